//! The handles that the owners of requests have in common.

use std::sync::Arc;

use super::claims::calls::DriverCalls;
use super::claims::{ClaimMetrics, RecordedValues, Retries, SpecFiles};
use super::records::RecordStore;
use crate::adapters::Adapters;
use crate::registry::Registry;
use nodedock_base::tasks::Tasks;

/// Each owner of requests clones those that it needs.
pub(super) struct Handles {
    pub(super) records: Arc<RecordStore>,
    pub(super) files: Arc<SpecFiles>,
    pub(super) retries: Arc<Retries>,
    pub(super) calls: Arc<DriverCalls>,
    pub(super) values: Arc<RecordedValues>,
    pub(super) registry: Registry,
    pub(super) adapters: Option<Adapters>,
    pub(super) tasks: Tasks,
    pub(super) metrics: Arc<ClaimMetrics>,
}
