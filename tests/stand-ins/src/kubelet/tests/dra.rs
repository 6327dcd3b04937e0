//! Calls to drivers.

use std::time::Duration;

use super::plugin::{Behaviour, Plugin, kubelet, quick};
use crate::kubelet::{ClaimRef, KubeletOptions, PreparedDevice, Release};

const DRIVER: &str = "gpu.example.com";

fn claims(uids: &[&str]) -> Vec<ClaimRef> {
    uids.iter().map(|uid| ClaimRef::new("default", &format!("claim-{uid}"), uid)).collect()
}

#[tokio::test]
async fn claims_are_prepared_in_the_first_version_that_a_driver_names() {
    let older = vec!["v1beta1.DRAPlugin", "v1.DRAPlugin"];
    let newer = Behaviour::of(DRIVER).versions;
    for (versions, service, share) in [(newer, "v1", Some("share".to_owned())), (older, "v1beta1", None)] {
        let (dir, kubelet) = kubelet(quick()).await;
        let plugin = Plugin::start(dir.path(), "", Behaviour { versions, ..Behaviour::of(DRIVER) });
        kubelet.registered(DRIVER).await;
        let prepared = kubelet.prepare(DRIVER, &claims(&["u-1"])).await.unwrap();
        let device = PreparedDevice {
            requests: vec!["gpu".to_owned()],
            pool: "p".to_owned(),
            device: "d-0".to_owned(),
            cdi: vec!["example.com/gpu=u-1".to_owned()],
            share,
        };
        assert_eq!(prepared.into_iter().collect::<Vec<_>>(), [("u-1".to_owned(), vec![device])]);
        kubelet.unprepare(DRIVER, &claims(&["u-1"])).await.unwrap();
        let uids = vec!["u-1".to_owned()];
        assert_eq!(plugin.calls(), [(service, "prepare", uids.clone()), (service, "unprepare", uids)]);
    }
}

#[tokio::test]
async fn an_answer_must_be_for_the_claims_that_were_asked_for() {
    let options = KubeletOptions { call_timeout: Duration::from_millis(300), ..quick() };
    let (dir, kubelet) = kubelet(options).await;
    let plugin = Plugin::start(dir.path(), "", Behaviour::of(DRIVER));
    kubelet.registered(DRIVER).await;
    let two = claims(&["u-1", "u-2"]);
    plugin.change(|behaviour| behaviour.skips = 1);
    let why = kubelet.prepare(DRIVER, &two).await.unwrap_err();
    assert_eq!(why, "NodePrepareResources skipped 1 ResourceClaims");
    let why = kubelet.unprepare(DRIVER, &two).await.unwrap_err();
    assert_eq!(why, "NodeUnprepareResources skipped 1 ResourceClaims");
    plugin.change(|behaviour| (behaviour.skips, behaviour.makes_up) = (0, vec!["u-9".to_owned()]));
    let why = kubelet.prepare(DRIVER, &two).await.unwrap_err();
    assert_eq!(why, "NodePrepareResources returned result for unknown claim UID u-9");
    plugin.change(|behaviour| {
        behaviour.makes_up.clear();
        behaviour.claim_error = "no such device".to_owned();
    });
    let why = kubelet.prepare(DRIVER, &two).await.unwrap_err();
    assert_eq!(why, "NodePrepareResources failed for ResourceClaim claim-u-1: no such device");
    plugin.change(|behaviour| {
        behaviour.claim_error.clear();
        behaviour.prepare_takes = Duration::from_secs(3600);
    });
    let why = kubelet.prepare(DRIVER, &two).await.unwrap_err();
    assert!(why.starts_with("NodePrepareResources: DeadlineExceeded"), "{why}");
    let why = kubelet.prepare("none", &two).await.unwrap_err();
    assert_eq!(why, "DRA driver none is not registered");
}

#[tokio::test]
async fn the_newest_instance_is_called_and_the_older_one_when_it_is_gone() {
    let (dir, kubelet) = kubelet(quick()).await;
    let old = Plugin::start(dir.path(), "-old", Behaviour::of(DRIVER));
    kubelet.registered(DRIVER).await;
    let new = Plugin::start(dir.path(), "-new", Behaviour::of(DRIVER));
    kubelet.connected(DRIVER, 2).await;
    kubelet.prepare(DRIVER, &claims(&["u-1"])).await.unwrap();
    assert_eq!((old.calls().len(), new.calls().len()), (0, 1));
    new.remove();
    kubelet.wait_until("the old one", |view| view.endpoints(DRIVER).len() == 1).await;
    kubelet.unprepare(DRIVER, &claims(&["u-1"])).await.unwrap();
    assert_eq!(old.calls(), [("v1", "unprepare", vec!["u-1".to_owned()])]);
}

#[tokio::test]
async fn a_lost_connection_is_made_again_and_the_driver_stays_registered() {
    let (dir, kubelet) = kubelet(quick()).await;
    let plugin = Plugin::start(dir.path(), "", Behaviour::of(DRIVER));
    kubelet.registered(DRIVER).await;
    let (registration, endpoint) = (plugin.registration.clone(), plugin.endpoint.clone());
    // Its files stay.
    drop(plugin);
    kubelet.wait_until("the loss", |view| view.count("connection lost", DRIVER) == 1).await;
    kubelet.wait_until("still one", |view| view.endpoints(DRIVER) == [endpoint.clone()]).await;
    let elsewhere = tempfile::tempdir().unwrap();
    std::fs::create_dir(elsewhere.path().join("plugins_registry")).unwrap();
    let again = Plugin::start(elsewhere.path(), "", Behaviour::of(DRIVER));
    // Under the endpoint of the one that died.
    std::fs::rename(&again.endpoint, &endpoint).unwrap();
    kubelet.registered(DRIVER).await;
    kubelet.prepare(DRIVER, &claims(&["u-1"])).await.unwrap();
    assert_eq!((again.calls().len(), registration.exists()), (1, true));
    assert_eq!(kubelet.calls().iter().filter(|call| call.what == "GetInfo").count(), 1);
}

#[tokio::test]
async fn health_is_followed_in_the_version_of_the_release() {
    for (release, message) in [(Release::V1_36, "v1alpha1"), (Release::V1_37, "v1")] {
        let (dir, kubelet) = kubelet(KubeletOptions { release, ..quick() }).await;
        let plugin = Plugin::start(dir.path(), "", Behaviour::of(DRIVER));
        kubelet.wait_until("health", |view| view.health(DRIVER).len() == 2).await;
        let health = kubelet.health(DRIVER);
        let of = |name: &str| &health[&("p".to_owned(), name.to_owned())];
        assert_eq!((of("d-0").healthy, of("d-1").healthy), (Some(true), Some(false)));
        assert_eq!(of("d-0").message, message);
        plugin.remove();
        kubelet.wait_until("no health", |view| view.health(DRIVER).is_empty()).await;
    }
}

#[tokio::test]
async fn a_newer_kubelet_asks_no_health_of_a_driver_that_offers_none() {
    let (dir, kubelet) = kubelet(KubeletOptions { release: Release::V1_37, ..quick() }).await;
    let versions = vec!["v1.DRAPlugin"];
    let _plugin = Plugin::start(dir.path(), "", Behaviour { versions, ..Behaviour::of(DRIVER) });
    kubelet.registered(DRIVER).await;
    kubelet.prepare(DRIVER, &claims(&["u-1"])).await.unwrap();
    assert!(kubelet.health(DRIVER).is_empty());
    assert!(!kubelet.calls().iter().any(|call| call.what == "NodeWatchResources"));
}
