//! Which mechanism offers each pool with an extended-resource name, and the switch from one mechanism to the other. Pure.
//!
//! Given the decision for the node, the pools of its drivers, and what was read of the cluster; emits the reads that are needed, the
//! record to be made durable, and the mechanisms that slices and bridge follow.
//!
//! A pool is offered by the mechanism of its durable record if that is the desired one, and by neither otherwise. Its record changes only
//! after the other mechanism was seen without free devices of the pool, in a read that began after the owner of that mechanism (the bridge,
//! or the writer of slices) had acknowledged the withdrawal. A crash leaves the record as it was before or after, so it can be repeated at
//! every step. Without a record nothing is known, and both are read.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tokio::time::Instant;

use super::decide::Decision;
use nodedock_model::{DeviceName, DriverName, ExtendedResource, Mechanism, PoolName};

/// Delay from the withdrawal of devices at the kubelet to a read of the Node object that counts: a kubelet updates the object every 10 s
/// after a change.
const NODE_SETTLE: Duration = Duration::from_secs(15);

/// Delay from the first list without the pool's slices to a list of claims that counts: a request to write slices may take 10 s, and the
/// scheduler writes allocations that it made from older slices.
const SLICES_SETTLE: Duration = Duration::from_secs(30);

/// Time after which a pool that is not offered is reported.
pub(super) const WITHHELD_LONG: Duration = Duration::from_secs(300);

/// Pools with a record: those of drivers that are gone are dropped first.
pub(super) const POOLS_MAX: usize = 4096;

/// A pool by its driver's own name for it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LocalPool {
    pub driver: DriverName,
    pub pool: PoolName,
}

/// What is durable.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Record {
    /// The last decision.
    pub(super) decided: Option<Mechanism>,
    pub(super) pools: BTreeMap<LocalPool, PoolRecord>,
}

/// The only mechanism that may have free devices of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PoolRecord {
    pub(super) resource: ExtendedResource,
    pub(super) mechanism: Mechanism,
    /// Devices that claims of the API server had when the pool became one of the device plugin: not free yet.
    pub(super) claimed: BTreeSet<DeviceName>,
}

/// The mechanisms of all pools at a moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mechanisms {
    /// Differs if any pool is offered otherwise.
    pub generation: u64,
    pub decision: Option<Decision>,
    pub pools: BTreeMap<LocalPool, PoolStatus>,
    /// Of every pool with a name that is not in `pools`.
    pub fixed: Option<Mechanism>,
}

/// How a pool is offered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolStatus {
    pub resource: ExtendedResource,
    /// `None`: by neither mechanism.
    pub offered: Option<Mechanism>,
    /// What has to come before the pool is offered as decided; empty: it is.
    pub waits_for: String,
    /// Devices that claims of the API server had when the pool became one of the device plugin: not free yet.
    pub claimed: BTreeSet<DeviceName>,
}

impl Mechanisms {
    /// Returns the mechanism that offers a pool. One without an extended-resource name is in slices.
    pub fn of(&self, driver: &DriverName, pool: &PoolName, is_named: bool) -> Option<Mechanism> {
        let key = LocalPool {
            driver: driver.clone(),
            pool: pool.clone(),
        };
        match self.pools.get(&key) {
            Some(status) => status.offered,
            None if is_named => self.fixed,
            None => Some(Mechanism::Dra),
        }
    }

    /// Returns whether a claim of the API server had a device when its pool became one of the device plugin, and may have it still.
    pub fn is_claimed(&self, driver: &DriverName, pool: &PoolName, device: &DeviceName) -> bool {
        let key = LocalPool {
            driver: driver.clone(),
            pool: pool.clone(),
        };
        self.pools
            .get(&key)
            .is_some_and(|status| status.claimed.contains(device))
    }

