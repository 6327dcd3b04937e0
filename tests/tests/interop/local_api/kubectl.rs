//! kubectl creates, shows, explains and deletes.

use nodedock_tests::drivers::MOCK_GPU_NAME;
use nodedock_tests::{DEADLINE, assert_parts};
use serde_json::{Value, json};

use super::{Machine, NODE, claim, class, devices};

/// The words of a table's rows, without the age at their end.
fn rows(table: &str) -> Vec<Vec<&str>> {
    let words = |line| {
        let mut words: Vec<&str> = str::split_whitespace(line).collect();
        words.pop();
        words
    };
    table.lines().map(words).collect()
}

#[tokio::test]
async fn applied_claims_are_allocated_and_shown() {
    let Some(machine) = Machine::with_gpus().await else {
        return;
    };
    let both = format!(
        "{}---\n{}",
        claim("one", "gpu", json!({})),
        claim("other", "none", json!({}))
    );
    machine.apply("claims", &both).await.done_with(&[
        "resourceclaim.resource.k8s.io/one created",
        "resourceclaim.resource.k8s.io/other created",
    ]);
    machine.until_allocated("one").await;

    let table = machine
        .kubectl(&["get", "resourceclaims", "-o", "wide"])
        .await
        .done();
    assert_eq!(
        rows(&table),
        [
            ["NAME", "STATE"],
            ["one", "allocated"],
            ["other", "pending"]
        ]
    );
    let found = machine.get("resourceclaim/one").await;
    let [device] = &devices(&found)[..] else {
        panic!("one device is requested: {found:#}")
    };
    assert!(device.starts_with(&format!("{MOCK_GPU_NAME}/")), "{device}");
    assert_eq!(
        machine
            .cli(&["claim", "get", "one", "-o", "json"])
            .await
            .json()["metadata"]["uid"],
        found["metadata"]["uid"]
    );
    let described = machine
        .kubectl(&["describe", "resourceclaim", "one"])
        .await
        .done();
    assert_parts(
        &described,
        &[
            "Name:         one",
            "Device Class Name:  gpu",
            device.rsplit('/').next().unwrap_or_default(),
        ],
    );

    let slices = machine
        .kubectl(&["get", "resourceslices", "-o", "wide"])
        .await
        .done();
    let of_node: Vec<_> = rows(&slices)
        .into_iter()
        .skip(1)
        .map(|row| (row[1], row[2]))
        .collect();
    assert!(
        !of_node.is_empty() && of_node.iter().all(|found| *found == (NODE, MOCK_GPU_NAME)),
        "{slices}"
    );
    machine
        .kubectl(&["describe", "node", NODE])
        .await
        .done_with(&["kubernetes.io/os=linux", MOCK_GPU_NAME]);
    let classes = machine.kubectl(&["get", "deviceclasses"]).await.done();
    assert_eq!(rows(&classes), [["NAME"], ["gpu"]]);
}

#[tokio::test]
async fn objects_are_printed_like_kubectl() {
    let Some(machine) = Machine::with_gpus().await else {
        return;
    };
    for name in ["one", "two"] {
        machine.allocated(name).await;
    }
    for (own, kubectl) in [
        (&["claim", "get"][..], &["get", "resourceclaims"][..]),
        (&["claim", "get", "one"], &["get", "resourceclaim", "one"]),
        (&["get", "deviceclasses"], &["get", "deviceclasses"]),
        (
            &["get", "deviceclasses", "gpu"],
            &["get", "deviceclass", "gpu"],
        ),
        (&["get", "slices"], &["get", "resourceslices"]),
    ] {
        let json = ["-o", "json"];
        let shown = machine.cli(&[own, &json].concat()).await.json();
        let expected = machine.kubectl(&[kubectl, &json].concat()).await.json();
        assert_eq!(shown, expected, "{own:?}");
    }
    let yaml = machine.cli(&["claim", "get", "-o", "yaml"]).await.done();
    let file = machine.write("printed.yaml", yaml);
    let file = file.to_str().expect("UTF-8");
    machine
        .kubectl(&["apply", "--dry-run=server", "-f", file])
        .await
        .done_with(&["/one ", "/two "]);
}

#[tokio::test]
async fn pending_claim_has_events() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "web" },
        "spec": { "containers": [{ "name": "main", "image": "none" }],
            "resourceClaims": [{ "name": "gpu", "resourceClaimName": "one" }] } });
    let both = format!("{}---\n{pod}\n", claim("one", "none", json!({})));
    machine.apply("both", &both).await.done();
    let described = async |object: &str| {
        let (_, name) = object.split_once('/').expect("KIND/NAME");
        loop {
            let described = machine.kubectl(&["describe", object]).await.done();
            if described.contains("FailedScheduling") {
                assert_parts(
                    &described,
                    &["Warning", "cannot allocate devices: ", "nodedock"],
                );
                return described;
            }
            assert_parts(&described, &[name]);
            tokio::task::yield_now().await;
        }
    };
    let claim = tokio::time::timeout(DEADLINE, described("resourceclaim/one"));
    claim.await.expect("the claim has an Event");
    let pod = tokio::time::timeout(DEADLINE, described("pod/web")).await;
    assert_parts(&pod.expect("the pod has an Event"), &["claim one: "]);
}

