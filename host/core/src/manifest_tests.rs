//! Fixtures are objects as an API server of Kubernetes 1.36 and its scheduler wrote them.

use std::io::Write;

use super::*;
use nodedock_model::ConfigSource;

fn fixture(name: &str) -> Objects {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/fixtures/kubernetes-1.36")
        .join(name);
    read(&path).unwrap()
}

fn only_claim(name: &str) -> Claim {
    let mut objects = fixture(name);
    assert_eq!((objects.claims.len(), objects.pods.len()), (1, 0));
    objects.claims.remove(0)
}

fn only_pod(name: &str) -> PodRequest {
    let mut objects = fixture(name);
    assert_eq!((objects.claims.len(), objects.pods.len()), (0, 1));
    objects.pods.remove(0)
}

/// Request, driver, pool and device of each result.
fn devices(claim: &Claim) -> Vec<[&str; 4]> {
    let devices = claim
        .allocation
        .iter()
        .flat_map(|allocation| &allocation.devices);
    devices
        .map(|d| {
            [
                d.request.as_str(),
                d.driver.as_str(),
                d.pool.as_str(),
                d.device.as_str(),
            ]
        })
        .collect()
}

/// The error with its causes, as a person sees it.
fn error_of(text: &str) -> String {
    nodedock_base::error::chain(&parse(text, "pods.yaml").unwrap_err()).to_string()
}

#[track_caller]
fn assert_says(error: &str, parts: &[&str]) {
    for part in parts {
        assert!(error.contains(part), "{part:?} is wanted in: {error}");
    }
}

#[test]
fn allocated_claim_is_read_completely() {
    let claim = only_claim("claim-one-gpu.json");
    assert_eq!(claim.id.to_string(), "default/one-gpu");
    assert_eq!(
        claim.id.uid.as_str(),
        "68a5aecc-0b16-411c-ac56-2f23834fb15c"
    );
    assert_eq!(
        devices(&claim),
        [["gpu", "gpu.example.com", "node-1", "gpu-0"]]
    );
    assert_eq!((claim.reserved_for.len(), &claim.owner_pod), (2, &None));
    assert!(
        claim.reserved_for.iter().all(|consumer| consumer.is_pod()),
        "{:?}",
        claim.reserved_for
    );
    let allocation = claim.allocation.unwrap();
    assert_eq!(allocation.node_name.as_deref(), Some("node-1"));
    let [config] = allocation.configs.as_slice() else {
        panic!("one config")
    };
    assert_eq!(
        (config.source, config.requests.as_slice()),
        (ConfigSource::Claim, ["gpu".to_owned()].as_slice())
    );
    let parameters: Value = serde_json::from_str(&config.parameters).unwrap();
    assert_eq!(parameters["sharing"]["strategy"], "TimeSlicing");
}

#[test]
fn claim_has_devices_of_each_driver() {
    let claim = only_claim("claim-gpu-and-nic.json");
    let wanted = [
        ["gpu", "gpu.example.com", "node-1", "gpu-1"],
        ["nic", "nic.example.com", "nics", "nic-0"],
    ];
    assert_eq!(devices(&claim), wanted);
}

#[test]
fn first_available_request_keeps_subrequest() {
    let claim = only_claim("claim-first-available.json");
    assert_eq!(
        devices(&claim),
        [["gpu/normal", "gpu.example.com", "node-1", "gpu-2"]]
    );
    assert_eq!(claim.allocation.unwrap().devices[0].base_request(), "gpu");
}

#[test]
fn share_has_id_and_consumed_capacity() {
    let claim = only_claim("claim-share-a.json");
    let device = claim.allocation.unwrap().devices.remove(0);
    assert_eq!(
        device.share_id.as_deref(),
        Some("bb8e3567-9e9f-44d5-be77-47e2bca0a4eb")
    );
    assert_eq!(
        device.consumed,
        BTreeMap::from([("memory".to_owned(), "20Gi".to_owned())])
    );
    assert!(!device.admin_access);
}