    /// Returns the pools of a resource that a driver has.
    pub fn of_resource<'a>(
        &'a self,
        driver: &'a DriverName,
        resource: &'a ExtendedResource,
    ) -> impl Iterator<Item = &'a PoolStatus> {
        let pools = self
            .pools
            .iter()
            .filter(move |(key, _)| key.driver == *driver);
        pools
            .map(|(_, status)| status)
            .filter(move |status| status.resource == *resource)
    }

    /// Returns whether any pool of a driver is offered to the kubelet under a resource's name.
    pub(crate) fn is_at_kubelet(&self, driver: &DriverName, resource: &ExtendedResource) -> bool {
        let mut pools = self.of_resource(driver, resource).peekable();
        match pools.peek() {
            Some(_) => pools.any(|pool| pool.offered == Some(Mechanism::DevicePlugin)),
            None => self.fixed == Some(Mechanism::DevicePlugin),
        }
    }

    /// Returns whether a pool is kept out of slices.
    pub(crate) fn keeps_from_slices(&self, driver: &DriverName, pool: &PoolName) -> bool {
        let key = LocalPool {
            driver: driver.clone(),
            pool: pool.clone(),
        };
        self.pools
            .get(&key)
            .is_some_and(|status| status.offered != Some(Mechanism::Dra))
    }
}

/// The generations whose withdrawals are carried out: of the lists at the kubelet, and of the desired slices.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Acknowledged {
    pub(super) kubelet: u64,
    pub(super) slices: u64,
}

/// What is to be read of the cluster.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Needs {
    pub(super) node: bool,
    pub(super) slices: bool,
    /// Of all claims, which are many: for a pool that waits for the list, or else to see which devices are free by now.
    pub(super) claims: bool,
    pub(super) is_claims_urgent: bool,
}

/// The resources whose DeviceClass is as it has to be. A pool that the scheduler is to offer needs one: without it pods that request the
/// resource are not scheduled.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Classes {
    /// They do not matter: an operator decided.
    NotNeeded,
    #[default]
    Unread,
    Ready(BTreeSet<ExtendedResource>),
}

/// A pool that no mechanism offers.
#[derive(Debug)]
struct Withheld {
    target: Mechanism,
    /// The generation that withdrew it.
    since: u64,
    began: Instant,
    /// When the owner of the other mechanism was seen to have withdrawn it.
    acknowledged: Option<Instant>,
    /// Since when a list has no slices of it.
    clear: Option<Instant>,
    was_in_slices: bool,
    /// Devices that the kubelet had allocatable in the last read.
    allocatable: u64,
}

#[derive(Debug, Default)]
pub(super) struct Switch {
    record: Record,
    /// No process before this one wrote slices of the node.
    pub(super) is_new_node: bool,
    decision: Option<Decision>,
    classes: Classes,
    /// Pools that the kubelet's device manager is to offer, whatever is decided.
    disabled: BTreeSet<LocalPool>,
    /// Pools of serving drivers, with their resource. One without a name had one before.
    pools: BTreeMap<LocalPool, Option<ExtendedResource>>,
    withheld: BTreeMap<LocalPool, Withheld>,
    /// Since when pools are offered by neither because nothing is decided for them.
    undecided: BTreeMap<LocalPool, Instant>,
    /// As of `generation`.
    offered: BTreeMap<LocalPool, Offered>,
    generation: u64,
}

/// The mechanism that offers a pool, and the devices that are not free in it.
type Offered = (Option<Mechanism>, BTreeSet<DeviceName>);

impl Switch {
    /// `is_new_node`: no process before this one had a record.
    pub(super) fn new(record: Record, is_new_node: bool, now: Instant) -> Self {
        let decision = record.decided.map(|mechanism| {
            let reason =
                "it was decided so before the start, and the cluster has not been read since"
                    .to_owned();
            Decision { mechanism, reason }
        });
        let mut switch = Self {
            record,
            is_new_node,
            decision,
            generation: 1,
            ..Self::default()
        };
        switch.refresh(now);
        switch
    }

