//! Allocate: choose devices, commit the intents, call the plugins, commit the results. Before a container starts, plugins that want it are
//! called again.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use tokio::time::{Instant, sleep_until, timeout_at};

use super::choose::{self, Step};
use super::record::{self, Key, Want};
use super::reuse::Reuse;
use super::snapshot::Snapshot;
use super::{DeviceNodes, ResourceOutcome, ResourceSource, affinity};
use crate::checkpoint::Change;
use crate::driver::{Call, DeviceDriver, plugin_paths};
use crate::manager::{Manager, interrupted, pool_claims};
use nodedock_base::clock::now_ms;
use nodedock_base::error::chain;
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{
    AllocationEntry, DriverName, ExtendedResource, ObjectRef, PluginDevice, PodAllocation, PodRequest,
    PooledClaim, Problem, ProblemCode, Uid, limit,
};

/// Others have the devices, or their plugin does not list them as healthy yet.
const WAITS: [ProblemCode; 2] = [ProblemCode::TooFewDevices, ProblemCode::NoHealthyDevice];

/// The choice for a want. None: no devices are wanted, and none are held.
type Chosen = Result<Option<AllocationEntry>, Problem>;
type Choices = BTreeMap<Key, Chosen>;

/// A request that is being carried out.
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

    /// The outcome of a want for which nothing has to be chosen.
    fn known(&self, want: &Want) -> Option<Chosen> {
        match self.held(want) {
            Some(held) if held.devices.len() != want.count => {
                Some(choose::check_count(want, Some(&held.devices)).map(|()| None))
            }
            Some(entry) if entry.is_complete() => Some(Ok(Some(entry.clone()))),
            None if want.count == 0 => Some(Ok(None)),
            _ => None,
        }
    }
}

impl Manager {
    /// Allocates the devices of a pod whose lock the caller has: one outcome for each container and resource, in the pod's order. A
    /// repeated request is answered from the record.
    ///
    /// Devices of a pool are the container's when the pool claim of its entry is prepared, which the caller sees to.
    pub(crate) async fn allocate(&self, request: &PodRequest, request_id: &Arc<str>) -> Vec<ResourceOutcome> {
        let uid = request.pod.uid.as_str();
        let job = Job { request, before: self.allocation(uid), request_id: request_id.clone() };
        let wants = record::wants(request);
        if wants.is_empty() {
            return Vec::new();
        }
        let mut choices = self.choose_all(&job, &wants).await;
        match self.commit_allocation_intents(&job, &choices).await {
            Ok(None) => {}
            Ok(Some(intents)) => {
                failpoint::pass(Point::AllocateIntended);
                let answers = self.call_plugins(&job, &intents, &choices).await;
                self.commit_answers(&intents, answers, &mut choices).await;
            }
            Err(problem) => self.refuse_incomplete(&job, &problem, &mut choices),
        }
        if job.before != self.allocation(uid) {
            self.report_resources(wants.iter().map(|want| want.resource.clone()));
        }
        record::keys(request).map(|key| outcome(&job, key, &choices)).collect()
    }

    /// Refuses what was chosen and is not durable.
    fn refuse_incomplete(&self, job: &Job<'_>, problem: &Problem, choices: &mut Choices) {
        let known = self.allocation(job.pod().uid.as_str());
        let is_complete = |(container, resource): &Key| {
            let entry = known.as_ref().and_then(|record| record.entry(container, resource));
            entry.is_some_and(AllocationEntry::is_complete)
        };
        for (key, choice) in choices.iter_mut() {
            if matches!(choice, Ok(Some(_))) && !is_complete(key) {
                *choice = Err(problem.clone());
            }
        }
    }

