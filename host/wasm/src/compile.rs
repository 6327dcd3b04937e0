//! Compilation: in a process of its own, which has nothing but the file that it works on, and bounds to its time and memory.
//!
//! Is given bytes that nobody has looked into; gives back an artifact whose seal was checked, or why there is none. Everything
//! that reads a driver's file in depth, from validation on, runs there.

mod confine;
mod process;
mod worker;

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use wasmtime::Engine;

pub use self::worker::serve as compile_for_parent;

use super::admission::LoadError;
use super::artifact::{Artifact, Key, memory_file};
use nodedock_base::error::chain;
use nodedock_model::limit::{COMPILE_CPU, COMPILE_MEMORY, COMPILE_WALL};

/// The program's command that is a compiler, with the parent's ID, bytes of memory and seconds of CPU.
pub const COMPILE_COMMAND: &str = "internal-compile";

/// Where drivers are compiled.
#[derive(Debug, Clone)]
pub enum Compiler {
    /// In a process of its own, by a `nodedock` program of this very build.
    Process { program: PathBuf, bounds: CompileBounds },
    /// In this process and without bounds: for tests of one's own files, where there is no such program.
    InProcess,
}

/// What a compilation may take.
#[derive(Debug, Clone, Copy)]
pub struct CompileBounds {
    /// Bytes of address space.
    pub memory: u64,
    pub cpu: Duration,
    pub wall: Duration,
}

impl Default for CompileBounds {
    fn default() -> Self {
        Self { memory: COMPILE_MEMORY, cpu: COMPILE_CPU, wall: COMPILE_WALL }
    }
}

impl Compiler {
    /// This program's own image, also after its file was replaced.
    pub fn this_program() -> Self {
        Self::Process { program: "/proc/self/exe".into(), bounds: CompileBounds::default() }
    }

    /// Admits and compiles a file. Dropped, it ends the process.
    pub(super) async fn compile(
        &self,
        engine: &Engine,
        key: Key,
        source: Bytes,
    ) -> Result<Artifact, LoadError> {
        let file = match self {
            Self::InProcess => in_process(engine.clone(), source).await?,
            Self::Process { program, bounds } => match process::run(program, source.clone(), bounds).await {
                // The system may have been short of memory for a moment, or somebody killed the wrong process.
                Err(LoadError::CompilerKilled(signal)) => {
                    tracing::warn!(
                        signal,
                        digest = key.digest(),
                        "compiler was killed and is started once more"
                    );
                    process::run(program, source, bounds).await?
                }
                outcome => outcome?,
            },
        };
        let checked = blocking(move || Ok(Artifact::check(file, &key))).await?;
        checked.map_err(|flaw| LoadError::Host(format!("the compiler's answer is no good: {}", chain(&flaw))))
    }
}

async fn in_process(engine: Engine, source: Bytes) -> Result<std::fs::File, LoadError> {
    let work = move || -> io::Result<std::fs::File> {
        let file = memory_file()?;
        worker::produce(&engine, &source, &file)?;
        Ok(file)
    };
    blocking(move || work().map_err(|error| LoadError::Host(format!("compile: {error}")))).await
}

/// Work that takes long, off the serving threads.
pub(super) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LoadError> + Send + 'static,
) -> Result<T, LoadError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(LoadError::Host(format!("compile: {error}"))))
}
