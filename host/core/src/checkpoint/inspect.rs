//! Inspects a checkpoint without changing it, for `checkpoint dump` and `checkpoint verify`: copies the file and its log, and opens the
//! copies. Works beside a running daemon. The log has every page that a daemon changes in the file while it is copied, as long as the log
//! is not begun again; if it was, it is copied again.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::Serialize;

use super::database::{Database, LOG_HEADER};
use super::format::{self, Dump, FORMAT_VERSION, LoadError, Meta, Skipped};
use super::upgrade::UPGRADES;
use super::{ReadError, file};
use nodedock_base::error::chain;
use nodedock_model::{ClaimRecord, ClaimValues, ObjectRef, PodRecord};

/// Attempts to copy a file that changes meanwhile; each takes a few milliseconds.
const ATTEMPTS: u32 = 8;
/// Bytes of a file that is copied: room for more than 100,000 claims.
const FILE_BYTES_MAX: u64 = 1 << 30;
/// Integrity of a file's pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Integrity {
    /// Closed properly, and its structure is sound.
    Clean,
    /// Open in a daemon or left by a crash; its structure is sound, with its log.
    NotClosed,
    /// Some written data cannot be read.
    Damaged(String),
}

/// Result of `checkpoint verify`.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub integrity: Integrity,
    pub meta: Meta,
    pub bytes: u64,
    pub claims: usize,
    pub pods: usize,
    /// Claims that an operator released.
    pub released: usize,
    /// Claims that the host made for extended resources of pods.
    pub extended_resources: usize,
    /// Claims for which drivers changed values below `/sys`.
    pub values: usize,
    pub skipped: Vec<Skipped>,
    pub unreadable: u64,
    /// Inconsistencies between the records, one sentence each.
    pub findings: Vec<String>,
}

impl Report {
    /// Returns whether the file has no defect.
    pub fn is_good(&self) -> bool {
        !matches!(self.integrity, Integrity::Damaged(_))
            && self.skipped.is_empty()
            && self.findings.is_empty()
    }
}

/// Reads a checkpoint without changing it; a daemon may have it open.
pub fn read(path: &Path) -> Result<Dump, ReadError> {
    Ok(copy(path)?.1)
}

/// Checks a checkpoint without changing it; a daemon may have it open.
pub fn verify(path: &Path) -> Result<Report, ReadError> {
    let (integrity, dump, bytes) = copy(path)?;
    let mut findings = disagreements(&dump.claims, &dump.pods);
    findings.extend(given_twice(&dump.claims));
    findings.extend(without_claim(&dump.claims, &dump.values));
    Ok(Report {
        integrity,
        meta: dump.meta,
        bytes,
        claims: dump.claims.len(),
        pods: dump.pods.len(),
        released: dump.released.len(),
        extended_resources: dump
            .claims
            .iter()
            .filter(|claim| claim.resource.is_some())
            .count(),
        values: dump.values.len(),
        skipped: dump.skipped,
        unreadable: dump.unreadable,
        findings,
    })
}

/// Returns the state of a file's pages, its content and its size with its log.
fn copy(path: &Path) -> Result<(Integrity, Dump, u64), ReadError> {
    let io = |source| ReadError::Io {
        path: path.to_owned(),
        source,
    };
    let damaged = |reason| ReadError::Damaged {
        path: path.to_owned(),
        reason,
    };
    let file = File::open(path).map_err(io)?;
    let length = file.metadata().map_err(io)?.len();
    if length > FILE_BYTES_MAX {
        let path = path.to_owned();
        return Err(ReadError::TooLarge {
            path,
            bytes: length,
            max: FILE_BYTES_MAX,
        });
    }
    if let Err(reason) = file::check_header(&file).map_err(io)? {
        return Err(damaged(reason));
    }
    let directory = tempfile::tempdir().map_err(io)?;
    let copied = directory.path().join("checkpoint.db");
    let bytes = copy_with_log(path, &copied)?;
    let read = open_copy(&copied).map(|(integrity, dump)| (integrity, dump, bytes));
    read.map_err(|error| match error {
        LoadError::Newer { found, written_by } => ReadError::Newer {
            path: path.to_owned(),
            found,
            known: FORMAT_VERSION,
            written_by,
        },
        LoadError::Older { found, written_by } => ReadError::Older {
            path: path.to_owned(),
            found,
            written_by,
        },
        LoadError::Foreign(reason) => damaged(reason),
        LoadError::Store(error) => damaged(chain(&error)),
    })
}

