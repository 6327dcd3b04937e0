//! Converts extended resources between the node API's messages and the model.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_proto::node::v1;

use super::{bounded, count, invalid, label, missing, name, problem, shown};
use nodedock_core::adapters::AdapterView;
use nodedock_core::manager::devices::{
    Capacity, DeviceView, HintScope, ResourceHints, ResourceOutcome, ResourceSource, ResourceView,
};
use nodedock_core::manager::{PodResource, PodView};
use nodedock_core::pools::NodePools;
use nodedock_kube::extended_resources::{LocalPool, Mechanism, Mechanisms};
use nodedock_model::{DriverName, ExtendedResource, Problem, Uid, limit};

/// Checks how many devices of each resource a container is limited to.
pub(super) fn limits(
    container: &str,
    limits: &BTreeMap<String, u32>,
) -> Result<BTreeMap<ExtendedResource, u32>, Problem> {
    let field = format!("containers[{}].extended_resources", shown(container));
    bounded(&field, limits.len(), limit::CONTAINER_RESOURCES_MAX)?;
    // Of more than a plugin can list there are too few in any case.
    let max = limit::RESOURCE_DEVICES_MAX as u32;
    let checked = limits
        .iter()
        .map(|(resource, count)| match name(&field, resource)? {
            resource if (1..=max).contains(count) => Ok((resource, *count)),
            resource => Err(invalid(format!(
                "{field}: {count} of {resource}: 1 to {max} are possible"
            ))),
        });
    checked.collect()
}

/// Checks NUMA nodes, and returns them ascending and each once.
pub(super) fn numa_nodes(container: &str, nodes: &[u32]) -> Result<Vec<u32>, Problem> {
    let max = limit::NUMA_NODE_ID_MAX + 1;
    let wrong = |what: String| {
        let field = format!("containers[{}].numa_affinity", shown(container));
        Err(invalid(format!(
            "{field}: {what}; Linux numbers at most {max} NUMA nodes"
        )))
    };
    if nodes.len() > max as usize {
        return wrong(format!("{} entries", nodes.len()));
    }
    if let Some(node) = nodes.iter().find(|node| **node >= max) {
        return wrong(format!("there is no node {node}"));
    }
    Ok(nodes
        .iter()
        .copied()
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect())
}

/// Converts the outcome of a resource; `done` is the word for success.
pub(super) fn outcome(outcome: &ResourceOutcome, done: &str) -> v1::ResourceOutcome {
    let (device_ids, word, refused) = match &outcome.end {
        Ok(devices) => (devices.keys().cloned().collect(), done, None),
        Err(refused) => (Vec::new(), "refused", Some(problem(refused))),
    };
    v1::ResourceOutcome {
        container: outcome.container.clone(),
        resource: outcome.resource.to_string(),
        device_ids,
        outcome: word.to_owned(),
        problem: refused,
    }
}

pub(super) fn held(resource: &PodResource) -> v1::ResourceOutcome {
    v1::ResourceOutcome {
        container: resource.container.clone(),
        resource: resource.resource.to_string(),
        device_ids: resource.devices.keys().cloned().collect(),
        outcome: resource.state.as_str().to_owned(),
        problem: None,
    }
}

/// Counts every resource. Allocated devices are counted by the pods' records, which hold while a plugin is unreachable and lists no
/// devices, and until a driver has unprepared the devices of a removed pod; and by the claims for devices of a pool, as those of a kubelet.
pub fn capacity(
    capacity: &Capacity,
    pods: &[PodView],
    is_claimed: impl Fn(&DriverName, &str) -> bool,
) -> v1::GetCapacityResponse {
    let mut allocated: BTreeMap<&ExtendedResource, BTreeSet<&str>> = BTreeMap::new();
    for held in pods.iter().flat_map(|pod| &pod.resources) {
        let ids = held.devices.keys().map(String::as_str);
        allocated.entry(&held.resource).or_default().extend(ids);
    }
    for view in &capacity.resources {
        let ResourceSource::Pools(driver) = &view.source else {
            continue;
        };
        let ids = view.devices.iter().map(|view| view.device.id.as_str());
        allocated
            .entry(&view.name)
            .or_default()
            .extend(ids.filter(|id| is_claimed(driver, id)));
    }
    v1::GetCapacityResponse {
        resources: capacity
            .resources
            .iter()
            .map(|view| v1::Resource {
                name: view.name.to_string(),
                capacity: count(view.capacity()),
                allocatable: count(view.allocatable()),
                allocated: count(allocated.get(&view.name).map_or(0, BTreeSet::len)),
                active: view.active,
                driver: source(&view.source),
                numa_nodes: nodes_of(&view.devices),
                ..v1::Resource::default()
            })
            .collect(),
        removed: capacity.removed.iter().map(ToString::to_string).collect(),
    }
}

