//! Chooses the devices of a pod's containers, and makes the claims that have them. The claims are prepared like all others.

mod snapshot;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep_until, timeout_at};

use self::snapshot::Snapshot;
use super::held;
use super::reuse::Reuse;
use super::{Devices, ResourceSource};
use crate::manager::claims::hardware::Holds;
use crate::manager::claims::machine::UnprepareRequest;
use crate::manager::claims::source::ClaimSource;
use crate::manager::claims::unprepare::Unprepares;
use crate::manager::entry::{self, Choices, Chosen, Entry, Key};
use crate::records::RecordStore;
use nodedock_allocator::resource::{self as choose, DeviceNodes, Step, Want, closest};
use nodedock_base::locks::Locks;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    ExtendedResource, ObjectRef, PluginDevice, PodRequest, PooledClaim, Problem, ProblemCode, Uid,
    limit, plugin_driver,
};

/// Others have the devices, or their plugin does not list them as healthy yet.
const WAITS: [ProblemCode; 2] = [ProblemCode::TooFewDevices, ProblemCode::NoHealthyDevice];

/// A request that is being carried out.
struct Job<'a> {
    pod: &'a ObjectRef,
    /// Devices that the pod had before the request.
    before: Vec<Entry>,
    request_id: Arc<str>,
}

impl Job<'_> {
    fn held(&self, want: &Want) -> Option<&Entry> {
        self.before
            .iter()
            .find(|entry| entry.container == want.container && entry.resource == want.resource)
    }

    /// The outcome of a want for which nothing has to be chosen.
    fn known(&self, want: &Want) -> Option<Chosen> {
        match self.held(want) {
            Some(held) if held.devices.len() != want.count => {
                Some(choose::check_count(want, Some(&held.devices)).map(|()| None))
            }
            Some(held) if held.is_prepared || !held.is_of_plugin() => Some(Ok(Some(held.clone()))),
            None if want.count == 0 => Some(Ok(None)),
            _ => None,
        }
    }
}

/// Devices that a request has reserved for a pod. The reservations end with the request, in any way: the pod's claims then have the devices
/// that it was given.
pub(in crate::manager) struct Reservations<'a> {
    choices: &'a DeviceChoices,
    pod: &'a Uid,
}

impl Drop for Reservations<'_> {
    fn drop(&mut self) {
        let reserved: Vec<_> = {
            let mut chosen = self.choices.chosen.lock();
            let own = chosen.extract_if(.., |_, known| known.pod == *self.pod);
            own.map(|(_, known)| known.resource).collect()
        };
        if !reserved.is_empty() {
            self.choices.devices.report_resources(reserved);
        }
    }
}

/// The owner of choices of devices for containers, until their claims are in the table.
pub struct DeviceChoices {
    records: Arc<RecordStore>,
    holds: Arc<Holds>,
    unprepares: Arc<Unprepares>,
    devices: Arc<Devices>,
    source: Arc<dyn ClaimSource>,
    tasks: Tasks,
    settings: ChoiceSettings,
    /// One choice at a time of a resource's devices; no request has two of these locks.
    resource_locks: Locks<ExtendedResource>,
    /// Devices for claims that are not in the table yet, by the claim's UID. Not locked over an await.
    chosen: Mutex<BTreeMap<Uid, Reserved>>,
}

/// Deadlines and facts of the node for choices.
pub(in crate::manager) struct ChoiceSettings {
    /// Deadline of a device plugin's calls while devices are chosen.
    pub(in crate::manager) call_deadline: Duration,
    /// Time for which a choice waits for devices.
    pub(in crate::manager) exclusive_wait: Duration,
    /// NUMA nodes of this machine, ascending.
    pub(in crate::manager) numa_nodes: Vec<u32>,
    /// A kubelet allocates the devices of native device plugins.
    pub(in crate::manager) kubelet_allocates: bool,
}

/// Devices that a pod is about to have by a claim.
struct Reserved {
    pod: Uid,
    resource: ExtendedResource,
    devices: BTreeSet<String>,
}

