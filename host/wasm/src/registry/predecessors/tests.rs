use futures::FutureExt;

use super::*;
use crate::tests::Stage;
use crate::tests::guest::{Guest, NAME};
use nodedock_model::DriverKind;

struct Scene {
    /// Has the folder of the files.
    _stage: Stage,
    kept: KeptDrivers,
    tasks: Tasks,
    name: DriverName,
}

impl Scene {
    fn new() -> Self {
        let (stage, tasks) = (Stage::new(), Tasks::new());
        let (files, trust) =
            (KeptFiles::open(stage.directory.path()).unwrap(), Trust::new(Policy::default()));
        let kept = KeptDrivers::open(files, stage.host.clone(), trust, tasks.clone()).unwrap();
        Self { _stage: stage, kept, tasks, name: DriverName::new(NAME).unwrap() }
    }

    fn grant(&self) -> Option<Grant> {
        self.kept.grant_of(&self.name)
    }

    /// Keeps a version, which may or may not be loaded later.
    async fn keep(&self, version: &Arc<DriverIdentity>, code: &Bytes) {
        let file = SignedFile { code: code.clone(), signature: None };
        self.kept.keep(version, file, None).await.unwrap();
    }
}

impl KeptDrivers {
    /// What a name's predecessors may do.
    pub(crate) fn grant_of(&self, name: &DriverName) -> Option<Grant> {
        self.state().grants.get(name).map(|known| (*known.grant).clone())
    }
}

fn grant(text: &str) -> Grant {
    Grant::parse(&format!("apiVersion: nodedock.dev/v1\nkind: DriverGrant\n{text}")).unwrap()
}

/// The code of a version, and as what it served.
fn version() -> (Arc<DriverIdentity>, Bytes) {
    let code = Bytes::from(Guest::default().module());
    let digest = DriverFile { name: String::new(), bytes: code.clone() }.digest();
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

/// A file that gave its name up said so after another had the name, whose predecessors could not be asked any more.
#[test]
fn a_file_that_leaves_a_name_takes_nothing_from_the_one_that_has_it_now() {
    let scene = Scene::new();
    let (name, wide) = (&scene.name, grant("env: [A]"));
    for others in [wide.clone(), grant("env: [B]")] {
        scene.kept.granted(name, "a.wasm", &wide);
        scene.kept.granted(name, "b.wasm", &others);
        scene.kept.left(name, "a.wasm");
        assert_eq!(scene.grant(), Some(others));
        scene.kept.left(name, "b.wasm");
        assert_eq!(scene.grant(), None);
    }
}

/// Whoever had no more time took its place in the compiler's queue along, and began at the end with each try.
#[tokio::test]
async fn loading_goes_on_when_nobody_has_time_for_it() {
    let scene = Scene::new();
    let ((identity, code), name) = (version(), &scene.name);
    scene.keep(&identity, &code).await;
    scene.kept.granted(name, "tiny.wasm", &grant(""));
    assert!(scene.kept.driver(name, &identity.digest).now_or_never().is_none());
    let loading = scene.kept.state().loaded.values().next().cloned().unwrap();
    let loaded = loading.outcome().await.unwrap();
    assert_eq!(loaded.driver.digest(), identity.digest);
    assert!(scene.kept.driver(name, &identity.digest).now_or_never().unwrap().is_ok(), "it is there");
}

#[tokio::test]
async fn what_could_not_be_loaded_is_tried_again_and_nothing_more_is_begun_at_the_end() {
    let scene = Scene::new();
    let ((identity, code), name) = (version(), &scene.name);
    let failure = async || scene.kept.driver(name, &identity.digest).await.err().unwrap().code;
    assert_eq!(failure().await, "driver-not-serving");
    scene.kept.granted(name, "tiny.wasm", &grant(""));
    assert_eq!(failure().await, "predecessor-missing");
    scene.keep(&identity, &code).await;
    assert!(scene.kept.driver(name, &identity.digest).await.is_ok());

    scene.kept.granted(name, "tiny.wasm", &grant("env: [A]"));
    scene.tasks.stop();
    assert_eq!(failure().await, "predecessor-not-loaded");
}
