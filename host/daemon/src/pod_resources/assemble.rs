//! Composes the answers from the records of pods. Pure.

use nodedock_proto::kubelet::pod_resources::{v1, v1alpha1};

use nodedock_core::cdi;
use nodedock_core::manager::devices::Capacity;
use nodedock_core::manager::{PodResource, PodView, ResourceState};
use nodedock_core::pools::NodePools;
use nodedock_model::{ClaimRecord, ClaimState, ContainerKind, DriverName, PreparedDevice};

/// A pod with its containers and sidecars; ordinary init containers have ended, or will before the others start.
pub(super) fn pod(view: &PodView, pools: &NodePools) -> v1::PodResources {
    let containers = view
        .kinds()
        .into_iter()
        .filter(|(_, kind)| *kind != ContainerKind::Init);
    v1::PodResources {
        name: view.pod.name.to_string(),
        namespace: view.pod.namespace.to_string(),
        containers: containers
            .map(|(name, _)| container(view, name, pools))
            .collect(),
        ..v1::PodResources::default()
    }
}

fn container(view: &PodView, name: &str, pools: &NodePools) -> v1::ContainerResources {
    let devices = held_by(view, name).flat_map(|held| {
        held.devices
            .iter()
            .flat_map(|(id, nodes)| device(held.resource.as_str(), id, nodes))
    });
    v1::ContainerResources {
        name: name.to_owned(),
        devices: devices.collect(),
        dynamic_resources: view
            .claims_of(name)
            .into_iter()
            .map(|claim| dynamic_resource(claim, pools))
            .collect(),
        ..v1::ContainerResources::default()
    }
}

/// The resources of a container, without those that are still being allocated.
fn held_by<'a>(view: &'a PodView, container: &'a str) -> impl Iterator<Item = &'a PodResource> {
    view.resources.iter().filter(move |resource| {
        resource.container == container && resource.state != ResourceState::Allocating
    })
}

/// One for each NUMA node of a device, and one without topology for a device that has none.
fn device(resource: &str, id: &str, nodes: &[u32]) -> Vec<v1::ContainerDevices> {
    let one = |topology| v1::ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: vec![id.to_owned()],
        topology,
    };
    match nodes {
        [] => vec![one(None)],
        nodes => nodes
            .iter()
            .map(|node| {
                one(Some(v1::TopologyInfo {
                    nodes: vec![v1::NumaNode {
                        id: i64::from(*node),
                    }],
                }))
            })
            .collect(),
    }
}

/// Returns a claim with all its devices, regardless of the requests of it that a container names.
fn dynamic_resource(claim: &ClaimRecord, pools: &NodePools) -> v1::DynamicResource {
    let mut claim_resources = Vec::new();
    for driver in claim.drivers.keys() {
        for (device, names) in cdi::cdi_devices(claim, driver) {
            claim_resources.push(claim_resource(claim, driver, device, names, pools));
        }
    }
    v1::DynamicResource {
        claim_name: claim.id.name.to_string(),
        claim_namespace: claim.id.namespace.to_string(),
        claim_resources,
    }
}

fn claim_resource(
    claim: &ClaimRecord,
    driver: &DriverName,
    device: &PreparedDevice,
    names: Vec<String>,
    pools: &NodePools,
) -> v1::ClaimResource {
    v1::ClaimResource {
        cdi_devices: names
            .into_iter()
            .map(|name| v1::CdiDevice { name })
            .collect(),
        driver_name: driver.to_string(),
        pool_name: pools.published_in(claim, driver, &device.pool).to_string(),
        device_name: device.device.to_string(),
        share_id: device.share_id.clone(),
    }
}

/// The pod as v1alpha1 has it: the regular containers, and the devices of each resource together.
pub(super) fn pod_v1alpha1(view: &PodView) -> v1alpha1::PodResources {
    let regular = view.kinds().into_iter().filter(|(_, kind)| kind.is_app());
    v1alpha1::PodResources {
        name: view.pod.name.to_string(),
        namespace: view.pod.namespace.to_string(),
        containers: regular
            .map(|(name, _)| v1alpha1::ContainerResources {
                name: name.to_owned(),
                devices: held_by(view, name)
                    .map(|held| v1alpha1::ContainerDevices {
                        resource_name: held.resource.to_string(),
                        device_ids: held.devices.keys().cloned().collect(),
                    })
                    .collect(),
            })
            .collect(),
    }
}

/// Healthy devices, allocated or not. CPUs and memory are not managed here.
pub(super) fn allocatable(capacity: &Capacity) -> v1::AllocatableResourcesResponse {
    let views = capacity.resources.iter().flat_map(|resource| {
        let healthy = resource.devices.iter().filter(|view| view.device.healthy);
        healthy.map(|view| (resource.name.as_str(), &view.device))
    });
    v1::AllocatableResourcesResponse {
        devices: views
            .flat_map(|(name, found)| device(name, &found.id, &found.numa_nodes))
            .collect(),
        ..v1::AllocatableResourcesResponse::default()
    }
}

/// Returns the pod that is not being unprepared, of pods with one name, where one replaces another.
pub(super) fn staying(pods: &[PodView]) -> Option<&PodView> {
    pods.iter()
        .find(|view| view.state() != ClaimState::Unpreparing)
        .or_else(|| pods.first())
}

#[cfg(test)]
#[path = "assemble_tests.rs"]
mod tests;
