//! Generated histories of the real manager on a real checkpoint and a real CDI directory, with drivers that refuse, come late, hang, go and
//! come back, several pods at once, and crashes anywhere. What the machine's own histories cannot show: locks, tasks and order.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use proptest::prelude::*;
use tokio::sync::watch;

use crate::driver::{Call, ClaimDriver, Outcomes};
use crate::manager::claims::ReleaseRequest;
use crate::manager::claims::fixtures::{claim, driver, permanent, pod, prepared, transient};
use crate::manager::tests::scene::{Daemon, Home, request};
use nodedock_model::{
    Caller, Claim, ClaimState, DriverClaim, DriverKind, DriverName, LiveClaim, ObjectRef, PreparedClaim,
    Problem, Uid,
};

/// What a driver does at its next call.
#[derive(Debug, Clone, Copy)]
enum Luck {
    Good,
    Permanent,
    Transient,
    InAMinute,
    /// It acts, and says that it did not.
    DoneAndRefused,
    /// It acts, and its answer leaves the claims out.
    DoneAndSilent,
    /// It acts, and never answers.
    Stuck,
}

/// A driver with its hardware: it outlives every daemon.
struct Hardware {
    name: DriverName,
    state: Mutex<State>,
    /// Calls wait while it is shut.
    open: watch::Sender<bool>,
}

#[derive(Default)]
struct State {
    /// Claims that it was asked to prepare, and has not unprepared since.
    holds: BTreeSet<Uid>,
    luck: VecDeque<Luck>,
    calls: usize,
}

impl Hardware {
    fn new(short: &str) -> Arc<Self> {
        Arc::new(Self { name: driver(short), state: Mutex::default(), open: watch::Sender::new(true) })
    }

    fn holds(&self) -> BTreeSet<Uid> {
        self.state.lock().unwrap().holds.clone()
    }

    fn next_luck(&self) -> Luck {
        self.state.lock().unwrap().luck.pop_front().unwrap_or(Luck::Good)
    }

    /// None: the answer leaves the claims out.
    async fn answer<T>(&self, luck: Luck, good: T) -> Option<Result<T, Problem>> {
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        match luck {
            Luck::Good => Some(Ok(good)),
            Luck::Permanent => Some(Err(permanent())),
            Luck::Transient | Luck::DoneAndRefused => Some(Err(transient())),
            Luck::InAMinute => Some(Err(transient().retry_after(Duration::from_secs(60)))),
            Luck::DoneAndSilent => None,
            Luck::Stuck => std::future::pending().await,
        }
    }
}

#[async_trait]
impl ClaimDriver for Hardware {
    async fn prepare(&self, _: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let luck = self.next_luck();
        let memo = {
            let mut state = self.state.lock().unwrap();
            state.calls += 1;
            state.holds.extend(claims.iter().map(|claim| claim.id.uid.clone()));
            format!("call {}", state.calls)
        };
        let Some(answer) = self.answer(luck, ()).await else { return Outcomes::new() };
        let one = |claim: &DriverClaim| {
            let outcome = answer.clone().map(|()| prepared(&claim.devices, &memo));
            (claim.id.uid.clone(), outcome)
        };
        claims.iter().map(one).collect()
    }

    async fn unprepare(&self, _: &Call, claims: &[LiveClaim]) -> Outcomes<()> {
        let luck = self.next_luck();
        let acts = matches!(luck, Luck::Good | Luck::DoneAndRefused | Luck::DoneAndSilent | Luck::Stuck);
        if acts {
            let mut state = self.state.lock().unwrap();
            state.holds.retain(|uid| claims.iter().all(|live| live.claim.id.uid != *uid));
        }
        let Some(answer) = self.answer(luck, ()).await else { return Outcomes::new() };
        claims.iter().map(|live| (live.claim.id.uid.clone(), answer.clone())).collect()
    }
}

#[derive(Debug, Clone)]
enum Request {
    Prepare {
        pod: usize,
        claims: BTreeSet<usize>,
    },
    Unprepare {
        pod: usize,
    },
    Release {
        claim: usize,
    },
    /// A kubelet asks for a driver's part of a claim, gives it up, or all that it holds is unprepared for it.
    KubeletPrepare {
        claim: usize,
        driver: usize,
    },
    KubeletUnprepare {
        claim: usize,
        driver: usize,
    },
    KubeletGivesUp {
        claim: usize,
    },
}