    /// Chooses for each resource by itself, so that a plugin that hangs does not delay other resources. The table has what is chosen.
    async fn choose_all(&self, job: &Job<'_>, wants: &[Want]) -> Choices {
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
        let started = Instant::now();
        let deadline = started + self.settings.call_deadline;
        let (mut freed, mut changed) = (self.claims_freed.subscribe(), self.devices_changed.subscribe());
        let mut may_wait = true;
        loop {
            let Ok(lock) = timeout_at(deadline, self.resource_locks.take([resource.clone()])).await else {
                let busy =
                    |want: &&Want| (want.key(), job.known(want).unwrap_or_else(|| Err(busy(resource))));
                return wants.iter().map(busy).collect();
            };
            freed.mark_unchanged();
            changed.mark_unchanged();
            let choices = self.choose_in_order(job, &wants, deadline).await;
            if !may_wait || !self.may_be_enough_later(resource, &wants, &choices) {
                return choices;
            }
            self.unreserve(job, resource);
            drop(lock);
            tokio::select! {
                // Nothing of the pod is in the table meanwhile: there is nothing to undo.
                () = self.tasks.stopped() => may_wait = false,
                () = sleep_until(started + self.settings.exclusive_wait) => may_wait = false,
                woken = freed.changed() => may_wait = woken.is_ok(),
                woken = changed.changed() => may_wait = woken.is_ok(),
            }
        }
    }

    /// Chooses for the containers of a pod one after the other. The table has what is chosen.
    async fn choose_in_order(&self, job: &Job<'_>, wants: &[&Want], deadline: Instant) -> Vec<(Key, Chosen)> {
        let (mut reuse, mut choices) = (Reuse::default(), Vec::new());
        for want in wants {
            let choice = match job.known(want) {
                Some(choice) => choice,
                None => self.choose_one(job, want, &reuse, deadline).await.map(Some),
            };
            if let Ok(Some(entry)) = &choice {
                reuse.settle(entry);
                self.reserve(job.pod(), entry);
            }
            choices.push((want.key(), choice));
        }
        choices
    }

    /// Whether too few devices are free or healthy now for a container, and the resource has enough of them.
    fn may_be_enough_later(
        &self,
        resource: &ExtendedResource,
        wants: &[&Want],
        choices: &[(Key, Chosen)],
    ) -> bool {
        let is_short = |(key, choice): &(Key, Chosen)| {
            let Err(problem) = choice else { return false };
            let want = wants.iter().find(|want| want.key() == *key);
            let count = want.map_or(usize::MAX, |want| want.count);
            let is_wait = WAITS.iter().any(|code| problem.code == *code);
            is_wait && self.devices().resources.source(resource).is_some_and(|of| of.devices.len() >= count)
        };
        choices.iter().any(is_short)
    }

    /// Removes what this request has chosen of a resource: while its pod waits, others may take it.
    fn unreserve(&self, job: &Job<'_>, resource: &ExtendedResource) {
        let mut state = self.devices();
        let Some(known) = state.table.pod(job.pod().uid.as_str()) else { return };
        let mut record = PodAllocation::clone(known);
        let is_from_before = |entry: &AllocationEntry| {
            job.before.as_ref().is_some_and(|before| before.entry(&entry.container, resource).is_some())
        };
        record.entries.retain(|entry| entry.resource != *resource || is_from_before(entry));
        let is_empty = record.entries.is_empty() && job.before.is_none();
        state.table.restore(&job.pod().uid, (!is_empty).then(|| Arc::new(record)));
    }

    /// Puts an entry into the table, so that no other pod takes its devices.
    fn reserve(&self, pod: &ObjectRef, entry: &AllocationEntry) {
        let mut state = self.devices();
        let known = state.table.pod(pod.uid.as_str());
        let empty = || PodAllocation {
            pod: pod.clone(),
            entries: Vec::new(),
            since_ms: now_ms(),
            unknown: BTreeMap::new(),
        };
        let mut record = known.map_or_else(empty, |known| PodAllocation::clone(known));
        if record.entry(&entry.container, &entry.resource).is_none() {
            record.entries.push(entry.clone());
            state.table.put(Arc::new(record));
        }
    }

