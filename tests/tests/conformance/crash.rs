//! Crashes of the daemon. It is killed and the driver is not: the driver may have completed calls whose answers no caller received.

use nodedock_proto::node::v1::ClaimStatus;
use nodedock_tests::compose::pod;
use scripted::Command;

use crate::kind::Kind;
use crate::scene::{POD, Scene, Story};

pub(crate) async fn a_crash_while_the_driver_prepares<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    let asked = scene.ask(&["hold"]);
    scene.until_asked("prepare hold", 1).await;
    scene.crash(&[("hold", "preparing")]).await;
    asked.await.expect("asking does not panic").expect_err("the daemon is dead");
    scene.see(&[("hold", "preparing")]).await;
    scene.release().await;
    scene.prepare_to(&[("hold", "prepared")]).await;
    scene.see(&[("hold", "prepared"), ("release", "prepared")]).await;
    scene.unprepare_to(&[("hold", "unprepared")]).await;
    scene.expect_calls(&["prepare hold", "prepare release", "prepare hold", "unprepare hold"]);
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_crash_while_the_driver_prepares_and_then_an_unprepare<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    let asked = scene.ask(&["hold"]);
    scene.until_asked("prepare hold", 1).await;
    scene.crash(&[("hold", "preparing")]).await;
    asked.await.expect("asking does not panic").expect_err("the daemon is dead");
    scene.unprepare_to(&[("hold", "unprepared")]).await;
    scene.expect_calls(&["prepare hold", "unprepare hold"]);
    scene.clean().await;
    scene.end()
}

/// Either state is right, since the result may or may not be durable: the claim can continue from both.
pub(crate) async fn a_crash_as_the_driver_answers<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    let asked = scene.ask(&["hold"]);
    scene.until_asked("prepare hold", 1).await;
    scene.release().await;
    scene.daemon.kill9().await;
    let answer = asked.await.expect("asking does not panic");
    scene.daemon.run().await;
    scene.daemon.until_serving(K::DRIVER).await;
    let claims = scene.daemon.claims().await;
    let hold = claims.iter().find(|claim| claim.id.as_ref().is_some_and(|id| id.name == "hold"));
    let state = hold.map(|claim| claim.state.as_str()).expect("the intent was durable");
    match answer {
        Ok(_) => assert_eq!(state, "prepared", "what was answered is durable"),
        Err(_) => assert!(["preparing", "prepared"].contains(&state), "{claims:#?}"),
    }
    scene.prepare_to(&[("hold", "prepared")]).await;
    scene.unprepare_to(&[("hold", "unprepared")]).await;
    assert_eq!(scene.calls().last().map(String::as_str), Some("unprepare hold"));
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_crash_after_the_answer<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    let before = scene.prepare(&["ok", "ok-2"]).await;
    scene.crash(&[("ok", "prepared"), ("ok-2", "prepared")]).await;
    assert_eq!(scene.prepare(&["ok", "ok-2"]).await, before);
    scene.see(&[("ok", "prepared"), ("ok-2", "prepared")]).await;
    scene.unprepare_to(&[("ok", "unprepared"), ("ok-2", "unprepared")]).await;
    scene.expect_calls(&["prepare ok,ok-2", "unprepare ok,ok-2"]);
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_crash_after_a_refusal<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.prepare_to(&[("refuse-transient", "driver-refused")]).await;
    scene.crash(&[("refuse-transient", "preparing")]).await;
    scene.see(&[("refuse-transient", "preparing")]).await;
    scene.set_prepare("refuse-transient", Command::Ok).await;
    scene.prepare_to(&[("refuse-transient", "prepared")]).await;
    scene.unprepare_to(&[("refuse-transient", "unprepared")]).await;
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_crash_during_an_unprepare<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.set_unprepare("ok", Command::Hold).await;
    scene.prepare_to(&[("ok", "prepared")]).await;
    let asked = scene.ask_unprepare();
    scene.until_asked("unprepare ok", 1).await;
    scene.crash(&[("ok", "unpreparing")]).await;
    asked.await.expect("asking does not panic").expect_err("the daemon is dead");
    // Without a request: the driver is called as soon as it serves.
    scene.until_asked("unprepare ok", 2).await;
    scene.see(&[("ok", "unpreparing")]).await;
    scene.release().await;
    let only_one = |claims: &[ClaimStatus]| claims.len() == 1;
    scene.daemon.until_claims("only the claim that ended the hold is left", only_one).await;
    scene.expect_calls(&["prepare ok", "unprepare ok", "unprepare ok", "prepare release"]);
    assert_eq!(scene.daemon.unprepare(&pod(POD)).await, []);
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_crash_while_the_driver_is_gone<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    let before = scene.prepare(&["ok", "ok-2"]).await;
    scene.kind.leave(&scene.daemon).await;
    scene.daemon.crash().await;
    assert_eq!(scene.prepare(&["ok", "ok-2"]).await, before, "what is prepared needs no driver");
    scene.unprepare_to(&[("ok", "driver-unknown"), ("ok-2", "driver-unknown")]).await;
    scene.daemon.crash().await;
    scene.see(&[("ok", "unpreparing"), ("ok-2", "unpreparing")]).await;
    scene.kind.come(&scene.daemon).await;
    scene.daemon.until_claims("the driver is back", <[_]>::is_empty).await;
    scene.expect_calls(&["prepare ok,ok-2", "unprepare ok", "unprepare ok-2"]);
    scene.clean().await;
    scene.end()
}
