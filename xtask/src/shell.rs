//! Runs other programs: prints the command as in a shell, and names it in errors.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

const POLL_PERIOD: Duration = Duration::from_millis(20);

/// Prints a command, runs it on this terminal, and fails if it fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let status = status(command)?;
    ensure!(status.success(), "`{}` failed: {status}", line(command));
    Ok(())
}

/// Prints a command, runs it on this terminal, and returns its status.
pub(crate) fn status(command: &mut Command) -> Result<ExitStatus> {
    eprintln!("$ {}", line(command));
    command
        .status()
        .with_context(|| format!("starting `{}`", line(command)))
}

/// Runs a command as `status` does, and passes each line of standard output and of standard error to a reader, on two threads.
pub(crate) fn watched(
    command: &mut Command,
    stdout: impl FnMut(&str),
    stderr: impl FnMut(&str) + Send,
) -> Result<ExitStatus> {
    let shown = line(command);
    eprintln!("$ {shown}");
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = child.with_context(|| format!("starting `{shown}`"))?;
    let (out, err) = (child.stdout.take(), child.stderr.take());
    thread::scope(|scope| {
        scope.spawn(|| pass_on(err, io::stderr(), stderr));
        pass_on(out, io::stdout(), stdout);
    });
    child
        .wait()
        .with_context(|| format!("waiting for `{shown}`"))
}

/// Copies a stream and passes each line to a reader.
fn pass_on(from: Option<impl Read>, mut to: impl Write, mut read: impl FnMut(&str)) {
    let mut from = BufReader::new(from.expect("it is piped"));
    let mut bytes = Vec::new();
    // A read error ends the stream.
    while from
        .read_until(b'\n', &mut bytes)
        .is_ok_and(|count| count > 0)
    {
        // A closed terminal does not stop the command.
        let _ = to.write_all(&bytes).and_then(|()| to.flush());
        read(String::from_utf8_lossy(&bytes).trim_end_matches('\n'));
        bytes.clear();
    }
}

/// Returns the standard output of a command that succeeds quickly; its standard error goes to this terminal.
pub(crate) fn read(command: &mut Command) -> Result<String> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .with_context(|| format!("starting `{}`", line(command)))?;
    ensure!(
        output.status.success(),
        "`{}` failed: {}",
        line(command),
        output.status
    );
    String::from_utf8(output.stdout)
        .with_context(|| format!("reading the output of `{}`", line(command)))
}

/// Formats the command as in a shell: the program by its bare name, arguments quoted where necessary.
pub(crate) fn line(command: &Command) -> String {
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(program.as_os_str());
    let words = std::iter::once(program).chain(command.get_args());
    words
        .map(|word| quoted(&word.to_string_lossy()))
        .collect::<Vec<_>>()
        .join(" ")
}

fn quoted(word: &str) -> String {
    if !word.is_empty()
        && word
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-_./=:,+@%".contains(c))
    {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Set by Ctrl-C, SIGTERM or a closed terminal. Long waits check it and end with an error, so that destructors clean up.
#[derive(Clone)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    pub(crate) fn listen() -> Result<Self> {
        use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM, SIGHUP] {
            signal_hook::flag::register(signal, Arc::clone(&flag))
                .context("listening for signals")?;
        }
        Ok(Self(flag))
    }

    pub(crate) fn check(&self) -> Result<()> {
        ensure!(!self.0.load(Ordering::Relaxed), "interrupted");
        Ok(())
    }

    /// Polls `done` until it returns a value.
    pub(crate) fn wait_for<T>(
        &self,
        limit: Duration,
        mut done: impl FnMut() -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let deadline = Instant::now() + limit;
        loop {
            self.check()?;
            if let Some(answer) = done()? {
                return Ok(Some(answer));
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            thread::sleep(POLL_PERIOD);
        }
    }

    /// Collects the output of a command; kills it at the deadline or on an interrupt.
    pub(crate) fn output(&self, command: &mut Command, limit: Duration) -> Result<Output> {
        let command = command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command
            .spawn()
            .with_context(|| format!("starting `{}`", line(command)))?;
        let stdout = drain(child.stdout.take());
        let stderr = drain(child.stderr.take());
        let ended = self.wait_for(limit, || Ok(child.try_wait()?));
        let Ok(Some(status)) = ended else {
            end(&mut child);
            ended.with_context(|| format!("running `{}`", line(command)))?;
            bail!(
                "`{}` did not end within {} s",
                line(command),
                limit.as_secs()
            );
        };
        Ok(Output {
            status,
            stdout: collected(stdout),
            stderr: collected(stderr),
        })
    }
}

