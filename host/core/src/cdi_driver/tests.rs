//! Devices of specs as vendors' tools write them, of specs by hand, and of generated ones.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;

use super::exclusion::identities;
use super::look::{Looked, ReadSpecs, look, read};
use super::merge::{CdiDevice, KnownSpec, Merged, merged};
use super::*;
use crate::cdi::foreign;
use nodedock_base::changes::Changes;
use nodedock_model::{HealthState, limit::IDENTITIES_MAX};

/// Made by `nvidia-ctk cdi generate` 1.20.2 on a simulated machine: a GPU, and a GPU with two partitions.
const NVIDIA: &str = include_str!("fixtures/nvidia-ctk.yaml");
const AMD: &str = include_str!("fixtures/amd-ctk.json");

fn known(path: &str, directory: usize, text: &str) -> KnownSpec {
    KnownSpec {
        path: path.into(),
        directory,
        spec: Arc::new(foreign::parse(text).unwrap()),
        refused: None,
    }
}

/// A spec with devices, each with its nodes by name.
fn spec(kind: &str, devices: &[(&str, &[&str])]) -> String {
    let devices: Vec<_> = devices
        .iter()
        .map(|(name, nodes)| {
            let nodes = nodes
                .iter()
                .map(|node| serde_json::json!({"path": format!("/dev/{node}")}));
            let nodes: Vec<_> = nodes.collect();
            let edits = serde_json::json!({"env": [format!("NAME={name}")], "deviceNodes": nodes});
            serde_json::json!({"name": name, "containerEdits": edits})
        })
        .collect();
    serde_json::json!({"cdiVersion": "0.5.0", "kind": kind, "devices": devices}).to_string()
}

/// Merged devices of a machine on which only nodes that begin with `/dev/dri` have a device of the kernel.
fn merge(specs: &[KnownSpec]) -> Merged {
    merged(specs, |_| true, |path| path.starts_with("/dev/dri"))
}

/// The name, the other names and the identities of each device.
fn described(devices: &[CdiDevice]) -> Vec<(String, String, String)> {
    let none = vec![None; devices.len()];
    let identities = identities(devices, &none);
    let described = devices.iter().zip(identities).map(|(device, identities)| {
        let names: Vec<_> = device.names.iter().map(String::as_str).collect();
        let identities = identities.map_or_else(|why| why, |of| of.join(" "));
        (device.name.clone(), names.join(" "), identities)
    });
    described.collect()
}

fn strings(expected: &[(&str, &str, &str)]) -> Vec<(String, String, String)> {
    let of = |text: &&str| (*text).to_owned();
    expected
        .iter()
        .map(|(name, names, identities)| (of(name), of(names), of(identities)))
        .collect()
}

#[test]
fn nvidia_names_of_one_gpu_merge() {
    let found = merge(&[known("/etc/cdi/nvidia.yaml", 0, NVIDIA)]);
    let first = "0 GPU-00000000-1111-2222-3333-444444444444";
    let expected = [
        ("0", first, "dev:/dev/nvidia0"),
        (
            "1:0",
            "1:0 MIG-00000000-5555-6666-7777-888888888888",
            "dev:/dev/nvidia-caps/nvidia-cap21 dev:/dev/nvidia-caps/nvidia-cap22",
        ),
        (
            "1:1",
            "1:1 MIG-00000001-5555-6666-7777-888888888888",
            "dev:/dev/nvidia-caps/nvidia-cap30 dev:/dev/nvidia-caps/nvidia-cap31",
        ),
    ];
    assert_eq!(described(&found.devices), strings(&expected));
    assert!(found.devices[0].node_paths().contains("/dev/nvidiactl"));
}

#[test]
fn shared_amd_node_tells_nothing_apart() {
    let found = merge(&[known("/var/run/cdi/amd.json", 0, AMD)]);
    let expected = [
        ("0", "0", "dev:/dev/dri/card1 dev:/dev/dri/renderD128"),
        ("1", "1", "dev:/dev/dri/card2 dev:/dev/dri/renderD129"),
    ];
    assert_eq!(described(&found.devices), strings(&expected));
}

