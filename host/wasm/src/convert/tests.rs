use std::collections::BTreeMap;

use super::*;
use crate::bindings::exports::nodedock::driver::identity as guest_identity;
use crate::bindings::exports::nodedock::driver::scheduling as guest_scheduling;
use crate::bindings::nodedock::driver::inventory::CapacityRange;
use nodedock_model::limit::MEMO_BYTES_MAX;
use nodedock_model::{
    AllocatedDevice, DeviceAccess, DeviceName, DriverName, Inventory, ObjectRef, PoolName,
    ProblemCode, SkippedOperations,
};

fn driver() -> DriverName {
    DriverName::new("gpu.example.com").unwrap()
}

fn device(name: &str) -> types::Device {
    types::Device {
        name: name.into(),
        attributes: Vec::new(),
        capacities: Vec::new(),
        taints: Vec::new(),
        consumes: Vec::new(),
        allow_multiple_allocations: false,
        identity: Vec::new(),
        numa_nodes: Vec::new(),
        annotations: Vec::new(),
    }
}

fn pool(devices: Vec<types::Device>) -> types::Pool {
    types::Pool {
        name: "pool".into(),
        devices,
        shared_counters: Vec::new(),
        extended_resource: None,
        annotations: Vec::new(),
    }
}

fn attribute(name: &str, value: types::AttributeValue) -> types::Attribute {
    types::Attribute {
        name: name.into(),
        value,
    }
}

fn capacity(value: &str, policy: Option<types::CapacityPolicy>) -> types::Capacity {
    types::Capacity {
        name: "memory".into(),
        value: value.into(),
        policy,
    }
}

fn set(name: &str, counters: &[(&str, &str)]) -> types::CounterSet {
    let counter = |(name, value): &(&str, &str)| types::Counter {
        name: (*name).into(),
        value: (*value).into(),
    };
    types::CounterSet {
        name: name.into(),
        counters: counters.iter().map(counter).collect(),
    }
}

fn refusal_of_pool(pool: types::Pool) -> String {
    inventory(&driver(), types::Inventory { pools: vec![pool] })
        .unwrap_err()
        .to_string()
}

fn refusal(change: impl FnOnce(&mut types::Device)) -> String {
    let mut device = device("gpu-0");
    change(&mut device);
    refusal_of_pool(pool(vec![device]))
}

#[test]
fn a_whole_inventory_comes_through() {
    let mut gpu = device("gpu-0");
    gpu.attributes = vec![
        attribute("model", types::AttributeValue::Text("Z1".into())),
        attribute(
            "example.com/driver",
            types::AttributeValue::Version("1.2.3".into()),
        ),
        attribute("links", types::AttributeValue::Ints(vec![1, 2])),
    ];
    gpu.allow_multiple_allocations = true;
    let policy = types::CapacityPolicy {
        default_amount: Some("1Gi".into()),
        choice: types::CapacityChoice::Range(CapacityRange {
            min: "1Gi".into(),
            max: None,
            step: None,
        }),
    };
    gpu.capacities = vec![capacity("80Gi", Some(policy))];
    gpu.taints = vec![types::Taint {
        key: "example.com/hot".into(),
        value: String::new(),
        effect: types::TaintEffect::NoExecute,
    }];
    gpu.consumes = vec![set("slices", &[("memory", "10")])];
    gpu.identity = vec!["pci:0000:3b:00.0".into()];
    let mut pool = pool(vec![gpu]);
    pool.shared_counters = vec![set("slices", &[("memory", "80")])];
    pool.extended_resource = Some("example.com/gpu".into());
    let inventory = inventory(&driver(), types::Inventory { pools: vec![pool] }).unwrap();
    let (pool, gpu) = (
        PoolName::new("pool").unwrap(),
        DeviceName::new("gpu-0").unwrap(),
    );
    let gpu = inventory.device(&pool, &gpu).unwrap();
    assert_eq!(
        (gpu.attributes.len(), gpu.capacities.len(), gpu.taints.len()),
        (3, 1, 1)
    );
}

#[test]
fn a_refusal_says_where_it_is() {
    let text = refusal(|gpu| {
        gpu.attributes = vec![attribute(
            "model",
            types::AttributeValue::Text("x".repeat(65)),
        )]
    });
    assert_eq!(
        text,
        "pool pool: device gpu-0: attribute model: text has 65 bytes, at most 64 are allowed"
    );
}

fn asked() -> DriverClaim {
    DriverClaim {
        id: ObjectRef::new("default", "claim", "uid-1").unwrap(),
        devices: vec![AllocatedDevice {
            request: "gpu/big".into(),
            driver: driver(),
            pool: PoolName::new("pool").unwrap(),
            device: DeviceName::new("gpu-0").unwrap(),
            share_id: None,
            consumed: BTreeMap::new(),
            admin_access: false,
            binding: Default::default(),
        }],
        configs: Vec::new(),
        annotations: BTreeMap::new(),
        reserved_for: Vec::new(),
        progress: Vec::new(),
    }
}

