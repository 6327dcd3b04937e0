//! What requests about claims came to, of pods and of kubelets.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use super::PodOutcome;
use nodedock_base::metrics::CLAIM_SECONDS;
use nodedock_base::metrics::{Histogram, HistogramView};

/// Requests since the start.
pub(super) struct Metrics {
    /// Those that went well, and those with a claim that did not.
    prepares: [Histogram; 2],
    unprepares: [Histogram; 2],
    pub(super) files_rendered_again: AtomicU64,
}

/// What the claim manager counted since the start. Seconds of requests: those that went well, and the others.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimStats {
    pub prepares: [HistogramView; 2],
    pub unprepares: [HistogramView; 2],
    /// CDI files of prepared claims that were missing or altered.
    pub files_rendered_again: u64,
}

impl Default for Metrics {
    fn default() -> Self {
        let both = || [Histogram::new(CLAIM_SECONDS), Histogram::new(CLAIM_SECONDS)];
        Self { prepares: both(), unprepares: both(), files_rendered_again: AtomicU64::new(0) }
    }
}

impl Metrics {
    pub(super) fn prepared(&self, took: Duration, failed: bool) {
        self.prepares[usize::from(failed)].observe_time(took);
    }

    pub(super) fn unprepared(&self, took: Duration, failed: bool) {
        self.unprepares[usize::from(failed)].observe_time(took);
    }

    pub(super) fn view(&self) -> ClaimStats {
        let both = |[good, bad]: &[Histogram; 2]| [good.view(), bad.view()];
        ClaimStats {
            prepares: both(&self.prepares),
            unprepares: both(&self.unprepares),
            files_rendered_again: self.files_rendered_again.load(Relaxed),
        }
    }
}

pub(super) fn has_failed(outcome: &PodOutcome) -> bool {
    outcome.claims.iter().any(|claim| claim.end.is_err())
}
