//! A driver's lines in the host's log: limited in number and length, without control characters, under the driver's name.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::time::Instant;

use crate::bindings::nodedock::driver::log::Level;
use crate::{Limit, Stats};
use nodedock_base::printable::one_line;
use nodedock_base::rate::TokenBucket;
use nodedock_model::grant::LogRates;

/// Bytes of a line.
const LOG_LINE_BYTES_MAX: usize = 4096;

/// A burst has the lines of so many seconds.
const BURST_SECONDS: u32 = 4;
/// Fields of a line; more are omitted.
const FIELDS_MAX: usize = 32;

/// One driver's share of the log.
pub(crate) struct DriverLog {
    driver: Arc<str>,
    rates: LogRates,
    lines: Mutex<Share>,
    /// Rate of our own lines about refusals: separate, so that neither suppresses the other.
    refusals: Mutex<Share>,
    counters: Arc<Stats>,
}

impl DriverLog {
    pub(crate) fn new(driver: &str, rates: LogRates, counters: Arc<Stats>) -> Self {
        let now = Instant::now();
        Self {
            driver: driver.into(),
            rates,
            lines: Mutex::new(Share::full(rates, now)),
            refusals: Mutex::new(Share::full(rates, now)),
            counters,
        }
    }

    /// Admits a line: how many were suppressed before it. None: it is suppressed.
    fn admit(&self, bytes: usize) -> Option<u64> {
        let admitted = self.lines.lock().take(bytes, Instant::now());
        match admitted {
            Ok(_) => drop(self.counters.log_lines.inc()),
            Err(limit) => self.counters.refuse(limit),
        }
        admitted.ok()
    }

    /// Admits a line about a refusal: how many were suppressed before it. None: it is suppressed.
    pub(crate) fn admit_refusal(&self, bytes: usize) -> Option<u64> {
        self.refusals.lock().take(bytes, Instant::now()).ok()
    }
}

/// Writes the lines of one call.
#[derive(Clone)]
pub(crate) struct LogSink {
    log: Arc<DriverLog>,
    request: Arc<str>,
    /// The last error line of this call, for the message of a trap after it.
    last_error: Arc<Mutex<Option<String>>>,
}

impl LogSink {
    pub(crate) fn new(log: Arc<DriverLog>, request: Arc<str>) -> Self {
        Self {
            log,
            request,
            last_error: Arc::default(),
        }
    }

    pub(crate) fn last_error(&self) -> Option<String> {
        self.last_error.lock().clone()
    }

    pub(crate) fn write(&self, level: Level, message: &str, fields: &[(String, String)]) {
        let text = render(message, fields);
        if level == Level::Error {
            *self.last_error.lock() = Some(text.clone());
        }
        let Some(suppressed) = self.log.admit(text.len()) else {
            return;
        };
        let (driver, request) = (&*self.log.driver, &*self.request);
        if suppressed > 0 {
            let LogRates {
                lines: lines_per_second,
                bytes: bytes_per_second,
            } = self.log.rates;
            tracing::warn!(
                driver,
                request,
                suppressed,
                lines_per_second,
                bytes_per_second,
                "lines of the driver were suppressed: it logs too much"
            );
        }
        match level {
            Level::Trace => tracing::trace!(driver, request, "{text}"),
            Level::Debug => tracing::debug!(driver, request, "{text}"),
            Level::Info => tracing::info!(driver, request, "{text}"),
            Level::Warn => tracing::warn!(driver, request, "{text}"),
            Level::Error => tracing::error!(driver, request, "{text}"),
        }
    }
}

/// Message and fields in one line of bounded length. A longer one is shortened in its middle: the cause is at its end.
fn render(message: &str, fields: &[(String, String)]) -> String {
    let mut text = message.to_owned();
    for (key, value) in fields.iter().take(FIELDS_MAX) {
        for part in [" ", key, "=", value] {
            text.push_str(part);
        }
    }
    one_line(&text, LOG_LINE_BYTES_MAX)
}

