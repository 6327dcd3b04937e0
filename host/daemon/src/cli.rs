//! The command line. Verbs follow kubectl's habits; each flag is defined once, and help and completion come from that.

mod checkpoint;
mod client;
mod driver;
mod explain;
mod get;
mod kubelet;
mod output;
mod pods;
mod probe;
mod release;
mod values;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::app;
use crate::config::{Config, ConfigFile, KubernetesError, KubernetesFlags, Paths};
use crate::telemetry::{self, LogFormat};
use nodedock_model::Uid;
use nodedock_wasm::{COMPILE_COMMAND, CompileBounds, compile_for_parent};

/// The device dock of a node: drivers are native plugins or sandboxed WebAssembly files; their devices go into containers.
///
/// Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 daemon not reachable.
#[derive(Parser)]
#[command(name = "nodedock", version, max_term_width = 100, propagate_version = true)]
struct Cli {
    #[command(flatten)]
    place: Place,
    #[command(subcommand)]
    command: Command,
}

/// Where the daemon is.
#[derive(Args, Clone)]
struct Place {
    /// Folder below which the daemon keeps everything
    #[arg(long, global = true, env = "NODEDOCK_ROOT", default_value = "/", value_name = "DIR")]
    root: PathBuf,
    /// The daemon's socket, where it is not ROOT/run/nodedock/nodedock.sock
    #[arg(long, global = true, value_name = "PATH")]
    socket: Option<PathBuf>,
}

impl Place {
    fn socket(&self) -> PathBuf {
        self.socket.clone().unwrap_or_else(|| Paths::below(&self.root).socket)
    }
}

#[derive(Subcommand)]
enum Command {
    /// Run the daemon
    Run(RunArgs),
    /// Show drivers, devices, claims, pods or extended resources
    Get(get::GetArgs),
    /// Give a pod its extended resources and make the devices of its claims ready
    Prepare(pods::PrepareArgs),
    /// Give up what a pod holds
    Unprepare(pods::UnprepareArgs),
    /// Give up by hand what a driver does not give up
    #[command(subcommand)]
    Release(release::ReleaseCommand),
    /// Tell the history of a claim or a driver, and what is wrong with it
    #[command(subcommand)]
    Explain(explain::ExplainCommand),
    /// Look at driver files, and have the daemon load one again
    #[command(subcommand)]
    Driver(driver::DriverCommand),
    /// Look at a checkpoint file; it is never changed
    #[command(subcommand)]
    Checkpoint(checkpoint::CheckpointCommand),
    /// Ask the daemon whether it lives or is ready
    Probe(probe::ProbeArgs),
    /// Print the completion script of a shell
    Completion { shell: clap_complete::Shell },
    /// Compile a driver for the daemon that started this, from standard input to standard output
    #[command(name = COMPILE_COMMAND, hide = true)]
    InternalCompile { parent: u32, memory: u64, cpu_seconds: u64 },
}

#[derive(Args)]
struct RunArgs {
    /// Config file
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Name of this node [default: the host name; with --kubernetes there is none]
    #[arg(long, value_name = "NAME", env = "NODEDOCK_NODE_NAME")]
    node_name: Option<String>,
    /// This is a Kubernetes node: offer the drivers to its kubelet, and take claims from the API server
    #[arg(long, env = "NODEDOCK_KUBERNETES", value_name = "BOOL", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new())]
    kubernetes: Option<bool>,
    /// The kubelet's folder [default: ROOT/var/lib/kubelet]
    #[arg(long, value_name = "DIR", env = "NODEDOCK_KUBELET_ROOT")]
    kubelet_root: Option<PathBuf>,
    /// How the API server is reached [default: as a pod does]
    #[arg(long, value_name = "FILE", env = "NODEDOCK_KUBECONFIG")]
    kubeconfig: Option<PathBuf>,
    /// The pod in which the daemon runs: a kubelet that does not name it does not know of all its pods yet
    #[arg(long, value_name = "NAMESPACE/NAME", env = "NODEDOCK_POD")]
    pod: Option<String>,
    /// Identity of this instance where several take turns on one root, a pod's UID: the newest serves, and is handed over to
    #[arg(long, value_name = "UID", env = "NODEDOCK_INSTANCE_UID")]
    instance_uid: Option<Uid>,
    /// Where CDI specs are written; runtimes read /etc/cdi and /var/run/cdi only [default: ROOT/var/run/cdi]
    #[arg(long, value_name = "DIR")]
    cdi_dir: Option<PathBuf>,
    /// Form of the log on standard error
    #[arg(long, value_enum, default_value_t)]
    log_format: LogFormat,
    /// Identity of this boot, in tests that play a reboot
    #[arg(long, hide = true, value_name = "ID")]
    boot_id: Option<String>,
}

