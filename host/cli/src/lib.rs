//! The command line. Verbs follow kubectl; each flag is defined once, and help and completion come from that.

mod adapter;
mod checkpoint;
mod claim;
mod completion;
mod container;
mod driver;
mod explain;
mod files;
mod get;
mod local_api;
mod names;
mod node;
mod output;
mod owned_claim;
mod pods;
mod preflight;
mod record;
mod release;
mod run_with;
mod simulate;
mod virtual_nodes;
mod waiting;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};

use nodedock_author::{ConformArgs, ReplayArgs};
use nodedock_command::{CommandError, Location, block_on, client, describe, exit_code};
use nodedock_wasm::COMPILE_COMMAND;
use nodedockd::program::CompileArgs;

/// The device dock of a node: drivers are native plugins or sandboxed WebAssembly files; their devices go into containers.
///
/// The node program itself is `nodedockd`. Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 3 daemon not reachable.
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

#[derive(Subcommand)]
enum Command {
    /// Show drivers, devices, claims, pods, extended resources, DeviceClasses, slices, adapters or the node
    Get(get::GetArgs),
    /// Prepare the claims of a pod and allocate its extended resources
    Prepare(pods::PrepareArgs),
    /// Unprepare the claims of a pod and free its extended resources
    Unprepare(pods::UnprepareArgs),
    /// Force-release a claim that its driver cannot unprepare
    #[command(subcommand)]
    Release(release::ReleaseCommand),
    /// Show the state, the problems and the history of a claim, a driver, an extended resource or a device
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
    /// Give devices to containers, as hooks of container tools; `nodedock runtime` does it as an OCI runtime
    #[command(subcommand)]
    Container(container::ContainerCommand),
    /// Run an OCI runtime, such as runc, and give its containers the devices that they name; every argument is the runtime's
    #[command(disable_help_flag = true)]
    Runtime,
    /// Print the kubeconfig of the local API, for kubectl and native drivers
    Kubeconfig(local_api::KubeconfigArgs),
    Conform(ConformArgs),
    /// Write the recorded calls of a driver to a file
    Record(record::RecordArgs),
    /// Replay the recorded calls of a WebAssembly driver without its node, and print the first difference
    Replay(ReplayArgs),
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
    /// Print the completion script of a shell, which completes names of objects of the running daemon too
    Completion {
        shell: clap_complete::Shell,
    },
    /// Hold a claim for the program of `run-with`, and become it
    #[command(hide = true)]
    InternalHold(run_with::HoldArgs),
    /// Compile a driver for the command that started this, from standard input to standard output
    #[command(name = COMPILE_COMMAND, hide = true)]
    InternalCompile(CompileArgs),
}

/// Parses the arguments, executes the command, and returns its exit code.
pub fn main() -> ExitCode {
    if let Some(code) = completion::answer(Cli::command) {
        return code;
    }
    if let Some(arguments) = container::runtime_arguments(std::env::args_os()) {
        return exit_code(
            container::runtime_main(&arguments),
            &Location::default(),
            None,
        );
    }
    if let Some((location, command)) = container::hook(std::env::args_os().collect()) {
        let done = block_on(container::run(&location, command));
        return exit_code(done, &location, None);
    }
    let Cli { location, command } = Cli::parse();
    let runs_program = matches!(command, Command::RunWith(_) | Command::InternalHold(_));
    let failed = runs_program.then_some(run_with::FAILED);
    exit_code(execute(&location, command), &location, failed)
}

fn execute(location: &Location, command: Command) -> Result<()> {
    match command {
        Command::Get(args) => block_on(get::run(location, args)),
        Command::Prepare(args) => block_on(pods::prepare(location, args)),
        Command::Unprepare(args) => block_on(pods::unprepare(location, args)),
        Command::Release(command) => block_on(release::run(location, command)),
        Command::Explain(command) => block_on(explain::run(location, command)),
        Command::Adapter(command) => block_on(adapter::run(location, command)),
        Command::Claim(command) => block_on(claim::run(location, command)),
        Command::RunWith(args) => block_on(run_with::run(location, args)),
        Command::InternalHold(args) => block_on(run_with::hold(location, args)),
        Command::Container(command) => block_on(container::run(location, command)),
        // Its arguments are not parsed here.
        Command::Runtime => container::runtime_main(&[]),
        Command::Kubeconfig(args) => local_api::kubeconfig(location, args),
        Command::Conform(args) => nodedock_author::conform(args),
        Command::Record(args) => block_on(record::run(location, args)),
        Command::Replay(args) => nodedock_author::replay(args),
        Command::Driver(command) => driver::execute(location, command),
        Command::Checkpoint(command) => checkpoint::run(location, command),
        Command::Node(command) => node::run(command),
        Command::Simulate(args) => simulate::run(args),
        Command::Preflight(args) => block_on(preflight::run(location, args)),
        Command::Completion { shell } => completion::print_script(shell),
        Command::InternalCompile(args) => args.compile(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_valid() {
        Cli::command().debug_assert();
    }

    /// The commands of this program in the examples of a page.
    fn commands(page: &str) -> Vec<&str> {
        let (mut is_code, mut commands) = (false, Vec::new());
        for line in page.lines().map(str::trim) {
            match line {
                "```sh" => is_code = true,
                "```" => is_code = false,
                line if is_code => {
                    let line = line.split(" #").next().unwrap_or(line);
                    let parts = line.split(" && ").map(str::trim);
                    commands.extend(parts.filter(|part| part.starts_with("nodedock ")));
                }
                _ => {}
            }
        }
        commands
    }

    #[test]
    fn commands_for_driver_authors_parse() {
        let page = include_str!("../../../docs/write-a-driver.md");
        let readme = include_str!("../../author/templates/driver/common/README.md");
        for (page, least) in [(page, 16), (readme, 4)] {
            let commands = commands(page);
            assert!(commands.len() >= least, "{commands:?}");
            for command in commands {
                let parsed = Cli::try_parse_from(command.split_whitespace());
                assert!(parsed.is_ok(), "{command}: {}", parsed.err().unwrap());
            }
        }
        let stale = Cli::try_parse_from(["nodedock", "driver", "build", "--language-of-go"]);
        assert!(stale.is_err());
    }
}
