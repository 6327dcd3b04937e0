//! WASM drivers: loads a file's bytes as a driver, and runs each of its calls in a sandbox of its own.
//!
//! Owns the engine, the compiler and its cache, and the node's files as drivers see them. Is given files, grants and configs; returns
//! drivers, or errors that say what is wrong with a file. Never watches files, and never decides what happens to a driver that fails:
//! the registry does.
//!
//! # Containment of a misbehaving driver
//!
//! No driver affects another driver's calls.
//!
//! - `concurrency`: permits bound the concurrent calls and the memory of one driver and of all. One driver has at most half of them, and a
//!   quarter is reserved for the first call of each driver. Slow and failing drivers share a quarter of the calls and half of the memory; a
//!   call that sleeps for a second is slow as well. The maximum memory of a call is reserved before it begins, and the wait for a permit
//!   does not count as the driver's time.
//! - `executor`: a call begins on the caller's thread. After 5 ms of CPU it continues on a runtime of a few threads of lower priority, which
//!   switch between calls at each epoch tick; for a minute later calls of the same function of that driver begin there. CPU is measured by
//!   the thread's clock, so that a busy node does not look like a busy guest. Host work for the guest on another thread (a wide glob) counts
//!   as the call's. When the caller is cancelled or its time is over, the store is dropped at the next tick.
//! - `quarantine`: after five consecutive failures (traps, limits, time; not `driver-busy`, not refusals) every call fails with
//!   `driver-quarantined`, for 5 s, doubled up to 5 min while probes fail. After that time one call at a time probes the driver, and the
//!   inventory poller does so by itself. A success counts for its own function only, so that good discoveries do not hide failing prepares.
//!   A successful probe, `driver resume`, a new file, grant or config, or `driver reload` ends the quarantine; then claims that wait for the
//!   driver are retried at once. All of this is in memory.

mod bindings;
mod calls;
mod convert;
mod driver;
mod engine;
mod files;
mod host_functions;
pub mod kernel;
mod limits;
mod load;
pub mod registry;
pub mod replay;
#[cfg(any(test, feature = "fuzzing"))]
pub mod testing {
    pub mod fuzz;
}

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use sha2::{Digest, Sha256};
use tokio::sync::Semaphore;
use wasmtime::Engine;
use wasmtime::component::Component;

/// Why a driver's devices are discovered.
pub use self::bindings::exports::nodedock::driver::discovery::Trigger;
pub use self::convert::Refusal;
pub use self::driver::WasmDriver;
pub use self::files::stored_files::StoreError;
pub use self::files::{driver_image, file_watch, trust};
pub use self::limits::call_failure::CallFailure;
pub use self::limits::limiter::Reached;
pub use self::load::admission::{Form, LoadError, Profile, Surface};
pub use self::load::cache::CachePaths;
pub use self::load::compile::{COMPILE_COMMAND, CompileBounds, Compiler, compile_for_parent};
pub use self::load::driver_config::{self, driver_config};
pub use nodedock_core::driver::containment::{Containment, Quarantined};
pub use nodedock_core::driver::stats::{Limit, Operation, Outcome, Stats};

use self::calls::sandbox::Sandbox;
use self::driver::PERMIT_WAIT;
use self::engine::Runtime;
use self::host_functions::host_files::FilesRoot;
use self::host_functions::log::DriverLog;
use self::host_functions::nodes::DevRoot;
use self::host_functions::state::{Node, Scope};
use self::limits::concurrency::{DriverPermits, NodePermits};
use self::load::admission::bounded_line;
use self::load::artifact::{Artifact, Key, Report};
use self::load::cache::Cache;
use self::load::compile::blocking;
use self::load::compiled::{Compiled, Exports};
use nodedock_base::{clock, memory};
use nodedock_core::driver::values::Journal;
use nodedock_core::driver::{Call, NodeFacts, PreparedClaims, stats};
use nodedock_core::hardware::Hardware;
use nodedock_core::recording::{Kind, Recordings, Revision};
use nodedock_core::standard_attributes::NumaNodeForm;
use nodedock_core::sysfs::blocking::SYSFS_THREADS_PER_DRIVER;
use nodedock_model::DriverName;
use nodedock_model::grant::{self, Capabilities, Effective, Grant, LimitValues, Limits};

