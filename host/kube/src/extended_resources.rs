//! Extended resources of this node's drivers: each pool with a resource's name is offered either to the kubelet as a device plugin, or in
//! ResourceSlices with a DeviceClass (KEP-5004), and never by both.
//!
//! Owns the decision (`decide`), its durable record (`record`) and the switch from one mechanism to the other (`switch`). Is given the
//! drivers' pools, what the slices' writer and the kubelet bridge have carried out, and devices that the kubelet's device manager has
//! allocated. Emits the mechanism of each pool, which slices and bridge follow, and conditions about DeviceClasses (`classes`). Never
//! writes to the cluster.

mod apply;
mod classes;
mod decide;
mod observe;
mod record;
mod switch;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

pub use apply::{Applied, apply_class};
pub use classes::{attribute, class_name, manifest};
pub use decide::{Decision, MechanismSetting, Version};
pub use switch::{LocalPool, Mechanisms, PoolStatus};

pub(crate) use classes::ATTRIBUTE;

use self::decide::{Cluster, decide};
use self::observe::Observer;
use self::switch::{Acknowledged, Classes, Record, Switch};
use crate::client::{ApiError, ErrorKind, KubeClient};
use crate::drivers::DriverSnapshot;
use crate::pools::PoolKey;
use crate::pools::PoolNames;
use nodedock_base::backoff::Backoff;
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::signal::Listener;
use nodedock_base::tasks::Tasks;
use nodedock_core::adapters::Adapters;
use nodedock_core::checkpoint::{Change, Checkpoint};
use nodedock_model::{
    DriverName, ExtendedResource, MechanismsRecord, ObjectName, PoolName, Problem, ProblemCode,
};

pub use nodedock_model::Mechanism;

/// Interval of reading the versions of the cluster; the second after a failure, and while nothing was decided the third.
const CLUSTER_PERIOD: Duration = Duration::from_secs(600);
const CLUSTER_RETRY: Duration = Duration::from_secs(15);
const CLUSTER_FIRST_RETRY: Duration = Duration::from_secs(2);

/// Interval of reads while a pool is switched, doubled up to the second as long as they change nothing.
const SWITCH_PERIOD: Duration = Duration::from_secs(2);
const SWITCH_PERIOD_MAX: Duration = Duration::from_secs(30);

/// Interval of lists of all claims, which are large, while a pool waits for one; the second while only single devices do.
const CLAIMS_PERIOD: Duration = Duration::from_secs(30);
const CLAIMED_PERIOD: Duration = Duration::from_secs(600);

/// Interval of reading the DeviceClasses; the second while there is a condition about them, and the third while they were never read.
const CLASSES_PERIOD: Duration = Duration::from_secs(600);
const CLASSES_RETRY: Duration = Duration::from_secs(60);
const CLASSES_FIRST_RETRY: Duration = Duration::from_secs(15);

/// Devices by driver and `POOL/DEVICE`.
pub type DeviceIds = BTreeSet<(DriverName, String)>;

/// Handle to the mechanisms.
#[derive(Clone)]
pub struct ExtendedResources(Arc<Shared>);

struct Shared {
    mechanisms: watch::Sender<Arc<Mechanisms>>,
    /// Devices that the kubelet's device manager has allocated.
    allocated: watch::Sender<Arc<DeviceIds>>,
    done: watch::Sender<Acknowledged>,
    /// Pools that had slices since the start, by their names in the API: as many as drivers had.
    had_slices: Mutex<BTreeSet<PoolKey>>,
}

/// The mechanisms, and the devices that the kubelet's device manager has allocated: at least those of the mechanisms' time.
#[derive(Debug, Clone, Default)]
pub struct MechanismsView {
    pub mechanisms: Arc<Mechanisms>,
    pub allocated: Arc<DeviceIds>,
}

/// Notifies of changes of a [`MechanismsView`].
pub struct MechanismChanges {
    mechanisms: watch::Receiver<Arc<Mechanisms>>,
    allocated: watch::Receiver<Arc<DeviceIds>>,
}

impl MechanismChanges {
    /// Resolves when anything changed since the last call, or since [`ExtendedResources::changes`].
    pub async fn changed(&mut self) {
        tokio::select! {
            // The sender of either is in the handle; without it nothing changes any more.
            Ok(()) = self.mechanisms.changed() => {}
            Ok(()) = self.allocated.changed() => {}
            else => std::future::pending().await,
        }
    }
}

impl ExtendedResources {
    fn new(mechanisms: Mechanisms) -> Self {
        Self(Arc::new(Shared {
            mechanisms: watch::Sender::new(Arc::new(mechanisms)),
            allocated: watch::Sender::default(),
            done: watch::Sender::default(),
            had_slices: Mutex::default(),
        }))
    }

