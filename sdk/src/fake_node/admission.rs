//! Admission of operations by a fake node, as by the host: paths, the grant, and failures that a test injected.

use nodedock_model::grant::Effective;
use nodedock_model::rule::is_plain_path;

use super::State;
use crate::Problem;

impl State {
    pub(super) fn admit_read(&self, path: &str) -> Result<(), Problem> {
        self.check_path(path)?;
        self.demand(|granted| granted.allows_sysfs_read(path), "sysfsRead", path)
    }

    pub(super) fn admit_write(&self, path: &str, value: &str) -> Result<(), Problem> {
        self.check_path(path)?;
        self.check_writes(path)?;
        let granted = self.demand(
            |granted| granted.allows_sysfs_write(path, value),
            "sysfsWrite",
            path,
        );
        granted.map_err(|problem| problem.with_detail("value", value))
    }

    pub(super) fn check_path(&self, path: &str) -> Result<(), Problem> {
        let is_plain = is_plain_path(&format!("/{path}")) && !path.is_empty();
        if !is_plain {
            let message = format!("{path:?} is not a plain path relative to /sys");
            return Err(Problem::invalid("bad-path", message));
        }
        self.check_failure(path)
    }

    pub(super) fn check_node(&self, path: &str) -> Result<(), Problem> {
        if !is_plain_path(path) || !path.starts_with("/dev/") {
            return Err(Problem::invalid(
                "bad-path",
                format!("{path:?} is not a plain path below /dev"),
            ));
        }
        self.check_failure(path)
    }

    pub(super) fn check_failure(&self, path: &str) -> Result<(), Problem> {
        self.failures
            .get(path)
            .map_or(Ok(()), |problem| Err(problem.clone()))
    }

    pub(super) fn allows(&self, rule: impl FnOnce(&Effective) -> bool) -> bool {
        self.granted.as_ref().is_none_or(|granted| rule(granted))
    }

    pub(super) fn demand(
        &self,
        rule: impl FnOnce(&Effective) -> bool,
        what: &str,
        path: &str,
    ) -> Result<(), Problem> {
        let refusal = || Problem::denied("not-granted", format!("{path} is not granted ({what})"));
        self.allows(rule).then_some(()).ok_or_else(refusal)
    }
}
