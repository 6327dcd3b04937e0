//! Shared parts of the commands of both programs: the root and socket of the node program, its client, forms of output, parameters for drivers, errors
//! with exit codes.
//!
//! It knows no command, and nothing of the node program but the paths of its files and its API.

pub mod client;
pub mod describe;
pub mod output;
pub mod parameters;

use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use rustix::process::geteuid;
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tonic::Status;

use nodedock_base::error::chain;
use nodedock_base::paths::Paths;
use nodedock_base::users;

use crate::output::print_error;

/// The daemon's root and socket.
#[derive(Args)]
pub struct Location {
    /// Directory below which the daemon keeps all its files
    #[arg(
        long,
        global = true,
        env = "NODEDOCK_ROOT",
        default_value = "/",
        value_name = "DIR"
    )]
    pub root: PathBuf,
    /// The daemon's socket, where it is not ROOT/run/nodedock/nodedock.sock
    #[arg(long, global = true, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

impl Default for Location {
    fn default() -> Self {
        Self {
            root: "/".into(),
            socket: None,
        }
    }
}

impl Location {
    /// Returns the socket of the node API: of users, if this is one whom the daemon serves.
    pub fn socket(&self) -> PathBuf {
        let paths = Paths::below(&self.root);
        match (&self.socket, self.user()) {
            (Some(socket), _) => socket.clone(),
            (None, Some(_)) => paths.users.join("nodedock.sock"),
            (None, None) => paths.socket,
        }
    }

    /// Returns the user of this process, outside its user namespace, if the daemon has sockets for users. `None`: it may use the daemon's own.
    pub fn user(&self) -> Option<u32> {
        // no error: the daemon's own socket is tried then, and refuses others
        let uid = users::outer_uid().ok().filter(|uid| *uid != 0)?;
        let directory = Paths::below(&self.root).users;
        // no error: a directory that cannot be looked at is not this user's
        let owner = std::fs::metadata(&directory).map(|found| found.uid());
        if owner.is_ok_and(|owner| owner == geteuid().as_raw()) {
            // The daemon's own user, as root of a user namespace with the daemon in it.
            return None;
        }
        // A directory that this user may not enter is there.
        let is_missing = matches!(directory.join("nodedock.sock").try_exists(), Ok(false));
        (self.socket.is_none() && !is_missing).then_some(uid)
    }
}

/// An error with the exit code and the hint that belong to it.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// Everything about it is printed.
    #[error("refused")]
    Refused,
    /// The daemon, or a program that was run, which has printed why.
    #[error("it ended with exit code {code}")]
    Ended { code: u8 },
    #[error("{message}")]
    Usage { message: String, hint: String },
    #[error("{}", unreachable("the daemon", socket, source))]
    Unreachable {
        socket: PathBuf,
        source: anyhow::Error,
    },
    #[error("{}", unreachable("the local API", socket, source))]
    NoLocalApi {
        socket: PathBuf,
        source: anyhow::Error,
    },
}

impl CommandError {
    /// Returns an error of wrong usage, with what to do.
    pub fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage {
            message: message.into(),
            hint: hint.into(),
        }
    }

    /// Fails without a message unless the command is done: its output says why.
    pub fn unless_done(is_done: bool) -> Result<()> {
        if is_done {
            Ok(())
        } else {
            Err(Self::Refused.into())
        }
    }
}

/// Says why nothing answers on a socket.
fn unreachable(what: &str, socket: &Path, source: &anyhow::Error) -> String {
    let shown = socket.display();
    match io_error(source) {
        Some(ErrorKind::PermissionDenied) => {
            format!("this user may not open the socket of {what}, {shown}")
        }
        Some(ErrorKind::NotFound) => {
            format!("{what} is not reachable: there is no socket {shown}")
        }
        Some(ErrorKind::ConnectionRefused) => {
            format!("{what} is not reachable: no program listens on {shown}")
        }
        _ => format!("{what} is not reachable on {shown}"),
    }
}

