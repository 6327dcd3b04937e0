//! Devices of CDI specs that others wrote: they are claimed by the vendors' names or by copies of their edits, and follow the files.

use std::os::unix::fs::symlink;
use std::path::PathBuf;

use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::{Daemon, Options, Root, assert_parts};
use serde_json::json;

const DRIVER: &str = "cdi.nodedock.dev";
const ENABLED: &str = "cdiDriver: {enabled: true}\n";

/// A root with links in place of two GPUs' nodes and of a control node, and a daemon with the config.
struct Machine {
    daemon: Daemon,
}

impl Machine {
    async fn start(config: &str) -> Self {
        let root = Root::new();
        std::fs::create_dir_all(root.path().join("etc/cdi")).unwrap();
        for (name, target) in [
            ("gpu0", "/dev/zero"),
            ("gpu1", "/dev/full"),
            ("ctl", "/dev/null"),
        ] {
            symlink(target, root.path().join(name)).unwrap();
        }
        let options = Options::default().config(config);
        let daemon = Daemon::start_on(root, options).await;
        Self { daemon }
    }

    fn node(&self, name: &str) -> String {
        self.daemon.path().join(name).display().to_string()
    }

    fn file(&self) -> PathBuf {
        self.daemon.path().join("etc/cdi/gpus.json")
    }

    /// Writes the spec of a vendor's tool: a name and a UUID for each GPU, and one for all of them.
    fn write(&self, gpus: &[&str]) {
        std::fs::write(self.file(), self.spec(gpus)).unwrap();
    }

    fn spec(&self, gpus: &[&str]) -> String {
        let node = |gpu: &str| json!({"path": format!("/dev/gpu{gpu}"), "hostPath": self.node(&format!("gpu{gpu}"))});
        let device = |name: &str, gpus: &[&str]| {
            let nodes: Vec<_> = gpus.iter().map(|gpu| node(gpu)).collect();
            json!({"name": name, "containerEdits": {"deviceNodes": nodes, "env": [format!("GPU={name}")]}})
        };
        let mut devices: Vec<_> = gpus.iter().map(|gpu| device(gpu, &[gpu])).collect();
        devices.extend(gpus.iter().map(|gpu| device(&format!("GPU-{gpu}"), &[gpu])));
        devices.push(device("all", gpus));
        let common = json!({
            "deviceNodes": [{"path": "/dev/ctl", "hostPath": self.node("ctl")}],
            "mounts": [{"hostPath": "/dev/null", "containerPath": "/void", "options": ["ro", "bind"]}],
            "hooks": [{"hookName": "createContainer", "path": "/bin/true"}],
        });
        json!({"cdiVersion": "0.5.0", "kind": "example.com/gpu", "devices": devices, "containerEdits": common}).to_string()
    }

    /// Waits until the devices are these, each as `POOL/NAME: HEALTH`.
    async fn until_devices(&self, wanted: &[&str]) {
        let what = format!("the devices are {wanted:?}");
        self.daemon
            .until(&what, async |mut client| {
                let answer = client.list_devices(v1::ListDevicesRequest::default()).await;
                let devices = answer
                    .map_err(|status| status.to_string())?
                    .into_inner()
                    .devices;
                let found: Vec<_> = devices
                    .iter()
                    .map(|device| {
                        let pool = device.pool.split_once('/').map_or("", |(_, pool)| pool);
                        format!("{pool}/{}: {}", device.name, device.health)
                    })
                    .collect();
                if found == wanted {
                    Ok(())
                } else {
                    Err(format!("{found:?}"))
                }
            })
            .await;
    }
}

fn claiming(name: &str, gpus: &[&str]) -> v1::PreparePodRequest {
    let devices: Vec<_> = gpus
        .iter()
        .map(|gpu| format!("{DRIVER}/example.com/gpu/{gpu}"))
        .collect();
    let devices: Vec<_> = devices.iter().map(String::as_str).collect();
    request(&pod(name), &[&claim(&format!("claim-of-{name}"), &devices)])
}

