//! WASM drivers from the drivers directory and from images: each file has a worker that loads it, replaces it and removes it.
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
//! parsed. A file that describes the name of another source is called for nothing else (`docs/decisions/0025-names-belong-to-sources.md`). When the policy changes, every file is judged again: a serving driver that is no longer trusted is drained as if its file were
//! gone, and its claims are kept (`docs/decisions/0006-trust-in-driver-files.md`).

mod naming;
mod serving;
mod trusted;
mod workers;

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, oneshot, watch};

pub use crate::registry::file_memory::FileMemory;

use self::serving::Serving;
use self::workers::{Ended, Handle, Workers};
use crate::files::file_watch::{DriverFiles, FileEvent};
use crate::files::trust::{Policy, Trust, TrustDecision};
use crate::kernel::KernelEvents;
use crate::registry::file_memory::Room;
use crate::registry::inventory_poller;
use crate::registry::previous_versions::PreviousVersions;
use crate::registry::verification::{self, FileError, Verification, Verified};
use crate::{DriverFile, LoadError, Trigger, WasmDriver, WasmHost};
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::failpoint::{self, Point};
use nodedock_base::signal::Listener;
use nodedock_base::tasks::Tasks;
use nodedock_core::driver::{Driver, DriverIdentity, Published};
use nodedock_core::registry::names::{BindError, NameRefusal, NameReservation, name_problem};
use nodedock_core::registry::{DriverState, DriverView, Registry, Reloaded};
use nodedock_model::{DriverKind, DriverName, Problem, ProblemCode};

/// Queue of reloads of one file, of which half may be used.
const RELOADS_WAITING_MAX: usize = 64;

/// Interval of the checks for a name that may now belong to this file: the end of the last claim is reported to no worker.
const NAME_POLL_PERIOD: Duration = Duration::from_secs(10);

/// State that all workers use.
#[derive(Clone)]
pub struct WasmFiles {
    pub registry: Registry,
    pub host: Arc<WasmHost>,
    /// The code of versions that served before.
    pub previous_versions: Arc<PreviousVersions>,
    pub memory: FileMemory,
    pub kernel: KernelEvents,
    pub trust: Trust,
    pub conditions: Conditions,
    pub tasks: Tasks,
}

impl WasmFiles {
    /// Handles changes of files, and reloads by operators, until the tasks stop.
    pub async fn run(self, mut events: mpsc::Receiver<FileEvent>) {
        let Some(mut reloads) = self.registry.reloads.take(DriverKind::Wasm) else {
            return;
        };
        let mut workers = Workers::default();
        let stopped = self.tasks.stopped();
        tokio::pin!(stopped);
        loop {
            tokio::select! {
                // The files are there at the next start.
                () = &mut stopped => return,
                // An item that is not received stays in its channel, for both.
                event = events.recv() => match event {
                    None => return,
                    Some(FileEvent::Changed(files)) => {
                        let source = source_of(&files.stem);
                        self.registry.sources.update(DriverKind::Wasm, &source, |_| ());
                        self.registry.names.set_source(&source, Some(files.source()));
                        workers.load(files, |stem, before| self.worker(stem, before));
                    }
                    Some(FileEvent::Gone(stem)) => workers.remove(stem),
                    Some(FileEvent::Listed) => self.registry.names.set_listed(true),
                    Some(FileEvent::Permissions(faults)) => {
                        self.report_directory(&faults);
                        self.trust.judge_again();
                    }
                    Some(FileEvent::Shadowed(files)) => self.report_shadowed(&files),
                },
                Some(request) = reloads.recv() => workers.reload(request),
            }
        }
    }

    /// Starts a file's worker. It begins when the worker `before` it has ended.
    fn worker(&self, stem: &str, before: Option<Ended>) -> Handle {
        let (sender, files) = watch::channel(None);
        let (requests, reloads) = mpsc::channel(RELOADS_WAITING_MAX);
        let (end, ended) = oneshot::channel::<()>();
        let worker = Worker {
            shared: self.clone(),
            source: source_of(stem),
            files,
            policies: self.trust.changes(),
            names_freed: self.registry.names.changes(),
            reloads,
            interrupted_reload: None,
            awaited_name: None,
            name_not_stored: false,
            reason_is_of_trust: false,
            interrupted: false,
            open_files: Vec::new(),
            read: None,
            serving: None,
            replaced: Vec::new(),
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
            worker.run().await;
        });
        Handle {
            files: sender,
            reloads: requests,
            ended,
        }
    }
}

fn source_of(stem: &str) -> String {
    format!("{stem}.wasm")
}

