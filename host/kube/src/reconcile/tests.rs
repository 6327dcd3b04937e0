use std::sync::Mutex;

use serde_json::{Value, json};
use tokio::time::Duration;

use super::super::exchange::tests::{Scripted, failure, json as answer};
use super::super::exchange::{Answer, Away, Request, Subject};
use super::*;
use nodedock_model::{Consumer, ObjectRef};

/// A cluster of one node: claims and pods by path, and what is held.
#[derive(Default)]
struct Cluster {
    objects: Mutex<BTreeMap<String, Value>>,
    held: Mutex<Vec<KubeletClaim>>,
    given_up: Mutex<Vec<(String, String)>>,
    /// Instead of each answer.
    instead: Mutex<Option<Answer>>,
    no_kubelet: Mutex<bool>,
    /// What there is once something was given up.
    then: Mutex<Option<(String, Value)>>,
}

const CLAIM: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/one-gpu";
const PODS: &str = "/api/v1/pods?fieldSelector=spec.nodeName%3Dnode-1&limit=250";
const UID: &str = "68a5aecc-0b16-411c-ac56-2f23834fb15c";
const POD_UID: &str = "a1ddbed2-2c34-4d59-ab2d-b0193e4faa06";

fn fixture(name: &str) -> Value {
    let file = format!("{}/../tests/fixtures/kubernetes-1.36/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap()
}

impl Cluster {
    /// As recorded: a claim reserved for two pods, one of which is held here.
    fn new() -> Arc<Self> {
        let cluster = Self::default();
        cluster.put(CLAIM, fixture("claim-one-gpu"));
        cluster.pods(&[fixture("pod-one-gpu")]);
        let consumer = Consumer {
            api_group: String::new(),
            resource: "pods".to_owned(),
            name: ObjectName::new("pod-one-gpu").unwrap(),
            uid: Uid::new(POD_UID).unwrap(),
        };
        *cluster.held.lock().unwrap() = vec![KubeletClaim {
            claim: ObjectRef::new("default", "one-gpu", UID).unwrap(),
            drivers: Vec::new(),
            consumers: vec![consumer],
            since_ms: 0,
        }];
        Arc::new(cluster)
    }

    fn put(&self, path: &str, object: Value) {
        self.objects.lock().unwrap().insert(path.to_owned(), object);
    }

    fn remove(&self, path: &str) {
        self.objects.lock().unwrap().remove(path);
    }

    fn pods(&self, pods: &[Value]) {
        let list = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "9"}, "items": pods});
        self.put(PODS, list);
    }

    fn answer(&self, request: &Request) -> Result<Answer, Away> {
        if let Some(instead) = self.instead.lock().unwrap().clone() {
            return Ok(instead);
        }
        let name = request.path.rsplit('/').next().unwrap();
        let (group, resource) = match request.path.contains("resourceclaims") {
            true => ("resource.k8s.io", "resourceclaims"),
            false => ("", "pods"),
        };
        match self.objects.lock().unwrap().get(&request.path) {
            Some(object) => Ok(answer(200, object)),
            None => Ok(failure(404, "NotFound", Subject { group, resource, kind: "", name })),
        }
    }

    fn given_up(&self) -> Vec<(String, String)> {
        self.given_up.lock().unwrap().clone()
    }
}

#[async_trait]
impl HeldClaims for Cluster {
    fn held(&self) -> Vec<KubeletClaim> {
        self.held.lock().unwrap().clone()
    }

    fn kubelet_is_here(&self) -> bool {
        !*self.no_kubelet.lock().unwrap()
    }

    async fn give_up(&self, claim: &Uid, why: &str) -> Result<(), Problem> {
        self.held.lock().unwrap().retain(|held| held.claim.uid != *claim);
        self.given_up.lock().unwrap().push((claim.to_string(), why.to_owned()));
        if let Some((path, object)) = self.then.lock().unwrap().take() {
            self.put(&path, object);
        }
        Ok(())
    }
}

fn start(cluster: &Arc<Cluster>) -> (Tasks, Reconcile, Arc<dyn Fn() -> Vec<Request>>) {
    let at = Arc::clone(cluster);
    let api = Arc::new(Scripted::new(move |request: &Request| at.answer(request)));
    let tasks = Tasks::new();
    let node = ObjectName::new("node-1").unwrap();
    let reconcile = Reconcile::start(&tasks, api.clone(), node, Arc::clone(cluster) as Arc<dyn HeldClaims>);
    (tasks, reconcile, Arc::new(move || api.asked()))
}

