//! WASM drivers: from a file's bytes to a driver that can be called, and every call in a sandbox of its own.
//!
//! Owns the engine, the compiler and its cache, and the node's files as drivers see them. Is given files, grants and configs; gives back
//! drivers, or errors that say what is wrong with the file. Never watches files and never decides what becomes of a driver that
//! fails: the registry does.

mod admission;
mod artifact;
mod bindings;
mod cache;
mod compile;
mod convert;
mod driver;
pub mod driver_config;
mod edits;
mod engine;
pub mod file_watch;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod hostcalls;
mod kept;
pub mod kernel;
mod lane;
mod limiter;
mod log;
mod meter;
mod nodes;
mod places;
pub mod registry;
mod sandbox;
mod schema;
mod stats;
pub mod trust;
mod wasi;
mod wit_packages;
mod writes;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;
use wasmtime::component::{Component, InstancePre};

pub use self::admission::{CONTRACT, CONTRACT_VERSION, Form, LoadError, Profile, Surface};

pub use self::cache::CacheError;
pub use self::compile::{COMPILE_COMMAND, CompileBounds, Compiler, compile_for_parent};
pub use self::convert::Refusal;
pub use self::driver::WasmDriver;
pub use self::kept::{KeptError, KeptFacts, KeptFiles, SignedFile};
pub use self::limiter::Reached;
pub use nodedock_core::driver::containment::{Containment, QUARANTINED, Quarantined};

pub use self::sandbox::{CallFailure, Crowd};
pub use self::stats::{Limit, Operation, OperationStats, Outcome, Peak, Stats};

use self::artifact::{Artifact, Flaw, Key};
use self::bindings::exports::nodedock::driver as exports;
use self::cache::{Cache, Kept};
use self::compile::blocking;
use self::engine::Runtime;
use self::log::DriverLog;
use self::nodes::DevRoot;
use self::places::Places;
use self::sandbox::{CallSpec, Node, Sandbox, Scope, State};
use self::stats::Counters;
use nodedock_base::memory;
use nodedock_core::driver::values::Journal;
use nodedock_core::driver::{Ledger, NodeFacts};
use nodedock_core::sysfs::SysfsRoot;
use nodedock_model::DriverName;
use nodedock_model::grant::{self, Capabilities, Effective, Grant, LimitRequest, Limits};
use nodedock_model::limit::{CALL_MEMORIES, PLACE_WAIT, SYSFS_THREADS_PER_DRIVER};

/// Where drivers look and what they are told of the node.
#[derive(Debug, Clone)]
pub struct WasmSettings {
    /// Folder for compiled drivers; none compiles at each start.
    pub cache_dir: Option<PathBuf>,
    pub compiler: Compiler,
    /// `/sys`.
    pub sysfs_root: PathBuf,
    /// `/dev`.
    pub dev_root: PathBuf,
    pub node: NodeFacts,
}

/// Why WASM drivers cannot be hosted at all.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("set up the WebAssembly engine: {0}")]
    Engine(String),
    #[error("open {path}")]
    Root { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// A file as it was read: the same bytes are hashed, checked and compiled.
#[derive(Debug, Clone)]
pub struct DriverFile {
    /// For messages.
    pub name: String,
    pub bytes: Bytes,
}

impl DriverFile {
    /// `sha256:` and hex.
    pub fn digest(&self) -> String {
        format!("sha256:{}", hex::encode(Sha256::digest(&self.bytes)))
    }
}

/// Why a driver is asked what it has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trigger {
    Load,
    Timer,
    /// Folders below `/sys` of the devices that changed.
    Events(Vec<String>),
    Request,
}

/// What a driver says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverInfo {
    pub name: DriverName,
    /// Semantic version.
    pub version: String,
    pub summary: String,
    pub capabilities: Capabilities,
    pub limits: LimitRequest,
    /// Kernel subsystems whose events call for a discovery.
    pub event_subsystems: Vec<String>,
    pub discovery_period: Duration,
    pub annotations: BTreeMap<String, String>,
}

/// All that can be said of a file.
#[derive(Debug)]
pub struct Inspection {
    pub size: usize,
    pub digest: String,
    pub surface: Surface,
    /// None: it did not come so far.
    pub info: Option<Arc<DriverInfo>>,
    pub missing_grants: Vec<String>,
    pub limits: Option<Limits>,
    /// Why it cannot be loaded.
    pub error: Option<LoadError>,
}