#[test]
fn admin_access_covers_all_devices() {
    let claim = only_claim("claim-monitor.json");
    assert_eq!(claim.id.namespace.as_str(), "admin");
    let devices = claim.allocation.unwrap().devices;
    assert_eq!(devices.len(), 6);
    assert!(devices.iter().all(|device| device.admin_access));
}

/// Items of a list from the API server say neither apiVersion nor kind, and the whole list was refused.
#[test]
fn typed_list_implies_item_kinds() {
    let objects = fixture("claim-list.json");
    assert_eq!(objects.claims.len(), 7);
    let made = objects
        .claims
        .iter()
        .find(|claim| claim.id.name.as_str() == "pod-template-nic-zzgwv")
        .unwrap();
    let owner = made.owner_pod.as_ref().map(Uid::as_str);
    assert_eq!(owner, Some("1626e799-e728-44ab-baea-ccc876d5ae84"));
    assert_eq!(
        made.annotations["resource.kubernetes.io/pod-claim-name"],
        "nic"
    );
}

#[test]
fn pod_refers_to_claims_by_name() {
    let pod = only_pod("pod-gpu-and-nic.json");
    assert_eq!(pod.pod.uid.as_str(), "60e98cf3-7d77-4c40-89e5-26b4ca5fd689");
    let reference = |name: &str, claim: &str| ClaimReference {
        pod_claim_name: name.to_owned(),
        claim_name: ObjectName::new(claim).unwrap(),
        claim_uid: None,
    };
    assert_eq!(pod.claims, [reference("both", "gpu-and-nic")]);
    let claim = ContainerClaim {
        pod_claim_name: "both".to_owned(),
        request: Some("gpu".to_owned()),
    };
    assert_eq!(
        pod.containers,
        [PodContainer {
            name: "main".to_owned(),
            claims: vec![claim],
            ..PodContainer::default()
        }]
    );
    let all = &only_pod("pod-one-gpu.json").containers[0].claims[0];
    assert_eq!(all.request, None);
}

#[test]
fn template_claim_is_found_in_status() {
    let pod = only_pod("pod-template.json");
    assert_eq!(pod.claims[0].claim_name.as_str(), "pod-template-nic-zzgwv");
    assert_eq!(pod.claims[0].pod_claim_name, "nic");
}

/// A pod whose extended resource the scheduler took from a driver was given nothing, and no error.
#[test]
fn extended_resource_claim_comes_from_status() {
    let pod = only_pod("pod-extended.json");
    assert_eq!(
        pod.claims[0].claim_name.as_str(),
        "pod-extended-extended-resources-kr6q7"
    );
    let claim = &pod.containers[0].claims[0];
    assert_eq!(claim.pod_claim_name, pod.claims[0].pod_claim_name);
    assert_eq!(claim.request.as_deref(), Some("container-0-request-0"));
}

#[test]
fn pod_has_its_group_name() {
    let with = |group: &str| POD.replace("spec:", &format!("spec:\n  schedulingGroup: {group}"));
    let group_of = |text: &str| parse(text, "pod.yaml").unwrap().pods.remove(0).pod_group;
    assert_eq!(
        group_of(&with("{podGroupName: train}")),
        Some(ObjectName::new("train").unwrap())
    );
    assert_eq!((group_of(&with("{}")), group_of(POD)), (None, None));
    let error = error_of(&with("{podGroupName: Train}"));
    assert_says(
        &error,
        &["Pod one", "spec.schedulingGroup.podGroupName", "Train"],
    );
}

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: one, uid: p-1}
spec:
  initContainers: [{name: first, resources: {claims: [{name: gpu}]}}]
  containers: [{name: main}]
  resourceClaims: [{name: gpu, resourceClaimName: one}]
";

const CLAIM: &str = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: one, uid: c-1}
spec: {}
";

#[test]
fn file_may_contain_several_documents() {
    let list = "apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Service, metadata: {name: x}}]\n";
    let text = format!("---\n{POD}\n---\n{CLAIM}\n---\n---\n{list}");
    let objects = parse(&text, "all.yaml").unwrap();
    assert_eq!((objects.pods.len(), objects.claims.len()), (1, 1));
    assert_eq!(objects.pods[0].pod.namespace.as_str(), "default");
    assert_eq!(
        objects.pods[0]
            .containers
            .iter()
            .map(|c| c.name.as_str())
            .collect::<Vec<_>>(),
        ["first", "main"]
    );
    assert_eq!(objects.claims[0].allocation, None);
}

