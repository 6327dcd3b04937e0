//! Workers on real files, with tiny drivers.

use super::*;
use crate::base::changes::Changes;
use crate::driver::wasm::KeptFiles;
use crate::driver::wasm::tests::Stage;
use crate::driver::wasm::tests::guest::{Guest, NAME};
use crate::trust::Policy;

const STEM: &str = "tiny";

struct Scene {
    stage: Stage,
    files: WasmFiles,
}

impl Scene {
    fn new() -> Self {
        let stage = Stage::new();
        for part in ["drivers", "kept"] {
            std::fs::create_dir(stage.folder.path().join(part)).unwrap();
        }
        let (changes, trust) = (Changes::default(), Trust::new(Policy::default()));
        let conditions = Conditions::new(changes.clone());
        let kept = KeptFiles::open(&stage.folder.path().join("kept")).unwrap();
        let predecessors = Arc::new(KeptDrivers::open(kept, stage.host.clone(), trust.clone()).unwrap());
        let files = WasmFiles {
            registry: Registry::with_conditions(changes, conditions.clone()),
            host: stage.host.clone(),
            predecessors,
            kernel: KernelEvents::default(),
            trust,
            conditions,
            tasks: Tasks::new(),
        };
        Self { stage, files }
    }

    /// Puts a file of the driver into the folder, by what its name ends with.
    fn put(&self, suffix: &str, content: impl AsRef<[u8]>) {
        let path = self.stage.folder.path().join(format!("drivers/{STEM}{suffix}"));
        std::fs::write(path, content).unwrap();
    }

    fn put_grant(&self, text: &str) {
        self.put(".grant.yaml", format!("apiVersion: nodedock.dev/v1\nkind: DriverGrant\n{text}"));
    }

    /// The driver's files, as discovery tells them.
    fn driver_files(&self) -> DriverFiles {
        let path = |suffix: &str| self.stage.folder.path().join(format!("drivers/{STEM}{suffix}"));
        let beside = |suffix: &str| Some(path(suffix)).filter(|path| path.exists());
        DriverFiles {
            stem: STEM.to_owned(),
            wasm: path(".wasm"),
            grant: beside(".grant.yaml"),
            config: beside(".config.yaml"),
            signature: beside(".wasm.sig"),
        }
    }

    fn grant(&self) -> Option<Grant> {
        self.files.predecessors.grant_of(&DriverName::new(NAME).unwrap())
    }

    fn shown(&self) -> (DriverState, String) {
        let view = self.files.registry.list().remove(0);
        (view.state, view.reason)
    }
}

/// Has a worker load files, and returns when it has.
async fn load(worker: &mpsc::Sender<Order>, files: DriverFiles) {
    let (done, loaded) = oneshot::channel();
    worker.send(Order::Load(files)).await.ok().unwrap();
    worker.send(Order::Again(Some(done))).await.ok().unwrap();
    loaded.await.unwrap();
}

/// As long as the new files could not be loaded, the versions before the one that serves went on with what was taken back.
#[tokio::test]
async fn a_right_that_is_taken_back_is_taken_from_earlier_versions_though_the_new_files_are_not_loaded() {
    let scene = Scene::new();
    scene.put(".wasm", Guest::default().module());
    scene.put_grant("env: [A]");
    let worker = scene.files.worker(STEM);
    load(&worker, scene.driver_files()).await;
    assert_eq!(scene.shown(), (DriverState::Serving, String::new()));
    assert_eq!(scene.grant().unwrap().allowed.env, ["A"]);

    scene.put_grant("");
    scene.put(".config.yaml", "- no mapping");
    load(&worker, scene.driver_files()).await;
    let (state, reason) = scene.shown();
    assert!(state == DriverState::Serving && reason.contains("tiny.config.yaml"), "{reason}");
    assert_eq!(scene.grant(), Some(Grant::empty()));
}
