//! What comes after a list that failed or a watch that ended, and when.

use std::time::Duration;

use super::super::error::ApiError;
use nodedock_base::backoff::Backoff;
use nodedock_model::limit;

/// How it ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum End {
    /// The server closed a watch in order; the time for which it was open.
    Closed,
    /// As `Closed`, after so long that nothing is wrong.
    ClosedInTime,
    /// A new list is due.
    Resync,
    /// The resource version is too old.
    Expired,
    /// The same, of a watch that had lasted.
    ExpiredInTime,
    /// It failed, and may go on where it was after this delay at the least.
    Failed(Option<Duration>),
    /// The same, of a watch that had lasted.
    FailedInTime(Option<Duration>),
}

impl End {
    pub(super) fn failed(error: &ApiError) -> Self {
        match error {
            // The version may be served no more, and what a stranger said is not to be built on: begin anew.
            ApiError::Expired(_) | ApiError::NotServed(_) | ApiError::NotAnswer(_) => Self::Expired,
            error => Self::Failed(error.retry_after()),
        }
    }

    /// The same of a watch that was open for so long.
    pub(super) fn after(self, open: Duration) -> Self {
        match self {
            Self::Closed if open >= limit::WATCH_STEADY => Self::ClosedInTime,
            Self::Expired if open >= limit::WATCH_STEADY => Self::ExpiredInTime,
            Self::Failed(delay) if open >= limit::WATCH_STEADY => Self::FailedInTime(delay),
            end => end,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    List,
    /// From where the last one came to.
    Watch,
}

/// Delays that double while nothing lasts.
pub(super) struct Pace {
    backoff: Backoff,
}

impl Default for Pace {
    fn default() -> Self {
        Self { backoff: Backoff::new(limit::API_RETRY_MIN, limit::API_RETRY_MAX) }
    }
}

impl Pace {
    pub(super) fn after(&mut self, end: &End) -> (Next, Duration) {
        if matches!(end, End::ClosedInTime | End::ExpiredInTime | End::FailedInTime(_)) {
            self.backoff.reset();
        }
        match end {
            // Each list costs one of the rate's tokens, and who asks for it has a reason.
            End::Resync => (Next::List, Duration::ZERO),
            End::Closed | End::ClosedInTime => (Next::Watch, self.backoff.delay()),
            End::Expired | End::ExpiredInTime => (Next::List, self.backoff.delay()),
            End::Failed(asked) | End::FailedInTime(asked) => {
                (Next::Watch, self.backoff.delay().max(asked.unwrap_or_default()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn millis(pace: &mut Pace, end: End, times: usize) -> Vec<u128> {
        (0..times).map(|_| pace.after(&end).1.as_millis()).collect()
    }

    #[test]
    fn a_server_that_closes_at_once_is_asked_less_and_less_often() {
        let mut pace = Pace::default();
        let brief = End::Closed.after(Duration::from_millis(3));
        let delays = millis(&mut pace, brief, 8);
        assert_eq!(delays, [500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]);
        let long = End::Closed.after(Duration::from_secs(290));
        assert_eq!(millis(&mut pace, long, 3), [500, 500, 500]);
    }

    #[test]
    fn what_is_too_old_is_listed_again_and_not_in_a_tight_circle() {
        let mut pace = Pace::default();
        let expired = End::failed(&ApiError::Expired("too old".to_owned()));
        assert_eq!(pace.after(&expired), (Next::List, limit::API_RETRY_MIN));
        assert_eq!(pace.after(&expired), (Next::List, limit::API_RETRY_MIN * 2));
        let in_time = expired.after(Duration::from_secs(60));
        assert_eq!(pace.after(&in_time), (Next::List, limit::API_RETRY_MIN));
    }

    #[test]
    fn a_failure_goes_on_where_it_was_after_the_delay_that_the_server_asks_for() {
        let mut pace = Pace::default();
        let busy =
            ApiError::TooManyRequests { words: String::new(), retry_after: Some(Duration::from_secs(9)) };
        assert_eq!(pace.after(&End::failed(&busy)), (Next::Watch, Duration::from_secs(9)));
        let gone = End::failed(&ApiError::unavailable("gone"));
        assert_eq!(pace.after(&gone), (Next::Watch, Duration::from_secs(1)));
    }

    #[test]
    fn a_path_that_is_gone_and_an_answer_of_a_stranger_begin_anew() {
        let mut pace = Pace::default();
        for error in [ApiError::NotServed("/x".to_owned()), ApiError::NotAnswer("HTML".to_owned())] {
            assert_eq!(pace.after(&End::failed(&error)).0, Next::List);
        }
        assert_eq!(pace.after(&End::Resync), (Next::List, Duration::ZERO));
    }
}
