//! Cost of a misbehaving driver for another one: prepares of a good driver, one at a time, alone and while many calls of a bad one are in
//! flight. Once with the quarantine in effect, and once with each quarantine ended by hand as soon as it is reported.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nodedock_proto::node::v1;
use nodedock_tests::drivers::{Form, wasm};
use nodedock_tests::{Client, Daemon, compose};
use tokio::sync::Notify;
use tokio::task::JoinSet;

use crate::table::{Table, Times, shown};
use crate::{CdiOnTmpfs, Size, claims};

const BAD_NAME: &str = "scripted.nodedock.dev";
/// Calls of the bad driver under way at once.
const BAD_AT_ONCE: usize = 16;
const ALONE: &str = "prepare, alone";
/// A bad request that was held back is sent again after so long.
const BAD_PAUSE: Duration = Duration::from_millis(5);

/// Actions of the bad driver in every prepare.
const WORDS: [(&str, &str); 4] = [
    ("spin", "computes"),
    ("grow", "allocates"),
    ("flood", "logs"),
    ("die", "traps"),
];

pub(crate) async fn run(size: Size, table: &mut Table) {
    let alone = scene(size, table, None, 0.0).await;
    for (word, does) in WORDS {
        for (quarantine, how) in [(true, "with quarantine"), (false, "without quarantine")] {
            let bad = Bad { word, quarantine };
            let name = format!("prepare, another driver {does}, {how}");
            scene(size, table, Some((name, bad)), alone).await;
        }
    }
}

#[derive(Clone, Copy)]
struct Bad {
    word: &'static str,
    quarantine: bool,
}

/// One daemon, one row. The 99th percentile of all its rounds, in microseconds.
async fn scene(size: Size, table: &mut Table, bad: Option<(String, Bad)>, alone: f64) -> f64 {
    let cdi = CdiOnTmpfs::new();
    let daemon = claims::daemon(&cdi).await;
    let stop = Arc::<AtomicBool>::default();
    let mut running = JoinSet::new();
    if let Some((_, bad)) = &bad {
        install(&daemon, bad.word).await;
        let answered = Arc::<Notify>::default();
        for n in 0..BAD_AT_ONCE {
            let (stop, answered) = (Arc::clone(&stop), Arc::clone(&answered));
            running.spawn(misbehave(daemon.client(), *bad, n, stop, answered));
        }
        // From here on the daemon knows what the driver is like.
        answered.notified().await;
    }
    let mut all = Times::default();
    let mut rounds = Vec::new();
    for _ in 0..size.rounds {
        let times = round(&daemon, size.single).await;
        rounds.push(times.at(0.99));
        all.merge(&times);
    }
    stop.store(true, Ordering::Relaxed);
    let asked: usize = running.join_all().await.into_iter().sum();
    let ratio = if bad.is_some() {
        format!("{:.2} × alone, ", all.at(0.99) / alone)
    } else {
        String::new()
    };
    let spread = spread(&rounds);
    let note = format!(
        "p99 {ratio}{spread} by round; peak {:.0} MiB; {asked} bad requests",
        daemon.memory_mib("VmHWM")
    );
    let name = bad.map_or_else(|| ALONE.to_owned(), |(name, _)| name);
    table.times(&name, &all, ALONE, &note);
    all.at(0.99)
}

async fn install(daemon: &Daemon, word: &str) {
    let bad: Vec<_> = (0..BAD_AT_ONCE)
        .map(|n| format!("\"device-{n}\": {word}"))
        .collect();
    daemon.drop_in(
        "scripted.grant.yaml",
        "apiVersion: nodedock.dev/v1\nkind: DriverGrant\nenv: [SCRIPTED_*]\n\
         sysfsWrite: [{glob: class/scripted/value, pattern: \"[0-9]\"}]\n",
    );
    daemon.drop_in(
        "scripted.config.yaml",
        format!("devices: {BAD_AT_ONCE}\nprepare: {{{}}}\n", bad.join(", ")),
    );
    daemon.drop_in("scripted.wasm", wasm("scripted", Form::Core));
    daemon.until_serving("scripted.wasm").await;
}

/// Asks the bad driver again and again, each time as for a new pod. How often it was asked.
async fn misbehave(
    mut client: Client,
    bad: Bad,
    n: usize,
    stop: Arc<AtomicBool>,
    answered: Arc<Notify>,
) -> usize {
    let device = format!("device-{n}");
    let claim = compose::claim(&device, &[&format!("{BAD_NAME}/script/{device}")]);
    let request = compose::request(&compose::pod(&device), &[&claim]);
    let mut asked = 0;
    while !stop.load(Ordering::Relaxed) {
        let answer = client
            .prepare_pod(request.clone())
            .await
            .expect("prepare")
            .into_inner();
        asked += 1;
        answered.notify_one();
        let problem = answer
            .claims
            .into_iter()
            .find_map(|claim| claim.problem)
            .unwrap_or_default();
        if problem.code == "driver-quarantined" {
            if bad.quarantine {
                tokio::time::sleep(BAD_PAUSE).await;
            } else {
                let name = BAD_NAME.to_owned();
                // Another may have ended it.
                drop(client.resume_driver(v1::ResumeDriverRequest { name }).await);
            }
        }
        client
            .unprepare_pod(v1::UnpreparePodRequest {
                pod: request.pod.clone(),
            })
            .await
            .expect("unprepare");
    }
    asked
}

async fn round(daemon: &Daemon, count: usize) -> Times {
    let (mut client, mut times, mut unprepares) =
        (daemon.client(), Times::default(), Times::default());
    for n in 0..count {
        claims::come_and_go(
            &mut client,
            claims::measured(n),
            &mut times,
            &mut unprepares,
        )
        .await;
    }
    times
}

/// The least and the most.
fn spread(values: &[f64]) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let most = values.iter().copied().fold(0.0, f64::max);
    format!("{} to {}", shown(least, "µs"), shown(most, "µs"))
}
