//! Types, bounds and label values of metrics that several modules count. A module counts in metrics of its own; the admin server has their
//! names and encodes them.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;

pub type Labels<const N: usize> = [(&'static str, String); N];
pub type Counters<const N: usize> = Family<Labels<N>, Counter>;
pub type Histograms<const N: usize> = Family<Labels<N>, Histogram, fn() -> Histogram>;

/// Returns a histogram with a kubelet's bounds for the seconds of calls about claims: from 0.1 to 40, each by the same factor above the
/// one before.
pub fn claim_seconds() -> Histogram {
    Histogram::new([
        0.1, 0.1534, 0.2354, 0.3611, 0.5539, 0.8498, 1.304, 2.0, 3.068, 4.707, 7.221, 11.08, 17.0,
        26.07, 40.0,
    ])
}

/// Returns a histogram with the bounds of Prometheus' own libraries, which a kubelet takes for allocations.
pub fn call_seconds() -> Histogram {
    Histogram::new([
        0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
    ])
}

/// Values of a label that others choose, such as names of resources. Those beyond the bound are counted together, under an empty value.
#[derive(Debug)]
pub struct BoundedNames {
    known: Mutex<BTreeSet<String>>,
    max: usize,
}

impl BoundedNames {
    pub fn at_most(max: usize) -> Self {
        Self {
            known: Mutex::default(),
            max,
        }
    }

    /// Returns the value for a name, and whether it is the first time that it is returned.
    pub fn value(&self, name: &str) -> (String, bool) {
        let mut known = self.known.lock();
        if known.contains(name) {
            return (name.to_owned(), false);
        }
        let name = if known.len() < self.max { name } else { "" };
        (name.to_owned(), known.insert(name.to_owned()))
    }
}
