//! The WASI context of a call: clocks, random numbers, and standard output and error as lines of the log.

use async_trait::async_trait;
use bytes::Bytes;
use tokio::io::AsyncWrite;
use wasmtime_wasi::WasiCtx;
use wasmtime_wasi::cli::{IsTerminal, StdoutStream};
use wasmtime_wasi::p2::{OutputStream, Pollable, StreamError, StreamResult};

use super::log::LogSink;
use super::tap::{Tap, tap_wasi};
use crate::bindings::nodedock::driver::log::Level;

/// Random bytes of one call: keys and seeds, not data.
const RANDOM_BYTES_MAX: u64 = 64 << 10;
/// Bytes that a stream takes at once.
const STREAM_PERMIT: usize = 4096;

/// A context with clocks, random numbers and the log only. Made when a driver first uses WASI: random number generators are seeded by
/// system calls.
pub(super) fn context(log: &LogSink, tap: Option<&Tap>) -> WasiCtx {
    let mut builder = WasiCtx::builder();
    if let Some(tap) = tap {
        tap_wasi(&mut builder, tap);
    }
    builder.stdout(Lines {
        log: log.clone(),
        level: Level::Info,
    });
    builder.stderr(Lines {
        log: log.clone(),
        level: Level::Warn,
    });
    builder.max_random_size(RANDOM_BYTES_MAX);
    builder.allow_tcp(false).allow_udp(false);
    builder.build()
}

/// Standard output or error, as lines of the log.
struct Lines {
    log: LogSink,
    level: Level,
}

impl IsTerminal for Lines {
    fn is_terminal(&self) -> bool {
        false
    }
}

impl StdoutStream for Lines {
    fn async_stream(&self) -> Box<dyn AsyncWrite + Send + Sync> {
        Box::new(tokio::io::sink())
    }

    fn p2_stream(&self) -> Box<dyn OutputStream> {
        Box::new(LineStream {
            log: self.log.clone(),
            level: self.level,
            buffer: Vec::new(),
        })
    }
}

struct LineStream {
    log: LogSink,
    level: Level,
    buffer: Vec<u8>,
}

impl LineStream {
    fn emit(&mut self) {
        if !self.buffer.is_empty() {
            let text = String::from_utf8_lossy(&self.buffer);
            self.log.write(self.level, &text, &[]);
            self.buffer.clear();
        }
    }
}

#[async_trait]
impl Pollable for LineStream {
    async fn ready(&mut self) {}
}

#[async_trait]
impl OutputStream for LineStream {
    fn write(&mut self, bytes: Bytes) -> StreamResult<()> {
        // wasmtime-wasi leaves it to streams to enforce the permit of `check_write`.
        if bytes.len() > STREAM_PERMIT {
            return Err(StreamError::trap(
                "wrote more at once than check-write allows",
            ));
        }
        for byte in bytes {
            match byte {
                b'\n' => self.emit(),
                byte => self.buffer.push(byte),
            }
            if self.buffer.len() >= STREAM_PERMIT {
                self.emit();
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> StreamResult<()> {
        Ok(())
    }

    fn check_write(&mut self) -> StreamResult<usize> {
        Ok(STREAM_PERMIT)
    }
}

impl Drop for LineStream {
    fn drop(&mut self) {
        self.emit();
    }
}
