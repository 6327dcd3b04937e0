//! WASM drivers: from a file's bytes to a driver that can be called, and every call in a sandbox of its own.
//!
//! Owns the engine, the compile cache and the node's files as drivers see them. Is given files, grants and configs; gives back
//! drivers, or errors that say what is wrong with the file. Never watches files and never decides what becomes of a driver that
//! fails: the registry does.

mod admission;
mod bindings;
mod cache;
mod convert;
mod driver;
mod edits;
mod engine;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod hostcalls;
mod log;
mod nodes;
mod sandbox;
mod stats;
mod sysfs;
mod wasi;
mod wit_packages;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;
use wasmtime::component::{Component, InstancePre};

pub use self::admission::{CONTRACT, CONTRACT_VERSION, Form, LoadError, Profile, Surface};
pub use self::cache::CacheError;
pub use self::convert::Refusal;
pub use self::driver::WasmDriver;
pub use self::sandbox::CallFailure;
pub use self::stats::Stats;

use self::bindings::exports::nodedock::driver as exports;
use self::cache::Cache;
use self::engine::Runtime;
use self::log::DriverLog;
use self::nodes::DevRoot;
use self::sandbox::{CallSpec, Node, Sandbox, Scope, State};
use self::stats::Counters;
use self::sysfs::SysfsRoot;
use super::grant::{self, Capabilities, Effective, Grant, LimitRequest, Limits};
use super::{Ledger, NodeFacts};
use crate::base::memory;
use crate::model::DriverName;
use crate::model::limit::{CALLS_MAX, CALLS_PER_DRIVER, LOOK_WALL, SYSFS_THREADS_PER_DRIVER};

/// Where drivers look and what they are told of the node.
#[derive(Debug, Clone)]
pub struct WasmSettings {
    /// Folder for compiled drivers; none compiles at each start.
    pub cache_dir: Option<PathBuf>,
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

/// A value that a driver wrote below `/sys`, and what was there before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SysfsWrite {
    /// Relative to `/sys`.
    pub path: String,
    pub before: String,
    pub after: String,
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
    exports: Exports,
    surface: Surface,
    digest: String,
    from_cache: bool,
    took: Duration,
}

/// One per daemon: the engine, the cache, and what all drivers share.
pub struct WasmHost {
    runtime: Arc<Runtime>,
    cache: Option<Cache>,
    node: Arc<Node>,
    calls: Arc<Semaphore>,
    /// One compilation at a time: each takes a core and up to some hundred MB.
    compiling: Mutex<()>,
}

