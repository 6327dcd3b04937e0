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
    let filter = EnvFilter::try_from_env("NODEDOCK_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let registry = tracing_subscriber::registry().with(filter);
    let colours = std::io::IsTerminal::is_terminal(&std::io::stderr());
    let done = match format {
        LogFormat::Text => {
            registry.with(fmt::layer().with_writer(std::io::stderr).with_ansi(colours)).try_init()
        }
        LogFormat::Json => {
            registry.with(fmt::layer().json().flatten_event(true).with_writer(std::io::stderr)).try_init()
        }
    };
    drop(done);
}
