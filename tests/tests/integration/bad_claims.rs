//! Claims and pods that cannot be: each is refused with a code of its own, and leaves nothing behind.

use nodedock_proto::node::v1;
use nodedock_proto::prost::Message;
use nodedock_tests::compose::{claim, gpu_claim, pod, request};
use nodedock_tests::{Daemon, Options};
use serde_json::json;

use crate::with_gpus;

fn good() -> v1::PreparePodRequest {
    request(&pod("one"), &[&gpu_claim("a", &["gpus/gpu-0"])])
}

fn changed(change: impl FnOnce(&mut v1::Claim)) -> v1::PreparePodRequest {
    let mut request = good();
    change(&mut request.inline_claims[0]);
    request
}

fn device(change: impl FnOnce(&mut v1::AllocatedDevice)) -> v1::PreparePodRequest {
    changed(|claim| change(&mut claim.allocation.as_mut().unwrap().devices[0]))
}

#[tokio::test]
async fn a_claim_that_is_not_for_this_pod_on_this_node_is_refused() {
    let with_uid = |uid: &str| {
        let mut request = good();
        request.claims[0].claim_uid = uid.to_owned();
        request
    };
    let without_claim = || {
        let mut request = good();
        request.inline_claims.clear();
        request
    };
    let cases = [
        (changed(|claim| claim.allocation = None), "unavailable", "claim-not-allocated"),
        (with_uid("claim-other"), "conflict", "claim-replaced"),
        (changed(|claim| claim.reserved_for.clear()), "denied", "claim-not-reserved"),
        (changed(|claim| claim.reserved_for[0].uid = "pod-other".into()), "denied", "claim-not-reserved"),
        (changed(|claim| claim.owner_pod_uid = "pod-other".into()), "denied", "claim-of-another-pod"),
        (
            changed(|claim| claim.allocation.as_mut().unwrap().node_name = "elsewhere".into()),
            "denied",
            "claim-on-another-node",
        ),
        (device(|device| device.driver = "unknown.example".into()), "unavailable", "driver-unknown"),
        (device(|device| device.pool = "nowhere".into()), "not-found", "no-such-pool"),
        (device(|device| device.device = "gpu-77".into()), "not-found", "no-such-device"),
        (without_claim(), "not-found", "no-such-claim"),
    ];
    let daemon = with_gpus().await;
    for (request, kind, code) in cases {
        let problem = daemon.refused(request).await;
        assert_eq!((problem.kind.as_str(), problem.code.as_str()), (kind, code), "{problem:?}");
        assert!(!problem.message.is_empty());
        assert_eq!((daemon.claims().await, daemon.pods().await), (vec![], vec![]), "{code}");
    }
    daemon.prepared(good()).await;
}

