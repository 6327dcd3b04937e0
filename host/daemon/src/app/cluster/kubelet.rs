//! The claim manager as the faces to a cluster see it: their ports, and no decisions.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;

use super::gate::{Gate, HANDING_OVER};
use super::pools::Pools;
use nodedock_core::manager::Manager;
use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_kube::bridge::plugins::{
    HeldDevices, PluginClaims, PreparedDevices, device_id, is_plugin_claim,
};
use nodedock_kube::bridge::{Bridge, BridgeClaims, DriverBridgeStatus, Registration};
use nodedock_kube::events::Events;
use nodedock_kube::reconcile::HeldClaims;
use nodedock_model::{Claim, Consumer, DriverName, KubeletClaim, KubeletDevice, ObjectRef, Problem, Uid};

/// The kubelet waits for its answer meanwhile.
const CONSUMERS_WAIT: Duration = Duration::from_secs(2);

/// Given to the bridge, the device plugins and the reconcile.
pub(super) struct KubeletClaims {
    pub(super) claims: Arc<Manager>,
    pub(super) pools: Pools,
    pub(super) gate: Gate,
    pub(super) events: Events,
    /// Says for whom a claim that was refused is reserved.
    pub(super) source: Arc<dyn ClaimSource>,
    /// Says whether a kubelet is connected; set when it is there.
    pub(super) bridge: OnceLock<Bridge>,
}

impl KubeletClaims {
    /// A refusal is told on the claim and its pods, unless it says nothing of them.
    async fn tell(&self, claim: &ObjectRef, problem: &Problem) {
        if problem.code == HANDING_OVER || problem.code == "claim-not-read" {
            return;
        }
        let held = self.claims.held_for_kubelet();
        let consumers = match held.into_iter().find(|held| held.claim.uid == claim.uid) {
            Some(held) => held.consumers,
            None => self.reserved_for(claim).await,
        };
        self.events.refused(claim, &consumers, problem);
    }

    /// By what was read a moment ago; what cannot be read now is told of on the claim alone.
    async fn reserved_for(&self, claim: &ObjectRef) -> Vec<Consumer> {
        let reading = self.source.claim_with_uid(&claim.namespace, &claim.name, &claim.uid);
        let read = tokio::time::timeout(CONSUMERS_WAIT, reading).await.ok().and_then(Result::ok).flatten();
        let same = read.filter(|read| read.id.uid == claim.uid);
        same.map(|read| read.reserved_for).unwrap_or_default()
    }
}

#[async_trait]
impl BridgeClaims for KubeletClaims {
    async fn prepare(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<Vec<KubeletDevice>, Problem> {
        self.gate.pass()?;
        let devices = self.claims.prepare_for_kubelet(driver, claim, request_id).await?;
        let prepared_by = || {
            let record = self.claims.claims().into_iter().find(|record| record.id.uid == claim.uid)?;
            record.drivers.get(driver)?.by.as_ref().map(|by| by.kind)
        };
        Ok(self.pools.answered(driver, devices, prepared_by))
    }

    async fn refused(&self, claim: &ObjectRef, problem: &Problem) {
        self.tell(claim, problem).await;
    }

    async fn unprepare(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<(), Problem> {
        self.gate.pass()?;
        self.claims.unprepare_for_kubelet(driver, claim, request_id).await
    }

    fn held_drivers(&self) -> BTreeSet<DriverName> {
        self.claims.held_for_kubelet().into_iter().flat_map(|held| held.drivers).collect()
    }
}

#[async_trait]
impl PluginClaims for KubeletClaims {
    async fn prepare(
        &self,
        driver: &DriverName,
        claim: Claim,
        request_id: Arc<str>,
    ) -> Result<PreparedDevices, Problem> {
        self.gate.pass()?;
        let prepared = self.claims.prepare_given_for_kubelet(driver, claim, request_id).await?;
        Ok(PreparedDevices { devices: prepared.devices, annotations: prepared.annotations })
    }

    async fn unprepare(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<(), Problem> {
        self.gate.pass()?;
        self.claims.unprepare_for_kubelet(driver, claim, request_id).await
    }

    fn held(&self) -> Vec<HeldDevices> {
        let records = self.claims.claims().into_iter().filter(|record| is_plugin_claim(&record.id));
        let held = records.filter_map(|record| {
            let devices = &record.allocation.devices;
            let driver = devices.first()?.driver.clone();
            let devices = devices.iter().map(|device| device_id(&device.pool, &device.device)).collect();
            Some(HeldDevices { claim: record.id.clone(), driver, devices })
        });
        held.collect()
    }
}

#[async_trait]
impl HeldClaims for KubeletClaims {
    fn held(&self) -> Vec<KubeletClaim> {
        self.claims.held_for_kubelet()
    }

    fn kubelet_is_here(&self) -> bool {
        let statuses = self.bridge.get().map(Bridge::status).unwrap_or_default();
        // A connection alone may be that of a probe.
        let is_at_a_kubelet = |status: &DriverBridgeStatus| {
            status.connections > 0 && matches!(status.registration, Registration::Registered { .. })
        };
        statuses.iter().any(is_at_a_kubelet)
    }

    async fn give_up(&self, claim: &Uid, why: &str) -> Result<(), Problem> {
        self.gate.pass()?;
        self.claims.unprepare_all_for_kubelet(claim, why).await
    }
}
