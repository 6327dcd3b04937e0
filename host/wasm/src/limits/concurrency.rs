//! Limits on concurrent calls and on the memory that they use together: of one driver and of all drivers.
//!
//! Every limit is a semaphore, and a call acquires them in one fixed order, so that no two calls wait for each other. The reasons for the
//! limits:
//! - One driver never holds more than half of the node's permits.
//! - A quarter of the node's permits is only for the first call of each driver: many greedy drivers leave it to the others.
//! - Functions that are slow, and drivers that fail, share a part of the permits.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::stats::Limit;
use nodedock_model::limit::CALL_MEMORY;

/// Calls of all WASM drivers at once, counted by linear memory: each reserves some GiB of addresses, and small machines have only 512.
pub(crate) const CALLS_MAX: usize = 64;
/// Memory that all calls may reserve together, each with its own limit. Sixteen calls of the default limit are half of it.
const CALLS_MEMORY_MAX: usize = 2 << 30;
/// Slow calls at once, of one driver and of all, and the memory that they may reserve.
pub(crate) const SLOW_CALLS_PER_DRIVER: usize = 4;
pub(crate) const SLOW_CALLS_MAX: usize = 16;
const SLOW_CALLS_MEMORY_MAX: usize = 1 << 30;

/// Permits for linear memories, of which each takes a slot of the allocator, and for MiB of memory.
pub(crate) struct Pool {
    pub(crate) memories: Arc<Semaphore>,
    mib: Arc<Semaphore>,
}

impl Pool {
    fn new(memories: usize, bytes: usize) -> Self {
        Self {
            memories: Arc::new(Semaphore::new(memories)),
            mib: Arc::new(Semaphore::new(bytes >> 20)),
        }
    }

    async fn acquire(&self, driver: &DriverPermits) -> [OwnedSemaphorePermit; 2] {
        let memories = acquire(&self.memories, driver.memories).await;
        [
            memories,
            acquire(&self.mib, driver.bytes.div_ceil(1 << 20)).await,
        ]
    }
}

async fn acquire(semaphore: &Arc<Semaphore>, permits: usize) -> OwnedSemaphorePermit {
    let permits = u32::try_from(permits).unwrap_or(u32::MAX);
    Arc::clone(semaphore)
        .acquire_many_owned(permits)
        .await
        .expect("the semaphore is never closed")
}

/// The permits of the node. Clones share them.
#[derive(Clone)]
pub(crate) struct NodePermits {
    pub(crate) all: Arc<Pool>,
    /// Permits for all calls but the first of each driver.
    shared: Arc<Pool>,
    pub(crate) slow: Arc<Pool>,
}

impl Default for NodePermits {
    fn default() -> Self {
        Self {
            all: pool(CALLS_MAX, CALLS_MEMORY_MAX),
            shared: pool(CALLS_MAX / 4 * 3, CALLS_MEMORY_MAX / 4 * 3),
            slow: pool(SLOW_CALLS_MAX, SLOW_CALLS_MEMORY_MAX),
        }
    }
}

fn pool(memories: usize, bytes: usize) -> Arc<Pool> {
    Arc::new(Pool::new(memories, bytes))
}

/// The permits of a driver, which are also permits of the node. Clones share them.
#[derive(Clone)]
pub(crate) struct DriverPermits {
    node: NodePermits,
    /// Linear memories of an instance, and bytes of all of them together, at most.
    memories: usize,
    bytes: usize,
    calls_max: usize,
    calls: Arc<Semaphore>,
    slow: Arc<Semaphore>,
    /// Held by one call at a time, which may use the permits that are reserved for first calls.
    first: Arc<Semaphore>,
}

/// Permits that a running call holds.
pub(crate) type CallPermits = Vec<OwnedSemaphorePermit>;

impl DriverPermits {
    /// Permits of a driver with so many linear memories, of so many bytes together, and so many calls at once.
    pub(crate) fn new(node: &NodePermits, memories: usize, bytes: usize, calls: usize) -> Self {
        let half = (CALLS_MAX / 2 / memories).min(CALLS_MEMORY_MAX / 2 / bytes);
        let calls_max = calls.min(half).max(1);
        Self {
            node: node.clone(),
            memories,
            bytes,
            calls_max,
            calls: Arc::new(Semaphore::new(calls_max)),
            slow: Arc::new(Semaphore::new(SLOW_CALLS_PER_DRIVER)),
            first: Arc::new(Semaphore::new(1)),
        }
    }

    /// Waits until one more call may run.
    pub(crate) async fn acquire(&self, is_slow: bool) -> CallPermits {
        let mut permits = CallPermits::with_capacity(8);
        if is_slow {
            permits.push(acquire(&self.slow, 1).await);
        }
        permits.push(acquire(&self.calls, 1).await);
        if is_slow {
            permits.extend(self.node.slow.acquire(self).await);
        }
        match self.first_call() {
            Some(permit) => permits.push(permit),
            None => permits.extend(self.node.shared.acquire(self).await),
        }
        permits.extend(self.node.all.acquire(self).await);
        permits
    }

    /// Reserved permits are for calls of the usual size.
    fn first_call(&self) -> Option<OwnedSemaphorePermit> {
        let is_usual = self.memories == 1 && self.bytes <= CALL_MEMORY;
        is_usual.then(|| Arc::clone(&self.first).try_acquire_owned().ok())?
    }

