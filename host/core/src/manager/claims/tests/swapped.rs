//! Versions of a driver that take over from one another, with the claims that those before them prepared.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;

use crate::driver::{ClaimDriver, DriverIdentity, StoredDrivers};
use crate::manager::claims::ClaimEnd;
use crate::manager::claims::fixtures::{claim, driver, permanent, pod, transient};
use crate::manager::claims::previous_versions::FAILED_UNPREPARES_MAX;
use crate::manager::tests::scene::{Daemon, FakeDriver, Home, Reply, ends, with_prepared};
use crate::registry::DriverState;
use nodedock_model::{
    ClaimState, Device, DeviceName, DriverClaimRecord, DriverKind, DriverName, ObjectRef, Pool,
    PoolName, Problem, ProblemCode,
};

const NO_CODE: &str = "predecessor-missing";

/// Stored versions by digest.
#[derive(Default)]
struct Stored {
    versions: BTreeMap<String, Arc<FakeDriver>>,
    forgotten: Mutex<Vec<String>>,
    /// Loading does not end.
    stuck: AtomicBool,
}

#[async_trait]
impl StoredDrivers for Stored {
    async fn driver(&self, _: &DriverName, digest: &str) -> Result<Arc<dyn ClaimDriver>, Problem> {
        if self.stuck.load(Relaxed) {
            std::future::pending::<()>().await;
        }
        let version = self.versions.get(digest).cloned();
        version
            .map(|version| version as Arc<dyn ClaimDriver>)
            .ok_or(Problem::internal(NO_CODE, "not stored"))
    }

    fn serves_as(&self, _: &Arc<DriverIdentity>) {}

    fn idle(&self) -> Vec<String> {
        let forgotten = self.forgotten.lock().unwrap();
        self.versions
            .keys()
            .filter(|digest| !forgotten.contains(digest))
            .cloned()
            .collect()
    }

    fn forget(&self, digest: &str) {
        self.forgotten.lock().unwrap().push(digest.to_owned());
    }
}

/// A daemon, the pod `a` and versions of the driver `gpu`.
struct Scene {
    home: Home,
    daemon: Daemon,
    a: ObjectRef,
    versions: [Arc<FakeDriver>; 3],
    stored: Arc<Stored>,
}

impl Scene {
    /// `stored`: so many versions, from the first, are stored after they served.
    fn new(stored: usize) -> Self {
        let versions = [(); 3].map(|()| FakeDriver::new(driver("gpu")));
        let (home, a) = (Home::new(), pod("a"));
        let stored = store(&versions[..stored]);
        let daemon = start_storing(&home, &stored);
        Self {
            home,
            daemon,
            a,
            versions,
            stored,
        }
    }

    /// The same, with a claim `one` of the pod that the first version has prepared.
    async fn served_by_the_first(stored: usize) -> Self {
        let scene = Self::new(stored);
        scene.serve(0);
        scene
            .daemon
            .source
            .put(claim("one", &["gpu/0"], &[&scene.a]));
        assert_eq!(
            ends(&scene.daemon.prepare(&scene.a, &["one"]).await),
            ["prepared"]
        );
        scene
    }

    fn serve(&self, version: usize) {
        self.daemon
            .serve_version(&self.versions[version], &digest(version));
    }
}

fn start_storing(home: &Home, stored: &Arc<Stored>) -> Daemon {
    home.start_storing(
        "boot-1",
        std::time::Duration::from_secs(3600),
        Some(stored.clone()),
    )
}

fn store(versions: &[Arc<FakeDriver>]) -> Arc<Stored> {
    let versions = versions
        .iter()
        .enumerate()
        .map(|(n, version)| (digest(n), version.clone()))
        .collect();
    Arc::new(Stored {
        versions,
        ..Stored::default()
    })
}

fn digest(version: usize) -> String {
    format!("sha256:{version}")
}

/// The claims of each unprepare, by name, with the memo that came along.
fn calls(version: &FakeDriver) -> Vec<Vec<(String, Vec<u8>)>> {
    let one = |live: &DriverClaimRecord| (live.claim.id.name.to_string(), live.memo.clone());
    version
        .calls()
        .unprepare
        .iter()
        .map(|claims| claims.iter().map(one).collect())
        .collect()
}

fn memo(claims: &[&str]) -> Vec<(String, Vec<u8>)> {
    claims
        .iter()
        .map(|claim| ((*claim).to_owned(), b"call 1".to_vec()))
        .collect()
}

