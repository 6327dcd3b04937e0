//! A compiler's process, from outside: started, fed, listened to, and its end explained.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{ExitStatus, Stdio};

use bytes::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::process::{Child, ChildStderr, ChildStdin, ChildStdout, Command};

use super::super::admission::{LoadError, words};
use super::super::artifact::memory_file;
use super::{COMPILE_COMMAND, CompileBounds};
use nodedock_model::limit::{COMPILED_BYTES_MAX, DRIVER_REPORT_BYTES_MAX};

/// Of what it writes to standard error: an explanation has a line or two.
const WORDS_BYTES_MAX: usize = 4 << 10;
const BLOCK_BYTES: usize = 64 << 10;
/// How the standard library's allocator ends a process that gets no memory.
const NO_MEMORY: &str = "memory allocation of";

/// Has a file compiled. Dropped, it takes the process with it.
pub(super) async fn run(program: &Path, source: Bytes, bounds: &CompileBounds) -> Result<File, LoadError> {
    let failed =
        |error: io::Error| LoadError::Host(format!("start the compiler {}: {error}", program.display()));
    let mut child = command(program, bounds).spawn().map_err(failed)?;
    tracing::debug!(pid = child.id(), bytes = source.len(), "compiler started");
    match tokio::time::timeout(bounds.wall, talk(&mut child, source, bounds)).await {
        Ok(outcome) => outcome,
        Err(_) => {
            // It may have ended just now. Either way it is waited for.
            let _ = child.kill().await;
            Err(LoadError::CompileTime(bounds.wall))
        }
    }
}

fn command(program: &Path, bounds: &CompileBounds) -> Command {
    let mut command = Command::new(program);
    command.arg(COMPILE_COMMAND).arg(std::process::id().to_string());
    command.arg(bounds.memory.to_string()).arg(bounds.cpu.as_secs().to_string());
    command.arg0("nodedock").env_clear().kill_on_drop(true);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

async fn talk(child: &mut Child, source: Bytes, bounds: &CompileBounds) -> Result<File, LoadError> {
    let host = |error: io::Error| LoadError::Host(format!("talk to the compiler: {error}"));
    let (stdin, stdout, stderr) = (child.stdin.take(), child.stdout.take(), child.stderr.take());
    let ((), answer, words) = tokio::join!(feed(stdin, source), receive(stdout), listen(stderr));
    let status = child.wait().await.map_err(host)?;
    let answer = answer.map_err(host)?;
    if status.success() { Ok(answer) } else { Err(explain(status, &words, bounds)) }
}

/// A process that ended before it had read all says why by its end.
async fn feed(stdin: Option<ChildStdin>, source: Bytes) {
    if let Some(mut stdin) = stdin {
        let _ = stdin.write_all(&source).await;
    }
}

/// Takes the answer into a file in memory, and not more than an answer can have.
async fn receive(stdout: Option<ChildStdout>) -> io::Result<File> {
    let mut file = memory_file()?;
    let max = COMPILED_BYTES_MAX + (2 * DRIVER_REPORT_BYTES_MAX) as u64;
    let mut left = stdout.ok_or(io::ErrorKind::BrokenPipe)?.take(max + 1);
    let mut buffer = vec![0; BLOCK_BYTES];
    loop {
        match left.read(&mut buffer).await? {
            0 if left.limit() == 0 => return Err(io::Error::other("it answers without an end")),
            0 => return Ok(file),
            count => file.write_all(&buffer[..count])?,
        }
    }
}

/// Keeps the beginning of what it says and reads the rest, for which it would wait otherwise.
async fn listen(stderr: Option<ChildStderr>) -> String {
    let Some(mut stderr) = stderr else { return String::new() };
    let mut words = Vec::new();
    // What cannot be read is not said.
    let _ = (&mut stderr).take(WORDS_BYTES_MAX as u64).read_to_end(&mut words).await;
    drain(&mut stderr).await;
    String::from_utf8_lossy(&words).trim().to_owned()
}

async fn drain(stream: &mut (impl AsyncRead + Unpin)) {
    let mut rest = [0; 1024];
    while matches!(stream.read(&mut rest).await, Ok(count) if count > 0) {}
}

/// Why a process ended without an answer.
fn explain(status: ExitStatus, words: &str, bounds: &CompileBounds) -> LoadError {
    match status.signal() {
        Some(libc::SIGXCPU) => LoadError::CompileCpu(bounds.cpu),
        Some(libc::SIGKILL | libc::SIGTERM) => LoadError::CompilerKilled(status.signal().unwrap_or_default()),
        Some(_) if words.contains(NO_MEMORY) => LoadError::CompileMemory(bounds.memory >> 20),
        Some(signal) => {
            LoadError::Compile(format!("the compiler crashed with signal {signal}{}", said(words)))
        }
        None if status.code() == Some(PANICKED) => {
            LoadError::Compile(format!("the compiler gave up{}", said(words)))
        }
        None => LoadError::Host(format!("the compiler could not begin ({status}){}", said(words))),
    }
}

/// How the standard library ends a process whose main thread panicked.
const PANICKED: i32 = 101;

fn said(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(": {}", words(text)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(raw: i32, words: &str) -> String {
        explain(ExitStatus::from_raw(raw), words, &CompileBounds::default()).code().to_owned()
    }

    #[test]
    fn each_end_has_a_reason_of_its_own() {
        assert_eq!(ended(libc::SIGXCPU, ""), "compile-cpu");
        assert_eq!(ended(libc::SIGKILL, "memory allocation of 8 bytes failed"), "compiler-killed");
        assert_eq!(ended(libc::SIGABRT, "memory allocation of 8 bytes failed"), "compile-memory");
        assert_eq!(ended(libc::SIGABRT, "thread 'main' has overflowed its stack"), "compile-failed");
        assert_eq!(ended(libc::SIGSEGV, ""), "compile-failed");
        assert_eq!(ended(PANICKED << 8, "panicked at x"), "compile-failed");
        assert_eq!(ended(1 << 8, "error: no such user"), "host-failed");
        let status = ExitStatus::from_raw(PANICKED << 8);
        let text = explain(status, "panicked\nat \x1b[1mhome", &CompileBounds::default()).to_string();
        assert!(text.ends_with("gave up: panicked at  [1mhome"), "{text}");
    }
}
