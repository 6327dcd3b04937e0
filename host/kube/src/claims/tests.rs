//! Claims of an API server in memory.

use std::time::Duration;

use nodedock_stand_ins::api_server::{Allocated, ApiServer, Fault, When};
use serde_json::{Value, json};

use super::super::client::tests::over;
use super::convert::tests::{claim, fixture};
use super::*;
use crate::claims::CLAIM_FOLLOW_AFTER;
use crate::client::API_RETRY_MAX;
use crate::pools::PoolNames;
use nodedock_base::changes::Changes;
use nodedock_core::registry::Registry;

struct Cluster {
    server: Arc<ApiServer>,
    claims: ApiClaims,
    tasks: Tasks,
    uid: Uid,
}

impl Cluster {
    async fn new() -> Self {
        let server = Arc::new(ApiServer::start().await);
        let uid = Uid::new(server.allocate_claim(allocated())).unwrap();
        let tasks = Tasks::new();
        let registry = Registry::new(Changes::default(), Conditions::default(), None);
        let pools = NodePools {
            names: PoolNames {
                node: ObjectName::new("node-1").unwrap(),
            },
            registry,
        };
        let claims = ApiClaims::new(over(&server), pools, Conditions::default(), tasks.clone());
        Self {
            server,
            claims,
            tasks,
            uid,
        }
    }

    async fn ask(&self, uid: &Uid) -> Result<Option<Claim>, Problem> {
        let (namespace, name) = names();
        self.claims.claim_with_uid(&namespace, &name, uid).await
    }

    /// Asks for the first time, and holds the claim.
    async fn held(&self) -> Claim {
        let claim = self.ask(&self.uid).await.unwrap().unwrap();
        self.claims.hold(true, [(claim.id.uid.clone(), true)]);
        claim
    }

    /// Holds the claim until it is watched.
    async fn watched(&self) -> Claim {
        let claim = self.held().await;
        tokio::time::sleep(CLAIM_FOLLOW_AFTER).await;
        self.server
            .wait_until("the watch", |state| state.watches("resourceclaims") == 1)
            .await;
        claim
    }

    /// Waits until every task waits: the clock advances only then.
    async fn settle(&self) {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }

    fn edit(&self, edit: impl FnOnce(&mut Value)) {
        self.server
            .edit("resourceclaims", "default", "one-gpu", edit);
    }

    fn replace(&self) -> Uid {
        self.server.delete("resourceclaims", "default", "one-gpu");
        Uid::new(self.server.allocate_claim(allocated())).unwrap()
    }

    /// Requests for the claim, by their verbs.
    fn verbs(&self) -> Vec<String> {
        let requests = self.server.requests().into_iter();
        requests
            .filter(|seen| seen.resource == "resourceclaims")
            .map(|seen| seen.verb.to_string())
            .collect()
    }

    /// Gets of the claim itself.
    fn gets(&self) -> usize {
        self.verbs().iter().filter(|verb| *verb == "get").count()
    }
}

fn allocated() -> Allocated {
    Allocated::new("default", "one-gpu")
        .node("node-1")
        .device("gpu", "gpu.example.com", "node-1", "gpu-0")
        .config("FromClaim", &["gpu"], "gpu.example.com", json!({"a": 1}))
        .reserved_for("pod", "pod-uid")
}

fn names() -> Key {
    (
        ObjectName::new("default").unwrap(),
        ObjectName::new("one-gpu").unwrap(),
    )
}

#[tokio::test(start_paused = true)]
async fn claim_is_fetched_once_then_cached() {
    let cluster = Cluster::new().await;
    // Requests that come together are one get.
    let asked = futures::future::join_all((0..8).map(|_| cluster.ask(&cluster.uid))).await;
    assert!(
        asked
            .iter()
            .all(|claim| claim.as_ref().is_ok_and(Option::is_some))
    );
    assert_eq!(cluster.gets(), 1);
    // Until it is watched each is a get of its own.
    let claim = cluster.watched().await;
    let gets = cluster.gets();
    assert_eq!(
        claim.allocation.as_ref().unwrap().devices[0]
            .device
            .as_str(),
        "gpu-0"
    );
    assert_eq!(cluster.ask(&cluster.uid).await, Ok(Some(claim)));
    assert_eq!(cluster.gets(), gets);
    let counts = cluster.claims.counts();
    assert_eq!(
        (counts.while_unreachable.get(), cluster.claims.cached()),
        (0, [1, 1])
    );
    assert_eq!(counts.from_server.get(), gets as u64);
    assert!(counts.from_cache.get() >= 1);
    // By name alone there is always a get: for whom it is reserved may have changed.
    let (namespace, name) = names();
    cluster
        .claims
        .claim(&namespace, &name)
        .await
        .unwrap()
        .unwrap();
    assert_eq!(cluster.gets(), gets + 1);
    assert!(cluster.tasks.drain(Duration::from_secs(1)).await);
}

