//! The CDI driver as a `ClaimDriver`: a prepare answers with names of the vendors' specs, or with a copy of their edits.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, timeout_at};

use super::CdiAnswer;
use super::look::{CdiDevices, absent};
use super::merge::CdiDevice;
use crate::driver::{Call, ClaimDriver, Outcomes};
use crate::hardware::{Hardware, leads_nowhere};
use crate::sysfs::blocking::blocking;
use crate::sysfs::read_stuck;
use nodedock_model::{
    AllocatedDevice, DeviceAccess, DriverClaim, DriverClaimRecord, DriverName, Edits, NodeKind,
    PreparedClaim, PreparedDevice, Problem, ProblemCode,
};

/// Time for a look at the nodes of a claim.
const NODES_WALL: Duration = Duration::from_secs(5);

pub(super) struct CdiClaims {
    pub(super) driver: DriverName,
    pub(super) answer: CdiAnswer,
    pub(super) hardware: Hardware,
    /// `None`: the specs were not read yet.
    pub(super) devices: watch::Receiver<Option<Arc<CdiDevices>>>,
    pub(super) looks: Arc<Semaphore>,
}

impl CdiClaims {
    async fn prepare_claim(
        &self,
        until: Instant,
        claim: &DriverClaim,
    ) -> Result<PreparedClaim, Problem> {
        if !claim.configs.is_empty() {
            let message = format!(
                "claim {} has parameters, and the driver {} takes none",
                claim.id, self.driver
            );
            return Err(Problem::invalid(ProblemCode::BadRequest, message));
        }
        let devices = self.devices(until).await?;
        let mut found = Vec::new();
        for device in &claim.devices {
            found.push((device.clone(), self.find(&devices, device)?));
        }
        let (hardware, answer) = (self.hardware.clone(), self.answer);
        blocking(&self.looks, NODES_WALL, read_stuck, move || {
            prepared(&hardware, answer, &found)
        })
        .await
    }

    /// Waits for the first look after a start.
    async fn devices(&self, until: Instant) -> Result<Arc<CdiDevices>, Problem> {
        let mut devices = self.devices.clone();
        let looked = timeout_at(until, devices.wait_for(Option::is_some)).await;
        let devices = looked.ok().and_then(|looked| looked.ok()?.clone());
        devices.ok_or_else(|| {
            let message = format!(
                "the driver {} has not read its CDI specs, or is not in the config any more",
                self.driver
            );
            Problem::unavailable(ProblemCode::DriverNotServing, message)
        })
    }

    fn find(&self, devices: &CdiDevices, wanted: &AllocatedDevice) -> Result<CdiDevice, Problem> {
        let (pool, device) = (&wanted.pool, &wanted.device);
        let what = format!("device {pool}/{device} of driver {}", self.driver);
        let Some(found) = devices.get(&(pool.clone(), device.clone())) else {
            let message = format!("{what} is in no CDI spec");
            return Err(Problem::unavailable(ProblemCode::DeviceUnknown, message));
        };
        match &found.file.refused {
            None => Ok(found.clone()),
            Some(why) => {
                let message = format!("{what} cannot be prepared: {why}");
                Err(Problem::unavailable(ProblemCode::CdiSpecInvalid, message))
            }
        }
    }
}

/// Blocks: it looks at the device nodes.
fn prepared(
    hardware: &Hardware,
    answer: CdiAnswer,
    devices: &[(AllocatedDevice, CdiDevice)],
) -> Result<PreparedClaim, Problem> {
    let files: BTreeSet<_> = devices.iter().map(|(_, found)| &found.file.path).collect();
    let mut prepared = PreparedClaim::default();
    for (allocated, found) in devices {
        let qualified = found.qualified();
        let mut edits = located(hardware, &qualified, found.edits.clone())?;
        let common = located(
            hardware,
            &qualified,
            found.file.spec.container_edits.clone(),
        )?;
        let access = match answer {
            CdiAnswer::Names => DeviceAccess::CdiDevices(vec![qualified]),
            CdiAnswer::Edits if files.len() == 1 => {
                prepared.edits = common;
                DeviceAccess::Edits(edits)
            }
            // A container may use the devices of one file only.
            CdiAnswer::Edits => {
                edits.extend(common);
                DeviceAccess::Edits(edits)
            }
        };
        prepared.devices.push(PreparedDevice {
            requests: vec![allocated.base_request().to_owned()],
            pool: allocated.pool.clone(),
            device: allocated.device.clone(),
            share_id: allocated.share_id.clone(),
            access,
            status: None,
            attributes: None,
        });
    }
    Ok(prepared)
}

/// Returns edits with the type and numbers of each node as it is now.
fn located(hardware: &Hardware, device: &str, mut edits: Edits) -> Result<Edits, Problem> {
    for node in &mut edits.device_nodes {
        let path = node.node_path().to_owned();
        let found = hardware
            .resolve(&path)
            .and_then(|resolved| Ok(hardware.node(&resolved)?.map(|found| (resolved, found))));
        let (resolved, found) = match found {
            Ok(Some(found)) => found,
            Err(error) if !leads_nowhere(&error) => {
                let message = format!("the CDI device {device} has the node {path}: {error}");
                return Err(Problem::unavailable(ProblemCode::IoError, message));
            }
            Ok(None) | Err(_) => {
                let message = format!("the CDI device {device} is gone: {}", absent(&path));
                return Err(Problem::unavailable(ProblemCode::NoSuchNode, message));
            }
        };
        if resolved != path {
            node.host_path = Some(resolved);
        }
        let has_numbers = found.kind != NodeKind::Fifo;
        node.kind = Some(found.kind);
        (node.major, node.minor) = (
            has_numbers.then_some(found.major),
            has_numbers.then_some(found.minor),
        );
    }
    Ok(edits)
}

#[async_trait]
impl ClaimDriver for CdiClaims {
    async fn prepare(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let until = Instant::now() + call.deadline;
        let mut outcomes = Outcomes::new();
        for claim in claims {
            let outcome = self.prepare_claim(until, claim).await;
            outcomes.insert(claim.id.uid.clone(), outcome);
        }
        outcomes
    }

    /// Nothing was changed on the node.
    async fn unprepare(&self, _: &Call, claims: &[DriverClaimRecord]) -> Outcomes<()> {
        let claims = claims.iter();
        claims
            .map(|live| (live.claim.id.uid.clone(), Ok(())))
            .collect()
    }
}
