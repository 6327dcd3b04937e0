//! An adapter as a `ClaimDriver`: a prepare is an Allocate of the plugin for each request of the claim.

use std::sync::Arc;

use async_trait::async_trait;
use tokio::time::Instant;

use super::Adapters;
use crate::driver::plugin_calls::{self, within};
use crate::driver::{Call, ClaimDriver, DeviceDriver, Outcomes};
use nodedock_model::{
    AllocatedDevice, Condition, ContainerAllocation, DeviceAccess, DeviceNode, DeviceStatus,
    DriverClaim, DriverClaimRecord, DriverName, Edits, ExtendedResource, Mount, PathPatterns,
    PreparedClaim, PreparedDevice, Problem, ProblemCode, limit,
};

/// The condition of a device whose plugin answered with annotations.
const ANNOTATIONS: &str = "AnnotationsDelivered";

pub(super) struct AdapterDriver {
    adapters: Adapters,
    resource: ExtendedResource,
    /// One call of the plugin at a time.
    calling: Arc<tokio::sync::Mutex<()>>,
}

/// The devices of a request, and the plugin's IDs of them.
struct Group<'a> {
    request: &'a str,
    devices: Vec<&'a AllocatedDevice>,
    ids: Vec<String>,
}

/// The driver's name, the paths that are allowed, and the devices of each request.
type Asked<'a> = (DriverName, Option<PathPatterns>, Vec<Group<'a>>);

impl AdapterDriver {
    pub(super) fn new(
        adapters: Adapters,
        resource: ExtendedResource,
        calling: Arc<tokio::sync::Mutex<()>>,
    ) -> Self {
        Self {
            adapters,
            resource,
            calling,
        }
    }

    async fn prepare_claim(
        &self,
        call: &Call,
        until: Instant,
        claim: &DriverClaim,
    ) -> Result<PreparedClaim, Problem> {
        if let Some(config) = claim.configs.first() {
            let message = format!(
                "claim {} has parameters for request {:?}, and the device plugin of {} takes none",
                claim.id,
                config.requests.first().map_or("", String::as_str),
                self.resource
            );
            return Err(Problem::invalid(ProblemCode::AdapterParameters, message));
        }
        let (driver, paths, groups) = self.groups(claim)?;
        let plugin = self.adapters.plugin(&self.resource).ok_or_else(|| {
            let message = format!(
                "the device plugin of {}, which is driver {driver}, is not connected",
                self.resource
            );
            Problem::unavailable(ProblemCode::PluginGone, message)
        })?;
        let mut prepared = PreparedClaim::default();
        for group in groups {
            let (allocation, nodes) = self
                .allocate(call, until, plugin.as_ref(), &group, paths.as_ref())
                .await?;
            prepared.annotations.extend(allocation.annotations.clone());
            prepared.devices.extend(devices(&group, allocation, nodes));
        }
        Ok(prepared)
    }

    /// The devices of each request of a claim, in the claim's order.
    fn groups<'a>(&self, claim: &'a DriverClaim) -> Result<Asked<'a>, Problem> {
        let state = self.adapters.state();
        let Some(adapted) = state.adapted.get(&self.resource) else {
            return Err(Problem::unavailable(
                ProblemCode::AdapterUnknown,
                format!("{} has no adapter", self.resource),
            ));
        };
        let driver = adapted.adapter.driver.clone();
        let waits_for = adapted.waits_for(self.adapters.0.parts.has_kubelet);
        if !adapted.is_ready(self.adapters.0.parts.has_kubelet) {
            let message = format!(
                "driver {driver} is the device plugin of {}, and waits: {waits_for}",
                self.resource
            );
            return Err(Problem::unavailable(ProblemCode::DriverNotServing, message));
        }
        let identities = adapted.held_identities();
        let mut groups: Vec<Group<'a>> = Vec::new();
        for device in &claim.devices {
            let what = format!(
                "device {}/{} of driver {driver}",
                device.pool, device.device
            );
            if device.admin_access {
                let message = format!(
                    "{what}: a device plugin, as that of {}, knows no admin access",
                    self.resource
                );
                return Err(Problem::invalid(ProblemCode::AdapterParameters, message));
            }
            let id = adapted
                .id_of(&device.device)
                .filter(|_| device.pool == adapted.adapter.pool);
            let Some(id) = id else {
                let message = format!(
                    "{what} is not among the devices that the device plugin of {} lists",
                    self.resource
                );
                // A plugin that has just started may list it a moment later.
                return Err(Problem::unavailable(ProblemCode::DeviceUnknown, message));
            };
            if let Some(held) = adapted.holder(&id, &identities) {
                let same = if held == id {
                    ""
                } else {
                    ", which is the same hardware,"
                };
                let message = format!(
                    "{what} is in use: a pod has {held:?} of {}{same} from the time before the adapter",
                    self.resource
                );
                return Err(Problem::conflict(ProblemCode::DeviceHeld, message).with("device", &id));
            }
            let request = device.base_request();
            match groups.iter_mut().find(|group| group.request == request) {
                Some(group) => {
                    group.devices.push(device);
                    group.ids.push(id);
                }
                None => groups.push(Group {
                    request,
                    devices: vec![device],
                    ids: vec![id],
                }),
            }
        }
        Ok((driver, adapted.adapter.paths.clone(), groups))
    }

    fn check_paths(
        &self,
        allowed: Option<&PathPatterns>,
        allocation: &ContainerAllocation,
    ) -> Result<(), Problem> {
        let Some(allowed) = allowed else {
            return Ok(());
        };
        let mounts = allocation.mounts.iter().map(|mount| &mount.host_path);
        let nodes = allocation.device_nodes.iter().map(|node| &node.host_path);
        match mounts.chain(nodes).find(|path| !allowed.matches(path)) {
            None => Ok(()),
            Some(path) => {
                let message = format!(
                    "the answer of the device plugin of {} names {path}, which is not among the paths of its adapter",
                    self.resource
                );
                Err(Problem::denied(ProblemCode::AllocationPathDenied, message))
            }
        }
    }

    /// Calls the plugin as a kubelet's device manager does for a container. Returns the answer, and the device nodes that a runtime would
    /// find by it.
    async fn allocate(
        &self,
        call: &Call,
        until: Instant,
        plugin: &dyn DeviceDriver,
        group: &Group<'_>,
        paths: Option<&PathPatterns>,
    ) -> Result<(ContainerAllocation, Vec<DeviceNode>), Problem> {
        let resource = &self.resource;
        let _calling = within(until, resource, "a call before this one", async {
            Ok(self.calling.lock().await)
        })
        .await?;
        let remaining = || plugin_calls::remaining(&call.request_id, until);
        let hardware = &self.adapters.0.parts.hardware;
        let (answer, nodes) =
            plugin_calls::allocate(resource, plugin, &remaining(), &group.ids, hardware).await?;
        self.check_paths(paths, &answer)?;
        if plugin.options().pre_start_required {
            let until = until.min(Instant::now() + limit::PRE_START);
            within(
                until,
                resource,
                "PreStartContainer",
                plugin.pre_start(&remaining(), &group.ids),
            )
            .await?;
        }
        Ok((answer, nodes))
    }
}

