//! The rate of requests: a token bucket that all share, a pause that the API server asked for, and a limit of requests in flight.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep, timeout_at};

use super::{ApiError, ErrorKind};
use crate::client::API_RETRY_AFTER_MAX;
use nodedock_base::rate::TokenBucket;
use nodedock_model::limit;

/// Time that a request waits for the rate limit: less than a kubelet waits for a prepare.
const API_TURN_WAIT: Duration = Duration::from_secs(20);

/// Requests to the API server in flight, separately for those that a pod waits for and for the others.
const API_IN_FLIGHT_MAX: usize = 8;

/// Who waits for a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Urgency {
    Usual,
    /// A pod waits: the request may take the last tokens.
    Urgent,
}

/// How many requests are sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestRate {
    /// At least 1.
    pub per_second: u32,
    /// At once after a pause; at least 1.
    pub burst: u32,
}

impl Default for RequestRate {
    fn default() -> Self {
        Self { per_second: limit::API_PER_SECOND, burst: limit::API_BURST }
    }
}

#[derive(Debug)]
struct Bucket {
    tokens: TokenBucket,
    /// Tokens that usual requests leave for urgent ones.
    reserve: u32,
    paused_until: Option<Instant>,
}

/// Why there is no token.
#[derive(Debug, PartialEq)]
enum Wait {
    /// There is one after so long.
    Token(Duration),
    /// The API server asked for a pause.
    Pause(Duration),
}

impl Bucket {
    fn full(rate: RequestRate, now: Instant) -> Self {
        // Of a small burst a quarter: a larger reserve would never be left over.
        let reserve = limit::API_URGENT_RESERVE.min(rate.burst / 4);
        Self { tokens: TokenBucket::full(rate.per_second, rate.burst, now), reserve, paused_until: None }
    }

    fn take(&mut self, now: Instant, urgency: Urgency) -> Result<(), Wait> {
        if let Some(left) = self.paused_until.and_then(|until| until.checked_duration_since(now)) {
            if !left.is_zero() {
                return Err(Wait::Pause(left));
            }
            self.paused_until = None;
        }
        let reserve = match urgency {
            Urgency::Usual => self.reserve,
            Urgency::Urgent => 0,
        };
        self.tokens.take(now, reserve).map_err(Wait::Token)
    }
}

pub(super) struct RateLimit {
    bucket: Mutex<Bucket>,
    usual: Semaphore,
    urgent: Semaphore,
}

impl RateLimit {
    pub(super) fn new(rate: RequestRate) -> Self {
        let in_flight = || Semaphore::new(API_IN_FLIGHT_MAX);
        Self {
            bucket: Mutex::new(Bucket::full(rate, Instant::now())),
            usual: in_flight(),
            urgent: in_flight(),
        }
    }

    /// Waits for a bounded time. The request may be sent until the permit is dropped.
    pub(super) async fn turn(&self, urgency: Urgency) -> Result<SemaphorePermit<'_>, ApiError> {
        let crowded = || ApiError::unreachable("too many requests of this node wait for it");
        let until = Instant::now() + API_TURN_WAIT;
        let permits = match urgency {
            Urgency::Usual => &self.usual,
            Urgency::Urgent => &self.urgent,
        };
        let permit = timeout_at(until, permits.acquire()).await;
        let Ok(Ok(permit)) = permit else { return Err(crowded()) };
        loop {
            let taken = self.bucket().take(Instant::now(), urgency);
            let wait = match taken {
                Ok(()) => return Ok(permit),
                Err(Wait::Pause(wait)) if Instant::now() + wait > until => return Err(paused(wait)),
                Err(Wait::Token(wait)) if Instant::now() + wait > until => return Err(crowded()),
                Err(Wait::Token(wait) | Wait::Pause(wait)) => wait,
            };
            sleep(wait).await;
        }
    }

    /// Sends nothing for so long: the API server asked for it.
    pub(super) fn pause(&self, delay: Duration) {
        let until = Instant::now() + delay.min(API_RETRY_AFTER_MAX);
        let mut bucket = self.bucket();
        bucket.paused_until = bucket.paused_until.max(Some(until));
    }

    fn bucket(&self) -> MutexGuard<'_, Bucket> {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn paused(wait: Duration) -> ApiError {
    let error = ApiError::new(ErrorKind::Throttled, "an earlier request was throttled");
    ApiError { retry_after: Some(wait), ..error }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN: RequestRate = RequestRate { per_second: 10, burst: 20 };

    fn taken(bucket: &mut Bucket, now: Instant, urgency: Urgency) -> usize {
        (0..100).filter(|_| bucket.take(now, urgency).is_ok()).count()
    }

    #[test]
    fn the_last_tokens_are_for_requests_that_a_pod_waits_for() {
        let now = Instant::now();
        let mut bucket = Bucket::full(TEN, now);
        assert_eq!(taken(&mut bucket, now, Urgency::Usual), 15);
        assert_eq!(bucket.take(now, Urgency::Usual), Err(Wait::Token(Duration::from_millis(100))));
        assert_eq!(taken(&mut bucket, now, Urgency::Urgent), 5);
        let later = now + Duration::from_secs(1);
        assert_eq!(taken(&mut bucket, later, Urgency::Usual), 5);
        assert_eq!(taken(&mut bucket, later, Urgency::Urgent), 5);
        // A clock that goes back gives nothing.
        assert_eq!(taken(&mut bucket, now, Urgency::Urgent), 0);
        assert_eq!(taken(&mut bucket, later + Duration::from_secs(86_400), Urgency::Urgent), 20);
    }

    #[tokio::test(start_paused = true)]
    async fn a_hundred_requests_take_the_time_that_the_rate_says() {
        let rate = RateLimit::new(TEN);
        let start = Instant::now();
        for _ in 0..115 {
            drop(rate.turn(Urgency::Usual).await.unwrap());
        }
        let took = start.elapsed();
        assert!((Duration::from_millis(9900)..Duration::from_millis(10_500)).contains(&took), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_pause_holds_for_every_request_and_the_longest_counts() {
        let rate = RateLimit::new(TEN);
        rate.pause(Duration::from_secs(3));
        rate.pause(Duration::from_secs(1));
        let start = Instant::now();
        assert!(rate.turn(Urgency::Urgent).await.is_ok());
        assert!(start.elapsed() >= Duration::from_secs(3));
        // A longer one than a request waits for is reported at once.
        rate.pause(Duration::from_secs(3600));
        let start = Instant::now();
        assert_eq!(rate.turn(Urgency::Urgent).await.err(), Some(paused(API_RETRY_AFTER_MAX)));
        assert!(start.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn requests_in_flight_are_limited_and_urgent_ones_have_their_own_limit() {
        let rate = RateLimit::new(TEN);
        let mut held = Vec::new();
        for _ in 0..API_IN_FLIGHT_MAX {
            held.push(rate.turn(Urgency::Usual).await.unwrap());
        }
        assert!(rate.turn(Urgency::Usual).await.is_err());
        assert!(rate.turn(Urgency::Urgent).await.is_ok());
        held.pop();
        assert!(rate.turn(Urgency::Usual).await.is_ok());
    }
}
