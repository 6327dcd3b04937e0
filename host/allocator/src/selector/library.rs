//! The library: what each function does with values. A function that makes or reads much takes the steps for it first.

mod collections;
mod kubernetes;
mod numbers;
mod strings;

use std::cmp::Ordering;

use super::functions::Function;
use super::value::{self, Value};
use super::{EvaluationError, Steps};

pub(super) use strings::search;

type Returned = Result<Value, EvaluationError>;

/// Calls a function whose arguments are evaluated.
pub(super) fn call(function: Function, arguments: Vec<Value>, steps: &mut Steps) -> Returned {
    use Function as F;
    match function {
        F::Not | F::Negate | F::Add | F::Subtract | F::Multiply | F::Divide | F::Modulo => {
            numbers::operate(function, &arguments, steps)
        }
        F::Equals | F::NotEquals => {
            let [left, right] = fixed(arguments, "==")?;
            match (function, value::equal(&left, &right, steps)?) {
                (F::NotEquals, equal) => Ok(Value::Bool(equal != Some(true))),
                (_, Some(equal)) => Ok(Value::Bool(equal)),
                (_, None) => Err(no_overload("==")),
            }
        }
        F::Less | F::LessEquals | F::Greater | F::GreaterEquals => {
            let [left, right] = fixed(arguments, "<")?;
            let order = value::compare(&left, &right, steps)?.ok_or(no_overload("<"))?;
            Ok(Value::Bool(match function {
                F::Less => order == Ordering::Less,
                F::LessEquals => order != Ordering::Greater,
                F::Greater => order == Ordering::Greater,
                _ => order != Ordering::Less,
            }))
        }
        F::TypeOf => {
            let [value] = fixed(arguments, "type")?;
            Ok(Value::Type(value.type_name()))
        }
        F::ToBool | F::ToDouble | F::ToDyn | F::ToInt | F::ToString | F::ToUint => {
            let [value] = fixed(arguments, "a conversion")?;
            numbers::convert(function, value, steps)
        }
        F::Contains
        | F::StartsWith
        | F::EndsWith
        | F::Matches
        | F::Find
        | F::FindAll
        | F::CharAt
        | F::LowerAscii
        | F::UpperAscii
        | F::Replace
        | F::Split
        | F::Substring
        | F::Trim => strings::call(function, &arguments, steps),
        F::IndexOf | F::LastIndexOf if !matches!(arguments.first(), Some(Value::List(_))) => {
            strings::call(function, &arguments, steps)
        }
        F::ToQuantity
        | F::IsQuantity
        | F::Sign
        | F::IsInteger
        | F::AsInteger
        | F::AsApproximateFloat
        | F::QuantityAdd
        | F::QuantitySub
        | F::IsGreaterThan
        | F::IsLessThan
        | F::CompareTo
        | F::ToSemver
        | F::IsSemver
        | F::Major
        | F::Minor
        | F::Patch => kubernetes::call(function, &arguments, steps),
        F::OptionalOf
        | F::OptionalOfNonZeroValue
        | F::OptionalNone
        | F::OptionalUnwrap
        | F::OptionalValue
        | F::HasValue => optional(function, arguments, steps),
        F::In
        | F::Index
        | F::OptionalIndex
        | F::Size
        | F::Join
        | F::IndexOf
        | F::LastIndexOf
        | F::IsSorted
        | F::Sum
        | F::Min
        | F::Max
        | F::Includes
        | F::First
        | F::Last
        | F::SetsContains
        | F::SetsEquivalent
        | F::SetsIntersects => collections::call(function, &arguments, steps),
        // The evaluator decides them itself: they do not evaluate all of their arguments.
        F::Conditional | F::Or | F::OrValue => Err(no_overload("or")),
    }
}

fn optional(function: Function, arguments: Vec<Value>, steps: &mut Steps) -> Returned {
    if function == Function::OptionalNone {
        return Ok(Value::Optional(None));
    }
    let [argument] = fixed(arguments, "optional")?;
    match (function, argument) {
        (Function::OptionalOf, value) => Ok(Value::some(value)),
        (Function::OptionalOfNonZeroValue, value) if value.is_zero() => Ok(Value::Optional(None)),
        (Function::OptionalOfNonZeroValue, value) => Ok(Value::some(value)),
        (Function::HasValue, Value::Optional(value)) => Ok(Value::Bool(value.is_some())),
        (Function::OptionalValue, Value::Optional(value)) => value
            .map(|value| value.as_ref().clone())
            .ok_or(EvaluationError::NoValue),
        (Function::OptionalUnwrap, Value::List(values)) => {
            steps.take(values.len())?;
            let mut unwrapped = Vec::new();
            for value in values.iter() {
                let Value::Optional(value) = value else {
                    return Err(no_overload("optional.unwrap"));
                };
                unwrapped.extend(value.as_ref().map(|value| value.as_ref().clone()));
            }
            Ok(Value::list(unwrapped))
        }
        _ => Err(no_overload("optional")),
    }
}

fn fixed<const N: usize>(
    arguments: Vec<Value>,
    function: &'static str,
) -> Result<[Value; N], EvaluationError> {
    arguments.try_into().map_err(|_| no_overload(function))
}

fn no_overload(function: &'static str) -> EvaluationError {
    EvaluationError::NoSuchOverload { function }
}

fn length(count: usize) -> Value {
    Value::Int(i64::try_from(count).unwrap_or(i64::MAX))
}
