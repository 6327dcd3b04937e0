//! A driver's file that is replaced under a steady stream of claims: the longest time without an answer, beside the same stream
//! without a swap, and the time until the new version serves.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nodedock_proto::node::v1;
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, digest, version, wasm};
use nodedock_tests::{Client, Daemon};
use tokio::task::JoinSet;

use crate::claims::{daemon, measured};
use crate::table::{Table, Times, millis};
use crate::{CdiOnTmpfs, Size};

/// Pods that come and go at once: few, so that each answer counts.
const LANES: usize = 4;
/// The least that a stream without a swap is watched; else as long as the swap before took.
const QUIET: Duration = Duration::from_millis(500);

pub(crate) async fn run(size: Size, table: &mut Table) {
    let cdi = CdiOnTmpfs::new();
    let daemon = daemon(&cdi).await;
    let files: Vec<_> = (0..size.swaps)
        .map(|n| version(wasm(MOCK_GPU, Form::Core), &format!("bench-{n}")))
        .collect();
    let (mut cold, mut cached) = (Times::default(), Times::default());
    let (mut with, mut without) = (Vec::new(), Vec::new());
    let mut window = QUIET;
    // A version that was compiled before is taken from the cache when it returns.
    for times in [&mut cold, &mut cached] {
        for file in &files {
            let (quiet, ()) = stream(&daemon, tokio::time::sleep(window)).await;
            let (gap, took) = stream(&daemon, swap(&daemon, file)).await;
            without.push(millis(quiet));
            with.push(millis(gap));
            times.add(took);
            window = took.max(QUIET);
        }
    }
    table.figures(
        "swap: longest time without an answer, no swap",
        without,
        "ms",
        "",
        "4 pods come and go",
    );
    let against = "swap: longest time without an answer, no swap";
    let note = "the file is replaced meanwhile";
    table.figures(
        "swap: longest time without an answer",
        with,
        "ms",
        against,
        note,
    );
    table.times(
        "swap: from rename to serving, cold",
        &cold,
        "",
        "under the stream",
    );
    table.times(
        "swap: from rename to serving, cached",
        &cached,
        "swap: from rename to serving, cold",
        "",
    );
}

/// Replaces the file; how long it took until the new version served.
async fn swap(daemon: &Daemon, file: &[u8]) -> Duration {
    let wanted = digest(file);
    let started = Instant::now();
    daemon.drop_in(MOCK_GPU_FILE, file);
    daemon
        .until_driver(MOCK_GPU_FILE, |driver| driver.digest == wanted)
        .await;
    started.elapsed()
}

/// Returns the longest time between two answers to prepares while `meanwhile` runs.
async fn stream<T>(daemon: &Daemon, meanwhile: impl Future<Output = T>) -> (Duration, T) {
    let (stop, mut lanes) = (Arc::<AtomicBool>::default(), JoinSet::new());
    (0..LANES).for_each(|lane| drop(lanes.spawn(come_and_go(lane, daemon.client(), stop.clone()))));
    let started = Instant::now();
    let outcome = meanwhile.await;
    let ended = Instant::now();
    stop.store(true, Ordering::Release);
    let mut answers: Vec<_> = lanes.join_all().await.into_iter().flatten().collect();
    answers.push(started);
    answers.sort_unstable();
    let until_end = answers.partition_point(|at| *at < ended) + 1;
    let gaps = answers
        .windows(2)
        .take(until_end)
        .map(|pair| pair[1] - pair[0]);
    (gaps.max().unwrap_or_else(|| ended - started), outcome)
}

/// Prepares and unprepares until stopped, and returns the time of each prepare's answer.
async fn come_and_go(lane: usize, mut client: Client, stop: Arc<AtomicBool>) -> Vec<Instant> {
    let mut answers = Vec::new();
    while !stop.load(Ordering::Acquire) {
        let request = measured(lane);
        let pod = request.pod.clone();
        let answer = client
            .prepare_pod(request)
            .await
            .expect("prepare")
            .into_inner();
        assert_eq!(answer.claims[0].outcome, "prepared", "{answer:?}");
        answers.push(Instant::now());
        client
            .unprepare_pod(v1::UnpreparePodRequest { pod })
            .await
            .expect("unprepare");
    }
    answers
}
