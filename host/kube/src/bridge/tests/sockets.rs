//! Sockets: when they are there, for whom, and what is in their way.

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

#[tokio::test]
async fn a_serving_driver_registers_as_any_plugin_does() {
    let home = Home::new();
    let running = home.start();
    let _gpu = home.serve(GPU);
    running.open(GPU).await;
    let (registration, service) = (home.registration(GPU), home.service(GPU));
    assert_eq!((mode(&registration), mode(&service)), (0o600, 0o600));
    assert_eq!((mode(service.parent().unwrap()), mode(registration.parent().unwrap())), (0o750, 0o750));
    assert_eq!(running.status(GPU).unwrap().registration, Registration::Offered);

    let mut kubelet = registrar(&home, GPU).await;
    let info = kubelet.info().await.unwrap();
    assert_eq!((&info.kind[..], &info.name[..], &info.endpoint), ("DRAPlugin", GPU, &service));
    assert_eq!(info.services[..2], ["v1.DRAPlugin", "v1beta1.DRAPlugin"]);
    assert_eq!(running.status(GPU).unwrap().registration, Registration::Asked);
    kubelet.accept().await.unwrap();
    assert!(running.status(GPU).unwrap().registration.is_registered());
    let counted = running.bridge.counters().view();
    assert_eq!((counted.registrations, counted.refusals, counted.connections), (1, 0, 1));
    let connected = channel(&service).await;
    let connections = |running: &Running| running.status(GPU).unwrap().connections;
    running.until("connected", |running| connections(running) == 1).await;
    drop(connected);
    running.until("disconnected", |running| connections(running) == 0).await;
}

#[tokio::test]
async fn a_refusal_of_the_kubelet_stands_with_its_words_until_it_registers_the_driver() {
    let home = Home::new();
    let running = home.start();
    let _gpu = home.serve(GPU);
    running.open(GPU).await;
    let mut kubelet = registrar(&home, GPU).await;
    kubelet.info().await.unwrap();
    let words = format!("plugin validation failed\n{}", "x".repeat(5000));
    let answer = kubelet.refuse(&words).await.unwrap_err().to_string();
    assert!(answer.contains("plugin validation failed xxx"), "{answer}");
    let told = running.condition(offer::REFUSED).unwrap();
    assert!(told.starts_with(GPU) && told.contains("plugin validation failed xxx"), "{told}");
    assert!(told.len() < 1024, "{}", told.len());
    kubelet.info().await.unwrap();
    let refused = running.status(GPU).unwrap().registration;
    assert!(matches!(refused, Registration::Refused { .. }), "{refused:?}");
    kubelet.accept().await.unwrap();
    assert_eq!(running.condition(offer::REFUSED), None);
    assert_eq!(running.bridge.counters().view().refusals, 1);
}

#[tokio::test]
async fn sockets_stay_while_a_driver_is_replaced_or_does_not_serve_and_go_with_its_file() {
    let home = Home::new();
    let running = home.start();
    let (_gpu, _nic) = (home.serve(GPU), home.serve(NIC));
    running.open(GPU).await;
    running.open(NIC).await;
    let before = (inode(&home.registration(GPU)), inode(&home.service(GPU)));
    let _replaced = home.serve(GPU);
    running.looked().await;
    home.registry.retire(&source(GPU));
    home.show(GPU, DriverState::Failed);
    running.looked().await;
    assert_eq!((inode(&home.registration(GPU)), inode(&home.service(GPU))), before);
    registrar(&home, GPU).await.info().await.unwrap();

    home.registry.remove(&source(GPU));
    running.until("withdrawn", |running| running.status(GPU).is_none()).await;
    assert!(!home.registration(GPU).exists() && !home.service(GPU).parent().unwrap().exists());
    assert!(home.registration(NIC).exists() && home.service(NIC).exists());
}

