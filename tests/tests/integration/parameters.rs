//! Opaque parameters: what a driver's schema or the driver refuses reaches no prepare, and authors and operators see the schema.

use nodedock_tests::compose::{gpu_claim, pod, request, with_parameters};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, side_file, wasm};
use nodedock_tests::recorded::Recorded;
use nodedock_tests::{Daemon, Options, Root};
use serde_json::Value;

use crate::with_gpus;

const BAD: &str = r#"{"sharing": {"strategy": "Fast"}}"#;
const GOOD: &str = r#"{"sharing": {"strategy": "TimeSlicing"}}"#;
/// What the schema allows, and the driver does not.
const REFUSED_BY_DRIVER: &str =
    r#"{"sharing": {"strategy": "Exclusive", "timeSlicing": {"interval": "Long"}}}"#;

#[tokio::test]
async fn bad_parameters_reach_no_prepare() {
    let daemon = with_gpus().await;
    let bad = with_parameters(gpu_claim("bad", &["shared/gpu-4"]), BAD);
    let asked = request(&pod("bad"), &[&bad]);
    let problem = daemon.refused_as(asked, "invalid", "schema-violated").await;
    for part in [
        "parameters of the claim",
        "mock-gpu.nodedock.dev",
        "/sharing/strategy",
        "Fast",
    ] {
        assert!(problem.message.contains(part), "{part}: {problem:?}");
    }
    daemon.until_no_claims().await;
    assert!(daemon.cdi_files().is_empty());
    let claim = with_parameters(gpu_claim("good", &["shared/gpu-4"]), GOOD);
    daemon.prepared(request(&pod("good"), &[&claim])).await;
}

#[tokio::test]
async fn driver_refuses_what_its_schema_allows() {
    let daemon = with_gpus().await;
    let claim = with_parameters(gpu_claim("one", &["shared/gpu-4"]), REFUSED_BY_DRIVER);
    let problem = daemon.refused(request(&pod("one"), &[&claim])).await;
    assert_eq!(problem.kind, "invalid", "{problem:?}");
    assert_ne!(problem.code, "schema-violated", "{problem:?}");
    daemon.until_no_claims().await;
}

#[tokio::test]
async fn command_prepares_with_parameters_and_share() {
    let daemon = with_gpus().await;
    let device = "mock-gpu.nodedock.dev/shared/gpu-4";
    let prepare = async |pod: &str, more: &[&str]| {
        let command = ["prepare", "--pod", pod, "--device", device];
        daemon.cli(&[&command[..], more].concat()).await
    };
    prepare("bad", &["--parameters", BAD])
        .await
        .failed_with(1, &["/sharing/strategy"]);
    prepare("lanes", &["--capacity", "lanes=1"])
        .await
        .failed_with(1, &["capacity lanes: the device does not have it"]);
    let file = daemon.write("parameters.yaml", "sharing: {strategy: TimeSlicing}\n");
    for name in ["one", "two"] {
        let parameters = [
            "--parameters",
            file.to_str().unwrap(),
            "--capacity",
            "memory=1Gi",
        ];
        prepare(name, &parameters).await.done();
    }
    let claims = daemon.claims().await;
    assert_eq!(claims.len(), 2, "each has a share: {claims:?}");
}

#[tokio::test]
async fn local_api_refuses_bad_parameters() {
    let daemon = Daemon::with_gpus(Options::default().flag("--local-api")).await;
    let object = |strategy: &str, driver: &str| {
        format!(
            "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {{name: fast}}\nspec:\n  config:\n  - opaque:\n      driver: {driver}\n      \
             parameters: {{sharing: {{strategy: {strategy}}}}}\n"
        )
    };
    let create = async |text: String| {
        let file = daemon.write("class.yaml", text);
        let command = ["claim", "create", "-f", file.to_str().unwrap()];
        daemon.cli(&command).await
    };
    create(object("Fast", "mock-gpu.nodedock.dev"))
        .await
        .failed_with(
            1,
            &["spec.config[0].opaque.parameters.sharing.strategy", "Fast"],
        );
    create(object("TimeSlicing", "mock-gpu.nodedock.dev"))
        .await
        .done_with(&["deviceclass fast created"]);
    // Of a driver of another node, nothing is known here.
    create(object("Fast", "elsewhere.example.com")).await.done();
}

/// The simulated GPUs in a directory of an author, with one that several claims can share, and a machine.
fn files(root: &Root) -> (String, String) {
    let file = root.write(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    root.write("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
    root.write(
        "mock-gpu.config.yaml",
        "pools: [{name: gpus, count: 1, shared: true}]\n",
    );
    let machine = Recorded::new(&root.path().join("machine"), &[]);
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    (text(&file), text(machine.path()))
}

#[tokio::test]
async fn author_commands_check_parameters() {
    let root = Root::new();
    let (file, machine) = files(&root);
    let command = async |name: &str, more: &[&str]| {
        let command = ["driver", name, &file, "--hardware", &machine];
        root.cli(&[&command[..], more].concat()).await
    };
    command("check", &["--parameters", GOOD]).await.done();
    command("check", &["--parameters", BAD])
        .await
        .failed_with(1, &["parameters-invalid", "/sharing/strategy"]);
    command("check", &["--parameters", "[1]"])
        .await
        .failed_with(1, &["read parameters from [1]"]);

    let tested = command("test", &["--parameters", GOOD, "-o", "json"]).await;
    let tested: Value = tested.json();
    let claims = tested["claims"].as_object().unwrap();
    let prepared = &claims.values().next().unwrap()["prepared"]["devices"][0];
    assert!(prepared["share_id"].is_string(), "{tested:#}");
    let refused = command("test", &["--parameters", BAD, "-o", "json"]).await;
    let refused: Value = refused.json();
    let claim = refused["claims"]
        .as_object()
        .unwrap()
        .values()
        .next()
        .unwrap();
    assert_eq!(claim["refused"]["code"], "schema-violated", "{refused:#}");
    command("test", &["--capacity", "lanes=1"])
        .await
        .failed_with(
            1,
            &["no device that several claims can share has the capacity lanes"],
        );
}

#[tokio::test]
async fn schema_is_shown_and_written() {
    let root = Root::new();
    let (file, _) = files(&root);
    let schema = root.path().join("schema.json");
    let inspect = ["driver", "inspect", &file];
    let inspected = root
        .cli(
            &[
                &inspect[..],
                &["--parameters-schema", schema.to_str().unwrap()],
            ]
            .concat(),
        )
        .await;
    inspected.done_with(&["of the parameters in claims and classes", "\"sharing\""]);
    let text = std::fs::read_to_string(&schema).unwrap();
    let written: Value = serde_json::from_str(&text).unwrap();
    assert!(written["properties"]["sharing"].is_object(), "{text}");

    let daemon = with_gpus().await;
    let explained = daemon
        .cli(&["explain", "driver", "mock-gpu.nodedock.dev"])
        .await;
    explained.done_with(&["parameters: apiVersion, kind, sharing"]);
}
