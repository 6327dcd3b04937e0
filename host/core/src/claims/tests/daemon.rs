//! A manager on a real checkpoint and a real CDI folder, with drivers and a claim source that do as they are told.

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{mpsc, watch};

use super::super::fixtures::prepared;
use super::super::source::ClaimSource;
use super::super::{
    ClaimEnd, ClaimParts, ClaimSettings, Claims, PodOutcome, PodSelector, SharedTable, Values,
};
use crate::cdi::{CdiDir, Durability};
use crate::cdi_watch;
use crate::checkpoint::{self, Checkpoint};
use crate::driver::{Call, ClaimDriver, Driver, DriverIdentity, NodeFacts, Outcomes, Published};
use crate::registry::Registry;
use crate::sysfs::SysfsTree;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{
    Claim, ClaimReference, ClaimState, ContainerClaim, DeviceAccess, DeviceStatus, DriverClaim, DriverKind,
    DriverName, Edits, Inventory, KubeletDevice, LiveClaim, ObjectName, ObjectRef, PodContainer, PodRequest,
    Pool, PreparedClaim, Problem, Uid,
};

/// What outlives a daemon.
pub(super) struct Home {
    folder: tempfile::TempDir,
}

pub(super) struct Daemon {
    pub(super) claims: Claims,
    pub(super) registry: Registry,
    pub(super) source: Arc<FakeSource>,
    pub(super) values: Values,
    pub(super) checkpoint: Checkpoint,
    pub(super) tasks: Tasks,
    pub(super) conditions: Conditions,
    changes: Changes,
    pub(super) cdi: PathBuf,
}

impl Home {
    pub(super) fn new() -> Self {
        let home = Self { folder: tempfile::tempdir().unwrap() };
        std::fs::create_dir(home.sys()).unwrap();
        home
    }

    /// Makes a claim's record one that this release cannot read, while no daemon runs.
    pub(super) fn make_unreadable(&self, uid: &str) {
        let claims = redb::TableDefinition::<&str, &[u8]>::new("claims");
        let database = redb::Database::open(self.folder.path().join("checkpoint.redb")).unwrap();
        let write = database.begin_write().unwrap();
        write.open_table(claims).unwrap().insert(uid, [u8::MAX].as_slice()).unwrap();
        write.commit().unwrap();
    }

    /// The folder that stands for `/sys`.
    pub(super) fn sys(&self) -> PathBuf {
        self.folder.path().join("sys")
    }

    pub(super) fn start(&self) -> Daemon {
        self.start_in("boot-1")
    }

    /// Starts without the tasks that go on without requests; see `Daemon::tend`.
    pub(super) fn start_in(&self, boot_id: &str) -> Daemon {
        self.start_with(boot_id, Duration::from_secs(3600))
    }

    /// The same, with a bound for what a prepare waits for a device.
    pub(super) fn start_with(&self, boot_id: &str, exclusive_wait: Duration) -> Daemon {
        let opened = checkpoint::open(&self.folder.path().join("checkpoint.redb")).unwrap();
        let unreadable = opened.unreadable_claims();
        let (source, changes) = (Arc::new(FakeSource::default()), Changes::default());
        let (registry, tasks, cdi) =
            (Registry::new(changes.clone()), Tasks::new(), self.folder.path().join("cdi"));
        let conditions = Conditions::new(changes.clone());
        let sys = SysfsTree::open(&self.sys()).unwrap();
        let values = Values::new(opened.values, boot_id, opened.checkpoint.clone(), sys);
        let claims = Claims::new(ClaimParts {
            table: SharedTable::new(opened.claims, opened.pods).with_unreadable(unreadable),
            released: opened.released,
            values: values.clone(),
            cdi: CdiDir::open(&cdi, "test", Durability::Rendered).unwrap(),
            registry: registry.clone(),
            source: source.clone(),
            settings: ClaimSettings {
                node: NodeFacts { name: "node-1".to_owned(), boot_id: boot_id.to_owned() },
                exclusive_wait,
                call_deadline: Duration::from_secs(45),
            },
            changes: changes.clone(),
            conditions: conditions.clone(),
            tasks: tasks.clone(),
        });
        let checkpoint = opened.checkpoint;
        Daemon { conditions, claims, registry, source, values, checkpoint, tasks, changes, cdi }
    }
}

impl Daemon {
    /// Puts a driver into service.
    pub(super) fn serve(&self, driver: &Arc<FakeDriver>) {
        self.serve_as(driver, DriverKind::Wasm);
    }

    pub(super) fn serve_as(&self, driver: &Arc<FakeDriver>, kind: DriverKind) {
        self.serve_face(&driver.name, kind, driver.clone(), driver.inventory.clone());
    }

