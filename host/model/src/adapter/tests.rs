use proptest::prelude::*;

use super::*;

const SRIOV: &str = "\
apiVersion: nodedock.dev/v1
kind: DevicePluginAdapter
resource: intel.com/sriov
driver: sriov.example.com
pool: functions
devices:
  - match: '(?<address>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\\.[0-7])'
    identity: pci:${address}
    attributes:
      vendor: { sysfs: 'bus/pci/devices/${address}/vendor' }
      numVfs: { sysfs: 'bus/pci/devices/${address}/sriov_numvfs', type: int }
      bus: { value: pci }
  - match: '.*'
    attributes:
      bus: { value: other }
";

fn listed(ids: &[&str]) -> BTreeMap<String, PluginDevice> {
    let device = |id: &&str| PluginDevice {
        id: (*id).to_owned(),
        healthy: true,
        numa_nodes: vec![1],
    };
    ids.iter()
        .map(|id| ((*id).to_owned(), device(id)))
        .collect()
}

fn refusal(text: &str) -> String {
    Adapter::parse(text).unwrap_err().to_string()
}

#[test]
fn plugin_ids_round_trip_through_names() {
    let uuid = "GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5";
    let ids = [
        "gpu-0",
        "0",
        "0000:3b:00.0",
        uuid,
        &format!("{uuid}::3"),
        "/dev/ttyUSB0",
        "a--b",
        "-a",
        "x:",
        ":",
    ];
    let names: BTreeSet<_> = ids.iter().map(|id| device_name(id)).collect();
    assert_eq!(names.len(), ids.len());
    for id in ids {
        assert_eq!(
            device_id(&device_name(id)).as_deref(),
            Some(id),
            "{}",
            device_name(id)
        );
    }
    assert_eq!(device_name("gpu-0").as_str(), "gpu-0");
    assert_eq!(
        device_name("0000:3b:00.0").as_str(),
        "0000--3a3b--3a00--2e0"
    );
    assert_eq!(
        device_name("/dev/ttyUSB0").as_str(),
        "x--2fdev--2ftty--55--53--420"
    );
    assert_eq!(device_name("/dev/a").as_str(), "x--2fdev--2fa");
}

#[test]
fn overlong_id_is_named_by_hash() {
    let (one, other) = ("/a".repeat(40), "/b".repeat(40));
    let names = [device_name(&one), device_name(&other)];
    assert_ne!(names[0], names[1]);
    assert!(
        names
            .iter()
            .all(|name| name.as_str().starts_with("x---") && device_id(name).is_none())
    );
    assert_eq!(device_name(&one), names[0]);
}

proptest! {
    #[test]
    fn a_name_is_of_one_id(id in "\\PC{0,40}|[x:\\-a0A]{1,20}", other in "[x:\\-a0A]{1,20}") {
        let name = device_name(&id);
        match device_id(&name) {
            Some(decoded) => prop_assert_eq!(decoded, id.clone()),
            None => prop_assert!(name.as_str().starts_with("x---")),
        }
        prop_assert_eq!(name == device_name(&other), id == other);
    }

    #[test]
    fn decoded_labels_encode_to_themselves(label in "[a-z0-9]([a-z0-9\\-]{0,60}[a-z0-9])?") {
        let name = DeviceName::new(&label).unwrap();
        if let Some(id) = device_id(&name) {
            prop_assert_eq!(device_name(&id), name);
        }
    }
}

#[test]
fn rules_add_attributes_by_device_id() {
    let adapter = Adapter::parse(SRIOV).unwrap();
    assert!(adapter.enabled && adapter.pool.as_str() == "functions");
    let read = |path: &str| match path {
        "bus/pci/devices/0000:3b:02.1/vendor" => Ok(Some("0x8086\n".to_owned())),
        "bus/pci/devices/0000:3b:02.1/sriov_numvfs" => Ok(Some("many".to_owned())),
        _ => Ok::<_, ()>(None),
    };
    let listed = listed(&["0000:3b:02.1", "other"]);
    assert_eq!(
        adapter.devices(&listed, |_| Err("no memory")),
        Err("no memory")
    );
    let devices = adapter.devices(&listed, read).unwrap();
    let facts = |id: &str| {
        let device = &devices[&device_name(id)];
        let attributes: Vec<_> = device
            .attributes
            .iter()
            .map(|(name, value)| (name.to_string(), value.clone()))
            .collect();
        (
            device.identity.clone(),
            attributes,
            device.numa_nodes.clone(),
        )
    };
    let text = |name: &str, value: &str| (name.to_owned(), AttributeValue::Text(value.to_owned()));
    let (identity, attributes, nodes) = facts("0000:3b:02.1");
    assert_eq!(
        (identity, nodes),
        (vec!["pci:0000:3b:02.1".to_owned()], vec![1])
    );
    // The first rule that names an attribute counts; a number that is none is left out.
    let expected = [
        text("bus", "pci"),
        text(DEVICE_ID_ATTRIBUTE, "0000:3b:02.1"),
        text("vendor", "0x8086"),
    ];
    assert_eq!(attributes, expected);
    let (identity, attributes, _) = facts("other");
    assert!(identity.is_empty());
    assert_eq!(
        attributes,
        [text("bus", "other"), text(DEVICE_ID_ATTRIBUTE, "other")]
    );
}