const BOTH: [&str; 2] = ["example.com/gpu/0: healthy", "example.com/gpu/1: healthy"];

#[tokio::test]
async fn prepare_names_the_vendors_device() {
    let mut machine = Machine::start(ENABLED).await;
    machine.until_devices(&[]).await;
    machine.write(&["0", "1"]);
    machine.until_devices(&BOTH).await;
    let driver = machine.daemon.drivers().await.remove(0);
    assert_eq!(
        (
            driver.name.as_str(),
            driver.kind.as_str(),
            driver.state.as_str(),
            driver.devices
        ),
        (DRIVER, "cdi", "serving", 2)
    );
    let first = machine.daemon.prepared(claiming("one", &["0"])).await;
    assert_eq!(first.containers[0].cdi_devices, ["example.com/gpu=0"]);
    let held = machine.daemon.refused(claiming("two", &["0"])).await;
    assert_eq!(held.code, "device-held");

    // The claim keeps its answer when the daemon starts again, and when the spec is gone.
    machine.daemon.crash().await;
    machine.until_devices(&BOTH).await;
    assert_eq!(
        machine
            .daemon
            .prepared(claiming("one", &["0"]))
            .await
            .containers,
        first.containers
    );
    machine.write(&["0"]);
    machine.until_devices(&BOTH[..1]).await;
    let gone = machine.daemon.refused(claiming("two", &["1"])).await;
    assert_parts(&gone.message, &["example.com/gpu", "1", DRIVER]);
    std::fs::remove_file(machine.file()).unwrap();
    machine.until_devices(&[]).await;
    let again = machine.daemon.prepared(claiming("one", &["0"])).await;
    assert_eq!(again.containers, first.containers);
    machine.daemon.unprepare(&pod("one")).await;
    machine.daemon.until_no_claims().await;
}

#[tokio::test]
async fn edits_are_copied_if_configured() {
    let machine = Machine::start("cdiDriver: {enabled: true, answer: edits}\n").await;
    machine.write(&["0", "1"]);
    machine.until_devices(&BOTH).await;
    machine.daemon.prepared(claiming("one", &["0", "1"])).await;
    let file = machine.daemon.only_cdi_file();
    let common = &file.spec["containerEdits"];
    assert_eq!(common["mounts"][0]["containerPath"], "/void");
    assert_eq!(common["hooks"][0]["path"], "/bin/true");
    assert_eq!(common["deviceNodes"][0]["hostPath"], "/dev/null");
    let device = |at: usize| &file.spec["devices"][at]["containerEdits"];
    let node = &device(0)["deviceNodes"][0];
    assert_eq!(
        (
            &node["path"],
            &node["hostPath"],
            &node["major"],
            &node["minor"]
        ),
        (
            &json!("/dev/gpu0"),
            &json!("/dev/zero"),
            &json!(1),
            &json!(5)
        )
    );
    assert_eq!(node["permissions"], "rwm");
    assert_eq!(device(1)["env"], json!(["GPU=1"]));
    machine.daemon.unprepare(&pod("one")).await;
    machine.daemon.assert_empty().await;
}

