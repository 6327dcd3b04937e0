//! Functions of lists, maps and sets.

use std::cmp::Ordering;

use super::super::functions::Function;
use super::super::value::{self, Key, Value};
use super::super::{EvaluationError, Steps};
use super::{Returned, length, no_overload, numbers};

pub(super) fn call(function: Function, arguments: &[Value], steps: &mut Steps) -> Returned {
    use Function as F;
    match (function, arguments) {
        (F::In, [searched, Value::List(list)]) => {
            value::contains(list, searched, steps).map(Value::Bool)
        }
        // Not a key that is there by default only.
        (F::In, [searched, Value::Map(map)]) => {
            let Some(key) = Key::of(searched) else {
                return Ok(Value::Bool(false));
            };
            map.take_search(&key, steps)?;
            Ok(Value::Bool(map.entries.contains_key(&key)))
        }
        (F::Index, [Value::Optional(None), _]) => Ok(Value::Optional(None)),
        (F::Index, [Value::Optional(Some(operand)), index]) => Ok(Value::Optional(
            find(operand, index, steps)?.map(std::sync::Arc::new),
        )),
        (F::Index, [operand, index]) => find(operand, index, steps)?
            .ok_or_else(|| EvaluationError::NoSuchKey { key: shown(index) }),
        (F::OptionalIndex, [Value::Optional(None), _]) => Ok(Value::Optional(None)),
        (F::OptionalIndex, [Value::Optional(Some(operand)), index]) => Ok(Value::Optional(
            find(operand, index, steps)?.map(std::sync::Arc::new),
        )),
        (F::OptionalIndex, [operand, index]) => Ok(Value::Optional(
            find(operand, index, steps)?.map(std::sync::Arc::new),
        )),
        (F::Size, [Value::List(list)]) => Ok(length(list.len())),
        (F::Size, [Value::Map(map)]) => Ok(length(map.entries.len())),
        (F::Size, [Value::String(text)]) => {
            steps.take_text(text.len())?;
            Ok(length(text.chars().count()))
        }
        (F::Join, [Value::List(list)]) => join(list, "", steps),
        (F::Join, [Value::List(list), Value::String(separator)]) => join(list, separator, steps),
        (F::IndexOf, [Value::List(list), searched]) => {
            position(list.iter().enumerate(), searched, steps)
        }
        (F::LastIndexOf, [Value::List(list), searched]) => {
            position(list.iter().enumerate().rev(), searched, steps)
        }
        (F::IsSorted, [Value::List(list)]) => is_sorted(list, steps),
        (F::Sum, [Value::List(list), zero]) => {
            let mut sum = match list.first() {
                None | Some(Value::Int(_)) => zero.clone(),
                Some(Value::Uint(_)) => Value::Uint(0),
                Some(Value::Double(_)) => Value::Double(0.0),
                Some(_) => return Err(no_overload("sum")),
            };
            steps.take(list.len())?;
            for value in list.iter() {
                sum = numbers::operate(F::Add, &[sum, value.clone()], steps)?;
            }
            Ok(sum)
        }
        (F::Min, [Value::List(list)]) => extreme(list, Ordering::Greater, "min", steps),
        (F::Max, [Value::List(list)]) => extreme(list, Ordering::Less, "max", steps),
        (F::Includes, [Value::List(list), searched]) => Ok(Value::Bool(matches!(
            position(list.iter().enumerate(), searched, steps)?,
            Value::Int(0..)
        ))),
        (F::Includes, [value, searched]) => Ok(Value::Bool(
            value::equal(value, searched, steps)? == Some(true),
        )),
        (F::First, [Value::List(list)]) => Ok(list
            .first()
            .map_or(Value::Optional(None), |value| Value::some(value.clone()))),
        (F::Last, [Value::List(list)]) => Ok(list
            .last()
            .map_or(Value::Optional(None), |value| Value::some(value.clone()))),
        (F::SetsContains, [Value::List(list), Value::List(parts)]) => {
            contains_all(list, parts, steps).map(Value::Bool)
        }
        (F::SetsEquivalent, [Value::List(left), Value::List(right)]) => Ok(Value::Bool(
            contains_all(left, right, steps)? && contains_all(right, left, steps)?,
        )),
        (F::SetsIntersects, [Value::List(left), Value::List(right)]) => {
            for value in left.iter() {
                if value::contains(right, value, steps)? {
                    return Ok(Value::Bool(true));
                }
            }
            Ok(Value::Bool(false))
        }
        _ => Err(no_overload("a function of lists or maps")),
    }
}

/// Returns the element of a list or a map.
fn find(
    operand: &Value,
    index: &Value,
    steps: &mut Steps,
) -> Result<Option<Value>, EvaluationError> {
    match operand {
        Value::List(list) => {
            let number = value::index(index).ok_or(no_overload("[]"))?;
            Ok(usize::try_from(number)
                .ok()
                .and_then(|number| list.get(number))
                .cloned())
        }
        Value::Map(map) => match Key::of(index) {
            Some(key) => map.find(&key, steps).map(Option::<&Value>::cloned),
            None => Ok(None),
        },
        _ => Ok(None),
    }
}

fn shown(index: &Value) -> String {
    match index {
        Value::String(text) => text.chars().take(64).collect(),
        Value::Int(number) => number.to_string(),
        other => other.type_name().to_owned(),
    }
}

fn join(list: &[Value], separator: &str, steps: &mut Steps) -> Returned {
    let mut joined = String::new();
    for (number, value) in list.iter().enumerate() {
        let Value::String(text) = value else {
            return Err(no_overload("join"));
        };
        steps.take(1)?;
        steps.take_text(text.len() + separator.len())?;
        if number > 0 {
            joined.push_str(separator);
        }
        joined.push_str(text);
    }
    Ok(Value::string(joined))
}

/// Returns the number of the first element that is equal, or -1.
fn position<'a>(
    list: impl Iterator<Item = (usize, &'a Value)>,
    searched: &Value,
    steps: &mut Steps,
) -> Returned {
    for (number, value) in list {
        if value::equal(value, searched, steps)? == Some(true) {
            return Ok(length(number));
        }
    }
    Ok(Value::Int(-1))
}

fn is_sorted(list: &[Value], steps: &mut Steps) -> Returned {
    steps.take(list.len())?;
    if !list.iter().all(value::is_ordered) {
        return Err(no_overload("isSorted"));
    }
    for (left, right) in list.iter().zip(list.iter().skip(1)) {
        if value::compare(left, right, steps)? == Some(Ordering::Greater) {
            return Ok(Value::Bool(false));
        }
    }
    Ok(Value::Bool(true))
}

/// Returns the element that replaced every one that was in the order `replaced` to it.
fn extreme(
    list: &[Value],
    replaced: Ordering,
    function: &'static str,
    steps: &mut Steps,
) -> Returned {
    steps.take(list.len())?;
    let mut extreme: Option<&Value> = None;
    for value in list {
        if !value::is_ordered(value) {
            return Err(no_overload(function));
        }
        let is_replaced = match extreme {
            Some(extreme) => value::compare(extreme, value, steps)? == Some(replaced),
            None => true,
        };
        if is_replaced {
            extreme = Some(value);
        }
    }
    extreme
        .cloned()
        .ok_or(EvaluationError::OutOfRange { function })
}

fn contains_all(
    list: &[Value],
    parts: &[Value],
    steps: &mut Steps,
) -> Result<bool, EvaluationError> {
    for part in parts {
        if !value::contains(list, part, steps)? {
            return Ok(false);
        }
    }
    Ok(true)
}
