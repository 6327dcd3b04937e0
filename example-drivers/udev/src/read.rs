//! Reads from sysfs while devices come and go.
//!
//! A name must not depend on whether a read succeeds: a device is left out while the kernel has no value of one of its files. Only a file
//! that does not exist is a fact about the device. A read that failed is an error of the whole discovery.

use nodedock_sdk::{Problem, ProblemKind};

/// Returns `None` for a file or link that does not exist.
pub(crate) fn optional<T>(read: Result<T, Problem>) -> Result<Option<T>, Problem> {
    match read {
        Ok(value) => Ok(Some(value)),
        Err(problem) if problem.kind == ProblemKind::NotFound => Ok(None),
        Err(problem) => Err(problem),
    }
}
