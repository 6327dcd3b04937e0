//! Requests and manifests that are not valid: each is refused with the field or the reason, and leaves nothing behind.

use nodedock_proto::node::v1;
use nodedock_proto::prost::Message;
use nodedock_tests::compose::{gpu_claim, pod, request};
use serde_json::json;

use crate::with_gpus;

#[tokio::test]
async fn invalid_request_names_the_field() {
    let edited = |edit: fn(&mut v1::PreparePodRequest)| {
        let mut request = request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])]);
        edit(&mut request);
        request
    };
    let cases = [
        (edited(|request| request.pod = None), "pod"),
        (
            edited(|request| request.containers[0].claims[0].pod_claim_name = "other".into()),
            "other",
        ),
        (
            edited(|request| request.inline_claims[0].owner_pod_uid = "-".into()),
            "owner_pod_uid",
        ),
    ];
    let daemon = with_gpus().await;
    for (request, field) in cases {
        let status = daemon.client().prepare_pod(request).await.unwrap_err();
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status}");
        assert!(status.message().contains(field), "{field} in {status}");
        let problem = v1::Problem::decode(status.details()).unwrap();
        assert_eq!(problem.kind, "invalid");
    }
    let no_pod = v1::UnpreparePodRequest { pod: None };
    assert_eq!(
        daemon
            .client()
            .unprepare_pod(no_pod)
            .await
            .unwrap_err()
            .code(),
        tonic::Code::InvalidArgument
    );
    assert_eq!(daemon.claims().await, []);
}

const CLAIM: &str = "
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: a, namespace: default, uid: claim-a}
status:
  reservedFor: [{resource: pods, name: one, uid: pod-one}]
  allocation: {devices: {results: [{request: gpu, driver: mock-gpu.nodedock.dev, pool: gpus, device: gpu-0}]}}
";

const POD: &str = "
apiVersion: v1
kind: Pod
metadata: {name: one, namespace: default, uid: pod-one}
spec:
  resourceClaims: [{name: gpu, resourceClaimName: a}]
  containers: [{name: main, resources: {claims: [{name: gpu}]}}]
";

#[tokio::test]
async fn invalid_manifest_names_file_and_reason() {
    let cases = [
        ("apiVersion: [", 1, "line"),
        (
            &CLAIM.replace(", uid: claim-a", ""),
            1,
            "metadata.uid is missing",
        ),
        (CLAIM, 2, "there is no Pod"),
        ("", 2, "there is no Pod"),
        (POD, 1, "default/a does not exist"),
    ];
    let daemon = with_gpus().await;
    for (text, code, expected) in cases {
        let file = daemon.write("bad.yaml", text);
        let said = daemon
            .cli(&["prepare", "-f", file.to_str().unwrap()])
            .await
            .failed(code);
        assert!(said.contains(expected), "{expected:?} in {said} for {text}");
    }
    daemon
        .cli(&["prepare", "-f", "/nowhere/pod.yaml"])
        .await
        .failed_with(1, &["/nowhere/pod.yaml"]);
    assert_eq!(daemon.claims().await, []);
}

#[tokio::test]
async fn claim_file_loads_beside_broken_file() {
    let daemon = with_gpus().await;
    let file = daemon.write("pod.yaml", POD);
    let args = ["prepare", "-f", file.to_str().unwrap(), "-o", "json"];
    std::fs::write(daemon.claims_dir().join("broken.yaml"), "apiVersion: [").unwrap();
    daemon.cli(&args).await.failed_with(1, &["broken.yaml"]);
    std::fs::write(daemon.claims_dir().join("claim.yaml"), CLAIM).unwrap();
    let answer = daemon.cli(&args).await.json();
    assert_eq!(answer["claims"][0]["outcome"], json!("prepared"));
    let claims = daemon.cli(&["get", "claims", "-o", "json"]).await.json();
    assert_eq!(
        claims[0]["drivers"][0]["devices"],
        json!([format!("{}/gpus/gpu-0", daemon.node().await.name)])
    );
}