#[test]
fn only_gpu_has_the_name_all() {
    let devices: [(&str, &[&str]); 3] = [("0", &["a"]), ("GPU-x", &["a"]), ("all", &["a"])];
    let found = merge(&[known("/a.json", 0, &spec("v.com/gpu", &devices))]);
    let expected = [("0", "0 GPU-x all", "dev:/dev/a")];
    assert_eq!(described(&found.devices), strings(&expected));
    let found = merge(&[known("/a.json", 0, &spec("v.com/fs", &devices[2..]))]);
    let expected = [("all", "all", "dev:/dev/a")];
    assert_eq!(described(&found.devices), strings(&expected));
}

#[test]
fn partition_excludes_its_parent_alone() {
    let devices: [(&str, &[&str]); 3] = [
        ("0", &["g0", "dri/card0"]),
        ("0:0", &["g0", "cap1"]),
        ("0:1", &["g0", "cap2"]),
    ];
    let found = merge(&[known("/a.json", 0, &spec("v.com/gpu", &devices))]);
    let [pair_0, pair_1] = ["0:0", "0:1"].map(|part| format!("cdi:v.com/gpu=0,v.com/gpu={part}"));
    let expected = [
        ("0", "0", format!("{pair_0} {pair_1} dev:/dev/dri/card0")),
        ("0:0", "0:0", format!("{pair_0} dev:/dev/cap1")),
        ("0:1", "0:1", format!("{pair_1} dev:/dev/cap2")),
    ];
    let expected = expected
        .each_ref()
        .map(|(name, names, identities)| (*name, *names, identities.as_str()));
    assert_eq!(described(&found.devices), strings(&expected));
}

#[test]
fn devices_with_common_nodes_exclude_each_other() {
    let devices: [(&str, &[&str]); 3] = [
        ("left", &["dri/a", "dri/b"]),
        ("right", &["dri/b", "dri/c"]),
        ("wide", &["dri/c", "dri/d"]),
    ];
    // Across kinds as well.
    let other: [(&str, &[&str]); 1] = [("x", &["dri/d"])];
    let found = merge(&[
        known("/a.json", 0, &spec("v.com/gpu", &devices)),
        known("/b.json", 0, &spec("w.com/gpu", &other)),
    ]);
    let expected = [
        ("left", "left", "dev:/dev/dri/b dev:/dev/dri/a"),
        ("right", "right", "dev:/dev/dri/b dev:/dev/dri/c"),
        ("wide", "wide", "dev:/dev/dri/c dev:/dev/dri/d"),
        ("x", "x", "dev:/dev/dri/d"),
    ];
    assert_eq!(described(&found.devices), strings(&expected));
}

#[test]
fn nodes_for_every_container_are_hardware() {
    let mut text: serde_json::Value =
        serde_json::from_str(&spec("v/gpu", &[("0", &[]), ("GPU-1", &[])])).unwrap();
    let nodes = serde_json::json!([{ "path": "/dev/dri/renderD128" }, { "path": "/dev/ctl" }]);
    text["containerEdits"] = serde_json::json!({ "deviceNodes": nodes });
    let whole = spec("other/gpu", &[("a", &["dri/renderD128", "x"])]);
    let found = merge(&[known("/a", 0, &text.to_string()), known("/b", 0, &whole)]);
    assert_eq!(
        described(&found.devices),
        strings(&[
            ("a", "a", "dev:/dev/dri/renderD128 dev:/dev/x"),
            ("0", "0 GPU-1", "dev:/dev/dri/renderD128"),
        ])
    );
}

