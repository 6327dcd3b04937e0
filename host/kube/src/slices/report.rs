//! The outcome of publishing slices, by pool and in numbers: for metrics, health and `get`.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use super::convert::has_room;
use super::entry::UNHEALTHY;
use super::health::TaintedDevices;
use super::slice::PoolKey;
use crate::client::Verb;
use nodedock_base::worded;
use nodedock_model::{DeviceName, DriverName, PoolName, Problem, Taint};

/// The kinds of writes.
pub(super) const WRITES: [Verb; 3] = [Verb::Create, Verb::Update, Verb::Delete];

worded! {
    /// The outcome of a write.
    Outcome {
        Done = "done",
        /// Another writer was faster.
        Conflict = "conflict",
        Refused = "refused",
        /// The server was not reached or could not answer.
        Failed = "failed",
    }
}

/// A published pool.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PoolStatus {
    /// Whether the server has it as desired.
    pub is_current: bool,
    pub slices: usize,
    pub devices: usize,
    pub generation: i64,
    /// Unix milliseconds of the last write.
    pub written_ms: Option<u64>,
    /// Why it is not current.
    pub problem: Option<Problem>,
}

/// Handle to the report. Clones share it.
#[derive(Debug, Clone)]
pub struct SliceReport {
    pools: Arc<Mutex<BTreeMap<PoolKey, PoolStatus>>>,
    /// The devices of each driver that are to have the taint of unhealthy ones.
    unhealthy: Arc<Mutex<BTreeMap<DriverName, TaintedDevices>>>,
    /// By verb and outcome.
    pub writes: Family<WriteLabels, Counter>,
    /// How often a pool was written again because others had changed it.
    pub repairs: Counter,
}

type WriteLabels = [(&'static str, &'static str); 2];

impl Default for SliceReport {
    fn default() -> Self {
        let report = Self {
            pools: Arc::default(),
            unhealthy: Arc::default(),
            writes: Family::default(),
            repairs: Counter::default(),
        };
        // The samples exist from the start.
        for (verb, outcome) in WRITES.iter().flat_map(|verb| Outcome::ALL.iter().map(move |o| (verb, o))) {
            drop(report.writes(*verb, *outcome));
        }
        report
    }
}

impl SliceReport {
    pub fn pools(&self) -> BTreeMap<PoolKey, PoolStatus> {
        self.pools.lock().clone()
    }

    pub fn pool(&self, key: &PoolKey) -> Option<PoolStatus> {
        self.pools.lock().get(key).cloned()
    }

    /// Returns the taint that a device has in its slice because it is unhealthy, by the driver's own name of the pool. `own`: the taints
    /// that it has from its driver.
    pub(crate) fn unhealthy(
        &self,
        driver: &DriverName,
        pool: &PoolName,
        device: &DeviceName,
        own: &[Taint],
    ) -> Option<Taint> {
        let unhealthy = self.unhealthy.lock();
        let taint = unhealthy.get(driver)?.get(&(pool.clone(), device.clone())).filter(|_| has_room(own))?;
        Some(Taint { key: UNHEALTHY.to_owned(), value: taint.value.clone(), effect: taint.effect() })
    }

    pub(super) fn set_unhealthy(&self, devices: BTreeMap<DriverName, TaintedDevices>) {
        *self.unhealthy.lock() = devices;
    }

    pub(super) fn writes(&self, verb: Verb, outcome: Outcome) -> Counter {
        self.writes.get_or_create_owned(&[("verb", verb.as_str()), ("outcome", outcome.as_str())])
    }

    pub(super) fn set(&self, key: &PoolKey, status: PoolStatus) {
        self.pools.lock().insert(key.clone(), status);
    }

    pub(super) fn remove(&self, key: &PoolKey) {
        self.pools.lock().remove(key);
    }
}
