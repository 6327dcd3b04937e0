//! When drivers are called again, and when not.

use std::time::Duration;

use tokio::time::Instant;

use crate::manager::PodOutcome;
use crate::manager::claims::calls::CALL_MARGIN;
use crate::manager::claims::fixtures::{claim, driver, permanent, pod, transient, uid};
use crate::manager::claims::unprepare_retry::UNPREPARE_RETRY_MIN;
use crate::manager::claims::{ClaimEnd, Retry};
use crate::manager::tests::scene::{
    Daemon, FakeDriver, Home, Reply, ends, with_claim, with_gpu, with_two_drivers,
};
use nodedock_model::{ClaimState, Device, DeviceName, DriverKind, Pool};

fn retry_after(outcome: &PodOutcome) -> Option<u64> {
    outcome.claims[0].end.as_ref().unwrap_err().retry_after_ms.map(u64::from)
}

/// The attempts and the retry of the only driver of a claim that is not done.
fn retry_of(daemon: &Daemon, uid: &str) -> (u32, Retry) {
    let record = daemon.manager.claims().into_iter().find(|record| record.id.uid.as_str() == uid).unwrap();
    let retries = daemon.manager.claim_view(record).retries;
    assert_eq!(retries.len(), 1, "{retries:?}");
    (retries[0].attempts, retries[0].retry)
}

#[tokio::test]
async fn what_is_refused_for_good_is_not_called_again() {
    let (_home, daemon, a, gpu) = with_claim();
    gpu.reply("uid-one", Reply::Refuse(permanent()));
    let first = daemon.prepare(&a, &["one"]).await;
    assert_eq!(ends(&first), ["bad-parameters"]);
    assert_eq!(daemon.prepare(&a, &["one"]).await, first);
    assert_eq!(gpu.counts(), (1, 1), "it was called for the roll-back once");
    assert!(daemon.is_empty());
    let refused = daemon.manager.refused_claims();
    assert_eq!((refused.len(), refused[0].retry.retry), (1, Retry::WhenChanged));

    daemon.source.put(claim("one", &["gpu/1"], &[&a]));
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"], "another request");
    assert!(daemon.manager.refused_claims().is_empty());
}

#[tokio::test]
async fn a_driver_that_is_loaded_again_or_has_other_devices_is_called_again() {
    let devices = [(DeviceName::new("0").unwrap(), Device::default())].into();
    let (home, a) = (Home::new(), pod("a"));
    let gpu = FakeDriver::with_pool(driver("gpu"), Pool { devices, ..Pool::default() });
    let daemon = home.start();
    daemon.serve(&gpu);
    (0..3).for_each(|_| gpu.reply("uid-one", Reply::Refuse(permanent())));
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    for calls in 1..=3 {
        assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["bad-parameters"]);
        assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["bad-parameters"]);
        assert_eq!(gpu.counts().0, calls);
        if calls == 1 { gpu.publish() } else { daemon.serve(&gpu) }
    }
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
}

#[tokio::test]
async fn a_pod_that_leaves_takes_its_own_refusals_with_it() {
    let ((_home, daemon, a, gpu), b) = (with_claim(), pod("b"));
    daemon.source.put(claim("two", &["gpu/1"], &[&b]));
    for (pod, name) in [(&a, "one"), (&b, "two")] {
        gpu.reply(&format!("uid-{name}"), Reply::Refuse(permanent()));
        assert_eq!(ends(&daemon.prepare(pod, &[name]).await), ["bad-parameters"]);
    }
    assert_eq!(daemon.unprepare(&a).await, []);
    assert_eq!(ends(&daemon.prepare(&b, &["two"]).await), ["bad-parameters"]);
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
}

#[tokio::test]
async fn a_restart_may_call_once_more() {
    let (home, a, gpu) = (Home::new(), pod("a"), FakeDriver::new(driver("gpu")));
    gpu.reply("uid-one", Reply::Refuse(permanent()));
    for end in ["bad-parameters", "prepared"] {
        let daemon = home.start();
        daemon.serve(&gpu);
        daemon.source.put(claim("one", &["gpu/0"], &[&a]));
        assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), [end]);
        daemon.stop().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_names_a_delay_is_not_called_before() {
    let (_home, daemon, a, gpu) = with_claim();
    gpu.reply("uid-one", Reply::Refuse(transient().retry_after(Duration::from_secs(30))));
    assert_eq!(retry_after(&daemon.prepare(&a, &["one"]).await), Some(30_000));
    tokio::time::advance(Duration::from_secs(10)).await;
    let between = daemon.prepare(&a, &["one"]).await;
    assert_eq!((ends(&between), retry_after(&between)), (vec!["device-busy"], Some(20_000)));
    assert!(matches!(retry_of(&daemon, "uid-one"), (1, Retry::At(_))));
    tokio::time::advance(Duration::from_secs(20)).await;
    assert_eq!(retry_of(&daemon, "uid-one"), (1, Retry::Now));
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
    assert_eq!(gpu.counts(), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_retries_often_waits_and_is_then_refused() {
    let (_home, daemon, a, gpu) = with_claim();
    (0..4).for_each(|_| gpu.reply("uid-one", Reply::Refuse(transient())));
    let started = Instant::now();
    for waited_ms in [0, 0, 250, 750] {
        assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["device-busy"]);
        assert_eq!(started.elapsed().as_millis(), waited_ms);
    }
    let away = daemon.prepare(&a, &["one"]).await;
    assert_eq!((started.elapsed().as_millis(), retry_after(&away)), (750, Some(1000)));
    assert_eq!(gpu.counts(), (4, 0));
    daemon.retire(&gpu);
    assert_eq!(retry_of(&daemon, "uid-one"), (4, Retry::WhenServing));
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["driver-unknown"]);
    daemon.serve(&gpu);
    assert_eq!(
        ends(&daemon.prepare(&a, &["one"]).await),
        ["prepared"],
        "a driver that comes is asked at once"
    );
}

