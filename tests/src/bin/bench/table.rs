//! The table of results.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use comfy_table::presets;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

/// Times of one kind of operation.
pub(crate) struct Times(Histogram<u64>);

impl Default for Times {
    fn default() -> Self {
        // 1 ns to 5 minutes.
        Self(
            Histogram::new_with_bounds(1, 300_000_000_000, 3)
                .expect("bounds and digits are allowed"),
        )
    }
}

impl Times {
    pub(crate) fn add(&mut self, took: Duration) {
        self.0
            .saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
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

/// A row: what one operation takes, in every row less is better.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Row {
    row: String,
    /// Measurements.
    count: u64,
    median: f64,
    /// The 99th percentile of times, the largest of figures.
    high: f64,
    unit: String,
    /// The median's ratio to that of another row of the same run.
    #[serde(skip_serializing_if = "Option::is_none")]
    ratio: Option<f64>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    against: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    note: String,
    /// Of a counter that no noise changes: how much more a later run may count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tolerance: Option<f64>,
}

/// Rows as they come.
#[derive(Default)]
pub(crate) struct Table(Vec<Row>);

impl Table {
    /// A row of times. `against` names an earlier row.
    pub(crate) fn times(&mut self, name: &str, times: &Times, against: &str, note: &str) {
        self.row(
            name,
            times.0.len(),
            [times.at(0.5), times.at(0.99)],
            "µs",
            against,
            note,
        );
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
        let Some(largest) = figures.last() else {
            return;
        };
        let values = [figures[figures.len() / 2], *largest];
        self.row(name, figures.len() as u64, values, unit, against, note);
    }

    /// A row of a counter, of each call or the mean of calls: median and largest. A run that counts more than an earlier one by more than
    /// `tolerance` is worse.
    pub(crate) fn counts(
        &mut self,
        name: &str,
        counts: Vec<f64>,
        unit: &str,
        tolerance: f64,
        note: &str,
    ) {
        assert!(!counts.is_empty(), "{name}: nothing was counted");
        self.figures(name, counts, unit, "", note);
        let row = self.0.last_mut().expect("the row was added");
        row.tolerance = Some(tolerance);
    }

    fn row(
        &mut self,
        name: &str,
        count: u64,
        values: [f64; 2],
        unit: &str,
        against: &str,
        note: &str,
    ) {
        let [median, high] = values;
        let ratio = self
            .0
            .iter()
            .find(|row| row.row == against)
            .map(|base| median / base.median);
        let against = ratio.map_or(String::new(), |_| against.to_owned());
        let (row, unit, note) = (name.to_owned(), unit.to_owned(), note.to_owned());
        eprintln!(
            "{row}: {} ({}) {note}",
            shown(median, &unit),
            shown(high, &unit)
        );
        self.0.push(Row {
            row,
            count,
            median,
            high,
            unit,
            ratio,
            against,
            note,
            tolerance: None,
        });
    }

    /// Prints the rows, beside those of an earlier run if there is one.
    pub(crate) fn print(&self, before: &[Row]) {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::NOTHING);
        let header = ["ROW", "N", "MEDIAN", "P99 OR MAX", "RATIO", "NOTE"];
        let of_before = if before.is_empty() {
            &[][..]
        } else {
            &["BEFORE", "CHANGE"]
        };
        table.set_header(header.iter().chain(of_before));
        for row in &self.0 {
            let ratio = row.ratio.map_or(String::new(), |ratio| {
                let digits = if ratio < 0.1 { 3 } else { 2 };
                format!("{ratio:.digits$} × {}", row.against)
            });
            let (median, high) = (shown(row.median, &row.unit), shown(row.high, &row.unit));
            let mut cells = vec![
                row.row.clone(),
                row.count.to_string(),
                median,
                high,
                ratio,
                row.note.clone(),
            ];
            if let Some(change) = row.change(before) {
                cells.extend([
                    shown(row.median / change, &row.unit),
                    format!("{:+.0} %", (change - 1.0) * 100.0),
                ]);
            }
            table.add_row(cells);
        }
        println!("{table}");
    }

    pub(crate) fn print_json(&self) -> Result<()> {
        println!("{}", serde_json::to_string_pretty(&self.0)?);
        Ok(())
    }

    /// Fails with the rows whose median is worse than in the earlier run: times and figures by more than so many percent, counters by more
    /// than their tolerance.
    pub(crate) fn check_against(&self, before: &[Row], percent: f64) -> Result<()> {
        let is_slower = |row: &&Row| {
            row.tolerance.is_none()
                && row
                    .change(before)
                    .is_some_and(|change| (change - 1.0) * 100.0 > percent)
        };
        let slower: Vec<_> = self
            .0
            .iter()
            .filter(is_slower)
            .map(|row| row.row.as_str())
            .collect();
        let more: Vec<_> = self.0.iter().filter_map(|row| row.more(before)).collect();
        let mut worse = Vec::new();
        if !slower.is_empty() {
            worse.push(format!(
                "worse by more than {percent} %: {}",
                slower.join(", ")
            ));
        }
        if !more.is_empty() {
            worse.push(format!("counted more: {}", more.join(", ")));
        }
        ensure!(worse.is_empty(), "{}", worse.join("; "));
        Ok(())
    }
}

