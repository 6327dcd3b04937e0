use super::super::exchange::tests::{Scripted, failure, json as answer};
use super::super::exchange::{Answer, Away};
use super::*;
use nodedock_model::Uid;

fn claim() -> ObjectRef {
    ObjectRef::new("default", "one-gpu", "68a5aecc-0b16-411c-ac56-2f23834fb15c").unwrap()
}

fn pod(name: &str) -> Consumer {
    Consumer {
        api_group: String::new(),
        resource: "pods".to_owned(),
        name: ObjectName::new(name).unwrap(),
        uid: Uid::new(name).unwrap(),
    }
}

fn problem(words: &str) -> Problem {
    Problem::conflict("device-held", words)
}

/// Takes what is written.
fn takes(request: &Request) -> Result<Answer, Away> {
    let event = json!({"kind": "Event", "apiVersion": "v1"});
    Ok(answer(if request.verb == Verb::Post { 201 } else { 200 }, &event))
}

struct Scene<F> {
    api: Arc<Scripted<F>>,
    tasks: Tasks,
    events: Events,
    conditions: Conditions,
}

fn scene<F: Fn(&Request) -> Result<Answer, Away> + Send + Sync + 'static>(answer: F) -> Scene<F> {
    let api = Arc::new(Scripted::new(answer));
    let (tasks, conditions) = (Tasks::new(), Conditions::default());
    let node = ObjectName::new("node-1").unwrap();
    let facts = NodeFacts { name: node.clone(), uid: Uid::new("node-uid").unwrap() };
    let (_, facts) = watch::channel(Some(facts));
    let events = Events::start(&tasks, api.clone(), node, facts, conditions.clone());
    Scene { api, tasks, events, conditions }
}

fn bodies(asked: &[Request]) -> Vec<Value> {
    asked.iter().map(|request| serde_json::from_slice(&request.body).unwrap()).collect()
}

const SHORTLY: Duration = Duration::from_millis(100);

#[tokio::test(start_paused = true)]
async fn a_refusal_is_told_on_the_claim_and_its_pods_in_the_form_that_an_api_server_takes() {
    let scene = scene(takes);
    let mut other = pod("job");
    other.resource = "jobs".to_owned();
    scene.events.refused(&claim(), &[pod("pod-one-gpu"), other], &problem("device gpu-0 is held\nby b"));
    tokio::time::sleep(SHORTLY).await;
    let asked = scene.api.asked();
    assert_eq!(asked.len(), 2);
    let mut events = bodies(&asked);
    events.sort_by_key(|event| event["involvedObject"]["kind"].to_string());
    let [on_pod, on_claim] = &mut events[..] else { panic!() };
    assert_eq!(on_pod["message"], "claim one-gpu: device gpu-0 is held by b");
    assert_eq!(on_pod["involvedObject"]["uid"], "pod-one-gpu");
    let name = on_claim["metadata"]["name"].take();
    assert!(name.as_str().is_some_and(|name| name.starts_with("one-gpu.") && name.len() == 24), "{name}");
    for time in ["firstTimestamp", "lastTimestamp"] {
        let at = on_claim[time].take();
        assert!(at.as_str().is_some_and(|at| at.len() == "2026-01-01T00:00:00Z".len()), "{at}");
    }
    // But for the name, the fields of one that was recorded as taken.
    let wanted = json!({
        "apiVersion": "v1", "kind": "Event",
        "metadata": {"name": null, "namespace": "default"},
        "involvedObject": {
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "name": "one-gpu", "namespace": "default",
            "uid": "68a5aecc-0b16-411c-ac56-2f23834fb15c",
        },
        "reason": "DeviceHeld", "message": "device gpu-0 is held by b", "type": "Warning",
        "source": {"component": "nodedock", "host": "node-1"},
        "reportingComponent": "nodedock", "reportingInstance": "node-1",
        "firstTimestamp": null, "lastTimestamp": null, "count": 1,
    });
    assert_eq!(*on_claim, wanted);
    assert!(scene.tasks.drain(Duration::from_secs(1)).await);
}

