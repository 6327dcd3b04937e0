//! Which drivers there are, as far as slices have to know.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{broadcast, watch};

use nodedock_base::changes::Changes;
use nodedock_core::driver::Published;
use nodedock_core::registry::Registry;
use nodedock_model::{Changed, ChangedKind, DriverKind, DriverName};

/// The drivers at a moment.
#[derive(Debug, Clone, Default)]
pub struct Look {
    /// Those that serve and tell what they have. A native plugin tells the API itself.
    pub serving: BTreeMap<DriverName, Arc<Published>>,
    /// Those that are there, in whatever state.
    pub present: BTreeSet<DriverName>,
    /// Of these, native plugins.
    pub native: BTreeSet<DriverName>,
    /// Files of which it is not known whose they are: a driver that is missing may be in one.
    pub nameless: Vec<String>,
    /// False: not everything that was there at the start has been looked at.
    pub is_settled: bool,
}

/// Tells which drivers there are.
#[async_trait]
pub trait Drivers: Send {
    fn look(&self) -> Look;

    /// Returns when a look may find something new. Nothing is lost if it is dropped.
    async fn changed(&mut self);
}

/// The drivers of the registry.
pub struct RegistryDrivers {
    registry: Registry,
    changes: broadcast::Receiver<Changed>,
    serving: watch::Receiver<u64>,
    settled: watch::Receiver<bool>,
}

impl RegistryDrivers {
    /// `settled` becomes true when everything that was there at the start has been looked at.
    pub fn new(registry: Registry, changes: &Changes, settled: watch::Receiver<bool>) -> Self {
        let serving = registry.serving_changes();
        Self { changes: changes.listen(), registry, serving, settled }
    }
}

#[async_trait]
impl Drivers for RegistryDrivers {
    fn look(&self) -> Look {
        let told = |driver: nodedock_core::driver::Driver| {
            let published = driver.inventory?.borrow().clone();
            Some((driver.identity.name.clone(), published))
        };
        let serving = self.registry.all_serving().into_iter().filter_map(told).collect();
        let mut look = Look { serving, is_settled: *self.settled.borrow(), ..Look::default() };
        for view in self.registry.list() {
            match view.name {
                Some(name) => {
                    if view.kind == DriverKind::Grpc {
                        look.native.insert(name.clone());
                    }
                    look.present.insert(name);
                }
                None if view.kind == DriverKind::Wasm => look.nameless.push(view.source),
                // A native plugin's slices are its own.
                None => {}
            }
        }
        look.present.extend(look.serving.keys().cloned());
        look
    }

    async fn changed(&mut self) {
        loop {
            tokio::select! {
                // What is not received stays in its channel, for each of the three.
                change = self.changes.recv() => match change {
                    Ok(Changed { kind: ChangedKind::Driver | ChangedKind::Device, .. }) => return,
                    Ok(_) => {}
                    Err(broadcast::error::RecvError::Lagged(_)) => return,
                    Err(broadcast::error::RecvError::Closed) => return std::future::pending().await,
                },
                Ok(()) = self.serving.changed() => return,
                Ok(()) = self.settled.changed() => return,
            }
        }
    }
}