    pub(super) fn record(&self) -> &Record {
        &self.record
    }

    pub(super) fn decide(&mut self, decision: Decision, now: Instant) {
        self.record.decided = Some(decision.mechanism);
        self.decision = Some(decision);
        self.refresh(now);
    }

    /// Sets the pools that an operator keeps with the kubelet's device manager.
    pub(super) fn set_disabled(&mut self, disabled: BTreeSet<LocalPool>, now: Instant) {
        if self.disabled != disabled {
            self.disabled = disabled;
            self.refresh(now);
        }
    }

    pub(super) fn set_classes(&mut self, classes: Classes, now: Instant) {
        if self.classes != classes {
            self.classes = classes;
            self.refresh(now);
        }
    }

    /// Returns the resources that need a DeviceClass, each with the first serving driver that has a pool of it.
    pub(super) fn needs_classes(&self) -> BTreeMap<ExtendedResource, DriverName> {
        let mut found = BTreeMap::new();
        if self.record.decided == Some(Mechanism::Dra) {
            for (key, resource) in self
                .pools
                .iter()
                .filter(|(key, _)| !self.disabled.contains(key))
            {
                let Some(resource) = resource else { continue };
                found
                    .entry(resource.clone())
                    .or_insert_with(|| key.driver.clone());
            }
        }
        found
    }

    /// Sets the pools of the drivers that serve.
    pub(super) fn set_pools(
        &mut self,
        pools: BTreeMap<LocalPool, Option<ExtendedResource>>,
        now: Instant,
    ) {
        self.pools = pools;
        let records = &mut self.record.pools;
        self.pools
            .retain(|key, resource| resource.is_some() || records.contains_key(key));
        for (key, resource) in &self.pools {
            let Some(record) = records.get_mut(key) else {
                continue;
            };
            match resource {
                // A pool without a name is in slices like any other.
                None if record.mechanism == Mechanism::Dra => drop(records.remove(key)),
                Some(resource) if record.mechanism == Mechanism::Dra => {
                    record.resource = resource.clone()
                }
                _ => {}
            }
        }
        self.pools
            .retain(|key, resource| resource.is_some() || records.contains_key(key));
        self.refresh(now);
    }

    /// Takes the generations that are carried out, and the pools that had slices since the start of the process.
    pub(super) fn acknowledge(
        &mut self,
        done: Acknowledged,
        had_slices: &BTreeSet<LocalPool>,
        now: Instant,
    ) {
        for (key, pool) in self
            .withheld
            .iter_mut()
            .filter(|(_, pool)| pool.acknowledged.is_none())
        {
            pool.was_in_slices |= had_slices.contains(key);
            let done = match pool.target {
                Mechanism::Dra => done.kubelet,
                Mechanism::DevicePlugin => done.slices,
            };
            pool.acknowledged = (done >= pool.since).then_some(now);
        }
    }

    /// Returns the reads that would count if they began now.
    pub(super) fn needs(&self, now: Instant) -> Needs {
        let mut needs = Needs {
            claims: self.has_claimed(),
            ..Needs::default()
        };
        for (key, pool) in &self.withheld {
            needs.node |= self.node_counts(key, pool, now);
            needs.slices |= pool.target == Mechanism::DevicePlugin && pool.acknowledged.is_some();
            needs.is_claims_urgent |= self.claims_count(pool, now);
        }
        needs.claims |= needs.is_claims_urgent;
        needs
    }

    fn has_claimed(&self) -> bool {
        self.record
            .pools
            .iter()
            .any(|(key, record)| !record.claimed.is_empty() && self.is_offered(key))
    }

    fn node_counts(&self, key: &LocalPool, pool: &Withheld, begun: Instant) -> bool {
        let was_plugin = self
            .record
            .pools
            .get(key)
            .is_some_and(|record| record.mechanism == Mechanism::DevicePlugin);
        let settle = if was_plugin {
            NODE_SETTLE
        } else {
            Duration::ZERO
        };
        pool.target == Mechanism::Dra && pool.acknowledged.is_some_and(|at| begun >= at + settle)
    }

