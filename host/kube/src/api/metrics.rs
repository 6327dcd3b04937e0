//! What is counted of requests to the API server.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use nodedock_base::metrics::{Histogram, HistogramView};
use nodedock_base::worded;

worded! {
    Verb {
        Get = "get",
        List = "list",
        Watch = "watch",
        Create = "create",
        Update = "update",
        Patch = "patch",
        Delete = "delete",
    }
}

/// Seconds: an API server that is well answers in milliseconds, and a request ends after ten seconds.
const SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

#[derive(Debug)]
pub(super) struct Counts {
    /// By verb, resource and code; code 0 is no answer. There are few resources, and few codes.
    requests: Mutex<BTreeMap<(Verb, &'static str, u16), u64>>,
    seconds: Histogram,
    pub(super) retries: AtomicU64,
    pub(super) watch_restarts: AtomicU64,
    waits: Histogram,
}

/// What was counted, at a moment.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiCounts {
    /// Verb, resource, status code (0: no answer) and how often.
    pub requests: Vec<(Verb, &'static str, u16, u64)>,
    /// Of requests with their answers, but for watches.
    pub seconds: HistogramView,
    pub retries: u64,
    pub watch_restarts: u64,
    /// Seconds for which requests waited for their turn.
    pub waits: HistogramView,
}

impl Default for Counts {
    fn default() -> Self {
        Self {
            requests: Mutex::default(),
            seconds: Histogram::new(SECONDS),
            retries: AtomicU64::default(),
            watch_restarts: AtomicU64::default(),
            waits: Histogram::new(SECONDS),
        }
    }
}

impl Counts {
    pub(super) fn answered(&self, verb: Verb, resource: &'static str, code: u16, took: Duration) {
        let mut requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        *requests.entry((verb, resource, code)).or_default() += 1;
        drop(requests);
        if verb != Verb::Watch {
            self.seconds.observe_time(took);
        }
    }

    pub(super) fn waited(&self, waited: Duration) {
        self.waits.observe_time(waited);
    }

    pub(super) fn view(&self) -> ApiCounts {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        ApiCounts {
            requests: requests
                .iter()
                .map(|(&(verb, resource, code), &n)| (verb, resource, code, n))
                .collect(),
            seconds: self.seconds.view(),
            retries: self.retries.load(Relaxed),
            watch_restarts: self.watch_restarts.load(Relaxed),
            waits: self.waits.view(),
        }
    }
}
