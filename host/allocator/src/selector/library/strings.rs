//! Functions of strings. Positions count characters.

use regex::Regex;

use super::super::functions::Function;
use super::super::pattern;
use super::super::value::Value;
use super::super::{EvaluationError, Steps};
use super::{Returned, length, no_overload};

/// Steps of the compilation of a pattern that is not known before.
const PATTERN_STEPS: usize = 4_000;

/// Steps of a search in a byte of text, with the largest pattern.
const SEARCH_STEPS: usize = 32;

pub(super) fn call(function: Function, arguments: &[Value], steps: &mut Steps) -> Returned {
    use Function as F;
    let Some(Value::String(text)) = arguments.first() else {
        return Err(no_overload("a function of strings"));
    };
    // A search reads what it searches for too.
    for argument in arguments {
        if let Value::String(text) = argument {
            steps.take_text(text.len())?;
        }
    }
    match (function, arguments.get(1..).unwrap_or_default()) {
        (F::Contains, [Value::String(part)]) => Ok(Value::Bool(text.contains(part.as_ref()))),
        (F::StartsWith, [Value::String(part)]) => Ok(Value::Bool(text.starts_with(part.as_ref()))),
        (F::EndsWith, [Value::String(part)]) => Ok(Value::Bool(text.ends_with(part.as_ref()))),
        (F::Matches | F::Find | F::FindAll, [Value::String(pattern), rest @ ..]) => {
            steps.take(PATTERN_STEPS)?;
            let pattern = pattern::compile(pattern)?;
            search(
                function,
                &Value::String(text.clone()),
                &pattern,
                rest.first(),
                steps,
            )
        }
        (F::CharAt, [Value::Int(index)]) => {
            let (start, end) = range(text, *index, index.saturating_add(1))
                .or_else(|| range(text, *index, *index))
                .ok_or(EvaluationError::OutOfRange { function: "charAt" })?;
            Ok(Value::string(text.get(start..end).unwrap_or_default()))
        }
        (F::IndexOf, [Value::String(part)]) => index_of(text, part, 0, steps),
        (F::IndexOf, [Value::String(part), Value::Int(from)]) => index_of(text, part, *from, steps),
        (F::LastIndexOf, [Value::String(part)]) => last_index_of(text, part, None, steps),
        (F::LastIndexOf, [Value::String(part), Value::Int(from)]) => {
            last_index_of(text, part, Some(*from), steps)
        }
        (F::LowerAscii, []) => Ok(Value::string(text.to_ascii_lowercase())),
        (F::UpperAscii, []) => Ok(Value::string(text.to_ascii_uppercase())),
        (F::Replace, [Value::String(old), Value::String(new)]) => {
            replace(text, old, new, -1, steps)
        }
        (F::Replace, [Value::String(old), Value::String(new), Value::Int(limit)]) => {
            replace(text, old, new, *limit, steps)
        }
        (F::Split, [Value::String(separator)]) => split(text, separator, -1, steps),
        (F::Split, [Value::String(separator), Value::Int(limit)]) => {
            split(text, separator, *limit, steps)
        }
        (F::Substring, [Value::Int(start)]) => substring(
            text,
            *start,
            i64::try_from(text.chars().count()).unwrap_or(i64::MAX),
        ),
        (F::Substring, [Value::Int(start), Value::Int(end)]) => substring(text, *start, *end),
        (F::Trim, []) => Ok(Value::string(text.trim())),
        _ => Err(no_overload("a function of strings")),
    }
}

/// Searches a compiled pattern: `matches`, `find` or `findAll`.
pub(in super::super) fn search(
    function: Function,
    text: &Value,
    pattern: &Regex,
    limit: Option<&Value>,
    steps: &mut Steps,
) -> Returned {
    let Value::String(text) = text else {
        return Err(no_overload("matches"));
    };
    steps.take(text.len().saturating_mul(SEARCH_STEPS))?;
    match (function, limit) {
        (Function::Matches, None) => Ok(Value::Bool(pattern.is_match(text))),
        (Function::Find, None) => Ok(Value::string(
            pattern.find(text).map_or("", |found| found.as_str()),
        )),
        (Function::FindAll, limit) => {
            let limit = match limit {
                None => -1,
                Some(Value::Int(limit)) => *limit,
                Some(_) => return Err(no_overload("findAll")),
            };
            let limit = usize::try_from(limit).unwrap_or(usize::MAX);
            let mut found = Vec::new();
            for part in pattern.find_iter(text).take(limit) {
                steps.take(1)?;
                found.push(Value::string(part.as_str()));
            }
            Ok(Value::list(found))
        }
        _ => Err(no_overload("matches")),
    }
}

