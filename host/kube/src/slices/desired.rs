//! Desired content of this node's pools, derived from the drivers. Pure.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use tokio::time::Instant;

use super::convert::{self, PoolAdditions, PoolTaints};
use super::health::{ObservedTaints, TaintedDevices, UnhealthyDevice, UnhealthyDevices};
use super::slice::{self, Content, Slice};
use super::{FailedDevices, SliceSettings, pools};
use crate::drivers::DriverSnapshot;
use crate::extended_resources::Mechanisms;
use crate::pools::PoolKey;
use crate::pools::PoolNames;
use nodedock_core::driver::Published;
use nodedock_model::{BindingConditions, DeviceName, DriverName, Pool, PoolName};

/// Delay from the removal of a driver's file to the deletion of its slices: files are replaced by removing and copying.
const SLICE_WITHDRAW_GRACE: Duration = Duration::from_secs(10);

pub(super) struct DesiredState {
    names: PoolNames,
    settings: Arc<SliceSettings>,
    /// Those that count from the next update on.
    pub(super) mechanisms: Arc<Mechanisms>,
    /// Drivers that serve, or served and may come back.
    drivers: BTreeMap<DriverName, DriverState>,
    /// Time since which drivers are gone whose slices still exist.
    gone_since: BTreeMap<DriverName, Instant>,
    /// Drivers that are surely gone: their slices are to be deleted.
    pub(super) withdrawn: BTreeSet<DriverName>,
    /// Devices that could not be prepared.
    pub(super) failed: FailedDevices,
    /// Devices that became unhealthy and were not reported yet.
    pub(super) new_unhealthy: Vec<UnhealthyDevice>,
}

/// Inputs from which a driver's pools are derived.
struct Source {
    published: Arc<Published>,
    unhealthy: TaintedDevices,
    failed: BTreeSet<(PoolName, DeviceName)>,
    mechanisms: Arc<Mechanisms>,
    settings: Arc<SliceSettings>,
}

#[derive(Default)]
struct DriverState {
    unhealthy: UnhealthyDevices,
    /// Inputs from which `pools` was derived.
    source: Option<Source>,
    pools: BTreeMap<PoolName, Arc<Content>>,
    /// Pools whose name in the API would be too long, with the reason.
    unnameable: BTreeMap<PoolName, String>,
}

impl DesiredState {
    pub(super) fn new(names: PoolNames, settings: SliceSettings) -> Self {
        let (drivers, gone_since) = (BTreeMap::new(), BTreeMap::new());
        let (withdrawn, failed, new_unhealthy, mechanisms) = Default::default();
        Self {
            names,
            settings: Arc::new(settings),
            mechanisms,
            drivers,
            gone_since,
            withdrawn,
            failed,
            new_unhealthy,
        }
    }

    /// Takes what the operator adds to devices from the next update on.
    pub(super) fn set_settings(&mut self, settings: &SliceSettings) {
        if *self.settings != *settings {
            self.settings = Arc::new(settings.clone());
        }
    }

    /// Returns the desired content of a pool, also of a driver that does not serve now.
    pub(super) fn content(&self, key: &PoolKey) -> Option<&Arc<Content>> {
        self.drivers.get(&key.driver)?.pools.get(&key.pool)
    }

    pub(super) fn pools(&self) -> BTreeMap<PoolKey, Arc<Content>> {
        let each = self.drivers.iter().flat_map(|(driver, state)| {
            state
                .pools
                .iter()
                .map(|(pool, content)| (driver.clone(), pool.clone(), Arc::clone(content)))
        });
        each.map(|(driver, pool, content)| (PoolKey { driver, pool }, content))
            .collect()
    }

    /// Returns the devices that are to have the taint of unhealthy ones, by the driver's own names.
    pub(super) fn unhealthy(&self) -> BTreeMap<DriverName, TaintedDevices> {
        let drivers = self.drivers.iter();
        let tainted = drivers.map(|(driver, state)| (driver.clone(), state.unhealthy.devices()));
        tainted.filter(|(_, devices)| !devices.is_empty()).collect()
    }

