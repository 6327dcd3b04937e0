//! The bounds of the contract, as the host checks them: with its code, of `nodedock-model`. Each function returns the violations, one
//! sentence each.
//!
//! ```
//! use nodedock_sdk::{Device, Inventory, Pool, testing::bounds};
//!
//! let inventory = Inventory::new().pool(Pool::new("misc").device(Device::new("fuse")));
//! assert!(bounds::inventory(&inventory).is_empty());
//! let twice = Inventory::new().pool(Pool::new("misc")).pool(Pool::new("misc"));
//! assert_eq!(bounds::inventory(&twice), ["pools[1]: \"misc\" occurs twice"]);
//! ```

use nodedock_model::UnparsedValue;
use nodedock_model::answer::{self, UnparsedAllocatable, UnparsedMapping};
use nodedock_model::check::Findings;
use nodedock_model::{
    BindingConditions, Capacity, CapacityChoice, CapacityPolicy, Condition, DeviceNode,
    DeviceStatus, Edits, Hook, IntelRdt, Mount, NetDevice, NetworkData, NodeKind, Taint,
    TaintEffect,
};

use super::grant::requested;

// `nodedock-model` is published with this crate, so the check is the host's own, and not a copy: each function only makes the model's
// types of a driver's.

fn lines<T>(checked: Result<T, Findings>) -> Vec<String> {
    let found = checked.err().into_iter().flatten();
    found.map(|violation| violation.to_string()).collect()
}

/// Returns the violations of the bounds in a driver's description.
pub fn driver_info(info: &crate::DriverInfo) -> Vec<String> {
    lines(answer::description(&answer::Description {
        name: &info.name,
        version: &info.version,
        summary: &info.summary,
        capabilities: &requested(&info.capabilities),
        event_subsystems: &info.event_subsystems,
        annotations: &info.annotations,
    }))
}

/// Returns the violations of the bounds in an inventory.
pub fn inventory(inventory: &crate::Inventory) -> Vec<String> {
    lines(answer::inventory(None, converted(inventory)))
}

fn converted(inventory: &crate::Inventory) -> answer::Inventory {
    let pool = |pool: &crate::Pool| answer::Pool {
        name: pool.name.clone(),
        devices: pool.devices.iter().map(device).collect(),
        shared_counters: pool.shared_counters.iter().map(counter_set).collect(),
        extended_resource: pool.extended_resource.clone(),
        annotations: pool.annotations.clone(),
    };
    answer::Inventory {
        pools: inventory.pools.iter().map(pool).collect(),
    }
}

fn device(device: &crate::Device) -> answer::Device {
    let taint = |taint: &crate::Taint| Taint {
        key: taint.key.clone(),
        value: taint.value.clone(),
        effect: match taint.effect {
            crate::TaintEffect::None => TaintEffect::None,
            crate::TaintEffect::NoSchedule => TaintEffect::NoSchedule,
            crate::TaintEffect::NoExecute => TaintEffect::NoExecute,
        },
    };
    answer::Device {
        name: device.name.clone(),
        attributes: device.attributes.iter().map(attribute).collect(),
        capacities: device.capacities.iter().map(capacity).collect(),
        taints: device.taints.iter().map(taint).collect(),
        consumes: device.consumes.iter().map(counter_set).collect(),
        allow_multiple_allocations: device.allow_multiple_allocations,
        identity: device.identity.clone(),
        numa_nodes: device.numa_nodes.clone(),
        annotations: device.annotations.clone(),
    }
}

fn attribute(attribute: &crate::Attribute) -> answer::Attribute {
    use crate::AttributeValue as Value;
    let value = match attribute.value.clone() {
        Value::Int(value) => UnparsedValue::Int(value),
        Value::Bool(value) => UnparsedValue::Bool(value),
        Value::Text(text) => UnparsedValue::Text(text),
        Value::Version(text) => UnparsedValue::Version(text),
        Value::Ints(list) => UnparsedValue::Ints(list),
        Value::Bools(list) => UnparsedValue::Bools(list),
        Value::Texts(list) => UnparsedValue::Texts(list),
        Value::Versions(list) => UnparsedValue::Versions(list),
    };
    (attribute.name.clone(), value)
}

fn capacity(capacity: &crate::Capacity) -> (String, Capacity) {
    let choice = |choice| match choice {
        crate::CapacityChoice::Any => CapacityChoice::Any,
        crate::CapacityChoice::Values(values) => CapacityChoice::Values(values),
        crate::CapacityChoice::Range { min, max, step } => CapacityChoice::Range { min, max, step },
    };
    let policy = |policy: crate::CapacityPolicy| CapacityPolicy {
        default_amount: policy.default_amount,
        choice: choice(policy.choice),
    };
    let converted = Capacity {
        value: capacity.value.clone(),
        policy: capacity.policy.clone().map(policy),
    };
    (capacity.name.clone(), converted)
}