    /// Puts a face of any make into service.
    pub(super) fn serve_face(
        &self,
        name: &DriverName,
        kind: DriverKind,
        face: Arc<dyn ClaimDriver>,
        inventory: Option<watch::Receiver<Arc<Published>>>,
    ) {
        let identity = DriverIdentity {
            name: name.clone(),
            kind,
            version: "1.0.0".to_owned(),
            digest: "sha256:00".to_owned(),
            source: name.to_string(),
            summary: String::new(),
        };
        self.put_into_service(identity, face, inventory);
    }

    /// Puts a version of a driver into service, by the digest of its file.
    pub(super) fn serve_version(&self, driver: &Arc<FakeDriver>, digest: &str) {
        let identity = DriverIdentity {
            name: driver.name.clone(),
            kind: DriverKind::Wasm,
            version: "1.0.0".to_owned(),
            digest: digest.to_owned(),
            source: driver.name.to_string(),
            summary: String::new(),
        };
        self.put_into_service(identity, driver.clone(), driver.inventory.clone());
        self.registry.tell_devices(&driver.name);
    }

    fn put_into_service(
        &self,
        identity: DriverIdentity,
        face: Arc<dyn ClaimDriver>,
        inventory: Option<watch::Receiver<Arc<Published>>>,
    ) {
        let source = identity.source.clone();
        let driver = Driver { identity: Arc::new(identity), claims: Some(face), inventory };
        self.registry.serve(&source, driver).unwrap();
    }

    pub(super) fn retire(&self, driver: &FakeDriver) {
        self.registry.retire(driver.name.as_str());
    }

    pub(super) async fn prepare(&self, pod: &ObjectRef, claims: &[&str]) -> PodOutcome {
        self.claims.prepare_pod(request(pod, claims), vec![], "test".into()).await
    }

    pub(super) async fn unprepare(&self, pod: &ObjectRef) -> Vec<Result<ClaimEnd, Problem>> {
        let outcomes =
            self.claims.unprepare_pod(PodSelector::Uid(pod.uid.clone()), "test".into()).await.unwrap();
        outcomes.into_iter().flat_map(|outcome| outcome.claims).map(|claim| claim.end).collect()
    }

    /// A kubelet asks for a driver's part.
    pub(super) async fn kubelet_prepare(
        &self,
        driver: &DriverName,
        claim: &Claim,
    ) -> Result<Vec<KubeletDevice>, Problem> {
        self.claims.prepare_for_kubelet(driver, &claim.id, "test".into()).await
    }

    pub(super) async fn kubelet_unprepare(&self, driver: &DriverName, claim: &Claim) -> Result<(), Problem> {
        self.claims.unprepare_for_kubelet(driver, &claim.id, "test".into()).await
    }

    pub(super) fn state(&self, uid: &str) -> Option<ClaimState> {
        let claims = self.claims.list();
        claims.into_iter().find(|record| record.id.uid.as_str() == uid).map(|record| record.state)
    }

    /// Starts what finishes unprepares, and nothing that looks at files on timers: with a paused clock those fire while the
    /// checkpoint's thread writes.
    pub(super) fn tend_unprepares(&self) {
        let inner = self.claims.0.clone();
        self.tasks.spawn("resume-unprepare", async move { inner.resume_unprepares().await });
    }

    /// Starts what clears up after swapped drivers.
    pub(super) fn follow_swaps(&self) {
        let inner = self.claims.0.clone();
        self.tasks.spawn("driver-swaps", async move { inner.follow_swaps().await });
    }

    /// Returns when exactly this is wrong, by code and subject.
    pub(super) async fn until_wrong(&self, wanted: &[(&str, &str)]) {
        let mut changes = self.changes.listen();
        let is_wanted = || {
            let wrong = self.wrong();
            let wrong = wrong.iter().map(|(code, subject)| (code.as_str(), subject.as_str()));
            wrong.eq(wanted.iter().copied())
        };
        while !is_wanted() {
            changes.recv().await.unwrap();
        }
    }

    /// Returns when nothing is known of a claim.
    pub(super) async fn gone(&self, uid: &str) {
        let mut changes = self.changes.listen();
        while self.state(uid).is_some() {
            changes.recv().await.unwrap();
        }
    }

    /// Paths of the CDI files, by name.
    pub(super) fn cdi_files(&self) -> Vec<PathBuf> {
        let mut paths: Vec<_> =
            std::fs::read_dir(&self.cdi).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths
    }

    /// Starts what goes on without requests.
    pub(super) fn tend(&self) {
        let (sender, events) = mpsc::channel(16);
        self.tasks.spawn("cdi-folder", cdi_watch::watch(self.cdi.clone(), self.tasks.clone(), sender));
        self.claims.start(events);
    }

