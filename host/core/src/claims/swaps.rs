//! What swapped drivers leave behind: kept code that no claim needs any more, and claims with devices that their driver has no more.

use std::collections::{BTreeMap, BTreeSet};

use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::{RecvError, TryRecvError};

use super::Inner;
use nodedock_model::{Changed, ChangedKind, ClaimRecord, DriverName, Inventory, Problem, limit};

/// Code of the condition that claims hold devices that their driver does not have.
pub(super) const DEVICES_GONE: &str = "claim-devices-gone";
/// Devices that a condition names; the message is one line.
const DEVICES_TOLD_MAX: usize = 8;

/// What changes call for.
#[derive(Debug, Default)]
struct Wanted {
    /// Drivers whose devices changed.
    drivers: BTreeSet<String>,
    /// A claim is gone, or a driver changed.
    collect: bool,
    /// Changes were missed.
    everything: bool,
}

impl Wanted {
    fn add(&mut self, changed: Changed) {
        match changed.kind {
            ChangedKind::Device => drop(self.drivers.insert(changed.name)),
            ChangedKind::Claim => self.collect |= changed.state == "gone",
            ChangedKind::Driver => self.collect = true,
            ChangedKind::Node => {}
        }
    }
}

impl Inner {
    /// Goes on until the tasks stop.
    pub(super) async fn follow_swaps(&self) {
        let mut changes = self.changes.listen();
        let mut sweep = tokio::time::interval(limit::KEPT_SWEEP);
        sweep.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut troubled = BTreeSet::new();
        loop {
            let wanted = tokio::select! {
                // What is left behind is found at the next start.
                () = self.tasks.stopped() => return,
                // A change that is not received stays in the channel.
                first = changes.recv() => match gather(first, &mut changes) {
                    Some(wanted) => wanted,
                    None => return,
                },
                // The first tick is at once: the start.
                _ = sweep.tick() => Wanted { everything: true, ..Wanted::default() },
            };
            self.clear_up(wanted, &mut troubled);
        }
    }

    /// `troubled` are the drivers whose claims were found to hold what they do not have.
    fn clear_up(&self, wanted: Wanted, troubled: &mut BTreeSet<DriverName>) {
        if wanted.collect || wanted.everything || !wanted.drivers.is_empty() {
            self.forget_code();
        }
        let serving = self.registry.all_serving();
        for driver in &serving {
            let (name, Some(inventory)) = (&driver.identity.name, &driver.inventory) else { continue };
            let is_due = wanted.everything || wanted.drivers.contains(name.as_str());
            if is_due || wanted.collect && troubled.contains(name) {
                let lost = self.lost_devices(name, &inventory.borrow().inventory);
                self.tell_lost(name, &lost, troubled);
            }
        }
        // Of a driver that does not serve nobody knows what it has.
        let unknown = |name: &DriverName| !serving.iter().any(|driver| driver.identity.name == *name);
        for name in troubled.extract_if(.., |name| unknown(name)) {
            self.conditions.clear(DEVICES_GONE, name.as_str());
        }
    }

    /// Forgets the code of drivers that nobody serves with and that prepared no claim that is left.
    pub(super) fn forget_code(&self) {
        let Some(predecessors) = self.registry.predecessors() else { return };
        for digest in predecessors.idle() {
            if !self.table.lock().needs_code(&digest) {
                predecessors.forget(&digest);
            }
        }
    }

    /// Devices of a driver's claims that it does not have, each with a claim that holds it.
    fn lost_devices(&self, driver: &DriverName, inventory: &Inventory) -> BTreeMap<String, String> {
        let table = self.table.lock();
        let claims = table.claims_of_driver(driver);
        let holds = |record: &&std::sync::Arc<ClaimRecord>| {
            record.drivers.get(driver).is_some_and(|part| part.prepared.is_some())
        };
        let mut lost = BTreeMap::new();
        for record in claims.filter(holds) {
            let devices = record.allocation.devices.iter().filter(|device| device.driver == *driver);
            for device in devices.filter(|device| inventory.device(&device.pool, &device.device).is_none()) {
                lost.insert(format!("{}/{}", device.pool, device.device), record.id.to_string());
            }
        }
        lost
    }

    fn tell_lost(
        &self,
        driver: &DriverName,
        lost: &BTreeMap<String, String>,
        troubled: &mut BTreeSet<DriverName>,
    ) {
        if lost.is_empty() {
            if troubled.remove(driver) {
                self.conditions.clear(DEVICES_GONE, driver.as_str());
            }
            return;
        }
        troubled.insert(driver.clone());
        self.conditions.set(driver.as_str(), Problem::unavailable(DEVICES_GONE, words(driver, lost)));
    }
}

fn words(driver: &DriverName, lost: &BTreeMap<String, String>) -> String {
    let named = lost.iter().take(DEVICES_TOLD_MAX);
    let mut named: Vec<_> = named.map(|(device, claim)| format!("{device} (claim {claim})")).collect();
    if lost.len() > DEVICES_TOLD_MAX {
        named.push(format!("and {} more", lost.len() - DEVICES_TOLD_MAX));
    }
    format!("claims hold devices that driver {driver} does not have any more: {}", named.join(", "))
}

/// Takes changes that wait together. None: there will be no more.
fn gather(first: Result<Changed, RecvError>, changes: &mut Receiver<Changed>) -> Option<Wanted> {
    let mut wanted = Wanted::default();
    match first {
        Ok(changed) => wanted.add(changed),
        Err(RecvError::Lagged(_)) => wanted.everything = true,
        Err(RecvError::Closed) => return None,
    }
    loop {
        match changes.try_recv() {
            Ok(changed) => wanted.add(changed),
            Err(TryRecvError::Lagged(_)) => wanted.everything = true,
            Err(TryRecvError::Empty | TryRecvError::Closed) => return Some(wanted),
        }
    }
}
