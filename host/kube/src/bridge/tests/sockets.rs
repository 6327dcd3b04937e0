//! Sockets: when they are there, for which driver, and what is in their way.

use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener as StdListener;

use super::*;

fn mode(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().mode() & 0o777
}

fn inode(path: &Path) -> Option<(u64, i64)> {
    let found = std::fs::symlink_metadata(path).ok()?;
    Some((found.ino(), found.ctime_nsec()))
}

/// Returns the number of registrations that the kubelet accepted, and the number that it refused.
fn registrations(running: &Running) -> [u64; 2] {
    let registrations = &running.bridge.metrics().registrations;
    ["registered", "refused"].map(|outcome| {
        registrations
            .get_or_create(&[("outcome", outcome.to_owned())])
            .get()
    })
}

#[tokio::test]
async fn serving_driver_registers_with_kubelet() {
    let node = Node::new();
    let running = node.serving().await;
    let (registration, service) = (node.registration(GPU), node.service(GPU));
    assert_eq!((mode(&registration), mode(&service)), (0o600, 0o600));
    assert_eq!(
        (
            mode(service.parent().unwrap()),
            mode(registration.parent().unwrap())
        ),
        (0o750, 0o750)
    );
    assert_eq!(
        running.status(GPU).unwrap().registration,
        Registration::Offered
    );

    let mut kubelet = Registrar::dial(&node, GPU).await;
    let info = kubelet.info().await;
    assert_eq!((&info.r#type[..], &info.name[..]), ("DRAPlugin", GPU));
    assert_eq!(Path::new(&info.endpoint), service);
    let services = [
        "v1.DRAPlugin",
        "v1beta1.DRAPlugin",
        "v1.DRAResourceHealth",
        "v1alpha1.DRAResourceHealth",
    ];
    assert_eq!(info.supported_versions, services, "the newest first");
    assert_eq!(
        running.status(GPU).unwrap().registration,
        Registration::Asked
    );
    kubelet.notify("").await.unwrap();
    assert!(running.status(GPU).unwrap().registration == Registration::Registered);
    assert_eq!(
        (
            registrations(&running),
            running.bridge.metrics().connections()
        ),
        ([1, 0], [1, 1])
    );
    let connected = connect(&service).await.unwrap();
    let connections = |running: &Running| running.status(GPU).unwrap().connections;
    running
        .until("connected", |running| connections(running) == 1)
        .await;
    assert!(running.bridge.has_kubelet());
    drop(connected);
    running
        .until("disconnected", |running| connections(running) == 0)
        .await;
    assert!(!running.bridge.has_kubelet());
}

#[tokio::test]
async fn refused_driver_sets_condition_until_registered() {
    let node = Node::new();
    let running = node.serving().await;
    let mut kubelet = Registrar::dial(&node, GPU).await;
    kubelet.info().await;
    let message = format!("plugin validation failed\n{}", "x".repeat(5000));
    let answer = kubelet
        .notify(&message)
        .await
        .unwrap_err()
        .message()
        .to_owned();
    assert!(answer.contains("plugin validation failed xxx"), "{answer}");
    let message = running.condition("kubelet-refused-driver").unwrap();
    assert!(
        message.starts_with(GPU) && message.contains("plugin validation failed xxx"),
        "{message}"
    );
    assert!(message.len() < 1024, "{}", message.len());
    kubelet.info().await;
    let refused = running.status(GPU).unwrap().registration;
    assert!(matches!(refused, Registration::Refused(_)), "{refused:?}");
    kubelet.notify("").await.unwrap();
    assert_eq!(running.condition("kubelet-refused-driver"), None);
    assert_eq!(registrations(&running), [1, 1]);
}

#[tokio::test]
async fn sockets_stay_until_driver_is_removed() {
    let node = Node::new();
    node.serve(NIC);
    let running = node.serving().await;
    running.open(NIC).await;
    let before = (inode(&node.registration(GPU)), inode(&node.service(GPU)));
    node.serve(GPU);
    running.looked().await;
    node.retire(GPU, DriverState::Failed);
    running.looked().await;
    assert_eq!(
        (inode(&node.registration(GPU)), inode(&node.service(GPU))),
        before
    );
    Registrar::dial(&node, GPU).await.info().await;

    node.remove(GPU);
    running
        .until("withdrawn", |running| running.status(GPU).is_none())
        .await;
    assert!(!node.registration(GPU).exists() && !node.service(GPU).parent().unwrap().exists());
    assert!(node.registration(NIC).exists() && node.service(NIC).exists());
}

#[tokio::test]
async fn prepared_claims_keep_driver_offered() {
    let node = Node::new();
    let running = node.serving().await;
    let claim = node.source.put("one", "pool", "a");
    node.prepare(&claim).await;
    node.remove(GPU);
    for _ in 0..5 {
        running.looked().await;
    }
    assert!(node.registration(GPU).exists());
    node.serve(GPU);
    node.unprepare(&claim).await;
    node.remove(GPU);
    running
        .until("withdrawn", |running| running.status(GPU).is_none())
        .await;
}

#[tokio::test]
async fn stored_driver_is_offered_before_loading() {
    let node = Node::new();
    let running = node.serving().await;
    running.drain().await;
    assert!(!node.registration(GPU).exists() && !node.service(GPU).exists());
    node.remove(GPU);

    let running = node.start();
    running.open(GPU).await;
    assert_eq!(Registrar::dial(&node, GPU).await.info().await.name, GPU);
}

/// One of the process before had the registration of the kubelet, until that has the new one's.
#[tokio::test]
async fn crash_leftovers_are_removed_after_registration() {
    let node = Node::new();
    let crashed = Listeners::of_start("crashed");
    let paths = KubeletDirectories::new(node.root(), crashed.start())
        .unwrap()
        .of_driver(&name(GPU), "crashed");
    for socket in [&paths.registration, &paths.service] {
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
        drop(StdListener::bind(socket).unwrap());
    }
    node.offered_by("crashed").await;
    let running = node.serving().await;
    running.looked().await;
    assert!(paths.registration.exists() && paths.service.exists());
    let mut kubelet = Registrar::dial(&node, GPU).await;
    kubelet.info().await;
    kubelet.notify("").await.unwrap();
    running
        .until("removed", |_| {
            !paths.registration.exists() && !paths.service.exists()
        })
        .await;
    assert!(node.registration(GPU).exists() && node.service(GPU).exists());
    running
        .until("forgotten", |_| {
            let offers = node.offered().drivers;
            offers.len() == 1 && !offers[0].starts.contains("crashed")
        })
        .await;
}

/// A kubelet that has registered a driver does not do it again: its sockets are the same.
#[tokio::test]
async fn adopted_sockets_keep_driver_registered() {
    let node = Node::new();
    node.serve(GPU);
    let listeners = Listeners::of_start(START);
    let running = Running::start(BridgeParts {
        listeners: listeners.clone(),
        ..node.parts()
    });
    running.open(GPU).await;
    Registrar::dial(&node, GPU).await.notify("").await.unwrap();
    running
        .until("stored", |_| {
            node.offered().drivers.iter().any(|offer| offer.registered)
        })
        .await;
    let sockets = inode(&node.registration(GPU));
    let kept = listeners.give().unwrap();
    running.drain().await;

    let listeners = Listeners::of_start("start2");
    listeners.adopt(kept);
    let running = Running::start(BridgeParts {
        listeners,
        ..node.parts()
    });
    running.open(GPU).await;
    assert_eq!(
        running.status(GPU).unwrap().registration,
        Registration::Registered
    );
    assert_eq!(inode(&node.registration(GPU)), sockets);
}

#[tokio::test]
async fn second_daemon_waits_for_first() {
    let node = Node::new();
    let first = node.serving().await;
    let second = Running::start(BridgeParts {
        offered_before: OfferedBefore::default(),
        conditions: Conditions::default(),
        ..node.parts()
    });
    let message = second.condition_comes("kubelet-socket").await;
    assert!(
        message.contains("another process listens") && message.contains(GPU),
        "{message}"
    );
    Registrar::dial(&node, GPU).await.info().await;
    first.drain().await;
    second.condition_goes("kubelet-socket").await;
    second.open(GPU).await;
}

#[tokio::test]
async fn only_stale_sockets_are_replaced() {
    let node = Node::new();
    let (registration, service) = (node.registration(GPU), node.service(GPU));
    for socket in [&registration, &service] {
        std::fs::create_dir_all(socket.parent().unwrap()).unwrap();
    }
    drop(StdListener::bind(&service).unwrap());
    std::fs::write(&registration, "precious").unwrap();
    node.serve(GPU);
    node.serve(NIC);
    let running = node.start();
    let message = running.condition_comes("kubelet-socket").await;
    assert!(
        message.contains("not a socket") && message.contains("-reg.sock"),
        "{message}"
    );
    running.open(NIC).await;
    assert!(running.status(GPU).unwrap().problem.is_some());
    connect(&service).await.unwrap();
    std::fs::remove_file(&registration).unwrap();
    running.condition_goes("kubelet-socket").await;
    running.open(GPU).await;
    Registrar::dial(&node, GPU).await.info().await;
}

#[tokio::test]
async fn removed_sockets_are_created_again() {
    let node = Node::new();
    let running = node.serving().await;
    Registrar::dial(&node, GPU).await.notify("").await.unwrap();
    let service = inode(&node.service(GPU));
    std::fs::remove_file(node.registration(GPU)).unwrap();
    running
        .until("created again", |_| node.registration(GPU).exists())
        .await;
    running.looked().await;
    assert_eq!(inode(&node.service(GPU)), service);
    assert_eq!(
        running.status(GPU).unwrap().registration,
        Registration::Offered,
        "the kubelet forgot it"
    );

    std::fs::remove_dir_all(node.root().join("plugins")).unwrap();
    std::fs::remove_dir_all(node.root().join("plugins_registry")).unwrap();
    let both = |_: &Running| node.registration(GPU).exists() && node.service(GPU).exists();
    running.until("both created again", both).await;
    Registrar::dial(&node, GPU).await.info().await;
    connect(&node.service(GPU)).await.unwrap();
}

#[tokio::test]
async fn bridge_waits_for_kubelet_directory() {
    let node = Node::new();
    std::fs::remove_dir_all(node.root()).unwrap();
    node.serve(GPU);
    let running = node.start();
    let message = running.condition_comes("kubelet-folder").await;
    assert!(
        message.contains("kubelet") && message.contains("No such file"),
        "{message}"
    );
    assert_eq!(running.status(GPU), None);
    std::fs::create_dir(node.root()).unwrap();
    running.condition_goes("kubelet-folder").await;
    running.open(GPU).await;
}

#[tokio::test]
async fn unusable_root_is_refused_at_start() {
    let node = Node::new();
    let refused = |parts: BridgeParts| Bridge::new(parts).err().unwrap().to_string();
    let relative = refused(BridgeParts {
        root: "kubelet".into(),
        ..node.parts()
    });
    assert!(relative.contains("absolute"), "{relative}");
    let registry = node.root().join("plugins_registry");
    std::fs::create_dir(&registry).unwrap();
    let link = node.dir.path().join("link");
    std::os::unix::fs::symlink(&registry, &link).unwrap();
    for own_registry in [registry.clone(), link, registry.join("ours"), node.root()] {
        let own = refused(BridgeParts {
            own_registry,
            ..node.parts()
        });
        assert!(own.contains("--kubelet-root"), "{own}");
    }
}

#[tokio::test]
async fn unstored_offers_are_still_made() {
    let node = Node::new();
    let parts = node.parts();
    node.checkpoint.close().await;
    let running = Running::start(parts);
    node.serve(GPU);
    running.open(GPU).await;
    running.looked().await;
    assert!(node.offered().drivers.is_empty());
    Registrar::dial(&node, GPU).await.info().await;
}