#[test]
fn node_of_another_kind_tells_apart() {
    let parts = spec(
        "v/mig",
        &[("0:0", &["gpu0", "cap0"]), ("0:1", &["gpu0", "cap1"])],
    );
    let whole = spec("w/gpu", &[("0", &["gpu0"])]);
    let found = merge(&[known("/a", 0, &parts), known("/b", 0, &whole)]);
    let with_gpu = |device: &&CdiDevice| device.hardware.contains("/dev/gpu0");
    assert_eq!(found.devices.iter().filter(with_gpu).count(), 3);
    // Where it is of no kind alone, it is a control node of both.
    let both = spec("w/gpu", &[("0", &["gpu0", "x"]), ("1", &["gpu0", "y"])]);
    let found = merge(&[known("/a", 0, &parts), known("/b", 0, &both)]);
    assert_eq!(found.devices.iter().filter(with_gpu).count(), 0);
}

#[test]
fn pci_addresses_are_no_partitions() {
    let names: [(&str, &[&str]); 2] = [
        ("0000:03:00.0", &["dri/a", "dri/x"]),
        ("0000:04:00.0", &["dri/b", "dri/x"]),
    ];
    let found = merge(&[known("/a", 0, &spec("v/gpu", &names))]);
    for (_, _, identities) in described(&found.devices) {
        assert!(identities.contains("dev:/dev/dri/x"), "{identities}");
    }
}

#[test]
fn devices_without_nodes_are_each_one() {
    let devices: [(&str, &[&str]); 3] = [("a", &[]), ("b", &[]), ("all", &[])];
    let found = merge(&[known("/a.json", 0, &spec("v.com/license", &devices))]);
    let expected = [("a", "a", ""), ("b", "b", "")];
    assert_eq!(described(&found.devices), strings(&expected));
}

#[test]
fn too_many_overlaps_refuse_a_device() {
    let names: Vec<_> = (0..=IDENTITIES_MAX).map(|n| format!("n{n}")).collect();
    let all: Vec<_> = names.iter().map(String::as_str).collect();
    let text = spec("w.com/gpu", &[("all", &all)]);
    let parts: Vec<_> = all.iter().map(std::slice::from_ref).collect();
    let parts: Vec<_> = all.iter().copied().zip(parts).collect();
    let found = merge(&[
        known("/a.json", 0, &spec("v.com/gpu", &parts)),
        known("/b.json", 0, &text),
    ]);
    let identities = identities(&found.devices, &vec![None; found.devices.len()]);
    let refused: Vec<_> = identities
        .iter()
        .filter_map(|of| of.as_ref().err())
        .collect();
    assert_eq!(refused.len(), 1);
    assert!(refused[0].contains("17 ways"), "{}", refused[0]);
}

#[test]
fn later_directory_takes_precedence() {
    let gpu = |node: &str| spec("v.com/gpu", &[("0", &[node])]);
    let found = merge(&[
        known("/etc/cdi/a.json", 0, &gpu("a")),
        known("/run/cdi/a.json", 1, &gpu("b")),
    ]);
    let [device] = &found.devices[..] else {
        panic!("{found:?}")
    };
    assert_eq!(device.hardware, BTreeSet::from(["/dev/b".to_owned()]));
    assert_eq!(found.conflicts, BTreeMap::new());
}

#[test]
fn name_in_two_files_is_unusable() {
    let gpus = |names: &[&str]| {
        let devices: Vec<(&str, &[&str])> = names.iter().map(|name| (*name, &[][..])).collect();
        spec("v.com/gpu", &devices)
    };
    let found = merge(&[
        known("/etc/cdi/a.json", 0, &gpus(&["0", "1"])),
        known("/etc/cdi/b.json", 0, &gpus(&["0", "2"])),
    ]);
    let names: Vec<_> = found.devices.iter().map(|device| &device.name).collect();
    assert_eq!(names, ["1", "2"]);
    let why = &found.conflicts["v.com/gpu=0"];
    assert!(
        why.starts_with("/etc/cdi/a.json and /etc/cdi/b.json have it"),
        "{why}"
    );
}

