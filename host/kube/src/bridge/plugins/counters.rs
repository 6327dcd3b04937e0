//! What is counted of our device plugins, for whoever tells it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use nodedock_base::metrics::{ByKey, Histogram, HistogramView};
use nodedock_model::{ExtendedResource, limit};

/// The bounds of Prometheus' own libraries, which a kubelet takes for allocations.
const SECONDS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];

struct OfResource {
    registrations: AtomicU64,
    refusals: AtomicU64,
    lists: AtomicU64,
    allocations: Histogram,
    failures: AtomicU64,
}

impl Default for OfResource {
    fn default() -> Self {
        Self {
            registrations: AtomicU64::new(0),
            refusals: AtomicU64::new(0),
            lists: AtomicU64::new(0),
            allocations: Histogram::new(SECONDS),
            failures: AtomicU64::new(0),
        }
    }
}

pub(super) struct Counters {
    resources: ByKey<String, OfResource>,
    looks: AtomicU64,
    looks_failed: AtomicU64,
    given_up: AtomicU64,
}

/// What was counted of one resource since the start; those beyond `PLUGIN_RESOURCES_MAX` together under no name.
#[derive(Debug, Clone, PartialEq)]
pub struct ResourceCounts {
    pub resource: String,
    /// Registrations that a kubelet took, and that it refused.
    pub registrations: u64,
    pub refusals: u64,
    /// Lists of devices sent.
    pub lists: u64,
    /// Seconds of our answers to Allocate, and how many of them were errors.
    pub allocations: HistogramView,
    pub failures: u64,
}

/// What was counted since the start.
#[derive(Debug, Clone, PartialEq)]
pub struct PluginCounts {
    pub resources: Vec<ResourceCounts>,
    /// Times that the kubelet was asked which devices pods have, and those in vain.
    pub looks: u64,
    pub looks_failed: u64,
    /// Claims given up because no pod has their devices.
    pub given_up: u64,
}

impl Default for Counters {
    fn default() -> Self {
        Self {
            resources: ByKey::at_most(limit::PLUGIN_RESOURCES_MAX),
            looks: AtomicU64::new(0),
            looks_failed: AtomicU64::new(0),
            given_up: AtomicU64::new(0),
        }
    }
}

impl Counters {
    fn of(&self, resource: &ExtendedResource) -> Arc<OfResource> {
        self.resources.of(&resource.to_string())
    }

    pub(super) fn registered(&self, resource: &ExtendedResource) {
        self.of(resource).registrations.fetch_add(1, Relaxed);
    }

    pub(super) fn refused(&self, resource: &ExtendedResource) {
        self.of(resource).refusals.fetch_add(1, Relaxed);
    }

    pub(super) fn listed(&self, resource: &ExtendedResource) {
        self.of(resource).lists.fetch_add(1, Relaxed);
    }

    pub(super) fn allocated(&self, resource: &ExtendedResource, took: Duration, well: bool) {
        let counts = self.of(resource);
        counts.allocations.observe_time(took);
        counts.failures.fetch_add(u64::from(!well), Relaxed);
    }

    pub(super) fn gave_up(&self) {
        self.given_up.fetch_add(1, Relaxed);
    }

    pub(super) fn looked(&self, well: bool) {
        self.looks.fetch_add(1, Relaxed);
        self.looks_failed.fetch_add(u64::from(!well), Relaxed);
    }

    pub(super) fn view(&self) -> PluginCounts {
        let view = |(resource, of): (String, Arc<OfResource>)| ResourceCounts {
            resource,
            registrations: of.registrations.load(Relaxed),
            refusals: of.refusals.load(Relaxed),
            lists: of.lists.load(Relaxed),
            allocations: of.allocations.view(),
            failures: of.failures.load(Relaxed),
        };
        PluginCounts {
            resources: self.resources.list().into_iter().map(view).collect(),
            looks: self.looks.load(Relaxed),
            looks_failed: self.looks_failed.load(Relaxed),
            given_up: self.given_up.load(Relaxed),
        }
    }
}
