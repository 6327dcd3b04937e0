//! The outcome of publishing slices, by pool and in numbers: for metrics, health and `get`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::slice::PoolKey;
use nodedock_base::worded;
use nodedock_model::Problem;

worded! {
    /// A kind of write.
    Verb {
        Create = "create",
        Update = "update",
        Delete = "delete",
    }
}

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

/// Handle to the report.
#[derive(Debug, Clone, Default)]
pub struct SliceReport(Arc<Mutex<Counted>>);

#[derive(Debug, Default)]
struct Counted {
    pools: BTreeMap<PoolKey, PoolStatus>,
    writes: [[u64; Outcome::ALL.len()]; Verb::ALL.len()],
    repairs: u64,
}

impl SliceReport {
    pub fn pools(&self) -> BTreeMap<PoolKey, PoolStatus> {
        self.lock().pools.clone()
    }

    pub fn pool(&self, key: &PoolKey) -> Option<PoolStatus> {
        self.lock().pools.get(key).cloned()
    }

    /// Returns the number of writes by verb and outcome.
    pub fn writes(&self) -> Vec<(Verb, Outcome, u64)> {
        let counted = self.lock();
        let all = Verb::ALL.iter().flat_map(|verb| Outcome::ALL.iter().map(move |outcome| (*verb, *outcome)));
        all.map(|(verb, outcome)| (verb, outcome, counted.writes[verb as usize][outcome as usize])).collect()
    }

    /// Returns how often a pool was written again because others had changed it.
    pub fn repairs(&self) -> u64 {
        self.lock().repairs
    }

    pub(super) fn wrote(&self, verb: Verb, outcome: Outcome) {
        self.lock().writes[verb as usize][outcome as usize] += 1;
    }

    pub(super) fn repaired(&self) {
        self.lock().repairs += 1;
    }

    pub(super) fn set(&self, key: &PoolKey, status: PoolStatus) {
        self.lock().pools.insert(key.clone(), status);
    }

    pub(super) fn remove(&self, key: &PoolKey) {
        self.lock().pools.remove(key);
    }

    fn lock(&self) -> MutexGuard<'_, Counted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