const LONG: Duration = Duration::from_secs(3600);

/// As long as it may take until an abandoned claim is given up.
fn enough() -> Duration {
    limit::RECONCILE_PERIOD + limit::RECONCILE_DELAY + limit::RECONCILE_PERIOD_PENDING
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_a_pod_uses_stays_and_costs_one_list_a_round() {
    let cluster = Cluster::new();
    let (_tasks, reconcile, asked) = start(&cluster);
    tokio::time::sleep(LONG).await;
    assert_eq!(cluster.given_up(), []);
    let asked = asked();
    assert!(asked.iter().all(|request| request.path == PODS));
    assert_eq!(asked.len() as u64, reconcile.counts().rounds.load(Relaxed));
    assert!(asked.len() as u64 <= 1 + LONG.as_secs() / limit::RECONCILE_PERIOD.as_secs());
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_object_and_pods_are_gone_is_given_up_after_the_delay_and_not_before() {
    let cluster = Cluster::new();
    let (_tasks, reconcile, _) = start(&cluster);
    cluster.remove(CLAIM);
    cluster.pods(&[]);
    tokio::time::sleep(limit::RECONCILE_DELAY - Duration::from_secs(1)).await;
    assert_eq!(cluster.given_up(), []);
    tokio::time::sleep(enough()).await;
    assert_eq!(cluster.given_up(), [(UID.to_owned(), Why::Gone.words().to_owned())]);
    assert_eq!(reconcile.counts().given_up.load(Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_being_deleted_is_not_gone_until_its_pods_are() {
    let cluster = Cluster::new();
    let mut claim = fixture("claim-one-gpu");
    claim["metadata"]["deletionTimestamp"] = "2026-11-20T08:16:05Z".into();
    cluster.put(CLAIM, claim.clone());
    // No pod of this node; of the two for which it is reserved one is on another node, and one is not bound yet.
    cluster.pods(&[]);
    let mut elsewhere = fixture("pod-one-gpu");
    elsewhere["spec"]["nodeName"] = "node-2".into();
    cluster.put("/api/v1/namespaces/default/pods/pod-one-gpu", elsewhere);
    let mut waiting = fixture("pod-one-gpu");
    waiting["metadata"]["name"] = "pod-one-gpu-again".into();
    waiting["metadata"]["uid"] = claim["status"]["reservedFor"][1]["uid"].clone();
    waiting["spec"]["nodeName"].take();
    waiting["spec"]["nodeName"] = "".into();
    cluster.put("/api/v1/namespaces/default/pods/pod-one-gpu-again", waiting);
    let (_tasks, ..) = start(&cluster);
    tokio::time::sleep(LONG).await;
    assert_eq!(cluster.given_up(), []);
    cluster.remove("/api/v1/namespaces/default/pods/pod-one-gpu-again");
    tokio::time::sleep(enough()).await;
    assert_eq!(cluster.given_up(), [(UID.to_owned(), Why::NoPods.words().to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_used_again_while_others_are_given_up_is_kept() {
    let cluster = Cluster::new();
    cluster.pods(&[]);
    let mut claim = fixture("claim-one-gpu");
    claim["status"]["reservedFor"].take();
    cluster.put(CLAIM, claim);
    let mut first = cluster.held()[0].clone();
    // It comes first, and while it is given up a pod is bound for which the other is reserved.
    first.claim = ObjectRef::new("default", "gone", "0-first").unwrap();
    cluster.held.lock().unwrap().push(first);
    *cluster.then.lock().unwrap() = Some((CLAIM.to_owned(), fixture("claim-one-gpu")));
    cluster.put("/api/v1/namespaces/default/pods/pod-one-gpu", fixture("pod-one-gpu"));
    let (_tasks, ..) = start(&cluster);
    tokio::time::sleep(LONG).await;
    assert_eq!(cluster.given_up(), [("0-first".to_owned(), Why::Gone.words().to_owned())]);
}

#[tokio::test(start_paused = true)]
async fn another_claim_of_the_same_name_is_another_claim() {
    let cluster = Cluster::new();
    let mut other = fixture("claim-one-gpu");
    other["metadata"]["uid"] = "another".into();
    cluster.put(CLAIM, other);
    cluster.pods(&[]);
    let (_tasks, ..) = start(&cluster);
    tokio::time::sleep(enough()).await;
    assert_eq!(cluster.given_up()[0].1, Why::Replaced.words());
}

#[tokio::test(start_paused = true)]
async fn what_an_api_server_did_not_say_proves_nothing() {
    let page = |status, body: &'static str| Answer { status, body: body.into() };
    let of = Subject { group: "", resource: "pods", kind: "", name: "" };
    let answers = [
        page(404, "<html>not found</html>"),
        page(200, "<html>log in</html>"),
        page(200, "{}"),
        page(200, r#"{"kind":"PodList","apiVersion":"v1","items":[]}"#),
        page(200, r#"{"kind":"PodList","apiVersion":"v1","metadata":{},"items":[]}"#),
        page(404, r#"{"kind":"Status","apiVersion":"v1","reason":"NotFound","details":{},"code":404}"#),
        failure(401, "Unauthorized", of),
        failure(403, "Forbidden", of),
        failure(500, "InternalError", of),
    ];
    for instead in answers {
        let cluster = Cluster::new();
        cluster.remove(CLAIM);
        cluster.pods(&[]);
        *cluster.instead.lock().unwrap() = Some(instead);
        let (_tasks, reconcile, _) = start(&cluster);
        tokio::time::sleep(LONG).await;
        assert_eq!(cluster.given_up(), []);
        assert!(reconcile.counts().blind.load(Relaxed) > 10);
        // When it is back the time begins anew.
        *cluster.instead.lock().unwrap() = None;
        tokio::time::sleep(limit::RECONCILE_DELAY - Duration::from_secs(1)).await;
        assert_eq!(cluster.given_up(), []);
        tokio::time::sleep(enough()).await;
        assert_eq!(cluster.given_up().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_kubelet_nothing_is_given_up() {
    let cluster = Cluster::new();
    cluster.remove(CLAIM);
    cluster.pods(&[]);
    *cluster.no_kubelet.lock().unwrap() = true;
    let (_tasks, _, asked) = start(&cluster);
    tokio::time::sleep(LONG).await;
    assert_eq!((cluster.given_up().len(), asked().len()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_comes_back_within_the_delay_keeps_its_claim_and_one_that_ended_does_not() {
    let cluster = Cluster::new();
    cluster.pods(&[]);
    let (_tasks, reconcile, _) = start(&cluster);
    tokio::time::sleep(limit::RECONCILE_DELAY / 2).await;
    cluster.pods(&[fixture("pod-one-gpu")]);
    reconcile.look_soon();
    tokio::time::sleep(LONG).await;
    assert_eq!(cluster.given_up(), []);
    let mut ended = fixture("pod-one-gpu");
    ended["status"]["phase"] = "Succeeded".into();
    cluster.pods(&[ended]);
    tokio::time::sleep(enough()).await;
    assert_eq!(cluster.given_up()[0].1, Why::NoPods.words());
}

#[tokio::test(start_paused = true)]
async fn pods_are_listed_in_pages_and_every_page_counts() {
    let cluster = Cluster::new();
    cluster.remove(CLAIM);
    let first = json!({"kind": "PodList", "apiVersion": "v1",
        "metadata": {"resourceVersion": "9", "continue": "a+b/="}, "items": null});
    cluster.put(PODS, first);
    let second = json!({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "9"},
        "items": [fixture("pod-one-gpu")]});
    cluster.put(&format!("{PODS}&continue=a%2Bb%2F%3D"), second);
    let (_tasks, ..) = start(&cluster);
    tokio::time::sleep(LONG).await;
    assert_eq!(cluster.given_up(), []);
}

#[tokio::test]
async fn names_of_claims_in_recorded_pods_are_found() {
    for (file, claim) in [
        ("pod-one-gpu", "one-gpu"),
        ("pod-template", "pod-template-nic-zzgwv"),
        ("pod-extended", "pod-extended-extended-resources-kr6q7"),
    ] {
        let cluster = Cluster::new();
        cluster.pods(&[fixture(file)]);
        let at = Arc::clone(&cluster);
        let api = Arc::new(Scripted::new(move |request: &Request| at.answer(request)));
        let look = Look { api, node: ObjectName::new("node-1").unwrap() };
        let pods = look.pods().await.unwrap();
        assert_eq!(pods[0].claims, [ObjectName::new(claim).unwrap()], "{file}");
        assert!(!pods[0].finished);
    }
}
