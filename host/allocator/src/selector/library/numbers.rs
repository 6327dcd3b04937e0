//! Arithmetic, concatenation and conversions.

use super::super::functions::Function;
use super::super::value::Value;
use super::super::{EvaluationError, Steps};
use super::{Returned, no_overload};

/// Applies an operator to one or two values of the same type.
pub(super) fn operate(function: Function, arguments: &[Value], steps: &mut Steps) -> Returned {
    match (function, arguments) {
        (Function::Not, [Value::Bool(value)]) => Ok(Value::Bool(!value)),
        (Function::Negate, [Value::Int(value)]) => {
            in_range(value.checked_neg().map(Value::Int), "-")
        }
        (Function::Negate, [Value::Double(value)]) => Ok(Value::Double(-value)),
        (Function::Add, [Value::String(left), Value::String(right)]) => {
            steps.take_text(left.len() + right.len())?;
            Ok(Value::string([left.as_ref(), right.as_ref()].concat()))
        }
        (Function::Add, [Value::List(left), Value::List(right)]) => {
            steps.take(left.len() + right.len())?;
            Ok(Value::list([left.as_slice(), right.as_slice()].concat()))
        }
        (_, [Value::Int(left), Value::Int(right)]) => integers(function, *left, *right),
        (_, [Value::Uint(left), Value::Uint(right)]) => naturals(function, *left, *right),
        (_, [Value::Double(left), Value::Double(right)]) => Ok(Value::Double(match function {
            Function::Add => left + right,
            Function::Subtract => left - right,
            Function::Multiply => left * right,
            Function::Divide => left / right,
            _ => return Err(no_overload(sign(function))),
        })),
        _ => Err(no_overload(sign(function))),
    }
}

fn integers(function: Function, left: i64, right: i64) -> Returned {
    let result = match function {
        Function::Add => left.checked_add(right),
        Function::Subtract => left.checked_sub(right),
        Function::Multiply => left.checked_mul(right),
        Function::Divide | Function::Modulo if right == 0 => {
            return Err(EvaluationError::DivisionByZero);
        }
        Function::Divide => left.checked_div(right),
        Function::Modulo => left.checked_rem(right),
        _ => return Err(no_overload(sign(function))),
    };
    in_range(result.map(Value::Int), sign(function))
}

fn naturals(function: Function, left: u64, right: u64) -> Returned {
    let result = match function {
        Function::Add => left.checked_add(right),
        Function::Subtract => left.checked_sub(right),
        Function::Multiply => left.checked_mul(right),
        Function::Divide | Function::Modulo if right == 0 => {
            return Err(EvaluationError::DivisionByZero);
        }
        Function::Divide => left.checked_div(right),
        Function::Modulo => left.checked_rem(right),
        _ => return Err(no_overload(sign(function))),
    };
    in_range(result.map(Value::Uint), sign(function))
}

fn in_range(result: Option<Value>, function: &'static str) -> Returned {
    result.ok_or(EvaluationError::OutOfRange { function })
}

fn sign(function: Function) -> &'static str {
    match function {
        Function::Not => "!",
        Function::Add => "+",
        Function::Multiply => "*",
        Function::Divide => "/",
        Function::Modulo => "%",
        _ => "-",
    }
}

/// Converts a value as the function of the type's name does.
pub(super) fn convert(function: Function, value: Value, steps: &mut Steps) -> Returned {
    if let Value::String(text) = &value {
        steps.take_text(text.len())?;
    }
    let (converted, wanted) = match function {
        Function::ToDyn => (Some(value.clone()), "dyn"),
        Function::ToBool => (to_bool(&value), "bool"),
        Function::ToInt => (to_int(&value), "int"),
        Function::ToUint => (to_uint(&value), "uint"),
        Function::ToDouble => (to_double(&value), "double"),
        _ => (to_string(&value), "string"),
    };
    converted.ok_or_else(|| EvaluationError::NotConvertible {
        value: match to_string(&value) {
            Some(Value::String(text)) => text.chars().take(64).collect(),
            _ => value.type_name().to_owned(),
        },
        wanted,
    })
}

fn to_bool(value: &Value) -> Option<Value> {
    match value {
        Value::Bool(_) => Some(value.clone()),
        Value::String(text) => match text.as_ref() {
            "1" | "t" | "T" | "TRUE" | "true" | "True" => Some(Value::Bool(true)),
            "0" | "f" | "F" | "FALSE" | "false" | "False" => Some(Value::Bool(false)),
            _ => None,
        },
        _ => None,
    }
}

fn to_int(value: &Value) -> Option<Value> {
    match value {
        Value::Int(_) => Some(value.clone()),
        Value::Uint(value) => i64::try_from(*value).ok().map(Value::Int),
        // Both bounds are outside of what cel-go converts.
        Value::Double(value) if *value > i64::MIN as f64 && *value < i64::MAX as f64 => {
            Some(Value::Int(*value as i64))
        }
        Value::String(text) => text.parse().ok().map(Value::Int),
        _ => None,
    }
}

fn to_uint(value: &Value) -> Option<Value> {
    match value {
        Value::Uint(_) => Some(value.clone()),
        Value::Int(value) => u64::try_from(*value).ok().map(Value::Uint),
        Value::Double(value) if *value >= 0.0 && *value < u64::MAX as f64 => {
            Some(Value::Uint(*value as u64))
        }
        Value::String(text) if !text.starts_with('+') => text.parse().ok().map(Value::Uint),
        _ => None,
    }
}

fn to_double(value: &Value) -> Option<Value> {
    match value {
        Value::Double(_) => Some(value.clone()),
        Value::Int(value) => Some(Value::Double(*value as f64)),
        Value::Uint(value) => Some(Value::Double(*value as f64)),
        Value::String(text) => {
            let value: f64 = text.parse().ok()?;
            // A number that is too large is an error; the word is not.
            (value.is_finite() || !text.contains(|c: char| c.is_ascii_digit()))
                .then_some(Value::Double(value))
        }
        _ => None,
    }
}

fn to_string(value: &Value) -> Option<Value> {
    Some(Value::string(match value {
        Value::String(_) => return Some(value.clone()),
        Value::Bool(value) => value.to_string(),
        Value::Int(value) => value.to_string(),
        Value::Uint(value) => value.to_string(),
        Value::Double(value) => double(*value),
        _ => return None,
    }))
}

/// Formats a double as `%g` of Go does: with an exponent below -4 and from 6 on.
fn double(value: f64) -> String {
    /// The first exponent that Go writes.
    const EXPONENT_MIN: i32 = 6;
    if value.is_nan() {
        return "NaN".to_owned();
    }
    if value.is_infinite() {
        return if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let Some((mantissa, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    match exponent.parse::<i32>() {
        Ok(exponent) if (-4..EXPONENT_MIN).contains(&exponent) => value.to_string(),
        Ok(exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
        }
        Err(_) => scientific,
    }
}
