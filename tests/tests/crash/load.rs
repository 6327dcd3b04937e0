//! Kills and stops at any moment of work: what was answered holds, and the rest is in a state that is gone on with.

use std::time::{Duration, Instant};

use nodedock_proto::node::v1;
use nodedock_tests::Client;
use nodedock_tests::compose::pod;
use nodedock_tests::machine::tell;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::task::JoinSet;

use crate::Place;
use crate::driver::{Driver, Native, Wasm};
use crate::random::{explain, seed};
use crate::scene::{Known, Scene, request_of};

/// Pods that work at once; two and two share a claim.
const PODS: u64 = 8;
/// Calls of a pod until it rests: what it was answered last is then for the daemon to know.
const CALLS_MAX: u64 = 6;
/// Latest time of the first kill, in microseconds of the work.
const KILL_MAX_US: u64 = 40_000;
/// Bounds of the latest time of any kill.
const KILL_BOUNDS_US: (u64, u64) = (1_000, 2_000_000);

const ROUNDS: u64 = 120;
/// Fewer say too little, however long they take.
const ROUNDS_MIN: u64 = 40;
/// Time after which `ROUNDS_MIN` rounds are enough.
const BUDGET: Duration = Duration::from_secs(60);

fn name_of(number: u64) -> String {
    format!("pod-{number}")
}

/// Two of its own, and one with its neighbour.
fn claims_of(number: u64) -> [String; 3] {
    [2 * number, 2 * number + 1, 2 * PODS + number / 2].map(|device| format!("device-{device}"))
}

/// Calls at random until it rests or the connection breaks; gives what the pod knows then.
async fn work<D: Driver>(
    number: u64,
    mut known: Known,
    mut random: StdRng,
    mut client: Client,
) -> (String, Known) {
    let name = name_of(number);
    for _ in 0..random.random_range(0..CALLS_MAX) {
        let answered = match random.random() {
            true => prepare::<D>(number, &mut known, &mut client).await,
            false => unprepare(number, &mut known, &mut client).await,
        };
        if answered.is_err() {
            break;
        }
    }
    (name, known)
}

async fn prepare<D: Driver>(
    number: u64,
    known: &mut Known,
    client: &mut Client,
) -> Result<(), tonic::Status> {
    let before = match known {
        // It stays so, whether this is answered or not.
        Known::Prepared(answer) => Some(answer.clone()),
        _ => None,
    };
    if before.is_none() {
        *known = Known::Unknown;
    }
    let request = request_of::<D>(&name_of(number), &claims_of(number));
    let answer = client.prepare_pod(request).await?.into_inner();
    assert!(
        answer
            .claims
            .iter()
            .all(|claim| claim.outcome == "prepared"),
        "{answer:#?}"
    );
    assert!(
        before.is_none_or(|before| before == answer),
        "another answer: {answer:#?}"
    );
    *known = Known::Prepared(answer);
    Ok(())
}

async fn unprepare(
    number: u64,
    known: &mut Known,
    client: &mut Client,
) -> Result<(), tonic::Status> {
    if *known != Known::Gone {
        *known = Known::Unknown;
    }
    let request = v1::UnpreparePodRequest {
        pod: Some(pod(&name_of(number))),
    };
    let answer = client.unprepare_pod(request).await?.into_inner();
    assert!(
        answer.claims.iter().all(|claim| claim.problem.is_none()),
        "{answer:#?}"
    );
    *known = Known::Gone;
    Ok(())
}

/// Number of times that pods knew their claims when the daemon ended, and that they did not.
#[derive(Debug)]
struct Tally {
    known: u64,
    unknown: u64,
    /// Latest time of the next end, in microseconds of the work.
    latest_us: u64,
}

impl Tally {
    fn new() -> Self {
        Self {
            known: 0,
            unknown: 0,
            latest_us: KILL_MAX_US,
        }
    }