fn pair(key: &str, value: &str) -> types::KeyValue {
    types::KeyValue {
        key: key.to_owned(),
        value: value.to_owned(),
    }
}

fn no_edits() -> types::ContainerEdits {
    types::ContainerEdits {
        env: Vec::new(),
        device_nodes: Vec::new(),
        mounts: Vec::new(),
        net_devices: Vec::new(),
        hooks: Vec::new(),
        additional_gids: Vec::new(),
        intel_rdt: None,
    }
}

fn answer() -> types::PreparedClaim {
    let device = types::PreparedDevice {
        requests: vec!["gpu".into()],
        pool: "pool".into(),
        device: "gpu-0".into(),
        share_id: None,
        edits: types::ContainerEdits {
            env: vec![pair("GPU", "0")],
            ..no_edits()
        },
        status: None,
    };
    types::PreparedClaim {
        devices: vec![device],
        edits: no_edits(),
        annotations: Vec::new(),
        memo: vec![1],
    }
}

fn refusal_of_claim(change: impl FnOnce(&mut types::PreparedClaim)) -> String {
    let mut answer = answer();
    change(&mut answer);
    prepared_claim(&driver(), &asked(), answer)
        .unwrap_err()
        .to_string()
}

#[test]
fn refusal_names_the_exceeded_limit() {
    let limit_of = |change: fn(&mut types::PreparedClaim)| {
        let mut answer = answer();
        change(&mut answer);
        prepared_claim(&driver(), &asked(), answer)
            .unwrap_err()
            .limit()
    };
    assert_eq!(
        limit_of(|claim| claim.memo = vec![0; MEMO_BYTES_MAX + 1]),
        Some(Limit::Memo)
    );
    assert_eq!(
        limit_of(|claim| claim.edits.env = vec![pair("A", ""); 65]),
        Some(Limit::AnswerEntries)
    );
    assert_eq!(
        limit_of(|claim| claim.edits.env = vec![pair("A", &"x".repeat(4097))]),
        Some(Limit::AnswerBytes)
    );
    assert_eq!(
        limit_of(|claim| claim.annotations = vec![pair("k", &"x".repeat(1025))]),
        Some(Limit::AnswerBytes)
    );
    assert_eq!(
        limit_of(|claim| claim.edits.env = vec![pair("a b", "1")]),
        None
    );
}

#[test]
fn a_prepared_claim_comes_through() {
    let prepared = prepared_claim(&driver(), &asked(), answer()).unwrap();
    assert_eq!(prepared.memo, [1]);
    assert!(
        matches!(&prepared.devices[0].access, DeviceAccess::Edits(edits) if edits.env.len() == 1)
    );
}

#[test]
fn device_is_not_prepared_for_subrequests() {
    let request = refusal_of_claim(|claim| claim.devices[0].requests = vec!["gpu/big".into()]);
    assert!(request.contains("(gpu)"), "{request}");
}

#[test]
fn description_is_checked_and_period_clamped() {
    let info = || guest_identity::DriverInfo {
        name: "gpu.example.com".into(),
        version: "1.0.0".into(),
        summary: "GPUs".into(),
        capabilities: guest_identity::Capabilities {
            sysfs_read: vec!["class/drm/*".into()],
            sysfs_write: Vec::new(),
            host_files: Vec::new(),
            pci_driver: Vec::new(),
            device_nodes: Vec::new(),
            mounts: Vec::new(),
            hooks: Vec::new(),
            env: Vec::new(),
            net_devices: Vec::new(),
        },
        limits: guest_identity::Limits {
            memory_mib: None,
            wall_ms: None,
            cpu_ms: None,
            concurrent_calls: None,
        },
        event_subsystems: vec!["drm".into()],
        discovery_period_seconds: Some(0),
        annotations: Vec::new(),
    };
    let good = driver_info(info()).unwrap();
    assert_eq!(good.discovery_period.as_secs(), 1, "clamped");
    let refusal = |change: fn(&mut guest_identity::DriverInfo)| {
        let mut bad = info();
        change(&mut bad);
        driver_info(bad).unwrap_err().to_string()
    };
    assert!(refusal(|info| info.name = "3gpu.example.com".into()).contains("begins with a digit"));
    assert!(refusal(|info| info.capabilities.hooks = vec!["/usr/bin/*".into()]).contains("hooks"));
}

