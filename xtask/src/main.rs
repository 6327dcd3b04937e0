//! The tasks of this repository, as `cargo xtask TASK`.

mod bench;
mod demo;
mod deploy;
mod drivers;
mod fuzz;
mod golden;
mod lint;
mod machine;
mod package;
mod shell;
mod test;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::workspace::Workspace;

#[derive(Parser)]
#[command(
    name = "xtask",
    bin_name = "cargo xtask",
    about = "The tasks of this repository"
)]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Build the example drivers to target/drivers, and as wasip2 components to target/drivers/wasip2
    Drivers {
        /// Also copy each driver with its grant and config into DIR, in the layout of a node's drivers directory
        #[arg(long, value_name = "DIR")]
        release_dir: Option<PathBuf>,
    },
    /// Build the golden driver in every language whose tools are installed, to target/golden
    Golden,
    /// Run every test that this machine can run, and list those that it cannot run
    Test {
        /// Run no test; check that all tests in tests/parity.md exist
        #[arg(long, conflicts_with = "args")]
        list: bool,
        /// Arguments for `cargo test`; a package with -p replaces the whole workspace
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Demonstrate the daemon on this machine: a driver, a claim, a crash, a container
    Demo {
        /// Use the host of the test build: after the tests there is less to build
        #[arg(long)]
        built: bool,
    },
    /// Measure the release build
    Bench {
        /// Arguments for the benchmark program
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Fuzz the parsers and checks of untrusted input, each for a bounded time
    Fuzz {
        /// Seconds for each target
        #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
        seconds: u32,
        /// Seed of the random generator: the same seed generates the same inputs, as far as the time suffices
        #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
        seed: Option<u32>,
        /// Only build the targets
        #[arg(long, conflicts_with_all = ["seconds", "seed", "report", "targets"])]
        build: bool,
        /// Report findings without failing
        #[arg(long)]
        report: bool,
        /// Targets, by their files in fuzz/fuzz_targets; default: all
        targets: Vec<String>,
    },
    /// Render the kustomize base from the Helm chart, and check deploy/
    Deploy {
        /// Render nothing
        #[arg(long)]
        check: bool,
    },
    /// Check format, lints and words, of the drivers for WebAssembly too, and that the SDK can be published
    Lint {
        /// Check only the words, and print how many terms each directory still has to replace
        #[arg(long)]
        words: bool,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> anyhow::Result<()> {
    let workspace = Workspace::load()?;
    match task {
        Task::Drivers { release_dir } => drivers::run(&workspace, release_dir.as_deref()),
        Task::Golden => golden::run(&workspace),
        Task::Test { list: true, .. } => test::list(&workspace),
        Task::Test { args, .. } => test::run(&workspace, &args),
        Task::Demo { built } => demo::run(&workspace, built),
        Task::Bench { args } => bench::run(&workspace, &args),
        Task::Fuzz {
            seconds,
            seed,
            report,
            targets,
            build: false,
        } => fuzz::run(
            &workspace,
            &fuzz::Bounds { seconds, seed },
            report,
            &targets,
        ),
        Task::Fuzz { build: true, .. } => fuzz::build(&workspace),
        Task::Deploy { check } => deploy::run(&workspace, check),
        Task::Lint { words: true } => lint::words(&workspace),
        Task::Lint { words: false } => lint::run(&workspace),
    }
}
