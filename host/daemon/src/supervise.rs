//! `nodedockd run --supervise`: a parent process that keeps the daemon's listening sockets and starts the daemon again when it crashes.
//!
//! It reads no configuration and no file. A client that dials while no daemon accepts waits in a socket's backlog, and is served by the
//! next one (`nodedock_base::listeners`). A daemon that ends with an exit code of 0 has been stopped, and the parent ends too. It also ends
//! if the daemon has never served, and after a series of crashes, so that the process which restarts the parent sees them. As the first
//! process of a container it waits for every process that ends there.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, wait};
use tokio::net::UnixStream;
use tokio::signal::unix::{Signal as Signals, SignalKind, signal};
use tokio::time::{Instant, sleep};

use nodedock_base::clock::millis;
use nodedock_base::descriptors::{Received, receive_line, send_line};
use nodedock_base::error::chain;
use nodedock_base::listeners::KEPT_BY_PARENT;

/// Delays before the restarts after crashes in a row; after the last of them the parent ends.
const RESTART_DELAYS: [Duration; 5] = [
    Duration::ZERO,
    Duration::from_millis(100),
    Duration::from_millis(500),
    Duration::from_secs(2),
    Duration::from_secs(5),
];

/// A daemon that has served for so long begins a new series.
const STEADY: Duration = Duration::from_secs(60);

/// Listeners that are kept: a daemon has two for each driver, one for each extended resource, and two of its own.
const KEPT_MAX: usize = 8192;

/// Runs the daemon with the arguments of this process until it is stopped. Returns its exit code.
pub(crate) async fn run() -> Result<u8> {
    let mut parent = Parent {
        kept: BTreeMap::new(),
        crashes: Crashes::default(),
        last: String::new(),
        ended: signal(SignalKind::child()).context("listen for SIGCHLD")?,
        stop: [SignalKind::terminate(), SignalKind::interrupt()]
            .map(signal)
            .into_iter()
            .collect::<std::io::Result<_>>()
            .context("listen for SIGTERM and SIGINT")?,
    };
    loop {
        let daemon = parent.run_daemon().await?;
        if daemon.is_stopping || daemon.status.success() {
            return Ok(code(daemon.status));
        }
        let served = daemon.ready.map(|since| since.elapsed());
        let Some(delay) = parent.crashes.restart_after(served) else {
            tracing::error!(ended = %daemon.status, crashes = parent.crashes.total, "the daemon is not started again");
            return Ok(code(daemon.status));
        };
        tracing::error!(ended = %daemon.status, crashes = parent.crashes.total, delay_ms = millis(delay), "the daemon crashed, starting it again");
        parent.last = daemon.status.to_string();
        tokio::select! {
            () = sleep(delay) => {}
            () = parent.stop_requested() => return Ok(code(daemon.status)),
        }
    }
}

struct Parent {
    /// Sockets by name, as the daemon sent them.
    kept: BTreeMap<String, OwnedFd>,
    crashes: Crashes,
    /// Exit status of the previous daemon.
    last: String,
    ended: Signals,
    stop: Vec<Signals>,
}

/// One run of the daemon, at its end.
struct Ended {
    status: ExitStatus,
    /// Time since which it served, if it did.
    ready: Option<Instant>,
    /// It was requested to stop.
    is_stopping: bool,
}

impl Parent {
    async fn run_daemon(&mut self) -> Result<Ended> {
        let (near, far) = StdStream::pair().context("make a socket for the daemon")?;
        // The program that runs, even if its file has been replaced.
        let (mut command, mut args) = (Command::new("/proc/self/exe"), std::env::args_os());
        command
            .arg0(args.next().unwrap_or_default())
            .args(args)
            .env(KEPT_BY_PARENT, "1")
            .stdin(OwnedFd::from(far));
        // A terminal's signals come by way of this process, and once.
        let child = command
            .process_group(0)
            .spawn()
            .context("start the daemon")?;
        drop(command);
        let daemon = Pid::from_child(&child);
        near.set_nonblocking(true)?;
        let socket = UnixStream::from_std(near)?;
        // A daemon that does not read any more ends.
        if let Err(error) = self.pass(&socket).await {
            tracing::warn!(
                error = chain(&error),
                "the daemon does not take its listeners"
            );
        }
        let (mut received, mut is_open) = (Received::default(), true);
        let (mut ready, mut is_stopping) = (None, false);
        loop {
            tokio::select! {
                line = receive_line(&socket, &mut received), if is_open => match line {
                    Ok(Some(line)) => self.process(&line, &mut received, &mut ready),
                    Ok(None) => is_open = false,
                    Err(error) => {
                        tracing::warn!(error = chain(&error), "the daemon's listeners are not kept any more");
                        is_open = false;
                    }
                },
                _ = self.ended.recv() => {
                    if let Some(status) = reap(daemon) {
                        // What it sent last.
                        while received.read(socket.as_fd()).is_ok_and(|read| read > 0) {
                            while let Ok(Some(line)) = received.line() {
                                self.process(&line, &mut received, &mut ready);
                            }
                        }
                        return Ok(Ended { status, ready, is_stopping });
                    }
                }
                () = requested(&mut self.stop) => {
                    is_stopping = true;
                    // It may have ended just now.
                    let _ = kill_process(daemon, Signal::TERM);
                }
            }
        }
    }

