//! Names in the registry, with a checkpoint: what is durable, what is reserved, and what ends.

use super::super::Registry;
use super::*;
use crate::checkpoint;
use crate::driver::{Driver, DriverIdentity};
use crate::records::table::ClaimTable;
use nodedock_base::changes::Changes;
use nodedock_base::conditions::Conditions;

struct Scene {
    directory: tempfile::TempDir,
}

impl Scene {
    fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
        }
    }

    /// The registry of a daemon that starts with the checkpoint.
    fn start(&self) -> (Registry, Checkpoint) {
        let opened = checkpoint::open(&self.directory.path().join("checkpoint.db")).unwrap();
        let (checkpoint, dump) = (opened.checkpoint, opened.dump);
        let claims = Arc::new(SharedClaimTable::new(ClaimTable::default()));
        let store = NameStore {
            checkpoint: checkpoint.clone(),
            claims,
        };
        let registry = Registry::new(Changes::default(), Conditions::default(), None);
        let unreadable = dump.unreadable_names();
        registry
            .names
            .load(store, dump.names, unreadable, BTreeMap::new());
        (registry, checkpoint)
    }
}

fn name(short: &str) -> DriverName {
    DriverName::new(format!("{short}.example.com")).unwrap()
}

/// A file that was read and described a driver, as its worker says it.
fn add(registry: &Registry, stem: &str, driver: &str) -> String {
    let key = format!("{stem}.wasm");
    registry.sources.update(DriverKind::Wasm, &key, |_| ());
    registry
        .names
        .set_source(&key, Some(NameSource::file(stem)));
    registry.names.set_granted_name(&key, None);
    registry
        .names
        .set_read_digest(&key, Some(format!("digest-{stem}")));
    registry.names.set_described(&key, &name(driver));
    key
}

fn driver(short: &str) -> Driver {
    let identity = DriverIdentity {
        name: name(short),
        kind: DriverKind::Wasm,
        version: "1.0.0".to_owned(),
        digest: String::new(),
        source: String::new(),
        summary: String::new(),
    };
    Driver {
        identity: Arc::new(identity),
        claims: None,
        inventory: None,
    }
}

fn refused(outcome: Result<NameReservation, NameRefusal>) -> NameRefusal {
    outcome.err().expect("it is refused")
}

async fn bind(registry: &Registry, key: &str, short: &str) {
    let reserved = registry.names.reserve(key, &name(short)).await.unwrap();
    reserved.bind().await.unwrap();
}

#[tokio::test]
async fn a_bound_name_survives_a_restart() {
    let scene = Scene::new();
    let (registry, checkpoint) = scene.start();
    let owner = add(&registry, "gpu", "gpu");
    bind(&registry, &owner, "gpu").await;
    checkpoint.close().await;
    let (registry, _checkpoint) = scene.start();
    registry.names.set_listed(false);
    let squatter = add(&registry, "aaa", "gpu");
    assert!(!registry.names.may_have(&squatter, &name("gpu")));
    let owner = add(&registry, "gpu", "gpu");
    registry.names.set_listed(true);
    let why = refused(registry.names.reserve(&squatter, &name("gpu")).await);
    assert_eq!(why, NameRefusal::Belongs(NameSource::file("gpu")));
    bind(&registry, &owner, "gpu").await;
}

#[tokio::test]
async fn only_new_names_need_checkpoint() {
    let scene = Scene::new();
    let (registry, checkpoint) = scene.start();
    let known = add(&registry, "gpu", "gpu");
    bind(&registry, &known, "gpu").await;
    checkpoint.close().await;
    bind(&registry, &known, "gpu").await;
    let new = add(&registry, "nic", "nic");
    let reserved = registry.names.reserve(&new, &name("nic")).await.unwrap();
    assert!(matches!(
        reserved.bind().await,
        Err(BindError::NotStored(_))
    ));
    assert_eq!(registry.names.owner_of(&name("nic")), None);
}

#[tokio::test]
async fn reserved_name_is_exclusive_until_dropped() {
    let (registry, _checkpoint) = Scene::new().start();
    let (first, second) = (add(&registry, "a", "gpu"), add(&registry, "b", "gpu"));
    let reserved = registry.names.reserve(&first, &name("gpu")).await.unwrap();
    let why = refused(registry.names.reserve(&second, &name("gpu")).await);
    assert_eq!(why, NameRefusal::Reserved(NameSource::file("a")));
    let changes = registry.names.changes();
    drop(reserved);
    assert!(changes.has_changed().unwrap());
    bind(&registry, &second, "gpu").await;
}

#[tokio::test]
async fn names_without_sources_leave_the_checkpoint() {
    let scene = Scene::new();
    let (registry, checkpoint) = scene.start();
    for short in ["gpu", "nic"] {
        let key = add(&registry, short, short);
        bind(&registry, &key, short).await;
    }
    registry.remove("gpu.wasm");
    let key = add(&registry, "tpu", "tpu");
    bind(&registry, &key, "tpu").await;
    checkpoint.close().await;
    let dump = checkpoint::open(&scene.directory.path().join("checkpoint.db"))
        .unwrap()
        .dump;
    let names: Vec<_> = dump
        .names
        .iter()
        .map(|record| record.name.as_str())
        .collect();
    assert_eq!(names, ["nic.example.com", "tpu.example.com"]);
}

#[tokio::test]
async fn assigned_name_evicts_previous_source() {
    let (registry, _checkpoint) = Scene::new().start();
    let (owner, other) = (add(&registry, "gpu", "gpu"), add(&registry, "new", "gpu"));
    bind(&registry, &owner, "gpu").await;
    registry.serve(&owner, driver("gpu")).unwrap();
    assert_eq!(registry.serve(&other, driver("gpu")), Err(owner.clone()));
    let by = Caller {
        uid: Some(0),
        ..Caller::default()
    };
    let view = registry
        .names
        .assign(&name("gpu"), "new", by)
        .await
        .unwrap();
    assert_eq!(
        (view.source.as_str(), view.timeline[0].cause.as_str()),
        ("new.wasm", "uid 0")
    );
    registry.serve(&other, driver("gpu")).unwrap();
    assert_eq!(registry.serve(&owner, driver("gpu")), Err(other));
}

#[tokio::test(start_paused = true)]
async fn unlistable_directory_does_not_block_names() {
    let (registry, _checkpoint) = Scene::new().start();
    registry.names.set_listed(false);
    let key = add(&registry, "gpu", "gpu");
    let started = Instant::now();
    assert!(registry.names.reserve(&key, &name("gpu")).await.is_ok());
    assert_eq!(started.elapsed(), NAME_WAIT);
}
