//! The program `nodedockd`: runs the daemon, alone or below a parent process, compiles drivers in a process of its own, and asks probes.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Parser, Subcommand};

use crate::app;
use crate::config::{Config, ConfigFile, Flags};
use crate::probe::{self, ProbeArgs};
use crate::supervise;
use crate::telemetry::{self, LogFormat};
use nodedock_base::directories;
use nodedock_base::listeners::{KEPT_BY_PARENT, Listeners};
use nodedock_base::process::raise_open_files_max;
use nodedock_command::{CommandError, Location, block_on, exit_code};
use nodedock_wasm::{COMPILE_COMMAND, CachePaths, CompileBounds, compile_for_parent};

/// The device dock of a node: drivers are native plugins or sandboxed WebAssembly files; their devices go into containers.
///
/// The commands for operators and authors are those of `nodedock`. Exit codes: 0 done, 1 failed, 2 wrong usage, 3 daemon not reachable.
#[derive(Parser)]
#[command(
    name = "nodedockd",
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

#[derive(Subcommand)]
enum Command {
    /// Run the daemon
    Run(Box<RunArgs>),
    /// Check whether the daemon is live or ready
    Probe(ProbeArgs),
    /// Compile a driver for the daemon that started this, from standard input to standard output
    #[command(name = COMPILE_COMMAND, hide = true)]
    InternalCompile(CompileArgs),
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
    /// Directory of compiled drivers and their key, for tools that run many daemons
    #[arg(long, hide = true, value_name = "DIR")]
    compile_cache: Option<PathBuf>,
}

/// A driver to compile: it is read from standard input, and its code written to standard output.
#[derive(Args)]
pub struct CompileArgs {
    parent: u32,
    memory: u64,
    cpu_seconds: u64,
}

impl CompileArgs {
    /// Compiles the driver within the bounds that the parent process has set.
    pub fn compile(&self) -> Result<()> {
        let bounds = CompileBounds {
            memory: self.memory,
            cpu: Duration::from_secs(self.cpu_seconds),
            ..CompileBounds::default()
        };
        Ok(compile_for_parent(self.parent, &bounds)?)
    }
}

/// Parses the arguments, executes the command, and returns its exit code.
pub fn main() -> ExitCode {
    let Cli { location, command } = Cli::parse();
    let outcome = match command {
        Command::Run(args) => run(&location, *args),
        Command::Probe(args) => block_on(probe::run(&location, args)),
        Command::InternalCompile(args) => args.compile(),
    };
    exit_code(outcome, &location, None)
}

fn run(location: &Location, args: RunArgs) -> Result<()> {
    app::directories::set_umask();
    telemetry::init(args.log_format);
    if args.supervise && std::env::var_os(KEPT_BY_PARENT).is_none() {
        return match block_on(supervise::run())? {
            0 => Ok(()),
            code => Err(CommandError::Ended { code }.into()),
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
    if let Some(directory) = &args.compile_cache {
        let cache = CachePaths::inside(directory);
        (config.paths.cache, config.paths.cache_key) = (cache.directory, cache.key);
    }
    let boot_id = args.boot_id.map_or_else(app::boot_id, Ok)?;
    if let Some(snapshot) = &args.hardware {
        config.hardware = app::hardware::simulated(snapshot, &config.paths.hardware, &boot_id)?;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        // A thread that waits for the disk leaves all other work to another: with one thread alone, each commit would change threads.
        .worker_threads(cores.max(2))
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
pub fn config(location: &Location, mut flags: Flags) -> Result<Config> {
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
        .map_err(|error| CommandError::usage(error.to_string(), error.hint()).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn command_line_definition_is_valid() {
        Cli::command().debug_assert();
    }
}