    /// Every pool with a name is offered by this mechanism, from the beginning.
    pub fn fixed(mechanism: Mechanism) -> Self {
        Self::new(Mechanisms {
            fixed: Some(mechanism),
            ..Mechanisms::default()
        })
    }

    pub fn view(&self) -> MechanismsView {
        // In this order: a mechanism becomes current after the devices that are allocated by the other one.
        let mechanisms = self.0.mechanisms.borrow().clone();
        MechanismsView {
            mechanisms,
            allocated: self.0.allocated.borrow().clone(),
        }
    }

    pub fn changes(&self) -> MechanismChanges {
        let (mechanisms, allocated) = (self.0.mechanisms.subscribe(), self.0.allocated.subscribe());
        MechanismChanges {
            mechanisms,
            allocated,
        }
    }

    pub(crate) fn mechanism_changes(&self) -> watch::Receiver<Arc<Mechanisms>> {
        self.0.mechanisms.subscribe()
    }

    /// The slices are derived by this generation, and no write of other ones is under way. `observed`: pools that have slices until now.
    pub(crate) fn slices_derived(&self, generation: u64, observed: BTreeSet<PoolKey>) {
        self.0.had_slices.lock().extend(observed);
        self.0
            .done
            .send_if_modified(|done| std::mem::replace(&mut done.slices, generation) != generation);
    }

    /// Sets the devices that the kubelet's device manager has allocated.
    pub(crate) fn set_allocated(&self, devices: DeviceIds) {
        self.0.allocated.send_if_modified(|known| {
            let differs = **known != devices;
            if differs {
                *known = Arc::new(devices);
            }
            differs
        });
    }

    /// The lists at the kubelet are of this generation, and no call for devices that they do not have is answered any more.
    pub(crate) fn lists_replaced(&self, generation: u64) {
        self.0.done.send_if_modified(|done| {
            std::mem::replace(&mut done.kubelet, generation) != generation
        });
    }
}

#[cfg(test)]
impl ExtendedResources {
    /// Every pool with a name is offered by another mechanism from this generation on.
    pub(crate) fn set_fixed(&self, mechanism: Mechanism, generation: u64) {
        let fixed = Some(mechanism);
        self.0.mechanisms.send_replace(Arc::new(Mechanisms {
            generation,
            fixed,
            ..Mechanisms::default()
        }));
    }

    /// Resolves when the kubelet's lists are of a generation.
    pub(crate) async fn lists_of(&self, generation: u64) {
        self.0
            .done
            .subscribe()
            .wait_for(|done| done.kubelet == generation)
            .await
            .expect("a handle is there");
    }
}

/// What the mechanisms are decided from.
pub struct SwitchParts {
    pub client: KubeClient,
    pub names: PoolNames,
    pub setting: MechanismSetting,
    pub drivers: watch::Receiver<DriverSnapshot>,
    /// Device plugins that are drivers, of which an operator may disable some.
    pub adapters: Option<Adapters>,
    pub conditions: Conditions,
    pub tasks: Tasks,
}

/// Decides as a daemon of this node would at its first start; `None`: the cluster cannot be read.
pub async fn decided(
    client: &KubeClient,
    node: ObjectName,
    setting: MechanismSetting,
) -> Option<Decision> {
    let observer = Observer {
        client: client.clone(),
        names: PoolNames { node },
    };
    decide(setting, &observer.cluster().await)
}

/// The mechanisms before their task runs.
pub struct LoadedSwitch {
    handle: ExtendedResources,
    switch: Switch,
    stored: StoredRecord,
}

/// The record in the checkpoint.
struct StoredRecord {
    checkpoint: Checkpoint,
    /// `None`: there is none that can be read.
    record: Option<Record>,
}

impl StoredRecord {
    /// Makes a record durable, if it differs. False: the checkpoint takes no writes, which it reports itself.
    async fn save(&mut self, record: &Record) -> bool {
        if self.record.as_ref() == Some(record) {
            return true;
        }
        let change = Change::PutMechanisms(Arc::new(record.into()));
        if let Err(error) = self.checkpoint.commit(vec![change]).await {
            tracing::debug!(
                error = chain(&error),
                "the mechanisms of pools are not stored yet"
            );
            return false;
        }
        self.record = Some(record.clone());
        true
    }
}