/// Where the driver's functions are.
#[derive(Clone)]
struct Exports {
    identity: exports::identity::GuestIndices,
    discovery: exports::discovery::GuestIndices,
    preparation: exports::preparation::GuestIndices,
    configuration: Option<exports::configuration::GuestIndices>,
    health: Option<exports::health::GuestIndices>,
}

impl Exports {
    fn new(pre: &InstancePre<State>, surface: &Surface) -> wasmtime::Result<Self> {
        let facets = surface.facets();
        let has = |facet: &str| facets.contains(&facet);
        Ok(Self {
            identity: exports::identity::GuestIndices::new(pre)?,
            discovery: exports::discovery::GuestIndices::new(pre)?,
            preparation: exports::preparation::GuestIndices::new(pre)?,
            configuration: match has("configuration") {
                true => Some(exports::configuration::GuestIndices::new(pre)?),
                false => None,
            },
            health: match has("health") {
                true => Some(exports::health::GuestIndices::new(pre)?),
                false => None,
            },
        })
    }
}

/// A compiled driver and how it came about.
struct Compiled {
    pre: InstancePre<State>,
    exports: Arc<Exports>,
    /// Linear memories of an instance.
    memories: usize,
    surface: Surface,
    digest: String,
    from_cache: bool,
    kept: Option<Kept>,
    took: Duration,
}

/// A driver's code, mapped.
struct Code {
    component: Component,
    surface: Surface,
    from_cache: bool,
    kept: Option<Kept>,
}

/// One per daemon: the engine, the cache, and what all drivers share.
pub struct WasmHost {
    runtime: Arc<Runtime>,
    cache: Option<Cache>,
    node: Arc<Node>,
    places: Places,
    /// Counts the sandboxes.
    owners: AtomicU64,
    compiler: Compiler,
    /// One compilation at a time, in the order in which they are asked for: each takes a core and up to some hundred MB.
    compiling: Semaphore,
}

impl WasmHost {
    pub fn new(
        settings: WasmSettings,
        ledger: Arc<dyn Ledger>,
        journal: Arc<dyn Journal>,
    ) -> Result<Arc<Self>, HostError> {
        let runtime = Runtime::new().map_err(|error| HostError::Engine(format!("{error:#}")))?;
        let root = |path: &PathBuf| {
            let path = path.clone();
            move |source| HostError::Root { path, source }
        };
        let sysfs = SysfsRoot::open(&settings.sysfs_root).map_err(root(&settings.sysfs_root))?;
        let dev = DevRoot::open(&settings.dev_root).map_err(root(&settings.dev_root))?;
        let (sysfs, dev) = (Arc::new(sysfs), Arc::new(dev));
        let node = Node { facts: settings.node, sysfs, dev, ledger, journal };
        let open = |folder: &PathBuf| Cache::open(folder, &runtime.engine);
        Ok(Arc::new(Self {
            cache: settings.cache_dir.as_ref().map(open).transpose()?,
            runtime: Arc::new(runtime),
            node: Arc::new(node),
            places: Places::default(),
            owners: AtomicU64::default(),
            compiler: settings.compiler,
            compiling: Semaphore::new(1),
        }))
    }

    /// Admits a file, compiles it or takes it from the cache, and asks it who it is, with nothing granted. `config` is JSON text.
    pub async fn load(
        self: &Arc<Self>,
        file: DriverFile,
        grant: Grant,
        config: Option<String>,
    ) -> Result<WasmDriver, LoadError> {
        let (mut surface, label) = (Surface::default(), file.name.clone());
        let compiled = self.compile(file, &mut surface).await?;
        self.describe(&label, compiled, &grant, config).await
    }

    /// The same for a person: as much as can be said, also of a file that cannot be loaded.
    pub async fn inspect(self: &Arc<Self>, file: DriverFile, grant: &Grant) -> Inspection {
        let (mut surface, label) = (Surface::default(), file.name.clone());
        let (size, digest) = (file.bytes.len(), file.digest());
        let driver = match self.compile(file, &mut surface).await {
            Ok(compiled) => self.describe(&label, compiled, grant, None).await,
            Err(error) => Err(error),
        };
        let blank = Inspection {
            size,
            digest,
            surface,
            info: None,
            missing_grants: Vec::new(),
            limits: None,
            error: None,
        };
        match driver {
            Ok(driver) => Inspection {
                info: Some(Arc::clone(driver.shared_info())),
                missing_grants: driver.missing_grants().to_vec(),
                limits: Some(driver.limits()),
                ..blank
            },
            Err(error) => Inspection { error: Some(error), ..blank },
        }
    }

