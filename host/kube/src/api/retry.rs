//! Repeats, for callers that want them.

use std::future::Future;
use std::hash::{BuildHasher, Hasher, RandomState};

use super::error::ApiError;
use nodedock_base::backoff::{Backoff, spread};
use nodedock_model::limit;

/// A number that differs from node to node and from call to call.
pub fn chance() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Asks up to so many times, with delays that double or are the API server's own, while the failure may heal by itself.
pub async fn retry<T, F>(tries_max: u32, mut ask: impl FnMut() -> F) -> Result<T, ApiError>
where
    F: Future<Output = Result<T, ApiError>>,
{
    let mut backoff = Backoff::new(limit::API_RETRY_MIN, limit::API_RETRY_MAX);
    let mut tried = 1;
    loop {
        let error = match ask().await {
            Err(error) if error.is_retryable() && tried < tries_max => error,
            outcome => return outcome,
        };
        tried += 1;
        let delay = spread(backoff.delay(), chance());
        tokio::time::sleep(error.retry_after().unwrap_or(delay).max(delay)).await;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use std::time::Duration;

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_may_heal_is_tried_again_for_a_bounded_number_of_times() {
        let asked = AtomicU32::new(0);
        let start = Instant::now();
        let outcome = retry(4, || {
            asked.fetch_add(1, Relaxed);
            async { Err::<(), _>(ApiError::unavailable("gone")) }
        });
        assert_eq!(outcome.await, Err(ApiError::unavailable("gone")));
        assert_eq!(asked.load(Relaxed), 4);
        let took = start.elapsed();
        assert!((Duration::from_millis(2625)..=Duration::from_millis(3501)).contains(&took), "{took:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn the_servers_own_delay_is_kept_and_a_refusal_is_final() {
        let start = Instant::now();
        let asked = AtomicU32::new(0);
        let outcome = retry(9, || {
            let first = asked.fetch_add(1, Relaxed) == 0;
            async move {
                let retry_after = Some(Duration::from_secs(7));
                Err::<(), _>(if first {
                    ApiError::TooManyRequests { words: "slow".to_owned(), retry_after }
                } else {
                    ApiError::Forbidden("no".to_owned())
                })
            }
        });
        assert_eq!(outcome.await, Err(ApiError::Forbidden("no".to_owned())));
        assert!(start.elapsed() >= Duration::from_secs(7) && start.elapsed() < Duration::from_secs(8));
    }
}
