//! Versions and validity.

use proptest::prelude::*;

use nodedock_model::{CdiVersion, DeviceNode, Hook, IntelRdt, Mount, NetDevice};

use super::*;

fn valid() -> Spec {
    let container_edits = Edits {
        env: vec![("A".to_owned(), "1".to_owned())],
        ..Edits::default()
    };
    Spec {
        cdi_version: "1.1.0".to_owned(),
        kind: "vendor.com/class".to_owned(),
        devices: vec![Device {
            name: "dev0".to_owned(),
            container_edits,
        }],
        ..Spec::default()
    }
}

fn edits(spec: &mut Spec) -> &mut Edits {
    &mut spec.devices[0].container_edits
}

fn node(spec: &mut Spec, change: impl FnOnce(&mut DeviceNode)) {
    let mut node = DeviceNode::at("/dev/a");
    change(&mut node);
    edits(spec).device_nodes.push(node);
}

fn mount(spec: &mut Spec, host_path: &str, container_path: &str, fs_type: Option<&str>) {
    edits(spec).mounts.push(Mount {
        host_path: host_path.to_owned(),
        container_path: container_path.to_owned(),
        fs_type: fs_type.map(str::to_owned),
        options: Vec::new(),
    });
}

fn nets(spec: &mut Spec, names: &[(&str, &str)]) {
    let device = |(a, b): &(&str, &str)| NetDevice {
        host_interface: (*a).into(),
        container_interface: (*b).into(),
    };
    edits(spec).net_devices = names.iter().map(device).collect();
}

fn rdt(spec: &mut Spec) -> &mut IntelRdt {
    spec.container_edits.intel_rdt.get_or_insert_default()
}