const WRITTEN: Written<'static> = Written {
    unknown_fields: |_, object| {
        let specification = object.get("specification");
        specification
            .iter()
            .map(|_| "unknown field \"specification\"".to_owned())
            .collect()
    },
    namespace: "team",
    pod_uid: |namespace, name| Uid::new(format!("{namespace}-{name}")).unwrap(),
};

#[test]
fn written_pod_gets_namespace_and_uid() {
    let of = |text: &str| {
        let mut objects = parse_written(text, "all.yaml", &WRITTEN).unwrap();
        objects.pods.remove(0).pod
    };
    let made = of(&POD.replace(", uid: p-1", ""));
    assert_eq!(
        (made.namespace.as_str(), made.uid.as_str()),
        ("team", "team-one")
    );
    let given = of(&POD.replace("uid: p-1", "uid: p-1, namespace: own"));
    assert_eq!(
        (given.namespace.as_str(), given.uid.as_str()),
        ("own", "p-1")
    );
}

#[test]
fn unknown_field_of_written_object_refused() {
    let text = format!("{CLAIM}---\n{}", POD.replace("spec:", "specification:"));
    let error = parse_written(&text, "all.yaml", &WRITTEN).unwrap_err();
    let expected = "document 2, Pod one: unknown field \"specification\"";
    assert_eq!(error.to_string(), expected);
}

#[test]
fn foreign_kinds_are_named() {
    let list = "apiVersion: v1\nkind: List\nitems: [{apiVersion: v1, kind: Service, metadata: {name: x}}]\n";
    let text = format!("{POD}---\n{list}");
    let objects = parse(&text, "all.yaml").unwrap();
    assert_eq!(objects.skipped, ["document 2: Service x (v1)"]);
    let kinds: Vec<_> = documents(&text, "all.yaml").unwrap();
    let kinds: Vec<_> = kinds.iter().map(kind_of).collect();
    assert_eq!(kinds, ["Pod", "Service"]);
}

#[test]
fn unneeded_template_claim_is_skipped() {
    let text = POD.replace("resourceClaimName: one", "resourceClaimTemplateName: one");
    let with_status = format!("{text}status: {{resourceClaimStatuses: [{{name: gpu}}]}}\n");
    assert_eq!(parse(&with_status, "pod.yaml").unwrap().pods[0].claims, []);
    assert_says(
        &error_of(&text),
        &["Pod one", "\"gpu\"", "template", "does not say yet"],
    );
}

#[test]
fn error_names_document_object_and_field() {
    let second = |text: String| format!("{CLAIM}---\n{text}");
    let with_device = |device: &str| {
        let status = "status: {allocation: {devices: {results: [{request: r, driver: gpu.example.com, pool: p, device: X}]}}}";
        format!("{CLAIM}{}\n", status.replace("device: X", device))
    };
    let cases: [(String, &[&str]); 10] = [
        (
            CLAIM.replace(", uid: c-1", ""),
            &["document 1", "ResourceClaim one", "metadata.uid is missing"],
        ),
        (
            POD.replace(", uid: p-1", ""),
            &["document 1", "Pod one", "metadata.uid is missing"],
        ),
        (
            second(POD.replace("name: one, uid", "name: One, uid")),
            &["document 2", "Pod One", "metadata.name"],
        ),
        (
            second(CLAIM.replace("c-1", "../c")),
            &["document 2", "ResourceClaim one", "metadata.uid", "../c"],
        ),
        (
            with_device("device: GPU_0"),
            &["ResourceClaim one", "results[].device", "GPU_0"],
        ),
        (
            CLAIM.replace("/v1", "/v1beta1"),
            &[
                "document 1",
                "resource.k8s.io/v1beta1",
                "resource.k8s.io/v1 is",
            ],
        ),
        (
            second("kind: Pod\n".to_owned()),
            &["document 2", "apiVersion"],
        ),
        (
            POD.replace("resourceClaimName: one", "x: y"),
            &["Pod one", "\"gpu\"", "neither resourceClaimName"],
        ),
        (
            POD.replace("claims: [{name: gpu}]", "claims: [{name: nic}]"),
            &["Pod one", "\"first\"", "\"nic\""],
        ),
        (
            POD.replace("spec:", "spec: [") + "]",
            &["pods.yaml", "line"],
        ),
    ];
    for (text, parts) in cases {
        assert_says(&error_of(&text), parts);
    }
}

