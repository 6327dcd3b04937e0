//! The status of devices in claims: what drivers report, written into `status.devices` of their claims.
//!
//! Given what drivers report (`Statuses::report`), claim by claim; of each claim the newest counts. Emits an update of the claim's status
//! where it has other entries of these drivers: read, changed in place (`splice`), put with the version that was read. Never touches the
//! entries of other drivers, nor takes back its own when a claim is given up: they go with its allocation.

mod entry;
mod plan;
mod splice;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::{Duration, Instant, sleep_until};

pub use self::entry::DeviceReport;
pub use self::plan::ClaimStatus;
use self::plan::{Plan, plan};
use super::exchange::{Exchange, Media, Refusal, Request, Subject, Verb};
use nodedock_base::backoff::Backoff;
use nodedock_base::clock::now_ms;
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_model::{DriverName, Problem, Uid, limit};

const FORBIDDEN: &str = "claim-status-forbidden";

/// Handle to the writer of statuses.
#[derive(Clone)]
pub struct Statuses {
    queue: Arc<Queue>,
}

/// Statuses written, and those that were not.
#[derive(Debug, Default)]
pub struct StatusCounts {
    pub written: AtomicU64,
    /// The claim had them.
    pub standing: AtomicU64,
    /// The API server refuses them for good.
    pub refused: AtomicU64,
    /// There was no room to wait in.
    pub dropped: AtomicU64,
}

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    news: Notify,
    counts: StatusCounts,
}

#[derive(Default)]
struct Waiting {
    claims: BTreeMap<Uid, ClaimStatus>,
    /// In the order in which they came.
    order: VecDeque<Uid>,
    /// The claim that is being written; None also where it was given up meanwhile.
    under_way: Option<Uid>,
    /// Until when claims of these drivers wait, since a status of theirs was forbidden: rights are given by driver. Claims of others do
    /// not wait for it.
    held_back: BTreeMap<BTreeSet<DriverName>, Instant>,
}

/// What is written next.
enum Next {
    Write(ClaimStatus),
    /// Nothing until then, or until something is reported.
    Idle(Option<Instant>),
}

/// What became of a status.
enum Outcome {
    /// There is nothing more to do.
    Done,
    Written,
    /// To be tried again after a while.
    Later(String, Option<Duration>),
    Forbidden(String),
}

impl Statuses {
    /// Starts the task that writes.
    pub fn start(tasks: &Tasks, api: Arc<dyn Exchange>, conditions: Conditions) -> Self {
        let queue = Arc::new(Queue::default());
        let writer = Writer { api, queue: Arc::clone(&queue), conditions };
        let stop = tasks.clone();
        tasks.spawn("claim-statuses", async move { writer.run(&stop).await });
        Self { queue }
    }

    /// Takes what drivers report of a claim, in place of what waits for it. False: so many claims wait that it has no room.
    pub fn report(&self, status: ClaimStatus) -> bool {
        let taken = self.queue.waiting().push(status, true);
        if taken {
            self.queue.news.notify_one();
        } else {
            self.queue.counts.dropped.fetch_add(1, Relaxed);
        }
        taken
    }

    /// The claim was given up: what waits for it is written no more.
    pub fn forget(&self, claim: &Uid) {
        self.queue.waiting().forget(claim);
    }

    pub fn counts(&self) -> &StatusCounts {
        &self.queue.counts
    }
}

