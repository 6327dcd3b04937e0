//! The handles that the owners of requests have in common.

use std::sync::Arc;

use super::calls::DriverCalls;
use super::{ClaimMetrics, Retries, SpecFiles};
use crate::adapters::Adapters;
use crate::records::{RecordStore, RecordedValues};
use crate::registry::Registry;
use nodedock_base::tasks::Tasks;

/// Each owner of requests clones those that it needs.
pub(in crate::manager) struct Handles {
    pub(in crate::manager) records: Arc<RecordStore>,
    pub(in crate::manager) files: Arc<SpecFiles>,
    pub(in crate::manager) retries: Arc<Retries>,
    pub(in crate::manager) calls: Arc<DriverCalls>,
    pub(in crate::manager) values: Arc<RecordedValues>,
    pub(in crate::manager) registry: Registry,
    pub(in crate::manager) adapters: Option<Adapters>,
    pub(in crate::manager) tasks: Tasks,
    pub(in crate::manager) metrics: Arc<ClaimMetrics>,
}
