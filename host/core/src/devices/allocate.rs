//! Allocate: choose, commit the intents, call the plugins, commit the results, answer.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::time::{Instant, timeout_at};

use super::choose::{self, Step, Wish};
use super::record::{self, Answer, Key, Want};
use super::resources::Origin;
use super::reuse::Reuse;
use super::stock::Snapshot;
use super::{Inner, ResourceOutcome, affinity, check, pooled};
use crate::checkpoint::Change;
use crate::driver::{Call, DeviceDriver};
use nodedock_base::clock::now_ms;
use nodedock_base::error::chain;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{
    AllocationEntry, DriverName, ExtendedResource, ObjectRef, PluginDevice, PodAllocation, PodRequest,
    PooledClaim, Problem, Uid, limit,
};

/// What a want comes to. None: nothing is wanted, and nothing is held.
type Chosen = Result<Option<AllocationEntry>, Problem>;

/// A request on its way.
struct Job<'a> {
    request: &'a PodRequest,
    /// What the pod had before it.
    before: Option<Arc<PodAllocation>>,
    request_id: Arc<str>,
}

impl Job<'_> {
    fn pod(&self) -> &ObjectRef {
        &self.request.pod
    }

    fn held(&self, want: &Want) -> Option<&AllocationEntry> {
        self.before.as_ref()?.entry(&want.container, &want.resource)
    }

    /// What needs no choice.
    fn known(&self, want: &Want) -> Option<Chosen> {
        let held = self.held(want);
        if let Some(held) = held.filter(|held| held.devices.len() != want.count) {
            let wish = wish(want, Some(&held.devices), &NOTHING);
            return Some(choose::check_count(&wish).map(|()| None));
        }
        match held {
            Some(entry) if entry.is_complete() => Some(Ok(Some(entry.clone()))),
            None if want.count == 0 => Some(Ok(None)),
            _ => None,
        }
    }
}

static NOTHING: BTreeSet<String> = BTreeSet::new();

fn wish<'a>(
    want: &'a Want,
    held: Option<&'a BTreeMap<String, Vec<u32>>>,
    reusable: &'a BTreeSet<String>,
) -> Wish<'a> {
    Wish {
        container: &want.container,
        resource: &want.resource,
        count: want.count,
        held,
        reusable,
        affinity: &want.affinity,
    }
}

impl Inner {
    pub(super) async fn allocate(&self, request: &PodRequest, request_id: Arc<str>) -> Vec<ResourceOutcome> {
        let _pod = self.pod_locks.take([request.pod.uid.clone()]).await;
        let before = self.state().table.pod(request.pod.uid.as_str()).cloned();
        let job = Job { request, before, request_id };
        let wants = record::wants(request);
        let mut ends = self.choose_all(&job, &wants).await;
        match self.commit_intents(&job, &ends).await {
            Ok(None) => {}
            Ok(Some(intents)) => {
                failpoint::pass(Point::AllocateIntended);
                let answers = self.call_plugins(&job, &intents, &ends).await;
                self.commit_answers(&intents, answers, &mut ends).await;
            }
            Err(problem) => refuse(&mut ends, &problem, |key| !self.is_complete(&job.request.pod.uid, key)),
        }
        let after = self.state().table.pod(request.pod.uid.as_str()).cloned();
        if job.before != after {
            self.changed(wants.iter().map(|want| want.resource.clone()));
        }
        wants.iter().map(|want| outcome(&job, want, &ends)).collect()
    }

    fn is_complete(&self, pod: &Uid, key: &Key) -> bool {
        let state = self.state();
        let entry = state.table.pod(pod.as_str()).and_then(|record| record.entry(&key.0, &key.1));
        entry.is_some_and(AllocationEntry::is_complete)
    }

    /// Every resource by itself, so that one whose plugin hangs holds up no other. What is chosen is in the table.
    async fn choose_all(&self, job: &Job<'_>, wants: &[Want]) -> BTreeMap<Key, Chosen> {
        let mut by_resource: BTreeMap<&ExtendedResource, Vec<&Want>> = BTreeMap::new();
        for want in wants {
            by_resource.entry(&want.resource).or_default().push(want);
        }
        let choices = by_resource.into_iter().map(|(resource, wants)| self.choose_of(job, resource, wants));
        join_all(choices).await.into_iter().flatten().collect()
    }

