use super::*;
use nodedock_model::limit::{PLUGIN_LIST_BYTES_MAX, RESOURCE_DEVICES_MAX};

fn device(id: &str, health: &str, nodes: &[i64]) -> wire::Device {
    let nodes: Vec<_> = nodes.iter().map(|id| wire::NumaNode { id: *id }).collect();
    wire::Device {
        id: id.into(),
        health: health.into(),
        topology: Some(wire::TopologyInfo { nodes }),
    }
}

fn list(devices: Vec<wire::Device>) -> Result<Arc<[PluginDevice]>, String> {
    let message = wire::ListAndWatchResponse { devices }.encode_to_vec();
    listed(List::decode(message.as_slice()).map_err(|error| error.to_string())?)
}

fn answer(
    change: impl FnOnce(&mut wire::ContainerAllocateResponse),
) -> Result<ContainerAllocation, String> {
    let mut response = wire::ContainerAllocateResponse::default();
    change(&mut response);
    allocation(wire::AllocateResponse {
        container_responses: vec![response],
    })
}

fn a_mount(host: &str, container: &str) -> wire::Mount {
    wire::Mount {
        host_path: host.into(),
        container_path: container.into(),
        read_only: true,
    }
}

fn a_node(path: &str, permissions: &str) -> wire::DeviceSpec {
    wire::DeviceSpec {
        host_path: path.into(),
        container_path: path.into(),
        permissions: permissions.into(),
    }
}

#[test]
fn only_exact_healthy_counts_as_healthy() {
    let listed = list(vec![
        device("a", "Healthy", &[3, 1, 3]),
        device("b", "healthy", &[]),
        device("c", "", &[-1, i64::MAX, 0]),
    ])
    .unwrap();
    let expected = [
        ("a", true, vec![1, 3]),
        ("b", false, vec![]),
        ("c", false, vec![0, u32::MAX]),
    ];
    let expected = expected.map(|(id, healthy, numa_nodes)| PluginDevice {
        id: id.into(),
        healthy,
        numa_nodes,
    });
    assert_eq!(*listed, expected);
}

#[test]
fn odd_list_entries_are_passed_on() {
    let listed = list(vec![
        device("a", "Healthy", &[]),
        device("", "", &[]),
        device("a", "", &[]),
    ])
    .unwrap();
    let ids: Vec<_> = listed
        .iter()
        .map(|device| (device.id.as_str(), device.healthy))
        .collect();
    assert_eq!(ids, [("a", true), ("", false), ("a", false)]);
}

#[test]
fn excess_listed_devices_are_not_decoded() {
    // One ID for each MiB of the memory of some devices.
    let id = |n: usize| format!("GPU-8f6d2c1e-0b1c-4f5e-9a7b-{n:012}");
    let devices = (0..RESOURCE_DEVICES_MAX).map(|n| device(&id(n), HEALTHY, &[]));
    let full = wire::ListAndWatchResponse {
        devices: devices.collect(),
    };
    assert!(
        full.encoded_len() < PLUGIN_LIST_BYTES_MAX,
        "{}",
        full.encoded_len()
    );
    let message = wire::ListAndWatchResponse {
        devices: vec![Default::default(); LISTED_DEVICES_MAX + 3],
    };
    let read = List::decode(message.encode_to_vec().as_slice()).unwrap();
    assert_eq!(read.wire().devices.len(), LISTED_DEVICES_MAX);
    let why = listed(read).unwrap_err();
    assert!(why.contains("1048579 devices, at most 1048576"), "{why}");
}

#[test]
fn an_answer_is_passed_through_unchanged() {
    let allocation = answer(|response| {
        response.envs.insert("VISIBLE".into(), "0,1\n2".into());
        response.mounts.push(a_mount("/usr/lib/gpu", "/opt/gpu"));
        response.devices.push(a_node("/dev/gpu0", "mrw"));
        response
            .annotations
            .insert("cdi.k8s.io/Plugin_1".into(), "v/c=0".into());
        response.cdi_devices.push(wire::CdiDevice {
            name: "v/c=0".into(),
        });
    });
    let expected = ContainerAllocation {
        env: BTreeMap::from([("VISIBLE".into(), "0,1\n2".into())]),
        mounts: vec![AllocationMount {
            host_path: "/usr/lib/gpu".into(),
            container_path: "/opt/gpu".into(),
            read_only: true,
        }],
        device_nodes: vec![AllocationNode {
            host_path: "/dev/gpu0".into(),
            container_path: "/dev/gpu0".into(),
            permissions: "mrw".into(),
        }],
        annotations: BTreeMap::from([("cdi.k8s.io/Plugin_1".into(), "v/c=0".into())]),
        cdi_devices: vec!["v/c=0".into()],
    };
    assert_eq!(allocation.unwrap(), expected);
    assert_eq!(answer(|_| ()).unwrap(), ContainerAllocation::default());
}

#[test]
fn first_container_response_counts() {
    let none = allocation(wire::AllocateResponse::default()).unwrap_err();
    assert!(none.contains("no container response"), "{none}");
    let second = wire::ContainerAllocateResponse {
        mounts: vec![a_mount("", "")],
        ..Default::default()
    };
    let both = wire::AllocateResponse {
        container_responses: vec![Default::default(), second],
    };
    assert_eq!(allocation(both).unwrap(), ContainerAllocation::default());
}

