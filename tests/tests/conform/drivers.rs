//! Drivers that pass: our examples, and one on the official Go library.

use std::collections::BTreeMap;
use std::path::Path;

use nodedock_tests::go::Module;
use nodedock_tests::machine::skip;
use nodedock_tests::places::{beside, drivers, examples};
use nodedock_tests::recorded::{DISKS, Recorded};

use super::{all_pass, listed, of, outcomes, text};

/// Runs a program side by side with itself: ours take no port, and nothing outside their directories.
fn native(command: &str) -> [&str; 4] {
    ["--exec", command, "--jobs", "4"]
}

/// A busy machine may need more than the default time.
const BUSY: [&str; 2] = ["--slices-timeout", "60"];

#[tokio::test]
async fn the_native_null_driver_passes() {
    let program = beside("native-null");
    let command = format!(
        "{} --registry-dir {{registry}} --plugins-dir {{plugins}}",
        text(&program)
    );
    let device = ["--device", "null/null-0"];
    let (outcomes, report) = outcomes(&[&native(&command)[..], &device[..]].concat()).await;
    all_pass("native-null", &outcomes, &report);
    // Whichever case ends first.
    let verdicts = report["verdicts"].as_array().expect("verdicts").iter();
    let ids = verdicts.map(|verdict| verdict["id"].as_str().expect("an ID"));
    let ids: Vec<_> = ids.collect();
    assert_eq!(ids, listed().await);
    for level in ["wire", "idempotency", "crash", "conduct"] {
        assert!(
            of(&outcomes, "passed")
                .iter()
                .any(|id| id.starts_with(level)),
            "{level}: {outcomes:?}"
        );
    }
}

#[tokio::test]
async fn running_driver_passes_without_restart_cases() {
    let kubelet = tempfile::tempdir().expect("a directory");
    let [registry, plugins] = ["plugins_registry", "plugins"].map(|name| kubelet.path().join(name));
    std::fs::create_dir(&registry).expect("a new directory");
    let mut driver = tokio::process::Command::new(beside("native-null"));
    driver
        .args([
            "--registry-dir",
            text(&registry),
            "--plugins-dir",
            text(&plugins),
        ])
        .kill_on_drop(true);
    let mut driver = driver.spawn().expect("it starts");
    let kubeconfig = kubelet.path().join("kubeconfig");
    let device = ["--driver", "null.example.com", "--device", "null/null-0"];
    let args = [
        "--socket-dir",
        text(kubelet.path()),
        "--write-kubeconfig",
        text(&kubeconfig),
    ];
    let (outcomes, report) = outcomes(&[&args[..], &device[..]].concat()).await;
    all_pass("native-null", &outcomes, &report);
    assert_eq!(outcomes["wire.prepare"], "passed");
    assert_eq!(outcomes["crash.after-prepare"], "not-declared");
    assert!(
        driver.try_wait().expect("its state").is_none(),
        "it is left running"
    );
    // What is there already is not replaced.
    let again = super::conform(&[&args[..], &device[..]].concat()).await;
    let error = String::from_utf8_lossy(&again.stderr).into_owned();
    assert!(
        again.status.code() == Some(1) && error.contains("File exists"),
        "{error}"
    );
}

#[tokio::test]
async fn the_native_device_plugin_passes() {
    let program = beside("native-device-plugin");
    let command = format!(
        "{} --device-plugins-dir {{device-plugins}} --prefer last",
        text(&program)
    );
    let (outcomes, report) = outcomes(&native(&command)).await;
    all_pass("native-device-plugin", &outcomes, &report);
    let passed = of(&outcomes, "passed");
    assert_eq!(
        passed
            .iter()
            .filter(|id| id.starts_with("device-plugin."))
            .count(),
        9,
        "{outcomes:?}"
    );
}

