//! The daemon on a recorded machine: a real driver binds PCI functions there, and the host restores them without it.

use std::path::{Path, PathBuf};

use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::drivers::{Form, side_file, wasm};
use nodedock_tests::machine::skip;
use nodedock_tests::recorded::{DISKS, Recorded, archives, kernel_driver};
use nodedock_tests::{Daemon, Options, Root};

const NAME: &str = "vfio-pci.nodedock.dev";
const GPU: &str = "0000:01:00.0";
const AUDIO: &str = "0000:01:00.1";
const NIC: &str = "0000:02:00.0";
const CONFIG: &str = "pools: [{name: gpu, select: [{class: \"0x03\"}, {class: \"0x0403\"}]}, {name: nic, select: [{class: \"0x02\"}]}]";

/// A GPU with its audio function in one IOMMU group, and a network card without any.
fn machine(root: &Root) -> Recorded {
    let machine = Recorded::new(
        &root.path().join("machine"),
        &["vfio-pci", "amdgpu", "snd_hda_intel", "igb"],
    );
    machine
        .function(GPU, "0x030000", "amdgpu", Some(7))
        .function(AUDIO, "0x040300", "snd_hda_intel", Some(7))
        .function(NIC, "0x020000", "igb", None);
    machine
}

struct Scene {
    daemon: Daemon,
    sys: PathBuf,
}

impl Scene {
    async fn start() -> Self {
        Self::start_with(|_| {}).await
    }

    async fn start_with(change: impl FnOnce(&Recorded)) -> Self {
        let root = Root::new();
        let machine = machine(&root);
        change(&machine);
        Self::of(root, machine.path(), "vfio-pci", NAME, CONFIG).await
    }

    /// A daemon on a machine, with one driver.
    async fn of(root: Root, machine: &Path, file: &str, name: &str, config: &str) -> Self {
        let sys = root.path().join("run/nodedock/hardware/sys");
        root.drop_in(&format!("{file}.grant.yaml"), side_file(file, "grant"));
        root.drop_in(&format!("{file}.config.yaml"), config);
        root.drop_in(&format!("{file}.wasm"), wasm(file, Form::Core));
        let options = Options::default().arg("--hardware", machine.to_string_lossy());
        let daemon = Daemon::start_on(root, options).await;
        daemon.until_serving(name).await;
        Self { daemon, sys }
    }

    fn function(&self, address: &str) -> PathBuf {
        self.sys.join("devices/pci0000:00").join(address)
    }

    fn drivers(&self) -> [String; 2] {
        [GPU, AUDIO].map(|function| kernel_driver(&self.sys, function))
    }
}

fn of_group(name: &str) -> v1::PreparePodRequest {
    request(
        &pod(name),
        &[&claim("group", &[&format!("{NAME}/gpu/0000-01-00-0")])],
    )
}

const OWN: [&str; 2] = ["amdgpu", "snd_hda_intel"];
const VFIO: [&str; 2] = ["vfio-pci", "vfio-pci"];

#[tokio::test]
async fn group_is_bound_while_claimed() {
    let scene = Scene::start().await;
    assert!(
        scene.daemon.node().await.recorded_hardware,
        "an operator sees that it is not the node's own"
    );
    let devices = scene.daemon.devices().await;
    assert_eq!(
        devices
            .iter()
            .map(|device| device.name.as_str())
            .collect::<Vec<_>>(),
        ["0000-01-00-0"]
    );
    let annotations = &devices[0].annotations;
    assert_eq!(annotations["nodedock.dev/control-nodes"], "/dev/vfio/vfio");
    let explained = scene
        .daemon
        .cli(&["explain", "device", "0000-01-00-0"])
        .await;
    let line = "annotation: nodedock.dev/control-nodes=/dev/vfio/vfio";
    assert!(explained.stdout.contains(line), "{}", explained.stdout);
    scene.daemon.prepared(of_group("one")).await;
    assert_eq!(scene.drivers(), VFIO);
    let spec: String = scene
        .daemon
        .cdi_files()
        .into_iter()
        .map(|file| file.text)
        .collect();
    assert!(
        spec.contains("/dev/vfio/7") && spec.contains("/dev/vfio/vfio"),
        "{spec}"
    );
    scene.daemon.unprepare(&pod("one")).await;
    assert_eq!(scene.drivers(), OWN);
    scene.daemon.assert_empty().await;
}

