//! Waiting time of a pod while the daemon is updated, crashes or restarts: a kubelet prepares and unprepares ten claims at a time, and
//! repeats a failed call at once. A real kubelet repeats it after a minute or more, so the calls that failed count more than the wait.

use std::cell::Cell;
use std::time::{Duration, Instant};

use futures::future::join_all;
use nodedock_stand_ins::kubelet::{ClaimRef, Driver, Kubelet, KubeletOptions};
use nodedock_tests::cluster::{Cluster, NAMESPACE};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::{Daemon, Options};

use crate::kubelet::unhurried;
use crate::table::{Table, millis};
use crate::{CdiOnTmpfs, Size};

const QUIET: &str = "seam: longest wait, nothing happens";
/// Claims at a time, and calls of each before and after something happens.
const CLAIMS: usize = 10;
const CALLS: usize = 5;

pub(crate) async fn run(size: Size, table: &mut Table) {
    let with_parent = |options: Options| options.flag("--supervise");
    let mut seam = Seam::new(|options| with_parent(options.arg("--instance-uid", "first"))).await;
    let [
        mut quiet,
        mut updates,
        mut crashes,
        mut restarts,
        mut of_service,
    ] = [const { Vec::new() }; 5];
    for number in 0..size.starts {
        quiet.push(seam.round(async |_| ()).await);
        let update = async |seam: &mut Seam| {
            let newer = seam
                .options
                .clone()
                .arg("--instance-uid", format!("newer-{number}"));
            let newer = seam.daemon.beside(with_parent(newer)).await;
            let mut older = std::mem::replace(&mut seam.daemon, newer);
            assert!(older.terminate().await.success());
        };
        updates.push(seam.round(update).await);
        crashes.push(
            seam.round(async |seam| seam.daemon.crash_supervised().await)
                .await,
        );
        // Its parent is new too: the next crash is the first of a series.
        restarts.push(seam.round(async |seam| seam.daemon.restart().await).await);
    }
    drop(seam);
    let mut seam = Seam::new(Options::with_store).await;
    for _ in 0..size.starts {
        of_service.push(seam.round(async |seam| seam.daemon.restart().await).await);
    }
    row(table, QUIET, "", &quiet);
    row(
        table,
        "seam: longest wait, a newer instance takes over",
        QUIET,
        &updates,
    );
    row(
        table,
        "seam: longest wait, the service restarts (systemd)",
        QUIET,
        &of_service,
    );
    row(
        table,
        "seam: longest wait, a crash under the parent process",
        QUIET,
        &crashes,
    );
    row(
        table,
        "seam: longest wait, the container restarts",
        QUIET,
        &restarts,
    );
}

struct Seam {
    daemon: Daemon,
    options: Options,
    driver: Driver,
    claims: Vec<[ClaimRef; 1]>,
    _kubelet: Kubelet,
    _cluster: Cluster,
    _cdi: CdiOnTmpfs,
}

impl Seam {
    async fn new(change: impl FnOnce(Options) -> Options) -> Self {
        let (cluster, cdi) = (Cluster::start().await, CdiOnTmpfs::new());
        let options = cdi.with(unhurried(&cluster));
        let daemon = cluster.daemon_with(change(options.clone())).await;
        daemon.install_gpus(&format!("pools: [{{name: gpus, count: {CLAIMS}}}]\n"));
        daemon.until_serving(MOCK_GPU_FILE).await;
        let kubelet = Kubelet::start(&daemon.kubelet(), KubeletOptions::default()).await;
        kubelet.registered(MOCK_GPU_NAME).await;
        let claim = |number: usize| {
            let name = format!("seam-{number}");
            let uid = cluster.gpu_claim(&name, &[&format!("gpus/gpu-{number}")]);
            [ClaimRef::new(NAMESPACE, &name, &uid)]
        };
        let (driver, claims) = (
            kubelet.driver(MOCK_GPU_NAME),
            (0..CLAIMS).map(claim).collect(),
        );
        Self {
            daemon,
            options,
            driver,
            claims,
            _kubelet: kubelet,
            _cluster: cluster,
            _cdi: cdi,
        }
    }

    /// Runs the claims while something happens.
    async fn round(&mut self, action: impl AsyncFnOnce(&mut Self)) -> Waits {
        let (driver, claims) = (self.driver.clone(), self.claims.clone());
        let (waits, has_happened) = (Waits::default(), Cell::new(false));
        let workers = join_all(
            claims
                .iter()
                .map(|claim| waits.work(&driver, claim, &has_happened)),
        );
        let happening = async {
            action(self).await;
            has_happened.set(true);
        };
        tokio::join!(workers, happening);
        waits
    }
}

/// Adds the longest waits.
fn row(table: &mut Table, row: &str, against: &str, rounds: &[Waits]) {
    let sum =
        |of: fn(&Waits) -> &Cell<usize>| rounds.iter().map(|waits| of(waits).get()).sum::<usize>();
    let note = format!(
        "of {} calls {} failed at first",
        sum(|waits| &waits.calls),
        sum(|waits| &waits.failed)
    );
    let longest = rounds
        .iter()
        .map(|waits| millis(waits.longest.get()))
        .collect();
    table.figures(row, longest, "ms", against, &note);
}

#[derive(Default)]
struct Waits {
    longest: Cell<Duration>,
    calls: Cell<usize>,
    /// Calls that did not succeed at the first attempt.
    failed: Cell<usize>,
}

impl Waits {
    /// Prepares and unprepares a claim until something has happened and some calls more.
    async fn work(&self, driver: &Driver, claim: &[ClaimRef], has_happened: &Cell<bool>) {
        let mut left = CALLS;
        while left > 0 {
            left -= usize::from(has_happened.get());
            self.repeat(async || driver.prepare(claim).await.map(drop))
                .await;
            self.repeat(async || driver.unprepare(claim).await).await;
        }
    }

    async fn repeat(&self, call: impl AsyncFn() -> Result<(), String>) {
        let (began, mut is_first) = (Instant::now(), true);
        while call().await.is_err() {
            self.failed
                .set(self.failed.get() + usize::from(std::mem::take(&mut is_first)));
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        self.calls.set(self.calls.get() + 1);
        self.longest.set(self.longest.get().max(began.elapsed()));
    }
}
