//! A daemon with a driver, and what its pods know: what they were answered must hold after any crash.

use std::collections::BTreeMap;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use nodedock_model::ClaimRecord;
use nodedock_proto::node::v1;
use nodedock_tests::agreement::driver_agrees;
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::{Daemon, Root};
use scripted::POOL;

use crate::driver::{Driver, serves};

/// A pod's knowledge of its claims.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Known {
    /// It was answered this.
    Prepared(v1::PreparePodResponse),
    Gone,
    /// A call was under way when the daemon died.
    Unknown,
}

pub(crate) struct Scene<D> {
    pub(crate) daemon: Daemon,
    pub(crate) driver: D,
    /// Knowledge by pod name.
    pub(crate) known: BTreeMap<String, Known>,
    /// Time from the start of the process until it is ready, of each restart so far.
    pub(crate) restarts: Vec<Duration>,
}

/// A request for claims by name, each for the device of its name.
pub(crate) fn request_of<D: Driver>(
    name: &str,
    claims: &[impl AsRef<str>],
) -> v1::PreparePodRequest {
    let claims = claims.iter().map(AsRef::as_ref);
    let claims: Vec<_> = claims
        .map(|name| claim(name, &[&format!("{}/{POOL}/{name}", D::NAME)]))
        .collect();
    request(&pod(name), &claims.iter().collect::<Vec<_>>())
}

/// Checks that a test's crash ended the daemon; it never crashes otherwise.
#[track_caller]
pub(crate) fn assert_killed(status: ExitStatus) {
    assert_eq!(
        status.signal(),
        Some(9),
        "the daemon ended by itself: {status}"
    );
}

impl<D: Driver> Scene<D> {
    pub(crate) async fn start() -> Self {
        let root = Root::new();
        let driver = D::new(&root);
        let daemon = Daemon::start_on(root, nodedock_tests::Options::default()).await;
        serves::<D>(&daemon).await;
        Self {
            daemon,
            driver,
            known: BTreeMap::new(),
            restarts: Vec::new(),
        }
    }

    /// Starts a daemon that ended, and checks everything.
    pub(crate) async fn restart(&mut self) {
        let started = Instant::now();
        self.daemon.run().await;
        self.restarts.push(started.elapsed());
        serves::<D>(&self.daemon).await;
        self.check().await;
    }

    /// Driver, checkpoint, CDI directory and answers agree with one another and with what the pods know.
    pub(crate) async fn check(&mut self) {
        let records = self.daemon.agrees().await;
        driver_agrees(&records, &self.driver.held(&self.daemon));
        for (name, known) in &self.known {
            match known {
                Known::Prepared(answer) => self.check_prepared(name, answer, &records).await,
                Known::Gone => check_gone(name, &records),
                Known::Unknown => {}
            }
        }
    }

    async fn check_prepared(
        &self,
        name: &str,
        answer: &v1::PreparePodResponse,
        records: &[ClaimRecord],
    ) {
        for claim in &answer.claims {
            let uid = &claim.id.as_ref().expect("an outcome has a claim").uid;
            let record = records.iter().find(|record| record.id.uid.as_str() == uid);
            let record =
                record.unwrap_or_else(|| panic!("{uid} was answered to {name} and is gone"));
            assert_eq!(
                record.state.as_str(),
                "prepared",
                "{uid} was answered to {name}"
            );
            assert!(
                record.pods.contains_key(pod(name).uid.as_str()),
                "{name} is not a pod of {record:?}"
            );
        }
        let again = self
            .daemon
            .pod_devices(&pod(name))
            .await
            .expect("a pod that holds claims is known");
        assert_eq!(
            by_claim(again),
            by_claim(answer.clone()),
            "{name} was answered otherwise"
        );
    }

    /// Every pod leaves, and nothing is left.
    pub(crate) async fn clean(&mut self) {
        for name in std::mem::take(&mut self.known).keys() {
            self.daemon.unprepare(&pod(name)).await;
        }
        // Then everything is at rest, and the driver's record is whole.
        self.check().await;
        self.daemon
            .holds_nothing(&self.driver.held(&self.daemon))
            .await;
    }

    /// Median and longest of the restarts.
    pub(crate) fn restart_times(&self) -> String {
        let mut times = self.restarts.clone();
        times.sort_unstable();
        let at = |index: usize| times.get(index).copied().unwrap_or_default();
        format!(
            "ready after {:.0?} (median), {:.0?} (longest)",
            at(times.len() / 2),
            at(times.len().saturating_sub(1))
        )
    }
}

/// Sorts an answer by the claims' UIDs, as claims are listed for a pod regardless of the order of its requests.
fn by_claim(mut answer: v1::PreparePodResponse) -> v1::PreparePodResponse {
    answer
        .claims
        .sort_by_key(|claim| claim.id.as_ref().map(|id| id.uid.clone()));
    answer
}

fn check_gone(name: &str, records: &[ClaimRecord]) {
    let held = records
        .iter()
        .find(|record| record.pods.contains_key(pod(name).uid.as_str()));
    assert!(
        held.is_none(),
        "{name} gave everything up, and holds {held:?}"
    );
}
