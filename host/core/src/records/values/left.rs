//! Counts values below `/sys` that drivers left behind when they unprepared a claim.

use std::sync::Arc;

use nodedock_base::metrics::{BoundedNames, Counters};
use nodedock_model::{ProblemCode, PutBack, PutBackEnd, limit};

/// Values since the start, by driver and outcome. Clones count together.
#[derive(Debug, Clone)]
pub struct LeftValues {
    /// `driver`; `outcome`: `put-back`, or `left` if the host could not restore the value.
    pub values: Counters<2>,
    drivers: Arc<BoundedNames>,
}

impl Default for LeftValues {
    fn default() -> Self {
        Self {
            values: Counters::default(),
            drivers: Arc::new(BoundedNames::at_most(limit::DRIVER_FILES_MAX)),
        }
    }
}

impl LeftValues {
    /// Counts a value that its driver had to restore. One that another program has changed since is not the driver's.
    pub(super) fn count(&self, value: &PutBack) {
        let is_changed = value
            .problem
            .as_ref()
            .is_some_and(|problem| problem.code == ProblemCode::ValueChanged);
        let is_counted = matches!(value.end, PutBackEnd::PutBack | PutBackEnd::Left);
        if is_counted && !is_changed {
            let driver = self.drivers.value(value.driver.as_str()).0;
            let outcome = value.end.as_str().to_owned();
            self.values
                .get_or_create(&[("driver", driver), ("outcome", outcome)])
                .inc();
        }
    }
}
