use futures::FutureExt;

use super::*;
use crate::tests::Stage;
use crate::tests::guest::{Guest, NAME};
use nodedock_model::DriverKind;

struct Scene {
    /// Has the directory of the files.
    _stage: Stage,
    versions: PreviousVersions,
    tasks: Tasks,
    name: DriverName,
}

impl Scene {
    fn new() -> Self {
        let (stage, tasks) = (Stage::new(), Tasks::new());
        let (directory, trust) = (stage.directory.path(), Trust::new(Policy::default()));
        let versions =
            PreviousVersions::open(directory, stage.host.clone(), trust, tasks.clone()).unwrap();
        Self {
            _stage: stage,
            versions,
            tasks,
            name: DriverName::new(NAME).unwrap(),
        }
    }

    fn grant(&self) -> Option<Grant> {
        self.versions.grant_of(&self.name)
    }

    /// Stores a version, which may or may not be loaded later.
    async fn store(&self, version: &Arc<DriverIdentity>, code: &Bytes) {
        let file = SignedFile {
            code: code.clone(),
            signature: None,
        };
        self.versions.store(version, file, None).await.unwrap();
    }
}

impl PreviousVersions {
    /// The grant of a name's previous versions.
    pub(crate) fn grant_of(&self, name: &DriverName) -> Option<Grant> {
        self.state()
            .grants
            .get(name)
            .map(|known| (*known.grant).clone())
    }
}

fn grant(text: &str) -> Grant {
    Grant::parse(&format!(
        "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n{text}"
    ))
    .unwrap()
}

/// The code of a version, and the identity under which it served.
fn version() -> (Arc<DriverIdentity>, Bytes) {
    let code = Bytes::from(Guest::default().module());
    let digest = DriverFile {
        name: String::new(),
        bytes: code.clone(),
    }
    .digest();
    let identity = DriverIdentity {
        name: DriverName::new(NAME).unwrap(),
        kind: DriverKind::Wasm,
        version: "1.2.3".to_owned(),
        digest,
        source: "tiny.wasm".to_owned(),
        summary: String::new(),
    };
    (Arc::new(identity), code)
}

/// A file that lost its name reported that after another file had the name, whose previous versions were unloaded then.
#[test]
fn former_name_owner_revokes_nothing() {
    let scene = Scene::new();
    let (name, wide) = (&scene.name, grant("env: [A]"));
    for others in [wide.clone(), grant("env: [B]")] {
        scene.versions.granted(name, "a.wasm", &wide);
        scene.versions.granted(name, "b.wasm", &others);
        scene.versions.left(name, "a.wasm");
        assert_eq!(scene.grant(), Some(others));
        scene.versions.left(name, "b.wasm");
        assert_eq!(scene.grant(), None);
    }
}

/// A caller whose time was over cancelled the load, and each retry began at the end of the compiler's queue.
#[tokio::test]
async fn loading_continues_after_caller_cancellation() {
    let scene = Scene::new();
    let ((identity, code), name) = (version(), &scene.name);
    scene.store(&identity, &code).await;
    scene.versions.granted(name, "tiny.wasm", &grant(""));
    assert!(
        scene
            .versions
            .driver(name, &identity.digest)
            .now_or_never()
            .is_none()
    );
    let loading = scene
        .versions
        .state()
        .loaded
        .values()
        .next()
        .cloned()
        .unwrap();
    let loaded = loading.outcome().await.unwrap();
    assert_eq!(loaded.driver.digest(), identity.digest);
    assert!(
        scene
            .versions
            .driver(name, &identity.digest)
            .now_or_never()
            .unwrap()
            .is_ok(),
        "it is there"
    );
}

#[tokio::test]
async fn failed_load_is_retried_until_shutdown() {
    let scene = Scene::new();
    let ((identity, code), name) = (version(), &scene.name);
    let failure = async || {
        scene
            .versions
            .driver(name, &identity.digest)
            .await
            .err()
            .unwrap()
            .code
    };
    assert_eq!(failure().await, "driver-not-serving");
    scene.versions.granted(name, "tiny.wasm", &grant(""));
    assert_eq!(failure().await, "predecessor-missing");
    scene.store(&identity, &code).await;
    assert!(scene.versions.driver(name, &identity.digest).await.is_ok());

    scene
        .versions
        .granted(name, "tiny.wasm", &grant("env: [A]"));
    scene.tasks.stop();
    assert_eq!(failure().await, "predecessor-not-loaded");
}
