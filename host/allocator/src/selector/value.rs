//! Values of selectors: what a device and an expression consist of, their equality and order.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::Arc;

use super::{EvaluationError, Steps};

/// A value. Lists, maps and strings are shared, so that a clone is cheap.
#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Bool(bool),
    Int(i64),
    Uint(u64),
    Double(f64),
    String(Arc<str>),
    List(Arc<Vec<Value>>),
    Map(Arc<Map>),
    Optional(Option<Arc<Value>>),
    Quantity(Quantity),
    Semver(Arc<semver::Version>),
    Type(&'static str),
}

/// An amount in billionths, which is the finest unit of a quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Quantity(pub(super) i128);

/// A map. The keys are kept as values too, since `1` and `1u` are the same key.
#[derive(Debug, Default)]
pub(super) struct Map {
    pub(super) entries: BTreeMap<Key, (Value, Value)>,
    /// Value for a key that the map does not contain.
    pub(super) default: Option<Value>,
}

/// A key of a map, such that keys which CEL holds for equal are equal.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Key {
    Bool(bool),
    Number(i128),
    String(Arc<str>),
}

/// Nesting of lists and maps that a comparison follows: each level takes stack.
const COMPARED_DEPTH_MAX: usize = 128;

impl Key {
    /// Returns the key that a value is; `None` for a value that can be no key.
    pub(super) fn of(value: &Value) -> Option<Key> {
        match value {
            Value::Bool(value) => Some(Key::Bool(*value)),
            Value::String(value) => Some(Key::String(Arc::clone(value))),
            other => integer(other).map(Key::Number),
        }
    }
}

impl Map {
    pub(super) fn find(
        &self,
        key: &Key,
        steps: &mut Steps,
    ) -> Result<Option<&Value>, EvaluationError> {
        self.take_search(key, steps)?;
        Ok(self
            .entries
            .get(key)
            .map(|(_, value)| value)
            .or(self.default.as_ref()))
    }

    /// Takes the steps for the texts that a search of a key compares.
    pub(super) fn take_search(&self, key: &Key, steps: &mut Steps) -> Result<(), EvaluationError> {
        let Key::String(text) = key else {
            return Ok(());
        };
        let compared = self
            .entries
            .len()
            .checked_ilog2()
            .map_or(0, |log| log as usize + 1);
        steps.take_text(text.len().saturating_mul(compared))
    }
}

impl Value {
    pub(super) fn string(text: impl Into<Arc<str>>) -> Value {
        Value::String(text.into())
    }

    pub(super) fn list(values: Vec<Value>) -> Value {
        Value::List(Arc::new(values))
    }

    pub(super) fn some(value: Value) -> Value {
        Value::Optional(Some(Arc::new(value)))
    }

    /// Returns the name by which `type(value)` is known.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Value::Null => "null_type",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Uint(_) => "uint",
            Value::Double(_) => "double",
            Value::String(_) => "string",
            Value::List(_) => "list",
            Value::Map(_) => "map",
            Value::Optional(_) => "optional_type",
            Value::Quantity(_) => "kubernetes.Quantity",
            Value::Semver(_) => "kubernetes.Semver",
            Value::Type(_) => "type",
        }
    }

    /// Returns true for a zero value, which an optional without zero values does not hold.
    pub(super) fn is_zero(&self) -> bool {
        match self {
            Value::Null => true,
            Value::Bool(value) => !value,
            Value::Int(value) => *value == 0,
            Value::Uint(value) => *value == 0,
            Value::Double(value) => *value == 0.0,
            Value::String(value) => value.is_empty(),
            Value::List(values) => values.is_empty(),
            Value::Map(map) => map.entries.is_empty(),
            Value::Optional(value) => value.is_none(),
            Value::Quantity(_) | Value::Semver(_) | Value::Type(_) => false,
        }
    }
}

/// Returns the whole number that a number is, without loss.
fn integer(value: &Value) -> Option<i128> {
    match value {
        Value::Int(value) => Some(i128::from(*value)),
        Value::Uint(value) => Some(i128::from(*value)),
        // Below 2^64, so that the cast is exact.
        Value::Double(value) if value.fract() == 0.0 && value.abs() < 1.8e19 => {
            Some(*value as i128)
        }
        _ => None,
    }
}