/// What a command came to.
enum Outcome {
    Done,
    /// It answered, and the answer is a refusal that was printed.
    Refused,
}

/// An error with the exit code and the hint that belong to it.
#[derive(Debug, thiserror::Error)]
enum CliError {
    #[error("{message}")]
    Usage { message: String, hint: String },
    #[error("the daemon is not reachable on {}", socket.display())]
    Unreachable { socket: PathBuf, source: anyhow::Error },
}

impl CliError {
    fn usage(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::Usage { message: message.into(), hint: hint.into() }
    }
}

/// Parses the arguments, carries the command out, and gives its exit code.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    match execute(cli) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::Refused) => ExitCode::from(1),
        Err(error) => complain(&error),
    }
}

fn complain(error: &anyhow::Error) -> ExitCode {
    let (code, hint) = match error.downcast_ref::<CliError>() {
        Some(CliError::Usage { hint, .. }) => (2, Some(hint.clone())),
        Some(CliError::Unreachable { .. }) => {
            (3, Some("is `nodedock run` running, with the same --root?".to_owned()))
        }
        None => match error.downcast_ref::<KubernetesError>() {
            Some(error) => (2, Some(error.hint().to_owned())),
            None => (1, None),
        },
    };
    // A closed standard error is nobody to tell.
    let mut stderr = std::io::stderr().lock();
    let _ = writeln!(stderr, "error: {}", app::explain(error));
    if let Some(hint) = hint {
        let _ = writeln!(stderr, "hint: {hint}");
    }
    ExitCode::from(code)
}

fn execute(cli: Cli) -> Result<Outcome> {
    let place = cli.place;
    match cli.command {
        Command::Run(args) => run(&place, args),
        Command::Get(args) => on_client(get::run(place, args)),
        Command::Prepare(args) => on_client(pods::prepare(place, args)),
        Command::Unprepare(args) => on_client(pods::unprepare(place, args)),
        Command::Release(command) => on_client(release::run(place, command)),
        Command::Explain(command) => on_client(explain::run(place, command)),
        Command::Driver(command) => on_client(driver::run(place, command)),
        Command::Checkpoint(command) => checkpoint::run(&place, command),
        Command::Probe(args) => on_client(probe::run(place, args)),
        Command::Completion { shell } => {
            clap_complete::generate(shell, &mut Cli::command(), "nodedock", &mut std::io::stdout());
            Ok(Outcome::Done)
        }
        Command::InternalCompile { parent, memory, cpu_seconds } => {
            let cpu = Duration::from_secs(cpu_seconds);
            compile_for_parent(parent, &CompileBounds { memory, cpu, ..CompileBounds::default() })?;
            Ok(Outcome::Done)
        }
    }
}

fn on_client(command: impl Future<Output = Result<Outcome>>) -> Result<Outcome> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().context("start a runtime")?;
    runtime.block_on(command)
}

fn run(place: &Place, args: RunArgs) -> Result<Outcome> {
    telemetry::init(args.log_format);
    #[cfg(feature = "failpoints")]
    let _armed = nodedock_base::failpoint::arm();
    let file = args.config.as_deref().map(ConfigFile::read).transpose()?.unwrap_or_default();
    let host_name = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    let given_name = args.node_name.or_else(|| file.node_name.clone());
    let node_name = given_name.clone().unwrap_or_else(host_name);
    let boot_id = args.boot_id.map_or_else(app::boot_id, Ok)?;
    std::fs::create_dir_all(&place.root).with_context(|| {
        format!("make the root {}: choose a --root that can be written", place.root.display())
    })?;
    let root =
        place.root.canonicalize().with_context(|| format!("find the root {}", place.root.display()))?;
    let mut config = Config::new(&root, place.socket.clone(), args.cdi_dir, node_name, &file);
    let file_path = args.config.as_deref().map(std::path::absolute);
    config.file_path = file_path.transpose().context("find the config file")?;
    config.instance = args.instance_uid;
    let kubeconfig = args.kubeconfig.as_deref().map(std::path::absolute).transpose();
    let kubeconfig = kubeconfig.context("find the kubeconfig")?;
    let flags = KubernetesFlags {
        enabled: args.kubernetes,
        kubelet_root: args.kubelet_root,
        kubeconfig,
        pod: args.pod,
    };
    config.join_cluster(flags, &root, given_name.as_deref())?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("start a runtime")?;
    let outcome = runtime.block_on(app::run(config, boot_id));
    // What a driver's file system call hangs in must not keep the process.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome.map(|()| Outcome::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_of_the_command_line_is_sound() {
        Cli::command().debug_assert();
    }
}
