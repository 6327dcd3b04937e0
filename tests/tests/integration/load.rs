//! Kills and stops in the middle of work: what was answered holds, and the rest is in a state that is gone on with.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_proto::node::v1;
use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::{Client, Daemon};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

const WORKERS: usize = 12;
const ROUNDS: u64 = 15;
const CONFIG: &str = "pools: [{name: gpus, count: 12}]\n";

/// What an agent knows of its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    Prepared,
    Gone,
    /// A call was under way when the daemon died.
    Unknown,
}

fn pod_of(worker: usize) -> v1::ObjectRef {
    pod(&format!("pod-{worker}"))
}

fn request_of(worker: usize) -> v1::PreparePodRequest {
    let claim = gpu_claim(&format!("claim-{worker}"), &[&format!("gpus/gpu-{worker}")]);
    request(&pod_of(worker), &[&claim])
}

/// Prepares and unprepares until the connection breaks, and tells of each answer.
async fn work(worker: usize, mut client: Client, answers: mpsc::UnboundedSender<(usize, Known)>) {
    let tell = |known| {
        // The test has seen enough: the daemon is being killed.
        let _ = answers.send((worker, known));
    };
    loop {
        tell(Known::Unknown);
        let Ok(answer) = client.prepare_pod(request_of(worker)).await else { return };
        let claim = &answer.get_ref().claims[0];
        assert_eq!(claim.outcome, "prepared", "{claim:?}");
        tell(Known::Prepared);
        tell(Known::Unknown);
        let request = v1::UnpreparePodRequest { pod: Some(pod_of(worker)) };
        let Ok(answer) = client.unprepare_pod(request).await else { return };
        assert!(answer.get_ref().claims.iter().all(|claim| claim.outcome == "unprepared"), "{answer:?}");
        tell(Known::Gone);
    }
}

/// A number from 0 below `bound` that looks random and is the same in each run.
fn scatter(seed: u64, bound: u64) -> u64 {
    let mixed = (seed + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) % bound
}

/// Lets the workers loose, calls `stop` after some answers, and gives what the workers know at the end.
async fn interrupted(
    daemon: &mut Daemon,
    after: u64,
    stop: impl AsyncFnOnce(&mut Daemon),
) -> BTreeMap<usize, Known> {
    let (sender, mut answers) = mpsc::unbounded_channel();
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        workers.spawn(work(worker, daemon.client(), sender.clone()));
    }
    drop(sender);
    let mut known = BTreeMap::new();
    let mut count = 0;
    while count < after {
        let (worker, now) = answers.recv().await.expect("workers go on while the daemon lives");
        count += u64::from(now != Known::Unknown);
        known.insert(worker, now);
    }
    stop(daemon).await;
    while let Some(worker) = workers.join_next().await {
        worker.unwrap();
    }
    while let Ok((worker, now)) = answers.try_recv() {
        known.insert(worker, now);
    }
    known
}

async fn check(daemon: &Daemon, known: &BTreeMap<usize, Known>) {
    let states: BTreeMap<String, String> =
        daemon.claims().await.into_iter().map(|claim| (claim.id.unwrap().uid, claim.state)).collect();
    let files: BTreeSet<_> = daemon.cdi_files().iter().map(|file| file.claim_uid().to_owned()).collect();
    for state in states.values() {
        assert!(["prepared", "preparing", "unpreparing"].contains(&state.as_str()), "{states:?}");
    }
    for (worker, known) in known {
        let uid = format!("claim-claim-{worker}");
        match known {
            Known::Prepared => {
                assert_eq!(states.get(&uid).map(String::as_str), Some("prepared"), "{uid} was answered");
                assert!(files.contains(&uid), "{uid} was answered, and its file is not there");
                let devices = daemon.pod_devices(&pod_of(*worker)).await.unwrap();
                assert_eq!(devices.containers[0].cdi_devices.len(), 1, "{devices:?}");
            }
            Known::Gone => {
                assert_eq!(states.get(&uid), None, "{uid} was given up");
                assert!(!files.contains(&uid), "{uid} was given up, and its file is there");
            }
            Known::Unknown => {}
        }
    }
}

async fn give_everything_up(daemon: &Daemon) {
    for worker in 0..WORKERS {
        daemon.unprepare(&pod_of(worker)).await;
    }
    daemon.until_claims("no claim is left", <[_]>::is_empty).await;
    assert_eq!((daemon.pods().await, daemon.cdi_files()), (vec![], vec![]));
    let dump = daemon.cli(&["checkpoint", "dump", "-o", "json"]).await.json();
    assert_eq!(dump["claims"], serde_json::json!([]));
}

#[tokio::test]
async fn a_daemon_killed_at_any_moment_knows_what_it_answered_and_loses_nothing() {
    let mut daemon = Daemon::start().await;
    daemon.install_gpus(CONFIG);
    for round in 0..ROUNDS {
        daemon.until_serving(MOCK_GPU_FILE).await;
        let known =
            interrupted(&mut daemon, 1 + scatter(round, 60), async |daemon| daemon.kill9().await).await;
        daemon.run().await;
        check(&daemon, &known).await;
    }
    daemon.until_serving(MOCK_GPU_FILE).await;
    give_everything_up(&daemon).await;
}

#[tokio::test]
async fn a_daemon_that_is_stopped_under_load_answers_what_it_took_on() {
    let mut daemon = Daemon::start().await;
    daemon.install_gpus(CONFIG);
    for round in 0..3 {
        daemon.until_serving(MOCK_GPU_FILE).await;
        let stop = async |daemon: &mut Daemon| {
            let status = daemon.terminate().await;
            assert!(status.success(), "{status}");
        };
        let known = interrupted(&mut daemon, 20 + scatter(round, 20), stop).await;
        assert!(!daemon.log().contains("did not end in time"), "{}", daemon.log());
        daemon.run().await;
        check(&daemon, &known).await;
        // Each call was answered or never taken on: nothing is half done.
        let open: Vec<_> =
            daemon.claims().await.into_iter().filter(|claim| claim.state != "prepared").collect();
        assert!(open.is_empty(), "{open:?}");
    }
    daemon.until_serving(MOCK_GPU_FILE).await;
    give_everything_up(&daemon).await;
}
