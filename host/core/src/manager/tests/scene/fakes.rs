//! A claim source, a driver and a device plugin that a test scripts.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use tokio::sync::watch;

use crate::driver::{
    Call, ClaimDriver, DeviceDriver, DeviceLists, DeviceOptions, Outcomes, Published,
};
use crate::manager::claims::fixtures::prepared;
use crate::manager::claims::source::ClaimSource;
use nodedock_model::{
    Allocation, Claim, ContainerAllocation, DeviceAccess, DeviceStatus, DriverClaim,
    DriverClaimRecord, DriverName, Edits, Inventory, ObjectName, Pool, PoolName, PreparedClaim,
    Problem, Uid,
};
pub(crate) struct FakeSource {
    /// Allocations that the source's own allocator has made for claims.
    allocated: Mutex<Vec<(Uid, Allocation)>>,
    claims: Mutex<BTreeMap<(ObjectName, ObjectName), Claim>>,
    problem: Mutex<Option<Problem>>,
    /// So many reads may pass.
    passes: watch::Sender<usize>,
    reads: watch::Sender<usize>,
}

impl FakeSource {
    pub(super) fn new() -> Self {
        Self {
            allocated: Mutex::default(),
            claims: Mutex::default(),
            problem: Mutex::default(),
            passes: watch::Sender::new(usize::MAX),
            reads: watch::Sender::default(),
        }
    }

    pub(crate) fn put(&self, claim: Claim) {
        self.claims
            .lock()
            .unwrap()
            .insert((claim.id.namespace.clone(), claim.id.name.clone()), claim);
    }

    /// Has allocated a claim, which may never be prepared.
    pub(crate) fn allocate(&self, claim: Claim) {
        let allocation = claim.allocation.expect("an allocation");
        self.allocated
            .lock()
            .unwrap()
            .push((claim.id.uid, allocation));
    }

    pub(crate) fn remove(&self, claim: &Claim) {
        self.claims
            .lock()
            .unwrap()
            .remove(&(claim.id.namespace.clone(), claim.id.name.clone()));
    }

    /// Fails from now on, or returns its claims.
    pub(crate) fn fail(&self, problem: Option<Problem>) {
        *self.problem.lock().unwrap() = problem;
    }

    /// Later reads wait while it is shut.
    pub(crate) fn shut(&self, shut: bool) {
        self.passes.send_replace(if shut {
            *self.reads.borrow()
        } else {
            usize::MAX
        });
    }

    /// Lets so many reads pass in all.
    pub(crate) fn pass(&self, reads: usize) {
        self.passes.send_replace(reads);
    }

    /// Waits for so many reads.
    pub(crate) async fn asked(&self, times: usize) {
        self.reads
            .subscribe()
            .wait_for(|reads| *reads >= times)
            .await
            .unwrap();
    }
}

#[async_trait]
impl ClaimSource for FakeSource {
    async fn claim(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
    ) -> Result<Option<Claim>, Problem> {
        self.reads.send_modify(|reads| *reads += 1);
        let number = *self.reads.borrow();
        self.passes
            .subscribe()
            .wait_for(|passes| *passes >= number)
            .await
            .unwrap();
        if let Some(problem) = self.problem.lock().unwrap().clone() {
            return Err(problem);
        }
        Ok(self
            .claims
            .lock()
            .unwrap()
            .get(&(namespace.clone(), name.clone()))
            .cloned())
    }

    fn allocated(&self) -> Vec<(Uid, Allocation)> {
        self.allocated.lock().unwrap().clone()
    }
}

/// Result of a driver's next call.
pub(crate) enum Reply {
    Refuse(Problem),
    /// Edits for all containers, and no device with edits: a result that makes no CDI file.
    Unrenderable,
    /// The access of every device.
    Access(DeviceAccess),
    /// The status of every device.
    Status(DeviceStatus),
    /// An annotation for containers.
    Annotation(&'static str, &'static str),
}

pub(crate) struct FakeDriver {
    pub(crate) name: DriverName,
    /// Keeps the inventory, and publishes another.
    published: Option<watch::Sender<Arc<Published>>>,
    replies: Mutex<VecDeque<(Uid, Reply)>>,
    unprepare_refusals: Mutex<VecDeque<Problem>>,
    /// Parameters that it refuses.
    refused_parameters: Mutex<Option<(&'static str, Problem)>>,
    calls: watch::Sender<Calls>,
    /// Calls wait while it is shut.
    shut: watch::Sender<bool>,
    is_pure: AtomicBool,
}

/// Claims of each call.
#[derive(Default, Clone)]
pub(crate) struct Calls {
    pub(crate) prepare: Vec<Vec<Uid>>,
    pub(crate) unprepare: Vec<Vec<DriverClaimRecord>>,
}

impl FakeDriver {
    pub(crate) fn new(name: DriverName) -> Arc<Self> {
        Self::with(name, None)
    }