    /// Takes a file's code from the cache, or has it compiled. Whoever drops this ends the compilation.
    async fn compile(
        self: &Arc<Self>,
        file: DriverFile,
        surface: &mut Surface,
    ) -> Result<Compiled, LoadError> {
        let begin = Instant::now();
        surface.form = Some(admission::form(&file.bytes)?);
        let (host, bytes) = (Arc::clone(self), file.bytes);
        let source = bytes.clone();
        let key = blocking(move || Ok(Key::new(&host.runtime.engine, &source))).await?;
        let code = match self.cached(key).await? {
            Some(code) => code,
            None => self.compile_anew(key, bytes, surface).await?,
        };
        *surface = code.surface.clone();
        let host = Arc::clone(self);
        blocking(move || host.link(key, code, begin)).await
    }

    async fn compile_anew(
        self: &Arc<Self>,
        key: Key,
        bytes: Bytes,
        surface: &mut Surface,
    ) -> Result<Code, LoadError> {
        let closed = |_| LoadError::Host("compile: the host ends".to_owned());
        let _turn = self.compiling.acquire().await.map_err(closed)?;
        // The same file under another name may just have been compiled.
        if let Some(code) = self.cached(key).await? {
            return Ok(code);
        }
        let begin = Instant::now();
        let artifact = self.compiler.compile(&self.runtime.engine, key, bytes).await?;
        let report = &artifact.report;
        let (elapsed, code_bytes, digest) = (begin.elapsed(), artifact.code_bytes, key.digest());
        tracing::info!(digest, ?elapsed, code_bytes, spent = ?report.spent, refused = report.refusal.is_some(), "compiled");
        *surface = report.surface.clone();
        let host = Arc::clone(self);
        blocking(move || {
            let code = host.keep(&key, artifact);
            memory::give_back();
            code
        })
        .await
    }

    async fn cached(self: &Arc<Self>, key: Key) -> Result<Option<Code>, LoadError> {
        let host = Arc::clone(self);
        blocking(move || Ok(host.take(&key))).await
    }

    fn take(&self, key: &Key) -> Option<Code> {
        let cache = self.cache.as_ref()?;
        let (artifact, kept) = cache.take(key)?;
        match artifact.map(&self.runtime.engine) {
            Ok(component) => {
                let surface = artifact.report.surface;
                Some(Code { component, surface, from_cache: true, kept: Some(kept) })
            }
            Err(flaw) => {
                cache.discard(key, &flaw);
                None
            }
        }
    }

    /// Keeps what was compiled and maps it from there. A full disk must not keep a driver from its work: then it stays in memory.
    fn keep(&self, key: &Key, mut artifact: Artifact) -> Result<Code, LoadError> {
        if let Some(refusal) = artifact.report.refusal.take() {
            return Err(refusal);
        }
        let (artifact, kept) = match &self.cache {
            Some(cache) => cache.put(key, artifact),
            None => (artifact, None),
        };
        // It has just been compiled, and by us: what the engine does not take of it is more than any driver may have.
        let failed = |flaw| match flaw {
            Flaw::Engine(why) => LoadError::Compile(admission::words(&why)),
            flaw => LoadError::Host(format!("map the compiled driver: {flaw}")),
        };
        let component = artifact.map(&self.runtime.engine).map_err(failed)?;
        Ok(Code { component, surface: artifact.report.surface, from_cache: false, kept })
    }

    /// Holds what a driver imports and exports against what there is.
    fn link(&self, key: Key, code: Code, begin: Instant) -> Result<Compiled, LoadError> {
        let types = |error: wasmtime::Error| LoadError::Types(admission::words(&format!("{error:#}")));
        let pre = self.runtime.linker.instantiate_pre(&code.component).map_err(types)?;
        let exports = Arc::new(Exports::new(&pre, &code.surface).map_err(types)?);
        let memories = memories(&code.component);
        let Code { surface, from_cache, kept, .. } = code;
        let (digest, took) = (key.digest(), begin.elapsed());
        Ok(Compiled { pre, exports, memories, surface, digest, from_cache, kept, took })
    }

