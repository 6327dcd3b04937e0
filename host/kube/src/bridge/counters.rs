//! What the kubelets' calls came to, since our start.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tonic::Code;

use super::connections::Gauge;
use nodedock_base::metrics::CLAIM_SECONDS;
use nodedock_base::metrics::{Histogram, HistogramView};
use nodedock_model::DriverName;
use nodedock_model::limit::BRIDGE_DRIVERS_MAX;

/// A call of the DRA API.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Method {
    PrepareV1,
    UnprepareV1,
    PrepareV1beta1,
    UnprepareV1beta1,
}

/// What a kubelet wants of claims.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Operation {
    Prepare,
    Unprepare,
}

impl Operation {
    /// As a kubelet calls it.
    fn as_str(self) -> &'static str {
        match self {
            Self::Prepare => "PrepareResources",
            Self::Unprepare => "UnprepareResources",
        }
    }
}

impl Method {
    /// Its path in gRPC.
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::PrepareV1 => "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodePrepareResources",
            Self::UnprepareV1 => "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources",
            Self::PrepareV1beta1 => "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodePrepareResources",
            Self::UnprepareV1beta1 => "/k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin/NodeUnprepareResources",
        }
    }

    pub(super) fn operation(self) -> Operation {
        match self {
            Self::PrepareV1 | Self::PrepareV1beta1 => Operation::Prepare,
            Self::UnprepareV1 | Self::UnprepareV1beta1 => Operation::Unprepare,
        }
    }
}

/// Counted while the bridge works. Bounded by the drivers, methods and codes that there are.
#[derive(Debug, Default)]
pub struct Counters {
    pub(super) registrations: AtomicU64,
    pub(super) refusals: AtomicU64,
    pub(super) connections: Arc<Gauge>,
    in_flight: AtomicU64,
    calls: Mutex<BTreeMap<CallKey, Histogram>>,
    operations: Mutex<BTreeMap<(Operation, bool), Histogram>>,
}

/// Methods, each with an answer, a refusal and a caller that went away.
const CALL_KINDS: usize = 4 * 3;

/// Driver, method and the code's number.
type CallKey = (DriverName, Method, i32);

/// The counters at a moment.
#[derive(Debug, Clone, PartialEq)]
pub struct CountersView {
    /// Times that a kubelet said that a driver is registered, and that it is not.
    pub registrations: u64,
    pub refusals: u64,
    /// To sockets of either kind.
    pub connections_open: u64,
    pub connections: u64,
    /// Prepares and unprepares that are not answered yet.
    pub calls_in_flight: u64,
    pub calls: Vec<CallSeconds>,
    pub operations: Vec<OperationSeconds>,
}

/// `dra_grpc_operations_duration_seconds` of a kubelet, as it is seen from here.
#[derive(Debug, Clone, PartialEq)]
pub struct CallSeconds {
    pub driver: DriverName,
    pub method: &'static str,
    pub code: Code,
    pub seconds: HistogramView,
}

/// `dra_operations_duration_seconds` of a kubelet: an error is a call that failed, or that failed for any of its claims.
#[derive(Debug, Clone, PartialEq)]
pub struct OperationSeconds {
    pub operation: &'static str,
    pub is_error: bool,
    pub seconds: HistogramView,
}

impl Counters {
    pub(super) fn begin(self: &Arc<Self>, driver: &DriverName, method: Method) -> Call {
        self.in_flight.fetch_add(1, Relaxed);
        let (counters, driver) = (Arc::clone(self), driver.clone());
        Call { counters, driver, method, began: Instant::now(), end: (Code::Cancelled, true) }
    }

