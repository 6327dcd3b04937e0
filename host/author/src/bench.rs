//! `nodedock driver bench`: what a driver costs on a node.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;

use super::compile_cache::CompileCacheArgs;
use super::workbench::{Found, SubjectArgs, Use, Workbench, devices};
use nodedock_command::output::{Column, Format, print, table};
use nodedock_model::{Inventory, Problem};
use nodedock_wasm::{Trigger, WasmDriver};

const ROUNDS: u32 = 50;
const ROUNDS_MAX: u32 = 10_000;
/// Devices that are tried until one is prepared.
const DEVICES_TRIED: usize = 64;

#[derive(Args)]
pub struct BenchArgs {
    #[command(flatten)]
    subject: SubjectArgs,
    /// Recorded machine: a directory or a tar file with its /sys [default: this machine]
    #[arg(long, value_name = "SNAPSHOT")]
    hardware: Option<PathBuf>,
    /// Calls of each function
    #[arg(long, default_value_t = ROUNDS, value_parser = clap::value_parser!(u32).range(1..=i64::from(ROUNDS_MAX)))]
    rounds: u32,
    #[command(flatten)]
    cache: CompileCacheArgs,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

/// A value, or several of the same kind.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Measured {
    what: &'static str,
    unit: &'static str,
    /// Median of several values.
    median: f64,
    p10: f64,
    p90: f64,
    max: f64,
    count: usize,
}

impl Measured {
    const COLUMNS: &'static [Column<Self>] = &[
        ("WHAT", |row| row.what.to_owned()),
        ("MEDIAN", |row| row.shown(row.median)),
        ("P10", |row| row.spread(row.p10)),
        ("P90", |row| row.spread(row.p90)),
        ("MAX", |row| row.spread(row.max)),
        ("N", |row| row.count.to_string()),
    ];
}

impl Measured {
    /// `values` has at least one.
    fn new(what: &'static str, unit: &'static str, mut values: Vec<f64>) -> Self {
        values.sort_by(f64::total_cmp);
        let count = values.len();
        Self {
            what,
            unit,
            median: percentile(&values, 50),
            p10: percentile(&values, 10),
            p90: percentile(&values, 90),
            max: percentile(&values, 100),
            count,
        }
    }

    fn of_size(what: &'static str, bytes: u64) -> Self {
        Self::new(what, "KiB", vec![bytes as f64 / 1024.0])
    }

    fn of_times(what: &'static str, times: &[Duration]) -> Self {
        Self::new(
            what,
            "ms",
            times
                .iter()
                .map(|time| time.as_secs_f64() * 1000.0)
                .collect(),
        )
    }

    fn shown(&self, value: f64) -> String {
        let digits = if self.unit == "ms" { 3 } else { 1 };
        format!("{value:.digits$} {}", self.unit)
    }

    /// One value has no spread.
    fn spread(&self, value: f64) -> String {
        if self.count == 1 {
            "-".to_owned()
        } else {
            self.shown(value)
        }
    }
}

fn percentile(values: &[f64], percent: usize) -> f64 {
    values
        .get((values.len() - 1) * percent / 100)
        .copied()
        .unwrap_or_default()
}

pub(super) async fn run(args: BenchArgs) -> Result<()> {
    let subject = args.subject.read()?;
    let bench = Workbench::new(args.hardware.as_deref(), &args.cache)?;
    let start = Instant::now();
    let driver = bench.load(&subject).await?;
    let load = start.elapsed();
    let (mut rows, inventory) = calls(&driver, args.rounds).await?;
    let what = if driver.from_cache() {
        "load, from the cache"
    } else {
        "load, with compilation"
    };
    rows.insert(0, Measured::of_times(what, &[load]));
    let mut refused = Ok(());
    match preparable(&bench, &driver, &inventory).await {
        None => {}
        Some(Ok(found)) => rows.extend(claims(&bench, &driver, found, args.rounds).await?),
        Some(Err(error)) => refused = Err(error),
    }
    rows.push(Measured::of_size(
        "memory of a call, at most",
        driver.stats().peak_memory.get(),
    ));
    rows.push(Measured::of_size(
        "devices, as JSON",
        json_bytes(&inventory)?,
    ));
    rows.push(Measured::of_size("file", subject.file.bytes.len() as u64));
    print(args.output, &rows, || {
        table(
            args.output,
            Measured::COLUMNS,
            Measured::COLUMNS.len(),
            &rows,
            "",
        )
    })?;
    refused
}

fn json_bytes(value: &impl Serialize) -> Result<u64> {
    Ok(serde_json::to_vec(value).context("write it as JSON")?.len() as u64)
}

/// Resources that the calls of a function took.
#[derive(Default)]
struct Spent {
    elapsed: Vec<Duration>,
    cpu: Vec<Duration>,
}