struct Worker {
    shared: WasmFiles,
    source: String,
    /// None: the file is gone, or was not reported yet.
    files: watch::Receiver<Option<DriverFiles>>,
    policies: watch::Receiver<Arc<Policy>>,
    /// Changes when a driver's name becomes free.
    names_freed: Listener,
    reloads: mpsc::Receiver<oneshot::Sender<Reloaded>>,
    /// A reload that did not end.
    interrupted_reload: Option<oneshot::Sender<Reloaded>>,
    /// The name that the last load did not get, because it belongs to another source or could not be stored.
    awaited_name: Option<DriverName>,
    /// The last load failed because the checkpoint did not take the name.
    name_not_stored: bool,
    /// The last load failed because the file is not trusted, or others may change it.
    reason_is_of_trust: bool,
    /// The last load did not end.
    interrupted: bool,
    /// Files that others may change, as reported.
    open_files: Vec<String>,
    /// Digest of the file that was read last.
    read: Option<String>,
    serving: Option<Serving>,
    /// Replaced versions with calls that may still run.
    replaced: Vec<Weak<WasmDriver>>,
}

/// Next action of a worker.
enum Next {
    /// Loads the file, with the cause.
    Load(&'static str),
    Judge,
    Reload(oneshot::Sender<Reloaded>),
    /// The name of the serving version belongs to another source now.
    LeaveName,
    Remove,
}

#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("{0}")]
    SchemaInvalid(Problem),
    #[error("the config was refused: {0}")]
    ConfigRefused(Problem),
    #[error("the first discovery of its devices failed: {0}")]
    Discovery(Problem),
    #[error("requests more than it is granted: {}", missing.join("; "))]
    Blocked {
        driver: Arc<WasmDriver>,
        verdict: Box<TrustDecision>,
        missing: Vec<String>,
    },
    #[error("{}", name_problem(name, by, why))]
    Name {
        name: DriverName,
        by: String,
        why: NameRefusal,
    },
    #[error("the driver {name} is served by {other}")]
    Served { name: DriverName, other: String },
    #[error("the driver name {name}: {why}")]
    NameNotStored { name: DriverName, why: BindError },
}

/// A version that may serve.
struct Ready {
    driver: Arc<WasmDriver>,
    found: Published,
    verified: Verified,
    name: NameReservation,
}

impl Worker {
    async fn run(mut self) {
        let stopped = self.shared.tasks.stopped();
        tokio::pin!(stopped);
        loop {
            let next = tokio::select! {
                // A load that did not begin begins at the next start.
                () = &mut stopped => return,
                next = self.next() => next,
            };
            match next {
                None => return,
                Some(Next::Load(cause)) => self.load(cause).await,
                Some(Next::Judge) => self.judge_again().await,
                Some(Next::Reload(done)) => self.reload(done).await,
                Some(Next::LeaveName) => self.leave_name(),
                Some(Next::Remove) => {
                    self.remove();
                    return;
                }
            }
        }
    }

    /// The next change, or the next reload. Cancel safe: what is not seen or received here stays in its channel.
    async fn next(&mut self) -> Option<Next> {
        loop {
            tokio::select! {
                biased;
                changed = self.files.changed() => {
                    changed.ok()?;
                    let is_gone = self.files.borrow_and_update().is_none();
                    return Some(if is_gone { Next::Remove } else { Next::Load("file") });
                }
                Ok(()) = self.policies.changed() => return Some(Next::Judge),
                // A name that the checkpoint does not take is free again with each attempt: the poll below tries it.
                Ok(()) = self.names_freed.changed(), if !self.name_not_stored => {
                    if let Some(next) = self.name_changed() {
                        return Some(next);
                    }
                }
                () = tokio::time::sleep(NAME_POLL_PERIOD), if self.awaited_name.is_some() => {
                    if let Some(next) = self.name_changed() {
                        return Some(next);
                    }
                }
                () = std::future::ready(()), if self.interrupted_reload.is_some() => {
                    return self.interrupted_reload.take().map(Next::Reload);
                }
                Some(done) = self.reloads.recv() => return Some(Next::Reload(done)),
            }
        }
    }

    /// Resolves when the file changes or goes, or the policy changes: the current work may be obsolete.
    fn obsolete(&self) -> impl Future<Output = ()> + use<> {
        let (mut files, mut policies) = (self.files.clone(), self.policies.clone());
        async move {
            tokio::select! {
                Ok(()) = files.changed() => {}
                Ok(()) = policies.changed() => {}
                // No more changes come: the work continues to its end.
                else => std::future::pending().await,
            }
        }
    }

    async fn reload(&mut self, done: oneshot::Sender<Reloaded>) {
        self.load("reload").await;
        if self.interrupted {
            self.interrupted_reload = Some(done);
            return;
        }
        if let Some(serving) = &self.serving {
            serving.requests.discover().await;
        }
        // The operator may no longer wait.
        let _ = done.send(Ok(()));
    }

