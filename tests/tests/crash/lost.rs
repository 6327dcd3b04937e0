//! Death while a lost checkpoint is made up for.

use nodedock_base::failpoint::Point;
use nodedock_tests::compose::pod;

use crate::Place;
use crate::driver::{Wasm, serves};
use crate::scene::{Known, Scene, assert_killed, request_of};

/// Points that a start with a damaged checkpoint passes.
const POINTS: [Point; 4] = [
    Point::CheckpointOpened,
    Point::CheckpointCommit,
    Point::CheckpointCommitted,
    Point::Recovered,
];

#[tokio::test]
async fn crash_before_checkpoint_recovery_loses_nothing() {
    let mut scene = Scene::<Wasm>::start().await;
    for point in POINTS {
        let _place = Place(format!("at {point:?}"));
        let request = request_of::<Wasm>("one", &["device-0", "device-1"]);
        let answer = scene.daemon.prepared(request.clone()).await;
        let files = scene.daemon.cdi_files();
        scene.daemon.kill9().await;
        std::fs::write(scene.daemon.checkpoint(), "not a database").unwrap();
        scene.daemon.arm(point, 1);
        assert_killed(
            scene
                .daemon
                .try_run()
                .await
                .expect_err("it dies before it is ready"),
        );
        scene.daemon.disarm();
        scene.daemon.run().await;
        serves::<Wasm>(&scene.daemon).await;
        let claims = scene.daemon.claims().await;
        assert!(
            claims.iter().all(|claim| claim.pods == [pod("one")]),
            "{claims:#?}"
        );
        assert_eq!(
            (claims.len(), scene.daemon.cdi_files()),
            (2, files),
            "{}",
            scene.daemon.log()
        );
        // A pod that comes back gets what it had.
        assert_eq!(scene.daemon.prepared(request).await, answer);
        scene
            .known
            .insert("one".to_owned(), Known::Prepared(answer));
        scene.check().await;
        scene.clean().await;
    }
}
