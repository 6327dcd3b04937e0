//! A driver's lines in the host's log: bounded, without control characters, under the driver's name.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::text::is_unprintable;
use crate::model::limit::{LOG_BYTES_PER_SECOND, LOG_LINE_BYTES_MAX, LOG_LINES_PER_SECOND};

/// Seconds' worth of lines that may come at once.
const BURST: f64 = 4.0;
/// Fields of a line; more are left out.
const FIELDS_MAX: usize = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    Trace,
    Debug,
    Info,
    Warn,
    Error,
}

pub(super) struct Line<'a> {
    pub(super) level: Level,
    pub(super) message: &'a str,
    pub(super) fields: &'a [(String, String)],
}

/// One driver's share of the log.
pub(super) struct DriverLog {
    driver: Arc<str>,
    bucket: Mutex<Bucket>,
}

impl DriverLog {
    pub(super) fn new(driver: &str) -> Self {
        Self { driver: driver.into(), bucket: Mutex::new(Bucket::full(Instant::now())) }
    }
}

/// Where the lines of one call go.
#[derive(Clone)]
pub(super) struct LogSink {
    log: Arc<DriverLog>,
    request: Arc<str>,
    /// The last error of this call, for the message of a trap that follows it.
    last_error: Arc<Mutex<Option<String>>>,
}

impl LogSink {
    pub(super) fn new(log: Arc<DriverLog>, request: Arc<str>) -> Self {
        Self { log, request, last_error: Arc::default() }
    }

    pub(super) fn last_error(&self) -> Option<String> {
        self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn write(&self, line: Line<'_>) {
        let text = render(&line);
        if line.level == Level::Error {
            *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(text.clone());
        }
        let taken = {
            let mut bucket = self.log.bucket.lock().unwrap_or_else(PoisonError::into_inner);
            bucket.take(text.len(), Instant::now())
        };
        let Some(suppressed) = taken else { return };
        let (driver, request) = (&*self.log.driver, &*self.request);
        if suppressed > 0 {
            tracing::warn!(
                driver,
                request,
                suppressed,
                "lines of the driver were suppressed: it logs too much"
            );
        }
        match line.level {
            Level::Trace => tracing::trace!(driver, request, "{text}"),
            Level::Debug => tracing::debug!(driver, request, "{text}"),
            Level::Info => tracing::info!(driver, request, "{text}"),
            Level::Warn => tracing::warn!(driver, request, "{text}"),
            Level::Error => tracing::error!(driver, request, "{text}"),
        }
    }
}

/// Message and fields in one line of bounded length.
fn render(line: &Line<'_>) -> String {
    let mut text = String::new();
    push_clean(&mut text, line.message);
    for (key, value) in line.fields.iter().take(FIELDS_MAX) {
        text.push(' ');
        push_clean(&mut text, key);
        text.push('=');
        push_clean(&mut text, value);
    }
    text
}

/// A control character could begin an escape sequence of a terminal or feign a line of ours.
fn push_clean(text: &mut String, part: &str) {
    for c in part.chars() {
        let c = if is_unprintable(c) { ' ' } else { c };
        if text.len() + c.len_utf8() > LOG_LINE_BYTES_MAX {
            return;
        }
        text.push(c);
    }
}

/// A bucket of lines and one of bytes.
struct Bucket {
    lines: f64,
    bytes: f64,
    filled: Instant,
    suppressed: u64,
}

impl Bucket {
    fn full(now: Instant) -> Self {
        let (lines, bytes) = (f64::from(LOG_LINES_PER_SECOND), f64::from(LOG_BYTES_PER_SECOND));
        Self { lines: lines * BURST, bytes: bytes * BURST, filled: now, suppressed: 0 }
    }

    /// Takes a line: how many were suppressed before it, or None if this one is.
    fn take(&mut self, bytes: usize, now: Instant) -> Option<u64> {
        let passed = now.saturating_duration_since(self.filled).as_secs_f64();
        self.filled = now;
        let refill = |have: f64, rate: u32| (have + passed * f64::from(rate)).min(f64::from(rate) * BURST);
        self.lines = refill(self.lines, LOG_LINES_PER_SECOND);
        self.bytes = refill(self.bytes, LOG_BYTES_PER_SECOND);
        let bytes = u32::try_from(bytes).map_or(f64::MAX, f64::from);
        if self.lines < 1.0 || self.bytes < bytes {
            self.suppressed += 1;
            return None;
        }
        self.lines -= 1.0;
        self.bytes -= bytes;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_flood_is_cut_and_counted_and_the_driver_is_heard_again() {
        let start = Instant::now();
        let mut bucket = Bucket::full(start);
        let passed = (0..1000).filter(|_| bucket.take(10, start).is_some()).count();
        assert_eq!(passed, LOG_LINES_PER_SECOND as usize * 4);
        assert_eq!(bucket.take(10, start), None);
        assert_eq!(bucket.take(10, start + Duration::from_secs(1)), Some(801));
        assert_eq!(bucket.take(10, start + Duration::from_secs(1)), Some(0));
    }

    #[test]
    fn long_lines_use_up_the_bytes() {
        let start = Instant::now();
        let mut bucket = Bucket::full(start);
        let passed = (0..1000).filter(|_| bucket.take(LOG_LINE_BYTES_MAX, start).is_some()).count();
        assert_eq!(passed, 4 * LOG_BYTES_PER_SECOND as usize / LOG_LINE_BYTES_MAX);
    }

    #[test]
    fn a_line_is_one_line_of_bounded_length() {
        let fields = [("k\n".to_owned(), "\u{1b}[31mv".to_owned())];
        let line = Line { level: Level::Info, message: "a\r\nb", fields: &fields };
        assert_eq!(render(&line), "a  b k = [31mv");
        let long = "é".repeat(5000);
        let line = Line { level: Level::Info, message: &long, fields: &[] };
        assert_eq!(render(&line).len(), LOG_LINE_BYTES_MAX);
    }
}