    /// What the manager does when files of the CDI folder were touched, so that nothing need be waited for.
    pub(super) async fn touched(&self, names: &[&str]) {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let found = self.claims.0.look_at(names).await;
        self.claims.0.tend(found).await;
    }

    /// What it does on its slow period.
    pub(super) async fn sweep(&self) {
        let found = self.claims.0.sweep_files().await;
        self.claims.0.tend(found).await;
    }

    /// Code and subject of what is wrong.
    pub(super) fn wrong(&self) -> Vec<(String, String)> {
        self.conditions.list().into_iter().map(|c| (c.problem.code, c.subject)).collect()
    }

    /// Waits until nobody works on anything, then closes.
    pub(super) async fn stop(self) {
        assert!(self.tasks.drain(Duration::from_secs(3600)).await);
        self.checkpoint.close().await;
    }

    /// The checkpoint takes nothing more from here; what drivers are asked goes on.
    pub(super) async fn crash(&self) {
        self.checkpoint.close().await;
    }
}

pub(super) fn request(pod: &ObjectRef, claims: &[&str]) -> PodRequest {
    let reference = |name: &&str| ClaimReference {
        pod_claim_name: (*name).to_owned(),
        claim_name: ObjectName::new(name).unwrap(),
        claim_uid: None,
    };
    let uses = |name: &&str| ContainerClaim { pod_claim_name: (*name).to_owned(), request: None };
    let container = PodContainer {
        name: "main".to_owned(),
        claims: claims.iter().map(uses).collect(),
        ..PodContainer::default()
    };
    PodRequest {
        pod: pod.clone(),
        claims: claims.iter().map(reference).collect(),
        containers: vec![container],
    }
}

/// What became of each claim, by code where it was refused.
pub(super) fn ends(outcome: &PodOutcome) -> Vec<&str> {
    outcome
        .claims
        .iter()
        .map(|claim| claim.end.as_ref().map_or_else(|p| p.code.as_str(), |end| end.as_str()))
        .collect()
}

pub(super) fn cdi_devices(outcome: &PodOutcome) -> Vec<String> {
    outcome.containers.iter().flat_map(|container| container.cdi_devices.clone()).collect()
}

#[derive(Default)]
pub(super) struct FakeSource {
    claims: Mutex<BTreeMap<(ObjectName, ObjectName), Claim>>,
    problem: Mutex<Option<Problem>>,
    /// Who asks waits while it is shut.
    shut: watch::Sender<bool>,
    asked: watch::Sender<usize>,
}

impl FakeSource {
    pub(super) fn put(&self, claim: Claim) {
        self.claims.lock().unwrap().insert((claim.id.namespace.clone(), claim.id.name.clone()), claim);
    }

    pub(super) fn remove(&self, claim: &Claim) {
        self.claims.lock().unwrap().remove(&(claim.id.namespace.clone(), claim.id.name.clone()));
    }

    /// Answers with a problem from now on, or with what it has.
    pub(super) fn fail(&self, problem: Option<Problem>) {
        *self.problem.lock().unwrap() = problem;
    }

    pub(super) fn shut(&self, shut: bool) {
        self.shut.send_replace(shut);
    }

    /// Returns when it was asked so often.
    pub(super) async fn asked(&self, times: usize) {
        self.asked.subscribe().wait_for(|asked| *asked >= times).await.unwrap();
    }
}

#[async_trait]
impl ClaimSource for FakeSource {
    async fn claim(&self, namespace: &ObjectName, name: &ObjectName) -> Result<Option<Claim>, Problem> {
        self.asked.send_modify(|asked| *asked += 1);
        self.shut.subscribe().wait_for(|shut| !*shut).await.unwrap();
        if let Some(problem) = self.problem.lock().unwrap().clone() {
            return Err(problem);
        }
        Ok(self.claims.lock().unwrap().get(&(namespace.clone(), name.clone())).cloned())
    }
}

/// What a driver does at its next call.
pub(super) enum Reply {
    Refuse(Problem),
    /// Edits for all containers, and no device that brings them: what makes no CDI file.
    Unrenderable,
    /// Every device is had in this way.
    Access(DeviceAccess),
    /// Every device has something to tell.
    Status(DeviceStatus),
    /// Says nothing of the claims.
    Silence,
}

pub(super) struct FakeDriver {
    pub(super) name: DriverName,
    inventory: Option<watch::Receiver<Arc<Published>>>,
    /// Keeps the inventory, and publishes another.
    published: Option<watch::Sender<Arc<Published>>>,
    replies: Mutex<VecDeque<(Uid, Reply)>>,
    unprepare_replies: Mutex<VecDeque<Reply>>,
    calls: watch::Sender<Calls>,
    /// Calls wait while it is shut.
    open: watch::Sender<bool>,
}