/// Copies a file and its log to another path. Returns their bytes.
fn copy_with_log(path: &Path, to: &Path) -> Result<u64, ReadError> {
    let io = |source| ReadError::Io {
        path: path.to_owned(),
        source,
    };
    let log = file::log_of(path);
    for _ in 0..ATTEMPTS {
        let before = log_header(&log).map_err(io)?;
        let mut bytes = std::fs::copy(path, to).map_err(io)?;
        match std::fs::copy(&log, file::log_of(to)) {
            Ok(more) => bytes += more,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(io(error)),
        }
        if log_header(&log).map_err(io)? == before {
            return Ok(bytes);
        }
    }
    Err(ReadError::Busy {
        path: path.to_owned(),
        attempts: ATTEMPTS,
    })
}

/// The header of a log, which changes when the log is begun again.
fn log_header(log: &Path) -> io::Result<Vec<u8>> {
    let mut header = Vec::new();
    match File::open(log) {
        Ok(log) => log
            .take(LOG_HEADER as u64)
            .read_to_end(&mut header)
            .map(|_| header),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(header),
        Err(error) => Err(error),
    }
}

fn open_copy(path: &Path) -> Result<(Integrity, Dump), LoadError> {
    let closed = !file::is_log_filled(&file::log_of(path));
    let mut database = Database::open(path, None, None)?;
    let integrity = match database.check()? {
        Ok(()) if closed => Integrity::Clean,
        Ok(()) => Integrity::NotClosed,
        Err(reason) => Integrity::Damaged(reason),
    };
    // An older file is upgraded in the copy, and reported with its own format.
    let meta = format::load_meta(&database)?;
    let dump = file::load(&mut database, &UPGRADES)?;
    Ok((integrity, Dump { meta, ..dump }))
}

/// Returns inconsistent references between records.
fn disagreements(claims: &[ClaimRecord], pods: &[PodRecord]) -> Vec<String> {
    let claim_uids: HashSet<_> = claims.iter().map(|claim| &claim.id.uid).collect();
    let pod_uids: HashSet<_> = pods.iter().map(|pod| &pod.pod.uid).collect();
    let mut findings = Vec::new();
    for pod in pods {
        for claim in pod
            .claims
            .values()
            .filter(|claim| !claim_uids.contains(&claim.uid))
        {
            findings.push(format!(
                "pod {} ({}) uses the claim {claim} ({}), which has no record",
                pod.pod, pod.pod.uid, claim.uid
            ));
        }
    }
    for claim in claims {
        for (uid, pod) in claim.pods.iter().filter(|(uid, _)| !pod_uids.contains(uid)) {
            findings.push(format!(
                "claim {} ({}) is used by the pod {pod} ({uid}), which has no record",
                claim.id, claim.id.uid
            ));
        }
    }
    findings
}

/// Returns stored values of claims without a record.
fn without_claim(claims: &[ClaimRecord], values: &[ClaimValues]) -> Vec<String> {
    let known: HashSet<_> = claims.iter().map(|claim| &claim.id.uid).collect();
    let lost = values
        .iter()
        .map(|kept| &kept.id)
        .filter(|id| !known.contains(&id.uid));
    lost.map(|id| {
        format!(
            "values below /sys are stored for the claim {id} ({}), which has no record",
            id.uid
        )
    })
    .collect()
}

/// Returns devices of an extended resource that more than one pod has.
fn given_twice(claims: &[ClaimRecord]) -> Vec<String> {
    let mut owners = HashMap::new();
    let mut findings = Vec::new();
    for claim in claims {
        let Some(of) = &claim.resource else { continue };
        for (device, pod) in of
            .devices
            .keys()
            .flat_map(|device| claim.pods.values().map(move |pod| (device, pod)))
        {
            let other: &ObjectRef = owners.entry((&of.resource, device)).or_insert(pod);
            if other.uid != pod.uid {
                findings.push(format!(
                    "the device {device:?} of {} is allocated to the pod {other} ({}) and to the pod {pod} ({})",
                    of.resource, other.uid, pod.uid
                ));
            }
        }
    }
    findings
}
