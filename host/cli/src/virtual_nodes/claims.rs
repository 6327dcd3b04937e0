//! The claims that are allocated on virtual nodes: prepared in memory when a pod has reserved them, and unprepared when none has.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures::{StreamExt, stream};
use tokio::time::{Instant, sleep_until};

use super::Nodes;
use super::node::VirtualNode;
use nodedock_core::driver::{Call, ClaimDriver, validate_claims};
use nodedock_kube::claims::{ClaimEvent, watch_all};
use nodedock_kube::client::KubeClient;
use nodedock_kube::status::{Reported, Statuses};
use nodedock_model::{
    Allocation, Claim, ClaimRecord, ClaimState, ClaimStatuses, DriverClaim, DriverKind, DriverName,
    DriverPart, ObjectRef, PoolName, PreparedBy, Problem, ReportedDevice, Uid,
};
use nodedock_wasm::WasmDriver;

/// Claims that are prepared or unprepared at the same time.
const CLAIMS: usize = 8;
/// Events that are taken together: the newest state of a claim counts.
const EVENTS: usize = 1000;
/// Deadline of a driver's call.
const DEADLINE: Duration = Duration::from_secs(30);
/// Time after a refusal until a retry, as in a kubelet.
const RETRY: Duration = Duration::from_secs(60);

/// Number of claims that are prepared, and of prepares and unprepares that have been refused.
#[derive(Debug, Default)]
pub(super) struct ClaimCounts {
    prepared: AtomicU64,
    refused: AtomicU64,
}

impl ClaimCounts {
    pub(super) fn now(&self) -> (u64, u64) {
        (
            self.prepared.load(Ordering::Relaxed),
            self.refused.load(Ordering::Relaxed),
        )
    }
}

/// A claim of a node: prepared, or of a prepare that was refused and could not be undone.
struct Held {
    node: Arc<VirtualNode>,
    id: ObjectRef,
    /// Allocation with the names of pools that the API server has.
    allocation: Allocation,
    is_prepared: bool,
}

/// A change of a claim to process: the allocation that was held, and the claim, if it exists.
struct Work {
    uid: Uid,
    claim: Option<Claim>,
    held: Option<Held>,
}

struct Outcome {
    work: Work,
    is_done: bool,
}

/// Prepares and unprepares without end.
pub(super) async fn run(
    client: KubeClient,
    nodes: Nodes,
    statuses: Statuses,
    counts: Arc<ClaimCounts>,
) {
    let mut events = pin!(watch_all(&client).ready_chunks(EVENTS));
    let mut held: BTreeMap<Uid, Held> = BTreeMap::new();
    let mut retries: BTreeMap<Uid, (Instant, Option<Claim>)> = BTreeMap::new();
    loop {
        let retry = retries.values().map(|(at, _)| *at).min();
        let mut changed: BTreeMap<Uid, Option<Claim>> = BTreeMap::new();
        tokio::select! {
            Some(events) = events.next() => for event in events {
                take(event, held.keys().chain(retries.keys()), &mut changed);
            },
            () = sleep_until(retry.unwrap_or_else(Instant::now)), if retry.is_some() => {
                let now = Instant::now();
                let due = retries.iter().filter(|(_, (at, _))| *at <= now);
                changed.extend(due.map(|(uid, (_, claim))| (uid.clone(), claim.clone())));
            }
        }
        let work = changed.into_iter().map(|(uid, claim)| {
            retries.remove(&uid);
            Work {
                held: held.remove(&uid),
                uid,
                claim,
            }
        });
        let work: Vec<_> = work.collect();
        let outcomes = stream::iter(work)
            .map(|work| carry_out(&nodes, work))
            .buffer_unordered(CLAIMS);
        for Outcome { work, is_done } in outcomes.collect::<Vec<_>>().await {
            if !is_done {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                retries.insert(work.uid.clone(), (Instant::now() + RETRY, work.claim));
            }
            held.extend(work.held.map(|held| (work.uid, held)));
        }
        let prepared = held.values().filter(|held| held.is_prepared).count();
        counts.prepared.store(prepared as u64, Ordering::Relaxed);
        statuses.set(
            held.iter()
                .map(|(uid, held)| (uid.clone(), held.statuses()))
                .collect::<Reported>(),
        );
    }
}