impl WasmHost {
    pub fn new(settings: WasmSettings, ledger: Arc<dyn Ledger>) -> Result<Arc<Self>, HostError> {
        let runtime = Runtime::new().map_err(|error| HostError::Engine(format!("{error:#}")))?;
        let root = |path: &PathBuf| {
            let path = path.clone();
            move |source| HostError::Root { path, source }
        };
        let sysfs = SysfsRoot::open(&settings.sysfs_root).map_err(root(&settings.sysfs_root))?;
        let dev = DevRoot::open(&settings.dev_root).map_err(root(&settings.dev_root))?;
        let node = Node { facts: settings.node, sysfs: Arc::new(sysfs), dev: Arc::new(dev), ledger };
        Ok(Arc::new(Self {
            runtime: Arc::new(runtime),
            cache: settings.cache_dir.as_deref().map(Cache::open).transpose()?,
            node: Arc::new(node),
            calls: Arc::new(Semaphore::new(CALLS_MAX)),
            compiling: Mutex::new(()),
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

    /// Off the serving threads, one at a time.
    async fn compile(
        self: &Arc<Self>,
        file: DriverFile,
        surface: &mut Surface,
    ) -> Result<Compiled, LoadError> {
        let host = Arc::clone(self);
        let thread = tokio::task::spawn_blocking(move || {
            let _turn = host.compiling.lock().unwrap_or_else(PoisonError::into_inner);
            let mut surface = Surface::default();
            let compiled = host.compile_now(&file, &mut surface);
            drop(file);
            memory::give_back();
            (compiled, surface)
        });
        let (compiled, seen) = thread.await.map_err(|error| LoadError::Host(format!("compile: {error}")))?;
        *surface = seen;
        compiled
    }

    fn compile_now(&self, file: &DriverFile, surface: &mut Surface) -> Result<Compiled, LoadError> {
        let begin = Instant::now();
        let component = admission::admit(&file.bytes, surface)?;
        let digest = file.digest();
        let cached = self.cache.as_ref().and_then(|cache| cache.take(&self.runtime.engine, &digest));
        let from_cache = cached.is_some();
        let compiled = match cached {
            Some(compiled) => compiled,
            None => self.compile_anew(&digest, &component)?,
        };
        let types = |error: wasmtime::Error| LoadError::Types(format!("{error:#}"));
        let pre = self.runtime.linker.instantiate_pre(&compiled).map_err(types)?;
        let exports = Exports::new(&pre, surface).map_err(types)?;
        Ok(Compiled { pre, exports, surface: surface.clone(), digest, from_cache, took: begin.elapsed() })
    }

    fn compile_anew(&self, digest: &str, component: &[u8]) -> Result<Component, LoadError> {
        let engine = &self.runtime.engine;
        let failed = |error: wasmtime::Error| LoadError::Compile(format!("{error:#}"));
        let Some(cache) = &self.cache else {
            return Component::from_binary(engine, component).map_err(failed);
        };
        let compiled = engine.precompile_component(component).map_err(failed)?;
        match cache.put(engine, digest, &compiled) {
            Ok(component) => Ok(component),
            // A full disk must not keep a driver from its work.
            Err(error) => {
                tracing::warn!(digest, error, "compiled driver cannot be kept");
                Component::from_binary(engine, component).map_err(failed)
            }
        }
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
        let log = Arc::new(DriverLog::new(label));
        let limits = Limits::new(&LimitRequest::default(), &grant.limits);
        let scope = self.scope(None, Effective::none(), limits, log);
        let sandbox = self.sandbox(&compiled, scope, Arc::clone(&counters));
        let spec =
            CallSpec { request: "describe".into(), deadline: LOOK_WALL, wall: LOOK_WALL, may_write: false };
        let done = sandbox.call(spec, |store, instance, exports| {
            Box::pin(async move {
                if let Err(error) = load_all(&mut *store, instance, exports) {
                    return Ok(Err(format!("{error:#}")));
                }
                let identity = exports.identity.load(&mut *store, instance)?;
                Ok(Ok(identity.call_describe(store).await?))
            })
        });
        let answer = done.await.map_err(LoadError::Describe)?.answer.map_err(LoadError::Types)?;
        let info = convert::driver_info(answer).map_err(|why| LoadError::Description(why.to_string()))?;
        let missing = grant::missing(&info.capabilities, &info.limits, grant);
        let effective = Effective::new(&info.capabilities, grant);
        let effective = effective.map_err(|error| LoadError::Description(error.to_string()))?;
        let limits = Limits::new(&info.limits, &grant.limits);
        let log = Arc::new(DriverLog::new(info.name.as_str()));
        let scope = self.scope(Some(info.name.clone()), effective, limits, log);
        let sandbox = self.sandbox(&compiled, scope, counters);
        Ok(WasmDriver::new(sandbox, info, missing, compiled, config))
    }

    fn scope(
        &self,
        driver: Option<DriverName>,
        effective: Effective,
        limits: Limits,
        log: Arc<DriverLog>,
    ) -> Scope {
        let blocking = Arc::new(Semaphore::new(SYSFS_THREADS_PER_DRIVER));
        Scope { driver, effective, limits, log, node: Arc::clone(&self.node), blocking }
    }

    fn sandbox(&self, compiled: &Compiled, scope: Scope, counters: Arc<Counters>) -> Sandbox {
        Sandbox {
            runtime: Arc::clone(&self.runtime),
            pre: compiled.pre.clone(),
            exports: compiled.exports.clone(),
            scope: Arc::new(scope),
            own_calls: Arc::new(Semaphore::new(CALLS_PER_DRIVER)),
            all_calls: Arc::clone(&self.calls),
            counters,
        }
    }
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
mod tests;
