//! Both kinds in one claim: what one refuses does not undo what the other did.

use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, pod, request};
use scripted::{Command, POOL, Script};
use serde_json::json;

use crate::kind::Kind;
use crate::scene::{POD, Scene, Story, answered};

/// The pod's claim, with a device of each driver for its only request: a plugin does not see requests.
fn shared<A: Kind, B: Kind>() -> v1::PreparePodRequest {
    let devices = [
        format!("{}/{POOL}/ok", A::DRIVER),
        format!("{}/{POOL}/ok", B::DRIVER),
    ];
    let mut claim = claim("ok", &[&devices[0], &devices[1]]);
    let allocation = claim.allocation.as_mut().expect("it is allocated");
    allocation
        .devices
        .iter_mut()
        .for_each(|device| device.request = "device-0".to_owned());
    request(&pod(POD), &[&claim])
}

async fn prepare<A: Kind, B: Kind>(scene: &mut Scene<A>, expected: &str) {
    let answer = scene.daemon.prepare(shared::<A, B>()).await;
    let claim = &answer.claims[0];
    let end = claim
        .problem
        .as_ref()
        .map_or(&claim.outcome, |problem| &problem.code);
    assert_eq!(end, expected, "{answer:#?}");
    let devices: usize = answer
        .containers
        .iter()
        .map(|container| container.cdi_devices.len())
        .sum();
    assert_eq!(devices, if expected == "prepared" { 2 } else { 0 });
    scene.tell("prepare", answered(&answer));
}

/// Checks the calls of each driver.
fn expect_calls<A: Kind, B: Kind>(
    scene: &mut Scene<A>,
    other: &mut B,
    one_was: &[&str],
    other_was: &[&str],
) {
    scene.expect_calls(one_was);
    let calls = other.calls(&scene.daemon);
    assert_eq!(calls, other_was, "{}", scene.daemon.log());
    scene.tell("calls of the other", json!(calls));
}

async fn run_script<A: Kind, B: Kind>(scene: &Scene<A>, other: &mut B, command: Command) {
    let script = Script {
        prepare: [("ok".to_owned(), command)].into(),
        ..Script::default()
    };
    other.run_script(&scene.daemon, script).await;
}

async fn start<A: Kind, B: Kind>() -> (Scene<A>, B) {
    let mut scene = Scene::<A>::start().await;
    let other = scene.join::<B>().await;
    // Drivers are asked side by side, and their entries are in the order of their names.
    scene.without_timelines();
    (scene, other)
}

pub(crate) async fn what_one_driver_refuses_for_now_keeps_the_others_result<A: Kind, B: Kind>()
-> Story {
    let (mut scene, mut other) = start::<A, B>().await;
    run_script(&scene, &mut other, Command::RefuseTransient).await;
    prepare::<A, B>(&mut scene, "driver-refused").await;
    scene.see(&[("ok", "preparing")]).await;
    run_script(&scene, &mut other, Command::Ok).await;
    prepare::<A, B>(&mut scene, "prepared").await;
    scene.see(&[("ok", "prepared")]).await;
    scene.unprepare_to(&[("ok", "unprepared")]).await;
    expect_calls(
        &mut scene,
        &mut other,
        &["prepare ok", "unprepare ok"],
        &["prepare ok", "prepare ok", "unprepare ok"],
    );
    scene.clean().await;
    scene.end()
}

pub(crate) async fn what_one_driver_refuses_for_good_is_not_rolled_back_under_the_other<
    A: Kind,
    B: Kind,
>() -> Story {
    let (mut scene, mut other) = start::<A, B>().await;
    run_script(&scene, &mut other, Command::RefusePermanent).await;
    prepare::<A, B>(&mut scene, "driver-refused").await;
    scene.see(&[("ok", "preparing")]).await;
    scene.unprepare_to(&[("ok", "unprepared")]).await;
    expect_calls(
        &mut scene,
        &mut other,
        &["prepare ok", "unprepare ok"],
        &["prepare ok", "unprepare ok"],
    );
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_crash_while_one_driver_prepares_asks_both_again<A: Kind, B: Kind>() -> Story {
    let (mut scene, mut other) = start::<A, B>().await;
    run_script(&scene, &mut other, Command::Hold).await;
    let (mut client, asked) = (scene.daemon.client(), shared::<A, B>());
    let asked = tokio::spawn(async move { client.prepare_pod(asked).await });
    scene.until_asked("prepare ok", 1).await;
    other.until_asked(&scene.daemon, "prepare ok", 1).await;
    scene.crash(&[("ok", "preparing")]).await;
    asked
        .await
        .expect("asking does not panic")
        .expect_err("the daemon is dead");
    scene.daemon.until_serving(B::DRIVER).await;
    run_script(&scene, &mut other, Command::Ok).await;
    prepare::<A, B>(&mut scene, "prepared").await;
    scene.see(&[("ok", "prepared")]).await;
    scene.unprepare_to(&[("ok", "unprepared")]).await;
    let twice = ["prepare ok", "prepare ok", "unprepare ok"];
    expect_calls(&mut scene, &mut other, &twice, &twice);
    scene.clean().await;
    scene.end()
}
