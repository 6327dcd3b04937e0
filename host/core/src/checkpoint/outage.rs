//! Lines of the log about commits that fail: one when they begin to, one for each minute in which they do, and one when a commit succeeds again.
//!
//! Requests are refused, and those of claims retried, many times during an outage: none of them has a line about the checkpoint. Pure.

use std::time::Duration;

use tokio::time::Instant;

/// Minimum interval of lines about failed commits, also of several outages: on a disk that is almost full one commit fails and the next does not.
const LINE_EVERY: Duration = Duration::from_secs(60);

/// The outages so far.
#[derive(Debug, Default)]
pub(super) struct OutageLog {
    /// Time of the first of the failed commits; `None`: the last one succeeded.
    since: Option<Instant>,
    /// Time of the last line about a failed commit.
    last: Option<Instant>,
    /// This outage has a line.
    is_reported: bool,
}

/// A line that is due, with the duration of the outage.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum OutageLine {
    Fails(Duration),
    Ended(Duration),
}

impl OutageLog {
    /// Takes the outcome of a commit.
    pub(super) fn observe(&mut self, is_failure: bool, now: Instant) -> Option<OutageLine> {
        if !is_failure {
            let since = self.since.take()?;
            let is_reported = std::mem::take(&mut self.is_reported);
            return is_reported.then(|| OutageLine::Ended(now - since));
        }
        let since = *self.since.get_or_insert(now);
        if self.last.is_some_and(|last| now < last + LINE_EVERY) {
            return None;
        }
        (self.last, self.is_reported) = (Some(now), true);
        Some(OutageLine::Fails(now - since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A full disk had a line for each open claim each two seconds.
    #[test]
    fn outage_has_one_line_a_minute() {
        let (start, mut log) = (Instant::now(), OutageLog::default());
        let at = |seconds| start + Duration::from_secs(seconds);
        let fails = |seconds| Some(OutageLine::Fails(Duration::from_secs(seconds)));
        let ended = |seconds| Some(OutageLine::Ended(Duration::from_secs(seconds)));
        assert_eq!(log.observe(false, at(0)), None);
        let lines: Vec<_> = (10..200)
            .step_by(2)
            .filter_map(|second| log.observe(true, at(second)))
            .collect();
        assert_eq!(
            lines,
            [0, 60, 120, 180].map(|second| fails(second).unwrap())
        );
        assert_eq!(log.observe(false, at(200)), ended(190));
        assert_eq!(log.observe(false, at(201)), None);
        // Of a disk that is almost full no commit has a line of its own, neither for its failure nor for the success after it.
        for second in 202..249 {
            assert_eq!(log.observe(true, at(second)), None);
            assert_eq!(log.observe(false, at(second)), None);
        }
        assert_eq!(log.observe(true, at(251)), fails(0));
        assert_eq!(log.observe(false, at(252)), ended(1));
    }
}
