//! The messages of the device plugin API and of pod-resources, from and to our words.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_proto::kubelet::device_plugin::v1beta1 as wire;
use nodedock_proto::kubelet::pod_resources::v1 as pods;

use super::claim::Ids;
use nodedock_core::manager::devices::closest;
use nodedock_model::{ContainerAllocation, ExtendedResource, PluginDevice, Problem, limit};

/// The version of the API.
pub(super) const VERSION: &str = "v1beta1";
/// Characters of a kubelet's text that are repeated to it.
const SHOWN_CHARS_MAX: usize = 128;

/// What a kubelet asks of a plugin. It does not look at them here: it calls for them again.
pub(super) fn options() -> wire::DevicePluginOptions {
    wire::DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: true }
}

pub(super) fn list(devices: &[PluginDevice]) -> wire::ListAndWatchResponse {
    let node = |node: &u32| wire::NumaNode { id: i64::from(*node) };
    let device = |device: &PluginDevice| wire::Device {
        id: device.id.clone(),
        health: if device.healthy { "Healthy" } else { "Unhealthy" }.to_owned(),
        // A topology without nodes would hide the device from pod-resources.
        topology: (!device.numa_nodes.is_empty())
            .then(|| wire::TopologyInfo { nodes: device.numa_nodes.iter().map(node).collect() }),
    };
    wire::ListAndWatchResponse { devices: devices.iter().map(device).collect() }
}

/// The devices for each container; no device is for two of them.
pub(super) fn allocate_request(request: wire::AllocateRequest) -> Result<Vec<Ids>, Problem> {
    let containers = request.container_requests;
    if containers.len() > limit::ALLOCATE_CONTAINERS_MAX {
        let (count, max) = (containers.len(), limit::ALLOCATE_CONTAINERS_MAX);
        let message = format!("devices for {count} containers are asked for at once, and {max} are taken");
        return Err(Problem::invalid("too-many-containers", message));
    }
    let mut seen = BTreeSet::new();
    let mut wanted = Vec::with_capacity(containers.len());
    for container in containers {
        let ids: Ids = container.devices_ids.into_iter().collect();
        if let Some(twice) = ids.iter().find(|id| seen.contains(*id)) {
            let message = format!("device {} is asked for two containers", shown(twice));
            return Err(Problem::invalid("device-asked-twice", message));
        }
        seen.extend(ids.iter().cloned());
        wanted.push(ids);
    }
    Ok(wanted)
}

/// Devices by CDI alone: a runtime that got the device nodes as well would be told each of them twice, and a kubelet that does not know the
/// field (before 1.28) does not run on a node whose drivers need CDI.
pub(super) fn container(allocation: ContainerAllocation) -> wire::ContainerAllocateResponse {
    let ContainerAllocation { cdi_devices, annotations, .. } = allocation;
    let cdi_devices = cdi_devices.into_iter().map(|name| wire::CdiDevice { name }).collect();
    wire::ContainerAllocateResponse { cdi_devices, annotations, ..Default::default() }
}

/// Of the available devices those that are best together.
pub(super) fn preferred(
    devices: &[PluginDevice],
    request: &wire::ContainerPreferredAllocationRequest,
) -> wire::ContainerPreferredAllocationResponse {
    let known: BTreeMap<&str, &PluginDevice> =
        devices.iter().map(|device| (device.id.as_str(), device)).collect();
    let wanted: BTreeSet<&String> =
        request.available_device_ids.iter().chain(&request.must_include_device_ids).collect();
    let stranger = |id: &String| PluginDevice { id: id.clone(), healthy: true, numa_nodes: Vec::new() };
    let available: Vec<PluginDevice> = wanted
        .into_iter()
        .map(|id| known.get(id.as_str()).map_or_else(|| stranger(id), |device| (*device).clone()))
        .collect();
    let size = usize::try_from(request.allocation_size).unwrap_or(0);
    let device_ids = closest(&available.iter().collect::<Vec<_>>(), &request.must_include_device_ids, size);
    wire::ContainerPreferredAllocationResponse { device_ids }
}

/// What pods have of extended resources, and the pods that were named.
pub(super) struct Told {
    pub(super) devices: BTreeMap<ExtendedResource, Ids>,
    /// Namespace and name.
    pub(super) pods: BTreeSet<(String, String)>,
}

/// Resources with names that we could not offer are left out.
pub(super) fn told(answer: pods::ListPodResourcesResponse) -> Told {
    let mut told = Told { devices: BTreeMap::new(), pods: BTreeSet::new() };
    for pod in answer.pod_resources {
        for entry in pod.containers.into_iter().flat_map(|container| container.devices) {
            let Ok(resource) = ExtendedResource::new(&entry.resource_name) else { continue };
            told.devices.entry(resource).or_default().extend(entry.device_ids);
        }
        told.pods.insert((pod.namespace, pod.name));
    }
    told
}

pub(super) fn shown(text: &str) -> String {
    let cut: String = text.chars().take(SHOWN_CHARS_MAX).collect();
    format!("{cut:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device(id: &str, healthy: bool, numa_nodes: &[u32]) -> PluginDevice {
        PluginDevice { id: id.to_owned(), healthy, numa_nodes: numa_nodes.to_vec() }
    }

    fn texts(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    #[test]
    fn a_list_has_health_and_topology() {
        let listed = list(&[device("p/0", true, &[0, 1]), device("p/1", false, &[])]).devices;
        let nodes = |at: usize| {
            listed[at].topology.as_ref().map(|t| t.nodes.iter().map(|n| n.id).collect::<Vec<_>>())
        };
        assert_eq!((listed[0].health.as_str(), nodes(0)), ("Healthy", Some(vec![0, 1])));
        assert_eq!((listed[1].health.as_str(), nodes(1)), ("Unhealthy", None));
    }

    #[test]
    fn a_request_names_each_device_for_one_container() {
        let request = |containers: &[&[&str]]| wire::AllocateRequest {
            container_requests: containers
                .iter()
                .map(|ids| wire::ContainerAllocateRequest { devices_ids: texts(ids) })
                .collect(),
        };
        let wanted = allocate_request(request(&[&["b", "a", "b"], &[]])).unwrap();
        assert_eq!(wanted, [Ids::from(["a".to_owned(), "b".to_owned()]), Ids::new()]);
        assert_eq!(allocate_request(request(&[&["a"], &["a"]])).unwrap_err().code, "device-asked-twice");
        let many = vec![&["a"][..]; limit::ALLOCATE_CONTAINERS_MAX + 1];
        assert_eq!(allocate_request(request(&many)).unwrap_err().code, "too-many-containers");
    }

    #[test]
    fn devices_of_one_node_are_preferred_and_what_must_be_is() {
        let devices = [device("p/0", true, &[0]), device("p/1", true, &[1]), device("p/2", true, &[1])];
        let ask = |available: &[&str], must: &[&str], size| {
            let request = wire::ContainerPreferredAllocationRequest {
                available_device_ids: texts(available),
                must_include_device_ids: texts(must),
                allocation_size: size,
            };
            preferred(&devices, &request).device_ids
        };
        let all = ["p/0", "p/1", "p/2"];
        assert_eq!(ask(&all, &[], 2), ["p/1", "p/2"]);
        assert_eq!(ask(&all, &["p/0"], 2)[0], "p/0");
        assert_eq!(ask(&all, &[], 9).len(), 3);
        assert_eq!(ask(&["x", "p/1"], &["y"], 2)[0], "y", "what is not known is answered as it was asked");
        assert!(ask(&all, &[], -1).is_empty() && ask(&[], &[], 3).is_empty());
    }
}