/// Returns the kind of the error of the system that is behind an error.
fn io_error(error: &anyhow::Error) -> Option<ErrorKind> {
    let errors = error.chain().filter_map(|error| error.downcast_ref());
    errors.map(std::io::Error::kind).last()
}

/// Prints the error of a command, and returns the exit code of its program. `failed`: for errors of every kind, but not the code of a program
/// that was run; `None`: one for each kind.
pub fn exit_code(outcome: Result<()>, location: &Location, failed: Option<u8>) -> ExitCode {
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(fail(error, location, failed)),
    }
}

/// Prints an error with its hint, and returns its exit code.
fn fail(error: anyhow::Error, location: &Location, failed: Option<u8>) -> u8 {
    let error = error
        .downcast::<Status>()
        .map_or_else(|other| other, |status| client::call_error(status, location));
    let (code, hint) = match error.downcast_ref::<CommandError>() {
        Some(CommandError::Refused) => return 1,
        Some(CommandError::Ended { code }) => return *code,
        Some(CommandError::Usage { hint, .. }) => (2, Some(hint.as_str())),
        Some(
            CommandError::NoLocalApi { source, .. } | CommandError::Unreachable { source, .. },
        ) if io_error(source) == Some(ErrorKind::PermissionDenied) => (
            3,
            Some("run the command as root, or as a user whom the daemon serves"),
        ),
        Some(CommandError::NoLocalApi { .. }) => (
            3,
            Some("is `nodedockd run --local-api` running, with the same --root?"),
        ),
        Some(CommandError::Unreachable { .. }) => {
            (3, Some("is `nodedockd run` running, with the same --root?"))
        }
        None => (1, None),
    };
    print_error(&format!("error: {}", chain(error.as_ref())));
    if let Some(hint) = hint {
        print_error(&format!("hint: {hint}"));
    }
    failed.unwrap_or(code)
}

/// Runs a command on a runtime of this thread.
pub fn block_on<T>(command: impl Future<Output = Result<T>>) -> Result<T> {
    runtime()?.block_on(command)
}

/// Runs a command that has temporary files: a signal ends it as an error does, so that they are removed.
pub fn block_on_until_stopped(command: impl Future<Output = Result<()>>) -> Result<()> {
    let runtime = runtime()?;
    let outcome = runtime.block_on(async {
        tokio::select! {
            // First, so that a signal is not lost while the command makes its files.
            biased;
            stopped = stopped() => {
                stopped.context("wait for signals")?;
                bail!("interrupted")
            }
            // Dropped, it removes its files and kills its processes.
            outcome = command => outcome,
        }
    });
    // A call of a driver may run on for as long as its grant lets it.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

fn runtime() -> Result<Runtime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("start a runtime")
}

/// Resolves when the user, a terminal that ends or another program wants an end.
async fn stopped() -> std::io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut hang_up = signal(SignalKind::hangup())?;
    tokio::select! {
        interrupted = tokio::signal::ctrl_c() => interrupted,
        _ = terminate.recv() => Ok(()),
        _ = hang_up.recv() => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_permission_is_not_missing_socket() {
        let error = |kind: ErrorKind| {
            let source = anyhow::Error::from(std::io::Error::from(kind)).context("connect");
            let socket = PathBuf::from("/run/a.sock");
            CommandError::Unreachable { socket, source }.to_string()
        };
        for (kind, expected) in [
            (
                ErrorKind::PermissionDenied,
                "this user may not open the socket of the daemon, /run/a.sock",
            ),
            (
                ErrorKind::NotFound,
                "the daemon is not reachable: there is no socket /run/a.sock",
            ),
            (
                ErrorKind::ConnectionRefused,
                "the daemon is not reachable: no program listens on /run/a.sock",
            ),
            (
                ErrorKind::TimedOut,
                "the daemon is not reachable on /run/a.sock",
            ),
        ] {
            assert_eq!(error(kind), expected);
        }
    }
}
