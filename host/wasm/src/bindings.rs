//! The code that `bindgen!` generates for the contract. Of its types, other crates see only `Trigger`.

#![allow(unreachable_pub, unused_variables, clippy::all)]

wasmtime::component::bindgen!({
    path: "../../wit",
    world: "full-driver",
    imports: {
        "nodedock:driver/log": trappable,
        default: async | trappable,
    },
    exports: { default: async },
    // A refusal is a result of a host function, and not a trap.
    trappable_error_type: { "nodedock:driver/common.problem" => nodedock_model::Problem },
    // For recordings.
    additional_derives: [serde::Serialize, serde::Deserialize],
});

/// Serializes flags as a list of their names, for recordings.
macro_rules! flags_as_names {
    ($flags:ty: $($flag:ident),*) => {
        impl serde::Serialize for $flags {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let all = [$((stringify!($flag), Self::$flag)),*];
                serializer.collect_seq(all.iter().filter(|(_, flag)| self.contains(*flag)).map(|(name, _)| name))
            }
        }

        impl<'de> serde::Deserialize<'de> for $flags {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let mut flags = Self::empty();
                for name in <Vec<String> as serde::Deserialize>::deserialize(deserializer)? {
                    flags |= match name.as_str() {
                        $(stringify!($flag) => Self::$flag,)*
                        name => return Err(serde::de::Error::custom(format!("no such flag: {name}"))),
                    };
                }
                Ok(flags)
            }
        }
    };
}

flags_as_names!(nodedock::driver::container_edits::NodeAccess: READ, WRITE, MKNOD);
flags_as_names!(exports::nodedock::driver::scheduling::NodeOperations: PREPARE, UNPREPARE);

/// The types that calls exchange, by which the conversions name them.
pub mod types {
    use super::exports::nodedock::driver as exports;
    use super::nodedock::driver;

    pub use driver::claims::{
        AllocatedDevice, Claim, ClaimRecord, ClaimRef, Condition, ConditionStatus, Consumer,
        DeviceStatus, NetworkData, OpaqueParameters, ParametersSource, PrepareOutcome,
        PreparedClaim, PreparedDevice, UnprepareOutcome,
    };
    pub use driver::common::{Context, KeyValue, Problem, ProblemKind};
    pub use driver::container_edits::{
        ContainerEdits, DeviceNode, Hook, HookStage, IntelRdt, Mount, NetDevice, NodeAccess,
        NodeKind,
    };
    pub use driver::inventory::{
        Attribute, AttributeValue, Capacity, CapacityChoice, CapacityPolicy, Counter, CounterSet,
        Device, Inventory, Pool, Taint, TaintEffect,
    };
    pub use exports::health::{DeviceHealth, HealthState};
    pub use exports::left_out::LeftOutDevice;
    pub use exports::telemetry::{DeviceReadings, Reading};
}
