//! `nodedock driver`: what authors and operators ask of driver files.

mod inspect;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Subcommand;
use nodedock_proto::node::v1;

use super::client::{connect, said};
use super::output::{Format, printable, say};
use super::{CliError, Outcome, Place};
use nodedock_core::driver::values::NoJournal;
use nodedock_core::driver::{NoClaims, NodeFacts};
use nodedock_model::grant::{self, Grant};
use nodedock_model::limit;
use nodedock_wasm::trust::open::{self, OpenError};
use nodedock_wasm::{Compiler, DriverFile, Inspection, WasmHost, WasmSettings};

#[derive(Subcommand)]
pub(super) enum DriverCommand {
    /// Tell what a driver file is and asks for, without a daemon; of its code only `describe` runs
    Inspect {
        file: PathBuf,
        /// Grant to compare with [default: NAME.grant.yaml beside NAME.wasm, if it is there]
        #[arg(long, value_name = "FILE")]
        grant: Option<PathBuf>,
        /// Judge the file by the `trust` section of this config of the daemon
        #[arg(long, value_name = "FILE", conflicts_with = "key")]
        config: Option<PathBuf>,
        /// Check the signature beside the file, NAME.wasm.sig, with this public key (PEM)
        #[arg(long, value_name = "FILE")]
        key: Option<PathBuf>,
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Print the grant that a driver file asks for, for a person to read, narrow and save as NAME.grant.yaml
    Grant { file: PathBuf },
    /// Have the daemon read a driver's files again and ask it for its devices; by the driver's name or its file's
    Reload { name: String },
    /// End a driver's quarantine now, and forget its failures; by the driver's name or its file's
    Resume { name: String },
}

pub(super) async fn run(place: Place, command: DriverCommand) -> Result<Outcome> {
    match command {
        DriverCommand::Inspect { file, grant, config, key, output } => {
            let vouching = inspect::Vouching { config, key };
            inspect::run(&file, grant, &vouching, output).await
        }
        DriverCommand::Grant { file } => ask_grant(&file).await,
        DriverCommand::Reload { name } => reload(&place, name).await,
        DriverCommand::Resume { name } => resume(&place, name).await,
    }
}

async fn look(file: &Path, bytes: Vec<u8>, grant: &Grant) -> Result<Inspection> {
    let node = NodeFacts { name: "inspect".to_owned(), boot_id: String::new() };
    let settings = WasmSettings {
        cache_dir: None,
        compiler: Compiler::this_program(),
        sysfs_root: "/sys".into(),
        dev_root: "/dev".into(),
        node,
    };
    let host =
        WasmHost::new(settings, Arc::new(NoClaims), Arc::new(NoJournal)).context("set up the sandbox")?;
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy().into_owned();
    Ok(host.inspect(DriverFile { name, bytes: bytes.into() }, grant).await)
}

/// A file that a person names: links are followed, and a pipe is no file.
fn read(file: &Path, max: u64) -> Result<Vec<u8>> {
    let opened = open::open(file, max).map_err(|error| match error {
        OpenError::TooLarge(max) => anyhow::anyhow!("{} is larger than {max} bytes", file.display()),
        error => anyhow::Error::new(error).context(format!("read {}", file.display())),
    })?;
    Ok(opened.bytes)
}

/// The grant to compare with, and where it is from.
fn grant_beside(file: &Path, given: Option<PathBuf>) -> Result<(Grant, Option<PathBuf>)> {
    let beside = file.with_extension("grant.yaml");
    let Some(path) = given.or_else(|| beside.is_file().then_some(beside)) else {
        return Ok((Grant::empty(), None));
    };
    let text = String::from_utf8(read(&path, limit::SIDE_FILE_BYTES_MAX)?)
        .with_context(|| format!("{} is not UTF-8 text", path.display()))?;
    let grant = Grant::parse(&text).with_context(|| format!("grant {}", path.display()))?;
    Ok((grant, Some(path)))
}

async fn ask_grant(file: &Path) -> Result<Outcome> {
    let found = look(file, read(file, limit::DRIVER_FILE_BYTES_MAX)?, &Grant::empty()).await?;
    match (found.info, found.error) {
        (Some(info), _) => {
            say(grant::to_yaml(info.name.as_str(), &info.summary, &info.capabilities, &info.limits)
                .trim_end())?;
            Ok(Outcome::Done)
        }
        (None, Some(error)) => Err(error).with_context(|| format!("{} cannot be loaded", file.display())),
        (None, None) => Err(CliError::usage("the file says nothing of itself", "is it a driver?").into()),
    }
}

async fn reload(place: &Place, name: String) -> Result<Outcome> {
    let mut client = connect(place).await?;
    let answer = client.reload_driver(v1::ReloadDriverRequest { name }).await.map_err(said(place))?;
    let driver = answer.into_inner().driver.unwrap_or_default();
    let name = if driver.name.is_empty() { "driver of unknown name" } else { &driver.name };
    say(&format!("{name} ({}) is {}, {} devices", driver.source, driver.state, driver.devices))?;
    anyhow::ensure!(driver.reason.is_empty(), "{}", printable(&driver.reason));
    Ok(Outcome::Done)
}

async fn resume(place: &Place, name: String) -> Result<Outcome> {
    let mut client = connect(place).await?;
    let answer = client.resume_driver(v1::ResumeDriverRequest { name }).await.map_err(said(place))?;
    let driver = answer.into_inner().driver.unwrap_or_default();
    say(&format!("the quarantine of {} ({}) is over: it is {}", driver.name, driver.source, driver.state))?;
    Ok(Outcome::Done)
}