    /// Asks a driver who it is. All its functions are looked up: types that differ show here and not at the first claim.
    async fn describe(
        self: &Arc<Self>,
        label: &str,
        compiled: Compiled,
        grant: &Grant,
        config: Option<String>,
    ) -> Result<WasmDriver, LoadError> {
        let counters = Arc::new(Counters::default());
        let limits = Limits::new(&LimitRequest::default(), &grant.limits);
        let log = Arc::new(DriverLog::new(label, limits.log, Arc::clone(&counters)));
        let wall = limits.look_wall();
        let scope = self.scope(None, Effective::none(), limits, log, Arc::clone(&counters));
        let sandbox = self.sandbox(&compiled, scope, Arc::clone(&counters));
        let (operation, request) = (Operation::Describe, "describe".into());
        let spec = CallSpec { operation, request, deadline: wall + PLACE_WAIT, wall, writes_for: None };
        let done = sandbox.call(spec, |store, instance, exports| {
            Box::pin(async move {
                if let Err(error) = load_all(&mut *store, instance, exports) {
                    return Ok(Err(admission::words(&format!("{error:#}"))));
                }
                let identity = exports.identity.load(&mut *store, instance)?;
                Ok(Ok(identity.call_describe(store).await?))
            })
        });
        let answer = done.await.map_err(LoadError::Describe)?.answer.map_err(LoadError::Types)?;
        let info = convert::driver_info(answer)
            .map_err(|why| LoadError::Description(admission::words(&why.to_string())))?;
        let missing = grant::missing(&info.capabilities, &info.limits, grant);
        let effective = Effective::new(&info.capabilities, grant);
        let effective = effective.map_err(|error| LoadError::Description(error.to_string()))?;
        let limits = Limits::new(&info.limits, &grant.limits);
        let log = Arc::new(DriverLog::new(info.name.as_str(), limits.log, Arc::clone(&counters)));
        let scope = self.scope(Some(info.name.clone()), effective, limits, log, Arc::clone(&counters));
        let sandbox = self.sandbox(&compiled, scope, counters);
        Ok(WasmDriver::new(sandbox, info, missing, compiled, config))
    }

    fn scope(
        &self,
        driver: Option<DriverName>,
        effective: Effective,
        limits: Limits,
        log: Arc<DriverLog>,
        counters: Arc<Counters>,
    ) -> Scope {
        let blocking = Arc::new(Semaphore::new(SYSFS_THREADS_PER_DRIVER));
        Scope { driver, effective, limits, log, counters, node: Arc::clone(&self.node), blocking }
    }

    fn sandbox(&self, compiled: &Compiled, scope: Scope, counters: Arc<Counters>) -> Sandbox {
        Sandbox {
            runtime: Arc::clone(&self.runtime),
            pre: compiled.pre.clone(),
            exports: Arc::clone(&compiled.exports),
            owner: self.owners.fetch_add(1, Ordering::Relaxed),
            memories: compiled.memories,
            places: self.places.clone(),
            containment: Arc::new(Containment::new(scope.driver.clone())),
            scope: Arc::new(scope),
            counters,
        }
    }
}

/// Linear memories of an instance; the most that there can be where the component does not tell.
fn memories(component: &Component) -> usize {
    let known =
        component.resources_required().and_then(|required| usize::try_from(required.num_memories).ok());
    known.unwrap_or(CALL_MEMORIES).clamp(1, CALL_MEMORIES)
}

/// Checks the types of all exported functions.
fn load_all(
    store: &mut wasmtime::Store<State>,
    instance: &wasmtime::component::Instance,
    exports: &Exports,
) -> wasmtime::Result<()> {
    exports.identity.load(&mut *store, instance)?;
    exports.discovery.load(&mut *store, instance)?;
    exports.preparation.load(&mut *store, instance)?;
    if let Some(configuration) = &exports.configuration {
        configuration.load(&mut *store, instance)?;
    }
    if let Some(health) = &exports.health {
        health.load(&mut *store, instance)?;
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests;