    /// A driver that publishes the pool `pool`.
    pub(crate) fn with_pool(name: DriverName, pool: Pool) -> Arc<Self> {
        let pools = BTreeMap::from([(PoolName::new("pool").unwrap(), pool)]);
        let published = Published {
            inventory: Inventory { pools },
            ..Published::default()
        };
        Self::with(name, Some(watch::Sender::new(Arc::new(published))))
    }

    /// Publishes the same devices again.
    pub(crate) fn publish(&self) {
        let published = self.published.as_ref().expect("a driver that publishes");
        published.send_modify(|known| *known = Arc::new(Published::clone(known)));
    }

    pub(super) fn inventory(&self) -> Option<watch::Receiver<Arc<Published>>> {
        self.published.as_ref().map(watch::Sender::subscribe)
    }

    fn with(name: DriverName, published: Option<watch::Sender<Arc<Published>>>) -> Arc<Self> {
        Arc::new(Self {
            name,
            published,
            replies: Mutex::default(),
            unprepare_refusals: Mutex::default(),
            refused_parameters: Mutex::default(),
            calls: watch::Sender::default(),
            shut: watch::Sender::default(),
            is_pure: AtomicBool::new(false),
        })
    }

    /// Makes the driver pure: from now on it cannot change the node.
    pub(crate) fn become_pure(&self) {
        self.is_pure.store(true, Relaxed);
    }

    /// The answer for a claim the next time that it is prepared.
    pub(crate) fn reply(&self, claim: &str, reply: Reply) {
        self.replies
            .lock()
            .unwrap()
            .push_back((Uid::new(claim).unwrap(), reply));
    }

    /// Refuses these parameters from now on.
    pub(crate) fn refuse_parameters(&self, parameters: &'static str, problem: Problem) {
        *self.refused_parameters.lock().unwrap() = Some((parameters, problem));
    }

    pub(crate) fn refuse_unprepare(&self, problem: Problem) {
        self.unprepare_refusals.lock().unwrap().push_back(problem);
    }

    pub(crate) fn shut(&self, shut: bool) {
        self.shut.send_replace(shut);
    }

    pub(crate) fn calls(&self) -> Calls {
        self.calls.borrow().clone()
    }

    pub(crate) fn counts(&self) -> (usize, usize) {
        let calls = self.calls.borrow();
        (calls.prepare.len(), calls.unprepare.len())
    }

    /// Waits for calls.
    pub(crate) async fn called(&self, wanted: impl Fn(&Calls) -> bool) {
        self.calls.subscribe().wait_for(wanted).await.unwrap();
    }

    fn next_reply(&self, claim: &Uid) -> Option<Reply> {
        let mut replies = self.replies.lock().unwrap();
        let at = replies.iter().position(|(uid, _)| uid == claim)?;
        replies.remove(at).map(|(_, reply)| reply)
    }

    async fn pass(&self) {
        self.shut.subscribe().wait_for(|shut| !*shut).await.unwrap();
    }
}

#[async_trait]
impl ClaimDriver for FakeDriver {
    fn is_pure(&self) -> bool {
        self.is_pure.load(Relaxed)
    }

    async fn validate_parameters(&self, _: &Call, parameters: &[&str]) -> Vec<Result<(), Problem>> {
        self.pass().await;
        let refused = self.refused_parameters.lock().unwrap().clone();
        let verdict = |parameters: &&str| match &refused {
            Some((text, problem)) if text == parameters => Err(problem.clone()),
            _ => Ok(()),
        };
        parameters.iter().map(verdict).collect()
    }

    async fn prepare(&self, _: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let uids: Vec<_> = claims.iter().map(|claim| claim.id.uid.clone()).collect();
        self.calls.send_modify(|calls| calls.prepare.push(uids));
        self.pass().await;
        let memo = format!("call {}", self.calls.borrow().prepare.len());
        let mut outcomes = Outcomes::new();
        for claim in claims {
            let mut result = prepared(&claim.devices, &memo);
            let mut outcome = Ok(());
            match self.next_reply(&claim.id.uid) {
                None => {}
                Some(Reply::Access(access)) => {
                    result
                        .devices
                        .iter_mut()
                        .for_each(|device| device.access = access.clone());
                }
                Some(Reply::Status(status)) => {
                    result
                        .devices
                        .iter_mut()
                        .for_each(|device| device.status = Some(status.clone()));
                }
                Some(Reply::Annotation(key, value)) => {
                    result.annotations.insert(key.to_owned(), value.to_owned());
                }
                Some(Reply::Refuse(problem)) => outcome = Err(problem),
                Some(Reply::Unrenderable) => {
                    let edits = Edits {
                        env: vec![("A".to_owned(), "b".to_owned())],
                        ..Edits::default()
                    };
                    result = PreparedClaim {
                        edits,
                        ..PreparedClaim::default()
                    };
                }
            }
            outcomes.insert(claim.id.uid.clone(), outcome.map(|()| result));
        }
        outcomes
    }

