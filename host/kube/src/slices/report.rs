//! What became of writing slices, for those who ask: by pool, and counted.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::planner::PoolKey;
use nodedock_base::worded;
use nodedock_model::Problem;

worded! {
    /// What was asked of the server.
    Verb {
        Create = "create",
        Update = "update",
        Delete = "delete",
    }
}

worded! {
    /// What came of it.
    Outcome {
        Done = "done",
        /// Somebody else was faster.
        Conflict = "conflict",
        /// The server does not want it.
        Refused = "refused",
        /// The server was not there, or has a problem of its own.
        Failed = "failed",
    }
}

/// A pool of a driver as it stands in the API.
#[derive(Debug, Clone, PartialEq)]
pub struct PoolStatus {
    /// Written as it is to be.
    pub is_current: bool,
    pub slices: usize,
    pub devices: usize,
    pub generation: i64,
    /// Unix milliseconds of the last write that changed something.
    pub written_ms: Option<u64>,
    /// Why it is not written, or what is wrong although it is.
    pub problem: Option<Problem>,
}

/// Handle to what became of writing slices.
#[derive(Debug, Clone, Default)]
pub struct Report(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    pools: Mutex<BTreeMap<PoolKey, PoolStatus>>,
    writes: [[AtomicU64; Outcome::ALL.len()]; Verb::ALL.len()],
    repairs: AtomicU64,
}

impl Report {
    pub fn pools(&self) -> BTreeMap<PoolKey, PoolStatus> {
        self.lock().clone()
    }

    /// Writes by verb and outcome since the start.
    pub fn writes(&self) -> Vec<(Verb, Outcome, u64)> {
        let all = Verb::ALL.iter().flat_map(|verb| Outcome::ALL.iter().map(move |outcome| (*verb, *outcome)));
        all.map(|(verb, outcome)| (verb, outcome, self.count(verb, outcome).load(Relaxed))).collect()
    }

    /// Times that a pool was written since somebody else had changed it.
    pub fn repairs(&self) -> u64 {
        self.0.repairs.load(Relaxed)
    }

    pub(super) fn wrote(&self, verb: Verb, outcome: Outcome) {
        self.count(verb, outcome).fetch_add(1, Relaxed);
    }

    pub(super) fn repaired(&self) {
        self.0.repairs.fetch_add(1, Relaxed);
    }

    /// None: the pool is there no more.
    pub(super) fn tell(&self, key: &PoolKey, status: Option<PoolStatus>) {
        match status {
            Some(status) => drop(self.lock().insert(key.clone(), status)),
            None => drop(self.lock().remove(key)),
        }
    }

    pub fn pool(&self, key: &PoolKey) -> Option<PoolStatus> {
        self.lock().get(key).cloned()
    }

    fn count(&self, verb: Verb, outcome: Outcome) -> &AtomicU64 {
        &self.0.writes[verb as usize][outcome as usize]
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PoolKey, PoolStatus>> {
        self.0.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