#[derive(Debug, Clone)]
enum Event {
    /// Several at once. `crash`: after so many turns of the tasks, while drivers do not answer, the daemon is gone.
    Requests {
        requests: Vec<Request>,
        crash: Option<usize>,
    },
    Luck {
        driver: usize,
        luck: Vec<Luck>,
    },
    Serving {
        driver: usize,
        serves: bool,
    },
    Restart,
    Reboot,
    Later {
        seconds: u64,
    },
}

const DRIVERS: [&str; 2] = ["gpu", "nic"];
const PODS: [&str; 3] = ["a", "b", "c"];
/// Some want the same device, or a share of it; some are of both drivers; one has the name of another.
const CLAIMS: [(&str, &[&str]); 6] = [
    ("one", &["gpu/0"]),
    ("both", &["gpu/0", "nic/0"]),
    ("share-a", &["gpu/1#a", "nic/1"]),
    ("share-b", &["gpu/1#b"]),
    ("whole", &["gpu/1"]),
    ("one@uid-one-again", &["nic/2"]),
];

fn pods() -> Vec<ObjectRef> {
    PODS.iter().map(|name| pod(name)).collect()
}

fn claims() -> Vec<Claim> {
    let pods = pods();
    let pods: Vec<_> = pods.iter().collect();
    CLAIMS.iter().map(|(name, devices)| claim(name, devices, &pods)).collect()
}

fn luck() -> impl Strategy<Value = Luck> {
    prop_oneof![
        3 => Just(Luck::Good),
        2 => Just(Luck::Permanent),
        2 => Just(Luck::Transient),
        1 => Just(Luck::InAMinute),
        1 => Just(Luck::DoneAndRefused),
        1 => Just(Luck::DoneAndSilent),
        1 => Just(Luck::Stuck),
    ]
}

fn one_request() -> impl Strategy<Value = Request> {
    let claims = prop::collection::btree_set(0..CLAIMS.len(), 1..3);
    prop_oneof![
        6 => (0..PODS.len(), claims).prop_map(|(pod, claims)| Request::Prepare { pod, claims }),
        3 => (0..PODS.len()).prop_map(|pod| Request::Unprepare { pod }),
        1 => (0..CLAIMS.len()).prop_map(|claim| Request::Release { claim }),
        6 => (0..CLAIMS.len(), 0..DRIVERS.len())
            .prop_map(|(claim, driver)| Request::KubeletPrepare { claim, driver }),
        3 => (0..CLAIMS.len(), 0..DRIVERS.len())
            .prop_map(|(claim, driver)| Request::KubeletUnprepare { claim, driver }),
        1 => (0..CLAIMS.len()).prop_map(|claim| Request::KubeletGivesUp { claim }),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    let crash = prop::option::weighted(0.25, 0..60usize);
    let requests = prop::collection::vec(one_request(), 1..4);
    prop_oneof![
        8 => (requests, crash).prop_map(|(requests, crash)| Event::Requests { requests, crash }),
        3 => (0..DRIVERS.len(), prop::collection::vec(luck(), 1..4))
            .prop_map(|(driver, luck)| Event::Luck { driver, luck }),
        2 => (0..DRIVERS.len(), any::<bool>()).prop_map(|(driver, serves)| Event::Serving { driver, serves }),
        1 => Just(Event::Restart),
        1 => Just(Event::Reboot),
        1 => (0..100u64).prop_map(|seconds| Event::Later { seconds }),
    ]
}

/// Who was told of a claim.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Holder {
    Pod(Uid),
    /// Of a driver's part.
    Kubelet(DriverName),
}

