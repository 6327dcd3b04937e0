//! Pods that want the same claim, the same device or the same name at once.

use crate::manager::claims::ClaimEnd;
use crate::manager::claims::fixtures::{claim, driver, pod};
use crate::manager::tests::scene::{FakeDriver, Home, ends, with_claim, with_gpu, with_prepared};

/// Lets every task go as far as it comes without an event.
async fn settle() {
    for _ in 0..64 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn pods_that_want_one_claim_at_once_are_one_driver_call() {
    let ((_home, daemon, a, gpu), b) = (with_gpu(), pod("b"));
    daemon.source.put(claim("one", &["gpu/0"], &[&a, &b]));
    gpu.shut(true);
    let open = async {
        gpu.called(|calls| calls.prepare.len() == 1).await;
        settle().await;
        gpu.shut(false);
    };
    let (first, second, ()) = tokio::join!(daemon.prepare(&a, &["one"]), daemon.prepare(&b, &["one"]), open);
    assert_eq!((ends(&first), ends(&second)), (vec!["prepared"], vec!["prepared"]));
    assert_eq!(first.containers, second.containers);
    assert_eq!(gpu.counts(), (1, 0));
}

#[tokio::test]
async fn claims_that_have_nothing_in_common_do_not_wait_for_each_other() {
    let (home, a, b) = (Home::new(), pod("a"), pod("b"));
    let (gpu, nic) = (FakeDriver::new(driver("gpu")), FakeDriver::new(driver("nic")));
    let daemon = home.start();
    daemon.serve(&gpu);
    daemon.serve(&nic);
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    daemon.source.put(claim("two", &["nic/0"], &[&b]));
    gpu.shut(true);
    let other = async {
        gpu.called(|calls| calls.prepare.len() == 1).await;
        assert_eq!(ends(&daemon.prepare(&b, &["two"]).await), ["prepared"]);
        gpu.shut(false);
    };
    let (first, ()) = tokio::join!(daemon.prepare(&a, &["one"]), other);
    assert_eq!(ends(&first), ["prepared"]);
}

#[tokio::test(start_paused = true)]
async fn a_prepare_that_waits_too_long_is_refused_with_the_holder_of_the_device() {
    let ((_home, daemon, a, gpu), b) = (with_claim(), pod("b"));
    daemon.source.put(claim("two", &["gpu/0"], &[&b]));
    daemon.source.put(claim("three", &["gpu/1"], &[&b]));
    daemon.prepare(&a, &["one"]).await;
    let outcome = daemon.prepare(&b, &["three", "two"]).await;
    assert_eq!(ends(&outcome), ["prepared", "device-held"], "what is free is given all the same");
    let problem = outcome.claims[1].end.as_ref().unwrap_err();
    assert!(problem.message.contains("default/one") && problem.message.contains("default/a"), "{problem}");
    assert_eq!(gpu.counts(), (2, 0));
}

#[tokio::test]
async fn a_prepare_that_waits_goes_on_when_the_holder_leaves() {
    let ((_home, daemon, a, _gpu), b) = (with_claim(), pod("b"));
    daemon.source.put(claim("two", &["gpu/0"], &[&b]));
    daemon.prepare(&a, &["one"]).await;
    let leave = async {
        settle().await;
        assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
    };
    let (outcome, ()) = tokio::join!(daemon.prepare(&b, &["two"]), leave);
    assert_eq!(ends(&outcome), ["prepared"]);
    assert_eq!(daemon.manager.claims().len(), 1);
}

#[tokio::test]
async fn a_claim_of_the_same_name_waits_for_the_older_one_to_go() {
    let ((_home, daemon, a, _gpu), b) = (with_prepared().await, pod("b"));
    daemon.source.put(claim("one@uid-newer", &["gpu/1"], &[&b]));
    let leave = async {
        settle().await;
        assert_eq!(daemon.manager.claims()[0].id.uid.as_str(), "uid-one");
        daemon.unprepare(&a).await;
    };
    let (outcome, ()) = tokio::join!(daemon.prepare(&b, &["one"]), leave);
    assert_eq!(ends(&outcome), ["prepared"]);
    assert_eq!(daemon.manager.claims()[0].id.uid.as_str(), "uid-newer");
}

/// A prepare that still waited when its pod was unprepared went on afterwards, for a pod that would not be unprepared again.
#[tokio::test]
async fn an_unprepare_finds_what_a_prepare_before_it_still_waits_for() {
    let ((_home, daemon, a, gpu), b) = (with_claim(), pod("b"));
    daemon.source.put(claim("two", &["gpu/0"], &[&b]));
    daemon.source.put(claim("three", &["gpu/1"], &[&b]));
    daemon.prepare(&b, &["three"]).await;
    daemon.prepare(&a, &["one"]).await;
    let free = async {
        settle().await;
        daemon.unprepare(&a).await;
    };
    let waiting = daemon.prepare(&b, &["two", "three"]);
    let (_, left, ()) = tokio::join!(waiting, daemon.unprepare(&b), free);
    assert_eq!(left, [Ok(ClaimEnd::Unprepared), Ok(ClaimEnd::Unprepared)]);
    assert!(daemon.is_empty());
    assert_eq!(gpu.counts(), (3, 2));
}

#[tokio::test]
async fn a_prepare_that_waits_when_the_daemon_stops_is_refused_at_once() {
    let ((_home, daemon, a, _gpu), b) = (with_claim(), pod("b"));
    daemon.source.put(claim("two", &["gpu/0"], &[&b]));
    daemon.prepare(&a, &["one"]).await;
    let stop = async {
        settle().await;
        daemon.tasks().stop();
    };
    let (outcome, ()) = tokio::join!(daemon.prepare(&b, &["two"]), stop);
    assert_eq!(ends(&outcome), ["device-held"]);
}

#[tokio::test(start_paused = true)]
async fn two_claims_of_one_pod_that_want_one_device_do_not_both_get_it() {
    let (_home, daemon, a, _gpu) = with_claim();
    daemon.source.put(claim("two", &["gpu/0"], &[&a]));
    assert_eq!(ends(&daemon.prepare(&a, &["one", "two"]).await), ["prepared", "device-held"]);
}
