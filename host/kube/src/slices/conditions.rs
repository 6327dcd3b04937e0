//! The conditions of the node that are about slices.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kube::ResourceExt;

use super::slice::{NODEDOCK, Slice};
use crate::pools::PoolKey;
use nodedock_base::conditions::Conditions;
use nodedock_base::printable::one_line;
use nodedock_model::{DriverName, Problem, ProblemCode, limit};

/// Bytes of others' texts in a message.
const QUOTED_BYTES_MAX: usize = limit::PROBLEM_MESSAGE_BYTES_MAX / 2;
const NAME_BYTES_MAX: usize = 64;

pub(super) fn refusal(key: &PoolKey, reason: &str) -> Problem {
    let reason = one_line(reason, QUOTED_BYTES_MAX);
    let message = format!(
        "pool {} of driver {} cannot be published as slices: {reason}",
        key.pool, key.driver
    );
    Problem::invalid(ProblemCode::SlicesRefused, message)
}

/// Clears all conditions of a pool that is no longer published, and those of its driver that may be about it.
pub(super) fn clear(conditions: &Conditions, key: &PoolKey) {
    conditions.clear(ProblemCode::SlicesRefused, &key.to_string());
    conditions.clear(ProblemCode::SlicesContested, &key.to_string());
    conditions.clear(ProblemCode::SliceFieldsDropped, key.driver.as_str());
}

/// Sets the condition that others change what nodedock writes.
pub(super) fn set_contested(conditions: &Conditions, key: &PoolKey, slices: &[Arc<Slice>]) {
    let managers = slices.iter().flat_map(|slice| slice.managed_fields());
    let others: BTreeSet<&str> = managers
        .filter_map(|manager| manager.manager.as_deref())
        .filter(|name| *name != NODEDOCK)
        .collect();
    let others: Vec<_> = others
        .into_iter()
        .take(4)
        .map(|name| one_line(name, NAME_BYTES_MAX))
        .collect();
    let writer = match others.is_empty() {
        true => "another client".to_owned(),
        false => others.join(", "),
    };
    let message = format!(
        "slices of pool {} of driver {} are changed or deleted again and again, and nodedock writes them again: {writer} writes them \
         as well; one of the two has to be removed, or a kubelet restarts all the time",
        key.pool, key.driver
    );
    conditions.set(
        &key.to_string(),
        Problem::conflict(ProblemCode::SlicesContested, message),
    );
}

/// Sets or clears the condition that the server drops, changes or refuses fields of a driver's devices.
pub(super) fn set_dropped(conditions: &Conditions, driver: &DriverName, fields: BTreeSet<String>) {
    if fields.is_empty() {
        return conditions.clear(ProblemCode::SliceFieldsDropped, driver.as_str());
    }
    let fields: Vec<_> = fields.into_iter().collect();
    let message = format!(
        "the API server dropped, changed or refused fields of the devices of driver {driver}: {}; a feature gate of the cluster is off, or its \
         version is too old",
        one_line(&fields.join(", "), QUOTED_BYTES_MAX)
    );
    conditions.set(
        driver.as_str(),
        Problem::unavailable(ProblemCode::SliceFieldsDropped, message),
    );
}

/// Sets the condition of exactly these drivers that their slices are kept, since each of the `nameless` files may be theirs.
pub(super) fn set_kept(
    conditions: &Conditions,
    drivers: &BTreeSet<DriverName>,
    nameless: &[String],
) {
    let files: Vec<_> = nameless
        .iter()
        .take(8)
        .map(|name| one_line(name, NAME_BYTES_MAX))
        .collect();
    for driver in drivers {
        let message = format!(
            "the slices of driver {driver}, which is not present, are kept: it is not known which drivers are in {}",
            files.join(", ")
        );
        conditions.set(
            driver.as_str(),
            Problem::unavailable(ProblemCode::SlicesKept, message),
        );
    }
    conditions.retain(ProblemCode::SlicesKept, |subject| drivers.contains(subject));
}

/// Sets the condition of exactly these pools that they cannot be named in the API. `before` had it until now.
pub(super) fn set_unnameable(
    conditions: &Conditions,
    before: &BTreeMap<PoolKey, String>,
    now: &BTreeMap<PoolKey, String>,
) {
    let nameable = before.keys().filter(|key| !now.contains_key(*key));
    nameable.for_each(|key| conditions.clear(ProblemCode::SlicesRefused, &key.to_string()));
    now.iter()
        .for_each(|(key, reason)| conditions.set(&key.to_string(), refusal(key, reason)));
}
