//! What pools are to be: from what the drivers say, and from which of them are here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tokio::time::Instant;

use super::conditions::refusal;
use super::{PoolState, Tainted, Wanted, Writer};
use crate::slices::REFUSED;
use crate::slices::content::{Content, TaintKey, of_pool};
use crate::slices::drivers::Look;
use crate::slices::planner::PoolKey;
use nodedock_core::driver::Published;
use nodedock_model::{DeviceName, DriverName, PoolName, limit};

impl Writer {
    /// Takes what the drivers are now.
    pub(super) fn look(&mut self, look: Look, now: Instant) {
        let served: BTreeSet<_> = self.last.serving.keys().cloned().collect();
        self.last = look;
        let serving = self.last.serving.clone();
        for (driver, published) in &serving {
            self.look_at_driver(driver, published, now);
            if !served.contains(driver) {
                // Slices of pools that it does not have may be there.
                self.touch_driver(driver);
            }
        }
        self.forget_names_of_the_absent();
        self.leave_to_natives();
        self.look_for_the_gone(now);
    }

    pub(super) fn look_at_driver(&mut self, driver: &DriverName, published: &Arc<Published>, now: Instant) {
        let told = self.told_as_unhealthy(driver);
        let state = self.drivers.entry(driver.clone()).or_default();
        state.sick.look(now, limit::SLICE_TAINT_HOLD, &published.health, &told);
        let tainted: Tainted = published
            .inventory
            .pools
            .keys()
            .flat_map(|pool| state.sick.of_pool(pool).into_iter().map(|device| (pool.clone(), device)))
            .collect();
        let is_known =
            |(known, then): &(Arc<Published>, Tainted)| Arc::ptr_eq(known, published) && *then == tainted;
        let healed_at = state.sick.due(limit::SLICE_TAINT_HOLD);
        let is_known = state.seen.as_ref().is_some_and(is_known);
        // Also for a taint that was only found in a slice: no driver says anything when its time is over.
        healed_at.into_iter().for_each(|at| self.look_at_latest(at));
        if is_known {
            return;
        }
        let state = self.drivers.entry(driver.clone()).or_default();
        let mut contents = BTreeMap::new();
        let mut unnameable = BTreeMap::new();
        for (name, pool) in &published.inventory.pools {
            if pool.extended_resource.is_some() && !self.settings.with_resource_pools {
                continue;
            }
            let sick = state.sick.of_pool(name);
            match self.settings.names.published(name) {
                Ok(published) => {
                    contents.insert(published, of_pool(pool, &sick, self.settings.unhealthy));
                }
                Err(error) => {
                    let key = PoolKey { driver: driver.clone(), pool: name.clone() };
                    unnameable.insert(key.to_string(), refusal(&key, &error.to_string()));
                }
            }
        }
        state.seen = Some((Arc::clone(published), tainted));
        let before = std::mem::take(&mut state.unnameable);
        state.unnameable = unnameable.keys().cloned().collect();
        before
            .iter()
            .filter(|pool| !unnameable.contains_key(*pool))
            .for_each(|pool| self.conditions.clear(REFUSED, pool));
        unnameable.into_iter().for_each(|(pool, problem)| self.conditions.set(&pool, problem));
        self.want(driver, contents, now);
    }

    /// Devices of a driver that stand as unhealthy in slices.
    fn told_as_unhealthy(&self, driver: &DriverName) -> Tainted {
        let mut told = BTreeSet::new();
        for held in self.view.all().filter(|held| held.key.driver == *driver) {
            let Ok(pool) = PoolName::new(self.settings.names.local(held.key.pool.as_str())) else { continue };
            for (name, device) in &held.content.devices {
                let is_told = device.taints().any(|(taint, _): (TaintKey, _)| taint.is_of_health());
                if let (true, Ok(name)) = (is_told, DeviceName::new(name)) {
                    told.insert((pool.clone(), name));
                }
            }
        }
        told
    }

