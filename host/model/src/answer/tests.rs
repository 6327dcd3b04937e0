// Answers that are accepted come through the conversions of `nodedock-wasm` and of the SDK, and their tests.
use super::*;
use crate::check::Findings;
use crate::limit::{
    LEFT_OUT_MAX, LEFT_OUT_NAME_BYTES_MAX, LEFT_OUT_REASON_BYTES_MAX, MEMO_BYTES_MAX,
};
use crate::{Condition, DeviceNode, DriverName, NetDevice, NetworkData};

fn driver() -> DriverName {
    DriverName::new("gpu.example.com").unwrap()
}

fn device(name: &str) -> Device {
    Device {
        name: name.into(),
        ..Device::default()
    }
}

fn pool(devices: Vec<Device>) -> Pool {
    Pool {
        name: "pool".into(),
        devices,
        ..Pool::default()
    }
}

fn pair(key: &str, value: &str) -> (String, String) {
    (key.into(), value.into())
}

fn text(text: &str) -> UnparsedValue {
    UnparsedValue::Text(text.into())
}

fn capacity(value: &str) -> (String, Capacity) {
    let value = value.into();
    let policy = None;
    ("memory".into(), Capacity { value, policy })
}

fn set(name: &str, counters: &[(&str, &str)]) -> CounterSet {
    CounterSet {
        name: name.into(),
        counters: counters
            .iter()
            .map(|(key, value)| pair(key, value))
            .collect(),
    }
}

fn converted(pool: Pool) -> Result<crate::Inventory, Findings> {
    inventory(Some(&driver()), Inventory { pools: vec![pool] })
}

fn refusal_of_pool(pool: Pool) -> String {
    converted(pool).unwrap_err().to_string()
}

fn refusal(change: impl FnOnce(&mut Device)) -> String {
    let mut device = device("gpu-0");
    change(&mut device);
    refusal_of_pool(pool(vec![device]))
}

#[test]
fn a_refusal_names_its_place() {
    let text = refusal(|gpu| gpu.attributes = vec![("model".into(), text(&"x".repeat(65)))]);
    assert_eq!(
        text,
        "pool pool: device gpu-0: attribute model: text has 65 bytes, at most 64 are allowed"
    );
}

#[test]
fn every_violation_is_found() {
    let mut bad = device("gpu-0");
    bad.attributes = vec![
        ("a-b".into(), text("x")),
        ("c".into(), UnparsedValue::Version("1".into())),
    ];
    bad.numa_nodes = vec![1024];
    let found: Vec<_> = converted(pool(vec![bad, device("GPU"), device("gpu-0")]))
        .unwrap_err()
        .into_iter()
        .map(|violation| violation.to_string())
        .collect();
    let parts = [
        "attributes[0]: ",
        "attribute c: version",
        "numa-nodes[0]",
        "devices[1]: ",
        "twice",
    ];
    assert_eq!(found.len(), parts.len(), "{found:#?}");
    for (line, part) in found.iter().zip(parts) {
        assert!(line.contains(part), "{part}: {line}");
    }
}

