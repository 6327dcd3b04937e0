//! Metrics of device plugins, by resource: bounded, since plugins choose the names.

use std::time::Duration;

use prometheus_client::metrics::family::Family;

use nodedock_base::metrics::{BoundedNames, Counters, Histograms, Labels, call_seconds};
use nodedock_model::{ExtendedResource, limit};

#[derive(Debug)]
pub struct DeviceMetrics {
    pub registrations: Counters<1>,
    /// Seconds of the plugins' answers to Allocate.
    pub allocations: Histograms<1>,
    names: BoundedNames,
}

impl Default for DeviceMetrics {
    fn default() -> Self {
        Self {
            registrations: Family::default(),
            allocations: Family::new_with_constructor(call_seconds),
            names: BoundedNames::at_most(limit::PLUGIN_RESOURCES_MAX),
        }
    }
}

impl DeviceMetrics {
    pub(crate) fn called(&self, resource: &ExtendedResource) {
        self.registrations
            .get_or_create(&self.label(resource))
            .inc();
    }

    pub(crate) fn allocated(&self, resource: &ExtendedResource, elapsed: Duration) {
        self.allocations
            .get_or_create(&self.label(resource))
            .observe(elapsed.as_secs_f64());
    }

    fn label(&self, resource: &ExtendedResource) -> Labels<1> {
        [("resource_name", self.names.value(resource.as_str()).0)]
    }
}
