//! A driver's file that is replaced while it serves: no call fails, and what a new version cannot do it does not begin.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nodedock_proto::node::v1;
use nodedock_tests::compose::{pod, request};
use nodedock_tests::drivers::{Form, MOCK_GPU, digest, wasm};
use nodedock_tests::versions::{FILE, claim, file, script};
use nodedock_tests::{Client, Daemon};
use scripted::Script;
use tokio::task::JoinSet;

/// Pods that come and go at once, and how often the file is replaced meanwhile.
const PODS: usize = 64;
const SWAPS: usize = 20;

fn name(number: usize) -> String {
    format!("device-{number}")
}

/// A pod that comes and goes until it is stopped; then it stays. How often it came.
async fn come_and_go(number: usize, mut client: Client, stop: Arc<AtomicBool>) -> usize {
    let (pod, claim) = (pod(&name(number)), claim(&name(number)));
    for times in 1.. {
        let answer = client
            .prepare_pod(request(&pod, &[&claim]))
            .await
            .expect("prepare")
            .into_inner();
        assert_eq!(answer.claims[0].outcome, "prepared", "{answer:#?}");
        if stop.load(Ordering::Acquire) {
            return times;
        }
        let leave = v1::UnpreparePodRequest {
            pod: Some(pod.clone()),
        };
        let answer = client
            .unprepare_pod(leave)
            .await
            .expect("unprepare")
            .into_inner();
        assert_eq!(answer.claims[0].outcome, "unprepared", "{answer:#?}");
    }
    unreachable!("no loop runs so long")
}

#[tokio::test]
async fn file_replacement_fails_no_call() {
    let daemon = Daemon::start().await;
    daemon.drop_in_script(&script(0));
    let mut known = BTreeSet::from([daemon.swap("v0", &script(0)).await]);
    let (mut pods, stop) = (JoinSet::new(), Arc::<AtomicBool>::default());
    (0..PODS).for_each(|n| drop(pods.spawn(come_and_go(n, daemon.client(), stop.clone()))));
    for swap in 1..=SWAPS {
        let file = file(&format!("v{swap}"));
        let new = digest(&file);
        known.insert(new.clone());
        daemon.drop_in(FILE, &file);
        daemon
            .until_driver(FILE, |driver| driver.digest == new)
            .await;
        for claim in daemon
            .claims()
            .await
            .iter()
            .filter(|claim| claim.state == "prepared")
        {
            let by: Vec<_> = claim
                .drivers
                .iter()
                .map(|driver| driver.digest.clone())
                .collect();
            assert!(by.len() == 1 && known.contains(&by[0]), "{claim:?}");
        }
    }
    stop.store(true, Ordering::Release);
    let times: usize = pods.join_all().await.into_iter().sum();
    assert!(times > PODS, "the pods came only once each");
    assert_eq!(daemon.claims().await.len(), PODS);
    let driver = daemon.until_serving(FILE).await;
    assert_eq!(
        (driver.digest.as_str(), driver.reason.as_str()),
        (digest(&file("v20")).as_str(), "")
    );
    for number in 0..PODS {
        assert_eq!(daemon.unprepare(&pod(&name(number))).await.len(), 1);
    }
    daemon.holds_nothing(&BTreeSet::new()).await;
    daemon.until_kept(&[&driver.digest]).await;
}

#[tokio::test]
async fn failed_version_keeps_old_one_serving() {
    let daemon = Daemon::start().await;
    daemon.drop_in_script(&script(0));
    let old = daemon.swap("v1", &script(0)).await;
    daemon.serve(MOCK_GPU, Form::Core).await;
    let whole = file("v2");
    let cases = [
        (whole[..whole.len() / 2].to_vec(), "cut off"),
        (
            wasm(MOCK_GPU, Form::Component),
            "belongs to the driver file mock-gpu.wasm",
        ),
        (
            wasm("device-nodes", Form::Core),
            "requests more than it is granted",
        ),
    ];
    for (number, (broken, expected)) in cases.into_iter().enumerate() {
        daemon.drop_in(FILE, &broken);
        let kept = daemon
            .until_driver(FILE, |driver| driver.reason.contains(expected))
            .await;
        assert_eq!(
            (kept.state.as_str(), &kept.digest),
            ("serving", &old),
            "{kept:?}"
        );
        assert!(
            kept.reason.contains(&old) && kept.reason.contains(&digest(&broken)),
            "{kept:?}"
        );
        let pod = pod(&name(number));
        daemon
            .prepared(request(&pod, &[&claim(&name(number))]))
            .await;
        assert_eq!(daemon.unprepare(&pod).await.len(), 1);
    }
    // The new version's first discovery fails because of its config; the old one continues with its previous config.
    daemon.drop_in(FILE, &whole);
    let new = digest(&whole);
    daemon
        .until_driver(FILE, |driver| {
            driver.digest == new && driver.reason.is_empty()
        })
        .await;
    daemon.drop_in("scripted.config.yaml", "devices: many\n");
    let kept = daemon
        .until_driver(FILE, |driver| driver.reason.contains("first discovery"))
        .await;
    assert!(
        kept.reason
            .contains("the same file with its current side files"),
        "{kept:?}"
    );
    assert_eq!((kept.state.as_str(), &kept.digest), ("serving", &new));
    daemon
        .prepared(request(&pod("last"), &[&claim("device-9")]))
        .await;
    daemon
        .cli(&["explain", "driver", FILE])
        .await
        .done_with(&["continues to serve", &new]);

    // Devices that the driver does not have any more are named as long as a claim holds them.
    daemon.drop_in_script(&Script {
        devices: 2,
        ..script(1)
    });
    let conditions = daemon.until_conditions(&["claim-devices-gone"]).await;
    let problem = conditions[0]
        .problem
        .as_ref()
        .expect("a condition has a problem");
    assert!(
        problem
            .message
            .contains("script/device-9 (claim default/device-9"),
        "{problem:?}"
    );
    let get = daemon.cli(&["get", "claims"]).await;
    get.done_with(&["script/device-9 (gone)"]);
    assert_eq!(daemon.unprepare(&pod("last")).await.len(), 1);
    daemon.until_conditions(&[]).await;
}

#[tokio::test]
async fn unstorable_version_serves_with_condition() {
    let daemon = Daemon::start().await;
    let dir = daemon.kept_drivers();
    std::fs::remove_dir(&dir).unwrap();
    std::fs::write(&dir, "in the way").unwrap();
    daemon.drop_in_script(&script(0));
    let digest = daemon.swap("v1", &script(0)).await;
    let conditions = daemon.until_conditions(&["driver-not-kept"]).await;
    assert_eq!(conditions[0].subject, FILE);
    daemon
        .prepared(request(&pod("one"), &[&claim("device-0")]))
        .await;
    std::fs::remove_file(&dir).unwrap();
    std::fs::create_dir(&dir).unwrap();
    daemon.cli(&["driver", "reload", FILE]).await.done();
    daemon.until_conditions(&[]).await;
    daemon.until_kept(&[&digest]).await;
}
