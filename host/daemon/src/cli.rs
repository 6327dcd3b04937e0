//! The command line. Verbs follow kubectl; each flag is defined once, and help and completion come from that.

mod adapter;
mod checkpoint;
mod claim;
mod client;
mod conform;
mod describe;
mod driver;
mod explain;
mod get;
mod local_api;
mod names;
mod node;
mod output;
mod pods;
mod preflight;
mod probe;
mod record;
mod release;
mod replay;
mod run_with;
mod simulate;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, CommandFactory, Parser, Subcommand};
use tokio::runtime::Runtime;
use tokio::signal::unix::{SignalKind, signal};
use tonic::Status;

use crate::app;
use crate::cli::output::print_error;
use crate::config::{Config, ConfigFile, Flags, Paths};
use crate::supervise;
use crate::telemetry::{self, LogFormat};
use nodedock_base::directories;
use nodedock_base::error::chain;
use nodedock_base::listeners::{KEPT_BY_PARENT, Listeners};
use nodedock_base::process::raise_open_files_max;
use nodedock_wasm::{COMPILE_COMMAND, CompileBounds, compile_for_parent};

/// The device dock of a node: drivers are native plugins or sandboxed WebAssembly files; their devices go into containers.
///
/// Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 daemon not reachable.
#[derive(Parser)]
#[command(
    name = "nodedock",
    version,
    max_term_width = 100,
    propagate_version = true
)]
struct Cli {
    #[command(flatten)]
    location: Location,
    #[command(subcommand)]
    command: Command,
}

/// The daemon's root and socket.
#[derive(Args)]
struct Location {
    /// Directory below which the daemon keeps all its files
    #[arg(
        long,
        global = true,
        env = "NODEDOCK_ROOT",
        default_value = "/",
        value_name = "DIR"
    )]
    root: PathBuf,
    /// The daemon's socket, where it is not ROOT/run/nodedock/nodedock.sock
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl Location {
    fn socket(&self) -> PathBuf {
        self.socket
            .clone()
            .unwrap_or_else(|| Paths::below(&self.root).socket)
    }
}

#[derive(Subcommand)]
enum Command {
    /// Run the daemon
    Run(RunArgs),
    /// Show drivers, devices, claims, pods, extended resources, their DeviceClasses, adapters or the node
    Get(get::GetArgs),
    /// Prepare the claims of a pod and allocate its extended resources
    Prepare(pods::PrepareArgs),
    /// Unprepare the claims of a pod and free its extended resources
    Unprepare(pods::UnprepareArgs),
    /// Force-release a claim that its driver cannot unprepare
    #[command(subcommand)]
    Release(release::ReleaseCommand),
    /// Show the state, the problems and the history of a claim, a driver or an extended resource
    #[command(subcommand)]
    Explain(explain::ExplainCommand),
    /// Write, build, check, test, inspect and package drivers, and reload or resume a driver
    #[command(subcommand)]
    Driver(driver::DriverCommand),
    /// Decide which way a device plugin's devices are offered
    #[command(subcommand)]
    Adapter(adapter::AdapterCommand),
    /// Make, show and delete claims of the local API
    #[command(subcommand)]
    Claim(claim::ClaimCommand),
    /// Run a program, such as podman, with devices of a DeviceClass of the local API, which are free again when it ends
    RunWith(run_with::RunWithArgs),
    /// Print the kubeconfig of the local API, for kubectl and native drivers
    Kubeconfig(local_api::KubeconfigArgs),
    Conform(conform::ConformArgs),
    /// Write the recorded calls of a driver to a file
    Record(record::RecordArgs),
    /// Replay the recorded calls of a WebAssembly driver without its node, and print the first difference
    Replay(replay::ReplayArgs),
    /// Print or check a checkpoint file; it is never changed
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointCommand),
    /// Record this machine's hardware
    #[command(subcommand)]
    Node(node::NodeCommand),
    /// Publish the devices of many virtual nodes on recorded machines, for tests of a cluster
    Simulate(simulate::SimulateArgs),
    /// Check what the daemon needs of this node, its container runtime and its cluster, without changing anything
    Preflight(preflight::PreflightArgs),
    /// Check whether the daemon is live or ready
    Probe(probe::ProbeArgs),
    /// Print the completion script of a shell
    Completion {
        shell: clap_complete::Shell,
    },
    /// Hold a claim for the program of `run-with`, and become it
    #[command(hide = true)]
    InternalHold(run_with::HoldArgs),
    /// Compile a driver for the daemon that started this, from standard input to standard output
    #[command(name = COMPILE_COMMAND, hide = true)]
    InternalCompile {
        parent: u32,
        memory: u64,
        cpu_seconds: u64,
    },
}

