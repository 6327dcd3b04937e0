//! Between the bindings' types and the SDK's, in the directions that calls go.

use super::bindings::exports::nodedock::driver::{discovery, identity};
use super::bindings::nodedock::driver::device_nodes;
use super::bindings::nodedock::driver::log;
use super::bindings::nodedock::driver::types as wit;
use crate::*;

/// Like `Into`. The standard one would not do: `From` implementations that exist for WebAssembly alone would make `?` in drivers
/// ambiguous there and only there.
pub(super) trait Convert<T> {
    fn convert(self) -> T;
}

pub(super) fn all<T: Convert<U>, U>(values: Vec<T>) -> Vec<U> {
    values.into_iter().map(Convert::convert).collect()
}

/// Enums whose variants have the same names on both sides.
macro_rules! same_variants {
    ($from:ty => $to:ty: $($variant:ident),*) => {
        impl Convert<$to> for $from {
            fn convert(self) -> $to {
                match self {
                    $(<$from>::$variant => <$to>::$variant,)*
                }
            }
        }
    };
}

/// Records whose fields have the same names on both sides: as they are, converted, or lists converted one by one.
macro_rules! same_fields {
    ($from:ty => $to:ty: $($plain:ident),*; into $($single:ident),*; all $($list:ident),*) => {
        impl Convert<$to> for $from {
            fn convert(self) -> $to {
                type To = $to;
                To {
                    $($plain: self.$plain,)*
                    $($single: self.$single.convert(),)*
                    $($list: all(self.$list),)*
                }
            }
        }
    };
}

same_variants!(wit::ProblemKind => ProblemKind: Invalid, Denied, NotFound, Conflict, Unavailable, Internal);
same_variants!(ProblemKind => wit::ProblemKind: Invalid, Denied, NotFound, Conflict, Unavailable, Internal);
same_variants!(Level => log::Level: Trace, Debug, Info, Warn, Error);
same_variants!(wit::NodeKind => NodeKind: Character, Block, Fifo);
same_variants!(NodeKind => wit::NodeKind: Character, Block, Fifo);
same_variants!(TaintEffect => wit::TaintEffect: None, NoSchedule, NoExecute);
same_variants!(HealthState => wit::HealthState: Unknown, Healthy, Unhealthy);
same_variants!(wit::ConfigSource => ConfigSource: DeviceClass, Claim);

same_fields!(wit::Problem => Problem: code, message, retry_after_ms, details; into kind; all);
same_fields!(Problem => wit::Problem: code, message, retry_after_ms, details; into kind; all);

// What comes from the host.
same_fields!(wit::Context => Context: request_id, node_name, boot_id, now_ms, config, facts; into; all);
same_fields!(wit::ClaimRef => ClaimRef: namespace, name, uid; into; all);
same_fields!(wit::Counter => Counter: name, value; into; all);
same_fields!(wit::AllocatedDevice => AllocatedDevice: request, pool, device, share_id, admin_access; into; all consumed);
same_fields!(wit::OpaqueConfig => OpaqueConfig: requests, parameters; into source; all);
same_fields!(wit::Claim => Claim: annotations; into id; all devices, configs);
same_fields!(wit::LiveClaim => LiveClaim: memo, driver_version, boot_id; into claim; all);
same_fields!(device_nodes::NodeInfo => NodeInfo: path, major, minor, mode, uid, gid, sysfs_path; into kind; all);

impl Convert<Trigger> for discovery::Trigger {
    fn convert(self) -> Trigger {
        match self {
            discovery::Trigger::Load => Trigger::Load,
            discovery::Trigger::Timer => Trigger::Timer,
            discovery::Trigger::Events(folders) => Trigger::Events(folders),
            discovery::Trigger::Request => Trigger::Request,
        }
    }
}

// What goes to the host: the driver itself.
same_fields!(ValueGrant => identity::ValueGrant: glob, pattern; into; all);
same_fields!(Capabilities => identity::Capabilities:
    sysfs_read, device_nodes, mounts, hooks, env, net_devices; into; all sysfs_write);
same_fields!(Limits => identity::Limits: memory_mib, wall_ms, cpu_ms; into; all);
same_fields!(DriverInfo => identity::DriverInfo:
    name, version, summary, event_subsystems, discovery_period_seconds, annotations;
    into capabilities, limits; all);

