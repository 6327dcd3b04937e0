use std::collections::BTreeMap;

use super::*;
use nodedock_model::{ConfigSource, DeviceName, DriverName, ObjectName, PoolName, Uid};

fn id(name: &str) -> ObjectRef {
    ObjectRef::new("default", name, &format!("uid-{name}")).unwrap()
}

fn device() -> AllocatedDevice {
    AllocatedDevice {
        request: "gpu/normal".to_owned(),
        driver: DriverName::new("gpu.example.com").unwrap(),
        pool: PoolName::new("node-1/a").unwrap(),
        device: DeviceName::new("gpu-0").unwrap(),
        share_id: Some("share".to_owned()),
        consumed: BTreeMap::from([("memory".to_owned(), "20Gi".to_owned())]),
        admin_access: true,
        binding: Default::default(),
    }
}

fn inline_claim() -> Claim {
    let config = |source| OpaqueConfig {
        source,
        requests: vec!["gpu".to_owned()],
        driver: DriverName::new("gpu.example.com").unwrap(),
        parameters: "{}".to_owned(),
    };
    Claim {
        id: id("claim"),
        allocation: Some(Allocation {
            devices: vec![device()],
            configs: vec![
                config(ConfigSource::DeviceClass),
                config(ConfigSource::Claim),
            ],
            node_name: Some("node-1".to_owned()),
        }),
        reserved_for: vec![Consumer::of_pod(&id("pod"))],
        annotations: BTreeMap::from([("a".to_owned(), "b".to_owned())]),
        owner_pod: Some(Uid::new("uid-pod").unwrap()),
        resource: None,
    }
}

fn bare_claim() -> Claim {
    Claim {
        allocation: None,
        reserved_for: vec![],
        annotations: BTreeMap::new(),
        owner_pod: None,
        resource: None,
        ..inline_claim()
    }
}

fn resource(name: &str) -> nodedock_model::ExtendedResource {
    nodedock_model::ExtendedResource::new(name).unwrap()
}

fn request() -> PodRequest {
    let reference = |name: &str, uid: Option<&str>| ClaimReference {
        pod_claim_name: name.to_owned(),
        claim_name: ObjectName::new("claim").unwrap(),
        claim_uid: uid.map(|uid| Uid::new(uid).unwrap()),
    };
    let uses = |name: &str, request: Option<&str>| ContainerClaim {
        pod_claim_name: name.to_owned(),
        request: request.map(str::to_owned),
    };
    PodRequest {
        pod: id("pod"),
        pod_group: Some(ObjectName::new("group").unwrap()),
        claims: vec![reference("gpu", None), reference("nic", Some("uid-claim"))],
        containers: vec![
            PodContainer {
                name: "main".to_owned(),
                claims: vec![uses("gpu", None), uses("nic", Some("r"))],
                ..PodContainer::default()
            },
            PodContainer {
                name: "side".to_owned(),
                claims: vec![],
                kind: ContainerKind::Sidecar,
                resources: BTreeMap::from([(resource("example.com/nic"), 2)]),
                numa_affinity: vec![0, 3],
            },
        ],
    }
}

fn message() -> v1::PreparePodRequest {
    pod_message(&request(), &[inline_claim()])
}

#[test]
fn pod_request_round_trips() {
    let inline = vec![inline_claim(), bare_claim()];
    assert_eq!(
        pod_request(&pod_message(&request(), &inline)),
        Ok((request(), inline))
    );
}

/// Changes a message so that one thing of it is wrong, and says what the error has to name.
type Case = (fn(&mut v1::PreparePodRequest), &'static [&'static str]);

