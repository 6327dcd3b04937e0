//! The value of a scalar, by the rules of Go's library for YAML (`go.yaml.in/yaml/v2`), which `kubectl` reads files with.

use std::sync::LazyLock;

use regex::Regex;
use serde_json::{Number, Value};

use super::whole;

/// A number with a fraction or an exponent.
static FLOAT: LazyLock<Regex> = LazyLock::new(|| {
    let float = r"^[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$";
    Regex::new(float).expect("a valid expression")
});
/// Bounds of the numbers with a fraction whose text as a key is the same everywhere; Go writes others with an exponent.
const FLOAT_KEYS: std::ops::Range<f32> = 1e-4..1e6;

/// Returns the value of a scalar without quotes and without a tag.
///
/// # Errors
///
/// It is a number that JSON cannot have.
pub(super) fn plain(text: &str) -> Result<Value, String> {
    let value = match text {
        "" | "~" | "null" | "Null" | "NULL" => Value::Null,
        "y" | "Y" | "yes" | "Yes" | "YES" | "true" | "True" | "TRUE" | "on" | "On" | "ON" => {
            true.into()
        }
        "n" | "N" | "no" | "No" | "NO" | "false" | "False" | "FALSE" | "off" | "Off" | "OFF" => {
            false.into()
        }
        ".nan" | ".NaN" | ".NAN" | ".inf" | ".Inf" | ".INF" | "+.inf" | "+.Inf" | "+.INF"
        | "-.inf" | "-.Inf" | "-.INF" => {
            return Err(format!("JSON has no number {text}"));
        }
        _ => number(text).map_or_else(|| text.into(), Value::Number),
    };
    Ok(value)
}

/// Returns the value of a scalar with a tag of YAML, such as `str`, whose form may be one with quotes.
///
/// # Errors
///
/// The text is none of this type.
pub(super) fn tagged(tag: &str, text: &str) -> Result<Value, String> {
    let value = match tag {
        "bool" | "int" | "float" | "null" => plain(text)?,
        "binary" => return Err("!!binary is not supported: write the text itself".to_owned()),
        _ => return Ok(text.into()),
    };
    let is_one = match (tag, &value) {
        ("bool", Value::Bool(_)) | ("null", Value::Null) | ("float", Value::Number(_)) => true,
        ("int", Value::Number(_)) => integer(&text.replace('_', "")).is_some(),
        _ => false,
    };
    is_one
        .then_some(value)
        .ok_or_else(|| format!("{text:?} is no {tag}"))
}

/// Returns the text of a key.
///
/// # Errors
///
/// JSON has no such key.
pub(super) fn key(value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Bool(_) => Ok(value.to_string()),
        Value::Number(number) if number.is_i64() => Ok(number.to_string()),
        Value::Number(number) => {
            let float = number.as_f64().map(|float| float as f32);
            let float = float.filter(|float| FLOAT_KEYS.contains(&float.abs()));
            float
                .map(|float| float.to_string())
                .ok_or_else(|| format!("the number {number} as a key is to be in quotes"))
        }
        Value::Null => Err("a key is null".to_owned()),
        Value::Array(_) => Err("a key is a list".to_owned()),
        Value::Object(_) => Err("a key is a mapping".to_owned()),
    }
}

fn number(text: &str) -> Option<Number> {
    let digits = match text.as_bytes().first()? {
        b'+' | b'-' | b'0'..=b'9' => text.replace('_', ""),
        b'.' => text.to_owned(),
        _ => return None,
    };
    if text.starts_with('.') {
        return float(&digits);
    }
    integer(&digits).or_else(|| float(&digits))
}

/// A number of 64 bits: decimal, or with a prefix for another base, of which `0` means octal. One that only fits without a sign is, as in
/// JSON of Go's clients, a float.
fn integer(text: &str) -> Option<Number> {
    let (is_negative, unsigned) = match text.as_bytes().first()? {
        b'-' => (true, &text[1..]),
        b'+' => (false, &text[1..]),
        _ => (false, text),
    };
    let (base, digits) = base(unsigned);
    // The parser would accept one more sign.
    let digits = digits
        .bytes()
        .all(|digit| digit.is_ascii_alphanumeric())
        .then_some(digits)?;
    // no error: another text is no number
    let magnitude = i128::from(u64::from_str_radix(digits, base).ok()?);
    let value = if is_negative { -magnitude } else { magnitude };
    match i64::try_from(value) {
        Ok(value) => Some(value.into()),
        Err(_) if unsigned.len() == text.len() => Number::from_f64(value as f64),
        Err(_) => None,
    }
}

fn base(text: &str) -> (u32, &str) {
    match text.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &text[2..]),
        [b'0', b'o' | b'O', ..] => (8, &text[2..]),
        [b'0', b'b' | b'B', ..] => (2, &text[2..]),
        [b'0', _, ..] => (8, &text[1..]),
        _ => (10, text),
    }
}

fn float(text: &str) -> Option<Number> {
    if !FLOAT.is_match(text) {
        return None;
    }
    // no error: another text is no number
    let value: f64 = text.parse().ok()?;
    // One that is not finite is no number, and so a text.
    let number = Number::from_f64(value)?;
    Some(whole(&number).unwrap_or(number))
}