    pub fn view(&self) -> CountersView {
        let call = |((driver, method, code), seconds): (&CallKey, &Histogram)| CallSeconds {
            driver: driver.clone(),
            method: method.as_str(),
            code: Code::from_i32(*code),
            seconds: seconds.view(),
        };
        let operation = |((operation, is_error), seconds): (&(Operation, bool), &Histogram)| {
            OperationSeconds { operation: operation.as_str(), is_error: *is_error, seconds: seconds.view() }
        };
        CountersView {
            registrations: self.registrations.load(Relaxed),
            refusals: self.refusals.load(Relaxed),
            connections_open: self.connections.open(),
            connections: self.connections.made(),
            calls_in_flight: self.in_flight.load(Relaxed),
            calls: lock(&self.calls).iter().map(call).collect(),
            operations: lock(&self.operations).iter().map(operation).collect(),
        }
    }

    fn record(&self, call: &Call) {
        let (took, (code, is_error)) = (call.began.elapsed(), call.end);
        let key = (call.driver.clone(), call.method, code as i32);
        let mut calls = lock(&self.calls);
        let max = BRIDGE_DRIVERS_MAX * CALL_KINDS;
        if calls.len() < max || calls.contains_key(&key) {
            calls.entry(key).or_insert_with(|| Histogram::new(CLAIM_SECONDS)).observe_time(took);
        }
        drop(calls);
        let mut operations = lock(&self.operations);
        let operation = operations.entry((call.method.operation(), is_error));
        operation.or_insert_with(|| Histogram::new(CLAIM_SECONDS)).observe_time(took);
    }
}

fn lock<T>(map: &Mutex<T>) -> MutexGuard<'_, T> {
    map.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A call under way; one that is dropped without an end was cancelled.
pub(super) struct Call {
    counters: Arc<Counters>,
    driver: DriverName,
    method: Method,
    began: Instant,
    end: (Code, bool),
}

impl Call {
    /// Notes how it ended: with an answer, in which some claims may have failed, or without one.
    pub(super) fn end(mut self, code: Code, is_error: bool) {
        self.end = (code, is_error);
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.counters.in_flight.fetch_sub(1, Relaxed);
        self.counters.record(self);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_kept_by_driver_method_and_code_and_a_dropped_one_was_cancelled() {
        let counters = Arc::new(Counters::default());
        let driver = DriverName::new("gpu.example.com").unwrap();
        counters.begin(&driver, Method::PrepareV1).end(Code::Ok, false);
        counters.begin(&driver, Method::PrepareV1).end(Code::Ok, true);
        counters.begin(&driver, Method::UnprepareV1beta1).end(Code::ResourceExhausted, true);
        let under_way = counters.begin(&driver, Method::PrepareV1);
        assert_eq!(counters.view().calls_in_flight, 1);
        drop(under_way);
        let view = counters.view();
        assert_eq!(view.calls_in_flight, 0);
        let calls: Vec<_> =
            view.calls.iter().map(|call| (call.method, call.code, call.seconds.count())).collect();
        let (prepare, unprepare) = (Method::PrepareV1.as_str(), Method::UnprepareV1beta1.as_str());
        let expected =
            [(prepare, Code::Ok, 2), (prepare, Code::Cancelled, 1), (unprepare, Code::ResourceExhausted, 1)];
        assert_eq!(calls, expected);
        let operations: Vec<_> =
            view.operations.iter().map(|o| (o.operation, o.is_error, o.seconds.count())).collect();
        let expected = [("PrepareResources", false, 1), ("PrepareResources", true, 2)];
        assert_eq!(operations, [expected[0], expected[1], ("UnprepareResources", true, 1)]);
    }

    #[test]
    fn the_paths_are_those_of_the_services() {
        use nodedock_proto::kubelet::dra::{v1, v1beta1};
        let names = [v1::dra_plugin_server::SERVICE_NAME, v1beta1::dra_plugin_server::SERVICE_NAME];
        let path = |name: &str, method: &str| format!("/{name}/{method}");
        assert_eq!(Method::PrepareV1.as_str(), path(names[0], "NodePrepareResources"));
        assert_eq!(Method::UnprepareV1.as_str(), path(names[0], "NodeUnprepareResources"));
        assert_eq!(Method::PrepareV1beta1.as_str(), path(names[1], "NodePrepareResources"));
        assert_eq!(Method::UnprepareV1beta1.as_str(), path(names[1], "NodeUnprepareResources"));
    }
}
