//! Delays that double.

use std::time::Duration;

/// The delays before the next tries: the first is `min`, each is twice the one before, none is above `max`.
#[derive(Debug, Clone)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, next: min }
    }

    /// The delay before the next try.
    pub fn delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(self.max);
        delay
    }

    /// After a success the first delay is the shortest again.
    pub fn reset(&mut self) {
        self.next = self.min;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_longest_and_begin_anew_after_a_success() {
        let mut backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(120));
        let delays: Vec<_> = (0..10).map(|_| backoff.delay().as_millis()).collect();
        assert_eq!(delays, [500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 120_000, 120_000]);
        backoff.reset();
        assert_eq!(backoff.delay().as_millis(), 500);
    }
}