/// Takes what was decided before a restart. `is_unreadable`: the checkpoint has a record that cannot be read, which says nothing, not even
/// that there was none.
pub async fn load(
    checkpoint: Checkpoint,
    stored: Option<MechanismsRecord>,
    is_unreadable: bool,
) -> LoadedSwitch {
    let mut stored = StoredRecord {
        checkpoint,
        record: stored.map(Record::from),
    };
    let is_missing = stored.record.is_none() && !is_unreadable;
    let record = stored.record.clone().unwrap_or_default();
    // From now on it is there: a process after this one knows that slices may have been written.
    let is_new_node = is_missing && stored.save(&record).await;
    let switch = Switch::new(record, is_new_node, Instant::now());
    LoadedSwitch {
        handle: ExtendedResources::new(switch.mechanisms()),
        switch,
        stored,
    }
}

impl LoadedSwitch {
    pub fn handle(&self) -> ExtendedResources {
        self.handle.clone()
    }

    /// Starts the task that decides, and switches.
    pub fn start(self, parts: SwitchParts) {
        let Self {
            handle,
            switch,
            stored,
        } = self;
        let observer = Observer {
            client: parts.client.clone(),
            names: parts.names.clone(),
        };
        let tasks = parts.tasks.clone();
        let now = Instant::now();
        let task = SwitchTask {
            handle,
            switch,
            stored,
            observer,
            parts,
            cluster_at: now,
            switch_at: now,
            switch_backoff: Backoff::new(SWITCH_PERIOD, SWITCH_PERIOD_MAX),
            switching: 0,
            claims_read: None,
            classes_at: now,
            judged: BTreeMap::new(),
        };
        // What it was about to do is done again after the next start.
        tasks.spawn_until_stopped("extended-resources", task.run());
    }
}

struct SwitchTask {
    handle: ExtendedResources,
    switch: Switch,
    stored: StoredRecord,
    observer: Observer,
    parts: SwitchParts,
    /// When the versions, what a switch waits for, and the classes are read next.
    cluster_at: Instant,
    switch_at: Instant,
    switch_backoff: Backoff,
    /// The generation whose switches `switch_backoff` is about.
    switching: u64,
    /// When all claims were read last.
    claims_read: Option<Instant>,
    classes_at: Instant,
    /// The resources for which the classes were read last.
    judged: BTreeMap<ExtendedResource, DriverName>,
}

impl SwitchTask {
    async fn run(mut self) {
        let mut done = self.handle.0.done.subscribe();
        let mut adapters = self.parts.adapters.as_ref().map(Adapters::changes);
        loop {
            if let Some(adapters) = &mut adapters {
                adapters.mark_unchanged();
            }
            self.set_disabled();
            self.read_cluster().await;
            let pools = pools_of(&self.parts.drivers.borrow_and_update());
            self.switch.set_pools(pools, Instant::now());
            self.judge_classes().await;
            self.publish();
            let acknowledged = *done.borrow_and_update();
            self.switch
                .acknowledge(acknowledged, &self.had_slices(), Instant::now());
            self.advance().await;
            self.publish();
            self.report_overdue();
            self.save().await;
            self.report_returned().await;
            let wake = self.next_wake();
            tokio::select! {
                // Whichever it was, the next round checks everything.
                Ok(()) = self.parts.drivers.changed() => {}
                Ok(()) = done.changed() => {}
                () = changed(&mut adapters) => {}
                () = sleep_until(wake) => {}
            }
        }
    }

    fn set_disabled(&mut self) {
        let Some(adapters) = &self.parts.adapters else {
            return;
        };
        let disabled = adapters
            .disabled()
            .into_iter()
            .map(|(driver, pool)| LocalPool { driver, pool });
        self.switch.set_disabled(disabled.collect(), Instant::now());
    }

    /// Reports the drivers all of whose pools are offered by the kubelet's device manager.
    async fn report_returned(&self) {
        let Some(adapters) = &self.parts.adapters else {
            return;
        };
        let mechanisms = self.handle.view().mechanisms;
        let at_kubelet = |status: &PoolStatus| status.offered == Some(Mechanism::DevicePlugin);
        let (returned, others): (Vec<_>, Vec<_>) = mechanisms
            .pools
            .iter()
            .partition(|(_, status)| at_kubelet(status) && status.claimed.is_empty());
        let mut returned: BTreeSet<_> = returned
            .into_iter()
            .map(|(key, _)| key.driver.clone())
            .collect();
        returned.retain(|driver| others.iter().all(|(key, _)| key.driver != *driver));
        if let Err(problem) = adapters.set_returned(&returned).await {
            tracing::debug!(%problem, "what is returned to the device manager is not stored yet");
        }
    }