#[test]
fn an_error_names_the_field() {
    fn allocation(message: &mut v1::PreparePodRequest) -> &mut v1::Allocation {
        message.inline_claims[0].allocation.as_mut().unwrap()
    }
    fn limit_to(message: &mut v1::PreparePodRequest, name: &str, count: u32) {
        message.containers[1]
            .extended_resources
            .insert(name.to_owned(), count);
    }
    let cases: [Case; 28] = [
        (|m| m.pod = None, &["pod is missing"]),
        (
            |m| m.pod.as_mut().unwrap().namespace.clear(),
            &["pod.namespace", "\"\""],
        ),
        (
            |m| m.pod.as_mut().unwrap().name = "A".to_owned(),
            &["pod.name", "\"A\""],
        ),
        (
            |m| m.pod.as_mut().unwrap().uid = "a/b".to_owned(),
            &["pod.uid", "a/b"],
        ),
        (|m| m.pod_group = "A".to_owned(), &["pod_group", "\"A\""]),
        (
            |m| m.claims[0].pod_claim_name = "a\nb".to_owned(),
            &["claims[].pod_claim_name", "a\\nb"],
        ),
        (|m| m.claims[0].claim_name.clear(), &["claims[].claim_name"]),
        (
            |m| m.claims[0].claim_uid = "..".to_owned(),
            &["claims[].claim_uid"],
        ),
        (
            |m| m.claims[0].pod_claim_name = "nic".to_owned(),
            &["claims[].pod_claim_name", "\"nic\"", "twice"],
        ),
        (|m| m.containers[0].name.clear(), &["containers[].name"]),
        (
            |m| m.containers[0].name = "side".to_owned(),
            &["containers[].name", "\"side\"", "twice"],
        ),
        (
            |m| m.containers[0].claims[0].pod_claim_name = "x".to_owned(),
            &["\"main\"", "\"x\""],
        ),
        (
            |m| m.containers[1].kind = "main".to_owned(),
            &["containers[].kind", "\"main\"", "sidecar"],
        ),
        (
            |m| limit_to(m, "cpu", 1),
            &["containers[side].extended_resources", "\"cpu\""],
        ),
        (
            |m| limit_to(m, "example.com/gpu", 0),
            &["0 of example.com/gpu", "1 to 262144"],
        ),
        (
            |m| limit_to(m, "example.com/gpu", u32::MAX),
            &["4294967295 of example.com/gpu"],
        ),
        (
            |m| (0..64).for_each(|i| limit_to(m, &format!("a.dev/{i}"), 1)),
            &["65 entries", "at most 64"],
        ),
        (
            |m| m.containers[1].numa_affinity.push(1024),
            &["containers[side].numa_affinity", "no node 1024"],
        ),
        (
            |m| m.containers[1].numa_affinity = vec![0; 1025],
            &["numa_affinity", "1025 entries"],
        ),
        (
            |m| m.inline_claims[0].id = None,
            &["inline_claims[].id is missing"],
        ),
        (
            |m| m.inline_claims[0].id.as_mut().unwrap().uid.clear(),
            &["inline_claims[].id.uid"],
        ),
        (
            |m| m.inline_claims[0].reserved_for[0].uid.clear(),
            &["reserved_for[].uid"],
        ),
        (
            |m| m.inline_claims[0].owner_pod_uid = "-".to_owned(),
            &["owner_pod_uid"],
        ),
        (
            |m| allocation(m).devices[0].driver = "gpu_".to_owned(),
            &["devices[].driver", "\"GPU\""],
        ),
        (
            |m| allocation(m).devices[0].pool = "/".to_owned(),
            &["devices[].pool"],
        ),
        (
            |m| allocation(m).devices[0].device = "gpu_0".to_owned(),
            &["devices[].device", "gpu_0"],
        ),
        (
            |m| allocation(m).configs[0].source = "Mine".to_owned(),
            &["configs[].source", "\"Mine\""],
        ),
        (
            |m| allocation(m).configs[0].driver.clear(),
            &["configs[].driver"],
        ),
    ];
    for (index, (spoil, parts)) in cases.into_iter().enumerate() {
        let mut message = message();
        spoil(&mut message);
        let problem = pod_request(&message).expect_err(&format!("case {index}"));
        assert_eq!(problem.code, "bad-request");
        parts.iter().for_each(|part| {
            assert!(
                problem.message.contains(part),
                "{part:?} is wanted in: {problem}"
            )
        });
    }
}

#[test]
fn lists_are_bounded_inclusively() {
    fn repeat<T: Clone>(list: &mut Vec<T>, count: usize, name: fn(&mut T, usize)) {
        let first = list[0].clone();
        *list = (0..count).map(|_| first.clone()).collect();
        list.iter_mut()
            .enumerate()
            .for_each(|(n, entry)| name(entry, n));
    }
    type Grow = fn(&mut v1::PreparePodRequest, usize);
    let cases: [(&str, usize, Grow); 5] = [
        ("claims", limit::POD_CLAIMS_MAX, |m, n| {
            m.containers.clear();
            repeat(&mut m.claims, n, |claim, n| {
                claim.pod_claim_name = format!("claim-{n}")
            });
        }),
        ("inline_claims", limit::POD_CLAIMS_MAX, |m, n| {
            repeat(&mut m.inline_claims, n, |_, _| {})
        }),
        ("containers", limit::POD_CONTAINERS_MAX, |m, n| {
            repeat(&mut m.containers, n, |container, n| {
                container.name = format!("container-{n}")
            });
        }),
        (
            "containers[].claims",
            limit::CONTAINER_CLAIMS_MAX,
            |m, n| {
                repeat(&mut m.containers[0].claims, n, |_, _| {});
            },
        ),
        ("reserved_for", limit::RESERVED_FOR_MAX, |m, n| {
            repeat(&mut m.inline_claims[0].reserved_for, n, |_, _| {});
        }),
    ];
    for (field, max, grow) in cases {
        let of = |count: usize| {
            let mut message = message();
            grow(&mut message, count);
            pod_request(&message)
        };
        assert!(of(max).is_ok(), "{field}: {:?}", of(max));
        let problem = of(max + 1).unwrap_err();
        assert!(
            problem
                .message
                .starts_with(&format!("{field} has {} entries", max + 1)),
            "{problem}"
        );
    }
}

#[test]
fn long_invalid_name_gives_short_error() {
    let mut message = message();
    message.containers[0].name = "x".repeat(1 << 20);
    assert!(pod_request(&message).unwrap_err().message.len() < limit::PROBLEM_MESSAGE_BYTES_MAX);
}

