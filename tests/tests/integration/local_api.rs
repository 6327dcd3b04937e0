//! A machine without a cluster: claims of the local API, by selectors, with devices of a driver file.

mod bulk;
mod class_files;
mod containers;
mod node_name;
mod pool_names;
mod programs;
mod race;
mod runtime;
mod users;

use nodedock_kube::local_client::LocalClient;
use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::{DEADLINE, Daemon, Options, Root};
use serde_json::Value;

const CLASS: &str = r#"
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: gpu}
spec:
  selectors: [{cel: {expression: 'device.driver == "mock-gpu.nodedock.dev"'}}]
"#;

/// A machine with four GPUs and a class for them.
async fn machine() -> Daemon {
    machine_with(Options::default().flag("--local-api")).await
}

async fn machine_with(options: Options) -> Daemon {
    let daemon = Daemon::start_with(options).await;
    daemon.install_gpus("driverVersion: 1.0.0\n");
    daemon.until_serving(MOCK_GPU_FILE).await;
    let api = api(&daemon).await;
    while api.slices().await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    let class = daemon.write("class.yaml", CLASS);
    daemon
        .cli(&["claim", "create", "-f", class.to_str().unwrap()])
        .await
        .done_with(&["deviceclass gpu created"]);
    daemon
}

async fn api(root: &Root) -> LocalClient {
    LocalClient::connect(&root.socket().with_file_name("api.sock"))
        .await
        .expect("the local API listens")
}

fn claim(name: &str, request: &str) -> String {
    format!(
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: {name}}}\nspec: {{devices: {{requests: [{{name: gpu, exactly: {request}}}]}}}}\n"
    )
}

/// Makes a claim that has to be allocated, and returns its devices.
async fn create(root: &Root, name: &str, request: &str) -> Vec<String> {
    let file = root.write(&format!("{name}.yaml"), claim(name, request));
    root.cli(&["claim", "create", "-f", file.to_str().unwrap()])
        .await
        .done();
    devices(root, name).await
}

