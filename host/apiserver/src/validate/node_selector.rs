//! The rules of node selectors, which slices and allocations have.

use serde_json::Value;

use super::fields::{Causes, invalid, list, text};
use super::names;
use crate::status::Cause;

/// Checks a selector; the caller knows that it is set.
pub(super) fn check(causes: &mut Causes, at: &str, selector: &Value) {
    let (field, terms) = (
        format!("{at}.nodeSelectorTerms"),
        list(selector, "nodeSelectorTerms"),
    );
    if terms.is_empty() {
        causes.push(Cause::required(
            &field,
            "must have at least one node selector term",
        ));
    }
    for (index, term) in terms.iter().enumerate() {
        for (item, requirement) in list(term, "matchExpressions").iter().enumerate() {
            expression(
                causes,
                &format!("{field}[{index}].matchExpressions[{item}]"),
                requirement,
            );
        }
        for (item, requirement) in list(term, "matchFields").iter().enumerate() {
            name(
                causes,
                &format!("{field}[{index}].matchFields[{item}]"),
                requirement,
            );
        }
    }
}

fn expression(causes: &mut Causes, at: &str, requirement: &Value) {
    let (values, key) = (list(requirement, "values"), text(requirement, "key"));
    let field = format!("{at}.values");
    match text(requirement, "operator") {
        "In" | "NotIn" if values.is_empty() => {
            causes.push(Cause::required(
                &field,
                "must be specified when `operator` is 'In' or 'NotIn'",
            ));
        }
        "Exists" | "DoesNotExist" if !values.is_empty() => {
            let why = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
            causes.push(Cause::forbidden(&field, why));
        }
        "Gt" | "Lt" if values.len() != 1 => {
            let why = "must be specified single value when `operator` is 'Lt' or 'Gt'";
            causes.push(Cause::required(&field, why));
        }
        "In" | "NotIn" | "Exists" | "DoesNotExist" | "Gt" | "Lt" => {}
        other => causes.push(no_operator(at, other)),
    }
    names::refuse(causes, &format!("{at}.key"), key, names::label_key(key));
    for (index, value) in values.iter().enumerate() {
        let value = value.as_str().unwrap_or_default();
        names::refuse(
            causes,
            &format!("{field}[{index}]"),
            value,
            names::label_value(value),
        );
    }
}

/// A requirement on a field of the node, of which there is one: its name.
fn name(causes: &mut Causes, at: &str, requirement: &Value) {
    let (values, key) = (list(requirement, "values"), text(requirement, "key"));
    match text(requirement, "operator") {
        "In" | "NotIn" if values.len() != 1 => {
            let why =
                "must be only one value when `operator` is 'In' or 'NotIn' for node field selector";
            causes.push(Cause::required(format!("{at}.values"), why));
        }
        "In" | "NotIn" => {}
        other => causes.push(no_operator(at, other)),
    }
    if key != "metadata.name" {
        causes.push(invalid(
            format!("{at}.key"),
            key,
            "not a valid field selector key",
        ));
        return;
    }
    for (index, value) in values.iter().enumerate() {
        let value = value.as_str().unwrap_or_default();
        names::refuse(
            causes,
            &format!("{at}.values[{index}]"),
            value,
            names::subdomain(value),
        );
    }
}

fn no_operator(at: &str, operator: &str) -> Cause {
    invalid(
        format!("{at}.operator"),
        operator,
        "not a valid selector operator",
    )
}