#[tokio::test]
async fn capable_new_version_is_called_alone() {
    let scene = Scene::served_by_the_first(1).await;
    let Scene {
        daemon,
        a,
        versions: [old, new, _],
        ..
    } = &scene;
    daemon.serve_version(new, &digest(1));
    assert_eq!(daemon.unprepare(a).await, [Ok(ClaimEnd::Unprepared)]);
    assert_eq!((calls(new), old.counts()), (vec![memo(&["one"])], (1, 0)));
}

#[tokio::test]
async fn each_claim_uses_its_preparing_version() {
    let scene = Scene::new(2);
    let Scene {
        daemon,
        a,
        versions: [first, second, third],
        ..
    } = &scene;
    let names = ["one", "two", "three"];
    for (version, name) in names.into_iter().enumerate() {
        scene.serve(version);
        daemon
            .source
            .put(claim(name, &[&format!("gpu/{version}")], &[a]));
        daemon.prepare(a, &names[..=version]).await;
    }
    third.refuse_unprepare(permanent());
    let ends = daemon.unprepare(a).await;
    let refused: Vec<_> = ends.iter().filter_map(|end| end.as_ref().err()).collect();
    assert_eq!(
        refused,
        [&permanent()],
        "its own claim has no previous version"
    );
    assert_eq!(
        (calls(first), calls(second)),
        (vec![memo(&["one"])], vec![memo(&["two"])])
    );
    assert_eq!(calls(third)[0].len(), 3);
    assert_eq!(daemon.manager.records.claims().len(), 1);
}

#[tokio::test]
async fn claim_refused_by_both_is_releasable() {
    let scene = Scene::served_by_the_first(0).await;
    let Scene {
        daemon,
        a,
        versions: [_, new, _],
        ..
    } = &scene;
    daemon.serve_version(new, &digest(1));
    new.refuse_unprepare(permanent());
    let problem = daemon.unprepare(a).await.remove(0).unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (permanent().kind, "bad-parameters")
    );
    assert!(
        problem
            .details
            .contains(&("predecessor-code".to_owned(), NO_CODE.to_owned())),
        "{problem:?}"
    );
    assert!(
        problem
            .details
            .iter()
            .any(|(_, value)| value.contains(&digest(0))),
        "{problem:?}"
    );
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Unpreparing));

    new.refuse_unprepare(permanent());
    daemon.release("one").await.unwrap();
    assert!(daemon.manager.records.claims().is_empty());
}

#[tokio::test(start_paused = true)]
async fn previous_version_is_called_after_retries() {
    let quarantined = Problem::unavailable(ProblemCode::DriverQuarantined, "it trapped")
        .retry_after(std::time::Duration::from_secs(300));
    for wait in [transient(), quarantined] {
        let scene = Scene::served_by_the_first(1).await;
        let Scene {
            daemon,
            a,
            versions: [old, new, _],
            ..
        } = &scene;
        daemon.starts.unprepares();
        daemon.serve_version(new, &digest(1));
        (0..=FAILED_UNPREPARES_MAX).for_each(|_| new.refuse_unprepare(wait.clone()));
        assert!(daemon.unprepare(a).await[0].is_err());
        assert_eq!(old.counts(), (1, 0), "not yet");
        daemon.gone("uid-one").await;
        assert_eq!(new.counts().1, 1 + FAILED_UNPREPARES_MAX as usize);
        assert_eq!(calls(old), [memo(&["one"])]);
    }
}

/// The compiler may be busy with other files for hours: the claim, and all who wait for it, were held as long.
#[tokio::test(start_paused = true)]
async fn slow_loading_version_blocks_no_request() {
    let scene = Scene::served_by_the_first(0).await;
    let Scene {
        daemon,
        a,
        versions: [_, new, _],
        ..
    } = &scene;
    scene.stored.stuck.store(true, Relaxed);
    daemon.serve_version(new, &digest(1));
    new.refuse_unprepare(permanent());
    let problem = daemon.unprepare(a).await.remove(0).unwrap_err();
    assert_eq!(problem.code, permanent().code);
    let code = (
        "predecessor-code".to_owned(),
        "predecessor-not-loaded".to_owned(),
    );
    assert!(problem.details.contains(&code), "{problem:?}");
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Unpreparing));
}

