//! `nodedock checkpoint`: reads a checkpoint file, also while a daemon has it open. Never writes.

use std::path::{Path, PathBuf};

use anyhow::Result;
use clap::{Args, Subcommand};

use super::output::{Column, Format, Row, join, joined, print, table};
use super::{CommandError, Location};
use nodedock_base::clock::rfc3339;
use nodedock_base::paths::Paths;
use nodedock_core::checkpoint::{self, Dump, Integrity, Report};
use nodedock_model::{
    AdapterRecord, ClaimRecord, ClaimValues, DriverName, KeptValue, ObjectRef, PoolMechanism,
    ReleaseRecord, ResourceDevices,
};

#[derive(Subcommand)]
pub(super) enum CheckpointCommand {
    /// Print the records of a checkpoint
    Dump(FileArgs),
    /// Check a checkpoint, and print its defects
    Verify(FileArgs),
}

#[derive(Args)]
pub(super) struct FileArgs {
    /// The file [default: ROOT/var/lib/nodedock/checkpoint.db]
    file: Option<PathBuf>,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

impl FileArgs {
    fn path(&self, location: &Location) -> PathBuf {
        self.file
            .clone()
            .unwrap_or_else(|| Paths::below(&location.root).checkpoint)
    }
}

pub(super) fn run(location: &Location, command: CheckpointCommand) -> Result<()> {
    match command {
        CheckpointCommand::Dump(args) => {
            let dump = checkpoint::read(&args.path(location))?;
            print(args.output, &dump, || dump_text(&dump, args.output))
        }
        CheckpointCommand::Verify(args) => {
            let path = args.path(location);
            let report = checkpoint::verify(&path)?;
            print(args.output, &report, || join(report_lines(&path, &report)))?;
            CommandError::unless_done(report.is_good())
        }
    }
}

fn dump_text(dump: &Dump, format: Format) -> String {
    let mut parts = vec![table(format, &dump.claims, "no claims")];
    parts.extend(dump.released.iter().map(|record| join([released(record)])));
    let allocations: Vec<_> = dump
        .claims
        .iter()
        .filter_map(|claim| Some((claim.clone(), claim.resource.clone()?)))
        .collect();
    if !allocations.is_empty() {
        parts.extend([String::new(), table(format, &allocations, "")]);
    }
    if !dump.values.is_empty() {
        parts.extend([String::new(), table(format, &changed_values(dump), "")]);
    }
    if !dump.adapters.is_empty() {
        parts.extend([String::new(), table(format, &dump.adapters, "")]);
    }
    let mechanisms = dump.mechanisms.iter().flat_map(|record| &record.pools);
    let pools: Vec<_> = mechanisms.cloned().collect();
    if !pools.is_empty() {
        parts.extend([String::new(), table(format, &pools, "")]);
    }
    parts.join("\n")
}

impl Row for ClaimRecord {
    const COLUMNS: &'static [Column<Self>] = &[
        ("CLAIM", |claim| claim.id.to_string()),
        ("STATE", |claim| claim.state.as_str().to_owned()),
        ("DRIVERS", |claim| joined(claim.drivers.keys())),
        ("PODS", |claim| {
            let kubelet = claim.is_held_by_kubelet().then(|| "(kubelet)".to_owned());
            joined(claim.pods.values().map(ToString::to_string).chain(kubelet))
        }),
        ("UID", |claim| claim.id.uid.to_string()),
        ("BOOT", |claim| claim.boot_id.clone()),
    ];
    const NARROW: usize = 5;
}

/// A claim that the host made for an extended resource, and its devices.
impl Row for (ClaimRecord, ResourceDevices) {
    const COLUMNS: &'static [Column<Self>] = &[
        ("POD", |(claim, _)| joined(claim.pods.values())),
        ("RESOURCE", |(_, of)| of.resource.to_string()),
        ("DEVICES", |(_, of)| joined(of.devices.keys())),
        ("CLAIM", |(claim, _)| claim.id.to_string()),
    ];
}

