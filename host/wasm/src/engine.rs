//! The engine: one for all WASM drivers. Its settings, its epoch clock, and the linker with every capability.

use std::num::NonZeroUsize;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use wasmtime::component::{HasSelf, Linker};
use wasmtime::{
    Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig, WasmBacktraceDetails,
};

use super::bindings::nodedock::driver::{device_nodes, ledger, log, sysfs, sysfs_write, types};
use super::lane::Lane;
use super::sandbox::State;
use super::wasi;
use nodedock_model::limit::{
    CALL_INSTANCES, CALL_MEMORIES, CALL_MEMORY_MAX, CALL_TABLE_ELEMENTS, CALL_TABLES, CALLS_MAX, EPOCH_TICK,
};

/// Stack of a guest, and of a fiber: what a guest does not use is for host functions.
const GUEST_STACK: usize = 256 << 10;
const FIBER_STACK: usize = 1 << 20;
/// Frames of a backtrace: enough to find the place, few enough to read.
const BACKTRACE_FRAMES: NonZeroUsize = NonZeroUsize::new(20).unwrap();

/// Bytes of a slot that are put back by hand rather than given back to the kernel: what a small driver touches. Giving back costs
/// an interruption of every core, and page faults in the next call.
const KEEP_RESIDENT: usize = 256 << 10;
const STACK_KEEP_RESIDENT: usize = 32 << 10;
/// Slots that keep a driver's memory image while no call uses them: bounds what an idle daemon holds.
const WARM_SLOTS: u32 = 16;

/// Engine, linker, clock and slow lane.
pub(super) struct Runtime {
    pub(super) engine: Engine,
    pub(super) linker: Linker<State>,
    pub(super) clock: EpochClock,
    pub(super) lane: Lane,
}

impl Runtime {
    pub(super) fn new() -> wasmtime::Result<Self> {
        let engine = engine()?;
        let linker = linker(&engine)?;
        let clock = EpochClock::start(engine.clone())?;
        Ok(Self { engine, linker, clock, lane: Lane::start()? })
    }
}

/// Slots for all calls that may run at once, made when the daemon starts: an instance costs half as much as one whose memory
/// is mapped for it. They are addresses, some 260 GiB, and nearly no memory; a machine that has not so many gets them per call.
fn engine() -> wasmtime::Result<Engine> {
    let mut pooled = config();
    pooled.allocation_strategy(InstanceAllocationStrategy::Pooling(pool()));
    Engine::new(&pooled).or_else(|error| {
        tracing::info!(
            error = format!("{error:#}"),
            "no room for a pool of instances: they are made per call"
        );
        Engine::new(&config())
    })
}

/// An engine that compiles for the other, and runs nothing.
pub(super) fn for_compiling() -> wasmtime::Result<Engine> {
    Engine::new(&config())
}

fn pool() -> PoolingAllocationConfig {
    let slots = u32::try_from(CALLS_MAX).unwrap_or(u32::MAX);
    // These are counts, or addresses by the megabyte: there are enough for the most that each component may have, so that no
    // driver can use up what is for others. Memories are dearer; calls are let in by their number.
    let all = |of_each: usize| slots.saturating_mul(of_each as u32);
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(slots)
        .total_memories(slots)
        .total_stacks(slots)
        .total_core_instances(all(CALL_INSTANCES))
        .total_tables(all(CALL_TABLES))
        .max_core_instances_per_component(CALL_INSTANCES as u32)
        .max_memories_per_component(CALL_MEMORIES as u32)
        .max_tables_per_component(CALL_TABLES as u32)
        // Of one module of it, as well: the default is one of each.
        .max_memories_per_module(CALL_MEMORIES as u32)
        .max_tables_per_module(CALL_TABLES as u32)
        .max_memory_size(CALL_MEMORY_MAX)
        .table_elements(CALL_TABLE_ELEMENTS)
        .linear_memory_keep_resident(KEEP_RESIDENT)
        .table_keep_resident(KEEP_RESIDENT)
        .async_stack_keep_resident(STACK_KEEP_RESIDENT)
        .pagemap_scan(Enabled::Auto)
        .max_unused_warm_slots(WARM_SLOTS);
    pool
}

/// Proposals that no toolchain for drivers needs are off: most of wasmtime's advisories were about them.
fn config() -> Config {
    let mut config = Config::new();
    config.concurrency_support(false);
    config.epoch_interruption(true);
    config.max_wasm_stack(GUEST_STACK);
    config.async_stack_size(FIBER_STACK);
    config.wasm_memory64(false);
    config.wasm_relaxed_simd(false);
    // The default reads an environment variable.
    config.wasm_backtrace_details(WasmBacktraceDetails::Disable);
    config.wasm_backtrace_max_frames(Some(BACKTRACE_FRAMES));
    // Registration of unwind information is quadratic in the number of modules.
    config.native_unwind_info(false);
    config
}

fn linker(engine: &Engine) -> wasmtime::Result<Linker<State>> {
    let mut linker = Linker::new(engine);
    types::add_to_linker::<_, HasSelf<_>>(&mut linker, |state| state)?;
    log::add_to_linker::<_, HasSelf<_>>(&mut linker, |state| state)?;
    sysfs::add_to_linker::<_, HasSelf<_>>(&mut linker, |state| state)?;
    sysfs_write::add_to_linker::<_, HasSelf<_>>(&mut linker, |state| state)?;
    device_nodes::add_to_linker::<_, HasSelf<_>>(&mut linker, |state| state)?;
    ledger::add_to_linker::<_, HasSelf<_>>(&mut linker, |state| state)?;
    wasi::add_to_linker(&mut linker)?;
    Ok(linker)
}

/// One thread that advances the engine's epoch while calls run, and sleeps while none does. It ends after the last call.
pub(super) struct EpochClock(Arc<ClockShared>);

#[derive(Default)]
struct ClockShared {
    state: Mutex<ClockState>,
    changed: Condvar,
}

#[derive(Default)]
struct ClockState {
    calls: usize,
    stopped: bool,
}

/// Keeps the clock ticking.
pub(super) struct Ticking(Arc<ClockShared>);

impl EpochClock {
    fn start(engine: Engine) -> std::io::Result<Self> {
        let shared = Arc::new(ClockShared::default());
        let of_thread = Arc::clone(&shared);
        std::thread::Builder::new().name("epoch".into()).spawn(move || {
            while of_thread.wait_for_a_call() {
                std::thread::sleep(EPOCH_TICK);
                engine.increment_epoch();
            }
        })?;
        Ok(Self(shared))
    }

    pub(super) fn tick(&self) -> Ticking {
        self.0.change(|state| state.calls += 1);
        Ticking(Arc::clone(&self.0))
    }
}

impl ClockShared {
    /// False when there will be none. Calls that were given up may run still: the next tick ends them.
    fn wait_for_a_call(&self) -> bool {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = |state: &mut ClockState| state.calls == 0 && !state.stopped;
        let state = self.changed.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
        !state.stopped || state.calls > 0
    }

    fn change(&self, change: impl FnOnce(&mut ClockState)) {
        change(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner));
        self.changed.notify_one();
    }
}

impl Drop for Ticking {
    fn drop(&mut self) {
        self.0.change(|state| state.calls -= 1);
    }
}

impl Drop for EpochClock {
    fn drop(&mut self) {
        self.0.change(|state| state.stopped = true);
    }
}
