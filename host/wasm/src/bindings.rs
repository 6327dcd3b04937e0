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
});

/// The types that calls exchange, by which the conversions name them.
pub mod types {
    use super::exports::nodedock::driver as exports;
    use super::nodedock::driver;

    pub use driver::claims::{
        AllocatedDevice, Claim, ClaimRecord, ClaimRef, Condition, ConditionStatus, Consumer, DeviceStatus,
        NetworkData, OpaqueParameters, ParametersSource, PreparedClaim, PreparedDevice, UnprepareOutcome,
    };
    pub use driver::common::{Context, KeyValue, Problem, ProblemKind};
    pub use driver::container_edits::{
        ContainerEdits, DeviceNode, Hook, HookStage, IntelRdt, Mount, NetDevice, NodeAccess, NodeKind,
    };
    pub use driver::inventory::{
        Attribute, AttributeValue, Capacity, CapacityChoice, CapacityPolicy, Counter, CounterSet, Device,
        Inventory, Pool, Taint, TaintEffect,
    };
    pub use exports::health::{DeviceHealth, HealthState};
}