    async fn choose_one(
        &self,
        job: &Job<'_>,
        want: &Want,
        reuse: &Reuse,
        deadline: Instant,
    ) -> Result<AllocationEntry, Problem> {
        let snapshot = self.snapshot(&want.resource, None)?;
        if let ResourceSource::Pools(driver) = &snapshot.offer.source {
            return self.choose_pooled(job, want, reuse, driver);
        }
        let held = job.held(want).map(|entry| &entry.devices);
        if self.settings.kubelet_allocates && held.is_none() {
            return Err(of_kubelet(&want.resource));
        }
        let (ids, devices) = match choose::choose(&snapshot.stock(), want, held, reuse.devices())? {
            Step::Chosen(ids) => (ids, snapshot.offer.devices.clone()),
            Step::Open(open) => {
                let preferred =
                    self.preferred(&want.resource, &job.request_id, &open.question(), deadline).await;
                // The call took some time: the choice is made from the newest list.
                let now = self.snapshot(&want.resource, None)?;
                match choose::choose(&now.stock(), want, held, reuse.devices())? {
                    Step::Chosen(ids) => (ids, now.offer.devices),
                    Step::Open(open) => (open.finish(&preferred), now.offer.devices),
                }
            }
        };
        Ok(entry(want, with_nodes(ids, &devices), None))
    }

    /// Chooses devices of a pool: those of an init container's claim if it fits as it is, or those of the fewest NUMA nodes.
    fn choose_pooled(
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
        let claim = pool_claims::name_claim(pod, &want.container, resource, driver)?;
        let snapshot = self.snapshot(resource, Some((&pod.uid, &claim.id.uid)))?;
        if let Some((claim, devices)) = reuse.claim(driver, want.count, |id| snapshot.is_healthy(id)) {
            return Ok(entry(want, devices.clone(), Some(claim.clone())));
        }
        Ok(entry(want, choose_from_pool(want, &snapshot)?, Some(claim)))
    }

    /// Makes the choices durable. None: no plugin has to be called.
    async fn commit_allocation_intents(
        &self,
        job: &Job<'_>,
        choices: &Choices,
    ) -> Result<Option<Arc<PodAllocation>>, Problem> {
        let pod = &job.pod().uid;
        let Some(reserved) = self.allocation(pod.as_str()) else { return Ok(None) };
        // A device that is not healthy any more is dropped: the next try chooses another.
        let is_lost = |choice: &Chosen| matches!(choice, Err(p) if p.code == ProblemCode::DevicesUnhealthy);
        let lost: BTreeSet<_> =
            choices.iter().filter(|(_, choice)| is_lost(choice)).map(|(key, _)| key.clone()).collect();
        if lost.is_empty() && job.before.as_ref() == Some(&reserved) {
            return Ok(Some(reserved));
        }
        let intents = Arc::new(record::ordered(&reserved, job.request, &lost));
        if let Err(problem) = self.commit_allocation(&intents).await {
            self.devices().table.restore(pod, job.before.clone());
            return Err(problem);
        }
        Ok(Some(intents))
    }

    /// Makes a pod's record durable, then current: devices that it frees cannot be taken before.
    pub(super) async fn commit_allocation(&self, record: &Arc<PodAllocation>) -> Result<(), Problem> {
        let after = (!record.entries.is_empty()).then(|| record.clone());
        let change = after
            .clone()
            .map_or_else(|| Change::DeleteAllocation(record.uid().clone()), Change::PutAllocation);
        if let Err(error) = self.checkpoint.commit(vec![change]).await {
            tracing::error!(error = chain(&error), pod = %record.pod, "commit to the checkpoint failed");
            return Err(error.problem());
        }
        self.devices().table.restore(record.uid(), after);
        if let Some(adapters) = self.adapters.as_ref().filter(|adapters| adapters.has_taken()) {
            let pods: Vec<_> = self.allocations().into_values().collect();
            adapters.set_allocations(pods.iter().map(Arc::as_ref));
        }
        Ok(())
    }

