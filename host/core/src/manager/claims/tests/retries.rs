//! Tests of the times at which drivers are called again.

use std::time::Duration;

use tokio::time::Instant;

use crate::manager::PodOutcome;
use crate::manager::claims::Retry;
use crate::manager::claims::fixtures::{claim, driver, permanent, pod, transient, uid};
use crate::manager::claims::timed_calls::CALL_MARGIN;
use crate::manager::claims::unprepare_retry::UNPREPARE_RETRY_MIN;
use crate::manager::tests::scene::{
    Daemon, FakeDriver, Home, Reply, ends, with_claim, with_gpu, with_two_drivers,
};
use nodedock_model::{ClaimState, Device, DeviceName, Pool};

fn retry_after(outcome: &PodOutcome) -> Option<u64> {
    outcome.claims[0]
        .end
        .as_ref()
        .unwrap_err()
        .retry_after_ms
        .map(u64::from)
}

/// The attempts and the retry of the only driver of a claim that is not done.
fn retry_of(daemon: &Daemon, uid: &str) -> (u32, Retry) {
    let record = daemon
        .manager
        .records
        .claims()
        .into_iter()
        .find(|record| record.id.uid.as_str() == uid)
        .unwrap();
    let retries = daemon.manager.retries.claim_view(record).retries;
    assert_eq!(retries.len(), 1, "{retries:?}");
    (retries[0].attempts, retries[0].retry)
}

#[tokio::test]
async fn reloaded_driver_is_called_again() {
    let devices = [(DeviceName::new("0").unwrap(), Device::default())].into();
    let (home, a) = (Home::new(), pod("a"));
    let gpu = FakeDriver::with_pool(
        driver("gpu"),
        Pool {
            devices,
            ..Pool::default()
        },
    );
    let daemon = home.start();
    daemon.serve(&gpu);
    (0..3).for_each(|_| gpu.reply("uid-one", Reply::Refuse(permanent())));
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    for calls in 1..=3 {
        assert_eq!(
            ends(&daemon.prepare(&a, &["one"]).await),
            ["bad-parameters"]
        );
        assert_eq!(
            ends(&daemon.prepare(&a, &["one"]).await),
            ["bad-parameters"]
        );
        assert_eq!(gpu.counts().0, calls);
        if calls == 1 {
            gpu.publish()
        } else {
            daemon.serve(&gpu)
        }
    }
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
}

#[tokio::test]
async fn leaving_pod_clears_its_refusals() {
    let ((_home, daemon, a, gpu), b) = (with_claim(), pod("b"));
    daemon.source.put(claim("two", &["gpu/1"], &[&b]));
    for (pod, name) in [(&a, "one"), (&b, "two")] {
        gpu.reply(&format!("uid-{name}"), Reply::Refuse(permanent()));
        assert_eq!(
            ends(&daemon.prepare(pod, &[name]).await),
            ["bad-parameters"]
        );
    }
    assert_eq!(daemon.unprepare(&a).await, []);
    assert_eq!(
        ends(&daemon.prepare(&b, &["two"]).await),
        ["bad-parameters"]
    );
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
async fn frequent_retries_are_delayed_then_refused() {
    let (_home, daemon, a, gpu) = with_claim();
    (0..4).for_each(|_| gpu.reply("uid-one", Reply::Refuse(transient())));
    let started = Instant::now();
    for waited_ms in [0, 0, 250, 750] {
        assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["device-busy"]);
        assert_eq!(started.elapsed().as_millis(), waited_ms);
    }
    let away = daemon.prepare(&a, &["one"]).await;
    assert_eq!(
        (started.elapsed().as_millis(), retry_after(&away)),
        (750, Some(1000))
    );
    assert_eq!(gpu.counts(), (4, 0));
    daemon.retire(&gpu);
    assert_eq!(retry_of(&daemon, "uid-one"), (4, Retry::WhenServing));
    assert_eq!(
        ends(&daemon.prepare(&a, &["one"]).await),
        ["driver-unknown"]
    );
    daemon.serve(&gpu);
    assert_eq!(
        ends(&daemon.prepare(&a, &["one"]).await),
        ["prepared"],
        "a driver that comes is asked at once"
    );
}

#[tokio::test(start_paused = true)]
async fn backing_off_driver_delays_no_other() {
    let (_home, daemon, a, gpu, nic) = with_two_drivers();
    gpu.reply("uid-both", Reply::Refuse(transient()));
    nic.reply(
        "uid-both",
        Reply::Refuse(transient().retry_after(Duration::from_secs(60))),
    );
    assert_eq!(ends(&daemon.prepare(&a, &["both"]).await), ["device-busy"]);
    assert_eq!(ends(&daemon.prepare(&a, &["both"]).await), ["device-busy"]);
    assert_eq!((gpu.counts(), nic.counts()), ((2, 0), (1, 0)));
    tokio::time::advance(Duration::from_secs(60)).await;
    assert_eq!(ends(&daemon.prepare(&a, &["both"]).await), ["prepared"]);
    assert_eq!((gpu.counts(), nic.counts()), ((2, 0), (2, 0)));
}

/// A driver call that never ended locked its claim, and every other claim of its device, until the daemon was restarted.
#[tokio::test(start_paused = true)]
async fn stuck_driver_locks_nothing_forever() {
    let (_home, daemon, a, gpu) = with_gpu();
    daemon.starts.unprepares();
    gpu.shut(true);
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    let (started, bound) = (Instant::now(), Duration::from_secs(45) + CALL_MARGIN);
    assert_eq!(
        ends(&daemon.prepare(&a, &["one"]).await),
        ["driver-call-stuck"]
    );
    assert_eq!(started.elapsed(), bound);
    assert_eq!(
        daemon.state("uid-one"),
        Some(ClaimState::Preparing),
        "it may have been done"
    );
    assert_eq!(
        daemon.unprepare(&a).await[0].as_ref().unwrap_err().code,
        "driver-call-stuck"
    );
    assert_eq!(started.elapsed(), 2 * bound);
    gpu.shut(false);
    daemon.gone("uid-one").await;
}

#[tokio::test(start_paused = true)]
async fn claims_have_separate_unprepare_backoffs() {
    let ((_home, daemon, a, gpu), b) = (with_gpu(), pod("b"));
    daemon.starts.unprepares();
    for (pod, name, device) in [(&a, "one", "gpu/0"), (&b, "two", "gpu/1")] {
        daemon.source.put(claim(name, &[device], &[pod]));
        daemon.prepare(pod, &[name]).await;
    }
    gpu.refuse_unprepare(transient().retry_after(Duration::from_secs(600)));
    gpu.refuse_unprepare(transient());
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
async fn only_returning_driver_is_called_immediately() {
    let (_home, daemon, a, gpu, nic) = with_two_drivers();
    daemon.starts.unprepares();
    daemon.prepare(&a, &["both"]).await;
    for driver in [&gpu, &nic] {
        driver.refuse_unprepare(transient().retry_after(Duration::from_secs(600)));
    }
    let started = Instant::now();
    daemon.unprepare(&a).await;
    daemon.serve(&nic);
    nic.called(|calls| calls.unprepare.len() == 2).await;
    assert_eq!((started.elapsed(), gpu.counts()), (Duration::ZERO, (1, 1)));
    daemon.gone("uid-both").await;
    assert_eq!(
        (started.elapsed(), gpu.counts(), nic.counts()),
        (Duration::from_secs(600), (1, 2), (1, 2))
    );
    assert_eq!(gpu.calls().unprepare[1][0].claim.id.uid, uid("uid-both"));
}
