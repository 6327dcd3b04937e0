//! Claims over an API server that is a function.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::json;
use tokio::sync::mpsc;

use super::super::api::fake;
use super::convert::tests::fixture;
use super::*;

type Part = std::io::Result<bytes::Bytes>;
type Trouble = fn() -> fake::Answer;

/// What the API server has, and how it is.
struct World {
    claims: BTreeMap<String, Value>,
    /// What it answers instead, if anything.
    trouble: Option<Trouble>,
    watches: BTreeMap<String, mpsc::Sender<Part>>,
}

struct Server {
    world: Arc<Mutex<World>>,
    claims: ApiClaims,
    log: Arc<Mutex<Vec<fake::Asked>>>,
    opened: mpsc::UnboundedReceiver<String>,
    tasks: Tasks,
}

const UID: &str = "68a5aecc-0b16-411c-ac56-2f23834fb15c";

fn answer(world: &mut World, asked: &fake::Asked, opened: &mpsc::UnboundedSender<String>) -> fake::Answer {
    if let Some(trouble) = world.trouble {
        return trouble();
    }
    if asked.path == "/apis/resource.k8s.io" {
        return fake::group(&["v1"]);
    }
    let name = match asked.query.split("metadata.name%3D").nth(1) {
        Some(name) => name.to_owned(),
        None => asked.path.rsplit('/').next().unwrap().to_owned(),
    };
    let claim = world.claims.get(&name).cloned();
    if asked.is_watch() {
        let (sender, answer) = fake::open();
        world.watches.insert(name.clone(), sender);
        let _ = opened.send(name);
        return answer;
    }
    if asked.query.contains("limit=") {
        return fake::list("500", &claim.into_iter().collect::<Vec<_>>());
    }
    claim.map_or_else(|| fake::refusal(404, "NotFound", "none"), |claim| fake::answer(200, &claim))
}

impl Server {
    fn new() -> Self {
        let claims = BTreeMap::from([("one-gpu".to_owned(), fixture("claim-one-gpu.json"))]);
        let world = Arc::new(Mutex::new(World { claims, trouble: None, watches: BTreeMap::new() }));
        let (tell, opened) = mpsc::unbounded_channel();
        let behind = world.clone();
        let (api, log) =
            fake::api(move |asked| std::future::ready(answer(&mut behind.lock().unwrap(), &asked, &tell)));
        let tasks = Tasks::new();
        let claims = ApiClaims::new(api, "node-1".to_owned(), Conditions::default(), tasks.clone());
        Self { world, claims, log, opened, tasks }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }

    async fn ask(&self, uid: &str) -> Result<Option<Claim>, Problem> {
        let (namespace, name) = names();
        self.claims.claim_with_uid(&namespace, &name, &Uid::new(uid).unwrap()).await
    }

    /// Asks for the first time, and waits until the claim is watched.
    async fn known(&mut self) -> Claim {
        let claim = self.ask(UID).await.unwrap().unwrap();
        self.watched().await;
        claim
    }

    async fn watched(&mut self) {
        self.opened.recv().await.unwrap();
        while self
            .claims
            .0
            .lock()
            .fresh(&names(), &Uid::new(UID).unwrap(), Instant::now(), Following::is_live)
            .is_none()
        {
            tokio::task::yield_now().await;
        }
    }

    async fn tell(&self, kind: &str, object: &Value) {
        let watch = self.world().watches["one-gpu"].clone();
        watch.send(fake::event(kind, object)).await.unwrap();
    }

    /// Gets of the claim itself.
    fn gets(&self) -> usize {
        self.log
            .lock()
            .unwrap()
            .iter()
            .filter(|asked| asked.path.ends_with("/resourceclaims/one-gpu"))
            .count()
    }
}

fn names() -> Key {
    (ObjectName::new("default").unwrap(), ObjectName::new("one-gpu").unwrap())
}

fn away() -> fake::Answer {
    fake::text(503, "text/plain", "")
}