    async fn unprepare(&self, _: &Call, claims: &[DriverClaimRecord]) -> Outcomes<()> {
        self.calls
            .send_modify(|calls| calls.unprepare.push(claims.to_vec()));
        self.pass().await;
        let uids = claims.iter().map(|live| live.claim.id.uid.clone());
        let end = self
            .unprepare_refusals
            .lock()
            .unwrap()
            .pop_front()
            .map_or(Ok(()), Err);
        uids.map(|uid| (uid, end.clone())).collect()
    }
}

/// The arguments of a preferred allocation.
pub(crate) type Preferred = (Vec<String>, Vec<String>, u32);

/// The calls of a plugin.
#[derive(Debug, Default, Clone)]
pub(crate) struct PluginCalls {
    pub(crate) allocate: Vec<Vec<String>>,
    pub(crate) preferred: Vec<Preferred>,
    pub(crate) pre_start: Vec<Vec<String>>,
}

/// The outcome of a call for a preference.
#[derive(Clone)]
pub(crate) enum Preference {
    Devices(Vec<String>),
    Failure,
    Silence,
}

impl Preference {
    pub(crate) fn of(ids: &[&str]) -> Self {
        Self::Devices(crate::manager::devices::fixtures::ids(ids))
    }
}

impl Default for Preference {
    fn default() -> Self {
        Self::Devices(Vec::new())
    }
}

#[derive(Default)]
pub(crate) struct FakePlugin {
    options: Mutex<DeviceOptions>,
    /// The problems of the next calls of Allocate; a call that is to panic has none.
    refusals: Mutex<Vec<Option<Problem>>>,
    answer: Mutex<ContainerAllocation>,
    prefers: Mutex<Preference>,
    calls: watch::Sender<PluginCalls>,
    /// Calls wait while it is shut.
    shut: watch::Sender<bool>,
}

impl FakePlugin {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    pub(crate) fn preferring(ids: &[&str]) -> Arc<Self> {
        let plugin = Self::new();
        plugin
            .options
            .lock()
            .unwrap()
            .preferred_allocation_available = true;
        plugin.prefer(Preference::of(ids));
        plugin
    }

    pub(crate) fn prefer(&self, preference: Preference) {
        *self.prefers.lock().unwrap() = preference;
    }

    pub(crate) fn wanting_pre_start() -> Arc<Self> {
        let plugin = Self::new();
        plugin.options.lock().unwrap().pre_start_required = true;
        plugin
    }

    pub(crate) fn refuse(&self, problem: Problem) {
        self.refusals.lock().unwrap().push(Some(problem));
    }

    pub(crate) fn panic(&self) {
        self.refusals.lock().unwrap().push(None);
    }

    pub(crate) fn answer(&self, answer: ContainerAllocation) {
        *self.answer.lock().unwrap() = answer;
    }

    pub(crate) fn shut(&self, shut: bool) {
        self.shut.send_replace(shut);
    }

    pub(crate) fn calls(&self) -> PluginCalls {
        self.calls.borrow().clone()
    }

    /// Waits for calls.
    pub(crate) async fn called(&self, wanted: impl Fn(&PluginCalls) -> bool) {
        self.calls.subscribe().wait_for(wanted).await.unwrap();
    }

    async fn pass(&self) {
        self.shut.subscribe().wait_for(|shut| !*shut).await.unwrap();
    }
}

#[async_trait]
impl DeviceDriver for FakePlugin {
    fn options(&self) -> DeviceOptions {
        *self.options.lock().unwrap()
    }

    async fn list_and_watch(&self, _: &Call) -> Result<DeviceLists, Problem> {
        Err(Problem::internal(
            "not-followed",
            "tests set lists themselves",
        ))
    }

    async fn allocate(
        &self,
        _: &Call,
        device_ids: &[String],
    ) -> Result<ContainerAllocation, Problem> {
        self.calls
            .send_modify(|calls| calls.allocate.push(device_ids.to_vec()));
        self.pass().await;
        let refusal = self.refusals.lock().unwrap().pop();
        match refusal {
            Some(refusal) => Err(refusal.expect("a panic that the test wants")),
            None => Ok(self.answer.lock().unwrap().clone()),
        }
    }

    async fn preferred_allocation(
        &self,
        _: &Call,
        available: &[String],
        must_include: &[String],
        size: u32,
    ) -> Result<Vec<String>, Problem> {
        self.calls.send_modify(|calls| {
            calls
                .preferred
                .push((available.to_vec(), must_include.to_vec(), size))
        });
        self.pass().await;
        let preference = self.prefers.lock().unwrap().clone();
        match preference {
            Preference::Devices(ids) => Ok(ids),
            Preference::Failure => Err(Problem::internal("lost", "GPU is lost")),
            Preference::Silence => std::future::pending().await,
        }
    }

    async fn pre_start(&self, _: &Call, device_ids: &[String]) -> Result<(), Problem> {
        self.calls
            .send_modify(|calls| calls.pre_start.push(device_ids.to_vec()));
        self.pass().await;
        Ok(())
    }
}
