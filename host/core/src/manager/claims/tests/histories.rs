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
use crate::manager::claims::fixtures::{driver, permanent, prepared, transient};
use crate::manager::claims::machine_tests::requests::{
    self, CLAIMS_OF_TWO_DRIVERS, Request, claims, driver_of, pods,
};
use crate::manager::tests::scene::{Daemon, Home, release_request, request};
use nodedock_model::{
    ClaimState, DriverClaim, DriverClaimRecord, DriverKind, DriverName, PreparedClaim, Problem, Uid,
};

/// Outcome of a driver's next call.
#[derive(Debug, Clone, Copy)]
enum DriverOutcome {
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
    /// A pure driver leaves nothing on its hardware.
    is_pure: bool,
    state: Mutex<HardwareState>,
    /// Calls wait while it is shut.
    open: watch::Sender<bool>,
}

#[derive(Default)]
struct HardwareState {
    /// Claims that it was called to prepare, and has not unprepared since.
    holds: BTreeSet<Uid>,
    outcomes: VecDeque<DriverOutcome>,
    calls: usize,
}

impl Hardware {
    fn new(short: &str, is_pure: bool) -> Arc<Self> {
        let (name, open) = (driver(short), watch::Sender::new(true));
        Arc::new(Self {
            name,
            is_pure,
            state: Mutex::default(),
            open,
        })
    }

    fn holds(&self) -> BTreeSet<Uid> {
        self.state.lock().unwrap().holds.clone()
    }

    fn next_outcome(&self) -> DriverOutcome {
        self.state
            .lock()
            .unwrap()
            .outcomes
            .pop_front()
            .unwrap_or(DriverOutcome::Good)
    }

    /// None: the answer leaves the claims out.
    async fn answer<T>(&self, outcome: DriverOutcome, good: T) -> Option<Result<T, Problem>> {
        self.open.subscribe().wait_for(|open| *open).await.unwrap();
        match outcome {
            DriverOutcome::Good => Some(Ok(good)),
            DriverOutcome::Permanent => Some(Err(permanent())),
            DriverOutcome::Transient | DriverOutcome::DoneAndRefused => Some(Err(transient())),
            DriverOutcome::InAMinute => Some(Err(transient().retry_after(Duration::from_secs(60)))),
            DriverOutcome::DoneAndSilent => None,
            DriverOutcome::Stuck => std::future::pending().await,
        }
    }
}

#[async_trait]
impl ClaimDriver for Hardware {
    fn is_pure(&self) -> bool {
        self.is_pure
    }

    async fn prepare(&self, _: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let outcome = self.next_outcome();
        let memo = {
            let mut state = self.state.lock().unwrap();
            state.calls += 1;
            if !self.is_pure {
                state
                    .holds
                    .extend(claims.iter().map(|claim| claim.id.uid.clone()));
            }
            format!("call {}", state.calls)
        };
        let Some(answer) = self.answer(outcome, ()).await else {
            return Outcomes::new();
        };
        let one = |claim: &DriverClaim| {
            let outcome = answer.clone().map(|()| prepared(&claim.devices, &memo));
            (claim.id.uid.clone(), outcome)
        };
        claims.iter().map(one).collect()
    }

    async fn unprepare(&self, _: &Call, claims: &[DriverClaimRecord]) -> Outcomes<()> {
        let outcome = self.next_outcome();
        let acts = matches!(
            outcome,
            DriverOutcome::Good
                | DriverOutcome::DoneAndRefused
                | DriverOutcome::DoneAndSilent
                | DriverOutcome::Stuck
        );
        if acts {
            let mut state = self.state.lock().unwrap();
            state
                .holds
                .retain(|uid| claims.iter().all(|live| live.claim.id.uid != *uid));
        }
        let Some(answer) = self.answer(outcome, ()).await else {
            return Outcomes::new();
        };
        claims
            .iter()
            .map(|live| (live.claim.id.uid.clone(), answer.clone()))
            .collect()
    }
}

