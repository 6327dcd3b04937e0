//! Rests of tasks that look at everything after a change: what they cost is bounded, however often something changes.

use std::time::Duration;

use tokio::time::Instant;

/// A rest is so many times as long as the work before it: such a task takes a tenth of a core at most.
const REST_PER_WORK: u32 = 9;

/// Longest rest: what has changed is seen after it.
const REST_MAX: Duration = Duration::from_secs(1);

/// Returns how long to rest after work that began then, at least `min`.
pub fn rest_after(began: Instant, min: Duration) -> Duration {
    rest(began.elapsed(), min)
}

fn rest(worked: Duration, min: Duration) -> Duration {
    worked.saturating_mul(REST_PER_WORK).min(REST_MAX).max(min)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rest_grows_with_work_until_bound() {
        let ms = Duration::from_millis;
        assert_eq!(rest(ms(0), ms(50)), ms(50));
        assert_eq!(rest(ms(20), ms(50)), ms(180));
        assert_eq!(rest(ms(4000), ms(50)), REST_MAX);
        assert_eq!(rest(ms(1), ms(5000)), ms(5000));
    }
}
