//! The outcome of publishing slices, by pool and in numbers: for metrics, health and `get`.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use super::FailedDevices;
use super::convert::host_taints;
use super::health::TaintedDevices;
use crate::client::Verb;
use crate::pools::PoolKey;
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
    /// True if the server has it as desired.
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
    tainted: Arc<Mutex<Tainted>>,
    /// Writes by verb and outcome.
    pub writes: Family<WriteLabels, Counter>,
    /// Number of times that a pool was written again because others had changed it.
    pub repairs: Counter,
}

/// The devices that are to have taints of the host.
#[derive(Debug, Default)]
struct Tainted {
    unhealthy: BTreeMap<DriverName, TaintedDevices>,
    failed: FailedDevices,
}

type WriteLabels = [(&'static str, &'static str); 2];

impl Default for SliceReport {
    fn default() -> Self {
        let report = Self {
            pools: Arc::default(),
            tainted: Arc::default(),
            writes: Family::default(),
            repairs: Counter::default(),
        };
        // The samples exist from the start.
        for (verb, outcome) in WRITES
            .iter()
            .flat_map(|verb| Outcome::ALL.iter().map(move |o| (verb, o)))
        {
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

    /// Returns the taints that a device has in its slice from the host, by the driver's own name of the pool. `own`: those that it has from
    /// its driver.
    pub(crate) fn host_taints(
        &self,
        driver: &DriverName,
        pool: &PoolName,
        device: &DeviceName,
        own: &[Taint],
    ) -> Vec<Taint> {
        let tainted = self.tainted.lock();
        let of_driver = tainted.unhealthy.get(driver);
        let unhealthy = of_driver.and_then(|devices| devices.get(&(pool.clone(), device.clone())));
        let has_failed = tainted
            .failed
            .contains(&(driver.clone(), pool.clone(), device.clone()));
        host_taints(own, unhealthy, has_failed)
    }

    pub(super) fn set_tainted(
        &self,
        unhealthy: BTreeMap<DriverName, TaintedDevices>,
        failed: &FailedDevices,
    ) {
        *self.tainted.lock() = Tainted {
            unhealthy,
            failed: failed.clone(),
        };
    }

    pub(super) fn writes(&self, verb: Verb, outcome: Outcome) -> Counter {
        self.writes
            .get_or_create_owned(&[("verb", verb.as_str()), ("outcome", outcome.as_str())])
    }

    pub(super) fn set(&self, key: &PoolKey, status: PoolStatus) {
        self.pools.lock().insert(key.clone(), status);
    }

    pub(super) fn remove(&self, key: &PoolKey) {
        self.pools.lock().remove(key);
    }
}