#[tokio::test]
async fn function_in_use_keeps_kernel_driver() {
    let scene = Scene::start_with(|machine| {
        machine.value(AUDIO, "boot_vga", "1");
    })
    .await;
    let problem = scene
        .daemon
        .refused_as(of_group("one"), "denied", "function-in-use")
        .await;
    assert!(
        problem.message.contains(AUDIO) && problem.message.contains("console"),
        "{}",
        problem.message
    );
    assert_eq!(scene.drivers(), OWN, "the whole group or nothing");
    scene.daemon.assert_empty().await;
}

#[tokio::test]
async fn failed_group_bind_is_rolled_back() {
    let scene = Scene::start().await;
    // The kernel takes the first function, and the second has no file for the override.
    std::fs::remove_file(scene.function(AUDIO).join("driver_override")).unwrap();
    let problem = scene.daemon.refused(of_group("one")).await;
    assert_eq!(problem.kind, "not-found", "{problem:?}");
    assert_eq!(scene.drivers(), OWN);
}

#[tokio::test]
async fn bindings_survive_crash_until_released() {
    let mut scene = Scene::start().await;
    scene.daemon.prepared(of_group("one")).await;
    scene.daemon.crash().await;
    scene.daemon.until_serving(NAME).await;
    assert_eq!(scene.drivers(), VFIO);
    scene.daemon.take_out("vfio-pci.wasm");
    scene.daemon.until_gone(NAME).await;
    let left = scene.daemon.unprepare_pod(&pod("one")).await;
    assert!(
        left.claims.iter().all(|claim| claim.problem.is_some()),
        "{left:#?}"
    );
    let claim = v1::ObjectRef {
        namespace: "default".into(),
        name: "group".into(),
        uid: String::new(),
    };
    let release = v1::ReleaseClaimRequest {
        claim: Some(claim),
        dry_run: false,
    };
    scene.daemon.client().release_claim(release).await.unwrap();
    assert_eq!(scene.drivers(), OWN, "without the driver");
}

#[tokio::test]
async fn daemon_runs_on_a_recorded_snapshot() {
    let root = Root::new();
    let machine = machine(&root);
    machine.value(NIC, "serial_number", "A50285BI");
    let file = root.path().join("machine.tar.gz");
    let mut record = root.command();
    record
        .args(["node", "snapshot", "--machine-root"])
        .arg(machine.path())
        .arg(&file);
    let output = record.output().await.unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("replaced: 1 identifiers in 1 files"),
        "{text}"
    );
    assert!(output.stdout.is_empty(), "{output:?}");
    let scene = Scene::of(root, &file, "vfio-pci", NAME, CONFIG).await;
    let serial = std::fs::read_to_string(scene.function(NIC).join("serial_number")).unwrap();
    assert_eq!(serial.trim(), "00000001");
    scene.daemon.prepared(of_group("one")).await;
    assert_eq!(scene.drivers(), VFIO);
    scene.daemon.unprepare(&pod("one")).await;
    assert_eq!(scene.drivers(), OWN);
}

#[tokio::test]
async fn readings_change_without_a_new_inventory() {
    let root = Root::new();
    let machine = machine(&root);
    let sensor = "hwmon/hwmon3/temp1_input";
    machine.file(&format!("sys/devices/pci0000:00/{GPU}/{sensor}"), "65500");
    let scene = Scene::of(root, machine.path(), "gpu", "gpu.nodedock.dev", "{}").await;
    let daemon = &scene.daemon;
    let shown = async || {
        let devices = daemon.devices().await;
        let device = devices.iter().find(|device| device.name == "0000-01-00-0");
        let readings = &device.expect("the GPU is offered").readings;
        readings.get("temperature_celsius").copied()
    };
    assert_eq!(shown().await, Some(65.5));
    std::fs::write(scene.function(GPU).join(sensor), "70000\n").unwrap();
    let again = v1::ReloadDriverRequest {
        name: "gpu.nodedock.dev".into(),
    };
    daemon.client().reload_driver(again).await.unwrap();
    assert_eq!(shown().await, Some(70.0));
    assert!(
        !daemon.log().contains("devices changed"),
        "{}",
        daemon.log()
    );
    let metrics = daemon.admin("GET", "/metrics").await.body;
    let series = metrics
        .lines()
        .find(|line| line.starts_with("nodedock_device_reading{"));
    let series = series.expect("it is a metric");
    assert!(
        series.contains("reading=\"temperature_celsius\"") && series.ends_with("} 70.0"),
        "{series}"
    );
    let listed = daemon.cli(&["get", "devices", "-o", "wide"]).await.stdout;
    assert!(listed.contains("temperature_celsius=70"), "{listed}");
}

