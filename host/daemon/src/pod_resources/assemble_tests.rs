//! Pods as the manager has them, and what a monitoring agent gets.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::*;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_core::manager::claims::table::ClaimTable;
use nodedock_core::manager::devices::{DeviceView, ResourceSource, ResourceView};
use nodedock_core::registry::Registry;
use nodedock_model::{
    AllocationEntry, ContainerAllocation, ContainerClaim, DriverName, Edits, ExtendedResource, ObjectName,
    ObjectRef, PluginDevice, PodAllocation, PodContainer, PodRecord, PoolNames, PooledClaim,
};

const DRIVER: &str = "gpu.example.com";

fn object(name: &str) -> ObjectRef {
    ObjectRef::new("default", name, &format!("uid-{name}")).unwrap()
}

/// A prepared claim: a device with edits of ours, and a share of another that a native plugin named.
fn claim_record(name: &str, state: &str) -> Arc<ClaimRecord> {
    let device = |device: &str, access, share: Option<&str>| PreparedDevice {
        requests: vec![device.to_owned()],
        pool: "pool".parse().unwrap(),
        device: device.parse().unwrap(),
        share_id: share.map(str::to_owned),
        access,
        status: None,
        attributes: None,
    };
    let prepared = nodedock_model::PreparedClaim {
        devices: vec![
            device("gpu-0", nodedock_model::DeviceAccess::Edits(Edits::default()), None),
            device("gpu-1", nodedock_model::DeviceAccess::CdiDevices(vec!["v/c=1".to_owned()]), Some("s-1")),
        ],
        ..nodedock_model::PreparedClaim::default()
    };
    let part = nodedock_model::DriverPart { prepared: Some(Arc::new(prepared)), ..Default::default() };
    let id = object(name);
    let record = serde_json::json!({
        "id": id, "state": state, "allocation": {"devices": []}, "drivers": {DRIVER: part},
        "pods": {}, "boot_id": "boot", "holds": [], "timeline": [], "annotations": {},
    });
    Arc::new(serde_json::from_value(record).unwrap())
}

fn container(name: &str, kind: ContainerKind, claims: &[(&str, Option<&str>)]) -> PodContainer {
    let claim = |(name, request): &(&str, Option<&str>)| ContainerClaim {
        pod_claim_name: (*name).to_owned(),
        request: request.map(str::to_owned),
    };
    PodContainer {
        name: name.to_owned(),
        kind,
        claims: claims.iter().map(claim).collect(),
        ..PodContainer::default()
    }
}

/// A pod with claims, by the pod's names for them.
fn of_claims(
    pod: ObjectRef,
    containers: Vec<PodContainer>,
    named: &[(&str, Arc<ClaimRecord>)],
) -> ClaimTable {
    let held = |(_, record): &(&str, Arc<ClaimRecord>)| {
        let pods = BTreeMap::from([(pod.uid.clone(), pod.clone())]);
        ClaimRecord { pods, ..ClaimRecord::clone(record) }
    };
    let records = named.iter().map(held).collect();
    let claims = named.iter().map(|(name, record)| ((*name).to_owned(), record.id.clone())).collect();
    ClaimTable::new(records, vec![PodRecord { pod, claims, containers, unknown: BTreeMap::new() }])
}

fn entry(
    container: &str,
    kind: ContainerKind,
    resource: &str,
    devices: &[(&str, &[u32])],
) -> AllocationEntry {
    AllocationEntry {
        container: container.to_owned(),
        kind,
        resource: ExtendedResource::new(resource).unwrap(),
        devices: devices.iter().map(|(id, nodes)| ((*id).to_owned(), nodes.to_vec())).collect(),
        claim: None,
        response: Some(ContainerAllocation::default()),
        pre_start: false,
        unknown: BTreeMap::new(),
    }
}

fn allocation(pod: &str, entries: Vec<AllocationEntry>) -> Arc<PodAllocation> {
    Arc::new(PodAllocation { pod: object(pod), entries, since_ms: 0, unknown: BTreeMap::new() })
}

