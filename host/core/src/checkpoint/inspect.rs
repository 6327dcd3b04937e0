//! Inspects a checkpoint without changing it, for `checkpoint dump` and `checkpoint verify`: reads the bytes into memory and
//! opens those. Works beside a running daemon: each commit leaves the pages of the previous one in place, so that a copy is
//! complete if its checksums match; otherwise it is copied again.

use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasher, RandomState};
use std::io::Read;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use serde::Serialize;

use super::format::{self, Dump, FORMAT_VERSION, LoadError, Meta, Skipped};
use super::upgrade::UPGRADES;
use super::{ReadError, file, writer};
use nodedock_model::{ClaimRecord, ClaimValues, PodAllocation, PodRecord};

/// Attempts to copy a file that changes meanwhile; each takes a few milliseconds.
const ATTEMPTS: u32 = 8;
/// Bytes that are read into memory: room for more than 100,000 claims.
const FILE_BYTES_MAX: u64 = 1 << 30;

/// Integrity of a file's pages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Integrity {
    /// Closed properly, and every checksum matches.
    Clean,
    /// Open in a daemon or left by a crash; every checksum matches, and the next open repairs the rest.
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
    /// Pods with devices of extended resources.
    pub allocations: usize,
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
    findings.extend(given_twice(&dump.allocations));
    findings.extend(without_claim(&dump.claims, &dump.values));
    Ok(Report {
        integrity,
        meta: dump.meta,
        bytes,
        claims: dump.claims.len(),
        pods: dump.pods.len(),
        released: dump.released.len(),
        allocations: dump.allocations.len(),
        values: dump.values.len(),
        skipped: dump.skipped,
        unreadable: dump.unreadable,
        findings,
    })
}

/// Returns the state of a file's pages, its content and its size.
fn copy(path: &Path) -> Result<(Integrity, Dump, u64), ReadError> {
    let (hasher, mut reason) = (RandomState::new(), String::new());
    for _ in 0..ATTEMPTS {
        let bytes = bytes_of(path)?;
        let (length, before) = (bytes.len() as u64, hasher.hash_one(&bytes));
        match open_copy(bytes) {
            Ok((integrity, dump)) => return Ok((integrity, dump, length)),
            Err(LoadError::Newer { found, written_by }) => {
                let path = path.to_owned();
                return Err(ReadError::Newer { path, found, known: FORMAT_VERSION, written_by });
            }
            Err(LoadError::Older { found, written_by }) => {
                return Err(ReadError::Older { path: path.to_owned(), found, written_by });
            }
            Err(LoadError::Foreign(why)) => reason = why,
            Err(LoadError::Storage(error)) => reason = error.to_string(),
        }
        // Unchanged bytes need no second attempt.
        if hasher.hash_one(bytes_of(path)?) == before {
            return Err(ReadError::Damaged { path: path.to_owned(), reason });
        }
    }
    tracing::debug!(%reason, "no copy of the checkpoint was whole");
    Err(ReadError::Busy { path: path.to_owned(), attempts: ATTEMPTS })
}

fn bytes_of(path: &Path) -> Result<Vec<u8>, ReadError> {
    let io = |source| ReadError::Io { path: path.to_owned(), source };
    let file = std::fs::File::open(path).map_err(io)?;
    let length = file.metadata().map_err(io)?.len();
    if length > FILE_BYTES_MAX {
        let path = path.to_owned();
        return Err(ReadError::TooLarge { path, bytes: length, max: FILE_BYTES_MAX });
    }
    let mut bytes = Vec::with_capacity(usize::try_from(length).unwrap_or_default());
    file.take(length).read_to_end(&mut bytes).map_err(io)?;
    Ok(bytes)
}

fn open_copy(bytes: Vec<u8>) -> Result<(Integrity, Dump), LoadError> {
    if bytes.is_empty() {
        return Err(LoadError::Foreign("it is empty".to_owned()));
    }
    let closed = was_closed(&bytes);
    catch_unwind(AssertUnwindSafe(|| {
        let mut database = file::open_bytes(bytes)?;
        let integrity = match database.check_integrity()? {
            true if closed => Integrity::Clean,
            true => Integrity::NotClosed,
            false => Integrity::Damaged("the pages in use are not those that were recorded".to_owned()),
        };
        let nothing = || LoadError::Foreign("it has no tables".to_owned());
        let meta = format::load_meta(&database)?.ok_or_else(nothing)?;
        // An older file is upgraded in memory, and reported with its own format.
        format::sign(&database, Some(&meta), &UPGRADES)?;
        let dump = format::load(&database, UPGRADES.records)?.ok_or_else(nothing)?;
        Ok((integrity, Dump { meta, ..dump }))
    }))
    .unwrap_or_else(|panic| Err(LoadError::Foreign(writer::panic_text(&*panic))))
}

/// Returns whether redb's header says that the file was closed properly: byte 9, bit 1 is "recovery required" (redb, docs/design.md).
fn was_closed(bytes: &[u8]) -> bool {
    bytes.get(9).is_some_and(|flags| flags & 2 == 0)
}

/// Returns inconsistent references between records.
fn disagreements(claims: &[ClaimRecord], pods: &[PodRecord]) -> Vec<String> {
    let claim_uids: HashSet<_> = claims.iter().map(|claim| &claim.id.uid).collect();
    let pod_uids: HashSet<_> = pods.iter().map(|pod| &pod.pod.uid).collect();
    let mut findings = Vec::new();
    for pod in pods {
        for claim in pod.claims.values().filter(|claim| !claim_uids.contains(&claim.uid)) {
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
    let lost = values.iter().map(|kept| &kept.id).filter(|id| !known.contains(&id.uid));
    lost.map(|id| {
        format!("values below /sys are stored for the claim {id} ({}), which has no record", id.uid)
    })
    .collect()
}

/// Returns devices of an extended resource that are allocated to more than one pod.
fn given_twice(allocations: &[PodAllocation]) -> Vec<String> {
    let mut owners = HashMap::new();
    let mut findings = Vec::new();
    for allocation in allocations {
        for entry in &allocation.entries {
            for device in entry.devices.keys() {
                let other = *owners.entry((&entry.resource, device)).or_insert(&allocation.pod);
                if other.uid != allocation.pod.uid {
                    findings.push(format!(
                        "the device {device:?} of {} is allocated to the pod {other} ({}) and to the pod {} ({})",
                        entry.resource, other.uid, allocation.pod, allocation.pod.uid
                    ));
                }
            }
        }
    }
    findings
}