impl Spent {
    /// Adds a call.
    async fn add<T>(&mut self, driver: &WasmDriver, call: impl Future<Output = T>) -> T {
        let cpu_seconds = &driver.stats().cpu_seconds;
        let (start, before) = (Instant::now(), cpu_seconds.get());
        let outcome = call.await;
        self.elapsed.push(start.elapsed());
        self.cpu
            .push(Duration::try_from_secs_f64(cpu_seconds.get() - before).unwrap_or_default());
        outcome
    }

    fn rows(&self, what: &'static str, cpu: &'static str) -> [Measured; 2] {
        [
            Measured::of_times(what, &self.elapsed),
            Measured::of_times(cpu, &self.cpu),
        ]
    }
}

async fn calls(driver: &WasmDriver, rounds: u32) -> Result<(Vec<Measured>, Inventory)> {
    let name = &driver.info().name;
    let (mut instantiate, mut discover) = (Vec::new(), Spent::default());
    let mut inventory = Inventory::default();
    for _ in 0..rounds {
        let start = Instant::now();
        let made = driver.instantiate(&driver.look_call()).await;
        instantiate.push(start.elapsed());
        made.with_context(|| format!("{name} cannot be instantiated"))?;
        let found = discover
            .add(
                driver,
                driver.discover(&driver.look_call(), Trigger::Request),
            )
            .await;
        inventory = found.with_context(|| format!("{name} does not discover its devices"))?;
    }
    let mut rows = vec![Measured::of_times("instantiate", &instantiate)];
    rows.extend(discover.rows("discover", "discover, CPU"));
    Ok((rows, inventory))
}

/// Finds the first device that the driver prepares, or returns why the first one is refused; `None`: there is no device.
async fn preparable<'a>(
    bench: &Workbench,
    driver: &WasmDriver,
    inventory: &'a Inventory,
) -> Option<Result<Found<'a>>> {
    let devices = devices(inventory);
    let mut refused = None;
    for found in devices.take(DEVICES_TRIED) {
        match prepare_once(bench, driver, found).await {
            Ok(()) => return Some(Ok(found)),
            Err(problem) => {
                let (pool, device, _) = found;
                let error =
                    anyhow::Error::new(problem).context(format!("{pool}/{device} is not prepared"));
                refused.get_or_insert(Err(error));
            }
        }
    }
    refused
}

async fn prepare_once(
    bench: &Workbench,
    driver: &WasmDriver,
    found: Found<'_>,
) -> Result<(), Problem> {
    let mut claim = bench.claim(driver, found, &Use::default())?;
    let prepared = claim.prepare(driver).await;
    let unprepared = claim.unprepare(driver).await;
    prepared.and(unprepared)
}

/// Prepares and unprepares a claim for one device.
async fn claims(
    bench: &Workbench,
    driver: &WasmDriver,
    found: Found<'_>,
    rounds: u32,
) -> Result<Vec<Measured>> {
    let (pool, device, _) = found;
    let (mut prepare, mut unprepare) = (Spent::default(), Spent::default());
    let mut answer = 0;
    for _ in 0..rounds {
        let mut claim = bench.claim(driver, found, &Use::default())?;
        let prepared = prepare.add(driver, claim.prepare(driver)).await;
        answer =
            json_bytes(&prepared.with_context(|| format!("{pool}/{device} is not prepared"))?)?;
        let unprepared = unprepare.add(driver, claim.unprepare(driver)).await;
        unprepared.with_context(|| format!("{pool}/{device} is not unprepared"))?;
        drop(bench.take_writes());
    }
    let mut rows = prepare.rows("prepare", "prepare, CPU").to_vec();
    rows.extend(unprepare.rows("unprepare", "unprepare, CPU"));
    rows.push(Measured::of_size("prepared claim, as JSON", answer));
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_median_has_a_spread() {
        let values = (0..=100).rev().map(f64::from).collect();
        let several = Measured::new("discover", "ms", values);
        let Measured {
            median,
            p10,
            p90,
            max,
            count,
            ..
        } = several;
        assert_eq!(
            (median, p10, p90, max, count),
            (50.0, 10.0, 90.0, 100.0, 101)
        );
        let rows = [several, Measured::new("file", "KiB", vec![1.25])];
        assert_eq!(
            table(
                Format::Table,
                Measured::COLUMNS,
                Measured::COLUMNS.len(),
                &rows,
                ""
            ),
            "WHAT       MEDIAN      P10         P90         MAX          N\n\
             discover   50.000 ms   10.000 ms   90.000 ms   100.000 ms   101\n\
             file       1.2 KiB     -           -           -            1"
        );
    }
}
