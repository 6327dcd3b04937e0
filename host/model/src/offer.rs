//! Records of how the devices of this node are offered: the adapters of device plugins, the mechanism of each pool with an extended-resource
//! name, and what a kubelet was offered before a restart.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr};

use super::{
    AttributeRule, DriverName, ExtendedResource, NameRecord, Named, NodeRecord, PluginDevice,
    PoolName, Uid,
};

/// An adapter of a device plugin: the operator's decision, and the devices that pods of a kubelet had before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdapterRecord {
    pub resource: ExtendedResource,
    pub driver: DriverName,
    pub pool: PoolName,
    /// The operator's decision. `None`: the adapter's file decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enabled: Option<bool>,
    /// The paths that the adapter allows, for a start at which its file cannot be read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paths: Option<Vec<String>>,
    /// The rules of the adapter, for such a start: without them other drivers could have the same hardware.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<AttributeRule>,
    /// It is disabled, and the kubelet's device manager alone offers its devices.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_returned: bool,
    /// The devices that pods of the kubelet had before the adapter are known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub is_taken_over: bool,
    /// Devices of pods from before the adapter that are not free yet.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub held: BTreeSet<String>,
}

impl AdapterRecord {
    pub fn new(resource: ExtendedResource, driver: DriverName, pool: PoolName) -> Self {
        Self {
            resource,
            driver,
            pool,
            enabled: None,
            paths: None,
            rules: Vec::new(),
            is_returned: false,
            is_taken_over: false,
            held: BTreeSet::new(),
        }
    }

    /// Returns the key of the record.
    pub fn key(&self) -> Uid {
        NameRecord::key(&Named::Resource(self.resource.clone()))
    }
}

/// The mechanism that allocates the free devices of a pool with an extended-resource name.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    Display,
    IntoStaticStr,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum Mechanism {
    /// The kubelet's device manager, to which the daemon is a device plugin.
    DevicePlugin,
    /// The scheduler, by ResourceSlices and a DeviceClass.
    Dra,
}

impl Mechanism {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// The only mechanism that may have devices of each pool with an extended-resource name.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MechanismsRecord {
    /// The last decision for the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decided: Option<Mechanism>,
    /// Mechanisms by driver and pool, ascending.
    pub pools: Vec<PoolMechanism>,
}

impl MechanismsRecord {
    /// Returns the key of the one record.
    pub fn key() -> Uid {
        Uid::new(NodeRecord::KEY).expect("it has letters only")
    }
}

/// The mechanism of one pool.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct PoolMechanism {
    pub driver: DriverName,
    /// The driver's own name of the pool.
    pub pool: PoolName,
    pub resource: ExtendedResource,
    pub mechanism: Mechanism,
}

/// A driver that is offered to the kubelet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverOffer {
    pub driver: DriverName,
    /// The process starts whose sockets may be there.
    pub starts: BTreeSet<String>,
    /// The kubelet has registered it by the sockets of the last one.
    pub registered: bool,
}

impl DriverOffer {
    /// Returns the key of the record.
    pub fn key(&self) -> Uid {
        NameRecord::key(&Named::Driver(self.driver.clone()))
    }
}

/// Devices of an extended resource that are offered to the kubelet: of pools of one driver, or of a native device plugin.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceOffer {
    pub resource: ExtendedResource,
    #[serde(flatten)]
    pub source: OfferSource,
    /// Devices by ID, ascending.
    pub devices: Vec<PluginDevice>,
}

impl ResourceOffer {
    /// Returns the key of the record.
    pub fn key(&self) -> Uid {
        NameRecord::key(&Named::Resource(self.resource.clone()))
    }
}

/// The source of the devices of an offer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OfferSource {
    /// Pools of this driver.
    Driver(DriverName),
    /// A native device plugin, with its options.
    Plugin(DeviceOptions),
}

impl OfferSource {
    /// Returns what the kubelet is to call.
    pub fn options(&self) -> DeviceOptions {
        match self {
            Self::Driver(_) => DeviceOptions {
                pre_start_required: false,
                preferred_allocation_available: true,
            },
            Self::Plugin(options) => *options,
        }
    }

    pub fn driver(&self) -> Option<&DriverName> {
        match self {
            Self::Driver(driver) => Some(driver),
            Self::Plugin(_) => None,
        }
    }
}

/// Options of a device plugin.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceOptions {
    /// `pre_start` must be called before each start of a container.
    pub pre_start_required: bool,
    /// `preferred_allocation` may be called.
    pub preferred_allocation_available: bool,
}