/// The devices of a request. The answer is for all of them, so the first one has it: containers get a request's devices together.
fn devices(
    group: &Group<'_>,
    allocation: ContainerAllocation,
    nodes: Vec<DeviceNode>,
) -> Vec<PreparedDevice> {
    let status = (!allocation.annotations.is_empty()).then(|| undelivered(&allocation));
    let mut access = Some(access(allocation, nodes));
    group
        .devices
        .iter()
        .map(|device| PreparedDevice {
            requests: vec![group.request.to_owned()],
            pool: device.pool.clone(),
            device: device.device.clone(),
            share_id: device.share_id.clone(),
            access: access
                .take()
                .unwrap_or_else(|| DeviceAccess::Edits(Edits::default())),
            status: status.clone(),
            attributes: None,
        })
        .collect()
}

/// A kubelet has no way to a container for annotations of a DRA driver.
fn undelivered(allocation: &ContainerAllocation) -> DeviceStatus {
    let keys: Vec<_> = allocation.annotations.keys().map(String::as_str).collect();
    let message = format!(
        "containers get these annotations of the device plugin by the node API and by the kubelet's device manager alone: {}",
        keys.join(", ")
    );
    let condition = Condition {
        kind: ANNOTATIONS.to_owned(),
        status: Some(false),
        reason: "NotByClaims".to_owned(),
        message,
    };
    DeviceStatus {
        conditions: vec![condition],
        ..DeviceStatus::default()
    }
}

fn access(allocation: ContainerAllocation, device_nodes: Vec<DeviceNode>) -> DeviceAccess {
    let ContainerAllocation {
        env,
        mounts,
        device_nodes: _,
        cdi_devices,
        annotations: _,
    } = allocation;
    let edits = Edits {
        env: env.into_iter().collect(),
        device_nodes,
        mounts: mounts.into_iter().map(mount).collect(),
        ..Edits::default()
    };
    match (cdi_devices.is_empty(), edits.is_empty()) {
        (true, _) => DeviceAccess::Edits(edits),
        (false, true) => DeviceAccess::CdiDevices(cdi_devices),
        (false, false) => DeviceAccess::EditsAndCdiDevices(edits, cdi_devices),
    }
}

fn mount(mount: nodedock_model::AllocationMount) -> Mount {
    Mount {
        host_path: mount.host_path,
        container_path: mount.container_path,
        // As a kubelet's device manager has it mounted.
        options: [
            "rbind",
            "rprivate",
            if mount.read_only { "ro" } else { "rw" },
        ]
        .map(str::to_owned)
        .to_vec(),
        fs_type: None,
    }
}

#[async_trait]
impl ClaimDriver for AdapterDriver {
    async fn prepare(&self, call: &Call, claims: &[DriverClaim]) -> Outcomes<PreparedClaim> {
        let until = Instant::now() + call.deadline;
        let mut outcomes = Outcomes::new();
        for claim in claims {
            outcomes.insert(
                claim.id.uid.clone(),
                self.prepare_claim(call, until, claim).await,
            );
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