#[tokio::test]
async fn a_plugins_refusals_are_for_now_whatever_it_says() {
    let (home, a, gpu) = (Home::new(), pod("a"), FakeDriver::new(driver("gpu")));
    let daemon = home.start();
    daemon.serve_as(&gpu, DriverKind::Grpc);
    gpu.reply("uid-one", Reply::Refuse(permanent()));
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["bad-parameters"]);
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
}

#[tokio::test]
async fn a_claim_that_one_driver_refuses_for_good_is_not_prepared_by_the_others_and_is_undone() {
    let (_home, daemon, a, gpu, nic) = with_two_drivers();
    nic.reply("uid-both", Reply::Refuse(permanent()));
    for _ in 0..2 {
        assert_eq!(ends(&daemon.prepare(&a, &["both"]).await), ["bad-parameters"]);
    }
    assert_eq!((gpu.counts(), nic.counts()), ((1, 0), (1, 0)));
    assert_eq!(daemon.state("uid-both"), Some(ClaimState::Preparing));
    assert_eq!(retry_of(&daemon, "uid-both"), (1, Retry::WhenChanged));
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
    assert_eq!((gpu.counts(), nic.counts()), ((1, 1), (1, 1)));
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_may_be_called_is_called_while_another_wants_time() {
    let (_home, daemon, a, gpu, nic) = with_two_drivers();
    gpu.reply("uid-both", Reply::Refuse(transient()));
    nic.reply("uid-both", Reply::Refuse(transient().retry_after(Duration::from_secs(60))));
    assert_eq!(ends(&daemon.prepare(&a, &["both"]).await), ["device-busy"]);
    assert_eq!(ends(&daemon.prepare(&a, &["both"]).await), ["device-busy"]);
    assert_eq!((gpu.counts(), nic.counts()), ((2, 0), (1, 0)));
    tokio::time::advance(Duration::from_secs(60)).await;
    assert_eq!(ends(&daemon.prepare(&a, &["both"]).await), ["prepared"]);
    assert_eq!((gpu.counts(), nic.counts()), ((2, 0), (2, 0)));
}

/// A driver call that never ended locked its claim, and every other claim of its device, until the daemon was restarted.
#[tokio::test(start_paused = true)]
async fn a_driver_that_never_answers_locks_nothing_for_ever() {
    let (_home, daemon, a, gpu) = with_gpu();
    daemon.start_unprepares();
    gpu.shut(true);
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    let (started, bound) = (Instant::now(), Duration::from_secs(45) + CALL_MARGIN);
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["driver-call-stuck"]);
    assert_eq!(started.elapsed(), bound);
    assert_eq!(daemon.state("uid-one"), Some(ClaimState::Preparing), "it may have been done");
    assert_eq!(daemon.unprepare(&a).await[0].as_ref().unwrap_err().code, "driver-call-stuck");
    assert_eq!(started.elapsed(), 2 * bound);
    gpu.shut(false);
    daemon.gone("uid-one").await;
}

#[tokio::test(start_paused = true)]
async fn each_claim_is_unprepared_after_its_own_backoff() {
    let ((_home, daemon, a, gpu), b) = (with_gpu(), pod("b"));
    daemon.start_unprepares();
    for (pod, name, device) in [(&a, "one", "gpu/0"), (&b, "two", "gpu/1")] {
        daemon.source.put(claim(name, &[device], &[pod]));
        daemon.prepare(pod, &[name]).await;
    }
    gpu.reply_unprepare(Reply::Refuse(transient().retry_after(Duration::from_secs(600))));
    gpu.reply_unprepare(Reply::Refuse(transient()));
    let started = Instant::now();
    daemon.unprepare(&a).await;
    daemon.unprepare(&b).await;
    daemon.gone("uid-two").await;
    assert_eq!(started.elapsed(), UNPREPARE_RETRY_MIN);
    assert!(matches!(retry_of(&daemon, "uid-one"), (1, Retry::At(_))));
    daemon.gone("uid-one").await;
    assert_eq!(started.elapsed(), Duration::from_secs(600));
    assert_eq!(gpu.counts(), (2, 4));
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_serves_again_is_called_at_once_and_no_other() {
    let (_home, daemon, a, gpu, nic) = with_two_drivers();
    daemon.start_unprepares();
    daemon.prepare(&a, &["both"]).await;
    for driver in [&gpu, &nic] {
        driver.reply_unprepare(Reply::Refuse(transient().retry_after(Duration::from_secs(600))));
    }
    let started = Instant::now();
    daemon.unprepare(&a).await;
    daemon.serve(&nic);
    nic.called(|calls| calls.unprepare.len() == 2).await;
    assert_eq!((started.elapsed(), gpu.counts()), (Duration::ZERO, (1, 1)));
    daemon.gone("uid-both").await;
    assert_eq!((started.elapsed(), gpu.counts(), nic.counts()), (Duration::from_secs(600), (1, 2), (1, 2)));
    assert_eq!(gpu.calls().unprepare[1][0].claim.id.uid, uid("uid-both"));
}