    /// Whether a list of claims that began at `begun` shows all claims with devices of the pool.
    fn claims_count(&self, pool: &Withheld, begun: Instant) -> bool {
        let was_never_in_slices = self.is_new_node && !pool.was_in_slices;
        let settle = if was_never_in_slices {
            Duration::ZERO
        } else {
            SLICES_SETTLE
        };
        pool.target == Mechanism::DevicePlugin
            && pool.clear.is_some_and(|clear| begun >= clear + settle)
    }

    /// Takes the extended resources that the kubelet had allocatable in a read that began at `begun`. Returns the record to commit.
    pub(super) fn saw_node(
        &mut self,
        allocatable: &BTreeMap<ExtendedResource, u64>,
        begun: Instant,
    ) -> Option<Record> {
        let mut next = self.record.clone();
        let counting: Vec<_> = self
            .withheld
            .iter()
            .filter(|(key, pool)| self.node_counts(key, pool, begun))
            .collect();
        let mut seen = BTreeMap::new();
        for (key, _) in counting {
            let named = self.pools.get(key).cloned().flatten();
            let before = self
                .record
                .pools
                .get(key)
                .map(|record| record.resource.clone());
            let of = |resource: &ExtendedResource| allocatable.get(resource).copied().unwrap_or(0);
            let left = named.iter().chain(&before).map(of).max().unwrap_or(0);
            seen.insert(key.clone(), left);
            let is_unnamed = self.pools.get(key).is_some_and(Option::is_none);
            match named.or(before) {
                _ if left > 0 => {}
                Some(resource) if !is_unnamed => {
                    let (mechanism, claimed) = (Mechanism::Dra, BTreeSet::new());
                    next.pools.insert(
                        key.clone(),
                        PoolRecord {
                            resource,
                            mechanism,
                            claimed,
                        },
                    );
                }
                _ => drop(next.pools.remove(key)),
            }
        }
        for (key, left) in seen {
            if let Some(pool) = self.withheld.get_mut(&key) {
                pool.allocatable = left;
            }
        }
        self.proposed(next)
    }

    /// Takes the pools that have slices, of a list that began at `begun`.
    pub(super) fn saw_slices(&mut self, published: &BTreeSet<LocalPool>, begun: Instant) {
        for (key, pool) in &mut self.withheld {
            if pool.target != Mechanism::DevicePlugin || pool.acknowledged.is_none() {
                continue;
            }
            if published.contains(key) {
                (pool.clear, pool.was_in_slices) = (None, true);
            } else {
                pool.clear.get_or_insert(begun);
            }
        }
    }

    /// Takes the devices that claims of the API server have, of a list that began at `begun`. Returns the record to commit.
    pub(super) fn saw_claims(
        &self,
        allocated: &BTreeMap<LocalPool, BTreeSet<DeviceName>>,
        begun: Instant,
    ) -> Option<Record> {
        let mut next = self.record.clone();
        let of = |key: &LocalPool| allocated.get(key).cloned().unwrap_or_default();
        for (key, record) in &mut next.pools {
            let still = of(key);
            record.claimed.retain(|device| still.contains(device));
        }
        for (key, _) in self
            .withheld
            .iter()
            .filter(|(_, pool)| self.claims_count(pool, begun))
        {
            let named = self.pools.get(key).cloned().flatten();
            let before = self
                .record
                .pools
                .get(key)
                .map(|record| record.resource.clone());
            let Some(resource) = named.or(before) else {
                continue;
            };
            let (mechanism, claimed) = (Mechanism::DevicePlugin, of(key));
            next.pools.insert(
                key.clone(),
                PoolRecord {
                    resource,
                    mechanism,
                    claimed,
                },
            );
        }
        self.proposed(next)
    }

