//! The rate limit of the API: a burst at once, and a number of calls a second after that.

use std::sync::{Mutex, PoisonError};

use tokio::time::Instant;

/// A token bucket.
pub(super) struct Bucket {
    per_second: f64,
    burst: f64,
    /// The tokens in it, and the time of that count.
    level: Mutex<(f64, Instant)>,
}

impl Bucket {
    pub(super) fn full(per_second: u32, burst: u32, now: Instant) -> Self {
        let burst = f64::from(burst);
        Self { per_second: f64::from(per_second), burst, level: Mutex::new((burst, now)) }
    }

    /// Takes a token, if there is one.
    pub(super) fn take(&self, now: Instant) -> bool {
        let mut level = self.level.lock().unwrap_or_else(PoisonError::into_inner);
        let filled = level.0 + now.saturating_duration_since(level.1).as_secs_f64() * self.per_second;
        let tokens = filled.min(self.burst);
        let is_there = tokens >= 1.0;
        *level = (if is_there { tokens - 1.0 } else { tokens }, now.max(level.1));
        is_there
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn taken(bucket: &Bucket, tries: usize, now: Instant) -> usize {
        (0..tries).filter(|_| bucket.take(now)).count()
    }

    #[test]
    fn as_many_as_the_burst_come_at_once_and_then_as_many_as_the_rate() {
        let start = Instant::now();
        let bucket = Bucket::full(100, 10, start);
        assert_eq!(taken(&bucket, 100, start), 10);
        assert_eq!(taken(&bucket, 100, start + Duration::from_millis(9)), 0);
        assert_eq!(taken(&bucket, 100, start + Duration::from_millis(51)), 5);
        assert_eq!(
            taken(&bucket, 100, start + Duration::from_secs(3600)),
            10,
            "it holds no more than a burst"
        );
        let second = start + Duration::from_secs(7200);
        let steady = (0..1000).filter(|i| bucket.take(second + Duration::from_millis(*i))).count();
        assert!((108..=110).contains(&steady), "{steady} in a second");
    }

    #[test]
    fn a_clock_that_is_behind_gives_nothing() {
        let start = Instant::now();
        let bucket = Bucket::full(100, 1, start + Duration::from_secs(1));
        assert!(bucket.take(start + Duration::from_secs(1)));
        assert!(!bucket.take(start));
        assert!(!bucket.take(start + Duration::from_secs(1)), "the time of before is not counted again");
    }
}
