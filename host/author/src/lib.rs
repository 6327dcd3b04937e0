//! The tools of driver authors: `nodedock driver` as far as it is about files, `nodedock conform` and `nodedock replay`.
//!
//! A driver runs here without a daemon, on a recorded machine (`workbench.rs`), or with a daemon on a temporary root.

mod bench;
mod bindings;
mod build;
mod check;
mod compile_cache;
mod conform;
mod image_layout;
mod inspect;
mod language;
mod new;
mod package;
mod replay;
mod run;
mod templates;
mod test;
mod unexported;
mod workbench;
mod wrap_module;

use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Subcommand;

use nodedock_base::file;
use nodedock_command::output::print_text;
use nodedock_command::{block_on, block_on_until_stopped};
use nodedock_core::driver::NodeFacts;
use nodedock_core::driver::values::NoJournal;
use nodedock_core::hardware::Hardware;
use nodedock_core::recording::Recordings;
use nodedock_core::records::SharedClaimTable;
use nodedock_core::standard_attributes::NumaNodeForm;
use nodedock_model::grant::{self, Grant};
use nodedock_model::limit;
use nodedock_wasm::trust::open::{self, OpenError};
use nodedock_wasm::{Compiler, DriverFile, Inspection, WasmHost, WasmSettings};

pub use conform::ConformArgs;
pub use replay::ReplayArgs;

/// Mode of files that are written, before the umask.
const FILE_MODE: u32 = 0o666;

/// The commands of `nodedock driver` that are about files and need no daemon.
#[derive(Subcommand)]
pub enum DriverFileCommand {
    /// Write the directory of a new driver, which builds and passes its tests as it is
    New(new::NewArgs),
    /// Build a driver with the tool of its language, into NAME.wasm beside its sources
    Build(build::BuildArgs),
    /// Generate what stands between the sources of a driver and the contract, as `build` does first
    Bindings(bindings::BindingsArgs),
    /// Check a driver and its files: the contract, the grant, the config, and its devices on a machine
    Check(check::CheckArgs),
    /// Show the devices that a driver finds on a recorded machine and what a container gets for each, and compare with a golden file
    Test(test::TestArgs),
    /// Measure the calls of a driver
    Bench(bench::BenchArgs),
    /// Run a daemon with one driver on a temporary root, and print what it publishes
    Run(run::RunArgs),
    /// Show what a driver file is and requests, without a daemon; of its code only `describe` and the functions that return its schemas run
    Inspect(inspect::InspectArgs),
    /// Print a grant with everything that a driver file requests, to be read, narrowed and saved as NAME.grant.yaml
    Grant { file: PathBuf },
    /// Write a driver file as an OCI image (an image layout), to be pushed to a registry and mounted by a container runtime
    Package(package::PackageArgs),
}

/// Executes a command about driver files.
pub fn execute(command: DriverFileCommand) -> Result<()> {
    match command {
        DriverFileCommand::New(args) => new::run(&args),
        DriverFileCommand::Build(args) => build::run(&args),
        DriverFileCommand::Bindings(args) => bindings::run(&args),
        DriverFileCommand::Check(args) => block_on_until_stopped(check::run(args)),
        DriverFileCommand::Test(args) => block_on_until_stopped(test::run(args)),
        DriverFileCommand::Bench(args) => block_on_until_stopped(bench::run(args)),
        // A daemon has a runtime of its own.
        DriverFileCommand::Run(args) => run::run(&args),
        DriverFileCommand::Inspect(args) => block_on(inspect::run(args)),
        DriverFileCommand::Grant { file } => block_on(print_grant(&file)),
        DriverFileCommand::Package(args) => block_on(package::run(args)),
    }
}

/// Runs the conformance cases.
pub fn conform(args: ConformArgs) -> Result<()> {
    block_on_until_stopped(conform::run(args))
}

/// Replays a recording.
pub fn replay(args: ReplayArgs) -> Result<()> {
    block_on(replay::run(args))
}

