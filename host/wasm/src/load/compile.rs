//! Compilation, in a process of its own that has nothing but the file that it works on, and limits to its time and memory.
//!
//! Is given bytes that were not parsed; returns an artifact whose seal was verified, or why there is none. Everything that parses a
//! driver's file, from validation on, runs in that process.

mod confine;
mod process;
mod worker;

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;

pub use self::worker::serve as compile_for_parent;

use crate::load::admission::LoadError;
use crate::load::artifact::{Artifact, Key, SealKey};
use nodedock_base::error::chain;

/// The program's command that compiles, with the parent's process ID, bytes of memory and seconds of CPU.
pub const COMPILE_COMMAND: &str = "internal-compile";

/// Process in which drivers are compiled.
#[derive(Debug, Clone)]
pub enum Compiler {
    /// A separate process, by a `nodedock` program of the same build.
    Process {
        program: PathBuf,
        bounds: CompileBounds,
    },
    /// This process, without limits.
    #[cfg(test)]
    InProcess,
}

/// Resource limits of a compilation.
#[derive(Debug, Clone, Copy)]
pub struct CompileBounds {
    /// Bytes of address space.
    pub memory: u64,
    pub cpu: Duration,
    pub wall: Duration,
}

impl Default for CompileBounds {
    /// A Python driver of 18 MB takes 5 s and some 450 MB; of addresses there are more. The wall clock is longer than the CPU time,
    /// because a compiler has the lowest priority.
    fn default() -> Self {
        Self {
            memory: 1536 << 20,
            cpu: Duration::from_secs(120),
            wall: Duration::from_secs(180),
        }
    }
}

impl Compiler {
    /// This program's own image, also after its file was replaced.
    pub fn this_program() -> Self {
        Self::Process {
            program: "/proc/self/exe".into(),
            bounds: CompileBounds::default(),
        }
    }

    /// Admits and compiles a file. When the future is dropped, the process is killed.
    pub(crate) async fn compile(&self, key: Key, source: Bytes) -> Result<Artifact, LoadError> {
        let file = match self {
            #[cfg(test)]
            Self::InProcess => tests::compile(source).await?,
            Self::Process { program, bounds } => {
                match process::run(program, source.clone(), bounds).await {
                    // The node may have been short of memory for a moment.
                    Err(LoadError::CompilerKilled(signal)) => {
                        let digest = key.digest();
                        tracing::warn!(
                            signal,
                            digest,
                            "compiler was killed and is started once more"
                        );
                        process::run(program, source, bounds).await?
                    }
                    outcome => outcome?,
                }
            }
        };
        blocking(move || {
            Artifact::verify(file, &key, &SealKey::OF_PIPE).map_err(|error| {
                LoadError::Host(format!(
                    "the compiler's answer is unusable: {}",
                    chain(&error)
                ))
            })
        })
        .await
    }
}

/// Runs long work off the serving threads.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LoadError> + Send + 'static,
) -> Result<T, LoadError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(LoadError::Host(format!("compile: {error}"))))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    /// Compiles in this process.
    pub(crate) async fn compile(source: Bytes) -> Result<File, LoadError> {
        blocking(move || {
            let engine = crate::engine::for_compiling(true).unwrap();
            let file = crate::load::artifact::memory_file().unwrap();
            worker::produce(&engine, &source, &file).unwrap();
            Ok(file)
        })
        .await
    }
}
