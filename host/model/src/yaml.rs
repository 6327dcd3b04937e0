//! YAML and JSON of Kubernetes objects, read as `kubectl` and other clients that are written in Go read them: YAML 1.1, and then JSON.
//!
//! Two differences are on purpose: a mapping that has a key twice is refused, of which Go takes the last value, and so is `!!binary`.

mod compose;
mod scalar;

use serde::de::IgnoredAny;
use serde_json::{Number, Value};

pub use self::compose::Aliases;

/// Bound of the whole numbers that an integer of 64 bits can have: 2 to the power of 63.
const WHOLE_NUMBERS: f64 = 9_223_372_036_854_775_808.0;

/// Why a text is not read.
#[derive(Debug, thiserror::Error)]
pub enum SyntaxError {
    /// Lines and columns count from 1.
    #[error("line {line}, column {column}: {what}")]
    At {
        line: usize,
        column: usize,
        what: String,
    },
    #[error("it has more than one document")]
    Documents,
}

/// Reads every document of a text; an empty one is null. `0755` is an octal number, `8080.0` and `1e3` are whole numbers, and `on` is true,
/// also as a key, which is the text `true` then. At the beginning, objects of JSON need no line `---` between them.
///
/// # Errors
///
/// The text is not YAML, a mapping has a key twice, a key is null, a list or a mapping, a number is not finite, or the text nests deeper
/// than 128 levels or repeats more than 64 MiB by aliases.
pub fn documents(text: &str) -> Result<Vec<Value>, SyntaxError> {
    documents_with(text, Aliases::Expanded, usize::MAX)
}

/// Reads the documents, and no further ones once there are more than `most`.
fn documents_with(text: &str, aliases: Aliases, most: usize) -> Result<Vec<Value>, SyntaxError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut documents = Vec::new();
    let mut begin = 0;
    while let Some((end, next)) = json_object(text, begin) {
        compose::documents(text, begin..end, aliases, &mut documents)?;
        begin = next;
        if documents.len() > most {
            return Ok(documents);
        }
    }
    compose::documents(text, begin..text.len(), aliases, &mut documents)?;
    Ok(documents)
}

/// Reads the only document of a text like [`documents`], with or without aliases; a text without any is null.
///
/// # Errors
///
/// Those of [`documents`], an alias where there may be none, and more than one document.
pub fn document(text: &str, aliases: Aliases) -> Result<Value, SyntaxError> {
    let mut documents = documents_with(text, aliases, 1)?;
    let document = documents.pop().unwrap_or(Value::Null);
    documents
        .is_empty()
        .then_some(document)
        .ok_or(SyntaxError::Documents)
}

/// The end of an object in JSON at a place of a text, and where the next document begins: after a line `---` if one follows. `None`: there is
/// no such object, or it is followed by something that is no document.
fn json_object(text: &str, begin: usize) -> Option<(usize, usize)> {
    let text_here = &text[begin..];
    if !text_here.trim_start().starts_with('{') {
        return None;
    }
    let mut values = serde_json::Deserializer::from_str(text_here).into_iter::<IgnoredAny>();
    // no error: what is not JSON is read as YAML
    values.next()?.ok()?;
    let end = begin + values.byte_offset();
    let rest = text[end..].trim_start();
    let next = rest.strip_prefix("---").filter(|next| {
        let line = next.lines().next().unwrap_or_default();
        line.trim().is_empty()
    });
    let is_next = rest.is_empty() || ["{", "---", "#"].iter().any(|sign| rest.starts_with(sign));
    is_next.then(|| (end, text.len() - next.unwrap_or(rest).len()))
}

/// Makes integers of all numbers in a value that are whole: Go writes them as JSON without a fraction and without an exponent.
pub fn whole_numbers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            if let Some(whole) = whole(number) {
                *number = whole;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(whole_numbers),
        Value::Object(fields) => fields.values_mut().for_each(whole_numbers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

fn whole(number: &Number) -> Option<Number> {
    let float = number.as_f64().filter(|_| number.is_f64())?;
    let is_whole = float.fract() == 0.0 && float.abs() < WHOLE_NUMBERS;
    is_whole.then(|| Number::from(float as i64))
}

#[cfg(test)]
#[path = "yaml_tests.rs"]
mod tests;
