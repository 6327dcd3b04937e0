//! Metrics of the kubelet's calls and of what it is offered; `docs/metrics.md` has the families.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use tonic::Code;

use super::sockets::Connections;
use crate::bridge::BRIDGE_DRIVERS_MAX;
use nodedock_base::metrics::{
    BoundedNames, Counters, Histograms, Labels, call_seconds, claim_seconds,
};
use nodedock_model::{DriverName, ExtendedResource, limit};

/// A call of the DRA API.
#[derive(Debug, Clone, Copy)]
pub(super) struct Method {
    /// Path of the method in gRPC.
    pub(super) path: &'static str,
    pub(super) is_prepare: bool,
}

/// Metrics since the start. The number of names of drivers and resources is bounded; those beyond the bound are counted without a name.
pub struct Metrics {
    /// Registrations of drivers, by the outcome that a kubelet reported.
    pub registrations: Counters<1>,
    /// Connections to the sockets of all drivers.
    pub(super) connections: Arc<Connections>,
    pub calls_in_flight: Gauge,
    /// Calls by driver, method and code: `dra_grpc_operations_duration_seconds` of a kubelet, as measured here.
    pub calls: Histograms<3>,
    /// Operations by kind, and whether the operation or one of its claims failed.
    pub operations: Histograms<2>,
    /// Registrations by resource and outcome.
    pub resource_registrations: Counters<2>,
    /// Lists of devices sent, by resource.
    pub lists: Counters<1>,
    /// Allocates by resource.
    pub allocations: Histograms<1>,
    pub allocation_failures: Counters<1>,
    /// Requests to the kubelet for the devices that pods use, by outcome.
    pub in_use_looks: Counters<1>,
    /// Claims released because no pod uses their devices.
    pub released: Counter,
    driver_names: BoundedNames,
    resource_names: BoundedNames,
}

impl Default for Metrics {
    fn default() -> Self {
        let metrics = Self {
            registrations: Family::default(),
            connections: Arc::default(),
            calls_in_flight: Gauge::default(),
            calls: Family::new_with_constructor(claim_seconds),
            operations: Family::new_with_constructor(claim_seconds),
            resource_registrations: Family::default(),
            lists: Family::default(),
            allocations: Family::new_with_constructor(call_seconds),
            allocation_failures: Family::default(),
            in_use_looks: Family::default(),
            released: Counter::default(),
            driver_names: BoundedNames::at_most(BRIDGE_DRIVERS_MAX),
            resource_names: BoundedNames::at_most(limit::PLUGIN_RESOURCES_MAX),
        };
        // A sample of each outcome is there from the start.
        for outcome in ["registered", "refused"] {
            drop(metrics.registrations.get_or_create(&labels(outcome)));
        }
        for outcome in ["answered", "failed"] {
            drop(metrics.in_use_looks.get_or_create(&labels(outcome)));
        }
        metrics
    }
}

fn labels(outcome: &str) -> Labels<1> {
    [("outcome", outcome.to_owned())]
}

impl Metrics {
    /// Connections that are open, and that were made.
    pub fn connections(&self) -> [u64; 2] {
        [self.connections.open(), self.connections.made()]
    }

    pub(super) fn registered(&self, outcome: &str) {
        self.registrations.get_or_create(&labels(outcome)).inc();
    }

    pub(super) fn looked(&self, outcome: &str) {
        self.in_use_looks.get_or_create(&labels(outcome)).inc();
    }

    pub(super) fn resource_registered(&self, resource: &ExtendedResource, outcome: &str) {
        let [resource] = self.resource(resource);
        self.resource_registrations
            .get_or_create(&[resource, ("outcome", outcome.to_owned())])
            .inc();
    }

    pub(super) fn listed(&self, resource: &ExtendedResource) {
        self.lists.get_or_create(&self.resource(resource)).inc();
    }

    pub(super) fn allocated(&self, resource: &ExtendedResource, took: Duration, failed: bool) {
        let resource = self.resource(resource);
        self.allocations
            .get_or_create(&resource)
            .observe(took.as_secs_f64());
        self.allocation_failures
            .get_or_create(&resource)
            .inc_by(u64::from(failed));
    }

    /// The label of a resource, which has a sample in each family from the first one on.
    fn resource(&self, resource: &ExtendedResource) -> Labels<1> {
        let (name, is_new) = self.resource_names.value(resource.as_str());
        let label = ("resource", name);
        if is_new {
            for outcome in ["registered", "refused"] {
                let outcome = ("outcome", outcome.to_owned());
                drop(
                    self.resource_registrations
                        .get_or_create(&[label.clone(), outcome]),
                );
            }
            let only = [label.clone()];
            drop(self.lists.get_or_create(&only));
            drop(self.allocations.get_or_create(&only));
            drop(self.allocation_failures.get_or_create(&only));
        }
        [label]
    }

    /// Counts a call of the kubelet until it ends.
    pub(super) fn begin(&self, driver: &DriverName, method: Method) -> Call<'_> {
        self.calls_in_flight.inc();
        Call {
            metrics: self,
            driver: driver.clone(),
            method,
            began: Instant::now(),
            end: (Code::Cancelled, true),
        }
    }
}

/// A call under way; one that is dropped without an end was cancelled.
pub(super) struct Call<'a> {
    metrics: &'a Metrics,
    driver: DriverName,
    method: Method,
    began: Instant,
    end: (Code, bool),
}

impl Call<'_> {
    /// Records how it ended: with an answer, in which some claims may have failed, or without one.
    pub(super) fn end(mut self, code: Code, is_error: bool) {
        self.end = (code, is_error);
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        let (seconds, (code, is_error)) = (self.began.elapsed().as_secs_f64(), self.end);
        self.metrics.calls_in_flight.dec();
        let (driver, _) = self.metrics.driver_names.value(self.driver.as_str());
        let call = [
            ("driver", driver),
            ("method", self.method.path.to_owned()),
            ("code", format!("{code:?}")),
        ];
        self.metrics.calls.get_or_create(&call).observe(seconds);
        // As a kubelet names them.
        let operation = if self.method.is_prepare {
            "PrepareResources"
        } else {
            "UnprepareResources"
        };
        let operation = [
            ("operation", operation.to_owned()),
            ("is_error", is_error.to_string()),
        ];
        self.metrics
            .operations
            .get_or_create(&operation)
            .observe(seconds);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excess_resources_share_one_metric_label() {
        let metrics = Metrics::default();
        for n in 0..limit::PLUGIN_RESOURCES_MAX + 2 {
            metrics.listed(&ExtendedResource::new(format!("example.com/r{n}")).unwrap());
        }
        let mut registry = prometheus_client::registry::Registry::default();
        registry.register("lists", "", metrics.lists.clone());
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(
            text.contains(r#"lists_total{resource="example.com/r0"} 1"#),
            "{text}"
        );
        assert!(text.contains(r#"lists_total{resource=""} 2"#), "{text}");
    }
}