/// Notes what an event changes; of several about a claim the last counts.
fn take<'a>(
    event: ClaimEvent,
    known: impl Iterator<Item = &'a Uid>,
    changed: &mut BTreeMap<Uid, Option<Claim>>,
) {
    match event {
        ClaimEvent::Is(claim) => drop(changed.insert(claim.id.uid.clone(), Some(*claim))),
        ClaimEvent::Gone(uid) => drop(changed.insert(uid, None)),
        ClaimEvent::Listed(all) => {
            let gone = known.filter(|uid| !all.contains(*uid));
            changed.extend(gone.map(|uid| (uid.clone(), None)));
        }
    }
}

async fn carry_out(nodes: &Nodes, mut work: Work) -> Outcome {
    let wanted = work.claim.as_ref().and_then(|claim| wanted(nodes, claim));
    if let Some(held) = &work.held {
        let is_same = wanted.as_ref().is_some_and(|wanted| {
            Arc::ptr_eq(&wanted.node, &held.node) && wanted.allocation == held.allocation
        });
        if is_same && held.is_prepared {
            return Outcome {
                work,
                is_done: true,
            };
        }
        if !is_same && !held.unprepare().await {
            return Outcome {
                work,
                is_done: false,
            };
        }
    }
    work.held = None;
    let (Some(mut wanted), Some(claim)) = (wanted, &work.claim) else {
        return Outcome {
            work,
            is_done: true,
        };
    };
    wanted.is_prepared = wanted.prepare(claim).await;
    let is_done = wanted.is_prepared;
    work.held = (is_done || !wanted.unprepare().await).then_some(wanted);
    Outcome { work, is_done }
}

/// The claim as it is to be prepared, if it is reserved and has devices of a virtual node.
fn wanted(nodes: &Nodes, claim: &Claim) -> Option<Held> {
    let allocation = claim
        .allocation
        .as_ref()
        .filter(|_| !claim.reserved_for.is_empty())?;
    let node = allocation.devices.iter().find_map(|device| {
        let name = device.pool.as_str().split('/').next()?;
        nodes
            .get(name)
            .filter(|node| node.machine.driver(&device.driver).is_some())
    })?;
    Some(Held {
        node: Arc::clone(node),
        id: claim.id.clone(),
        allocation: allocation.clone(),
        is_prepared: false,
    })
}

impl Held {
    /// The drivers of the claim that the node has.
    fn drivers(&self) -> impl Iterator<Item = &Arc<WasmDriver>> {
        self.allocation
            .drivers()
            .into_iter()
            .filter_map(|driver| self.node.machine.driver(driver))
    }

    /// The claim's record, without a driver's part: its pools have the drivers' names.
    fn record(&self, claim: &Claim) -> ClaimRecord {
        let mut record = ClaimRecord::new(
            self.id.clone(),
            ClaimState::Preparing,
            &self.node.machine.boot_id,
        );
        let names = self.node.pool_names();
        record.allocation = self.allocation.clone();
        for device in &mut record.allocation.devices {
            if let Ok(local) = PoolName::new(names.local(device.pool.as_str())) {
                device.pool = local;
            }
        }
        record.annotations = claim.annotations.clone();
        let pods = claim
            .reserved_for
            .iter()
            .filter(|consumer| consumer.resource == "pods");
        let pods = pods.map(|pod| ObjectRef {
            namespace: claim.id.namespace.clone(),
            name: pod.name.clone(),
            uid: pod.uid.clone(),
        });
        record.pods = pods.map(|pod| (pod.uid.clone(), pod)).collect();
        for driver in self.drivers() {
            let (info, digest) = (driver.info(), driver.digest().to_owned());
            let by = PreparedBy {
                kind: DriverKind::Wasm,
                version: info.version.clone(),
                digest,
                lists: false,
            };
            record.drivers.insert(
                info.name.clone(),
                Box::new(DriverPart {
                    by: Some(by),
                    ..DriverPart::default()
                }),
            );
        }
        record
    }

