//! A virtual node: its devices as its drivers show them, with the faults of the script, and its claims.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use tokio::sync::watch;

use super::faults::Fault;
use super::machine::Machine;
use nodedock_core::driver::values::NoJournal;
use nodedock_core::driver::{NodeFacts, Published};
use nodedock_core::records::SharedClaimTable;
use nodedock_kube::pools::PoolNames;
use nodedock_kube::slices::DriverSnapshot;
use nodedock_model::{DriverName, ObjectName};
use nodedock_wasm::{Trigger, WasmDriver};

pub(super) struct VirtualNode {
    pub(super) name: ObjectName,
    pub(super) machine: Arc<Machine>,
    pub(super) claims: Arc<SharedClaimTable>,
    /// Inventories that the drivers found, without faults.
    found: Mutex<BTreeMap<DriverName, Arc<Published>>>,
    faults: Mutex<Vec<Arc<Fault>>>,
    shown: watch::Sender<DriverSnapshot>,
}

impl VirtualNode {
    pub(super) fn new(name: ObjectName, machine: Arc<Machine>) -> Self {
        Self {
            name,
            machine,
            claims: Arc::default(),
            found: Mutex::default(),
            faults: Mutex::default(),
            shown: watch::Sender::default(),
        }
    }

    /// The drivers with their inventories, as the slices are derived from them.
    pub(super) fn drivers(&self) -> watch::Receiver<DriverSnapshot> {
        self.shown.subscribe()
    }

    pub(super) fn pool_names(&self) -> PoolNames {
        PoolNames {
            node: self.name.clone(),
        }
    }

    /// A driver as it is called on this node.
    pub(super) fn driver(&self, driver: &WasmDriver) -> WasmDriver {
        let facts = NodeFacts {
            name: self.name.to_string(),
            boot_id: self.machine.boot_id.clone(),
        };
        driver.on_node(facts, self.claims.clone(), Arc::new(NoJournal))
    }

    /// Has every driver discover its devices. Equal answers of nodes share their memory.
    pub(super) async fn discover(&self) -> Result<()> {
        for driver in &self.machine.drivers {
            let here = self.driver(driver);
            let found = here.publish(&here.look_call(), Trigger::Load).await;
            let name = &driver.info().name;
            let found =
                found.with_context(|| format!("discovery of {name} on node {}", self.name))?;
            let missing = here.missing_resources(&found.inventory);
            anyhow::ensure!(
                missing.is_empty(),
                "{name} is not granted: {}",
                missing.join("; ")
            );
            self.found
                .lock()
                .insert(name.clone(), self.machine.share(name, found));
        }
        self.show();
        Ok(())
    }

    /// Replaces the faults that the node has.
    pub(super) fn set_faults(&self, faults: Vec<Arc<Fault>>) {
        let before = std::mem::replace(&mut *self.faults.lock(), faults);
        let is_same = self
            .faults
            .lock()
            .iter()
            .map(Arc::as_ptr)
            .eq(before.iter().map(Arc::as_ptr));
        if !is_same {
            self.show();
        }
    }

    fn show(&self) {
        let (found, faults) = (self.found.lock(), self.faults.lock());
        let serving = found.iter().map(|(driver, found)| {
            let shown = faults.iter().filter(|fault| fault.is_of(driver));
            (
                driver.clone(),
                shown.fold(Arc::clone(found), |found, fault| fault.applied(found)),
            )
        });
        let serving: BTreeMap<_, _> = serving.collect();
        let present = serving.keys().cloned().collect();
        self.shown.send_replace(DriverSnapshot {
            serving,
            present,
            is_settled: true,
            ..DriverSnapshot::default()
        });
    }

    pub(super) fn device_count(&self) -> usize {
        self.found
            .lock()
            .values()
            .map(|found| found.inventory.device_count())
            .sum()
    }

    /// Pools that are in slices: devices of an extended resource are not.
    pub(super) fn pool_count(&self) -> usize {
        let drivers = self.shown.borrow();
        let pools = drivers
            .serving
            .values()
            .flat_map(|found| found.inventory.pools.values());
        pools
            .filter(|pool| pool.extended_resource.is_none() && !pool.devices.is_empty())
            .count()
    }
}
