use std::time::Duration;

use nodedock_stand_ins::api_server::{ApiServer, Fault, When};
use serde_json::{Value, json};

use super::super::client::tests::over;
use super::*;
use crate::events::{
    EVENT_AGE_MAX, EVENT_REASON_BYTES_MAX, EVENTS_BURST, EVENTS_EVERY, EVENTS_MAX,
    KUBE_FORBIDDEN_PAUSE,
};

const CLAIM_UID: &str = "68a5aecc-0b16-411c-ac56-2f23834fb15c";
const SHORTLY: Duration = Duration::from_millis(100);

pub(super) fn claim() -> ObjectRef {
    ObjectRef::new("default", "one-gpu", CLAIM_UID).unwrap()
}

pub(super) fn pod(name: &str) -> Consumer {
    Consumer {
        api_group: String::new(),
        resource: "pods".to_owned(),
        name: ObjectName::new(name).unwrap(),
        uid: Uid::new(name).unwrap(),
    }
}

fn problem(message: &str) -> Problem {
    Problem::conflict("device-held", message)
}

pub(super) struct Scene {
    server: Arc<ApiServer>,
    tasks: Tasks,
    pub(super) events: Events,
    conditions: Conditions,
}

impl Scene {
    pub(super) async fn new() -> Self {
        let server = Arc::new(ApiServer::start().await);
        let (tasks, conditions) = (Tasks::new(), Conditions::default());
        let node = ObjectName::new("node-1").unwrap();
        let facts = NodeFacts {
            name: node.clone(),
            uid: Uid::new("node-uid").unwrap(),
        };
        let (_, facts) = watch::channel(Some(facts));
        let events = Events::start(&tasks, over(&server), node, facts, conditions.clone());
        Self {
            server,
            tasks,
            events,
            conditions,
        }
    }

    pub(super) fn refuse(&self, message: &str) {
        self.refuse_of(&[], message);
    }

    fn refuse_of(&self, consumers: &[Consumer], message: &str) {
        let (claim, problem) = (&claim(), &problem(message));
        self.events.refused(&Refusal {
            action: "Prepare",
            claim,
            consumers,
            problem,
        });
    }

    fn publish_on_pod(&self, name: &str, note: &str) {
        let namespace = ObjectName::new("default").unwrap();
        self.events.publish(
            of_pod(&namespace, &pod(name)),
            warning("Some", "Check", note.to_owned(), None),
        );
    }

    /// Numbers of events that were created, updated, refused and dropped.
    pub(super) fn counts(&self) -> [u64; 4] {
        self.events.counts().map(|(_, count)| count)
    }

    pub(super) fn events(&self) -> Vec<Value> {
        self.server.list("events")
    }

    fn writes(&self) -> usize {
        let requests = self.server.requests().into_iter();
        requests
            .filter(|seen| seen.group == "events.k8s.io" && seen.resource == "events")
            .count()
    }
}

#[tokio::test(start_paused = true)]
async fn refusal_event_covers_claim_and_pods() {
    let scene = Scene::new().await;
    let mut other = pod("job");
    other.resource = "jobs".to_owned();
    let consumers = [pod("pod-one-gpu"), other];
    scene.refuse_of(&consumers, "device gpu-0 is held\nby b");
    tokio::time::sleep(SHORTLY).await;
    let mut events = scene.events();
    events.sort_by_key(|event| event["involvedObject"]["kind"].to_string());
    let [on_pod, on_claim] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        on_pod["message"],
        "claim one-gpu: device gpu-0 is held by b"
    );
    assert_eq!(on_pod["involvedObject"]["uid"], "pod-one-gpu");
    assert_eq!(on_pod["related"]["name"], "one-gpu");
    let expected = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "name": "one-gpu", "namespace": "default",
        "uid": CLAIM_UID,
    });
    assert_eq!(on_claim["involvedObject"], expected);
    for (field, value) in [
        ("reason", "DeviceHeld"),
        ("message", "device gpu-0 is held by b"),
        ("type", "Warning"),
        ("action", "Prepare"),
        ("reportingComponent", "nodedock"),
        ("reportingInstance", "node-1"),
    ] {
        assert_eq!(on_claim[field], value, "{field}");
    }
    scene.refuse_of(&consumers, "device gpu-0 is held by b");
    tokio::time::sleep(SHORTLY).await;
    let counts: Vec<_> = scene
        .events()
        .iter()
        .map(|event| event["series"]["count"].clone())
        .collect();
    assert_eq!(counts, [2, 2]);
    assert_eq!(scene.counts(), [2, 2, 0, 0]);
    assert!(scene.tasks.drain(Duration::from_secs(1)).await);
}

