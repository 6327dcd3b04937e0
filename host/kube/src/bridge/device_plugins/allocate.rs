//! Allocate: prepares claims for devices, and releases first those of pods that are gone.
//!
//! One operation at a time for a device; two Allocates of other devices do not wait for each other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::claim::{self, Ids, device_id};
use super::in_use;
use super::offers::PoolOffer;
use super::plan::{self, Existing};
use crate::bridge::claims::DeviceClaim;
use crate::bridge::{Context, convert};
use nodedock_base::locks::Locks;
use nodedock_base::request::new_id;
use nodedock_model::{
    ContainerAllocation, DriverName, ExtendedResource, KubeletDevice, ObjectRef, PreparedForKubelet, Problem,
    ProblemKind, Uid, limit,
};

/// Answers Allocate, for all resources.
pub(in crate::bridge) struct Allocations {
    context: Arc<Context>,
    /// By driver and device.
    locks: Locks<(DriverName, String)>,
    /// When a kubelet requested a claim last.
    requested: Mutex<HashMap<Uid, Instant>>,
    /// Notified when a claim is prepared.
    pub(super) begun: Notify,
}

impl Allocations {
    pub(in crate::bridge) fn new(context: Arc<Context>) -> Self {
        Self { context, locks: Locks::default(), requested: Mutex::default(), begun: Notify::new() }
    }

    /// What one container needs for its devices: CDI names and annotations. Not cancelled when the future is dropped: the kubelet
    /// repeats the call.
    pub(super) async fn allocate(
        self: &Arc<Self>,
        resource: &ExtendedResource,
        offer: Arc<PoolOffer>,
        ids: Ids,
        request_id: Arc<str>,
    ) -> Result<ContainerAllocation, Problem> {
        if ids.is_empty() {
            return Ok(ContainerAllocation::default());
        }
        let (this, resource) = (self.clone(), resource.clone());
        let work = async move { this.allocate_when_served(&resource, &offer, &ids, &request_id).await };
        let interrupted =
            || Problem::internal("interrupted", "the allocation ended before its time; retry it");
        let tasks = &self.context.parts.tasks;
        tasks.complete("device-plugin-allocate", work).await.unwrap_or_else(|| Err(interrupted()))
    }

    /// Waits for a driver that does not serve yet, and retries once: its devices are listed from the start on, a kubelet sets no deadline
    /// for this call, and it rejects the pod for good if it fails.
    async fn allocate_when_served(
        &self,
        resource: &ExtendedResource,
        offer: &PoolOffer,
        ids: &Ids,
        request_id: &Arc<str>,
    ) -> Result<ContainerAllocation, Problem> {
        // Before the first attempt: a driver that begins to serve meanwhile is worth the second.
        let did_serve = self.context.serves(&offer.driver);
        let first = self.attempt(resource, offer, ids, request_id).await;
        let is_unavailable = first.as_ref().is_err_and(|problem| problem.kind == ProblemKind::Unavailable);
        if is_unavailable
            && !did_serve
            && self.context.serves_within(&offer.driver, limit::BRIDGE_DRIVER_WAIT).await
        {
            return self.attempt(resource, offer, ids, request_id).await;
        }
        first
    }

    async fn attempt(
        &self,
        resource: &ExtendedResource,
        offer: &PoolOffer,
        ids: &Ids,
        request_id: &Arc<str>,
    ) -> Result<ContainerAllocation, Problem> {
        let driver = &offer.driver;
        let _devices = self.locks.take(ids.iter().map(|id| (driver.clone(), id.clone()))).await;
        let mut existing = self.existing(driver);
        check_known(resource, offer, ids, &existing)?;
        if plan::depends_on_pods(ids, &existing) {
            self.learn_usage(&mut existing).await;
        }
        let plan = plan::plan(ids, &existing);
        for unused in &plan.release {
            self.release_for(unused, request_id).await?;
        }
        let mut answer = ContainerAllocation::default();
        for (existing, wanted) in &plan.join {
            let (id, devices) = (existing.claim.clone(), &existing.devices);
            add(&mut answer, self.prepare(driver, id, devices, request_id).await?, wanted);
        }
        for devices in claim::portions(&plan.new) {
            let id = claim::id(driver, resource, &devices)?;
            add(&mut answer, self.prepare(driver, id, &devices, request_id).await?, &devices);
        }
        Ok(answer)
    }

    fn existing(&self, driver: &DriverName) -> Vec<Existing> {
        let (now, admission) = (Instant::now(), self.context.parts.times.admission);
        let claims = self.context.claims.device_claims().into_iter().filter(|claim| claim.driver == *driver);
        let existing = |claim: DeviceClaim| {
            let is_fresh = now < self.requested_at(&claim.claim.uid) + admission;
            Existing { claim, is_fresh, is_used: None }
        };
        claims.map(existing).collect()
    }