type Feature = (&'static str, fn(&mut Spec), CdiVersion);

/// Each feature: how it changes a spec, and the version that brought it.
const FEATURES: [Feature; 10] = [
    ("device node", |s| node(s, |_| {}), CdiVersion::V0_3_0),
    ("mount", |s| mount(s, "/a", "/b", None), CdiVersion::V0_3_0),
    (
        "mount type",
        |s| mount(s, "/a", "/b", Some("bind")),
        CdiVersion::V0_4_0,
    ),
    (
        "digit first",
        |s| s.devices[0].name = "0dev".to_owned(),
        CdiVersion::V0_5_0,
    ),
    (
        "host path",
        |s| node(s, |n| n.host_path = Some("/x".to_owned())),
        CdiVersion::V0_5_0,
    ),
    (
        "gids",
        |s| s.container_edits.additional_gids.push(1),
        CdiVersion::V0_7_0,
    ),
    ("rdt", |s| _ = rdt(s), CdiVersion::V0_7_0),
    (
        "net device",
        |s| nets(s, &[("eth0", "net0")]),
        CdiVersion::V1_1_0,
    ),
    (
        "monitoring",
        |s| rdt(s).enable_monitoring = true,
        CdiVersion::V1_1_0,
    ),
    (
        "schemata",
        |s| rdt(s).schemata = vec!["L3:0=f".to_owned()],
        CdiVersion::V1_1_0,
    ),
];

proptest! {
    #[test]
    fn spec_requires_highest_used_version(chosen in any::<[bool; FEATURES.len()]>()) {
        let (mut spec, mut needed) = (valid(), CdiVersion::V0_3_0);
        for ((name, change, version), _) in FEATURES.into_iter().zip(chosen).filter(|(_, chosen)| *chosen) {
            change(&mut spec);
            needed = needed.max(version);
            prop_assert!(spec.required_version() >= version, "{}", name);
        }
        prop_assert_eq!(spec.required_version(), needed);
        prop_assert_eq!(validate(&spec), Ok(()));
    }

    /// Any answer of a driver makes either no file, or a file that libraries accept, with a name for each device.
    #[test]
    fn what_is_rendered_is_valid(
        uid in "[a-z0-9]([a-z0-9._-]{0,20}[a-z0-9])?",
        devices in proptest::collection::vec(("[a-z]{1,3}", "[a-z0-9]([a-z0-9-]{0,5}[a-z0-9])?", ".{0,4}", ".{0,12}"), 1..6),
        version in ".{0,20}",
    ) {
        let devices: Vec<_> = devices
            .iter()
            .map(|(pool, name, key, value)| {
                let edits = if key.is_empty() { Edits::default() } else { with_env(key, value) };
                device(pool, name, edits)
            })
            .collect();
        let count = devices.len();
        let mut record = claim_with_uid(&uid, PreparedClaim { devices, ..PreparedClaim::default() });
        record.drivers.get_mut(&driver()).unwrap().by.as_mut().unwrap().version = version;
        if let Ok(Some(file)) = render_driver(&record, &driver()) {
            let text = String::from_utf8(file.bytes).unwrap();
            let spec: Spec = serde_saphyr::from_str(&text).unwrap();
            prop_assert_eq!(validate(&spec), Ok(()));
            prop_assert_eq!(spec.cdi_version.as_str(), spec.required_version().as_str());
            let names: Vec<_> = spec.devices.iter().map(|d| format!("{}={}", spec.kind, d.name)).collect();
            let given: Vec<_> = cdi_devices(&record, &driver()).into_iter().flat_map(|(_, names)| names).collect();
            prop_assert_eq!(names.len(), count);
            prop_assert_eq!(names, given);
        }
    }
}

#[test]
fn what_libraries_refuse_is_refused() {
    fn hook(spec: &mut Spec, name: &str, path: &str, env: &str) {
        let hook = Hook {
            stage: name.into(),
            path: path.into(),
            args: Vec::new(),
            env: vec![(env.into(), "1".into())],
            timeout_seconds: None,
        };
        edits(spec).hooks.push(hook);
    }
    fn clos(spec: &mut Spec, id: &str) {
        rdt(spec).clos_id = Some(id.to_owned());
    }
    let long = "x".repeat(4096);
    type Change<'a> = &'a dyn Fn(&mut Spec);
    let bad: &[(&str, Change<'_>)] = &[
        ("kind", &|s| s.kind = "vendor.com".to_owned()),
        ("kind", &|s| s.kind = "vendor.com/a/b".to_owned()),
        ("kind", &|s| s.kind = "0vendor/a".to_owned()),
        ("kind", &|s| s.kind = "vendor/a-".to_owned()),
        ("kind", &|s| s.kind = "ven dor/a".to_owned()),
        ("device name", &|s| s.devices[0].name = String::new()),
        ("device name", &|s| s.devices[0].name = "-a".to_owned()),
        ("device name", &|s| s.devices[0].name = "a:".to_owned()),
        ("device name", &|s| s.devices[0].name = "a=b".to_owned()),
        ("twice", &|s| s.devices.push(s.devices[0].clone())),
        ("no devices", &|s| s.devices.clear()),
        ("no edits", &|s| {
            s.devices[0].container_edits = Edits::default()
        }),
        ("no name", &|s| {
            edits(s).env.push((String::new(), "A".to_owned()))
        }),
        ("no name", &|s| {
            s.container_edits.env.push(("=".to_owned(), "A".to_owned()))
        }),
        ("no path", &|s| node(s, |n| n.path.clear())),
        ("permissions", &|s| {
            node(s, |n| n.permissions = "rx".to_owned())
        }),
        ("mount", &|s| mount(s, "/a", "", None)),
        ("mount", &|s| mount(s, "", "/a", None)),
        ("hook name", &|s| hook(s, "prestop", "/a", "A")),
        ("no path", &|s| hook(s, "prestart", "", "A")),
        ("no name", &|s| hook(s, "prestart", "/a", "")),
        ("closID", &|s| clos(s, "..")),
        ("closID", &|s| clos(s, ".")),
        ("closID", &|s| clos(s, "a/b")),
        ("closID", &|s| clos(s, &long)),
        ("network device", &|s| nets(s, &[("", "a")])),
        ("network device", &|s| nets(s, &[("a", "")])),
        ("network device", &|s| nets(s, &[("a", "b"), ("a", "c")])),
        ("network device", &|s| nets(s, &[("a", "b"), ("c", "b")])),
    ];
    for (word, change) in bad {
        let mut spec = valid();
        change(&mut spec);
        let error = validate(&spec).expect_err(word).to_string();
        assert!(error.contains(word), "{word}: {error}");
    }
    let good: &[Change<'_>] = &[
        &|s| node(s, |n| n.permissions.clear()),
        &|s| s.devices[0].name = "0a:b_c.d-e".to_owned(),
        &|s| edits(s).env.push(("A".to_owned(), String::new())),
        &|s| clos(s, &long[..4095]),
        &|s| hook(s, "poststop", "/a", "A"),
    ];
    for change in good {
        let mut spec = valid();
        change(&mut spec);
        assert_eq!(validate(&spec), Ok(()));
    }
}
