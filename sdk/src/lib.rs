//! Write a device driver for Nodedock: one trait, one macro, tests without hardware.
//!
//! A driver maps its arguments and the files that it may read to an inventory of devices ([`Driver::discover`]) and to the changes
//! in a container that uses one ([`Driver::prepare`]). The host owns time, files, kernel events and Kubernetes. It calls a driver in
//! a sandbox that may last for one call only, with the capabilities that the driver [requests](Driver::describe) and the operator
//! grants.
//!
//! This is a complete driver, for LEDs. `crate-type = ["cdylib"]` and a build for `wasm32-unknown-unknown` turn it into a file for the
//! host's drivers directory. The test below it runs on the developer's machine.
//!
//! ```
//! use nodedock_sdk::*;
//!
//! struct Leds;
//!
//! nodedock_sdk::export_driver!(Leds);
//!
//! impl Driver for Leds {
//!     fn describe() -> DriverInfo {
//!         DriverInfo::new("leds.example.com", "0.1.0")
//!             .sysfs_read(["class/leds/*"])
//!             .sysfs_write("class/leds/*/brightness", "[0-9]{1,3}")
//!             .env(["LED_*"])
//!             .events(["leds"])
//!     }
//!
//!     fn discover(host: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> {
//!         let leds = leds(host)?.into_iter().map(|(name, path)| Device::new(name).identity(format!("led:{path}")));
//!         Ok(Inventory::new().pool(Pool::new("leds").devices(leds)))
//!     }
//!
//!     fn prepare(host: &Host, _: &Context, claim: &Claim) -> Result<Prepared, Problem> {
//!         Prepared::each(claim, |device| {
//!             let brightness = claim.parse_parameters::<u8>(&device.request)?.unwrap_or(255);
//!             let Some((_, path)) = leds(host)?.into_iter().find(|(name, _)| *name == device.device) else {
//!                 return Err(Problem::not_found("no-such-led", format!("there is no LED {}", device.device)));
//!             };
//!             host.sysfs().write(&format!("{path}/brightness"), &brightness.to_string())?;
//!             Ok(ContainerEdits::new().env("LED_PATH", format!("/sys/{path}")))
//!         })
//!     }
//!
//!     fn unprepare(host: &Host, _: &Context, record: &ClaimRecord) -> Result<(), Problem> {
//!         let uses = |name: &str| record.claim.devices.iter().any(|device| device.device == name);
//!         for (_, path) in leds(host)?.into_iter().filter(|(name, _)| uses(name)) {
//!             host.sysfs().write(&format!("{path}/brightness"), "0")?;
//!         }
//!         Ok(())
//!     }
//! }
//!
//! /// Names of devices and directories below `/sys`. An LED may be called `input3::capslock`, a device may not.
//! fn leds(host: &Host) -> Result<Vec<(String, String)>, Problem> {
//!     let paths = host.sysfs().glob("class/leds/*")?;
//!     Ok(paths.into_iter().map(|path| (dns_label(path.trim_start_matches("class/leds/")), path)).collect())
//! }
//!
//! # #[cfg(not(target_family = "wasm"))]
//! # fn main() -> Result<(), Problem> {
//! use nodedock_sdk::testing::Harness;
//!
//! let node = Harness::<Leds>::new();
//! node.fake()
//!     .file("devices/platform/leds/led:front/brightness", "0\n")
//!     .link("class/leds/led:front", "../../devices/platform/leds/led:front");
//! assert!(node.discover()?.device("leds", "led-front").is_some());
//!
//! let claim = Claim::new("default", "lamp", "uid-1")
//!     .device("r", "leds", "led-front")
//!     .with_parameters(ParametersSource::Claim, [], "80");
//! node.prepare(&claim)?;
//! assert_eq!(node.fake().writes()[0].value, "80");
//!
//! node.unprepare("uid-1")?;
//! assert_eq!(node.fake().writes()[1].value, "0");
//! # Ok(())
//! # }
//! ```
//!
//! # What a driver imports
//!
//! A function of the host that a driver does not call leaves no import in its binary, so that the import list shows what the
//! driver can do at most. Every driver imports the log: a panic is logged with its location before it traps. A build for
//! `wasm32-wasip2` works as well; there the standard library adds imports of WASI, which give access to nothing.
#![deny(missing_docs)]

pub mod address;
mod claim;
mod context;
mod driver;
mod edits;
mod facts;
#[cfg(not(target_family = "wasm"))]
mod fake_node;
mod health;
mod host;
mod info;
mod inventory;
mod json;
mod left_out;
pub mod pci;
mod pools;
mod prepared;
mod problem;
mod scheduling;
mod telemetry;
#[cfg(not(target_family = "wasm"))]
pub mod testing;
mod text;
#[cfg(any(target_family = "wasm", test))]
#[doc(hidden)]
#[allow(
    missing_docs,
    missing_debug_implementations,
    unreachable_pub,
    dead_code
)]
pub mod wasm;

