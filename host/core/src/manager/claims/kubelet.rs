//! Requests of a kubelet: each driver's part of a claim by itself, at any time. The rest of the way is that of pods.
//!
//! # Claims of a kubelet
//!
//! A kubelet names no pods and calls each driver separately, so it uses a claim part by part, beside pods or without them.
//!
//! - The kubelet gets a part when that part is prepared, independently of the others.
//! - An unprepared part is passed to its driver at once and its CDI file is removed. The claim is removed with the last part that has a user.
//! - A prepare of a part that is leaving waits for it, as a prepare of a whole claim does.
//! - The claim is read from its source for each prepare. If the source is unreachable, the cached claim is used, since an allocation is final. If the
//!   source says that the claim is gone or another one, that is final. An unprepare needs no source.
//! - A claim for which a scheduler waits is prepared early, before a kubelet knows it. The kubelet's own request then finds it prepared. Until then
//!   `unprepare_early` releases it.
//! - The reconciler reports claims whose pods or objects are gone; the manager then unprepares them for the kubelet.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::log::{EndedRequest, User};
use super::machine::{self, Holder, UnprepareRequest};
use super::metrics::{ClaimMetrics, PREPARE, UNPREPARE};
use super::prepare::Prepares;
use super::retries::Retries;
use super::source::{ClaimSource, check_bounds};
use super::unprepare::Unprepares;
use crate::cdi;
use crate::driver::NodeFacts;
use crate::manager::claims::handles::Handles;
use crate::manager::request::{complete, interrupted};
use crate::records::RecordStore;
use nodedock_base::locks::Locks;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    Claim, ClaimRecord, DriverName, KubeletClaim, KubeletDevice, ObjectRef, PreparedForKubelet,
    Problem, ProblemCode, Uid,
};

/// Deadline of reading a claim for a kubelet, which waits 45 s for a prepare: after it the cached claim is used, or the kubelet retries.
const CLAIM_SOURCE_WAIT: Duration = Duration::from_secs(10);

/// The number of the last request to prepare each claim, counted since the start: a claim is not unprepared for a kubelet that has
/// requested it again meanwhile.
#[derive(Debug, Default)]
struct KubeletRequests {
    count: u64,
    last: BTreeMap<Uid, u64>,
}

impl KubeletRequests {
    fn note(&mut self, claim: &Uid) {
        self.count += 1;
        self.last.insert(claim.clone(), self.count);
    }
}

/// The owner of the requests of kubelets.
pub struct KubeletClaims {
    records: Arc<RecordStore>,
    prepares: Arc<Prepares>,
    unprepares: Arc<Unprepares>,
    retries: Arc<Retries>,
    source: Arc<dyn ClaimSource>,
    /// A claim's allocation must fit the node's name.
    node: NodeFacts,
    tasks: Tasks,
    metrics: Arc<ClaimMetrics>,
    /// One request at a time for a driver's part of a claim.
    part_locks: Locks<(Uid, DriverName)>,
    requests: Mutex<KubeletRequests>,
}

impl KubeletClaims {
    pub(in crate::manager) fn new(
        handles: &Handles,
        prepares: Arc<Prepares>,
        unprepares: Arc<Unprepares>,
        source: Arc<dyn ClaimSource>,
        node: NodeFacts,
    ) -> Self {
        Self {
            records: handles.records.clone(),
            prepares,
            unprepares,
            retries: handles.retries.clone(),
            source,
            node,
            tasks: handles.tasks.clone(),
            metrics: handles.metrics.clone(),
            part_locks: Locks::default(),
            requests: Mutex::default(),
        }
    }

