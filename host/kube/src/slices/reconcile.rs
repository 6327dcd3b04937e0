//! The task that makes the slices of this node's drivers as desired.
//!
//! Each change of the drivers, of the Node object or of an observed slice makes the pools that it may concern due. Due pools are
//! reconciled one after the other; one that is refused delays no other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures::StreamExt;
use kube::ResourceExt;
use kube::api::DynamicObject;
use kube::runtime::watcher::Event;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use super::api::SliceApi;
use super::desired::{DesiredState, earliest};
use super::diff::{CounterPlacement, DesiredPool, Diff, KnownPool, Write, diff};
use super::pace::Pace;
use super::report::{Outcome, PoolStatus};
use super::slice::Content;
use super::store::SliceStore;
use super::{SliceEvents, SliceParts, conditions};
use crate::client::{ApiError, ErrorKind, Verb};
use crate::drivers::{DriverSnapshot, SLICE_SETTLE};
use crate::extended_resources::LocalPool;
use crate::facts::NodeFacts;
use crate::pools::PoolKey;
use nodedock_base::clock::now_ms;
use nodedock_core::registry::DeviceKeys;
use nodedock_model::{DriverName, Problem, ProblemCode};

pub(super) struct Reconciler {
    parts: SliceParts,
    api: SliceApi,
    node: watch::Receiver<Option<NodeFacts>>,
    store: SliceStore,
    desired: DesiredState,
    /// The drivers that `desired` was derived from.
    snapshot: DriverSnapshot,
    unnameable: BTreeMap<PoolKey, String>,
    pools: BTreeMap<PoolKey, PoolState>,
    counters: CounterPlacement,
    /// Time at which the desired state is derived again.
    derive_at: Option<Instant>,
}

#[derive(Default)]
struct PoolState {
    pace: Pace,
    known: KnownPool,
    /// The content and the owner with which the pool was last reconciled.
    done: Option<(Arc<Content>, NodeFacts)>,
    /// The server refused the pool, and is offered it without attributes that are lists: one that does not know them refuses the whole slice.
    without_lists: bool,
}

impl Reconciler {
    pub(super) async fn run(parts: SliceParts, mut events: SliceEvents) {
        let settings = parts.settings.borrow().clone();
        let mut reconciler = Self {
            api: SliceApi(parts.kube.clone()),
            node: parts.node.watch(),
            desired: DesiredState::new(parts.names.clone(), settings),
            parts,
            store: SliceStore::new(),
            snapshot: DriverSnapshot::default(),
            unnameable: BTreeMap::new(),
            pools: BTreeMap::new(),
            counters: CounterPlacement::default(),
            derive_at: Some(Instant::now()),
        };
        let mut mechanisms = reconciler.parts.extended_resources.changes();
        loop {
            let due = reconciler.next_due();
            tokio::select! {
                biased;
                // Events, and the newest drivers and node, stay in their channels until they are received.
                Some(event) = events.next() => if let Ok(event) = event {
                    reconciler.observe(event).await;
                },
                Ok(()) = reconciler.parts.drivers.changed() => reconciler.derive_at = Some(Instant::now()),
                Ok(()) = reconciler.parts.failed.changed() => reconciler.derive_at = Some(Instant::now()),
                Ok(()) = reconciler.parts.settings.changed() => reconciler.derive_at = Some(Instant::now()),
                Ok(()) = reconciler.node.changed() => reconciler.all_changed(),
                Ok(()) = mechanisms.changed() => reconciler.derive_at = Some(Instant::now()),
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => {
                    reconciler.step().await;
                }
            }
            reconciler.report_published();
        }
    }

    /// Reports whose mechanisms the desired slices have, and the pools that still have slices while any is withdrawn.
    fn report_published(&self) {
        let mechanisms = &self.desired.mechanisms;
        let mut published = BTreeSet::new();
        if mechanisms.is_any_withdrawn() {
            let local = |PoolKey { driver, pool }: PoolKey| {
                LocalPool::of_published(&self.parts.names, &driver, &pool)
            };
            published = self.store.pools().into_iter().filter_map(local).collect();
        }
        self.parts.extended_resources.report(|reported| {
            (reported.slices, reported.published) = (mechanisms.generation, published);
        });
    }

    fn next_due(&self) -> Option<Instant> {
        let pools = self.pools.values().filter_map(|pool| pool.pace.due());
        let pools = pools.min().filter(|_| self.node.borrow().is_some());
        earliest(self.derive_at, pools).filter(|_| self.store.is_listed)
    }