/// Every try counted, also those at which no version served: one that came then and wanted a moment was passed over at once.
#[tokio::test]
async fn failures_without_driver_do_not_count() {
    let scene = Scene::served_by_the_first(1).await;
    let Scene {
        daemon,
        a,
        versions: [old, new, _],
        ..
    } = &scene;
    daemon.retire(old);
    for _ in 0..=FAILED_UNPREPARES_MAX {
        assert!(daemon.unprepare(a).await[0].is_err());
    }
    daemon.serve_version(new, &digest(1));
    for tries in 1..=FAILED_UNPREPARES_MAX {
        new.refuse_unprepare(transient());
        assert!(daemon.unprepare(a).await[0].is_err());
        assert_eq!((new.counts().1, old.counts().1), (tries as usize, 0));
    }
    new.refuse_unprepare(transient());
    assert_eq!(daemon.unprepare(a).await, [Ok(ClaimEnd::Unprepared)]);
    assert_eq!(calls(old), [memo(&["one"])]);
}

#[tokio::test]
async fn preparing_version_is_known_after_restart() {
    let (
        Scene {
            home,
            daemon,
            a,
            versions: [old, new, _],
            ..
        },
        b,
    ) = (Scene::served_by_the_first(1).await, pod("b"));
    daemon.source.put(claim("two", &["gpu/1"], &[&b]));
    old.reply("uid-two", Reply::Refuse(transient()));
    assert_eq!(
        ends(&daemon.prepare(&b, &["two"]).await),
        [transient().code]
    );
    daemon.stop().await;

    let daemon = start_storing(&home, &store(std::slice::from_ref(&old)));
    daemon.serve_version(&new, &digest(1));
    for pod in [&a, &b] {
        new.refuse_unprepare(permanent());
        assert_eq!(daemon.unprepare(pod).await, [Ok(ClaimEnd::Unprepared)]);
    }
    let nothing = vec![("two".to_owned(), Vec::new())];
    assert_eq!(calls(&old), [memo(&["one"]), nothing]);
}

#[tokio::test]
async fn previous_version_requires_serving_wasm_driver() {
    let scene = Scene::served_by_the_first(1).await;
    let Scene {
        daemon,
        a,
        versions: [old, new, _],
        ..
    } = &scene;
    daemon.retire(old);
    let problem = daemon.unprepare(a).await.remove(0).unwrap_err();
    assert!(
        problem.message.contains("kept until its driver is back"),
        "{problem}"
    );
    daemon.serve_as(new, DriverKind::Grpc);
    new.refuse_unprepare(permanent());
    assert_eq!(daemon.unprepare(a).await.remove(0), Err(permanent()));
    assert_eq!((old.counts(), new.counts()), ((1, 0), (0, 1)));
}

#[tokio::test]
async fn code_is_removed_with_last_claim() {
    let scene = Scene::new(3);
    let (
        Scene {
            daemon, a, stored, ..
        },
        b,
    ) = (&scene, &pod("b"));
    scene.serve(0);
    daemon.source.put(claim("one", &["gpu/0"], &[a, b]));
    daemon.prepare(a, &["one"]).await;
    daemon.prepare(b, &["one"]).await;
    scene.serve(1);
    for (pod, forgotten) in [
        (None, vec![1, 2]),
        (Some(a), vec![1, 2]),
        (Some(b), vec![1, 2, 0]),
    ] {
        if let Some(pod) = pod {
            daemon.unprepare(pod).await;
        }
        daemon.manager.driver_changes.forget_code();
        let forgotten: Vec<_> = forgotten.into_iter().map(digest).collect();
        assert_eq!(*stored.forgotten.lock().unwrap(), forgotten);
    }
}

#[tokio::test]
async fn unreadable_claim_keeps_stored_code() {
    let Scene {
        home,
        daemon,
        versions: [old, ..],
        ..
    } = Scene::served_by_the_first(1).await;
    daemon.stop().await;
    home.make_unreadable("uid-one");
    let stored = store(std::slice::from_ref(&old));
    let daemon = start_storing(&home, &stored);
    daemon.manager.driver_changes.forget_code();
    assert!(stored.forgotten.lock().unwrap().is_empty());
}

