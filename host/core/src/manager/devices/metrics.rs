//! Counts of device plugins, by resource: bounded, since plugins choose the names.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use nodedock_base::metrics::{ByKey, Histogram, HistogramView};
use nodedock_model::{ExtendedResource, limit};

/// The bounds of Prometheus' own libraries, which a kubelet takes for allocations.
const SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

struct Seconds(Histogram);

impl Default for Seconds {
    fn default() -> Self {
        Self(Histogram::new(SECONDS))
    }
}

pub(crate) struct DeviceMetrics {
    registrations: ByKey<String, AtomicU64>,
    allocations: ByKey<String, Seconds>,
}

/// Counts since the start, by the resource's name; those beyond `PLUGIN_RESOURCES_MAX` under no name.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceStats {
    pub registrations: Vec<(String, u64)>,
    /// Seconds of the plugins' answers to Allocate.
    pub allocations: Vec<(String, HistogramView)>,
}

impl Default for DeviceMetrics {
    fn default() -> Self {
        let max = limit::PLUGIN_RESOURCES_MAX;
        Self { registrations: ByKey::at_most(max), allocations: ByKey::at_most(max) }
    }
}

impl DeviceMetrics {
    pub(super) fn called(&self, resource: &ExtendedResource) {
        self.registrations.of(&resource.to_string()).fetch_add(1, Relaxed);
    }

    pub(super) fn allocated(&self, resource: &ExtendedResource, elapsed: Duration) {
        self.allocations.of(&resource.to_string()).0.observe_time(elapsed);
    }

    pub(super) fn stats(&self) -> DeviceStats {
        let registrations = self.registrations.list().into_iter();
        let allocations = self.allocations.list().into_iter();
        DeviceStats {
            registrations: registrations.map(|(name, count)| (name, count.load(Relaxed))).collect(),
            allocations: allocations.map(|(name, seconds)| (name, seconds.0.view())).collect(),
        }
    }
}
