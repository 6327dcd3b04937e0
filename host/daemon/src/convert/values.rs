//! Values below `/sys`, as messages.

use nodedock_proto::node::v1;

use nodedock_core::manager::claims::ClaimView;
use nodedock_model::{DriverName, KeptValue, PutBack};

/// What a claim's drivers changed, in the order in which the host would put it back.
pub(super) fn kept(view: &ClaimView) -> Vec<v1::SysfsValue> {
    let Some(values) = &view.values else { return Vec::new() };
    values.newest_first().into_iter().map(|(driver, kept)| one(driver, kept)).collect()
}

fn one(driver: &DriverName, kept: &KeptValue) -> v1::SysfsValue {
    v1::SysfsValue {
        driver: driver.to_string(),
        path: kept.path.clone(),
        before: kept.before.clone(),
        left: kept.left().map(str::to_owned),
        found: None,
        end: String::new(),
        problem: None,
    }
}

pub(super) fn put_back(value: &PutBack) -> v1::SysfsValue {
    v1::SysfsValue {
        driver: value.driver.to_string(),
        path: value.path.clone(),
        before: value.before.clone(),
        left: None,
        found: value.found.clone(),
        end: value.end.as_str().to_owned(),
        problem: value.problem.as_ref().map(super::problem),
    }
}
