//! Extended resources between the node API's messages and the vocabulary.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_proto::node::v1;

use super::{SHOWN_CHARS_MAX, count, problem, wrong};
use nodedock_core::manager::devices::{
    Capacity, DeviceView, HintScope, ResourceHints, ResourceOutcome, ResourceSource, ResourceView,
    TopologyHint,
};
use nodedock_core::manager::{PodResource, PodView};
use nodedock_model::{ExtendedResource, Problem, Uid, limit};

/// How many devices of each resource a container is limited to.
pub(super) fn limits(
    container: &str,
    limits: &BTreeMap<String, u32>,
) -> Result<BTreeMap<ExtendedResource, u32>, Problem> {
    let field = || format!("containers[{}].extended_resources", shown(container));
    if limits.len() > limit::CONTAINER_RESOURCES_MAX {
        let message = format!(
            "{} has {} entries, and {} are the most",
            field(),
            limits.len(),
            limit::CONTAINER_RESOURCES_MAX
        );
        return Err(Problem::invalid("bad-request", message));
    }
    let parsed = limits.iter().map(|(name, count)| {
        let resource = ExtendedResource::new(name).map_err(|error| wrong(&field(), &error))?;
        if (1..=limit::RESOURCE_COUNT_MAX).contains(count) {
            return Ok((resource, *count));
        }
        let message =
            format!("{}: {count} of {resource}: 1 to {} are possible", field(), limit::RESOURCE_COUNT_MAX);
        Err(Problem::invalid("bad-request", message))
    });
    parsed.collect()
}

fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(SHOWN_CHARS_MAX).collect()
}

/// NUMA nodes, ascending and each once.
pub(super) fn numa_nodes(container: &str, nodes: &[u32]) -> Result<Vec<u32>, Problem> {
    let wrong = |what: String| {
        let message = format!(
            "containers[{}].numa_affinity: {what}; Linux numbers at most {} NUMA nodes",
            shown(container),
            limit::NUMA_NODES_OF_LINUX
        );
        Err(Problem::invalid("bad-request", message))
    };
    if nodes.len() > limit::NUMA_NODES_OF_LINUX as usize {
        return wrong(format!("{} entries", nodes.len()));
    }
    if let Some(node) = nodes.iter().find(|node| **node >= limit::NUMA_NODES_OF_LINUX) {
        return wrong(format!("there is no node {node}"));
    }
    Ok(nodes.iter().copied().collect::<BTreeSet<_>>().into_iter().collect())
}

/// What became of a resource; `done` is the word where it is as it was wanted.
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

/// What a pod has of a resource.
pub(super) fn held(resource: &PodResource) -> v1::ResourceOutcome {
    v1::ResourceOutcome {
        container: resource.container.clone(),
        resource: resource.resource.to_string(),
        device_ids: resource.devices.keys().cloned().collect(),
        outcome: resource.state.as_str().to_owned(),
        problem: None,
    }
}

/// Every resource; of what pods have, they are the truth, also while a plugin is away and lists nothing, or a driver has not given
/// up what a pod that left had of its pools.
pub fn capacity(capacity: &Capacity, pods: &[PodView]) -> v1::GetCapacityResponse {
    let mut allocated: BTreeMap<&ExtendedResource, BTreeSet<&str>> = BTreeMap::new();
    for held in pods.iter().flat_map(|pod| &pod.resources) {
        let ids = held.devices.keys().map(String::as_str);
        allocated.entry(&held.resource).or_default().extend(ids);
    }
    let resource = |view: &ResourceView| v1::Resource {
        name: view.name.to_string(),
        capacity: count(view.capacity()),
        allocatable: count(view.allocatable()),
        allocated: count(allocated.get(&view.name).map_or(0, BTreeSet::len)),
        active: view.active,
        driver: source(&view.source),
        numa_nodes: nodes_of(&view.devices),
    };
    v1::GetCapacityResponse {
        resources: capacity.resources.iter().map(resource).collect(),
        removed: capacity.removed.iter().map(ToString::to_string).collect(),
    }
}

fn source(source: &ResourceSource) -> String {
    match source {
        ResourceSource::Plugin(path) => path.display().to_string(),
        ResourceSource::Pools(driver) => driver.to_string(),
        ResourceSource::Remembered => String::new(),
    }
}

fn nodes_of(devices: &[DeviceView]) -> Vec<u32> {
    let nodes: BTreeSet<_> = devices.iter().flat_map(|view| view.device.numa_nodes.clone()).collect();
    nodes.into_iter().collect()
}

/// A device plugin's device, as one of the node's.
pub fn plugin_device(resource: &ResourceView, view: &DeviceView) -> v1::Device {
    v1::Device {
        driver: source(&resource.source),
        name: view.device.id.clone(),
        attributes_json: "{}".to_owned(),
        health: if view.device.healthy { "healthy" } else { "unhealthy" }.to_owned(),
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
        other => {
            let message = format!("scope: {:?} is neither container nor pod", shown(other));
            Err(Problem::invalid("bad-request", message))
        }
    }
}

pub fn hints(hints: &[ResourceHints]) -> v1::GetTopologyHintsResponse {
    let hint = |hint: &TopologyHint| v1::TopologyHint {
        numa_nodes: hint.numa_nodes.clone(),
        preferred: hint.preferred,
    };
    let resource = |of: &ResourceHints| v1::ResourceHints {
        container: of.container.clone(),
        resource: of.resource.to_string(),
        has_topology: of.hints.is_some(),
        hints: of.hints.iter().flatten().map(hint).collect(),
    };
    v1::GetTopologyHintsResponse { resources: hints.iter().map(resource).collect() }
}

/// The pod and a node's allocatable. What is no extended resource is left out: it is nothing that is allocated here.
pub fn cover_request(
    request: &v1::CoverAllocatedRequest,
) -> Result<(Uid, BTreeMap<ExtendedResource, u64>), Problem> {
    let pod = Uid::new(&request.pod_uid).map_err(|error| wrong("pod_uid", &error))?;
    let extended =
        |(name, count): (&String, &u64)| ExtendedResource::new(name).ok().map(|name| (name, *count));
    Ok((pod, request.allocatable.iter().filter_map(extended).collect()))
}

/// The node's allocatable as it came, with what was raised.
pub fn covered(
    request: v1::CoverAllocatedRequest,
    raised: BTreeMap<ExtendedResource, u64>,
) -> v1::CoverAllocatedResponse {
    let mut allocatable = request.allocatable;
    allocatable.extend(raised.into_iter().map(|(name, count)| (name.to_string(), count)));
    v1::CoverAllocatedResponse { allocatable }
}

pub fn start_request(request: v1::StartContainerRequest) -> Result<(Uid, String), Problem> {
    let pod = request.pod.ok_or_else(|| super::missing("pod"))?;
    let uid = Uid::new(&pod.uid).map_err(|error| wrong("pod.uid", &error))?;
    Ok((uid, super::label("container", &request.container)?))
}

#[cfg(test)]
#[path = "resources_tests.rs"]
mod tests;