impl Row {
    fn same_in<'a>(&self, before: &'a [Self]) -> Option<&'a Self> {
        before
            .iter()
            .find(|row| row.row == self.row && row.unit == self.unit)
    }

    /// The median's ratio to that of an earlier run. `None`: that run has no such row.
    fn change(&self, before: &[Self]) -> Option<f64> {
        let before = self.same_in(before)?;
        (before.median > 0.0).then(|| self.median / before.median)
    }

    /// Describes a counter that has grown beyond its tolerance.
    fn more(&self, before: &[Self]) -> Option<String> {
        let (tolerance, before) = (self.tolerance?, self.same_in(before)?);
        (self.median > before.median + tolerance).then(|| {
            format!(
                "{} ({} instead of {})",
                self.row,
                shown(self.median, &self.unit),
                shown(before.median, &self.unit)
            )
        })
    }
}

/// Reads the rows that an earlier run printed as JSON.
pub(crate) fn read(path: &Path) -> Result<Vec<Row>> {
    let text = std::fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let rows: Vec<Row> = serde_json::from_slice(&text)
        .with_context(|| format!("{} is not what `bench --json` prints", path.display()))?;
    ensure!(!rows.is_empty(), "{} has no rows", path.display());
    Ok(rows)
}

pub(crate) fn shown(value: f64, unit: &str) -> String {
    match unit {
        "µs" if value >= 10_000.0 => format!("{:.1} ms", value / 1000.0),
        unit => format!("{value:.1} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(medians: &[(&str, f64)]) -> Table {
        let mut table = Table::default();
        medians
            .iter()
            .for_each(|(name, median)| table.figures(name, vec![*median], "ms", "", ""));
        table
    }

    #[test]
    fn run_is_compared_with_earlier_results() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("before.json");
        let before = table(&[("a", 10.0), ("b", 10.0), ("gone", 1.0)]);
        std::fs::write(&path, serde_json::to_vec(&before.0).unwrap()).unwrap();
        let before = read(&path).unwrap();
        let now = table(&[("a", 10.9), ("b", 5.0), ("new", 100.0)]);
        now.check_against(&before, 10.0).unwrap();
        let worse = table(&[("a", 11.2), ("b", 10.0)])
            .check_against(&before, 10.0)
            .unwrap_err();
        assert_eq!(worse.to_string(), "worse by more than 10 %: a");
        table(&[("a", 11.2)]).check_against(&before, 20.0).unwrap();
    }

    #[test]
    fn counters_are_compared_without_percentage() {
        let counted = |switches: f64, syncs: f64| {
            let mut table = Table::default();
            table.counts("switches", vec![switches], "switches", 1.0, "");
            table.counts("syncs", vec![syncs], "syncs", 0.1, "");
            table
        };
        let before = counted(100.0, 0.0).0;
        counted(101.0, 0.0).check_against(&before, 10.0).unwrap();
        counted(50.0, 0.0).check_against(&before, 10.0).unwrap();
        let worse = counted(102.0, 1.0).check_against(&before, 10.0);
        assert_eq!(
            worse.unwrap_err().to_string(),
            "counted more: switches (102.0 switches instead of 100.0 switches), syncs (1.0 syncs instead of 0.0 syncs)"
        );
        let mut both = counted(102.0, 0.0);
        both.figures("a", vec![2.0], "ms", "", "");
        let mut earlier = before;
        earlier.extend(table(&[("a", 1.0)]).0);
        let worse = both.check_against(&earlier, 10.0).unwrap_err().to_string();
        assert_eq!(
            worse,
            "worse by more than 10 %: a; counted more: switches (102.0 switches instead of 100.0 switches)"
        );
    }

    #[test]
    fn invalid_baseline_file_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("before.json");
        assert!(read(&path).unwrap_err().to_string().contains("before.json"));
        for text in ["{}", "[]", "ROW  N  MEDIAN"] {
            std::fs::write(&path, text).unwrap();
            assert!(
                read(&path).unwrap_err().to_string().contains("before.json"),
                "{text}"
            );
        }
    }

    #[test]
    fn long_times_are_shown_in_milliseconds() {
        assert_eq!(
            (shown(9999.0, "µs"), shown(10_500.0, "µs")),
            ("9999.0 µs".to_owned(), "10.5 ms".to_owned())
        );
        assert_eq!(shown(20_000.0, "MiB"), "20000.0 MiB");
    }
}
