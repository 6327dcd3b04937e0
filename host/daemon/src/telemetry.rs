//! The log: human text or JSON lines on standard error.

use std::io::{self, Write};

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;

use nodedock_base::printable::is_unprintable;

/// Form of the log's lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Sends the log to standard error. `NODEDOCK_LOG` filters it (`info` unless set; the syntax of tracing's `EnvFilter`).
/// A second call changes nothing.
pub fn init(format: LogFormat) {
    init_with(format, "info");
}

/// Initialises logging like [`init`], with another filter unless one is set.
pub fn init_with(format: LogFormat, filter: &str) {
    let filter = EnvFilter::try_from_env("NODEDOCK_LOG").unwrap_or_else(|_| EnvFilter::new(filter));
    let has_colours =
        matches!(format, LogFormat::Text) && io::IsTerminal::is_terminal(&io::stderr());
    let layer = fmt::layer().with_writer(move || PrintableLines {
        has_colours,
        to: io::stderr(),
    });
    let layer = match format {
        LogFormat::Text => layer.with_ansi(has_colours).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    drop(
        tracing_subscriber::registry()
            .with(filter)
            .with(layer)
            .try_init(),
    );
}

/// Replaces unprintable characters in text from any source: a driver, a plugin, an API object, a file's name. Each write is one line.
struct PrintableLines<W> {
    /// The subscriber writes escape sequences for colours. It does not escape those of all texts.
    has_colours: bool,
    to: W,
}

/// The escape sequences that the subscriber writes. A text that has one can change a colour, and neither hide something nor move the cursor.
const COLOURS: [&str; 10] = [
    "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[3m", "\x1b[31m", "\x1b[32m", "\x1b[33m", "\x1b[34m",
    "\x1b[35m", "\x1b[36m",
];

impl<W> PrintableLines<W> {
    fn printable(&self, line: &str) -> String {
        let replaced = line.char_indices().map(|(at, c)| {
            match is_unprintable(c) && !self.is_colour(&line[at..]) {
                true => '\u{fffd}',
                false => c,
            }
        });
        replaced.collect()
    }

    fn is_colour(&self, rest: &str) -> bool {
        self.has_colours && COLOURS.iter().any(|colour| rest.starts_with(colour))
    }
}

impl<W: Write> Write for PrintableLines<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        let text = self.printable(text.trim_end_matches('\n'));
        self.to.write_all((text + "\n").as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;

    #[derive(Clone, Default)]
    struct Written(Arc<Mutex<Vec<u8>>>);

    impl Write for Written {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// The lines of an event with these characters in its message and in fields of every kind.
    fn logged(format: LogFormat, has_colours: bool, odd: &str) -> String {
        let written = Written::default();
        let to = written.clone();
        let layer = fmt::layer().with_writer(move || PrintableLines {
            has_colours,
            to: to.clone(),
        });
        let layer = match format {
            LogFormat::Text => layer.with_ansi(has_colours).boxed(),
            LogFormat::Json => layer.json().flatten_event(true).boxed(),
        };
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::info!(text = odd, shown = %odd, debugged = ?odd, "{odd} said");
        });
        String::from_utf8(written.0.lock().clone()).unwrap()
    }

    #[test]
    fn log_record_is_one_printable_line() {
        let odd = "a\n\u{9b}31m\u{200b}\u{200f}\u{61c}\u{e0041}\u{2028}\rb";
        for (format, has_colours) in [
            (LogFormat::Text, false),
            (LogFormat::Text, true),
            (LogFormat::Json, false),
        ] {
            let lines = logged(format, has_colours, odd);
            let line = lines.strip_suffix('\n').unwrap();
            let found: Vec<_> = line.chars().filter(|c| is_unprintable(*c)).collect();
            assert!(
                found.iter().all(|c| has_colours && *c == '\x1b'),
                "{format:?}: {line:?}"
            );
            assert!(line.contains("said") && line.contains('\u{fffd}'), "{line}");
            if let LogFormat::Json = format {
                let value: serde_json::Value = serde_json::from_str(line).unwrap();
                assert!(
                    value["message"].as_str().unwrap().ends_with(" said"),
                    "{value}"
                );
            }
        }
    }

    #[test]
    fn only_colour_escapes_are_printed() {
        let plain = logged(LogFormat::Text, true, "a");
        assert!(
            plain.contains("\x1b[32m INFO") && !plain.contains('\u{fffd}'),
            "{plain:?}"
        );
        for odd in ["\x1b[2J", "\x1b[8m", "\x1b]0;title\x07", "\x1b"] {
            let line = logged(LogFormat::Text, true, odd);
            assert!(!line.contains(odd) || odd == "\x1b", "{line:?}");
            assert!(line.contains('\u{fffd}'), "{line:?}");
            assert!(!logged(LogFormat::Text, false, odd).contains('\x1b'));
        }
    }
}