/// Remaining rate of lines and bytes, and the number of lines that were suppressed since the last one.
struct Share {
    lines: TokenBucket,
    bytes: TokenBucket,
    suppressed: u64,
}

impl Share {
    fn full(rates: LogRates, now: Instant) -> Self {
        // A line of any length passes after a pause.
        let bytes = rates
            .bytes
            .saturating_mul(BURST_SECONDS)
            .max(LOG_LINE_BYTES_MAX as u32);
        Self {
            lines: TokenBucket::full(rates.lines, rates.lines.saturating_mul(BURST_SECONDS), now),
            bytes: TokenBucket::full(rates.bytes, bytes, now),
            suppressed: 0,
        }
    }

    /// Takes a line: how many were suppressed before it, or the limit for which this one is suppressed.
    fn take(&mut self, bytes: usize, now: Instant) -> Result<u64, Limit> {
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let lacking = [
            (&mut self.lines, 1, Limit::LogLines),
            (&mut self.bytes, bytes, Limit::LogBytes),
        ];
        for (bucket, tokens, limit) in lacking {
            if bucket.delay_until(now, tokens).is_some() {
                self.suppressed += 1;
                return Err(limit);
            }
        }
        self.lines.spend(1);
        self.bytes.spend(bytes);
        Ok(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::limit::{LOG_BYTES_PER_SECOND, LOG_LINES_PER_SECOND};
    use std::time::Duration;

    const RATES: LogRates = LogRates {
        lines: LOG_LINES_PER_SECOND,
        bytes: LOG_BYTES_PER_SECOND,
    };

    #[test]
    fn log_flood_is_limited_and_counted() {
        let start = Instant::now();
        let mut bucket = Share::full(RATES, start);
        let passed = (0..1000).filter(|_| bucket.take(10, start).is_ok()).count();
        assert_eq!(passed, LOG_LINES_PER_SECOND as usize * 4);
        assert_eq!(bucket.take(10, start), Err(Limit::LogLines));
        assert_eq!(bucket.take(10, start + Duration::from_secs(1)), Ok(801));
        assert_eq!(bucket.take(10, start + Duration::from_secs(1)), Ok(0));
    }

    #[test]
    fn long_lines_use_up_the_bytes() {
        let start = Instant::now();
        let mut bucket = Share::full(RATES, start);
        let passed = (0..1000)
            .filter(|_| bucket.take(LOG_LINE_BYTES_MAX, start).is_ok())
            .count();
        assert_eq!(
            passed,
            4 * LOG_BYTES_PER_SECOND as usize / LOG_LINE_BYTES_MAX
        );
        assert_eq!(bucket.take(LOG_LINE_BYTES_MAX, start), Err(Limit::LogBytes));
    }

    #[test]
    fn longest_line_passes_at_lowest_rate() {
        let start = Instant::now();
        let mut bucket = Share::full(LogRates { lines: 1, bytes: 1 }, start);
        assert_eq!(bucket.take(LOG_LINE_BYTES_MAX, start), Ok(0));
        assert_eq!(
            bucket.take(2, start + Duration::from_secs(1)),
            Err(Limit::LogBytes)
        );
    }

    #[test]
    fn log_record_is_one_bounded_line() {
        let fields = [("k\n".to_owned(), "\u{1b}[31mv".to_owned())];
        assert_eq!(render("a\r\nb", &fields), "a  b k = [31mv");
        assert_eq!(render("a", &[]), "a");
    }

    /// The end of a long line, which had the cause of an error, was not in the log.
    #[test]
    fn long_line_keeps_begin_and_end() {
        let message = format!("reset gpu-0: {}: no such device", "é".repeat(5000));
        let fields = [("errno".to_owned(), "ENODEV".to_owned())];
        let line = render(&message, &fields);
        assert!(line.len() <= LOG_LINE_BYTES_MAX && line.len() > LOG_LINE_BYTES_MAX - 8);
        assert!(line.starts_with("reset gpu-0: é"), "{line}");
        assert!(line.contains(" … "), "{line}");
        assert!(line.ends_with(": no such device errno=ENODEV"), "{line}");
    }
}
