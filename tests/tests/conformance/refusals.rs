//! Refusals that a driver may report.

use scripted::Command;

use crate::kind::Kind;
use crate::scene::{Scene, Story};

pub(crate) async fn a_claim_that_is_refused_for_good_is_rolled_back_with_its_driver<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.prepare_to(&[("refuse-permanent", "driver-refused")]).await;
    scene.expect_calls(&["prepare refuse-permanent", "unprepare refuse-permanent"]);
    scene.see(&[]).await;
    scene.unprepare_to(&[]).await;
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_claim_that_is_refused_for_good_is_asked_for_again_when_its_driver_has_changed<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.prepare_to(&[("refuse-permanent", "driver-refused")]).await;
    scene.set_prepare("refuse-permanent", Command::Ok).await;
    scene.prepare_to(&[("refuse-permanent", "prepared")]).await;
    scene.see(&[("refuse-permanent", "prepared")]).await;
    scene.expect_calls(&["prepare refuse-permanent", "unprepare refuse-permanent", "prepare refuse-permanent"]);
    scene.unprepare_to(&[("refuse-permanent", "unprepared")]).await;
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_claim_that_is_refused_for_now_is_kept_until_the_driver_takes_it<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.prepare_to(&[("refuse-transient", "driver-refused")]).await;
    scene.see(&[("refuse-transient", "preparing")]).await;
    scene.prepare_to(&[("refuse-transient", "driver-refused")]).await;
    scene.set_prepare("refuse-transient", Command::Ok).await;
    scene.prepare_to(&[("refuse-transient", "prepared")]).await;
    scene.see(&[("refuse-transient", "prepared")]).await;
    scene.expect_calls(&["prepare refuse-transient"; 3]);
    scene.unprepare_to(&[("refuse-transient", "unprepared")]).await;
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_claim_that_was_never_prepared_is_unprepared_by_its_driver<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.prepare_to(&[("refuse-transient", "driver-refused")]).await;
    scene.unprepare_to(&[("refuse-transient", "unprepared")]).await;
    scene.expect_calls(&["prepare refuse-transient", "unprepare refuse-transient"]);
    scene.clean().await;
    scene.end()
}

pub(crate) async fn the_other_claim_of_the_pod_is_prepared_and_not_asked_for_again<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.prepare_to(&[("ok", "prepared"), ("refuse-transient", "driver-refused")]).await;
    scene.see(&[("ok", "prepared"), ("refuse-transient", "preparing")]).await;
    scene.set_prepare("refuse-transient", Command::Ok).await;
    scene.prepare_to(&[("ok", "prepared"), ("refuse-transient", "prepared")]).await;
    scene.expect_calls(&["prepare ok,refuse-transient", "prepare refuse-transient"]);
    scene.unprepare_to(&[("ok", "unprepared"), ("refuse-transient", "unprepared")]).await;
    scene.clean().await;
    scene.end()
}

pub(crate) async fn an_unprepare_that_the_driver_refuses_is_retried_without_a_request<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.without_timelines();
    scene.set_unprepare("ok", Command::RefuseTransient).await;
    scene.prepare_to(&[("ok", "prepared")]).await;
    scene.unprepare_to(&[("ok", "driver-refused")]).await;
    scene.see(&[("ok", "unpreparing")]).await;
    scene.set_unprepare("ok", Command::Ok).await;
    scene.daemon.until_claims("the driver let go", <[_]>::is_empty).await;
    scene.clean().await;
    scene.end()
}