/// Returns the bytes of the characters from `start` to before `end`; `None` if they are not within the text.
fn range(text: &str, start: i64, end: i64) -> Option<(usize, usize)> {
    let (start, end) = (usize::try_from(start).ok()?, usize::try_from(end).ok()?);
    let mut offsets = text
        .char_indices()
        .map(|(offset, _)| offset)
        .chain([text.len()]);
    let from = offsets.nth(start)?;
    let to = match end.checked_sub(start)? {
        0 => from,
        more => offsets.nth(more - 1)?,
    };
    Some((from, to))
}

fn substring(text: &str, start: i64, end: i64) -> Returned {
    let (start, end) = range(text, start, end).ok_or(EvaluationError::OutOfRange {
        function: "substring",
    })?;
    Ok(Value::string(text.get(start..end).unwrap_or_default()))
}

fn index_of(text: &str, part: &str, from: i64, steps: &mut Steps) -> Returned {
    let from = usize::try_from(from).map_err(|_| EvaluationError::OutOfRange {
        function: "indexOf",
    })?;
    steps.take_text(text.len())?;
    let characters = text.chars().count();
    if part.is_empty() {
        return Ok(length(from.min(characters)));
    }
    let found = text.char_indices().nth(from).and_then(|(offset, _)| {
        let rest = text.get(offset..)?;
        rest.find(part)
            .and_then(|at| rest.get(..at))
            .map(|before| from + before.chars().count())
    });
    Ok(found.map_or(Value::Int(-1), length))
}

fn last_index_of(text: &str, part: &str, from: Option<i64>, steps: &mut Steps) -> Returned {
    steps.take_text(text.len())?;
    let characters = text.chars().count();
    let from = match from {
        Some(from) => usize::try_from(from).map_err(|_| EvaluationError::OutOfRange {
            function: "lastIndexOf",
        })?,
        None if part.is_empty() => characters,
        None if text.len() < part.len() => return Ok(Value::Int(-1)),
        None => characters.saturating_sub(1),
    };
    if part.is_empty() {
        return Ok(length(from.min(characters)));
    }
    if from >= characters {
        return Ok(Value::Int(-1));
    }
    // The part may begin at `from` at the latest.
    let end = text
        .char_indices()
        .nth(from)
        .map_or(text.len(), |(offset, _)| offset + part.len());
    let end = (end..=text.len())
        .find(|end| text.is_char_boundary(*end))
        .unwrap_or(text.len());
    let searched = text.get(..end).unwrap_or(text);
    let found = searched
        .rfind(part)
        .and_then(|at| text.get(..at))
        .map(|before| before.chars().count());
    Ok(found
        .filter(|found| *found <= from)
        .map_or(Value::Int(-1), length))
}

fn replace(text: &str, old: &str, new: &str, limit: i64, steps: &mut Steps) -> Returned {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    let count = text.matches(old).take(limit).count();
    steps.take_text(text.len().saturating_add(count.saturating_mul(new.len())))?;
    steps.take(count)?;
    Ok(Value::string(text.replacen(old, new, limit)))
}

fn split(text: &str, separator: &str, limit: i64, steps: &mut Steps) -> Returned {
    let limit = usize::try_from(limit).unwrap_or(usize::MAX);
    if limit == 0 {
        return Ok(Value::list(Vec::new()));
    }
    let count = if separator.is_empty() {
        text.len()
    } else {
        1 + text.matches(separator).count()
    };
    steps.take(count.min(limit))?;
    if !separator.is_empty() {
        return Ok(Value::list(
            text.splitn(limit, separator).map(Value::string).collect(),
        ));
    }
    // An empty separator is between any two characters.
    let mut parts = Vec::new();
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        if parts.len() + 1 == limit {
            break;
        }
        let (part, after) = rest.split_at(first.len_utf8());
        parts.push(Value::string(part));
        rest = after;
    }
    if !rest.is_empty() {
        parts.push(Value::string(rest));
    }
    Ok(Value::list(parts))
}
