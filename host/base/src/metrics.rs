//! Counters and histograms that modules update. The metrics endpoint owns names and formats.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A histogram with fixed bounds.
#[derive(Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// Counts by bucket, with one more for values beyond the last bound.
    counts: Box<[AtomicU64]>,
    /// The bits of an `f64`.
    sum: AtomicU64,
}

/// A snapshot of a histogram.
#[derive(Debug, Clone, PartialEq)]
pub struct HistogramView {
    pub bounds: &'static [f64],
    /// Not cumulative; the last one counts values beyond every bound.
    pub counts: Vec<u64>,
    pub sum: f64,
}

impl Histogram {
    /// `bounds` must ascend.
    pub fn new(bounds: &'static [f64]) -> Self {
        let counts = (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect();
        Self { bounds, counts, sum: AtomicU64::new(0) }
    }

    pub fn observe(&self, value: f64) {
        let place = self.bounds.partition_point(|bound| *bound < value);
        self.counts[place].fetch_add(1, Relaxed);
        let add = |bits| Some((f64::from_bits(bits) + value).to_bits());
        // The closure always returns a value, so there is always an update.
        let _ = self.sum.fetch_update(Relaxed, Relaxed, add);
    }

    /// In seconds.
    pub fn observe_time(&self, took: Duration) {
        self.observe(took.as_secs_f64());
    }

    pub fn view(&self) -> HistogramView {
        HistogramView {
            bounds: self.bounds,
            counts: self.counts.iter().map(|count| count.load(Relaxed)).collect(),
            sum: f64::from_bits(self.sum.load(Relaxed)),
        }
    }
}

impl HistogramView {
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

/// Counters by a key whose values are external, such as names of resources: bounded, and further keys count under the default key.
#[derive(Debug)]
pub struct ByKey<K, V> {
    entries: Mutex<BTreeMap<K, Arc<V>>>,
    max: usize,
}

impl<K: Ord + Default + Clone, V: Default> ByKey<K, V> {
    pub fn at_most(max: usize) -> Self {
        Self { entries: Mutex::default(), max }
    }

    /// Returns the counters of a key; beyond the bound, and for the default key, those of all other keys together.
    pub fn of(&self, key: &K) -> Arc<V> {
        let mut entries = self.entries();
        if let Some(known) = entries.get(key) {
            return Arc::clone(known);
        }
        let others = K::default();
        let known = entries.len() - usize::from(entries.contains_key(&others));
        let key = if known < self.max { key.clone() } else { others };
        Arc::clone(entries.entry(key).or_default())
    }

    pub fn list(&self) -> Vec<(K, Arc<V>)> {
        self.entries().iter().map(|(key, value)| (key.clone(), Arc::clone(value))).collect()
    }

    fn entries(&self) -> MutexGuard<'_, BTreeMap<K, Arc<V>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A kubelet's bounds for the seconds of calls about claims: from 0.1 to 40, each by the same factor above the one before.
pub const CLAIM_SECONDS: &[f64] =
    &[0.1, 0.1534, 0.2354, 0.3611, 0.5539, 0.8498, 1.304, 2.0, 3.068, 4.707, 7.221, 11.08, 17.0, 26.07, 40.0];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_counts_under_the_first_bound_that_holds_it() {
        let histogram = Histogram::new(&[0.5, 1.0]);
        for value in [0.1, 0.5, 0.6, 1.5, 2.0] {
            histogram.observe(value);
        }
        let view = histogram.view();
        assert_eq!((view.counts.as_slice(), view.count()), ([2, 1, 2].as_slice(), 5));
        assert!((view.sum - 4.7).abs() < 1e-9, "{}", view.sum);
    }

    #[test]
    fn beyond_the_bound_all_count_together() {
        let by_name: ByKey<String, AtomicU64> = ByKey::at_most(2);
        for name in ["a", "b", "c", "d", "a"] {
            by_name.of(&name.to_owned()).fetch_add(1, Relaxed);
        }
        let counts: Vec<_> =
            by_name.list().into_iter().map(|(name, count)| (name, count.load(Relaxed))).collect();
        assert_eq!(counts, [(String::new(), 2), ("a".to_owned(), 2), ("b".to_owned(), 1)]);
    }
}