#[derive(Debug, Clone)]
enum Event {
    /// Several at once. `crash`: after so many turns of the tasks, while drivers do not answer, the daemon is gone.
    Requests {
        requests: Vec<Request>,
        crash: Option<usize>,
    },
    Outcomes {
        driver: usize,
        outcomes: Vec<DriverOutcome>,
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

fn outcome() -> impl Strategy<Value = DriverOutcome> {
    prop_oneof![
        3 => Just(DriverOutcome::Good),
        2 => Just(DriverOutcome::Permanent),
        2 => Just(DriverOutcome::Transient),
        1 => Just(DriverOutcome::InAMinute),
        1 => Just(DriverOutcome::DoneAndRefused),
        1 => Just(DriverOutcome::DoneAndSilent),
        1 => Just(DriverOutcome::Stuck),
    ]
}

fn event() -> impl Strategy<Value = Event> {
    let crash = prop::option::weighted(0.25, 0..60usize);
    let requests = prop::collection::vec(requests::request(CLAIMS_OF_TWO_DRIVERS), 1..4);
    prop_oneof![
        8 => (requests, crash).prop_map(|(requests, crash)| Event::Requests { requests, crash }),
        3 => (0..DRIVERS.len(), prop::collection::vec(outcome(), 1..4))
            .prop_map(|(driver, outcomes)| Event::Outcomes { driver, outcomes }),
        2 => (0..DRIVERS.len(), any::<bool>()).prop_map(|(driver, serves)| Event::Serving { driver, serves }),
        1 => Just(Event::Restart),
        1 => Just(Event::Reboot),
        1 => (0..100u64).prop_map(|seconds| Event::Later { seconds }),
    ]
}

/// A user of a claim that is prepared.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum User {
    Pod(Uid),
    /// A kubelet, for a driver's part.
    Kubelet(DriverName),
}

/// Returns whether a request unprepares a claim for a user.
fn takes(request: &Request, user: &User, uid: &Uid) -> bool {
    let claim =
        |index: &usize| Some(claims().swap_remove(*index)).filter(|claim| claim.id.uid == *uid);
    match (request, user) {
        (Request::Unprepare { pod }, User::Pod(uid)) => pods()[*pod].uid == *uid,
        (Request::Release { claim: index }, _) => claim(index).is_some(),
        (Request::KubeletUnprepare { claim: index, part }, User::Kubelet(name)) => claim(index)
            .is_some_and(|claim| part.is_none_or(|part| driver_of(&claim, part) == *name)),
        _ => false,
    }
}

/// An answer: its boot, and the CDI files of that time.
type PreparedAnswer = (u32, Vec<String>, BTreeMap<String, Vec<u8>>);

struct World {
    home: Home,
    daemon: Daemon,
    drivers: Vec<Arc<Hardware>>,
    serving: BTreeSet<usize>,
    boot: u32,
    /// Answers by user and claim, until the claim's unprepare is requested.
    answers: BTreeMap<(User, Uid), PreparedAnswer>,
}

impl World {
    fn new(are_pure: [bool; 2]) -> Self {
        let (home, boot) = (Home::new(), 1);
        let daemon = Self::start(&home, boot);
        let drivers = DRIVERS
            .into_iter()
            .zip(are_pure)
            .map(|(name, is_pure)| Hardware::new(name, is_pure))
            .collect();
        let mut world = Self {
            home,
            daemon,
            drivers,
            serving: BTreeSet::new(),
            boot,
            answers: BTreeMap::new(),
        };
        (0..DRIVERS.len()).for_each(|driver| world.serve(driver, true));
        world
    }

    fn start(home: &Home, boot: u32) -> Daemon {
        let daemon = home.start_with(&format!("boot-{boot}"), Duration::from_secs(2));
        daemon.starts.all();
        daemon
    }

    fn serve(&mut self, index: usize, serves: bool) {
        let driver = &self.drivers[index];
        if serves {
            let claims = Some(driver.clone() as Arc<dyn ClaimDriver>);
            self.daemon
                .serve_any(&driver.name, DriverKind::Wasm, claims, None, "sha256:00");
            self.serving.insert(index);
        } else {
            self.daemon.registry.retire(driver.name.as_str());
            self.serving.remove(&index);
        }
    }

    /// A new daemon on what is durable.
    fn begin_again(&mut self) {
        self.daemon = Self::start(&self.home, self.boot);
        self.serving
            .clone()
            .into_iter()
            .for_each(|driver| self.serve(driver, true));
        self.assert_answers_are_durable();
    }

