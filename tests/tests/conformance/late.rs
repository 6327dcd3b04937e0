//! Drivers that take their time.

use nodedock_proto::node::v1::ClaimStatus;
use nodedock_tests::Options;
use scripted::Command;

use crate::kind::Kind;
use crate::scene::{Scene, Story};

/// A daemon that gives drivers a few seconds.
async fn impatient<K: Kind>() -> Scene<K> {
    Scene::start_with(Options::default().config("claims: {callDeadlineMs: 4000}\n")).await
}

pub(crate) async fn a_slow_driver_is_waited_for_and_delays_no_other<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    let asked = scene.ask(&["hold"]);
    scene.until_asked("prepare hold", 1).await;
    scene.see(&[("hold", "preparing")]).await;
    scene.release().await;
    let answer = scene.answered(asked).await;
    assert_eq!(answer.claims[0].outcome, "prepared", "{answer:#?}");
    scene.see(&[("hold", "prepared"), ("release", "prepared")]).await;
    scene.unprepare_to(&[("hold", "unprepared")]).await;
    scene.expect_calls(&["prepare hold", "prepare release", "unprepare hold"]);
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_call_past_its_deadline_is_retried_and_its_late_answer_is_not_taken<
    K: Kind,
>() -> Story {
    let mut scene = impatient::<K>().await;
    scene.prepare_to(&[("hold", "driver-deadline")]).await;
    scene.see(&[("hold", "preparing")]).await;
    scene.release().await;
    scene.see(&[("hold", "preparing"), ("release", "prepared")]).await;
    scene.prepare_to(&[("hold", "prepared")]).await;
    scene.unprepare_to(&[("hold", "unprepared")]).await;
    scene.expect_calls(&["prepare hold", "prepare release", "prepare hold", "unprepare hold"]);
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_slow_unprepare_is_waited_for<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.set_unprepare("ok", Command::Hold).await;
    scene.prepare_to(&[("ok", "prepared")]).await;
    let asked = scene.ask_unprepare();
    scene.until_asked("unprepare ok", 1).await;
    scene.see(&[("ok", "unpreparing")]).await;
    scene.release().await;
    let answer = asked.await.expect("asking does not panic").expect("an answer");
    assert_eq!(answer.claims[0].outcome, "unprepared", "{answer:#?}");
    scene.clean().await;
    scene.end()
}

pub(crate) async fn an_unprepare_past_its_deadline_is_retried<K: Kind>() -> Story {
    let mut scene = impatient::<K>().await;
    scene.without_timelines();
    scene.set_unprepare("ok", Command::Hold).await;
    scene.prepare_to(&[("ok", "prepared")]).await;
    scene.unprepare_to(&[("ok", "driver-deadline")]).await;
    scene.see(&[("ok", "unpreparing")]).await;
    scene.release().await;
    let only_one = |claims: &[ClaimStatus]| claims.len() == 1;
    scene.daemon.until_claims("only the claim that ended the hold is left", only_one).await;
    scene.clean().await;
    scene.end()
}