/// Returns the number of an element in a list.
pub(super) fn index(value: &Value) -> Option<i128> {
    integer(value)
}

/// Compares two values; `None` if CEL has no equality between them: a quantity or a version on the left with another type on the right.
///
/// # Errors
///
/// Fails if the steps are used up or the values are nested too deeply.
pub(super) fn equal(
    left: &Value,
    right: &Value,
    steps: &mut Steps,
) -> Result<Option<bool>, EvaluationError> {
    equal_at(left, right, steps, 0)
}

fn equal_at(
    left: &Value,
    right: &Value,
    steps: &mut Steps,
    depth: usize,
) -> Result<Option<bool>, EvaluationError> {
    steps.take(1)?;
    if depth > COMPARED_DEPTH_MAX {
        return Err(EvaluationError::TooDeep);
    }
    // A pair without equality inside of a list or a map does not make them differ, as in cel-go.
    Ok(Some(match (left, right) {
        (Value::Null, _) | (_, Value::Null) => matches!((left, right), (Value::Null, Value::Null)),
        (Value::Bool(left), Value::Bool(right)) => left == right,
        (Value::String(left), Value::String(right)) => {
            steps.take_text(left.len())?;
            left == right
        }
        (Value::Type(left), Value::Type(right)) => left == right,
        (Value::Quantity(left), Value::Quantity(right)) => left == right,
        (Value::Semver(left), Value::Semver(right)) => {
            steps.take_text(left.pre.len())?;
            left.cmp_precedence(right).is_eq()
        }
        (Value::Quantity(_) | Value::Semver(_), _) => return Ok(None),
        (Value::Optional(left), Value::Optional(right)) => match (left, right) {
            (Some(left), Some(right)) => return equal_at(left, right, steps, depth + 1),
            (left, right) => left.is_none() && right.is_none(),
        },
        (Value::List(left), Value::List(right)) => {
            if left.len() != right.len() {
                return Ok(Some(false));
            }
            for (left, right) in left.iter().zip(right.iter()) {
                if equal_at(left, right, steps, depth + 1)? == Some(false) {
                    return Ok(Some(false));
                }
            }
            true
        }
        (Value::Map(left), Value::Map(right)) => {
            if left.entries.len() != right.entries.len() {
                return Ok(Some(false));
            }
            for (key, (_, value)) in &left.entries {
                let Some(other) = right.find(key, steps)? else {
                    return Ok(Some(false));
                };
                if equal_at(value, other, steps, depth + 1)? == Some(false) {
                    return Ok(Some(false));
                }
            }
            true
        }
        (left, right) => compare_numbers(left, right) == Some(Ordering::Equal),
    }))
}

/// Returns true if the list has an element that is equal to the value. `searched` is on the left of each comparison.
pub(super) fn contains(
    list: &[Value],
    searched: &Value,
    steps: &mut Steps,
) -> Result<bool, EvaluationError> {
    for value in list {
        if equal(searched, value, steps)? == Some(true) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the order of two values; `None` if they have none.
///
/// # Errors
///
/// Fails if the steps are used up.
pub(super) fn compare(
    left: &Value,
    right: &Value,
    steps: &mut Steps,
) -> Result<Option<Ordering>, EvaluationError> {
    Ok(match (left, right) {
        (Value::Bool(left), Value::Bool(right)) => Some(left.cmp(right)),
        (Value::String(left), Value::String(right)) => {
            steps.take_text(left.len())?;
            Some(left.cmp(right))
        }
        (left, right) => compare_numbers(left, right),
    })
}

/// Returns true if values of this type have an order.
pub(super) fn is_ordered(value: &Value) -> bool {
    matches!(
        value,
        Value::Bool(_) | Value::String(_) | Value::Int(_) | Value::Uint(_) | Value::Double(_)
    )
}

fn compare_numbers(left: &Value, right: &Value) -> Option<Ordering> {
    match (left, right) {
        (Value::Double(_), _) | (_, Value::Double(_)) => double(left)?.partial_cmp(&double(right)?),
        _ => Some(integer(left)?.cmp(&integer(right)?)),
    }
}

fn double(value: &Value) -> Option<f64> {
    match value {
        Value::Int(value) => Some(*value as f64),
        Value::Uint(value) => Some(*value as f64),
        Value::Double(value) => Some(*value),
        _ => None,
    }
}