#[test]
fn paths_are_normalized_or_refused() {
    let plain = answer(|response| response.mounts.push(a_mount("//usr/./lib/", "/"))).unwrap();
    assert_eq!(
        (
            plain.mounts[0].host_path.as_str(),
            plain.mounts[0].container_path.as_str()
        ),
        ("/usr/lib", "/")
    );
    let long = format!("/{}", "x".repeat(PATH_BYTES_MAX));
    for bad in [
        "",
        "dev/x",
        "./x",
        "/dev/../etc",
        "/..",
        "/a\0b",
        "/a\nb",
        long.as_str(),
    ] {
        for why in [
            answer(|response| response.mounts.push(a_mount(bad, "/x"))).unwrap_err(),
            answer(|response| response.mounts.push(a_mount("/x", bad))).unwrap_err(),
            answer(|response| response.devices.push(a_node(bad, "rw"))).unwrap_err(),
        ] {
            let names_it = why.starts_with("mounts[0]: ") || why.starts_with("devices[0]: ");
            assert!(
                names_it && why.contains("_path") && why.len() < 300,
                "{why}"
            );
        }
    }
}

#[test]
fn permissions_are_some_of_three_letters() {
    for good in ["r", "rw", "mwr"] {
        answer(|response| response.devices.push(a_node("/dev/x", good))).unwrap();
    }
    let all = answer(|response| response.devices.push(a_node("/dev/x", ""))).unwrap();
    assert_eq!(all.device_nodes[0].permissions, "rwm");
    for bad in ["x", "rr", "rwmr", "RW", "r w"] {
        let why = answer(|response| response.devices.push(a_node("/dev/x", bad))).unwrap_err();
        assert!(
            why.contains(&format!("devices[0]: permissions {bad:?}")),
            "{why}"
        );
    }
}

#[test]
fn names_are_checked_and_cdi_deduplicated() {
    let cdi = |names: &[&str]| {
        let device = |name: &&str| wire::CdiDevice {
            name: (*name).to_owned(),
        };
        answer(|response| response.cdi_devices = names.iter().map(device).collect())
    };
    assert_eq!(
        cdi(&["v/c=1", "v/c=0", "v/c=1"]).unwrap().cdi_devices,
        ["v/c=1", "v/c=0"]
    );
    assert!(
        cdi(&["v/c=1", "gpu0"])
            .unwrap_err()
            .contains("cdi_devices[1]: name \"gpu0\"")
    );
    for bad in [
        "",
        "A=B",
        "A B",
        "A\n",
        "Ä",
        &"A".repeat(ENV_NAME_BYTES_MAX + 1),
    ] {
        let why =
            answer(|response| drop(response.envs.insert(bad.into(), String::new()))).unwrap_err();
        assert!(why.starts_with("envs: "), "{why}");
    }
    for bad in ["", "a b", "/a", "a/b/c"] {
        let why = answer(|response| drop(response.annotations.insert(bad.into(), String::new())))
            .unwrap_err();
        assert!(why.starts_with("annotations: "), "{why}");
    }
}

#[test]
fn every_list_and_text_is_bounded() {
    let many = ALLOCATION_ENTRIES_MAX + 1;
    let cases = [
        answer(|response| response.mounts = vec![a_mount("/x", "/x"); many]),
        answer(|response| response.devices = vec![a_node("/x", "r"); many]),
        answer(|response| {
            response.cdi_devices = vec![
                wire::CdiDevice {
                    name: "v/c=1".into()
                };
                many
            ]
        }),
        answer(|response| {
            response.envs = (0..many)
                .map(|n| (format!("N{n}"), String::new()))
                .collect()
        }),
        answer(|response| {
            response.annotations = (0..many)
                .map(|n| (format!("n{n}"), String::new()))
                .collect()
        }),
        answer(|response| {
            drop(
                response
                    .envs
                    .insert("A".into(), "x".repeat(ALLOCATION_ENV_BYTES_MAX + 1)),
            )
        }),
        answer(|response| drop(response.envs.insert("A".into(), "\0".into()))),
        answer(|response| {
            let half = "x".repeat(ALLOCATION_ANNOTATIONS_BYTES_MAX / 2);
            response.annotations = [("a".to_owned(), half.clone()), ("b".to_owned(), half)].into();
        }),
    ];
    for (index, case) in cases.into_iter().enumerate() {
        let why = case.unwrap_err();
        assert!(
            why.contains("at most") || why.contains("zero byte"),
            "{index}: {why}"
        );
    }
}

#[test]
fn preference_is_passed_through() {
    let ids = vec!["b".to_owned(), "a".to_owned()];
    let response = wire::ContainerPreferredAllocationResponse {
        device_ids: ids.clone(),
    };
    let answer = wire::PreferredAllocationResponse {
        container_responses: vec![response],
    };
    assert_eq!(preferred(answer).unwrap(), ids);
    assert_eq!(
        preferred(wire::PreferredAllocationResponse::default()).unwrap(),
        Vec::<String>::new()
    );
}
