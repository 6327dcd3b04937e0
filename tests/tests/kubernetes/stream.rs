//! Pods with claims that come and go while something happens to the node.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::path::Path;
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::join_all;
use nodedock_tests::cdi::CdiFile;
use regex::Regex;
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::PATIENCE;
use crate::api::Api;
use crate::kubelet::{Kubelet, Repeated};
use crate::scene::{cdi_devices, gpus, path, pod, pod_with_claim, remove};

/// The longest time for which a pod holds its claim.
const HOLD: Duration = Duration::from_millis(200);

/// The setup of the pods, and their number.
pub(crate) struct Stream<'a> {
    pub(crate) api: &'a Api,
    pub(crate) kubelet: &'a Kubelet,
    pub(crate) node: &'a str,
    /// The driver of the devices.
    pub(crate) driver: &'a str,
    pub(crate) wants: Wants<'a>,
    /// The directory of CDI files.
    pub(crate) cdi: &'a Path,
    /// Pods at once.
    pub(crate) in_flight: usize,
    /// Pods that end before, between and after the actions.
    pub(crate) between: usize,
}

/// The way in which each pod gets a device.
#[derive(Clone, Copy)]
pub(crate) enum Wants<'a> {
    /// A claim, which the kubelet prepares and unprepares.
    Claim,
    /// An extended resource, of which the device manager allocates a device.
    Resource(&'a str),
}

/// Results of the pods, by the action that had begun last.
#[derive(Debug, Default)]
pub(crate) struct Report(BTreeMap<String, Tally>);

#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) pods: usize,
    /// Pods whose first attempt failed, by command. A kubelet repeats a prepare a minute later; a pod whose devices are not allocated has
    /// failed for good.
    failed: BTreeMap<&'static str, usize>,
    /// The longest time from the first attempt of a command to its success.
    pub(crate) longest_wait: Duration,
    /// The longest time for which a pod waited for the scheduler.
    pub(crate) longest_binding: Duration,
    /// The longest time that a manager took for an attempt that succeeded.
    pub(crate) longest_call: Duration,
    /// The errors, without names, and how often each came.
    pub(crate) errors: BTreeMap<String, usize>,
}

struct StreamState {
    progress: watch::Sender<Progress>,
    report: Mutex<Report>,
}

#[derive(Default)]
struct Progress {
    done: usize,
    /// The actions that have begun.
    actions: Vec<(Instant, String)>,
    is_last: bool,
}

impl Stream<'_> {
    /// Runs pods, and each action in turn after so many more pods have ended. Returns when all pods have ended.
    pub(crate) async fn run(&self, actions: &[&str], mut action: impl AsyncFnMut(&str)) -> Report {
        let state = StreamState {
            progress: watch::Sender::default(),
            report: Mutex::default(),
        };
        let act = async {
            for name in actions {
                state.more_done(self.between).await;
                let begun = (Instant::now(), (*name).to_owned());
                state
                    .progress
                    .send_modify(|progress| progress.actions.push(begun));
                action(name).await;
            }
            state.more_done(self.between).await;
            state
                .progress
                .send_modify(|progress| progress.is_last = true);
        };
        let workers = join_all((0..self.in_flight).map(|number| self.work(number, &state)));
        tokio::join!(act, workers);
        state
            .report
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// One pod after the other.
    async fn work(&self, number: usize, state: &StreamState) {
        let mut turn = 0;
        while !state.progress.borrow().is_last {
            self.pod(&format!("stream-{number}-{turn}"), state).await;
            turn += 1;
        }
    }

    /// A pod from its creation to its end.
    async fn pod(&self, name: &str, state: &StreamState) {
        match self.wants {
            Wants::Claim => self.pod_with_claim(name, state).await,
            Wants::Resource(resource) => self.pod_with_resource(name, resource, state).await,
        }
        state.progress.send_modify(|progress| progress.done += 1);
    }

    async fn pod_with_claim(&self, name: &str, state: &StreamState) {
        pod_with_claim(self.api, self.node, name, gpus(1)).await;
        self.bound(name, state).await;
        let prepared = self.repeat("prepare", name, state).await;
        let mut devices = cdi_devices(&prepared);
        // A kubelet that was started again has them twice: it adds those of the answer to those of its checkpoint.
        devices.dedup();
        assert_eq!(
            (devices.len(), self.files_with(&devices[0])),
            (1, 1),
            "{name}: {prepared}"
        );
        state.hold().await;
        self.repeat("unprepare", name, state).await;
        assert_eq!(self.files_with(&devices[0]), 0, "{name} is unprepared");
        remove(self.api, self.node, name).await;
    }

    async fn pod_with_resource(&self, name: &str, resource: &str, state: &StreamState) {
        let (pods, container) = (
            path(self.node, "pods"),
            json!({"resources": {"limits": {resource: "1"}}}),
        );
        self.api
            .post(&pods, &pod(self.node, name, json!([]), container))
            .await
            .done();
        self.bound(name, state).await;
        self.repeat("allocate", name, state).await;
        let started = self.repeat("start", name, state).await;
        let device = started["cdi"][0]
            .as_str()
            .unwrap_or_else(|| panic!("{name}: {started}"));
        assert_eq!(self.files_with(device), 1, "{name}: {started}");
        state.hold().await;
        self.api
            .delete_at_once(&format!("{pods}/{name}"))
            .await
            .done();
    }

    async fn bound(&self, pod: &str, state: &StreamState) {
        let began = Instant::now();
        self.kubelet.bound(self.node, pod, self.driver).await;
        state.note(Instant::now(), |tally| {
            tally.longest_binding = tally.longest_binding.max(began.elapsed())
        });
    }

    /// Repeats a command until it succeeds. Gives its result.
    async fn repeat(&self, what: &'static str, pod: &str, state: &StreamState) -> Value {
        // What a kubelet refuses just after its own start is not the daemon's fault.
        self.kubelet.was_registered(self.driver).await;
        let Repeated {
            result,
            refusals,
            decided,
            elapsed,
            waited,
        } = self.kubelet.repeat(what, self.node, pod, self.driver).await;
        state.note(decided, |tally| {
            // The first command of a pod.
            tally.pods += usize::from(matches!(what, "prepare" | "allocate"));
            *tally.failed.entry(what).or_default() += usize::from(!refusals.is_empty());
            tally.longest_wait = tally.longest_wait.max(waited);
            tally.longest_call = tally.longest_call.max(elapsed);
            for error in refusals {
                *tally
                    .errors
                    .entry(without_names(&error.replace(pod, "POD")))
                    .or_default() += 1;
            }
        });
        result
    }
}

