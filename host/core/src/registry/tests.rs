mod quarantine;

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};

use super::reloads::RELOADS_WAITING_MAX;
use super::*;
use crate::driver::{DriverIdentity, Link, Published};
use nodedock_model::{Device, DeviceName, Inventory, Pool, PoolName, limit};

fn name(short: &str) -> DriverName {
    DriverName::new(format!("{short}.example.com")).unwrap()
}

fn driver(short: &str, version: &str) -> Driver {
    let identity = DriverIdentity {
        name: name(short),
        kind: DriverKind::Wasm,
        version: version.to_owned(),
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

fn registry() -> Registry {
    Registry::new(Changes::default(), Conditions::default(), None)
}

/// Returns the version of the serving driver of a name.
fn version(registry: &Registry, short: &str) -> Option<String> {
    registry
        .serving(&name(short))
        .ok()
        .map(|driver| driver.identity.version.clone())
}

/// Sets the state of a source, as its worker does.
fn show(registry: &Registry, source: &str, short: &str, state: DriverState, reason: &str) {
    registry.sources.update(DriverKind::Wasm, source, |view| {
        (view.name, view.state, view.reason) = (Some(name(short)), state, reason.to_owned());
    });
}

#[test]
fn first_source_keeps_the_name() {
    let registry = registry();
    registry.serve("a.wasm", driver("gpu", "1")).unwrap();
    assert_eq!(
        registry.serve("b.wasm", driver("gpu", "2")),
        Err("a.wasm".to_owned())
    );
    assert_eq!(version(&registry, "gpu").as_deref(), Some("1"));
    registry.retire("a.wasm");
    assert_eq!(version(&registry, "gpu"), None);
    registry.serve("b.wasm", driver("gpu", "2")).unwrap();
    assert_eq!(version(&registry, "gpu").as_deref(), Some("2"));
}

#[test]
fn newest_connected_instance_serves() {
    let (registry, connected) = (
        registry(),
        Arc::new(std::sync::Mutex::new([true, true, false])),
    );
    for (number, version) in ["1", "2", "3"].into_iter().enumerate() {
        let connected = connected.clone();
        let link = move || {
            if connected.lock().unwrap()[number] {
                Link::Connected
            } else {
                Link::Connecting
            }
        };
        let (endpoint, services) = (format!("/{version}.sock").into(), Vec::new());
        let native = Native {
            endpoint,
            services,
            link: Box::new(link),
            health: None,
        };
        registry
            .serve_instance(version, driver("gpu", version), native)
            .unwrap();
    }
    for (now, serving) in [
        ([true, true, false], "2"),
        ([true, false, true], "3"),
        ([false; 3], "3"),
    ] {
        *connected.lock().unwrap() = now;
        assert_eq!(
            version(&registry, "gpu").as_deref(),
            Some(serving),
            "{now:?}"
        );
        assert_eq!(
            registry.instances.connected().contains(&name("gpu")),
            now.contains(&true),
            "{now:?}"
        );
    }
    registry.serve("a.wasm", driver("nic", "1")).unwrap();
    assert_eq!(registry.instances.connected(), [name("nic")].into());
}

#[test]
fn refused_source_keeps_its_driver() {
    let registry = registry();
    registry.serve("a.wasm", driver("gpu", "1")).unwrap();
    registry.serve("b.wasm", driver("nic", "1")).unwrap();
    assert!(registry.serve("b.wasm", driver("gpu", "2")).is_err());
    assert_eq!(version(&registry, "nic").as_deref(), Some("1"));
}

#[test]
fn renamed_source_frees_its_name() {
    let registry = registry();
    registry.serve("a.wasm", driver("gpu", "1")).unwrap();
    registry.serve("a.wasm", driver("gpu", "2")).unwrap();
    assert_eq!(version(&registry, "gpu").as_deref(), Some("2"));
    let freed = registry.names.changes();
    registry.serve("a.wasm", driver("nic", "3")).unwrap();
    assert_eq!(
        (
            version(&registry, "gpu"),
            version(&registry, "nic").as_deref()
        ),
        (None, Some("3"))
    );
    assert_eq!(registry.instances.all().len(), 1);
    assert!(
        freed.has_changed().unwrap(),
        "callers that wait for the name are notified"
    );
}

/// A source that was removed while its driver served left the driver callable and invisible.
#[test]
fn removed_source_stops_serving() {
    let registry = registry();
    show(&registry, "a.wasm", "gpu", DriverState::Serving, "");
    registry.serve("a.wasm", driver("gpu", "1")).unwrap();
    registry.remove("a.wasm");
    assert!(registry.list().is_empty() && registry.instances.all().is_empty());
    registry.remove("a.wasm");
}

#[test]
fn only_serving_starts_are_reported() {
    let registry = registry();
    let mut serving = registry.instances.changes();
    registry.serve("a.wasm", driver("gpu", "1")).unwrap();
    assert!(serving.has_changed().unwrap());
    serving.mark_unchanged();
    registry.serve("b.wasm", driver("gpu", "2")).unwrap_err();
    registry.retire("a.wasm");
    assert!(!serving.has_changed().unwrap());
}

#[test]
fn unserved_driver_problem_names_its_state() {
    let registry = registry();
    let problem = registry.serving(&name("gpu")).err().unwrap();
    assert_eq!(
        (problem.code.as_str(), problem.kind.is_permanent()),
        ("driver-unknown", false)
    );
    show(
        &registry,
        "a.wasm",
        "gpu",
        DriverState::Blocked,
        "it wants /dev/kvm",
    );
    let problem = registry.serving(&name("gpu")).err().unwrap();
    assert_eq!(problem.code, "driver-not-serving");
    assert_eq!(
        problem.message,
        "driver gpu.example.com (a.wasm) is blocked: it wants /dev/kvm"
    );
    show(&registry, "a.wasm", "gpu", DriverState::Compiled, "");
    let problem = registry.serving(&name("gpu")).err().unwrap();
    assert_eq!(
        problem.message,
        "driver gpu.example.com (a.wasm) is compiled: it is being loaded"
    );
    // One that is not known by name may be any.
    registry.sources.update(DriverKind::Wasm, "b.wasm", |_| ());
    let problem = registry.serving(&name("nic")).err().unwrap();
    assert_eq!(
        problem.message,
        "driver nic.example.com is not here yet: b.wasm is being loaded"
    );
    assert!(registry.is_under_way(&name("nic")));
    registry.sources.update(DriverKind::Wasm, "b.wasm", |view| {
        view.state = DriverState::Failed
    });
    assert!(!registry.is_under_way(&name("nic")));
    registry.names.set_listed(false);
    let problem = registry.serving(&name("nic")).err().unwrap();
    assert_eq!(
        problem.message,
        "driver nic.example.com is not here yet: the drivers directory is being read"
    );
    assert!(registry.is_under_way(&name("nic")));
}

#[tokio::test(start_paused = true)]
async fn driver_is_expected_back_for_moment() {
    let registry = registry();
    let is_awaited = |short: &str| registry.may_return(&name(short));
    show(&registry, "a.wasm", "gpu", DriverState::Serving, "");
    registry.serve("a.wasm", driver("gpu", "1")).unwrap();
    assert!(!is_awaited("gpu") && !is_awaited("nic"));
    registry.retire("a.wasm");
    show(&registry, "a.wasm", "gpu", DriverState::Failed, "no code");
    assert!(!is_awaited("gpu"), "its file is there, and is no driver");
    registry.remove("a.wasm");
    assert!(is_awaited("gpu") && !is_awaited("nic"));
    tokio::time::advance(limit::DRIVER_RETURN).await;
    assert!(!is_awaited("gpu"));

    // One that never served is not.
    show(&registry, "b.wasm", "nic", DriverState::Blocked, "");
    registry.remove("b.wasm");
    assert!(!is_awaited("nic"));
}

#[test]
fn device_matches_its_latest_description() {
    let registry = registry();
    let pool = PoolName::new("node-1").unwrap();
    let device = Device {
        identity: vec!["pci:1".to_owned()],
        ..Device::default()
    };
    let devices = BTreeMap::from([(DeviceName::new("gpu-0").unwrap(), device.clone())]);
    let pools = BTreeMap::from([(
        pool,
        Pool {
            devices,
            ..Pool::default()
        },
    )]);
    let (published, inventory) = watch::channel(Arc::new(Published::default()));
    registry
        .serve(
            "a.wasm",
            Driver {
                inventory: Some(inventory),
                ..driver("gpu", "1")
            },
        )
        .unwrap();
    assert_eq!(
        registry.instances.device(&name("gpu"), "node-1", "gpu-0"),
        None
    );
    let inventory = Inventory { pools };
    published.send_replace(Arc::new(Published {
        inventory,
        ..Published::default()
    }));
    assert_eq!(
        registry.instances.device(&name("gpu"), "node-1", "gpu-0"),
        Some(device)
    );
    for (short, pool, device) in [
        ("gpu", "node-1", "gpu-1"),
        ("gpu", "NO POOL", "gpu-0"),
        ("nic", "node-1", "gpu-0"),
    ] {
        assert_eq!(registry.instances.device(&name(short), pool, device), None);
    }
}

#[test]
fn changed_state_or_reason_is_published() {
    let changes = Changes::default();
    let (registry, mut listener) = (
        Registry::new(changes.clone(), Conditions::default(), None),
        changes.listen(),
    );
    for reason in ["", "", "slow"] {
        show(&registry, "a.wasm", "gpu", DriverState::Serving, reason);
    }
    registry.remove("a.wasm");
    let states: Vec<_> = std::iter::from_fn(|| listener.try_recv().ok())
        .map(|changed| changed.state)
        .collect();
    assert_eq!(states, ["serving", "serving", "gone"]);
}

#[test]
fn a_sources_history_is_bounded() {
    let registry = registry();
    for n in 0..limit::TIMELINE_MAX + 5 {
        registry.sources.update(DriverKind::Wasm, "a.wasm", |view| {
            view.note(&format!("step {n}"), "test", 0, None)
        });
    }
    let timeline = registry.list().remove(0).timeline;
    assert_eq!(
        (timeline.len(), timeline[0].what.as_str()),
        (limit::TIMELINE_MAX, "step 5")
    );
}

#[tokio::test]
async fn reload_accepts_driver_or_source() {
    let registry = registry();
    show(
        &registry,
        "a.wasm",
        "gpu",
        DriverState::Failed,
        "no component",
    );
    let mut reloads = registry.reloads.take(DriverKind::Wasm).unwrap();
    assert!(registry.reloads.take(DriverKind::Wasm).is_none());
    for asked in ["gpu.example.com", "a.wasm"] {
        let work = async {
            let request = reloads.recv().await.unwrap();
            assert_eq!(request.source, "a.wasm");
            show(&registry, "a.wasm", "gpu", DriverState::Serving, "");
            request.done.send(Ok(())).unwrap();
        };
        let (view, ()) = tokio::join!(registry.reload(asked), work);
        assert_eq!(view.unwrap().state, DriverState::Serving);
    }
    let gone = async {
        registry.remove(&reloads.recv().await.unwrap().source);
    };
    let (view, ()) = tokio::join!(registry.reload("a.wasm"), gone);
    assert_eq!(view.unwrap_err().message, "a.wasm is gone");
    let unknown = registry.reload("gpu.example.com").await.unwrap_err();
    assert!(
        unknown.code == "driver-unknown" && unknown.message.contains("gpu.example.com"),
        "{unknown}"
    );
}

#[tokio::test]
async fn busy_worker_refuses_more_reloads() {
    let registry = registry();
    show(&registry, "a.wasm", "gpu", DriverState::Serving, "");
    let mut reloads = registry.reloads.take(DriverKind::Wasm).unwrap();
    let (worker, mut inbox) = mpsc::channel(4);
    let mut ask = async |worker: &mpsc::Sender<_>| {
        let registry = registry.clone();
        let mut reload = Box::pin(async move { registry.reload("a.wasm").await });
        assert!(futures::FutureExt::now_or_never(&mut reload).is_none());
        reloads.recv().await.unwrap().hand_to(worker, Some);
        futures::FutureExt::now_or_never(&mut reload).ok_or(reload)
    };
    let _first = ask(&worker).await.expect_err("it waits for the worker");
    let _second = ask(&worker).await.expect_err("it waits for the worker");
    let refused = ask(&worker)
        .await
        .ok()
        .expect("an answer at once")
        .unwrap_err();
    assert_eq!(refused.code, "too-many-reloads");
    assert!(
        spare_place(&worker).is_none()
            && worker.try_send(None).is_ok()
            && worker.try_send(None).is_ok()
    );
    while inbox.try_recv().is_ok() {}
    assert!(spare_place(&worker).is_some());
    drop(inbox);
    let gone = ask(&worker).await.ok().expect("an answer at once").unwrap();
    assert_eq!(
        gone.state,
        DriverState::Serving,
        "a worker that ended says nothing, its source tells"
    );
}

#[tokio::test]
async fn ended_task_does_not_answer() {
    let registry = registry();
    for kind in [DriverKind::Wasm, DriverKind::Grpc] {
        let mut reloads = registry.reloads.take(kind).unwrap();
        let work = async { drop(reloads.recv().await.unwrap()) };
        assert_eq!(
            tokio::join!(registry.reloads.answers(kind), work),
            (true, ())
        );
        let end = async { drop(reloads) };
        assert_eq!(
            tokio::join!(registry.reloads.answers(kind), end),
            (false, ()),
            "while it was asked"
        );
        assert!(!registry.reloads.answers(kind).await, "before it was asked");
    }
}

#[tokio::test]
async fn excess_reloads_are_refused() {
    let registry = registry();
    show(&registry, "a.wasm", "gpu", DriverState::Serving, "");
    let waiting: Vec<_> = (0..RELOADS_WAITING_MAX)
        .map(|_| Box::pin(registry.reload("a.wasm")))
        .collect();
    let waiting = waiting.into_iter().map(|mut reload| {
        assert!(futures::FutureExt::now_or_never(&mut reload).is_none());
        reload
    });
    let _waiting: Vec<_> = waiting.collect();
    assert_eq!(
        registry.reload("a.wasm").await.unwrap_err().code,
        "too-many-reloads"
    );
}
