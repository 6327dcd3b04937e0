//! A token bucket: a burst at once, and a number of tokens a second after that. Without a clock of its own.

use std::time::Duration;

use tokio::time::Instant;

#[derive(Debug)]
pub struct TokenBucket {
    per_second: f64,
    burst: f64,
    tokens: f64,
    filled_at: Instant,
}

impl TokenBucket {
    /// The rate is above 0, and the burst at least 1.
    pub fn full(per_second: impl Into<f64>, burst: u32, now: Instant) -> Self {
        let burst = f64::from(burst);
        Self {
            per_second: per_second.into(),
            burst,
            tokens: burst,
            filled_at: now,
        }
    }

    /// Takes a token if more than `reserve` are left; otherwise returns the delay after which there is one.
    pub fn take(&mut self, now: Instant, reserve: u32) -> Result<(), Duration> {
        match self.delay_until(now, 1 + reserve) {
            Some(delay) => Err(delay),
            None => {
                self.spend(1);
                Ok(())
            }
        }
    }

    /// Returns the delay after which there are so many tokens, if there are fewer now. A clock that goes back adds nothing.
    pub fn delay_until(&mut self, now: Instant, tokens: u32) -> Option<Duration> {
        let passed = now.saturating_duration_since(self.filled_at).as_secs_f64();
        self.tokens = (self.tokens + passed * self.per_second).min(self.burst);
        self.filled_at = self.filled_at.max(now);
        let missing = f64::from(tokens) - self.tokens;
        // A rounding error is not waited for.
        (missing > 1e-6).then(|| Duration::from_secs_f64(missing / self.per_second))
    }

    /// Takes tokens that are there.
    pub fn spend(&mut self, tokens: u32) {
        self.tokens -= f64::from(tokens);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(bucket: &mut TokenBucket, now: Instant, reserve: u32) -> usize {
        (0..100)
            .filter(|_| bucket.take(now, reserve).is_ok())
            .count()
    }

    #[test]
    fn burst_is_allowed_then_rate_applies() {
        let start = Instant::now();
        let after = |ms| start + Duration::from_millis(ms);
        let mut bucket = TokenBucket::full(100, 10, start);
        let counts = [0, 9, 51, 3_600_000].map(|ms| taken(&mut bucket, after(ms), 0));
        assert_eq!(counts, [10, 0, 5, 10], "it holds no more than a burst");
        assert_eq!(
            bucket.take(after(3_600_000), 0),
            Err(Duration::from_millis(10))
        );
        let steady = (0..1000)
            .filter(|ms| bucket.take(after(7_200_000 + ms), 0).is_ok())
            .count();
        assert!((108..=110).contains(&steady), "{steady} in a second");
    }

    #[test]
    fn reserve_is_kept_when_clock_reverses() {
        let start = Instant::now();
        let later = start + Duration::from_secs(1);
        let mut bucket = TokenBucket::full(10, 20, later);
        assert_eq!(
            (taken(&mut bucket, later, 5), taken(&mut bucket, later, 0)),
            (15, 5)
        );
        assert_eq!(
            (taken(&mut bucket, start, 0), taken(&mut bucket, later, 0)),
            (0, 0)
        );
    }
}
