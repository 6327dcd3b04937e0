//! Pods with claims that come and go while something happens to the node.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::join_all;
use nodedock_tests::cdi::CdiFile;
use tokio::sync::watch;
use tokio::time::timeout;

use crate::PATIENCE;
use crate::api::Api;
use crate::kubelet::{Kubelet, Repeated};
use crate::scene::{cdi_devices, gpus, pod_with_claim, remove};

/// The longest time for which a pod holds its claim.
const HOLD: Duration = Duration::from_millis(200);

/// Where the pods run, and how many.
pub(crate) struct Stream<'a> {
    pub(crate) api: &'a Api,
    pub(crate) kubelet: &'a Kubelet,
    pub(crate) node: &'a str,
    /// The driver of the claims' devices.
    pub(crate) driver: &'a str,
    /// The directory of CDI files.
    pub(crate) cdi: &'a Path,
    /// Pods at once.
    pub(crate) in_flight: usize,
    /// Pods that end before, between and after the actions.
    pub(crate) between: usize,
}

/// What the pods met, by the action that had begun last.
#[derive(Debug, Default)]
pub(crate) struct Report(BTreeMap<String, Tally>);

#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) pods: usize,
    /// Pods for which a kubelet would have made its pause: a first prepare failed.
    pub(crate) failed_prepares: usize,
    pub(crate) failed_unprepares: usize,
    /// The longest time from the first attempt to prepare to the success.
    pub(crate) longest_wait: Duration,
    /// The longest time for which a pod waited for the scheduler.
    pub(crate) longest_binding: Duration,
    /// The longest time that the manager took for an attempt that succeeded.
    pub(crate) longest_call: Duration,
    /// The errors, without names, and how often each came.
    pub(crate) errors: BTreeMap<String, usize>,
}

struct State {
    progress: watch::Sender<Progress>,
    report: Mutex<Report>,
}

#[derive(Default)]
struct Progress {
    done: usize,
    action: String,
    is_last: bool,
}

impl Stream<'_> {
    /// Runs pods, and each action in turn after so many more pods have ended. Returns when all pods have ended.
    pub(crate) async fn run(&self, actions: &[&str], mut action: impl AsyncFnMut(&str)) -> Report {
        let progress = Progress { action: "before".to_owned(), ..Progress::default() };
        let state = State { progress: watch::Sender::new(progress), report: Mutex::default() };
        let act = async {
            for name in actions {
                state.more_done(self.between).await;
                state.progress.send_modify(|progress| (*name).clone_into(&mut progress.action));
                action(name).await;
            }
            state.more_done(self.between).await;
            state.progress.send_modify(|progress| progress.is_last = true);
        };
        let workers = join_all((0..self.in_flight).map(|number| self.work(number, &state)));
        tokio::join!(act, workers);
        state.report.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// One pod after the other.
    async fn work(&self, number: usize, state: &State) {
        let mut turn = 0;
        while !state.progress.borrow().is_last {
            self.pod(&format!("stream-{number}-{turn}"), state).await;
            turn += 1;
        }
    }

    /// A pod from its creation to its end.
    async fn pod(&self, name: &str, state: &State) {
        pod_with_claim(self.api, self.node, name, gpus(1)).await;
        let binding = Instant::now();
        self.kubelet.bound(self.node, name, self.driver).await;
        let binding = binding.elapsed();
        let prepared = self.kubelet.repeat("prepare", self.node, name, self.driver).await;
        let devices = cdi_devices(&prepared.result);
        assert_eq!((devices.len(), self.files_with(&devices[0])), (1, 1), "{name}: {prepared:?}");
        state.hold().await;
        let unprepared = self.kubelet.repeat("unprepare", self.node, name, self.driver).await;
        assert_eq!(self.files_with(&devices[0]), 0, "{name} is unprepared");
        remove(self.api, self.node, name).await;
        state.note(name, binding, &prepared, &unprepared);
    }
}

impl Stream<'_> {
    /// How many CDI files have a device.
    fn files_with(&self, device: &str) -> usize {
        let entries = std::fs::read_dir(self.cdi).expect("the directory is there").flatten();
        // Those of other claims come and go meanwhile.
        let files = entries.filter_map(|entry| CdiFile::read(&entry.path()));
        files.filter(|file| file.devices().iter().any(|name| name == device)).count()
    }
}

impl State {
    /// Waits until so many pods more have ended.
    async fn more_done(&self, count: usize) {
        let mut progress = self.progress.subscribe();
        let wanted = progress.borrow().done + count;
        let ended = timeout(PATIENCE * 2, progress.wait_for(|progress| progress.done >= wanted)).await;
        let progress = ended.unwrap_or_else(|_| panic!("the pods stand still; {}", self.report()));
        drop(progress.expect("the sender is here"));
    }

    /// Lets a pod run until another one ends, or for a little time.
    async fn hold(&self) {
        let mut progress = self.progress.subscribe();
        // Whichever comes first; the sender is here.
        let _ = timeout(HOLD, progress.changed()).await;
    }

    fn note(&self, pod: &str, binding: Duration, prepared: &Repeated, unprepared: &Repeated) {
        let action = self.progress.borrow().action.clone();
        let mut report = self.report();
        let tally = report.0.entry(action).or_default();
        tally.pods += 1;
        tally.failed_prepares += usize::from(!prepared.refusals.is_empty());
        tally.failed_unprepares += usize::from(!unprepared.refusals.is_empty());
        tally.longest_binding = tally.longest_binding.max(binding);
        tally.longest_wait = tally.longest_wait.max(prepared.waited);
        tally.longest_call = tally.longest_call.max(prepared.elapsed);
        for error in prepared.refusals.iter().chain(&unprepared.refusals) {
            *tally.errors.entry(error.replace(pod, "CLAIM")).or_default() += 1;
        }
        drop(report);
        self.progress.send_modify(|progress| progress.done += 1);
    }

    fn report(&self) -> std::sync::MutexGuard<'_, Report> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Report {
    /// The tally of an action after which pods ended.
    pub(crate) fn of(&self, action: &str) -> &Tally {
        self.0.get(action).unwrap_or_else(|| panic!("no pod ended after {action:?}: {self}"))
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (action, tally) in &self.0 {
            let Tally { pods, failed_prepares, failed_unprepares, .. } = tally;
            let [wait, call, binding] = [tally.longest_wait, tally.longest_call, tally.longest_binding];
            writeln!(
                f,
                "{action}: {pods} pods, {failed_prepares} failed to prepare, {failed_unprepares} to unprepare"
            )?;
            writeln!(
                f,
                "  longest wait {wait:.1?}, longest call {call:.1?}, longest wait for the scheduler {binding:.1?}"
            )?;
            for (error, count) in &tally.errors {
                writeln!(f, "  {count} x {error}")?;
            }
        }
        Ok(())
    }
}
