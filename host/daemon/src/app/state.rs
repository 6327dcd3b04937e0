//! The node's state at a start: the checkpoint, or after its loss the claims in the CDI files. Defects are conditions until the next start.

use std::path::Path;

use anyhow::{Context, Result};

use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_core::cdi::{self, CdiDir, Rebuilt};
use nodedock_core::checkpoint::{self, Change, Dump, Opened, Skipped};
use nodedock_core::manager::claims::machine;
use nodedock_model::{ClaimRecord, Problem, ProblemCode};

/// Keys of unreadable records that a condition names; the log has all of them.
const KEYS_NAMED_MAX: usize = 8;

/// Result of the recovery from CDI files at a start.
#[derive(Default, PartialEq, Eq)]
struct Recovered {
    claims: usize,
    /// Files of ours that gave no claim.
    unusable: usize,
}

/// Opens the checkpoint, and recovers claims from CDI files if it is new, or a previous start died before it had written them. In any
/// other checkpoint, a file without a claim is one whose removal a power loss undid. `settle` decides on the node's name.
pub(super) fn open(
    path: &Path,
    cdi: &CdiDir,
    conditions: &Conditions,
    settle: impl FnOnce(&mut Dump) -> Result<Vec<Change>>,
) -> Result<Opened> {
    let mut recovered = Recovered::default();
    let opened = checkpoint::open_or_recover(
        path,
        || {
            let (claims, unusable) = recover(cdi)?;
            recovered = Recovered {
                claims: claims.len(),
                unusable,
            };
            anyhow::Ok(claims)
        },
        settle,
    )?;
    tracing::info!(
        claims = opened.dump.claims.len(),
        pods = opened.dump.pods.len(),
        "checkpoint open"
    );
    report(path, &opened, &recovered, conditions);
    Ok(opened)
}

/// Reads claims from the CDI specs, so that running pods keep their devices and can be unprepared. Returns also the number of our files
/// from which no claim could be read.
fn recover(cdi: &CdiDir) -> Result<(Vec<ClaimRecord>, usize)> {
    let Rebuilt { claims, unusable } = cdi::rebuild(
        cdi.list_ours()
            .context("read the CDI files for lost claims")?,
    );
    for (file, error) in &unusable {
        tracing::error!(
            file,
            error = chain(error),
            "a cdi file gives no claim back; it stays"
        );
    }
    let mut claims: Vec<_> = claims.into_values().collect();
    for record in &mut claims {
        // Where a file has no holds, there is nothing beside the devices: each is held exclusively unless it is a share.
        let devices = machine::holds(&record.allocation, |_, _, _| {
            machine::DeviceFacts::default()
        });
        let devices: Vec<_> = devices
            .into_iter()
            .filter(|hold| record.holds.iter().all(|known| known.key != hold.key))
            .collect();
        record.holds.extend(devices);
    }
    Ok((claims, unusable.len()))
}

fn report(path: &Path, opened: &Opened, recovered: &Recovered, conditions: &Conditions) {
    let (subject, what) = (path.display().to_string(), describe(recovered));
    if let Some(aside) = &opened.set_aside {
        let message = format!(
            "the checkpoint could not be read ({}) and is set aside; {what}",
            aside.reason
        );
        conditions.set(
            &aside.path.display().to_string(),
            Problem::internal(ProblemCode::CheckpointSetAside, message),
        );
    } else if *recovered != Recovered::default() {
        let message = format!("the checkpoint was missing, or had no record; {what}");
        conditions.set(
            &subject,
            Problem::internal(ProblemCode::CheckpointMissing, message),
        );
    }
    if !opened.dump.skipped.is_empty() {
        conditions.set(&subject, unreadable(&opened.dump.skipped));
    }
}

fn describe(recovered: &Recovered) -> String {
    let claims = format!("{} claims were taken back from CDI files", recovered.claims);
    match recovered.unusable {
        0 => claims,
        files => format!("{claims}, and {files} of our files there gave none"),
    }
}