fn view(claims: Option<ClaimTable>, allocation: Option<Arc<PodAllocation>>) -> PodView {
    let claims = claims.unwrap_or_default();
    let pod =
        claims.pods().map(|record| record.pod.clone()).chain(allocation.iter().map(|a| a.pod.clone())).next();
    PodView::new(&claims, pod.unwrap().uid.as_str(), allocation).unwrap()
}

/// Pools of the node `node-1`.
fn pools() -> NodePools {
    NodePools {
        names: PoolNames { node: ObjectName::new("node-1").unwrap() },
        registry: Registry::new(Changes::default(), Conditions::default(), None),
    }
}

fn pod(view: &PodView) -> v1::PodResources {
    super::pod(view, &pools())
}

/// Resource, device and NUMA nodes of each.
fn listed(devices: &[v1::ContainerDevices]) -> Vec<(&str, &str, Vec<i64>)> {
    let one =
        |device: &v1::ContainerDevices| device.topology.iter().flat_map(|t| &t.nodes).map(|n| n.id).collect();
    devices.iter().map(|d| (d.resource_name.as_str(), d.device_ids[0].as_str(), one(d))).collect()
}

fn names(pod: &v1::PodResources) -> Vec<&str> {
    pod.containers.iter().map(|container| container.name.as_str()).collect()
}

#[test]
fn a_device_is_listed_once_for_each_numa_node_and_once_where_it_has_none() {
    let devices: [(&str, &[u32]); 3] = [("a", &[0]), ("b", &[0, 1]), ("c", &[])];
    let entries = vec![entry("main", ContainerKind::App, "example.com/nic", &devices)];
    let pod = pod(&view(None, Some(allocation("a", entries))));
    assert_eq!((pod.name.as_str(), pod.namespace.as_str()), ("a", "default"));
    let nic = "example.com/nic";
    assert_eq!(
        listed(&pod.containers[0].devices),
        [(nic, "a", vec![0]), (nic, "b", vec![0]), (nic, "b", vec![1]), (nic, "c", vec![])]
    );
    assert!(
        pod.containers[0].devices[3].topology.is_none() && pod.containers[0].dynamic_resources.is_empty()
    );
}

#[test]
fn a_claim_is_listed_whole_whatever_request_a_container_names() {
    let containers = vec![
        container("one", ContainerKind::App, &[("own", Some("gpu-0")), ("own", Some("gpu-1"))]),
        container("none", ContainerKind::App, &[]),
    ];
    let view =
        view(Some(of_claims(object("a"), containers, &[("own", claim_record("c", "prepared"))])), None);
    let pod = pod(&view);
    assert_eq!(names(&pod), ["one", "none"], "a container without devices is there");
    let [claim] = pod.containers[0].dynamic_resources.as_slice() else { panic!("{pod:#?}") };
    assert_eq!((claim.claim_name.as_str(), claim.claim_namespace.as_str()), ("c", "default"));
    let entry = |r: &v1::ClaimResource| {
        let cdi: Vec<_> = r.cdi_devices.iter().map(|device| device.name.clone()).collect();
        (r.driver_name.clone(), r.pool_name.clone(), r.device_name.clone(), r.share_id.clone(), cdi)
    };
    let (driver, pool) = (DRIVER.to_owned(), "node-1/pool".to_owned());
    let expected = [
        (driver.clone(), pool.clone(), "gpu-0".to_owned(), None, vec![format!("{DRIVER}/claim=uid-c-gpu-0")]),
        (driver, pool, "gpu-1".to_owned(), Some("s-1".to_owned()), vec!["v/c=1".to_owned()]),
    ];
    assert_eq!(claim.claim_resources.iter().map(entry).collect::<Vec<_>>(), expected);
    assert!(pod.containers[1].dynamic_resources.is_empty() && pod.containers[1].devices.is_empty());
}

