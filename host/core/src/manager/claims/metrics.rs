//! Counts of requests about claims, of pods and of kubelets.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use nodedock_base::metrics::{CLAIM_SECONDS, Histogram, HistogramView};

/// Requests since the start: successful ones, and those with a claim that failed.
pub(crate) struct ClaimMetrics {
    prepares: [Histogram; 2],
    unprepares: [Histogram; 2],
    pub(super) files_rendered_again: AtomicU64,
}

/// What was counted since the start. Seconds of requests: successful ones, and the others.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimStats {
    pub prepares: [HistogramView; 2],
    pub unprepares: [HistogramView; 2],
    /// CDI files of prepared claims that were missing or altered.
    pub files_rendered_again: u64,
}

impl Default for ClaimMetrics {
    fn default() -> Self {
        let both = || [Histogram::new(CLAIM_SECONDS), Histogram::new(CLAIM_SECONDS)];
        Self { prepares: both(), unprepares: both(), files_rendered_again: AtomicU64::new(0) }
    }
}

impl ClaimMetrics {
    pub(crate) fn prepared(&self, elapsed: Duration, failed: bool) {
        self.prepares[usize::from(failed)].observe_time(elapsed);
    }

    pub(crate) fn unprepared(&self, elapsed: Duration, failed: bool) {
        self.unprepares[usize::from(failed)].observe_time(elapsed);
    }

    pub(super) fn stats(&self) -> ClaimStats {
        let both = |[good, bad]: &[Histogram; 2]| [good.view(), bad.view()];
        ClaimStats {
            prepares: both(&self.prepares),
            unprepares: both(&self.unprepares),
            files_rendered_again: self.files_rendered_again.load(Relaxed),
        }
    }
}