impl Request {
    /// Whether it asks that a holder unprepare a claim, or all of them.
    fn takes(&self, holder: &Holder, claim: &Uid) -> bool {
        let is_claim = |index: &usize| claims()[*index].id.uid == *claim;
        match (self, holder) {
            (Self::Unprepare { pod }, Holder::Pod(uid)) => pods()[*pod].uid == *uid,
            (Self::Release { claim }, _) => is_claim(claim),
            (Self::KubeletUnprepare { claim, driver: index }, Holder::Kubelet(name)) => {
                is_claim(claim) && driver(DRIVERS[*index]) == *name
            }
            (Self::KubeletGivesUp { claim }, Holder::Kubelet(_)) => is_claim(claim),
            _ => false,
        }
    }
}

/// What a holder was told: in which boot, and what the CDI files said then.
type Told = (u32, Vec<String>, BTreeMap<String, Vec<u8>>);

struct World {
    home: Home,
    daemon: Daemon,
    drivers: Vec<Arc<Hardware>>,
    serving: BTreeSet<usize>,
    boot: u32,
    /// By holder and claim, what stands; until its unprepare is requested.
    told: BTreeMap<(Holder, Uid), Told>,
}

impl World {
    fn new() -> Self {
        let (home, boot) = (Home::new(), 1);
        let daemon = Self::start(&home, boot);
        let drivers = DRIVERS.map(Hardware::new).to_vec();
        let mut world = Self { home, daemon, drivers, serving: BTreeSet::new(), boot, told: BTreeMap::new() };
        (0..DRIVERS.len()).for_each(|driver| world.serve(driver, true));
        world
    }

    fn start(home: &Home, boot: u32) -> Daemon {
        let daemon = home.start_with(&format!("boot-{boot}"), Duration::from_secs(2));
        daemon.start_tasks();
        daemon
    }

    fn serve(&mut self, index: usize, serves: bool) {
        let driver = &self.drivers[index];
        if serves {
            let claims = Some(driver.clone() as Arc<dyn ClaimDriver>);
            self.daemon.serve_any(&driver.name, DriverKind::Wasm, claims, None, "sha256:00");
            self.serving.insert(index);
        } else {
            self.daemon.manager.registry.retire(driver.name.as_str());
            self.serving.remove(&index);
        }
    }

    /// A new daemon on what is durable.
    fn begin_again(&mut self) {
        self.daemon = Self::start(&self.home, self.boot);
        self.serving.clone().into_iter().for_each(|driver| self.serve(driver, true));
        self.assert_told_is_durable();
    }

    async fn happen(&mut self, event: &Event) {
        match event {
            Event::Requests { requests, crash } => self.ask(requests, *crash).await,
            Event::Luck { driver, luck } => self.drivers[*driver].state.lock().unwrap().luck.extend(luck),
            Event::Serving { driver, serves } => self.serve(*driver, *serves),
            Event::Restart => self.restart().await,
            Event::Reboot => {
                self.boot += 1;
                self.restart().await;
            }
            Event::Later { seconds } => tokio::time::sleep(Duration::from_secs(*seconds)).await,
        }
    }

    /// Ends the daemon's tasks. Without a bound: the clock runs ahead while the checkpoint's thread writes.
    async fn finish(&self) {
        self.daemon.tasks().stop();
        self.daemon.tasks().finished().await;
    }

    async fn restart(&mut self) {
        self.finish().await;
        self.daemon.checkpoint().close().await;
        self.begin_again();
    }

    async fn ask(&mut self, requests: &[Request], crash: Option<usize>) {
        // What is asked to be unprepared may be gone whatever the answer is.
        self.told.retain(|(holder, claim), _| !requests.iter().any(|request| request.takes(holder, claim)));
        let work = futures::future::join_all(requests.iter().map(|request| carry_out(&self.daemon, request)));
        let Some(turns) = crash else {
            let answers = work.await;
            self.take(requests, answers);
            return;
        };
        self.open(false);
        let end = async {
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
            self.daemon.crash().await;
            self.open(true);
        };
        let (answers, ()) = tokio::join!(work, end);
        // What the old daemon began ends without it; its commits fail.
        self.finish().await;
        self.take(requests, answers);
        self.begin_again();
    }

    fn open(&self, open: bool) {
        for driver in &self.drivers {
            driver.open.send_replace(open);
        }
    }