    /// Learns which claims pods use. Without an answer that stays unknown, and the claims serve again.
    async fn learn_usage(&self, existing: &mut [Existing]) {
        match in_use::list(&self.context, limit::IN_USE_DEADLINE_SHORT).await {
            Ok(in_use) => {
                existing.iter_mut().for_each(|existing| existing.is_used = Some(in_use.has(&existing.claim)));
            }
            Err(error) => tracing::debug!(error, "which devices pods use is not known"),
        }
    }

    async fn release_for(&self, unused: &DeviceClaim, request_id: &Arc<str>) -> Result<(), Problem> {
        let DeviceClaim { claim, driver, devices } = unused;
        let manager = self.context.claims.manager()?;
        let unprepare = manager.unprepare_for_kubelet(driver, claim, request_id.clone());
        let why = match tokio::time::timeout(limit::GIVE_UP_WAIT, unprepare).await {
            Ok(Ok(())) => {
                tracing::info!(%driver, %claim, request = %request_id, "released devices of a pod that is gone");
                self.requested().remove(&claim.uid);
                return Ok(());
            }
            Ok(Err(problem)) => problem.message,
            Err(_) => format!("no answer within {} s", limit::GIVE_UP_WAIT.as_secs()),
        };
        let devices: Vec<_> = devices.iter().map(String::as_str).collect();
        let message =
            format!("driver {driver} has not unprepared {} of a pod that is gone: {why}", devices.join(", "));
        Err(Problem::unavailable("devices-not-given-up", message).with("claim", claim))
    }

    async fn prepare(
        &self,
        driver: &DriverName,
        id: ObjectRef,
        devices: &Ids,
        request_id: &Arc<str>,
    ) -> Result<PreparedForKubelet, Problem> {
        // Before the call: the search for unused claims must not take it for an old one.
        self.requested().insert(id.uid.clone(), Instant::now());
        self.begun.notify_one();
        let claim = claim::claim(id.clone(), driver, devices)?;
        let prepared = match self.context.claims.manager() {
            Ok(manager) => manager.prepare_given_for_kubelet(driver, claim, request_id.clone()).await,
            Err(problem) => Err(problem),
        };
        if prepared.is_ok() {
            self.requested().insert(id.uid, Instant::now());
        } else if !self.context.claims.device_claims().iter().any(|known| known.claim.uid == id.uid) {
            self.requested().remove(&id.uid);
        }
        prepared
    }

    /// Releases a claim that no pod uses. False: a kubelet requested it since `requested`, or requests its devices now.
    pub(super) async fn release(&self, unused: &DeviceClaim, requested: Instant) -> Result<bool, Problem> {
        let DeviceClaim { claim, driver, devices } = unused;
        let lock = |id: &String| self.locks.try_take(&(driver.clone(), id.clone()));
        let Some(_devices) = devices.iter().map(lock).collect::<Option<Vec<_>>>() else { return Ok(false) };
        if self.requested_at(&claim.uid) != requested {
            return Ok(false);
        }
        self.context.claims.manager()?.unprepare_for_kubelet(driver, claim, new_id()).await?;
        self.requested().remove(&claim.uid);
        Ok(true)
    }

    /// When a kubelet requested a claim last; for one from before a restart, the start.
    pub(super) fn requested_at(&self, claim: &Uid) -> Instant {
        self.requested().get(claim).copied().unwrap_or(self.context.started)
    }

    /// Forgets claims that are gone, unless they were requested after `since`.
    pub(super) fn forget_all_but(&self, claims: &[DeviceClaim], since: Instant) {
        let is_known = |uid: &Uid| claims.iter().any(|known| known.claim.uid == *uid);
        self.requested().retain(|uid, requested| *requested > since || is_known(uid));
    }

    fn requested(&self) -> MutexGuard<'_, HashMap<Uid, Instant>> {
        self.requested.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A device that is not listed any more may still be requested by the pod that has it.
fn check_known(
    resource: &ExtendedResource,
    offer: &PoolOffer,
    ids: &Ids,
    existing: &[Existing],
) -> Result<(), Problem> {
    let listed: Ids = offer.devices.iter().map(|device| device.id.clone()).collect();
    let is_known =
        |id: &&String| listed.contains(*id) || existing.iter().any(|known| known.claim.devices.contains(*id));
    let Some(unknown) = ids.iter().find(|id| !is_known(id)) else { return Ok(()) };
    let message =
        format!("{} is no device of {resource} by the driver {}", convert::shown(unknown), offer.driver);
    Err(Problem::not_found("device-unknown", message))
}

/// Adds CDI names of the wanted devices, each once, and annotations, of which the first of a key counts.
fn add(answer: &mut ContainerAllocation, prepared: PreparedForKubelet, wanted: &Ids) {
    let is_wanted = |device: &KubeletDevice| wanted.contains(&device_id(&device.pool, &device.device));
    for name in prepared.devices.into_iter().filter(is_wanted).flat_map(|device| device.cdi) {
        if !answer.cdi_devices.contains(&name) {
            answer.cdi_devices.push(name);
        }
    }
    for (key, value) in prepared.annotations {
        answer.annotations.entry(key).or_insert(value);
    }
}