#[tokio::test(start_paused = true)]
async fn expired_event_is_created_again() {
    let scene = Scene::new().await;
    scene.refuse("held");
    tokio::time::sleep(SHORTLY).await;
    let name = scene.events()[0]["metadata"]["name"]
        .as_str()
        .unwrap()
        .to_owned();
    scene.server.delete("events", "default", &name);
    scene.refuse("held");
    tokio::time::sleep(SHORTLY).await;
    assert_eq!((scene.events().len(), scene.counts()[0]), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn events_wait_until_too_old() {
    let scene = Scene::new().await;
    scene.server.fail(Fault::Away, When::any());
    scene.refuse("early");
    tokio::time::sleep(EVENT_AGE_MAX - limit::KUBE_RETRY_MAX / 2).await;
    scene.publish_on_pod("late", "late");
    assert!(scene.writes() < 20);
    tokio::time::sleep(limit::KUBE_RETRY_MAX).await;
    scene.server.lift_all();
    tokio::time::sleep(limit::KUBE_RETRY_MAX).await;
    let messages: Vec<_> = scene
        .events()
        .iter()
        .map(|event| event["message"].clone())
        .collect();
    assert_eq!((messages, scene.counts()[3]), (vec![json!("late")], 1));
}

#[tokio::test(start_paused = true)]
async fn events_are_rate_limited_and_bounded() {
    let scene = Scene::new().await;
    for index in 0..EVENTS_MAX + 50 {
        scene.publish_on_pod(&format!("pod-{index}"), "many");
    }
    assert_eq!(scene.counts()[3], 50);
    tokio::time::sleep(EVENTS_EVERY / 2).await;
    assert_eq!(scene.events().len(), EVENTS_BURST as usize);
    tokio::time::sleep(10 * EVENTS_EVERY).await;
    assert_eq!(scene.events().len(), EVENTS_BURST as usize + 10);
}

#[tokio::test(start_paused = true)]
async fn forbidden_events_set_one_condition() {
    let scene = Scene::new().await;
    scene.server.deny("create", "events");
    scene.refuse("a");
    scene.refuse("b");
    tokio::time::sleep(KUBE_FORBIDDEN_PAUSE / 2).await;
    assert_eq!(scene.writes(), 1);
    assert_eq!(
        scene.conditions.list()[0].problem.code,
        ProblemCode::EventsForbidden
    );
    scene.server.allow_all();
    scene
        .server
        .fail(Fault::Status(422), When::any().resource("events"));
    tokio::time::sleep(KUBE_FORBIDDEN_PAUSE).await;
    assert_eq!(scene.writes(), 2);
    assert_eq!(scene.conditions.list(), []);
    assert_eq!(scene.counts()[2..], [1, 1]);
}

#[tokio::test(start_paused = true)]
async fn node_conditions_become_node_events() {
    let changes = nodedock_base::changes::Changes::default();
    let conditions = Conditions::new(changes.clone());
    let scene = Scene::new().await;
    publish_conditions(
        &scene.tasks,
        scene.events.clone(),
        conditions.clone(),
        &changes,
    );
    for driver in ["gpu.example.com", "nic.example.com"] {
        conditions.set(
            driver,
            Problem::unavailable("driver-quarantined", format!("driver {driver} fails")),
        );
    }
    tokio::time::sleep(SHORTLY).await;
    conditions.clear(ProblemCode::DriverQuarantined, "gpu.example.com");
    tokio::time::sleep(SHORTLY).await;
    let events = scene.events();
    let mut reasons: Vec<_> = events
        .iter()
        .map(|event| event["reason"].as_str().unwrap())
        .collect();
    reasons.sort_unstable();
    assert_eq!(
        reasons,
        [
            "DriverQuarantined",
            "DriverQuarantined",
            "DriverQuarantinedOver"
        ]
    );
    for event in &events {
        assert_eq!(event["metadata"]["namespace"], "default");
        let node = json!({"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-uid"});
        assert_eq!(event["involvedObject"], node);
    }
    assert!(scene.tasks.drain(Duration::from_secs(1)).await);
}

#[test]
fn reasons_are_words_of_kubernetes() {
    let words = ["device-held", "", "-", "3d", "a_b c", "Ünter-x", "already"];
    let reasons: Vec<_> = words.iter().map(|words| camel_case(words)).collect();
    assert_eq!(
        reasons,
        [
            "DeviceHeld",
            "Unspecified",
            "Unspecified",
            "Reason3d",
            "ABC",
            "NterX",
            "Already"
        ]
    );
    assert_eq!(camel_case(&"ab-".repeat(100)).len(), EVENT_REASON_BYTES_MAX);
}
