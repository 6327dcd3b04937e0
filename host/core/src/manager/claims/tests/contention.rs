//! Pods that want the same claim, the same device or the same name at once.

use std::time::Duration;

use tokio::time::Instant;

use crate::manager::claims::ClaimEnd;
use crate::manager::claims::fixtures::{claim, pod};
use crate::manager::tests::scene::{ends, settle, with_claim, with_prepared, with_two_drivers};
use crate::registry::DriverState;
use nodedock_model::limit;

#[tokio::test]
async fn independent_claims_do_not_wait() {
    let ((_home, daemon, a, gpu, _), b) = (with_two_drivers(), pod("b"));
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
async fn timed_out_prepare_names_the_holder() {
    let ((_home, daemon, a, gpu), b) = (with_claim(), pod("b"));
    daemon.source.put(claim("two", &["gpu/0"], &[&b]));
    daemon.source.put(claim("three", &["gpu/1"], &[&b]));
    daemon.prepare(&a, &["one"]).await;
    let outcome = daemon.prepare(&b, &["three", "two"]).await;
    assert_eq!(
        ends(&outcome),
        ["prepared", "device-held"],
        "what is free is given all the same"
    );
    let problem = outcome.claims[1].end.as_ref().unwrap_err();
    assert!(
        problem.message.contains("default/one") && problem.message.contains("default/a"),
        "{problem}"
    );
    assert_eq!(gpu.counts(), (2, 0));
}

#[tokio::test]
async fn waiting_prepare_resumes_after_release() {
    for (other, device) in [("two", "gpu/0"), ("one@uid-newer", "gpu/1")] {
        for released in [false, true] {
            let ((_home, daemon, a, gpu), b) = (with_prepared().await, pod("b"));
            if released {
                daemon.retire(&gpu);
                assert!(daemon.unprepare(&a).await[0].is_err());
                daemon.serve(&gpu);
            }
            let other = claim(other, &[device], &[&b]);
            daemon.source.put(other.clone());
            let leave = async {
                settle().await;
                assert!(daemon.state("uid-one").is_some());
                if released {
                    daemon.release("one").await.unwrap();
                } else {
                    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
                }
            };
            let names = [other.id.name.as_str()];
            let (outcome, ()) = tokio::join!(daemon.prepare(&b, &names), leave);
            assert_eq!(ends(&outcome), ["prepared"]);
            let claims = daemon.manager.records.claims();
            assert_eq!(
                claims
                    .iter()
                    .map(|record| &record.id.uid)
                    .collect::<Vec<_>>(),
                [&other.id.uid]
            );
        }
    }
}

/// A prepare that still waited when its pod was unprepared continued afterwards, for a pod that would not be unprepared again.
#[tokio::test]
async fn unprepare_covers_a_waiting_prepare() {
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
async fn shutdown_refuses_waiting_prepare() {
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
async fn pods_claims_cannot_share_a_device() {
    let (_home, daemon, a, _gpu) = with_claim();
    daemon.source.put(claim("two", &["gpu/0"], &[&a]));
    assert_eq!(
        ends(&daemon.prepare(&a, &["one", "two"]).await),
        ["prepared", "device-held"]
    );
}

#[tokio::test(start_paused = true)]
async fn prepare_waits_for_loading_driver() {
    let (_home, daemon, a, gpu) = with_claim();
    daemon.retire(&gpu);
    daemon.loads("gpu.wasm", DriverState::Seen);
    let load = async {
        settle().await;
        assert_eq!(daemon.state("uid-one"), None, "nothing is taken meanwhile");
        daemon.serve(&gpu);
    };
    let (outcome, ()) = tokio::join!(daemon.prepare(&a, &["one"]), load);
    assert_eq!((ends(&outcome), gpu.counts()), (vec!["prepared"], (1, 0)));
    // What is prepared needs no driver.
    daemon.retire(&gpu);
    let asked = Instant::now();
    assert_eq!(ends(&daemon.prepare(&a, &["one"]).await), ["prepared"]);
    assert_eq!(asked.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn prepare_without_loaded_driver_is_refused() {
    let (_home, daemon, a, gpu) = with_claim();
    daemon.retire(&gpu);
    for (becomes, words) in [
        (DriverState::Failed, "is not here"),
        (DriverState::Seen, "gpu.wasm is being loaded"),
    ] {
        daemon.loads("gpu.wasm", DriverState::Seen);
        let asked = Instant::now();
        let change = async {
            settle().await;
            daemon.loads("gpu.wasm", becomes);
        };
        let (outcome, ()) = tokio::join!(daemon.prepare(&a, &["one"]), change);
        let problem = outcome.claims[0].end.as_ref().unwrap_err();
        assert!(
            problem.code == "driver-unknown" && problem.message.ends_with(words),
            "{problem}"
        );
        let in_time = asked.elapsed() < limit::DRIVER_WAIT;
        assert_eq!(
            in_time,
            becomes == DriverState::Failed,
            "{:?}",
            asked.elapsed()
        );
    }
}
