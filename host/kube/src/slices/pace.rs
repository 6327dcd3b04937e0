//! Timing of the writes of a pool: soon, but not more often than necessary. Pure.

use std::time::Duration;

use tokio::time::Instant;

use crate::drivers::SLICE_SETTLE;
use nodedock_base::backoff::Backoff;

/// Repairs of a pool without a calm between them after which another writer is assumed: a kubelet that restarts causes one repair. So many
/// are not delayed.
const SLICE_REPAIRS_TOLERATED: u32 = 5;

/// Backoff between repairs of a pool that another writer changes, doubled up to the second.
pub(crate) const SLICE_REPAIR_MIN: Duration = Duration::from_secs(2);
pub(crate) const SLICE_REPAIR_MAX: Duration = Duration::from_secs(30);
/// Time without a foreign change after which the other writer has stopped: the next repair is immediate again. Not shorter than the longest
/// delay, within which no change is noticed.
pub(crate) const SLICE_CALM: Duration = SLICE_REPAIR_MAX;

/// Backoff of writes of a pool that the API server refused or that failed; doubled up to the second.
pub(crate) const SLICE_RETRY_MIN: Duration = Duration::from_secs(1);
pub(crate) const SLICE_RETRY_MAX: Duration = Duration::from_secs(120);

/// Minimum interval between two writes of a pool, however fast its devices change.
const SLICE_PERIOD: Duration = Duration::from_secs(1);

/// Timing of the next write of one pool.
#[derive(Debug, Clone)]
pub(super) struct Pace {
    due: Option<Instant>,
    not_before: Instant,
    retries: Backoff,
    is_refused: bool,
    repair_delays: Backoff,
    repairs: u32,
    last_repair: Option<Instant>,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            due: None,
            not_before: Instant::now(),
            retries: Backoff::new(SLICE_RETRY_MIN, SLICE_RETRY_MAX),
            is_refused: false,
            repair_delays: Backoff::new(SLICE_REPAIR_MIN, SLICE_REPAIR_MAX),
            repairs: 0,
            last_repair: None,
        }
    }
}

impl Pace {
    /// Returns when the pool is to be reconciled.
    pub(super) fn due(&self) -> Option<Instant> {
        let due = self.due.map(|due| due.max(self.not_before));
        due.or_else(|| self.repairs_end())
    }

    /// The observed or the desired state changed. Changes until the pool is due are handled together.
    pub(super) fn changed(&mut self, now: Instant) {
        self.due.get_or_insert(now + SLICE_SETTLE);
    }

    /// The desired state changed. A server that refused the former one may accept the new one.
    pub(super) fn desired_changed(&mut self, now: Instant) {
        if std::mem::take(&mut self.is_refused) {
            self.not_before = self.not_before.min(now + SLICE_PERIOD);
            self.due = None;
        }
        self.changed(now);
    }

    /// The pool is reconciled now. Returns whether no other writer changes it: there was no repair, or nothing changed since for long enough.
    pub(super) fn started(&mut self, now: Instant) -> bool {
        let is_unchanged = self.due.take().is_none();
        if is_unchanged && self.repairs_end().is_some_and(|end| now >= end) {
            (self.repairs, self.last_repair) = (0, None);
            self.repair_delays.reset();
        }
        self.last_repair.is_none()
    }

    /// The pool is as desired, after writes or without.
    pub(super) fn succeeded(&mut self, now: Instant, wrote: bool) {
        if wrote {
            self.not_before = now + SLICE_PERIOD;
        }
        self.retries.reset();
    }

    /// A write failed; `retry_after` is the delay that the server wants.
    pub(super) fn failed(&mut self, now: Instant, retry_after: Option<Duration>) {
        let delay = self.retries.delay();
        let longest = SLICE_RETRY_MAX.max(delay);
        self.not_before = now + retry_after.map_or(delay, |after| after.clamp(delay, longest));
        self.due = Some(self.not_before);
    }

