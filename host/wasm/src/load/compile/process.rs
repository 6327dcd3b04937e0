//! The compiler's process, seen by its parent: starts it, writes the source, reads the artifact, and explains its end.

use std::fs::File;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};

use bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};

use super::{COMPILE_COMMAND, CompileBounds};
use crate::load::admission::{LoadError, bounded_line};
use crate::load::artifact::{ARTIFACT_BYTES_MAX, memory_file};

/// Bytes of its standard error: an explanation has a line or two.
const STDERR_BYTES_MAX: usize = 4 << 10;
/// Text that the standard library's allocator prints before it aborts when memory is exhausted.
const NO_MEMORY: &str = "memory allocation of";

/// Compiles a file. When the future is dropped, the process is killed.
pub(super) async fn run(
    program: &Path,
    source: Bytes,
    bounds: &CompileBounds,
) -> Result<File, LoadError> {
    let mut child = command(program, bounds).spawn().map_err(|error| {
        LoadError::Host(format!("start the compiler {}: {error}", program.display()))
    })?;
    tracing::debug!(pid = child.id(), bytes = source.len(), "compiler started");
    match tokio::time::timeout(bounds.wall, talk(&mut child, source, bounds)).await {
        Ok(outcome) => outcome,
        Err(_) => {
            // It may have ended just now: the call fails then, and waits for it all the same.
            let _ = child.kill().await;
            Err(LoadError::CompileTime(bounds.wall))
        }
    }
}

fn command(program: &Path, bounds: &CompileBounds) -> Command {
    let mut command = Command::new(program);
    command
        .arg(COMPILE_COMMAND)
        .arg(std::process::id().to_string());
    command
        .arg(bounds.memory.to_string())
        .arg(bounds.cpu.as_secs().to_string());
    command.arg0("nodedock").env_clear().kill_on_drop(true);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

async fn talk(child: &mut Child, source: Bytes, bounds: &CompileBounds) -> Result<File, LoadError> {
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let ((), answer, stderr) =
        tokio::join!(write(stdin, source), receive(stdout), read_stderr(stderr));
    let status = child.wait().await.map_err(talk_failed)?;
    let answer = answer.map_err(talk_failed)?;
    if status.success() {
        Ok(answer)
    } else {
        Err(explain(status, &stderr, bounds))
    }
}

fn talk_failed(error: io::Error) -> LoadError {
    LoadError::Host(format!("talk to the compiler: {error}"))
}

/// Writes the source. A process that ends before it has read all explains that by its exit status.
async fn write(stdin: Option<ChildStdin>, source: Bytes) {
    if let Some(mut stdin) = stdin {
        let _ = stdin.write_all(&source).await;
    }
}

/// Reads the artifact into a file in memory, and not more than an artifact can have.
async fn receive(stdout: Option<ChildStdout>) -> io::Result<File> {
    let mut file = tokio::fs::File::from_std(memory_file()?);
    let mut stdout = stdout
        .ok_or(io::ErrorKind::BrokenPipe)?
        .take(ARTIFACT_BYTES_MAX + 1);
    tokio::io::copy(&mut stdout, &mut file).await?;
    file.flush().await?;
    if stdout.limit() == 0 {
        Err(io::Error::other("it writes without an end"))
    } else {
        Ok(file.into_std().await)
    }
}

/// Returns the beginning of its standard error, and discards the rest, so that the process does not block on it.
async fn read_stderr(stderr: Option<ChildStderr>) -> String {
    let Some(mut stderr) = stderr else {
        return String::new();
    };
    let mut text = Vec::new();
    // Without it the error lacks an explanation, and nothing else.
    let _ = (&mut stderr)
        .take(STDERR_BYTES_MAX as u64)
        .read_to_end(&mut text)
        .await;
    let _ = tokio::io::copy(&mut stderr, &mut tokio::io::sink()).await;
    String::from_utf8_lossy(&text).trim().to_owned()
}

/// Why a process ended without an artifact.
fn explain(status: ExitStatus, stderr: &str, bounds: &CompileBounds) -> LoadError {
    match status.signal() {
        Some(libc::SIGXCPU) => LoadError::CompileCpu(bounds.cpu),
        Some(libc::SIGKILL | libc::SIGTERM) => {
            LoadError::CompilerKilled(status.signal().unwrap_or_default())
        }
        Some(_) if stderr.contains(NO_MEMORY) => LoadError::CompileMemory(bounds.memory >> 20),
        Some(signal) => LoadError::Compile(format!(
            "the compiler crashed with signal {signal}{}",
            said(stderr)
        )),
        None if status.code() == Some(PANICKED) => {
            LoadError::Compile(format!("the compiler panicked{}", said(stderr)))
        }
        None => LoadError::Host(format!(
            "the compiler could not start ({status}){}",
            said(stderr)
        )),
    }
}

/// Exit status of a process whose main thread panicked.
const PANICKED: i32 = 101;

fn said(text: &str) -> String {
    if text.is_empty() {
        String::new()
    } else {
        format!(": {}", bounded_line(text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(raw: i32, stderr: &str) -> String {
        explain(ExitStatus::from_raw(raw), stderr, &CompileBounds::default())
            .code()
            .to_string()
    }

    #[test]
    fn every_compiler_exit_has_an_error() {
        assert_eq!(ended(libc::SIGXCPU, ""), "compile-cpu");
        assert_eq!(
            ended(libc::SIGKILL, "memory allocation of 8 bytes failed"),
            "compiler-killed"
        );
        assert_eq!(
            ended(libc::SIGABRT, "memory allocation of 8 bytes failed"),
            "compile-memory"
        );
        assert_eq!(
            ended(libc::SIGABRT, "thread 'main' has overflowed its stack"),
            "compile-failed"
        );
        assert_eq!(ended(libc::SIGSEGV, ""), "compile-failed");
        assert_eq!(ended(PANICKED << 8, "panicked at x"), "compile-failed");
        assert_eq!(ended(1 << 8, "error: no such user"), "host-failed");
        let status = ExitStatus::from_raw(PANICKED << 8);
        let text = explain(
            status,
            "panicked\nat \x1b[1mhome",
            &CompileBounds::default(),
        )
        .to_string();
        assert!(text.ends_with("panicked: panicked at  [1mhome"), "{text}");
    }
}
