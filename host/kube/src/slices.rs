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
mod drivers;
mod entry;
mod health;
mod pace;
mod quantity;
mod reconcile;
mod report;
mod slice;
mod store;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

pub use drivers::{DriverSnapshot, watch_drivers};
pub use health::UnhealthyDevice;
pub use report::{PoolStatus, SliceReport};
pub use slice::PoolKey;

use crate::client::KubeClient;
use crate::facts::Facts;
use crate::pools::PoolNames;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::ObjectName;

/// Delay from the first change of slices to the reconcile: changes come in bursts.
const SLICE_SETTLE: Duration = Duration::from_millis(100);

/// Called with each device that became unhealthy: once until it has been healthy for a while.
pub type OnUnhealthy = Arc<dyn Fn(&UnhealthyDevice) + Send + Sync>;

/// What the slices depend on.
pub struct SliceParts {
    pub kube: KubeClient,
    pub node_name: ObjectName,
    pub drivers: watch::Receiver<DriverSnapshot>,
    /// The owner of the slices. Read again after others changed slices of ours: a Node object that was created again has another UID,
    /// and the slices of the old one are garbage-collected.
    pub node: Facts,
    pub names: PoolNames,
    pub on_unhealthy: OnUnhealthy,
    pub conditions: Conditions,
    pub report: SliceReport,
    pub tasks: Tasks,
}

/// Starts the task that writes the slices; it ends with the tasks.
pub fn start(parts: SliceParts) {
    let tasks = parts.tasks.clone();
    // A write that is interrupted is found by the next start.
    tasks.spawn_until_stopped("slices", reconcile::Reconciler::run(parts));
}