async fn devices(root: &Root, name: &str) -> Vec<String> {
    let claim = root.cli(&["claim", "get", name, "-o", "json"]).await.json();
    let results = claim["status"]["allocation"]["devices"]["results"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    results
        .iter()
        .map(|result| result["device"].as_str().unwrap().to_owned())
        .collect()
}

#[tokio::test]
async fn selected_devices_stay_until_claim_deletion() {
    let mut daemon = machine().await;
    let selector = r#"{deviceClassName: gpu, selectors: [{cel: {expression: 'device.attributes["mock-gpu.nodedock.dev"].index == 2'}}]}"#;
    let request = r#"{deviceClassName: gpu, allocationMode: ExactCount, count: 2}"#;
    assert_eq!(create(&daemon, "third", selector).await, ["gpu-2"]);
    assert_eq!(create(&daemon, "two", request).await, ["gpu-0", "gpu-1"]);
    daemon.crash().await;
    assert_eq!(devices(&daemon, "two").await, ["gpu-0", "gpu-1"]);
    let prepared = ["prepare", "--pod", "web", "--claim", "two"];
    let before = daemon
        .cli(&prepared)
        .await
        .done_with(&["mock-gpu.nodedock.dev/claim="]);
    daemon.crash().await;
    assert_eq!(daemon.cli(&prepared).await.done(), before);
    let get = daemon.cli(&["claim", "get", "two", "-o", "wide"]).await;
    get.done_with(&["allocated,reserved", "gpus/gpu-0", "pods/web"]);
    // In use, it outlives its deletion.
    let delete = daemon
        .cli(&["claim", "delete", "two", "--timeout", "1"])
        .await;
    delete.failed_with(1, &["claim default/two is in use"]);
    // An unprepare waits for no driver that is being loaded.
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.cli(&["unprepare", "default/web"]).await.done();
    let (api, uid) = (api(&daemon).await, uid(&daemon, "two").await);
    if let Some(uid) = uid {
        assert!(
            api.until_gone("default", "two", &uid, nodedock_tests::DEADLINE)
                .await
        );
    }
    daemon
        .cli(&["claim", "get", "two"])
        .await
        .failed_with(1, &["there is no claim \"default/two\""]);
    daemon
        .cli(&["claim", "delete", "third"])
        .await
        .done_with(&["claim default/third deleted"]);
    daemon.assert_empty().await;
}

async fn uid(root: &Root, name: &str) -> Option<String> {
    let output = root.cli(&["claim", "get", name, "-o", "json"]).await;
    let claim: Value = serde_json::from_str(&output.stdout).ok()?;
    claim["metadata"]["uid"].as_str().map(str::to_owned)
}

#[tokio::test]
async fn pending_claim_explains_each_device() {
    let daemon = machine().await;
    let all = r#"{deviceClassName: gpu, allocationMode: ExactCount, count: 4}"#;
    assert_eq!(create(&daemon, "all", all).await.len(), 4);
    let file = daemon.write("one.yaml", claim("one", "{deviceClassName: gpu}"));
    let create = [
        "claim",
        "create",
        "-f",
        file.to_str().unwrap(),
        "--timeout",
        "1",
    ];
    daemon.cli(&create).await.failed_with(
        1,
        &[
            "claim default/one waits for devices",
            "nodedock explain claim default/one",
        ],
    );
    let why = [
        "is not allocated: request \"gpu\" needs 1 device",
        "gpus/gpu-3: in use by claim",
    ];
    // On a busy machine the node has not decided yet.
    let explained = async {
        loop {
            let output = daemon.cli(&["explain", "claim", "one"]).await.stdout;
            if why.iter().all(|part| output.contains(part)) {
                return;
            }
        }
    };
    let found = tokio::time::timeout(DEADLINE, explained).await;
    found.expect("it says why");
    daemon.cli(&["claim", "describe", "one"]).await.done_with(&[
        "is pending",
        "request gpu: 1 of class gpu",
        why[1],
    ]);
    let explained = daemon
        .cli(&["explain", "claim", "one", "-o", "json"])
        .await
        .json();
    assert_eq!(
        explained["waiting"][0]["excluded"].as_array().map(Vec::len),
        Some(4),
        "{explained}"
    );
    daemon.cli(&["claim", "delete", "all"]).await.done();
    assert!(
        api(&daemon)
            .await
            .until_allocated("default", "one")
            .await
            .is_some()
    );
}

#[tokio::test]
async fn file_commands_handle_all_named_objects() {
    let daemon = machine().await;
    let template = "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: one-gpu}\nspec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu}}]}}}\n";
    let pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {containers: [{name: main, image: none}], resourceClaims: [{name: gpu, resourceClaimName: one}]}\n";
    let one = claim("one", "{deviceClassName: gpu}");
    let file = daemon.write("all.yaml", [CLASS, template, &one, pod].join("---\n"));
    let file = file.to_str().unwrap();
    let made = [
        "deviceclass gpu unchanged",
        "resourceclaimtemplate default/one-gpu created",
        "pod default/web created",
    ];
    daemon
        .cli(&["claim", "create", "-f", file])
        .await
        .done_with(&made);
    daemon
        .cli(&["claim", "create", "-f", file])
        .await
        .failed_with(1, &["all.yaml, object 3", "already exists"]);
    daemon
        .cli(&["claim", "get", "-f", file])
        .await
        .done_with(&["one", "gpus/gpu-0"]);
    daemon
        .cli(&["claim", "describe", "-f", file])
        .await
        .done_with(&["claim default/one is allocated"]);
    let class = daemon.write("class.yaml", CLASS.replace("driver ==", "driver !="));
    let class = class.to_str().unwrap();
    daemon
        .cli(&["claim", "create", "-f", class])
        .await
        .done_with(&["deviceclass gpu updated"]);
    daemon
        .cli(&["claim", "get", "-f", class])
        .await
        .failed_with(1, &["there is no ResourceClaim in "]);
    let two = daemon.write("two.yaml", claim("two", "{deviceClassName: gpu}"));
    let two = two.to_str().unwrap();
    daemon
        .cli(&["claim", "create", "--timeout", "1", "-f", two])
        .await
        .failed_with(1, &["waits for devices"]);
    // Without selectors every device will do: what is not in the file any more is not in the class.
    let any = daemon.write(
        "any.yaml",
        "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: gpu}\nspec: {}\n",
    );
    daemon
        .cli(&["claim", "create", "-f", any.to_str().unwrap()])
        .await
        .done_with(&["deviceclass gpu updated"]);
    assert!(
        api(&daemon)
            .await
            .until_allocated("default", "two")
            .await
            .is_some()
    );
    let other = daemon.write("other.yaml", template.replace("name: gpu", "name: other"));
    let other = other.to_str().unwrap();
    daemon
        .cli(&["claim", "create", "-f", other])
        .await
        .failed_with(1, &["immutable"]);
    let gone = [
        "deviceclass gpu deleted",
        "resourceclaimtemplate default/one-gpu deleted",
        "pod default/web deleted",
        "claim default/one deleted",
    ];
    daemon
        .cli(&["claim", "delete", "-f", file])
        .await
        .done_with(&gone);
    daemon
        .cli(&["claim", "delete", "-f", file])
        .await
        .failed_with(
            1,
            &[
                "there is no deviceclass \"gpu\"",
                "there is no pod \"web\"",
                "there is no claim \"one\"",
            ],
        );
    daemon
        .cli(&["claim", "delete", "two"])
        .await
        .done_with(&["claim default/two deleted"]);
    daemon.assert_empty().await;
}

#[tokio::test]
async fn pod_template_claim_ends_with_pod() {
    let daemon = machine().await;
    let text = r#"
apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: one-gpu}
spec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu}}]}}}
---
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  containers: [{name: main, image: none}]
  resourceClaims: [{name: gpu, resourceClaimTemplateName: one-gpu}]
