//! Claims of the kubelet at the claim manager: those of the API server, and those for devices that the kubelet's device manager allocated.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Context;
use super::plugin_claim::{self, is_plugin_claim};
use crate::events::Refusal;
use crate::extended_resources::{LocalPool, Mechanism, PoolsInUse};
use nodedock_core::manager::Manager;
use nodedock_core::manager::claims::KubeletClaims;
use nodedock_core::resources::pools::{device_id, split_id};
use nodedock_model::{
    ClaimRecord, DriverName, KubeletClaim, KubeletDevice, ObjectRef, Problem, ProblemCode,
};

/// A start takes about so long.
const HANDOVER_RETRY: Duration = Duration::from_secs(2);
/// Time limit for reading the consumers of a refused claim, while the kubelet waits for its answer.
const CONSUMERS_WAIT: Duration = Duration::from_secs(2);

/// Devices by driver and `POOL/DEVICE`.
pub(super) type DeviceIds = BTreeSet<(DriverName, String)>;

/// Claim for devices that the kubelet's device manager allocated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeviceClaim {
    pub(super) claim: ObjectRef,
    pub(super) driver: DriverName,
    /// IDs of the devices, as `device_id` forms them.
    pub(super) devices: BTreeSet<String>,
    /// Time of the last request by a kubelet.
    pub(super) requested: Instant,
}

impl Context {
    /// The manager. Fails while another instance takes over, which answers the call then.
    pub(super) fn manager(&self) -> Result<&Arc<Manager>, Problem> {
        if !self.handover.is_under_way() {
            return Ok(&self.parts.manager);
        }
        let message = "a newer instance takes over just now";
        Err(Problem::unavailable(ProblemCode::HandingOver, message).retry_after(HANDOVER_RETRY))
    }

    /// The owner of a kubelet's requests. Fails while another instance takes over.
    pub(super) fn kubelet_claims(&self) -> Result<&Arc<KubeletClaims>, Problem> {
        Ok(&self.manager()?.kubelet)
    }