impl DeviceChoices {
    pub(in crate::manager) fn new(
        records: Arc<RecordStore>,
        holds: Arc<Holds>,
        unprepares: Arc<Unprepares>,
        devices: Arc<Devices>,
        source: Arc<dyn ClaimSource>,
        tasks: Tasks,
        settings: ChoiceSettings,
    ) -> Self {
        Self {
            records,
            holds,
            unprepares,
            devices,
            source,
            tasks,
            settings,
            resource_locks: Locks::default(),
            chosen: Mutex::default(),
        }
    }

    /// Waits until no request is about to take devices of a resource by the IDs of its plugin. The plugin is an adapter's by now, so no other
    /// request begins to.
    pub(in crate::manager) async fn until_in_claims(&self, resource: &ExtendedResource) {
        let mut changes = self.devices.changes();
        // A choice that began before ends first.
        drop(self.resource_locks.take([resource.clone()]).await);
        loop {
            changes.mark_unchanged();
            let is_reserved = |known: &Reserved| known.resource == *resource;
            if !self.chosen.lock().values().any(is_reserved) {
                return;
            }
            // The end of the reservations is reported; without a sender the devices are gone as well.
            if changes.changed().await.is_err() {
                return;
            }
        }
    }

    pub(in crate::manager) fn reservations<'a>(&'a self, pod: &'a Uid) -> Reservations<'a> {
        Reservations { choices: self, pod }
    }

    /// Chooses the devices of a pod whose lock the caller has, and reserves them as long as the caller has `reservations`. What the pod's claims
    /// have it keeps.
    ///
    /// Devices are a container's when the claim of its entry is prepared, which the caller sees to.
    pub(in crate::manager) async fn choose_devices(
        &self,
        request: &PodRequest,
        request_id: &Arc<str>,
    ) -> Choices {
        let wants = choose::wants(request);
        if wants.is_empty() {
            return Choices::new();
        }
        let before = held::entries(&self.records.table(), request.pod.uid.as_str());
        let job = Job {
            pod: &request.pod,
            before,
            request_id: request_id.clone(),
        };
        // Each resource by itself, so that a plugin that hangs does not delay other resources.
        let mut by_resource: BTreeMap<&ExtendedResource, Vec<&Want>> = BTreeMap::new();
        for want in &wants {
            by_resource.entry(&want.resource).or_default().push(want);
        }
        let choices = by_resource
            .into_iter()
            .map(|(resource, wants)| self.choose_of(&job, resource, wants));
        join_all(choices).await.into_iter().flatten().collect()
    }

    async fn choose_of(
        &self,
        job: &Job<'_>,
        resource: &ExtendedResource,
        wants: Vec<&Want>,
    ) -> Vec<(Key, Chosen)> {
        let known: Option<Vec<_>> = wants
            .iter()
            .map(|want| Some((entry::key(want), job.known(want)?)))
            .collect();
        if let Some(known) = known {
            return known;
        }
        // One deadline for all containers, and for the wait as well: pods that queue behind a plugin that hangs end with the first.
        let started = Instant::now();
        let deadline = started + self.settings.call_deadline;
        let (mut freed, mut changed) = (self.records.freed(), self.devices.changes());
        let mut may_wait = true;
        loop {
            let Ok(lock) = timeout_at(deadline, self.resource_locks.take([resource.clone()])).await
            else {
                return wants
                    .iter()
                    .map(|want| {
                        (
                            entry::key(want),
                            job.known(want).unwrap_or_else(|| Err(busy(resource))),
                        )
                    })
                    .collect();
            };
            freed.mark_unchanged();
            changed.mark_unchanged();
            let choices = self.choose_in_order(job, &wants, deadline).await;
            if !may_wait || !self.may_be_enough_later(resource, &wants, &choices) {
                return choices;
            }
            // Nothing of the pod is reserved while it waits: others may take it.
            self.chosen
                .lock()
                .retain(|_, known| known.pod != job.pod.uid || known.resource != *resource);
            drop(lock);
            tokio::select! {
                () = self.tasks.stopped() => may_wait = false,
                () = sleep_until(started + self.settings.exclusive_wait) => may_wait = false,
                woken = freed.changed() => may_wait = woken.is_ok(),
                woken = changed.changed() => may_wait = woken.is_ok(),
            }
        }
    }

