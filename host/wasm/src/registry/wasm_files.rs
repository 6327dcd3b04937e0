//! WASM drivers from the drivers directory: each file has a worker that loads it, replaces it and removes it.
//!
//! # Life of a driver file
//!
//! `seen → verified → compiled → described → (blocked) → serving ⇄ quarantined → draining → gone`, with `failed` beside it. A worker per file
//! does one thing at a time, and the worker of a file that comes back begins when the one before it has ended. A new version is loaded,
//! described and its devices are discovered beside the old one, which serves until the switch, and after it if a step fails. A file that
//! changes or goes while it is loaded ends that load, and its compilation. A revoked grant ends a serving version, also its running calls.
//! Each version is stored before it serves, for as long as claims name its digest (`docs/decisions/0007-replaced-drivers-and-their-claims.md`).
//!
//! A file is read once, beneath its directory; those bytes are hashed, verified and compiled, and other files wait while 256 MiB are in
//! memory. Its grant is read before: a revocation waits for nothing. In mode `enforce` an untrusted file fails before its content is
//! parsed. When the policy changes, every file is judged again: a serving driver that is no longer trusted is drained as if its file were
//! gone, and its claims are kept (`docs/decisions/0006-trust-in-driver-files.md`).

mod inbox;
mod standing;
mod trusted;
mod workers;

use std::sync::Arc;
use std::time::Instant;

use tokio::sync::{mpsc, oneshot, watch};

pub use crate::registry::file_memory::FileMemory;

use self::inbox::Inbox;
use self::standing::{Drained, Serving};
use self::workers::{Ended, Handle, Workers};
use crate::file_watch::{DriverFiles, FileEvent};
use crate::kernel::KernelEvents;
use crate::registry::keeper::{InventoryPoller, look};
use crate::registry::predecessors::KeptDrivers;
use crate::registry::vetting::{Looked, VetError, Vetted, Vetting};
use crate::trust::{Trust, Verdict};
use crate::{DriverFile, LoadError, SignedFile, Trigger, WasmDriver, WasmHost};
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{Call, Driver, DriverIdentity, Published};
use nodedock_core::registry::{DriverState, DriverView, Registry, Reloaded};
use nodedock_model::grant::Grant;
use nodedock_model::{DriverKind, DriverName, Problem};

/// Orders that wait for a worker: only the newest files are loaded.
const ORDERS_WAITING_MAX: usize = 64;

/// What all workers use.
#[derive(Clone)]
pub struct WasmFiles {
    pub registry: Registry,
    pub host: Arc<WasmHost>,
    /// The code of versions that served before.
    pub predecessors: Arc<KeptDrivers>,
    pub memory: FileMemory,
    pub kernel: KernelEvents,
    pub trust: Trust,
    pub conditions: Conditions,
    pub tasks: Tasks,
}

enum Order {
    Load(DriverFiles),
    /// Loads the same files again, because something outside the files changed, and reports the end.
    Again(Option<oneshot::Sender<Reloaded>>),
    /// Judges the file by the current policy.
    Judge,
    Gone,
}

impl WasmFiles {
    /// Handles changes of files, and reloads by operators, until the tasks stop.
    pub async fn run(self, mut events: mpsc::Receiver<FileEvent>) {
        let Some(mut reloads) = self.registry.take_reloads(DriverKind::Wasm) else { return };
        let mut names_freed = self.registry.freed_changes();
        let mut policies = self.trust.changes();
        let mut workers = Workers::default();
        let stopped = self.tasks.stopped();
        tokio::pin!(stopped);
        loop {
            tokio::select! {
                // The files are there at the next start.
                () = &mut stopped => return,
                // An item that is not received stays in its channel, for each of the four.
                event = events.recv() => match event {
                    None => return,
                    Some(FileEvent::Changed(files)) => {
                        workers.load(files, |stem, before| self.worker(stem, before)).await;
                    }
                    Some(FileEvent::Gone(stem)) => workers.leave(stem).await,
                    Some(FileEvent::Place(faults)) => {
                        self.tell_place(&faults);
                        workers.tell_all(|| Order::Judge).await;
                    }
                },
                Some(request) = reloads.recv() => {
                    if let Some(stem) = request.source.strip_suffix(".wasm").map(str::to_owned) {
                        workers.reload(&stem, request);
                    }
                }
                Ok(()) = policies.changed() => workers.tell_all(|| Order::Judge).await,
                Ok(()) = names_freed.changed() => workers.look_again(),
            }
        }
    }

