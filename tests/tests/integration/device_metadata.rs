//! Device metadata that a container reads.

use std::path::{Path, PathBuf};

use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::{Daemon, Options, own_pool};
use serde_json::{Map, Value, json};

use crate::with_gpus;

const IN_CONTAINER: &str = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/one";

fn objects(path: &Path) -> Vec<Value> {
    let bytes = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    serde_json::Deserializer::from_slice(&bytes)
        .into_iter()
        .map(Result::unwrap)
        .collect()
}

/// The values without their types, as the node API has them.
fn plain(attributes: &Value) -> Map<String, Value> {
    let value = |value: &Value| value.as_object().unwrap().values().next().unwrap().clone();
    attributes
        .as_object()
        .unwrap()
        .iter()
        .map(|(name, typed)| (name.clone(), value(typed)))
        .collect()
}

#[tokio::test]
async fn container_reads_attributes_until_unprepare() {
    let mut daemon = with_gpus().await;
    let a = pod("a");
    let prepare = request(&a, &[&gpu_claim("one", &["gpus/gpu-0", "gpus/gpu-1"])]);
    daemon.prepared(prepare.clone()).await;
    let mounts = daemon.only_cdi_file().mounts();
    let in_container = |index: usize| {
        PathBuf::from(format!(
            "{IN_CONTAINER}/device-{index}/{MOCK_GPU_NAME}-metadata.json"
        ))
    };
    assert_eq!(
        mounts
            .iter()
            .map(|(_, path)| path.clone())
            .collect::<Vec<_>>(),
        [in_container(0), in_container(1)]
    );
    let (devices, node) = (daemon.devices().await, daemon.node().await.name);
    for (index, (on_node, _)) in mounts.iter().enumerate() {
        let objects = objects(on_node);
        assert_eq!(
            objects
                .iter()
                .map(|object| &object["kind"])
                .collect::<Vec<_>>(),
            ["DeviceMetadata"; 2]
        );
        let found = &objects[0]["requests"][0]["devices"][0];
        let name = format!("gpu-{index}");
        assert_eq!(
            (&found["pool"], &found["name"]),
            (&json!(format!("{node}/gpus")), &json!(name))
        );
        let known = devices
            .iter()
            .find(|device| own_pool(&device.pool) == "gpus" && device.name == name)
            .unwrap();
        let known: Map<String, Value> = serde_json::from_str(&known.attributes_json).unwrap();
        assert!(
            known.len() > 3 && plain(&found["attributes"]) == known,
            "{found} {known:?}"
        );
    }

    let before: Vec<_> = mounts
        .iter()
        .map(|(path, _)| std::fs::read(path).unwrap())
        .collect();
    daemon.kill9().await;
    std::fs::remove_dir_all(mounts[0].0.parent().unwrap().parent().unwrap()).unwrap();
    daemon.run().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.prepared(prepare).await;
    let after: Vec<_> = mounts
        .iter()
        .map(|(path, _)| std::fs::read(path).unwrap())
        .collect();
    assert_eq!(after, before, "rendered again from the checkpoint");
    daemon.unprepare(&a).await;
    assert!(mounts.iter().all(|(path, _)| !path.exists()));
    daemon.assert_empty().await;
}

#[tokio::test]
async fn an_operator_switches_metadata_off() {
    let daemon = Daemon::start_with(Options::default().config("deviceMetadata: false\n")).await;
    daemon.install(MOCK_GPU, Form::Core);
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon
        .prepared(request(&pod("a"), &[&gpu_claim("one", &["gpus/gpu-0"])]))
        .await;
    let file = daemon.only_cdi_file();
    assert_eq!(
        (file.mounts(), file.text.contains("attributes")),
        (Vec::new(), false)
    );
}