#[tokio::test(start_paused = true)]
async fn a_claim_is_asked_for_once_and_then_known() {
    let mut server = Server::new();
    let claim = server.known().await;
    assert_eq!(claim.allocation.as_ref().unwrap().devices[0].device.as_str(), "gpu-0");
    assert_eq!(server.ask(UID).await, Ok(Some(claim)));
    assert_eq!(server.gets(), 1);
    let counts = server.claims.counts();
    assert_eq!(counts, ApiClaimCounts { from_memory: 1, asked: 1, while_away: 0, known: 1, followed: 1 });
    // By name alone it is always asked: whom it is reserved for may have changed.
    let (namespace, name) = names();
    server.claims.claim(&namespace, &name).await.unwrap().unwrap();
    assert_eq!(server.gets(), 2);
    assert!(server.tasks.drain(Duration::from_secs(1)).await);
}

#[tokio::test(start_paused = true)]
async fn requests_that_come_together_are_one_get() {
    let server = Server::new();
    let asked = futures::future::join_all((0..8).map(|_| server.ask(UID))).await;
    assert!(asked.iter().all(|claim| claim.as_ref().is_ok_and(Option::is_some)));
    assert_eq!(server.gets(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_claim_of_another_uid_is_given_as_it_is_now() {
    let mut server = Server::new();
    server.known().await;
    let mut other = fixture("claim-one-gpu.json");
    other["metadata"]["uid"] = json!("other");
    server.world().claims.insert("one-gpu".to_owned(), other);
    assert_eq!(server.ask("other").await.unwrap().unwrap().id.uid.as_str(), "other");
    // Whoever wants the old one learns that it is replaced.
    assert_eq!(server.ask(UID).await.unwrap().unwrap().id.uid.as_str(), "other");
}

#[tokio::test(start_paused = true)]
async fn what_is_not_there_is_none_and_what_is_not_allocated_is_not_kept() {
    let server = Server::new();
    server.world().claims.clear();
    assert_eq!(server.ask(UID).await, Ok(None));
    let mut free = fixture("claim-one-gpu.json");
    free["status"] = json!({});
    server.world().claims.insert("one-gpu".to_owned(), free);
    assert_eq!(server.ask(UID).await.unwrap().unwrap().allocation, None);
    assert_eq!(server.claims.counts().known, 0);
}

#[tokio::test(start_paused = true)]
async fn changes_are_followed_and_what_is_lost_is_told() {
    let mut server = Server::new();
    server.known().await;
    let mut lost = server.claims.lost();
    let mut changed = fixture("claim-one-gpu.json");
    changed["metadata"]["resourceVersion"] = json!("900");
    changed["status"]["reservedFor"] = json!([]);
    server.tell("MODIFIED", &changed).await;
    while !server.ask(UID).await.unwrap().unwrap().reserved_for.is_empty() {
        tokio::task::yield_now().await;
    }
    assert_eq!(server.gets(), 1);
    changed["metadata"]["resourceVersion"] = json!("901");
    changed["status"] = json!({});
    server.tell("MODIFIED", &changed).await;
    assert_eq!(lost.recv().await.unwrap().uid.as_str(), UID);
    assert_eq!(server.claims.counts().known, 0);
}

#[tokio::test(start_paused = true)]
async fn a_deletion_is_told_whether_it_was_seen_or_not() {
    let mut server = Server::new();
    server.known().await;
    let mut lost = server.claims.lost();
    server.tell("DELETED", &fixture("claim-one-gpu.json")).await;
    assert_eq!(lost.recv().await.unwrap().uid.as_str(), UID);

    let mut server = Server::new();
    server.known().await;
    let mut lost = server.claims.lost();
    server.world().claims.clear();
    let gone = json!({"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"});
    server.tell("ERROR", &gone).await;
    assert_eq!(lost.recv().await.unwrap().uid.as_str(), UID);
}

#[tokio::test(start_paused = true)]
async fn while_the_server_is_away_what_is_known_is_answered_and_nothing_else() {
    let mut server = Server::new();
    server.known().await;
    server.world().trouble = Some(away);
    server.world().watches.clear();
    // The watch is over, and nobody answers.
    while server.claims.0.api.reach().borrow().clone() != crate::api::Reach::Here {
        tokio::task::yield_now().await;
    }
    tokio::time::sleep(Duration::from_secs(30)).await;
    let start = Instant::now();
    let claim = server.ask(UID).await.unwrap().unwrap();
    assert_eq!((claim.id.uid.as_str(), start.elapsed()), (UID, Duration::ZERO));
    assert_eq!(server.claims.counts().while_away, 1);
    let problem = server.ask("other").await.unwrap_err();
    assert_eq!(problem.code, "api-server-unreachable");
    assert!(
        problem.message.starts_with("claim default/one-gpu: the API server cannot be reached: 503"),
        "{problem}"
    );
    assert!(problem.retry_after_ms.is_some());
    let (namespace, name) = names();
    assert!(server.claims.claim(&namespace, &name).await.is_err());
    server.world().trouble = None;
    tokio::time::sleep(limit::API_RETRY_MAX * 2).await;
    assert_eq!(server.ask("other").await.unwrap().unwrap().id.uid.as_str(), UID);
    server.ask(UID).await.unwrap().unwrap();
    assert!(
        server
            .claims
            .0
            .lock()
            .fresh(&names(), &Uid::new(UID).unwrap(), Instant::now(), Following::is_live)
            .is_some()
    );
}

#[tokio::test(start_paused = true)]
async fn what_stands_in_the_way_is_said_with_the_claim() {
    let server = Server::new();
    let cases: [(Trouble, &str, &str); 3] = [
        (
            || fake::refusal(403, "Forbidden", "resourceclaims is forbidden"),
            "api-forbidden",
            "resourceclaims is forbidden",
        ),
        (|| fake::text(200, "text/html", "<html>hello"), "api-server-unreachable", "is there a proxy"),
        (|| fake::refusal(429, "TooManyRequests", "slow down"), "api-server-busy", "slow down"),
    ];
    for (trouble, code, words) in cases {
        server.world().trouble = Some(trouble);
        let problem = server.ask(UID).await.unwrap_err();
        assert_eq!(problem.code, code);
        assert!(
            problem.message.starts_with("claim default/one-gpu: ") && problem.message.contains(words),
            "{problem}"
        );
    }
    server.world().trouble = None;
    let mut broken = fixture("claim-one-gpu.json");
    broken["status"]["allocation"]["devices"]["config"][0]["opaque"]["parameters"] = json!("x");
    server.world().claims.insert("one-gpu".to_owned(), broken);
    assert_eq!(server.ask(UID).await.unwrap_err().code, "claim-parameters-malformed");
}

/// A claim that was readable and is no more is not answered from before.
#[tokio::test(start_paused = true)]
async fn what_became_unreadable_is_asked_for_again() {
    let mut server = Server::new();
    server.known().await;
    let mut broken = fixture("claim-one-gpu.json");
    broken["metadata"]["resourceVersion"] = json!("900");
    broken["status"]["allocation"]["devices"]["results"][0]["driver"] = json!("no driver!");
    server.world().claims.insert("one-gpu".to_owned(), broken.clone());
    server.tell("MODIFIED", &broken).await;
    while server.ask(UID).await.is_ok() {
        tokio::task::yield_now().await;
    }
    assert_eq!(server.ask(UID).await.unwrap_err().code, "claim-malformed");
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_nobody_holds_or_asks_for_is_followed_no_more() {
    let mut server = Server::new();
    let id = server.known().await.id;
    server.claims.hold(std::slice::from_ref(&id));
    // As a server does, so that the watch is not taken for dead.
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_secs(60)).await;
        server.tell("BOOKMARK", &fake::object("", "901")).await;
    }
    assert_eq!(server.claims.counts().followed, 1);
    server.claims.hold(&[]);
    assert_eq!(server.claims.counts().known, 0);
    let watch = server.world().watches["one-gpu"].clone();
    watch.closed().await;

    server.known().await;
    let mut minutes = 0;
    while server.claims.counts().known > 0 {
        tokio::time::sleep(Duration::from_secs(60)).await;
        minutes += 1;
    }
    assert!((5..=7).contains(&minutes), "{minutes}");
    server.known().await;
    server.claims.forget(&id);
    assert_eq!(server.claims.counts().known, 0);
}