#[test]
fn ordinary_init_containers_are_left_out_and_sidecars_are_not() {
    let devices: [(&str, &[u32]); 1] = [("a", &[0])];
    let kinds =
        [("init", ContainerKind::Init), ("side", ContainerKind::Sidecar), ("main", ContainerKind::App)];
    let containers = kinds.map(|(name, kind)| container(name, kind, &[("own", None)]));
    let entries = kinds.map(|(name, kind)| entry(name, kind, "example.com/nic", &devices)).to_vec();
    let claims = of_claims(object("a"), containers.to_vec(), &[("own", claim_record("c", "prepared"))]);
    for view in [
        view(None, Some(allocation("a", entries.clone()))),
        view(Some(claims), Some(allocation("a", entries))),
    ] {
        assert_eq!(names(&pod(&view)), ["side", "main"]);
        let old = pod_v1alpha1(&view);
        let [main] = old.containers.as_slice() else { panic!("regular containers alone: {old:#?}") };
        assert_eq!((old.name.as_str(), old.namespace.as_str(), main.name.as_str()), ("a", "default", "main"));
        assert_eq!(
            (main.devices[0].resource_name.as_str(), main.devices[0].device_ids.as_slice()),
            ("example.com/nic", ["a".to_owned()].as_slice())
        );
    }
}

#[test]
fn devices_of_a_pool_are_devices_and_their_claim_is_no_dynamic_resource() {
    let record = claim_record("p", "prepared");
    let mut gpu = entry("main", ContainerKind::App, "example.com/gpu", &[("pool/gpu-0", &[1])]);
    gpu.response = None;
    gpu.claim = Some(PooledClaim { driver: DriverName::new(DRIVER).unwrap(), id: record.id.clone() });
    let containers = vec![container("main", ContainerKind::App, &[("example.com/gpu/p", None)])];
    let claims = of_claims(object("a"), containers, &[("example.com/gpu/p", record)]);
    let pod = pod(&view(Some(claims), Some(allocation("a", vec![gpu]))));
    assert_eq!(listed(&pod.containers[0].devices), [("example.com/gpu", "pool/gpu-0", vec![1])]);
    assert!(pod.containers[0].dynamic_resources.is_empty(), "{pod:#?}");
}

#[test]
fn devices_that_are_still_being_allocated_are_not_listed() {
    let mut open = entry("main", ContainerKind::App, "example.com/nic", &[("a", &[])]);
    open.response = None;
    let view = view(None, Some(allocation("a", vec![open])));
    assert!(
        pod(&view).containers[0].devices.is_empty() && pod_v1alpha1(&view).containers[0].devices.is_empty()
    );
}

#[test]
fn healthy_devices_can_be_allocated_whether_or_not_they_are() {
    let device = |id: &str, healthy, nodes: &[u32], pods: Vec<ObjectRef>| DeviceView {
        device: PluginDevice { id: id.to_owned(), healthy, numa_nodes: nodes.to_vec() },
        pods,
    };
    let resource = |name: &str, devices| ResourceView {
        name: ExtendedResource::new(name).unwrap(),
        source: ResourceSource::Remembered,
        active: true,
        options: None,
        devices,
    };
    let (nic, gpu) = ("example.com/nic", "example.com/gpu");
    let capacity = Capacity {
        resources: vec![
            resource(
                gpu,
                vec![device("a", true, &[0, 1], vec![object("a")]), device("b", false, &[0], vec![])],
            ),
            resource(nic, vec![device("a", true, &[], vec![])]),
        ],
        removed: vec![ExtendedResource::new("example.com/gone").unwrap()],
    };
    let answer = allocatable(&capacity);
    assert_eq!(listed(&answer.devices), [(gpu, "a", vec![0]), (gpu, "a", vec![1]), (nic, "a", vec![])]);
    assert!(answer.cpu_ids.is_empty() && answer.memory.is_empty());
    assert_eq!(allocatable(&Capacity::default()), v1::AllocatableResourcesResponse::default());
}

#[test]
fn of_two_pods_with_one_name_the_one_that_stays_is_meant() {
    let pod = |state: &str, uid: &str| {
        let pod = ObjectRef { uid: uid.parse().unwrap(), ..object("a") };
        view(Some(of_claims(pod, vec![], &[("own", claim_record("c", state))])), None)
    };
    let pods = [pod("unpreparing", "uid-1"), pod("prepared", "uid-2")];
    assert_eq!(staying(&pods).unwrap().pod.uid.as_str(), "uid-2");
    assert_eq!(staying(&pods[..1]).unwrap().pod.uid.as_str(), "uid-1");
    assert!(staying(&[]).is_none());
}