/// Loads a driver file as the daemon does, with a node that has no facts.
async fn load(file: &Path, bytes: Vec<u8>, grant: &Grant) -> Result<Inspection> {
    let host = host("inspect")?;
    let name = file
        .file_name()
        .unwrap_or(file.as_os_str())
        .to_string_lossy()
        .into_owned();
    Ok(host
        .inspect(
            DriverFile {
                name,
                bytes: bytes.into(),
            },
            grant,
        )
        .await)
}

/// A sandbox without a daemon, on a node without facts.
fn host(node: &str) -> Result<Arc<WasmHost>> {
    let node = NodeFacts {
        name: node.to_owned(),
        boot_id: String::new(),
    };
    let settings = WasmSettings {
        cache: None,
        compiler: Compiler::this_program(),
        hardware: Hardware::of_node(),
        node,
        numa_node_form: NumaNodeForm::default(),
        recordings: Recordings::default(),
    };
    WasmHost::new(
        settings,
        Arc::new(SharedClaimTable::default()),
        Arc::new(NoJournal),
    )
    .context("set up the sandbox")
}

/// Reads a file that a person named: links are followed, and a pipe is refused.
fn read(file: &Path, max: u64) -> Result<Vec<u8>> {
    let opened = open::open(file, max).map_err(|error| match error {
        OpenError::TooLarge(max) => {
            anyhow::anyhow!("{} is larger than {max} bytes", file.display())
        }
        error => anyhow::Error::new(error).context(format!("read {}", file.display())),
    })?;
    Ok(opened.bytes)
}

/// The file beside a driver's, if there is one.
fn beside(driver: &Path, extension: &str) -> Result<Option<PathBuf>> {
    let path = driver.with_extension(extension);
    let is_there = file::is_file(&path).with_context(|| format!("look at {}", path.display()))?;
    Ok(is_there.then_some(path))
}

/// Reads the grant to compare with, and returns its path too.
fn grant_beside(file: &Path, given: Option<&Path>) -> Result<(Grant, Option<PathBuf>)> {
    let path = given.map_or_else(
        || beside(file, "grant.yaml"),
        |path| Ok(Some(path.to_owned())),
    )?;
    let Some(path) = path else {
        return Ok((Grant::empty(), None));
    };
    let grant =
        Grant::parse(&read_text(&path)?).with_context(|| format!("grant {}", path.display()))?;
    Ok((grant, Some(path)))
}

/// Reads a grant or a config.
fn read_text(path: &Path) -> Result<String> {
    let bytes = read(path, limit::SIDE_FILE_BYTES_MAX)?;
    String::from_utf8(bytes).with_context(|| format!("{} is not UTF-8 text", path.display()))
}

/// Writes a file at once: a daemon or a person may read it meanwhile.
fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    replace_file(path, bytes).with_context(|| format!("write {}", path.display()))
}

fn replace_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let parent = nodedock_base::file::directory_of(path);
    let mut file = tempfile::Builder::new()
        .prefix(".nodedock-")
        .permissions(Permissions::from_mode(FILE_MODE))
        .tempfile_in(parent)?;
    file.write_all(bytes)?;
    file.persist(path)?;
    Ok(())
}

/// Writes a file and the directories above it.
fn write_below(directory: &Path, path: &str, bytes: &[u8]) -> Result<()> {
    let path = directory.join(path);
    let parent = nodedock_base::file::directory_of(&path);
    std::fs::create_dir_all(parent).with_context(|| format!("make {}", parent.display()))?;
    write_file(&path, bytes)
}

async fn print_grant(file: &Path) -> Result<()> {
    let found = load(
        file,
        read(file, limit::DRIVER_FILE_BYTES_MAX)?,
        &Grant::empty(),
    )
    .await?;
    let driver = found
        .driver
        .with_context(|| format!("{} cannot be loaded", file.display()))?;
    let info = driver.info();
    let grant = grant::to_yaml(
        info.name.as_str(),
        &info.summary,
        &info.capabilities,
        &info.limits,
    );
    print_text(grant.trim_end())
}