#[tokio::test]
async fn malformed_spec_is_a_condition() {
    let machine = Machine::start(ENABLED).await;
    machine.write(&["0"]);
    let other = json!({"cdiVersion": "0.6.0", "kind": "other.com/key", "devices": [
        {"name": "a", "containerEdits": {"env": ["KEY=a"]}},
    ]});
    let path = machine.daemon.path().join("etc/cdi/other.json");
    std::fs::write(&path, other.to_string()).unwrap();
    machine
        .until_devices(&["example.com/gpu/0: healthy", "other.com/key/a: healthy"])
        .await;
    machine.daemon.until_conditions(&[]).await;

    std::fs::write(
        machine.file(),
        machine.spec(&["0"]).replace("0.5.0", "9.9.9"),
    )
    .unwrap();
    let conditions = machine.daemon.until_conditions(&["cdi-spec-invalid"]).await;
    let message = &conditions[0].problem.as_ref().unwrap().message;
    assert_parts(message, &["etc/cdi/gpus.json", "CDI version \"9.9.9\""]);
    machine
        .until_devices(&["example.com/gpu/0: unhealthy", "other.com/key/a: healthy"])
        .await;
    let refused = machine.daemon.refused(claiming("one", &["0"])).await;
    assert_parts(&refused.message, &["gpus.json", "9.9.9"]);

    // Two files of a directory with one name: runtimes use neither.
    machine.write(&["0"]);
    std::fs::write(
        machine.daemon.path().join("etc/cdi/twice.json"),
        machine.spec(&["0"]),
    )
    .unwrap();
    let codes = ["cdi-spec-conflict"; 3];
    let conditions = machine.daemon.until_conditions(&codes).await;
    let message = &conditions[0].problem.as_ref().unwrap().message;
    assert_parts(message, &["example.com/gpu=0", "gpus.json", "twice.json"]);
    machine.until_devices(&["other.com/key/a: healthy"]).await;
    std::fs::remove_file(machine.daemon.path().join("etc/cdi/twice.json")).unwrap();
    machine.daemon.until_conditions(&[]).await;
    machine
        .until_devices(&["example.com/gpu/0: healthy", "other.com/key/a: healthy"])
        .await;
}

#[tokio::test]
async fn health_follows_the_device_nodes() {
    let machine = Machine::start(ENABLED).await;
    machine.write(&["0", "1"]);
    machine.until_devices(&BOTH).await;
    let link = machine.daemon.path().join("gpu1");
    std::fs::remove_file(&link).unwrap();
    machine
        .until_devices(&[BOTH[0], "example.com/gpu/1: unhealthy"])
        .await;
    let refused = machine.daemon.refused(claiming("one", &["1"])).await;
    assert_eq!(refused.code, "no-such-node");
    assert_parts(
        &refused.message,
        &["example.com/gpu=1", "gpu1 is not there"],
    );
    symlink("/dev/full", &link).unwrap();
    machine.until_devices(&BOTH).await;
    machine.daemon.prepared(claiming("one", &["1"])).await;
}

/// A driver that was renamed or turned off left claims that nothing unprepared.
#[tokio::test]
async fn claims_outlive_the_config() {
    let machine = Machine::start(ENABLED).await;
    machine.write(&["0"]);
    machine.until_devices(&BOTH[..1]).await;
    machine.daemon.prepared(claiming("one", &["0"])).await;
    let mut daemon = machine.daemon;
    *daemon.options() = Options::default();
    daemon.restart().await;
    assert_eq!(daemon.devices().await, []);
    let refused = daemon.refused(claiming("two", &["0"])).await;
    assert_parts(&refused.message, &[DRIVER]);
    daemon.unprepare(&pod("one")).await;
    daemon.until_no_claims().await;
}

#[tokio::test]
async fn own_files_are_no_inventory() {
    let machine =
        Machine::start("cdiDriver: {enabled: true, answer: edits, kinds: [\"*/*\"]}\n").await;
    machine.write(&["0"]);
    let own = json!({"cdiVersion": "0.6.0", "kind": "nodedock.dev/gpu", "devices": [
        {"name": "any", "containerEdits": {"env": ["A=any"]}},
    ]});
    std::fs::write(
        machine.daemon.path().join("etc/cdi/own.json"),
        own.to_string(),
    )
    .unwrap();
    machine.until_devices(&BOTH[..1]).await;
    machine.daemon.prepared(claiming("one", &["0"])).await;
    let file = machine.daemon.only_cdi_file();
    assert!(file.path.starts_with(machine.daemon.cdi()), "{file:?}");
    // A later spec is seen, and the file of the claim with the same look.
    machine.write(&["0", "1"]);
    machine.until_devices(&BOTH).await;
}
