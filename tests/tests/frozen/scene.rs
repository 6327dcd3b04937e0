//! A daemon with drivers of each kind, under names and in a boot that are the same each time.

use native_device_plugin::Device;
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::{Daemon, Options, Root};
use scripted::{Command, Script};
use serde_json::{Value, json};

pub(crate) const GPU: &str = "example.com/gpu";
pub(crate) const NIC: &str = "example.com/nic";
const NATIVE: &str = "null.example.com";
/// A pool of each kind.
pub(crate) const POOLS: &str = "driverVersion: 1.4.2
pools:
- {name: gpus, count: 2, model: Mock-100, memoryGiB: 80, numaNodes: [0, 1]}
- {name: shared, count: 1, firstIndex: 2, shared: true, memoryGiB: 24}
- {name: split, count: 1, firstIndex: 3, partitions: 2, unhealthy: [{index: 3, message: it is too hot}]}
- {name: plugged, count: 2, firstIndex: 4, extendedResource: example.com/gpu}
";

pub(crate) struct Scene {
    pub(crate) daemon: Daemon,
    _native: native_null::Plugin,
    _nics: native_device_plugin::Plugin,
}

/// Returns options with the same values on every machine. A claim does not wait for a device.
pub(crate) fn options() -> Options {
    let options = Options::default().config("claims: {exclusiveWaitMs: 0}\n");
    options
        .arg("--boot-id", "boot-1")
        .arg("--node-name", "node-1")
}

impl Scene {
    pub(crate) async fn start() -> Self {
        Self::start_on(Root::new()).await
    }

    pub(crate) async fn start_on(root: Root) -> Self {
        root.install_gpus(POOLS);
        let unprepare = [("device-0".to_owned(), Command::RefuseAnHour)].into();
        root.install_scripted(&Script {
            devices: 2,
            unprepare,
            ..Script::default()
        });
        root.drop_in("bad.wasm", "not a driver");
        let daemon = Daemon::start_on(root, options()).await;
        let state = daemon.state();
        let native = native_null::Options::new(
            NATIVE,
            &state.join("plugins_registry"),
            &daemon.path().join("native"),
        );
        let native = native_null::Plugin::start(native, native_null::Script::ok(NATIVE)).await;
        let nics = native_device_plugin::Options::new(NIC, &state.join("device-plugins"));
        let devices = vec![
            Device::healthy("nic-0").on(&[0]),
            Device::healthy("nic-1").on(&[1]),
        ];
        let nics =
            native_device_plugin::Plugin::start(nics, native_device_plugin::Script::ok(), devices)
                .await;
        let (native, nics) = (
            native.expect("its sockets are made"),
            nics.expect("it registers"),
        );
        for driver in [MOCK_GPU_FILE, "scripted.wasm", NATIVE] {
            daemon.until_serving(driver).await;
        }
        daemon.until_state("bad.wasm", "failed").await;
        daemon.until_allocatable(GPU, 2).await;
        daemon.until_allocatable(NIC, 2).await;
        Self {
            daemon,
            _native: native,
            _nics: nics,
        }
    }
}

/// Writes a pod that has claims, each for a device (`DRIVER/POOL/DEVICE`), and devices of resources; gives the file's name.
pub(crate) fn write_pod(
    root: &Root,
    pod_name: &str,
    claims: &[(&str, &str)],
    limits: &[&str],
) -> String {
    let metadata = |kind: &str, name: &str| json!({"namespace": "default", "name": name, "uid": format!("{kind}-{name}")});
    let claim = |(name, device): &(&str, &str)| {
        let [driver, pool, device] = Vec::from_iter(device.split('/'))
            .try_into()
            .expect("DRIVER/POOL/DEVICE");
        let config = json!({"source": "FromClaim", "requests": [], "opaque": {"driver": MOCK_GPU_NAME, "parameters": {"sharing": {"strategy": "TimeSlicing"}}}});
        let config = Vec::from_iter((pool == "shared").then_some(config));
        let result = json!({"request": "one", "driver": driver, "pool": pool, "device": device});
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": metadata("claim", name),
            "status": {
                "allocation": {"devices": {"results": [result], "config": config}},
                "reservedFor": [{"resource": "pods", "name": pod_name, "uid": format!("pod-{pod_name}")}],
            },
        })
    };
    let references = claims
        .iter()
        .map(|(name, _)| json!({"name": name, "resourceClaimName": name}));
    let uses = claims.iter().map(|(name, _)| json!({"name": name}));
    let limits = limits
        .iter()
        .map(|name| ((*name).to_owned(), Value::from("1")));
    let resources =
        json!({"claims": Vec::from_iter(uses), "limits": serde_json::Map::from_iter(limits)});
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": metadata("pod", pod_name),
        "spec": {"resourceClaims": Vec::from_iter(references), "containers": [{"name": "main", "image": "none", "resources": resources}]},
    });
    let objects = claims
        .iter()
        .map(claim)
        .chain([pod])
        .map(|object| format!("---\n{object}\n"));
    let file = root.write(&format!("{pod_name}.yaml"), objects.collect::<String>());
    file.to_str().expect("the root's path is text").to_owned()
}
