//! Names of drivers belong to sources: a file that describes another driver's name is not called for anything else, in any order of
//! loading.

use native_null::{Options as PluginOptions, Plugin, Script};
use nodedock_proto::node::v1;
use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{
    Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, digest, side_file, version, wasm,
};
use nodedock_tests::{Daemon, Options, Root};

use crate::with_gpus;

/// A file before the owner in the order of the directory, and smaller: compiled first.
const SQUATTER: &str = "aaa.wasm";
const GRANT: &str = "apiVersion: nodedock.dev/v1\nkind: DriverGrant\nenv: [MOCK_GPU_*]\n";
const NAMING_GRANT: &str = "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n\
    driver: mock-gpu.nodedock.dev\nenv: [MOCK_GPU_*]\n";

/// Another driver of the same name: another digest.
fn squatter() -> Vec<u8> {
    version(wasm(MOCK_GPU, Form::Core), "squatter")
}

fn unprepared() -> [(String, String); 1] {
    [("a".to_owned(), "unprepared".to_owned())]
}

/// The owner serves, and the squatter is refused, called for nothing, and named in a condition.
async fn assert_refused(daemon: &Daemon) {
    daemon.until_serving(MOCK_GPU_FILE).await;
    let refused = daemon
        .until_failed(
            SQUATTER,
            &["mock-gpu.wasm", MOCK_GPU_NAME, "nodedock driver assign"],
        )
        .await;
    assert_eq!(
        (refused.name.as_str(), refused.devices),
        ("", 0),
        "{refused:?}"
    );
    let conditions = daemon.until_conditions(&["driver-name-taken"]).await;
    assert_eq!(conditions[0].subject, SQUATTER, "{conditions:?}");
    let problem = conditions[0].problem.as_ref().unwrap();
    for (key, value) in [
        ("driver", MOCK_GPU_NAME),
        ("source", SQUATTER),
        ("owner", "the driver file mock-gpu.wasm"),
    ] {
        assert_eq!(problem.details[key], value, "{problem:?}");
    }
    let kept = daemon.kept();
    assert!(!kept.contains(&digest(&squatter())), "{kept:?}");
}

fn put_squatter(root: &Root, grant: Option<&str>) {
    if let Some(grant) = grant {
        root.drop_in("aaa.grant.yaml", grant);
    }
    root.drop_in(SQUATTER, squatter());
}

#[tokio::test]
async fn squatter_is_refused_at_every_restart() {
    let mut daemon = with_gpus().await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    put_squatter(&daemon, Some(GRANT));
    assert_refused(&daemon).await;
    for round in 0..6 {
        if round % 2 == 0 {
            daemon.restart().await
        } else {
            daemon.crash().await
        }
        assert_refused(&daemon).await;
    }
    assert_eq!(daemon.unprepare(&pod("one")).await, unprepared());
}

#[tokio::test]
async fn squatter_is_refused_without_claims() {
    let mut daemon = with_gpus().await;
    put_squatter(&daemon, None);
    for _ in 0..3 {
        daemon.restart().await;
        assert_refused(&daemon).await;
    }
    daemon
        .cli(&["get", "drivers"])
        .await
        .done_with(&["aaa.wasm", "belongs to the driver file mock-gpu.wasm"]);
    daemon
        .cli(&["explain", "driver", SQUATTER])
        .await
        .done_with(&["belongs to the driver file mock-gpu.wasm"]);
    daemon
        .cli(&["get", "node"])
        .await
        .done_with(&["driver-name-taken"]);
}

/// The file of the owner came back, and its claims had been asked of the squatter.
#[tokio::test]
async fn claims_reserve_name_without_its_file() {
    let mut daemon = with_gpus().await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    put_squatter(&daemon, Some(GRANT));
    daemon.until_failed(SQUATTER, &["mock-gpu.wasm"]).await;
    daemon.take_out(MOCK_GPU_FILE);
    daemon.until_gone(MOCK_GPU_FILE).await;
    daemon.restart().await;
    daemon
        .until_failed(SQUATTER, &["belongs to the driver file mock-gpu.wasm"])
        .await;
    let outcome = daemon.unprepare_pod(&pod("one")).await.claims.remove(0);
    assert_eq!(outcome.outcome, "refused", "{outcome:?}");
    daemon.install(MOCK_GPU, Form::Core);
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_no_claims().await;
}

