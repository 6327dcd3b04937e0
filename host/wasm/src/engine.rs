//! The engine: one for all WASM drivers. Its settings, its epoch clock, and the linker with every capability.

use std::num::NonZeroUsize;
use std::time::Duration;

use wasmtime::component::Linker;
use wasmtime::{
    Config, Enabled, Engine, InstanceAllocationStrategy, PoolingAllocationConfig,
    WasmBacktraceDetails,
};

use crate::bindings::nodedock::driver;
use crate::host_functions::state::CallState;
use crate::host_functions::tapped::{HasTapped, Tapped};
use crate::host_functions::wasi;
use crate::limits::concurrency::CALLS_MAX;
use crate::limits::executor::SlowRuntime;
use crate::limits::limiter::{CALL_INSTANCES, CALL_MEMORIES, CALL_TABLE_ELEMENTS, CALL_TABLES};
use nodedock_base::ticker::Ticker;
use nodedock_model::limit::CALL_MEMORY_MAX;

/// Epoch tick: the longest time that a driver keeps a thread from other work.
const EPOCH_TICK: Duration = Duration::from_millis(10);

/// Stack of a guest, and of a fiber: host functions use the rest of it.
const GUEST_STACK: usize = 256 << 10;
const FIBER_STACK: usize = 1 << 20;
/// Frames of a backtrace: enough to find the place, few enough to read.
const BACKTRACE_FRAMES: NonZeroUsize = NonZeroUsize::new(20).unwrap();

/// Bytes of a slot that are zeroed by hand rather than returned to the kernel: as many as a small driver touches. Returning them
/// interrupts every core, and costs page faults in the next call.
const KEEP_RESIDENT: usize = 256 << 10;
/// Unused slots that keep a driver's memory image: bounds the memory of an idle daemon.
const WARM_SLOTS: u32 = 16;

/// Engine, linker and clock that run all drivers.
pub(crate) struct Runtime {
    pub(crate) engine: Engine,
    pub(crate) linker: Linker<CallState>,
    /// Advances the engine's epoch while calls run: also those that were cancelled and still run, which the next tick ends.
    pub(crate) clock: Ticker,
    pub(crate) slow: SlowRuntime,
}

impl Runtime {
    pub(crate) fn new() -> wasmtime::Result<Self> {
        let engine = engine()?;
        let linker = linker(&engine)?;
        let of_clock = engine.clone();
        let clock = Ticker::start("epoch", EPOCH_TICK, move || of_clock.increment_epoch())?;
        Ok(Self {
            engine,
            linker,
            clock,
            slow: SlowRuntime::start()?,
        })
    }
}

/// Slots for all calls that may run at once: instances from a pool cost half as much as those whose memory is mapped for them. The
/// slots take some 260 GiB of addresses, and nearly no memory; a machine with fewer addresses maps memory for each call.
fn engine() -> wasmtime::Result<Engine> {
    let mut pooled = config();
    pooled.allocation_strategy(InstanceAllocationStrategy::Pooling(pool()));
    Engine::new(&pooled).or_else(|error| {
        tracing::info!(
            error = format!("{error:#}"),
            "not enough addresses for a pool of instances: memory is mapped for each call"
        );
        Engine::new(&config())
    })
}

/// An engine that only compiles, for the engine above: on the threads of rayon's global pool, or on the caller's alone.
pub(crate) fn for_compiling(parallel: bool) -> wasmtime::Result<Engine> {
    Engine::new(config().parallel_compilation(parallel))
}

fn pool() -> PoolingAllocationConfig {
    let slots = u32::try_from(CALLS_MAX).unwrap_or(u32::MAX);
    // These are counts, or addresses by the megabyte: there are enough for the most that each component may have, so that no driver
    // can use up those of others. Memories are more expensive: calls are limited by their number.
    let mut pool = PoolingAllocationConfig::new();
    pool.total_component_instances(slots)
        .total_memories(slots)
        .total_stacks(slots)
        .total_core_instances(slots.saturating_mul(CALL_INSTANCES as u32))
        .total_tables(slots.saturating_mul(CALL_TABLES as u32))
        .max_core_instances_per_component(CALL_INSTANCES as u32)
        .max_memories_per_component(CALL_MEMORIES as u32)
        .max_tables_per_component(CALL_TABLES as u32)
        // Also for one module: the default is one of each.
        .max_memories_per_module(CALL_MEMORIES as u32)
        .max_tables_per_module(CALL_TABLES as u32)
        .max_memory_size(CALL_MEMORY_MAX)
        .table_elements(CALL_TABLE_ELEMENTS)
        .linear_memory_keep_resident(KEEP_RESIDENT)
        .table_keep_resident(KEEP_RESIDENT)
        .pagemap_scan(Enabled::Auto)
        .max_unused_warm_slots(WARM_SLOTS);
    pool
}

/// Switches off proposals that no toolchain for drivers needs: most of wasmtime's advisories were about them.
fn config() -> Config {
    let mut config = Config::new();
    config.concurrency_support(false);
    config.parallel_compilation(false);
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

fn linker(engine: &Engine) -> wasmtime::Result<Linker<CallState>> {
    let mut linker = Linker::new(engine);
    driver::common::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::inventory::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::claims::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::container_edits::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::log::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::sysfs::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::sysfs_write::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::host_files::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::pci_driver::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::device_nodes::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::net_interfaces::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::prepared_claims::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    driver::progress::add_to_linker::<_, HasTapped>(&mut linker, |state| Tapped(state))?;
    wasi::add_to_linker(&mut linker)?;
    Ok(linker)
}