/// The node's files, and the facts about the node that drivers are given.
#[derive(Debug, Clone)]
pub struct WasmSettings {
    /// The cache of compiled drivers. Without one, drivers are compiled at each start.
    pub cache: Option<CachePaths>,
    pub compiler: Compiler,
    pub hardware: Hardware,
    pub node: NodeFacts,
    pub numa_node_form: NumaNodeForm,
    pub recordings: Recordings,
}

/// Why WASM drivers cannot be hosted at all.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("set up the WebAssembly engine: {0}")]
    Engine(String),
    #[error("open {path}")]
    Root { path: PathBuf, source: io::Error },
    #[error("open the cache of compiled drivers {path}")]
    Cache { path: PathBuf, source: io::Error },
}

/// A driver's file, read once: the same bytes are hashed, verified and compiled.
#[derive(Debug, Clone)]
pub struct DriverFile {
    /// Name for messages.
    pub name: String,
    pub bytes: Bytes,
}

impl DriverFile {
    /// `sha256:` and hex.
    pub fn digest(&self) -> String {
        digest_text(&Sha256::digest(&self.bytes).into())
    }
}

/// A file's digest, as it is shown.
fn digest_text(sha256: &[u8; 32]) -> String {
    format!("sha256:{}", hex::encode(sha256))
}

fn is_digest(text: &str) -> bool {
    text.strip_prefix("sha256:").is_some_and(|hex| {
        hex.len() == 64
            && hex
                .bytes()
                .all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'))
    })
}

/// A driver's description of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverInfo {
    pub name: DriverName,
    /// Semantic version.
    pub version: String,
    pub summary: String,
    pub capabilities: Capabilities,
    pub limits: LimitValues,
    /// Kernel subsystems whose events trigger a discovery.
    pub event_subsystems: Vec<String>,
    pub discovery_period: Duration,
    pub annotations: BTreeMap<String, String>,
}

/// Facts about a file.
#[derive(Debug)]
pub struct Inspection {
    pub size: usize,
    pub digest: String,
    /// Imports and exports, as far as they could be read.
    pub surface: Surface,
    /// Or why it cannot be loaded.
    pub driver: Result<WasmDriver, LoadError>,
}

/// One per daemon: the engine, the cache, and what all drivers share.
pub struct WasmHost {
    runtime: Arc<Runtime>,
    cache: Option<Cache>,
    node: Arc<Node>,
    permits: NodePermits,
    compiler: Compiler,
    recordings: Recordings,
    /// One compilation at a time, in order: each takes a core and up to some hundred MB.
    compiling: Semaphore,
}

impl WasmHost {
    pub fn new(
        settings: WasmSettings,
        prepared_claims: Arc<dyn PreparedClaims>,
        journal: Arc<dyn Journal>,
    ) -> Result<Arc<Self>, HostError> {
        let runtime = Runtime::new().map_err(|error| HostError::Engine(format!("{error:#}")))?;
        let WasmSettings {
            cache,
            compiler,
            hardware,
            node,
            numa_node_form,
            recordings,
        } = settings;
        let sysfs = hardware.open_sys().map_err(at_root(&hardware.sys()))?;
        let dev = DevRoot::open(&hardware).map_err(at_root(&hardware.dev()))?;
        let files = FilesRoot::open(hardware.root()).map_err(at_root(hardware.root()))?;
        let cache = cache
            .map(|paths| {
                let opened = Cache::open(&paths, &runtime.engine);
                opened.map_err(|source| HostError::Cache {
                    path: paths.directory,
                    source,
                })
            })
            .transpose()?;
        let node = Node {
            facts: node,
            sysfs: Arc::new(sysfs),
            dev: Arc::new(dev),
            files: Arc::new(files),
            hardware,
            prepared_claims,
            journal,
            numa_node_form,
        };
        Ok(Arc::new(Self {
            runtime: Arc::new(runtime),
            cache,
            node: Arc::new(node),
            permits: NodePermits::default(),
            compiler,
            recordings,
            compiling: Semaphore::new(1),
        }))
    }

    /// Admits a file, compiles it or takes it from the cache, and calls its `describe` with nothing granted. `config` is JSON text.
    pub async fn load(
        &self,
        file: DriverFile,
        grant: Grant,
        config: Option<String>,
    ) -> Result<WasmDriver, LoadError> {
        self.load_with(file, &grant, config, &mut Surface::default())
            .await
    }

