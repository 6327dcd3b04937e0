//! Extended resources of this node's drivers: each pool with a resource's name is offered either to the kubelet as a device plugin, or in
//! ResourceSlices with a DeviceClass (KEP-5004), and never by both.
//!
//! Owns the decision (`decide` for the node, `switch` for each pool) and its durable record. Is given the drivers' pools, and what the
//! slices' writer and the kubelet bridge have carried out and know to be in use. Emits the mechanism of each pool, which slices and bridge
//! follow, and conditions about DeviceClasses (`classes`). Never writes to the cluster. `task` has the effects.

mod apply;
mod classes;
mod decide;
mod switch;
mod task;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use tokio::sync::watch;

pub use apply::{Applied, apply_class};
pub use classes::{attribute, class_name, manifest};
pub use decide::{Decision, MechanismSetting, Version};
pub use switch::{LocalPool, Mechanisms, PoolStatus, PoolsInUse};
pub use task::{LoadedSwitch, SwitchParts, decided};

pub(crate) use classes::ATTRIBUTE;

use self::switch::Reported;
use nodedock_base::signal::Listener;

pub use nodedock_model::Mechanism;

/// Handle to the mechanisms.
#[derive(Clone)]
pub struct ExtendedResources(Arc<Shared>);

struct Shared {
    mechanisms: watch::Sender<Arc<Mechanisms>>,
    reported: watch::Sender<Reported>,
}

impl ExtendedResources {
    fn new(mechanisms: Mechanisms) -> Self {
        Self(Arc::new(Shared {
            mechanisms: watch::Sender::new(Arc::new(mechanisms)),
            reported: watch::Sender::default(),
        }))
    }

    /// Every pool with a name is offered by this mechanism, from the beginning.
    pub fn fixed(mechanism: Mechanism) -> Self {
        Self::new(Mechanisms {
            fixed: Some(mechanism),
            ..Mechanisms::default()
        })
    }

    pub fn mechanisms(&self) -> Arc<Mechanisms> {
        self.0.mechanisms.borrow().clone()
    }

    pub(crate) fn changes(&self) -> watch::Receiver<Arc<Mechanisms>> {
        self.0.mechanisms.subscribe()
    }

    /// Changes what bridge or slices report. The pools in use are those after the lists of the generation have replaced others.
    pub(crate) fn report(&self, change: impl FnOnce(&mut Reported)) {
        self.0.reported.send_if_modified(|reported| {
            let before = reported.clone();
            change(reported);
            *reported != before
        });
    }
}

#[cfg(test)]
impl ExtendedResources {
    /// Every pool with a name is offered by another mechanism from this generation on.
    pub(crate) fn set_fixed(&self, mechanism: Mechanism, generation: u64) {
        let fixed = Some(mechanism);
        self.0.mechanisms.send_replace(Arc::new(Mechanisms {
            generation,
            fixed,
            ..Mechanisms::default()
        }));
    }

    /// Resolves with the pools in use when the kubelet's lists are of a generation.
    pub(crate) async fn lists_of(&self, generation: u64) -> PoolsInUse {
        let mut reported = self.0.reported.subscribe();
        let is_of = |reported: &Reported| reported.lists == generation;
        let reported = reported.wait_for(is_of).await.expect("a handle is there");
        reported.in_use.clone()
    }

    pub(crate) fn in_use(&self) -> PoolsInUse {
        self.0.reported.borrow().in_use.clone()
    }
}

/// Resolves when an adapter changed.
pub(crate) async fn changed(adapters: &mut Option<Listener>) {
    let is_there = match adapters {
        Some(adapters) => adapters.changed().await.is_ok(),
        None => false,
    };
    if !is_there {
        std::future::pending().await
    }
}
