//! How often we ask: a bucket of tokens that all share, a pause that an API server asked for, and places for requests under way.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::error::ApiError;
use nodedock_model::limit;

/// Who waits for a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Urgency {
    /// Nobody in particular.
    #[default]
    Usual,
    /// A pod: it may take the last tokens.
    Urgent,
}

/// How many requests there may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    /// At least 1.
    pub per_second: u32,
    /// At once after a pause; at least 1.
    pub burst: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self { per_second: limit::API_PER_SECOND, burst: limit::API_BURST }
    }
}

/// The tokens, and until when nothing is sent.
#[derive(Debug, Clone)]
struct Bucket {
    pace: Pace,
    tokens: f64,
    at: Instant,
    paused_until: Option<Instant>,
}

/// Why a token is not there.
#[derive(Debug, PartialEq)]
enum Wait {
    /// There is one after so long.
    Token(Duration),
    /// The API server asked for it.
    Pause(Duration),
}

impl Bucket {
    fn full(pace: Pace, now: Instant) -> Self {
        Self { pace, tokens: f64::from(pace.burst), at: now, paused_until: None }
    }

    fn take(&mut self, now: Instant, urgency: Urgency) -> Result<(), Wait> {
        let filled = now.saturating_duration_since(self.at).as_secs_f64() * f64::from(self.pace.per_second);
        self.tokens = (self.tokens + filled).min(f64::from(self.pace.burst));
        self.at = self.at.max(now);
        if let Some(left) = self.paused_until.and_then(|until| until.checked_duration_since(now)) {
            if !left.is_zero() {
                return Err(Wait::Pause(left));
            }
            self.paused_until = None;
        }
        let reserve = match urgency {
            // Of a small burst a quarter: one that is never left would never be taken.
            Urgency::Usual => f64::from(limit::API_URGENT_RESERVE.min(self.pace.burst / 4)),
            Urgency::Urgent => 0.0,
        };
        let missing = 1.0 + reserve - self.tokens;
        // A hair's breadth of rounding is not waited for.
        if missing > 1e-6 {
            return Err(Wait::Token(Duration::from_secs_f64(missing / f64::from(self.pace.per_second))));
        }
        self.tokens -= 1.0;
        Ok(())
    }

    fn pause(&mut self, until: Instant) {
        self.paused_until = self.paused_until.max(Some(until));
    }
}

pub(super) struct Rate {
    bucket: Mutex<Bucket>,
    usual: Arc<Semaphore>,
    urgent: Arc<Semaphore>,
}

/// The right to send one request, until it is dropped.
pub(super) struct Turn {
    _place: OwnedSemaphorePermit,
}

impl Rate {
    pub(super) fn new(pace: Pace) -> Self {
        let places = || Arc::new(Semaphore::new(limit::API_IN_FLIGHT_MAX));
        Self { bucket: Mutex::new(Bucket::full(pace, Instant::now())), usual: places(), urgent: places() }
    }

    /// Waits for its turn, for a bounded time.
    pub(super) async fn turn(&self, urgency: Urgency) -> Result<Turn, ApiError> {
        let until = Instant::now() + limit::API_TURN_WAIT;
        let places = match urgency {
            Urgency::Usual => &self.usual,
            Urgency::Urgent => &self.urgent,
        };
        let place = tokio::time::timeout_at(until, places.clone().acquire_owned()).await;
        let Ok(Ok(place)) = place else {
            return Err(ApiError::unavailable("too many requests of ours wait for it"));
        };
        loop {
            let asked = self.lock().take(Instant::now(), urgency);
            let wait = match asked {
                Ok(()) => return Ok(Turn { _place: place }),
                Err(Wait::Token(wait)) => wait,
                Err(Wait::Pause(wait)) if Instant::now() + wait > until => {
                    let words = "it said so to an earlier request".to_owned();
                    return Err(ApiError::TooManyRequests { words, retry_after: Some(wait) });
                }
                Err(Wait::Pause(wait)) => wait,
            };
            if Instant::now() + wait > until {
                return Err(ApiError::unavailable("too many requests of ours wait for it"));
            }
            tokio::time::sleep(wait).await;
        }
    }