    async fn happen(&mut self, event: &Event) {
        match event {
            Event::Requests { requests, crash } => self.ask(requests, *crash).await,
            Event::Outcomes { driver, outcomes } => self.drivers[*driver]
                .state
                .lock()
                .unwrap()
                .outcomes
                .extend(outcomes),
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
        // A claim whose unprepare is requested may be gone, regardless of the answer.
        self.answers
            .retain(|(user, claim), _| !requests.iter().any(|request| takes(request, user, claim)));
        let work = futures::future::join_all(
            requests
                .iter()
                .map(|request| carry_out(&self.daemon, request)),
        );
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
    fn take(&mut self, requests: &[Request], answers: Vec<Vec<(User, Uid)>>) {
        let is_leaving =
            |user: &User, claim: &Uid| requests.iter().any(|one| takes(one, user, claim));
        let answers = answers.into_iter().flatten();
        for (user, claim) in answers.filter(|(user, claim)| !is_leaving(user, claim)) {
            let answer = self.files_of(&user, &claim);
            let before = self.answers.insert((user, claim), answer.clone());
            assert!(
                before.is_none_or(|before| before.0 != answer.0 || before == answer),
                "the same answer again"
            );
        }
    }

    fn files_of(&self, user: &User, claim: &Uid) -> PreparedAnswer {
        let of_claim = |name: &String| match user {
            User::Pod(_) => name.ends_with(&format!("_{claim}.yaml")),
            User::Kubelet(driver) => *name == format!("{driver}_{claim}.yaml"),
        };
        let name =
            |path: &std::path::PathBuf| path.file_name().unwrap().to_str().unwrap().to_owned();
        let files = self
            .daemon
            .cdi_files()
            .into_iter()
            .map(|path| (name(&path), path));
        let files = files.filter(|(name, _)| of_claim(name));
        let files: BTreeMap<_, _> = files
            .map(|(name, path)| (name, devices(&std::fs::read(path).unwrap())))
            .collect();
        (self.boot, files.keys().cloned().collect(), files)
    }

    fn assert_answers_are_durable(&self) {
        let records = self.daemon.manager.records.claims();
        for ((user, claim), (boot, ..)) in &self.answers {
            let record = records.iter().find(|record| record.id.uid == *claim);
            let record = record
                .unwrap_or_else(|| panic!("{claim} was answered to {user:?} and is not known"));
            let (is_held, is_ready) = match user {
                User::Pod(pod) => (
                    record.pods.contains_key(pod),
                    record.state == ClaimState::Prepared,
                ),
                User::Kubelet(driver) => {
                    let part = record.drivers.get(driver);
                    (
                        part.is_some_and(|part| part.kubelet),
                        part.is_some_and(|part| part.current().is_some()),
                    )
                }
            };
            assert!(is_held, "{claim} was answered to {user:?}");
            assert!(
                is_ready || *boot != self.boot,
                "{claim} was answered to {user:?}"
            );
        }
    }

    /// Asserts the invariants that hold while no request is running, regardless of the daemon's own work.
    fn assert_sound(&self) {
        let records = self.daemon.manager.records.claims();
        for driver in &self.drivers {
            for uid in self.claims_of(driver) {
                let known = records
                    .iter()
                    .any(|r| r.id.uid == uid && r.drivers.contains_key(&driver.name));
                assert!(known, "{} has {uid}, which no record has", driver.name);
            }
        }
        requests::assert_devices_are_exclusive(records.iter().map(Arc::as_ref));
    }

    /// Claims that a driver has, without those that were released while it could not unprepare them.
    fn claims_of(&self, driver: &Hardware) -> BTreeSet<Uid> {
        let (mut uids, released) = (
            driver.holds(),
            self.daemon.manager.records.released_claims(),
        );
        uids.retain(|uid| {
            !released
                .iter()
                .any(|r| r.id.uid == *uid && r.untold.contains_key(&driver.name))
        });
        uids
    }

    /// Faults stop, drivers come back, the kubelet unprepares what it holds, and every pod leaves.
    async fn settle(mut self) {
        self.drivers
            .iter()
            .for_each(|driver| driver.state.lock().unwrap().outcomes.clear());
        (0..DRIVERS.len()).for_each(|driver| self.serve(driver, true));
        for claim in claims() {
            for name in DRIVERS.map(driver) {
                // A part that is not unprepared at once is retried.
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
        for driver in &self.drivers {
            assert_eq!(
                self.claims_of(driver),
                BTreeSet::new(),
                "{} unprepared everything",
                driver.name
            );
        }
        self.daemon.checkpoint().close().await;
        let last = self.home.start();
        assert!(last.is_empty(), "an empty checkpoint");
    }
}

/// Returns a file without the claim's identity, which names the pods that hold the claim now: the rest is the devices that containers get.
fn devices(file: &[u8]) -> Vec<u8> {
    file.split(|byte| *byte == b'\n')
        .skip(1)
        .flatten()
        .copied()
        .collect()
}

/// Returns the users and claims that were answered to be prepared.
async fn carry_out(daemon: &Daemon, asked: &Request) -> Vec<(User, Uid)> {
    match asked {
        Request::Unprepare { pod } => drop(daemon.unprepare(&pods()[*pod]).await),
        Request::KubeletUnprepare {
            claim,
            part: Some(part),
        } => {
            let claim = &claims()[*claim];
            daemon
                .kubelet_unprepare(&driver_of(claim, *part), claim)
                .await
                .ok();
        }
        Request::KubeletUnprepare { claim, part: None } => {
            if let Some(seen) = daemon.manager.kubelet.held_claim(&claims()[*claim].id.uid) {
                daemon
                    .manager
                    .kubelet
                    .unprepare_all(&seen, "its pods are gone")
                    .await
                    .ok();
            }
        }
        Request::KubeletPrepare { claim, part } => {
            let claim = claims()[*claim].clone();
            let name = driver_of(&claim, *part);
            daemon.source.put(claim.clone());
            // Two claims have the same name: it may be the other that is there.
            let answer = daemon.kubelet_prepare(&name, &claim).await;
            let has_devices = answer.is_ok_and(|devices| !devices.is_empty());
            return has_devices
                .then_some((User::Kubelet(name), claim.id.uid))
                .into_iter()
                .collect();
        }
        Request::EarlyPrepare { claim, part } => {
            let claim = claims()[*claim].clone();
            let name = driver_of(&claim, *part);
            // Nothing is promised to a kubelet yet.
            daemon
                .manager
                .kubelet
                .prepare_early(&name, claim, "test".into())
                .await
                .ok();
        }
        Request::EarlyUnprepare { claim } => {
            // What a kubelet requested meanwhile stays.
            daemon
                .manager
                .kubelet
                .unprepare_early(&claims()[*claim].id.uid, "not nominated")
                .await
                .ok();
        }
        Request::Release { claim } => {
            let id = claims()[*claim].id.clone();
            let request = ReleaseRequest {
                uid: Some(id.uid),
                ..release_request(id.name.as_str())
            };
            // It is refused where the claim is in use.
            daemon
                .manager
                .releases
                .release(request, "test".into())
                .await
                .ok();
        }
        Request::Prepare {
            pod,
            claims: wanted,
        } => {
            let (pod, mut inline) = (&pods()[*pod], BTreeMap::new());
            for index in wanted {
                let claim = claims()[*index].clone();
                inline.insert(claim.id.name.clone(), claim);
            }
            let names: Vec<_> = inline.keys().map(|name| name.as_str()).collect();
            let inline = inline.values().cloned().collect();
            let outcome = daemon.prepare_request(request(pod, &names), inline).await;
            let prepared = outcome.claims.into_iter().filter(|claim| claim.end.is_ok());
            return prepared
                .filter_map(|claim| Some((User::Pod(pod.uid.clone()), claim.uid?)))
                .collect();
        }
    }
    Vec::new()
}

/// A history takes milliseconds; one that never ends is reported with its events. By the true clock: the paused one runs ahead of the
/// checkpoint's thread.
async fn too_long() {
    let (report, reported) = tokio::sync::oneshot::channel::<()>();
    let (over, watched) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        if watched
            .recv_timeout(Duration::from_secs(30))
            .is_err_and(|end| end == RecvTimeoutError::Timeout)
        {
            report.send(()).ok();
        }
    });
    let _over = over;
    if reported.await.is_err() {
        std::future::pending::<()>().await;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn manager_histories_preserve_claims_and_durability(
        are_pure in any::<[bool; 2]>(),
        events in prop::collection::vec(event(), 1..14),
    ) {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().start_paused(true).build().unwrap();
        let history = async {
            let mut world = World::new(are_pure);
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