#[test]
fn pod_is_selected_by_uid_first() {
    let mut message = object_message(&id("pod"));
    assert_eq!(
        selector(Some(&message)),
        Ok(PodSelector::Uid(id("pod").uid))
    );
    message.uid.clear();
    assert_eq!(
        selector(Some(&message)),
        Ok(PodSelector::Name(id("pod").namespace, id("pod").name))
    );
    message.name.clear();
    assert!(
        selector(Some(&message))
            .unwrap_err()
            .message
            .starts_with("pod.name")
    );
    assert!(selector(None).is_err());
}

#[test]
fn response_has_outcome_of_each_claim() {
    let outcome = |name: &str, end| ClaimOutcome {
        namespace: id(name).namespace,
        name: id(name).name,
        uid: None,
        end,
    };
    let refused =
        Problem::conflict("device-held", "another claim has it").with("holder", "default/x");
    let outcome = PodOutcome {
        pod: id("pod"),
        claims: vec![
            outcome(
                "one",
                Ok(nodedock_core::manager::claims::ClaimEnd::Prepared),
            ),
            outcome(
                "two",
                Err(refused.retry_after(std::time::Duration::from_secs(1))),
            ),
        ],
        resources: vec![],
        containers: vec![],
    };
    let answer = prepared(&outcome);
    assert_eq!(answer.claims[0].outcome, "prepared");
    let problem = answer.claims[1].problem.as_ref().unwrap();
    assert_eq!(
        (problem.kind.as_str(), problem.code.as_str()),
        ("conflict", "device-held")
    );
    assert_eq!(
        (problem.retry_after_ms, problem.details["holder"].as_str()),
        (Some(1000), "default/x")
    );
    assert_eq!(
        unprepared(&object_message(&id("pod")), &[]).pod,
        Some(object_message(&id("pod")))
    );
}

#[test]
fn container_kind_defaults_to_app() {
    let mut message = message();
    message.containers[0].kind.clear();
    message.containers[1].numa_affinity = vec![3, 0, 3];
    assert_eq!(pod_request(&message).unwrap().0, request());
}

#[test]
fn response_has_outcome_of_each_resource() {
    use nodedock_core::manager::devices::ResourceOutcome;
    use nodedock_model::{AllocationMount, AllocationNode, ContainerAllocation};
    let outcome = |name: &str, end| ResourceOutcome {
        container: "main".to_owned(),
        resource: resource(name),
        end,
    };
    let refused = Problem::unavailable("too-few-devices", "none is free");
    let text = str::to_owned;
    let allocation = ContainerAllocation {
        env: BTreeMap::from([(text("A"), text("1"))]),
        mounts: vec![AllocationMount {
            host_path: text("/h"),
            container_path: text("/c"),
            read_only: true,
        }],
        device_nodes: vec![AllocationNode {
            host_path: text("/dev/h"),
            container_path: text("/dev/c"),
            permissions: text("rw"),
        }],
        annotations: BTreeMap::from([(text("k"), text("v"))]),
        cdi_devices: vec![text("v/c=0")],
    };
    let container = ContainerAnswer {
        name: text("main"),
        allocation,
        conflicts: vec![text("twice")],
    };
    let devices = BTreeMap::from([(text("b"), vec![0]), (text("a"), vec![])]);
    let outcome = PodOutcome {
        pod: id("pod"),
        claims: vec![],
        resources: vec![
            outcome("a.dev/a", Ok(devices)),
            outcome("b.dev/b", Err(refused)),
        ],
        containers: vec![container],
    };
    let answer = prepared(&outcome);
    let [good, bad] = answer.resources.as_slice() else {
        panic!("{answer:#?}")
    };
    assert_eq!(
        (good.container.as_str(), good.resource.as_str()),
        ("main", "a.dev/a")
    );
    assert_eq!(
        (good.outcome.as_str(), good.device_ids.as_slice()),
        ("allocated", ["a", "b"].map(text).as_slice())
    );
    assert_eq!((bad.outcome.as_str(), bad.device_ids.len()), ("refused", 0));
    assert_eq!(bad.problem.as_ref().unwrap().code, "too-few-devices");
    let expected = v1::ContainerDevices {
        name: text("main"),
        cdi_devices: vec![text("v/c=0")],
        env: BTreeMap::from([(text("A"), text("1"))]),
        mounts: vec![v1::Mount {
            host_path: text("/h"),
            container_path: text("/c"),
            read_only: true,
        }],
        device_nodes: vec![v1::DeviceNode {
            host_path: text("/dev/h"),
            container_path: text("/dev/c"),
            permissions: text("rw"),
        }],
        annotations: BTreeMap::from([(text("k"), text("v"))]),
        conflicts: vec![text("twice")],
    };
    assert_eq!(answer.containers, [expected]);
    let freed = unprepared(&object_message(&id("pod")), &[outcome]);
    let words: Vec<_> = freed
        .resources
        .iter()
        .map(|resource| resource.outcome.as_str())
        .collect();
    assert_eq!(words, ["freed", "refused"]);
}