    async fn choose_of(
        &self,
        job: &Job<'_>,
        resource: &ExtendedResource,
        wants: Vec<&Want>,
    ) -> Vec<(Key, Chosen)> {
        let known: Option<Vec<_>> = wants.iter().map(|want| Some((want.key(), job.known(want)?))).collect();
        if let Some(known) = known {
            return known;
        }
        // One deadline for all containers, and for the wait as well: pods that queue behind a plugin that hangs end with the first.
        let deadline = Instant::now() + self.settings.call_deadline;
        let Ok(_lock) = timeout_at(deadline, self.resource_locks.take([resource.clone()])).await else {
            let busy = |want: &&Want| (want.key(), job.known(want).unwrap_or_else(|| Err(busy(resource))));
            return wants.iter().map(busy).collect();
        };
        let (mut reuse, mut ends) = (Reuse::default(), Vec::new());
        for want in wants {
            let end = match job.known(want) {
                Some(end) => end,
                None => self.pick(job, want, &reuse, deadline).await.map(Some),
            };
            if let Ok(Some(entry)) = &end {
                reuse.settle(entry);
                self.reserve(job.pod(), entry);
            }
            ends.push((want.key(), end));
        }
        ends
    }

    /// Takes an entry's devices, so that nobody else does.
    fn reserve(&self, pod: &ObjectRef, entry: &AllocationEntry) {
        let mut state = self.state();
        let known = state.table.pod(pod.uid.as_str());
        let mut record =
            known.map_or_else(|| record::empty(pod, now_ms()), |known| PodAllocation::clone(known));
        if record.entry(&entry.container, &entry.resource).is_none() {
            record.entries.push(entry.clone());
            state.table.put(Arc::new(record));
        }
    }

    async fn pick(
        &self,
        job: &Job<'_>,
        want: &Want,
        reuse: &Reuse,
        deadline: Instant,
    ) -> Result<AllocationEntry, Problem> {
        let snapshot = self.snapshot(&want.resource, None);
        let snapshot = snapshot.ok_or_else(|| choose::unregistered(&want.resource))?;
        if let Origin::Pools(driver) = &snapshot.origin {
            return self.pick_pooled(job, want, reuse, driver);
        }
        let wish = wish(want, job.held(want).map(|entry| &entry.devices), reuse.devices());
        let (ids, devices) = match choose::choose(Some(&snapshot.stock()), &wish)? {
            Step::Chosen(ids) => (ids, snapshot.devices.clone()),
            Step::Open(open) => {
                let preferred =
                    self.preferred(job, want, &snapshot.origin, open.question(), deadline).await?;
                // The plugin took its time: what it lists now counts.
                let now = self.snapshot(&want.resource, None);
                let now = now.ok_or_else(|| choose::unregistered(&want.resource))?;
                match choose::choose(Some(&now.stock()), &wish)? {
                    Step::Chosen(ids) => (ids, now.devices),
                    Step::Open(open) => (open.finish(&preferred), now.devices),
                }
            }
        };
        Ok(entry(want, with_nodes(ids, &devices), None))
    }

    /// Devices of a pool: those of an init container's claim where it fits as it is, or those of the fewest NUMA nodes.
    fn pick_pooled(
        &self,
        job: &Job<'_>,
        want: &Want,
        reuse: &Reuse,
        driver: &DriverName,
    ) -> Result<AllocationEntry, Problem> {
        if job.held(want).is_some() {
            return Err(choose::lost(want.resource.as_str(), &want.container));
        }
        if want.count > limit::ALLOCATED_DEVICES_MAX {
            return Err(too_many(want));
        }
        let (pod, resource) = (job.pod(), &want.resource);
        let claim = pooled::pooled(pod, &want.container, resource, driver)?;
        let snapshot = self.snapshot(resource, Some((&pod.uid, &claim.id.uid)));
        let snapshot = snapshot.ok_or_else(|| choose::unregistered(resource))?;
        if let Some((claim, devices)) = reuse.claim(driver, want.count, |id| snapshot.is_healthy(id)) {
            return Ok(entry(want, devices.clone(), Some(claim.clone())));
        }
        Ok(entry(want, choose_pooled(want, &snapshot)?, Some(claim)))
    }

    async fn preferred(
        &self,
        job: &Job<'_>,
        want: &Want,
        origin: &Origin,
        question: choose::Question,
        deadline: Instant,
    ) -> Result<Vec<String>, Problem> {
        let Origin::Plugin { driver, .. } = origin else { return Ok(Vec::new()) };
        if !driver.options().preferred_allocation_available {
            return Ok(Vec::new());
        }
        let choose::Question { available, must_include, size } = question;
        let size = u32::try_from(size).unwrap_or(u32::MAX);
        let call = self.call(&job.request_id, deadline);
        let answer = driver.preferred_allocation(&call, &available, &must_include, size);
        within(deadline, &want.resource, "preferred allocation", answer).await
    }