    /// Calls plugins for entries without an answer: resources in parallel, the containers of one in their order.
    async fn call_plugins(
        &self,
        job: &Job<'_>,
        intents: &PodAllocation,
        choices: &Choices,
    ) -> BTreeMap<Key, Result<AllocationEntry, Problem>> {
        let mut open: BTreeMap<&ExtendedResource, Vec<&AllocationEntry>> = BTreeMap::new();
        let is_chosen =
            |entry: &&AllocationEntry| matches!(choices.get(&record::key(entry)), Some(Ok(Some(_))));
        for entry in intents.entries.iter().filter(|entry| !entry.is_complete()).filter(is_chosen) {
            open.entry(&entry.resource).or_default().push(entry);
        }
        let calls = open.into_iter().map(|(resource, entries)| async move {
            let deadline = Instant::now() + self.settings.call_deadline;
            let mut answers = Vec::new();
            for entry in entries {
                let answer = self.call_plugin(job, entry, deadline).await;
                if let Err(problem) = &answer {
                    let (pod, container) = (job.pod(), &entry.container);
                    tracing::warn!(%resource, %pod, container, request = %job.request_id, code = problem.code, %problem, "devices not allocated");
                }
                answers.push((record::key(entry), answer));
            }
            answers
        });
        join_all(calls).await.into_iter().flatten().collect()
    }

    async fn call_plugin(
        &self,
        job: &Job<'_>,
        entry: &AllocationEntry,
        deadline: Instant,
    ) -> Result<AllocationEntry, Problem> {
        let resource = &entry.resource;
        let driver = self.plugin(resource).ok_or_else(|| no_plugin(resource))?;
        let ids: Vec<_> = entry.devices.keys().cloned().collect();
        let call = plugin_call(&job.request_id, deadline);
        failpoint::pass(Point::AllocateCall);
        let started = Instant::now();
        let answered = within(deadline, resource, "allocation", driver.allocate(&call, &ids)).await;
        self.device_metrics.allocated(resource, started.elapsed());
        let response = answered?;
        failpoint::pass(Point::AllocateAnswered);
        let (hardware, answer, of) = (self.settings.hardware.clone(), response.clone(), resource.clone());
        // A path may be on a file system that hangs: not for a thread that serves requests. The runtime finds the nodes itself.
        let checked = tokio::task::spawn_blocking(move || {
            plugin_paths::device_nodes(&of, &answer, &hardware).map(drop)
        });
        let checked = async { checked.await.unwrap_or_else(|_| Err(interrupted())) };
        within(deadline, resource, "check of the paths that the allocation names", checked).await?;
        let pre_start = driver.options().pre_start_required;
        Ok(AllocationEntry { response: Some(response), pre_start, ..entry.clone() })
    }

    async fn commit_answers(
        &self,
        intents: &PodAllocation,
        answers: BTreeMap<Key, Result<AllocationEntry, Problem>>,
        choices: &mut Choices,
    ) {
        if answers.is_empty() {
            return;
        }
        let record = Arc::new(record::answered(intents, &answers));
        let committed = self.commit_allocation(&record).await;
        failpoint::pass(Point::AllocateCommitted);
        for (key, answer) in answers {
            // A refusal keeps its own problem, whether it is durable or not.
            if let Some(problem) = answer.err().or_else(|| committed.as_ref().err().cloned()) {
                choices.insert(key, Err(problem));
            }
        }
    }

    /// The native device plugin of a resource, while it is connected.
    pub fn plugin(&self, resource: &ExtendedResource) -> Option<Arc<dyn DeviceDriver>> {
        let known = {
            let state = self.devices();
            let offer = state.resources.source(resource).filter(|offer| offer.is_active());
            offer.and_then(|offer| offer.plugin.as_ref().map(|(_, driver)| driver.clone()))
        };
        // Pods that had its devices before it was adapted have them by its own IDs.
        known.or_else(|| self.adapters.as_ref()?.plugin(resource))
    }

    /// Calls the plugins of a container's devices. A container without devices is success.
    pub(crate) async fn pre_start(
        &self,
        pod: &Uid,
        container: &str,
        request_id: &Arc<str>,
    ) -> Result<(), Problem> {
        let record = self.allocation(pod.as_str());
        let entries = record.iter().flat_map(|record| &record.entries);
        for entry in entries.filter(|entry| entry.container == container && entry.claim.is_none()) {
            self.pre_start_entry(entry, request_id).await?;
        }
        Ok(())
    }