/// An error without the digits in the names of sockets.
fn without_names(error: &str) -> String {
    static DIGITS: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"(-|/\.)[0-9a-f]{6,8}\b").expect("a valid expression"));
    DIGITS.replace_all(error, "${1}DIGITS").into_owned()
}

impl Stream<'_> {
    /// Returns the number of CDI files that have a device.
    fn files_with(&self, device: &str) -> usize {
        let entries = std::fs::read_dir(self.cdi)
            .expect("the directory is there")
            .flatten();
        // Those of other claims come and go meanwhile.
        let files = entries.filter_map(|entry| CdiFile::read(&entry.path()));
        files
            .filter(|file| file.devices().iter().any(|name| name == device))
            .count()
    }
}

impl StreamState {
    /// Waits until so many pods more have ended.
    async fn more_done(&self, count: usize) {
        let mut progress = self.progress.subscribe();
        let wanted = progress.borrow().done + count;
        let ended = timeout(
            PATIENCE * 2,
            progress.wait_for(|progress| progress.done >= wanted),
        )
        .await;
        let progress = ended.unwrap_or_else(|_| panic!("the pods stand still; {}", self.report()));
        drop(progress.expect("the sender is here"));
    }

    /// Lets a pod run until another one ends, or for a little time.
    async fn hold(&self) {
        let mut progress = self.progress.subscribe();
        // Whichever comes first; the sender is here.
        let _ = timeout(HOLD, progress.changed()).await;
    }

    /// Changes the tally of the action that began last before a time.
    fn note(&self, at: Instant, change: impl FnOnce(&mut Tally)) {
        let progress = self.progress.borrow();
        let begun = progress
            .actions
            .iter()
            .rev()
            .find(|(began, _)| *began <= at);
        let action = begun.map_or("before", |(_, action)| action);
        change(self.report().0.entry(action.to_owned()).or_default());
    }

    fn report(&self) -> std::sync::MutexGuard<'_, Report> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Report {
    /// The tally of an action after which pods ended.
    pub(crate) fn of(&self, action: &str) -> &Tally {
        self.0
            .get(action)
            .unwrap_or_else(|| panic!("no pod ended after {action:?}: {self}"))
    }
}

impl Tally {
    /// Returns the number of pods that had to repeat a command.
    pub(crate) fn failed(&self, what: &str) -> usize {
        self.failed.get(what).copied().unwrap_or_default()
    }
}

impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (action, tally) in &self.0 {
            let Tally {
                pods,
                failed,
                longest_wait,
                longest_call,
                longest_binding,
                ..
            } = tally;
            writeln!(
                f,
                "{action}: {pods} pods, first attempts that failed: {failed:?}"
            )?;
            writeln!(
                f,
                "  longest wait {longest_wait:.1?}, longest call {longest_call:.1?}, longest wait for the scheduler {longest_binding:.1?}"
            )?;
            for (error, count) in &tally.errors {
                writeln!(f, "  {count} x {error}")?;
            }
        }
        Ok(())
    }
}
