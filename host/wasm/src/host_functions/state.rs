//! The state of one call, which the functions of the host read and change: the node, what the driver may do, and what the call has used.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use wasmtime::component::ResourceTable;
use wasmtime_wasi::WasiCtx;

use super::host_files::FilesRoot;
use super::log::{DriverLog, LogSink};
use super::nodes::DevRoot;
use super::sysfs_reads::{Kind, SysfsEntry};
use super::tap::Tap;
use super::wasi_context;
use crate::limits::executor::CpuMeter;
use crate::limits::limiter::{HANDLES_MAX, Limiter};
use nodedock_core::driver::stats::{Operation, Stats, Usage};
use nodedock_core::driver::values::Journal;
use nodedock_core::driver::{Call, NodeFacts, PreparedClaims};
use nodedock_core::hardware::Hardware;
use nodedock_core::standard_attributes::NumaNodeForm;
use nodedock_core::sysfs::SysfsRoot;
use nodedock_model::grant::{Effective, Limits};
use nodedock_model::{DriverName, ObjectRef, Problem};

/// The node as every driver sees it.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) facts: NodeFacts,
    pub(crate) sysfs: Arc<SysfsRoot>,
    pub(crate) dev: Arc<DevRoot>,
    pub(crate) files: Arc<FilesRoot>,
    pub(crate) hardware: Hardware,
    pub(crate) prepared_claims: Arc<dyn PreparedClaims>,
    pub(crate) journal: Arc<dyn Journal>,
    pub(crate) numa_node_form: NumaNodeForm,
}

/// The same in all calls of a driver.
#[derive(Clone)]
pub(crate) struct Scope {
    /// None until the driver has described itself.
    pub(crate) driver: Option<DriverName>,
    pub(crate) effective: Arc<Effective>,
    pub(crate) limits: Limits,
    pub(crate) log: Arc<DriverLog>,
    pub(crate) counters: Arc<Stats>,
    pub(crate) node: Arc<Node>,
    /// Permits for threads that read below `/sys`. One that hangs in the kernel keeps its permit.
    pub(crate) blocking: Arc<Semaphore>,
}

impl Scope {
    pub(crate) fn wall(&self, operation: Operation) -> Duration {
        if operation.acts() {
            self.limits.wall
        } else {
            self.limits.look_wall()
        }
    }
}

/// State of a store for its call.
pub(crate) struct CallState {
    pub(crate) scope: Arc<Scope>,
    pub(crate) request: Arc<str>,
    pub(crate) log: LogSink,
    /// Results of the reads below `/sys` in the call.
    pub(crate) seen: HashMap<(Kind, String), Result<SysfsEntry, Problem>>,
    pub(crate) usage: Usage,
    /// Values that it wrote below `/sys`, functions that it bound, and progress that it saved, or tried to.
    pub(crate) writes: usize,
    pub(crate) writes_for: Option<Arc<[ObjectRef]>>,
    pub(crate) limiter: Limiter,
    pub(crate) meter: Arc<CpuMeter>,
    /// Records the host's functions, or answers from a recording.
    pub(crate) tap: Option<Tap>,
    pub(crate) table: ResourceTable,
    wasi: Option<Box<WasiCtx>>,
}

impl CallState {
    pub(crate) fn new(
        scope: &Arc<Scope>,
        call: &Call,
        writes_for: Option<Arc<[ObjectRef]>>,
        tap: Option<Tap>,
        meter: &Arc<CpuMeter>,
    ) -> Self {
        let mut table = ResourceTable::new();
        table.set_max_capacity(HANDLES_MAX);
        Self {
            log: LogSink::new(Arc::clone(&scope.log), Arc::clone(&call.request_id)),
            seen: HashMap::new(),
            usage: Usage::default(),
            writes: 0,
            writes_for,
            limiter: Limiter::new(scope.limits.memory),
            meter: Arc::clone(meter),
            tap,
            table,
            wasi: None,
            scope: Arc::clone(scope),
            request: Arc::clone(&call.request_id),
        }
    }

    pub(crate) fn wasi_parts(&mut self) -> (&mut WasiCtx, &mut ResourceTable) {
        let (log, tap) = (&self.log, self.tap.as_ref());
        (
            self.wasi
                .get_or_insert_with(|| Box::new(wasi_context::context(log, tap))),
            &mut self.table,
        )
    }
}

/// Counts what the call used, also when it was cancelled.
impl Drop for CallState {
    fn drop(&mut self) {
        self.usage.cpu = self.meter.used();
        self.usage.memory = self.limiter.memory;
        self.usage.table_elements = self.limiter.table_elements;
        self.scope.counters.record_usage(&self.usage);
    }
}
