use serde_json::{Value, json};

use super::super::exchange::tests::{Scripted, failure, json as answer};
use super::super::exchange::{Answer, Away};
use super::*;
use nodedock_model::{Condition, DeviceName, DeviceStatus, DriverName, ObjectRef, PoolName};

const CLAIM: &str = include_str!("../../../tests/fixtures/kubernetes-1.36/claim-one-gpu.json");

/// An API server with one claim.
struct Server {
    claim: Mutex<Value>,
    mood: Mutex<Mood>,
}

#[derive(Clone, Copy, PartialEq)]
enum Mood {
    Well,
    Away,
    Forbids,
    /// Somebody else changes the claim before each of so many writes.
    Busy(u32),
    /// The parameters are stored with white space, so that no JSON is the same.
    Spaced,
    Refuses,
}

impl Server {
    fn new(mood: Mood) -> Arc<Self> {
        Arc::new(Self { claim: Mutex::new(serde_json::from_str(CLAIM).unwrap()), mood: Mutex::new(mood) })
    }

    fn answer(&self, request: &Request) -> Result<Answer, Away> {
        let claim = self.claim.lock().unwrap().clone();
        let mut mood = self.mood.lock().unwrap();
        let status = status("a");
        let of = subject(&status);
        match (*mood, request.verb, request.wants) {
            (Mood::Away, ..) => Err(Away::new("no route to host")),
            (Mood::Spaced, Verb::Get, Media::Protobuf) => {
                let body = splice::tests::recorded(r#"{ "a": 1 }"#, "141");
                Ok(Answer { status: 200, body: body.into() })
            }
            (_, Verb::Get, _) => Ok(answer(200, &claim)),
            (Mood::Forbids, ..) => Ok(failure(403, "Forbidden", of)),
            (Mood::Refuses, ..) => Ok(failure(422, "Invalid", of)),
            (Mood::Busy(times), ..) => {
                *mood = times.checked_sub(2).map_or(Mood::Well, |left| Mood::Busy(left + 1));
                Ok(failure(409, "Conflict", of))
            }
            (Mood::Spaced, ..) if request.sends == Media::Json => {
                let mut refusal: Value = serde_json::from_slice(&failure(422, "Invalid", of).body).unwrap();
                refusal["details"]["causes"] =
                    json!([{"reason": "FieldValueInvalid", "field": "status.allocation"}]);
                Ok(answer(422, &refusal))
            }
            (Mood::Spaced, ..) => Ok(answer(200, &claim)),
            (Mood::Well, ..) => {
                *self.claim.lock().unwrap() = serde_json::from_slice(&request.body).unwrap();
                Ok(answer(200, &claim))
            }
        }
    }

    fn reasons(&self) -> Value {
        let claim = self.claim.lock().unwrap();
        claim["status"]["devices"][0]["conditions"][0]["reason"].clone()
    }
}

fn status(reason: &str) -> ClaimStatus {
    let condition = Condition {
        kind: "Ready".to_owned(),
        status: Some(true),
        reason: reason.to_owned(),
        message: String::new(),
    };
    let report = DeviceReport {
        pool: PoolName::new("node-1").unwrap(),
        device: DeviceName::new("gpu-0").unwrap(),
        share_id: None,
        status: DeviceStatus { conditions: vec![condition], ..DeviceStatus::default() },
    };
    ClaimStatus {
        claim: ObjectRef::new("default", "one-gpu", "68a5aecc-0b16-411c-ac56-2f23834fb15c").unwrap(),
        drivers: [(DriverName::new("gpu.example.com").unwrap(), vec![report])].into(),
    }
}

/// A writer at such a server, and requests that it made.
async fn wrote(
    server: &Arc<Server>,
    statuses: Vec<ClaimStatus>,
    conditions: &Conditions,
) -> (Vec<Request>, StatusCounts) {
    let at = Arc::clone(server);
    let api = Arc::new(Scripted::new(move |request: &Request| at.answer(request)));
    let tasks = Tasks::new();
    let writer = Statuses::start(&tasks, api.clone(), conditions.clone());
    statuses.into_iter().for_each(|status| assert!(writer.report(status)));
    // Nothing but the paused clock goes on once the writer waits.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let asked = api.asked();
    assert!(tasks.drain(Duration::from_secs(1)).await);
    let counts = std::mem::take(&mut Arc::into_inner(writer.queue).unwrap().counts);
    (asked, counts)
}

fn written(counts: &StatusCounts) -> [u64; 4] {
    [&counts.written, &counts.standing, &counts.refused, &counts.dropped].map(|count| count.load(Relaxed))
}

#[tokio::test(start_paused = true)]
async fn a_status_is_read_changed_and_put_and_one_that_stands_is_not_written_again() {
    let server = Server::new(Mood::Well);
    let conditions = Conditions::default();
    let (asked, counts) = wrote(&server, vec![status("Old"), status("New")], &conditions).await;
    let paths: Vec<_> = asked.iter().map(|request| (request.verb, request.path.as_str())).collect();
    let path = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/one-gpu";
    // Of two reports that wait the newer counts.
    assert_eq!(paths, [(Verb::Get, path), (Verb::Put, &format!("{path}/status"))]);
    assert_eq!((server.reasons(), written(&counts)), (json!("New"), [1, 0, 0, 0]));
    let (asked, counts) = wrote(&server, vec![status("New")], &conditions).await;
    assert_eq!((asked.len(), written(&counts)), (1, [0, 1, 0, 0]));
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_read_anew() {
    let server = Server::new(Mood::Busy(2));
    let (asked, counts) = wrote(&server, vec![status("New")], &Conditions::default()).await;
    assert_eq!((asked.len(), written(&counts)), (6, [1, 0, 0, 0]));
    assert_eq!(server.reasons(), "New");
}

#[tokio::test(start_paused = true)]
async fn parameters_stored_with_white_space_are_kept_by_the_form_of_protobuf() {
    // As recorded: a patch of `status.devices` alone was refused as one of `status.allocation`. The claim had been created by a client
    // whose JSON has spaces.
    let server = Server::new(Mood::Spaced);
    let (asked, counts) = wrote(&server, vec![status("New")], &Conditions::default()).await;
    assert_eq!(written(&counts), [1, 0, 0, 0]);
    let forms: Vec<_> = asked.iter().map(|request| (request.verb, request.sends, request.wants)).collect();
    assert_eq!(forms[2], (Verb::Get, Media::Json, Media::Protobuf));
    assert_eq!(forms[3], (Verb::Put, Media::Protobuf, Media::Json));
    let (parameters, devices) = splice::tests::told(&asked[3].body);
    assert_eq!(parameters, r#"{ "a": 1 }"#);
    assert_eq!(devices, ["nic-0", "gpu-0"]);
}

#[tokio::test(start_paused = true)]
async fn what_is_refused_for_good_is_not_tried_again() {
    let server = Server::new(Mood::Refuses);
    let (asked, counts) = wrote(&server, vec![status("New")], &Conditions::default()).await;
    assert_eq!((asked.len(), written(&counts)), (2, [0, 0, 1, 0]));
}

#[tokio::test(start_paused = true)]
async fn what_is_forbidden_is_one_condition_and_no_hammering() {
    let server = Server::new(Mood::Forbids);
    let conditions = Conditions::default();
    let at = Arc::clone(&server);
    let api = Arc::new(Scripted::new(move |request: &Request| at.answer(request)));
    let tasks = Tasks::new();
    let writer = Statuses::start(&tasks, api.clone(), conditions.clone());
    writer.report(status("New"));
    tokio::time::sleep(limit::KUBE_FORBIDDEN_PAUSE - Duration::from_secs(1)).await;
    assert_eq!(api.asked().len(), 2);
    assert_eq!(conditions.list()[0].problem.code, FORBIDDEN);
    *server.mood.lock().unwrap() = Mood::Well;
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!((server.reasons(), conditions.list().len()), (json!("New"), 0));
    assert!(tasks.drain(Duration::from_secs(1)).await);
}

#[tokio::test(start_paused = true)]
async fn while_the_api_server_is_away_the_newest_waits() {
    let server = Server::new(Mood::Away);
    let at = Arc::clone(&server);
    let api = Arc::new(Scripted::new(move |request: &Request| at.answer(request)));
    let tasks = Tasks::new();
    let writer = Statuses::start(&tasks, api.clone(), Conditions::default());
    writer.report(status("Old"));
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(api.asked().len() < 25);
    writer.report(status("New"));
    *server.mood.lock().unwrap() = Mood::Well;
    tokio::time::sleep(limit::KUBE_RETRY_MAX).await;
    assert_eq!(server.reasons(), "New");
    assert_eq!(written(writer.counts()), [1, 0, 0, 0]);
    assert!(tasks.drain(Duration::from_secs(1)).await);
}

#[test]
fn the_queue_has_a_bound_and_a_claim_has_one_place() {
    let mut waiting = Waiting::default();
    for i in 0..limit::STATUSES_WAITING_MAX + 1 {
        let mut status = status("a");
        status.claim.uid = Uid::new(format!("uid-{i}")).unwrap();
        assert_eq!(waiting.push(status.clone(), true), i < limit::STATUSES_WAITING_MAX);
        if i == 0 {
            assert!(waiting.push(status, true));
        }
    }
    assert_eq!(waiting.order.len(), limit::STATUSES_WAITING_MAX);
    waiting.forget(&Uid::new("uid-0").unwrap());
    waiting.forget(&Uid::new("uid-0").unwrap());
    assert_eq!(
        (waiting.order.len(), waiting.claims.len()),
        (limit::STATUSES_WAITING_MAX - 1, limit::STATUSES_WAITING_MAX - 1)
    );
    let Next::Write(first) = waiting.next(Instant::now()) else { panic!() };
    assert_eq!(Some(&first.claim.uid), Uid::new("uid-1").ok().as_ref());
    // What is given up while it is written does not come back.
    waiting.forget(&first.claim.uid);
    assert!(waiting.put_back(first));
    assert_eq!(waiting.order.len(), limit::STATUSES_WAITING_MAX - 2);
}

#[test]
fn claims_of_a_driver_whose_status_is_forbidden_keep_those_of_no_other_waiting() {
    let now = Instant::now();
    let of = |uid: &str, driver: &str| {
        let mut status = status("a");
        status.claim.uid = Uid::new(uid).unwrap();
        let reports = status.drivers.pop_first().unwrap().1;
        ClaimStatus { drivers: [(DriverName::new(driver).unwrap(), reports)].into(), ..status }
    };
    let mut waiting = Waiting::default();
    for status in [of("a", "gpu.example.com"), of("b", "gpu.example.com"), of("c", "nic.example.com")] {
        waiting.push(status, true);
    }
    let next = |waiting: &mut Waiting, at: Instant| match waiting.next(at) {
        Next::Write(status) => Ok(status),
        Next::Idle(until) => Err(until),
    };
    let first = next(&mut waiting, now).unwrap();
    let until = now + limit::KUBE_FORBIDDEN_PAUSE;
    waiting.held_back.insert(drivers_of(&first), until);
    waiting.put_back(first);
    assert_eq!(next(&mut waiting, now).unwrap().claim.uid.as_str(), "c");
    assert_eq!(next(&mut waiting, now), Err(Some(until)));
    // One try after the pause; it is not that of the same claim again.
    assert_eq!(next(&mut waiting, until).unwrap().claim.uid.as_str(), "b");
    waiting.forget(&Uid::new("a").unwrap());
    assert_eq!(next(&mut waiting, until), Err(None));
    assert!(waiting.held_back.is_empty());
}