#[tokio::test]
async fn invalid_snapshot_stops_the_start() {
    let root = Root::new();
    let file = root.write("broken.tar", [0x1f, 0x8b, 0, 0]);
    let output = root
        .node_program()
        .arg("run")
        .arg("--hardware")
        .arg(&file)
        .output()
        .await
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && text.contains("broken.tar"),
        "{text}"
    );
}

const SRIOV: &str = "sriov.nodedock.dev";
const PF: &str = "0000:05:00.0";
const SRIOV_CONFIG: &str =
    "pools: [{name: vf, select: [{addresses: [\"0000:05:00.0\"]}], vfs: 4, mode: vfio}]";

/// A network card without virtual functions.
async fn card(vfs: &str) -> Scene {
    let root = Root::new();
    let machine = Recorded::new(&root.path().join("machine"), &["vfio-pci", "mlx5_core"]);
    machine
        .function(PF, "0x020000", "mlx5_core", Some(9))
        .value(PF, "sriov_totalvfs", vfs)
        .value(PF, "sriov_numvfs", "0")
        .value(PF, "sriov_offset", "1")
        .value(PF, "sriov_stride", "1")
        .value(PF, "sriov_vf_device", "101e")
        .value(PF, "sriov_drivers_autoprobe", "1");
    Scene::of(root, machine.path(), "sriov", SRIOV, SRIOV_CONFIG).await
}

fn of_vf(name: &str, vf: &str) -> v1::PreparePodRequest {
    request(&pod(name), &[&claim(name, &[&format!("{SRIOV}/vf/{vf}")])])
}

#[tokio::test]
async fn virtual_functions_exist_while_claimed() {
    let scene = card("8").await;
    let count = || {
        std::fs::read_to_string(scene.function(PF).join("sriov_numvfs"))
            .unwrap()
            .trim()
            .to_owned()
    };
    assert_eq!(
        scene.daemon.devices().await.len(),
        4,
        "by the addresses that they will have"
    );
    scene.daemon.prepared(of_vf("one", "0000-05-00-1")).await;
    assert_eq!(
        (
            count().as_str(),
            kernel_driver(&scene.sys, "0000:05:00.1").as_str()
        ),
        ("4", "vfio-pci")
    );
    scene.daemon.prepared(of_vf("two", "0000-05-00-4")).await;
    scene.daemon.unprepare(&pod("one")).await;
    assert_eq!(count(), "4", "the other claim uses one");
    scene.daemon.unprepare(&pod("two")).await;
    assert_eq!(count(), "0");
    scene.daemon.assert_empty().await;
}

#[tokio::test]
async fn missing_virtual_functions_refuse_the_claim() {
    let scene = card("8").await;
    // The card has fewer of them since the driver looked.
    std::fs::write(scene.function(PF).join("sriov_totalvfs"), "2\n").unwrap();
    let problem = scene.daemon.refused(of_vf("one", "0000-05-00-4")).await;
    assert!(!problem.message.is_empty(), "{problem:?}");
    assert_eq!(
        std::fs::read_to_string(scene.function(PF).join("sriov_numvfs"))
            .unwrap()
            .trim(),
        "0"
    );
    scene.daemon.assert_empty().await;
}

const BLOCK: &str = "block.nodedock.dev";

/// The driver sees no mounts: the host looks, at every prepare.
#[tokio::test]
async fn mounted_disk_is_refused() {
    let root = Root::new();
    let machine = Recorded::new(&root.path().join("machine"), &[]);
    machine.disks();
    let config = format!("pools: [{{name: disks, select: [{{wwid: {}}}]}}]", DISKS[0]);
    let scene = Scene::of(root, machine.path(), "block", BLOCK, &config).await;
    let device = format!("{BLOCK}/disks/{}", DISKS[0].replace('.', "-"));
    let of_disk = || request(&pod("one"), &[&claim("disk", &[&device])]);
    scene.daemon.prepared(of_disk()).await;
    let spec: String = scene
        .daemon
        .cdi_files()
        .into_iter()
        .map(|file| file.text)
        .collect();
    assert!(spec.contains("/dev/nvme1n1"), "{spec}");
    scene.daemon.unprepare(&pod("one")).await;
    let mounts = scene.sys.with_file_name("proc/self/mountinfo");
    let line = "36 25 259:1 / /data rw - ext4 /dev/nvme1n1 rw\n";
    std::fs::write(mounts, line).unwrap();
    let problem = scene
        .daemon
        .refused_as(of_disk(), "conflict", "edit-denied")
        .await;
    assert!(problem.message.contains("is mounted"), "{problem:?}");
    scene.daemon.unprepare(&pod("one")).await;
    scene.daemon.assert_empty().await;
}