fn counter_set(set: &crate::CounterSet) -> answer::CounterSet {
    let counter = |counter: &crate::Counter| (counter.name.clone(), counter.value.clone());
    answer::CounterSet {
        name: set.name.clone(),
        counters: set.counters.iter().map(counter).collect(),
    }
}

/// Returns the violations of the bounds in the result of a prepare.
pub fn prepared(prepared: &crate::Prepared) -> Vec<String> {
    let converted = answer::PreparedClaim {
        devices: prepared.devices.iter().map(prepared_device).collect(),
        edits: edits(&prepared.edits),
        annotations: prepared.annotations.clone(),
        memo: prepared.memo.clone(),
    };
    let mut lines = lines(answer::prepared_claim(None, converted));
    lines.extend(prepared.devices.iter().filter_map(without_base_requests));
    lines
}

/// The host, which knows the claim, compares the requests with it.
fn without_base_requests(device: &crate::PreparedDevice) -> Option<String> {
    let requests = &device.requests;
    let is_base = !requests.is_empty() && !requests.iter().any(|request| request.contains('/'));
    (!is_base).then(|| {
        format!(
            "device {}/{}: requests {requests:?} are not base requests",
            device.pool, device.device
        )
    })
}

fn prepared_device(device: &crate::PreparedDevice) -> answer::PreparedDevice {
    answer::PreparedDevice {
        requests: device.requests.clone(),
        pool: device.pool.clone(),
        device: device.device.clone(),
        share_id: device.share_id.clone(),
        edits: edits(&device.edits),
        status: device.status.as_ref().map(status),
    }
}

fn status(status: &crate::DeviceStatus) -> answer::DeviceStatus {
    let condition = |condition: &crate::Condition| Condition {
        kind: condition.kind.clone(),
        status: match condition.status {
            crate::ConditionStatus::True => Some(true),
            crate::ConditionStatus::False => Some(false),
            crate::ConditionStatus::Unknown => None,
        },
        reason: condition.reason.clone(),
        message: condition.message.clone(),
    };
    let network = |network: &crate::NetworkData| NetworkData {
        interface_name: network.interface_name.clone(),
        ips: network.ips.clone(),
        hardware_address: network.hardware_address.clone(),
    };
    answer::DeviceStatus {
        status: DeviceStatus {
            conditions: status.conditions.iter().map(condition).collect(),
            data: status.data.clone(),
            network: status.network.as_ref().map(network),
            ..DeviceStatus::default()
        },
        attributes: status.attributes.iter().map(attribute).collect(),
    }
}

fn edits(edits: &crate::ContainerEdits) -> Edits {
    let mount = |mount: &crate::Mount| Mount {
        host_path: mount.host_path.clone(),
        container_path: mount.container_path.clone(),
        fs_type: mount.fs_type.clone(),
        options: mount.options.clone(),
    };
    let net_device = |device: &crate::NetDevice| NetDevice {
        host_interface: device.host_interface.clone(),
        container_interface: device.container_interface.clone(),
    };
    let hook = |hook: &crate::Hook| Hook {
        // Its type has the stages that there are.
        stage: String::new(),
        path: hook.path.clone(),
        args: hook.args.clone(),
        env: hook.env.clone(),
        timeout_seconds: hook.timeout_seconds,
    };
    let intel_rdt = |rdt: &crate::IntelRdt| IntelRdt {
        clos_id: rdt.clos_id.clone(),
        schemata: rdt.schemata.clone(),
        enable_monitoring: rdt.enable_monitoring,
    };
    Edits {
        env: edits.env.clone(),
        device_nodes: edits.device_nodes.iter().map(device_node).collect(),
        net_devices: edits.net_devices.iter().map(net_device).collect(),
        hooks: edits.hooks.iter().map(hook).collect(),
        mounts: edits.mounts.iter().map(mount).collect(),
        intel_rdt: edits.intel_rdt.as_ref().map(intel_rdt),
        additional_gids: edits.additional_gids.clone(),
    }
}

