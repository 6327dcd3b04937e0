//! Checks that a daemon's answers, its checkpoint, the CDI directory and the calls of a driver agree about the claims: for the end of any
//! test, and after each crash.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_core::cdi;
use nodedock_core::checkpoint;
use nodedock_model::{ClaimRecord, ClaimState};
use nodedock_proto::node::v1;

use crate::until::until_path;
use crate::{NodeApi, Root};

/// A claim's state and the UIDs of its pods, by its UID.
type Standing = BTreeMap<String, (String, BTreeSet<String>)>;

impl NodeApi {
    /// Expects that the daemon, its checkpoint and the CDI directory agree, and gives what they say. What the daemon mends by itself
    /// is waited for: files that are lost or without an owner, and unprepares that were interrupted, whose drivers have to
    /// serve. No request may be under way.
    pub async fn agrees(&self) -> Vec<ClaimRecord> {
        let settled = |claims: &[v1::ClaimStatus]| {
            claims
                .iter()
                .all(|claim| claim.state != ClaimState::Unpreparing.as_str())
        };
        let listed = self
            .until_claims("no claim is being unprepared", settled)
            .await;
        let records = self.records();
        assert_eq!(
            standing_of_list(&listed),
            standing_of_records(&records),
            "the list and the checkpoint differ"
        );
        let files = Agreement(self);
        let agrees = || files.check_files(&records);
        until_path(
            &self.cdi(),
            "the CDI directory is as the checkpoint says",
            agrees,
        )
        .await;
        files.check_names().await;
        records
    }

    /// Expects that nothing is left of any claim: not here, and not with the driver, which was asked for `held`.
    pub async fn holds_nothing(&self, held: &BTreeSet<String>) {
        let records = self.agrees().await;
        assert!(records.is_empty(), "{records:#?}");
        assert_eq!((self.pods().await, self.cdi_files()), (vec![], vec![]));
        assert!(
            held.is_empty(),
            "the driver was never asked to unprepare {held:?}"
        );
    }
}

impl Root {
    /// Returns the records of the checkpoint after checking that it is whole and that its records agree with one another.
    pub fn records(&self) -> Vec<ClaimRecord> {
        let path = self.checkpoint();
        let report = checkpoint::verify(&path).expect("verify the checkpoint");
        assert!(report.is_good(), "{report:#?}");
        checkpoint::read(&path).expect("read the checkpoint").claims
    }
}

/// The CDI directory against what the daemon and its checkpoint say.
struct Agreement<'a>(&'a NodeApi);

impl Agreement<'_> {
    /// Each CDI name of ours that is reported to pods is in a file.
    async fn check_names(&self) {
        let files = self.0.cdi_files();
        let there: BTreeSet<_> = files
            .iter()
            .flat_map(crate::cdi::CdiFile::devices)
            .collect();
        for claim in self
            .0
            .claims()
            .await
            .iter()
            .filter(|claim| claim.state == ClaimState::Prepared.as_str())
        {
            let has_file = |driver: &&v1::ClaimDriver| !driver.digest.is_empty();
            for name in claim
                .drivers
                .iter()
                .filter(has_file)
                .flat_map(|driver| &driver.cdi_devices)
            {
                assert!(
                    there.contains(name),
                    "{name} is in no file, and {claim:?} names it"
                );
            }
        }
    }

    /// Checks that the directory has the files of all prepared claims, as they are rendered, and of no unknown claim. The error names the
    /// differences. A claim whose prepare or unprepare is not complete may already, or still, have its file.
    fn check_files(&self, records: &[ClaimRecord]) -> Result<(), String> {
        let files = self.0.cdi_files();
        let mut there: BTreeMap<_, _> = files
            .iter()
            .map(|file| (name_of(file), body(&file.text)))
            .collect();
        for record in records {
            if record.state == ClaimState::Prepared {
                for file in cdi::render(record).map_err(|error| error.to_string())? {
                    let wanted = String::from_utf8_lossy(&file.bytes);
                    let found = there
                        .remove(&file.name)
                        .ok_or(format!("{} is not there", file.name))?;
                    if found != body(&wanted) {
                        return Err(format!("{} says {found}, and not {wanted}", file.name));
                    }
                }
            } else {
                let drivers = record
                    .allocation
                    .devices
                    .iter()
                    .map(|device| &device.driver);
                for driver in drivers {
                    there.remove(&cdi::file_name(driver, &record.id.uid));
                }
            }
        }
        let left: Vec<_> = self.temporary_files();
        match there.is_empty() && left.is_empty() {
            true => Ok(()),
            false => Err(format!("no claim owns {:?} and {left:?}", there.keys())),
        }
    }

    fn temporary_files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.0.cdi()).expect("read the CDI directory");
        let names = entries.map(|entry| {
            entry
                .expect("read the CDI directory")
                .file_name()
                .to_string_lossy()
                .into_owned()
        });
        names.filter(|name| name.ends_with(".tmp")).collect()
    }
}

/// Expects that the checkpoint knows every claim that a driver was asked for, and that the driver was asked for every claim that
/// is prepared.
pub fn driver_agrees(records: &[ClaimRecord], held: &BTreeSet<String>) {
    let known: BTreeSet<_> = records
        .iter()
        .map(|record| record.id.uid.to_string())
        .collect();
    let forgotten: Vec<_> = held.difference(&known).collect();
    assert!(
        forgotten.is_empty(),
        "the driver holds {forgotten:?}, and the checkpoint knows only {known:?}"
    );
    let prepared = records
        .iter()
        .filter(|record| record.state == ClaimState::Prepared);
    let invented: Vec<_> = prepared
        .map(|record| record.id.uid.to_string())
        .filter(|uid| !held.contains(uid))
        .collect();
    assert!(
        invented.is_empty(),
        "{invented:?} are prepared, and the driver holds only {held:?}"
    );
}

fn standing_of_list(claims: &[v1::ClaimStatus]) -> Standing {
    let standing = |claim: &v1::ClaimStatus| {
        let pods = claim.pods.iter().map(|pod| pod.uid.clone()).collect();
        (
            claim.id.clone().unwrap_or_default().uid,
            (claim.state.clone(), pods),
        )
    };
    claims.iter().map(standing).collect()
}

fn standing_of_records(records: &[ClaimRecord]) -> Standing {
    let standing = |record: &ClaimRecord| {
        let pods = record.pods.keys().map(ToString::to_string).collect();
        (
            record.id.uid.to_string(),
            (record.state.as_str().to_owned(), pods),
        )
    };
    records.iter().map(standing).collect()
}

fn name_of(file: &crate::cdi::CdiFile) -> String {
    file.path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned()
}

/// Returns the text that runtimes read: the first line differs from daemon to daemon.
fn body(text: &str) -> &str {
    text.split_once('\n').map_or("", |(_, body)| body)
}
