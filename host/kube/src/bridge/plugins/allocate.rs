//! Carries out Allocate: claims of devices prepared, and those of pods that are gone given up first.
//!
//! One operation at a time for a device; two Allocates of other devices do not wait for each other.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::claim::{self, Ids, device_id};
use super::counters::Counters;
use super::in_use::{InUse, InUseSource};
use super::offer::PoolOffer;
use super::plan::{self, Earlier};
use super::{DriverNow, HeldDevices, PluginClaims, PooledResources, PreparedDevices, convert, offering};
use nodedock_base::error::chain;
use nodedock_base::locks::Locks;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    ContainerAllocation, DriverName, ExtendedResource, KubeletDevice, ObjectRef, Problem, ProblemKind, Uid,
    limit,
};

/// Between looks whether a driver that is waited for still may come.
const LOOK_PERIOD: Duration = Duration::from_millis(500);

/// What answers Allocate, for all resources.
pub(super) struct Allocations {
    claims: Arc<dyn PluginClaims>,
    pools: Arc<dyn PooledResources>,
    in_use: Arc<dyn InUseSource>,
    counters: Arc<Counters>,
    tasks: Tasks,
    /// By driver and device.
    locks: Locks<String>,
    /// When a kubelet asked for a claim last.
    asked: Mutex<HashMap<Uid, Instant>>,
    started: Instant,
    /// Wakes whoever looks for claims that nobody uses.
    pub(super) begun: Notify,
}

impl Allocations {
    pub(super) fn new(
        claims: Arc<dyn PluginClaims>,
        pools: Arc<dyn PooledResources>,
        in_use: Arc<dyn InUseSource>,
        counters: Arc<Counters>,
        tasks: Tasks,
    ) -> Self {
        Self {
            claims,
            pools,
            in_use,
            counters,
            tasks,
            locks: Locks::default(),
            asked: Mutex::default(),
            started: Instant::now(),
            begun: Notify::new(),
        }
    }