    /// Chooses for the containers of a pod one after the other, and reserves what is chosen.
    async fn choose_in_order(
        &self,
        job: &Job<'_>,
        wants: &[&Want],
        deadline: Instant,
    ) -> Vec<(Key, Chosen)> {
        let (mut reuse, mut choices) = (Reuse::default(), Vec::new());
        for want in wants {
            let choice = match job.known(want) {
                Some(choice) => choice,
                None => self.choose_one(job, want, &reuse, deadline).await.map(Some),
            };
            if let Ok(Some(entry)) = &choice {
                reuse.settle(entry);
                self.reserve(job.pod, entry);
            }
            choices.push((entry::key(want), choice));
        }
        choices
    }

    /// Returns whether too few devices are free or healthy now for a container, although the resource has enough of them.
    fn may_be_enough_later(
        &self,
        resource: &ExtendedResource,
        wants: &[&Want],
        choices: &[(Key, Chosen)],
    ) -> bool {
        choices.iter().any(|(key, choice)| {
            let Err(problem) = choice else { return false };
            let want = wants.iter().find(|want| entry::key(want) == *key);
            let count = want.map_or(usize::MAX, |want| want.count);
            let is_wait = WAITS.iter().any(|code| problem.code == *code);
            is_wait
                && self
                    .devices
                    .offer(resource)
                    .is_some_and(|of| of.devices.len() >= count)
        })
    }

    /// Reserves an entry, so that no other pod takes its devices before its claim is in the table.
    fn reserve(&self, pod: &ObjectRef, entry: &Entry) {
        let devices = entry.devices.keys().cloned().collect();
        let reserved = Reserved {
            pod: pod.uid.clone(),
            resource: entry.resource.clone(),
            devices,
        };
        self.chosen
            .lock()
            .insert(entry.claim.id.uid.clone(), reserved);
    }

    async fn choose_one(
        &self,
        job: &Job<'_>,
        want: &Want,
        reuse: &Reuse,
        deadline: Instant,
    ) -> Result<Entry, Problem> {
        let driver = match self.devices.offer(&want.resource).map(|offer| offer.source) {
            Some(ResourceSource::Pools(driver)) => driver,
            _ => plugin_driver(&want.resource),
        };
        let held = job.held(want).filter(|held| held.claim.driver == driver);
        if let Some(other) = job.held(want).filter(|_| held.is_none()) {
            // Its plugin has become an adapter, or is one no more, and was not asked yet.
            self.unprepare_for_pod(job, &other.claim.id.uid).await?;
        }
        let claim = match held {
            Some(held) => held.claim.clone(),
            None => PooledClaim::named(job.pod, &want.container, &want.resource, &driver),
        };
        let snapshot = self.snapshot(&want.resource, Some(&claim.id.uid))?;
        if let ResourceSource::Pools(driver) = &snapshot.offer.source {
            if want.count > limit::ALLOCATED_DEVICES_MAX {
                return Err(too_many(want));
            }
            if let Some((claim, devices)) =
                reuse.claim(driver, want.count, |id| snapshot.is_healthy(id))
            {
                return Ok(entry::entry(want, claim.clone(), devices.clone()));
            }
            return Ok(entry::entry(
                want,
                claim,
                self.choose_from_pool(want, &snapshot)?,
            ));
        }
        if self.settings.kubelet_allocates && held.is_none() {
            return Err(of_kubelet(&want.resource));
        }
        let chosen = choose::choose(
            &snapshot.stock(),
            want,
            held.map(|held| &held.devices),
            reuse.devices(),
        );
        if chosen
            .as_ref()
            .is_err_and(|problem| problem.code == ProblemCode::DevicesUnhealthy)
        {
            // The next try chooses others.
            self.unprepare_for_pod(job, &claim.id.uid).await?;
        }
        let (ids, devices) = match chosen? {
            Step::Chosen(ids) => (ids, snapshot.offer.devices.clone()),
            Step::Open(open) => {
                let preferred = self
                    .devices
                    .preferred(&want.resource, &job.request_id, &open.question(), deadline)
                    .await;
                // The call took some time: the choice is made from the newest list.
                let now = self.snapshot(&want.resource, Some(&claim.id.uid))?;
                match choose::choose(&now.stock(), want, None, reuse.devices())? {
                    Step::Chosen(ids) => (ids, now.offer.devices),
                    Step::Open(open) => (open.finish(&preferred), now.offer.devices),
                }
            }
        };
        Ok(entry::entry(want, claim, with_nodes(ids, &devices)))
    }