#[tokio::test]
async fn removed_devices_with_claims_are_reported() {
    let pool = |names: &[&str]| {
        let devices = names
            .iter()
            .map(|name| (DeviceName::new(name).unwrap(), Device::default()));
        Pool {
            devices: devices.collect(),
            ..Pool::default()
        }
    };
    let (home, a) = (Home::new(), pod("a"));
    let daemon = home.start();
    daemon.starts.driver_changes();
    let old = FakeDriver::with_pool(driver("gpu"), pool(&["0", "1", "2"]));
    let new = FakeDriver::with_pool(driver("gpu"), pool(&["1"]));
    daemon.serve_version(&old, &digest(0));
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    daemon.source.put(claim("two", &["gpu/1"], &[&a]));
    daemon.prepare(&a, &["one", "two"]).await;
    daemon.serve_version(&new, &digest(1));
    daemon
        .until_conditions(&[("claim-devices-gone", "gpu.example.com")])
        .await;
    let message = daemon.conditions.list().remove(0).problem.message;
    assert!(
        message.contains("pool/0 (claim default/one") && !message.contains("pool/1"),
        "{message}"
    );
    let claims = daemon.manager.records.claims();
    let devices = claims.iter().flat_map(|claim| &claim.allocation.devices);
    let gone = devices.filter(|device| daemon.manager.gone_devices.has(device));
    assert_eq!(
        gone.map(|device| device.device.as_str())
            .collect::<Vec<_>>(),
        ["0"]
    );

    daemon.serve_version(&old, &digest(0));
    daemon.until_conditions(&[]).await;
    daemon.serve_version(&new, &digest(1));
    daemon
        .until_conditions(&[("claim-devices-gone", "gpu.example.com")])
        .await;
    assert!(daemon.unprepare(&a).await.iter().all(Result::is_ok));
    daemon.until_conditions(&[]).await;
}

/// A plugin publishes its devices itself, and others may delete its slices for a moment.
#[tokio::test(start_paused = true)]
async fn unpublished_devices_of_plugin_are_reported() {
    let (home, a) = (Home::new(), pod("a"));
    let daemon = home.start();
    daemon.starts.driver_changes();
    let plugin = FakeDriver::new(driver("gpu"));
    daemon.serve_as(&plugin, DriverKind::Grpc);
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    daemon.source.put(claim("two", &["gpu/1"], &[&a]));
    daemon.prepare(&a, &["one", "two"]).await;
    let publish = |names: &[&str]| {
        let pool = PoolName::new("pool").unwrap();
        let devices = names
            .iter()
            .map(|name| (pool.clone(), (*name).to_owned()))
            .collect();
        let devices = BTreeMap::from([(plugin.name.clone(), devices)]);
        daemon.registry.own_devices.replace(devices, |_| true);
    };
    let gone = || {
        let claims = daemon.manager.records.claims();
        let devices = claims.iter().flat_map(|claim| &claim.allocation.devices);
        let gone = devices.filter(|device| daemon.manager.gone_devices.has(device));
        gone.map(|device| device.device.to_string())
            .collect::<Vec<_>>()
    };
    let seconds = |count: u64| tokio::time::sleep(std::time::Duration::from_secs(count));
    seconds(100).await;
    assert!(
        daemon.conditions().is_empty(),
        "nothing is known of its devices"
    );
    publish(&["0", "1"]);
    publish(&[]);
    seconds(5).await;
    publish(&["0", "1"]);
    seconds(100).await;
    assert!(daemon.conditions().is_empty());

    publish(&["1"]);
    daemon
        .until_conditions(&[("claim-devices-gone", "gpu.example.com")])
        .await;
    assert_eq!(gone(), ["0"]);
    publish(&["0", "1"]);
    daemon.until_conditions(&[]).await;
    assert_eq!(gone(), [""; 0]);
    publish(&["0"]);
    daemon
        .until_conditions(&[("claim-devices-gone", "gpu.example.com")])
        .await;
    assert_eq!(gone(), ["1"]);
    assert!(daemon.unprepare(&a).await.iter().all(Result::is_ok));
    daemon.until_conditions(&[]).await;
}

#[tokio::test(start_paused = true)]
async fn absent_driver_of_claims_is_reported() {
    let (_home, daemon, a, gpu) = with_prepared().await;
    daemon.starts.driver_changes();
    let reported = || {
        let conditions = daemon.conditions.list();
        let mut gone = conditions
            .into_iter()
            .filter(|c| c.problem.code == "claim-driver-gone");
        gone.next()
            .map(|condition| (condition.subject, condition.problem.message))
    };
    let minutes = |count: u64| tokio::time::sleep(std::time::Duration::from_secs(61 * count));
    minutes(2).await;
    assert_eq!(reported(), None);
    daemon.loads(gpu.name.as_str(), DriverState::Serving);
    daemon.registry.remove(gpu.name.as_str());
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    let (subject, message) = reported().expect("a condition");
    assert!(
        subject == gpu.name.as_str() && message.contains("default/one"),
        "{message}"
    );
    // A file that may be it is being loaded.
    daemon.loads("gpu.wasm", DriverState::Seen);
    minutes(1).await;
    assert_eq!(reported(), None);
    daemon.loads("gpu.wasm", DriverState::Failed);
    tokio::time::sleep(std::time::Duration::from_secs(2)).await;
    assert!(reported().is_some());
    daemon.serve(&gpu);
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
    minutes(1).await;
    assert_eq!(reported(), None);
}
