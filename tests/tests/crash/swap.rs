//! Death while a driver's file is replaced, and while a claim that its new version refuses goes back to the one that prepared it.

use std::collections::BTreeSet;
use std::time::Instant;

use nodedock_base::failpoint::Point;
use nodedock_proto::node::v1;
use nodedock_tests::Daemon;
use nodedock_tests::compose::{pod, request};
use nodedock_tests::drivers::digest;
use nodedock_tests::machine::tell;
use nodedock_tests::versions::{FILE, NAME, claim, file, script, with_unprepare};
use nodedock_tests::wait::until_path;
use scripted::{Command, Script};
use tonic::Status;

use crate::scene::assert_killed;
use crate::{Place, every_pass};

/// Points that only versions of a driver pass that take over from one another.
pub(crate) const POINTS: [Point; 6] = [
    Point::KeptStaged,
    Point::KeptWritten,
    Point::DriverSwitched,
    Point::PredecessorCall,
    Point::PredecessorAnswered,
    Point::KeptForgotten,
];

const CLAIM: &str = "device-0";

#[derive(Debug, Clone, Copy, PartialEq)]
enum Step {
    /// The old version has a claim, and the new one's file is put in its place.
    Replace,
    /// The new version gets its own config, in which it refuses the claim.
    Configure,
    Unprepare,
    /// The old version's code is needed no more.
    Forget,
}

const STEPS: [Step; 4] = [
    Step::Replace,
    Step::Configure,
    Step::Unprepare,
    Step::Forget,
];

/// Takes a step; the error says that the daemon died.
async fn take(daemon: &Daemon, step: Step) -> Result<(), Status> {
    let new = digest(&file("new"));
    match step {
        Step::Replace => {
            daemon.drop_in(FILE, file("new"));
            let serves = |driver: &v1::Driver| driver.digest == new && driver.state == "serving";
            daemon.try_until_driver(NAME, serves).await.map(drop)
        }
        Step::Configure => {
            daemon.drop_in_script(&with_unprepare(
                refusing(),
                &[CLAIM],
                Command::RefusePermanent,
            ));
            let has_config = |driver: &v1::Driver| {
                driver.state == "serving" && driver.devices == refusing_devices()
            };
            daemon.try_until_driver(NAME, has_config).await.map(drop)
        }
        Step::Unprepare => {
            let request = v1::UnpreparePodRequest {
                pod: Some(pod(CLAIM)),
            };
            let answer = daemon.client().unprepare_pod(request).await?.into_inner();
            assert!(
                answer.claims.iter().all(|claim| claim.problem.is_none()),
                "{answer:#?}"
            );
            Ok(())
        }
        Step::Forget => {
            let dir = daemon.kept_drivers();
            tokio::select! {
                // The question after it finds a daemon that died.
                () = daemon.death() => {}
                () = until_path(&dir, "one version is kept", || only_one(daemon)) => {}
            }
            daemon
                .client()
                .get_node(v1::GetNodeRequest {})
                .await
                .map(drop)
        }
    }
}

/// A file and what is beside it.
fn only_one(daemon: &Daemon) -> Result<(), String> {
    let entries = std::fs::read_dir(daemon.kept_drivers())
        .expect("the directory is there")
        .count();
    if entries == 2 {
        Ok(())
    } else {
        Err(format!("{entries} files"))
    }
}

/// One device fewer, by which the config is known to be in use.
fn refusing() -> Script {
    Script {
        devices: 63,
        ..script(2)
    }
}

fn refusing_devices() -> u32 {
    // Each of the words has two devices, and the generation is one.
    63 + 2 * u32::try_from(scripted::Command::ALL.len()).expect("words are few") + 1
}

/// The old version serves and has a claim; no other is kept.
async fn begin(daemon: &mut Daemon) {
    let old = digest(&file("old"));
    daemon.kill9().await;
    daemon.install_scripted(&script(1));
    daemon.drop_in(FILE, file("old"));
    daemon.run().await;
    daemon
        .until_driver(FILE, |driver| {
            driver.digest == old && driver.state == "serving"
        })
        .await;
    daemon.until_kept(&[&old]).await;
    daemon
        .prepared(request(&pod(CLAIM), &[&claim(CLAIM)]))
        .await;
    daemon.kill9().await;
}

/// Plays the steps, and returns whether the daemon died.
async fn play(daemon: &mut Daemon, point: Point, pass: u32) -> bool {
    let _place = Place(format!("at {point:?}, pass {pass}"));
    begin(daemon).await;
    let before = unprepared(daemon);
    daemon.arm(point, pass);
    let mut died = false;
    if let Err(status) = daemon.try_run().await {
        assert_killed(status);
        died = true;
        again(daemon).await;
    }
    for step in STEPS {
        while let Err(status) = take(daemon, step).await {
            assert!(!died, "{step:?}: {status}\n{}", daemon.log());
            assert_killed(daemon.ended().await);
            died = true;
            again(daemon).await;
        }
    }
    daemon.holds_nothing(&BTreeSet::new()).await;
    assert!(unprepared(daemon) > before, "{}", daemon.log());
    daemon.disarm();
    died
}

fn unprepared(daemon: &Daemon) -> usize {
    daemon
        .log()
        .matches("claim unprepared by the version that prepared it")
        .count()
}

async fn again(daemon: &mut Daemon) {
    daemon.disarm();
    daemon.run().await;
    daemon.until_serving(FILE).await;
}

#[tokio::test]
async fn crash_during_swap_loses_no_version() {
    let mut daemon = Daemon::start().await;
    let (started, mut deaths) = (Instant::now(), 0);
    for point in POINTS {
        deaths += every_pass(point, async |pass| play(&mut daemon, point, pass).await).await;
    }
    tell(&format!(
        "swaps: {deaths} deaths at {} points in {:.0?}",
        POINTS.len(),
        started.elapsed()
    ));
}
