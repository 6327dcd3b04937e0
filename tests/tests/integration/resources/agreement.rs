//! Checks that all reports of extended resources agree, at a moment without a request in flight.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_proto::kubelet::pod_resources::v1::pod_resources_lister_client::PodResourcesListerClient;
use nodedock_proto::kubelet::pod_resources::v1::{
    AllocatableResourcesRequest, ContainerDevices, GetPodResourcesRequest, ListPodResourcesRequest,
    PodResources,
};
use nodedock_proto::node::v1;
use nodedock_tests::{DEADLINE, Daemon, own_pool};
use tokio::time::timeout;
use tonic::transport::Channel;
use tonic::{Code, Response, Status};

/// The container that is an ordinary init container wherever these tests have one: pod resources leave it out.
const INIT: &str = "init";

/// A resource and a device of it.
type Device = (String, String);

/// Expects that capacity, devices, pods and pod resources agree, and gives the pods that have each device.
pub(super) async fn agree(daemon: &Daemon) -> BTreeMap<Device, BTreeSet<String>> {
    let (pods, devices) = (daemon.pods().await, daemon.devices().await);
    let devices: Vec<_> = devices
        .into_iter()
        .filter(|device| !device.extended_resource.is_empty())
        .collect();
    let capacity = daemon
        .client()
        .get_capacity(v1::GetCapacityRequest {})
        .await
        .expect("an answer");
    let held = held(&pods);
    counts_agree(&capacity.into_inner().resources, &devices, &held);
    for device in &devices {
        let users: BTreeSet<_> = device.pods.iter().map(|pod| pod.uid.clone()).collect();
        assert_eq!(
            users,
            held.get(&key(device)).cloned().unwrap_or_default(),
            "{device:?}"
        );
    }
    pod_resources_agree(daemon, &pods, &devices).await;
    held
}

fn held(pods: &[v1::PodStatus]) -> BTreeMap<Device, BTreeSet<String>> {
    let mut held: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for pod in pods {
        let uid = &pod.pod.as_ref().expect("a pod has a name").uid;
        for of in &pod.resources {
            for id in &of.device_ids {
                held.entry((of.resource.clone(), id.clone()))
                    .or_default()
                    .insert(uid.clone());
            }
        }
    }
    held
}

fn key(device: &v1::Device) -> Device {
    let id = if device.pool.is_empty() {
        device.name.clone()
    } else {
        format!("{}/{}", own_pool(&device.pool), device.name)
    };
    (device.extended_resource.clone(), id)
}

fn is_healthy(device: &v1::Device) -> bool {
    device.health != "unhealthy"
}

fn counts_agree(
    resources: &[v1::Resource],
    devices: &[v1::Device],
    held: &BTreeMap<Device, BTreeSet<String>>,
) {
    for resource in resources {
        // What a driver that is away had is not listed, and counts until it is away for long.
        let listed: Vec<_> = devices
            .iter()
            .filter(|d| d.extended_resource == resource.name)
            .collect();
        if resource.active {
            let healthy = listed.iter().filter(|device| is_healthy(device)).count();
            let counted = (resource.capacity as usize, resource.allocatable as usize);
            assert_eq!(counted, (listed.len(), healthy), "{resource:?}");
        } else {
            assert_eq!(resource.allocatable, 0, "{resource:?}");
        }
        let of_pods = held
            .keys()
            .filter(|(name, _)| *name == resource.name)
            .cloned();
        let of_claims = listed
            .iter()
            .filter(|device| !device.claims.is_empty())
            .map(|device| key(device));
        let allocated: BTreeSet<_> = of_pods.chain(of_claims).collect();
        assert_eq!(
            resource.allocated as usize,
            allocated.len(),
            "{resource:?} {held:?}"
        );
    }
    for (name, id) in held.keys() {
        assert!(
            resources.iter().any(|resource| resource.name == *name),
            "{id} of {name} is held"
        );
    }
}

async fn pod_resources_agree(daemon: &Daemon, pods: &[v1::PodStatus], devices: &[v1::Device]) {
    let client = PodResourcesListerClient::new(daemon.pod_resources_channel())
        // As Kubernetes' own client library.
        .max_decoding_message_size(nodedock_model::limit::POD_RESOURCES_MESSAGE_BYTES_MAX);
    let list = call(&client, async |mut c| {
        c.list(ListPodResourcesRequest {}).await
    })
    .await
    .pod_resources;
    for pod in pods {
        let id = pod.pod.clone().expect("a pod has a name");
        let found = list
            .iter()
            .find(|listed| listed.name == id.name && listed.namespace == id.namespace);
        let found = found.unwrap_or_else(|| panic!("{id:?} is not listed: {list:#?}"));
        assert_eq!(listed(found), wanted(pod), "{id:?}");
        let request = GetPodResourcesRequest {
            pod_name: id.name,
            pod_namespace: id.namespace,
        };
        let got = call(&client, async |mut c| c.get(request.clone()).await).await;
        assert_eq!(got.pod_resources.as_ref(), Some(found));
    }
    assert_eq!(list.len(), pods.len(), "{list:#?}");
    let asked = async |mut c: PodResourcesListerClient<Channel>| {
        c.get_allocatable_resources(AllocatableResourcesRequest {})
            .await
    };
    let allocatable: BTreeSet<_> = call(&client, asked)
        .await
        .devices
        .iter()
        .flat_map(each)
        .collect();
    let healthy: BTreeSet<_> = devices
        .iter()
        .filter(|device| is_healthy(device))
        .map(key)
        .collect();
    assert_eq!(allocatable, healthy);
}

/// The devices of each container that has some, but for the ordinary init container.
fn wanted(pod: &v1::PodStatus) -> BTreeMap<String, BTreeSet<Device>> {
    let mut wanted: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    for of in pod
        .resources
        .iter()
        .filter(|of| of.container != INIT && of.outcome != "allocating")
    {
        let devices = of
            .device_ids
            .iter()
            .map(|id| (of.resource.clone(), id.clone()));
        wanted
            .entry(of.container.clone())
            .or_default()
            .extend(devices);
    }
    wanted
}

fn listed(pod: &PodResources) -> BTreeMap<String, BTreeSet<Device>> {
    let of = |container: &nodedock_proto::kubelet::pod_resources::v1::ContainerResources| {
        (
            container.name.clone(),
            container
                .devices
                .iter()
                .flat_map(each)
                .collect::<BTreeSet<_>>(),
        )
    };
    pod.containers
        .iter()
        .map(of)
        .filter(|(_, devices)| !devices.is_empty())
        .collect()
}

fn each(devices: &ContainerDevices) -> impl Iterator<Item = Device> {
    devices
        .device_ids
        .iter()
        .map(|id| (devices.resource_name.clone(), id.clone()))
}

/// Asks until the limit of calls lets it through.
async fn call<T>(
    client: &PodResourcesListerClient<Channel>,
    ask: impl AsyncFn(PodResourcesListerClient<Channel>) -> Result<Response<T>, Status>,
) -> T {
    let asked = async {
        loop {
            match ask(client.clone()).await {
                Err(status) if status.code() == Code::ResourceExhausted => {}
                answer => break answer.expect("an answer").into_inner(),
            }
        }
    };
    timeout(DEADLINE, asked)
        .await
        .expect("a call is let through after a while")
}
