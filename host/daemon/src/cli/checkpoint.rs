//! `nodedock checkpoint`: works on a file, read only, also while a daemon has it open.

use std::path::PathBuf;

use anyhow::Result;
use clap::Subcommand;

use super::output::{Format, Rows, print, printable, say};
use super::{Outcome, Place};
use crate::config::Paths;
use nodedock_base::clock::rfc3339;
use nodedock_core::checkpoint::{self, Dump, Integrity, Report};
use nodedock_model::{
    AllocationEntry, ClaimRecord, ClaimValues, DriverName, KeptValue, PodAllocation, ReleaseRecord,
};

#[derive(Subcommand)]
pub(super) enum CheckpointCommand {
    /// Print the records of a checkpoint
    Dump {
        /// The file [default: ROOT/var/lib/nodedock/checkpoint.redb]
        file: Option<PathBuf>,
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// Check a checkpoint, and say what is wrong with it
    Verify {
        /// The file [default: ROOT/var/lib/nodedock/checkpoint.redb]
        file: Option<PathBuf>,
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
}

pub(super) fn run(place: &Place, command: CheckpointCommand) -> Result<Outcome> {
    let or_default = |file: Option<PathBuf>| file.unwrap_or_else(|| Paths::below(&place.root).checkpoint);
    match command {
        CheckpointCommand::Dump { file, output } => dump(&checkpoint::read(&or_default(file))?, output),
        CheckpointCommand::Verify { file, output } => verify(&or_default(file), output),
    }
}

fn dump(dump: &Dump, format: Format) -> Result<Outcome> {
    let row = |claim: &ClaimRecord| {
        let mut pods: Vec<_> = claim.pods.values().map(ToString::to_string).collect();
        pods.extend(claim.is_held_by_kubelet().then(|| "(kubelet)".to_owned()));
        let drivers: Vec<_> = claim.drivers.keys().map(ToString::to_string).collect();
        vec![
            claim.id.to_string(),
            claim.state.as_str().to_owned(),
            drivers.join(","),
            pods.join(","),
            claim.id.uid.to_string(),
            claim.boot_id.clone(),
        ]
    };
    let rows = || Rows {
        heading: vec!["CLAIM", "STATE", "DRIVERS", "PODS", "UID", "BOOT"],
        wide_from: 5,
        rows: dump.claims.iter().map(row).collect(),
    };
    print(format, dump, rows, "no claims")?;
    if matches!(format, Format::Json | Format::Yaml) {
        return Ok(Outcome::Done);
    }
    dump.released.iter().try_for_each(released)?;
    if !dump.allocations.is_empty() {
        say("")?;
        print(format, dump, || allocation_rows(&dump.allocations), "")?;
    }
    if !dump.values.is_empty() {
        say("")?;
        print(format, dump, || value_rows(&dump.values), "")?;
    }
    Ok(Outcome::Done)
}

fn released(record: &ReleaseRecord) -> Result<()> {
    let drivers: Vec<_> = record.untold.keys().map(ToString::to_string).collect();
    let untold =
        if drivers.is_empty() { String::new() } else { format!(", not told: {}", drivers.join(", ")) };
    let (claim, uid, at, by) = (&record.id, &record.id.uid, rfc3339(record.at_ms), record.by.to_string());
    say(&format!("released: {claim} (UID {uid}) on {at} by {}{untold}", printable(&by)))
}

fn allocation_rows(allocations: &[PodAllocation]) -> Rows {
    let row = |pod: &PodAllocation, entry: &AllocationEntry| {
        let devices: Vec<_> = entry.devices.keys().map(String::as_str).collect();
        vec![
            pod.pod.to_string(),
            entry.container.clone(),
            entry.resource.to_string(),
            devices.join(","),
            if entry.is_complete() { "allocated" } else { "asked for" }.to_owned(),
            pod.pod.uid.to_string(),
        ]
    };
    let rows = allocations.iter().flat_map(|pod| pod.entries.iter().map(move |entry| row(pod, entry)));
    Rows {
        heading: vec!["POD", "CONTAINER", "RESOURCE", "DEVICES", "STATE", "UID"],
        wide_from: 6,
        rows: rows.collect(),
    }
}

fn value_rows(values: &[ClaimValues]) -> Rows {
    let text = |value: &Option<String>| value.as_deref().map(printable).unwrap_or_else(|| "?".to_owned());
    let row = |of: &ClaimValues, driver: &DriverName, kept: &KeptValue| {
        let left = kept.left().map(printable).unwrap_or_default();
        let place = format!("/sys/{}", printable(&kept.path));
        vec![of.id.to_string(), driver.to_string(), place, text(&kept.before), left, of.boot_id.clone()]
    };
    let of_claim = |of: &ClaimValues| -> Vec<_> {
        let drivers = of.drivers.iter();
        drivers.flat_map(|(driver, kept)| kept.iter().map(|kept| row(of, driver, kept))).collect()
    };
    Rows {
        heading: vec!["CLAIM", "DRIVER", "PATH", "BEFORE", "LEFT", "BOOT"],
        wide_from: 5,
        rows: values.iter().flat_map(of_claim).collect(),
    }
}

fn verify(path: &std::path::Path, format: Format) -> Result<Outcome> {
    let report = checkpoint::verify(path)?;
    let good = report.is_good();
    if matches!(format, Format::Json | Format::Yaml) {
        print(format, &report, || Rows { heading: vec![], wide_from: 0, rows: vec![] }, "")?;
        return Ok(if good { Outcome::Done } else { Outcome::Refused });
    }
    say(&format!("{}: format {}, {} bytes", path.display(), report.meta.format, report.bytes))?;
    say(&format!("  written by {}, created {}", report.meta.written_by, report.meta.created))?;
    say(match &report.integrity {
        Integrity::Clean => "  closed properly, every checksum agrees",
        Integrity::NotClosed => "  open in a daemon or left by a crash, every checksum agrees",
        Integrity::Damaged(_) => "  damaged: less could be read than was written",
    })?;
    say(&counts(&report))?;
    for skipped in &report.skipped {
        say(&format!("  {} {:?} is unreadable: {}", skipped.table.as_str(), skipped.key, skipped.reason))?;
    }
    for finding in &report.findings {
        say(&format!("  {finding}"))?;
    }
    say(if good { "good" } else { "not good" })?;
    Ok(if good { Outcome::Done } else { Outcome::Refused })
}

fn counts(report: &Report) -> String {
    let Report { claims, pods, released, allocations, values, skipped, .. } = report;
    format!(
        "  {claims} claims, {pods} pods, {released} claims released by hand, {allocations} pods with extended resources, {values} claims with values below /sys, {} unreadable",
        skipped.len()
    )
}