    /// Reports as much as possible about a file, also about one that cannot be loaded.
    pub async fn inspect(&self, file: DriverFile, grant: &Grant) -> Inspection {
        let (size, digest, mut surface) = (file.bytes.len(), file.digest(), Surface::default());
        let driver = self.load_with(file, grant, None, &mut surface).await;
        Inspection {
            size,
            digest,
            surface,
            driver,
        }
    }

    async fn load_with(
        &self,
        file: DriverFile,
        grant: &Grant,
        config: Option<String>,
        surface: &mut Surface,
    ) -> Result<WasmDriver, LoadError> {
        let label = file.name.clone();
        let compiled = self.compile(file, surface).await?;
        self.describe(&label, compiled, grant, config).await
    }

    /// Takes a file's code from the cache, or compiles it. When the future is dropped, the compilation ends.
    async fn compile(
        &self,
        file: DriverFile,
        surface: &mut Surface,
    ) -> Result<Arc<Compiled>, LoadError> {
        surface.form = Some(load::admission::form(&file.bytes)?);
        let (engine, source) = (self.runtime.engine.clone(), file.bytes.clone());
        let key = blocking(move || Ok(Key::new(&engine, &source))).await?;
        let (component, from_cache) = match self.cached(key, surface).await? {
            Some(component) => (component, true),
            None => self.compile_new(key, file.bytes, surface).await?,
        };
        let (runtime, surface) = (Arc::clone(&self.runtime), surface.clone());
        blocking(move || link(&runtime, key, &component, surface, from_cache)).await
    }

    /// The second: whether the same file was compiled under another name meanwhile.
    async fn compile_new(
        &self,
        key: Key,
        bytes: Bytes,
        surface: &mut Surface,
    ) -> Result<(Component, bool), LoadError> {
        let _permit = self
            .compiling
            .acquire()
            .await
            .map_err(|_| LoadError::Host("compile: the host ends".to_owned()))?;
        if let Some(component) = self.cached(key, surface).await? {
            return Ok((component, true));
        }
        let start = Instant::now();
        let artifact = self.compiler.compile(key, bytes).await?;
        let Report {
            surface: found,
            refusal,
            spent,
        } = &artifact.report;
        let (elapsed, code_bytes, digest) = (start.elapsed(), artifact.code_bytes, key.digest());
        tracing::info!(
            digest,
            elapsed_ms = clock::millis(elapsed),
            code_bytes,
            cpu_ms = spent.cpu_ms,
            memory_peak_mib = spent.memory_peak_mib,
            refused = refusal.is_some(),
            "compiled"
        );
        surface.clone_from(found);
        let (cache, engine) = (self.cache.clone(), self.runtime.engine.clone());
        let stored = blocking(move || {
            let component = store(cache.as_ref(), &engine, &key, artifact);
            memory::release();
            component
        });
        Ok((stored.await?, false))
    }

    async fn cached(
        &self,
        key: Key,
        surface: &mut Surface,
    ) -> Result<Option<Component>, LoadError> {
        let Some(cache) = self.cache.clone() else {
            return Ok(None);
        };
        let engine = self.runtime.engine.clone();
        let found = blocking(move || Ok(cache.take(&key, &engine))).await?;
        Ok(found.map(|(component, report)| {
            *surface = report.surface;
            component
        }))
    }

