//! What is wrong with slices, as it is told to people.

use std::collections::BTreeSet;

use super::Writer;
use crate::slices::planner::PoolKey;
use crate::slices::report::PoolStatus;
use crate::slices::{CONTESTED, FIELDS_DROPPED, KEPT, REFUSED, wire};
use nodedock_base::printable::one_line;
use nodedock_model::{DriverName, Problem, limit};

/// Under which name the server knows what we write.
const MANAGER: &str = "nodedock";
/// Bytes of words of others in a message.
const WORDS_BYTES_MAX: usize = limit::PROBLEM_MESSAGE_BYTES_MAX / 2;

pub(super) fn refusal(key: &PoolKey, words: &str) -> Problem {
    let words = one_line(words, WORDS_BYTES_MAX);
    let message = format!("pool {} of driver {} cannot be told as slices: {words}", key.pool, key.driver);
    Problem::invalid(REFUSED, message)
}

impl Writer {
    /// Takes back what was told of a pool that is not ours to tell any more.
    pub(super) fn tell_no_more(&self, key: &PoolKey) {
        self.conditions.clear(REFUSED, &key.to_string());
        self.conditions.clear(CONTESTED, &key.to_string());
        self.conditions.clear(FIELDS_DROPPED, key.driver.as_str());
    }

    pub(super) fn tell_problem(&self, key: &PoolKey, problem: Problem) {
        let known = self.report.pool(key);
        let status = PoolStatus {
            is_current: false,
            problem: Some(problem),
            ..known.unwrap_or(PoolStatus {
                is_current: false,
                slices: 0,
                devices: 0,
                generation: 0,
                written_ms: None,
                problem: None,
            })
        };
        self.report.tell(key, Some(status));
    }

    /// Somebody changes what we write, again and again.
    pub(super) fn tell_contested(&self, key: &PoolKey) {
        let others: BTreeSet<String> =
            self.view.of_pool(key).flat_map(|held| wire::writers(&held.metadata, MANAGER)).collect();
        let others: Vec<_> = others.iter().take(4).map(|name| one_line(name, 64)).collect();
        let who = match others.is_empty() {
            true => "somebody else".to_owned(),
            false => others.join(", "),
        };
        let message = format!(
            "slices of pool {} of driver {} are changed or deleted again and again, and nodedock writes them again: {who} writes them \
             as well; one of the two has to go, or a kubelet is started anew all the time",
            key.pool, key.driver
        );
        self.conditions.set(&key.to_string(), Problem::conflict(CONTESTED, message));
    }

    /// Tells which fields the server left out of a driver's slices.
    pub(super) fn tell_dropped(&self, driver: &DriverName) {
        let mut lost = BTreeSet::new();
        for held in self.view.all().filter(|held| held.key.driver == *driver) {
            if let (Some(sent), Some(wanted)) = (&held.sent, self.wanted.get(&held.key)) {
                lost.extend(wanted.content.only_of(sent).lost_in(&held.content));
            }
        }
        if lost.is_empty() {
            return self.conditions.clear(FIELDS_DROPPED, driver.as_str());
        }
        let fields: Vec<_> = lost.into_iter().collect();
        let message = format!(
            "the API server left out, or changed, what driver {driver} says of its devices: {}; a feature gate of the cluster is off, \
             or its version too old",
            one_line(&fields.join(", "), WORDS_BYTES_MAX)
        );
        self.conditions.set(driver.as_str(), Problem::unavailable(FIELDS_DROPPED, message));
    }

    /// Tells of drivers that seem to be gone, of which each file without a name may be one.
    pub(super) fn tell_kept(&self, drivers: &BTreeSet<DriverName>, nameless: &[String]) {
        let files: Vec<_> = nameless.iter().take(8).map(|name| one_line(name, 64)).collect();
        for driver in drivers {
            let message = format!(
                "the slices of driver {driver}, which is not here, stay: it is not known which drivers are in {}",
                files.join(", ")
            );
            self.conditions.set(driver.as_str(), Problem::unavailable(KEPT, message));
        }
        self.conditions.retain(KEPT, |subject| drivers.contains(subject));
    }
}