    /// Passes what is kept to a daemon that starts, and how often it was started again.
    async fn pass(&self, socket: &UnixStream) -> std::io::Result<()> {
        for (name, listener) in &self.kept {
            send_line(socket, &format!("keep {name}"), &[listener.as_fd()]).await?;
        }
        send_line(
            socket,
            &format!("start {} {}", self.crashes.total, self.last),
            &[],
        )
        .await
    }

    /// Keeps or drops a listener, or notes that the daemon serves.
    fn process(&mut self, line: &str, received: &mut Received, ready: &mut Option<Instant>) {
        if line == "ready" {
            ready.get_or_insert_with(Instant::now);
        } else if let Some(name) = line.strip_prefix("drop ") {
            self.kept.remove(name);
        } else if let Some(name) = line.strip_prefix("keep ")
            && let Some(listener) = received.descriptors(1).ok().and_then(|mut sent| sent.pop())
            && self.kept.len() < KEPT_MAX
        {
            self.kept.insert(name.to_owned(), listener);
        } else {
            tracing::warn!(
                line,
                "the daemon sent what is not understood, or more listeners than are kept"
            );
        }
    }

    async fn stop_requested(&mut self) {
        requested(&mut self.stop).await;
    }
}

async fn requested(stop: &mut [Signals]) {
    std::future::poll_fn(|cx| {
        let is_requested = stop
            .iter_mut()
            .any(|signal| signal.poll_recv(cx).is_ready());
        if is_requested {
            std::task::Poll::Ready(())
        } else {
            std::task::Poll::Pending
        }
    })
    .await;
}

/// Takes every process that has ended. Returns the status of the daemon if it is among them.
fn reap(daemon: Pid) -> Option<ExitStatus> {
    let mut status = None;
    while let Ok(Some((pid, ended))) = wait(WaitOptions::NOHANG) {
        if pid == daemon {
            status = Some(ExitStatus::from_raw(ended.as_raw()));
        }
    }
    status
}

/// The exit code of the daemon; of one that a signal ended, what a shell would say.
fn code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or(status.signal().map(|signal| 128 + signal))
        .unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// The crashes so far.
#[derive(Debug, Default)]
struct Crashes {
    total: u64,
    in_a_row: usize,
}

impl Crashes {
    /// Returns the delay before the daemon, which has served for so long or not at all, is started again. `None`: never.
    fn restart_after(&mut self, served: Option<Duration>) -> Option<Duration> {
        if self.total == 0 && served.is_none() {
            return None;
        }
        if served.is_some_and(|served| served >= STEADY) {
            self.in_a_row = 0;
        }
        let delay = RESTART_DELAYS.get(self.in_a_row).copied()?;
        self.in_a_row += 1;
        self.total += 1;
        Some(delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SERVED: Option<Duration> = Some(Duration::from_secs(1));

    #[test]
    fn failed_first_start_is_not_restarted() {
        assert_eq!(Crashes::default().restart_after(None), None);
        let mut crashes = Crashes::default();
        assert_eq!(crashes.restart_after(SERVED), Some(Duration::ZERO));
        assert_eq!(
            crashes.restart_after(None),
            Some(RESTART_DELAYS[1]),
            "it has served before"
        );
    }

    #[test]
    fn repeated_crashes_back_off_and_end() {
        let mut crashes = Crashes::default();
        let delays: Vec<_> = std::iter::from_fn(|| crashes.restart_after(SERVED))
            .take(20)
            .collect();
        assert_eq!(delays, RESTART_DELAYS);
        let mut crashes = Crashes::default();
        for _ in 0..20 {
            assert_eq!(crashes.restart_after(Some(STEADY)), Some(Duration::ZERO));
        }
        assert_eq!(
            (crashes.restart_after(SERVED), crashes.total),
            (Some(RESTART_DELAYS[1]), 21)
        );
    }
}