    /// Returns pools of present drivers that cannot be published under a name of the API, with the reason.
    pub(super) fn unnameable(&self, drivers: &DriverSnapshot) -> BTreeMap<PoolKey, String> {
        let states = self.drivers.iter().filter(|(driver, _)| {
            drivers.present.contains(*driver) && !drivers.native.contains(*driver)
        });
        let each = states.flat_map(|(driver, state)| {
            state.unnameable.iter().map(move |(pool, reason)| {
                (
                    PoolKey {
                        driver: driver.clone(),
                        pool: pool.clone(),
                    },
                    reason.clone(),
                )
            })
        });
        each.collect()
    }

    /// Takes the current drivers and observed slices. Returns when it is to be called again even if nothing changes.
    pub(super) fn update(
        &mut self,
        drivers: &DriverSnapshot,
        slices: &[Arc<Slice>],
        now: Instant,
    ) -> Option<Instant> {
        let mut next = None;
        for (driver, published) in &drivers.serving {
            next = earliest(next, self.update_driver(driver, published, slices, now));
        }
        // Of a driver that does not serve now, a pool that is withdrawn from slices must not be written again.
        let names = &self.names;
        for (driver, state) in self
            .drivers
            .iter_mut()
            .filter(|(name, _)| !drivers.serving.contains_key(*name))
        {
            let mechanisms = &self.mechanisms;
            state.pools.retain(|published, _| {
                let local = PoolName::new(names.local(published.as_str()));
                !local.is_ok_and(|local| mechanisms.keeps_from_slices(driver, &local))
            });
        }
        // A native plugin that took over a driver's name publishes its devices itself.
        self.drivers.retain(|driver, _| {
            !drivers.native.contains(driver) || drivers.serving.contains_key(driver)
        });
        let gone = self.gone(drivers, slices);
        self.withdrawn.retain(|driver| gone.contains(driver));
        self.gone_since.retain(|driver, _| gone.contains(driver));
        if !drivers.is_settled || !drivers.nameless.is_empty() {
            self.gone_since.clear();
            return next;
        }
        for driver in gone {
            let at = *self.gone_since.entry(driver.clone()).or_insert(now) + SLICE_WITHDRAW_GRACE;
            if at > now {
                next = earliest(next, Some(at));
            } else if self.withdrawn.insert(driver.clone()) {
                tracing::info!(%driver, "driver removed, its slices are withdrawn");
                self.drivers.remove(&driver);
            }
        }
        next
    }

    /// Returns the drivers with slices of ours, or that served, which are not present.
    pub(super) fn gone(
        &self,
        drivers: &DriverSnapshot,
        slices: &[Arc<Slice>],
    ) -> BTreeSet<DriverName> {
        let of_slices = slices
            .iter()
            .filter(|slice| slice::is_ours(slice))
            .map(|slice| &slice.spec.driver);
        let known = of_slices.chain(self.drivers.keys());
        known
            .filter(|driver| !drivers.present.contains(*driver))
            .cloned()
            .collect()
    }

    /// Derives the pools of a serving driver. Returns when the health of its devices changes without a report.
    pub(super) fn update_driver(
        &mut self,
        driver: &DriverName,
        published: &Arc<Published>,
        slices: &[Arc<Slice>],
        now: Instant,
    ) -> Option<Instant> {
        let tainted = self.tainted(driver, slices);
        let state = self.drivers.entry(driver.clone()).or_default();
        state.unhealthy.set_evict_after(self.settings.evict_after);
        let new = state
            .unhealthy
            .update(now, &published.health, &tainted)
            .into_iter();
        self.new_unhealthy
            .extend(new.map(|((pool, device), message)| UnhealthyDevice {
                driver: driver.clone(),
                pool: pool.clone(),
                device: device.clone(),
                message: message.to_owned(),
            }));
        let failed = self.failed.iter().filter(|(of, ..)| of == driver);
        let source = Source {
            published: Arc::clone(published),
            unhealthy: state.unhealthy.devices(),
            failed: failed
                .map(|(_, pool, device)| (pool.clone(), device.clone()))
                .collect(),
            mechanisms: self.mechanisms.clone(),
            settings: self.settings.clone(),
        };
        if !state.source.as_ref().is_some_and(|known| known.is(&source)) {
            state.derive_pools(
                &self.names,
                &source,
                |name, pool| pools::offered(driver, name, pool, &source.mechanisms),
                |pool| source.settings.of_pool(driver, pool),
            );
            state.source = Some(source);
        }
        state.unhealthy.next_change()
    }

