//! The kubelet's claims at the claim manager: those of the API server, and those that stand for devices that the kubelet's device
//! manager allocated.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::device_plugins::{device_id, is_plugin_claim};
use super::{BridgeParts, NodePools, OnRefused};
use nodedock_base::tasks::Tasks;
use nodedock_core::manager::Manager;
use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_model::{Consumer, DriverName, KubeletDevice, ObjectRef, Problem};

/// What calls are answered while no instance serves.
const HANDING_OVER: &str = "handing-over";
/// A start takes about so long.
const HANDOVER_RETRY: Duration = Duration::from_secs(2);
/// For so long a refused claim's consumers are waited for, while the kubelet waits for its answer.
const CONSUMERS_WAIT: Duration = Duration::from_secs(2);

#[derive(Clone)]
pub(super) struct KubeletClaims {
    claims: Arc<Manager>,
    pools: NodePools,
    source: Arc<dyn ClaimSource>,
    on_refused: OnRefused,
    /// Stopped when another instance takes over.
    serving: Tasks,
}

/// A claim that stands for devices of the kubelet's device manager.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeviceClaim {
    pub(super) claim: ObjectRef,
    pub(super) driver: DriverName,
    /// By `device_id`.
    pub(super) devices: BTreeSet<String>,
}

impl KubeletClaims {
    pub(super) fn new(parts: &BridgeParts, serving: Tasks) -> Self {
        Self {
            claims: parts.claims.clone(),
            pools: parts.pools.clone(),
            source: parts.source.clone(),
            on_refused: parts.on_refused.clone(),
            serving,
        }
    }

    /// The claim manager. Fails while another instance takes over: the kubelet retries, and finds that one.
    pub(super) fn manager(&self) -> Result<&Arc<Manager>, Problem> {
        if !self.serving.is_stopping() {
            return Ok(&self.claims);
        }
        let message = "the daemon stops, or a newer instance takes over just now";
        Err(Problem::unavailable(HANDING_OVER, message).retry_after(HANDOVER_RETRY))
    }

    /// Prepares a claim of the API server with one driver. May be repeated at any time.
    pub(super) async fn prepare(
        &self,
        driver: &DriverName,
        claim: &ObjectRef,
        request_id: Arc<str>,
    ) -> Result<Vec<KubeletDevice>, Problem> {
        let devices = self.manager()?.prepare_for_kubelet(driver, claim, request_id).await?;
        let prepared_by = || {
            let record = self.claims.claims().into_iter().find(|record| record.id.uid == claim.uid)?;
            record.drivers.get(driver)?.by.as_ref().map(|by| by.kind)
        };
        Ok(self.pools.publish_devices(driver, devices, prepared_by))
    }

    /// Reports a refusal on the claim and its pods, unless it says nothing about them.
    pub(super) async fn report_refusal(&self, claim: &ObjectRef, problem: &Problem) {
        if problem.code == HANDING_OVER || problem.code == "claim-not-read" {
            return;
        }
        let prepared = self.claims.held_for_kubelet();
        let consumers = match prepared.into_iter().find(|prepared| prepared.claim.uid == claim.uid) {
            Some(prepared) => prepared.consumers,
            None => self.reserved_for(claim).await,
        };
        (self.on_refused)(claim, &consumers, problem);
    }

    /// The consumers by what was read a moment ago; none, if the claim cannot be read now.
    async fn reserved_for(&self, claim: &ObjectRef) -> Vec<Consumer> {
        let reading = self.source.claim_with_uid(&claim.namespace, &claim.name, &claim.uid);
        let read = tokio::time::timeout(CONSUMERS_WAIT, reading).await.ok().and_then(Result::ok).flatten();
        let same = read.filter(|read| read.id.uid == claim.uid);
        same.map(|read| read.reserved_for).unwrap_or_default()
    }

    /// Drivers with which claims of the API server are prepared.
    pub(super) fn prepared_drivers(&self) -> BTreeSet<DriverName> {
        self.claims.held_for_kubelet().into_iter().flat_map(|prepared| prepared.drivers).collect()
    }

    /// Every claim that stands for devices, prepared or on its way, also from before a restart.
    pub(super) fn device_claims(&self) -> Vec<DeviceClaim> {
        let records = self.claims.claims().into_iter().filter(|record| is_plugin_claim(&record.id));
        let claims = records.filter_map(|record| {
            let devices = &record.allocation.devices;
            let driver = devices.first()?.driver.clone();
            let devices = devices.iter().map(|device| device_id(&device.pool, &device.device)).collect();
            Some(DeviceClaim { claim: record.id.clone(), driver, devices })
        });
        claims.collect()
    }

    /// Whether a device is in a claim that does not stand for devices of the kubelet's device manager.
    pub(super) fn is_used_elsewhere(&self, driver: &DriverName, pool: &str, device: &str) -> bool {
        let users = self.claims.holders_of_device(driver, pool, device);
        !users.is_empty() && !users.iter().any(is_plugin_claim)
    }
}
