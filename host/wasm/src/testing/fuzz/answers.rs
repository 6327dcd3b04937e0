//! Answers as a guest could give them: most of them nearly right, so that much of each gets behind the first check.

use super::bytes::Bytes;
use crate::bindings::exports::nodedock::driver::identity;
use crate::bindings::exports::nodedock::driver::scheduling;
use crate::bindings::nodedock::driver::inventory::CapacityRange;
use crate::bindings::types;

const DEVICES: &[&str] = &["gpu-0", "gpu-1", "nic", "0"];
const POOLS: &[&str] = &["node", "fabric/a", "b.c"];
const NAMES: &[&str] = &[
    "model",
    "memory",
    "gpu.example.com/model",
    "other.example.com/memory",
    "serial",
];
const QUANTITIES: &[&str] = &[
    "4", "80Gi", "500m", "1e3", ".5", "+1", "-1", "1.", "9E", "1e9999", ".",
];
const KEYS: &[&str] = &["example.com/key", "key", "other", "K-1"];
const VALUES: &[&str] = &["", "value", "line", "{\"a\": 1}"];
const PATHS: &[&str] = &[
    "/dev/null",
    "/dev/zero",
    "/usr/lib",
    "/usr/bin/env",
    "/etc/passwd",
    "/",
    "/dev/../etc",
    "dev",
];

fn label(bytes: &mut Bytes<'_>) -> types::KeyValue {
    types::KeyValue {
        key: bytes.text(KEYS),
        value: bytes.text(VALUES),
    }
}

pub(super) fn problem(bytes: &mut Bytes<'_>) -> types::Problem {
    use types::ProblemKind::{Conflict, Denied, Internal, Invalid, NotFound, Unavailable};
    types::Problem {
        kind: bytes.pick(&[Invalid, Denied, NotFound, Conflict, Unavailable, Internal]),
        code: bytes.text(&["no-such-device", "busy", "", "Not A Code"]),
        message: bytes.text(&["the device is gone", "", "\u{fc}\u{fc}\u{fc}"]),
        retry_after_ms: bytes.option(Bytes::number),
        details: bytes.list(label),
    }
}

pub(super) fn description(bytes: &mut Bytes<'_>) -> identity::DriverInfo {
    let mut info = identity::DriverInfo {
        name: bytes.text(&["gpu.example.com", "gpu", "3com.example.com", "Gpu"]),
        version: bytes.text(&["1.2.3", "0.1.0-rc.1+build", "1.2", "01.0.0"]),
        summary: bytes.text(VALUES),
        capabilities: capabilities(bytes),
        limits: identity::Limits {
            memory_mib: bytes.option(Bytes::number),
            wall_ms: bytes.option(Bytes::number),
            cpu_ms: bytes.option(Bytes::number),
            concurrent_calls: bytes.option(Bytes::number),
        },
        event_subsystems: bytes.list(|bytes| bytes.text(&["pci", "drm", "net"])),
        discovery_period_seconds: bytes.option(Bytes::number),
        annotations: bytes.list(label),
    };
    // Last, so that older seeds mean what they meant.
    info.capabilities.host_files =
        bytes.list(|bytes| bytes.text(&["/opt/*", "/proc/driver/**", "opt", "/[", "/etc/../a"]));
    info.capabilities.pci_driver = bytes.list(|bytes| identity::BindRequest {
        functions: bytes.text(&["0000:3b:00.*", "*", "a/b", "["]),
        drivers: bytes.text(&["vfio-pci", "(", ".*", ""]),
    });
    info
}

