//! A device plugin without an adapter as the driver of the claims that pods have for its resource: a prepare is an Allocate of the plugin.

use std::collections::BTreeSet;
use std::sync::{Arc, Weak};

use async_trait::async_trait;
use tokio::time::Instant;

use super::Devices;
use crate::driver::plugin_calls::{self, within};
use crate::driver::{Call, ClaimDriver, DeviceDriver, Driver, DriverIdentity, Outcomes};
use crate::manager::pool_claims;
use crate::manager::request::interrupted;
use crate::records::RecordStore;
use crate::resources::Offer;
use nodedock_model::{
    ClaimRecord, DeviceAccess, DriverClaim, DriverClaimRecord, ExtendedResource, PluginAnswer,
    PreparedClaim, Problem, ProblemCode, plugin_driver,
};

pub(super) struct PluginDriver {
    records: Arc<RecordStore>,
    devices: Weak<Devices>,
    resource: ExtendedResource,
}

impl PluginDriver {
    fn driver(devices: &Arc<Devices>, resource: &ExtendedResource) -> Driver {
        let identity = DriverIdentity::of_device_plugin(
            plugin_driver(resource),
            resource,
            source_of(resource),
        );
        let claims = Arc::new(Self {
            records: devices.records.clone(),
            devices: Arc::downgrade(devices),
            resource: resource.clone(),
        });
        Driver {
            identity: Arc::new(identity),
            claims: Some(claims),
            inventory: None,
        }
    }

    async fn prepare_claim(
        &self,
        call: &Call,
        until: Instant,
        claim: &DriverClaim,
    ) -> Result<PreparedClaim, Problem> {
        let (devices, resource) = (
            self.devices.upgrade().ok_or_else(interrupted)?,
            &self.resource,
        );
        let known = self.records.table().claim(claim.id.uid.as_str()).cloned();
        let of = known
            .and_then(|known| known.resource.clone())
            .filter(|of| of.resource == *resource);
        let of = of.ok_or_else(|| {
            let message = format!(
                "claim {} is for the device plugin of {resource}, which has no adapter: containers get its devices by their limits alone",
                claim.id
            );
            Problem::invalid(ProblemCode::AdapterUnknown, message)
        })?;
        let plugin = devices
            .plugin(resource)
            .ok_or_else(|| no_plugin(resource))?;
        let ids: Vec<_> = of.devices.into_keys().collect();
        let started = Instant::now();
        let call = plugin_calls::remaining(&call.request_id, until);
        let hardware = &devices.settings.hardware;
        let answer = plugin_calls::allocate(resource, plugin.as_ref(), &call, &ids, hardware).await;
        devices.metrics.allocated(resource, started.elapsed());
        let (allocation, nodes) = answer?;
        let pre_start = plugin.options().pre_start_required;
        Ok(PluginAnswer {
            allocation,
            pre_start,
            nodes,
        }
        .prepared(&claim.devices))
    }
}

#[async_trait]
impl ClaimDriver for PluginDriver {
    async fn prepare(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let until = Instant::now() + call.deadline;
        let mut outcomes = Outcomes::new();
        let mut claims: Vec<_> = claims.iter().collect();
        {
            let table = self.records.table();
            claims.sort_by_cached_key(|claim| pool_claims::place(&table, &claim.id.uid));
        }
        for claim in claims {
            let prepared = self.prepare_claim(call, until, claim).await;
            if let Err(problem) = &prepared {
                let (resource, claim, request) = (&self.resource, &claim.id, &call.request_id);
                tracing::warn!(%resource, %claim, %request, code = problem.code, %problem, "devices not allocated");
            }
            outcomes.insert(claim.id.uid.clone(), prepared);
        }
        outcomes
    }

    /// The protocol has no counterpart: the devices are free when the claim is.
    async fn unprepare(&self, _: &Call, claims: &[DriverClaimRecord]) -> Outcomes<()> {
        claims
            .iter()
            .map(|live| (live.claim.id.uid.clone(), Ok(())))
            .collect()
    }
}

/// The registry's source of a device plugin without an adapter.
fn source_of(resource: &ExtendedResource) -> String {
    format!("device plugin {resource} without adapter")
}

pub(super) fn no_plugin(resource: &ExtendedResource) -> Problem {
    Problem::unavailable(
        ProblemCode::PluginGone,
        format!("the plugin of {resource} is not connected"),
    )
}

impl Devices {
    /// Makes the plugin of a resource the driver of the claims that pods have for it.
    pub(super) fn serve_plugin(self: &Arc<Self>, resource: &ExtendedResource) {
        let driver = PluginDriver::driver(self, resource);
        if self.registry.serving(&driver.identity.name).is_ok() {
            return;
        }
        if let Err(other) = self.registry.serve(&source_of(resource), driver) {
            // No driver is allowed a name of that domain.
            tracing::error!(%resource, other, "the name of a device plugin's driver is taken");
        }
    }

    /// Serves the plugins of which pods had devices before the start: they are freed without their plugin.
    pub(super) fn serve_plugins_of_claims(self: &Arc<Self>) {
        let resources: BTreeSet<_> = {
            let table = self.records.table();
            let of_plugins = table.claims().filter(|claim| claim.is_of_plugin());
            of_plugins
                .filter_map(|claim| Some(claim.resource.as_ref()?.resource.clone()))
                .collect()
        };
        resources
            .iter()
            .for_each(|resource| self.serve_plugin(resource));
    }

    /// The native device plugin of a resource, while it is connected.
    pub fn plugin(&self, resource: &ExtendedResource) -> Option<Arc<dyn DeviceDriver>> {
        let known = {
            let offer = self.offer(resource).filter(Offer::is_active);
            offer.and_then(|offer| offer.plugin.map(|(_, driver)| driver))
        };
        // Pods that had its devices before it was adapted have them by its own IDs.
        known.or_else(|| self.adapters.as_ref()?.plugin(resource))
    }

    /// Calls the plugin of a claim before a container of it starts, if the plugin wants that.
    pub(in crate::manager) async fn pre_start(
        &self,
        claim: &ClaimRecord,
        request_id: &Arc<str>,
    ) -> Result<(), Problem> {
        let Some(of) = claim.resource.as_ref().filter(|_| claim.is_of_plugin()) else {
            return Ok(());
        };
        let resource = &of.resource;
        let Some(driver) = self.plugin(resource) else {
            // The plugin's options at the allocation still count.
            let prepared = claim.drivers.values().filter_map(|part| part.current());
            let mut answers = prepared.flat_map(|prepared| &prepared.devices);
            let is_wanted = answers
                .any(|d| matches!(&d.access, DeviceAccess::Plugin(answer) if answer.pre_start));
            return if is_wanted {
                Err(no_plugin(resource))
            } else {
                Ok(())
            };
        };
        if !driver.options().pre_start_required {
            return Ok(());
        }
        let ids: Vec<_> = of.devices.keys().cloned().collect();
        let until = Instant::now() + self.settings.pre_start_deadline;
        let call = plugin_calls::remaining(request_id, until);
        within(
            until,
            resource,
            "PreStartContainer",
            driver.pre_start(&call, &ids),
        )
        .await
    }
}