    /// Starts a file's worker. It begins when the worker `before` it has ended.
    fn worker(&self, stem: &str, before: Option<Ended>) -> Handle {
        let (orders, inbox) = mpsc::channel(ORDERS_WAITING_MAX);
        let (end, ended) = oneshot::channel::<()>();
        let worker = Worker {
            shared: self.clone(),
            source: format!("{stem}.wasm"),
            files: None,
            name_taken: false,
            reason_is_of_trust: false,
            overtaken: false,
            open_files: Vec::new(),
            read: None,
            serving: None,
            drained: Drained::default(),
        };
        let stopped = self.tasks.stopped();
        self.tasks.spawn("driver-file", async move {
            let _end = end;
            if let Some(before) = before {
                tokio::select! {
                    // The files are there at the next start.
                    () = stopped => return,
                    _ = before => {}
                }
            }
            worker.run(Inbox::new(inbox)).await;
        });
        Handle { orders, ended }
    }
}

struct Worker {
    shared: WasmFiles,
    source: String,
    files: Option<DriverFiles>,
    /// The last load failed because another driver has the name.
    name_taken: bool,
    /// The last load failed because the file is not trusted, or others may change it.
    reason_is_of_trust: bool,
    /// The last load did not end.
    overtaken: bool,
    /// Files that others may change, as reported.
    open_files: Vec<String>,
    /// Digest of the file that was read last.
    read: Option<String>,
    serving: Option<Serving>,
    /// Earlier versions with calls that may still run.
    drained: Drained,
}

#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    Vet(#[from] VetError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("the config was refused: {0}")]
    ConfigRefused(Problem),
    #[error("the first discovery of its devices failed: {0}")]
    Discovery(Problem),
    #[error("driver name {name} is taken by {other}, which came first")]
    NameTaken { name: String, other: String },
    #[error("driver name {0} does not start with a letter, and it has to be the vendor of a CDI kind")]
    NameNoVendor(String),
}

enum Loaded {
    Ready(Box<Ready>),
    Blocked(Arc<WasmDriver>, Verdict),
}

/// A version that may serve.
struct Ready {
    driver: Arc<WasmDriver>,
    found: Published,
    file: SignedFile,
    config: Option<String>,
    grant: Grant,
    verdict: Verdict,
}

impl Worker {
    async fn run(mut self, mut inbox: Inbox) {
        let stopped = self.shared.tasks.stopped();
        tokio::pin!(stopped);
        loop {
            let order = tokio::select! {
                // A load that did not begin begins at the next start.
                () = &mut stopped => return,
                order = inbox.next() => order,
            };
            match order {
                None => return,
                Some(Order::Load(files)) => {
                    self.files = Some(files);
                    if !inbox.has_newer() {
                        self.load("file", &mut inbox).await;
                    }
                }
                Some(Order::Again(None)) if !self.name_taken => {}
                Some(Order::Again(None)) => self.load("name free", &mut inbox).await,
                Some(Order::Again(Some(done))) => {
                    self.load("reload", &mut inbox).await;
                    if self.overtaken {
                        inbox.return_order(Order::Again(Some(done)));
                        continue;
                    }
                    if let Some(serving) = &self.serving {
                        serving.looker.look().await;
                    }
                    // The operator may no longer wait.
                    let _ = done.send(Ok(()));
                }
                Some(Order::Judge) => self.judge_again(&mut inbox).await,
                Some(Order::Gone) => {
                    self.leave();
                    return;
                }
            }
        }
    }

    fn show(&self, change: impl FnOnce(&mut DriverView)) {
        self.shared.registry.update(DriverKind::Wasm, &self.source, change);
    }