#[tokio::test]
async fn a_request_that_cannot_be_is_an_invalid_argument_with_the_field() {
    let edited = |edit: fn(&mut v1::PreparePodRequest)| {
        let mut request = good();
        edit(&mut request);
        request
    };
    let cases = [
        (v1::PreparePodRequest::default(), "pod"),
        (edited(|request| request.pod = None), "pod"),
        (edited(|request| request.pod.as_mut().unwrap().uid.clear()), "pod"),
        (edited(|request| request.pod.as_mut().unwrap().name = "../etc".into()), "pod"),
        (edited(|request| request.claims[0].claim_name = "A B".into()), "claim_name"),
        (edited(|request| request.containers[0].claims[0].pod_claim_name = "other".into()), "other"),
        (edited(|request| request.claims = vec![request.claims[0].clone(); 200]), "claims"),
        (device(|device| device.driver = "Not A Driver".into()), "driver"),
        (device(|device| device.device = "../../dev/mem".into()), "device"),
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
    assert_eq!(daemon.client().unprepare_pod(no_pod).await.unwrap_err().code(), tonic::Code::InvalidArgument);
    assert_eq!(daemon.claims().await, []);
}

#[tokio::test]
async fn one_bad_claim_keeps_the_pod_from_its_devices_and_the_good_ones_are_unprepared() {
    let daemon = with_gpus().await;
    let pod = pod("one");
    let (good, bad) = (gpu_claim("good", &["gpus/gpu-0"]), claim("bad", &["unknown.example/pool/device"]));
    let answer = daemon.prepare(request(&pod, &[&good, &bad])).await;
    let outcomes: Vec<_> = answer.claims.iter().map(|claim| claim.outcome.as_str()).collect();
    assert_eq!((outcomes, answer.containers), (vec!["prepared", "refused"], vec![]));
    assert_eq!(daemon.unprepare(&pod).await, [("good".to_owned(), "unprepared".to_owned())]);
    daemon.assert_empty().await;
}

#[tokio::test]
async fn a_claim_with_another_allocation_or_another_uid_is_not_the_one_that_is_held() {
    let daemon = Daemon::with_gpus(Options::default().config("claims: {exclusiveWaitMs: 0}\n")).await;
    let pod = pod("one");
    daemon.prepared(request(&pod, &[&gpu_claim("a", &["gpus/gpu-0"])])).await;
    daemon
        .refused_as(request(&pod, &[&gpu_claim("a", &["gpus/gpu-1"])]), "invalid", "allocation-changed")
        .await;
    let mut new = gpu_claim("a", &["gpus/gpu-1"]);
    new.id.as_mut().unwrap().uid = "claim-a-2".to_owned();
    let problem = daemon.refused_as(request(&pod, &[&new]), "conflict", "claim-replaced").await;
    assert_eq!(problem.details["old-uid"], "claim-a");
    assert_eq!(daemon.only_claim().await.state, "prepared");
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
async fn a_manifest_that_cannot_be_is_refused_with_the_file_and_the_reason() {
    let template = POD.replace("resourceClaimName: a", "resourceClaimTemplateName: t");
    let neither = POD.replace(", resourceClaimName: a", "");
    let unknown = POD.replace("[{name: gpu}]}}]", "[{name: fpga}]}}]");
    let beta = CLAIM.replace("k8s.io/v1\n", "k8s.io/v1beta1\n");
    let cases = [
        ("apiVersion: [", 1, "line"),
        ("just: a mapping\n", 1, "apiVersion and kind"),
        (&template, 1, "does not say yet which claim it became"),
        (&neither, 1, "neither resourceClaimName nor resourceClaimTemplateName"),
        (&unknown, 1, "fpga"),
        (&beta, 1, "v1beta1 is not read here"),
        (&CLAIM.replace(", uid: claim-a", ""), 1, "metadata.uid is missing"),
        (&CLAIM.replace("uid: claim-a", "uid: [7]"), 1, "not a valid ResourceClaim"),
        (CLAIM, 2, "there is no Pod"),
        ("", 2, "there is no Pod"),
        (POD, 1, "default/a does not exist"),
    ];
    let daemon = with_gpus().await;
    for (text, code, expected) in cases {
        let file = daemon.write("bad.yaml", text);
        let said = daemon.cli(&["prepare", "-f", file.to_str().unwrap()]).await.failed(code);
        assert!(said.contains(expected), "{expected:?} in {said} for {text}");
    }
    daemon.cli(&["prepare", "-f", "/nowhere/pod.yaml"]).await.failed_with(1, &["/nowhere/pod.yaml"]);
    assert_eq!(daemon.claims().await, []);
}

#[tokio::test]
async fn a_claim_that_stands_in_the_claims_directory_is_found_beside_a_broken_file() {
    let daemon = with_gpus().await;
    let file = daemon.write("pod.yaml", POD);
    let args = ["prepare", "-f", file.to_str().unwrap(), "-o", "json"];
    std::fs::write(daemon.claims_dir().join("broken.yaml"), "apiVersion: [").unwrap();
    daemon.cli(&args).await.failed_with(1, &["broken.yaml"]);
    std::fs::write(daemon.claims_dir().join("claim.yaml"), CLAIM).unwrap();
    let answer = daemon.cli(&args).await.json();
    assert_eq!(answer["claims"][0]["outcome"], json!("prepared"));
    let claims = daemon.cli(&["get", "claims", "-o", "json"]).await.json();
    assert_eq!(claims[0]["drivers"][0]["devices"], json!(["gpus/gpu-0"]));
}