#[test]
fn malformed_file_yields_to_a_valid_one() {
    let gpu = |node: &str| spec("v.com/gpu", &[("0", &[node])]);
    let refused = |path: &str, directory| KnownSpec {
        refused: Some("it is no CDI spec".to_owned()),
        ..known(path, directory, &gpu("old"))
    };
    let valid = known("/etc/cdi/b.json", 1, &gpu("new"));
    for specs in [
        [refused("/etc/cdi/a.json", 1), valid.clone()],
        [valid.clone(), refused("/etc/cdi/c.json", 1)],
        [valid.clone(), refused("/run/cdi/a.json", 2)],
    ] {
        let found = merge(&specs);
        assert_eq!(found.conflicts, BTreeMap::new());
        assert_eq!(found.devices[0].file, valid);
    }
}

#[test]
fn default_kinds_are_no_claims() {
    let settings = |kinds: Option<&[&str]>| CdiDriverSettings {
        driver: DriverName::new("cdi.nodedock.dev").unwrap(),
        kinds: kinds.map(|kinds| {
            let globs: Vec<_> = kinds.iter().map(ToString::to_string).collect();
            CdiKinds::try_from(globs).unwrap()
        }),
        directories: Vec::new(),
        answer: CdiAnswer::Names,
    };
    let plain = settings(None);
    assert!(plain.has("nvidia.com/gpu") && plain.has("amd.com/gpu"));
    for kind in [
        "nodedock.dev/gpu",
        "k8s.gpu.nvidia.com/device",
        "gpu.example.com/claim",
    ] {
        assert!(!plain.has(kind), "{kind}");
    }
    let some = settings(Some(&["nvidia.com/*", "*/claim", "nodedock.dev/*"]));
    assert!(some.has("nvidia.com/gpu") && some.has("gpu.example.com/claim"));
    assert!(!some.has("amd.com/gpu") && !some.has("nodedock.dev/gpu"));
}

proptest! {
    /// Devices of which at most one may be in use at a time have an identity in common, and no others have.
    #[test]
    fn common_identity_means_exclusion(
        devices in proptest::collection::btree_map("[0-2](:[0-2])?|GPU-[a-c]|all", proptest::collection::btree_set("[a-f]", 0..4), 1..8),
    ) {
        let devices: Vec<_> = devices
            .iter()
            .map(|(name, nodes)| (name.as_str(), nodes.iter().map(String::as_str).collect::<Vec<_>>()))
            .collect();
        let named: Vec<_> = devices.iter().map(|(name, nodes)| (*name, &nodes[..])).collect();
        let found = merge(&[known("/a.json", 0, &spec("v.com/gpu", &named))]).devices;
        let identities = identities(&found, &vec![None; found.len()]);
        let of: Vec<BTreeSet<_>> = identities.into_iter().map(|of| of.unwrap().into_iter().collect()).collect();
        for (at, one) in found.iter().enumerate() {
            for (beside, other) in found.iter().enumerate().skip(at + 1) {
                prop_assert_ne!(one.hardware.is_empty() || one.hardware != other.hardware, false);
                let is_related = one.is_parent_of(other) || other.is_parent_of(one);
                let are_parts = one.is_partition() && other.is_partition()
                    && !one.hardware.is_subset(&other.hardware) && !other.hardware.is_subset(&one.hardware);
                let excludes = is_related || (!are_parts && !one.hardware.is_disjoint(&other.hardware));
                prop_assert_eq!(!of[at].is_disjoint(&of[beside]), excludes, "{:?} {:?}", one, other);
            }
        }
        // Every name is one of a device, or stands for several.
        for (name, nodes) in named {
            let is_named = found.iter().any(|device| device.names.contains(name));
            let nodes: BTreeSet<_> = nodes.iter().map(|node| format!("/dev/{node}")).collect();
            let below = found.iter().filter(|device| device.hardware.is_subset(&nodes));
            prop_assert!(is_named || name == "all" || below.count() > 1, "{}", name);
        }
    }
}