    /// The limit that a waiting call waits for, and its value.
    pub(crate) fn exhausted(&self) -> (Limit, usize) {
        match self.calls.available_permits() {
            0 => (Limit::DriverCalls, self.calls_max),
            _ => (Limit::NodeCalls, CALLS_MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use futures::future::join_all;
    use proptest::prelude::*;

    use super::*;
    use nodedock_model::limit::{CALL_MEMORY_MAX, CALLS_PER_DRIVER};

    fn driver(node: &NodePermits) -> DriverPermits {
        DriverPermits::new(node, 1, CALL_MEMORY, CALLS_PER_DRIVER)
    }

    fn are_all_free(node: &NodePermits) -> bool {
        node.all.memories.available_permits() == CALLS_MAX
    }

    /// Acquires as many permits as are available now.
    fn take(driver: &DriverPermits, is_slow: bool) -> Vec<CallPermits> {
        std::iter::from_fn(|| driver.acquire(is_slow).now_or_never()).collect()
    }

    #[test]
    fn greedy_drivers_leave_a_first_call() {
        let node = NodePermits::default();
        let drivers: Vec<_> = (0..8).map(|_| driver(&node)).collect();
        let held: Vec<_> = drivers.iter().map(|driver| take(driver, false)).collect();
        assert_eq!(
            held.iter().map(Vec::len).collect::<Vec<_>>(),
            [CALLS_PER_DRIVER, 10, 1, 1, 1, 1, 1, 1]
        );
        drop(held);
        assert_eq!(take(&driver(&node), false).len(), CALLS_PER_DRIVER);
        assert!(are_all_free(&node));
    }

    #[test]
    fn slow_calls_share_a_limited_part() {
        let node = NodePermits::default();
        let slow: Vec<_> = (0..10).map(|_| driver(&node)).collect();
        let held: Vec<_> = slow.iter().map(|driver| take(driver, true).len()).collect();
        assert_eq!(held, [SLOW_CALLS_PER_DRIVER; 10], "each of them was alone");
        let held: Vec<_> = slow.iter().flat_map(|driver| take(driver, true)).collect();
        assert_eq!(held.len(), SLOW_CALLS_MAX);
        assert!(take(&driver(&node), false).len() > SLOW_CALLS_PER_DRIVER);
    }

    #[test]
    fn large_calls_leave_memory_for_small() {
        let node = NodePermits::default();
        let large: Vec<_> = (0..8)
            .map(|_| DriverPermits::new(&node, 1, CALL_MEMORY_MAX, CALLS_PER_DRIVER))
            .collect();
        let held: Vec<_> = large
            .iter()
            .flat_map(|driver| take(driver, false))
            .collect();
        assert_eq!(held.len(), 3);
        assert!(!take(&driver(&node), false).is_empty());
    }

    /// Components with sixteen memories used up the slots of all with four calls.
    #[test]
    fn an_instance_counts_by_its_memories() {
        let node = NodePermits::default();
        let wide = DriverPermits::new(&node, 16, 1, CALLS_PER_DRIVER);
        assert_eq!(take(&wide, false).len(), 2);
        assert_eq!(take(&wide, true).len(), 1);
    }

    #[test]
    fn waiting_call_blocks_no_other_driver() {
        let node = NodePermits::default();
        let (one, two) = (driver(&node), driver(&node));
        let mut held = take(&one, true);
        let mut waits = Box::pin(one.acquire(true));
        assert!((&mut waits).now_or_never().is_none());
        assert!(
            one.acquire(false).now_or_never().is_some()
                && two.acquire(true).now_or_never().is_some()
        );
        held.pop();
        drop(waits);
        let mut next = Box::pin(one.acquire(true));
        assert!((&mut next).now_or_never().is_some());
        drop((held, next));
        assert!(are_all_free(&node));
    }

    #[test]
    fn the_exhausted_limit_is_named() {
        let node = NodePermits::default();
        let (one, two) = (driver(&node), driver(&node));
        let _held = take(&one, false);
        assert_eq!(one.exhausted(), (Limit::DriverCalls, CALLS_PER_DRIVER));
        assert_eq!(two.exhausted(), (Limit::NodeCalls, CALLS_MAX));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn every_call_eventually_gets_permits(
            drivers in prop::collection::vec((1..17usize, 1..9usize), 1..7),
            calls in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 1..120),
        ) {
            let node = NodePermits::default();
            let permits = |(memories, part): (usize, usize)| DriverPermits::new(&node, memories, part * CALL_MEMORY, CALLS_PER_DRIVER);
            let drivers: Vec<_> = drivers.into_iter().map(permits).collect();
            let call = |(of, is_slow): (prop::sample::Index, bool)| {
                let driver = &drivers[of.index(drivers.len())];
                async move {
                    let permits = driver.acquire(is_slow).await;
                    tokio::task::yield_now().await;
                    drop(permits);
                }
            };
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
            let all = async { tokio::time::timeout(std::time::Duration::from_secs(1), join_all(calls.into_iter().map(call))).await };
            prop_assert!(runtime.block_on(all).is_ok(), "a call waits for ever");
            prop_assert!(are_all_free(&node));
        }
    }
}
