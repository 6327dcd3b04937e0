//! Whatever is wrong with a driver is a problem of the node until it ends: one table of faults, each with a driver of a file, a plugin of
//! DRA and a device plugin, as far as it can have the fault.

use native_device_plugin::{Device, Options as DevicePluginOptions, Plugin as DevicePlugin, api};
use native_null::{Options as PluginOptions, Plugin, Script};
use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, gpu_claim, pod, request};
use nodedock_tests::drivers::{
    Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, digest, side_file, wasm,
};
use nodedock_tests::{Daemon, Options, assert_parts};

use crate::with_gpus;

const PLUGIN: &str = "null.example.com";
const RESOURCE: &str = "example.com/nic";
/// More than a list may have.
const LIST_BYTES: usize = 65 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    File,
    Plugin,
    DevicePlugin,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// Another file, or another plugin, beside the one that serves is no driver.
    NoDriver,
    /// A driver requests more than is granted.
    Blocked,
    /// The process of a plugin does not answer any more.
    Lost,
    /// A driver with a prepared claim, or a device plugin with devices in use, is removed.
    Gone,
    /// A list of devices is too large.
    ListTooLarge,
    /// A driver sees a device that it does not offer, or a device of a plugin's list cannot be used.
    LeftOut,
}

/// The code of each fault, and what `explain` says of it.
const FAULTS: &[(Fault, Kind, &str, &[&str])] = &[
    (
        Fault::NoDriver,
        Kind::File,
        "driver-not-serving",
        &["is failed"],
    ),
    (
        Fault::NoDriver,
        Kind::Plugin,
        "driver-not-serving",
        &["is failed"],
    ),
    (
        Fault::Blocked,
        Kind::File,
        "driver-not-serving",
        &["is blocked", "MOCK_GPU_"],
    ),
    (
        Fault::LeftOut,
        Kind::File,
        "devices-left-out",
        &["not offered: 1 device", "gpu-9: its memory is broken"],
    ),
    (
        Fault::LeftOut,
        Kind::DevicePlugin,
        "devices-left-out",
        &["not offered: 1 device", "its ID has 600 bytes"],
    ),
    (
        Fault::Lost,
        Kind::Plugin,
        "driver-not-serving",
        &["is lost"],
    ),
    (
        Fault::Gone,
        Kind::File,
        "claim-driver-gone",
        &["is not here, and has claims", "default/a"],
    ),
    (
        Fault::Gone,
        Kind::Plugin,
        "claim-driver-gone",
        &["is not here, and has claims", "default/a"],
    ),
    (
        Fault::Gone,
        Kind::DevicePlugin,
        "plugin-gone",
        &["(pod default/user", "registers again"],
    ),
    (
        Fault::ListTooLarge,
        Kind::DevicePlugin,
        "device-list-faulty",
        &["none of its devices is offered"],
    ),
];

/// A daemon with a driver of a kind, of which one device is in use.
struct Scene {
    daemon: Daemon,
    driver: Driver,
}

enum Driver {
    File,
    Plugin(Plugin),
    DevicePlugin(DevicePlugin),
}

impl Scene {
    async fn start(kind: Kind) -> Self {
        let user = pod("user");
        let (daemon, driver) = match kind {
            Kind::File => {
                let daemon = with_gpus().await;
                let claim = gpu_claim("a", &["gpus/gpu-0"]);
                daemon.prepared(request(&user, &[&claim])).await;
                (daemon, Driver::File)
            }
            Kind::Plugin => {
                let daemon = Daemon::start_with(Options::default()).await;
                let registry = daemon.state().join("plugins_registry");
                let options = PluginOptions::new(PLUGIN, &registry, &daemon.path().join("plugins"));
                let plugin = Plugin::start(options, Script::ok(PLUGIN))
                    .await
                    .expect("it serves");
                let socket = plugin.registration_socket().display().to_string();
                daemon.until_serving(&socket).await;
                let claim = claim("a", &[&format!("{PLUGIN}/null/null-0")]);
                daemon.prepared(request(&user, &[&claim])).await;
                (daemon, Driver::Plugin(plugin))
            }
            Kind::DevicePlugin => {
                let daemon = Daemon::start_with(Options::default()).await;
                let plugin = register_nics(&daemon).await;
                let request = v1::PreparePodRequest {
                    pod: Some(user),
                    containers: vec![v1::Container {
                        name: "main".to_owned(),
                        extended_resources: [(RESOURCE.to_owned(), 1)].into(),
                        ..Default::default()
                    }],
                    ..Default::default()
                };
                daemon.prepared(request).await;
                (daemon, Driver::DevicePlugin(plugin))
            }
        };
        Self { daemon, driver }
    }