fn capabilities(bytes: &mut Bytes<'_>) -> identity::Capabilities {
    const RELATIVE: &[&str] = &[
        "class/drm/*",
        "bus/pci/**",
        "class/{net,drm}/card[0-9]",
        "**",
        "/sys",
        "a/../b",
    ];
    const WRITTEN: &[&str] = &[
        "class/drm/*/a",
        "bus/pci/**/a",
        "class/{net,drm}/card[0-9]",
        "**/a",
        "/sys/a",
        "a/../b",
    ];
    const ABSOLUTE: &[&str] = &[
        "/dev/dri/*",
        "/dev/kvm",
        "/opt/{a,b}/**",
        "/dev/[!a]",
        "dev",
        "/**x",
    ];
    let relative = |bytes: &mut Bytes<'_>| bytes.text(RELATIVE);
    let absolute = |bytes: &mut Bytes<'_>| bytes.text(ABSOLUTE);
    let name = |bytes: &mut Bytes<'_>| bytes.text(&["GPU_*", "LD_PRELOAD", "eth0", "*", "a/b"]);
    identity::Capabilities {
        sysfs_read: bytes.list(relative),
        host_files: Vec::new(),
        pci_driver: Vec::new(),
        sysfs_write: bytes.list(|bytes| identity::WriteRequest {
            glob: bytes.text(WRITTEN),
            pattern: bytes.text(&["[0-9]+", "0|1", "(", "(a{1000}){1000}", ".*"]),
        }),
        device_nodes: bytes.list(absolute),
        mounts: bytes.list(absolute),
        hooks: bytes.list(|bytes| bytes.text(PATHS)),
        env: bytes.list(name),
        net_devices: bytes.list(name),
    }
}

pub(super) fn inventory(bytes: &mut Bytes<'_>) -> types::Inventory {
    types::Inventory {
        pools: bytes.list(pool),
    }
}

fn pool(bytes: &mut Bytes<'_>) -> types::Pool {
    types::Pool {
        name: bytes.text(POOLS),
        devices: bytes.list(device),
        shared_counters: bytes.list(counter_set),
        extended_resource: bytes
            .option(|bytes| bytes.text(&["example.com/gpu", "kubernetes.io/gpu", "gpu"])),
        annotations: bytes.list(label),
    }
}

fn device(bytes: &mut Bytes<'_>) -> types::Device {
    types::Device {
        name: bytes.text(DEVICES),
        attributes: bytes.list(attribute),
        capacities: bytes.list(|bytes| types::Capacity {
            name: bytes.text(NAMES),
            value: bytes.text(QUANTITIES),
            policy: bytes.option(policy),
        }),
        taints: bytes.list(taint),
        consumes: bytes.list(counter_set),
        allow_multiple_allocations: bytes.flag(),
        identity: bytes.list(|bytes| bytes.text(&["pci:0000:3b:00.0", "dev:/dev/fuse"])),
        numa_nodes: bytes.list(Bytes::number),
        annotations: bytes.list(label),
    }
}

pub(super) fn additions(bytes: &mut Bytes<'_>) -> scheduling::Additions {
    scheduling::Additions {
        devices: bytes.list(|bytes| scheduling::DeviceScheduling {
            pool: bytes.text(POOLS),
            device: bytes.text(DEVICES),
            binds_to_node: bytes.flag(),
            binding_conditions: bytes.list(|bytes| bytes.text(&["Attached", "Ready", ""])),
            binding_failure_conditions: bytes.list(|bytes| bytes.text(&["Failed", "a\nb"])),
            node_allocatable: bytes.list(node_allocatable),
            compatibility: bytes.list(|bytes| scheduling::Compatibility {
                counter_set: bytes.text(&["gpu-0", "gpu-1"]),
                groups: bytes.list(|bytes| bytes.text(&["mig", "vgpu", "Not A Label"])),
            }),
        }),
        pools: bytes.list(|bytes| scheduling::PoolScheduling {
            pool: bytes.text(POOLS),
            partition_type_attribute: bytes.option(|bytes| bytes.text(NAMES)),
            skip_node_operations: bytes.pick(&[
                scheduling::NodeOperations::empty(),
                scheduling::NodeOperations::PREPARE,
                scheduling::NodeOperations::UNPREPARE,
            ]),
        }),
    }
}

fn node_allocatable(bytes: &mut Bytes<'_>) -> scheduling::NodeAllocatable {
    use scheduling::AllocatableMapping::{PerCapacity, PerDevice};
    scheduling::NodeAllocatable {
        resource: bytes.text(&["cpu", "hugepages-2Mi", "example.com/gpu"]),
        mapping: bytes.option(|bytes| match bytes.flag() {
            true => PerDevice(bytes.text(QUANTITIES)),
            false => PerCapacity(scheduling::CapacityMapping {
                capacity: bytes.text(NAMES),
                multiplier: bytes.text(QUANTITIES),
            }),
        }),
        per_pod: bytes.option(|bytes| bytes.text(QUANTITIES)),
        per_container: bytes.option(|bytes| bytes.text(QUANTITIES)),
    }
}