    /// Compares what was answered with what was answered before, and keeps it.
    fn take(&mut self, requests: &[Request], answers: Vec<Vec<(Holder, Uid)>>) {
        let is_leaving = |holder: &Holder, claim: &Uid| requests.iter().any(|one| one.takes(holder, claim));
        let answers = answers.into_iter().flatten();
        for (holder, claim) in answers.filter(|(holder, claim)| !is_leaving(holder, claim)) {
            let told = self.files_of(&holder, &claim);
            let before = self.told.insert((holder, claim), told.clone());
            assert!(
                before.is_none_or(|before| before.0 != told.0 || before == told),
                "the same answer again"
            );
        }
    }

    fn files_of(&self, holder: &Holder, claim: &Uid) -> Told {
        let of_claim = |name: &String| match holder {
            Holder::Pod(_) => name.ends_with(&format!("_{claim}.yaml")),
            Holder::Kubelet(driver) => *name == format!("{driver}_{claim}.yaml"),
        };
        let name = |path: &std::path::PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        let files = self.daemon.cdi_files().into_iter().map(|path| (name(&path), path));
        let files = files.filter(|(name, _)| of_claim(name));
        let files: BTreeMap<_, _> =
            files.map(|(name, path)| (name, devices(&std::fs::read(path).unwrap()))).collect();
        (self.boot, files.keys().cloned().collect(), files)
    }

    fn assert_told_is_durable(&self) {
        let records = self.daemon.manager.claims();
        for ((holder, claim), (boot, ..)) in &self.told {
            let record = records.iter().find(|record| record.id.uid == *claim);
            let record =
                record.unwrap_or_else(|| panic!("{claim} was answered to {holder:?} and is not known"));
            let (is_held, is_ready) = match holder {
                Holder::Pod(pod) => (record.pods.contains_key(pod), record.state == ClaimState::Prepared),
                Holder::Kubelet(driver) => {
                    let part = record.drivers.get(driver);
                    (part.is_some_and(|part| part.kubelet), part.is_some_and(|part| part.current().is_some()))
                }
            };
            assert!(is_held, "{claim} was answered to {holder:?}");
            assert!(is_ready || *boot != self.boot, "{claim} was answered to {holder:?}");
        }
    }

    /// What holds whenever no request is under way, whatever the daemon does by itself.
    fn assert_sound(&self) {
        let records = self.daemon.manager.claims();
        let released = self.daemon.manager.released_claims();
        for driver in &self.drivers {
            for uid in driver.holds() {
                let known = records.iter().any(|r| r.id.uid == uid && r.drivers.contains_key(&driver.name));
                let untold = released.iter().any(|r| r.id.uid == uid && r.untold.contains_key(&driver.name));
                assert!(known || untold, "{} has {uid}, which no record knows", driver.name);
            }
        }
        let mut users: BTreeMap<String, Vec<(&Uid, bool)>> = BTreeMap::new();
        for record in &records {
            let devices = record.allocation.devices.iter();
            for device in devices.filter(|device| record.drivers.contains_key(&device.driver)) {
                let key = format!("{}/{}", device.driver, device.device);
                users.entry(key).or_default().push((&record.id.uid, device.share_id.is_some()));
            }
        }
        for (device, users) in users {
            assert!(users.len() < 2 || users.iter().all(|(_, shared)| *shared), "{device} is in {users:?}");
        }
    }

    /// Faults stop, drivers come back, the kubelet unprepares what it holds, and every pod leaves.
    async fn settle(mut self) {
        self.drivers.iter().for_each(|driver| driver.state.lock().unwrap().luck.clear());
        (0..DRIVERS.len()).for_each(|driver| self.serve(driver, true));
        for claim in claims() {
            for name in DRIVERS.map(driver) {
                // What is not unprepared at once is by itself.
                self.daemon.kubelet_unprepare(&name, &claim).await.ok();
            }
        }
        for pod in pods() {
            self.daemon.unprepare(&pod).await;
        }
        for claim in claims() {
            self.daemon.gone(claim.id.uid.as_str()).await;
        }
        self.assert_sound();
        self.finish().await;
        assert_eq!(self.daemon.cdi_files(), Vec::<std::path::PathBuf>::new());
        let untold = |driver: &DriverName, uid: &Uid| {
            self.daemon
                .manager
                .released_claims()
                .iter()
                .any(|r| r.id.uid == *uid && r.untold.contains_key(driver))
        };
        for driver in &self.drivers {
            let left: Vec<_> = driver.holds().into_iter().filter(|uid| !untold(&driver.name, uid)).collect();
            assert_eq!(left, Vec::<Uid>::new(), "{} was told of everything", driver.name);
        }
        self.daemon.checkpoint().close().await;
        let last = self.home.start();
        assert!(last.is_empty(), "an empty checkpoint");
    }
}

