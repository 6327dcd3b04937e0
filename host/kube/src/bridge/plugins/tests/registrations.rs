//! Kubelets that come, go, refuse and forget.

use super::super::keeper::{AWAY, REFUSED};
use super::*;
use nodedock_model::limit;

#[tokio::test]
async fn a_resource_is_registered_once_and_listed_at_each_change() {
    let bench = Bench::new();
    bench.pools.offer("ab");
    let mut kubelet = Kubelet::start(&bench.folder());
    let run = bench.run(Some("one"));
    let endpoint = kubelet.registered().await;
    assert!(endpoint.starts_with("nodedock-gpu-") && endpoint.ends_with("-one.sock"), "{endpoint}");
    assert_eq!(kubelet.listed().await, "ab");
    bench.pools.offer("aBc");
    assert_eq!(kubelet.listed().await, "aBc");
    bench.pools.offer("");
    assert_eq!(kubelet.listed().await, "", "the driver says so");
    bench.pools.offer("a");
    assert_eq!(kubelet.listed().await, "a");
    until("it is not followed", || run.registration() == Some(Registration::Followed)).await;
    let status = run.plugins.status().remove(0);
    assert_eq!((status.driver, status.devices, status.healthy), (driver("gpu"), 1, 1));
    let counts = run.plugins.counts().resources.remove(0);
    assert_eq!((counts.registrations, counts.refusals, counts.lists), (1, 0, 4));

    bench.pools.set(Pooled::default());
    assert_eq!(kubelet.listed().await, "end");
    until("the socket stays", || bench.sockets().is_empty()).await;
    assert!(run.plugins.status().is_empty() && kubelet.is_quiet());
    run.stop().await;
}

#[tokio::test]
async fn a_kubelet_that_starts_anew_and_deletes_every_socket_is_registered_with_anew() {
    let bench = Bench::new();
    bench.pools.offer("a");
    let run = bench.run(None);
    let mut fastest = Duration::MAX;
    for _ in 0..5 {
        let begun = std::time::Instant::now();
        let mut kubelet = Kubelet::start(&bench.folder());
        kubelet.registered().await;
        fastest = fastest.min(begun.elapsed());
        assert_eq!(kubelet.listed().await, "a");
        assert_eq!(bench.sockets().len(), 1);
        assert!(kubelet.is_quiet());
        kubelet.die().await;
    }
    // The fastest of some: a machine that runs all tests at once is slow now and then.
    assert!(fastest < Duration::from_millis(100), "{fastest:?}");
    // Away altogether, with its folder.
    std::fs::remove_dir_all(bench.folder()).unwrap();
    std::fs::create_dir(bench.folder()).unwrap();
    let mut kubelet = Kubelet::start(&bench.folder());
    kubelet.registered().await;
    assert_eq!(kubelet.listed().await, "a");
    run.stop().await;
    assert_eq!(kubelet.listed().await, "end", "a stop ends the list");
    assert!(bench.sockets().is_empty(), "and takes the socket away");
}