    /// What one container needs for its devices: CDI names and annotations. Goes on when the kubelet goes away, which asks for the same again.
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
        let work = async move { this.work(&resource, &offer, &ids, &request_id).await };
        let interrupted =
            || Problem::internal("interrupted", "the allocation ended before its time; ask again");
        self.tasks.complete("device-plugin-allocate", work).await.unwrap_or_else(|| Err(interrupted()))
    }

    /// A driver that is on its way is waited for, and asked once more: its devices are listed from our start on, a kubelet sets no
    /// time for this call, and it rejects the pod for good if it fails.
    async fn work(
        &self,
        resource: &ExtendedResource,
        offer: &PoolOffer,
        ids: &Ids,
        request_id: &Arc<str>,
    ) -> Result<ContainerAllocation, Problem> {
        // Before it is asked: one that begins to serve meanwhile is worth the second time.
        let was_there = self.pools.driver(&offer.driver) == DriverNow::Serves;
        let first = self.once(resource, offer, ids, request_id).await;
        let is_unavailable = first.as_ref().is_err_and(|problem| problem.kind == ProblemKind::Unavailable);
        if is_unavailable && !was_there && self.comes(&offer.driver).await {
            return self.once(resource, offer, ids, request_id).await;
        }
        first
    }

    /// Waits until a driver serves. False: it does not come, or not in time.
    async fn comes(&self, driver: &DriverName) -> bool {
        let until = Instant::now() + limit::BRIDGE_DRIVER_WAIT;
        let mut changes = self.pools.follow();
        loop {
            changes.iter_mut().for_each(watch::Receiver::mark_unchanged);
            let now = Instant::now();
            match self.pools.driver(driver) {
                DriverNow::Serves => return true,
                // Just after our start nobody knows yet what is here.
                DriverNow::Away if now >= self.started + limit::BRIDGE_SETTLE => return false,
                DriverNow::Away | DriverNow::Comes if now >= until => return false,
                DriverNow::Away | DriverNow::Comes => {}
            }
            tokio::select! {
                () = self.tasks.stopped() => return false,
                // Whichever it was, the next turn looks.
                () = offering::any_changed(&mut changes) => {}
                // What fails instead of serving is told by nobody.
                () = tokio::time::sleep_until((now + LOOK_PERIOD).min(until)) => {}
            }
        }
    }

    async fn once(
        &self,
        resource: &ExtendedResource,
        offer: &PoolOffer,
        ids: &Ids,
        request_id: &Arc<str>,
    ) -> Result<ContainerAllocation, Problem> {
        let driver = &offer.driver;
        let _devices = self.locks.take(ids.iter().map(|id| key(driver, id))).await;
        let mut earlier = self.earlier(driver);
        check_known(resource, offer, ids, &earlier)?;
        if plan::depends_on_pods(ids, &earlier) {
            self.look(driver, &mut earlier).await;
        }
        let plan = plan::plan(ids, &earlier);
        for idle in &plan.give_up {
            self.give_up_for(driver, idle, request_id).await?;
        }
        let mut answer = ContainerAllocation::default();
        for (claim, of) in &plan.join {
            let prepared = self.prepare(driver, claim.claim.clone(), &claim.devices, request_id).await?;
            add(&mut answer, prepared, of);
        }
        for devices in claim::portions(&plan.new) {
            let id = claim::id(driver, resource, &devices)?;
            add(&mut answer, self.prepare(driver, id, &devices, request_id).await?, &devices);
        }
        Ok(answer)
    }

    fn earlier(&self, driver: &DriverName) -> Vec<Earlier> {
        let now = Instant::now();
        let held = self.claims.held().into_iter().filter(|held| held.driver == *driver);
        held.map(|held| Earlier {
            is_fresh: now < self.asked_at(&held.claim.uid) + limit::ADMISSION,
            claim: held.claim,
            devices: held.devices,
            is_used: None,
        })
        .collect()
    }

    /// Learns which claims pods use. What cannot be learned is not known, and the claims serve again.
    async fn look(&self, driver: &DriverName, earlier: &mut [Earlier]) {
        let listed = self.list(limit::IN_USE_DEADLINE_SHORT).await;
        let in_use = match listed {
            Ok(in_use) => in_use,
            Err(error) => {
                tracing::debug!(%driver, error, "which devices pods have is not known");
                return;
            }
        };
        for claim in earlier {
            let held = HeldDevices {
                driver: driver.clone(),
                claim: claim.claim.clone(),
                devices: claim.devices.clone(),
            };
            claim.is_used = Some(in_use.resource(&held).is_some());
        }
    }

    /// Asks the kubelet which devices pods have.
    pub(super) async fn list(&self, deadline: Duration) -> Result<InUse, String> {
        let listed = self.in_use.list(deadline).await;
        self.counters.looked(listed.is_ok());
        listed.map_err(|error| chain(&error))
    }

    async fn give_up_for(
        &self,
        driver: &DriverName,
        idle: &Earlier,
        request_id: &Arc<str>,
    ) -> Result<(), Problem> {
        let done = self.claims.unprepare(driver, &idle.claim, request_id.clone());
        let outcome = tokio::time::timeout(limit::GIVE_UP_WAIT, done).await;
        let why = match outcome {
            Ok(Ok(())) => {
                tracing::info!(%driver, claim = %idle.claim, request = %request_id, "devices of a pod that is gone given up");
                self.forget(&idle.claim.uid);
                return Ok(());
            }
            Ok(Err(problem)) => problem.message,
            Err(_) => format!("no answer within {} s", limit::GIVE_UP_WAIT.as_secs()),
        };
        let devices: Vec<_> = idle.devices.iter().map(String::as_str).collect();
        let message = format!(
            "the driver {driver} has not given up {} of a pod that is gone: {why}",
            devices.join(", ")
        );
        Err(Problem::unavailable("devices-not-given-up", message).with("claim", &idle.claim))
    }

    async fn prepare(
        &self,
        driver: &DriverName,
        id: ObjectRef,
        devices: &Ids,
        request_id: &Arc<str>,
    ) -> Result<PreparedDevices, Problem> {
        // Before the call: whoever looks for claims without use must not take it for an old one.
        self.asked().insert(id.uid.clone(), Instant::now());
        self.begun.notify_one();
        let claim = claim::claim(id.clone(), driver, devices)?;
        let prepared = self.claims.prepare(driver, claim, request_id.clone()).await;
        match prepared {
            Ok(prepared) => {
                self.asked().insert(id.uid, Instant::now());
                Ok(prepared)
            }
            Err(problem) => {
                if !self.claims.held().iter().any(|held| held.claim.uid == id.uid) {
                    self.forget(&id.uid);
                }
                Err(problem)
            }
        }
    }

    /// Gives up a claim that nobody uses, unless a kubelet asked for it since `asked` or asks for its devices now.
    pub(super) async fn give_up(&self, held: &HeldDevices, asked: Instant) -> Result<bool, Problem> {
        let mut devices = Vec::new();
        for id in &held.devices {
            let Some(device) = self.locks.try_take(&key(&held.driver, id)) else { return Ok(false) };
            devices.push(device);
        }
        if self.asked_at(&held.claim.uid) != asked {
            return Ok(false);
        }
        self.claims.unprepare(&held.driver, &held.claim, nodedock_base::request::new_id()).await?;
        self.forget(&held.claim.uid);
        Ok(true)
    }

    pub(super) fn held(&self) -> Vec<HeldDevices> {
        self.claims.held()
    }

    /// When a kubelet asked for a claim last; before our start it is not known.
    pub(super) fn asked_at(&self, claim: &Uid) -> Instant {
        self.asked().get(claim).copied().unwrap_or(self.started)
    }

    fn forget(&self, claim: &Uid) {
        self.asked().remove(claim);
    }

    /// Forgets what is not held any more, whoever gave it up.
    pub(super) fn retain(&self, held: &[HeldDevices], since: Instant) {
        self.asked().retain(|uid, asked| *asked > since || held.iter().any(|held| held.claim.uid == *uid));
    }

    fn asked(&self) -> MutexGuard<'_, HashMap<Uid, Instant>> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn key(driver: &DriverName, id: &str) -> String {
    format!("{driver}\0{id}")
}

/// A device that is not listed any more may be asked for again by who has it.
fn check_known(
    resource: &ExtendedResource,
    offer: &PoolOffer,
    ids: &Ids,
    earlier: &[Earlier],
) -> Result<(), Problem> {
    let listed: BTreeMap<&str, ()> = offer.devices.iter().map(|device| (device.id.as_str(), ())).collect();
    let is_known = |id: &&String| {
        listed.contains_key(id.as_str()) || earlier.iter().any(|claim| claim.devices.contains(*id))
    };
    match ids.iter().find(|id| !is_known(id)) {
        None => Ok(()),
        Some(id) => {
            let message =
                format!("{} is no device of {resource} by the driver {}", convert::shown(id), offer.driver);
            Err(Problem::not_found("device-unknown", message))
        }
    }
}

/// Adds CDI names of the wanted devices, each once, and annotations, of which the first of a key stands.
fn add(answer: &mut ContainerAllocation, prepared: PreparedDevices, wanted: &Ids) {
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