#[tokio::test]
async fn unused_name_is_free() {
    let daemon = with_gpus().await;
    put_squatter(&daemon, Some(GRANT));
    daemon.until_failed(SQUATTER, &["mock-gpu.wasm"]).await;
    daemon.take_out(MOCK_GPU_FILE);
    let served = daemon.until_serving(SQUATTER).await;
    assert_eq!(served.name, MOCK_GPU_NAME);
    daemon.until_conditions(&[]).await;
    daemon.install(MOCK_GPU, Form::Core);
    daemon
        .until_failed(MOCK_GPU_FILE, &["belongs to the driver file aaa.wasm"])
        .await;
}

#[tokio::test]
async fn operator_moves_name_with_claims() {
    let mut daemon = with_gpus().await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    put_squatter(&daemon, Some(GRANT));
    daemon.until_failed(SQUATTER, &["mock-gpu.wasm"]).await;
    daemon
        .cli(&["driver", "assign", MOCK_GPU_NAME, "unknown"])
        .await
        .failed_with(1, &["there is no source"]);
    daemon
        .cli(&["driver", "assign", "nic.example.com", SQUATTER])
        .await
        .failed_with(1, &["describes the driver"]);
    daemon
        .cli(&["driver", "assign", MOCK_GPU_NAME, "aaa"])
        .await
        .done_with(&["belongs to aaa.wasm"]);
    let served = daemon.until_serving(SQUATTER).await;
    let assigned = served
        .timeline
        .iter()
        .find(|entry| entry.what == "name assigned")
        .expect("it is dated");
    assert!(
        assigned.at_ms > 0 && assigned.cause.contains("uid"),
        "{assigned:?}"
    );
    daemon
        .until_failed(MOCK_GPU_FILE, &["belongs to the driver file aaa.wasm"])
        .await;
    daemon.restart().await;
    daemon.until_serving(SQUATTER).await;
    daemon
        .until_failed(MOCK_GPU_FILE, &["belongs to the driver file aaa.wasm"])
        .await;
    assert_eq!(daemon.unprepare(&pod("one")).await, unprepared());
}

#[tokio::test]
async fn grant_with_the_name_moves_it() {
    let mut daemon = with_gpus().await;
    put_squatter(&daemon, Some(NAMING_GRANT));
    daemon.until_serving(SQUATTER).await;
    daemon
        .until_failed(MOCK_GPU_FILE, &["belongs to the driver file aaa.wasm"])
        .await;
    daemon.restart().await;
    daemon.until_serving(SQUATTER).await;
    // Two grants: the owner stays.
    daemon.drop_in("mock-gpu.grant.yaml", NAMING_GRANT);
    daemon
        .until_failed(MOCK_GPU_FILE, &["belongs to the driver file aaa.wasm"])
        .await;
    daemon
        .cli(&["driver", "assign", MOCK_GPU_NAME, "mock-gpu"])
        .await
        .failed_with(1, &["remove `driver`"]);
}

#[tokio::test]
async fn grant_for_another_driver_blocks_file() {
    let root = Root::new();
    root.install_gpus("pools:\n- {name: gpus, count: 1}\n");
    root.drop_in(
        "mock-gpu.grant.yaml",
        NAMING_GRANT.replace("mock-gpu.nodedock.dev", "nic.example.com"),
    );
    let daemon = Daemon::start_on(root, Options::default()).await;
    daemon
        .until_failed(
            MOCK_GPU_FILE,
            &["its grant is for the driver nic.example.com"],
        )
        .await;
    daemon.drop_in("mock-gpu.grant.yaml", NAMING_GRANT);
    daemon.until_serving(MOCK_GPU_FILE).await;
}

/// The first start with names: claims were prepared by a file, and another is read first.
#[tokio::test(flavor = "multi_thread")]
async fn older_release_claims_decide_the_name() {
    let mut daemon = with_gpus().await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    put_squatter(&daemon, Some(GRANT));
    daemon.until_failed(SQUATTER, &["mock-gpu.wasm"]).await;
    daemon.terminate().await;
    forget_names(&daemon);
    daemon.run().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon
        .until_failed(SQUATTER, &["nodedock driver assign"])
        .await;
    assert!(!daemon.kept().contains(&digest(&squatter())));
    // Nor are there stored files: the digest tells.
    daemon.terminate().await;
    forget_names(&daemon);
    std::fs::remove_dir_all(daemon.kept_drivers()).unwrap();
    daemon.run().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon
        .until_failed(SQUATTER, &["nodedock driver assign"])
        .await;
    assert!(!daemon.kept().contains(&digest(&squatter())));
    assert_eq!(daemon.unprepare(&pod("one")).await, unprepared());
}

