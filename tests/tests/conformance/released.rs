//! Claims that an operator releases.

use nodedock_tests::Options;
use scripted::Command;
use serde_json::{Value, json};

use crate::kind::Kind;
use crate::scene::{Scene, Story};

const RELEASE: [&str; 3] = ["release", "claim", "ok"];
const RELEASE_YES: [&str; 4] = ["release", "claim", "ok", "--yes"];

/// Returns the checkpoint's record of the only claim that was released.
async fn released<K: Kind>(scene: &Scene<K>) -> Value {
    let mut dump = scene.daemon.cli(&["checkpoint", "dump", "-o", "json"]).await.json();
    assert_eq!(dump["released"].as_array().map(Vec::len), Some(1), "{dump}");
    dump["released"][0].take()
}

pub(crate) async fn a_claim_of_a_driver_that_is_gone_is_released_and_does_not_come_back_with_it<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start().await;
    scene.prepare_to(&[("ok", "prepared")]).await;
    scene.daemon.cli(&RELEASE_YES).await.failed_with(1, &["default/one", "nodedock unprepare"]);
    scene.kind.leave(&scene.daemon).await;
    scene.unprepare_to(&[("ok", "driver-unknown")]).await;
    scene.daemon.cli(&["explain", "claim", "ok"]).await.done_with(&["is unpreparing since", "nodedock release claim ok", "1 failed attempt"]);

    scene.daemon.cli(&RELEASE).await.failed_with(1, &["will not be told", "--yes", K::DRIVER]);
    scene.see(&[("ok", "unpreparing")]).await;
    scene.daemon.cli(&RELEASE_YES).await.done_with(&["not told", "script/ok"]);
    scene.see(&[]).await;
    assert_eq!((scene.daemon.pods().await, scene.daemon.cdi_files()), (vec![], vec![]));
    assert!(scene.daemon.log().contains("claim released by force"));

    scene.daemon.crash().await;
    let entry = released(&scene).await;
    assert_eq!(entry["by"]["uid"], json!(rustix::process::getuid().as_raw()));
    assert!(entry["by"]["pid"].is_i64() && entry["at_ms"].is_u64(), "{entry}");
    assert_eq!(entry["untold"][K::DRIVER]["devices"], json!(["script/ok"]));
    scene.daemon.cli(&["explain", "claim", "ok"]).await.done_with(&["was released on", "did not unprepare it", "script/ok", "history:", K::DRIVER]);

    scene.kind.come(&scene.daemon).await;
    scene.see(&[]).await;
    scene.prepare_to(&[("ok", "prepared")]).await;
    scene.expect_calls(&["prepare ok", "prepare ok"]);
    scene.unprepare_to(&[("ok", "unprepared")]).await;
    scene.clean().await;
    scene.end()
}

pub(crate) async fn a_crash_in_the_middle_of_a_release_leaves_the_claim<K: Kind>() -> Story {
    let mut scene = Scene::<K>::start_with(Options::default().env("NODEDOCK_LOG", "debug")).await;
    scene.without_timelines();
    scene.set_unprepare("ok", Command::RefuseAnHour).await;
    scene.prepare_to(&[("ok", "prepared")]).await;
    scene.unprepare_to(&[("ok", "driver-refused")]).await;
    scene.set_unprepare("ok", Command::Hold).await;
    let mut releasing = scene.daemon.command().args(RELEASE_YES).spawn().expect("start the command");
    // It is in the call, or waits for the one by which the daemon itself tries again.
    scene.daemon.until_log("ReleaseClaim").await;
    scene.until_asked("unprepare ok", 2).await;
    scene.crash(&[("ok", "unpreparing")]).await;
    assert!(!releasing.wait().await.expect("a child can be waited for").success());
    let dump = scene.daemon.cli(&["checkpoint", "dump", "-o", "json"]).await.json();
    assert_eq!(dump["released"], json!([]), "it is not said before it is done");
    scene.release().await;
    let only_one = |claims: &[nodedock_proto::node::v1::ClaimStatus]| claims.len() == 1;
    scene.daemon.until_claims("the driver let go", only_one).await;
    scene.clean().await;
    scene.end()
}