#[tokio::test(start_paused = true)]
async fn only_long_held_claims_are_watched() {
    let cluster = Cluster::new().await;
    cluster.held().await;
    tokio::time::sleep(CLAIM_FOLLOW_AFTER - Duration::from_secs(1)).await;
    cluster.claims.hold(true, []);
    tokio::time::sleep(10 * CLAIM_FOLLOW_AFTER).await;
    assert_eq!(cluster.verbs(), ["get"]);

    let cluster = Cluster::new().await;
    cluster.watched().await;
    tokio::time::sleep(CLAIM_FOLLOW_AFTER).await;
    assert_eq!(cluster.verbs(), ["get", "watch"]);
    // Also what happened before the watch is reported.
    let cluster = Cluster::new().await;
    cluster.held().await;
    let mut lost = cluster.claims.lost();
    cluster
        .server
        .delete("resourceclaims", "default", "one-gpu");
    lost.changed().await.unwrap();
    assert_eq!(cluster.verbs(), ["get", "watch"]);
    // The server does not know the version any more.
    let cluster = Cluster::new().await;
    cluster.held().await;
    cluster.edit(|claim| claim["status"]["reservedFor"] = json!([]));
    cluster.server.compact();
    tokio::time::sleep(2 * CLAIM_FOLLOW_AFTER).await;
    assert_eq!(
        cluster
            .ask(&cluster.uid)
            .await
            .unwrap()
            .unwrap()
            .reserved_for,
        []
    );
    assert_eq!(cluster.verbs(), ["get", "watch", "list", "watch"]);
}

#[tokio::test(start_paused = true)]
async fn claim_answered_from_cache_is_watched() {
    let cluster = Cluster::new().await;
    cluster.ask(&cluster.uid).await.unwrap().unwrap();
    let fault = cluster.server.fail(Fault::Status(503), When::any());
    let claim = cluster.held().await;
    cluster.server.lift(fault);
    tokio::time::sleep(API_RETRY_MAX).await;
    assert_eq!(cluster.claims.cached(), [1, 1]);
    let requests = cluster.verbs().len();
    assert_eq!(cluster.ask(&cluster.uid).await.unwrap(), Some(claim));
    assert_eq!(cluster.verbs().len(), requests);
}

#[tokio::test(start_paused = true)]
async fn replaced_claim_is_answered_as_current() {
    let cluster = Cluster::new().await;
    cluster.watched().await;
    let other = cluster.replace();
    assert_eq!(cluster.ask(&other).await.unwrap().unwrap().id.uid, other);
    // A caller that wants the old one learns that it is replaced.
    assert_eq!(
        cluster.ask(&cluster.uid).await.unwrap().unwrap().id.uid,
        other
    );
    cluster.server.deallocate_claim("default", "one-gpu");
    cluster.settle().await;
    assert_eq!(cluster.ask(&other).await.unwrap().unwrap().allocation, None);
    cluster
        .server
        .delete("resourceclaims", "default", "one-gpu");
    assert_eq!(cluster.ask(&other).await, Ok(None));
    assert_eq!(cluster.claims.cached()[0], 0);
}

#[tokio::test(start_paused = true)]
async fn watched_changes_and_losses_are_reported() {
    let cluster = Cluster::new().await;
    cluster.watched().await;
    let mut lost = cluster.claims.lost();
    cluster.edit(|claim| claim["status"]["reservedFor"] = json!([]));
    cluster.settle().await;
    assert_eq!(
        cluster
            .ask(&cluster.uid)
            .await
            .unwrap()
            .unwrap()
            .reserved_for,
        []
    );
    assert_eq!(cluster.gets(), 1);
    cluster.server.deallocate_claim("default", "one-gpu");
    lost.changed().await.unwrap();
    assert_eq!(cluster.claims.cached()[0], 0);
}

