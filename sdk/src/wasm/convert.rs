//! Conversions between the bindings' types and the SDK's, in the directions that calls need.

use super::bindings::exports::nodedock::driver::{discovery, identity};
use super::bindings::nodedock::driver::device_nodes;
use super::bindings::nodedock::driver::log;
use super::bindings::nodedock::driver::types as wit;
use crate::*;

/// Like `Into`. `From` implementations that exist for WebAssembly only would make `?` in drivers ambiguous there and only there.
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

// From the host.
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
            discovery::Trigger::Events(directories) => Trigger::Events(directories),
            discovery::Trigger::Request => Trigger::Request,
        }
    }
}

// To the host: the driver's description.
same_fields!(ValueGrant => identity::ValueGrant: glob, pattern; into; all);
same_fields!(Capabilities => identity::Capabilities:
    sysfs_read, device_nodes, mounts, hooks, env, net_devices; into; all sysfs_write);
same_fields!(Limits => identity::Limits: memory_mib, wall_ms, cpu_ms; into; all);
same_fields!(DriverInfo => identity::DriverInfo:
    name, version, summary, event_subsystems, discovery_period_seconds, annotations;
    into capabilities, limits; all);

// To the host: the inventory.
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

// To the host: results of a prepare.
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
            DriverInfo::new("leds.example.com", "0.1.0").sysfs_write("class/leds/*/brightness", "[0-9]+")
        }

        fn discover(_: &Host, ctx: &Context, trigger: &Trigger) -> Result<Inventory, Problem> {
            let Trigger::Events(directories) = trigger else {
                return Err(Problem::unavailable("idle", "no events"));
            };
            let range = CapacityChoice::Range { min: "1".into(), max: None, step: Some("2".into()) };
            let policy = CapacityPolicy { default_amount: Some("1".into()), choice: range };
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
            let parameters = claim.config::<String>("r/sub")?.unwrap_or_default();
            Prepared::each(claim, |device| match device.device.as_str() {
                "led-0" => Ok(Edits::new()
                    .env("LED", parameters.as_str())
                    .device_node(DeviceNode { kind: Some(NodeKind::Block), ..DeviceNode::new("/dev/led") })
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
            consumed: vec![wit::Counter { name: "percent".into(), value: "5".into() }],
            admin_access: false,
        };
        let config = wit::OpaqueConfig {
            source: wit::ConfigSource::Claim,
            requests: vec!["r".into()],
            parameters: "\"bright\"".into(),
        };
        wit::Claim {
            id: wit::ClaimRef { namespace: "ns".into(), name: "c".into(), uid: uid.into() },
            devices: vec![allocated],
            configs: vec![config],
            annotations: Vec::new(),
        }
    }

    #[test]
    fn a_description_crosses_whole() {
        let info = Exported::<Leds>::describe();
        assert_eq!((info.name.as_str(), info.version.as_str()), ("leds.example.com", "0.1.0"));
        assert_eq!(info.capabilities.sysfs_write[0].pattern, "[0-9]+");
    }

    #[test]
    fn triggers_come_in_and_inventories_go_out() {
        let trigger = discovery::Trigger::Events(vec!["devices/x".into()]);
        let inventory = Exported::<Leds>::discover(context(), trigger).unwrap();
        let device = &inventory.pools[0].devices[0];
        assert!(
            matches!(&device.attributes[0].value, wit::AttributeValue::Texts(directories) if *directories == ["devices/x"])
        );
        assert!(matches!(&device.attributes[1].value, wit::AttributeValue::Text(node) if node == "n1"));
        let policy = device.capacities[0].policy.as_ref().unwrap();
        assert!(
            matches!(&policy.choice, wit::CapacityChoice::Range(range) if range.min == "1" && range.step.as_deref() == Some("2"))
        );
        assert!(matches!(device.taints[0].effect, wit::TaintEffect::NoExecute));
        assert_eq!(device.consumes[0].counters[0].value, "1");
        assert_eq!(
            (device.identity.as_slice(), device.numa_nodes.as_slice()),
            (&["led:0".to_owned()][..], &[1][..])
        );
        assert!(device.allow_multiple_allocations);
    }

    #[test]
    fn a_problem_goes_out_with_all_it_says() {
        let problem = Exported::<Leds>::discover(context(), discovery::Trigger::Timer).unwrap_err();
        assert!(matches!(problem.kind, wit::ProblemKind::Unavailable));
        assert_eq!((problem.code.as_str(), problem.message.as_str()), ("idle", "no events"));
    }

    #[test]
    fn every_claim_of_a_batch_gets_its_own_outcome() {
        let claims = vec![claim("one", "led-0"), claim("two", "led-9")];
        let mut outcomes = Exported::<Leds>::prepare(context(), claims);
        let problem = outcomes.pop().unwrap();
        assert_eq!(problem.uid, "two");
        assert_eq!(problem.outcome.unwrap_err().details, [("device".to_owned(), "led-9".to_owned())]);
        let prepared = outcomes.pop().unwrap().outcome.unwrap();
        let device = &prepared.devices[0];
        assert_eq!(
            (device.requests.as_slice(), device.share_id.as_deref()),
            (&["r".to_owned()][..], Some("s"))
        );
        assert_eq!(device.edits.env, [("LED".to_owned(), "bright".to_owned())]);
        assert!(matches!(device.edits.device_nodes[0].kind, Some(wit::NodeKind::Block)));
        assert_eq!(device.edits.mounts[0].container_path, "/b");
        assert_eq!(device.edits.net_devices[0].container_interface, "net1");
        assert_eq!(device.edits.additional_gids, [7]);
    }

    #[test]
    fn a_live_claim_is_passed_to_unprepare() {
        let live = wit::LiveClaim {
            claim: claim("one", "led-0"),
            memo: vec![1],
            driver_version: "0.1.0".into(),
            boot_id: "b".into(),
        };
        let outcomes = Exported::<Leds>::unprepare(context(), vec![live]);
        assert_eq!(outcomes[0].uid, "one");
        assert!(outcomes[0].outcome.is_ok());
    }
}
