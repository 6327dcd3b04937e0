//! Stories without errors.

use nodedock_tests::compose::pod;

use crate::kind::Kind;
use crate::scene::{Scene, Story};

pub(crate) async fn a_claim_is_prepared_once_and_unprepared_once<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    let first = scene.prepare(&["ok"]).await;
    assert_eq!(first.claims[0].outcome, "prepared", "{first:#?}");
    assert_eq!(first.containers[0].cdi_devices.len(), 1);
    assert_eq!(scene.prepare(&["ok"]).await, first);
    scene.expect_calls(&["prepare ok"]);
    scene.see(&[("ok", "prepared")]).await;

    scene.unprepare_to(&[("ok", "unprepared")]).await;
    scene.unprepare_to(&[]).await;
    assert_eq!(scene.daemon.unprepare(&pod("unknown")).await, []);
    scene.expect_calls(&["prepare ok", "unprepare ok"]);
    scene.clean().await;
    scene.end()
}

pub(crate) async fn the_claims_of_a_pod_are_one_call<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.prepare_to(&[("ok", "prepared"), ("ok-2", "prepared")]).await;
    scene.see(&[("ok", "prepared"), ("ok-2", "prepared")]).await;
    scene.unprepare_to(&[("ok", "unprepared"), ("ok-2", "unprepared")]).await;
    scene.expect_calls(&["prepare ok,ok-2", "unprepare ok,ok-2"]);
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_driver_that_is_not_there_leaves_nothing_behind<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.kind.leave(&scene.daemon).await;
    scene.prepare_to(&[("ok", "driver-unknown")]).await;
    scene.expect_calls(&[]);
    scene.clean().await;
    scene.end()
}