#[tokio::test]
async fn cameras_with_equal_serials_are_two() {
    let root = Root::new();
    let machine = Recorded::new(&root.path().join("machine"), &[]);
    machine.cameras();
    let name = "camera.nodedock.dev";
    let scene = Scene::of(root, machine.path(), "camera", name, "pools: [{name: all}]").await;
    let names = ["pci-0000-00-14-0-usbv2-0-2", "pci-0000-00-14-0-usbv2-0-5"];
    let devices = scene.daemon.devices().await;
    let found: Vec<_> = devices.iter().map(|device| device.name.as_str()).collect();
    assert_eq!(found, names);
    let path = format!("{name}/all/{}", names[1]);
    let camera = request(&pod("one"), &[&claim("camera", &[&path])]);
    scene.daemon.prepared(camera).await;
    let spec: String = scene
        .daemon
        .cdi_files()
        .into_iter()
        .map(|file| file.text)
        .collect();
    for node in ["/dev/video2", "/dev/video3", "/dev/media1"] {
        assert!(spec.contains(node), "{node}: {spec}");
    }
}

/// Example drivers with configs that offer all that they can.
const EVERY_DRIVER: [(&str, &str, &str); 8] = [
    ("accel", "accel.nodedock.dev", "pools: [{name: all}]"),
    (
        "block",
        BLOCK,
        "pools: [{name: disks, select: [{wwid: eui.0025385b21b0c7e1}]}]",
    ),
    ("camera", "camera.nodedock.dev", "pools: [{name: all}]"),
    ("gpu", "gpu.nodedock.dev", "{}"),
    ("pci", "pci.nodedock.dev", "{}"),
    (
        "sriov",
        SRIOV,
        "pools: [{name: vf, select: [{addresses: [\"*\"]}], vfs: 2, mode: vfio}]",
    ),
    (
        "udev",
        "udev.nodedock.dev",
        "pools: [{name: serial, kind: serial}, {name: usb, kind: usb}]",
    ),
    (
        "vfio-pci",
        NAME,
        "pools: [{name: all, select: [{addresses: [\"*\"]}]}]",
    ),
];

/// Devices of each driver that are prepared on each machine.
const PREPARED_MAX: usize = 3;

#[tokio::test]
async fn every_driver_serves_every_recorded_machine() {
    let archives = match archives() {
        Ok(archives) => archives,
        Err(why) => return skip("drivers on recorded machines", &why),
    };
    let mut prepared = 0;
    for archive in archives {
        let root = Root::new();
        for (file, _, config) in EVERY_DRIVER {
            root.drop_in(&format!("{file}.grant.yaml"), side_file(file, "grant"));
            root.drop_in(&format!("{file}.config.yaml"), config);
            root.drop_in(&format!("{file}.wasm"), wasm(file, Form::Core));
        }
        let options = Options::default().arg("--hardware", archive.to_string_lossy());
        let daemon = Daemon::start_on(root, options).await;
        for (_, name, _) in EVERY_DRIVER {
            daemon.until_serving(name).await;
        }
        let devices = daemon.devices().await;
        for (_, name, _) in EVERY_DRIVER {
            for device in devices
                .iter()
                .filter(|device| device.driver == name)
                .take(PREPARED_MAX)
            {
                let path = format!("{name}/{}/{}", device.pool, device.name);
                let answer = daemon
                    .prepare(request(&pod("one"), &[&claim("one", &[&path])]))
                    .await;
                let problem = answer
                    .claims
                    .iter()
                    .find_map(|claim| claim.problem.as_ref());
                prepared += usize::from(problem.is_none());
                // A refusal names its reason; none is a defect of the driver or of the host.
                let is_refusal = problem.is_none_or(|problem| problem.kind != "internal");
                assert!(is_refusal, "{} on {}: {problem:?}", path, archive.display());
                daemon.unprepare(&pod("one")).await;
            }
        }
        daemon.assert_empty().await;
    }
    assert!(
        prepared > 10,
        "{prepared} devices of all machines could be prepared"
    );
}
