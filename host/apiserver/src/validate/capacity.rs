//! A device's capacity, and what a consumer may take of it.

use nodedock_model::{Capacity, CapacityChoice, CapacityPolicy, check};
use serde_json::Value;

use super::fields::{Causes, checked, list};
use crate::status::Cause;

/// Checks a capacity; only a device that several claims can have may say how much of it each may take.
pub(super) fn check(causes: &mut Causes, at: &str, capacity: &Value, is_shared: bool) {
    let policy = &capacity["requestPolicy"];
    let (values, range) = (list(policy, "validValues"), &policy["validRange"]);
    if is_shared && !values.is_empty() && !range.is_null() {
        let why = "exactly one policy can be specified, cannot specify \"validValues\" and \"validRange\" at the same time";
        causes.push(Cause::forbidden(format!("{at}.requestPolicy"), why));
        return;
    }
    let choice = match range.is_null() {
        true => CapacityChoice::Values(values.iter().filter_map(amount).collect()),
        false => CapacityChoice::Range {
            min: amount(&range["min"]).unwrap_or_default(),
            max: amount(&range["max"]),
            step: amount(&range["step"]),
        },
    };
    let converted = Capacity {
        value: amount(&capacity["value"]).unwrap_or_default(),
        policy: (!policy.is_null()).then(|| CapacityPolicy {
            default_amount: amount(&policy["default"]),
            choice,
        }),
    };
    checked(causes, at, |findings| {
        check::capacity(findings, &converted, is_shared);
    });
}

/// A quantity as it was written, if it is set.
fn amount(quantity: &Value) -> Option<String> {
    match quantity {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}
