//! Exponential backoff.

use std::time::Duration;

/// Reduces a delay by up to a quarter, so that many waiting callers do not retry together. `chance` is any number.
pub fn spread(delay: Duration, chance: u64) -> Duration {
    let off = u32::try_from(chance % 1024).expect("less than 1024");
    delay - delay / 4 * off / 1024
}

/// The delays of retries: the first is `min`, each is twice the previous one, none exceeds `max`.
#[derive(Debug, Clone)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
}

impl Backoff {
    pub fn new(min: Duration, max: Duration) -> Self {
        Self {
            min,
            max,
            next: min,
        }
    }

    pub fn delay(&mut self) -> Duration {
        let delay = self.next;
        self.next = (delay * 2).min(self.max);
        delay
    }

    /// Resets the delay to the minimum, after a success.
    pub fn reset(&mut self) {
        self.next = self.min;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_and_reset_on_success() {
        let mut backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(120));
        let delays: Vec<_> = (0..10).map(|_| backoff.delay().as_millis()).collect();
        assert_eq!(
            delays,
            [
                500, 1000, 2000, 4000, 8000, 16_000, 32_000, 64_000, 120_000, 120_000
            ]
        );
        backoff.reset();
        assert_eq!(backoff.delay().as_millis(), 500);
    }

    #[test]
    fn delay_is_spread_over_last_quarter() {
        let delay = Duration::from_secs(4);
        assert_eq!(spread(delay, 0), delay);
        assert_eq!(spread(delay, 512), Duration::from_millis(3500));
        for chance in [1, 7, 1023, u64::MAX] {
            assert!(
                (Duration::from_secs(3)..delay).contains(&spread(delay, chance)),
                "{chance}"
            );
        }
    }
}
