//! Durable prepare and unprepare through the node API, with few and many live claims, one at a time and 64 at once.

use std::time::{Duration, Instant};

use nodedock_proto::node::v1;
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::metrics::Exposition;
use nodedock_tests::{Client, Daemon, Options, Root, compose};

use crate::accounting::{READS, WRITTEN, accounted, grown, switches};
use crate::table::{Table, Times};
use crate::{CdiOnTmpfs, Size};

/// Devices for the requests that are measured, and for the claims that live beside them.
const MEASURED: usize = 2048;
const BESIDE: usize = 2048;
/// Requests under way at once.
pub(crate) const AT_ONCE: usize = 64;
/// Pages that a commit of one claim writes, as `strace` shows them.
const PAGES_OF_A_COMMIT: usize = 6;

pub(crate) async fn run(size: Size, table: &mut Table) {
    disk(size, table);
    for live in size.live {
        let cdi = CdiOnTmpfs::new();
        let daemon = daemon(&cdi).await;
        fill(&daemon, live).await;
        repeated(&daemon, size, live, table).await;
        one_at_a_time(&daemon, size, live, table).await;
        at_once(&daemon, size, live, table).await;
    }
    recorded(size, table).await;
}

/// Prepares of a driver that is recorded, in turns with those of a daemon that records nothing, so that both meet the same disk.
async fn recorded(size: Size, table: &mut Table) {
    let (plain_cdi, recorded_cdi) = (CdiOnTmpfs::new(), CdiOnTmpfs::new());
    let config = format!("recording: {{drivers: [{MOCK_GPU_NAME}]}}\n");
    let (plain, recorded) = (
        daemon(&plain_cdi).await,
        daemon_with(recorded_cdi.options().config(&config)).await,
    );
    let (mut without, mut with, mut unprepares) =
        (Times::default(), Times::default(), Times::default());
    let (mut of_plain, mut of_recorded) = (plain.client(), recorded.client());
    for n in 0..size.single {
        come_and_go(&mut of_plain, measured(n), &mut without, &mut unprepares).await;
        come_and_go(&mut of_recorded, measured(n), &mut with, &mut unprepares).await;
    }
    let row = "prepare, beside a daemon that records";
    table.times(row, &without, "", "in turns with the next row");
    table.times("prepare, recorded", &with, row, "goal: 1.05");
}

/// Measures the disk under the checkpoint alone: the sync of as many pages as a commit writes.
fn disk(size: Size, table: &mut Table) {
    use std::os::unix::fs::FileExt;
    let root = Root::new();
    let file = std::fs::File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(root.path().join("disk"));
    let file = file.expect("a new file");
    file.write_all_at(&vec![1; 1 << 20], 0)
        .and_then(|()| file.sync_all())
        .expect("a file of 1 MiB");
    for pages in [1, PAGES_OF_A_COMMIT] {
        let mut times = Times::default();
        for n in 0..size.single {
            let started = Instant::now();
            for page in 0..pages {
                let at = (n * 7 + page * 13) % 256 * 4096;
                file.write_all_at(&[2; 4096], at as u64)
                    .expect("write a page");
            }
            file.sync_data().expect("sync");
            times.add(started.elapsed());
        }
        table.times(
            &disk_row(pages),
            &times,
            &disk_row(1),
            "the same disk, no daemon",
        );
    }
}

fn disk_row(pages: usize) -> String {
    format!("fdatasync of {pages} pages")
}

/// A daemon with simulated GPUs enough for every row.
pub(crate) async fn daemon(cdi: &CdiOnTmpfs) -> Daemon {
    daemon_with(cdi.options()).await
}

async fn daemon_with(options: Options) -> Daemon {
    let root = Root::new();
    root.install_gpus(&format!(
        "pools:\n- {{name: gpus, count: {MEASURED}}}\n- {{name: beside, count: {BESIDE}, firstIndex: {MEASURED}, shared: true}}\n"
    ));
    let daemon = Daemon::start_on(root, options).await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon
}

/// Prepares `live` claims that stay, several on each shared device.
pub(crate) async fn fill(daemon: &Daemon, live: usize) {
    let requests = (0..live).map(|n| {
        request(
            &format!("live-{n}"),
            &format!("beside/gpu-{}", MEASURED + n % BESIDE),
        )
    });
    let (_, failed) = storm(daemon.client(), requests.collect()).await;
    assert_eq!(failed, 0, "claims beside the measured ones");
}