    /// Returns whether all drivers prepared the claim. Otherwise it has to be unprepared.
    async fn prepare(&self, claim: &Claim) -> bool {
        let mut record = self.record(claim);
        self.put(&record);
        let drivers: Vec<_> = self.drivers().cloned().collect();
        for driver in &drivers {
            let name = &driver.info().name;
            let asked = DriverClaim {
                reserved_for: record.consumers(),
                ..record.driver_claim(name)
            };
            let driver = self.node.driver(driver);
            let asked = std::slice::from_ref(&asked);
            let verdict = validate_claims(&driver, &call(), asked).await;
            if let Some(Err(problem)) = verdict.into_values().next() {
                self.refused("prepared", name, Some(&problem));
                return false;
            }
            let outcome = driver.prepare(&call(), asked).await;
            match outcome.into_values().next() {
                Some(Ok(prepared)) => {
                    let part = record.drivers.entry(name.clone()).or_default();
                    part.prepared = Some(Arc::new(prepared));
                    self.put(&record);
                }
                refused => {
                    self.refused("prepared", name, refused.and_then(Result::err).as_ref());
                    return false;
                }
            }
        }
        record.state = ClaimState::Prepared;
        self.put(&record);
        true
    }

    /// Returns whether all drivers unprepared the claim.
    async fn unprepare(&self) -> bool {
        let Some(record) = self.node.claims.lock().claim(self.id.uid.as_str()).cloned() else {
            return true;
        };
        for driver in self.drivers() {
            let name = &driver.info().name;
            let Some(part) = record.driver_record(name) else {
                continue;
            };
            let outcome = self
                .node
                .driver(driver)
                .unprepare(&call(), std::slice::from_ref(&part))
                .await;
            if let Some(Err(problem)) = outcome.into_values().next() {
                self.refused("unprepared", name, Some(&problem));
                return false;
            }
        }
        self.node.claims.lock().remove(&self.id.uid);
        true
    }

    fn put(&self, record: &ClaimRecord) {
        drop(self.node.claims.lock().put(Arc::new(record.clone())));
    }

    fn refused(&self, what: &str, driver: &DriverName, problem: Option<&Problem>) {
        let (claim, node) = (&self.id, &self.node.name);
        match problem {
            Some(problem) => tracing::warn!(%claim, %node, %driver, %problem, "claim not {what}"),
            None => {
                tracing::warn!(%claim, %node, %driver, "claim not {what}: the driver did not answer for it")
            }
        }
    }

    /// Returns the drivers' reports of the devices, by the names that the API server has.
    fn statuses(&self) -> ClaimStatuses {
        let record = self.node.claims.lock().claim(self.id.uid.as_str()).cloned();
        let parts = record.iter().flat_map(|record| &record.drivers);
        let prepared = parts.filter_map(|(driver, part)| Some((driver, part.prepared.as_ref()?)));
        let names = self.node.pool_names();
        let devices = prepared.flat_map(|(driver, prepared)| {
            let names = &names;
            prepared.devices.iter().filter_map(move |device| {
                Some(ReportedDevice {
                    driver: driver.clone(),
                    pool: names.published(&device.pool).ok()?,
                    device: device.device.clone(),
                    share_id: device.share_id.clone(),
                    status: device.status.clone()?,
                })
            })
        });
        ClaimStatuses {
            claim: self.id.clone(),
            allocated_ms: 0,
            devices: devices.collect(),
        }
    }
}

fn call() -> Call {
    Call {
        request_id: nodedock_base::request::new_id(),
        deadline: DEADLINE,
    }
}
