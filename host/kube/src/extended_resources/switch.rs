//! Mechanism that offers each pool with an extended-resource name, and the switch from one mechanism to the other. Pure, without a clock.
//!
//! Given the decision for the node, the pools of its drivers, what bridge and slices report, and claims as read from the API server; emits
//! whether the claims are to be read, the record to be made durable, and the mechanisms that slices and bridge follow.
//!
//! A pool is offered by the mechanism of its durable record. It switches only while none of its devices is in use: it is withdrawn, the
//! owner of its mechanism (the bridge, or the writer of slices) reports that it has carried that out, and then what is in use is looked at
//! again. If that is nothing, the record changes; otherwise the pool is offered as before. A crash leaves the record as it was before or
//! after. A pool without a record is offered by neither until the owner of the other mechanism has reported.

use std::collections::{BTreeMap, BTreeSet};

use super::decide::Decision;
use crate::pools::PoolNames;
use nodedock_model::{
    DriverName, ExtendedResource, Mechanism, MechanismsRecord, ObjectRef, PoolMechanism, PoolName,
};

/// Pools with a record: those of drivers that are gone are dropped first.
pub(super) const POOLS_MAX: usize = 4096;

/// A pool by its driver's own name for it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct LocalPool {
    pub driver: DriverName,
    pub pool: PoolName,
}

impl LocalPool {
    pub fn new(driver: &DriverName, pool: &PoolName) -> Self {
        Self {
            driver: driver.clone(),
            pool: pool.clone(),
        }
    }

    /// Returns the pool of this node that the API has under a name; `None`: it is of another node.
    pub(crate) fn of_published(
        names: &PoolNames,
        driver: &DriverName,
        published: &PoolName,
    ) -> Option<Self> {
        let is_here = names.is_of_node(published);
        let pool = PoolName::new(names.local(published.as_str())).ok()?;
        is_here.then(|| Self::new(driver, &pool))
    }
}

/// Pools with devices in use, with the mechanisms by which these were given.
pub type PoolsInUse = BTreeMap<LocalPool, BTreeSet<Mechanism>>;

/// The mechanisms of all pools at a moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Mechanisms {
    /// Differs if any pool is offered otherwise.
    pub generation: u64,
    pub decision: Option<Decision>,
    pub pools: BTreeMap<LocalPool, PoolStatus>,
    /// Mechanism of every pool with a name that is not in `pools`.
    pub fixed: Option<Mechanism>,
}

/// Status of a pool's offer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolStatus {
    pub resource: ExtendedResource,
    /// `None`: by neither mechanism.
    pub offered: Option<Mechanism>,
    /// Prerequisite before the pool is offered as decided; empty: it is.
    pub waits_for: String,
}

impl Mechanisms {
    /// Returns the mechanism that offers a pool. One without an extended-resource name is in slices.
    pub fn of(&self, driver: &DriverName, pool: &PoolName, is_named: bool) -> Option<Mechanism> {
        match self.pools.get(&LocalPool::new(driver, pool)) {
            Some(status) => status.offered,
            None if is_named => self.fixed,
            None => Some(Mechanism::Dra),
        }
    }

    /// Returns the pools of a resource that a driver has.
    pub fn of_resource<'a>(
        &'a self,
        driver: &'a DriverName,
        resource: &'a ExtendedResource,
    ) -> impl Iterator<Item = &'a PoolStatus> {
        let of_driver = self.pools.iter().filter(|(key, _)| key.driver == *driver);
        of_driver
            .map(|(_, status)| status)
            .filter(|status| status.resource == *resource)
    }

    /// Returns whether any pool of a driver is offered to the kubelet under a resource's name.
    pub(crate) fn is_at_kubelet(&self, driver: &DriverName, resource: &ExtendedResource) -> bool {
        let mut pools = self.of_resource(driver, resource).peekable();
        match pools.peek() {
            Some(_) => pools.any(|pool| pool.offered == Some(Mechanism::DevicePlugin)),
            None => self.fixed == Some(Mechanism::DevicePlugin),
        }
    }

    /// Returns whether a pool must not be in slices, also if its driver published it before.
    pub(crate) fn keeps_from_slices(&self, driver: &DriverName, pool: &PoolName) -> bool {
        self.of(driver, pool, false) != Some(Mechanism::Dra)
    }

    pub(crate) fn is_any_withdrawn(&self) -> bool {
        self.pools.values().any(|pool| pool.offered.is_none())
    }
}