    /// The server refuses the desired state.
    pub(super) fn refused(&mut self, now: Instant) {
        self.failed(now, None);
        self.is_refused = true;
    }

    /// A write was in conflict with another one, which the watch reports soon.
    pub(super) fn conflicted(&mut self, now: Instant) {
        self.not_before = now + self.retries.delay().min(SLICE_REPAIR_MAX);
        self.due = Some(now);
    }

    /// A write repaired what others changed. Returns whether that happened so often that another writer has to be assumed.
    pub(super) fn repaired(&mut self, now: Instant) -> bool {
        self.repairs = self.repairs.saturating_add(1);
        self.last_repair = Some(now);
        let is_contested = self.repairs > SLICE_REPAIRS_TOLERATED;
        if is_contested {
            self.not_before = self.not_before.max(now + self.repair_delays.delay());
        }
        is_contested
    }

    /// Returns when the repairs are forgotten.
    fn repairs_end(&self) -> Option<Instant> {
        self.last_repair.map(|last| last + SLICE_CALM)
    }

    /// Returns whether there is nothing to do and nothing to remember.
    pub(super) fn is_idle(&self) -> bool {
        self.due.is_none() && self.last_repair.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_are_batched_and_rate_limited() {
        let start = Instant::now();
        let mut pace = Pace::default();
        assert_eq!(pace.due(), None);
        pace.changed(start);
        pace.changed(start + SLICE_SETTLE / 2);
        assert_eq!(pace.due(), Some(start + SLICE_SETTLE));
        pace.started(start);
        pace.succeeded(start, true);
        pace.changed(start);
        assert_eq!(pace.due(), Some(start + SLICE_PERIOD));
    }

    #[test]
    fn failures_back_off_and_obey_server() {
        let start = Instant::now();
        let mut pace = Pace::default();
        pace.failed(start, None);
        assert_eq!(pace.due(), Some(start + SLICE_RETRY_MIN));
        pace.failed(start, Some(Duration::from_secs(30)));
        assert_eq!(pace.due(), Some(start + Duration::from_secs(30)));
        pace.failed(start, Some(Duration::MAX));
        assert_eq!(pace.due(), Some(start + SLICE_RETRY_MAX));
        pace.succeeded(start, false);
        pace.failed(start, None);
        assert_eq!(pace.due(), Some(start + SLICE_RETRY_MIN));
    }

    #[test]
    fn endless_repairs_are_reported() {
        let start = Instant::now();
        let mut pace = Pace::default();
        let reported: Vec<_> = (0..7).map(|_| pace.repaired(start)).collect();
        assert_eq!(reported, [false, false, false, false, false, true, true]);
        pace.changed(start);
        assert_eq!(pace.due(), Some(start + 2 * SLICE_REPAIR_MIN));
        // A change that waits for its repair is no calm.
        assert!(!pace.started(start + SLICE_CALM));
        assert_eq!(pace.due(), Some(start + SLICE_CALM));
        assert!(pace.started(start + SLICE_CALM));
        assert!(!pace.repaired(start + SLICE_CALM));
    }

    #[test]
    fn few_repairs_are_not_delayed() {
        let mut now = Instant::now();
        let mut pace = Pace::default();
        for _ in 0..SLICE_REPAIRS_TOLERATED {
            pace.changed(now);
            assert!(pace.due().is_some_and(|due| due <= now + SLICE_PERIOD));
            pace.started(now);
            pace.succeeded(now, true);
            assert!(!pace.repaired(now));
            now += SLICE_PERIOD;
        }
        for _ in 0..8 {
            assert!(pace.repaired(now));
        }
        // The other writer stops, and changes the pool once more after a while.
        now += SLICE_CALM;
        assert_eq!(pace.due(), Some(now));
        assert!(pace.started(now));
        now += Duration::from_secs(60);
        pace.changed(now);
        assert_eq!(pace.due(), Some(now + SLICE_SETTLE));
    }
}
