//! WASM drivers from the drivers folder: each file has a worker that loads it, swaps it and takes it away.
//!
//! A new version is loaded, described and asked for its devices beside the old one, which goes on serving until the switch, and
//! after it if any step fails. Only a grant that is taken back ends it (`standing`).

mod inbox;
mod standing;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use tokio::io::AsyncReadExt;
use tokio::sync::{mpsc, oneshot, watch};

use self::inbox::Inbox;
use self::standing::{Drained, Serving};
use super::keeper::{Keeper, look};
use super::predecessors::KeptDrivers;
use super::{DriverState, DriverView, Registry};
use crate::base::conditions::Conditions;
use crate::base::error::chain;
use crate::base::failpoint::{self, Point};
use crate::base::tasks::Tasks;
use crate::config;
use crate::discovery::files::{DriverFiles, FileEvent};
use crate::discovery::kernel::KernelEvents;
use crate::driver::grant::{Grant, GrantError};
use crate::driver::wasm::{DriverFile, LoadError, Trigger, WasmDriver, WasmHost};
use crate::driver::{Call, Driver, DriverIdentity, Published};
use crate::model::{DriverKind, DriverName, Problem, limit};

/// Orders that may wait for a worker: the newest files count, older ones are skipped.
const ORDERS_WAITING_MAX: usize = 64;

/// What the workers stand on.
#[derive(Clone)]
pub struct WasmFiles {
    pub registry: Registry,
    pub host: Arc<WasmHost>,
    /// The code of versions that served before.
    pub predecessors: Arc<KeptDrivers>,
    pub kernel: KernelEvents,
    pub conditions: Conditions,
    pub tasks: Tasks,
}

enum Order {
    Load(DriverFiles),
    /// Load again what is there, because something outside the files changed; tells when done.
    Again(Option<oneshot::Sender<()>>),
    Gone,
}

impl WasmFiles {
    /// Carries out what discovery and operators ask, until the tasks stop.
    pub async fn run(self, mut events: mpsc::Receiver<FileEvent>) {
        let Some(mut reloads) = self.registry.take_reloads(DriverKind::Wasm) else { return };
        let mut names_freed = self.registry.freed_changes();
        let mut workers: HashMap<String, mpsc::Sender<Order>> = HashMap::new();
        let stopped = self.tasks.stopped();
        tokio::pin!(stopped);
        loop {
            tokio::select! {
                // The files are there at the next start.
                () = &mut stopped => return,
                // What is not received stays in its channel, for each of the three.
                event = events.recv() => match event {
                    None => return,
                    Some(FileEvent::Changed(files)) => {
                        let stem = files.stem.clone();
                        let worker = workers.entry(stem).or_insert_with(|| self.worker(&files.stem));
                        // An error means that the worker stopped with the tasks.
                        worker.send(Order::Load(files)).await.ok();
                    }
                    Some(FileEvent::Gone(stem)) => {
                        if let Some(worker) = workers.remove(&stem) {
                            worker.send(Order::Gone).await.ok();
                        }
                    }
                },
                Some(request) = reloads.recv() => {
                    let worker = request.source.strip_suffix(".wasm").and_then(|stem| workers.get(stem));
                    if let Some(worker) = worker {
                        worker.send(Order::Again(Some(request.done))).await.ok();
                    }
                }
                Ok(()) = names_freed.changed() => {
                    for worker in workers.values() {
                        worker.send(Order::Again(None)).await.ok();
                    }
                }
            }
        }
    }

    fn worker(&self, stem: &str) -> mpsc::Sender<Order> {
        let (orders, inbox) = mpsc::channel(ORDERS_WAITING_MAX);
        let worker = Worker {
            shared: self.clone(),
            source: format!("{stem}.wasm"),
            files: None,
            name_taken: false,
            read: None,
            serving: None,
            drained: Drained::default(),
        };
        self.tasks.spawn("driver-file", worker.run(Inbox::new(inbox)));
        orders
    }
}

struct Worker {
    shared: WasmFiles,
    source: String,
    files: Option<DriverFiles>,
    /// The last load failed because another driver has the name.
    name_taken: bool,
    /// Digest of the file that was read last.
    read: Option<String>,
    serving: Option<Serving>,
    /// Versions before it whose calls may be under way.
    drained: Drained,
}

