//! ResourceSlices from the inventories of drivers.
//!
//! Is given which drivers serve with what (`Drivers`), what the server has (`SliceEvent`) and which Node object is ours; writes what
//! differs, and nothing else. `planner` decides what is written for a pool, `pace` when, `health` which devices are tainted, `writer`
//! carries out. Slices are ours if their driver serves here, or if they say so by a label and their driver is here no more. Slices of
//! other nodes, and those of native plugins, are never touched. They stay when we stop, and while a driver is loaded, lost, blocked or
//! in quarantine; they go when its file does.

mod assign;
mod content;
mod drivers;
mod health;
mod names;
mod pace;
mod planner;
mod quantity;
mod remote;
mod report;
#[cfg(test)]
mod tests;
mod view;
mod wire;
mod writer;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

pub use content::{Content, Entry, UNHEALTHY};
pub use drivers::{Drivers, Look, RegistryDrivers};
pub use names::PoolNames;
pub use planner::{Counters, Draft, Held, Owner, PoolKey};
pub use remote::{RemoteSlices, SliceEvents};
pub use report::{Outcome, PoolStatus, Report, Verb};
pub use view::SliceEvent;

use crate::facts::NodeFacts;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::TaintEffect;

/// Code of the condition that the server refuses a pool, or that it cannot be told to it.
pub const REFUSED: &str = "slices-refused";
/// That the server leaves out fields of what a driver says.
pub const FIELDS_DROPPED: &str = "slice-fields-dropped";
/// That somebody else writes a pool of ours as well.
pub const CONTESTED: &str = "slices-contested";
/// That slices of a driver that seems to be gone stay.
pub const KEPT: &str = "slices-kept";

/// What is chosen about slices.
#[derive(Debug, Clone)]
pub struct SliceSettings {
    pub names: PoolNames,
    /// The effect of the taint of unhealthy devices.
    pub unhealthy: TaintEffect,
    /// Whether pools that are offered under an extended resource's name are told as slices too. Then a scheduler may promise a device
    /// twice, and the second pod is refused on the node.
    pub with_resource_pools: bool,
}

/// What slices stand on.
pub struct SliceParts {
    pub api: Arc<dyn SliceApi>,
    /// Of all slices of this node.
    pub events: SliceEvents,
    pub drivers: Box<dyn Drivers>,
    /// None: not known yet, or there is none.
    pub node: watch::Receiver<Option<NodeFacts>>,
    /// Called when somebody changed or deleted slices of ours: a Node object that was made anew has another UID, and whatever belongs
    /// to the old one is collected.
    pub doubt_node: Box<dyn Fn() + Send + Sync>,
    pub settings: SliceSettings,
    pub conditions: Conditions,
    pub report: Report,
    pub tasks: Tasks,
}

/// Starts the task that writes the slices; it ends with the tasks.
pub fn start(parts: SliceParts) {
    let tasks = parts.tasks.clone();
    tasks.spawn("slices", writer::Writer::run(parts));
}

/// Slices at the API server.
#[async_trait]
pub trait SliceApi: Send + Sync {
    /// Where this server wants counter sets.
    fn counters(&self) -> Counters;

    /// None: there is none of this name.
    async fn get(&self, name: &str) -> Result<Option<Held>, SliceError>;

    /// The slice as the server made it.
    async fn create(&self, generate_name: &str, draft: &Draft) -> Result<Held, SliceError>;

    /// The same for one that is there and is still as `was`.
    async fn update(&self, was: &Held, draft: &Draft) -> Result<Held, SliceError>;

    /// Deletes a slice if it is still this one.
    async fn delete(&self, name: &str, uid: &str, resource_version: &str) -> Result<(), SliceError>;
}

/// A write or a read that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SliceError {
    /// It is another than we thought, or has just been made by somebody else.
    #[error("{0}")]
    Conflict(String),
    #[error("{0}")]
    NotFound(String),
    /// Sending the same again would not help.
    #[error("{0}")]
    Refused(String),
    /// The server is not there, or wants to be left alone.
    #[error("{words}")]
    Away { words: String, retry_after: Option<Duration> },
}