#[derive(Args)]
struct RunArgs {
    #[command(flatten)]
    flags: Flags,
    /// Form of the log on standard error
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
    /// Keep the listening sockets in a parent process, which starts the daemon again at once when it crashes
    #[arg(long)]
    supervise: bool,
    /// Run on a recorded machine: a directory or a tar file with its /sys (nothing of the node's own hardware is used)
    #[arg(long, value_name = "SNAPSHOT")]
    hardware: Option<PathBuf>,
    /// Identity of this boot, for tests that simulate a reboot
    #[arg(long, hide = true, value_name = "ID")]
    boot_id: Option<String>,
}

/// An error with the exit code and the hint that belong to it.
#[derive(Debug, thiserror::Error)]
enum CliError {
    /// Everything about it is printed.
    #[error("refused")]
    Refused,
    /// The daemon, or a program that was run, which has printed why.
    #[error("it ended with exit code {code}")]
    Ended { code: u8 },
    #[error("{message}")]
    Usage { message: String, hint: String },
    #[error("the daemon is not reachable on {}", socket.display())]
    Unreachable {
        socket: PathBuf,
        source: anyhow::Error,
    },
    #[error("the local API is not reachable on {}", socket.display())]
    NoLocalApi {
        socket: PathBuf,
        source: anyhow::Error,
    },
}

impl CliError {
    fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage {
            message: message.into(),
            hint: hint.into(),
        }
    }

    fn unless_done(is_done: bool) -> Result<()> {
        if is_done {
            Ok(())
        } else {
            Err(Self::Refused.into())
        }
    }
}

/// Parses the arguments, executes the command, and returns its exit code.
pub fn main() -> ExitCode {
    let Cli { location, command } = Cli::parse();
    execute(&location, command).map_or_else(|error| fail(error, &location), |()| ExitCode::SUCCESS)
}

/// Prints an error with its hint, and returns its exit code.
fn fail(error: anyhow::Error, location: &Location) -> ExitCode {
    let error = error
        .downcast::<Status>()
        .map_or_else(|other| other, |status| client::call_error(status, location));
    let (code, hint) = match error.downcast_ref::<CliError>() {
        Some(CliError::Refused) => return ExitCode::from(1),
        Some(CliError::Ended { code }) => return ExitCode::from(*code),
        Some(CliError::Usage { hint, .. }) => (2, Some(hint.as_str())),
        Some(CliError::NoLocalApi { .. }) => (
            3,
            Some("is `nodedock run --local-api` running, with the same --root?"),
        ),
        Some(CliError::Unreachable { .. }) => {
            (3, Some("is `nodedock run` running, with the same --root?"))
        }
        None => (1, None),
    };
    print_error(&format!("error: {}", chain(error.as_ref())));
    if let Some(hint) = hint {
        print_error(&format!("hint: {hint}"));
    }
    ExitCode::from(code)
}