/// Claims of each call.
#[derive(Default, Clone)]
pub(super) struct Calls {
    pub(super) prepare: Vec<Vec<Uid>>,
    pub(super) unprepare: Vec<Vec<LiveClaim>>,
}

impl FakeDriver {
    pub(super) fn new(name: DriverName) -> Arc<Self> {
        Self::with(name, None)
    }

    /// A driver that tells what it has.
    pub(super) fn with_pool(name: DriverName, pool: Pool) -> Arc<Self> {
        let pools = BTreeMap::from([(nodedock_model::PoolName::new("pool").unwrap(), pool)]);
        let published = Published { inventory: Inventory { pools }, ..Published::default() };
        Self::with(name, Some(watch::Sender::new(Arc::new(published))))
    }

    /// Tells of its devices anew.
    pub(super) fn publish(&self) {
        let published = self.published.as_ref().expect("a driver that tells what it has");
        published.send_modify(|known| *known = Arc::new(Published::clone(known)));
    }

    fn with(name: DriverName, published: Option<watch::Sender<Arc<Published>>>) -> Arc<Self> {
        Arc::new(Self {
            name,
            inventory: published.as_ref().map(watch::Sender::subscribe),
            published,
            replies: Mutex::default(),
            unprepare_replies: Mutex::default(),
            calls: watch::Sender::default(),
            open: watch::Sender::new(true),
        })
    }

    /// The answer for a claim the next time that it is asked for.
    pub(super) fn reply(&self, claim: &str, reply: Reply) {
        self.replies.lock().unwrap().push_back((Uid::new(claim).unwrap(), reply));
    }

    pub(super) fn reply_unprepare(&self, reply: Reply) {
        self.unprepare_replies.lock().unwrap().push_back(reply);
    }

    pub(super) fn shut(&self, shut: bool) {
        self.open.send_replace(!shut);
    }

    pub(super) fn calls(&self) -> Calls {
        self.calls.borrow().clone()
    }

    pub(super) fn counts(&self) -> (usize, usize) {
        let calls = self.calls.borrow();
        (calls.prepare.len(), calls.unprepare.len())
    }

    /// Returns when calls have begun.
    pub(super) async fn called(&self, wanted: impl Fn(&Calls) -> bool) {
        self.calls.subscribe().wait_for(wanted).await.unwrap();
    }

    fn next_reply(&self, claim: &Uid) -> Option<Reply> {
        let mut replies = self.replies.lock().unwrap();
        let at = replies.iter().position(|(uid, _)| uid == claim)?;
        replies.remove(at).map(|(_, reply)| reply)
    }

    async fn pass(&self) {
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
    }
}

#[async_trait]
impl ClaimDriver for FakeDriver {
    async fn prepare(&self, _: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let uids: Vec<_> = claims.iter().map(|claim| claim.id.uid.clone()).collect();
        self.calls.send_modify(|calls| calls.prepare.push(uids));
        self.pass().await;
        let memo = format!("call {}", self.calls.borrow().prepare.len());
        let mut outcomes = Outcomes::new();
        for claim in claims {
            let outcome = match self.next_reply(&claim.id.uid) {
                None => Ok(prepared(&claim.devices, &memo)),
                Some(Reply::Access(access)) => {
                    let mut prepared = prepared(&claim.devices, &memo);
                    prepared.devices.iter_mut().for_each(|device| device.access = access.clone());
                    Ok(prepared)
                }
                Some(Reply::Status(status)) => {
                    let mut prepared = prepared(&claim.devices, &memo);
                    prepared.devices.iter_mut().for_each(|device| device.status = Some(status.clone()));
                    Ok(prepared)
                }
                Some(Reply::Refuse(problem)) => Err(problem),
                Some(Reply::Unrenderable) => {
                    let edits = Edits { env: vec![("A".to_owned(), "b".to_owned())], ..Edits::default() };
                    Ok(PreparedClaim { edits, ..PreparedClaim::default() })
                }
                Some(Reply::Silence) => continue,
            };
            outcomes.insert(claim.id.uid.clone(), outcome);
        }
        outcomes
    }

    async fn unprepare(&self, _: &Call, claims: &[LiveClaim]) -> Outcomes<()> {
        self.calls.send_modify(|calls| calls.unprepare.push(claims.to_vec()));
        self.pass().await;
        let uids = claims.iter().map(|live| live.claim.id.uid.clone());
        match self.unprepare_replies.lock().unwrap().pop_front() {
            None | Some(Reply::Unrenderable | Reply::Access(_) | Reply::Status(_)) => {
                uids.map(|uid| (uid, Ok(()))).collect()
            }
            Some(Reply::Refuse(problem)) => uids.map(|uid| (uid, Err(problem.clone()))).collect(),
            Some(Reply::Silence) => Outcomes::new(),
        }
    }
}