    /// Prepares a claim of the API server with one driver. May be repeated at any time.
    pub(super) async fn prepare(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<Vec<KubeletDevice>, Problem> {
        let mut devices = self
            .kubelet_claims()?
            .prepare(driver, claim, request_id)
            .await?;
        let record = self.parts.manager.records.claim(&claim.uid);
        let pools = &self.parts.pools;
        for device in &mut devices {
            device.pool = match &record {
                Some(record) => pools.published_in(record, driver, &device.pool),
                None => pools.published(driver, &device.pool),
            };
        }
        Ok(devices)
    }

    /// Reports a refused prepare on the claim and its pods. The pods of a claim that is not prepared are those that a moment ago were read
    /// with it; none, if it cannot be read now.
    pub(super) async fn report_refused_prepare(&self, claim: &ObjectRef, problem: &Problem) {
        if !is_reported(problem) {
            return;
        }
        let consumers = match self.parts.manager.kubelet.held_claim(&claim.uid) {
            Some(prepared) => prepared.consumers,
            None => {
                let reading =
                    self.parts
                        .source
                        .claim_with_uid(&claim.namespace, &claim.name, &claim.uid);
                // no error: the event is on the claim then, and not on its pods
                let read = tokio::time::timeout(CONSUMERS_WAIT, reading)
                    .await
                    .ok()
                    .and_then(Result::ok);
                let same = read.flatten().filter(|read| read.id.uid == claim.uid);
                same.map(|read| read.reserved_for).unwrap_or_default()
            }
        };
        (self.parts.on_refused)(&Refusal {
            action: "Prepare",
            claim,
            consumers: &consumers,
            problem,
        });
    }

    /// Reports a refused unprepare on the claim and its pods. `held`: what the kubelet held before the request. A retry, of which there are
    /// many, holds nothing any more and is not reported.
    pub(super) fn report_refused_unprepare(
        &self,
        driver: &DriverName,
        held: Option<KubeletClaim>,
        problem: &Problem,
    ) {
        let held = held.filter(|held| held.drivers.contains(driver) && is_reported(problem));
        if let Some(KubeletClaim {
            claim, consumers, ..
        }) = held
        {
            let message = format!("it cannot be unprepared: {}", problem.message);
            let problem = Problem {
                message,
                ..problem.clone()
            };
            let (claim, consumers, problem) = (&claim, &consumers, &problem);
            (self.parts.on_refused)(&Refusal {
                action: "Unprepare",
                claim,
                consumers,
                problem,
            });
        }
    }

    /// Drivers with which claims of the API server are prepared.
    pub(super) fn prepared_drivers(&self) -> BTreeSet<DriverName> {
        self.parts
            .manager
            .kubelet
            .held()
            .into_iter()
            .flat_map(|prepared| prepared.drivers)
            .collect()
    }

    /// Returns every claim for devices of the kubelet's device manager that is prepared or being prepared, including those from before a
    /// restart.
    pub(super) fn device_claims(&self) -> Vec<DeviceClaim> {
        let records = self
            .parts
            .manager
            .records
            .claims_in(&plugin_claim::namespace());
        let claims = records
            .iter()
            .filter_map(|record| self.device_claim(record));
        claims.collect()
    }

    /// Returns those of [`Self::device_claims`] that have any of these devices of a driver.
    pub(super) fn device_claims_with(
        &self,
        driver: &DriverName,
        ids: &BTreeSet<String>,
    ) -> Vec<DeviceClaim> {
        let records = &self.parts.manager.records;
        let mut claims = BTreeMap::new();
        for (pool, device) in ids.iter().filter_map(|id| split_id(id)) {
            for record in records.claims_with_device(driver, pool.as_str(), device.as_str()) {
                let claim = self.device_claim(&record);
                let claim = claim.filter(|claim| claim.driver == *driver);
                claims.extend(claim.map(|claim| (record.id.clone(), claim)));
            }
        }
        claims.into_values().collect()
    }

    fn device_claim(&self, record: &ClaimRecord) -> Option<DeviceClaim> {
        let devices = &record.allocation.devices;
        let driver = devices
            .first()
            .filter(|_| is_plugin_claim(&record.id))?
            .driver
            .clone();
        let devices = devices
            .iter()
            .map(|device| device_id(&device.pool, &device.device))
            .collect();
        Some(DeviceClaim {
            claim: record.id.clone(),
            driver,
            devices,
            requested: self.requested_at(&record.id.uid),
        })
    }

    /// Devices that the kubelet's device manager has allocated, and those that an Allocate under way may have.
    pub(super) fn allocated_devices(&self) -> DeviceIds {
        // The calls first: one that ends meanwhile has made its claim.
        let mut devices: DeviceIds = self.allocations.devices_under_way();
        for claim in self.device_claims() {
            devices.extend(
                claim
                    .devices
                    .into_iter()
                    .map(|id| (claim.driver.clone(), id)),
            );
        }
        devices
    }

    /// Pools with a device that a claim has, or that an Allocate under way may have.
    pub(super) fn pools_in_use(&self) -> PoolsInUse {
        // The calls first: one that ends meanwhile has made its claim.
        let under_way = self.allocations.devices_under_way();
        let mut pools = self.pool_use.lock();
        let seen = pools.seen();
        pools.follow(self.parts.manager.records.changes_since(seen));
        let mut in_use = pools.in_use();
        drop(pools);
        for (driver, id) in under_way {
            if let Some((pool, _)) = split_id(&id) {
                let by = in_use.entry(LocalPool { driver, pool }).or_default();
                by.insert(Mechanism::DevicePlugin);
            }
        }
        in_use
    }

    /// Returns whether a device, its hardware or its counters are held by a claim other than the device's own claim by the kubelet's device
    /// manager.
    pub(super) fn is_used_elsewhere(&self, driver: &DriverName, id: &str) -> bool {
        let Some((pool, device)) = split_id(id) else {
            return false;
        };
        let (manager, pool, device) = (&self.parts.manager, pool.as_str(), device.as_str());
        let own = manager.records.users_of_device(driver, pool, device);
        !manager
            .holds
            .holders_of_device(driver, pool, device)
            .iter()
            .all(|claim| is_plugin_claim(claim) && own.contains(claim))
    }
}

/// Returns whether a refusal is about the claim.
fn is_reported(problem: &Problem) -> bool {
    problem.code != ProblemCode::HandingOver && problem.code != ProblemCode::ClaimNotRead
}