    /// A registration socket on which nothing listens.
    fn dead_socket(&self) -> std::path::PathBuf {
        self.daemon.state().join("plugins_registry/dead-reg.sock")
    }

    /// Causes a fault, and returns the subject of its condition.
    fn cause(&self, fault: Fault) -> String {
        let daemon = &self.daemon;
        match (fault, &self.driver) {
            (Fault::NoDriver, Driver::File) => {
                daemon.drop_in("broken.wasm", b"no driver");
                "broken.wasm".to_owned()
            }
            (Fault::NoDriver, _) => {
                let socket = self.dead_socket();
                drop(std::os::unix::net::UnixListener::bind(&socket).expect("bind a socket"));
                socket.display().to_string()
            }
            (Fault::Blocked, _) => {
                let grant = "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n";
                daemon.drop_in("mock-gpu.grant.yaml", grant);
                MOCK_GPU_FILE.to_owned()
            }
            (Fault::Lost, Driver::Plugin(plugin)) => {
                plugin.disconnect();
                plugin.registration_socket().display().to_string()
            }
            (Fault::Gone, Driver::File) => {
                daemon.take_out(MOCK_GPU_FILE);
                MOCK_GPU_NAME.to_owned()
            }
            (Fault::Gone, Driver::Plugin(plugin)) => {
                plugin.unregister().expect("the socket is there");
                PLUGIN.to_owned()
            }
            (Fault::Gone, Driver::DevicePlugin(plugin)) => {
                plugin.die();
                RESOURCE.to_owned()
            }
            (Fault::ListTooLarge, Driver::DevicePlugin(plugin)) => {
                plugin.list_raw(vec![api::Device {
                    id: "x".repeat(LIST_BYTES),
                    ..Default::default()
                }]);
                RESOURCE.to_owned()
            }
            (Fault::LeftOut, Driver::File) => {
                let left_out = "leftOut:\n  - {name: gpu-9, reason: its memory is broken}\n";
                let config = format!("{}{left_out}", side_file(MOCK_GPU, "config"));
                daemon.drop_in("mock-gpu.config.yaml", config);
                MOCK_GPU_FILE.to_owned()
            }
            (Fault::LeftOut, Driver::DevicePlugin(plugin)) => {
                let mut devices = nics();
                devices.push(Device::healthy(&"x".repeat(600)));
                plugin.list(devices);
                RESOURCE.to_owned()
            }
            (fault, _) => panic!("no driver of that kind has the fault {fault:?}"),
        }
    }

