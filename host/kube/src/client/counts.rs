//! Metrics of requests to the API server.

use std::time::Duration;

use http::Method;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use nodedock_base::metrics::call_seconds;
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
const RESOURCES: [&str; 5] = [
    "resourceclaims",
    "resourceslices",
    "pods",
    "nodes",
    "events",
];

/// Labels with which a request is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
        let mut query = uri.query().unwrap_or_default().split('&');
        let is_watch = query.any(|part| matches!(part, "watch=true" | "watch=1"));
        let verb = match *method {
            Method::POST => Verb::Create,
            Method::PUT => Verb::Update,
            Method::PATCH => Verb::Patch,
            Method::DELETE => Verb::Delete,
            _ if is_watch => Verb::Watch,
            _ if known.is_some() && parts.next().is_none() => Verb::List,
            _ => Verb::Get,
        };
        Self {
            verb,
            resource: known.unwrap_or("other"),
        }
    }
}

/// A request that was answered.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct AnsweredLabels {
    pub verb: &'static str,
    pub resource: &'static str,
    /// The status code; 0 is no answer.
    pub code: u16,
}

/// Metrics of requests since the start.
#[derive(Debug)]
pub struct RequestMetrics {
    /// There are few resources, and few codes.
    pub requests: Family<AnsweredLabels, Counter>,
    /// Seconds of requests with their answers, but for watches.
    pub seconds: Histogram,
    /// Seconds for which requests waited for the rate limit.
    pub waits: Histogram,
    /// Requests that were repeated with newer credentials.
    pub retries: Counter,
    pub watch_restarts: Counter,
}

impl Default for RequestMetrics {
    fn default() -> Self {
        let (requests, retries, watch_restarts) = Default::default();
        Self {
            requests,
            seconds: call_seconds(),
            waits: call_seconds(),
            retries,
            watch_restarts,
        }
    }
}

impl RequestMetrics {
    pub(super) fn answered(&self, call: Call, code: u16, took: Duration) {
        let labels = AnsweredLabels {
            verb: call.verb.as_str(),
            resource: call.resource,
            code,
        };
        self.requests.get_or_create(&labels).inc();
        if call.verb != Verb::Watch {
            self.seconds.observe(took.as_secs_f64());
        }
    }

    /// Returns the requests of a verb for a resource with a status code that means success.
    pub(crate) fn succeeded(&self, verb: Verb, resource: &'static str) -> u64 {
        (200..300)
            .map(|code| {
                let labels = AnsweredLabels {
                    verb: verb.as_str(),
                    resource,
                    code,
                };
                self.requests.get(&labels).map_or(0, |count| count.get())
            })
            .sum()
    }
}
