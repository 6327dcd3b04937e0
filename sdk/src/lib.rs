//! Write a device driver for Nodedock.
#![deny(missing_docs)]

mod claim;
mod context;
mod driver;
mod edits;
mod health;
mod host;
mod info;
mod inventory;
mod json;
mod prepared;
mod problem;
#[cfg(not(target_family = "wasm"))]
pub mod testing;
#[cfg(any(target_family = "wasm", test))]
#[doc(hidden)]
#[allow(missing_docs, missing_debug_implementations, unreachable_pub, dead_code)]
pub mod wasm;

pub use claim::{AllocatedDevice, Claim, ClaimRef, ConfigSource, LiveClaim, OpaqueConfig};
pub use context::{Context, Trigger};
pub use driver::{Configuration, Driver, Health, Outcomes};
pub use edits::{DeviceNode, Edits, Hook, IntelRdt, Mount, NetDevice, NodeKind};
pub use health::{DeviceHealth, HealthState};
pub use host::{DeviceNodes, Host, Ledger, Level, Log, NodeInfo, Sysfs};
pub use info::{Capabilities, DriverInfo, Limits, ValueGrant};
pub use inventory::{
    Attribute, AttributeValue, Capacity, CapacityChoice, CapacityPolicy, Counter, CounterSet, Device,
    Inventory, Pool, Taint, TaintEffect, dns_label, dns_label_hashed,
};
pub use json::parse_json;
pub use prepared::{Condition, DeviceStatus, NetworkData, Prepared, PreparedDevice};
pub use problem::{Problem, ProblemKind};

/// Makes a crate (of type `cdylib`) the driver that a type implements, with the optional facets that are named after a colon.
///
/// What is not named is not exported, and the host does not ask for it. Elsewhere than on WebAssembly the macro only checks that
/// the type implements what is named. Call it once in a crate.
///
/// ```
/// # use nodedock_sdk::*;
/// # struct Leds;
/// # impl Driver for Leds {
/// #     fn describe() -> DriverInfo { DriverInfo::new("leds.example.com", "0.1.0") }
/// #     fn discover(_: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> { Ok(Inventory::new()) }
/// #     fn prepare(_: &Host, _: &Context, claim: &Claim) -> Result<Prepared, Problem> { Ok(Prepared::new()) }
/// # }
/// # impl Configuration for Leds {}
/// nodedock_sdk::export_driver!(Leds: Configuration);
/// # fn main() {}
/// ```
///
/// A facet that the type does not implement does not compile:
///
/// ```compile_fail
/// # use nodedock_sdk::*;
/// # struct Leds;
/// # impl Driver for Leds {
/// #     fn describe() -> DriverInfo { DriverInfo::new("leds.example.com", "0.1.0") }
/// #     fn discover(_: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> { Ok(Inventory::new()) }
/// #     fn prepare(_: &Host, _: &Context, claim: &Claim) -> Result<Prepared, Problem> { Ok(Prepared::new()) }
/// # }
/// nodedock_sdk::export_driver!(Leds: Health);
/// # fn main() {}
/// ```
#[cfg(not(target_family = "wasm"))]
#[macro_export]
macro_rules! export_driver {
    ($driver:ty $(: $($facet:ident),+ $(,)?)?) => {
        const _: () = {
            const fn implements<D: $crate::Driver $($(+ $crate::$facet)+)?>() {}
            implements::<$driver>();
        };
    };
}

/// Makes a crate the driver that a type implements.
#[cfg(target_family = "wasm")]
#[macro_export]
macro_rules! export_driver {
    ($driver:ty $(: $($facet:ident),+ $(,)?)?) => {
        const _: () = {
            type Exported = $crate::wasm::Exported<$driver>;
            $crate::wasm::bindings::__export_driver_world!(Exported with_types_in $crate::wasm::bindings);
            $($($crate::export_driver!(@ $facet Exported);)+)?
        };
    };
    (@ Configuration $exported:ident) => {
        $crate::wasm::configuration::__export_configuration_facet!(
            $exported with_types_in $crate::wasm::configuration
        );
    };
    (@ Health $exported:ident) => {
        $crate::wasm::health::__export_health_facet!($exported with_types_in $crate::wasm::health);
    };
}
