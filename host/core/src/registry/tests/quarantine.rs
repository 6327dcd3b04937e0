use std::sync::Mutex;

use async_trait::async_trait;

use super::*;
use crate::driver::ClaimDriver;
use crate::driver::containment::Containment;
use nodedock_base::tasks::Tasks;
use nodedock_model::ProblemCode;

/// Records the identity under which a file is in use.
#[derive(Default)]
struct Notes(Mutex<Vec<Arc<DriverIdentity>>>);

#[async_trait]
impl StoredDrivers for Notes {
    async fn driver(&self, _: &DriverName, digest: &str) -> Result<Arc<dyn ClaimDriver>, Problem> {
        Err(Problem::internal("predecessor-missing", digest))
    }

    fn serves_as(&self, identity: &Arc<DriverIdentity>) {
        self.0.lock().unwrap().push(identity.clone());
    }

    fn idle(&self) -> Vec<String> {
        Vec::new()
    }

    fn forget(&self, _: &str) {}
}

/// A serving driver, with its conduct.
struct Scene {
    registry: Registry,
    conditions: Conditions,
    tasks: Tasks,
    containment: Arc<Containment>,
}

impl Scene {
    fn new() -> Self {
        Self::storing(None)
    }

    fn storing(stored: Option<Arc<dyn StoredDrivers>>) -> Self {
        let conditions = Conditions::default();
        let registry = Registry::new(Changes::default(), conditions.clone(), stored);
        let scene = Self {
            registry,
            conditions,
            tasks: Tasks::new(),
            containment: conduct(),
        };
        scene.serve();
        scene
    }

    fn serve(&self) {
        self.registry.serve("a.wasm", driver("gpu", "1")).unwrap();
        show(&self.registry, "a.wasm", "gpu", DriverState::Serving, "");
        self.registry
            .quarantines
            .follow("a.wasm", &name("gpu"), &self.containment, &self.tasks);
    }

    fn shown(&self) -> (DriverState, String) {
        let view = self.registry.list().remove(0);
        (view.state, view.reason)
    }

    fn conditions(&self) -> Vec<(String, String)> {
        self.conditions
            .list()
            .into_iter()
            .map(|c| (c.problem.code, c.subject))
            .collect()
    }

    async fn until(&self, state: DriverState) {
        let mut changes = self.registry.sources.changes().listen();
        while self.shown().0 != state {
            changes.recv().await.unwrap();
        }
    }
}

fn conduct() -> Arc<Containment> {
    Arc::new(Containment::new(Some(name("gpu"))))
}

#[tokio::test]
async fn quarantine_is_shown_until_it_ends() {
    let notes = Arc::new(Notes::default());
    let scene = Scene::storing(Some(notes.clone()));
    let (mut serving, before) = (
        scene.registry.instances.changes(),
        scene.registry.serving(&name("gpu")).unwrap(),
    );
    scene.containment.fail();
    scene.until(DriverState::Quarantined).await;
    let reason = scene.shown().1;
    assert!(
        reason.contains("it trapped") && reason.contains("resume gpu.example.com"),
        "{reason}"
    );
    assert_eq!(
        scene.conditions(),
        [(
            ProblemCode::DriverQuarantined.to_string(),
            "gpu.example.com".to_owned()
        )]
    );
    let still = scene.registry.serving(&name("gpu")).unwrap();
    assert!(Arc::ptr_eq(&still.identity, &before.identity) && !serving.has_changed().unwrap());

    let view = scene.registry.resume("gpu.example.com").unwrap();
    assert_eq!(
        (view.state, view.reason.as_str()),
        (DriverState::Serving, "")
    );
    assert_eq!(scene.conditions(), []);
    assert!(
        serving.has_changed().unwrap(),
        "waiting callers are notified"
    );
    serving.mark_unchanged();
    let after = scene.registry.serving(&name("gpu")).unwrap();
    assert!(
        !Arc::ptr_eq(&after.identity, &before.identity),
        "what it refused counts no more"
    );
    let noted = notes.0.lock().unwrap();
    assert!(
        noted
            .iter()
            .any(|noted| Arc::ptr_eq(noted, &after.identity)),
        "its file is kept still"
    );
    let entries: Vec<_> = view
        .timeline
        .iter()
        .map(|entry| entry.what.as_str())
        .collect();
    assert_eq!(entries, ["quarantined", "serving"]);
}

#[tokio::test]
async fn resume_errors_are_distinguished() {
    let scene = Scene::new();
    scene
        .registry
        .sources
        .update(DriverKind::Grpc, "/plugin.sock", |view| {
            view.name = Some(name("nic"))
        });
    show(
        &scene.registry,
        "b.wasm",
        "bad",
        DriverState::Failed,
        "no driver",
    );
    for (wanted, code, words) in [
        ("missing", "driver-unknown", "missing"),
        ("gpu.example.com", "driver-not-quarantined", "is serving"),
        ("b.wasm", "driver-not-quarantined", "is failed"),
        ("nic.example.com", "driver-native", "restart the plugin"),
        ("/plugin.sock", "driver-native", "nic.example.com"),
    ] {
        let problem = scene.registry.resume(wanted).unwrap_err();
        assert!(
            problem.code == code && problem.message.contains(words),
            "{wanted}: {problem:?}"
        );
    }
}

#[tokio::test]
async fn replaced_driver_leaves_no_quarantine() {
    let mut scene = Scene::new();
    scene.containment.fail();
    scene.until(DriverState::Quarantined).await;
    scene.containment = conduct();
    scene.serve();
    assert_eq!(
        (scene.shown().0, scene.conditions()),
        (DriverState::Serving, vec![])
    );

    scene.containment.fail();
    scene.until(DriverState::Quarantined).await;
    scene.registry.remove("a.wasm");
    assert_eq!(
        (scene.registry.list().len(), scene.conditions()),
        (0, vec![])
    );
    assert!(scene.containment.resume());
    assert_eq!(
        scene.registry.resume("a.wasm").unwrap_err().code,
        "driver-unknown"
    );
}

/// The condition was set after the state was unlocked: for a driver that was removed in between it stayed forever.
#[tokio::test(flavor = "multi_thread")]
async fn quarantine_and_condition_appear_together() {
    let scene = Scene::new();
    scene.conditions.set(
        "/var",
        Problem::unavailable(ProblemCode::CheckpointDiskFull, "no space"),
    );
    let state = || scene.registry.sources.try_state("a.wasm");
    // Read while no other task can set a condition.
    scene
        .conditions
        .retain(ProblemCode::CheckpointDiskFull, |_| {
            scene.containment.fail();
            let mut held = 0;
            while held < 10_000 {
                let seen = state();
                assert_ne!(
                    seen,
                    Some(DriverState::Quarantined),
                    "it is shown without its condition"
                );
                held = if seen.is_none() { held + 1 } else { 0 };
                std::thread::yield_now();
            }
            true
        });
    scene.until(DriverState::Quarantined).await;
    assert_eq!(scene.conditions().len(), 2);
}
