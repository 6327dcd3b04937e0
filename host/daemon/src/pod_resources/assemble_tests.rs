//! Pods as the manager has them, and what a monitoring agent gets.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::*;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;
use nodedock_core::manager::devices::{DeviceView, ResourceSource, ResourceView};
use nodedock_core::records::table::ClaimTable;
use nodedock_core::registry::Registry;
use nodedock_model::{
    ContainerClaim, Edits, ExtendedResource, ObjectName, ObjectRef, PluginDevice, PodContainer,
    PodRecord, PoolNames, PooledClaim, ResourceDevices, plugin_driver, pod_claim_name,
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
            device(
                "gpu-0",
                nodedock_model::DeviceAccess::Edits(Edits::default()),
                None,
            ),
            device(
                "gpu-1",
                nodedock_model::DeviceAccess::CdiDevices(vec!["v/c=1".to_owned()]),
                Some("s-1"),
            ),
        ],
        ..nodedock_model::PreparedClaim::default()
    };
    let part = nodedock_model::DriverPart {
        prepared: Some(Arc::new(prepared)),
        ..Default::default()
    };
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
        let pods = [(pod.uid.clone(), pod.clone())].into();
        ClaimRecord {
            pods,
            ..ClaimRecord::clone(record)
        }
    };
    let records = named.iter().map(held).collect();
    let claims = named
        .iter()
        .map(|(name, record)| ((*name).to_owned(), record.id.clone()))
        .collect();
    ClaimTable::new(
        records,
        vec![PodRecord {
            pod,
            claims,
            containers,
            unknown: BTreeMap::new(),
        }],
    )
}

/// Devices of a resource in a container: the container's name and kind, the resource, and the devices with their NUMA nodes.
type Entry<'a> = (&'a str, ContainerKind, &'a str, &'a [(&'a str, &'a [u32])]);

