//! Metrics of requests about claims, of pods and of kubelets.

use std::time::Instant;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

use nodedock_base::metrics::claim_seconds;

pub(crate) const PREPARE: &str = "PrepareResources";
pub(crate) const UNPREPARE: &str = "UnprepareResources";

type Labels = [(&'static str, &'static str); 2];

#[derive(Debug)]
pub struct ClaimMetrics {
    /// Seconds of requests since the start: by operation, and whether one of their claims failed.
    pub operations: Family<Labels, Histogram, fn() -> Histogram>,
    /// CDI files of prepared claims that were missing or altered.
    pub files_rendered_again: Counter,
}

impl Default for ClaimMetrics {
    fn default() -> Self {
        let operations = Family::<_, _, fn() -> Histogram>::new_with_constructor(claim_seconds);
        // The samples exist from the start.
        for (operation, failed) in [
            (PREPARE, false),
            (PREPARE, true),
            (UNPREPARE, false),
            (UNPREPARE, true),
        ] {
            drop(operations.get_or_create(&labels(operation, failed)));
        }
        Self {
            operations,
            files_rendered_again: Counter::default(),
        }
    }
}

fn labels(operation: &'static str, failed: bool) -> Labels {
    [
        ("operation_name", operation),
        ("is_error", if failed { "true" } else { "false" }),
    ]
}

impl ClaimMetrics {
    pub(crate) fn observe(&self, operation: &'static str, started: Instant, failed: bool) {
        let elapsed = started.elapsed().as_secs_f64();
        self.operations
            .get_or_create(&labels(operation, failed))
            .observe(elapsed);
    }
}