#[tokio::test]
async fn official_go_library_driver_passes() {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("interop/go");
    let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join("interop-conform");
    let module = Module {
        sources,
        output,
        fetch_seconds: 300,
        build_seconds: 900,
        linker_flags: "",
        requirements: None,
    };
    let program = match module.program("dra-driver") {
        Ok(program) => program,
        Err(why) => return skip("the conformance of a driver in Go", &why),
    };
    let command = format!(
        "{} --driver-name go.example.com --registry-dir {{registry}} --data-dir {{plugins}} --cdi-dir {{cdi}} --server {{api}} \
         --checkpoint {{state}}/checkpoint.json --node-name {{node}} --devices 4 --rolling-update-uid {{instance}}",
        text(&program)
    );
    let args = [&native(&command)[..], &BUSY[..]].concat();
    let (outcomes, report) = outcomes(&args).await;
    all_pass("the driver in Go", &outcomes, &report);
    for level in [
        "wire",
        "idempotency",
        "crash",
        "slices",
        "features",
        "conduct",
    ] {
        assert!(
            of(&outcomes, "passed")
                .iter()
                .any(|id| id.starts_with(level)),
            "{level}: {outcomes:?}"
        );
    }
}

/// The driver as the daemon offers it, on a recorded machine if it needs one.
async fn wasm(name: &str, more: &[&str]) {
    let file = drivers().join(format!("{name}.wasm"));
    let example = examples().join(name);
    let [grant, config] =
        ["grant", "config"].map(|kind| example.join(format!("{name}.{kind}.yaml")));
    let args = [
        text(&file),
        "--grant",
        text(&grant),
        "--config",
        text(&config),
    ];
    // What the host alone answers for is checked with one of them.
    let (outcomes, report) = outcomes(&[&args[..], &BUSY[..], more].concat()).await;
    all_pass(name, &outcomes, &report);
    for level in ["wire", "idempotency", "crash", "slices"] {
        assert!(
            of(&outcomes, "passed")
                .iter()
                .any(|id| id.starts_with(level)),
            "{name}, {level}: {outcomes:?}"
        );
    }
}

#[tokio::test]
async fn the_simulated_gpus_pass() {
    wasm("mock-gpu", &[]).await;
}

#[tokio::test]
async fn the_driver_of_device_nodes_passes() {
    wasm(
        "device-nodes",
        &["--only", "wire,idempotency,crash,slices,features"],
    )
    .await;
}

/// The levels that depend on a driver's own answers; the host answers for the rest, as with the simulated GPUs.
const OWN: [&str; 2] = ["--only", "wire,idempotency,slices,conduct.values-restored"];

/// The cases of drivers that report the health of their devices. Those that do not would wait for a report.
const OF_HEALTH: [&str; 2] = ["--only", "features.health-devices,features.health-again"];

/// An example driver on a machine, with a config of the test's own unless the driver has none.
async fn on_machine(name: &str, config: Option<&str>, machine: &Path) {
    on_machine_with(name, config, machine, &[]).await;
}

/// An example driver that reports the health of its devices, as [`on_machine`].
async fn with_health(name: &str, config: &str, machine: &Path) {
    let outcomes = on_machine_with(name, Some(config), machine, &OF_HEALTH).await;
    for case in [
        "features.health-list",
        "features.health-devices",
        "features.health-again",
    ] {
        assert_eq!(outcomes[case], "passed", "{name}");
    }
}

async fn on_machine_with(
    name: &str,
    config: Option<&str>,
    machine: &Path,
    more: &[&str],
) -> BTreeMap<String, String> {
    let driver = drivers().join(format!("{name}.wasm"));
    let grant = examples().join(name).join(format!("{name}.grant.yaml"));
    let file = tempfile::NamedTempFile::new().expect("a file");
    let mut args = vec![
        text(&driver),
        "--grant",
        text(&grant),
        "--hardware",
        text(machine),
    ];
    if let Some(config) = config {
        std::fs::write(file.path(), config).expect("it is written");
        args.extend(["--config", text(file.path())]);
    }
    args.extend(BUSY);
    args.extend(OWN);
    args.extend(more);
    let (outcomes, report) = outcomes(&args).await;
    all_pass(name, &outcomes, &report);
    for case in [
        "wire.cdi-files",
        "idempotency.unprepare-after-restart",
        "slices.repaired",
        "conduct.values-restored",
    ] {
        assert_eq!(outcomes[case], "passed", "{name}");
    }
    outcomes
}

