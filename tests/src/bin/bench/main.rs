//! Measures the daemon as it is built for use, and prints a table: median, 99th percentile, ratio against a row of the same run.
//!
//! Speed is measured here and asserted nowhere. `--quick` runs every row a few times only, to show that all of them work.

mod accounting;
mod anchors;
mod busy;
mod calls;
mod claims;
mod cold;
mod containers;
mod containment;
mod counters;
mod devices;
mod kubelet;
mod local;
mod manager;
mod native;
mod processes;
mod sandbox;
mod seam;
mod simulate;
mod slices;
mod start;
mod store;
mod swap;
mod table;

use std::path::PathBuf;

use anyhow::Result;
use clap::Parser;
use futures::FutureExt;
use futures::future::LocalBoxFuture;
use nodedock_tests::Options;
use table::Table;

#[derive(Parser)]
#[command(
    name = "bench",
    about = "Benchmarks of the daemon; run by `cargo xtask bench`"
)]
struct Args {
    /// Run every row a few times only
    #[arg(long)]
    quick: bool,
    /// Rows whose section has this in its name
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    /// Add where the time of prepares and unprepares goes, from the daemon's own metrics
    #[arg(long)]
    spans: bool,
    /// Print the rows as JSON
    #[arg(long)]
    json: bool,
    /// Compare with the rows that an earlier run printed with --json, and fail if one is worse: a time or figure by more than --worse, a
    /// counter of calls by anything beyond what background tasks count
    #[arg(long, value_name = "FILE")]
    compare: Option<PathBuf>,
    /// Percentage by which the median of a time or figure may be worse than in --compare
    #[arg(
        long,
        value_name = "PERCENT",
        default_value_t = 10.0,
        requires = "compare"
    )]
    worse: f64,
    /// Keep so many threads busy until the standard input ends, and measure nothing
    #[arg(long, value_name = "THREADS", hide = true)]
    spin: Option<usize>,
}

/// Amount of work for a row.
#[derive(Clone, Copy)]
struct Size {
    /// Requests one at a time.
    single: usize,
    /// Requests in a round of 64 at once, and rounds.
    burst: usize,
    rounds: usize,
    /// Numbers of live claims.
    live: [usize; 3],
    /// Numbers of drivers.
    drivers: [usize; 3],
    plugins: usize,
    /// Numbers of pods that have devices.
    pods: [usize; 3],
    /// Devices of a device plugin.
    devices: usize,
    /// Lists of devices, and of pods.
    lists: usize,
    listed_pods: usize,
    /// Claims that come and go in the checkpoint alone.
    churn: usize,
    loads: usize,
    /// Replacements of a driver's file.
    swaps: usize,
    starts: usize,
    /// Containers that are started in each way.
    containers: usize,
    /// Devices that are published, and changes of them.
    slice_devices: usize,
    slice_changes: usize,
    virtual_nodes: usize,
    /// Calls after a pause of half a second, in each condition.
    cold: usize,
    /// Calls whose counters are read.
    counted: usize,
    /// Numbers of live claims, and of pods with devices, beside a kubelet's managers; calls one at a time, and pairs of calls 64 at once.
    anchored: [usize; 4],
    anchored_calls: usize,
    anchored_pairs: usize,
    /// True to add a breakdown of the time.
    spans: bool,
}

const FULL: Size = Size {
    single: 2000,
    burst: 2048,
    rounds: 5,
    live: [0, 1000, 10_000],
    drivers: [1, 10, 100],
    plugins: 500,
    pods: [0, 100, 1000],
    devices: 10_000,
    lists: 200,
    listed_pods: 500,
    churn: 200_000,
    loads: 20,
    swaps: 20,
    starts: 10,
    containers: 50,
    slice_devices: 1000,
    slice_changes: 20,
    virtual_nodes: 5000,
    cold: 30,
    counted: 50,
    anchored: [0, 100, 1000, 5000],
    anchored_calls: 300,
    anchored_pairs: 512,
    spans: false,
};
const QUICK: Size = Size {
    single: 20,
    burst: 128,
    rounds: 1,
    live: [0, 50, 200],
    drivers: [1, 2, 4],
    plugins: 8,
    pods: [0, 5, 20],
    devices: 500,
    lists: 4,
    listed_pods: 10,
    churn: 500,
    loads: 2,
    swaps: 2,
    starts: 2,
    containers: 2,
    slice_devices: 200,
    slice_changes: 2,
    virtual_nodes: 20,
    cold: 2,
    counted: 2,
    anchored: [0, 2, 5, 10],
    anchored_calls: 5,
    anchored_pairs: 64,
    spans: false,
};

/// Measures the rows of a section.
type Section = fn(Size, &mut Table) -> LocalBoxFuture<'_, ()>;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<()> {
    let args = Args::parse();
    if let Some(threads) = args.spin {
        return busy::spin(threads);
    }
    let before = args
        .compare
        .as_deref()
        .map_or(Ok(Vec::new()), table::read)?;
    let size = Size {
        spans: args.spans,
        ..if args.quick { QUICK } else { FULL }
    };
    let mut table = Table::default();
    let sections: [(&str, Section); 18] = [
        ("store", |size, table| store::run(size, table).boxed_local()),
        ("sandbox", |size, table| {
            sandbox::run(size, table).boxed_local()
        }),
        ("processes", |size, table| {
            processes::run(size, table).boxed_local()
        }),
        ("claims", |size, table| {
            claims::run(size, table).boxed_local()
        }),
        ("cold", |size, table| cold::run(size, table).boxed_local()),
        ("counters", |size, table| {
            counters::run(size, table).boxed_local()
        }),
        ("anchors", |size, table| {
            anchors::run(size, table).boxed_local()
        }),
        ("native", |size, table| {
            native::run(size, table).boxed_local()
        }),
        ("devices", |size, table| {
            devices::run(size, table).boxed_local()
        }),
        ("containment", |size, table| {
            containment::run(size, table).boxed_local()
        }),
        ("swap", |size, table| swap::run(size, table).boxed_local()),
        ("kubelet", |size, table| {
            kubelet::run(size, table).boxed_local()
        }),
        ("local", |size, table| local::run(size, table).boxed_local()),
        ("containers", |size, table| {
            containers::run(size, table).boxed_local()
        }),
        ("seam", |size, table| seam::run(size, table).boxed_local()),
        ("simulate", |size, table| {
            simulate::run(size, table).boxed_local()
        }),
        ("slices", |size, table| {
            slices::run(size, table).boxed_local()
        }),
        ("start", |size, table| start::run(size, table).boxed_local()),
    ];
    for (_, run) in sections
        .into_iter()
        .filter(|(name, _)| name.contains(&args.only))
    {
        run(size, &mut table).await;
    }
    match args.json {
        true => table.print_json()?,
        false => table.print(&before),
    }
    table.check_against(&before, args.worse)
}

/// The daemon as on a node: its state on a disk, CDI specs on a tmpfs, where `/var/run` is one.
struct CdiOnTmpfs(Option<tempfile::TempDir>);

impl CdiOnTmpfs {
    fn new() -> Self {
        Self(
            tempfile::Builder::new()
                .prefix("nd-bench-")
                .tempdir_in("/dev/shm")
                .ok(),
        )
    }

    fn options(&self) -> Options {
        self.with(Options::default())
    }

    fn with(&self, options: Options) -> Options {
        match &self.0 {
            Some(dir) => options.arg("--cdi-dir", dir.path().to_string_lossy()),
            None => options,
        }
    }
}