// The hostile drivers of `nodedock-wasm` reach the other bounds.
#[test]
fn devices_beyond_the_bounds_are_refused() {
    type Change = fn(&mut Device);
    let cases: [(Change, &str); 16] = [
        (|gpu| gpu.name = "a_b".into(), "device name \"a_b\""),
        (
            |gpu| gpu.attributes = vec![("0a".into(), text("x"))],
            "attribute or capacity name \"0a\"",
        ),
        (
            |gpu| gpu.attributes = vec![("a".into(), UnparsedValue::Texts(Vec::new()))],
            "empty list",
        ),
        (
            |gpu| gpu.attributes = vec![("a".into(), text("x")); 33],
            "33 attributes and capacities",
        ),
        (
            |gpu| {
                gpu.attributes = vec![
                    ("a".into(), text("x")),
                    ("gpu.example.com/a".into(), text("x")),
                ]
            },
            "attributes[1]: \"gpu.example.com/a\" occurs twice",
        ),
        (
            |gpu| gpu.attributes = vec![("a".into(), UnparsedValue::Ints(vec![1; 49]))],
            "49 attribute values",
        ),
        (
            |gpu| gpu.attributes = vec![("a".into(), text("\u{1b}[0m"))],
            "control character",
        ),
        (
            |gpu| gpu.capacities = vec![capacity("80 Gi")],
            "not a quantity",
        ),
        (
            |gpu| gpu.capacities = vec![capacity("1"), capacity("2")],
            "occurs twice",
        ),
        (
            |gpu| gpu.identity = vec![String::new()],
            "identity[0] is empty",
        ),
        (
            |gpu| gpu.identity = vec!["node:x".into()],
            "host's own keys",
        ),
        (|gpu| gpu.identity = vec!["a".into(); 17], "17 identity"),
        (|gpu| gpu.numa_nodes = vec![0; 65], "65 numa-nodes"),
        (
            |gpu| gpu.annotations = vec![pair("a", &"x".repeat(1025))],
            "1025 bytes",
        ),
        (
            |gpu| gpu.annotations = vec![pair("a", "1"), pair("a", "2")],
            "occurs twice",
        ),
        (
            |gpu| gpu.consumes = vec![set("c", &[("x", "1")])],
            "which the pool does not have",
        ),
    ];
    for (change, expected) in cases {
        let text = refusal(change);
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn pools_beyond_the_bounds_are_refused() {
    type Change = fn(&mut Pool);
    let cases: [(Change, &str); 6] = [
        (
            |pool| pool.shared_counters = vec![set("a", &[("x", "1"), ("x", "2")])],
            "counters[1]: \"x\" occurs twice",
        ),
        (
            |pool| pool.shared_counters = vec![set("a", &[("x", "1")]), set("a", &[("x", "1")])],
            "shared-counters[1]: \"a\" occurs twice",
        ),
        (
            |pool| pool.shared_counters = vec![set("a", &[])],
            "shared-counters[0]: counters is empty",
        ),
        (
            |pool| pool.extended_resource = Some("cpu".into()),
            "extended resource \"cpu\"",
        ),
        (
            |pool| pool.annotations = vec![pair(crate::CONTROL_NODES, "/etc/x")],
            "no path below /dev",
        ),
        (
            |pool| pool.devices = vec![device("d"), device("d")],
            "devices[1]: \"d\" occurs twice",
        ),
    ];
    for (change, expected) in cases {
        let mut pool = pool(Vec::new());
        change(&mut pool);
        let text = refusal_of_pool(pool);
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let twice = Inventory {
        pools: vec![pool(Vec::new()), pool(Vec::new())],
    };
    assert_eq!(
        inventory(None, twice).unwrap_err().to_string(),
        "pools[1]: \"pool\" occurs twice"
    );
}

fn prepared() -> PreparedClaim {
    PreparedClaim {
        devices: vec![PreparedDevice {
            requests: vec!["gpu".into()],
            pool: "pool".into(),
            device: "gpu-0".into(),
            ..PreparedDevice::default()
        }],
        memo: vec![1],
        ..PreparedClaim::default()
    }
}

fn refusal_of_claim(change: impl FnOnce(&mut PreparedClaim)) -> String {
    let mut answer = prepared();
    change(&mut answer);
    prepared_claim(Some(&driver()), answer)
        .unwrap_err()
        .to_string()
}

#[test]
fn claims_beyond_the_bounds_are_refused() {
    type Change = fn(&mut PreparedClaim);
    let cases: [(Change, &str); 6] = [
        (
            |claim| claim.memo = vec![0; MEMO_BYTES_MAX + 1],
            "memo has 65537 bytes",
        ),
        (
            |claim| claim.devices = vec![claim.devices[0].clone(); 33],
            "33 devices",
        ),
        (
            |claim| claim.devices = vec![claim.devices[0].clone(); 2],
            "occurs twice",
        ),
        (|claim| claim.devices[0].pool = "../x".into(), "pool name"),
        (
            |claim| claim.annotations = vec![pair("a b", "")],
            "not the name of an annotation",
        ),
        (
            |claim| claim.annotations = vec![pair("cdi.k8s.io/x", "")],
            "by edits only",
        ),
    ];
    for (change, expected) in cases {
        let text = refusal_of_claim(change);
        assert!(text.contains(expected), "{expected}: {text}");
    }
    assert_eq!(prepared_claim(None, prepared()).unwrap().memo, [1]);
}

#[test]
fn invalid_edits_are_refused() {
    let node = |change: fn(&mut DeviceNode)| {
        let mut node = DeviceNode::at("/dev/x");
        change(&mut node);
        Edits {
            device_nodes: vec![node],
            ..Edits::default()
        }
    };
    let net = |names: &[(&str, &str)]| {
        let device = |(host, container): &(&str, &str)| NetDevice {
            host_interface: (*host).into(),
            container_interface: (*container).into(),
        };
        Edits {
            net_devices: names.iter().map(device).collect(),
            ..Edits::default()
        }
    };
    let env = |name: &str, value: &str| Edits {
        env: vec![pair(name, value)],
        ..Edits::default()
    };
    for (edits, expected) in [
        (env("", ""), "is not the name"),
        (
            env("A", "1\n2"),
            "env[0]: value A \"1\\n2\" contains a control character",
        ),
        (
            node(|node| node.path = "dev/x".into()),
            "not an absolute, plain path",
        ),
        (
            node(|node| node.host_path = Some("/dev/../x".into())),
            "host-path",
        ),
        (
            node(|node| node.permissions.clear()),
            "none of read, write and mknod",
        ),
        (
            node(|node| node.file_mode = Some(0o4777)),
            "\"4777\" has more than permissions",
        ),
        (
            net(&[("a-name-that-is-too-long", "net1")]),
            "name of a network interface",
        ),
        (
            net(&[("eth0", "net1"), ("eth0", "net2")]),
            "\"eth0\" occurs twice",
        ),
        (
            net(&[("eth0", "net1"), ("eth1", "net1")]),
            "\"net1\" occurs twice",
        ),
        (
            Edits {
                additional_gids: vec![1; 65],
                ..Edits::default()
            },
            "65 additional-gids",
        ),
    ] {
        let text = refusal_of_claim(|claim| claim.edits = edits);
        assert!(
            text.starts_with("edits: ") && text.contains(expected),
            "{expected}: {text}"
        );
    }
}

#[test]
fn a_status_fits_the_api() {
    let network = |ips: &[&str]| DeviceStatus {
        status: crate::DeviceStatus {
            network: Some(NetworkData {
                interface_name: "net1".into(),
                ips: ips.iter().map(|ip| (*ip).to_owned()).collect(),
                hardware_address: "02:00:00:00:00:01".into(),
            }),
            ..crate::DeviceStatus::default()
        },
        attributes: Vec::new(),
    };
    let data = |data: &str| DeviceStatus {
        status: crate::DeviceStatus {
            data: Some(data.into()),
            ..crate::DeviceStatus::default()
        },
        attributes: Vec::new(),
    };
    let conditions = |kinds: &[&str]| {
        let condition = |kind: &&str| Condition {
            kind: (*kind).into(),
            status: None,
            reason: "link up".into(),
            message: String::new(),
        };
        DeviceStatus {
            status: crate::DeviceStatus {
                conditions: kinds.iter().map(condition).collect(),
                ..crate::DeviceStatus::default()
            },
            attributes: Vec::new(),
        }
    };
    let with = |names: &[&str]| DeviceStatus {
        attributes: names
            .iter()
            .map(|name| ((*name).into(), text("x")))
            .collect(),
        ..DeviceStatus::default()
    };
    for good in [
        network(&["192.0.2.1/24", "2001:DB8::1/064"]),
        data("{\"a\": 1}"),
        conditions(&["Ready", "example.com/attached"]),
        with(&["firmware"]),
    ] {
        let mut claim = prepared();
        claim.devices[0].status = Some(good);
        prepared_claim(Some(&driver()), claim).unwrap();
    }
    for (bad, expected) in [
        (
            with(&["a", "gpu.example.com/a"]),
            "gpu.example.com/a\" occurs twice",
        ),
        (with(&["no name"]), "attribute or capacity name"),
        (with(&["a"; 33]), "33 attributes, at most 32"),
        (data("[1]"), "not a JSON object"),
        (
            data(&format!("{{\"a\": \"{}\"}}", "x".repeat(10 << 10))),
            "data has",
        ),
        (network(&["192.0.2.1"]), "192.0.2.1/24"),
        (network(&["192.0.2.1/33"]), "192.0.2.1/24"),
        (network(&["::ffff:192.0.2.1/120"]), "192.0.2.1/24"),
        (conditions(&["not ready"]), "no qualified name"),
        (conditions(&[""]), "no qualified name"),
        (
            conditions(&["Ready", "Ready"]),
            "conditions[1]: \"Ready\" occurs twice",
        ),
        (conditions(&["A"; 9]), "9 conditions, at most 8"),
    ] {
        let text = refusal_of_claim(|claim| claim.devices[0].status = Some(bad));
        assert!(
            text.contains("status: ") && text.contains(expected),
            "{expected}: {text}"
        );
    }
}

#[test]
fn health_is_of_devices_and_bounded() {
    let health_of = |device: &str, message: &str| Health {
        pool: "pool".into(),
        device: device.into(),
        health: DeviceHealth {
            message: message.into(),
            ..DeviceHealth::default()
        },
    };
    let good = health(vec![health_of("a", "hot"), health_of("b", "")]);
    assert_eq!(good.unwrap().len(), 2);
    for (bad, expected) in [
        (vec![health_of("a", &"x".repeat(1025))], "1025 bytes"),
        (
            vec![health_of("a", ""), health_of("a", "")],
            "\"pool/a\" occurs twice",
        ),
        (vec![health_of("A", "")], "device name"),
    ] {
        let text = health(bad).unwrap_err().to_string();
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn readings_are_named_finite_and_bounded() {
    let of = |device: &str, readings: &[(&str, f64)]| DeviceReadings {
        pool: "pool".into(),
        device: device.into(),
        readings: readings
            .iter()
            .map(|(name, value)| ((*name).to_owned(), *value))
            .collect(),
    };
    let good = readings(vec![
        of("a", &[("temperature_celsius", 65.5), ("errors", 0.0)]),
        of("b", &[]),
    ]);
    let good = good.unwrap();
    let keys: Vec<_> = good.values().map(|readings| readings.len()).collect();
    assert_eq!(keys, [2, 0]);
    let many: Vec<String> = (0..33).map(|n| format!("r{n}")).collect();
    let many: Vec<_> = many.iter().map(|name| (name.as_str(), 0.0)).collect();
    let devices: Vec<String> = (0..129).map(|n| format!("d{n}")).collect();
    for (bad, expected) in [
        (vec![of("a", &[("Temperature", 1.0)])], "snake case"),
        (vec![of("a", &[("1st", 1.0)])], "snake case"),
        (vec![of("a", &[("", 1.0)])], "snake case"),
        (vec![of("a", &[(&"x".repeat(65), 1.0)])], "snake case"),
        (vec![of("a", &[("power_watts", f64::NAN)])], "is not finite"),
        (
            vec![of("a", &[("power_watts", f64::INFINITY)])],
            "devices[0]: readings[0]: value",
        ),
        (
            vec![of("a", &[("x", 1.0), ("x", 2.0)])],
            "\"x\" occurs twice",
        ),
        (vec![of("a", &[]), of("a", &[])], "\"pool/a\" occurs twice"),
        (vec![of("A", &[])], "device name"),
        (vec![of("a", &many)], "33"),
        (
            devices
                .iter()
                .map(|device| of(device, &many[..32]))
                .collect(),
            "4128",
        ),
    ] {
        let text = readings(bad).unwrap_err().to_string();
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn left_out_devices_are_bounded_lines() {
    let of = |name: &str, reason: &str| LeftOutDevice::new(name, reason);
    let many = |count: usize| (0..count).map(|n| of(&format!("tty{n:04}"), "a console"));
    let good = left_out(vec![of("b", "too old"), of("a", "in use")]).unwrap();
    assert_eq!(good.devices(), [of("a", "in use"), of("b", "too old")]);
    let all = left_out(many(LEFT_OUT_MAX).collect()).unwrap();
    assert_eq!(all.count(), LEFT_OUT_MAX);
    let shown = all.devices();
    assert_eq!((shown.len(), &*shown[255].name), (256, "tty0255"));
    assert_eq!(left_out(Vec::new()).unwrap(), crate::LeftOut::default());

    let longest = "x".repeat(LEFT_OUT_REASON_BYTES_MAX);
    left_out(vec![of(&longest[..LEFT_OUT_NAME_BYTES_MAX], &longest)]).unwrap();
    let long = format!("{longest}x");
    for (bad, expected) in [
        (vec![of("", "why")], "devices[0]: name is empty"),
        (vec![of("a", "")], "devices[0]: reason is empty"),
        (vec![of(&long[..254], "why")], "name has 254 bytes"),
        (vec![of("a", &long)], "reason has 1025 bytes"),
        (vec![of("a\nb", "why")], "control character"),
        (vec![of("a", "b\u{1b}[2J")], "control character"),
        (vec![of("a", "x"), of("a", "y")], "\"a\" occurs twice"),
        (many(LEFT_OUT_MAX + 1).collect(), "4097 devices"),
    ] {
        let text = left_out(bad).unwrap_err().to_string();
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn descriptions_have_names_and_versions() {
    let capabilities = crate::grant::Capabilities::default();
    let check = |name: &str, version: &str| {
        description(&Description {
            name,
            version,
            summary: "",
            capabilities: &capabilities,
            event_subsystems: &[],
            annotations: &Labels::new(),
        })
    };
    assert_eq!(check("gpu.example.com", "1.0.0"), Ok(driver()));
    for (name, version, expected) in [
        ("3gpu.example.com", "1.0.0", "begins with a digit"),
        ("gpu_a", "1.0.0", "driver name"),
        ("gpu.example.com", "1", "not a semantic version"),
        ("gpu.example.com", &"1".repeat(65), "65 bytes"),
    ] {
        let text = check(name, version).unwrap_err().to_string();
        assert!(text.contains(expected), "{expected}: {text}");
    }
}

#[test]
fn problems_have_codes_and_messages() {
    assert_eq!(problem("no-such-profile", "a", &Labels::new()), Ok(()));
    let found = problem("No such", "", &vec![pair("", "")]).unwrap_err();
    assert_eq!(found.into_iter().count(), 3);
}

/// An inventory of one pool with two devices, the second a partition.
fn partitions() -> crate::Inventory {
    let mut whole = device("gpu-0");
    whole.capacities = vec![capacity("80Gi")];
    let mut part = device("gpu-1");
    part.consumes = vec![set("gpu", &[("memory", "40Gi")])];
    part.attributes = vec![("profile".into(), text("half"))];
    let mut all = pool(vec![whole, part]);
    all.shared_counters = vec![set("gpu", &[("memory", "80Gi")])];
    converted(all).unwrap()
}

fn of_device(name: &str) -> DeviceScheduling {
    DeviceScheduling {
        pool: "pool".into(),
        device: name.into(),
        ..DeviceScheduling::default()
    }
}

fn of_pool() -> PoolScheduling {
    PoolScheduling {
        pool: "pool".into(),
        ..PoolScheduling::default()
    }
}

fn allocatable(resource: &str, mapping: Option<UnparsedMapping>) -> (String, UnparsedAllocatable) {
    let amounts = UnparsedAllocatable {
        mapping,
        ..UnparsedAllocatable::default()
    };
    (resource.into(), amounts)
}

fn of_capacity(capacity: &str) -> Option<UnparsedMapping> {
    Some(UnparsedMapping::PerCapacity {
        capacity: capacity.into(),
        multiplier: "1".into(),
    })
}

#[test]
fn unfit_additions_are_refused() {
    let device = |change: &dyn Fn(&mut DeviceScheduling)| {
        let mut added = of_device("gpu-1");
        change(&mut added);
        Additions {
            devices: vec![added],
            pools: Vec::new(),
        }
    };
    let pool = |change: &dyn Fn(&mut PoolScheduling)| {
        let mut added = of_pool();
        change(&mut added);
        Additions {
            devices: Vec::new(),
            pools: vec![added],
        }
    };
    let of_node = |resource: &'static str, mapping: Option<UnparsedMapping>| {
        device(&move |added| added.node_allocatable = vec![allocatable(resource, mapping.clone())])
    };
    let groups = |set: &'static str, groups: &'static [&str]| {
        device(&|added| {
            let groups = groups.iter().map(ToString::to_string).collect();
            added.compatibility = vec![(set.into(), groups)];
        })
    };
    let amount = |amount: &str| Some(UnparsedMapping::PerDevice(amount.into()));
    for (additions, expected) in [
        (
            device(&|added| added.device = "gpu-9".into()),
            "does not have it",
        ),
        (
            device(&|added| added.pool = "other".into()),
            "does not have it",
        ),
        (
            Additions {
                devices: vec![of_device("gpu-0"), of_device("gpu-0")],
                pools: Vec::new(),
            },
            "occurs twice",
        ),
        (
            device(&|added| added.binding.conditions = vec!["A".into(); 5]),
            "5 binding-conditions, at most 4",
        ),
        (
            device(&|added| added.binding.failures = vec![String::new()]),
            "\"\" is no type",
        ),
        (of_node("example.com/gpu", None), "hugepages-SIZE"),
        (of_node("cpu", None), "neither a mapping nor an overhead"),
        (of_node("cpu", amount("-1")), "not a quantity"),
        (of_node("cpu", amount("0")), "not positive"),
        (of_node("cpu", of_capacity("memory")), "no capacity memory"),
        (groups("other", &["a"]), "does not consume it"),
        (groups("gpu", &["a", "b", "c"]), "3 groups, at most 2"),
        (groups("gpu", &["a", "a"]), "occurs twice"),
        (groups("gpu", &["A b"]), "not a DNS label"),
        (
            pool(&|added| added.pool = "other".into()),
            "does not have it",
        ),
        (
            pool(&|added| added.partition_type_attribute = Some("type".into())),
            "no text attribute type",
        ),
        (
            pool(&|added| added.skips_prepare = true),
            "only together with unprepare",
        ),
    ] {
        let found = add_scheduling(Some(&driver()), &mut partitions(), additions).unwrap_err();
        let text = found.to_string();
        assert!(text.contains(expected), "{expected}: {text}");
    }
}