/// Sets by which mechanism each resource is offered. One that has no driver and no plugin now is offered by none.
pub fn set_mechanisms(
    answer: &mut v1::GetCapacityResponse,
    mechanisms: &Mechanisms,
    disabled: &BTreeSet<DriverName>,
) {
    for resource in answer
        .resources
        .iter_mut()
        .filter(|resource| !resource.driver.is_empty())
    {
        let of_driver = DriverName::new(&resource.driver)
            .ok()
            .zip(ExtendedResource::new(&resource.name).ok());
        let Some((driver, name)) = of_driver else {
            resource.mechanism = Mechanism::DevicePlugin.to_string();
            resource.mechanism_reason = "it is of a native device plugin".to_owned();
            continue;
        };
        let pools: Vec<_> = mechanisms.of_resource(&driver, &name).collect();
        let offered: BTreeSet<_> = pools.iter().map(|pool| pool.offered).collect();
        let shown = offered
            .iter()
            .map(|offered| offered.map_or("none", Mechanism::as_str));
        resource.mechanism = if pools.is_empty() {
            "none".to_owned()
        } else {
            shown.collect::<Vec<_>>().join(",")
        };
        let waits = pools
            .iter()
            .map(|pool| &pool.waits_for)
            .find(|waits_for| !waits_for.is_empty());
        let decided = mechanisms
            .decision
            .as_ref()
            .map(|decision| decision.reason.clone());
        resource.mechanism_reason = match waits {
            Some(waits_for) => format!("it waits for {waits_for}"),
            None if disabled.contains(&driver) => "an operator disabled its adapter".to_owned(),
            None => decided.unwrap_or_else(|| {
                "it waits for the versions of API server and kubelet".to_owned()
            }),
        };
    }
}

/// `mechanisms`: of a Kubernetes node.
pub fn adapter(
    view: &AdapterView,
    pools: &NodePools,
    mechanisms: Option<&Mechanisms>,
) -> v1::Adapter {
    let pool = LocalPool {
        driver: view.driver.clone(),
        pool: view.pool.clone(),
    };
    let status = mechanisms.and_then(|mechanisms| mechanisms.pools.get(&pool));
    let waits_for = match (view.waits_for.as_str(), status) {
        ("", Some(status)) if !status.waits_for.is_empty() => {
            format!("the pool waits for {}", status.waits_for)
        }
        (waits_for, _) => waits_for.to_owned(),
    };
    let mechanism = status
        .and_then(|status| status.offered)
        .map(|of| of.to_string());
    v1::Adapter {
        driver: view.driver.to_string(),
        resource: view.resource.to_string(),
        pool: pools.published(&view.driver, &view.pool).to_string(),
        source: view.source.clone(),
        enabled: view.enabled,
        removed: view.is_removed,
        connected: view.is_connected,
        devices: count(view.devices),
        held: view.held.iter().cloned().collect(),
        mechanism: mechanisms
            .map(|_| mechanism.unwrap_or_else(|| "none".to_owned()))
            .unwrap_or_default(),
        reason: waits_for,
    }
}

/// Returns a driver's name, or the path of a device plugin's socket.
pub fn source(source: &ResourceSource) -> String {
    match source {
        ResourceSource::Plugin(path) => path.display().to_string(),
        ResourceSource::Pools(driver) => driver.to_string(),
        ResourceSource::Remembered => String::new(),
    }
}

fn nodes_of(devices: &[DeviceView]) -> Vec<u32> {
    let nodes: BTreeSet<_> = devices
        .iter()
        .flat_map(|view| view.device.numa_nodes.clone())
        .collect();
    nodes.into_iter().collect()
}

pub fn plugin_device(resource: &ResourceView, view: &DeviceView) -> v1::Device {
    v1::Device {
        driver: source(&resource.source),
        name: view.device.id.clone(),
        attributes_json: "{}".to_owned(),
        health: if view.device.healthy {
            "healthy"
        } else {
            "unhealthy"
        }
        .to_owned(),
        extended_resource: resource.name.to_string(),
        numa_nodes: view.device.numa_nodes.clone(),
        pods: view.pods.iter().map(super::object_message).collect(),
        ..v1::Device::default()
    }
}

pub fn hint_scope(scope: &str) -> Result<HintScope, Problem> {
    match scope {
        "" | "container" => Ok(HintScope::Container),
        "pod" => Ok(HintScope::Pod),
        other => Err(invalid(format!(
            "scope: {:?} is neither container nor pod",
            shown(other)
        ))),
    }
}

pub fn hints(hints: &[ResourceHints]) -> v1::GetTopologyHintsResponse {
    v1::GetTopologyHintsResponse {
        resources: hints
            .iter()
            .map(|of| v1::ResourceHints {
                container: of.container.clone(),
                resource: of.resource.to_string(),
                has_topology: of.hints.is_some(),
                hints: of
                    .hints
                    .iter()
                    .flatten()
                    .map(|hint| v1::TopologyHint {
                        numa_nodes: hint.numa_nodes.clone(),
                        preferred: hint.preferred,
                    })
                    .collect(),
            })
            .collect(),
    }
}

/// Returns the pod and the extended resources of a node's allocatable; no other resource is allocated here.
pub fn cover_request(
    request: &v1::CoverAllocatedRequest,
) -> Result<(Uid, BTreeMap<ExtendedResource, u64>), Problem> {
    Ok((
        name("pod_uid", &request.pod_uid)?,
        request
            .allocatable
            .iter()
            .filter_map(|(name, count)| ExtendedResource::new(name).ok().map(|name| (name, *count)))
            .collect(),
    ))
}

/// Returns the node's allocatable with the raised values.
pub fn covered(
    request: v1::CoverAllocatedRequest,
    raised: BTreeMap<ExtendedResource, u64>,
) -> v1::CoverAllocatedResponse {
    let mut allocatable = request.allocatable;
    allocatable.extend(
        raised
            .into_iter()
            .map(|(name, count)| (name.to_string(), count)),
    );
    v1::CoverAllocatedResponse { allocatable }
}

pub fn start_request(request: v1::StartContainerRequest) -> Result<(Uid, String), Problem> {
    let pod = request.pod.ok_or_else(|| missing("pod"))?;
    Ok((
        name("pod.uid", &pod.uid)?,
        label("container", &request.container)?,
    ))
}

#[cfg(test)]
#[path = "resources_tests.rs"]
mod tests;