    fn show(&self, change: impl FnOnce(&mut DriverView)) {
        self.shared
            .registry
            .sources
            .update(DriverKind::Wasm, &self.source, change);
    }

    /// Loads the files, unless they change or go meanwhile.
    async fn load(&mut self, cause: &str) {
        self.interrupted = true;
        let Some(files) = self.files.borrow().clone() else {
            return;
        };
        if self.serving.is_none() {
            self.show(|view| view.state = DriverState::Seen);
        }
        let started = Instant::now();
        let verification = Verification::begin(&files).await;
        self.shared
            .registry
            .names
            .set_source(&self.source, Some(files.source()));
        match &verification.grant {
            Ok(grant) => {
                self.shared
                    .registry
                    .names
                    .set_granted_name(&self.source, grant.driver.clone());
                self.revoke(grant, cause);
            }
            Err(_) => self
                .shared
                .registry
                .names
                .set_grant_unreadable(&self.source),
        }
        let tasks = self.shared.tasks.clone();
        let room = tokio::select! {
            // As below: it begins at the next start, or with the next change.
            () = tasks.stopped() => return,
            () = self.obsolete() => return,
            room = Room::within(&self.shared.memory.loading, verification.size) => room,
        };
        let verification::Outcome {
            digest, verified, ..
        } = self.verify(verification, room).await;
        self.shared
            .registry
            .names
            .set_read_digest(&self.source, digest.clone());
        self.read = digest;
        let loaded = tokio::select! {
            // A load that did not end begins again at the next start.
            () = tasks.stopped() => return,
            // The newer files are loaded next, and the compilation ends with this load.
            () = self.obsolete() => return,
            loaded = self.try_load(verified) => loaded,
        };
        self.interrupted = false;
        let outcome = match loaded {
            Ok(ready) => self.switch(ready, started, cause).await,
            Err(refusal) => Err(refusal),
        };
        self.name_not_stored = matches!(outcome, Err(Refusal::NameNotStored { .. }));
        self.awaited_name = match &outcome {
            Err(
                Refusal::Name { name, .. }
                | Refusal::NameNotStored { name, .. }
                | Refusal::Served { name, .. },
            ) => Some(name.clone()),
            _ => None,
        };
        self.reason_is_of_trust = matches!(
            outcome,
            Err(Refusal::File(
                FileError::Distrusted(_) | FileError::Permissions(_)
            ))
        );
        if let Err(refusal) = outcome {
            self.refused(&refusal, started, cause);
        }
    }

    async fn try_load(&self, verified: Result<Verified, FileError>) -> Result<Ready, Refusal> {
        let mut verified = verified?;
        let loading = DriverFile {
            name: self.source.clone(),
            bytes: verified.file.code.clone(),
        };
        let loaded = self
            .shared
            .host
            .load(loading, verified.grant.clone(), verified.config.clone())
            .await?;
        let driver = Arc::new(loaded);
        let name = &driver.info().name;
        verified.verdict = self.judge_named(&verified.verdict, name.as_str())?;
        let name = self.reserve_name(name).await?;
        if !driver.missing_grants().is_empty() {
            let missing = driver.missing_grants().to_vec();
            return Err(Refusal::Blocked {
                driver,
                verdict: Box::new(verified.verdict),
                missing,
            });
        }
        let call = driver.look_call();
        driver.validate_config(&call).await.map_err(|problem| {
            match problem.code == ProblemCode::SchemaInvalid {
                true => Refusal::SchemaInvalid(problem),
                false => Refusal::ConfigRefused(problem),
            }
        })?;
        let found = driver
            .publish(&call, Trigger::Load)
            .await
            .map_err(Refusal::Discovery)?;
        let missing = driver.missing_resources(&found.inventory);
        if !missing.is_empty() {
            return Err(Refusal::Blocked {
                driver,
                verdict: Box::new(verified.verdict),
                missing,
            });
        }
        Ok(Ready {
            driver,
            found,
            verified,
            name,
        })
    }