#[tokio::test(start_paused = true)]
async fn deletion_is_reported_even_if_missed() {
    let cluster = Cluster::new().await;
    cluster.watched().await;
    let mut lost = cluster.claims.lost();
    cluster
        .server
        .delete("resourceclaims", "default", "one-gpu");
    lost.changed().await.unwrap();

    let cluster = Cluster::new().await;
    cluster.watched().await;
    let mut lost = cluster.claims.lost();
    let fault = cluster.server.fail(Fault::Away, When::any());
    cluster.server.close_watches();
    tokio::time::sleep(Duration::from_secs(30)).await;
    cluster
        .server
        .delete("resourceclaims", "default", "one-gpu");
    cluster.server.lift(fault);
    lost.changed().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn cached_claims_are_answered_during_outage() {
    let cluster = Cluster::new().await;
    cluster.watched().await;
    let fault = cluster.server.fail(Fault::Status(503), When::any());
    cluster.server.close_watches();
    tokio::time::sleep(Duration::from_secs(30)).await;
    let start = Instant::now();
    let claim = cluster.ask(&cluster.uid).await.unwrap().unwrap();
    assert_eq!(
        (&claim.id.uid, start.elapsed()),
        (&cluster.uid, Duration::ZERO)
    );
    assert_eq!(cluster.claims.counts().while_unreachable.get(), 1);
    let problem = cluster.ask(&Uid::new("other").unwrap()).await.unwrap_err();
    assert_eq!(problem.code, "api-server-unreachable");
    assert!(
        problem
            .message
            .starts_with("claim default/one-gpu: the API server cannot be reached: "),
        "{problem}"
    );
    assert!(problem.retry_after_ms.is_some());
    let (namespace, name) = names();
    assert!(cluster.claims.claim(&namespace, &name).await.is_err());
    cluster.server.lift(fault);
    tokio::time::sleep(API_RETRY_MAX * 3).await;
    assert_eq!(
        cluster
            .ask(&Uid::new("other").unwrap())
            .await
            .unwrap()
            .unwrap()
            .id
            .uid,
        cluster.uid
    );
    assert_eq!(cluster.claims.cached()[1], 1);
}

#[tokio::test(start_paused = true)]
async fn failures_name_the_claim() {
    let cluster = Cluster::new().await;
    for (fault, code, words) in [
        (Fault::Status(403), "api-forbidden", "forbidden"),
        (
            Fault::Html(200),
            "api-server-unreachable",
            "is there a proxy",
        ),
        (
            Fault::TooMany { retry_after: 1 },
            "api-server-busy",
            "too many requests",
        ),
    ] {
        let fault = cluster
            .server
            .fail(fault, When::any().resource("resourceclaims"));
        let problem = cluster.ask(&cluster.uid).await.unwrap_err();
        assert_eq!(problem.code, code);
        let message = &problem.message;
        assert!(
            message.starts_with("claim default/one-gpu: ") && message.contains(words),
            "{problem}"
        );
        cluster.server.lift(fault);
    }
    let parameters = "/status/allocation/devices/config/0/opaque/parameters";
    cluster.edit(|claim| *claim.pointer_mut(parameters).unwrap() = json!("x"));
    assert_eq!(
        cluster.ask(&cluster.uid).await.unwrap_err().code,
        "claim-parameters-malformed"
    );
}

/// A claim that was readable and is no more is not answered from before.
#[tokio::test(start_paused = true)]
async fn unreadable_claim_is_fetched_again() {
    let cluster = Cluster::new().await;
    cluster.watched().await;
    let driver = "/status/allocation/devices/results/0/driver";
    cluster.edit(|claim| *claim.pointer_mut(driver).unwrap() = json!("no driver!"));
    cluster.settle().await;
    assert_eq!(
        cluster.ask(&cluster.uid).await.unwrap_err().code,
        "claim-malformed"
    );
}

#[tokio::test(start_paused = true)]
async fn released_claim_is_no_longer_watched() {
    let cluster = Cluster::new().await;
    cluster.watched().await;
    tokio::time::sleep(10 * CLAIM_FOLLOW_AFTER).await;
    assert_eq!(cluster.claims.cached()[1], 1);
    cluster.claims.hold(true, []);
    assert_eq!(cluster.claims.cached()[0], 0);
    cluster.settle().await;
    assert_eq!(
        cluster.server.look(|state| state.watches("resourceclaims")),
        0
    );

    cluster.ask(&cluster.uid).await.unwrap().unwrap();
    tokio::time::sleep(CLAIM_FOLLOW_AFTER - Duration::from_secs(1)).await;
    assert_eq!(cluster.claims.cached()[0], 1);
    tokio::time::sleep(CLAIM_FOLLOW_AFTER / 2).await;
    assert_eq!(cluster.claims.cached()[0], 0);
}

/// The status has the same form in every version; the object that a watch or a get gives is what a recorded one is.
#[test]
fn client_object_equals_recorded_object() {
    for name in [
        "claim-one-gpu.json",
        "claim-gpu-and-nic.json",
        "claim-share-a.json",
        "claim-deleting.json",
    ] {
        let object: DynamicObject = serde_json::from_value(fixture(name)).unwrap();
        assert_eq!(
            read(&object).unwrap().claim,
            claim(&fixture(name)).unwrap(),
            "{name}"
        );
    }
}