    async fn observe(&mut self, event: Event<DynamicObject>) {
        let is_list = matches!(event, Event::InitDone);
        let mut is_native = is_list;
        for key in self.store.apply(event) {
            is_native |= self.publishes_itself(&key.driver);
            if !self.snapshot.present.contains(&key.driver) {
                // Slices of a driver that is not here may have to be withdrawn.
                self.derive_at = earliest(self.derive_at, Some(Instant::now() + SLICE_SETTLE));
            }
            self.changed(&key);
        }
        if is_native {
            self.report_own_devices();
        }
        // The server may have been upgraded.
        for pool in self
            .pools
            .values_mut()
            .filter(|pool| is_list && pool.without_lists)
        {
            pool.without_lists = false;
            pool.pace.changed(Instant::now());
        }
        if is_list
            && let Some(counters) = self.api.counter_placement().await
            && std::mem::replace(&mut self.counters, counters) != counters
        {
            self.all_changed();
        }
    }

    fn publishes_itself(&self, driver: &DriverName) -> bool {
        self.snapshot.native.contains(driver) && !self.snapshot.serving.contains_key(driver)
    }

    /// Reports the devices of native plugins, of all generations of their pools: while a plugin writes a new generation, a device may be in the
    /// old one alone.
    fn report_own_devices(&self) {
        if !self.store.is_listed {
            return;
        }
        let mut devices = BTreeMap::<_, DeviceKeys>::new();
        for slice in self.store.all() {
            let spec = &slice.spec;
            if self.publishes_itself(&spec.driver) {
                let names = spec.content.devices.keys();
                devices
                    .entry(spec.driver.clone())
                    .or_default()
                    .extend(names.map(|name| (spec.pool.name.clone(), name.clone())));
            }
        }
        let is_present = |driver: &DriverName| self.publishes_itself(driver);
        self.parts.own_devices.replace(devices, is_present);
    }

    /// Derives the desired state and reconciles one pool, as far as they are due.
    async fn step(&mut self) {
        let now = Instant::now();
        if self.derive_at.is_some_and(|at| at <= now) {
            self.derive(now);
        }
        let due = self
            .pools
            .iter()
            .filter_map(|(key, pool)| Some((pool.pace.due()?, key)));
        let first = due
            .filter(|(at, _)| *at <= now)
            .min()
            .map(|(_, key)| key.clone());
        let node = self.node.borrow().clone();
        if let (Some(key), Some(node)) = (first, node) {
            self.reconcile(&key, node).await;
        }
    }

    fn changed(&mut self, key: &PoolKey) {
        self.pool(key).pace.changed(Instant::now());
    }

    fn all_changed(&mut self) {
        let pools: BTreeSet<_> = self
            .desired
            .pools()
            .into_keys()
            .chain(self.store.pools())
            .collect();
        pools.iter().for_each(|key| self.changed(key));
    }

    fn pool(&mut self, key: &PoolKey) -> &mut PoolState {
        self.pools.entry(key.clone()).or_default()
    }

    /// Returns whether the pools of a driver that are not desired are deleted.
    fn is_managed(&self, driver: &DriverName) -> bool {
        self.snapshot.serving.contains_key(driver) || self.desired.withdrawn.contains(driver)
    }

    /// Returns the observed pools that are deleted unless they are desired.
    fn managed(&self) -> BTreeSet<PoolKey> {
        self.store
            .pools()
            .into_iter()
            .filter(|key| self.is_managed(&key.driver))
            .collect()
    }

    /// Derives the desired state from the current drivers.
    fn derive(&mut self, now: Instant) {
        self.derive_at = None;
        let (slices, managed) = (self.store.all(), self.managed());
        let snapshot = self.parts.drivers.borrow_and_update().clone();
        self.snapshot = snapshot.clone();
        self.report_own_devices();
        self.desired.failed = self.parts.failed.borrow_and_update().clone();
        self.desired
            .set_settings(&self.parts.settings.borrow_and_update());
        // Of a pool that the mechanisms know, they count, whichever name these drivers give it.
        self.desired.mechanisms = self.parts.extended_resources.mechanisms();
        self.update_desired(now, |desired| desired.update(&snapshot, &slices, now));
        self.managed()
            .difference(&managed)
            .for_each(|key| self.changed(key));
        let unnameable = self.desired.unnameable(&snapshot);
        conditions::set_unnameable(&self.parts.conditions, &self.unnameable, &unnameable);
        self.unnameable = unnameable;
        let is_uncertain = snapshot.is_settled && !snapshot.nameless.is_empty();
        let kept = if is_uncertain {
            self.desired.gone(&snapshot, &slices)
        } else {
            BTreeSet::new()
        };
        conditions::set_kept(&self.parts.conditions, &kept, &snapshot.nameless);
    }