fn device_node(node: &crate::DeviceNode) -> DeviceNode {
    let access = node.access;
    let letters = [(access.read, 'r'), (access.write, 'w'), (access.mknod, 'm')];
    let kind = |kind| match kind {
        crate::NodeKind::Character => NodeKind::Character,
        crate::NodeKind::Block => NodeKind::Block,
        crate::NodeKind::Fifo => NodeKind::Fifo,
    };
    DeviceNode {
        path: node.path.clone(),
        host_path: node.host_path.clone(),
        kind: node.kind.map(kind),
        major: node.major,
        minor: node.minor,
        file_mode: node.file_mode,
        permissions: letters
            .into_iter()
            .filter_map(|(given, letter)| given.then_some(letter))
            .collect(),
        uid: node.uid,
        gid: node.gid,
    }
}

/// Returns the violations of the bounds in additions to an inventory, or those in the inventory.
pub fn additions(inventory: &crate::Inventory, additions: &crate::Additions) -> Vec<String> {
    let converted = answer::Additions {
        devices: additions.devices.iter().map(device_scheduling).collect(),
        pools: additions.pools.iter().map(pool_scheduling).collect(),
    };
    let inventory = answer::inventory(None, self::converted(inventory));
    lines(inventory.and_then(|mut known| answer::add_scheduling(None, &mut known, converted)))
}

fn device_scheduling(added: &crate::DeviceScheduling) -> answer::DeviceScheduling {
    let mapping = |mapping| match mapping {
        crate::AllocatableMapping::PerDevice(amount) => UnparsedMapping::PerDevice(amount),
        crate::AllocatableMapping::PerCapacity {
            capacity,
            multiplier,
        } => UnparsedMapping::PerCapacity {
            capacity,
            multiplier,
        },
    };
    let allocatable = |entry: &crate::NodeAllocatable| {
        let amounts = UnparsedAllocatable {
            mapping: entry.mapping.clone().map(mapping),
            per_pod: entry.per_pod.clone(),
            per_container: entry.per_container.clone(),
        };
        (entry.resource.clone(), amounts)
    };
    let groups = |entry: &crate::Compatibility| (entry.counter_set.clone(), entry.groups.clone());
    answer::DeviceScheduling {
        pool: added.pool.clone(),
        device: added.device.clone(),
        binds_to_node: added.binds_to_node,
        binding: BindingConditions {
            conditions: added.binding_conditions.clone(),
            failures: added.binding_failure_conditions.clone(),
        },
        node_allocatable: added.node_allocatable.iter().map(allocatable).collect(),
        compatibility: added.compatibility.iter().map(groups).collect(),
    }
}

fn pool_scheduling(added: &crate::PoolScheduling) -> answer::PoolScheduling {
    answer::PoolScheduling {
        pool: added.pool.clone(),
        partition_type_attribute: added.partition_type_attribute.clone(),
        skips_prepare: added.skip_node_operations.prepare,
        skips_unprepare: added.skip_node_operations.unprepare,
    }
}

/// Returns the violations of the bounds in a problem.
pub fn problem(problem: &crate::Problem) -> Vec<String> {
    lines(answer::problem(
        &problem.code,
        &problem.message,
        &problem.details,
    ))
}

/// Returns the violations of the bounds in readings.
pub fn readings(answer: &[crate::DeviceReadings]) -> Vec<String> {
    let of_device = |device: &crate::DeviceReadings| answer::DeviceReadings {
        pool: device.pool.clone(),
        device: device.device.clone(),
        readings: device
            .readings
            .iter()
            .map(|reading| (reading.name.clone(), reading.value))
            .collect(),
    };
    lines(answer::readings(answer.iter().map(of_device).collect()))
}

/// Returns the violations of the bounds in devices that are left out.
pub fn left_out(answer: &[crate::LeftOutDevice]) -> Vec<String> {
    let device = |device: &crate::LeftOutDevice| {
        nodedock_model::LeftOutDevice::new(&device.name, &device.reason)
    };
    lines(answer::left_out(answer.iter().map(device).collect()))
}