    async fn switch(&mut self, ready: Ready, started: Instant, cause: &str) -> Result<(), Refusal> {
        let Ready {
            driver,
            found,
            verified:
                Verified {
                    file,
                    grant,
                    config,
                    verdict,
                },
            name: reserved,
        } = ready;
        let devices = found.inventory.device_count();
        let left_out = found.left_out.clone();
        let telemetry_problem = found.telemetry.problem.clone();
        let (published, inventory) = watch::channel(Arc::new(found));
        let of_serving = inventory.clone();
        let identity = Arc::new(identity(&driver, &self.source));
        let name = identity.name.clone();
        let named = reserved.source().clone();
        // First: nothing of a file that does not serve is stored.
        reserved
            .bind()
            .await
            .map_err(|why| self.not_bound(&name, why))?;
        self.store(&identity, file, config).await;
        failpoint::pass(Point::KeptWritten);
        let serving = Driver {
            identity,
            claims: Some(driver.clone()),
            inventory: Some(inventory),
        };
        let served = self.shared.registry.serve(&self.source, serving);
        served.map_err(|other| Refusal::Served {
            name: name.clone(),
            other,
        })?;
        drop(reserved);
        failpoint::pass(Point::DriverSwitched);
        // Before the new version is shown: the old one reports nothing after this.
        let old = self.serving.take();
        if let Some(old) = &old {
            old.tasks.stop();
        }
        self.shared
            .previous_versions
            .granted(&name, &self.source, &grant);
        // Before it is shown to serve.
        self.shared
            .conditions
            .clear(ProblemCode::DriverNameTaken, &self.source);
        let duration_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.show(|view| {
            describe(view, &driver);
            // Together with the state: else a serving driver would be shown with the old refusal.
            view.trust = Some(verdict.view());
            view.state = DriverState::Serving;
            view.reason = String::new();
            view.devices = devices;
            view.left_out = left_out;
            view.discovered_ms = Some(nodedock_base::clock::now_ms());
            view.problem.clone_from(&telemetry_problem);
            view.note("serving", cause, duration_us, None);
        });
        self.show_verdict(&verdict);
        let tasks = self.shared.tasks.child();
        let Self {
            shared: WasmFiles {
                registry, kernel, ..
            },
            source,
            ..
        } = &*self;
        registry
            .quarantines
            .follow(source, &name, driver.containment(), &tasks);
        let requests =
            inventory_poller::start(registry, source, driver.clone(), published, &tasks, kernel);
        let version = driver.info().version.clone();
        let (from_cache, digest) = (driver.from_cache(), driver.digest());
        tracing::info!(driver = %name, version, digest, devices, from_cache, duration_us, file = self.source, "driver serves");
        self.serving = Some(Serving {
            driver,
            source: named,
            inventory: of_serving,
            verdict,
            requests,
            tasks,
        });
        if let Some(old) = old {
            self.note_replaced(&old);
        }
        self.shared.registry.sources.report_devices(&name);
        Ok(())
    }

    /// The old version continues to serve, if there is one, and the reason explains why the new one does not.
    fn refused(&self, refusal: &Refusal, started: Instant, cause: &str) {
        let (state, blocked) = match refusal {
            Refusal::Blocked {
                verdict, missing, ..
            } => (DriverState::Blocked, Some((missing, verdict))),
            _ => (DriverState::Failed, None),
        };
        let (file, reason) = (&self.source, chain(refusal));
        let duration_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        tracing::error!(file, state = state.as_str(), reason, "driver file refused");
        if let (None, Some((_, verdict))) = (&self.serving, blocked) {
            self.show_verdict(verdict);
        }
        let of_name = match refusal {
            Refusal::Name { name, by, why } => Some(name_problem(name, by, why)),
            _ => None,
        };
        self.shared
            .conditions
            .update(ProblemCode::DriverNameTaken, &self.source, of_name.clone());
        self.show(|view| {
            view.missing_grants = blocked
                .map(|(missing, _)| missing.clone())
                .unwrap_or_default();
            if let Some(serving) = &self.serving {
                view.reason = format!(
                    "{}: {reason}",
                    serving.still_serves(self.read.as_deref(), state)
                );
            } else {
                match refusal {
                    Refusal::Blocked {
                        driver, missing, ..
                    } => {
                        describe(view, driver);
                        view.missing_grants.clone_from(missing);
                    }
                    Refusal::File(error) => view.trust = error.verdict().map(TrustDecision::view),
                    // Else those who look for the driver by its name would find this file.
                    Refusal::Name { .. } => view.name = None,
                    _ => {}
                }
                view.state = state;
                view.reason.clone_from(&reason);
            }
            let problem =
                of_name.unwrap_or_else(|| Problem::invalid(ProblemCode::DriverNotTaken, &reason));
            view.note(state.as_str(), cause, duration_us, Some(problem));
        });
    }

    /// The file is gone: its claims stay, and running calls end.
    fn remove(&mut self) {
        self.clear_trust();
        self.show(|view| view.state = DriverState::Draining);
        if self.retire() {
            tracing::info!(file = self.source, "driver file gone, its claims are kept");
        }
        self.shared
            .conditions
            .clear(ProblemCode::DriverNotKept, &self.source);
        self.shared
            .conditions
            .clear(ProblemCode::DriverNameTaken, &self.source);
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
    view.parameters = driver.parameters_summary();
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