    /// Calls a driver's `describe`. All functions are looked up before it, so that wrong types show here and not at the first claim.
    async fn describe(
        &self,
        label: &str,
        compiled: Arc<Compiled>,
        grant: &Grant,
        config: Option<String>,
    ) -> Result<WasmDriver, LoadError> {
        let counters = Arc::new(Stats::default());
        let limits = Limits::new(&LimitValues::new(), &grant.limits);
        let sandbox = self.sandbox(&compiled, None, label, Effective::none(), limits, &counters);
        let call = Call {
            request_id: "describe".into(),
            deadline: limits.look_wall() + PERMIT_WAIT,
        };
        let described = sandbox.call(
            &call,
            Operation::Describe,
            None,
            None,
            |store, instance, exports| {
                Box::pin(async move {
                    if let Err(error) = exports.check(&mut *store, instance) {
                        return Ok(Err(bounded_line(&format!("{error:#}"))));
                    }
                    let identity = exports.identity.load(&mut *store, instance)?;
                    Ok(Ok(identity.call_describe(store).await?))
                })
            },
        );
        let answer = described
            .await
            .map_err(LoadError::Describe)?
            .map_err(LoadError::Types)?;
        let info = convert::driver_info(answer)
            .map_err(|why| LoadError::Description(bounded_line(&why.to_string())))?;
        let missing_grants = grant::missing(&info.capabilities, &info.limits, grant);
        let effective = Effective::new(&info.capabilities, grant);
        let effective = effective.map_err(|error| LoadError::Description(error.to_string()))?;
        let limits = Limits::new(&info.limits, &grant.limits);
        counters.memory_limit.set(limits.memory as u64);
        let name = info.name.clone();
        let revision = Revision {
            kind: Kind::Wasm,
            driver: name.to_string(),
            version: info.version.clone(),
            digest: compiled.digest.clone(),
            contract: compiled.surface.contract().unwrap_or_default(),
            grant: grant::to_yaml(name.as_str(), "granted", &grant.allowed, &grant.limits),
            config: config.clone(),
        };
        let recorder = self.recordings.recorder(name.as_str());
        let sandbox = self.sandbox(
            &compiled,
            Some(&name),
            name.as_str(),
            effective,
            limits,
            &counters,
        );
        Ok(WasmDriver {
            info: Arc::new(info),
            missing_grants: missing_grants.into(),
            config: config.map(Into::into),
            schemas: Arc::default(),
            sandbox,
            recorder,
            revision: Arc::new(revision),
        })
    }

    fn sandbox(
        &self,
        compiled: &Arc<Compiled>,
        driver: Option<&DriverName>,
        label: &str,
        effective: Effective,
        limits: Limits,
        counters: &Arc<Stats>,
    ) -> Sandbox {
        let scope = Scope {
            driver: driver.cloned(),
            effective: Arc::new(effective),
            limits,
            log: Arc::new(DriverLog::new(label, limits.log, Arc::clone(counters))),
            counters: Arc::clone(counters),
            node: Arc::clone(&self.node),
            blocking: Arc::new(Semaphore::new(SYSFS_THREADS_PER_DRIVER)),
        };
        Sandbox {
            runtime: Arc::clone(&self.runtime),
            compiled: Arc::clone(compiled),
            scope: Arc::new(scope),
            permits: DriverPermits::new(
                &self.permits,
                compiled.memories,
                limits.memory,
                limits.concurrent_calls,
            ),
            containment: Arc::new(Containment::new(driver.cloned())),
        }
    }
}

fn at_root(path: &Path) -> impl FnOnce(io::Error) -> HostError {
    let path = path.to_owned();
    move |source| HostError::Root { path, source }
}

/// Stores compiled code and maps it from there. If it cannot be stored, on a full disk for example, it stays in memory.
fn store(
    cache: Option<&Cache>,
    engine: &Engine,
    key: &Key,
    mut artifact: Artifact,
) -> Result<Component, LoadError> {
    if let Some(refusal) = artifact.report.refusal.take() {
        return Err(refusal);
    }
    let artifact = match cache {
        Some(cache) => cache.put(key, artifact),
        None => artifact,
    };
    // We have just compiled it: the engine refuses only what is beyond the limits of every driver.
    artifact
        .map(engine)
        .map_err(|error| LoadError::Compile(bounded_line(&format!("{error:#}"))))
}

/// Checks the driver's imports and exports against the contract.
fn link(
    runtime: &Runtime,
    key: Key,
    component: &Component,
    surface: Surface,
    from_cache: bool,
) -> Result<Arc<Compiled>, LoadError> {
    let pre = runtime
        .linker
        .instantiate_pre(component)
        .map_err(bad_types)?;
    let exports = Exports::new(&pre, &surface).map_err(bad_types)?;
    let (memories, digest) = (load::compiled::memories(component), key.digest());
    Ok(Arc::new(Compiled {
        pre,
        exports,
        memories,
        surface,
        digest,
        from_cache,
    }))
}

fn bad_types(error: wasmtime::Error) -> LoadError {
    LoadError::Types(bounded_line(&format!("{error:#}")))
}

#[cfg(test)]
pub(crate) mod tests;
