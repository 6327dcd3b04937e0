//! What is published of the drivers' devices.

use nodedock_stand_ins::api_server::State;
use nodedock_tests::cluster::NODE;
use nodedock_tests::drivers::{MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME};
use serde_json::Value;

use super::node_with_gpus;

fn devices(slice: &Value) -> usize {
    slice["spec"]["devices"].as_array().map_or(0, Vec::len)
}

/// Pools of the driver, and how many devices they have.
fn pools(state: &State) -> Vec<(String, usize)> {
    let slices = state.slices(MOCK_GPU_NAME);
    let each = slices.iter().filter(|slice| devices(slice) > 0);
    let mut pools: Vec<_> = each
        .map(|slice| (slice["spec"]["pool"]["name"].as_str().unwrap_or_default().to_owned(), devices(slice)))
        .collect();
    pools.sort();
    pools
}

fn expected() -> Vec<(String, usize)> {
    [("node-1/gpus", 4), ("node-1/shared", 2), ("node-1/split", 5)]
        .map(|(pool, count)| (pool.to_owned(), count))
        .into()
}

fn has_expected(state: &State) -> bool {
    let pools = pools(state);
    expected().iter().all(|pool| pools.contains(pool))
}

#[tokio::test]
async fn pools_are_published_with_the_node_s_name_and_the_node_owns_them() {
    let (cluster, _daemon) = node_with_gpus().await;
    cluster.api.wait_until("the slices of the driver", has_expected).await;
    cluster.api.look(|state| {
        for slice in state.slices(MOCK_GPU_NAME) {
            assert_eq!(slice["spec"]["nodeName"], NODE);
            let owner = &slice["metadata"]["ownerReferences"][0];
            assert_eq!((&owner["kind"], &owner["uid"]), (&"Node".into(), &cluster.node_uid.as_str().into()));
        }
    });
}

#[tokio::test]
async fn slices_that_a_kubelet_deletes_when_it_starts_are_written_again() {
    let (cluster, _daemon) = node_with_gpus().await;
    cluster.api.wait_until("the slices of the driver", has_expected).await;
    assert!(cluster.api.kubelet_starts(NODE) > 0);
    cluster.api.wait_until("the slices are there again", has_expected).await;
}

#[tokio::test]
async fn slices_stay_over_a_restart_and_go_with_their_driver_s_file() {
    let (cluster, mut daemon) = node_with_gpus().await;
    cluster.api.wait_until("the slices of the driver", has_expected).await;
    let uids = |state: &State| -> Vec<Value> {
        state.slices(MOCK_GPU_NAME).iter().map(|slice| slice["metadata"]["uid"].clone()).collect()
    };
    let before = cluster.api.look(uids);
    daemon.restart().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    assert_eq!(cluster.api.look(uids), before);
    for file in [MOCK_GPU_FILE, "mock-gpu.grant.yaml", "mock-gpu.config.yaml"] {
        daemon.take_out(file);
    }
    let none = |state: &State| state.slices(MOCK_GPU_NAME).is_empty();
    cluster.api.wait_until(&format!("the slices of {MOCK_GPU} are withdrawn"), none).await;
    daemon.until_withdrawn(MOCK_GPU_NAME).await;
}