/// Returns the violations of the bounds in a health result.
pub fn health(answer: &[crate::DeviceHealth]) -> Vec<String> {
    let health = |health: &crate::DeviceHealth| answer::Health {
        pool: health.pool.clone(),
        device: health.device.clone(),
        health: nodedock_model::DeviceHealth {
            message: health.message.clone(),
            ..nodedock_model::DeviceHealth::default()
        },
    };
    lines(answer::health(answer.iter().map(health).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttributeValue, ContainerEdits, Device, Inventory, NodeAccess, Pool, Prepared};

    fn lines_of(device: Device) -> Vec<String> {
        inventory(&Inventory::new().pool(Pool::new("p").device(device)))
    }

    #[test]
    fn device_parts_are_checked() {
        let shared = crate::CounterSet::new("memory").counter("slices", "1");
        let proper = Device::new("gpu-0")
            .attribute("example.com/model", "Z")
            .attribute("v", AttributeValue::version("1.0.0"))
            .capacity("memory", "80Gi")
            .identity("pci:0000:3b:00.0")
            .consumes(shared.clone());
        let pool = Pool::new("p").shared_counters(shared.clone());
        let whole = Inventory::new().pool(pool.clone().device(proper));
        assert_eq!(inventory(&whole), Vec::<String>::new());
        let taint = crate::TaintEffect::NoSchedule;
        for (device, part) in [
            (Device::new("GPU"), "device name"),
            (Device::new("d").attribute("a", "x".repeat(65)), "65 bytes"),
            (
                Device::new("d").attribute("a", AttributeValue::version("1.0")),
                "semantic version",
            ),
            (
                Device::new("d").capacity("memory", "80 Gi"),
                "not a quantity",
            ),
            (
                Device::new("d").with_capacity(
                    crate::Capacity::new("m", "1").policy(crate::CapacityPolicy::default()),
                ),
                "several allocations",
            ),
            (Device::new("d").taint("a b", "", taint), "not a label key"),
            (Device::new("d").identity(""), "identity[0] is empty"),
            (Device::new("d").numa_node(1024), "numa-nodes[0]"),
            (
                Device::new("d").annotation("a", "x".repeat(1025)),
                "1025 bytes",
            ),
            (
                Device::new("d").consumes(shared),
                "which the pool does not have",
            ),
        ] {
            let lines = lines_of(device);
            assert!(
                lines.len() == 1 && lines[0].contains(part),
                "{part}: {lines:?}"
            );
        }
    }

    #[test]
    fn claim_and_device_edits_are_checked() {
        let with = |edits: ContainerEdits| prepared(&Prepared::new().edits(edits));
        let proper = ContainerEdits::new().device_node("/dev/fuse").env("A", "b");
        assert_eq!(with(proper), Vec::<String>::new());
        let no_right = crate::DeviceNode::new("/dev/fuse").access(NodeAccess::default());
        let mount = crate::Mount::read_only("/usr/../x", "/x");
        let edits = ContainerEdits::new;
        for (edits, part) in [
            (edits().device_node("dev/fuse"), "absolute, plain path"),
            (
                edits().device_node(no_right),
                "none of read, write and mknod",
            ),
            (edits().mount(mount), "mounts[0]: host-path"),
            (edits().net_device("eth0", "a b"), "container-interface"),
        ] {
            let lines = with(edits.clone());
            assert!(
                lines.len() == 1 && lines[0].contains(part),
                "{part}: {lines:?}"
            );
            let allocated = crate::AllocatedDevice::new("r", "p", "d");
            let device = crate::PreparedDevice::new(&allocated, edits);
            let lines = prepared(&Prepared::new().device(device));
            assert!(
                lines.len() == 1 && lines[0].starts_with("device p/d: edits: "),
                "{lines:?}"
            );
        }
    }

    #[test]
    fn a_status_and_requests_are_checked() {
        let status = crate::DeviceStatus {
            conditions: vec![crate::Condition::default()],
            data: Some("[]".to_owned()),
            ..crate::DeviceStatus::new().attribute("a-b", 1)
        };
        let device = crate::PreparedDevice {
            pool: "p".to_owned(),
            device: "d".to_owned(),
            ..crate::PreparedDevice::default()
        };
        let lines = prepared(&Prepared::new().device(device.status(status)));
        for (line, part) in lines.iter().zip([
            "conditions[0]: kind",
            "data",
            "attributes[0]",
            "base requests",
        ]) {
            assert!(line.contains(part), "{part}: {line}");
        }
        assert_eq!(lines.len(), 4, "{lines:?}");
    }

    #[test]
    fn other_answers_are_checked() {
        let proper = crate::DriverInfo::new("leds.example.com", "0.1.0");
        assert_eq!(driver_info(&proper), Vec::<String>::new());
        assert_eq!(driver_info(&crate::DriverInfo::new("leds_", "1")).len(), 2);
        let proper = crate::Problem::invalid("no-such-profile", "a");
        assert_eq!(problem(&proper), Vec::<String>::new());
        assert_eq!(problem(&crate::Problem::invalid("No such", "")).len(), 2);
        let unknown = crate::Additions {
            pools: vec![crate::PoolScheduling::default()],
            ..crate::Additions::default()
        };
        assert_eq!(additions(&Inventory::new(), &unknown).len(), 1);
    }
}