"#;
    let file = daemon.write("pod.yaml", text);
    daemon
        .cli(&["claim", "create", "-f", file.to_str().unwrap()])
        .await
        .done_with(&["pod default/web created"]);
    let api = api(&daemon).await;
    let made = loop {
        let claims = api.claims(Some("default")).await.unwrap();
        match claims.first() {
            Some(claim) => break claim["metadata"]["name"].as_str().unwrap().to_owned(),
            None => tokio::task::yield_now().await,
        }
    };
    assert!(made.starts_with("web-gpu-"), "{made}");
    assert!(api.until_allocated("default", &made).await.is_some());
}

/// A template that was made after its pod changed nothing for the pod, and the command line named neither claim nor template.
#[tokio::test]
async fn late_template_makes_pod_claims() {
    let daemon = machine().await;
    let pod = r#"
apiVersion: v1
kind: Pod
metadata: {name: web}
spec:
  containers: [{name: main, image: none, resources: {claims: [{name: gpu}]}}]
  resourceClaims: [{name: gpu, resourceClaimTemplateName: one-gpu}]
"#;
    let create = async |name: &str, text: &str| {
        let file = daemon.write(name, text);
        daemon
            .cli(&["claim", "create", "-f", file.to_str().unwrap()])
            .await
            .done();
    };
    create("pod.yaml", pod).await;
    daemon.cli(&["prepare", "--pod", "web"]).await.failed_with(
        1,
        &["claim gpu of pod default/web cannot be made: there is no ResourceClaimTemplate default/one-gpu;"],
    );
    create("template.yaml", "apiVersion: resource.k8s.io/v1\nkind: ResourceClaimTemplate\nmetadata: {name: one-gpu}\nspec: {spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu}}]}}}\n").await;
    daemon.cli(&["prepare", "--pod", "web"]).await.done();
    daemon
        .cli(&["get", "claims"])
        .await
        .done_with(&["web-gpu-"]);
}

#[tokio::test]
async fn device_classes_are_objects() {
    let daemon = machine().await;
    daemon
        .cli(&["get", "deviceclasses"])
        .await
        .done_with(&["NAME", "RESOURCE", "AGE", "gpu"]);
    daemon
        .cli(&["get", "deviceclass", "gpu", "-o", "wide"])
        .await
        .done_with(&["device.driver == \"mock-gpu.nodedock.dev\""]);
    let class = daemon
        .cli(&["get", "deviceclass", "gpu", "-o", "json"])
        .await
        .json();
    assert_eq!(class["kind"], "DeviceClass", "{class}");
    let list = daemon
        .cli(&["get", "deviceclasses", "-o", "json"])
        .await
        .json();
    assert_eq!(
        (&list["kind"], &list["items"][0]["metadata"]["name"]),
        (&"List".into(), &"gpu".into())
    );
    daemon
        .cli(&["get", "deviceclass", "none"])
        .await
        .failed_with(
            1,
            &["there is no deviceclass \"none\"; `nodedock get deviceclasses`"],
        );
    daemon
        .cli(&["get", "deviceclasses", "--watch"])
        .await
        .failed_with(2, &["DeviceClasses are listed, not watched"]);
}

#[tokio::test]
async fn slices_match_drivers_if_api_enabled() {
    let daemon = machine().await;
    daemon
        .cli(&["get", "slices"])
        .await
        .done_with(&["mock-gpu.nodedock.dev", "/gpus", "4"]);
    let slices = daemon
        .cli(&["get", "slices", "mock-gpu.nodedock.dev", "-o", "json"])
        .await
        .json();
    assert_eq!(
        slices["items"][0]["spec"]["devices"]
            .as_array()
            .map(Vec::len),
        Some(4),
        "{slices}"
    );
    daemon
        .cli(&["get", "slices", "other.dev"])
        .await
        .failed_with(1, &["there is no slice \"other.dev\""]);
    // Nothing listens on an address unless it is asked for.
    daemon
        .cli(&["kubeconfig"])
        .await
        .failed_with(2, &["the local API has no address", "--local-api-listen"]);
    let off = crate::with_gpus().await;
    for command in [
        ["claim", "get"],
        ["get", "slices"],
        ["get", "deviceclasses"],
    ] {
        off.cli(&command)
            .await
            .failed_with(3, &["the local API is not reachable", "--local-api"]);
    }
}