#[test]
fn driver_problem_is_truncated_to_bounds() {
    let problem = problem_to_model(types::Problem {
        kind: types::ProblemKind::Conflict,
        code: "Not A Code".into(),
        message: format!("line\nline{}", "é".repeat(1000)),
        retry_after_ms: Some(5),
        details: vec![pair(&"k".repeat(300), "v\u{1b}"); 20],
    });
    assert_eq!(
        (problem.kind, problem.code.as_str(), problem.retry_after_ms),
        (ProblemKind::Conflict, "no-code", Some(5))
    );
    assert!(
        problem.message.starts_with("line line")
            && problem.message.contains("\"Not A Code\" is not valid")
            && problem.message.len() <= PROBLEM_MESSAGE_BYTES_MAX
    );
    assert_eq!(
        (
            problem.details.len(),
            problem.details[0].0.len(),
            problem.details[0].1.as_str()
        ),
        (16, 253, "v ")
    );
    assert_eq!(problem_to_model(problem_to_guest(&problem)), problem);
    let feigned = Problem::unavailable(ProblemCode::DriverQuarantined, "call me again");
    assert_eq!(
        problem_to_model(problem_to_guest(&feigned)).code,
        "no-code",
        "it is the host's to say"
    );
}

/// An inventory of one pool with two devices, the second a partition.
fn partitions() -> Inventory {
    let mut whole = device("gpu-0");
    whole.capacities = vec![capacity("80Gi", None)];
    let mut part = device("gpu-1");
    part.consumes = vec![set("gpu", &[("memory", "40Gi")])];
    part.attributes = vec![attribute(
        "profile",
        types::AttributeValue::Text("half".into()),
    )];
    let mut all = pool(vec![whole, part]);
    all.shared_counters = vec![set("gpu", &[("memory", "80Gi")])];
    inventory(&driver(), types::Inventory { pools: vec![all] }).unwrap()
}

fn of_device(name: &str) -> guest_scheduling::DeviceScheduling {
    guest_scheduling::DeviceScheduling {
        pool: "pool".into(),
        device: name.into(),
        binds_to_node: false,
        binding_conditions: Vec::new(),
        binding_failure_conditions: Vec::new(),
        node_allocatable: Vec::new(),
        compatibility: Vec::new(),
    }
}

fn of_pool() -> guest_scheduling::PoolScheduling {
    guest_scheduling::PoolScheduling {
        pool: "pool".into(),
        partition_type_attribute: None,
        skip_node_operations: guest_scheduling::NodeOperations::empty(),
    }
}

fn allocatable(
    resource: &str,
    mapping: Option<guest_scheduling::AllocatableMapping>,
) -> guest_scheduling::NodeAllocatable {
    guest_scheduling::NodeAllocatable {
        resource: resource.into(),
        mapping,
        per_pod: None,
        per_container: None,
    }
}

#[test]
fn scheduling_data_belongs_to_its_device() {
    use guest_scheduling::AllocatableMapping::{PerCapacity, PerDevice};
    let mut known = partitions();
    let mapping = guest_scheduling::CapacityMapping {
        capacity: "memory".into(),
        multiplier: "1".into(),
    };
    let whole = guest_scheduling::DeviceScheduling {
        binds_to_node: true,
        binding_conditions: vec!["Attached".into()],
        binding_failure_conditions: vec!["Failed".into()],
        node_allocatable: vec![
            allocatable("cpu", Some(PerDevice("2".into()))),
            allocatable("memory", Some(PerCapacity(mapping))),
        ],
        ..of_device("gpu-0")
    };
    let groups = guest_scheduling::Compatibility {
        counter_set: "gpu".into(),
        groups: vec!["mig".into()],
    };
    let part = guest_scheduling::DeviceScheduling {
        compatibility: vec![groups],
        ..of_device("gpu-1")
    };
    let skipped =
        guest_scheduling::NodeOperations::PREPARE | guest_scheduling::NodeOperations::UNPREPARE;
    let pools = vec![guest_scheduling::PoolScheduling {
        partition_type_attribute: Some("profile".into()),
        skip_node_operations: skipped,
        ..of_pool()
    }];
    add_scheduling(
        &driver(),
        &mut known,
        guest_scheduling::Additions {
            devices: vec![whole, part],
            pools,
        },
    )
    .unwrap();
    let pool = &known.pools["pool"];
    assert_eq!(
        pool.scheduling.partition_type_attribute.as_deref(),
        Some("gpu.example.com/profile")
    );
    assert_eq!(
        pool.scheduling.skip_node_operations,
        Some(SkippedOperations::PrepareAndUnprepare)
    );
    let added = pool.devices["gpu-0"].scheduling.as_deref().unwrap();
    assert_eq!(
        (added.binds_to_node, added.node_allocatable.len()),
        (true, 2)
    );
    assert_eq!(
        pool.devices["gpu-1"]
            .scheduling
            .as_deref()
            .unwrap()
            .compatibility["gpu"],
        ["mig"]
    );
}