    /// Loads the files, unless they change or go meanwhile.
    async fn load(&mut self, cause: &str, inbox: &mut Inbox) {
        let Some(files) = self.files.clone() else { return };
        if self.serving.is_none() {
            self.show(|view| view.state = DriverState::Seen);
        }
        let started = Instant::now();
        let vetting = Vetting::begin(&files).await;
        if let Some(grant) = vetting.grant() {
            self.revoke(grant, cause);
        }
        let tasks = self.shared.tasks.clone();
        self.overtaken = true;
        let room = tokio::select! {
            // As below: it begins at the next start, or by the next order.
            () = tasks.stopped() => return,
            () = inbox.overtaken() => return,
            room = self.shared.memory.to_load(vetting.size()) => room,
        };
        let Looked { digest, vetted, .. } = self.vet(vetting, room).await;
        self.read = digest;
        let loaded = tokio::select! {
            // A load that did not end begins again at the next start.
            () = tasks.stopped() => return,
            // The newer files are the next order, and the compilation ends with this load.
            () = inbox.overtaken() => return,
            loaded = self.try_load(vetted) => loaded,
        };
        self.overtaken = false;
        let outcome = match loaded {
            Ok(Loaded::Ready(ready)) => self.switch(*ready, started, cause).await,
            Ok(Loaded::Blocked(driver, verdict)) => {
                if self.serving.is_none() {
                    self.show_verdict(&verdict);
                }
                self.blocked(&driver, started, cause);
                return;
            }
            Err(refusal) => Err(refusal),
        };
        self.name_taken = matches!(outcome, Err(Refusal::NameTaken { .. }));
        let of_trust = |error: &VetError| matches!(error, VetError::Distrusted(_) | VetError::Place(_));
        self.reason_is_of_trust = matches!(&outcome, Err(Refusal::Vet(error)) if of_trust(error));
        if let Err(refusal) = outcome {
            self.failed(&refusal, started, cause);
        }
    }

    async fn try_load(&self, vetted: Result<Vetted, VetError>) -> Result<Loaded, Refusal> {
        let Vetted { file, grant, config, verdict } = vetted?;
        let loading = DriverFile { name: self.source.clone(), bytes: file.code.clone() };
        let driver = Arc::new(self.shared.host.load(loading, grant.clone(), config.clone()).await?);
        let name = &driver.info().name;
        let verdict = self.judge_named(&verdict, name.as_str())?;
        self.check_name(name)?;
        if !driver.missing_grants().is_empty() {
            return Ok(Loaded::Blocked(driver, verdict));
        }
        let call = Call { request_id: nodedock_base::request::new_id(), deadline: driver.look_deadline() };
        driver.validate_config(&call).await.map_err(Refusal::ConfigRefused)?;
        let found = look(&driver, &call, Trigger::Load).await.map_err(Refusal::Discovery)?;
        Ok(Loaded::Ready(Box::new(Ready { driver, found, file, config, grant, verdict })))
    }

    fn check_name(&self, name: &DriverName) -> Result<(), Refusal> {
        if !name.as_str().starts_with(|c: char| c.is_ascii_alphabetic()) {
            return Err(Refusal::NameNoVendor(name.to_string()));
        }
        match self.shared.registry.taken_by_other(name, &self.source) {
            Some(other) => Err(Refusal::NameTaken { name: name.to_string(), other }),
            None => Ok(()),
        }
    }