    fn next_wake(&self) -> Instant {
        let now = Instant::now();
        let mechanisms = self.handle.view().mechanisms;
        let is_switching = mechanisms.pools.values().any(|pool| pool.offered.is_none());
        let mut wake = self.cluster_at;
        if is_switching {
            wake = wake.min(self.switch_at.max(now + SWITCH_PERIOD));
        }
        if let Some(due) = self.claims_due(now) {
            wake = wake.min(due.max(now + SWITCH_PERIOD));
        }
        if !self.judged.is_empty() {
            wake = wake.min(self.classes_at);
        }
        wake
    }

    /// Returns when all claims are to be read, if they are.
    fn claims_due(&self, now: Instant) -> Option<Instant> {
        let needs = self.switch.needs(now);
        let period = if needs.is_claims_urgent {
            CLAIMS_PERIOD
        } else {
            CLAIMED_PERIOD
        };
        needs
            .claims
            .then(|| self.claims_read.map_or(now, |read| read + period))
    }

    /// Decides by what can be read now. A failed read changes nothing.
    async fn read_cluster(&mut self) {
        if Instant::now() < self.cluster_at {
            return;
        }
        let cluster = match self.parts.setting {
            MechanismSetting::Auto => self.observer.cluster().await,
            MechanismSetting::Dra | MechanismSetting::DevicePlugin => Cluster::default(),
        };
        let known = self.handle.view().mechanisms.decision.clone();
        let decision = decide(self.parts.setting, &cluster);
        self.cluster_at = Instant::now()
            + match (&decision, &known) {
                (Some(_), _) => CLUSTER_PERIOD,
                (None, Some(_)) => CLUSTER_RETRY,
                (None, None) => CLUSTER_FIRST_RETRY,
            };
        let Some(decision) = decision else { return };
        if known.as_ref().map(|known| known.mechanism) != Some(decision.mechanism) {
            let Decision { mechanism, reason } = &decision;
            tracing::info!(%mechanism, reason, "extended resources are offered by this mechanism");
        }
        self.switch.decide(decision, Instant::now());
    }

    fn had_slices(&self) -> BTreeSet<LocalPool> {
        let had_slices = self.handle.0.had_slices.lock();
        let local = |PoolKey { driver, pool }: &PoolKey| {
            let pool = PoolName::new(self.parts.names.local(pool.as_str())).ok()?;
            Some(LocalPool {
                driver: driver.clone(),
                pool,
            })
        };
        had_slices.iter().filter_map(local).collect()
    }

    /// Reads what the switch needs, and commits what follows.
    async fn advance(&mut self) {
        let begun = Instant::now();
        let needs = self.switch.needs(begun);
        let generation = self.switch.mechanisms().generation;
        if std::mem::replace(&mut self.switching, generation) != generation {
            self.switch_backoff.reset();
            self.switch_at = begun;
        }
        let is_due = begun >= self.switch_at;
        if is_due && (needs.node || needs.slices) {
            self.switch_at = begun + self.switch_backoff.delay();
        }
        if is_due
            && needs.node
            && let Some(Some(allocatable)) = logged(self.observer.allocatable().await)
            && let Some(record) = self.switch.saw_node(&allocatable, begun)
        {
            self.commit(record).await;
        }
        if is_due
            && needs.slices
            && let Some(published) = logged(self.observer.published_pools().await)
        {
            self.switch.saw_slices(&published, begun);
        }
        let begun = Instant::now();
        if self.claims_due(begun).is_some_and(|due| begun >= due) {
            let listed = logged(self.observer.allocated_devices().await);
            self.claims_read = Some(Instant::now());
            if let Some(allocated) = listed
                && let Some(record) = self.switch.saw_claims(&allocated, begun)
            {
                self.commit(record).await;
            }
        }
    }

    /// Makes a record durable, then current. One that cannot be written is proposed again.
    async fn commit(&mut self, record: Record) {
        if self.stored.save(&record).await {
            self.switch.committed(record, Instant::now());
        }
    }

    /// Saves what changed without a read, such as the decision.
    async fn save(&mut self) {
        let record = self.switch.record().clone();
        self.stored.save(&record).await;
    }

    fn publish(&self) {
        let now = self.switch.mechanisms();
        self.handle.0.mechanisms.send_if_modified(|known| {
            let differs = **known != now;
            if differs {
                log_changes(known, &now);
                *known = Arc::new(now);
            }
            differs
        });
    }