#[tokio::test(start_paused = true)]
async fn the_same_refusal_raises_a_count_and_one_whose_event_is_over_makes_a_new_one() {
    let gone = Arc::new(Mutex::new(false));
    let is_gone = Arc::clone(&gone);
    let scene = scene(move |request: &Request| match request.verb {
        Verb::MergePatch if *is_gone.lock().unwrap() => {
            let name = request.path.rsplit('/').next().unwrap();
            Ok(failure(404, "NotFound", subject(name)))
        }
        _ => takes(request),
    });
    for _ in 0..5 {
        scene.events.refused(&claim(), &[], &problem("held"));
    }
    tokio::time::sleep(SHORTLY).await;
    // What came before the first was written is in it.
    assert_eq!(bodies(&scene.api.asked())[0]["count"], 5);
    scene.events.refused(&claim(), &[], &problem("held"));
    tokio::time::sleep(limit::EVENT_COUNT_PACE).await;
    let asked = scene.api.asked();
    assert_eq!((asked.len(), asked[0].verb, &bodies(&asked)[0]["count"]), (1, Verb::MergePatch, &json!(6)));
    *gone.lock().unwrap() = true;
    scene.events.refused(&claim(), &[], &problem("held"));
    tokio::time::sleep(limit::EVENT_COUNT_PACE).await;
    let verbs: Vec<_> = scene.api.asked().iter().map(|request| request.verb).collect();
    assert_eq!(verbs, [Verb::MergePatch, Verb::Post]);
    let counts = scene.events.counts();
    assert_eq!((counts.created.load(Relaxed), counts.updated.load(Relaxed)), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn while_the_api_server_is_away_events_wait_and_old_ones_are_dropped() {
    let away = Arc::new(Mutex::new(true));
    let is_away = Arc::clone(&away);
    let scene = scene(move |request: &Request| match *is_away.lock().unwrap() {
        true => Err(Away::new("no route to host")),
        false => takes(request),
    });
    scene.events.refused(&claim(), &[], &problem("early"));
    tokio::time::sleep(limit::EVENT_SERIES).await;
    scene.events.refused(&claim(), &[], &problem("late"));
    assert!(scene.api.asked().len() < 20);
    *away.lock().unwrap() = false;
    tokio::time::sleep(limit::KUBE_RETRY_MAX).await;
    let told = bodies(&scene.api.asked());
    assert_eq!((told.len(), &told[0]["message"]), (1, &json!("late")));
    assert_eq!(scene.events.dropped(), 1);
}

#[tokio::test(start_paused = true)]
async fn an_event_whose_answer_was_lost_is_not_written_twice() {
    let names = Arc::new(Mutex::new(Vec::<String>::new()));
    let known = Arc::clone(&names);
    let scene = scene(move |request: &Request| {
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        let Some(name) = body["metadata"]["name"].as_str() else { return takes(request) };
        let mut known = known.lock().unwrap();
        if known.iter().any(|of| of == name) {
            return Ok(failure(409, "AlreadyExists", subject(name)));
        }
        known.push(name.to_owned());
        Err(Away::new("no answer within 10 s"))
    });
    scene.events.refused(&claim(), &[], &problem("held"));
    tokio::time::sleep(SHORTLY).await;
    scene.events.refused(&claim(), &[], &problem("held"));
    tokio::time::sleep(limit::KUBE_RETRY_MAX).await;
    assert_eq!(names.lock().unwrap().len(), 1);
    let asked = scene.api.asked();
    let verbs: Vec<_> = asked.iter().map(|request| request.verb).collect();
    assert_eq!(
        (verbs, &bodies(&asked)[2]["count"]),
        (vec![Verb::Post, Verb::Post, Verb::MergePatch], &json!(2))
    );
}

#[tokio::test(start_paused = true)]
async fn what_is_forbidden_is_one_condition_and_what_is_refused_is_let_go() {
    let status = Arc::new(Mutex::new((403, "Forbidden")));
    let now = Arc::clone(&status);
    let scene = scene(move |_: &Request| {
        let (status, reason) = *now.lock().unwrap();
        Ok(failure(status, reason, subject("")))
    });
    scene.events.refused(&claim(), &[], &problem("a"));
    tokio::time::sleep(limit::KUBE_FORBIDDEN_PAUSE / 2).await;
    assert_eq!(scene.api.asked().len(), 1);
    assert_eq!(scene.conditions.list()[0].problem.code, FORBIDDEN);
    *status.lock().unwrap() = (422, "Invalid");
    tokio::time::sleep(limit::KUBE_FORBIDDEN_PAUSE).await;
    assert_eq!(scene.api.asked().len(), 1);
    assert_eq!(scene.conditions.list(), []);
    assert_eq!(scene.events.counts().refused.load(Relaxed), 1);
}

#[tokio::test(start_paused = true)]
async fn conditions_of_the_node_are_told_on_its_object() {
    let changes = nodedock_base::changes::Changes::default();
    let conditions = Conditions::new(changes.clone());
    let scene = scene(takes);
    follow(&scene.tasks, scene.events.clone(), conditions.clone(), &changes);
    conditions
        .set("gpu.example.com", Problem::unavailable("driver-quarantined", "driver gpu.example.com fails"));
    tokio::time::sleep(SHORTLY).await;
    conditions.clear("driver-quarantined", "gpu.example.com");
    tokio::time::sleep(SHORTLY).await;
    let told = bodies(&scene.api.asked());
    assert_eq!(told.len(), 2);
    assert_eq!(told[0]["metadata"]["namespace"], "default");
    let node = json!({"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-uid"});
    assert_eq!(told[0]["involvedObject"], node);
    assert_eq!(
        (&told[0]["reason"], &told[1]["reason"]),
        (&json!("DriverQuarantined"), &json!("DriverQuarantinedOver"))
    );
    assert!(scene.tasks.drain(Duration::from_secs(1)).await);
}

#[test]
fn reasons_are_words_of_kubernetes() {
    let words = ["device-held", "", "-", "3d", "a_b c", "Ünter-x", "already"];
    let reasons: Vec<_> = words.iter().map(|words| camel_case(words)).collect();
    assert_eq!(reasons, ["DeviceHeld", "Unspecified", "Unspecified", "Reason3d", "ABC", "NterX", "Already"]);
    assert_eq!(camel_case(&"ab-".repeat(100)).len(), limit::EVENT_REASON_BYTES_MAX);
}

#[test]
fn names_of_events_are_object_names_whatever_the_object_is_called() {
    for object in ["a", &"a.".repeat(126), &format!("{}-b", "a".repeat(230)), &"a-".repeat(120)] {
        let name = event_name(object.trim_end_matches(['.', '-']));
        assert!(ObjectName::new(&name).is_ok(), "{name}");
    }
    assert_ne!(event_name("a"), event_name("a"));
}

#[test]
fn a_message_has_at_most_a_kibibyte() {
    assert!(message(&"é".repeat(2000)).len() <= limit::EVENT_MESSAGE_BYTES_MAX);
}