    async fn switch(&mut self, ready: Ready, started: Instant, cause: &str) -> Result<(), Refusal> {
        let Ready { driver, found, file, config, grant, verdict } = ready;
        let devices = found.inventory.device_count();
        let (published, inventory) = watch::channel(Arc::new(found));
        let identity = Arc::new(identity(&driver, &self.source));
        let name = identity.name.clone();
        self.keep(&identity, file, config).await;
        failpoint::pass(Point::KeptWritten);
        let serving = Driver { identity, claims: Some(driver.clone()), inventory: Some(inventory) };
        let taken = |other| Refusal::NameTaken { name: name.to_string(), other };
        self.shared.registry.serve(&self.source, serving).map_err(taken)?;
        failpoint::pass(Point::DriverSwitched);
        // Before the new version is shown: the old one reports nothing after this.
        let old = self.serving.take();
        if let Some(old) = &old {
            old.keeper.stop();
        }
        self.shared.predecessors.granted(&name, &self.source, &grant);
        let duration_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.show(|view| {
            describe(view, &driver);
            // Together with the state: else a serving driver would be shown with the old refusal.
            view.trust = Some(verdict.view());
            view.state = DriverState::Serving;
            view.reason = String::new();
            view.devices = devices;
            view.discovered_ms = Some(nodedock_base::clock::now_ms());
            view.problem = None;
            view.note("serving", cause, duration_us, None);
        });
        self.show_verdict(&verdict);
        let keeper = self.shared.tasks.child();
        self.shared.registry.follow_conduct(&self.source, &name, driver.containment(), &keeper);
        let looker = InventoryPoller {
            registry: self.shared.registry.clone(),
            source: self.source.clone(),
            driver: driver.clone(),
            published,
        }
        .start(&keeper, &self.shared.kernel);
        let version = driver.info().version.clone();
        let (from_cache, digest) = (driver.from_cache(), driver.digest());
        tracing::info!(driver = %name, version, digest, devices, from_cache, duration_us, file = self.source, "driver serves");
        self.serving = Some(Serving { driver, verdict, looker, keeper });
        if let Some(old) = old {
            self.drained(old);
        }
        self.shared.registry.tell_devices(&name);
        Ok(())
    }

    fn blocked(&mut self, driver: &WasmDriver, started: Instant, cause: &str) {
        self.name_taken = false;
        let missing = driver.missing_grants().to_vec();
        let reason = format!("requests more than it is granted: {}", missing.join("; "));
        self.refused(DriverState::Blocked, Some(driver), &reason, missing, started, cause);
    }

    fn failed(&mut self, refusal: &Refusal, started: Instant, cause: &str) {
        if let (Refusal::Vet(error), None) = (refusal, &self.serving) {
            let verdict = error.verdict().cloned();
            self.show(|view| view.trust = verdict.map(|verdict| verdict.view()));
        }
        self.refused(DriverState::Failed, None, &chain(refusal), Vec::new(), started, cause);
    }

    /// The old version goes on serving, if there is one, and the reason explains why the new one does not.
    fn refused(
        &self,
        state: DriverState,
        driver: Option<&WasmDriver>,
        reason: &str,
        missing: Vec<String>,
        started: Instant,
        cause: &str,
    ) {
        let duration_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        let file = &self.source;
        tracing::error!(file, state = state.as_str(), reason, "driver file refused");
        let goes_on = self.serving.as_ref().map(|serving| serving.goes_on(self.read.as_deref(), state));
        self.show(|view| {
            view.missing_grants = missing;
            match goes_on {
                Some(goes_on) => view.reason = format!("{goes_on}: {reason}"),
                None => {
                    if let Some(driver) = driver {
                        describe(view, driver);
                    }
                    view.state = state;
                    view.reason = reason.to_owned();
                }
            }
            let problem = Problem::invalid("driver-not-taken", reason);
            view.note(state.as_str(), cause, duration_us, Some(problem));
        });
    }

    /// The file is gone: its claims stay, and running calls end.
    fn leave(&mut self) {
        self.forget_trust();
        self.show(|view| view.state = DriverState::Draining);
        if self.retire() {
            tracing::info!(file = self.source, "driver file gone, its claims are kept");
        }
        self.shared.conditions.clear(standing::NOT_KEPT, &self.source);
        self.shared.registry.remove(&self.source);
    }
}

fn describe(view: &mut DriverView, driver: &WasmDriver) {
    let info = driver.info();
    view.name = Some(info.name.clone());
    view.version = info.version.to_string();
    view.summary = info.summary.clone();
    view.digest = driver.digest().to_owned();
    view.missing_grants = driver.missing_grants().to_vec();
}

fn identity(driver: &WasmDriver, source: &str) -> DriverIdentity {
    let info = driver.info();
    DriverIdentity {
        name: info.name.clone(),
        kind: DriverKind::Wasm,
        version: info.version.to_string(),
        digest: driver.digest().to_owned(),
        source: source.to_owned(),
        summary: info.summary.clone(),
    }
}

#[cfg(test)]
mod tests;