fn attribute(bytes: &mut Bytes<'_>) -> types::Attribute {
    types::Attribute {
        name: bytes.text(NAMES),
        value: attribute_value(bytes),
    }
}

fn attribute_value(bytes: &mut Bytes<'_>) -> types::AttributeValue {
    use types::AttributeValue as Value;
    const TEXTS: &[&str] = &["H100", "", "1.2.3"];
    const VERSIONS: &[&str] = &["1.2.3", "1.2.3-a.b+c", "1.2", "v1.2.3"];
    match bytes.byte() % 8 {
        0 => Value::Int(bytes.number().into()),
        1 => Value::Boolean(bytes.flag()),
        2 => Value::Text(bytes.text(TEXTS)),
        3 => Value::Version(bytes.text(VERSIONS)),
        4 => Value::Ints(bytes.list(|bytes| -i64::from(bytes.number()))),
        5 => Value::Booleans(bytes.list(Bytes::flag)),
        6 => Value::Texts(bytes.list(|bytes| bytes.text(TEXTS))),
        _ => Value::Versions(bytes.list(|bytes| bytes.text(VERSIONS))),
    }
}

fn policy(bytes: &mut Bytes<'_>) -> types::CapacityPolicy {
    let quantity = |bytes: &mut Bytes<'_>| bytes.text(QUANTITIES);
    types::CapacityPolicy {
        default_amount: bytes.option(quantity),
        choice: match bytes.byte() % 3 {
            0 => types::CapacityChoice::Any,
            1 => types::CapacityChoice::Values(bytes.list(quantity)),
            _ => types::CapacityChoice::Range(CapacityRange {
                min: quantity(bytes),
                max: bytes.option(quantity),
                step: bytes.option(quantity),
            }),
        },
    }
}

fn counter_set(bytes: &mut Bytes<'_>) -> types::CounterSet {
    let counter = |bytes: &mut Bytes<'_>| types::Counter {
        name: bytes.text(&["memory", "slices"]),
        value: bytes.text(QUANTITIES),
    };
    types::CounterSet {
        name: bytes.text(&["gpu-0", "gpu-1"]),
        counters: bytes.list(counter),
    }
}

fn taint(bytes: &mut Bytes<'_>) -> types::Taint {
    use types::TaintEffect::{NoExecute, NoSchedule, None};
    types::Taint {
        key: bytes.text(KEYS),
        value: bytes.text(VALUES),
        effect: bytes.pick(&[None, NoSchedule, NoExecute]),
    }
}

pub(super) fn health(bytes: &mut Bytes<'_>) -> Vec<types::DeviceHealth> {
    use types::HealthState::{Healthy, Unhealthy, Unknown};
    bytes.list(|bytes| types::DeviceHealth {
        pool: bytes.text(POOLS),
        device: bytes.text(DEVICES),
        state: bytes.pick(&[Unknown, Healthy, Unhealthy]),
        message: bytes.text(VALUES),
    })
}

pub(super) fn prepared_claim(bytes: &mut Bytes<'_>) -> types::PreparedClaim {
    types::PreparedClaim {
        devices: bytes.list(prepared_device),
        edits: edits(bytes),
        annotations: bytes.list(label),
        memo: bytes.blob(),
    }
}

fn prepared_device(bytes: &mut Bytes<'_>) -> types::PreparedDevice {
    types::PreparedDevice {
        requests: bytes.list(|bytes| bytes.text(&["gpu", "nic", "gpu/big"])),
        pool: bytes.text(POOLS),
        device: bytes.text(DEVICES),
        share_id: bytes.option(|bytes| bytes.text(&["share", ""])),
        edits: edits(bytes),
        status: bytes.option(status),
    }
}