impl Queue {
    fn waiting(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn push(&mut self, status: ClaimStatus, newer: bool) -> bool {
        let uid = status.claim.uid.clone();
        if let Some(known) = self.claims.get_mut(&uid) {
            if newer {
                *known = status;
            }
            return true;
        }
        if self.claims.len() >= limit::STATUSES_WAITING_MAX {
            return false;
        }
        self.claims.insert(uid.clone(), status);
        self.order.push_back(uid);
        true
    }

    /// The status that waits longest of those that may be written.
    fn next(&mut self, now: Instant) -> Next {
        let claims = &self.claims;
        self.held_back.retain(|drivers, _| claims.values().any(|status| drivers_of(status) == *drivers));
        let mut soonest: Option<Instant> = None;
        for (place, uid) in self.order.iter().enumerate() {
            let Some(status) = self.claims.get(uid) else { continue };
            match self.held_back.get(&drivers_of(status)) {
                Some(until) if *until > now => {
                    soonest = Some(soonest.map_or(*until, |soonest| soonest.min(*until)));
                }
                _ => {
                    let Some(uid) = self.order.remove(place) else { break };
                    let Some(status) = self.claims.remove(&uid) else { break };
                    self.under_way = Some(uid);
                    return Next::Write(status);
                }
            }
        }
        Next::Idle(soonest)
    }

    /// Takes back what could not be written. False: there is no room for it.
    fn put_back(&mut self, status: ClaimStatus) -> bool {
        // It was given up meanwhile.
        self.under_way.take().is_none() || self.push(status, false)
    }

    fn forget(&mut self, claim: &Uid) {
        self.under_way.take_if(|under_way| under_way == claim);
        if self.claims.remove(claim).is_some() {
            self.order.retain(|uid| uid != claim);
        }
    }
}

struct Writer {
    api: Arc<dyn Exchange>,
    queue: Arc<Queue>,
    conditions: Conditions,
}

impl Writer {
    async fn run(&self, tasks: &Tasks) {
        let mut backoff = Backoff::new(limit::KUBE_RETRY_MIN, limit::KUBE_RETRY_MAX);
        let mut said = false;
        loop {
            let next = self.queue.waiting().next(Instant::now());
            let status = match next {
                Next::Write(status) => status,
                Next::Idle(until) => {
                    self.tell_what_is_over();
                    tokio::select! {
                        () = tasks.stopped() => return,
                        // A report that comes between is kept as a permit.
                        () = self.queue.news.notified() => {}
                        () = sleep_until(until.unwrap_or_else(Instant::now)), if until.is_some() => {}
                    }
                    continue;
                }
            };
            let outcome = tokio::select! {
                // A status that is half written is written at the next start, when drivers report again.
                () = tasks.stopped() => return,
                outcome = self.write(&status) => outcome,
            };
            let delay = match outcome {
                Outcome::Done | Outcome::Written => {
                    backoff.reset();
                    said = false;
                    if matches!(outcome, Outcome::Written) {
                        self.queue.waiting().held_back.remove(&drivers_of(&status));
                    }
                    continue;
                }
                Outcome::Forbidden(words) => {
                    self.hold_back(status, &words);
                    continue;
                }
                Outcome::Later(why, wanted) => {
                    if !std::mem::replace(&mut said, true) {
                        tracing::warn!(claim = %status.claim, why, "a claim's status is not written yet");
                    }
                    backoff.delay().max(wanted.unwrap_or_default().min(limit::KUBE_RETRY_MAX))
                }
            };
            if !self.queue.waiting().put_back(status) {
                self.queue.counts.dropped.fetch_add(1, Relaxed);
            }
            let until = Instant::now() + delay;
            tokio::select! {
                () = tasks.stopped() => return,
                () = sleep_until(until) => {}
            }
        }
    }

    fn hold_back(&self, status: ClaimStatus, words: &str) {
        let drivers = drivers_of(&status);
        let named = named(&drivers);
        let words = format!("the status of devices of {named} cannot be written into claims: {words}");
        self.conditions.set(&named, Problem::denied(FORBIDDEN, words));
        let mut waiting = self.queue.waiting();
        waiting.held_back.insert(drivers, Instant::now() + limit::KUBE_FORBIDDEN_PAUSE);
        if !waiting.put_back(status) {
            self.queue.counts.dropped.fetch_add(1, Relaxed);
        }
    }

    /// Where nothing waits any more, or something was written, nothing is known to be forbidden.
    fn tell_what_is_over(&self) {
        let held_back: BTreeSet<String> = self.queue.waiting().held_back.keys().map(named).collect();
        self.conditions.retain(FORBIDDEN, |drivers| held_back.contains(drivers));
    }