    /// Notes what the pools of a driver are to be. The others of its pools are to be gone.
    fn want(&mut self, driver: &DriverName, contents: BTreeMap<PoolName, Content>, now: Instant) {
        let is_left = |key: &PoolKey| key.driver == *driver && !contents.contains_key(&key.pool);
        let left: Vec<_> = self.wanted.keys().filter(|key| is_left(key)).cloned().collect();
        for key in left {
            self.wanted.remove(&key);
            self.renew(&key, now);
        }
        for (pool, content) in contents {
            let key = PoolKey { driver: driver.clone(), pool };
            let known = self.wanted.get(&key);
            if known.is_some_and(|known| known.content == content) {
                continue;
            }
            let edition = known.map_or(1, |known| known.edition + 1);
            self.wanted.insert(key.clone(), Wanted { content, edition });
            self.renew(&key, now);
        }
    }

    fn renew(&mut self, key: &PoolKey, now: Instant) {
        self.pools.entry(key.clone()).or_insert_with(|| PoolState::new(now)).pace.renewed(now);
    }

    fn touch_driver(&mut self, driver: &DriverName) {
        let held = self.view.all().map(|held| &held.key).chain(self.wanted.keys());
        let keys: BTreeSet<PoolKey> = held.filter(|key| key.driver == *driver).cloned().collect();
        keys.iter().for_each(|key| self.touch(key));
    }

    /// A native plugin that has a driver's name now tells of its devices itself.
    fn leave_to_natives(&mut self) {
        let left = self.last.native.iter().filter(|driver| !self.last.serving.contains_key(*driver));
        let left: BTreeSet<DriverName> = left.cloned().collect();
        if !left.is_empty() {
            self.forget(&left);
        }
    }

    /// What was said of pools that the API cannot name is over with their drivers. One that comes back is looked at anew.
    fn forget_names_of_the_absent(&mut self) {
        for (driver, state) in &mut self.drivers {
            if self.last.present.contains(driver) && !self.last.native.contains(driver) {
                continue;
            }
            for pool in std::mem::take(&mut state.unnameable) {
                self.conditions.clear(REFUSED, &pool);
                state.seen = None;
            }
        }
    }

    /// Forgets what drivers had, without a word to the server.
    fn forget(&mut self, drivers: &BTreeSet<DriverName>) {
        let keys: Vec<_> = self.wanted.keys().filter(|key| drivers.contains(&key.driver)).cloned().collect();
        for key in keys {
            self.wanted.remove(&key);
            self.report.tell(&key, None);
            self.tell_no_more(&key);
        }
        self.drivers.retain(|driver, _| !drivers.contains(driver));
    }

    /// Withdraws the slices of drivers that are here no more, when that is sure.
    fn look_for_the_gone(&mut self, now: Instant) {
        let known = self.wanted.keys().map(|key| key.driver.clone());
        let missing: BTreeSet<DriverName> = self.view.our_drivers().into_iter().chain(known).collect();
        let missing: BTreeSet<_> = missing.difference(&self.last.present).cloned().collect();
        self.withdrawn.retain(|driver| missing.contains(driver));
        self.gone.retain(|driver, _| missing.contains(driver));
        let is_sure = self.last.is_settled && self.last.nameless.is_empty();
        let doubted = if self.last.is_settled && !is_sure { missing.clone() } else { BTreeSet::new() };
        self.tell_kept(&doubted, &self.last.nameless);
        if !is_sure {
            self.gone.clear();
            return;
        }
        for driver in missing {
            let since = *self.gone.entry(driver.clone()).or_insert(now);
            let at = since + limit::SLICE_WITHDRAW_GRACE;
            if at > now {
                self.look_at_latest(at);
            } else if self.withdrawn.insert(driver.clone()) {
                tracing::info!(%driver, "driver removed, its slices are withdrawn");
                let touched = self.wanted.keys().filter(|key| key.driver == driver).cloned();
                let touched: BTreeSet<PoolKey> = touched.collect();
                self.forget(&BTreeSet::from([driver.clone()]));
                touched.iter().for_each(|key| self.touch(key));
                self.touch_driver(&driver);
            }
        }
    }
}