    /// Makes durable what was chosen. None: nobody is to be called.
    async fn commit_intents(
        &self,
        job: &Job<'_>,
        ends: &BTreeMap<Key, Chosen>,
    ) -> Result<Option<Arc<PodAllocation>>, Problem> {
        let pod = &job.pod().uid;
        let Some(reserved) = self.state().table.pod(pod.as_str()).cloned() else { return Ok(None) };
        // A device that is not healthy any more is not asked for again: the next try chooses another.
        let is_lost = |end: &Chosen| matches!(end, Err(problem) if problem.code == choose::HELD_UNHEALTHY);
        let lost: BTreeSet<_> =
            ends.iter().filter(|(_, end)| is_lost(end)).map(|(key, _)| key.clone()).collect();
        if lost.is_empty() && job.before.as_ref() == Some(&reserved) {
            return Ok(Some(reserved));
        }
        let intents = Arc::new(record::ordered(&reserved, job.request, &lost));
        if let Err(problem) = self.commit(&intents).await {
            self.state().table.restore(pod, job.before.clone());
            return Err(problem);
        }
        Ok(Some(intents))
    }

    /// Makes a pod's record durable, then current: what it gives up is nobody else's before.
    pub(super) async fn commit(&self, record: &Arc<PodAllocation>) -> Result<(), Problem> {
        let gone = record.entries.is_empty();
        let change = if gone {
            Change::DeleteAllocation(record.uid().clone())
        } else {
            Change::PutAllocation(record.clone())
        };
        if let Err(error) = self.checkpoint.commit(vec![change]).await {
            tracing::error!(error = chain(&error), pod = %record.pod, "commit to the checkpoint failed");
            return Err(error.problem());
        }
        let mut state = self.state();
        let after = (!gone).then(|| record.clone());
        state.table.restore(record.uid(), after);
        Ok(())
    }

    /// Asks plugins for what has no answer yet: resources side by side, the containers of one in their order.
    async fn call_plugins(
        &self,
        job: &Job<'_>,
        intents: &PodAllocation,
        ends: &BTreeMap<Key, Chosen>,
    ) -> BTreeMap<Key, Result<Answer, Problem>> {
        let mut open: BTreeMap<&ExtendedResource, Vec<&AllocationEntry>> = BTreeMap::new();
        let is_wanted = |entry: &&AllocationEntry| matches!(ends.get(&record::key(entry)), Some(Ok(Some(_))));
        for entry in intents.entries.iter().filter(|entry| !entry.is_complete()).filter(is_wanted) {
            open.entry(&entry.resource).or_default().push(entry);
        }
        let calls = open.into_iter().map(|(resource, entries)| self.call_plugin(job, resource, entries));
        join_all(calls).await.into_iter().flatten().collect()
    }

    async fn call_plugin(
        &self,
        job: &Job<'_>,
        resource: &ExtendedResource,
        entries: Vec<&AllocationEntry>,
    ) -> Vec<(Key, Result<Answer, Problem>)> {
        let deadline = Instant::now() + self.settings.call_deadline;
        let mut ends = Vec::new();
        for entry in entries {
            let end = self.ask(job, resource, entry, deadline).await;
            if let Err(problem) = &end {
                let (pod, container) = (job.pod(), &entry.container);
                tracing::warn!(%resource, %pod, container, request = %job.request_id, code = problem.code, %problem, "devices not allocated");
            }
            ends.push((record::key(entry), end));
        }
        ends
    }

    async fn ask(
        &self,
        job: &Job<'_>,
        resource: &ExtendedResource,
        entry: &AllocationEntry,
        deadline: Instant,
    ) -> Result<Answer, Problem> {
        let driver = self.plugin(resource).ok_or_else(|| stopped(resource))?;
        let ids: Vec<_> = entry.devices.keys().cloned().collect();
        let call = self.call(&job.request_id, deadline);
        failpoint::pass(Point::AllocateCall);
        let started = Instant::now();
        let answered = within(deadline, resource, "allocation", driver.allocate(&call, &ids)).await;
        self.metrics.allocated(resource, started.elapsed());
        let response = answered?;
        failpoint::pass(Point::AllocateAnswered);
        let (root, answer) = (self.settings.host_root.clone(), response.clone());
        let of = resource.clone();
        // A path may be on a file system that hangs: not for a thread that serves.
        let look = tokio::task::spawn_blocking(move || check::paths_exist(&of, &answer, &root));
        let look = async move { look.await.unwrap_or_else(|_| Err(interrupted())) };
        within(deadline, resource, "look at what the allocation names", look).await?;
        Ok(Answer { response, pre_start: driver.options().pre_start_required })
    }

    async fn commit_answers(
        &self,
        intents: &PodAllocation,
        answers: BTreeMap<Key, Result<Answer, Problem>>,
        ends: &mut BTreeMap<Key, Chosen>,
    ) {
        if answers.is_empty() {
            return;
        }
        let record = Arc::new(record::answered(intents, &answers));
        let committed = self.commit(&record).await;
        failpoint::pass(Point::AllocateCommitted);
        for (key, answer) in answers {
            // What was refused is refused for its own reason, durable or not.
            if let Some(problem) = answer.err().or_else(|| committed.as_ref().err().cloned()) {
                ends.insert(key, Err(problem));
            }
        }
    }