#[test]
fn mismatch_names_line_and_field() {
    let pod = "\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: one, uid: p-1}\nspec:\n  containers:\n  - name: main\n  - name: [second]\n";
    assert_says(
        &error_of(&format!("{CLAIM}{pod}")),
        &[
            "document 2, line ",
            "field spec.containers[1].name: not a valid Pod",
        ],
    );
    let error = error_of(pod);
    assert_says(&error, &["document 1, line 9, field"]);
    let list = "{apiVersion: v1, kind: List, items: [\n{apiVersion: v1, kind: Pod, metadata: {name: a, uid: u}},\n{apiVersion: v1, kind: Pod, metadata: 7}]}";
    assert_says(
        &error_of(list),
        &["document 1, line 3, field items[1].metadata: not a valid Pod"],
    );
}

#[test]
fn unknown_config_source_is_refused() {
    let with = |config: &str| {
        format!("{CLAIM}status: {{allocation: {{devices: {{config: [{config}]}}}}}}\n")
    };
    let opaque = "opaque: {driver: gpu.example.com, parameters: {a: 1}}";
    let found = parse(&with("{source: FromClass}"), "claim.yaml").unwrap();
    assert_eq!(found.claims[0].allocation.as_ref().unwrap().configs, []);
    assert_says(
        &error_of(&with(&format!("{{source: Other, {opaque}}}"))),
        &["ResourceClaim one", "\"Other\""],
    );
    let found = parse(
        &with(&format!("{{source: FromClass, {opaque}}}")),
        "claim.yaml",
    )
    .unwrap();
    let config = &found.claims[0].allocation.as_ref().unwrap().configs[0];
    assert_eq!(
        (config.source, config.parameters.as_str()),
        (ConfigSource::DeviceClass, "{\"a\":1}")
    );
}

#[test]
fn only_single_node_selector_names_node() {
    let with = |terms: &str| {
        let text = format!(
            "{CLAIM}status: {{allocation: {{nodeSelector: {{nodeSelectorTerms: [{terms}]}}}}}}\n"
        );
        parse(&text, "claim.yaml")
            .unwrap()
            .claims
            .remove(0)
            .allocation
            .unwrap()
            .node_name
    };
    let field = |operator: &str, values: &str| {
        format!(
            "{{matchFields: [{{key: metadata.name, operator: {operator}, values: [{values}]}}]}}"
        )
    };
    assert_eq!(with(&field("In", "node-1")).as_deref(), Some("node-1"));
    let others = [
        field("In", "node-1, node-2"),
        field("NotIn", "node-1"),
        "{}".to_owned(),
    ];
    others
        .iter()
        .for_each(|terms| assert_eq!(with(terms), None, "{terms}"));
    assert_eq!(
        with(&format!(
            "{}, {}",
            field("In", "node-1"),
            field("In", "node-2")
        )),
        None
    );
}

#[test]
fn unreadable_file_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("claims.yaml");
    let error = |path: &Path| nodedock_base::error::chain(&read(path).unwrap_err()).to_string();
    assert_says(&error(&path), &["claims.yaml"]);
    std::fs::write(&path, b"kind: \xff").unwrap();
    assert_says(&error(&path), &["claims.yaml", "UTF-8"]);
    let mut file = std::fs::File::create(&path).unwrap();
    let line = [b'#'; 1 << 20];
    (0..5).for_each(|_| file.write_all(&line).unwrap());
    assert_says(&error(&path), &["claims.yaml", "larger than 4194304 bytes"]);
}

