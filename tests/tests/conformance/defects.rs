//! Answers that break a rule: the claim is refused, those that came with it are not, and a driver that is mended takes it.

use scripted::Command;

use crate::kind::Kind;
use crate::scene::{Scene, Story};

/// A claim with a defective answer beside one with a good one.
async fn refused_alone<K: Kind>(name: &str, code: &str) -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.prepare_to(&[("ok", "prepared"), (name, code)]).await;
    scene.see(&[("ok", "prepared"), (name, "preparing")]).await;
    scene.prepare_to(&[("ok", "prepared"), (name, code)]).await;
    scene.set_prepare(name, Command::Ok).await;
    scene.prepare_to(&[("ok", "prepared"), (name, "prepared")]).await;
    let mut both = ["ok", name];
    both.sort_unstable();
    let (both, alone) = (format!("prepare {}", both.join(",")), format!("prepare {name}"));
    scene.expect_calls(&[&both, &alone, &alone]);
    scene.unprepare_to(&[("ok", "unprepared"), (name, "unprepared")]).await;
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_claim_that_is_left_out_is_refused_alone<K: Kind>() -> Story {
    refused_alone::<K>("skip", "claim-skipped").await
}

pub(crate) async fn a_claim_that_is_answered_twice_is_refused_alone<K: Kind>() -> Story {
    refused_alone::<K>("twice", "claim-answered-twice").await
}

pub(crate) async fn a_claim_whose_answer_is_for_another_claim_is_refused_alone<K: Kind>() -> Story {
    refused_alone::<K>("wrong-claim", "claim-skipped").await
}

pub(crate) async fn an_answer_beyond_the_bounds_refuses_its_claim_alone<K: Kind>() -> Story {
    refused_alone::<K>("huge", "driver-answer-not-valid").await
}

pub(crate) async fn an_answer_for_an_unknown_claim_is_dropped<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.prepare_to(&[("ok", "prepared"), ("stranger", "prepared")]).await;
    assert!(scene.daemon.log().contains("answered for claims that were not requested"));
    scene.see(&[("ok", "prepared"), ("stranger", "prepared")]).await;
    scene.unprepare_to(&[("ok", "unprepared"), ("stranger", "unprepared")]).await;
    scene.expect_calls(&["prepare ok,stranger", "unprepare ok,stranger"]);
    scene.clean().await;
    scene.end()
}

async fn kept_alone<K: Kind>(command: Command, code: &str) -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.without_timelines();
    scene.set_unprepare("ok", command).await;
    scene.prepare_to(&[("ok", "prepared"), ("ok-2", "prepared")]).await;
    scene.unprepare_to(&[("ok", code), ("ok-2", "unprepared")]).await;
    scene.see(&[("ok", "unpreparing")]).await;
    scene.set_unprepare("ok", Command::Ok).await;
    scene.daemon.until_claims("the driver was mended", <[_]>::is_empty).await;
    scene.clean().await;
    scene.end()
}

pub(crate) async fn an_unprepare_that_is_left_out_keeps_the_claim<K: Kind>() -> Story {
    kept_alone::<K>(Command::Skip, "claim-skipped").await
}

pub(crate) async fn an_unprepare_that_is_answered_twice_keeps_the_claim<K: Kind>() -> Story {
    kept_alone::<K>(Command::Twice, "claim-answered-twice").await
}
