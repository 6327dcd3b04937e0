use std::path::PathBuf;

use super::*;
use nodedock_core::manager::devices::TopologyHint;
use nodedock_core::records::table::ClaimTable;
use nodedock_model::{
    ClaimRecord, ClaimState, ContainerClaim, ObjectRef, PluginDevice, PodContainer, PodRecord,
    PooledClaim, ResourceDevices, plugin_driver, pod_claim_name,
};

fn name(text: &str) -> ExtendedResource {
    ExtendedResource::new(text).unwrap()
}

fn device(id: &str, healthy: bool, numa_nodes: &[u32]) -> DeviceView {
    let device = PluginDevice {
        id: id.to_owned(),
        healthy,
        numa_nodes: numa_nodes.to_vec(),
    };
    DeviceView {
        device,
        pods: vec![ObjectRef::new("default", "a", "uid-a").unwrap()],
    }
}

fn view(resource: &str, source: ResourceSource, devices: Vec<DeviceView>) -> ResourceView {
    ResourceView {
        name: name(resource),
        source,
        active: true,
        options: None,
        devices,
    }
}

fn plugin() -> ResourceSource {
    ResourceSource::Plugin(PathBuf::from("/plugins/a.sock"))
}

fn pod(pod: &str, entries: &[(&str, &str, &[&str])]) -> PodView {
    let pod = ObjectRef::new("default", pod, pod).unwrap();
    let mut record = PodRecord {
        pod: pod.clone(),
        claims: [].into(),
        containers: vec![],
        unknown: BTreeMap::new(),
    };
    let mut claims = Vec::new();
    for (container, resource, devices) in entries {
        let (resource, driver) = (name(resource), plugin_driver(&name(resource)));
        let claim = PooledClaim::named(&pod, container, &resource, &driver).id;
        let pod_claim_name = pod_claim_name(&resource, &claim.name);
        record.claims.insert(pod_claim_name.clone(), claim.clone());
        record.containers.push(PodContainer {
            name: (*container).to_owned(),
            claims: vec![ContainerClaim {
                pod_claim_name,
                request: None,
            }],
            ..PodContainer::default()
        });
        let devices = devices
            .iter()
            .map(|id| ((*id).to_owned(), Vec::new()))
            .collect();
        claims.push(ClaimRecord {
            pods: [(pod.uid.clone(), pod.clone())].into(),
            resource: Some(ResourceDevices { resource, devices }),
            ..ClaimRecord::new(claim, ClaimState::Prepared, "boot")
        });
    }
    PodView::new(&ClaimTable::new(claims, vec![record]), pod.uid.as_str()).unwrap()
}

#[test]
fn capacity_allocatable_and_allocated_are_counted() {
    let devices = vec![
        device("0", true, &[1]),
        device("1", false, &[0]),
        device("2", true, &[]),
    ];
    let of_driver = ResourceSource::Pools("d.dev".parse().unwrap());
    let known = Capacity {
        resources: vec![
            view("a.dev/a", plugin(), devices),
            view(
                "b.dev/b",
                of_driver,
                vec![device("p/0", true, &[]), device("p/1", true, &[])],
            ),
            ResourceView {
                active: false,
                ..view("c.dev/c", ResourceSource::Remembered, vec![])
            },
        ],
        removed: vec![name("z.dev/z")],
    };
    // Containers of a pod may have a device in turn, and a plugin that is away lists nothing.
    let pods = [
        pod(
            "a",
            &[
                ("init", "a.dev/a", &["0", "1"]),
                ("main", "a.dev/a", &["1"]),
            ],
        ),
        pod("b", &[("main", "c.dev/c", &["x"])]),
    ];
    let is_claimed = |driver: &DriverName, id: &str| (driver.as_str(), id) == ("d.dev", "p/1");
    let answer = capacity(&known, &pods, is_claimed);
    let count = |r: &v1::Resource| {
        (
            r.name.clone(),
            r.capacity,
            r.allocatable,
            r.allocated,
            r.active,
        )
    };
    let expected = [
        ("a.dev/a", 3, 2, 2, true),
        ("b.dev/b", 2, 2, 1, true),
        ("c.dev/c", 0, 0, 1, false),
    ];
    let expected = expected.map(|(name, c, a, l, active)| (name.to_owned(), c, a, l, active));
    assert_eq!(
        answer.resources.iter().map(count).collect::<Vec<_>>(),
        expected
    );
    let drivers: Vec<_> = answer
        .resources
        .iter()
        .map(|resource| resource.driver.as_str())
        .collect();
    assert_eq!(drivers, ["/plugins/a.sock", "d.dev", ""]);
    assert_eq!(
        (answer.resources[0].numa_nodes.as_slice(), answer.removed),
        ([0, 1].as_slice(), vec!["z.dev/z".to_owned()])
    );
}

#[test]
fn plugin_device_names_socket_and_pods() {
    let resource = view("a.dev/a", plugin(), vec![device("0", false, &[1])]);
    let device = plugin_device(&resource, &resource.devices[0]);
    assert_eq!(
        (
            device.driver.as_str(),
            device.pool.as_str(),
            device.name.as_str()
        ),
        ("/plugins/a.sock", "", "0")
    );
    assert_eq!(
        (device.health.as_str(), device.extended_resource.as_str()),
        ("unhealthy", "a.dev/a")
    );
    assert_eq!(
        (device.numa_nodes.as_slice(), device.pods[0].uid.as_str()),
        ([1].as_slice(), "uid-a")
    );
}