/// Reports of bridge and slices.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Reported {
    /// The generation of the lists at the kubelet. No call for devices that they do not have is answered any more.
    pub(crate) lists: u64,
    /// The generation of the desired slices. No write of other ones is under way.
    pub(crate) slices: u64,
    /// Pools that still have slices, at least of those that are withdrawn.
    pub(crate) published: BTreeSet<LocalPool>,
    pub(crate) in_use: PoolsInUse,
}

/// The resources whose DeviceClass is as it has to be. A pool that the scheduler is to offer needs one: without it pods that request the
/// resource are not scheduled.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Classes {
    /// They do not matter: an operator decided.
    NotNeeded,
    #[default]
    Unread,
    Ready(BTreeSet<ExtendedResource>),
}

/// Facts that decide the mechanisms.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Inputs {
    pub(super) decision: Option<Decision>,
    /// Pools of the drivers that serve, with their resource.
    pub(super) pools: BTreeMap<LocalPool, Option<ExtendedResource>>,
    /// Pools that an operator keeps with the kubelet's device manager.
    pub(super) disabled: BTreeSet<LocalPool>,
    pub(super) classes: Classes,
    pub(super) reported: Reported,
}

/// Claims of the API server that have devices of this node's pools.
pub(super) type ClaimsOfPools = BTreeMap<LocalPool, BTreeSet<ObjectRef>>;

/// A pool that no mechanism offers, until it is offered by `target`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Withdrawn {
    target: Mechanism,
    /// The generation that withdrew it.
    since: u64,
    are_claims_read: bool,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Switch {
    generation: u64,
    /// Mechanisms of this `generation`.
    offered: BTreeMap<LocalPool, Option<Mechanism>>,
    pub(super) inputs: Inputs,
    /// The record: the only mechanism that may have devices of each pool.
    known: BTreeMap<LocalPool, PoolMechanism>,
    withdrawn: BTreeMap<LocalPool, Withdrawn>,
    /// Claims that keep pools from becoming those of a device plugin.
    claims: ClaimsOfPools,
}

impl Switch {
    pub(super) fn new(record: MechanismsRecord) -> Self {
        let mut switch = Self::default();
        switch.inputs.decision = record.decided.map(|mechanism| Decision {
            mechanism,
            reason: "it was decided before the start; the cluster was not read since".to_owned(),
        });
        switch.set_known(record);
        switch
    }

    /// Takes a proposed record, which is durable now.
    pub(super) fn set_known(&mut self, record: MechanismsRecord) {
        let pools = record.pools.into_iter();
        let keyed = pools.map(|known| (LocalPool::new(&known.driver, &known.pool), known));
        self.known = keyed.collect();
        self.refresh();
    }

    /// Returns whether all claims are to be read now: a pool's slices are gone.
    pub(super) fn awaits_claims(&self) -> bool {
        self.withdrawn
            .iter()
            .any(|(key, of)| self.is_awaiting(key, of))
    }

    /// Takes all claims, as read after `awaits_claims`.
    pub(super) fn claims_read(&mut self, mut claims: ClaimsOfPools) {
        let mut withdrawn = std::mem::take(&mut self.withdrawn);
        for (key, of) in &mut withdrawn {
            if self.is_awaiting(key, of) {
                of.are_claims_read = true;
                self.claims.extend(claims.remove_entry(key));
            }
        }
        self.withdrawn = withdrawn;
        self.refresh();
    }

    fn is_awaiting(&self, key: &LocalPool, of: &Withdrawn) -> bool {
        let is_plugin = of.target == Mechanism::DevicePlugin;
        is_plugin && !of.are_claims_read && self.is_carried_out(key, of)
    }

    /// Returns a claim that keeps a pool, to be followed until it has no device any more.
    pub(super) fn claim_in_the_way(&self) -> Option<&ObjectRef> {
        self.claims.values().flatten().next()
    }

    pub(super) fn released(&mut self, claim: &ObjectRef) {
        for of_pool in self.claims.values_mut() {
            of_pool.remove(claim);
        }
        self.refresh();
    }