    /// Ends a fault.
    async fn mend(&mut self, fault: Fault) {
        let daemon = &self.daemon;
        match (fault, &mut self.driver) {
            (Fault::NoDriver, Driver::File) => daemon.take_out("broken.wasm"),
            (Fault::NoDriver, _) => {
                std::fs::remove_file(self.dead_socket()).expect("the socket is there");
            }
            (Fault::Blocked, _) => {
                daemon.drop_in("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
            }
            (Fault::Lost, Driver::Plugin(plugin)) => plugin.serve().expect("it serves"),
            (Fault::Gone, Driver::File) => {
                daemon.drop_in(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
            }
            (Fault::Gone, Driver::Plugin(plugin)) => plugin.register().expect("it registers"),
            (Fault::Gone, Driver::DevicePlugin(plugin)) => *plugin = register_nics(daemon).await,
            (Fault::ListTooLarge | Fault::LeftOut, Driver::DevicePlugin(plugin)) => {
                plugin.list(nics());
            }
            (Fault::LeftOut, Driver::File) => {
                daemon.drop_in("mock-gpu.config.yaml", side_file(MOCK_GPU, "config"));
            }
            (fault, _) => panic!("no driver of that kind has the fault {fault:?}"),
        }
    }

    /// Waits until a condition of a subject is there, or is not.
    async fn until_condition(&self, code: &str, subject: &str, there: bool) {
        let what = format!("the condition {code} of {subject} is there: {there}");
        self.daemon
            .until(&what, async |mut client| {
                let answer = client.get_node(v1::GetNodeRequest {}).await;
                let conditions = answer
                    .map_err(|status| status.to_string())?
                    .into_inner()
                    .conditions;
                let is_found = conditions.iter().any(|condition| {
                    let problem = condition.problem.as_ref();
                    condition.subject == subject && problem.is_some_and(|of| of.code == code)
                });
                if is_found == there {
                    Ok(())
                } else {
                    Err(format!("{conditions:?}"))
                }
            })
            .await;
    }
}

fn nics() -> Vec<Device> {
    vec![Device::healthy("nic-0"), Device::healthy("nic-1")]
}

async fn register_nics(daemon: &Daemon) -> DevicePlugin {
    let options = DevicePluginOptions::new(RESOURCE, &daemon.state().join("device-plugins"));
    let script = native_device_plugin::Script::ok();
    let plugin = DevicePlugin::start(options, script, nics())
        .await
        .expect("it registers");
    daemon.until_allocatable(RESOURCE, 2).await;
    plugin
}

async fn assert_reported(kind: Kind) {
    let mut scene = Scene::start(kind).await;
    let of_kind = FAULTS.iter().copied().filter(|(_, of, ..)| *of == kind);
    for (fault, _, code, parts) in of_kind {
        let subject = scene.cause(fault);
        scene.until_condition(code, &subject, true).await;
        scene.daemon.cli(&["get", "node"]).await.done_with(&[code]);
        let what = match kind {
            Kind::File | Kind::Plugin => "driver",
            Kind::DevicePlugin => "resource",
        };
        let explained = scene.daemon.cli(&["explain", what, &subject]).await.done();
        assert_parts(&explained, parts);
        scene.mend(fault).await;
        scene.until_condition(code, &subject, false).await;
    }
}

#[tokio::test]
async fn faults_of_files_are_conditions() {
    assert_reported(Kind::File).await;
}

#[tokio::test]
async fn faults_of_plugins_are_conditions() {
    assert_reported(Kind::Plugin).await;
}

#[tokio::test]
async fn faults_of_device_plugins_are_conditions() {
    assert_reported(Kind::DevicePlugin).await;
}

/// The newest file is refused, and the version before it serves.
#[tokio::test]
async fn refused_update_is_a_condition() {
    let scene = Scene::start(Kind::File).await;
    let daemon = &scene.daemon;
    daemon.drop_in(MOCK_GPU_FILE, b"no driver");
    scene
        .until_condition("driver-not-serving", MOCK_GPU_FILE, true)
        .await;
    let serving = daemon.until_serving(MOCK_GPU_FILE).await;
    assert_eq!(serving.digest, digest(&wasm(MOCK_GPU, Form::Core)));
    daemon
        .cli(&["get", "node", "-o", "json"])
        .await
        .done_with(&["continues to serve"]);
    daemon.drop_in(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    scene
        .until_condition("driver-not-serving", MOCK_GPU_FILE, false)
        .await;
}

/// The device itself is explained, by its name alone and behind the driver's.
#[tokio::test]
async fn left_out_device_is_explained() {
    let mut scene = Scene::start(Kind::File).await;
    let subject = scene.cause(Fault::LeftOut);
    scene
        .until_condition("devices-left-out", &subject, true)
        .await;
    let daemon = &scene.daemon;
    let behind_driver = format!("{MOCK_GPU_NAME}/gpu-9");
    for name in ["gpu-9", &behind_driver] {
        daemon
            .cli(&["explain", "device", name])
            .await
            .done_with(&["is not offered: its memory is broken"]);
    }
    daemon
        .cli(&["explain", "device", "gpus/gpu-0"])
        .await
        .done_with(&["is offered", "used by claim default/a"]);
    let unknown = daemon.cli(&["explain", "device", "gpu-10"]).await;
    assert_eq!(unknown.code, Some(1), "{unknown:?}");
    scene.mend(Fault::LeftOut).await;
    scene
        .until_condition("devices-left-out", &subject, false)
        .await;
}

/// One condition for each of many drivers: none hides another.
#[tokio::test]
async fn every_refused_file_is_a_condition() {
    const FILES: usize = 20;
    let scene = Scene::start(Kind::File).await;
    let files: Vec<_> = (0..FILES).map(|n| format!("broken-{n}.wasm")).collect();
    for file in &files {
        scene.daemon.drop_in(file, file);
    }
    for file in &files {
        scene
            .until_condition("driver-not-serving", file, true)
            .await;
    }
    scene
        .daemon
        .until_conditions(&["driver-not-serving"; FILES])
        .await;
}