/// A pod whose containers have devices of plugins, in a state.
fn of_resources(pod: &str, entries: &[Entry<'_>], state: ClaimState) -> (ClaimTable, PodRecord) {
    let pod = object(pod);
    let mut record = PodRecord {
        pod: pod.clone(),
        claims: [].into(),
        containers: vec![],
        unknown: BTreeMap::new(),
    };
    let mut claims = Vec::new();
    for (name, kind, resource, devices) in entries {
        let resource = ExtendedResource::new(resource).unwrap();
        let claim = PooledClaim::named(&pod, name, &resource, &plugin_driver(&resource)).id;
        let of = pod_claim_name(&resource, &claim.name);
        record.claims.insert(of.clone(), claim.clone());
        record
            .containers
            .push(container(name, *kind, &[(&of, None)]));
        let devices = devices
            .iter()
            .map(|(id, nodes)| ((*id).to_owned(), nodes.to_vec()))
            .collect();
        claims.push(ClaimRecord {
            pods: [(pod.uid.clone(), pod.clone())].into(),
            resource: Some(ResourceDevices { resource, devices }),
            ..ClaimRecord::new(claim, state, "boot")
        });
    }
    (ClaimTable::new(claims, vec![record.clone()]), record)
}

fn view(claims: &ClaimTable) -> PodView {
    let pod = claims.pods().next().unwrap().pod.clone();
    PodView::new(claims, pod.uid.as_str()).unwrap()
}

/// Pools of the node `node-1`.
fn pools() -> NodePools {
    NodePools {
        names: PoolNames {
            node: ObjectName::new("node-1").unwrap(),
        },
        registry: Registry::new(Changes::default(), Conditions::default(), None),
    }
}

fn pod(view: &PodView) -> v1::PodResources {
    super::pod(view, &pools())
}

/// Resource, device and NUMA nodes of each.
fn listed(devices: &[v1::ContainerDevices]) -> Vec<(&str, &str, Vec<i64>)> {
    let one = |device: &v1::ContainerDevices| {
        device
            .topology
            .iter()
            .flat_map(|t| &t.nodes)
            .map(|n| n.id)
            .collect()
    };
    devices
        .iter()
        .map(|d| (d.resource_name.as_str(), d.device_ids[0].as_str(), one(d)))
        .collect()
}

fn names(pod: &v1::PodResources) -> Vec<&str> {
    pod.containers
        .iter()
        .map(|container| container.name.as_str())
        .collect()
}

#[test]
fn device_is_listed_per_numa_node() {
    let devices: [(&str, &[u32]); 3] = [("a", &[0]), ("b", &[0, 1]), ("c", &[])];
    let entries = [("main", ContainerKind::App, "example.com/nic", &devices[..])];
    let pod = pod(&view(&of_resources("a", &entries, ClaimState::Prepared).0));
    assert_eq!(
        (pod.name.as_str(), pod.namespace.as_str()),
        ("a", "default")
    );
    let nic = "example.com/nic";
    assert_eq!(
        listed(&pod.containers[0].devices),
        [
            (nic, "a", vec![0]),
            (nic, "b", vec![0]),
            (nic, "b", vec![1]),
            (nic, "c", vec![])
        ]
    );
    assert!(
        pod.containers[0].devices[3].topology.is_none()
            && pod.containers[0].dynamic_resources.is_empty()
    );
}

#[test]
fn claim_is_always_listed_whole() {
    let containers = vec![
        container(
            "one",
            ContainerKind::App,
            &[("own", Some("gpu-0")), ("own", Some("gpu-1"))],
        ),
        container("none", ContainerKind::App, &[]),
    ];
    let view = view(&of_claims(
        object("a"),
        containers,
        &[("own", claim_record("c", "prepared"))],
    ));
    let pod = pod(&view);
    assert_eq!(
        names(&pod),
        ["one", "none"],
        "a container without devices is there"
    );
    let [claim] = pod.containers[0].dynamic_resources.as_slice() else {
        panic!("{pod:#?}")
    };
    assert_eq!(
        (claim.claim_name.as_str(), claim.claim_namespace.as_str()),
        ("c", "default")
    );
    let entry = |r: &v1::ClaimResource| {
        let cdi: Vec<_> = r
            .cdi_devices
            .iter()
            .map(|device| device.name.clone())
            .collect();
        (
            r.driver_name.clone(),
            r.pool_name.clone(),
            r.device_name.clone(),
            r.share_id.clone(),
            cdi,
        )
    };
    let (driver, pool) = (DRIVER.to_owned(), "node-1/pool".to_owned());
    let expected = [
        (
            driver.clone(),
            pool.clone(),
            "gpu-0".to_owned(),
            None,
            vec![format!("{DRIVER}/claim=uid-c-gpu-0")],
        ),
        (
            driver,
            pool,
            "gpu-1".to_owned(),
            Some("s-1".to_owned()),
            vec!["v/c=1".to_owned()],
        ),
    ];
    assert_eq!(
        claim.claim_resources.iter().map(entry).collect::<Vec<_>>(),
        expected
    );
    assert!(pod.containers[1].dynamic_resources.is_empty() && pod.containers[1].devices.is_empty());
}

#[test]
fn init_containers_except_sidecars_are_omitted() {
    let devices: [(&str, &[u32]); 1] = [("a", &[0])];
    let kinds = [
        ("init", ContainerKind::Init),
        ("side", ContainerKind::Sidecar),
        ("main", ContainerKind::App),
    ];
    let entries = kinds.map(|(name, kind)| (name, kind, "example.com/nic", &devices[..]));
    let (claims, record) = of_resources("a", &entries, ClaimState::Prepared);
    let mut both = record;
    both.claims.insert("own".to_owned(), object("c"));
    both.containers.iter_mut().for_each(|container| {
        container.claims.insert(
            0,
            ContainerClaim {
                pod_claim_name: "own".to_owned(),
                request: None,
            },
        );
    });
    let mut records: Vec<_> = claims
        .claims()
        .map(|claim| ClaimRecord::clone(claim))
        .collect();
    records.push(ClaimRecord {
        pods: [(both.pod.uid.clone(), both.pod.clone())].into(),
        ..ClaimRecord::clone(&claim_record("c", "prepared"))
    });
    for claims in [claims, ClaimTable::new(records, vec![both])] {
        let view = view(&claims);
        assert_eq!(names(&pod(&view)), ["side", "main"]);
        let old = pod_v1alpha1(&view);
        let [main] = old.containers.as_slice() else {
            panic!("regular containers alone: {old:#?}")
        };
        assert_eq!(
            (
                old.name.as_str(),
                old.namespace.as_str(),
                main.name.as_str()
            ),
            ("a", "default", "main")
        );
        assert_eq!(
            (
                main.devices[0].resource_name.as_str(),
                main.devices[0].device_ids.as_slice()
            ),
            ("example.com/nic", ["a".to_owned()].as_slice())
        );
    }
}

#[test]
fn pool_devices_are_no_dynamic_resources() {
    let record = claim_record("p", "prepared");
    let resource = ExtendedResource::new("example.com/gpu").unwrap();
    let devices = [("pool/gpu-0".to_owned(), vec![1])].into();
    let of = Some(ResourceDevices { resource, devices });
    let record = Arc::new(ClaimRecord {
        resource: of,
        ..ClaimRecord::clone(&record)
    });
    let containers = vec![container(
        "main",
        ContainerKind::App,
        &[("example.com/gpu/p", None)],
    )];
    let claims = of_claims(object("a"), containers, &[("example.com/gpu/p", record)]);
    let pod = pod(&view(&claims));
    assert_eq!(
        listed(&pod.containers[0].devices),
        [("example.com/gpu", "pool/gpu-0", vec![1])]
    );
    assert!(pod.containers[0].dynamic_resources.is_empty(), "{pod:#?}");
}

#[test]
fn devices_being_allocated_are_not_listed() {
    let open = [(
        "main",
        ContainerKind::App,
        "example.com/nic",
        &[("a", &[][..])][..],
    )];
    let view = view(&of_resources("a", &open, ClaimState::Preparing).0);
    assert!(
        pod(&view).containers[0].devices.is_empty()
            && pod_v1alpha1(&view).containers[0].devices.is_empty()
    );
}

#[test]
fn healthy_devices_are_allocatable_when_allocated() {
    let device = |id: &str, healthy, nodes: &[u32], pods: Vec<ObjectRef>| DeviceView {
        device: PluginDevice {
            id: id.to_owned(),
            healthy,
            numa_nodes: nodes.to_vec(),
        },
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
                vec![
                    device("a", true, &[0, 1], vec![object("a")]),
                    device("b", false, &[0], vec![]),
                ],
            ),
            resource(nic, vec![device("a", true, &[], vec![])]),
        ],
        removed: vec![ExtendedResource::new("example.com/gone").unwrap()],
    };
    let answer = allocatable(&capacity);
    assert_eq!(
        listed(&answer.devices),
        [(gpu, "a", vec![0]), (gpu, "a", vec![1]), (nic, "a", vec![])]
    );
    assert!(answer.cpu_ids.is_empty() && answer.memory.is_empty());
    assert_eq!(
        allocatable(&Capacity::default()),
        v1::AllocatableResourcesResponse::default()
    );
}

#[test]
fn remaining_pod_wins_among_equal_names() {
    let pod = |state: &str, uid: &str| {
        let pod = ObjectRef {
            uid: uid.parse().unwrap(),
            ..object("a")
        };
        view(&of_claims(
            pod,
            vec![],
            &[("own", claim_record("c", state))],
        ))
    };
    let pods = [pod("unpreparing", "uid-1"), pod("prepared", "uid-2")];
    assert_eq!(staying(&pods).unwrap().pod.uid.as_str(), "uid-2");
    assert_eq!(staying(&pods[..1]).unwrap().pod.uid.as_str(), "uid-1");
    assert!(staying(&[]).is_none());
}