impl Row for AdapterRecord {
    const COLUMNS: &'static [Column<Self>] = &[
        ("ADAPTER", |adapter| adapter.resource.to_string()),
        ("DRIVER", |adapter| adapter.driver.to_string()),
        ("POOL", |adapter| adapter.pool.to_string()),
        ("DECIDED", |adapter| match adapter.enabled {
            Some(true) => "enabled".to_owned(),
            Some(false) => "disabled".to_owned(),
            None => "by its file".to_owned(),
        }),
        ("HELD", |adapter| joined(&adapter.held)),
    ];
}

impl Row for PoolMechanism {
    const COLUMNS: &'static [Column<Self>] = &[
        ("POOL", |pool| pool.pool.to_string()),
        ("DRIVER", |pool| pool.driver.to_string()),
        ("RESOURCE", |pool| pool.resource.to_string()),
        ("MECHANISM", |pool| pool.mechanism.to_string()),
    ];
}

/// The claim, the boot and the driver of a value below `/sys` that was changed.
type ChangedValue = (ObjectRef, String, DriverName, KeptValue);

impl Row for ChangedValue {
    const COLUMNS: &'static [Column<Self>] = &[
        ("CLAIM", |(claim, ..)| claim.to_string()),
        ("DRIVER", |(_, _, driver, _)| driver.to_string()),
        ("PATH", |(.., value)| format!("/sys/{}", value.path)),
        ("BEFORE", |(.., value)| {
            value.before.clone().unwrap_or_else(|| "?".to_owned())
        }),
        ("LEFT", |(.., value)| {
            value.left().unwrap_or_default().to_owned()
        }),
        ("BOOT", |(_, boot_id, ..)| boot_id.clone()),
    ];
    const NARROW: usize = 5;
}

fn changed_values(dump: &Dump) -> Vec<ChangedValue> {
    let mut rows = Vec::new();
    for ClaimValues {
        id,
        boot_id,
        drivers,
        ..
    } in &dump.values
    {
        for (driver, values) in drivers {
            rows.extend(
                values
                    .iter()
                    .map(|value| (id.clone(), boot_id.clone(), driver.clone(), value.clone())),
            );
        }
    }
    rows
}

fn released(record: &ReleaseRecord) -> String {
    let rest = match record.untold.is_empty() {
        true => String::new(),
        false => format!(", not unprepared by {}", joined(record.untold.keys())),
    };
    let (claim, uid, at, by) = (
        &record.id,
        &record.id.uid,
        rfc3339(record.at_ms),
        &record.by,
    );
    format!("released: {claim} (UID {uid}) on {at} by {by}{rest}")
}

fn report_lines(path: &Path, report: &Report) -> Vec<String> {
    let Report {
        claims,
        pods,
        released,
        extended_resources,
        values,
        skipped,
        meta,
        ..
    } = report;
    let integrity = match &report.integrity {
        Integrity::Clean => "closed properly, every checksum agrees",
        Integrity::NotClosed => "open in a daemon or left by a crash, every checksum agrees",
        Integrity::Damaged(_) => "damaged: less could be read than was written",
    };
    let mut lines = vec![
        format!(
            "{}: format {}, {} bytes",
            path.display(),
            meta.format,
            report.bytes
        ),
        format!("  written by {}, created {}", meta.written_by, meta.created),
        format!("  {integrity}"),
        format!(
            "  {claims} claims, {extended_resources} of them for extended resources, {pods} pods, {released} released claims, {values} claims with values below /sys, {} unreadable",
            skipped.len()
        ),
    ];
    lines.extend(skipped.iter().map(|skipped| {
        format!(
            "  {} {:?} is unreadable: {}",
            skipped.table.as_str(),
            skipped.key,
            skipped.reason
        )
    }));
    lines.extend(report.findings.iter().map(|finding| format!("  {finding}")));
    lines.push(if report.is_good() { "good" } else { "not good" }.to_owned());
    lines
}
