//! State of a kubelet, under one lock that is held briefly.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::KubeletOptions;
use super::device_plugin::{Allocation, Plugin, Resource};
use super::instance::{DeviceHealth, Instance};

/// Number of calls in the report of a wait that failed.
const STORY_LINES: usize = 80;

/// Something that the kubelet called, was called for, or did.
#[derive(Clone, Debug)]
pub struct Call {
    /// `GetInfo`, `NotifyRegistrationStatus`, `NodePrepareResources`, `Register`, `ListAndWatch`; `deregister`, `wipe` and so on in
    /// small letters for what is no call.
    pub what: String,
    /// A driver, a resource or, before its name is known, a path.
    pub whom: String,
    pub outcome: Result<(), String>,
    /// Time at which the call began.
    pub at: Instant,
    pub took: Duration,
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) calls: Vec<Call>,
    /// Instances by driver, oldest first.
    pub(super) instances: BTreeMap<String, Vec<Arc<Instance>>>,
    /// Health by driver; kept until the stream ends.
    pub(super) health: BTreeMap<String, BTreeMap<(String, String), DeviceHealth>>,
    pub(super) plugins: BTreeMap<String, Plugin>,
    pub(super) allocations: Vec<Allocation>,
    pub(super) last_number: u64,
    /// Drivers whose slices will go, and in which process that began.
    pub(super) wiping: BTreeMap<String, u64>,
    /// Grows with each restart.
    pub(super) process: u64,
}

impl State {
    pub(super) fn number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// Clears the state that ends with a kubelet's process.
    pub(super) fn process_ended(&mut self) {
        self.process += 1;
        self.wiping.clear();
        self.instances.clear();
        self.health.clear();
        for plugin in self.plugins.values_mut() {
            plugin.forget();
        }
    }
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) root: PathBuf,
    pub(super) options: KubeletOptions,
    state: Mutex<State>,
    tick: watch::Sender<()>,
}

impl Shared {
    pub(super) fn new(root: &Path, options: KubeletOptions) -> Self {
        let (state, tick) = (Mutex::default(), watch::Sender::new(()));
        Self {
            root: root.to_owned(),
            options,
            state,
            tick,
        }
    }

    pub(super) fn look<T>(&self, look: impl FnOnce(&State) -> T) -> T {
        look(
            &self
                .state
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner()),
        )
    }

    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let done = change(
            &mut self
                .state
                .lock()
                .unwrap_or_else(|poisoned| poisoned.into_inner()),
        );
        self.tick.send_replace(());
        done
    }

    pub(super) fn ticks(&self) -> watch::Receiver<()> {
        self.tick.subscribe()
    }

    /// Something changed that is not under the lock.
    pub(super) fn wake(&self) {
        self.tick.send_replace(());
    }

    /// Runs a call within a deadline, and notes how it went.
    pub(super) async fn call<T>(
        &self,
        what: &str,
        whom: &str,
        deadline: Duration,
        work: impl Future<Output = Result<T, tonic::Status>>,
    ) -> Result<T, String> {
        let at = Instant::now();
        let done = match tokio::time::timeout(deadline, work).await {
            Ok(done) => done.map_err(|status| format!("{:?}: {}", status.code(), status.message())),
            Err(_) => Err(format!("DeadlineExceeded: no answer within {deadline:?}")),
        };
        let outcome = done.as_ref().map(drop).map_err(Clone::clone);
        self.note(Call {
            what: what.to_owned(),
            whom: whom.to_owned(),
            outcome,
            at,
            took: at.elapsed(),
        });
        done
    }

    pub(super) fn note(&self, call: Call) {
        self.change(|state| state.calls.push(call));
    }

    pub(super) fn note_quietly(&self, what: &str, whom: &str) {
        self.note_outcome(what, whom, Ok(()));
    }

    pub(super) fn note_outcome(&self, what: &str, whom: &str, outcome: Result<(), String>) {
        let (what, whom) = (what.to_owned(), whom.to_owned());
        self.note(Call {
            what,
            whom,
            outcome,
            at: Instant::now(),
            took: Duration::ZERO,
        });
    }

    pub(super) fn story(&self) -> String {
        self.look(|state| {
            let mut story = String::new();
            for call in state.calls.iter().rev().take(STORY_LINES).rev() {
                let _ = writeln!(
                    story,
                    "  {} {} {:?} ({:?})",
                    call.what, call.whom, call.outcome, call.took
                );
            }
            for (driver, instances) in &state.instances {
                let endpoints: Vec<_> = instances
                    .iter()
                    .map(|one| (&one.endpoint, one.is_connected()))
                    .collect();
                let _ = writeln!(story, "  driver {driver}: {endpoints:?}");
            }
            for (resource, plugin) in &state.plugins {
                let _ = writeln!(story, "  resource {resource}: {:?}", plugin.shown());
            }
            story
        })
    }
}

/// The state that a wait checks.
#[derive(Debug)]
pub struct View<'a> {
    state: &'a State,
}

impl<'a> View<'a> {
    pub(super) fn of(state: &'a State) -> Self {
        Self { state }
    }

    /// Returns the number of instances of a driver that are registered, notified and connected.
    pub fn connected(&self, driver: &str) -> usize {
        let instances = self.state.instances.get(driver).into_iter().flatten();
        instances
            .filter(|instance| instance.is_notified() && instance.is_connected())
            .count()
    }

    /// The endpoints of a driver's instances, oldest first.
    pub fn endpoints(&self, driver: &str) -> Vec<PathBuf> {
        let instances = self.state.instances.get(driver).into_iter().flatten();
        instances
            .map(|instance| instance.endpoint.clone())
            .collect()
    }

    /// Returns the state of a device plugin's resource.
    pub fn resource(&self, resource: &str) -> Option<Resource> {
        self.state.plugins.get(resource).map(Plugin::shown)
    }

    pub fn health(&self, driver: &str) -> BTreeMap<(String, String), DeviceHealth> {
        self.state.health.get(driver).cloned().unwrap_or_default()
    }

    pub fn calls(&self) -> &'a [Call] {
        &self.state.calls
    }

    /// Returns the number of successful calls or actions.
    pub fn count(&self, what: &str, whom: &str) -> usize {
        let calls = self.state.calls.iter();
        calls
            .filter(|call| call.what == what && call.whom == whom && call.outcome.is_ok())
            .count()
    }
}