/// A recorded machine with a GPU, and a USB device behind a controller.
fn machine(root: &Path) -> CdiDriverParts {
    const GPU: &str = "devices/pci0000:3a/0000:3a:01.0/0000:3b:00.0";
    const PORT: &str = "devices/pci0000:00/0000:00:14.0/usb1/1-2/tty/ttyUSB0";
    let write = |path: &str, text: &str| {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    for (name, text) in [
        ("vendor", "0x10de\n"),
        ("device", "0x20b0\n"),
        ("class", "0x030200\n"),
        ("numa_node", "1\n"),
    ] {
        write(&format!("sys/{GPU}/{name}"), text);
    }
    for directory in [
        &format!("{GPU}/drm/card0"),
        PORT,
        "bus/pci/drivers/nvidia",
        "class",
        "dev/char",
    ] {
        fs::create_dir_all(root.join("sys").join(directory)).unwrap();
    }
    let link = |path: &str, target: &str| {
        let path = root.join("sys").join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(target, path).unwrap();
    };
    link("bus/pci/devices/0000:3b:00.0", &format!("../../../{GPU}"));
    link(
        &format!("{GPU}/driver"),
        "../../../../bus/pci/drivers/nvidia",
    );
    link("dev/char/226:0", &format!("../../{GPU}/drm/card0"));
    link("dev/char/188:0", &format!("../../{PORT}"));
    write("dev/dri/card0", "character 226:0");
    write("dev/ttyUSB0", "character 188:0");
    let hardware = Hardware::simulated(root);
    let changes = Changes::default();
    let conditions = Conditions::new(changes.clone());
    CdiDriverParts {
        registry: Registry::new(changes, conditions.clone(), None),
        conditions,
        sysfs: hardware.open_sys().unwrap(),
        numa_node_form: NumaNodeForm::Number,
        hardware,
    }
}

fn settings(directory: &Path) -> CdiDriverSettings {
    CdiDriverSettings {
        driver: DriverName::new("cdi.nodedock.dev").unwrap(),
        kinds: None,
        directories: vec![directory.to_owned()],
        answer: CdiAnswer::Names,
    }
}

/// Reads the specs and looks at their nodes, after a look before.
fn look_again(
    parts: &CdiDriverParts,
    settings: &CdiDriverSettings,
    before: &ReadSpecs,
) -> (ReadSpecs, Looked) {
    let specs = read(&settings.directories, before);
    let looked = look(parts, settings, &specs).unwrap();
    (specs, looked)
}

/// Each device with its health, as `POOL/DEVICE: STATE`.
fn health(looked: &Looked) -> Vec<String> {
    let health = looked.published.health.iter();
    health
        .map(|((pool, device), health)| format!("{pool}/{device}: {}", health.state.as_str()))
        .collect()
}

#[test]
fn device_has_attributes_of_its_function() {
    let (root, cdi) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let parts = machine(root.path());
    let uuid = "GPU-00000000-1111-2222-3333-444444444444";
    let gpu: [(&str, &[&str]); 2] = [("0", &["dri/card0"]), (uuid, &["dri/card0"])];
    fs::write(cdi.path().join("a.json"), spec("v.com/gpu", &gpu)).unwrap();
    let port: [(&str, &[&str]); 1] = [("Port_1", &["ttyUSB0"])];
    fs::write(cdi.path().join("b.json"), spec("v.com/Port", &port)).unwrap();
    let (_, looked) = look_again(&parts, &settings(cdi.path()), &ReadSpecs::default());
    let pools = &looked.published.inventory.pools;
    let device = |pool: &str, name: &str| &pools[pool].devices[name];
    let attributes = |device: &nodedock_model::Device| {
        let attributes = device.attributes.iter();
        let attributes = attributes
            .map(|(name, value)| format!("{name}={}", serde_json::to_string(value).unwrap()));
        attributes.collect::<Vec<_>>().join(" ").replace('"', "")
    };
    let gpu = device("v.com/gpu", "0");
    assert_eq!(
        attributes(gpu),
        format!(
            "class=0x030200 device=0x20b0 driver=nvidia index=0 kind=v.com/gpu name=0 resource.kubernetes.io/numaNode=1 \
             resource.kubernetes.io/pciBusID=0000:3b:00.0 resource.kubernetes.io/pcieRoot=pci0000:3a uuid={uuid} vendor=0x10de"
        )
    );
    assert_eq!(gpu.identity, ["pci:0000:3b:00.0", "dev:/dev/dri/card0"]);
    assert!(
        gpu.keys.iter().any(|key| key.ends_with("/0000:3b:00.0")),
        "{:?}",
        gpu.keys
    );
    let port = device("v.com/x--50ort", "port-1");
    assert_eq!(attributes(port), "kind=v.com/Port name=Port_1");
    assert_eq!(port.identity, ["dev:/dev/ttyUSB0"]);
    assert_eq!(looked.problems, BTreeMap::new());
}

#[test]
fn absent_node_makes_its_device_unhealthy() {
    let (root, cdi) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let parts = machine(root.path());
    let devices: [(&str, &[&str]); 2] = [("0", &["dri/card0"]), ("1", &["dri/card1"])];
    fs::write(cdi.path().join("a.json"), spec("v.com/gpu", &devices)).unwrap();
    let settings = settings(cdi.path());
    let (specs, looked) = look_again(&parts, &settings, &ReadSpecs::default());
    assert_eq!(
        health(&looked),
        ["v.com/gpu/0: healthy", "v.com/gpu/1: unhealthy"]
    );
    fs::write(root.path().join("dev/dri/card1"), "character 226:1").unwrap();
    let looked = look(&parts, &settings, &specs).unwrap();
    assert_eq!(
        health(&looked),
        ["v.com/gpu/0: healthy", "v.com/gpu/1: healthy"]
    );
}

#[test]
fn malformed_spec_keeps_its_devices_unhealthy() {
    let (root, cdi) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (parts, settings) = (machine(root.path()), settings(cdi.path()));
    let (a, b) = (cdi.path().join("a.json"), cdi.path().join("b.json"));
    fs::write(&a, spec("v.com/gpu", &[("0", &["dri/card0"])])).unwrap();
    fs::write(&b, spec("w.com/port", &[("0", &["ttyUSB0"])])).unwrap();
    let (specs, _) = look_again(&parts, &settings, &ReadSpecs::default());
    fs::write(&a, "{").unwrap();
    let (specs, second) = look_again(&parts, &settings, &specs);
    assert_eq!(
        health(&second),
        ["v.com/gpu/0: unhealthy", "w.com/port/0: healthy"]
    );
    let problem = &second.problems[&a.display().to_string()];
    assert_eq!(problem.code, ProblemCode::CdiSpecInvalid);
    assert!(problem.message.contains("a.json is not used"), "{problem}");
    // A directory that cannot be read hides nothing, and one that is gone has no specs.
    let moved = root.path().join("moved");
    fs::rename(cdi.path(), &moved).unwrap();
    fs::write(cdi.path(), "").unwrap();
    let (specs, third) = look_again(&parts, &settings, &specs);
    assert_eq!(health(&third), health(&second));
    assert_eq!(third.problems.len(), 1);
    fs::remove_file(cdi.path()).unwrap();
    let (specs, fourth) = look_again(&parts, &settings, &specs);
    assert_eq!((health(&fourth).len(), fourth.problems.len()), (0, 0));
    fs::rename(&moved, cdi.path()).unwrap();
    let (_, fifth) = look_again(&parts, &settings, &specs);
    assert_eq!(health(&fifth), ["w.com/port/0: healthy"]);
    assert!(
        fifth
            .published
            .health
            .values()
            .all(|of| of.state == HealthState::Healthy)
    );
}
