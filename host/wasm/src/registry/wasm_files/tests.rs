//! Workers on real files, with tiny drivers.

use std::time::Duration;

use tokio::sync::broadcast;

use super::*;
use crate::files::file_watch::DriverFiles;
use crate::files::trust::Policy;
use crate::tests::Stage;
use crate::tests::guest::{Guest, NAME};
use nodedock_base::changes::Changes;
use nodedock_model::grant::Grant;
use nodedock_model::{Changed, DriverName};

const STEM: &str = "tiny";
const DEADLINE: Duration = Duration::from_secs(10);

struct Scene {
    stage: Stage,
    files: WasmFiles,
}

impl Scene {
    fn new() -> Self {
        let stage = Stage::new();
        for part in ["drivers", "stored"] {
            std::fs::create_dir(stage.directory.path().join(part)).unwrap();
        }
        let (changes, trust) = (Changes::default(), Trust::new(Policy::default()));
        let conditions = Conditions::new(changes.clone());
        let (directory, tasks) = (stage.directory.path().join("stored"), Tasks::new());
        let stored =
            PreviousVersions::open(&directory, stage.host.clone(), trust.clone(), tasks.clone())
                .unwrap();
        let files = WasmFiles {
            registry: Registry::new(changes, conditions.clone(), None),
            host: stage.host.clone(),
            previous_versions: Arc::new(stored),
            memory: FileMemory::default(),
            kernel: KernelEvents::default(),
            trust,
            conditions,
            tasks,
        };
        Self { stage, files }
    }

    /// Puts a file of the driver into the directory, by the end of its name.
    fn put(&self, suffix: &str, content: impl AsRef<[u8]>) {
        let path = self
            .stage
            .directory
            .path()
            .join(format!("drivers/{STEM}{suffix}"));
        std::fs::write(path, content).unwrap();
    }

    fn put_grant(&self, text: &str) {
        self.put(
            ".grant.yaml",
            format!("apiVersion: nodedock.dev/v1\nkind: DriverGrant\n{text}"),
        );
    }

    /// The driver's files, as the file watcher reports them.
    fn driver_files(&self) -> DriverFiles {
        let path = |suffix: &str| {
            self.stage
                .directory
                .path()
                .join(format!("drivers/{STEM}{suffix}"))
        };
        let beside = |suffix: &str| Some(path(suffix)).filter(|path| path.exists());
        DriverFiles {
            stem: STEM.to_owned(),
            is_image: false,
            wasm: Ok(path(".wasm")),
            grant: beside(".grant.yaml"),
            config: beside(".config.yaml"),
            signature: beside(".wasm.sig"),
        }
    }

    fn grant(&self) -> Option<Grant> {
        self.files
            .previous_versions
            .grant_of(&DriverName::new(NAME).unwrap())
    }

    fn shown(&self) -> (DriverState, String) {
        let view = self.files.registry.list().remove(0);
        (view.state, view.reason)
    }
}

/// Has a worker load files, and returns when it has.
async fn load(worker: &Handle, files: DriverFiles) {
    let (done, loaded) = oneshot::channel();
    worker.files.send_replace(Some(files));
    worker.reloads.send(done).await.unwrap();
    loaded.await.unwrap().unwrap();
}

/// Returns when a driver is reported to be in a state.
async fn reported(changes: &mut broadcast::Receiver<Changed>, state: &str) {
    let reported = async { while changes.recv().await.unwrap().state != state {} };
    tokio::time::timeout(DEADLINE, reported)
        .await
        .unwrap_or_else(|_| panic!("{state} was not reported"));
}

/// Covers previous versions, which kept a right that was revoked until the new files could be loaded.
#[tokio::test]
async fn revocation_applies_before_new_files_load() {
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
    assert!(
        state == DriverState::Serving && reason.contains("tiny.config.yaml"),
        "{reason}"
    );
    assert_eq!(scene.grant(), Some(Grant::empty()));
}

/// A worker that still discovered devices when its file went and came back took the new file's driver out of service for good.
#[tokio::test]
async fn returning_file_is_served() {
    let scene = Scene::new();
    let on_request = "(if (i32.eq (local.get 11) (i32.const 3)) (then (loop $l (br $l))))";
    let slow = Guest {
        discover: format!("{on_request} i32.const 8192"),
        ..Guest::default()
    };
    scene.put(".wasm", slow.module());
    scene.put_grant("limits: {cpuMs: 300}");
    let (registry, mut changes) = (
        &scene.files.registry,
        scene.files.registry.sources.changes().listen(),
    );
    let (events, received) = mpsc::channel(8);
    scene
        .files
        .tasks
        .spawn("files", scene.files.clone().run(received));
    events
        .send(FileEvent::Changed(scene.driver_files()))
        .await
        .unwrap();
    reported(&mut changes, "serving").await;

    let mut serving = registry.instances.changes();
    serving.mark_unchanged();
    let back = async {
        // The worker discovers its driver's devices next.
        serving.changed().await.unwrap();
        scene.put(".wasm", Guest::default().module());
        events.send(FileEvent::Gone(STEM.to_owned())).await.unwrap();
        events
            .send(FileEvent::Changed(scene.driver_files()))
            .await
            .unwrap();
    };
    let (_, ()) = tokio::join!(registry.reload("tiny.wasm"), back);
    reported(&mut changes, "gone").await;
    reported(&mut changes, "serving").await;
    let name = DriverName::new(NAME).unwrap();
    assert!(registry.serving(&name).is_ok() && registry.reload(NAME).await.is_ok());
    assert!(scene.files.tasks.drain(DEADLINE).await);
}

#[tokio::test]
async fn waiting_file_is_revocable_and_removable() {
    let scene = Scene::new();
    scene.put(
        ".wasm",
        Guest {
            env: Some("A"),
            ..Guest::default()
        }
        .module(),
    );
    scene.put_grant("env: [A]");
    let mut changes = scene.files.registry.sources.changes().listen();
    let worker = scene.files.worker(STEM, None);
    load(&worker, scene.driver_files()).await;
    reported(&mut changes, "serving").await;
    let loading = &scene.files.memory.loading;
    let _room = loading
        .acquire_many(loading.available_permits() as u32)
        .await
        .unwrap();
    scene.put_grant("");
    worker.files.send_replace(Some(scene.driver_files()));
    reported(&mut changes, "blocked").await;
    worker.files.send_replace(None);
    reported(&mut changes, "gone").await;
    assert!(worker.ended.await.is_err());
}