    async fn pre_start_entry(&self, entry: &AllocationEntry, request_id: &Arc<str>) -> Result<(), Problem> {
        let AllocationEntry { container, resource, .. } = entry;
        if !entry.is_complete() {
            let message =
                format!("container {container} has no devices of {resource}: they are not allocated yet");
            return Err(Problem::unavailable(ProblemCode::DevicesNotAllocated, message));
        }
        let Some(driver) = self.plugin(resource) else {
            // The plugin's options at the allocation still count.
            return if entry.pre_start { Err(no_plugin(resource)) } else { Ok(()) };
        };
        if !driver.options().pre_start_required {
            return Ok(());
        }
        let ids: Vec<_> = entry.devices.keys().cloned().collect();
        let deadline = Instant::now() + self.settings.pre_start_deadline;
        let call = plugin_call(request_id, deadline);
        within(deadline, resource, "before the start of a container", driver.pre_start(&call, &ids)).await
    }
}

pub(super) fn plugin_call(request_id: &Arc<str>, deadline: Instant) -> Call {
    Call { request_id: request_id.clone(), deadline: deadline.saturating_duration_since(Instant::now()) }
}

pub(super) fn choose_from_pool(want: &Want, snapshot: &Snapshot) -> Result<DeviceNodes, Problem> {
    let ids = match choose::choose(&snapshot.stock(), want, None, &BTreeSet::new())? {
        Step::Chosen(ids) => ids,
        Step::Open(open) => {
            let question = open.question();
            let available: Vec<_> =
                question.available.iter().filter_map(|id| snapshot.offer.devices.get(id)).collect();
            let closest = affinity::closest(&available, &question.must_include, question.size);
            open.finish(&closest)
        }
    };
    Ok(with_nodes(ids, &snapshot.offer.devices))
}

fn entry(want: &Want, devices: DeviceNodes, claim: Option<PooledClaim>) -> AllocationEntry {
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

fn with_nodes(ids: BTreeSet<String>, devices: &BTreeMap<String, PluginDevice>) -> DeviceNodes {
    let nodes = |id: &String| devices.get(id).map(|device| device.numa_nodes.clone()).unwrap_or_default();
    ids.into_iter().map(|id| (id.clone(), nodes(&id))).collect()
}

fn outcome(job: &Job<'_>, key: Key, choices: &Choices) -> ResourceOutcome {
    let end = choices.get(&key).cloned().unwrap_or_else(|| Err(interrupted()));
    let (container, resource) = key;
    if let Err(problem) = &end {
        let pod = job.pod();
        tracing::info!(%pod, container, %resource, request = %job.request_id, code = problem.code, %problem, "no devices");
    }
    let end = end.map(|entry| entry.map(|entry| entry.devices).unwrap_or_default());
    ResourceOutcome { container, resource, end }
}

fn too_many(want: &Want) -> Problem {
    let Want { container, resource, count, .. } = want;
    let max = limit::ALLOCATED_DEVICES_MAX;
    let message =
        format!("container {container} wants {count} devices of {resource}, and a claim has {max} at most");
    Problem::invalid(ProblemCode::TooManyDevices, message)
}

/// Ends a plugin's call at the deadline, whatever the plugin does.
pub(super) async fn within<T>(
    deadline: Instant,
    resource: &ExtendedResource,
    what: &str,
    call: impl Future<Output = Result<T, Problem>>,
) -> Result<T, Problem> {
    let timed_out = |_| {
        let message = format!("the plugin of {resource} did not answer in time ({what})");
        Err(Problem::unavailable(ProblemCode::DriverDeadline, message).retry_after(Duration::from_secs(5)))
    };
    timeout_at(deadline, call).await.unwrap_or_else(timed_out)
}

fn of_kubelet(resource: &ExtendedResource) -> Problem {
    let message = format!(
        "the kubelet of this node allocates the devices of {resource}: request them in a pod of the cluster"
    );
    Problem::denied(ProblemCode::ResourceOfKubelet, message)
}

pub(super) fn busy(resource: &ExtendedResource) -> Problem {
    let message = format!("another pod waits for the plugin of {resource}, which does not answer");
    Problem::unavailable(ProblemCode::ResourceBusy, message).retry_after(Duration::from_secs(5))
}

fn no_plugin(resource: &ExtendedResource) -> Problem {
    Problem::unavailable(ProblemCode::PluginGone, format!("the plugin of {resource} is not connected"))
}