    fn proposed(&self, mut next: Record) -> Option<Record> {
        if next == self.record {
            return None;
        }
        let mut surplus = next.pools.len().saturating_sub(POOLS_MAX);
        next.pools.retain(|key, _| {
            let is_dropped = surplus > 0 && !self.pools.contains_key(key);
            surplus -= usize::from(is_dropped);
            !is_dropped
        });
        Some(next)
    }

    /// A record that was returned is durable.
    pub(super) fn committed(&mut self, record: Record, now: Instant) {
        self.record = record;
        self.refresh(now);
    }

    /// Returns pools that no mechanism has offered for long, with what they wait for.
    pub(super) fn overdue(&self, now: Instant) -> BTreeMap<LocalPool, String> {
        let is_long = |began: Instant| now >= began + WITHHELD_LONG;
        let withheld = self.withheld.iter().filter(|(_, pool)| is_long(pool.began));
        let withheld = withheld.map(|(key, pool)| (key.clone(), self.waits_for(key, pool)));
        let undecided = self.undecided.iter().filter(|(_, began)| is_long(**began));
        withheld
            .chain(undecided.map(|(key, _)| (key.clone(), self.undecided().to_owned())))
            .collect()
    }

    pub(super) fn mechanisms(&self) -> Mechanisms {
        Mechanisms {
            generation: self.generation,
            decision: self.decision.clone(),
            pools: self.statuses(),
            fixed: None,
        }
    }

    fn target(&self, key: &LocalPool) -> Option<Mechanism> {
        match self.pools.get(key) {
            Some(None) => Some(Mechanism::Dra),
            _ if self.disabled.contains(key) => Some(Mechanism::DevicePlugin),
            Some(Some(_)) | None => match self.record.decided? {
                Mechanism::Dra if self.lacks_class(key) => self.without_class(key),
                decided => Some(decided),
            },
        }
    }

    /// Returns whether a pool must not be offered through DRA yet. A resource that is offered so stays, whatever becomes of its class: it
    /// would cost a withdrawal each time that the class is replaced.
    fn lacks_class(&self, key: &LocalPool) -> bool {
        let ready = match &self.classes {
            Classes::NotNeeded => return false,
            Classes::Unread => None,
            Classes::Ready(ready) => Some(ready),
        };
        let record = self.record.pools.get(key);
        let named = self.pools.get(key).and_then(Option::as_ref);
        let Some(resource) = named.or(record.map(|record| &record.resource)) else {
            return false;
        };
        let mut records = self.record.pools.values();
        !ready.is_some_and(|ready| ready.contains(resource))
            && !records
                .any(|record| record.mechanism == Mechanism::Dra && record.resource == *resource)
    }

    /// What offers a pool without a class. Nothing does before the classes were read, unless it is offered already.
    fn without_class(&self, key: &LocalPool) -> Option<Mechanism> {
        let is_known = self.record.pools.contains_key(key) || self.classes != Classes::Unread;
        is_known.then_some(Mechanism::DevicePlugin)
    }

    fn is_offered(&self, key: &LocalPool) -> bool {
        let known = self.record.pools.get(key).map(|record| record.mechanism);
        known.is_some() && known == self.target(key)
    }

    fn keys(&self) -> BTreeSet<LocalPool> {
        self.record
            .pools
            .keys()
            .chain(self.pools.keys())
            .cloned()
            .collect()
    }

