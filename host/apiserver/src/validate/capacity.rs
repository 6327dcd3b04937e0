//! The rules of a device's capacity and of what a consumer may take of it.

use nodedock_model::quantity;
use serde_json::Value;

use super::fields::{Causes, invalid, list, set};
use crate::status::Cause;

/// Values of which a consumer takes one.
const VALID_VALUES: usize = 10;
const NANOS: i128 = 1_000_000_000;

/// Checks a capacity; only a device that several claims can have may say how much of it each may take.
pub(super) fn check(causes: &mut Causes, at: &str, capacity: &Value, is_shared: bool) {
    let (at, policy) = (format!("{at}.requestPolicy"), &capacity["requestPolicy"]);
    if policy.is_null() {
        return;
    }
    if !is_shared {
        causes.push(Cause::forbidden(
            at,
            "allowMultipleAllocations must be true",
        ));
        return;
    }
    let whole = Amount::of(&capacity["value"]);
    let (values, range) = (list(policy, "validValues"), &policy["validRange"]);
    let (choice, key) = match (values.is_empty(), range.is_null()) {
        (false, false) => {
            let why = "exactly one policy can be specified, cannot specify \"validValues\" and \"validRange\" at the same time";
            causes.push(Cause::forbidden(at, why));
            return;
        }
        (true, true) => return,
        (false, true) => (policy, "validValues"),
        (true, false) => (range, "validRange"),
    };
    if policy["default"].is_null() {
        let why = format!("required when {key} is defined");
        causes.push(Cause::required(format!("{at}.default"), &why));
        return;
    }
    let default = Amount::of(&policy["default"]);
    match key {
        "validValues" => one_of(causes, &at, choice, &whole, &default),
        _ => between(causes, &format!("{at}.{key}"), choice, &whole, &default),
    }
}

/// A quantity, and how it was written.
struct Amount {
    text: String,
    /// A quantity out of range counts as none.
    nanos: i128,
}

impl Amount {
    fn of(quantity: &Value) -> Self {
        let text = match quantity {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        let nanos = quantity::nanos(&text).unwrap_or_default();
        Self { text, nanos }
    }

    /// In whole units, rounded up.
    fn units(&self) -> i128 {
        self.nanos.div_euclid(NANOS) + i128::from(self.nanos.rem_euclid(NANOS) != 0)
    }
}

fn one_of(causes: &mut Causes, at: &str, policy: &Value, whole: &Amount, default: &Amount) {
    let field = format!("{at}.validValues");
    let values: Vec<Amount> = list(policy, "validValues").iter().map(Amount::of).collect();
    for (index, (value, next)) in values.iter().zip(values.iter().skip(1)).enumerate() {
        if value.nanos > next.nanos {
            let field = format!("{field}[{}]", index + 1);
            causes.push(invalid(
                field,
                &next.text,
                "values must be sorted in ascending order",
            ));
        }
    }
    let identity = |value: &Value| format!("\"{}\"", Amount::of(value).units());
    set(
        causes,
        at,
        policy,
        "validValues",
        VALID_VALUES,
        identity,
        |causes, field, value| {
            let value = Amount::of(value);
            if value.nanos > whole.nanos {
                let why = format!("option is larger than capacity value: {}", whole.text);
                causes.push(invalid(field, &value.text, &why));
            }
        },
    );
    let is_default = |value: &Amount| value.nanos == default.nanos;
    if values.len() > VALID_VALUES || !values.iter().any(is_default) {
        let why = "default value is not valid according to the requestPolicy";
        causes.push(invalid(field, &default.text, why));
    }
}

fn between(causes: &mut Causes, at: &str, range: &Value, whole: &Amount, default: &Amount) {
    if range["min"].is_null() {
        causes.push(Cause::required(
            format!("{at}.min"),
            "required when validRange is defined",
        ));
        return;
    }
    let min = Amount::of(&range["min"]);
    let mut refuse = |is_wrong: bool, key: &str, shown: &Amount, why: &str, than: &str| {
        if is_wrong {
            causes.push(invalid(
                format!("{at}.{key}"),
                &shown.text,
                &format!("{why}: {than}"),
            ));
        }
    };
    refuse(
        min.nanos > whole.nanos,
        "min",
        &min,
        "min is larger than capacity value",
        &whole.text,
    );
    refuse(
        default.nanos < min.nanos,
        "min",
        default,
        "default is less than min",
        &min.text,
    );
    let max = Some(&range["max"])
        .filter(|max| !max.is_null())
        .map(Amount::of);
    if let Some(max) = &max {
        refuse(
            min.nanos > max.nanos,
            "max",
            &min,
            "min is larger than max",
            &max.text,
        );
        refuse(
            max.nanos > whole.nanos,
            "max",
            max,
            "max is larger than capacity value",
            &whole.text,
        );
        refuse(
            default.nanos > max.nanos,
            "max",
            default,
            "default is more than max",
            &max.text,
        );
    }
    if !range["step"].is_null() {
        steps(
            causes,
            &format!("{at}.step"),
            &Amount::of(&range["step"]),
            &min,
            whole,
            [Some(default), max.as_ref()],
        );
    }
}

/// Each of `values` is as many steps from the least amount as may be, without a rest.
fn steps(
    causes: &mut Causes,
    field: &str,
    step: &Amount,
    min: &Amount,
    whole: &Amount,
    values: [Option<&Amount>; 2],
) {
    let first = min.nanos.saturating_add(step.nanos);
    if first > whole.nanos {
        let first = quantity::of_nanos(first);
        let why = format!(
            "one step {first} is larger than capacity value: {}",
            whole.text
        );
        causes.push(invalid(field, &step.text, &why));
    }
    for value in values.into_iter().flatten() {
        let rest = value
            .units()
            .saturating_sub(min.units())
            .checked_rem(step.units());
        // A step of nothing leads nowhere.
        if rest != Some(0) {
            let why = format!(
                "value is not a multiple of a given step ({}) from ({})",
                step.text, min.text
            );
            causes.push(invalid(field, &value.text, &why));
        }
    }
}