    /// The plugin of a resource, if it is there.
    pub(super) fn plugin(&self, resource: &ExtendedResource) -> Option<Arc<dyn DeviceDriver>> {
        let state = self.state();
        match state.resources.source(resource).filter(|offer| offer.is_active()).map(|offer| &offer.origin) {
            Some(Origin::Plugin { driver, .. }) => Some(driver.clone()),
            _ => None,
        }
    }

    pub(super) fn call(&self, request_id: &Arc<str>, deadline: Instant) -> Call {
        Call { request_id: request_id.clone(), deadline: deadline.saturating_duration_since(Instant::now()) }
    }
}

pub(super) fn choose_pooled(want: &Want, snapshot: &Snapshot) -> Result<BTreeMap<String, Vec<u32>>, Problem> {
    let ids = match choose::choose(Some(&snapshot.stock()), &wish(want, None, &NOTHING))? {
        Step::Chosen(ids) => ids,
        Step::Open(open) => {
            let question = open.question();
            let available: Vec<_> =
                question.available.iter().filter_map(|id| snapshot.devices.get(id)).collect();
            let closest = affinity::closest(&available, &question.must_include, question.size);
            open.finish(&closest)
        }
    };
    Ok(with_nodes(ids, &snapshot.devices))
}

fn entry(want: &Want, devices: BTreeMap<String, Vec<u32>>, claim: Option<PooledClaim>) -> AllocationEntry {
    AllocationEntry {
        container: want.container.clone(),
        kind: want.kind,
        resource: want.resource.clone(),
        devices,
        claim,
        response: None,
        pre_start: false,
        unknown: BTreeMap::new(),
    }
}

fn with_nodes(ids: BTreeSet<String>, devices: &BTreeMap<String, PluginDevice>) -> BTreeMap<String, Vec<u32>> {
    let nodes = |id: &String| devices.get(id).map(|device| device.numa_nodes.clone()).unwrap_or_default();
    ids.into_iter().map(|id| (id.clone(), nodes(&id))).collect()
}

/// Refuses what was chosen and is not durable.
fn refuse(ends: &mut BTreeMap<Key, Chosen>, problem: &Problem, is_open: impl Fn(&Key) -> bool) {
    for (key, end) in ends {
        if matches!(end, Ok(Some(_))) && is_open(key) {
            *end = Err(problem.clone());
        }
    }
}

fn outcome(job: &Job<'_>, want: &Want, ends: &BTreeMap<Key, Chosen>) -> ResourceOutcome {
    let end = ends.get(&want.key()).cloned().unwrap_or_else(|| Err(interrupted()));
    if let Err(problem) = &end {
        let (pod, container, resource) = (job.pod(), &want.container, &want.resource);
        tracing::info!(%pod, container, %resource, request = %job.request_id, code = problem.code, %problem, "no devices");
    }
    let end = end.map(|entry| entry.map(|entry| entry.devices).unwrap_or_default());
    ResourceOutcome { container: want.container.clone(), resource: want.resource.clone(), end }
}

fn too_many(want: &Want) -> Problem {
    let Want { container, resource, count, .. } = want;
    let max = limit::ALLOCATED_DEVICES_MAX;
    let message =
        format!("container {container} wants {count} devices of {resource}, and a claim has {max} at most");
    Problem::invalid("too-many-devices", message)
}

/// Ends a plugin's call at the deadline, whatever the plugin does.
pub(super) async fn within<T>(
    deadline: Instant,
    resource: &ExtendedResource,
    what: &str,
    call: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    let late = |_| {
        let message = format!("the plugin of {resource} did not answer in time ({what})");
        Err(Problem::unavailable("driver-deadline", message).retry_after(Duration::from_secs(5)))
    };
    timeout_at(deadline, call).await.unwrap_or_else(late)
}

pub(super) fn busy(resource: &ExtendedResource) -> Problem {
    let message = format!("another pod waits for the plugin of {resource}, which does not answer");
    Problem::unavailable("resource-busy", message).retry_after(Duration::from_secs(5))
}

pub(super) fn stopped(resource: &ExtendedResource) -> Problem {
    Problem::unavailable("plugin-gone", format!("the plugin of {resource} is not here"))
}

pub(super) fn interrupted() -> Problem {
    Problem::unavailable("interrupted", "the daemon is stopping")
}

pub(super) fn interrupted_pod(request: &PodRequest) -> Vec<ResourceOutcome> {
    let refused = |want: Want| ResourceOutcome {
        container: want.container,
        resource: want.resource,
        end: Err(interrupted()),
    };
    record::wants(request).into_iter().map(refused).collect()
}