    /// Returns the devices of a driver that have the taint of unhealthy ones in observed slices.
    fn tainted(&self, driver: &DriverName, slices: &[Arc<Slice>]) -> ObservedTaints {
        let (mut tainted, now) = (ObservedTaints::new(), Timestamp::now());
        for slice in slices.iter().filter(|slice| slice.spec.driver == *driver) {
            let Ok(pool) = PoolName::new(self.names.local(slice.spec.pool.name.as_str())) else {
                continue;
            };
            for (name, device) in &slice.spec.content.devices {
                if let (Some(taint), Ok(name)) = (device.unhealthy(now), DeviceName::new(name)) {
                    tainted.insert((pool.clone(), name), taint);
                }
            }
        }
        tainted
    }
}

impl SliceSettings {
    /// Returns what the operator adds to the devices of a pool.
    fn of_pool(&self, driver: &DriverName, pool: &PoolName) -> PoolAdditions {
        let rules = self.overhead.iter().filter(|rule| {
            rule.driver == *driver && rule.pool.as_ref().is_none_or(|of| of == pool)
        });
        let overhead = rules.flat_map(|rule| rule.resources.clone()).collect();
        let binding = self.binding_of(driver, pool).cloned().unwrap_or_default();
        PoolAdditions { overhead, binding }
    }

    fn binding_of(&self, driver: &DriverName, pool: &PoolName) -> Option<&BindingConditions> {
        self.binding
            .iter()
            .rev()
            .find(|rule| rule.driver == *driver && rule.pool.as_ref().is_none_or(|of| of == pool))
            .map(|rule| &rule.conditions)
    }

    /// Returns whether a scheduler waits for conditions of any published device.
    pub(crate) fn waits_for_binding(&self, drivers: &DriverSnapshot) -> bool {
        drivers.serving.iter().any(|(driver, published)| {
            published.inventory.pools.iter().any(|(name, pool)| {
                let by_rule = self
                    .binding_of(driver, name)
                    .is_some_and(|binding| !binding.is_empty());
                (by_rule && !pool.devices.is_empty())
                    || pool.devices.values().any(|device| {
                        device
                            .scheduling
                            .as_ref()
                            .is_some_and(|added| !added.binding_conditions.is_empty())
                    })
            })
        })
    }
}

impl Source {
    fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.published, &other.published)
            && Arc::ptr_eq(&self.mechanisms, &other.mechanisms)
            && Arc::ptr_eq(&self.settings, &other.settings)
            && (&self.unhealthy, &self.failed) == (&other.unhealthy, &other.failed)
    }
}

impl DriverState {
    fn derive_pools<'a>(
        &mut self,
        names: &PoolNames,
        source: &'a Source,
        offered: impl Fn(&PoolName, &'a Pool) -> Option<Cow<'a, Pool>>,
        additions: impl Fn(&PoolName) -> PoolAdditions,
    ) {
        let before = std::mem::take(&mut self.pools);
        self.unnameable.clear();
        for (name, pool) in &source.published.inventory.pools {
            let Some(pool) = offered(name, pool) else {
                continue;
            };
            let published = match names.published(name) {
                Ok(published) => published,
                Err(error) => {
                    self.unnameable.insert(name.clone(), error.to_string());
                    continue;
                }
            };
            let of_pool = source.unhealthy.iter().filter(|((of, _), _)| of == name);
            let unhealthy = of_pool
                .map(|((_, device), taint)| (device.clone(), taint.clone()))
                .collect();
            let failed = source.failed.iter().filter(|(of, _)| of == name);
            let failed = failed.map(|(_, device)| device.clone()).collect();
            let content =
                convert::content(&pool, &PoolTaints { unhealthy, failed }, &additions(name));
            let known = before.get(&published).filter(|known| ***known == content);
            let content = known.map_or_else(|| Arc::new(content), Arc::clone);
            self.pools.insert(published, content);
        }
    }
}

/// Returns the earlier of two moments, of which either may be none.
pub(super) fn earliest(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    a.into_iter().chain(b).min()
}