/// A pod whose template was misspelt had no Event.
#[tokio::test]
async fn pod_without_template_has_event() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    let pod = json!({ "apiVersion": "v1", "kind": "Pod", "metadata": { "name": "web" },
        "spec": { "containers": [{ "name": "main", "image": "none" }],
            "resourceClaims": [{ "name": "gpu", "resourceClaimTemplateName": "none" }] } });
    machine.apply("pod", &pod.to_string()).await.done();
    let described = async {
        loop {
            let described = machine.kubectl(&["describe", "pod/web"]).await.done();
            if described.contains("FailedResourceClaimCreation") {
                return described;
            }
            tokio::task::yield_now().await;
        }
    };
    let described = tokio::time::timeout(DEADLINE, described).await;
    assert_parts(
        &described.expect("the pod has an Event"),
        &[
            "Warning",
            "cannot create the claim gpu: there is no ResourceClaimTemplate default/none",
            "nodedock",
        ],
    );
}

#[tokio::test]
async fn lists_support_selectors_sorting_and_chunks() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    for (name, color) in [("c", "red"), ("a", "blue"), ("b", "red")] {
        machine
            .apply(name, &claim(name, "gpu", json!({ "color": color })))
            .await
            .done();
    }
    let names = async |options: &[&str]| {
        let list = [&["get", "resourceclaims", "-o", "name"], options].concat();
        let names = machine.kubectl(&list).await.done();
        names
            .lines()
            .map(|line| line.replace("resourceclaim.resource.k8s.io/", ""))
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&["--chunk-size=1"]).await, ["a", "b", "c"]);
    assert_eq!(names(&["-l", "color=red"]).await, ["b", "c"]);
    assert_eq!(names(&["-l", "color notin (red)"]).await, ["a"]);
    assert_eq!(
        names(&["--field-selector", "metadata.name!=b"]).await,
        ["a", "c"]
    );
    assert_eq!(
        names(&["--sort-by", ".metadata.creationTimestamp"])
            .await
            .len(),
        3
    );
    assert_eq!(names(&["-A"]).await, ["a", "b", "c"]);
    assert_eq!(names(&["-n", "other"]).await, [""; 0]);
    assert_eq!(
        names(&["--sort-by", ".metadata.labels.color"]).await[0],
        "a"
    );
    for (form, expected) in [
        ("jsonpath={.items[*].metadata.name}", "a b c"),
        (
            "go-template={{range .items}}{{.metadata.name}}{{end}}",
            "abc",
        ),
        (
            "custom-columns=N:.metadata.name,C:.metadata.labels.color",
            "N C a blue b red c red",
        ),
    ] {
        let list = machine
            .kubectl(&["get", "resourceclaims", "-o", form])
            .await;
        let words: Vec<_> = list.stdout.split_whitespace().collect();
        assert_eq!(words.join(" "), expected, "{list:?}");
    }
    let shown = machine
        .kubectl(&["get", "resourceclaims", "-L", "color", "-l", "color=blue"])
        .await
        .done();
    assert_parts(&shown, &["COLOR", "blue"]);
}

