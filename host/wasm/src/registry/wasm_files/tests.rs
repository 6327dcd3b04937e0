//! Workers on real files, with tiny drivers.

use std::time::Duration;

use tokio::sync::broadcast;

use super::*;
use crate::KeptFiles;
use crate::tests::Stage;
use crate::tests::guest::{Guest, NAME};
use crate::trust::Policy;
use nodedock_base::changes::Changes;
use nodedock_model::Changed;

const STEM: &str = "tiny";
const DEADLINE: Duration = Duration::from_secs(10);

struct Scene {
    stage: Stage,
    files: WasmFiles,
}

impl Scene {
    fn new() -> Self {
        let stage = Stage::new();
        for part in ["drivers", "kept"] {
            std::fs::create_dir(stage.directory.path().join(part)).unwrap();
        }
        let (changes, trust) = (Changes::default(), Trust::new(Policy::default()));
        let conditions = Conditions::new(changes.clone());
        let kept = KeptFiles::open(&stage.directory.path().join("kept")).unwrap();
        let tasks = Tasks::new();
        let kept = KeptDrivers::open(kept, stage.host.clone(), trust.clone(), tasks.clone()).unwrap();
        let files = WasmFiles {
            registry: Registry::with_conditions(changes, conditions.clone()),
            host: stage.host.clone(),
            predecessors: Arc::new(kept),
            memory: FileMemory::default(),
            kernel: KernelEvents::default(),
            trust,
            conditions,
            tasks,
        };
        Self { stage, files }
    }

    /// Puts a file of the driver into the folder, by what its name ends with.
    fn put(&self, suffix: &str, content: impl AsRef<[u8]>) {
        let path = self.stage.directory.path().join(format!("drivers/{STEM}{suffix}"));
        std::fs::write(path, content).unwrap();
    }

    fn put_grant(&self, text: &str) {
        self.put(".grant.yaml", format!("apiVersion: nodedock.dev/v1\nkind: DriverGrant\n{text}"));
    }

    /// The driver's files, as discovery tells them.
    fn driver_files(&self) -> DriverFiles {
        let path = |suffix: &str| self.stage.directory.path().join(format!("drivers/{STEM}{suffix}"));
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
async fn load(worker: &Handle, files: DriverFiles) {
    let (done, loaded) = oneshot::channel();
    worker.orders.send(Order::Load(files)).await.ok().unwrap();
    worker.orders.send(Order::Again(Some(done))).await.ok().unwrap();
    loaded.await.unwrap().unwrap();
}

/// Returns when a driver is told to be in a state.
async fn told(changes: &mut broadcast::Receiver<Changed>, state: &str) {
    let told = async { while changes.recv().await.unwrap().state != state {} };
    tokio::time::timeout(DEADLINE, told).await.unwrap_or_else(|_| panic!("waited in vain for {state}"));
}

/// As long as the new files could not be loaded, the versions before the one that serves went on with what was taken back.
#[tokio::test]
async fn a_right_that_is_taken_back_is_taken_from_earlier_versions_though_the_new_files_are_not_loaded() {
    let scene = Scene::new();
    scene.put(".wasm", Guest::default().module());
    scene.put_grant("env: [A]");
    let worker = scene.files.worker(STEM, None);
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

/// A worker that was still at a look when its file went and came back took the new file's driver out of service, and nobody could
/// find that any more.
#[tokio::test]
async fn a_file_that_comes_back_before_its_worker_has_left_is_served() {
    let scene = Scene::new();
    let on_request = "(if (i32.eq (local.get 11) (i32.const 3)) (then (loop $l (br $l))))";
    let slow = Guest { discover: format!("{on_request} i32.const 8192"), ..Guest::default() };
    scene.put(".wasm", slow.module());
    scene.put_grant("limits: {cpuMs: 300}");
    let (registry, mut changes) = (&scene.files.registry, scene.files.registry.changes().listen());
    let (events, received) = mpsc::channel(8);
    scene.files.tasks.spawn("files", scene.files.clone().run(received));
    events.send(FileEvent::Changed(scene.driver_files())).await.unwrap();
    told(&mut changes, "serving").await;

    let mut serving = registry.serving_changes();
    serving.mark_unchanged();
    let back = async {
        // The worker looks at its driver's devices next.
        serving.changed().await.unwrap();
        scene.put(".wasm", Guest::default().module());
        events.send(FileEvent::Gone(STEM.to_owned())).await.unwrap();
        events.send(FileEvent::Changed(scene.driver_files())).await.unwrap();
    };
    let (_, ()) = tokio::join!(registry.reload("tiny.wasm"), back);
    told(&mut changes, "gone").await;
    told(&mut changes, "serving").await;
    let name = DriverName::new(NAME).unwrap();
    assert!(registry.serving(&name).is_ok() && registry.reload(NAME).await.is_ok());
    assert!(scene.files.tasks.drain(DEADLINE).await);
}

#[tokio::test]
async fn while_there_is_no_room_for_a_file_its_grant_and_its_end_count_all_the_same() {
    let scene = Scene::new();
    scene.put(".wasm", Guest { env: Some("A"), ..Guest::default() }.module());
    scene.put_grant("env: [A]");
    let mut changes = scene.files.registry.changes().listen();
    let worker = scene.files.worker(STEM, None);
    load(&worker, scene.driver_files()).await;
    told(&mut changes, "serving").await;
    let _room = scene.files.memory.fill().await;
    scene.put_grant("");
    worker.orders.send(Order::Load(scene.driver_files())).await.ok().unwrap();
    told(&mut changes, "blocked").await;
    worker.orders.send(Order::Gone).await.ok().unwrap();
    told(&mut changes, "gone").await;
    assert!(worker.ended.await.is_err());
}