    /// Changes the desired state and makes the pools due whose content changes.
    fn update_desired(
        &mut self,
        now: Instant,
        update: impl FnOnce(&mut DesiredState) -> Option<Instant>,
    ) {
        let before = self.desired.pools();
        let next = update(&mut self.desired);
        self.parts
            .report
            .set_tainted(self.desired.unhealthy(), &self.desired.failed);
        self.desired
            .new_unhealthy
            .drain(..)
            .for_each(|device| (self.parts.on_unhealthy)(&device));
        self.derive_at = earliest(self.derive_at, next);
        let after = self.desired.pools();
        for key in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
            let is_same = match (before.get(key), after.get(key)) {
                (Some(before), Some(after)) => Arc::ptr_eq(before, after),
                _ => false,
            };
            if !is_same {
                self.pool(key).pace.desired_changed(now);
            }
        }
    }

    /// Makes one pool as desired.
    async fn reconcile(&mut self, key: &PoolKey, node: NodeFacts) {
        let now = Instant::now();
        if let Some(published) = self.snapshot.serving.get(&key.driver).cloned() {
            // A taint that another instance added is adopted before this one would remove it.
            let slices = self.store.all();
            self.update_desired(now, |desired| {
                desired.update_driver(&key.driver, &published, &slices, now)
            });
        }
        let content = match self.desired.content(key) {
            Some(content) => Arc::clone(content),
            None if self.is_managed(&key.driver) => Arc::default(),
            None => return self.forget(key),
        };
        let plain = content.without_lists().map(Arc::new);
        let content = plain
            .clone()
            .filter(|_| self.pool(key).without_lists)
            .unwrap_or(content);
        let (slices, counters) = (self.store.of_pool(key), self.counters);
        if self.pool(key).pace.started(now) {
            self.parts
                .conditions
                .clear(ProblemCode::SlicesContested, &key.to_string());
        }
        let pool = self.pool(key);
        pool.known.observe(&slices, &content);
        let desired = DesiredPool {
            key,
            node: &node,
            content: &content,
            counters,
            known: &pool.known,
        };
        let diff = match diff(&desired, &slices) {
            Ok(diff) => diff,
            Err(error) => return self.refused(key, &error.to_string()),
        };
        let Diff {
            writes,
            generation,
            slices,
        } = diff;
        let wrote = !writes.is_empty();
        for write in writes {
            if let Err(error) = self.carry_out(write).await {
                let was_plain = std::mem::take(&mut self.pool(key).without_lists);
                if error.kind == ErrorKind::Invalid && plain.is_some() && !was_plain {
                    tracing::info!(pool = %key, %error, "slices are written without attributes that are lists");
                    let pool = self.pool(key);
                    pool.without_lists = true;
                    return pool.pace.changed(now);
                }
                self.pool(key).without_lists = was_plain && error.kind != ErrorKind::Invalid;
                return self.failed(key, &error);
            }
        }
        let written_ms = match wrote {
            true => Some(now_ms()),
            false => self
                .parts
                .report
                .pool(key)
                .and_then(|status| status.written_ms),
        };
        let devices = content.devices.len();
        let status = PoolStatus {
            is_current: true,
            slices,
            devices,
            generation,
            written_ms,
            problem: None,
        };
        self.succeeded(key, status, wrote, (content, node));
    }

    fn succeeded(
        &mut self,
        key: &PoolKey,
        status: PoolStatus,
        wrote: bool,
        done: (Arc<Content>, NodeFacts),
    ) {
        let (now, slices) = (Instant::now(), self.store.of_pool(key));
        let pool = self.pool(key);
        pool.known.written(&slices, &done.0, status.generation);
        pool.pace.succeeded(now, wrote);
        let is_repair = wrote
            && pool
                .done
                .as_ref()
                .is_some_and(|(content, node)| *content == done.0 && *node == done.1);
        let is_contested = is_repair && pool.pace.repaired(now);
        let is_deleted = done.0.is_empty();
        pool.done = Some(done);
        let is_idle = pool.pace.is_idle();
        let PoolStatus {
            slices: count,
            devices,
            generation,
            ..
        } = status;
        if !is_deleted {
            self.parts.report.set(key, status);
        }
        if is_repair {
            self.parts.report.repairs.inc();
            self.parts.node.read_again();
            tracing::info!(pool = %key, "slices written again, others had changed them");
        } else if wrote {
            tracing::info!(pool = %key, slices = count, devices, generation, "slices written");
        }
        if is_contested {
            conditions::set_contested(&self.parts.conditions, key, &slices);
        }
        self.parts
            .conditions
            .clear(ProblemCode::SlicesRefused, &key.to_string());
        self.report_dropped(&key.driver);
        if !is_deleted {
            return;
        }
        self.parts.report.remove(key);
        if is_idle {
            self.pools.remove(key);
        }
    }

    fn report_dropped(&self, driver: &DriverName) {
        let slices = self.store.all();
        let desired = slices
            .iter()
            .filter(|slice| slice.spec.driver == *driver)
            .filter_map(|slice| {
                let desired = self.desired.content(&slice.spec.key())?;
                Some((&slice.spec, &**desired))
            });
        let mut fields: BTreeSet<_> = desired
            .flat_map(|(slice, desired)| slice.dropped(desired))
            .collect();
        let plain = self
            .pools
            .iter()
            .filter(|(key, pool)| key.driver == *driver && pool.without_lists);
        let lists = plain.filter_map(|(key, _)| self.desired.content(key));
        fields.extend(
            lists
                .flat_map(|content| content.list_attributes())
                .map(|name| format!("devices[].attributes.{name}")),
        );
        conditions::set_dropped(&self.parts.conditions, driver, fields);
    }

    /// Leaves a pool to its other owner.
    fn forget(&mut self, key: &PoolKey) {
        self.pools.remove(key);
        self.parts.report.remove(key);
        conditions::clear(&self.parts.conditions, key);
    }

    async fn carry_out(&mut self, write: Write) -> Result<(), ApiError> {
        // Without a turn the semaphore was closed, which nothing does.
        let _turn = Arc::clone(&self.parts.turns).acquire_owned().await;
        match write {
            Write::Delete(slice) => match self.count(Verb::Delete, self.api.delete(&slice).await) {
                // It exists until its finalizers are removed; the watch reports it.
                Ok(()) if !slice.finalizers().is_empty() => {}
                Err(error) if error.kind != ErrorKind::NotFound => return Err(error),
                Ok(()) | Err(_) => self.store.deleted(&slice),
            },
            Write::Update(slice) => {
                let updated = self.count(Verb::Update, self.api.update(&slice).await)?;
                self.store.written(updated, slice.spec.content);
            }
            Write::Create(slice) => {
                let created = self.count(Verb::Create, self.api.create(&slice).await)?;
                self.store.written(created, slice.spec.content);
            }
        }
        Ok(())
    }

    fn count<T>(&self, verb: Verb, answer: Result<T, ApiError>) -> Result<T, ApiError> {
        self.parts
            .report
            .writes(
                verb,
                answer.as_ref().map_or_else(outcome, |_| Outcome::Done),
            )
            .inc();
        answer
    }

    fn failed(&mut self, key: &PoolKey, error: &ApiError) {
        let now = Instant::now();
        let pace = &mut self.pool(key).pace;
        match outcome(error) {
            Outcome::Conflict => pace.conflicted(now),
            Outcome::Refused => {
                pace.refused(now);
                self.refused(key, &error.to_string());
            }
            Outcome::Failed | Outcome::Done => {
                pace.failed(now, error.retry_after);
                tracing::debug!(pool = %key, %error, "slices could not be written, trying again");
                self.report_problem(
                    key,
                    Problem::unavailable(ProblemCode::SlicesNotWritten, error.to_string()),
                );
            }
        }
    }

    fn refused(&self, key: &PoolKey, reason: &str) {
        let problem = conditions::refusal(key, reason);
        self.parts.conditions.set(&key.to_string(), problem.clone());
        self.report_problem(key, problem);
    }

    fn report_problem(&self, key: &PoolKey, problem: Problem) {
        let known = self.parts.report.pool(key).unwrap_or_default();
        self.parts.report.set(
            key,
            PoolStatus {
                is_current: false,
                problem: Some(problem),
                ..known
            },
        );
    }
}

fn outcome(error: &ApiError) -> Outcome {
    match error.kind {
        ErrorKind::Conflict | ErrorKind::NotFound => Outcome::Conflict,
        ErrorKind::NotServed | ErrorKind::Forbidden | ErrorKind::Invalid => Outcome::Refused,
        _ => Outcome::Failed,
    }
}
