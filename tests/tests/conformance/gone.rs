//! Drivers that go: in the middle of a call, or between two calls.

use scripted::{Command, Script};

use crate::kind::Kind;
use crate::scene::{Scene, Story};

/// The error of a call to a driver that died differs: a trap is a defect, and a broken connection is temporary.
pub(crate) async fn a_driver_that_dies_in_a_prepare_leaves_all_claims_of_the_call_preparing<K: Kind>() -> Story
{
    let mut scene = Scene::<K>::start().await;
    scene.any_problem_will_do();
    let answer = scene.prepare(&["die", "ok"]).await;
    for claim in &answer.claims {
        let problem = claim.problem.as_ref().expect("it is refused");
        assert!(["driver-trapped", "driver-unavailable"].contains(&problem.code.as_str()), "{problem:?}");
    }
    scene.see(&[("die", "preparing"), ("ok", "preparing")]).await;
    scene.kind.revive(&scene.daemon).await;
    scene.set_prepare("die", Command::Ok).await;
    scene.prepare_to(&[("die", "prepared"), ("ok", "prepared")]).await;
    scene.see(&[("die", "prepared"), ("ok", "prepared")]).await;
    scene.expect_calls(&["prepare die,ok"; 2]);
    scene.unprepare_to(&[("die", "unprepared"), ("ok", "unprepared")]).await;
    scene.clean().await;
    scene.end()
}

pub(crate) async fn an_unprepare_in_which_the_driver_dies_is_retried<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.any_problem_will_do();
    scene.without_timelines();
    scene.set_unprepare("ok", Command::Die).await;
    scene.prepare_to(&[("ok", "prepared")]).await;
    let answer = scene.daemon.unprepare(&nodedock_tests::compose::pod(crate::scene::POD)).await;
    assert_eq!(answer, [("ok".to_owned(), "refused".to_owned())]);
    scene.see(&[("ok", "unpreparing")]).await;
    scene.kind.run_script(&scene.daemon, Script::default()).await;
    scene.kind.revive(&scene.daemon).await;
    scene.daemon.until_claims("the driver is back", <[_]>::is_empty).await;
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_driver_that_leaves_during_a_call_still_answers_it<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    let asked = scene.ask(&["hold"]);
    scene.until_asked("prepare hold", 1).await;
    scene.kind.leave(&scene.daemon).await;
    scene.look(&[("hold", "preparing")]).await;
    // The held call has to end.
    scene.kind.come(&scene.daemon).await;
    scene.release().await;
    let answer = scene.answered(asked).await;
    assert_eq!(answer.claims[0].outcome, "prepared", "{answer:#?}");
    scene.see(&[("hold", "prepared"), ("release", "prepared")]).await;
    scene.unprepare_to(&[("hold", "unprepared")]).await;
    scene.expect_calls(&["prepare hold", "prepare release", "unprepare hold"]);
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_claim_of_an_absent_driver_is_unprepared_when_it_is_back<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    let before = scene.prepare(&["ok"]).await;
    scene.kind.leave(&scene.daemon).await;
    assert_eq!(scene.prepare(&["ok"]).await, before, "what is prepared needs no driver");
    scene.unprepare_to(&[("ok", "driver-unknown")]).await;
    scene.see(&[("ok", "unpreparing")]).await;
    scene.kind.come(&scene.daemon).await;
    scene.daemon.until_claims("the driver is back", <[_]>::is_empty).await;
    scene.expect_calls(&["prepare ok", "unprepare ok"]);
    scene.clean().await;
    scene.end()
}