/// A slice of another program, with devices of the same name.
fn slice(driver: &str, devices: usize) -> String {
    let devices = vec![serde_json::json!({ "name": "d" }); devices];
    let pool = serde_json::json!({ "name": "p", "generation": 1, "resourceSliceCount": 1 });
    serde_json::json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": { "name": "theirs" },
        "spec": { "driver": driver, "allNodes": true, "pool": pool, "devices": devices },
    })
    .to_string()
}

#[tokio::test]
async fn malformed_input_is_refused_with_position() {
    let daemon = machine().await;
    for (object, parts) in [
        (
            claim(
                "a",
                "{deviceClassName: gpu, selectors: [{cel: {expression: 'device.nosuch'}}]}",
            ),
            vec!["a.yaml, object 1", "selectors[0].cel.expression"],
        ),
        (
            claim(
                "a",
                "{deviceClassName: gpu, selectors: [{cel: {expression: '1 +'}}]}",
            ),
            vec!["selectors[0].cel.expression"],
        ),
        (
            claim("a", "{deviceClassName: gpu, count: -1}"),
            vec!["spec.devices.requests[0].exactly.count"],
        ),
        (claim("A", "{deviceClassName: gpu}"), vec!["metadata.name"]),
        (
            "kind: Deployment\napiVersion: apps/v1\n".to_owned(),
            vec![
                "skipped: ",
                "Deployment  (apps/v1)",
                "there is no object for this command",
            ],
        ),
        ("{".to_owned(), vec!["a.yaml"]),
        (
            claim("a", "{deviceClassName: gpu, selectrs: []}"),
            vec!["a.yaml, object 1: unknown field \"spec.devices.requests[0].exactly.selectrs\""],
        ),
        (
            slice("mock-gpu.nodedock.dev", 1),
            vec!["spec.driver: Forbidden: the slices of this driver are published by the daemon"],
        ),
        (
            slice("other.dev", 2),
            vec!["spec.devices[1]: Duplicate value"],
        ),
    ] {
        let file = daemon.write("a.yaml", object);
        daemon
            .cli(&["claim", "create", "-f", file.to_str().unwrap()])
            .await
            .failed_with(1, &parts);
    }
    assert_eq!(
        api(&daemon).await.claims(None).await.unwrap(),
        Vec::<Value>::new()
    );
    // A class that is not there yet is no error of the claim.
    let file = daemon.write("a.yaml", claim("a", "{deviceClassName: other}"));
    let create = [
        "claim",
        "create",
        "-f",
        file.to_str().unwrap(),
        "--timeout",
        "5",
    ];
    daemon
        .cli(&create)
        .await
        .failed_with(1, &["claim default/a waits for devices", "other"]);
}

#[tokio::test]
async fn kubectl_token_survives_a_restart() {
    let open = ["run", "--local-api", "--local-api-listen", "0.0.0.0:80"];
    Root::new()
        .run_node_program(&open)
        .await
        .failed_with(2, &["loopback addresses alone, and 0.0.0.0:80 is none"]);
    let stray = ["run", "--local-api-listen", "127.0.0.1:80"];
    Root::new()
        .run_node_program(&stray)
        .await
        .failed_with(2, &["--local-api-listen has no effect without --local-api"]);
    let options = Options::default()
        .flag("--local-api")
        .arg("--local-api-listen", "127.0.0.1:0");
    let mut daemon = machine_with(options).await;
    let kubeconfig = daemon.cli(&["kubeconfig"]).await.json();
    let server = &kubeconfig["clusters"][0]["cluster"]["server"];
    assert!(
        server.as_str().unwrap().starts_with("https://127.0.0.1:"),
        "{kubeconfig}"
    );
    daemon.restart().await;
    let again = daemon.cli(&["kubeconfig"]).await.json();
    assert_eq!(again["users"], kubeconfig["users"]);
    let authority =
        |config: &Value| config["clusters"][0]["cluster"]["certificate-authority-data"].clone();
    assert_eq!(authority(&again), authority(&kubeconfig));
}