#[tokio::test]
async fn the_api_says_what_it_has() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    let resources = machine
        .kubectl(&["api-resources", "--no-headers"])
        .await
        .done();
    let resources: Vec<Vec<&str>> = resources
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    for (name, version, namespaced, kind) in [
        (
            "deviceclasses",
            "resource.k8s.io/v1",
            "false",
            "DeviceClass",
        ),
        (
            "resourceclaims",
            "resource.k8s.io/v1",
            "true",
            "ResourceClaim",
        ),
        (
            "resourceclaimtemplates",
            "resource.k8s.io/v1",
            "true",
            "ResourceClaimTemplate",
        ),
        (
            "resourceslices",
            "resource.k8s.io/v1",
            "false",
            "ResourceSlice",
        ),
        ("nodes", "v1", "false", "Node"),
        ("pods", "v1", "true", "Pod"),
        ("events", "v1", "true", "Event"),
        ("namespaces", "v1", "false", "Namespace"),
    ] {
        let found = resources
            .iter()
            .find(|row| row.first() == Some(&name) && row.contains(&version));
        let found = found.unwrap_or_else(|| panic!("{name} of {version} in {resources:?}"));
        assert_eq!(
            found[found.len() - 3..],
            [version, namespaced, kind],
            "{found:?}"
        );
    }
    let versions = machine.kubectl(&["api-versions"]).await.done();
    assert_parts(&versions, &["resource.k8s.io/v1\n", "v1\n"]);
    assert_eq!(
        machine.kubectl(&["get", "--raw", "/readyz"]).await.done(),
        "ok"
    );
    machine
        .kubectl(&["version"])
        .await
        .done_with(&["Server Version: v1."]);
    machine
        .kubectl(&["get", "namespaces", "-o", "name"])
        .await
        .done_with(&["namespace/default"]);

    let explained = machine.kubectl(&["explain", "resourceclaim"]).await.done();
    assert_parts(
        &explained,
        &[
            "GROUP:      resource.k8s.io",
            "KIND:       ResourceClaim",
            "spec\t<ResourceClaimSpec> -required-",
        ],
    );
    let field = machine
        .kubectl(&[
            "explain",
            "resourceclaim.spec.devices.requests.exactly.count",
        ])
        .await
        .done();
    assert_parts(&field, &["FIELD: count <integer>"]);
    let whole = machine
        .kubectl(&["explain", "resourceclaim.spec", "--recursive"])
        .await
        .done();
    assert_parts(
        &whole,
        &["firstAvailable", "deviceClassName", "tolerations"],
    );
    machine
        .kubectl(&["explain", "resourceclaim.spec.color"])
        .await
        .failed_with(1, &["color"]);
}

#[tokio::test]
async fn unknown_manifest_field_is_named() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    let good = claim("one", "gpu", json!({}));
    let bad = good.replace(
        "\"deviceClassName\"",
        "\"color\": \"red\", \"deviceClassName\"",
    );
    let unknown = "unknown field \"spec.devices.requests[0].exactly.color\"";
    for options in [&[][..], &["--server-side"], &["--dry-run=server"]] {
        machine
            .apply_with("bad", &bad, options)
            .await
            .failed_with(1, &[unknown]);
    }
    machine
        .kubectl(&["get", "resourceclaim", "one"])
        .await
        .failed_with(1, &["resourceclaims.resource.k8s.io \"one\" not found"]);

    let warned = machine.apply_with("bad", &bad, &["--validate=warn"]).await;
    assert_parts(&warned.stderr, &["Warning", unknown]);
    warned.done_with(&["created"]);
    let stored = machine.get("resourceclaim/one").await;
    assert_eq!(
        stored["spec"]["devices"]["requests"][0]["exactly"].get("color"),
        None
    );
}

#[tokio::test]
async fn invalid_objects_are_refused_like_clusters() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    let admin = claim("admin", "gpu", json!({})).replace(
        "\"deviceClassName\"",
        "\"adminAccess\": true, \"deviceClassName\"",
    );
    let refused = machine.apply("admin", &admin).await.failed(1);
    assert_parts(
        &refused,
        &[
            "spec.devices.requests[0].adminAccess: Forbidden",
            "resource.kubernetes.io/admin-access: true",
        ],
    );
    let bad_name = machine
        .apply("name", &claim("Bad_Name", "gpu", json!({})))
        .await
        .failed(1);
    assert_parts(&bad_name, &["metadata.name: Invalid value: \"Bad_Name\""]);
    let broken = class("broken", "x").replace("==", "=");
    machine
        .apply("broken", &broken)
        .await
        .failed_with(1, &["spec.selectors[0].cel.expression"]);

    let file = machine.write("twice.yaml", claim("twice", "gpu", json!({})));
    let create = ["create", "-f", file.to_str().expect("UTF-8")];
    machine
        .kubectl(&create)
        .await
        .done_with(&["resourceclaim.resource.k8s.io/twice created"]);
    machine
        .kubectl(&create)
        .await
        .failed_with(1, &["AlreadyExists", "\"twice\" already exists"]);
}

#[tokio::test]
async fn list_applies_and_unserved_kinds_fail() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    let item = |manifest: &str| serde_json::from_str::<Value>(manifest).expect("JSON");
    let items = [
        item(&class("gpu", "x")),
        item(&claim("one", "gpu", json!({}))),
    ];
    let list = json!({ "apiVersion": "v1", "kind": "List", "items": items }).to_string();
    machine
        .apply("list", &list)
        .await
        .done_with(&["deviceclass.resource.k8s.io/gpu created", "one created"]);
    machine
        .apply_with("list", &list, &["--server-side"])
        .await
        .done_with(&["one serverside-applied"]);
    let other = json!({ "apiVersion": "v1", "kind": "ConfigMap", "metadata": { "name": "one" } })
        .to_string();
    machine
        .apply("other", &other)
        .await
        .failed_with(1, &["no matches for kind \"ConfigMap\" in version \"v1\""]);
}