fn edits(bytes: &mut Bytes<'_>) -> types::ContainerEdits {
    types::ContainerEdits {
        env: bytes.list(env),
        device_nodes: bytes.list(device_node),
        mounts: bytes.list(mount),
        net_devices: bytes.list(|bytes| types::NetDevice {
            host_interface: bytes.text(&["lo", "eth0", "eth1"]),
            container_interface: bytes.text(&["net1", "net2"]),
        }),
        hooks: bytes.list(hook),
        additional_gids: bytes.list(Bytes::number),
        intel_rdt: bytes.option(|bytes| types::IntelRdt {
            clos_id: bytes.option(|bytes| bytes.text(&["gold", "..", ".hidden", ""])),
            schemata: bytes.list(|bytes| bytes.text(&["L3:0=f", "MB:0=50"])),
            enable_monitoring: bytes.flag(),
        }),
    }
}

fn env(bytes: &mut Bytes<'_>) -> types::KeyValue {
    let key = bytes.text(&["GPU_UUID", "_", "LD_PRELOAD", "PATH", "a.b-c", "0"]);
    types::KeyValue {
        key,
        value: bytes.text(VALUES),
    }
}

fn device_node(bytes: &mut Bytes<'_>) -> types::DeviceNode {
    use types::NodeAccess as Access;
    use types::NodeKind::{Block, Character, Fifo};
    types::DeviceNode {
        path: bytes.text(PATHS),
        host_path: bytes.option(|bytes| bytes.text(PATHS)),
        kind: bytes.option(|bytes| bytes.pick(&[Character, Block, Fifo])),
        major: bytes.option(Bytes::number),
        minor: bytes.option(Bytes::number),
        access: bytes.pick(&[
            Access::READ | Access::WRITE,
            Access::READ | Access::WRITE | Access::MKNOD,
            Access::READ,
            Access::READ | Access::MKNOD,
            Access::empty(),
        ]),
        file_mode: bytes.option(Bytes::number),
        uid: bytes.option(Bytes::number),
        gid: bytes.option(Bytes::number),
    }
}

fn mount(bytes: &mut Bytes<'_>) -> types::Mount {
    const OPTIONS: &[&str] = &[
        "ro", "bind", "rbind", "nosuid", "noexec", "suid", "rshared", "",
    ];
    types::Mount {
        host_path: bytes.text(&[
            "/usr/lib",
            "/usr/bin/env",
            "/opt",
            "/etc",
            "/",
            "/proc/self/root",
            "/usr/../etc",
        ]),
        container_path: bytes.text(PATHS),
        options: bytes.list(|bytes| bytes.text(OPTIONS)),
        fs_type: bytes.option(|bytes| bytes.text(&["", "bind", "none", "ext4"])),
    }
}

fn hook(bytes: &mut Bytes<'_>) -> types::Hook {
    use types::HookStage as Stage;
    types::Hook {
        stage: bytes.pick(&[
            Stage::CreateRuntime,
            Stage::Prestart,
            Stage::Poststop,
            Stage::StartContainer,
        ]),
        path: bytes.text(&["/usr/bin/env", "/bin/sh", "/tmp/x", "env"]),
        args: bytes.list(|bytes| bytes.text(VALUES)),
        env: bytes.list(env),
        timeout_seconds: bytes.option(Bytes::number),
    }
}

fn status(bytes: &mut Bytes<'_>) -> types::DeviceStatus {
    use types::ConditionStatus as Status;
    types::DeviceStatus {
        conditions: bytes.list(|bytes| types::Condition {
            kind: bytes.text(&["Ready", ""]),
            status: match bytes.option(Bytes::flag) {
                None => Status::Unknown,
                Some(true) => Status::True,
                Some(false) => Status::False,
            },
            reason: bytes.text(VALUES),
            message: bytes.text(VALUES),
        }),
        data: bytes.option(|bytes| bytes.text(&["{}", "{\"a\": [1.5, null]}", "[]", "{"])),
        network: bytes.option(|bytes| types::NetworkData {
            interface_name: bytes.text(&["net1", ""]),
            ips: bytes.list(|bytes| {
                bytes.text(&["192.0.2.1/24", "2001:db8::1/64", "192.0.2.1/33", "::/128"])
            }),
            hardware_address: bytes.text(&["02:00:00:00:00:01", ""]),
        }),
        attributes: bytes.list(attribute),
    }
}