    fn report_overdue(&self) {
        let (conditions, code) = (
            &self.parts.conditions,
            ProblemCode::ExtendedResourceWithheld,
        );
        let overdue = self.switch.overdue(Instant::now());
        let names = &self.parts.names;
        let subject = |key: &LocalPool| format!("{}/{}", key.driver, names.shown(&key.pool));
        for (key, waits_for) in &overdue {
            let message = format!(
                "the devices of pool {} of driver {} are offered neither in ResourceSlices nor to the kubelet: they wait for {waits_for}",
                names.shown(&key.pool),
                key.driver
            );
            conditions.set(&subject(key), Problem::unavailable(code, message));
        }
        let subjects: BTreeSet<_> = overdue.keys().map(subject).collect();
        conditions.retain(code, |known| subjects.contains(known));
    }

    /// Reads the DeviceClasses that pools need, and sets the conditions about them.
    async fn judge_classes(&mut self) {
        if self.parts.setting == MechanismSetting::Dra {
            self.switch.set_classes(Classes::NotNeeded, Instant::now());
        }
        let needed = self.switch.needs_classes();
        if needed == self.judged && (needed.is_empty() || Instant::now() < self.classes_at) {
            return;
        }
        self.judged.clone_from(&needed);
        self.classes_at = Instant::now() + CLASSES_FIRST_RETRY;
        let read = match needed.is_empty() {
            true => Ok(Vec::new()),
            false => self.observer.classes().await,
        };
        let problems = match read {
            Ok(classes) => problems_of(&needed, &classes),
            // Who may not list them knows of none.
            Err(error) if error.kind == ErrorKind::Forbidden => {
                let problem = || classes::unreadable(&error);
                needed
                    .keys()
                    .map(|resource| (resource.to_string(), problem()))
                    .collect()
            }
            Err(error) => {
                tracing::debug!(%error, "the cluster cannot be read for extended resources");
                return;
            }
        };
        self.classes_at = Instant::now()
            + if problems.is_empty() {
                CLASSES_PERIOD
            } else {
                CLASSES_RETRY
            };
        if self.parts.setting != MechanismSetting::Dra {
            let ready = needed
                .into_keys()
                .filter(|resource| !problems.contains_key(resource.as_str()));
            self.switch
                .set_classes(Classes::Ready(ready.collect()), Instant::now());
        }
        let conditions = &self.parts.conditions;
        for code in [
            ProblemCode::DeviceClassConflict,
            ProblemCode::DeviceClassMissing,
        ] {
            conditions.retain(code, |subject| {
                problems
                    .get(subject)
                    .is_some_and(|problem| problem.code == code)
            });
        }
        problems
            .into_iter()
            .for_each(|(subject, problem)| conditions.set(&subject, problem));
    }
}

fn problems_of(
    needed: &BTreeMap<ExtendedResource, DriverName>,
    classes: &[classes::Class],
) -> BTreeMap<String, Problem> {
    let problem = |(resource, driver)| Some((resource, classes::judge(resource, driver, classes)?));
    let problems = needed.iter().filter_map(problem);
    problems
        .map(|(resource, problem): (&ExtendedResource, _)| (resource.to_string(), problem))
        .collect()
}

/// The pools of the drivers that serve, with their resource.
fn pools_of(drivers: &DriverSnapshot) -> BTreeMap<LocalPool, Option<ExtendedResource>> {
    let pools = drivers.serving.iter().flat_map(|(driver, published)| {
        let of = |(name, pool): (&PoolName, &nodedock_model::Pool)| {
            (
                LocalPool {
                    driver: driver.clone(),
                    pool: name.clone(),
                },
                pool.extended_resource.clone(),
            )
        };
        published.inventory.pools.iter().map(of).collect::<Vec<_>>()
    });
    pools.collect()
}

/// Resolves when an adapter changed.
pub(crate) async fn changed(adapters: &mut Option<Listener>) {
    let is_there = match adapters {
        Some(adapters) => adapters.changed().await.is_ok(),
        None => false,
    };
    if !is_there {
        std::future::pending().await
    }
}

fn log_changes(before: &Mechanisms, now: &Mechanisms) {
    for (LocalPool { driver, pool }, status) in &now.pools {
        let offered = |mechanisms: &Mechanisms| mechanisms.of(driver, pool, true);
        if offered(before) == offered(now) {
            continue;
        }
        let resource = &status.resource;
        match status.offered {
            Some(mechanism) => {
                tracing::info!(%driver, %pool, %resource, %mechanism, "pool offered")
            }
            None => {
                tracing::info!(%driver, %pool, %resource, "pool withdrawn, to be offered otherwise")
            }
        }
    }
}

/// A failed read is repeated.
fn logged<T>(read: Result<T, ApiError>) -> Option<T> {
    read.inspect_err(
        |error| tracing::debug!(%error, "the cluster cannot be read for extended resources"),
    )
    .ok()
}