fn request(name: &str, device: &str) -> v1::PreparePodRequest {
    compose::request(&compose::pod(name), &[&compose::gpu_claim(name, &[device])])
}

pub(crate) fn measured(n: usize) -> v1::PreparePodRequest {
    request(&format!("pod-{n}"), &format!("gpus/gpu-{}", n % MEASURED))
}

/// Prepares the claim of a pod, and unprepares it.
pub(crate) async fn come_and_go(
    client: &mut Client,
    request: v1::PreparePodRequest,
    prepares: &mut Times,
    unprepares: &mut Times,
) {
    let pod = request.pod.clone();
    prepared(client, request, prepares).await;
    unprepares
        .time(client.unprepare_pod(v1::UnpreparePodRequest { pod }))
        .await
        .expect("unprepare");
}

async fn prepared(client: &mut Client, request: v1::PreparePodRequest, times: &mut Times) {
    let answer = times
        .time(client.prepare_pod(request))
        .await
        .expect("prepare")
        .into_inner();
    assert_eq!(answer.claims[0].outcome, "prepared", "{answer:?}");
}

async fn one_at_a_time(daemon: &Daemon, size: Size, live: usize, table: &mut Table) {
    let (mut prepares, mut unprepares) = (Times::default(), Times::default());
    let mut client = daemon.client();
    let before = daemon.metrics().await;
    let written = accounted(daemon.pid(), WRITTEN);
    let switched = switches(daemon.pid());
    for n in 0..size.single {
        come_and_go(&mut client, measured(n), &mut prepares, &mut unprepares).await;
    }
    let switched = grown(&switched, &switches(daemon.pid()))
        .map(|count| format!("{:.1} switches", count as f64 / size.single as f64));
    let written = accounted_since(daemon, WRITTEN, written, size.single)
        .map(|bytes| format!("{:.0} KiB written", bytes / 1024.0));
    let first = size.live[0];
    let counted: Vec<_> = written.into_iter().chain(switched).collect();
    let note = match counted.join(", ") {
        counts if counts.is_empty() => counts,
        counts => format!("for both: {counts}"),
    };
    let against = if live == first {
        disk_row(PAGES_OF_A_COMMIT)
    } else {
        prepare_row(first)
    };
    table.times(&prepare_row(live), &prepares, &against, &note);
    table.times(
        &format!("unprepare, {live} live"),
        &unprepares,
        &format!("unprepare, {first} live"),
        "",
    );
    if size.spans {
        spans(&before, &daemon.metrics().await, live, table);
    }
}

/// Breaks down the time of the requests between two reads of the daemon's metrics: means, since histograms have no medians.
fn spans(before: &Exposition, after: &Exposition, live: usize, table: &mut Table) {
    let operation = |name| {
        (
            "dra_operations_duration_seconds",
            vec![("is_error", "false"), ("operation_name", name)],
        )
    };
    let call = |name| {
        let labels = vec![("driver", MOCK_GPU_NAME), ("operation", name)];
        ("nodedock_driver_call_duration_seconds", labels)
    };
    let spans = [
        (
            "prepare, in the daemon",
            operation("PrepareResources"),
            "without gRPC",
        ),
        ("prepare, the driver's call", call("prepare"), "of that"),
        (
            "unprepare, in the daemon",
            operation("UnprepareResources"),
            "without gRPC",
        ),
        ("unprepare, the driver's call", call("unprepare"), "of that"),
        (
            "a commit",
            ("nodedock_checkpoint_commit_duration_seconds", Vec::new()),
            "of prepares and unprepares",
        ),
    ];
    for (what, (family, labels), note) in spans {
        let grown = |suffix: &str| {
            let value = |of: &Exposition| {
                of.value(&format!("{family}{suffix}"), &labels)
                    .unwrap_or_default()
            };
            value(after) - value(before)
        };
        let mean = grown("_sum") / grown("_count") * 1e6;
        let note = format!("{note}; mean of {}", grown("_count"));
        table.figures(
            &format!("{what}, {live} live"),
            vec![mean],
            "µs",
            &prepare_row(live),
            &note,
        );
    }
}

/// A figure of the kernel's accounting for each of so many calls since a look. `None`: there is no accounting.
fn accounted_since(
    daemon: &Daemon,
    figure: &str,
    before: Option<u64>,
    calls: usize,
) -> Option<f64> {
    let after = accounted(daemon.pid(), figure)?;
    Some((after - before?) as f64 / calls as f64)
}

fn prepare_row(live: usize) -> String {
    format!("prepare, {live} live")
}

