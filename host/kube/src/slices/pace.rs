//! When a pool is written: at once, but not more often than it must be. Pure, the time is given.

use std::time::Duration;

use tokio::time::Instant;

use nodedock_base::backoff::Backoff;
use nodedock_model::limit;

/// The pace of one pool.
#[derive(Debug, Clone)]
pub(super) struct Pace {
    due: Option<Instant>,
    /// Not before that.
    free_at: Instant,
    tries: Backoff,
    is_refused: bool,
    repairs: Backoff,
    repaired: u32,
    last_repair: Option<Instant>,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            due: None,
            free_at: now,
            tries: Backoff::new(limit::SLICE_RETRY_MIN, limit::SLICE_RETRY_MAX),
            is_refused: false,
            repairs: Backoff::new(limit::SLICE_REPAIR_MIN, limit::SLICE_REPAIR_MAX),
            repaired: 0,
            last_repair: None,
        }
    }

    /// When it is to be looked at.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due.map(|due| due.max(self.free_at))
    }

    /// Something changed. What changes while it waits is looked at together.
    pub(super) fn touched(&mut self, now: Instant) {
        self.due.get_or_insert(now + limit::SLICE_SETTLE);
    }

    /// It is to be another than before. What was refused before may be taken now.
    pub(super) fn renewed(&mut self, now: Instant) {
        if std::mem::take(&mut self.is_refused) {
            self.free_at = self.free_at.min(now + limit::SLICE_PERIOD);
            self.due = None;
        }
        self.touched(now);
    }

    /// It is looked at now.
    pub(super) fn begun(&mut self) {
        self.due = None;
    }

    /// It was written as it is to be.
    pub(super) fn written(&mut self, now: Instant) {
        self.free_at = now + limit::SLICE_PERIOD;
        self.tries.reset();
    }

    /// The server has it as it is to be, without a write.
    pub(super) fn found_right(&mut self) {
        self.tries.reset();
    }

    /// It could not be written; `after` is what the server asked for.
    pub(super) fn failed(&mut self, now: Instant, after: Option<Duration>) {
        let delay = self.tries.delay();
        self.free_at =
            now + after.map_or(delay, |after| after.clamp(delay, limit::SLICE_RETRY_MAX.max(delay)));
        self.due = Some(self.free_at);
    }

    /// The server does not want it as it is.
    pub(super) fn refused(&mut self, now: Instant) {
        self.failed(now, None);
        self.is_refused = true;
    }

    /// Another was faster: what was read meanwhile is looked at soon.
    pub(super) fn overtaken(&mut self, now: Instant) {
        self.free_at = now + self.tries.delay();
        self.due = Some(now);
    }

    /// What was written mended what others did. True: so often that somebody else writes the pool as well.
    pub(super) fn repaired(&mut self, now: Instant) -> bool {
        self.calm(now);
        self.repaired = self.repaired.saturating_add(1);
        self.last_repair = Some(now);
        self.free_at = self.free_at.max(now + self.repairs.delay());
        self.repaired > limit::SLICE_REPAIRS_TOLERATED
    }

    /// Forgets repairs when there were none for long. True: there are none to remember.
    pub(super) fn calm(&mut self, now: Instant) -> bool {
        if self.last_repair.is_some_and(|last| now >= last + limit::SLICE_CALM) {
            (self.repaired, self.last_repair) = (0, None);
            self.repairs.reset();
        }
        self.last_repair.is_none()
    }

    /// When `calm` is to be asked next.
    pub(super) fn calm_at(&self) -> Option<Instant> {
        self.last_repair.map(|last| last + limit::SLICE_CALM)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_taken_together_and_a_pool_is_written_at_most_once_in_a_period() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        assert_eq!(pace.due(), None);
        pace.touched(start);
        pace.touched(start + limit::SLICE_SETTLE / 2);
        assert_eq!(pace.due(), Some(start + limit::SLICE_SETTLE));
        pace.begun();
        pace.written(start);
        pace.touched(start);
        assert_eq!(pace.due(), Some(start + limit::SLICE_PERIOD));
    }

    #[test]
    fn failures_wait_longer_each_time_and_for_as_long_as_the_server_asks() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        pace.failed(start, None);
        assert_eq!(pace.due(), Some(start + limit::SLICE_RETRY_MIN));
        pace.failed(start, Some(Duration::from_secs(30)));
        assert_eq!(pace.due(), Some(start + Duration::from_secs(30)));
        pace.failed(start, Some(Duration::MAX));
        assert_eq!(pace.due(), Some(start + limit::SLICE_RETRY_MAX));
        pace.found_right();
        pace.failed(start, None);
        assert_eq!(pace.due(), Some(start + limit::SLICE_RETRY_MIN));
    }

    #[test]
    fn repairs_are_told_when_they_do_not_end_and_forgotten_after_a_calm() {
        let start = Instant::now();
        let mut pace = Pace::new(start);
        let told: Vec<_> = (0..7).map(|_| pace.repaired(start)).collect();
        assert_eq!(told, [false, false, false, false, false, true, true]);
        pace.touched(start);
        assert_eq!(pace.due(), Some(start + limit::SLICE_REPAIR_MAX));
        assert!(!pace.calm(start));
        assert!(pace.calm(start + limit::SLICE_CALM));
        assert!(!pace.repaired(start + limit::SLICE_CALM));
    }
}
