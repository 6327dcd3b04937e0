//! Counters of requests to the API server.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use http::Method;

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

/// Resources that are counted by their name.
const RESOURCES: [&str; 5] = ["resourceclaims", "resourceslices", "pods", "nodes", "events"];

/// Seconds: a healthy API server answers in milliseconds, and a request ends after ten seconds.
const SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

/// What a request is counted as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Call {
    pub(super) verb: Verb,
    resource: &'static str,
}

impl Call {
    pub(super) fn of(method: &Method, uri: &http::Uri) -> Self {
        let mut parts = uri.path().split('/').filter(|part| !part.is_empty());
        // `api/VERSION` or `apis/GROUP/VERSION`.
        let head = if parts.next() == Some("apis") { 2 } else { 1 };
        let mut parts = parts.skip(head);
        let resource = match parts.next() {
            Some("namespaces") => parts.nth(1),
            resource => resource,
        };
        let known = RESOURCES.into_iter().find(|known| resource == Some(*known));
        let is_watch = || {
            uri.query().unwrap_or_default().split('&').any(|part| matches!(part, "watch=true" | "watch=1"))
        };
        let verb = match *method {
            Method::POST => Verb::Create,
            Method::PUT => Verb::Update,
            Method::PATCH => Verb::Patch,
            Method::DELETE => Verb::Delete,
            _ if is_watch() => Verb::Watch,
            _ if known.is_some() && parts.next().is_none() => Verb::List,
            _ => Verb::Get,
        };
        Self { verb, resource: known.unwrap_or("other") }
    }
}

#[derive(Debug)]
pub(super) struct Counts {
    /// By call and status code; code 0 is no answer. There are few resources, and few codes.
    requests: Mutex<BTreeMap<(Call, u16), u64>>,
    seconds: Histogram,
    retries: AtomicU64,
    waits: Histogram,
}

/// What was counted, at a moment.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestCounts {
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
            waits: Histogram::new(SECONDS),
        }
    }
}

impl Counts {
    pub(super) fn answered(&self, call: Call, code: u16, took: Duration) {
        *self.requests.lock().unwrap_or_else(PoisonError::into_inner).entry((call, code)).or_default() += 1;
        if call.verb != Verb::Watch {
            self.seconds.observe_time(took);
        }
    }

    pub(super) fn waited(&self, waited: Duration) {
        self.waits.observe_time(waited);
    }

    pub(super) fn retried(&self) {
        self.retries.fetch_add(1, Relaxed);
    }

    pub(super) fn view(&self, watch_restarts: u64) -> RequestCounts {
        let requests = self.requests.lock().unwrap_or_else(PoisonError::into_inner);
        RequestCounts {
            requests: requests
                .iter()
                .map(|((call, code), &n)| (call.verb, call.resource, *code, n))
                .collect(),
            seconds: self.seconds.view(),
            retries: self.retries.load(Relaxed),
            watch_restarts,
            waits: self.waits.view(),
        }
    }
}