#[tokio::test]
async fn the_driver_of_gpus_passes() {
    let directory = tempfile::tempdir().expect("a directory");
    let machine = Recorded::new(directory.path(), &["amdgpu"]);
    for (bus, minor) in [(1, 0), (2, 1)] {
        let address = format!("0000:0{bus}:00.0");
        machine.function(&address, "0x030000", "amdgpu", Some(bus));
        for (name, minor) in [
            (format!("card{minor}"), minor),
            (format!("renderD{}", 128 + minor), 128 + minor),
        ] {
            let path = format!("sys/devices/pci0000:00/{address}/drm/{name}");
            machine.device_node(&path, 226, minor, &format!("dri/{name}"));
        }
    }
    on_machine("gpu", None, machine.path()).await;
}

#[tokio::test]
async fn the_driver_of_ports_passes() {
    let directory = tempfile::tempdir().expect("a directory");
    let machine = Recorded::new(directory.path(), &[]);
    for (number, minor) in [(0, 64), (1, 65)] {
        let name = format!("ttyAMA{number}");
        let port = format!("devices/platform/soc/3f20{number}000.serial/tty/{name}");
        machine.device_node(&format!("sys/{port}"), 204, minor, &name);
        machine.file(&format!("sys/{port}/dev"), &format!("204:{minor}"));
        machine.file(&format!("sys/{port}/type"), "32");
        machine.link(&format!("sys/class/tty/{name}"), &format!("../../{port}"));
    }
    on_machine(
        "udev",
        Some("pools: [{name: ports, kind: serial}]"),
        machine.path(),
    )
    .await;
}

#[tokio::test]
async fn the_driver_of_cameras_passes() {
    let directory = tempfile::tempdir().expect("a directory");
    let machine = Recorded::new(directory.path(), &[]);
    machine.cameras();
    with_health("camera", "pools: [{name: all}]", machine.path()).await;
}

#[tokio::test]
async fn the_driver_of_accelerators_passes() {
    let directory = tempfile::tempdir().expect("a directory");
    let machine = Recorded::new(directory.path(), &["intel_vpu", "apex"]);
    machine.accelerators();
    with_health("accel", "pools: [{name: all}]", machine.path()).await;
}

#[tokio::test]
async fn the_driver_of_disks_passes() {
    let directory = tempfile::tempdir().expect("a directory");
    let machine = Recorded::new(directory.path(), &[]);
    machine.disks();
    let [one, other] = DISKS;
    let pools = format!("pools: [{{name: disks, select: [{{wwid: {one}}}, {{wwid: {other}}}]}}]");
    with_health("block", &pools, machine.path()).await;
}

#[tokio::test]
async fn the_driver_that_binds_functions_passes() {
    let directory = tempfile::tempdir().expect("a directory");
    let machine = Recorded::new(directory.path(), &["vfio-pci", "amdgpu", "igb"]);
    machine
        .function("0000:01:00.0", "0x030000", "amdgpu", Some(7))
        .function("0000:02:00.0", "0x020000", "igb", Some(8));
    let pools = "pools: [{name: all, select: [{class: \"0x02\"}, {class: \"0x03\"}]}]";
    on_machine("vfio-pci", Some(pools), machine.path()).await;
}

#[tokio::test]
async fn the_driver_of_bound_functions_passes() {
    let directory = tempfile::tempdir().expect("a directory");
    let machine = Recorded::new(directory.path(), &["vfio-pci"]);
    machine.function("0000:03:00.0", "0x030000", "vfio-pci", Some(9));
    for (kind, name, number) in [("misc", "vfio", 10), ("vfio", "9", 240)] {
        let path = format!("sys/devices/virtual/{kind}/{name}");
        machine.device_node(&path, number, 0, &format!("vfio/{name}"));
    }
    let pools = "pools: [{name: vfio, select: [{driver: vfio-pci}]}]";
    on_machine("pci", Some(pools), machine.path()).await;
}

#[tokio::test]
async fn the_driver_of_virtual_functions_passes() {
    const PF: &str = "0000:05:00.0";
    let directory = tempfile::tempdir().expect("a directory");
    let machine = Recorded::new(directory.path(), &["vfio-pci", "mlx5_core"]);
    machine.card(PF);
    let pools =
        "pools: [{name: vf, select: [{addresses: [\"0000:05:00.0\"]}], vfs: 4, mode: vfio}]";
    on_machine("sriov", Some(pools), machine.path()).await;
}