/// A claim that is prepared: nothing is called and nothing written, its CDI file and those of others are looked at.
async fn repeated(daemon: &Daemon, size: Size, live: usize, table: &mut Table) {
    let mut times = Times::default();
    let mut client = daemon.client();
    let request = measured(0);
    let pod = request.pod.clone();
    client.prepare_pod(request.clone()).await.expect("prepare");
    let before = accounted(daemon.pid(), READS);
    for _ in 0..size.single {
        prepared(&mut client, request.clone(), &mut times).await;
    }
    let reads = accounted_since(daemon, READS, before, size.single);
    let row = |live: usize| format!("prepare of a prepared claim, {live} live");
    let note = reads.map_or(String::new(), |reads| {
        format!("{reads:.1} read calls each, sockets and files")
    });
    table.times(&row(live), &times, &row(size.live[0]), &note);
    client
        .unprepare_pod(v1::UnpreparePodRequest { pod })
        .await
        .expect("unprepare");
}

async fn at_once(daemon: &Daemon, size: Size, live: usize, table: &mut Table) {
    let (mut prepares, mut unprepares) = (Times::default(), Times::default());
    let (mut prepared, mut gone) = (Duration::ZERO, Duration::ZERO);
    for _ in 0..size.rounds {
        let requests: Vec<_> = (0..size.burst).map(measured).collect();
        let pods: Vec<_> = requests
            .iter()
            .filter_map(|request| request.pod.clone())
            .collect();
        let started = Instant::now();
        let (times, failed) = storm(daemon.client(), requests).await;
        prepared += started.elapsed();
        assert_eq!(failed, 0, "prepares that failed");
        prepares.merge(&times);
        let started = Instant::now();
        unprepares.merge(&release(daemon.client(), pods).await);
        gone += started.elapsed();
    }
    let rate = |took: Duration| {
        format!(
            "{:.0} claims/s",
            (size.burst * size.rounds) as f64 / took.as_secs_f64()
        )
    };
    let first = size.live[0];
    let row = |what: &str, live: usize| format!("{what}, 64 at once, {live} live");
    table.times(
        &row("prepare", live),
        &prepares,
        &row("prepare", first),
        &rate(prepared),
    );
    table.times(
        &row("unprepare", live),
        &unprepares,
        &row("unprepare", first),
        &rate(gone),
    );
}

/// Sends the requests, 64 under way at once; the time of each, and how many were refused.
pub(crate) async fn storm(client: Client, requests: Vec<v1::PreparePodRequest>) -> (Times, usize) {
    let outcomes = side_by_side(requests, move |request| {
        let mut client = client.clone();
        async move {
            let answer = client
                .prepare_pod(request)
                .await
                .expect("prepare")
                .into_inner();
            let no_claim = answer
                .claims
                .iter()
                .any(|claim| claim.outcome != "prepared");
            usize::from(
                no_claim
                    || answer
                        .resources
                        .iter()
                        .any(|resource| resource.outcome != "allocated"),
            )
        }
    });
    outcomes.await
}

async fn release(client: Client, pods: Vec<v1::ObjectRef>) -> Times {
    let outcomes = side_by_side(pods, move |pod| {
        let mut client = client.clone();
        async move {
            client
                .unprepare_pod(v1::UnpreparePodRequest { pod: Some(pod) })
                .await
                .expect("unprepare");
            0
        }
    });
    outcomes.await.0
}

/// Does work for each item, [`AT_ONCE`] under way at once; the time of each, and the sum of what the work returns.
pub(crate) async fn side_by_side<T: Send + 'static, W: Future<Output = usize> + Send>(
    items: Vec<T>,
    work: impl Fn(T) -> W + Clone + Send + 'static,
) -> (Times, usize) {
    let mut lanes: Vec<Vec<T>> = (0..AT_ONCE).map(|_| Vec::new()).collect();
    for (n, item) in items.into_iter().enumerate() {
        lanes[n % AT_ONCE].push(item);
    }
    let mut running = tokio::task::JoinSet::new();
    for lane in lanes {
        let work = work.clone();
        running.spawn(async move {
            let (mut times, mut failed) = (Times::default(), 0);
            for item in lane {
                let started = Instant::now();
                failed += work(item).await;
                times.add(started.elapsed());
            }
            (times, failed)
        });
    }
    let (mut times, mut failed) = (Times::default(), 0);
    for (lane, lane_failed) in running.join_all().await {
        times.merge(&lane);
        failed += lane_failed;
    }
    (times, failed)
}