    /// Counts the pods of a round. How long a call takes depends on the machine and its load: the next end is later if most pods were
    /// interrupted, else earlier.
    fn count(&mut self, known: u64) {
        let unknown = PODS - known;
        self.known += known;
        self.unknown += unknown;
        let next = if known < unknown {
            self.latest_us * 5 / 4
        } else {
            self.latest_us * 4 / 5
        };
        self.latest_us = next.clamp(KILL_BOUNDS_US.0, KILL_BOUNDS_US.1);
    }
}

impl<D: Driver> Scene<D> {
    /// Lets the pods loose, and calls `stop` at a moment that chance decides.
    async fn interrupted(
        &mut self,
        random: &mut StdRng,
        tally: &mut Tally,
        stop: impl AsyncFnOnce(&mut Self),
    ) {
        let mut workers = JoinSet::new();
        for number in 0..PODS {
            let known = self.known.remove(&name_of(number)).unwrap_or(Known::Gone);
            workers.spawn(work::<D>(
                number,
                known,
                StdRng::from_rng(random),
                self.daemon.client(),
            ));
        }
        // Nothing is waited for: this is the moment.
        tokio::time::sleep(Duration::from_micros(
            random.random_range(0..tally.latest_us),
        ))
        .await;
        stop(self).await;
        let mut knowing = 0;
        while let Some(pod) = workers.join_next().await {
            let (name, known) = pod.expect("a pod was answered wrongly");
            if known != Known::Unknown {
                knowing += 1;
            }
            self.known.insert(name, known);
        }
        tally.count(knowing);
    }
}

async fn kill_at_any_moment<D: Driver>() {
    let seed = seed();
    let _place = Place(format!("with {} and {}", explain(seed), D::NAME));
    let (mut random, mut tally) = (StdRng::seed_from_u64(seed), Tally::new());
    let mut scene = Scene::<D>::start().await;
    let (started, mut rounds) = (Instant::now(), 0);
    while rounds < ROUNDS_MIN || (rounds < ROUNDS && started.elapsed() < BUDGET) {
        let _round = Place(format!("in round {rounds}"));
        scene
            .interrupted(&mut random, &mut tally, async |scene| {
                scene.daemon.kill9().await
            })
            .await;
        scene.restart().await;
        rounds += 1;
    }
    let (elapsed, restarts) = (started.elapsed(), scene.restart_times());
    tell(&format!(
        "{}: {rounds} kills under load in {elapsed:.0?}, {tally:?}; {restarts}",
        D::NAME
    ));
    assert!(
        tally.known > rounds && tally.unknown > rounds,
        "the kills come too early or too late: {tally:?}"
    );
    scene.clean().await;
}

async fn stop_under_load<D: Driver>() {
    let seed = seed();
    let _place = Place(format!("with {} and {}", explain(seed), D::NAME));
    let (mut random, mut tally) = (StdRng::seed_from_u64(seed), Tally::new());
    let mut scene = Scene::<D>::start().await;
    for _ in 0..5 {
        let stop = async |scene: &mut Scene<D>| {
            let status = scene.daemon.terminate().await;
            assert!(status.success(), "{status}");
        };
        scene.interrupted(&mut random, &mut tally, stop).await;
        assert!(
            !scene.daemon.log().contains("did not end in time"),
            "{}",
            scene.daemon.log()
        );
        // Each call was answered or never taken on: nothing is half done.
        let open = scene
            .daemon
            .records()
            .into_iter()
            .filter(|record| record.state.as_str() != "prepared");
        assert_eq!(open.collect::<Vec<_>>(), []);
        scene.restart().await;
    }
    scene.clean().await;
}

#[tokio::test]
async fn kill_loses_no_wasm_driver_state() {
    kill_at_any_moment::<Wasm>().await;
}

#[tokio::test]
async fn kill_loses_no_native_driver_state() {
    kill_at_any_moment::<Native>().await;
}

#[tokio::test]
async fn stopped_daemon_answers_accepted_calls() {
    tokio::join!(stop_under_load::<Wasm>(), stop_under_load::<Native>());
}
