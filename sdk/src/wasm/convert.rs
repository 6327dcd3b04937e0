//! Conversions between the bindings' types and the SDK's, in the directions that calls need.

use super::bindings::exports::nodedock::driver::{discovery, identity};
use super::bindings::nodedock::driver::{
    device_nodes, host_files, log, net_interfaces, prepared_claims,
};
use super::health::exports::nodedock::driver::health;
use super::left_out::exports::nodedock::driver::left_out;
use super::scheduling::exports::nodedock::driver::scheduling;
use super::telemetry::exports::nodedock::driver::telemetry;
use crate::facts::Page;
use crate::*;

/// The types that calls exchange.
mod wit {
    use super::super::bindings::nodedock::driver;

    pub(super) use driver::claims::{
        AllocatedDevice, Claim, ClaimRecord, ClaimRef, Condition, ConditionStatus, Consumer,
        DeviceStatus, NetworkData, OpaqueParameters, ParametersSource, PrepareOutcome,
        PreparedClaim, PreparedDevice, UnprepareOutcome,
    };
    pub(super) use driver::common::{Context, KeyValue, Problem, ProblemKind};
    pub(super) use driver::container_edits::{
        ContainerEdits, DeviceNode, Hook, HookStage, IntelRdt, Mount, NetDevice, NodeAccess,
        NodeKind,
    };
    pub(super) use driver::inventory::{
        Attribute, AttributeValue, Capacity, CapacityChoice, CapacityPolicy, CapacityRange,
        Counter, CounterSet, Device, Inventory, Pool, Taint, TaintEffect,
    };
}

/// Conversion as by `Into`. `From` implementations that exist for WebAssembly only would make `?` in drivers ambiguous there and only
/// there.
pub(super) trait Convert<T> {
    fn convert(self) -> T;
}

pub(super) fn all<T: Convert<U>, U>(values: Vec<T>) -> Vec<U> {
    values.into_iter().map(Convert::convert).collect()
}

/// Converts enums whose variants have the same names on both sides.
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

