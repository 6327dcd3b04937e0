//! The rate of requests: a token bucket that all share, a pause that the API server asked for, and a limit of requests in flight.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep, timeout_at};

use super::{API_RETRY_AFTER_MAX, ApiError, ErrorKind};
use nodedock_base::rate::TokenBucket;
use nodedock_model::limit;

/// Time that a request waits for the rate limit: less than a kubelet waits for a prepare.
const API_RATE_WAIT: Duration = Duration::from_secs(20);

/// Requests to the API server in flight, separately for those that a pod waits for and for the others.
const API_IN_FLIGHT_MAX: usize = 8;

/// Urgency of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Urgency {
    Usual,
    /// A pod waits: the request may take the last tokens.
    Urgent,
}

/// Rate of requests to the API server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestRate {
    /// Requests per second, at least 1.
    pub per_second: u32,
    /// Requests at once after a pause, at least 1.
    pub burst: u32,
}

impl Default for RequestRate {
    fn default() -> Self {
        Self {
            per_second: limit::API_PER_SECOND,
            burst: limit::API_BURST,
        }
    }
}

pub(super) struct RateLimit {
    tokens: Mutex<TokenBucket>,
    /// Tokens that usual requests leave for urgent ones.
    reserve: u32,
    /// Nothing is sent before, as the API server requested.
    paused_until: Mutex<Instant>,
    usual: Semaphore,
    urgent: Semaphore,
}

impl RateLimit {
    pub(super) fn new(rate: RequestRate) -> Self {
        let now = Instant::now();
        Self {
            tokens: Mutex::new(TokenBucket::full(rate.per_second, rate.burst, now)),
            // Of a small burst a quarter: a larger reserve would never be left over.
            reserve: limit::API_URGENT_RESERVE.min(rate.burst / 4),
            paused_until: Mutex::new(now),
            usual: Semaphore::new(API_IN_FLIGHT_MAX),
            urgent: Semaphore::new(API_IN_FLIGHT_MAX),
        }
    }

    /// Waits for a bounded time. The request may be sent until the permit is dropped.
    pub(super) async fn permit(&self, urgency: Urgency) -> Result<SemaphorePermit<'_>, ApiError> {
        let until = Instant::now() + API_RATE_WAIT;
        let (permits, reserve) = match urgency {
            Urgency::Usual => (&self.usual, self.reserve),
            Urgency::Urgent => (&self.urgent, 0),
        };
        let Ok(Ok(permit)) = timeout_at(until, permits.acquire()).await else {
            return Err(too_many());
        };
        loop {
            let now = Instant::now();
            let pause = self.paused_until.lock().saturating_duration_since(now);
            if !pause.is_zero() && now + pause > until {
                return Err(paused(pause));
            }
            let taken = if pause.is_zero() {
                self.tokens.lock().take(now, reserve)
            } else {
                Err(pause)
            };
            match taken {
                Ok(()) => return Ok(permit),
                Err(wait) if now + wait > until => return Err(too_many()),
                Err(wait) => sleep(wait).await,
            }
        }
    }

    /// Sends nothing for so long: the API server requested it.
    pub(super) fn pause(&self, delay: Duration) {
        let until = Instant::now() + delay.min(API_RETRY_AFTER_MAX);
        let mut paused_until = self.paused_until.lock();
        *paused_until = until.max(*paused_until);
    }
}

fn too_many() -> ApiError {
    ApiError::unreachable("too many requests of this node wait for it")
}

fn paused(wait: Duration) -> ApiError {
    let error = ApiError::new(ErrorKind::Throttled, "an earlier request was throttled");
    ApiError {
        retry_after: Some(wait),
        ..error
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEN: RequestRate = RequestRate {
        per_second: 10,
        burst: 20,
    };

    /// Returns the number of requests of an urgency that are sent without a wait.
    async fn sent(rate: &RateLimit, urgency: Urgency) -> usize {
        let mut count = 0;
        while tokio::time::timeout(Duration::ZERO, rate.permit(urgency))
            .await
            .is_ok()
        {
            count += 1;
        }
        count
    }

    #[tokio::test(start_paused = true)]
    async fn last_tokens_are_for_urgent_requests() {
        let rate = RateLimit::new(TEN);
        assert_eq!(
            (
                sent(&rate, Urgency::Usual).await,
                sent(&rate, Urgency::Urgent).await
            ),
            (15, 5)
        );
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(
            (
                sent(&rate, Urgency::Usual).await,
                sent(&rate, Urgency::Urgent).await
            ),
            (5, 5)
        );
        tokio::time::advance(Duration::from_secs(86_400)).await;
        assert_eq!(sent(&rate, Urgency::Urgent).await, 20);
    }

    #[tokio::test(start_paused = true)]
    async fn hundred_requests_obey_the_rate() {
        let rate = RateLimit::new(TEN);
        let start = Instant::now();
        for _ in 0..115 {
            drop(rate.permit(Urgency::Usual).await.unwrap());
        }
        let took = start.elapsed();
        assert!(
            (Duration::from_millis(9900)..Duration::from_millis(10_500)).contains(&took),
            "{took:?}"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn longest_pause_applies_to_every_request() {
        let rate = RateLimit::new(TEN);
        rate.pause(Duration::from_secs(3));
        rate.pause(Duration::from_secs(1));
        let start = Instant::now();
        assert!(rate.permit(Urgency::Urgent).await.is_ok());
        assert!(start.elapsed() >= Duration::from_secs(3));
        // A longer one than a request waits for is reported at once.
        rate.pause(Duration::from_secs(3600));
        let start = Instant::now();
        assert_eq!(
            rate.permit(Urgency::Urgent).await.err(),
            Some(paused(API_RETRY_AFTER_MAX))
        );
        assert!(start.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test(start_paused = true)]
    async fn urgent_requests_have_their_own_limit() {
        let rate = RateLimit::new(TEN);
        let mut held = Vec::new();
        for _ in 0..API_IN_FLIGHT_MAX {
            held.push(rate.permit(Urgency::Usual).await.unwrap());
        }
        assert!(rate.permit(Urgency::Usual).await.is_err());
        assert!(rate.permit(Urgency::Urgent).await.is_ok());
        held.pop();
        assert!(rate.permit(Urgency::Usual).await.is_ok());
    }
}