#[tokio::test]
async fn a_dry_run_changes_nothing() {
    let Some(machine) = Machine::start().await else {
        return;
    };
    let text = claim("one", "gpu", json!({ "color": "red" }));
    machine
        .apply_with("dry", &text, &["--dry-run=server"])
        .await
        .done_with(&["created (server dry run)"]);
    machine
        .kubectl(&["get", "resourceclaim", "one"])
        .await
        .failed_with(1, &["not found"]);
    machine.apply("dry", &text).await.done();
    let changed = machine.write("changed.yaml", text.replace("red", "blue"));
    let changed = changed.to_str().expect("UTF-8");
    let difference = machine.kubectl(&["diff", "-f", changed]).await.failed(1);
    assert_parts(&difference, &["-    color: red", "+    color: blue"]);
    assert!(!difference.contains("+  resourceVersion"), "{difference}");
    let label = machine.get("resourceclaim/one").await["metadata"]["labels"]["color"].take();
    assert_eq!(label, "red");
}

#[tokio::test]
async fn deleted_claim_ends_with_its_unprepare() {
    let Some(machine) = Machine::with_gpus().await else {
        return;
    };
    machine.allocated("one").await;
    machine
        .cli(&["prepare", "--pod", "web", "--claim", "one"])
        .await
        .done();
    let table = machine.kubectl(&["get", "resourceclaims"]).await.done();
    assert_eq!(rows(&table)[1], ["one", "allocated,reserved"]);

    let deleted = machine
        .kubectl(&["delete", "resourceclaim", "one", "--wait=false"])
        .await
        .done();
    assert_parts(&deleted, &["resourceclaim.resource.k8s.io \"one\" deleted"]);
    let table = machine.kubectl(&["get", "resourceclaims"]).await.done();
    assert_eq!(rows(&table)[1], ["one", "deleted,allocated,reserved"]);
    machine.cli(&["unprepare", "default/web"]).await.done();
    machine.until_deleted("resourceclaim/one").await;
    machine.until_no_claims().await;

    // One that is not in use goes at once; kubectl waits for that.
    machine.allocated("two").await;
    machine
        .kubectl(&[
            "delete",
            "-f",
            machine.path().join("two.yaml").to_str().expect("UTF-8"),
        ])
        .await
        .done();
    machine
        .apply("three", &claim("three", "none", json!({})))
        .await
        .done();
    machine
        .kubectl(&["delete", "resourceclaims", "--all"])
        .await
        .done_with(&["\"three\" deleted"]);
    let table = machine.kubectl(&["get", "resourceclaims"]).await;
    assert_parts(&table.stderr, &["No resources found in default namespace."]);
    machine
        .kubectl(&["delete", "resourceclaim", "one"])
        .await
        .failed_with(1, &["\"one\" not found"]);
}

#[tokio::test]
async fn template_claim_ends_with_its_pod() {
    let Some(machine) = Machine::with_gpus().await else {
        return;
    };
    let template = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": { "name": "gpu" },
        "spec": {
            "metadata": { "labels": { "of": "template" } },
            "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": { "deviceClassName": "gpu" } }] } },
        },
    });
    let pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": { "name": "web" },
        "spec": {
            "containers": [{ "name": "main", "image": "none", "resources": { "claims": [{ "name": "gpu" }] } }],
            "resourceClaims": [{ "name": "gpu", "resourceClaimTemplateName": "gpu" }],
        },
    });
    machine
        .apply("pod", &format!("{template}\n---\n{pod}\n"))
        .await
        .done_with(&["pod/web created"]);
    let named = [
        "wait",
        "--for=jsonpath={.status.resourceClaimStatuses[0].resourceClaimName}",
        "pod/web",
        "--timeout=100s",
    ];
    machine.kubectl(&named).await.done();
    let name =
        machine.get("pod/web").await["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
            .take();
    let name = name.as_str().expect("the pod names its claim");
    assert!(name.starts_with("web-gpu-"), "{name}");
    machine.until_allocated(name).await;
    let claim = machine.get(&format!("resourceclaim/{name}")).await;
    assert_eq!(claim["metadata"]["labels"], json!({ "of": "template" }));
    assert_eq!(claim["metadata"]["ownerReferences"][0]["name"], "web");
    assert_eq!(
        claim["status"]["reservedFor"][0]["name"], "web",
        "{claim:#}"
    );
    machine
        .kubectl(&["get", "pods", "-o", "wide"])
        .await
        .done_with(&["NAME", "web"]);
    machine
        .kubectl(&["describe", "pod", "web"])
        .await
        .done_with(&["Status:       Pending"]);

    machine
        .kubectl(&["delete", "pod", "web"])
        .await
        .done_with(&["pod \"web\" deleted"]);
    machine
        .until_deleted(&format!("resourceclaim/{name}"))
        .await;
}