#[tokio::test]
async fn a_driver_is_kept_while_the_kubelet_holds_claims_of_it() {
    let home = Home::new();
    let running = home.start();
    let _gpu = home.serve(GPU);
    running.open(GPU).await;
    home.claims.hold(&[GPU]);
    home.registry.remove(&source(GPU));
    for _ in 0..5 {
        running.looked().await;
    }
    assert!(home.registration(GPU).exists());
    home.claims.hold(&[]);
    running.until("withdrawn", |running| running.status(GPU).is_none()).await;
}

#[tokio::test]
async fn a_driver_of_before_the_restart_is_offered_before_it_is_loaded() {
    let home = Home::new();
    let running = home.start();
    let _gpu = home.serve(GPU);
    running.open(GPU).await;
    running.drain().await;
    assert!(!home.registration(GPU).exists() && !home.service(GPU).exists());
    home.registry.remove(&source(GPU));

    let remembered = vec![name(NIC)];
    let running = Running::start(BridgeParts { remembered, ..home.parts() });
    running.open(GPU).await;
    running.open(NIC).await;
    let info = registrar(&home, GPU).await.info().await.unwrap();
    assert_eq!(info.name, GPU);
}

#[tokio::test]
async fn instances_have_sockets_of_their_own_and_leave_each_others_alone() {
    let home = Home::new();
    let _gpu = home.serve(GPU);
    let (old, new) = (home.instance("pod-1"), home.instance("pod-2"));
    old.open(GPU).await;
    new.open(GPU).await;
    let of = |running: &Running| running.status(GPU).unwrap().sockets.unwrap();
    let (of_old, of_new) = (of(&old), of(&new));
    assert!(of_new.registration.ends_with(format!("{GPU}-pod-2-reg.sock")), "{of_new:?}");
    assert!(of_new.service.ends_with(format!("{GPU}/dra-pod-2.sock")), "{of_new:?}");
    assert!(of_old.registration.exists() && of_old.service.exists());
    old.drain().await;
    assert!(!of_old.registration.exists() && !of_old.service.exists());
    assert!(of_new.registration.exists() && of_new.service.exists());
}

#[tokio::test]
async fn of_two_daemons_under_the_same_names_the_second_waits_for_the_first() {
    let home = Home::new();
    let _gpu = home.serve(GPU);
    let first = home.start();
    first.open(GPU).await;
    let memory = home.dir.path().join("second");
    let second = Running::start(BridgeParts { memory, ..home.parts() });
    let told = second.condition_comes(standing::NO_SOCKET).await;
    assert!(told.contains("another process listens") && told.contains(GPU), "{told}");
    registrar(&home, GPU).await.info().await.unwrap();
    first.drain().await;
    second.condition_goes(standing::NO_SOCKET).await;
    second.open(GPU).await;
}

#[tokio::test]
async fn a_stale_socket_is_replaced_and_a_file_or_a_link_in_the_way_is_not() {
    for link in [false, true] {
        let home = Home::new();
        std::fs::create_dir_all(home.service(GPU).parent().unwrap()).unwrap();
        std::fs::create_dir_all(home.root().join("plugins_registry")).unwrap();
        drop(StdListener::bind(home.service(GPU)).unwrap());
        let registration = home.registration(GPU);
        let elsewhere = home.dir.path().join("precious");
        std::fs::write(&elsewhere, "precious").unwrap();
        if link {
            std::os::unix::fs::symlink(&elsewhere, &registration).unwrap();
        } else {
            std::fs::write(&registration, "precious").unwrap();
        }
        let (_gpu, _nic) = (home.serve(GPU), home.serve(NIC));
        let running = home.start();
        let told = running.condition_comes(standing::NO_SOCKET).await;
        assert!(told.contains("not a socket") && told.contains("-reg.sock"), "{told}");
        running.open(NIC).await;
        assert_eq!(std::fs::read_to_string(&registration).unwrap(), "precious");
        assert!(running.status(GPU).unwrap().problem.is_some());
        channel(&home.service(GPU)).await;
        std::fs::remove_file(&registration).unwrap();
        running.condition_goes(standing::NO_SOCKET).await;
        running.open(GPU).await;
        registrar(&home, GPU).await.info().await.unwrap();
    }
}