    /// Prepares one driver's part of a claim for a kubelet. Returns no devices if the claim has none of the driver. Not cancelled when
    /// the future is dropped.
    pub async fn prepare(
        self: &Arc<Self>,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<Vec<KubeletDevice>, Problem> {
        Ok(self
            .prepare_part(driver, PartOf::Named(claim.clone()), request_id)
            .await?
            .devices)
    }

    /// The same for a claim that no API server knows, such as one for devices that a kubelet allocates through a device plugin.
    /// `held` leaves it out.
    pub async fn prepare_given(
        self: &Arc<Self>,
        driver: &DriverName,
        claim: Claim,
        request_id: Arc<str>,
    ) -> Result<PreparedForKubelet, Problem> {
        self.prepare_part(driver, PartOf::Given(claim), request_id)
            .await
    }

    /// Prepares one driver's part of a claim of the API server that no kubelet has requested yet. `claim` was read a moment ago. Not
    /// cancelled when the future is dropped.
    pub async fn prepare_early(
        self: &Arc<Self>,
        driver: &DriverName,
        claim: Claim,
        request_id: Arc<str>,
    ) -> Result<(), Problem> {
        self.prepare_part(driver, PartOf::Early(claim), request_id)
            .await
            .map(drop)
    }

    async fn prepare_part(
        self: &Arc<Self>,
        driver: &DriverName,
        claim: PartOf,
        request_id: Arc<str>,
    ) -> Result<PreparedForKubelet, Problem> {
        let (kubelet, driver) = (self.clone(), driver.clone());
        complete(&self.tasks, "kubelet", async move {
            let (started, id) = (Instant::now(), claim.id().clone());
            let outcome = kubelet
                .prepare_locked_part(&driver, claim, request_id.clone())
                .await;
            kubelet.metrics.observe(PREPARE, started, outcome.is_err());
            let record = kubelet.records.table().claim(id.uid.as_str()).cloned();
            let ended = EndedRequest {
                claim: &id,
                user: User::Consumers(record.as_deref()),
                allocation: record.as_deref().map(|record| &record.allocation),
                part: Some(&driver),
                started,
                request: &request_id,
            };
            ended.log_prepare(outcome.as_ref().map(|_| ()));
            outcome
        })
        .await
    }

    async fn prepare_locked_part(
        &self,
        driver: &DriverName,
        claim: PartOf,
        request_id: Arc<str>,
    ) -> Result<PreparedForKubelet, Problem> {
        // Also while it waits for a device: an unprepare that comes meanwhile has to find what this request takes.
        let _part = self
            .part_locks
            .take([(claim.id().uid.clone(), driver.clone())])
            .await;
        let (holder, claim) = match claim {
            PartOf::Named(id) => {
                self.requests.lock().note(&id.uid);
                (
                    Holder::Kubelet {
                        driver,
                        given: false,
                    },
                    self.claim_for_kubelet(driver, &id).await?,
                )
            }
            PartOf::Given(claim) => {
                self.requests.lock().note(&claim.id.uid);
                (
                    Holder::Kubelet {
                        driver,
                        given: true,
                    },
                    claim,
                )
            }
            PartOf::Early(claim) => {
                self.requests.lock().note(&claim.id.uid);
                (Holder::Early { driver }, claim)
            }
        };
        check_bounds(&claim)?;
        let allocation = machine::admit_for_kubelet(&claim, &self.node.name)?;
        if !allocation.has_driver(driver) {
            return Ok(PreparedForKubelet::default());
        }
        let record = self.prepares.prepare_one(holder, claim, request_id).await?;
        answer(&record, driver).ok_or_else(interrupted)
    }

    /// The claim as its source has it, or as its record has it if the source cannot be read.
    async fn claim_for_kubelet(
        &self,
        driver: &DriverName,
        wanted: &ObjectRef,
    ) -> Result<Claim, Problem> {
        let reading = self
            .source
            .claim_with_uid(&wanted.namespace, &wanted.name, &wanted.uid);
        let read = tokio::time::timeout(CLAIM_SOURCE_WAIT, reading).await;
        let problem = match read.unwrap_or_else(|_| Err(source_slow(wanted))) {
            Ok(Some(claim)) if claim.id.uid == wanted.uid => return Ok(claim),
            Ok(Some(claim)) => return Err(machine::other_uid(wanted, &claim.id.uid, &wanted.uid)),
            Ok(None) => return Err(no_claim(wanted)),
            Err(problem) => problem,
        };
        let known = self.records.table().claim(wanted.uid.as_str()).cloned();
        // A record that was rebuilt from CDI files names the devices of some drivers only: it does not say that this one has none.
        let known = known.filter(|record| record.allocation.has_driver(driver));
        let claim = machine::known_claim(known.as_deref(), wanted, problem.clone())?;
        tracing::warn!(claim = %wanted, %problem, "a claim that cannot be read is taken from its record");
        Ok(claim)
    }

    /// Unprepares one driver's part of a claim, by the claim's UID and from the checkpoint alone; an unknown claim is success. An
    /// unprepare that fails is retried, by the kubelet and by the kubelet. Not cancelled when the future is dropped.
    pub async fn unprepare(
        self: &Arc<Self>,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<(), Problem> {
        let (kubelet, driver, uid) = (self.clone(), driver.clone(), claim.uid.clone());
        complete(&self.tasks, "kubelet", async move {
            let started = Instant::now();
            let _part = kubelet
                .part_locks
                .take([(uid.clone(), driver.clone())])
                .await;
            let by = UnprepareRequest::Kubelet {
                driver: Some(&driver),
                cause: "unprepare kubelet",
            };
            let end = kubelet
                .unprepares
                .unprepare_one_claim(&uid, by, request_id)
                .await;
            // The next prepare calls the driver again.
            kubelet.retries.clear_prepare(&uid, &driver);
            kubelet.metrics.observe(UNPREPARE, started, end.is_err());
            end
        })
        .await
    }

    /// Unprepares every part of a claim that a kubelet holds and will not unprepare itself: the claim's object or its consumers are gone.
    /// `why` goes into the claim's history. Fails if the kubelet requested the claim after `seen`, or if some driver failed; the latter is
    /// retried. Not cancelled when the future is dropped.
    pub async fn unprepare_all(
        self: &Arc<Self>,
        seen: &KubeletClaim,
        why: &str,
    ) -> Result<(), Problem> {
        self.unprepare_parts(&seen.claim.uid, why, Some(seen.clone()))
            .await
    }

    /// The same for a claim that was prepared early. Does nothing once a kubelet has requested it.
    pub async fn unprepare_early(self: &Arc<Self>, claim: &Uid, why: &str) -> Result<(), Problem> {
        self.unprepare_parts(claim, why, None).await
    }

    /// `seen`: the claim as a kubelet held it. `None`: it was prepared early.
    async fn unprepare_parts(
        self: &Arc<Self>,
        claim: &Uid,
        why: &str,
        seen: Option<KubeletClaim>,
    ) -> Result<(), Problem> {
        let (kubelet, uid, why) = (self.clone(), claim.clone(), why.to_owned());
        complete(&self.tasks, "kubelet", async move {
            let record = kubelet.records.table().claim(uid.as_str()).cloned();
            let drivers: Vec<_> = record
                .iter()
                .flat_map(|record| record.drivers.keys())
                .cloned()
                .collect();
            let parts = drivers.iter().map(|driver| (uid.clone(), driver.clone()));
            let _parts = kubelet.part_locks.take(parts).await;
            if let Some(seen) = &seen
                && kubelet.held_claim(&uid).is_some_and(|now| now != *seen)
            {
                return Err(used_again(&seen.claim));
            }
            let by = match seen {
                None => UnprepareRequest::Early { cause: &why },
                Some(_) => UnprepareRequest::Kubelet {
                    driver: None,
                    cause: &why,
                },
            };
            let end = kubelet
                .unprepares
                .unprepare_one_claim(&uid, by, format!("unprepare-{uid}").into())
                .await;
            drivers
                .iter()
                .for_each(|driver| kubelet.retries.clear_prepare(&uid, driver));
            end
        })
        .await
    }

    /// Claims of the API server of which a kubelet holds parts, by UID.
    pub fn held(&self) -> Vec<KubeletClaim> {
        let table = self.records.table();
        let mut requests = self.requests.lock();
        requests
            .last
            .retain(|uid, _| table.claim(uid.as_str()).is_some());
        table
            .claims()
            .filter_map(|record| kubelet_claim(record, &requests))
            .collect()
    }

    /// Claims of the API server of which a kubelet holds a driver's part since an earlier boot, and has not had it prepared in this one.
    pub fn held_since_earlier_boot(&self, driver: &DriverName) -> Vec<Arc<ClaimRecord>> {
        let is_held = |record: &&Arc<ClaimRecord>| {
            let is_of_api = record.kubelet.as_ref().is_some_and(|hold| !hold.given);
            let part = record.drivers.get(driver).filter(|part| part.kubelet);
            is_of_api && part.is_some_and(|part| part.stale || record.boot_id != self.node.boot_id)
        };
        let table = self.records.table();
        table
            .claims_of_driver(driver)
            .filter(is_held)
            .cloned()
            .collect()
    }

    /// The claim, if it is of the API server and a kubelet holds parts of it.
    pub fn held_claim(&self, uid: &Uid) -> Option<KubeletClaim> {
        let record = self.records.table().claim(uid.as_str()).cloned()?;
        kubelet_claim(&record, &self.requests.lock())
    }
}

/// The claim of a request for one driver's part.
enum PartOf {
    /// Request of a kubelet, which gives the claim's name.
    Named(ObjectRef),
    /// Request of a kubelet's device manager: there is no object.
    Given(Claim),
    /// Request before a kubelet knows the claim.
    Early(Claim),
}

impl PartOf {
    fn id(&self) -> &ObjectRef {
        match self {
            Self::Named(id) => id,
            Self::Given(claim) | Self::Early(claim) => &claim.id,
        }
    }
}

/// Returns the answer to a kubelet for a driver's part.
fn answer(record: &ClaimRecord, driver: &DriverName) -> Option<PreparedForKubelet> {
    let prepared = record.drivers.get(driver)?.current()?;
    let devices = cdi::cdi_devices(record, driver)
        .into_iter()
        .map(|(device, cdi)| KubeletDevice {
            requests: device.requests.clone(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            cdi,
            share_id: device.share_id.clone(),
        });
    Some(PreparedForKubelet {
        devices: devices.collect(),
        annotations: prepared.annotations.clone(),
    })
}

/// The parts of a claim that a kubelet holds, if there are any and the claim is of the API server.
fn kubelet_claim(record: &ClaimRecord, requests: &KubeletRequests) -> Option<KubeletClaim> {
    let hold = record
        .kubelet
        .as_ref()
        .filter(|_| record.is_held_by_api_kubelet())?;
    let drivers = record.kubelet_drivers().cloned().collect();
    let (claim, consumers) = (record.id.clone(), hold.consumers.clone());
    let last_request = requests.last.get(&claim.uid).copied();
    let (since_ms, early) = (hold.since_ms, hold.early);
    Some(KubeletClaim {
        claim,
        drivers,
        consumers,
        since_ms,
        last_request,
        early,
    })
}

fn no_claim(wanted: &ObjectRef) -> Problem {
    let message = format!("claim {wanted} (UID {}) does not exist", wanted.uid);
    Problem::not_found(ProblemCode::NoSuchClaim, message)
}

fn used_again(claim: &ObjectRef) -> Problem {
    let message = format!(
        "claim {claim} (UID {}): the kubelet requested it again meanwhile",
        claim.uid
    );
    Problem::conflict(ProblemCode::ClaimInUse, message)
}

fn source_slow(wanted: &ObjectRef) -> Problem {
    let seconds = CLAIM_SOURCE_WAIT.as_secs();
    Problem::unavailable(
        ProblemCode::ClaimNotRead,
        format!("claim {wanted} was not read within {seconds} s"),
    )
}