fn execute(location: &Location, command: Command) -> Result<()> {
    match command {
        Command::Run(args) => run(location, args),
        Command::Get(args) => block_on(get::run(location, args)),
        Command::Prepare(args) => block_on(pods::prepare(location, args)),
        Command::Unprepare(args) => block_on(pods::unprepare(location, args)),
        Command::Release(command) => block_on(release::run(location, command)),
        Command::Explain(command) => block_on(explain::run(location, command)),
        Command::Adapter(command) => block_on(adapter::run(location, command)),
        Command::Claim(command) => block_on(claim::run(location, command)),
        Command::RunWith(args) => block_on(run_with::run(location, args)),
        Command::InternalHold(args) => block_on(run_with::hold(location, args)),
        Command::Kubeconfig(args) => local_api::kubeconfig(location, args),
        Command::Conform(args) => block_on_until_stopped(conform::run(args)),
        Command::Record(args) => block_on(record::run(location, args)),
        Command::Replay(args) => block_on(replay::run(args)),
        Command::Driver(command) => driver::execute(location, command),
        Command::Checkpoint(command) => checkpoint::run(location, command),
        Command::Node(command) => node::run(command),
        Command::Simulate(args) => simulate::run(args),
        Command::Preflight(args) => block_on(preflight::run(location, args)),
        Command::Probe(args) => block_on(probe::run(location, args)),
        Command::Completion { shell } => {
            clap_complete::generate(
                shell,
                &mut Cli::command(),
                "nodedock",
                &mut std::io::stdout(),
            );
            Ok(())
        }
        Command::InternalCompile {
            parent,
            memory,
            cpu_seconds,
        } => {
            let cpu = Duration::from_secs(cpu_seconds);
            Ok(compile_for_parent(
                parent,
                &CompileBounds {
                    memory,
                    cpu,
                    ..CompileBounds::default()
                },
            )?)
        }
    }
}

fn block_on<T>(command: impl Future<Output = Result<T>>) -> Result<T> {
    runtime()?.block_on(command)
}

/// Runs a command that has temporary files: a signal ends it as an error does, so that they are removed.
fn block_on_until_stopped(command: impl Future<Output = Result<()>>) -> Result<()> {
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

fn run(location: &Location, args: RunArgs) -> Result<()> {
    app::directories::set_umask();
    telemetry::init(args.log_format);
    if args.supervise && std::env::var_os(KEPT_BY_PARENT).is_none() {
        return match block_on(supervise::run())? {
            0 => Ok(()),
            code => Err(CliError::Ended { code }.into()),
        };
    }
    let (listeners, restarts) =
        Listeners::inherited().context("take over the sockets of the process before")?;
    #[cfg(feature = "failpoints")]
    let _armed = nodedock_base::failpoint::arm();
    if let Err(error) = raise_open_files_max() {
        tracing::warn!(%error, "the limit of open files stays");
    }
    make_root(location)?;
    let mut config = config(location, args.flags)?;
    let boot_id = args.boot_id.map_or_else(app::boot_id, Ok)?;
    if let Some(snapshot) = &args.hardware {
        config.hardware = app::hardware::simulated(snapshot, &config.paths.hardware, &boot_id)?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .context("start a runtime")?;
    let outcome = runtime.block_on(app::run(
        config,
        app::Start {
            boot_id,
            listeners,
            restarts,
            is_reported: false.into(),
        },
    ));
    // A file system call of a driver that hangs must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome
}

/// Makes the root.
fn make_root(location: &Location) -> Result<()> {
    let root = &location.root;
    // It may have directories for others, as that of the CDI files.
    directories::make(root, 0o755).with_context(|| {
        format!(
            "make the root {}: choose a --root that can be written",
            root.display()
        )
    })
}

/// Reads the config file and puts the daemon's configuration together.
fn config(location: &Location, mut flags: Flags) -> Result<Config> {
    let file = flags
        .config
        .as_deref()
        .map(ConfigFile::read)
        .transpose()?
        .unwrap_or_default();
    let root = std::path::absolute(&location.root)
        .with_context(|| format!("find the root {}", location.root.display()))?;
    let root = match root.canonicalize() {
        Ok(root) => root,
        // What does not exist has no links.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => root,
        Err(error) => {
            return Err(error).with_context(|| format!("find the root {}", root.display()));
        }
    };
    for path in [&mut flags.config, &mut flags.kubernetes.kubeconfig]
        .into_iter()
        .flatten()
    {
        *path = std::path::absolute(&path).with_context(|| format!("find {}", path.display()))?;
    }
    Config::new(&root, location.socket.clone(), flags, file)
        .map_err(|error| CliError::usage(error.to_string(), error.hint()).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_of_the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