#[test]
fn errors_name_line_and_column() {
    assert!(refusal("kind: DevicePluginAdapter").contains("missing field"));
    let changed = |from: &str, to: &str| refusal(&SRIOV.replace(from, to));
    for (from, to, wanted) in [
        (
            "kind: DevicePluginAdapter",
            "kind: DriverGrant",
            "line 2, column 7: kind is \"DriverGrant\"",
        ),
        ("apiVersion: nodedock.dev/v1\n", "", "apiVersion is missing"),
        ("intel.com/sriov", "cpu", "line 3, column 11"),
        ("sriov.example.com", "sriov_a", "line 4"),
        ("pool: functions", "pool: '-'", "line 5"),
        ("[0-7])", "[0-7", "is not a regular expression"),
        // It would end the group that has it match the whole ID.
        ("[0-7])", "[0-7]))|(?:.*", "is not a regular expression"),
        (
            "pci:${address}",
            "pci:${adress}",
            "identity: match has no group \"adress\"",
        ),
        ("pci:${address}", "pci:$2", "match has no group \"2\""),
        ("vendor: {", "ven-dor: {", "attributes"),
        (
            "{ value: pci }",
            "{ value: pci, sysfs: a }",
            "bus has either a value or a file",
        ),
        (
            "'bus/pci/devices/${address}/vendor'",
            "/sys/a",
            "sysfs is relative to /sys",
        ),
        ("type: int", "type: float", "float"),
        ("pool:", "pol:", "unknown field"),
        (
            "pool:",
            "paths: [dev/a]\npool:",
            "line 5, column 9: paths: \"dev/a\" must be absolute",
        ),
        ("pool:", "paths: ['/dev/[a']\npool:", "paths: \"/dev/[a\""),
    ] {
        let found = changed(from, to);
        assert!(found.contains(wanted), "{to}: {found}");
    }
    assert!(refusal(&"#".repeat(300 << 10)).contains("bytes, at most"));
    let many = format!("{SRIOV}{}", "  - { identity: a }\n".repeat(RULES_MAX));
    assert!(refusal(&many).contains("devices has more than 32 entries"));
    assert!(
        changed(
            "    identity: pci:${address}\n    attributes:",
            "    attribute:"
        )
        .contains("attribute")
    );
}

#[test]
fn config_entry_needs_no_kind() {
    let entry = "{ resource: example.com/thing, driver: thing.example.com, enabled: false }";
    let adapter: Adapter = serde_saphyr::from_str(entry).unwrap();
    assert_eq!(
        (adapter.pool.as_str(), adapter.enabled, adapter.rules.len()),
        ("devices", false, 0)
    );
    assert_eq!(adapter.paths, None);
    let bounded = Adapter::parse(&format!("{SRIOV}paths: ['/dev/vfio/*']\n"))
        .unwrap()
        .paths
        .unwrap();
    assert!(bounded.matches("/dev/vfio/9") && !bounded.matches("/dev/mem"));
    assert!(serde_saphyr::from_str::<Adapter>("{ resource: cpu, driver: a.b }").is_err());
}

#[test]
fn plugin_drivers_have_unique_resource_names() {
    let of = |resource: &str| plugin_driver(&ExtendedResource::new(resource).unwrap()).to_string();
    assert_eq!(of("nvidia.com/gpu"), "gpu.nvidia.com.plugin.nodedock.dev");
    let long = format!("example.com/{}", "x".repeat(60));
    let odd = [
        "example.com/GPU",
        "example.com/gpu",
        "example.com/g_pu",
        "example.com/g.pu",
        &long,
    ];
    let names: BTreeSet<_> = odd.iter().map(|resource| of(resource)).collect();
    assert_eq!(names.len(), odd.len(), "{names:?}");
    for name in names {
        assert!(
            name.len() <= 63 && is_plugin_driver(&name.parse().unwrap()),
            "{name}"
        );
    }
    for name in [
        "gpu.nvidia.com",
        "plugin.nodedock.dev.example.com",
        "myplugin.nodedock.dev",
    ] {
        assert!(!is_plugin_driver(&name.parse().unwrap()), "{name}");
    }
}
