//! The table of results.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use comfy_table::presets;
use hdrhistogram::Histogram;

/// Times of one kind of operation.
pub(crate) struct Times(Histogram<u64>);

impl Default for Times {
    fn default() -> Self {
        // 1 ns to 5 minutes.
        Self(Histogram::new_with_bounds(1, 300_000_000_000, 3).expect("bounds and digits are allowed"))
    }
}

impl Times {
    pub(crate) fn add(&mut self, took: Duration) {
        self.0.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Adds the time that something takes.
    pub(crate) async fn time<T>(&mut self, work: impl Future<Output = T>) -> T {
        let started = Instant::now();
        let done = work.await;
        self.add(started.elapsed());
        done
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        self.0.add(&other.0).expect("both have the same digits");
    }

    /// Microseconds.
    pub(crate) fn at(&self, quantile: f64) -> f64 {
        #[expect(clippy::cast_precision_loss, reason = "nanoseconds of a benchmark")]
        let nanoseconds = self.0.value_at_quantile(quantile) as f64;
        nanoseconds / 1000.0
    }
}

pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// Rows as they come; a ratio is against the row of that name in this run.
#[derive(Default)]
pub(crate) struct Table {
    rows: Vec<[String; 6]>,
    medians: BTreeMap<String, f64>,
}

impl Table {
    /// A row of times. `against` names an earlier row.
    pub(crate) fn times(&mut self, name: &str, times: &Times, against: &str, note: &str) {
        let median = times.at(0.5);
        let shown = [micros(median), micros(times.at(0.99))];
        self.row(name, times.0.len(), shown, median, against, note);
    }

    /// A row of single figures with a unit: median and largest.
    pub(crate) fn figures(
        &mut self,
        name: &str,
        mut figures: Vec<f64>,
        unit: &str,
        against: &str,
        note: &str,
    ) {
        figures.sort_by(f64::total_cmp);
        let Some(largest) = figures.last() else { return };
        let median = figures[figures.len() / 2];
        let shown = [format!("{median:.1} {unit}"), format!("{largest:.1} {unit}")];
        self.row(name, figures.len() as u64, shown, median, against, note);
    }

    fn row(&mut self, name: &str, count: u64, shown: [String; 2], median: f64, against: &str, note: &str) {
        let ratio = self.medians.get(against).map(|base| format!("{:.2} × {against}", median / base));
        self.medians.insert(name.to_owned(), median);
        let [middle, high] = shown;
        eprintln!("{name}: {middle} ({high}) {note}");
        let (ratio, note) = (ratio.unwrap_or_default(), note.to_owned());
        self.rows.push([name.to_owned(), count.to_string(), middle, high, ratio, note]);
    }

    pub(crate) fn print(&self) {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING);
        table.set_header(["ROW", "N", "MEDIAN", "P99 OR MAX", "RATIO", "NOTE"]);
        for row in &self.rows {
            table.add_row(row);
        }
        println!("{table}");
    }
}

pub(crate) fn micros(value: f64) -> String {
    if value >= 10_000.0 { format!("{:.1} ms", value / 1000.0) } else { format!("{value:.1} µs") }
}