    async fn write(&self, status: &ClaimStatus) -> Outcome {
        for _ in 0..limit::KUBE_CONFLICTS_MAX {
            match self.write_once(status).await {
                Err(Refusal::Conflict) => {}
                Err(Refusal::Forbidden(words)) => return Outcome::Forbidden(words),
                Err(Refusal::Away(away)) => return Outcome::Later(away.why, away.retry_after),
                Ok(outcome) => return outcome,
                // The claim is gone, and its status with it.
                Err(Refusal::Missing) => return Outcome::Done,
                Err(refused) => {
                    self.queue.counts.refused.fetch_add(1, Relaxed);
                    tracing::warn!(claim = %status.claim, error = chain(&refused), "a claim's status is not taken");
                    return Outcome::Done;
                }
            }
        }
        Outcome::Later("the claim changed each time between reading and writing".to_owned(), None)
    }

    async fn write_once(&self, status: &ClaimStatus) -> Result<Outcome, Refusal> {
        let subject = subject(status);
        let claim = self.api.exchange(Request::get(self.path(status, ""))).await?.object(subject)?;
        let read = splice::read(&claim).map_err(malformed)?;
        let mut left_out = Vec::new();
        let entries = match plan(status, &read, &now(), &mut left_out) {
            Plan::Past => return Ok(Outcome::Done),
            Plan::Standing => {
                self.queue.counts.standing.fetch_add(1, Relaxed);
                return Ok(Outcome::Done);
            }
            Plan::Write(entries) => entries,
        };
        if !left_out.is_empty() {
            let left_out = left_out.join("; ");
            tracing::warn!(claim = %status.claim, left_out, "part of a device's status does not fit into the claim");
        }
        let body = splice::json(&claim, &entries).map_err(malformed)?;
        let put = Request::with(Verb::Put, self.path(status, "/status"), body);
        match self.api.exchange(put).await?.object(subject) {
            // The parameters that it has are not those that it shows: only their bytes will do.
            Err(Refusal::Refused { status: 422, fields, .. }) if is_of_allocation(&fields) => {
                self.write_bytes(status, &read, &entries).await?;
            }
            other => drop(other?),
        }
        self.queue.counts.written.fetch_add(1, Relaxed);
        Ok(Outcome::Written)
    }

    /// The same by the wire format of protobuf.
    async fn write_bytes(
        &self,
        status: &ClaimStatus,
        read: &splice::Read,
        entries: &[serde_json::Value],
    ) -> Result<(), Refusal> {
        let subject = subject(status);
        let get = Request { wants: Media::Protobuf, ..Request::get(self.path(status, "")) };
        let claim = self.api.exchange(get).await?.success(subject)?;
        let body = splice::protobuf(&claim, read, |driver| status.has_driver(driver), entries);
        let Some(body) = body.map_err(malformed)? else { return Err(Refusal::Conflict) };
        let put = Request::with(Verb::Put, self.path(status, "/status"), body);
        let put = Request { sends: Media::Protobuf, ..put };
        self.api.exchange(put).await?.object(subject).map(drop)
    }

    fn path(&self, status: &ClaimStatus, rest: &str) -> String {
        super::claim_path(&self.api.resource_api(), &status.claim) + rest
    }
}

fn drivers_of(status: &ClaimStatus) -> BTreeSet<DriverName> {
    status.drivers.keys().cloned().collect()
}

fn named(drivers: &BTreeSet<DriverName>) -> String {
    drivers.iter().map(DriverName::as_str).collect::<Vec<_>>().join(", ")
}

fn subject(status: &ClaimStatus) -> Subject<'_> {
    super::claim_subject(&status.claim)
}

fn is_of_allocation(fields: &[String]) -> bool {
    !fields.is_empty() && fields.iter().all(|field| field == "status.allocation")
}

fn malformed(error: splice::Malformed) -> Refusal {
    let words = chain(&error);
    Refusal::Refused { status: 200, words, fields: Vec::new() }
}

/// Kubernetes' times have seconds.
fn now() -> String {
    let seconds = i64::try_from(now_ms() / 1000).unwrap_or(0);
    jiff::Timestamp::from_second(seconds).unwrap_or_default().to_string()
}
