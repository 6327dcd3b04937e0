use std::sync::Mutex;

use nodedock_proto::kubelet::pods::v1alpha1 as wire;
use nodedock_stand_ins::api_server::{ApiServer, Fault, Pod, When};
use nodedock_stand_ins::kubelet::{PodsAnswer, PodsApi};
use serde_json::Value;
use tokio::time::Duration;
use tonic::Code;

use super::super::client::tests::{answer, answered, over};
use super::decide::ClaimState;
use super::*;
use crate::reconcile::decide::RECONCILE_DELAY;
use crate::reconcile::{RECONCILE_PERIOD, RECONCILE_PERIOD_PENDING};
use nodedock_model::{Consumer, ObjectRef, Uid};

/// A cluster of one node, and the claims that are held.
struct Cluster {
    server: Arc<ApiServer>,
    held: Mutex<Vec<KubeletClaim>>,
    unprepared: Mutex<Vec<(String, String)>>,
    no_kubelet: Mutex<bool>,
    /// Object that the API server gets once a claim was unprepared.
    then: Mutex<Option<Value>>,
}

const UID: &str = "68a5aecc-0b16-411c-ac56-2f23834fb15c";
const POD_UID: &str = "a1ddbed2-2c34-4d59-ab2d-b0193e4faa06";
const LONG: Duration = Duration::from_secs(3600);