    fn statuses(&self) -> BTreeMap<LocalPool, PoolStatus> {
        let status = |key: LocalPool| {
            let record = self.record.pools.get(&key);
            let named = self.pools.get(&key).cloned().flatten();
            let resource = named.or_else(|| record.map(|record| record.resource.clone()))?;
            let offered = record
                .map(|record| record.mechanism)
                .filter(|_| self.is_offered(&key));
            let waits_for = self
                .withheld
                .get(&key)
                .map(|pool| self.waits_for(&key, pool));
            let is_decided = self.record.decided == Some(Mechanism::Dra)
                && self.lacks_class(&key)
                && !self.disabled.contains(&key);
            let waits_for = match (offered, waits_for) {
                (Some(Mechanism::DevicePlugin), _) if is_decided => {
                    format!(
                        "a DeviceClass of {resource}, to be offered by {}",
                        Mechanism::Dra
                    )
                }
                (Some(_), _) => String::new(),
                (None, Some(waits_for)) => waits_for,
                (None, None) => self.undecided().to_owned(),
            };
            let claimed = record
                .map(|record| record.claimed.clone())
                .unwrap_or_default();
            Some((
                key,
                PoolStatus {
                    resource,
                    offered,
                    waits_for,
                    claimed,
                },
            ))
        };
        self.keys().into_iter().filter_map(status).collect()
    }

    /// What a pool waits for whose mechanism is not decided.
    fn undecided(&self) -> &'static str {
        match self.record.decided {
            None => "the versions of API server and kubelet",
            Some(_) => "a list of the DeviceClasses",
        }
    }

    fn waits_for(&self, key: &LocalPool, pool: &Withheld) -> String {
        let named = self.pools.get(key).cloned().flatten();
        let resource = self
            .record
            .pools
            .get(key)
            .map(|record| record.resource.clone())
            .or(named);
        let resource = resource
            .map(|resource| resource.to_string())
            .unwrap_or_default();
        match pool.target {
            Mechanism::Dra if pool.acknowledged.is_none() => {
                "the withdrawal of its devices from the kubelet's device manager".to_owned()
            }
            Mechanism::Dra if pool.allocatable > 0 => {
                let count = pool.allocatable;
                format!(
                    "the Node object, which still has {count} {resource} allocatable by the kubelet's device manager"
                )
            }
            Mechanism::Dra => format!("a read of the Node object without allocatable {resource}"),
            Mechanism::DevicePlugin if pool.clear.is_none() => {
                "the deletion of its ResourceSlices".to_owned()
            }
            Mechanism::DevicePlugin => "a list of the claims that have its devices".to_owned(),
        }
    }

    /// Follows a change of what is offered.
    fn refresh(&mut self, now: Instant) {
        let mut withheld = std::mem::take(&mut self.withheld);
        let mut undecided = std::mem::take(&mut self.undecided);
        for key in self.keys() {
            if self.is_offered(&key) {
                continue;
            }
            let Some(target) = self.target(&key) else {
                let began = undecided.remove(&key).unwrap_or(now);
                self.undecided.insert(key, began);
                continue;
            };
            let known = withheld.remove(&key);
            // A pool that nothing was decided for is not offered already.
            let is_shown = self
                .offered
                .get(&key)
                .is_some_and(|(offered, _)| offered.is_none());
            let since = self.generation + u64::from(!is_shown);
            let (since, began) = known
                .as_ref()
                .map_or((since, now), |known| (known.since, known.began));
            let was_in_slices = self
                .record
                .pools
                .get(&key)
                .is_some_and(|record| record.mechanism == Mechanism::Dra)
                || known.as_ref().is_some_and(|known| known.was_in_slices);
            let pool = known
                .filter(|known| known.target == target)
                .unwrap_or(Withheld {
                    target,
                    since,
                    began,
                    acknowledged: None,
                    clear: None,
                    was_in_slices,
                    allocatable: 0,
                });
            self.withheld.insert(key, pool);
        }
        let statuses = self.statuses().into_iter();
        let offered: BTreeMap<_, _> = statuses
            .map(|(key, status)| (key, (status.offered, status.claimed)))
            .collect();
        if std::mem::replace(&mut self.offered, offered) != self.offered {
            self.generation += 1;
        }
    }
}

#[cfg(test)]
#[path = "switch_tests.rs"]
mod tests;
