//! The device manager: extended resources, and what pods hold of them.
//!
//! Is given device plugins that registered, pools of drivers that carry a resource's name, and pods' requests; keeps each step in
//! the checkpoint (intent before the call, result before the answer). The plugin, or the driver's inventory, is the only truth for
//! devices and health. Never prepares a claim: devices of a pool are chosen here, and held by a claim that somebody else prepares.

mod view;

pub use view::{
    Capacity, DeviceHolders, DeviceView, HintScope, ResourceHints, ResourceOutcome, ResourceSource,
    ResourceView, TopologyHint,
};
