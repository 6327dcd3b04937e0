//! `nodedock driver`: what authors and operators ask of driver files.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::Subcommand;
use nodedock_proto::node::v1;
use serde::Serialize;

use super::client::{connect, said};
use super::output::{Format, Rows, print, printable, say};
use super::{CliError, Outcome, Place};
use crate::base::error::chain;
use crate::driver::grant::{self, Grant, Limits};
use crate::driver::values::NoJournal;
use crate::driver::wasm::{Compiler, DriverFile, Inspection, WasmHost, WasmSettings};
use crate::driver::{Ledger, NodeFacts};
use crate::model::{DriverName, LiveClaim, limit};

#[derive(Subcommand)]
pub(super) enum DriverCommand {
    /// Tell what a driver file is and asks for, without a daemon; of its code only `describe` runs
    Inspect {
        file: PathBuf,
        /// Grant to compare with [default: NAME.grant.yaml beside NAME.wasm, if it is there]
        #[arg(long, value_name = "FILE")]
        grant: Option<PathBuf>,
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
        DriverCommand::Inspect { file, grant, output } => inspect(&file, grant, output).await,
        DriverCommand::Grant { file } => ask_grant(&file).await,
        DriverCommand::Reload { name } => reload(&place, name).await,
        DriverCommand::Resume { name } => resume(&place, name).await,
    }
}

/// A driver that is only looked at holds no claims.
struct NoClaims;

impl Ledger for NoClaims {
    fn claims(&self, _: &DriverName) -> Vec<LiveClaim> {
        Vec::new()
    }

    fn claim(&self, _: &DriverName, _: &str) -> Option<LiveClaim> {
        None
    }

    fn holders(&self, _: &DriverName, _: &str, _: &str) -> Vec<LiveClaim> {
        Vec::new()
    }
}

async fn look(file: &Path, grant: &Grant) -> Result<Inspection> {
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
    let bytes = read(file, limit::DRIVER_FILE_BYTES_MAX)?;
    let name = file.file_name().unwrap_or(file.as_os_str()).to_string_lossy().into_owned();
    Ok(host.inspect(DriverFile { name, bytes: bytes.into() }, grant).await)
}

fn read(file: &Path, max: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let opened = std::fs::File::open(file).with_context(|| format!("read {}", file.display()))?;
    opened.take(max + 1).read_to_end(&mut bytes).with_context(|| format!("read {}", file.display()))?;
    anyhow::ensure!(bytes.len() as u64 <= max, "{} is larger than {max} bytes", file.display());
    Ok(bytes)
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

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Inspected {
    file: String,
    size: usize,
    digest: String,
    form: Option<&'static str>,
    contract: Option<String>,
    profile: Option<&'static str>,
    imports: Vec<String>,
    exports: Vec<String>,
    facets: Vec<&'static str>,
    name: Option<String>,
    version: Option<String>,
    summary: Option<String>,
    grant: Option<String>,
    missing_grants: Vec<String>,
    limits: Option<InspectedLimits>,
    error: Option<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InspectedLimits {
    memory_mib: usize,
    wall_ms: u128,
    cpu_ms: u128,
    answer_mib: usize,
    host_operations: usize,
    host_mib: usize,
    log_lines_per_second: u32,
    log_bytes_per_second: u32,
    concurrent_calls: usize,
}

impl From<&Limits> for InspectedLimits {
    fn from(limits: &Limits) -> Self {
        Self {
            memory_mib: limits.memory >> 20,
            wall_ms: limits.wall.as_millis(),
            cpu_ms: limits.cpu.as_millis(),
            answer_mib: limits.hostcall_bytes >> 20,
            host_operations: limits.host_operations,
            host_mib: limits.host_bytes >> 20,
            log_lines_per_second: limits.log.lines,
            log_bytes_per_second: limits.log.bytes,
            concurrent_calls: limits.concurrent_calls,
        }
    }
}

impl InspectedLimits {
    /// In words, a line each.
    fn lines(&self) -> [String; 3] {
        [
            format!(
                "memory {} MiB, wall {} ms, CPU {} ms per call",
                self.memory_mib, self.wall_ms, self.cpu_ms
            ),
            format!(
                "answer {} MiB, {} questions to the host and {} MiB from it per call",
                self.answer_mib, self.host_operations, self.host_mib
            ),
            format!(
                "log {} lines and {} bytes a second, {} calls at once",
                self.log_lines_per_second, self.log_bytes_per_second, self.concurrent_calls
            ),
        ]
    }
}

async fn inspect(file: &Path, grant: Option<PathBuf>, format: Format) -> Result<Outcome> {
    let (grant, grant_path) = grant_beside(file, grant)?;
    let found = look(file, &grant).await?;
    let inspected = Inspected {
        file: file.display().to_string(),
        size: found.size,
        digest: found.digest.clone(),
        form: found.surface.form.map(|form| form.as_str()),
        contract: found.surface.contract(),
        profile: found.surface.profile().map(|profile| profile.as_str()),
        imports: found.surface.imports.iter().cloned().collect(),
        exports: found.surface.exports.iter().cloned().collect(),
        facets: found.surface.facets(),
        name: found.info.as_ref().map(|info| info.name.to_string()),
        version: found.info.as_ref().map(|info| info.version.clone()),
        summary: found.info.as_ref().map(|info| info.summary.clone()),
        grant: grant_path.map(|path| path.display().to_string()),
        missing_grants: found.missing_grants.clone(),
        limits: found.limits.as_ref().map(InspectedLimits::from),
        error: found.error.as_ref().map(|error| chain(error)),
    };
    match format {
        Format::Json | Format::Yaml => {
            print(format, &inspected, || Rows { heading: vec![], wide_from: 0, rows: vec![] }, "")?
        }
        Format::Table | Format::Wide => tell(&inspected)?,
    }
    match inspected.error {
        Some(_) => Ok(Outcome::Refused),
        None => Ok(Outcome::Done),
    }
}

fn tell(inspected: &Inspected) -> Result<()> {
    let line = |label: &str, value: &str| say(&format!("{label:<10}{}", printable(value)));
    let lines = |label: &str, values: &[String]| {
        values.iter().enumerate().try_for_each(|(i, value)| line(if i == 0 { label } else { "" }, value))
    };
    line("file", &format!("{}, {} bytes", inspected.file, inspected.size))?;
    line("digest", &inspected.digest)?;
    line("form", inspected.form.unwrap_or("not WebAssembly"))?;
    line("contract", inspected.contract.as_deref().unwrap_or("none"))?;
    if let Some(profile) = inspected.profile {
        line("profile", profile)?;
    }
    lines("imports", &inspected.imports)?;
    lines("exports", &inspected.exports)?;
    if let (Some(name), Some(version)) = (&inspected.name, &inspected.version) {
        line("driver", &format!("{name} {version}"))?;
        line("summary", inspected.summary.as_deref().unwrap_or_default())?;
    }
    if let Some(limits) = &inspected.limits {
        lines("limits", &limits.lines())?;
    }
    line("grant", inspected.grant.as_deref().unwrap_or("none: nothing but the log"))?;
    match (&inspected.error, inspected.missing_grants.as_slice()) {
        (Some(error), _) => line("verdict", &format!("cannot be loaded: {error}")),
        (None, []) => line("verdict", "would serve"),
        (None, missing) => {
            line("verdict", "would be blocked; not granted:")?;
            missing.iter().try_for_each(|entry| line("", entry))
        }
    }
}

async fn ask_grant(file: &Path) -> Result<Outcome> {
    let found = look(file, &Grant::empty()).await?;
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