/// What containers get, without the claim's identity, which names the pods that hold it now.
fn devices(file: &[u8]) -> Vec<u8> {
    file.split(|byte| *byte == b'\n').skip(1).flatten().copied().collect()
}

/// Holders and claims that were answered to be prepared.
async fn carry_out(daemon: &Daemon, asked: &Request) -> Vec<(Holder, Uid)> {
    match asked {
        Request::Unprepare { pod } => drop(daemon.unprepare(&pods()[*pod]).await),
        Request::KubeletUnprepare { claim, driver: index } => {
            daemon.kubelet_unprepare(&driver(DRIVERS[*index]), &claims()[*claim]).await.ok();
        }
        Request::KubeletGivesUp { claim } => {
            daemon
                .manager
                .unprepare_all_for_kubelet(&claims()[*claim].id.uid, "its pods are gone")
                .await
                .ok();
        }
        Request::KubeletPrepare { claim, driver: index } => {
            let (claim, name) = (claims()[*claim].clone(), driver(DRIVERS[*index]));
            daemon.source.put(claim.clone());
            // Two claims have the same name: it may be the other that is there.
            let answer = daemon.kubelet_prepare(&name, &claim).await;
            let has_devices = answer.is_ok_and(|devices| !devices.is_empty());
            return has_devices.then_some((Holder::Kubelet(name), claim.id.uid)).into_iter().collect();
        }
        Request::Release { claim } => {
            let id = claims()[*claim].id.clone();
            let (namespace, name, uid, by) = (id.namespace, id.name, Some(id.uid), Caller::default());
            let request = ReleaseRequest { namespace, name, uid, by };
            // It is refused where the claim is in use.
            daemon.manager.release_claim(request, "test".into()).await.ok();
        }
        Request::Prepare { pod, claims: wanted } => {
            let (pod, mut inline) = (&pods()[*pod], BTreeMap::new());
            for index in wanted {
                let claim = claims()[*index].clone();
                inline.insert(claim.id.name.clone(), claim);
            }
            let names: Vec<_> = inline.keys().map(|name| name.as_str()).collect();
            let request = request(pod, &names);
            let inline = inline.values().cloned().collect();
            let outcome = daemon.prepare_request(request, inline).await;
            let prepared = outcome.claims.into_iter().filter(|claim| claim.end.is_ok());
            return prepared.filter_map(|claim| Some((Holder::Pod(pod.uid.clone()), claim.uid?))).collect();
        }
    }
    Vec::new()
}

/// A history takes milliseconds; one that never ends is told with its events. By the true clock: the paused one runs ahead of the
/// checkpoint's thread.
async fn too_long() {
    let (tell, told) = tokio::sync::oneshot::channel::<()>();
    let (over, watched) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        if watched.recv_timeout(Duration::from_secs(30)).is_err_and(|end| end == RecvTimeoutError::Timeout) {
            tell.send(()).ok();
        }
    });
    let _over = over;
    if told.await.is_err() {
        std::future::pending::<()>().await;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_history_of_the_manager_loses_a_claim_shares_a_device_or_answers_what_is_not_durable(
        events in prop::collection::vec(event(), 1..14),
    ) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().start_paused(true).build().unwrap();
        let history = async {
            let mut world = World::new();
            for event in &events {
                world.happen(event).await;
                world.assert_sound();
            }
            world.settle().await;
        };
        let ended = runtime.block_on(async {
            tokio::select! {
                () = history => true,
                () = too_long() => false,
            }
        });
        prop_assert!(ended, "this history does not end");
    }
}