    /// Nothing is sent for so long: the API server asked for it.
    pub(super) fn pause(&self, delay: Duration) {
        self.lock().pause(Instant::now() + delay.min(limit::API_RETRY_AFTER_MAX));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Bucket> {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN: Pace = Pace { per_second: 10, burst: 20 };

    fn taken(bucket: &mut Bucket, now: Instant, urgency: Urgency) -> usize {
        (0..100).filter(|_| bucket.take(now, urgency).is_ok()).count()
    }

    #[test]
    fn the_last_tokens_are_for_those_that_a_pod_waits_for() {
        let now = Instant::now();
        let mut bucket = Bucket::full(TEN, now);
        assert_eq!(taken(&mut bucket, now, Urgency::Usual), 15);
        assert_eq!(bucket.take(now, Urgency::Usual), Err(Wait::Token(Duration::from_millis(100))));
        assert_eq!(taken(&mut bucket, now, Urgency::Urgent), 5);
        let later = now + Duration::from_secs(1);
        assert_eq!(taken(&mut bucket, later, Urgency::Usual), 5);
        assert_eq!(taken(&mut bucket, later, Urgency::Urgent), 5);
        assert_eq!(taken(&mut bucket, later + Duration::from_secs(86_400), Urgency::Urgent), 20);
    }

    #[test]
    fn a_pause_holds_for_everybody_and_the_longest_counts() {
        let now = Instant::now();
        let mut bucket = Bucket::full(TEN, now);
        bucket.pause(now + Duration::from_secs(3));
        bucket.pause(now + Duration::from_secs(1));
        let in_two = now + Duration::from_secs(2);
        assert_eq!(bucket.take(in_two, Urgency::Urgent), Err(Wait::Pause(Duration::from_secs(1))));
        assert_eq!(bucket.take(now + Duration::from_secs(3), Urgency::Usual), Ok(()));
    }

    #[test]
    fn a_clock_that_stands_or_goes_back_gives_nothing() {
        let now = Instant::now() + Duration::from_secs(10);
        let mut bucket = Bucket::full(TEN, now);
        assert_eq!(taken(&mut bucket, now, Urgency::Urgent), 20);
        assert_eq!(taken(&mut bucket, now - Duration::from_secs(5), Urgency::Urgent), 0);
        assert_eq!(taken(&mut bucket, now, Urgency::Urgent), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_hundred_requests_take_the_time_that_the_rate_says() {
        let rate = Rate::new(TEN);
        let start = Instant::now();
        for _ in 0..115 {
            drop(rate.turn(Urgency::Usual).await.unwrap());
        }
        let took = start.elapsed();
        assert!((Duration::from_millis(9900)..Duration::from_millis(10_500)).contains(&took), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn who_would_wait_too_long_is_told_at_once() {
        let rate = Rate::new(TEN);
        rate.pause(Duration::from_secs(3600));
        let start = Instant::now();
        let refused = rate.turn(Urgency::Urgent).await.err();
        let words = "it said so to an earlier request".to_owned();
        let retry_after = Some(limit::API_RETRY_AFTER_MAX);
        assert_eq!(refused, Some(ApiError::TooManyRequests { words, retry_after }));
        assert!(start.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn places_are_given_back_and_a_full_house_is_said() {
        let rate = Rate::new(TEN);
        let mut held = Vec::new();
        for _ in 0..limit::API_IN_FLIGHT_MAX {
            held.push(rate.turn(Urgency::Usual).await.unwrap());
        }
        assert!(rate.turn(Urgency::Usual).await.is_err());
        assert!(rate.turn(Urgency::Urgent).await.is_ok());
        held.pop();
        assert!(rate.turn(Urgency::Usual).await.is_ok());
    }
}