/// Deletes the records of names, as a release that does not know them leaves the checkpoint.
fn forget_names(root: &Root) {
    let checkpoint = nodedock_core::checkpoint::open(&root.checkpoint()).unwrap();
    let names = checkpoint
        .dump
        .names
        .iter()
        .map(|name| nodedock_core::checkpoint::Change::DeleteName(name.uid.clone()));
    let changes = names.collect::<Vec<_>>();
    assert!(!changes.is_empty());
    tokio::task::block_in_place(|| {
        tokio::runtime::Handle::current().block_on(async {
            checkpoint.checkpoint.commit(changes).await.unwrap();
            checkpoint.checkpoint.close().await;
        });
    });
}

#[tokio::test]
async fn lost_checkpoint_gives_squatter_no_name() {
    let mut daemon = with_gpus().await;
    daemon
        .prepared(request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]))
        .await;
    put_squatter(&daemon, Some(GRANT));
    daemon.until_failed(SQUATTER, &["mock-gpu.wasm"]).await;
    daemon.kill9().await;
    std::fs::remove_file(daemon.checkpoint()).unwrap();
    daemon.run().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    // The owner is known by what is stored, or serves already.
    daemon
        .until_failed(SQUATTER, &["the driver file mock-gpu.wasm"])
        .await;
    assert_eq!(daemon.unprepare(&pod("one")).await, unprepared());
}

#[tokio::test]
async fn plugin_and_file_keep_their_names() {
    let daemon = with_gpus().await;
    let (registry, plugins) = (
        daemon.state().join("plugins_registry"),
        daemon.path().join("plugins"),
    );
    let options = PluginOptions::new(MOCK_GPU_NAME, &registry, &plugins);
    let squatting = Plugin::start(options, Script::ok("v")).await.unwrap();
    let socket = squatting.registration_socket().display().to_string();
    daemon
        .until_failed(&socket, &["belongs to the driver file mock-gpu.wasm"])
        .await;
    assert_eq!(squatting.connections(), 0, "its service is not called");
    squatting.unregister().unwrap();
    daemon.until_gone(&socket).await;

    daemon.take_out(MOCK_GPU_FILE);
    daemon.until_gone(MOCK_GPU_FILE).await;
    let options = PluginOptions::new(MOCK_GPU_NAME, &registry, &plugins);
    let owner = Plugin::start(options, Script::ok("v")).await.unwrap();
    let socket = owner.registration_socket().display().to_string();
    daemon.until_serving(&socket).await;
    // A second instance, as in a rolling update.
    let options = PluginOptions::new(MOCK_GPU_NAME, &registry, &plugins).instance("b");
    let second = Plugin::start(options, Script::ok("v")).await.unwrap();
    daemon
        .until_serving(&second.registration_socket().display().to_string())
        .await;
    daemon.install(MOCK_GPU, Form::Core);
    daemon
        .until_failed(MOCK_GPU_FILE, &["belongs to native plugins of the user"])
        .await;
}

#[tokio::test]
async fn an_extended_resource_needs_a_grant() {
    let root = Root::new();
    let config = |resource: &str| {
        format!("pools:\n- {{name: gpus, count: 1, extendedResource: {resource}}}\n")
    };
    root.install_gpus(&config("nvidia.com/gpu"));
    let daemon = Daemon::start_on(root, Options::default()).await;
    let blocked = daemon.until_state(MOCK_GPU_FILE, "blocked").await;
    assert_eq!(
        blocked.missing_grants,
        ["extendedResources: nvidia.com/gpu"],
        "{blocked:?}"
    );
    assert!(blocked.reason.contains("nvidia.com/gpu"), "{blocked:?}");
    let resources = daemon
        .client()
        .get_capacity(v1::GetCapacityRequest {})
        .await
        .unwrap()
        .into_inner()
        .resources;
    assert!(resources.is_empty(), "{resources:?}");
    let grant = format!("{}  - nvidia.com/gpu\n", side_file(MOCK_GPU, "grant"));
    daemon.drop_in("mock-gpu.grant.yaml", &grant);
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_allocatable("nvidia.com/gpu", 1).await;
    // What is revoked counts at once.
    daemon.drop_in("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
    let stopped = daemon.until_state(MOCK_GPU_FILE, "blocked").await;
    assert!(
        stopped
            .missing_grants
            .contains(&"extendedResources: nvidia.com/gpu".to_owned()),
        "{stopped:?}"
    );
}
