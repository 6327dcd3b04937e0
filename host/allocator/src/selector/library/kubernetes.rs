//! Quantities and semantic versions.

use std::cmp::Ordering;
use std::sync::Arc;

use nodedock_model::quantity;

use super::super::functions::Function;
use super::super::value::{Quantity, Value};
use super::super::{EvaluationError, Steps};
use super::{Returned, no_overload};

/// Billionths in one.
const NANOS: i128 = 1_000_000_000;

pub(super) fn call(function: Function, arguments: &[Value], steps: &mut Steps) -> Returned {
    use Function as F;
    if let Some(Value::String(text)) = arguments.first() {
        steps.take_text(text.len())?;
    }
    match (function, arguments) {
        (F::ToQuantity, [Value::String(text)]) => quantity::nanos(text)
            .map(|nanos| Value::Quantity(Quantity(nanos)))
            .ok_or_else(|| not(text, "quantity")),
        (F::IsQuantity, [Value::String(text)]) => Ok(Value::Bool(quantity::nanos(text).is_some())),
        (F::Sign, [Value::Quantity(Quantity(nanos))]) => {
            Ok(Value::Int(i64::try_from(nanos.signum()).unwrap_or(0)))
        }
        (F::IsInteger, [Value::Quantity(quantity)]) => Ok(Value::Bool(whole(*quantity).is_some())),
        (F::AsInteger, [Value::Quantity(quantity)]) => {
            whole(*quantity)
                .map(Value::Int)
                .ok_or(EvaluationError::OutOfRange {
                    function: "asInteger",
                })
        }
        (F::AsApproximateFloat, [Value::Quantity(Quantity(nanos))]) => {
            Ok(Value::Double(*nanos as f64 / NANOS as f64))
        }
        (F::QuantityAdd | F::QuantitySub, [Value::Quantity(Quantity(left)), right]) => {
            let right = match right {
                Value::Quantity(Quantity(right)) => *right,
                Value::Int(right) => i128::from(*right) * NANOS,
                _ => return Err(no_overload("add")),
            };
            let sum = match function {
                F::QuantityAdd => left.checked_add(right),
                _ => left.checked_sub(right),
            };
            sum.map(|nanos| Value::Quantity(Quantity(nanos)))
                .ok_or(EvaluationError::OutOfRange { function: "add" })
        }
        (F::IsGreaterThan, [left, right]) => {
            Ok(Value::Bool(order(left, right, steps)? == Ordering::Greater))
        }
        (F::IsLessThan, [left, right]) => {
            Ok(Value::Bool(order(left, right, steps)? == Ordering::Less))
        }
        (F::CompareTo, [left, right]) => Ok(Value::Int(order(left, right, steps)? as i64)),
        (F::ToSemver | F::IsSemver, [Value::String(text), rest @ ..]) => {
            let parsed = match rest {
                [] | [Value::Bool(false)] => semver::Version::parse(text).ok(),
                [Value::Bool(true)] => semver::Version::parse(&normalized(text)).ok(),
                _ => return Err(no_overload("semver")),
            };
            match function {
                F::IsSemver => Ok(Value::Bool(parsed.is_some())),
                _ => parsed
                    .map(|version| Value::Semver(Arc::new(version)))
                    .ok_or_else(|| not(text, "semantic version")),
            }
        }
        // The scheduler converts the numbers in the same way, without a check.
        (F::Major, [Value::Semver(version)]) => Ok(Value::Int(version.major as i64)),
        (F::Minor, [Value::Semver(version)]) => Ok(Value::Int(version.minor as i64)),
        (F::Patch, [Value::Semver(version)]) => Ok(Value::Int(version.patch as i64)),
        _ => Err(no_overload("a function of quantities or versions")),
    }
}

fn not(text: &str, wanted: &'static str) -> EvaluationError {
    EvaluationError::NotConvertible {
        value: text.chars().take(64).collect(),
        wanted,
    }
}

fn whole(Quantity(nanos): Quantity) -> Option<i64> {
    (nanos % NANOS == 0)
        .then(|| i64::try_from(nanos / NANOS).ok())
        .flatten()
}

fn order(left: &Value, right: &Value, steps: &mut Steps) -> Result<Ordering, EvaluationError> {
    match (left, right) {
        (Value::Quantity(left), Value::Quantity(right)) => Ok(left.cmp(right)),
        (Value::Semver(left), Value::Semver(right)) => {
            steps.take_text(left.pre.len())?;
            Ok(left.cmp_precedence(right))
        }
        _ => Err(no_overload("compareTo")),
    }
}

/// Returns a version without a leading `v` and without leading zeros, and with all three numbers.
fn normalized(text: &str) -> String {
    let text = text.strip_prefix('v').unwrap_or(text);
    let mut parts: Vec<String> = text.splitn(3, '.').map(without_zeros).collect();
    // A short version with a pre-release or a build is malformed, and stays so.
    let is_plain = !parts.last().is_some_and(|last| last.contains(['+', '-']));
    while parts.len() < 3 && is_plain {
        parts.push("0".to_owned());
    }
    parts.join(".")
}

fn without_zeros(part: &str) -> String {
    let trimmed = part.trim_start_matches('0');
    match trimmed.chars().next() {
        _ if part.len() <= 1 => part.to_owned(),
        Some(first) if first.is_ascii_digit() => trimmed.to_owned(),
        _ => format!("0{trimmed}"),
    }
}