    /// Returns the record to be made durable.
    pub(super) fn proposal(&self) -> MechanismsRecord {
        let mut known = self.known.clone();
        for (key, of) in self
            .withdrawn
            .iter()
            .filter(|(key, of)| self.is_ready(key, of))
        {
            let ready = self.resource(key).map(|resource| PoolMechanism {
                driver: key.driver.clone(),
                pool: key.pool.clone(),
                resource: resource.clone(),
                mechanism: of.target,
            });
            known.extend(ready.map(|ready| (key.clone(), ready)));
        }
        let mut surplus = known.len().saturating_sub(POOLS_MAX);
        known.retain(|key, _| {
            let is_dropped = surplus > 0 && !self.inputs.pools.contains_key(key);
            surplus -= usize::from(is_dropped);
            !is_dropped
        });
        MechanismsRecord {
            decided: self.decided(),
            pools: known.into_values().collect(),
        }
    }

    pub(super) fn mechanisms(&self) -> Mechanisms {
        let status = |(key, offered): (&LocalPool, &Option<Mechanism>)| {
            let status = PoolStatus {
                resource: self.resource(key)?.clone(),
                offered: *offered,
                waits_for: self.waits_for(key),
            };
            Some((key.clone(), status))
        };
        Mechanisms {
            generation: self.generation,
            decision: self.inputs.decision.clone(),
            pools: self.offered.iter().filter_map(status).collect(),
            fixed: None,
        }
    }

    /// Returns the pools that are not offered as decided, or for which nothing is decided.
    pub(super) fn waiting(&self) -> BTreeSet<LocalPool> {
        let is_waiting = |(key, offered): &(&LocalPool, &Option<Mechanism>)| {
            offered.is_none() || **offered != self.target(key)
        };
        let waiting = self.offered.iter().filter(is_waiting);
        waiting.map(|(key, _)| key.clone()).collect()
    }

    /// Returns the resources that need a DeviceClass, each with a serving driver that has a pool of it.
    pub(super) fn needs_classes(&self) -> BTreeMap<ExtendedResource, DriverName> {
        let is_needed = |key: &LocalPool| {
            self.decided() == Some(Mechanism::Dra) && !self.inputs.disabled.contains(key)
        };
        // The first driver of several counts.
        let pools = self.inputs.pools.iter().rev();
        let pools = pools.filter(|(key, _)| is_needed(key));
        pools
            .filter_map(|(key, resource)| Some((resource.clone()?, key.driver.clone())))
            .collect()
    }

    fn decided(&self) -> Option<Mechanism> {
        let decision = self.inputs.decision.as_ref();
        decision.map(|decision| decision.mechanism)
    }

    fn known(&self, key: &LocalPool) -> Option<Mechanism> {
        self.known.get(key).map(|known| known.mechanism)
    }

    /// Returns the mechanism that is decided for a pool; `None`: nothing is. One that needs a DeviceClass stays where it is without.
    fn target(&self, key: &LocalPool) -> Option<Mechanism> {
        if self.inputs.pools.get(key) == Some(&None) {
            return Some(Mechanism::Dra);
        }
        if self.inputs.disabled.contains(key) {
            return Some(Mechanism::DevicePlugin);
        }
        let decided = self.decided()?;
        let has_class = match &self.inputs.classes {
            Classes::NotNeeded => true,
            Classes::Unread => false,
            Classes::Ready(ready) => self.resource(key).is_some_and(|of| ready.contains(of)),
        };
        match self.known(key) {
            _ if has_class || decided == Mechanism::DevicePlugin => Some(decided),
            None if self.inputs.classes == Classes::Unread => None,
            known => known.or(Some(Mechanism::DevicePlugin)),
        }
    }

    /// Returns the mechanism that a pool has or gets now: with a device in use the one by which that was given.
    fn goal(&self, key: &LocalPool) -> Option<Mechanism> {
        let known = self.known(key);
        let Some(target) = self.target(key) else {
            return known;
        };
        let (here, there) = (self.is_used(key, target), self.is_used(key, other(target)));
        match known {
            Some(known) if here || there => Some(known),
            None if there && !here => Some(other(target)),
            _ => Some(target),
        }
    }

    fn is_used(&self, key: &LocalPool, mechanism: Mechanism) -> bool {
        let in_use = self.inputs.reported.in_use.get(key);
        in_use.is_some_and(|by| by.contains(&mechanism))
            || (mechanism == Mechanism::Dra && self.claims.contains_key(key))
    }

    /// Returns the mechanism that offers a pool. Slices would offer devices that the device manager gave, so they do not then.
    fn offered(&self, key: &LocalPool) -> Option<Mechanism> {
        let known = self.known(key)?;
        let is_mixed = known == Mechanism::Dra && self.is_used(key, Mechanism::DevicePlugin);
        (self.goal(key) == Some(known) && !is_mixed).then_some(known)
    }

