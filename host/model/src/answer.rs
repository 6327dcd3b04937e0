//! Answers of a driver as the contract has them, with plain texts and lists, and their conversion into the model.
//!
//! Everything from a driver is checked here, once: names, bounds, duplicates. An answer with a violation is refused as a whole. The host
//! converts the answers of guests, and the SDK's fake host those of drivers under test, so both refuse the same. Pure.

mod claim;
mod identity;
mod inventory;
mod left_out;
mod scheduling;
mod telemetry;
#[cfg(test)]
mod tests;

use super::{
    BindingConditions, Capacity, DeviceHealth, Edits, LeftOutDevice, Taint, UnparsedValue,
};

pub use claim::prepared_claim;
pub use identity::{Description, description, problem};
pub use inventory::{health, inventory};
pub use left_out::left_out;
pub use scheduling::add_scheduling;
pub use telemetry::readings;

/// Keys and values.
pub type Labels = Vec<(String, String)>;

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Inventory {
    pub pools: Vec<Pool>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pool {
    pub name: String,
    pub devices: Vec<Device>,
    pub shared_counters: Vec<CounterSet>,
    pub extended_resource: Option<String>,
    pub annotations: Labels,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct Device {
    pub name: String,
    pub attributes: Vec<Attribute>,
    pub capacities: Vec<(String, Capacity)>,
    pub taints: Vec<Taint>,
    pub consumes: Vec<CounterSet>,
    pub allow_multiple_allocations: bool,
    pub identity: Vec<String>,
    pub numa_nodes: Vec<u32>,
    pub annotations: Labels,
}

pub type Attribute = (String, UnparsedValue);

#[derive(Debug, Clone, Default, PartialEq)]
pub struct CounterSet {
    pub name: String,
    /// Names and amounts.
    pub counters: Vec<(String, String)>,
}

/// Health of a device, by the names of its pool and itself.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Health {
    pub pool: String,
    pub device: String,
    pub health: DeviceHealth,
}

/// Names and values of what is measured of a device.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeviceReadings {
    pub pool: String,
    pub device: String,
    pub readings: Vec<(String, f64)>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct PreparedClaim {
    pub devices: Vec<PreparedDevice>,
    pub edits: Edits,
    pub annotations: Labels,
    pub memo: Vec<u8>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct PreparedDevice {
    pub requests: Vec<String>,
    pub pool: String,
    pub device: String,
    pub share_id: Option<String>,
    pub edits: Edits,
    pub status: Option<DeviceStatus>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeviceStatus {
    /// Status without its attributes.
    pub status: super::DeviceStatus,
    pub attributes: Vec<Attribute>,
}

/// Additions for the scheduler to an inventory.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Additions {
    pub devices: Vec<DeviceScheduling>,
    pub pools: Vec<PoolScheduling>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeviceScheduling {
    pub pool: String,
    pub device: String,
    pub binds_to_node: bool,
    pub binding: BindingConditions,
    /// Amounts by resource of the node.
    pub node_allocatable: Vec<(String, UnparsedAllocatable)>,
    /// Groups by consumed counter set.
    pub compatibility: Vec<(String, Vec<String>)>,
}

/// Amount that a device takes of a resource of the node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct UnparsedAllocatable {
    pub mapping: Option<UnparsedMapping>,
    pub per_pod: Option<String>,
    pub per_container: Option<String>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum UnparsedMapping {
    PerDevice(String),
    PerCapacity {
        capacity: String,
        multiplier: String,
    },
}

#[derive(Debug, Clone, Default, PartialEq)]
pub struct PoolScheduling {
    pub pool: String,
    pub partition_type_attribute: Option<String>,
    pub skips_prepare: bool,
    pub skips_unprepare: bool,
}