#[test]
fn hints_distinguish_unaligned_from_unsatisfiable_resources() {
    let of = |resource: &str, hints| ResourceHints {
        container: "main".to_owned(),
        resource: name(resource),
        hints,
    };
    let hint = TopologyHint {
        numa_nodes: vec![0, 1],
        preferred: true,
    };
    let answer = hints(&[
        of("a.dev/a", None),
        of("b.dev/b", Some(vec![])),
        of("c.dev/c", Some(vec![hint])),
    ]);
    let found: Vec<_> = answer
        .resources
        .iter()
        .map(|r| (r.has_topology, r.hints.len()))
        .collect();
    assert_eq!(found, [(false, 0), (true, 0), (true, 1)]);
    assert_eq!(
        answer.resources[2].hints[0],
        v1::TopologyHint {
            numa_nodes: vec![0, 1],
            preferred: true
        }
    );
    assert_eq!(hint_scope("").unwrap(), HintScope::Container);
    assert_eq!(hint_scope("container").unwrap(), HintScope::Container);
    assert_eq!(hint_scope("pod").unwrap(), HintScope::Pod);
    assert!(hint_scope("node").unwrap_err().message.contains("\"node\""));
}

#[test]
fn other_resources_are_returned_unchanged() {
    let request = v1::CoverAllocatedRequest {
        pod_uid: "uid-a".to_owned(),
        allocatable: BTreeMap::from([("cpu".to_owned(), 4), ("a.dev/a".to_owned(), 1)]),
    };
    let (pod, mut allocatable) = cover_request(&request).unwrap();
    assert_eq!(
        (pod.as_str(), &allocatable),
        ("uid-a", &BTreeMap::from([(name("a.dev/a"), 1)]))
    );
    allocatable.insert(name("a.dev/a"), 3);
    let answer = covered(request, allocatable).allocatable;
    assert_eq!(
        answer,
        BTreeMap::from([("cpu".to_owned(), 4), ("a.dev/a".to_owned(), 3)])
    );
    assert!(
        cover_request(&v1::CoverAllocatedRequest::default())
            .unwrap_err()
            .message
            .contains("pod_uid")
    );
}

#[test]
fn container_start_names_pod_and_container() {
    let pod = v1::ObjectRef {
        uid: "uid-a".to_owned(),
        ..v1::ObjectRef::default()
    };
    let request = |pod: Option<&v1::ObjectRef>, container: &str| {
        start_request(v1::StartContainerRequest {
            pod: pod.cloned(),
            container: container.to_owned(),
        })
    };
    assert_eq!(
        request(Some(&pod), "main").unwrap(),
        ("uid-a".parse().unwrap(), "main".to_owned())
    );
    assert!(
        request(None, "main")
            .unwrap_err()
            .message
            .contains("pod is missing")
    );
    assert!(
        request(Some(&v1::ObjectRef::default()), "main")
            .unwrap_err()
            .message
            .contains("pod.uid")
    );
    assert!(
        request(Some(&pod), "")
            .unwrap_err()
            .message
            .contains("container")
    );
}

#[test]
fn resource_shows_mechanism_and_its_reason() {
    use nodedock_kube::extended_resources::{Decision, LocalPool, PoolStatus};

    let status = |offered, waits_for: &str| PoolStatus {
        resource: name("b.dev/b"),
        offered,
        waits_for: waits_for.to_owned(),
    };
    let key = |pool: &str| LocalPool {
        driver: "d.dev".parse().unwrap(),
        pool: pool.parse().unwrap(),
    };
    let shown = |resource: &str, driver: &str, pools: Vec<(LocalPool, PoolStatus)>| {
        let decision = Decision {
            mechanism: Mechanism::Dra,
            reason: "both have 1.37".to_owned(),
        };
        let mechanisms = Mechanisms {
            decision: Some(decision),
            pools: pools.into_iter().collect(),
            ..Mechanisms::default()
        };
        let resource = v1::Resource {
            name: resource.to_owned(),
            driver: driver.to_owned(),
            ..v1::Resource::default()
        };
        let mut answer = v1::GetCapacityResponse {
            resources: vec![resource],
            removed: Vec::new(),
        };
        set_mechanisms(
            &mut answer,
            &mechanisms,
            &["off.dev".parse().unwrap()].into(),
        );
        let resource = answer.resources.remove(0);
        (resource.mechanism, resource.mechanism_reason)
    };
    let text = |mechanism: &str, reason: &str| (mechanism.to_owned(), reason.to_owned());
    let (dra, waits) = (status(Some(Mechanism::Dra), ""), status(None, "slices"));
    assert_eq!(
        shown("b.dev/b", "d.dev", vec![(key("p"), dra.clone())]),
        text("dra", "both have 1.37")
    );
    let both = vec![(key("p"), dra), (key("q"), waits)];
    assert_eq!(
        shown("b.dev/b", "d.dev", both),
        text("none,dra", "it waits for slices")
    );
    let held = vec![(key("p"), status(Some(Mechanism::DevicePlugin), "a class"))];
    assert_eq!(
        shown("b.dev/b", "d.dev", held),
        text("device-plugin", "it waits for a class")
    );
    assert_eq!(shown("b.dev/b", "d.dev", Vec::new()).0, "none");
    let key = LocalPool {
        driver: "off.dev".parse().unwrap(),
        ..key("p")
    };
    let disabled = vec![(key, status(Some(Mechanism::DevicePlugin), ""))];
    assert_eq!(
        shown("b.dev/b", "off.dev", disabled),
        text("device-plugin", "an operator disabled its adapter")
    );
    assert_eq!(
        shown("a.dev/a", "/plugins/a.sock", Vec::new()).0,
        "device-plugin"
    );
    assert_eq!(
        shown("c.dev/c", "", Vec::new()),
        text("", ""),
        "the checkpoint alone knows it"
    );
}