#[tokio::test]
async fn a_socket_that_somebody_removes_is_made_anew_and_so_are_the_folders() {
    let home = Home::new();
    let running = home.start();
    let _gpu = home.serve(GPU);
    running.open(GPU).await;
    registrar(&home, GPU).await.accept().await.unwrap();
    let service = inode(&home.service(GPU));
    std::fs::remove_file(home.registration(GPU)).unwrap();
    running.until("made anew", |_| home.registration(GPU).exists()).await;
    running.looked().await;
    assert_eq!(inode(&home.service(GPU)), service);
    assert_eq!(running.status(GPU).unwrap().registration, Registration::Offered, "the kubelet forgot it");
    registrar(&home, GPU).await.accept().await.unwrap();

    std::fs::remove_dir_all(home.root().join("plugins")).unwrap();
    std::fs::remove_dir_all(home.root().join("plugins_registry")).unwrap();
    let both = |_: &Running| home.registration(GPU).exists() && home.service(GPU).exists();
    running.until("both made anew", both).await;
    registrar(&home, GPU).await.info().await.unwrap();
    channel(&home.service(GPU)).await;
}

#[tokio::test]
async fn a_kubelet_that_is_not_there_yet_is_waited_for() {
    let home = Home::new();
    std::fs::remove_dir(home.root()).unwrap();
    let _gpu = home.serve(GPU);
    let running = home.start();
    let told = running.condition_comes(NO_FOLDER).await;
    assert!(told.contains("kubelet") && told.contains("No such file"), "{told}");
    assert_eq!(running.status(GPU), None);
    std::fs::create_dir(home.root()).unwrap();
    running.condition_goes(NO_FOLDER).await;
    running.open(GPU).await;
}

#[tokio::test]
async fn a_driver_whose_name_does_not_fit_is_named_and_the_others_are_offered() {
    let home = Home::new();
    let padding = 70 - home.root().as_os_str().len() - 1;
    let root = home.root().join("r".repeat(padding));
    std::fs::create_dir(&root).unwrap();
    let long = "d".repeat(50);
    let (_long, _short) = (home.serve(&long), home.serve("short"));
    let running = Running::start(BridgeParts { root, ..home.parts() });
    running.open("short").await;
    let told = running.condition_comes(standing::NO_SOCKET).await;
    assert!(told.starts_with(&long) && told.contains("--kubelet-root"), "{told}");
    let status = running.status(&long).unwrap();
    assert!(!status.is_open && status.sockets.is_none() && status.problem.is_some());
    home.registry.remove(&source(&long));
    running.condition_goes(standing::NO_SOCKET).await;
}

#[tokio::test]
async fn what_can_never_work_is_refused_at_the_start() {
    let home = Home::new();
    let refused = |parts: BridgeParts| Bridge::new(parts).err().unwrap().to_string();
    let long = refused(BridgeParts { root: format!("/{}", "r".repeat(90)).into(), ..home.parts() });
    assert!(long.contains("--kubelet-root") && long.contains("107"), "{long}");
    let relative = refused(BridgeParts { root: "kubelet".into(), ..home.parts() });
    assert!(relative.contains("absolute"), "{relative}");
    let registry = home.root().join("plugins_registry");
    std::fs::create_dir(&registry).unwrap();
    let link = home.dir.path().join("link");
    std::os::unix::fs::symlink(&registry, &link).unwrap();
    for own_registry in [registry.clone(), link, registry.join("ours"), home.root()] {
        let own = refused(BridgeParts { own_registry, ..home.parts() });
        assert!(own.contains("--kubelet-root"), "{own}");
    }
}

#[tokio::test]
async fn names_that_cannot_be_kept_are_told_and_nothing_else_suffers() {
    let home = Home::new();
    let memory = home.dir.path().join("state/offered-drivers");
    let running = Running::start(BridgeParts { memory, ..home.parts() });
    let _gpu = home.serve(GPU);
    running.open(GPU).await;
    running.condition_comes(NO_MEMORY).await;
    std::fs::create_dir(home.dir.path().join("state")).unwrap();
    running.condition_goes(NO_MEMORY).await;
}