fn unreadable(skipped: &[Skipped]) -> Problem {
    for record in skipped {
        let Skipped {
            table, key, reason, ..
        } = record;
        tracing::error!(%table, key, reason, "a record of the checkpoint is unreadable and stays in the file");
    }
    let keys = skipped
        .iter()
        .take(KEYS_NAMED_MAX)
        .map(|record| format!("{}/{}", record.table, record.key));
    let mut keys = keys.collect::<Vec<_>>().join(", ");
    if let Some(more) = skipped.len().checked_sub(KEYS_NAMED_MAX + 1) {
        keys.push_str(&format!(" and {} more", more + 1));
    }
    let message = format!(
        "{} records of the checkpoint are unreadable and stay in the file: {keys}",
        skipped.len()
    );
    Problem::internal(ProblemCode::CheckpointRecordsUnreadable, message)
        .with("count", skipped.len())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use nodedock_core::checkpoint::{Change, Table};
    use nodedock_model::{
        AllocatedDevice, ClaimState, DeviceAccess, DeviceName, DriverName, DriverPart, Edits,
        ObjectRef, PoolName, PreparedClaim, PreparedDevice,
    };

    #[test]
    fn unreadable_records_are_counted() {
        let record = |n: usize| Skipped {
            table: Table::Pods,
            key: format!("uid-{n}"),
            reason: "EOF".to_owned(),
            bytes: 0,
        };
        let records: Vec<_> = (1..=10).map(record).collect();
        let few = unreadable(&records[..8]).message;
        assert!(
            few.starts_with("8 records") && few.ends_with("pods/uid-7, pods/uid-8"),
            "{few}"
        );
        let many = unreadable(&records).message;
        assert!(
            many.starts_with("10 records") && many.ends_with("pods/uid-8 and 2 more"),
            "{many}"
        );
    }

    #[tokio::test]
    async fn start_defects_become_conditions() {
        let (directory, conditions) = (tempfile::tempdir().unwrap(), Conditions::default());
        let path = directory.path().join("checkpoint.db");
        let cdi = CdiDir::open(&directory.path().join("cdi"), &[], "test").unwrap();
        let mut opened = open(&path, &cdi, &conditions, |_| Ok(Vec::new())).unwrap();
        assert_eq!(conditions.list(), [], "a first start is no loss");

        let aside = directory.path().join("aside");
        opened.set_aside = Some(checkpoint::SetAside {
            path: aside.clone(),
            reason: "bad magic".to_owned(),
        });
        let (table, key, reason) = (Table::Claims, "uid-1".to_owned(), "EOF".to_owned());
        opened.dump.skipped.push(Skipped {
            table,
            key,
            reason,
            bytes: 0,
        });
        report(
            &path,
            &opened,
            &Recovered {
                claims: 2,
                unusable: 1,
            },
            &conditions,
        );
        let found: Vec<_> = conditions
            .list()
            .into_iter()
            .map(|c| (c.subject, c.problem.code))
            .collect();
        let subject = |path: &Path| path.display().to_string();
        let expected = [
            (subject(&path), "checkpoint-records-unreadable".to_owned()),
            (subject(&aside), "checkpoint-set-aside".to_owned()),
        ];
        assert_eq!(found, expected);
        let message = &conditions.list()[1].problem.message;
        assert!(
            message.contains("bad magic") && message.contains("2 claims"),
            "{message}"
        );
    }

    #[tokio::test]
    async fn claims_are_recovered_only_once() {
        let (directory, conditions) = (tempfile::tempdir().unwrap(), Conditions::default());
        let path = directory.path().join("checkpoint.db");
        let cdi = CdiDir::open(&directory.path().join("cdi"), &[], "test").unwrap();
        cdi.write(cdi::render(&prepared()).unwrap()).await.unwrap();
        for claims in [1, 0] {
            let opened = open(&path, &cdi, &conditions, |_| Ok(Vec::new())).unwrap();
            assert_eq!(opened.dump.claims.len(), claims);
            let changes = opened
                .dump
                .claims
                .iter()
                .map(|claim| Change::DeleteClaim(claim.id.uid.clone()));
            opened.checkpoint.commit(changes.collect()).await.unwrap();
            opened.checkpoint.close().await;
        }
        std::fs::remove_file(&path).unwrap();
        assert_eq!(
            open(&path, &cdi, &conditions, |_| Ok(Vec::new()))
                .unwrap()
                .dump
                .claims
                .len(),
            1
        );
    }

    #[tokio::test]
    async fn checkpoint_with_records_recovers_nothing() {
        let (directory, conditions) = (tempfile::tempdir().unwrap(), Conditions::default());
        let path = directory.path().join("checkpoint.db");
        let cdi = CdiDir::open(&directory.path().join("cdi"), &[], "test").unwrap();
        let (record, uid) = (prepared(), prepared().id.uid);
        cdi.write(cdi::render(&record).unwrap()).await.unwrap();
        // As a start leaves it whose first commit failed: without the mark.
        let first = checkpoint::open(&path).unwrap().checkpoint;
        first
            .commit(vec![Change::PutClaim(record.into())])
            .await
            .unwrap();
        first.close().await;
        let opened = open(&path, &cdi, &conditions, |_| Ok(Vec::new())).unwrap();
        opened
            .checkpoint
            .commit(vec![Change::DeleteClaim(uid)])
            .await
            .unwrap();
        opened.checkpoint.close().await;
        assert!(
            open(&path, &cdi, &conditions, |_| Ok(Vec::new()))
                .unwrap()
                .dump
                .claims
                .is_empty()
        );
        assert_eq!(conditions.list(), []);
    }

    #[tokio::test]
    async fn recovered_claim_retains_device_uses() {
        let directory = tempfile::tempdir().unwrap();
        let cdi = CdiDir::open(&directory.path().join("cdi"), &[], "test").unwrap();
        let driver = DriverName::new("gpu.example.com").unwrap();
        let facts = |_: &DriverName, _: &str, _: &str| {
            let identity = vec!["pci:0000:3b:00.0".to_owned()];
            let counter = machine::CounterFacts {
                set: "set".to_owned(),
                counter: "memory".to_owned(),
                amount: "1Gi".to_owned(),
                whole: "8Gi".to_owned(),
            };
            machine::DeviceFacts {
                identity,
                counters: vec![counter],
                ..machine::DeviceFacts::default()
            }
        };
        let allocated: AllocatedDevice = serde_json::from_value(serde_json::json!({
            "request": "gpu", "driver": driver, "pool": "pool", "device": "gpu-0",
        }))
        .unwrap();
        let mut record = prepared();
        record.allocation.devices = vec![allocated];
        for (facts, keys) in [(Some(facts), 2), (None, 1)] {
            let facts =
                |a: &DriverName, b: &str, c: &str| facts.map(|of| of(a, b, c)).unwrap_or_default();
            record.holds = machine::holds(&record.allocation, facts);
            assert_eq!(record.holds.len(), keys);
            cdi.write(cdi::render(&record).unwrap()).await.unwrap();
            let mut recovered = recover(&cdi).unwrap().0.remove(0).holds;
            recovered.sort_by(|a, b| a.key.cmp(&b.key));
            assert_eq!(recovered, record.holds);
        }
    }

    fn prepared() -> ClaimRecord {
        let id = ObjectRef::new("default", "one", "uid-one").unwrap();
        let (driver, edits) = (
            DriverName::new("gpu.example.com").unwrap(),
            Edits::default(),
        );
        let device = PreparedDevice {
            requests: vec!["gpu".to_owned()],
            pool: PoolName::new("pool").unwrap(),
            device: DeviceName::new("gpu-0").unwrap(),
            share_id: None,
            access: DeviceAccess::Edits(edits),
            status: None,
            attributes: None,
        };
        let result = PreparedClaim {
            devices: vec![device],
            ..PreparedClaim::default()
        };
        let mut record = ClaimRecord::new(id, ClaimState::Prepared, "boot");
        let part = DriverPart {
            prepared: Some(Arc::new(result)),
            ..DriverPart::default()
        };
        record.drivers.insert(driver, Box::new(part));
        record
    }

    #[test]
    fn unusable_files_are_counted() {
        assert_eq!(
            describe(&Recovered {
                claims: 2,
                unusable: 0
            }),
            "2 claims were taken back from CDI files"
        );
        let nothing = "0 claims were taken back from CDI files, and 1 of our files there gave none";
        assert_eq!(
            describe(&Recovered {
                claims: 0,
                unusable: 1
            }),
            nothing
        );
    }
}