// What goes to the host: the inventory.
impl Convert<wit::AttributeValue> for AttributeValue {
    fn convert(self) -> wit::AttributeValue {
        match self {
            AttributeValue::Int(value) => wit::AttributeValue::Int(value),
            AttributeValue::Bool(value) => wit::AttributeValue::Boolean(value),
            AttributeValue::Text(value) => wit::AttributeValue::Text(value),
            AttributeValue::Version(value) => wit::AttributeValue::Version(value),
            AttributeValue::Ints(values) => wit::AttributeValue::Ints(values),
            AttributeValue::Bools(values) => wit::AttributeValue::Booleans(values),
            AttributeValue::Texts(values) => wit::AttributeValue::Texts(values),
            AttributeValue::Versions(values) => wit::AttributeValue::Versions(values),
        }
    }
}

impl Convert<wit::CapacityChoice> for CapacityChoice {
    fn convert(self) -> wit::CapacityChoice {
        match self {
            CapacityChoice::Any => wit::CapacityChoice::Any,
            CapacityChoice::Values(values) => wit::CapacityChoice::Values(values),
            CapacityChoice::Range { min, max, step } => {
                wit::CapacityChoice::Range(wit::CapacityRange { min, max, step })
            }
        }
    }
}

impl Convert<wit::Capacity> for Capacity {
    fn convert(self) -> wit::Capacity {
        wit::Capacity { name: self.name, value: self.value, policy: self.policy.map(Convert::convert) }
    }
}

same_fields!(Attribute => wit::Attribute: name; into value; all);
same_fields!(CapacityPolicy => wit::CapacityPolicy: default_amount; into choice; all);
same_fields!(Counter => wit::Counter: name, value; into; all);
same_fields!(CounterSet => wit::CounterSet: name; into; all counters);
same_fields!(Taint => wit::Taint: key, value; into effect; all);
same_fields!(Device => wit::Device: name, allow_multiple_allocations, identity, numa_nodes, annotations;
    into; all attributes, capacities, taints, consumes);
same_fields!(Pool => wit::Pool: name, extended_resource, annotations; into; all devices, shared_counters);
same_fields!(Inventory => wit::Inventory: ; into; all pools);

// What goes to the host: preparations.
impl Convert<wit::DeviceNode> for DeviceNode {
    fn convert(self) -> wit::DeviceNode {
        wit::DeviceNode {
            path: self.path,
            host_path: self.host_path,
            kind: self.kind.map(Convert::convert),
            major: self.major,
            minor: self.minor,
            permissions: self.permissions,
            file_mode: self.file_mode,
            uid: self.uid,
            gid: self.gid,
        }
    }
}

same_fields!(Mount => wit::Mount: host_path, container_path, options, fs_type; into; all);
same_fields!(NetDevice => wit::NetDevice: host_interface, container_interface; into; all);
same_fields!(Hook => wit::Hook: stage, path, args, env, timeout_seconds; into; all);
same_fields!(IntelRdt => wit::IntelRdt: clos_id, schemata, enable_monitoring; into; all);

impl Convert<wit::Edits> for Edits {
    fn convert(self) -> wit::Edits {
        wit::Edits {
            env: self.env,
            device_nodes: all(self.device_nodes),
            mounts: all(self.mounts),
            net_devices: all(self.net_devices),
            hooks: all(self.hooks),
            additional_gids: self.additional_gids,
            intel_rdt: self.intel_rdt.map(Convert::convert),
        }
    }
}

same_fields!(Condition => wit::Condition: kind, status, reason, message; into; all);
same_fields!(NetworkData => wit::NetworkData: interface_name, ips, hardware_address; into; all);

impl Convert<wit::DeviceStatus> for DeviceStatus {
    fn convert(self) -> wit::DeviceStatus {
        wit::DeviceStatus {
            conditions: all(self.conditions),
            data: self.data,
            network: self.network.map(Convert::convert),
        }
    }
}

impl Convert<wit::PreparedDevice> for PreparedDevice {
    fn convert(self) -> wit::PreparedDevice {
        wit::PreparedDevice {
            requests: self.requests,
            pool: self.pool,
            device: self.device,
            share_id: self.share_id,
            edits: self.edits.convert(),
            status: self.status.map(Convert::convert),
        }
    }
}

same_fields!(Prepared => wit::PreparedClaim: annotations, memo; into edits; all devices);
same_fields!(DeviceHealth => wit::DeviceHealth: pool, device, message; into state; all);

impl Convert<wit::PrepareOutcome> for (String, Result<Prepared, Problem>) {
    fn convert(self) -> wit::PrepareOutcome {
        let (uid, outcome) = self;
        wit::PrepareOutcome { uid, outcome: outcome.map(Convert::convert).map_err(Convert::convert) }
    }
}

impl Convert<wit::UnprepareOutcome> for (String, Result<(), Problem>) {
    fn convert(self) -> wit::UnprepareOutcome {
        let (uid, outcome) = self;
        wit::UnprepareOutcome { uid, outcome: outcome.map_err(Convert::convert) }
    }
}