#[derive(Debug, thiserror::Error)]
enum Refusal {
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is larger than {max} bytes", path.display())]
    TooLarge { path: PathBuf, max: u64 },
    #[error("grant {file}")]
    Grant { file: String, source: GrantError },
    #[error("config {file}")]
    Config { file: String, source: config::DriverConfigError },
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error("the config was refused: {0}")]
    ConfigRefused(Problem),
    #[error("the first look at its devices failed: {0}")]
    Discovery(Problem),
    #[error("driver name {name} is taken by {other}, which came first")]
    NameTaken { name: String, other: String },
    #[error("driver name {0} does not start with a letter, and it has to be the vendor of a CDI kind")]
    NameNoVendor(String),
}

enum Loaded {
    Ready(Box<Ready>),
    Blocked(Arc<WasmDriver>),
}

/// A version that may serve.
struct Ready {
    driver: Arc<WasmDriver>,
    found: Published,
    bytes: bytes::Bytes,
    config: Option<String>,
    grant: Grant,
}

impl Worker {
    async fn run(mut self, mut inbox: Inbox) {
        let stopped = self.shared.tasks.stopped();
        tokio::pin!(stopped);
        loop {
            let order = tokio::select! {
                // A load that does not begin is begun at the next start.
                () = &mut stopped => return,
                order = inbox.next() => order,
            };
            match order {
                None => return,
                Some(Order::Load(files)) => {
                    self.files = Some(files);
                    if inbox.is_empty() {
                        self.load("file", &mut inbox).await;
                    }
                }
                Some(Order::Again(None)) if !self.name_taken => {}
                Some(Order::Again(None)) => self.load("name free", &mut inbox).await,
                Some(Order::Again(Some(done))) => {
                    self.load("reload", &mut inbox).await;
                    if let Some(serving) = &self.serving {
                        serving.looker.look().await;
                    }
                    // The operator may have gone away.
                    let _ = done.send(());
                }
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

    /// Loads the files, unless newer ones come meanwhile or they go.
    async fn load(&mut self, cause: &str, inbox: &mut Inbox) {
        let Some(files) = self.files.clone() else { return };
        if self.serving.is_none() {
            self.show(|view| view.state = DriverState::Seen);
        }
        let started = Instant::now();
        let grant = read_grant(files.grant.as_deref()).await;
        if let Ok(grant) = &grant {
            self.take_back(grant, cause);
        }
        let tasks = self.shared.tasks.clone();
        let loaded = tokio::select! {
            // A load that is not finished is begun at the next start.
            () = tasks.stopped() => return,
            // What overtook it is the next order, and a compilation ends with the load.
            () = inbox.overtaken() => return,
            loaded = self.try_load(&files, grant) => loaded,
        };
        let outcome = match loaded {
            Ok(Loaded::Ready(ready)) => self.switch(*ready, started, cause).await,
            Ok(Loaded::Blocked(driver)) => {
                self.blocked(&driver, started, cause);
                return;
            }
            Err(refusal) => Err(refusal),
        };
        self.name_taken = matches!(outcome, Err(Refusal::NameTaken { .. }));
        if let Err(refusal) = outcome {
            self.failed(&refusal, started, cause);
        }
    }

    async fn try_load(
        &mut self,
        files: &DriverFiles,
        grant: Result<Grant, Refusal>,
    ) -> Result<Loaded, Refusal> {
        self.read = None;
        let bytes: bytes::Bytes = read(&files.wasm, limit::DRIVER_FILE_BYTES_MAX).await?.into();
        let file = DriverFile { name: self.source.clone(), bytes: bytes.clone() };
        let hashed = file.clone();
        // Large files take their time. An error is the end of the daemon.
        self.read = tokio::task::spawn_blocking(move || hashed.digest()).await.ok();
        let grant = grant?;
        let config = read_config(files.config.as_deref()).await?;
        let driver = Arc::new(self.shared.host.load(file, grant.clone(), config.clone()).await?);
        self.check_name(&driver.info().name)?;
        if !driver.missing_grants().is_empty() {
            return Ok(Loaded::Blocked(driver));
        }
        let call = Call { request_id: crate::base::request::new_id(), deadline: limit::LOOK_WALL };
        driver.validate_config(&call).await.map_err(Refusal::ConfigRefused)?;
        let found = look(&driver, &call, Trigger::Load).await.map_err(Refusal::Discovery)?;
        Ok(Loaded::Ready(Box::new(Ready { driver, found, bytes, config, grant })))
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
        let Ready { driver, found, bytes, config, grant } = ready;
        let devices = found.inventory.device_count();
        let (published, inventory) = watch::channel(Arc::new(found));
        let identity = Arc::new(identity(&driver, &self.source));
        let name = identity.name.clone();
        self.keep(&identity, bytes, config).await;
        failpoint::pass(Point::KeptWritten);
        let serving = Driver { identity, claims: Some(driver.clone()), inventory: Some(inventory) };
        let taken = |other| Refusal::NameTaken { name: name.to_string(), other };
        self.shared.registry.serve(&self.source, serving).map_err(taken)?;
        failpoint::pass(Point::DriverSwitched);
        // Before the new one is shown: what the old one still finds out is not shown any more.
        let old = self.serving.take();
        if let Some(old) = &old {
            old.keeper.stop();
        }
        self.shared.predecessors.granted(&name, Some(&grant));
        let duration_us = u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX);
        self.show(|view| {
            describe(view, &driver);
            view.state = DriverState::Serving;
            view.reason = String::new();
            view.devices = devices;
            view.discovered_ms = Some(crate::base::clock::now_ms());
            view.problem = None;
            view.note("serving", cause, duration_us, None);
        });
        let keeper = self.shared.tasks.child();
        self.shared.registry.follow_conduct(&self.source, &name, driver.containment(), &keeper);
        let looker = Keeper {
            registry: self.shared.registry.clone(),
            source: self.source.clone(),
            driver: driver.clone(),
            published,
        }
        .start(&keeper, &self.shared.kernel);
        let version = driver.info().version.clone();
        let (from_cache, digest) = (driver.from_cache(), driver.digest());
        tracing::info!(driver = %name, version, digest, devices, from_cache, duration_us, file = self.source, "driver serves");
        self.serving = Some(Serving { driver, looker, keeper });
        if let Some(old) = old {
            self.drained(old);
        }
        self.shared.registry.tell_devices(&name);
        Ok(())
    }

    fn blocked(&mut self, driver: &WasmDriver, started: Instant, cause: &str) {
        self.name_taken = false;
        let missing = driver.missing_grants().to_vec();
        let reason = format!("asks for more than it is granted: {}", missing.join("; "));
        self.refused(DriverState::Blocked, Some(driver), &reason, missing, started, cause);
    }

    fn failed(&mut self, refusal: &Refusal, started: Instant, cause: &str) {
        self.refused(DriverState::Failed, None, &chain(refusal), Vec::new(), started, cause);
    }

    /// The old version goes on serving, if there is one, and the reason says what became of the new one.
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
        tracing::error!(file, state = state.as_str(), reason, "driver file not taken");
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

    /// The file is gone: its claims stay, and calls in flight finish.
    fn leave(&mut self) {
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

/// Reads a file that must not be larger than `max` bytes, from one opening.
async fn read(path: &Path, max: u64) -> Result<Vec<u8>, Refusal> {
    let io = |source| Refusal::Read { path: path.to_owned(), source };
    let file = tokio::fs::File::open(path).await.map_err(io)?;
    let mut bytes = Vec::new();
    file.take(max + 1).read_to_end(&mut bytes).await.map_err(io)?;
    if bytes.len() as u64 > max {
        return Err(Refusal::TooLarge { path: path.to_owned(), max });
    }
    Ok(bytes)
}

async fn read_text(path: &Path) -> Result<String, Refusal> {
    let bytes = read(path, limit::SIDE_FILE_BYTES_MAX).await?;
    let not_text = |error| std::io::Error::new(std::io::ErrorKind::InvalidData, error);
    let io = |source| Refusal::Read { path: path.to_owned(), source };
    String::from_utf8(bytes).map_err(not_text).map_err(io)
}

/// No grant file: the empty grant.
async fn read_grant(path: Option<&Path>) -> Result<Grant, Refusal> {
    let Some(path) = path else { return Ok(Grant::empty()) };
    let text = read_text(path).await?;
    Grant::parse(&text).map_err(|source| Refusal::Grant { file: file_name(path), source })
}

async fn read_config(path: Option<&Path>) -> Result<Option<String>, Refusal> {
    let Some(path) = path else { return Ok(None) };
    let text = read_text(path).await?;
    let json = config::driver_config(&text);
    json.map(Some).map_err(|source| Refusal::Config { file: file_name(path), source })
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}