pub use claim::{
    AllocatedDevice, Claim, ClaimRecord, ClaimRef, Consumer, OpaqueParameters, ParametersSource,
};
pub use context::{Context, Trigger};
pub use driver::{Configuration, Driver, Health, LeftOut, Outcomes, Scheduling, Telemetry};
pub use edits::{
    ContainerEdits, DeviceNode, Hook, HookStage, IntelRdt, Mount, NetDevice, NodeAccess, NodeKind,
};
pub use facts::{FileInfo, FileKind, Level, NetInterface, NodeInfo, OperationalState};
pub use health::{DeviceHealth, HealthState};
pub use host::{
    DeviceNodes, Host, HostFiles, Log, NetInterfaces, POWER_FILES, PciDriver, PreparedClaims,
    Progress, Sysfs,
};
pub use info::{BindRequest, Capabilities, DriverInfo, Limits, WriteRequest};
pub use inventory::{
    Attribute, AttributeValue, Capacity, CapacityChoice, CapacityPolicy, Counter, CounterSet,
    Device, Inventory, Pool, Taint, TaintEffect, dns_label, dns_label_hashed,
};
pub use json::parse_json;
pub use left_out::LeftOutDevice;
pub use pools::{PoolConfig, PoolDriver, Pools};
pub use prepared::{
    Condition, ConditionStatus, DeviceStatus, NetworkData, Prepared, PreparedDevice,
};
pub use problem::{Problem, ProblemKind, present};
pub use scheduling::{
    Additions, AllocatableMapping, Compatibility, DeviceScheduling, NodeAllocatable,
    NodeOperations, PoolScheduling,
};
pub use telemetry::{DeviceReadings, Reading};
pub use text::{beginning, last_segment, matches_wildcards, printable};

/// Exports a type that implements [`Driver`] from a crate of type `cdylib`, with the optional facets after the colon.
///
/// A facet that is not named is not exported, and the host does not call it. On targets other than WebAssembly the macro only checks
/// that the type implements the facets. Call it once in a crate.
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
///
/// Nor does one that the type implements and that is not named, since the host would never call it:
///
/// ```compile_fail
/// # use nodedock_sdk::*;
/// # struct Leds;
/// # impl Driver for Leds {
/// #     fn describe() -> DriverInfo { DriverInfo::new("leds.example.com", "0.1.0") }
/// #     fn discover(_: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> { Ok(Inventory::new()) }
/// #     fn prepare(_: &Host, _: &Context, claim: &Claim) -> Result<Prepared, Problem> { Ok(Prepared::new()) }
/// # }
/// # impl Configuration for Leds {}
/// nodedock_sdk::export_driver!(Leds);
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
        $crate::__refuse_unnamed_facets!($driver $(: $($facet),+)?);
    };
}

/// Fails the build if the type implements a facet that is not named.
///
/// A constant of the type itself comes before one of a trait, so that the type's is found only where it implements the facet.
#[doc(hidden)]
#[macro_export]
macro_rules! __refuse_unnamed_facets {
    ($driver:ty $(: $($facet:ident),+)?) => {
        const _: () = {
            const NAMED: &[&str] = &[$($(stringify!($facet)),+)?];
            $crate::__refuse_unnamed_facets!(@ $driver, Configuration);
            $crate::__refuse_unnamed_facets!(@ $driver, Health);
            $crate::__refuse_unnamed_facets!(@ $driver, LeftOut);
            $crate::__refuse_unnamed_facets!(@ $driver, Scheduling);
            $crate::__refuse_unnamed_facets!(@ $driver, Telemetry);
        };
    };
    (@ $driver:ty, $facet:ident) => {
        const _: () = {
            #[allow(dead_code)]
            struct Probe<D>(::core::marker::PhantomData<D>);
            trait Absent {
                const IS_IMPLEMENTED: bool = false;
            }
            impl<D> Absent for Probe<D> {}
            #[allow(dead_code)]
            impl<D: $crate::$facet> Probe<D> {
                const IS_IMPLEMENTED: bool = true;
            }
            assert!(
                !<Probe<$driver>>::IS_IMPLEMENTED || $crate::is_named(NAMED, stringify!($facet)),
                concat!(
                    "the driver implements ", stringify!($facet),
                    ", which export_driver! does not name, so that the host would never call it: export_driver!(",
                    stringify!($driver), ": ", stringify!($facet), ")"
                )
            );
        };
    };
}

/// Returns whether a facet is among those that are named.
#[doc(hidden)]
pub const fn is_named(named: &[&str], facet: &str) -> bool {
    let mut at = 0;
    while at < named.len() {
        if same(named[at].as_bytes(), facet.as_bytes()) {
            return true;
        }
        at += 1;
    }
    false
}

const fn same(one: &[u8], other: &[u8]) -> bool {
    if one.len() != other.len() {
        return false;
    }
    let mut at = 0;
    while at < one.len() {
        if one[at] != other[at] {
            return false;
        }
        at += 1;
    }
    true
}

/// Exports a type that implements [`Driver`].
#[cfg(target_family = "wasm")]
#[macro_export]
macro_rules! export_driver {
    ($driver:ty $(: $($facet:ident),+ $(,)?)?) => {
        const _: () = {
            type Exported = $crate::wasm::Exported<$driver>;
            $crate::wasm::bindings::__export_driver_world!(Exported with_types_in $crate::wasm::bindings);
            $($($crate::export_driver!(@ $facet Exported);)+)?
        };
        $crate::__refuse_unnamed_facets!($driver $(: $($facet),+)?);
    };
    (@ Configuration $exported:ident) => {
        $crate::wasm::configuration::__export_configuration_facet!(
            $exported with_types_in $crate::wasm::configuration
        );
    };
    (@ Scheduling $exported:ident) => {
        $crate::wasm::scheduling::__export_scheduling_facet!($exported with_types_in $crate::wasm::scheduling);
    };
    (@ Telemetry $exported:ident) => {
        $crate::wasm::telemetry::__export_telemetry_facet!($exported with_types_in $crate::wasm::telemetry);
    };
    (@ LeftOut $exported:ident) => {
        $crate::wasm::left_out::__export_left_out_facet!($exported with_types_in $crate::wasm::left_out);
    };
    (@ Health $exported:ident) => {
        $crate::wasm::health::__export_health_facet!($exported with_types_in $crate::wasm::health);
    };
}