/// A pod with the containers, in YAML's flow form.
fn pod_with(containers: &str) -> String {
    format!("{{apiVersion: v1, kind: Pod, metadata: {{name: p, uid: u}}, spec: {{{containers}}}}}")
}

#[test]
fn limits_of_all_containers_are_read() {
    let text = pod_with(
        "initContainers: [
            {name: init, resources: {limits: {example.com/gpu: 2}}},
            {name: side, restartPolicy: Always, resources: {limits: {example.com/gpu: '1'}}}],
         containers: [
            {name: main, resources: {
                limits: {example.com/gpu: 2000m, a.dev/nic: 1k, b.dev/none: 0, cpu: 500m, memory: 1Gi, hugepages-2Mi: 4Mi},
                requests: {example.com/gpu: 2, cpu: 100m, memory: 1Gi}}},
            {name: plain}]",
    );
    let pod = parse(&text, "pod.yaml").unwrap().pods.remove(0);
    let read = |container: &PodContainer| {
        let resources = container
            .resources
            .iter()
            .map(|(name, count)| format!("{name}={count}"));
        (
            container.name.clone(),
            container.kind.as_str(),
            resources.collect::<Vec<_>>().join(","),
        )
    };
    let expected = [
        ("init", "init", "example.com/gpu=2"),
        ("side", "sidecar", "example.com/gpu=1"),
        ("main", "app", "a.dev/nic=1000,example.com/gpu=2"),
        ("plain", "app", ""),
    ];
    let expected =
        expected.map(|(name, kind, resources)| (name.to_owned(), kind, resources.to_owned()));
    assert_eq!(
        pod.containers.iter().map(read).collect::<Vec<_>>(),
        expected
    );
}

#[test]
fn bad_resource_names_its_container() {
    let cases: [(&str, &[&str]); 7] = [
        (
            "limits: {example.com/gpu: 1500m}",
            &["limits.example.com/gpu", "\"1500m\"", "whole number"],
        ),
        ("limits: {example.com/gpu: -1}", &["\"-1\"", "negative"]),
        (
            "limits: {example.com/gpu: many}",
            &["\"many\"", "no quantity"],
        ),
        ("limits: {example.com/gpu: 1E}", &["\"1E\"", "more devices"]),
        (
            "limits: {Example.com/gpu: 1}",
            &["resources.limits", "Example.com/gpu"],
        ),
        (
            "requests: {example.com/gpu: 1}",
            &["requests.example.com/gpu", "no limit"],
        ),
        (
            "limits: {example.com/gpu: 2}, requests: {example.com/gpu: 1}",
            &["requests.example.com/gpu is 1", "limit 2", "the same"],
        ),
    ];
    for (resources, parts) in cases {
        let text = pod_with(&format!(
            "containers: [{{name: main, resources: {{{resources}}}}}]"
        ));
        let error = error_of(&text);
        assert_says(&error, &["document 1", "Pod p", "container \"main\""]);
        assert_says(&error, parts);
    }
}

/// The scheduler took the resource from a driver: a device plugin is not asked for it once more.
#[test]
fn claimed_resource_needs_no_plugin() {
    let text = "{apiVersion: v1, kind: Pod, metadata: {name: p, uid: u}, spec: {containers: [
            {name: main, resources: {limits: {example.com/gpu: 1, a.dev/nic: 1}}},
            {name: other, resources: {limits: {example.com/gpu: 1}}}]},
          status: {extendedResourceClaimStatus: {resourceClaimName: c, requestMappings: [
            {containerName: main, requestName: r, resourceName: example.com/gpu}]}}}";
    let pod = parse(text, "pod.yaml").unwrap().pods.remove(0);
    let wanted = |at: usize| {
        pod.containers[at]
            .resources
            .keys()
            .map(|name| name.as_str())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        (wanted(0), wanted(1)),
        (vec!["a.dev/nic"], vec!["example.com/gpu"])
    );
    assert_eq!(
        (
            pod.containers[0].claims.len(),
            pod.containers[1].claims.len()
        ),
        (1, 0)
    );
}
