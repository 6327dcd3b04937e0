//! Admits a file and compiles it: in the compiler's process, or in tests in the caller's.

use std::io::{self, Read, Write};
use std::mem::MaybeUninit;

use wasmtime::Engine;

use super::{CompileBounds, confine};
use crate::engine;
use crate::load::admission::{self, CODE_BYTES_MAX, LoadError, Surface, bounded_line};
use crate::load::artifact::{self, Key, Report, Spent};
use nodedock_model::limit::DRIVER_FILE_BYTES_MAX;

/// Runs the compiler's process: drops its privileges, reads a driver from standard input, and writes the artifact to standard output. A
/// refused driver makes an artifact as well; an error says that there is none.
pub fn serve(parent: u32, bounds: &CompileBounds) -> io::Result<()> {
    let parallel = confine::confine(parent, bounds)?;
    let mut source = Vec::new();
    // One byte more, so that a file that is too large is refused for that.
    io::stdin()
        .lock()
        .take(DRIVER_FILE_BYTES_MAX + 1)
        .read_to_end(&mut source)?;
    let engine =
        engine::for_compiling(parallel).map_err(|error| io::Error::other(format!("{error:#}")))?;
    produce(&engine, &source, io::stdout().lock())
}

/// Writes the artifact of a file: its code, or why there is none.
pub(super) fn produce(engine: &Engine, source: &[u8], out: impl Write) -> io::Result<()> {
    let mut surface = Surface::default();
    let compiled =
        admission::admit(source, &mut surface).and_then(|component| compile(engine, &component));
    let (code, refusal) = match compiled {
        Ok(code) => (code, None),
        Err(refusal) => (Vec::new(), Some(refusal)),
    };
    let report = Report {
        surface,
        refusal,
        spent: spent(),
    };
    artifact::write(out, &Key::new(engine, source), &code, &report)
}

fn compile(engine: &Engine, component: &[u8]) -> Result<Vec<u8>, LoadError> {
    let code = engine.precompile_component(component).map_err(|error| {
        let mut causes = error.chain().filter_map(|cause| cause.downcast_ref());
        match causes.any(|error: &io::Error| error.kind() == io::ErrorKind::OutOfMemory) {
            true => LoadError::CompileMemory(memory_bound() >> 20),
            false => LoadError::Compile(bounded_line(&format!("{error:#}"))),
        }
    })?;
    match code.len() as u64 <= CODE_BYTES_MAX {
        true => Ok(code),
        false => Err(LoadError::CompiledTooLarge),
    }
}

fn memory_bound() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::As)
        .current
        .unwrap_or(u64::MAX)
}

fn spent() -> Spent {
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the pointer is to memory of the type that the call fills, and zeroes are valid for it (getrusage(2)).
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    Spent {
        cpu_ms: milliseconds(usage.ru_utime) + milliseconds(usage.ru_stime),
        memory_peak_mib: usage.ru_maxrss as u64 >> 10,
    }
}

fn milliseconds(time: libc::timeval) -> u64 {
    time.tv_sec as u64 * 1000 + time.tv_usec as u64 / 1000
}