/// Kills a child and reaps it. It may have ended by itself.
pub(crate) fn end(child: &mut Child) {
    let _ = child.kill();
    let _ = child.wait();
}

fn drain(pipe: Option<impl Read + Send + 'static>) -> JoinHandle<Vec<u8>> {
    thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut pipe) = pipe {
            // Output before an error is still shown.
            let _ = pipe.read_to_end(&mut bytes);
        }
        bytes
    })
}

fn collected(reader: JoinHandle<Vec<u8>>) -> Vec<u8> {
    reader.join().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    fn quiet() -> Interrupt {
        Interrupt(Arc::new(AtomicBool::new(false)))
    }

    #[test]
    fn a_command_is_shown_as_typed() {
        assert_eq!(
            line(&sh("ls -l /dev/fuse; echo 'x'")),
            r"sh -c 'ls -l /dev/fuse; echo '\''x'\'''"
        );
        assert_eq!(quoted(""), "''");
        assert_eq!(
            quoted("vendor.example/node=fuse"),
            "vendor.example/node=fuse"
        );
    }

    #[test]
    fn streams_and_status_are_collected() {
        let output = quiet()
            .output(
                &mut sh("echo out; echo err >&2; exit 3"),
                Duration::from_secs(20),
            )
            .unwrap();
        assert_eq!(
            (&output.stdout[..], &output.stderr[..]),
            (&b"out\n"[..], &b"err\n"[..])
        );
        assert_eq!(output.status.code(), Some(3));
    }

    #[test]
    fn a_command_that_hangs_is_ended() {
        let mut hanging = Command::new("sleep");
        hanging.arg("600");
        let error = quiet()
            .output(&mut hanging, Duration::from_millis(50))
            .unwrap_err();
        assert!(error.to_string().contains("did not end"), "{error}");
    }

    #[test]
    fn an_interrupt_ends_a_wait() {
        let interrupt = Interrupt(Arc::new(AtomicBool::new(true)));
        let error = interrupt
            .wait_for(Duration::from_secs(600), || Ok(None::<()>))
            .unwrap_err();
        assert_eq!(error.to_string(), "interrupted");
    }

    #[test]
    fn output_passes_unchanged_and_by_line() {
        let (mut passed, mut lines) = (Vec::new(), Vec::new());
        let bytes = b"one\n\n\xff two";
        pass_on(Some(&bytes[..]), &mut passed, |line| {
            lines.push(line.to_owned())
        });
        assert_eq!(
            (passed.as_slice(), lines),
            (
                &bytes[..],
                vec!["one".into(), "".into(), "\u{fffd} two".into()]
            )
        );
    }

    #[test]
    fn watched_command_returns_its_status() {
        assert_eq!(
            watched(&mut sh("exit 3"), |_| (), |_| ()).unwrap().code(),
            Some(3)
        );
        let error = watched(&mut Command::new("/no/such/program"), |_| (), |_| ()).unwrap_err();
        assert_eq!(error.to_string(), "starting `program`");
    }

    #[test]
    fn a_failure_names_the_command() {
        let error = run(&mut sh("exit 7")).unwrap_err().to_string();
        assert!(error.contains("sh -c 'exit 7'"), "{error}");
        assert!(read(&mut Command::new("/no/such/program")).is_err());
    }
}