    /// Returns whether the other mechanism has no devices of a pool any more.
    fn is_carried_out(&self, key: &LocalPool, of: &Withdrawn) -> bool {
        let reported = &self.inputs.reported;
        match of.target {
            Mechanism::Dra => reported.lists >= of.since,
            Mechanism::DevicePlugin => {
                reported.slices >= of.since && !reported.published.contains(key)
            }
        }
    }

    fn is_ready(&self, key: &LocalPool, of: &Withdrawn) -> bool {
        self.is_carried_out(key, of)
            && (of.are_claims_read || of.target == Mechanism::Dra)
            && !self.is_used(key, other(of.target))
    }

    fn resource(&self, key: &LocalPool) -> Option<&ExtendedResource> {
        let named = self.inputs.pools.get(key).and_then(Option::as_ref);
        named.or_else(|| Some(&self.known.get(key)?.resource))
    }

    fn waits_for(&self, key: &LocalPool) -> String {
        let (offered, target) = (self.offered(key), self.target(key));
        let waits_for = match (target, offered, self.withdrawn.get(key)) {
            (None, ..) if self.decided().is_none() => "the versions of API server and kubelet",
            (None, ..) => "a list of the DeviceClasses",
            (_, None, Some(of)) if !self.is_carried_out(key, of) => match of.target {
                Mechanism::Dra => "the withdrawal of its devices from the kubelet's device manager",
                Mechanism::DevicePlugin => "the deletion of its ResourceSlices",
            },
            (_, None, Some(of)) if self.is_awaiting(key, of) => {
                "a list of the claims that have its devices"
            }
            (Some(target), offered, _) if offered != Some(target) => {
                return format!("its devices to be free, to be offered by {target}");
            }
            (Some(target), ..) => return self.class_for(key, target),
        };
        waits_for.to_owned()
    }

    /// Returns what a pool waits for that stays a device plugin for the lack of a class.
    fn class_for(&self, key: &LocalPool, target: Mechanism) -> String {
        let decided = self.decided().filter(|decided| *decided != target);
        let decided = decided.filter(|_| !self.inputs.disabled.contains(key));
        let class = decided.zip(self.resource(key));
        class.map_or(String::new(), |(decided, resource)| {
            format!("a DeviceClass of {resource}, to be offered by {decided}")
        })
    }

    /// Follows a change of the inputs, of the record or of claims.
    pub(super) fn refresh(&mut self) {
        self.follow_names();
        let mut claims = std::mem::take(&mut self.claims);
        let plugin = Some(Mechanism::DevicePlugin);
        let is_kept = |key: &LocalPool| self.known(key) != plugin && self.target(key) == plugin;
        claims.retain(|key, of| !of.is_empty() && is_kept(key));
        self.claims = claims;
        let named = self
            .inputs
            .pools
            .iter()
            .filter(|(_, resource)| resource.is_some());
        let keys = self.known.keys().chain(named.map(|(key, _)| key));
        let offered: BTreeMap<_, _> = keys.map(|key| (key.clone(), self.offered(key))).collect();
        if self.offered != offered {
            self.offered = offered;
            self.generation += 1;
        }
        let mut before = std::mem::take(&mut self.withdrawn);
        for (key, _) in self.offered.iter().filter(|(_, offered)| offered.is_none()) {
            let Some(target) = self.goal(key) else {
                continue;
            };
            let known = before.remove(key);
            let since = known.as_ref().map_or(self.generation, |known| known.since);
            let known = known.filter(|known| known.target == target);
            let withdrawn = known.unwrap_or(Withdrawn {
                target,
                since,
                are_claims_read: false,
            });
            self.withdrawn.insert(key.clone(), withdrawn);
        }
    }

    /// Renames pools as their drivers do. One without a name is in slices like any other, and has no record.
    fn follow_names(&mut self) {
        for (key, resource) in &self.inputs.pools {
            match (resource, self.known.get_mut(key)) {
                (Some(resource), Some(known)) => known.resource.clone_from(resource),
                (None, Some(known)) if known.mechanism == Mechanism::Dra => {
                    self.known.remove(key);
                }
                _ => {}
            }
        }
    }
}

fn other(mechanism: Mechanism) -> Mechanism {
    match mechanism {
        Mechanism::Dra => Mechanism::DevicePlugin,
        Mechanism::DevicePlugin => Mechanism::Dra,
    }
}

#[cfg(test)]
#[path = "switch_tests.rs"]
mod tests;