fn fixture(name: &str) -> Value {
    let file = format!(
        "{}/../tests/fixtures/kubernetes-1.36/{name}.json",
        env!("CARGO_MANIFEST_DIR")
    );
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

/// Returns the longest time until an abandoned claim is unprepared.
fn enough() -> Duration {
    RECONCILE_PERIOD + RECONCILE_DELAY + RECONCILE_PERIOD_PENDING
}

fn observer(client: KubeClient) -> Observer {
    observer_on(client, Path::new("/nonexistent"))
}

fn observer_on(client: KubeClient, kubelet_root: &Path) -> Observer {
    Observer::new(client, ObjectName::new("node-1").unwrap(), kubelet_root)
}

impl Cluster {
    /// Starts a cluster with recorded objects: a claim reserved for two pods, one of which is on this node.
    async fn new() -> Arc<Self> {
        let server = Arc::new(ApiServer::start().await);
        server.put(fixture("claim-one-gpu"));
        server.put(fixture("pod-one-gpu"));
        let consumer = Consumer {
            api_group: String::new(),
            resource: "pods".to_owned(),
            name: ObjectName::new("pod-one-gpu").unwrap(),
            uid: Uid::new(POD_UID).unwrap(),
        };
        let held = KubeletClaim {
            claim: ObjectRef::new("default", "one-gpu", UID).unwrap(),
            drivers: Vec::new(),
            consumers: vec![consumer],
            since_ms: 0,
            last_request: None,
            early: false,
        };
        Arc::new(Self {
            server,
            held: Mutex::new(vec![held]),
            unprepared: Mutex::default(),
            no_kubelet: Mutex::default(),
            then: Mutex::default(),
        })
    }

    /// One whose claim and pod are gone.
    async fn empty() -> Arc<Self> {
        let cluster = Self::new().await;
        cluster.remove("resourceclaims", "one-gpu");
        cluster.remove("pods", "pod-one-gpu");
        cluster
    }

    fn remove(&self, resource: &str, name: &str) {
        self.server.delete(resource, "default", name);
    }

    fn unprepared(&self) -> Vec<(String, String)> {
        self.unprepared.lock().unwrap().clone()
    }

    fn start(self: &Arc<Self>) -> (Tasks, Reconcile) {
        let (tasks, node) = (Tasks::new(), ObjectName::new("node-1").unwrap());
        let claims = Arc::clone(self) as Arc<dyn HeldClaims>;
        let reconcile = Reconcile::start(
            &tasks,
            &over(&self.server),
            node,
            Path::new("/nonexistent"),
            claims,
        );
        (tasks, reconcile)
    }
}

#[async_trait]
impl HeldClaims for Cluster {
    fn held(&self) -> Vec<KubeletClaim> {
        self.held.lock().unwrap().clone()
    }

    fn kubelet_is_connected(&self) -> bool {
        !*self.no_kubelet.lock().unwrap()
    }

    async fn unprepare_abandoned(&self, seen: &KubeletClaim, why: &str) -> Result<(), Problem> {
        if !self.held().contains(seen) {
            return Err(Problem::conflict("claim-in-use", "it was requested again"));
        }
        let uid = &seen.claim.uid;
        self.held
            .lock()
            .unwrap()
            .retain(|held| held.claim.uid != *uid);
        self.unprepared
            .lock()
            .unwrap()
            .push((uid.to_string(), why.to_owned()));
        if let Some(object) = self.then.lock().unwrap().take() {
            self.server.put(object);
        }
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn used_claim_costs_one_periodic_list() {
    let cluster = Cluster::new().await;
    let (_tasks, reconcile) = cluster.start();
    tokio::time::sleep(LONG).await;
    assert_eq!(cluster.unprepared(), []);
    let requests = cluster.server.requests();
    assert!(
        requests.iter().all(
            |seen| seen.verb == "list" && seen.query["fieldSelector"] == "spec.nodeName=node-1"
        )
    );
    assert_eq!(
        requests.len() as u64,
        reconcile.counts.seen.get() + reconcile.counts.blind.get()
    );
    assert!(requests.len() as u64 <= 1 + LONG.as_secs() / RECONCILE_PERIOD.as_secs());
}

#[tokio::test(start_paused = true)]
async fn abandoned_claim_is_unprepared_after_delay() {
    let cluster = Cluster::empty().await;
    let (_tasks, reconcile) = cluster.start();
    tokio::time::sleep(RECONCILE_DELAY - Duration::from_secs(1)).await;
    assert_eq!(cluster.unprepared(), []);
    tokio::time::sleep(enough()).await;
    assert_eq!(
        cluster.unprepared(),
        [(UID.to_owned(), Why::Gone.words().to_owned())]
    );
    assert_eq!(reconcile.counts.unprepared.get(), 1);
}

#[tokio::test(start_paused = true)]
async fn deleting_claim_waits_for_its_pods() {
    let cluster = Cluster::new().await;
    let mut claim = fixture("claim-one-gpu");
    claim["metadata"]["deletionTimestamp"] = "2026-11-20T08:16:05Z".into();
    cluster.server.put(claim.clone());
    // No pod of this node; of the two for which it is reserved one is on another node, and one is not bound yet.
    let mut elsewhere = fixture("pod-one-gpu");
    elsewhere["spec"]["nodeName"] = "node-2".into();
    cluster.server.put(elsewhere);
    let mut waiting = fixture("pod-one-gpu");
    waiting["metadata"]["name"] = "pod-one-gpu-again".into();
    waiting["metadata"]["uid"] = claim["status"]["reservedFor"][1]["uid"].clone();
    waiting["spec"]["nodeName"] = "".into();
    cluster.server.put(waiting);
    let (_tasks, _reconcile) = cluster.start();
    tokio::time::sleep(LONG).await;
    assert_eq!(cluster.unprepared(), []);
    cluster.remove("pods", "pod-one-gpu-again");
    tokio::time::sleep(enough()).await;
    assert_eq!(
        cluster.unprepared(),
        [(UID.to_owned(), Why::NoConsumers.words().to_owned())]
    );
}

#[tokio::test(start_paused = true)]
async fn claim_used_again_is_kept() {
    let cluster = Cluster::new().await;
    cluster.remove("pods", "pod-one-gpu");
    let mut claim = fixture("claim-one-gpu");
    claim["status"]["reservedFor"].take();
    cluster.server.put(claim);
    let mut first = cluster.held()[0].clone();
    // It comes first, and while it is unprepared the other is reserved for a pod that may come.
    first.claim = ObjectRef::new("default", "gone", "0-first").unwrap();
    cluster.held.lock().unwrap().push(first);
    *cluster.then.lock().unwrap() = Some(fixture("claim-one-gpu"));
    let mut waiting = fixture("pod-one-gpu");
    waiting["spec"]["nodeName"] = "".into();
    cluster.server.put(waiting);
    let (_tasks, _reconcile) = cluster.start();
    tokio::time::sleep(LONG).await;
    assert_eq!(
        cluster.unprepared(),
        [("0-first".to_owned(), Why::Gone.words().to_owned())]
    );
}

#[tokio::test(start_paused = true)]
async fn same_name_is_another_claim() {
    let cluster = Cluster::empty().await;
    let mut other = fixture("claim-one-gpu");
    other["metadata"]["uid"] = "another".into();
    cluster.server.put(other);
    let (_tasks, _reconcile) = cluster.start();
    tokio::time::sleep(enough()).await;
    assert_eq!(cluster.unprepared()[0].1, Why::Replaced.words());
}

#[tokio::test(start_paused = true)]
async fn failed_reads_prove_nothing() {
    for fault in [
        Fault::Html(404),
        Fault::Html(200),
        Fault::Status(404),
        Fault::Status(401),
        Fault::Status(403),
        Fault::Status(500),
        Fault::HalfAnswer,
    ] {
        let cluster = Cluster::empty().await;
        let away = cluster.server.fail(fault, When::any());
        let (_tasks, reconcile) = cluster.start();
        tokio::time::sleep(LONG).await;
        assert_eq!(cluster.unprepared(), []);
        assert!(reconcile.counts.blind.get() > 10);
        // When it is back the time begins again.
        cluster.server.lift(away);
        tokio::time::sleep(RECONCILE_DELAY - Duration::from_secs(1)).await;
        assert_eq!(cluster.unprepared(), []);
        tokio::time::sleep(enough()).await;
        assert_eq!(cluster.unprepared().len(), 1);
    }
    for body in [
        "{}",
        r#"{"kind":"PodList","apiVersion":"v1","items":[]}"#,
        r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[]}"#,
        r#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[{"metadata":{"uid":"a"}}]}"#,
        r#"{"kind":"PodList","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[{"metadata":{"namespace":"default","uid":"a"},
            "spec":{"nodeName":"node-1","containers":[],"schedulingGroup":{"podGroupName":"Not a name"}}}]}"#,
    ] {
        let client = answered(vec![answer(200, "application/json", body)]);
        assert!(observer(client).pods().await.is_err(), "{body}");
    }
    let another = r#"{"kind":"Status","apiVersion":"v1","reason":"NotFound","message":"none","code":404,
        "details":{"name":"another","group":"resource.k8s.io","kind":"resourceclaims"}}"#;
    let group = r#"{"kind":"APIGroup","apiVersion":"v1","name":"resource.k8s.io","versions":[{"groupVersion":"resource.k8s.io/v1","version":"v1"}]}"#;
    let pod = r#"{"kind":"Pod","apiVersion":"v1","metadata":{"name":"one-gpu","namespace":"default","uid":"a"}}"#;
    let claim = ObjectRef::new("default", "one-gpu", UID).unwrap();
    for (code, body) in [(404, another), (200, pod), (200, "{}")] {
        let answers = vec![
            answer(200, "application/json", group),
            answer(code, "application/json", body),
        ];
        assert_eq!(
            observer(answered(answers)).claim(&claim).await,
            ClaimState::Unknown,
            "{body}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_kubelet_nothing_is_unprepared() {
    let cluster = Cluster::empty().await;
    *cluster.no_kubelet.lock().unwrap() = true;
    let (_tasks, _reconcile) = cluster.start();
    tokio::time::sleep(LONG).await;
    assert_eq!(
        (cluster.unprepared().len(), cluster.server.requests().len()),
        (0, 0)
    );
}

#[tokio::test(start_paused = true)]
async fn returning_pod_keeps_its_claim() {
    let cluster = Cluster::new().await;
    cluster.remove("pods", "pod-one-gpu");
    let (_tasks, reconcile) = cluster.start();
    tokio::time::sleep(RECONCILE_DELAY / 2).await;
    cluster.server.put(fixture("pod-one-gpu"));
    reconcile.trigger();
    tokio::time::sleep(LONG).await;
    assert_eq!(cluster.unprepared(), []);
    // The other pod for which it is reserved does not exist.
    let mut ended = fixture("pod-one-gpu");
    ended["status"]["phase"] = "Succeeded".into();
    cluster.server.put(ended);
    tokio::time::sleep(enough()).await;
    assert_eq!(cluster.unprepared()[0].1, Why::NoConsumers.words());
}

#[tokio::test(start_paused = true)]
async fn unreserved_group_claim_is_unprepared() {
    let cluster = Cluster::new().await;
    cluster.remove("pods", "pod-one-gpu");
    let group = serde_json::json!({
        "apiGroup": "scheduling.k8s.io", "resource": "podgroups", "name": "train", "uid": "uid-train",
    });
    let mut claim = fixture("claim-one-gpu");
    claim["status"]["reservedFor"] = serde_json::json!([group]);
    cluster.server.put(claim.clone());
    cluster.held.lock().unwrap()[0].consumers = vec![Consumer {
        api_group: "scheduling.k8s.io".to_owned(),
        resource: "podgroups".to_owned(),
        name: ObjectName::new("train").unwrap(),
        uid: Uid::new("uid-train").unwrap(),
    }];
    let (_tasks, reconcile) = cluster.start();
    tokio::time::sleep(LONG).await;
    assert_eq!(cluster.unprepared(), [], "a pod of the group may come");
    assert_eq!(reconcile.counts.blind.get(), 0);
    // The group was removed by force; a pod of it runs on, and its status does not name the claim.
    claim["status"]["reservedFor"].take();
    cluster.server.put(claim);
    let mut member = fixture("pod-one-gpu");
    member["spec"]["resourceClaims"].take();
    member["spec"]["schedulingGroup"] = serde_json::json!({ "podGroupName": "train" });
    cluster.server.put(member.clone());
    tokio::time::sleep(LONG).await;
    assert_eq!(cluster.unprepared(), []);
    member["status"]["phase"] = "Failed".into();
    cluster.server.put(member);
    tokio::time::sleep(RECONCILE_DELAY - Duration::from_secs(1)).await;
    assert_eq!(cluster.unprepared(), []);
    tokio::time::sleep(enough()).await;
    assert_eq!(
        cluster.unprepared(),
        [(UID.to_owned(), Why::NoConsumers.words().to_owned())]
    );
}

#[tokio::test(start_paused = true)]
async fn pod_pages_are_all_read() {
    let cluster = Cluster::empty().await;
    for i in 0..260 {
        cluster
            .server
            .add_pod(Pod::new("default", &format!("pod-{i}"), "node-1"));
    }
    cluster
        .server
        .add_pod(Pod::new("default", "elsewhere", "node-2"));
    assert_eq!(
        observer(over(&cluster.server)).pods().await.unwrap().len(),
        260
    );
    assert_eq!(cluster.server.requests().len(), 2);
}

#[tokio::test]
async fn recorded_pods_name_their_claims() {
    for (file, claim) in [
        ("pod-one-gpu", "one-gpu"),
        ("pod-template", "pod-template-nic-zzgwv"),
        ("pod-extended", "pod-extended-extended-resources-kr6q7"),
    ] {
        let cluster = Cluster::empty().await;
        cluster.server.put(fixture(file));
        let pods = observer(over(&cluster.server)).pods().await.unwrap();
        assert_eq!(pods[0].claims, [ObjectName::new(claim).unwrap()], "{file}");
        assert!(!pods[0].finished);
    }
}

fn of_kubelet(pods: &[(&str, &str)]) -> PodsAnswer {
    let pod = |(uid, source): &(&str, &str)| wire::Pod {
        metadata: Some(wire::ObjectMeta {
            name: format!("pod-{uid}"),
            namespace: "default".to_owned(),
            uid: (*uid).to_owned(),
            annotations: BTreeMap::from([(
                "kubernetes.io/config.source".to_owned(),
                (*source).to_owned(),
            )]),
        }),
        spec: Some(wire::PodSpec {
            node_name: "node-1".to_owned(),
            ..wire::PodSpec::default()
        }),
        status: None,
    };
    PodsAnswer::Pods(pods.iter().map(pod).collect())
}

/// UIDs of the pods that an observer lists, and how often it listed them at the API server.
async fn listed(observer: &Observer, server: &ApiServer) -> (Vec<String>, usize) {
    server.forget_requests();
    let pods = observer.pods().await.unwrap();
    (
        pods.into_iter().map(|pod| pod.uid.to_string()).collect(),
        server.requests().len(),
    )
}

#[tokio::test]
async fn kubelet_pods_come_before_api_pods() {
    let (cluster, root) = (Cluster::new().await, tempfile::tempdir().unwrap());
    let (server, observer) = (
        &cluster.server,
        observer_on(over(&cluster.server), root.path()),
    );
    let at_api_server = (vec![POD_UID.to_owned()], 1);
    assert_eq!(
        listed(&observer, server).await,
        at_api_server,
        "there is no socket"
    );
    let kubelet = PodsApi::start(root.path(), of_kubelet(&[("static", "file"), ("a", "api")]));
    let at_kubelet = (vec!["static".to_owned(), "a".to_owned()], 0);
    assert_eq!(listed(&observer, server).await, at_kubelet);
    let without_uid = {
        let PodsAnswer::Pods(mut pods) = of_kubelet(&[("a", "api"), ("b", "api")]) else {
            unreachable!()
        };
        pods[1].metadata.as_mut().unwrap().uid.clear();
        PodsAnswer::Pods(pods)
    };
    for answer in [
        PodsAnswer::NoService,
        PodsAnswer::Refusal(Code::FailedPrecondition),
        PodsAnswer::Refusal(Code::ResourceExhausted),
        PodsAnswer::NotGrpc,
        PodsAnswer::Cut,
        PodsAnswer::Bytes(vec![b"\xff\xff".to_vec()]),
        without_uid,
        // It has just started.
        of_kubelet(&[("static", "file")]),
        of_kubelet(&[]),
    ] {
        kubelet.set(answer.clone());
        assert_eq!(listed(&observer, server).await, at_api_server, "{answer:?}");
        kubelet.set(of_kubelet(&[("static", "file"), ("a", "api")]));
        assert_eq!(
            listed(&observer, server).await,
            at_kubelet,
            "after {answer:?}"
        );
    }
    // It ended, its socket stays, and it starts again.
    drop(kubelet);
    tokio::task::yield_now().await;
    assert_eq!(listed(&observer, server).await, at_api_server);
    let _kubelet = PodsApi::start(root.path(), of_kubelet(&[("b", "api")]));
    assert_eq!(listed(&observer, server).await, (vec!["b".to_owned()], 0));
}

#[tokio::test]
async fn forbidden_account_uses_kubelet_pods() {
    let (cluster, root) = (Cluster::new().await, tempfile::tempdir().unwrap());
    let observer = observer_on(over(&cluster.server), root.path());
    ["list", "get"]
        .iter()
        .for_each(|verb| cluster.server.deny(verb, "pods"));
    let error = observer.pods().await.unwrap_err();
    assert!(
        error.contains("forbids") && error.contains("pods"),
        "{error}"
    );
    let kubelet = PodsApi::start(root.path(), PodsAnswer::Refusal(Code::Unavailable));
    let error = observer.pods().await.unwrap_err();
    assert!(
        error.contains("forbids") && error.contains("Unavailable"),
        "{error}"
    );
    kubelet.set(of_kubelet(&[("a", "api")]));
    assert_eq!(observer.pods().await.unwrap().len(), 1);
    // A pod that is not of this node may come: the claim that is reserved for it is kept.
    let pod = cluster.held()[0].consumers[0].clone();
    assert!(
        observer
            .may_be_here(&ObjectName::new("default").unwrap(), &pod)
            .await
    );
}
