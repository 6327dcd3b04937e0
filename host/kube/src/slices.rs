//! ResourceSlices of the drivers on this node.
//!
//! Given the drivers with their inventories, a watch of this node's slices and the Node object, it writes what differs, and nothing else:
//! `desired` derives the content of each pool, `diff` the writes for one pool, `pace` decides when they are due, `reconcile` carries them
//! out. A slice is ours if its driver serves here, or if it has our label and its driver is no longer here. Slices of other nodes and of
//! native plugins are never touched. Slices stay when the daemon stops and while a driver is loaded, lost, blocked or quarantined; they are
//! deleted with the driver's file.

mod api;
mod assign;
mod conditions;
mod convert;
mod desired;
mod diff;
mod entry;
pub mod former;
mod health;
mod pace;
mod pools;
mod reconcile;
mod report;
mod slice;
mod store;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use kube::api::DynamicObject;
use kube::runtime::watcher::Event;
use tokio::sync::{Semaphore, watch};

pub use crate::drivers::{DriverSnapshot, watch_drivers};
pub use crate::pools::PoolKey;
pub use health::UnhealthyDevice;
pub use report::{PoolStatus, SliceReport};
pub(crate) use slice::has_our_label;

use crate::client::{ApiError, DraResource, KubeClient};
use crate::extended_resources::ExtendedResources;
use crate::facts::Facts;
use crate::pools::PoolNames;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_core::registry::OwnDevices;
use nodedock_model::{
    BindingConditions, DeviceName, DriverName, NodeAllocatable, ObjectName, PoolName,
};

/// Called with each device that became unhealthy: once until it has been healthy for a while.
pub type OnUnhealthy = Arc<dyn Fn(&UnhealthyDevice) + Send + Sync>;

/// The slices of a node, as [`KubeClient::watch`] reports them.
pub type SliceEvents = BoxStream<'static, Result<Event<DynamicObject>, ApiError>>;

/// Watches the slices of one node.
pub fn watch_slices(kube: &KubeClient, node: &ObjectName) -> SliceEvents {
    let fields = format!("spec.nodeName={node}");
    kube.watch(
        "resource slices of this node",
        DraResource::Slices,
        None,
        fields,
        None,
    )
    .boxed()
}

/// Operator's additions to the devices of drivers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SliceSettings {
    /// Time for which a device has to be unhealthy until its pods are evicted; `None`: they are not.
    pub evict_after: Option<Duration>,
    /// Overheads of devices. Of several for a device and a resource the last applies.
    pub overhead: Vec<Overhead>,
    /// Binding conditions of devices. Those that a device's driver names take precedence; of several rules for a device the last applies.
    pub binding: Vec<BindingRule>,
}

/// Conditions of devices for which a scheduler waits before it binds a pod (KEP-5007).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindingRule {
    pub driver: DriverName,
    /// Pool, by the driver's name for it; `None`: every pool.
    pub pool: Option<PoolName>,
    pub conditions: BindingConditions,
}

/// A device, by the names that its driver gives.
pub type FailedDevice = (DriverName, PoolName, DeviceName);

/// Devices that could not be prepared before a pod was bound. They have a taint.
pub type FailedDevices = BTreeSet<FailedDevice>;

/// Node's own resources that a device uses beside itself (KEP-5517).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overhead {
    pub driver: DriverName,
    /// Pool, by the driver's name for it; `None`: every pool.
    pub pool: Option<PoolName>,
    /// Amounts by the resource's name.
    pub resources: BTreeMap<String, NodeAllocatable>,
}

/// Dependencies of the slices.
pub struct SliceParts {
    pub kube: KubeClient,
    /// One permit for each write at a time, shared by everything that publishes slices with this client.
    pub turns: Arc<Semaphore>,
    pub drivers: watch::Receiver<DriverSnapshot>,
    /// The owner of the slices. Read again after others changed slices of ours: a Node object that was created again has another UID,
    /// and the slices of the old one are garbage-collected.
    pub node: Facts,
    pub names: PoolNames,
    /// Is given the devices of native plugins, which publish themselves.
    pub own_devices: Arc<OwnDevices>,
    pub on_unhealthy: OnUnhealthy,
    pub settings: watch::Receiver<SliceSettings>,
    pub failed: watch::Receiver<FailedDevices>,
    /// The mechanism of each pool with an extended-resource name.
    pub extended_resources: ExtendedResources,
    pub conditions: Conditions,
    pub report: SliceReport,
    pub tasks: Tasks,
}

/// Starts the task that writes the slices; it ends with the tasks.
pub fn start(parts: SliceParts, events: SliceEvents) {
    let tasks = parts.tasks.clone();
    // A write that is interrupted is found by the next start.
    tasks.spawn_until_stopped("slices", reconcile::Reconciler::run(parts, events));
}