    async fn unprepare_for_pod(&self, job: &Job<'_>, claim: &Uid) -> Result<(), Problem> {
        let by = UnprepareRequest::Pod(&job.pod.uid);
        self.unprepares
            .unprepare_one_claim(claim, by, job.request_id.clone())
            .await
    }

    /// Chooses again for an entry whose devices another claim has, and whose claim is not prepared; the caller has the pod's lock.
    pub(in crate::manager) async fn choose_others(
        &self,
        pod: &ObjectRef,
        entry: &Entry,
    ) -> Result<Entry, Problem> {
        let deadline = Instant::now() + self.settings.call_deadline;
        let lock = timeout_at(deadline, self.resource_locks.take([entry.resource.clone()])).await;
        let _lock = lock.map_err(|_| busy(&entry.resource))?;
        let snapshot = self.snapshot(&entry.resource, Some(&entry.claim.id.uid))?;
        if snapshot.offer.driver(&entry.resource).as_ref() != Some(&entry.claim.driver) {
            return Err(choose::unregistered(&entry.resource));
        }
        let devices = self.choose_from_pool(&entry::want(entry), &snapshot)?;
        let entry = Entry {
            devices,
            ..entry.clone()
        };
        self.reserve(pod, &entry);
        Ok(entry)
    }

    fn choose_from_pool(&self, want: &Want, snapshot: &Snapshot) -> Result<DeviceNodes, Problem> {
        let ids = match choose::choose(&snapshot.stock(), want, None, &BTreeSet::new())? {
            Step::Chosen(ids) => ids,
            Step::Open(open) => {
                let question = open.question();
                let available: Vec<_> = question
                    .available
                    .iter()
                    .filter_map(|id| snapshot.offer.devices.get(id))
                    .collect();
                let closest = closest(&available, &question.must_include, question.size);
                open.finish(&closest)
            }
        };
        let ids = self.that_fit_together(want, snapshot, ids)?;
        Ok(with_nodes(ids, &snapshot.offer.devices))
    }
}

fn with_nodes(ids: BTreeSet<String>, devices: &BTreeMap<String, PluginDevice>) -> DeviceNodes {
    let with_nodes = ids.into_iter().map(|id| {
        let nodes = devices.get(&id).map(|device| device.numa_nodes.clone());
        (id, nodes.unwrap_or_default())
    });
    with_nodes.collect()
}

fn too_many(want: &Want) -> Problem {
    let Want {
        container,
        resource,
        count,
        ..
    } = want;
    let max = limit::ALLOCATED_DEVICES_MAX;
    let message = format!(
        "container {container} wants {count} devices of {resource}, and a claim has {max} at most"
    );
    Problem::invalid(ProblemCode::TooManyDevices, message)
}

fn of_kubelet(resource: &ExtendedResource) -> Problem {
    let message = format!(
        "the kubelet of this node allocates the devices of {resource}: request them in a pod of the cluster"
    );
    Problem::denied(ProblemCode::ResourceOfKubelet, message)
}

fn busy(resource: &ExtendedResource) -> Problem {
    let message = format!("another pod waits for the plugin of {resource}, which does not answer");
    Problem::unavailable(ProblemCode::ResourceBusy, message)
        .retry_after(std::time::Duration::from_secs(5))
}