/// A retry met the new kubelet before the watch told of it; the watch then led to a second registration, which cut the first one's
/// list off.
#[tokio::test]
async fn a_start_beside_a_dead_socket_leads_to_one_registration() {
    let bench = Bench::new();
    let path = bench.folder().join("kubelet.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    bench.pools.offer("a");
    let run = bench.run(None);
    until("it is not tried", || matches!(run.registration(), Some(Registration::Unreached(_)))).await;
    let mut kubelet = Kubelet::start(&bench.folder());
    kubelet.registered().await;
    assert_eq!(kubelet.listed().await, "a");
    // Whatever happens in the folder, and whoever comes beside.
    for name in ["x.sock", "y.sock"] {
        let _other = std::os::unix::net::UnixListener::bind(bench.folder().join(name)).unwrap();
        std::fs::remove_file(bench.folder().join(name)).unwrap();
    }
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    for letters in ["ab", "a", "ab"] {
        bench.pools.offer(letters);
        assert_eq!(kubelet.listed().await, letters);
    }
    assert!(kubelet.is_quiet());
    assert_eq!(run.plugins.counts().resources[0].registrations, 1);
    run.stop().await;
}

#[tokio::test]
async fn a_refusal_is_a_condition_with_the_kubelets_words_and_is_tried_again() {
    let bench = Bench::new();
    bench.pools.offer("a");
    let mut kubelet = Kubelet::start(&bench.folder());
    *kubelet.shared.refusal.lock().unwrap() = Some("the ResourceName is\ninvalid".to_owned());
    let run = bench.run(None);
    until("it is not said", || bench.problem(REFUSED).is_some()).await;
    let words = bench.problem(REFUSED).unwrap();
    assert!(words.contains("example.com/gpu") && words.ends_with("the ResourceName is invalid"), "{words}");
    assert!(matches!(run.registration(), Some(Registration::Refused(_))));
    *kubelet.shared.refusal.lock().unwrap() = None;
    kubelet.registered().await;
    until("it is still said", || bench.problem(REFUSED).is_none()).await;
    assert!(run.plugins.counts().resources[0].refusals > 0 && bench.problem(AWAY).is_none());
    run.stop().await;
}

#[tokio::test(start_paused = true)]
async fn that_no_kubelet_is_there_is_said_for_as_long_as_a_resource_waits_for_one() {
    let bench = Bench::new();
    bench.pools.offer("a");
    let run = bench.run(None);
    tokio::time::sleep(limit::KUBELET_AWAY + Duration::from_secs(1)).await;
    until("it is not said", || bench.problem(AWAY).is_some()).await;
    bench.pools.set(Pooled::default());
    until("it is still said", || bench.problem(AWAY).is_none()).await;
    run.stop().await;
}

/// Up to 1.36 a kubelet takes the end of an older plugin's list for the end of the newest.
#[tokio::test]
async fn a_list_that_the_kubelet_cut_is_registered_again() {
    let bench = Bench::new();
    bench.pools.offer("a");
    let mut kubelet = Kubelet::start(&bench.folder());
    let run = bench.run(None);
    kubelet.registered().await;
    assert_eq!(kubelet.listed().await, "a");
    kubelet.cut_streams();
    kubelet.registered().await;
    assert_eq!(kubelet.listed().await, "a");
    run.stop().await;
}

#[tokio::test]
async fn of_two_instances_the_newest_serves_and_the_older_does_not_fight() {
    let bench = Bench::new();
    bench.pools.offer("a");
    let mut kubelet = Kubelet::start(&bench.folder());
    let older = bench.run(Some("one"));
    assert!(kubelet.registered().await.ends_with("-one.sock"));
    assert_eq!(kubelet.listed().await, "a");
    let older_streams = std::mem::take(&mut *kubelet.shared.streams.lock().unwrap());
    let newer = bench.run(Some("two"));
    assert!(kubelet.registered().await.ends_with("-two.sock"));
    assert_eq!(kubelet.listed().await, "a");
    older_streams.iter().for_each(Tasks::stop);
    until("it fights", || older.registration() == Some(Registration::Superseded)).await;
    // The older one goes, and the kubelet takes the newer one's list for lost.
    older.stop().await;
    kubelet.cut_streams();
    assert!(kubelet.registered().await.ends_with("-two.sock"));
    assert_eq!(bench.sockets().len(), 1);
    newer.stop().await;
}

#[tokio::test]
async fn what_was_offered_before_a_restart_is_offered_until_the_driver_says_otherwise() {
    let bench = Bench::new();
    bench.pools.offer("aB");
    let mut kubelet = Kubelet::start(&bench.folder());
    let run = bench.run(None);
    assert_eq!(kubelet.listed().await, "aB");
    let file = bench.dir.path().join("devices-.json");
    until("it is not kept", || std::fs::read_to_string(&file).is_ok_and(|text| text.contains("p/b"))).await;
    run.stop().await;
    assert_eq!(kubelet.listed().await, "end");

    bench.pools.set(Pooled::default());
    let run = bench.run(None);
    kubelet.registered().await;
    kubelet.registered().await;
    assert_eq!(kubelet.listed().await, "aB", "no driver serves yet");
    let told = BTreeMap::from([(driver("gpu"), BTreeSet::from([resource("gpu")]))]);
    bench.pools.set(Pooled { told: told.clone(), ..Pooled::default() });
    let offers = Offers::from([(resource("gpu"), offer("gpu", "abc"))]);
    bench.pools.set(Pooled { told, offers, ..Pooled::default() });
    assert_eq!(kubelet.listed().await, "abc");
    until("it is not kept", || std::fs::read_to_string(&file).is_ok_and(|text| text.contains("p/c"))).await;
    run.stop().await;
    assert_eq!(kubelet.listed().await, "end");

    // The driver is back, and has it no more.
    bench.pools.set(Pooled { told: BTreeMap::from([(driver("gpu"), BTreeSet::new())]), ..Pooled::default() });
    let run = bench.run(None);
    until("it is not forgotten", || std::fs::read_to_string(&file).is_ok_and(|text| !text.contains("gpu")))
        .await;
    assert!(run.plugins.status().is_empty());
    run.stop().await;
    std::fs::write(&file, "{").unwrap();
    let run = bench.run(None);
    bench.pools.offer("a");
    kubelet.registered().await;
    assert_eq!(kubelet.listed().await, "a", "a memory that is spoilt does no harm");
    run.stop().await;
}

#[tokio::test]
async fn a_device_that_somebody_else_holds_is_not_healthy_and_one_of_the_kubelets_is() {
    let bench = Bench::new();
    bench.pools.offer("ab");
    let mut kubelet = Kubelet::start(&bench.folder());
    let run = bench.run(None);
    let endpoint = kubelet.registered().await;
    assert_eq!(kubelet.listed().await, "ab");
    let claim = ObjectRef::new("default", "c", "uid-c").unwrap();
    bench.others.0.lock().unwrap().insert("p/a".to_owned(), claim);
    bench.claims_changed();
    assert_eq!(kubelet.listed().await, "Ab");
    bench.others.0.lock().unwrap().clear();
    bench.claims_changed();
    assert_eq!(kubelet.listed().await, "ab");
    // What the kubelet gave is held as well, and its pod must not fail for it.
    let mut client = kubelet.client(&endpoint).await;
    client.allocate(allocations::request("b")).await.unwrap();
    let ours = bench.claims.held()[0].claim.clone();
    let other = ObjectRef::new("default", "c", "uid-c").unwrap();
    bench.others.0.lock().unwrap().extend([("p/b".to_owned(), ours), ("p/a".to_owned(), other)]);
    bench.claims_changed();
    assert_eq!(kubelet.listed().await, "Ab");
    run.stop().await;
}

#[test]
fn a_root_without_room_for_sockets_is_refused_at_the_start() {
    let long = Path::new("/").join("x".repeat(90));
    let words = check_paths(&long, None).unwrap_err().message;
    assert!(words.contains("--kubelet-root") && words.contains("107"), "{words}");
    assert!(check_paths(Path::new("/var/lib/kubelet"), Some(&Uid::new("6f1c2d7e").unwrap())).is_ok());
}
