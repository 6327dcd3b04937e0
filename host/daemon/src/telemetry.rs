//! The log: human text or JSON lines on standard error.

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;
use tracing_subscriber::prelude::*;

/// Form of the log's lines.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LogFormat {
    #[default]
    Text,
    Json,
}

/// Sends the log to standard error. `NODEDOCK_LOG` filters it (`info` unless set; the syntax of tracing's `EnvFilter`).
/// A second call changes nothing.
pub(crate) fn init(format: LogFormat) {
    init_with(format, "info");
}

/// As [`init`], with another filter unless one is set.
pub(crate) fn init_with(format: LogFormat, filter: &str) {
    let filter = EnvFilter::try_from_env("NODEDOCK_LOG").unwrap_or_else(|_| EnvFilter::new(filter));
    let layer = fmt::layer().with_writer(std::io::stderr);
    let layer = match format {
        LogFormat::Text => layer.with_ansi(std::io::IsTerminal::is_terminal(&std::io::stderr())).boxed(),
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
    };
    drop(tracing_subscriber::registry().with(filter).with(layer).try_init());
}
