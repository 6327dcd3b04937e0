//! The drivers of the registry, as far as slices depend on them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;

use nodedock_base::changes::Changes;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::Published;
use nodedock_core::registry::Registry;
use nodedock_model::{ChangedKind, DriverKind, DriverName};

/// Delay from the first change of slices to the reconcile: changes come in bursts.
pub(crate) const SLICE_SETTLE: Duration = Duration::from_millis(100);

/// The drivers at a moment.
#[derive(Debug, Clone, Default)]
pub struct DriverSnapshot {
    /// Drivers that serve and have an inventory. A native plugin publishes its slices itself.
    pub serving: BTreeMap<DriverName, Arc<Published>>,
    /// All drivers, in any state.
    pub present: BTreeSet<DriverName>,
    /// The native plugins among them.
    pub native: BTreeSet<DriverName>,
    /// Driver files whose driver's name is not known: a driver that is missing may be in one of them.
    pub nameless: Vec<String>,
    /// True if all files that existed at the start have been examined.
    pub is_settled: bool,
}

impl DriverSnapshot {
    fn of(registry: &Registry, is_settled: bool) -> Self {
        let serving = registry
            .instances
            .all()
            .into_iter()
            .filter_map(|driver| {
                let published = driver.inventory?.borrow().clone();
                Some((driver.identity.name.clone(), published))
            })
            .collect();
        let mut snapshot = Self {
            serving,
            is_settled,
            ..Self::default()
        };
        snapshot.present.extend(snapshot.serving.keys().cloned());
        for view in registry.list() {
            match view.name {
                Some(name) => {
                    if view.kind == DriverKind::Grpc {
                        snapshot.native.insert(name.clone());
                    }
                    snapshot.present.insert(name);
                }
                None if view.kind == DriverKind::Wasm => snapshot.nameless.push(view.source),
                None => {}
            }
        }
        snapshot
    }
}

/// Publishes the drivers of the registry after each change, at most once in [`SLICE_SETTLE`]. `settled` becomes true when all
/// files that were there at the start have been examined.
pub fn watch_drivers(
    registry: Registry,
    changes: &Changes,
    mut settled: watch::Receiver<bool>,
    tasks: &Tasks,
) -> watch::Receiver<DriverSnapshot> {
    let [mut drivers, mut devices] =
        [ChangedKind::Driver, ChangedKind::Device].map(|kind| changes.signal_of(kind));
    let mut serving = registry.instances.changes();
    let (publish, snapshots) =
        watch::channel(DriverSnapshot::of(&registry, *settled.borrow_and_update()));
    tasks.spawn_until_stopped("slice-drivers", async move {
        loop {
            tokio::select! {
                Ok(()) = drivers.changed() => {}
                Ok(()) = devices.changed() => {}
                Ok(()) = serving.changed() => {}
                Ok(()) = settled.changed() => {}
            }
            tokio::time::sleep(SLICE_SETTLE).await;
            publish.send_replace(DriverSnapshot::of(&registry, *settled.borrow()));
        }
    });
    snapshots
}