/// Converts records whose fields have the same names on both sides: unchanged, converted, or lists converted entry by entry.
macro_rules! same_fields {
    ($from:ty => $to:ty: $($plain:ident),*; into $($single:ident),*; all $($list:ident),*) => {
        impl Convert<$to> for $from {
            fn convert(self) -> $to {
                type To = $to;
                // Without `..`: a field that one side has alone does not compile.
                let Self { $($plain,)* $($single,)* $($list,)* } = self;
                To {
                    $($plain,)*
                    $($single: $single.convert(),)*
                    $($list: all($list),)*
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
same_variants!(host_files::FileKind => FileKind: Regular, Directory);
same_variants!(net_interfaces::OperationalState => OperationalState:
    Unknown, NotPresent, Down, LowerLayerDown, Testing, Dormant, Up);
same_variants!(TaintEffect => wit::TaintEffect: None, NoSchedule, NoExecute);
same_variants!(wit::TaintEffect => TaintEffect: None, NoSchedule, NoExecute);
same_variants!(HealthState => health::HealthState: Unknown, Healthy, Unhealthy);
same_variants!(wit::ParametersSource => ParametersSource: DeviceClass, Claim);
same_variants!(HookStage => wit::HookStage:
    Prestart, CreateRuntime, CreateContainer, StartContainer, Poststart, Poststop);
same_variants!(ConditionStatus => wit::ConditionStatus: True, False, Unknown);

impl Convert<(String, String)> for wit::KeyValue {
    fn convert(self) -> (String, String) {
        let wit::KeyValue { key, value } = self;
        (key, value)
    }
}

impl Convert<wit::KeyValue> for (String, String) {
    fn convert(self) -> wit::KeyValue {
        wit::KeyValue {
            key: self.0,
            value: self.1,
        }
    }
}

impl<T: Convert<U>, U> Convert<Option<U>> for Option<T> {
    fn convert(self) -> Option<U> {
        self.map(Convert::convert)
    }
}

same_fields!(wit::Problem => Problem: code, message, retry_after_ms; into kind; all details);
same_fields!(Problem => wit::Problem: code, message, retry_after_ms; into kind; all details);

// From the host.
same_fields!(wit::Context => Context: request_id, node_name, boot_id, now_ms, config; into; all facts);
same_fields!(wit::ClaimRef => ClaimRef: namespace, name, uid; into; all);
same_fields!(wit::Counter => Counter: name, value; into; all);
same_fields!(wit::AllocatedDevice => AllocatedDevice: request, pool, device, share_id, admin_access; into; all consumed);
same_fields!(wit::OpaqueParameters => OpaqueParameters: requests, parameters; into source; all);
same_fields!(wit::Consumer => Consumer: api_group, resource, namespace, name, uid; into; all);
same_fields!(wit::Claim => Claim: progress; into id; all devices, parameters, reserved_for, annotations);
same_fields!(wit::ClaimRecord => ClaimRecord: prepared, memo, driver_version, boot_id; into claim; all);
same_fields!(device_nodes::NodeInfo => NodeInfo: path, major, minor, mode, uid, gid, sysfs_path; into kind; all);
same_fields!(host_files::FileInfo => FileInfo: path, real_path, size; into kind; all);
same_fields!(net_interfaces::NetInterface => NetInterface:
    name, index, hardware_address, mtu, admin_up, device_path; into state; all);

impl Convert<Page> for prepared_claims::Page {
    fn convert(self) -> Page {
        let prepared_claims::Page { claims, next } = self;
        (all(claims), next)
    }
}

impl Convert<Trigger> for discovery::Trigger {
    fn convert(self) -> Trigger {
        match self {
            discovery::Trigger::Load => Trigger::Load,
            discovery::Trigger::Timer => Trigger::Timer,
            discovery::Trigger::Events(directories) => Trigger::Events(directories),
            discovery::Trigger::Request => Trigger::Request,
        }
    }
}

// To the host: the driver's description.
same_fields!(WriteRequest => identity::WriteRequest: glob, pattern; into; all);
same_fields!(BindRequest => identity::BindRequest: functions, drivers; into; all);
same_fields!(Capabilities => identity::Capabilities:
    sysfs_read, host_files, device_nodes, mounts, hooks, env, net_devices; into; all sysfs_write, pci_driver);
same_fields!(Limits => identity::Limits: memory_mib, wall_ms, cpu_ms, concurrent_calls; into; all);
same_fields!(DriverInfo => identity::DriverInfo:
    name, version, summary, event_subsystems, discovery_period_seconds;
    into capabilities, limits; all annotations);

/// Converts a variant whose cases have one value each, in both directions.
macro_rules! both_ways {
    ($name:ident: $($our:ident = $their:ident),*) => {
        impl Convert<wit::$name> for $name {
            fn convert(self) -> wit::$name {
                match self {
                    $($name::$our(value) => wit::$name::$their(value),)*
                }
            }
        }

        impl Convert<$name> for wit::$name {
            fn convert(self) -> $name {
                match self {
                    $(wit::$name::$their(value) => $name::$our(value),)*
                }
            }
        }
    };
}

// The inventory: to the host, and back for `schedule`.
both_ways!(AttributeValue:
    Int = Int, Bool = Boolean, Text = Text, Version = Version, Ints = Ints, Bools = Booleans, Texts = Texts,
    Versions = Versions);

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

impl Convert<CapacityChoice> for wit::CapacityChoice {
    fn convert(self) -> CapacityChoice {
        match self {
            wit::CapacityChoice::Any => CapacityChoice::Any,
            wit::CapacityChoice::Values(values) => CapacityChoice::Values(values),
            wit::CapacityChoice::Range(wit::CapacityRange { min, max, step }) => {
                CapacityChoice::Range { min, max, step }
            }
        }
    }
}

same_fields!(Attribute => wit::Attribute: name; into value; all);
same_fields!(wit::Attribute => Attribute: name; into value; all);
same_fields!(Capacity => wit::Capacity: name, value; into policy; all);
same_fields!(wit::Capacity => Capacity: name, value; into policy; all);
same_fields!(CapacityPolicy => wit::CapacityPolicy: default_amount; into choice; all);
same_fields!(wit::CapacityPolicy => CapacityPolicy: default_amount; into choice; all);
same_fields!(Counter => wit::Counter: name, value; into; all);
same_fields!(CounterSet => wit::CounterSet: name; into; all counters);
same_fields!(wit::CounterSet => CounterSet: name; into; all counters);
same_fields!(Taint => wit::Taint: key, value; into effect; all);
same_fields!(wit::Taint => Taint: key, value; into effect; all);
same_fields!(Device => wit::Device: name, allow_multiple_allocations, identity, numa_nodes;
    into; all attributes, capacities, taints, consumes, annotations);
same_fields!(wit::Device => Device: name, allow_multiple_allocations, identity, numa_nodes;
    into; all attributes, capacities, taints, consumes, annotations);
same_fields!(Pool => wit::Pool: name, extended_resource; into; all devices, shared_counters, annotations);
same_fields!(wit::Pool => Pool: name, extended_resource; into; all devices, shared_counters, annotations);
same_fields!(Inventory => wit::Inventory: ; into; all pools);
same_fields!(wit::Inventory => Inventory: ; into; all pools);

// To the host: results of a prepare.
impl Convert<wit::NodeAccess> for NodeAccess {
    fn convert(self) -> wit::NodeAccess {
        let flag = |is_set: bool, flag: wit::NodeAccess| {
            if is_set {
                flag
            } else {
                wit::NodeAccess::empty()
            }
        };
        flag(self.read, wit::NodeAccess::READ)
            | flag(self.write, wit::NodeAccess::WRITE)
            | flag(self.mknod, wit::NodeAccess::MKNOD)
    }
}

same_fields!(DeviceNode => wit::DeviceNode: path, host_path, major, minor, file_mode, uid, gid; into kind, access; all);
same_fields!(Mount => wit::Mount: host_path, container_path, options, fs_type; into; all);
same_fields!(NetDevice => wit::NetDevice: host_interface, container_interface; into; all);
same_fields!(Hook => wit::Hook: path, args, timeout_seconds; into stage; all env);
same_fields!(IntelRdt => wit::IntelRdt: clos_id, schemata, enable_monitoring; into; all);
same_fields!(ContainerEdits => wit::ContainerEdits: additional_gids; into intel_rdt;
    all env, device_nodes, mounts, net_devices, hooks);
same_fields!(Condition => wit::Condition: kind, reason, message; into status; all);
same_fields!(NetworkData => wit::NetworkData: interface_name, ips, hardware_address; into; all);
same_fields!(DeviceStatus => wit::DeviceStatus: data; into network; all conditions, attributes);
same_fields!(PreparedDevice => wit::PreparedDevice: requests, pool, device, share_id; into edits, status; all);
same_fields!(Prepared => wit::PreparedClaim: memo; into edits; all devices, annotations);

impl Convert<wit::PrepareOutcome> for (String, Result<Prepared, Problem>) {
    fn convert(self) -> wit::PrepareOutcome {
        let (uid, outcome) = self;
        wit::PrepareOutcome {
            uid,
            outcome: outcome.map(Convert::convert).map_err(Convert::convert),
        }
    }
}

impl Convert<wit::UnprepareOutcome> for (String, Result<(), Problem>) {
    fn convert(self) -> wit::UnprepareOutcome {
        let (uid, outcome) = self;
        wit::UnprepareOutcome {
            uid,
            outcome: outcome.map_err(Convert::convert),
        }
    }
}

// To the host: facets.
same_fields!(DeviceReadings => telemetry::DeviceReadings: pool, device; into; all readings);
same_fields!(Reading => telemetry::Reading: name, value; into; all);
same_fields!(LeftOutDevice => left_out::LeftOutDevice: name, reason; into; all);
same_fields!(DeviceHealth => health::DeviceHealth: pool, device, message; into state; all);

impl Convert<scheduling::AllocatableMapping> for AllocatableMapping {
    fn convert(self) -> scheduling::AllocatableMapping {
        match self {
            AllocatableMapping::PerDevice(quantity) => {
                scheduling::AllocatableMapping::PerDevice(quantity)
            }
            AllocatableMapping::PerCapacity {
                capacity,
                multiplier,
            } => {
                let mapping = scheduling::CapacityMapping {
                    capacity,
                    multiplier,
                };
                scheduling::AllocatableMapping::PerCapacity(mapping)
            }
        }
    }
}

impl Convert<scheduling::NodeOperations> for NodeOperations {
    fn convert(self) -> scheduling::NodeOperations {
        use scheduling::NodeOperations as Flags;
        let flag = |is_set: bool, flag: Flags| if is_set { flag } else { Flags::empty() };
        flag(self.prepare, Flags::PREPARE) | flag(self.unprepare, Flags::UNPREPARE)
    }
}

same_fields!(NodeAllocatable => scheduling::NodeAllocatable: resource, per_pod, per_container; into mapping; all);
same_fields!(Compatibility => scheduling::Compatibility: counter_set, groups; into; all);
same_fields!(DeviceScheduling => scheduling::DeviceScheduling:
    pool, device, binds_to_node, binding_conditions, binding_failure_conditions; into; all node_allocatable, compatibility);
same_fields!(PoolScheduling => scheduling::PoolScheduling: pool, partition_type_attribute; into skip_node_operations; all);
same_fields!(Additions => scheduling::Additions: ; into; all devices, pools);

#[cfg(test)]
mod tests {
    use super::super::Exported;
    use super::*;
    use discovery::Guest as _;
    use identity::Guest as _;
    use preparation::Guest as _;

    use super::super::bindings::exports::nodedock::driver::preparation;

    struct Leds;

    impl Driver for Leds {
        fn describe() -> DriverInfo {
            DriverInfo::new("leds.example.com", "0.1.0")
                .sysfs_write("class/leds/*/brightness", "[0-9]+")
        }

        fn discover(_: &Host, ctx: &Context, trigger: &Trigger) -> Result<Inventory, Problem> {
            let Trigger::Events(directories) = trigger else {
                return Err(Problem::unavailable("idle", "no events"));
            };
            let range = CapacityChoice::Range {
                min: "1".into(),
                max: None,
                step: Some("2".into()),
            };
            let policy = CapacityPolicy {
                default_amount: Some("1".into()),
                choice: range,
            };
            let device = Device::new("led-0")
                .attribute("directories", directories.clone())
                .attribute("node", ctx.node_name.as_str())
                .with_capacity(Capacity::new("percent", "100").policy(policy))
                .taint("a", "b", TaintEffect::NoExecute)
                .consumes(CounterSet::new("set").counter("slots", "1"))
                .allow_multiple_allocations(true)
                .identity("led:0")
                .numa_node(1);
            Ok(Inventory::new().pool(Pool::new("leds").device(device)))
        }

        fn prepare(_: &Host, _: &Context, claim: &Claim) -> Result<Prepared, Problem> {
            let parameters = claim
                .parse_parameters::<String>("r/sub")?
                .unwrap_or_default();
            Prepared::each(claim, |device| match device.device.as_str() {
                "led-0" => Ok(ContainerEdits::new()
                    .env("LED", parameters.as_str())
                    .device_node(DeviceNode {
                        kind: Some(NodeKind::Block),
                        ..DeviceNode::new("/dev/led")
                    })
                    .mount(Mount::read_only("/a", "/b"))
                    .net_device("eth0", "net1")
                    .additional_gid(7)),
                name => Err(Problem::not_found("gone", name).with_detail("device", name)),
            })
        }
    }

    fn context() -> wit::Context {
        wit::Context {
            request_id: "q".into(),
            node_name: "n1".into(),
            boot_id: "b".into(),
            now_ms: 5,
            config: "{}".into(),
            facts: Vec::new(),
        }
    }

    fn claim(uid: &str, device: &str) -> wit::Claim {
        let allocated = wit::AllocatedDevice {
            request: "r/sub".into(),
            pool: "leds".into(),
            device: device.into(),
            share_id: Some("s".into()),
            consumed: vec![wit::Counter {
                name: "percent".into(),
                value: "5".into(),
            }],
            admin_access: false,
        };
        let config = wit::OpaqueParameters {
            source: wit::ParametersSource::Claim,
            requests: vec!["r".into()],
            parameters: "\"bright\"".into(),
        };
        wit::Claim {
            id: wit::ClaimRef {
                namespace: "ns".into(),
                name: "c".into(),
                uid: uid.into(),
            },
            devices: vec![allocated],
            parameters: vec![config],
            reserved_for: Vec::new(),
            progress: vec![7],
            annotations: Vec::new(),
        }
    }

    #[test]
    fn a_description_crosses_whole() {
        let info = Exported::<Leds>::describe();
        assert_eq!(
            (info.name.as_str(), info.version.as_str()),
            ("leds.example.com", "0.1.0")
        );
        assert_eq!(info.capabilities.sysfs_write[0].pattern, "[0-9]+");
    }

    #[test]
    fn triggers_and_inventories_are_converted() {
        let trigger = discovery::Trigger::Events(vec!["devices/x".into()]);
        let inventory = Exported::<Leds>::discover(context(), trigger).unwrap();
        let device = &inventory.pools[0].devices[0];
        assert!(
            matches!(&device.attributes[0].value, wit::AttributeValue::Texts(directories) if *directories == ["devices/x"])
        );
        assert!(
            matches!(&device.attributes[1].value, wit::AttributeValue::Text(node) if node == "n1")
        );
        let policy = device.capacities[0].policy.as_ref().unwrap();
        assert!(
            matches!(&policy.choice, wit::CapacityChoice::Range(range) if range.min == "1" && range.step.as_deref() == Some("2"))
        );
        assert!(matches!(
            device.taints[0].effect,
            wit::TaintEffect::NoExecute
        ));
        assert_eq!(device.consumes[0].counters[0].value, "1");
        assert_eq!(
            (device.identity.as_slice(), device.numa_nodes.as_slice()),
            (&["led:0".to_owned()][..], &[1][..])
        );
        assert!(device.allow_multiple_allocations);
    }

    #[test]
    fn problem_is_converted_completely() {
        let problem = Exported::<Leds>::discover(context(), discovery::Trigger::Timer).unwrap_err();
        assert!(matches!(problem.kind, wit::ProblemKind::Unavailable));
        assert_eq!(
            (problem.code.as_str(), problem.message.as_str()),
            ("idle", "no events")
        );
    }

    #[test]
    fn each_claim_gets_its_own_outcome() {
        let claims = vec![claim("one", "led-0"), claim("two", "led-9")];
        let mut outcomes = Exported::<Leds>::prepare(context(), claims);
        let problem = outcomes.pop().unwrap();
        assert_eq!(problem.uid, "two");
        let detail = problem
            .outcome
            .unwrap_err()
            .details
            .pop()
            .unwrap()
            .convert();
        assert_eq!(detail, ("device".to_owned(), "led-9".to_owned()));
        let prepared = outcomes.pop().unwrap().outcome.unwrap();
        let device = &prepared.devices[0];
        assert_eq!(
            (device.requests.as_slice(), device.share_id.as_deref()),
            (&["r".to_owned()][..], Some("s"))
        );
        assert_eq!(
            device.edits.env[0].clone().convert(),
            ("LED".to_owned(), "bright".to_owned())
        );
        assert!(matches!(
            device.edits.device_nodes[0].kind,
            Some(wit::NodeKind::Block)
        ));
        assert_eq!(device.edits.mounts[0].container_path, "/b");
        assert_eq!(device.edits.net_devices[0].container_interface, "net1");
        assert_eq!(device.edits.additional_gids, [7]);
    }

    #[test]
    fn claim_record_reaches_unprepare() {
        let live = wit::ClaimRecord {
            claim: claim("one", "led-0"),
            prepared: true,
            memo: vec![1],
            driver_version: "0.1.0".into(),
            boot_id: "b".into(),
        };
        let outcomes = Exported::<Leds>::unprepare(context(), vec![live]);
        assert_eq!(outcomes[0].uid, "one");
        assert!(outcomes[0].outcome.is_ok());
    }
}
