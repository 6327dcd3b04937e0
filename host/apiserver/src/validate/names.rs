//! The formats of names, labels and identifiers, and what an API server says of a text that has not the format.

use uuid::Uuid;

use super::fields::{Causes, invalid, too_long};
use crate::status::Cause;

const LABEL_BYTES: usize = 63;
const SUBDOMAIN_BYTES: usize = 253;
const DRIVER_BYTES: usize = 63;
/// The part of a qualified name after its domain.
const IDENTIFIER_BYTES: usize = 32;

const NOT_A_LABEL: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start \
     and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is \
     '[a-z0-9]([-a-z0-9]*[a-z0-9])?')";
const NOT_A_SUBDOMAIN: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and \
     must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is \
     '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
const NOT_A_LABEL_KEY: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an \
     alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is \
     '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
const NOT_A_LABEL_VALUE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and \
     must start and end with an alphanumeric character (e.g. 'MyValue',  or 'my_value',  or '12345', regex used for validation is \
     '(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?')";
const NOT_AN_IDENTIFIER: &str = "a valid C identifier must start with alphabetic character or '_', followed by a string of \
     alphanumeric characters or '_' (e.g. 'my_name',  or 'MY_NAME',  or 'MyName', regex used for validation is \
     '[A-Za-z_][A-Za-z0-9_]*')";
const NOT_NORMALIZED: &str = "uid must be in RFC 4122 normalized form, `xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx` with lowercase \
     hexadecimal characters";

fn at_most(bytes: usize) -> String {
    format!("must be no more than {bytes} bytes")
}

fn has_label_form(text: &str) -> bool {
    let is_inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    !text.is_empty()
        && !text.starts_with('-')
        && !text.ends_with('-')
        && text.bytes().all(|byte| byte == b'-' || is_inner(byte))
}

fn has_subdomain_form(text: &str) -> bool {
    text.split('.').all(has_label_form)
}

/// What is wrong with a name of up to 63 bytes without dots.
pub(super) fn label(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.len() > LABEL_BYTES {
        wrong.push(at_most(LABEL_BYTES));
    }
    if !has_label_form(text) {
        let dots = if has_subdomain_form(text) {
            "must not contain dots"
        } else {
            NOT_A_LABEL
        };
        wrong.push(dots.to_owned());
    }
    wrong
}

/// What is wrong with a name of labels with dots between them, up to 253 bytes.
pub(super) fn subdomain(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.len() > SUBDOMAIN_BYTES {
        wrong.push(at_most(SUBDOMAIN_BYTES));
    }
    if !has_subdomain_form(text) {
        wrong.push(NOT_A_SUBDOMAIN.to_owned());
    }
    wrong
}

/// What is wrong with a name that only has to be one segment of a path.
pub(super) fn path_segment(text: &str) -> Vec<String> {
    if matches!(text, "." | "..") {
        return vec![format!("may not be '{text}'")];
    }
    let found = ['/', '%']
        .into_iter()
        .filter(|illegal| text.contains(*illegal));
    found
        .map(|illegal| format!("may not contain '{illegal}'"))
        .collect()
}

/// What is wrong with the key of a label, the name of a finalizer or the type of a condition.
pub(super) fn label_key(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    let (prefix, name) = match text.split_once('/') {
        None => (None, text),
        Some((_, name)) if name.contains('/') => {
            return vec![format!(
                "a valid label key {NOT_A_LABEL_KEY} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
        Some((prefix, name)) => (Some(prefix), name),
    };
    match prefix {
        Some("") => wrong.push("prefix part must be non-empty".to_owned()),
        Some(prefix) => wrong.extend(
            subdomain(prefix)
                .iter()
                .map(|why| format!("prefix part {why}")),
        ),
        None => {}
    }
    if name.is_empty() {
        wrong.push("name part must be non-empty".to_owned());
    } else if name.len() > LABEL_BYTES {
        wrong.push(format!("name part {}", at_most(LABEL_BYTES)));
    }
    if name.is_empty() || !has_label_value_form(name) {
        wrong.push(format!("name part {NOT_A_LABEL_KEY}"));
    }
    wrong
}

fn has_label_value_form(text: &str) -> bool {
    let is_end = |end: Option<char>| end.is_none_or(|end| end.is_ascii_alphanumeric());
    is_end(text.chars().next())
        && is_end(text.chars().next_back())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// What is wrong with the value of a label.
pub(super) fn label_value(text: &str) -> Vec<String> {
    let mut wrong = vec![];
    if text.len() > LABEL_BYTES {
        wrong.push(at_most(LABEL_BYTES));
    }
    if !has_label_value_form(text) {
        wrong.push(NOT_A_LABEL_VALUE.to_owned());
    }
    wrong
}

/// Refuses `text` at `field` for each of `wrong`.
pub(super) fn refuse(causes: &mut Causes, field: &str, text: &str, wrong: Vec<String>) {
    causes.extend(wrong.iter().map(|why| invalid(field, text, why)));
}

/// Names of drivers, and the domains of attributes: capital letters are let through.
pub(super) fn driver(causes: &mut Causes, field: &str, text: &str) {
    if text.is_empty() {
        causes.push(Cause::required(field, ""));
        return;
    }
    if text.len() > DRIVER_BYTES {
        causes.push(too_long(field, DRIVER_BYTES));
    }
    refuse(causes, field, text, subdomain(&text.to_lowercase()));
}

/// Names of pools: subdomains with slashes between them.
pub(super) fn pool(causes: &mut Causes, field: &str, text: &str) {
    if text.is_empty() {
        causes.push(Cause::required(field, ""));
        return;
    }
    if text.len() > SUBDOMAIN_BYTES {
        causes.push(too_long(field, SUBDOMAIN_BYTES));
    }
    for part in text.split('/') {
        refuse(causes, field, part, subdomain(part));
    }
}

/// Names of attributes and capacities, with a domain or without. More than one slash is not refused by an API server either.
pub(super) fn qualified(causes: &mut Causes, field: &str, text: &str) {
    match text.split('/').collect::<Vec<_>>().as_slice() {
        [id] => identifier(causes, field, id),
        [domain, id] => {
            match *domain {
                "" => causes.push(invalid(field, "", "the domain must not be empty")),
                domain => driver(causes, field, domain),
            }
            match *id {
                "" => causes.push(invalid(field, "", "the name must not be empty")),
                id => identifier(causes, field, id),
            }
        }
        _ => {}
    }
}

/// As [`qualified`], with a domain.
pub(super) fn fully_qualified(causes: &mut Causes, field: &str, text: &str) {
    qualified(causes, field, text);
    if !text.contains('/') {
        let why = "a fully qualified name must be a domain and a name separated by a slash";
        causes.push(invalid(field, text, why));
    }
}

fn identifier(causes: &mut Causes, field: &str, text: &str) {
    if text.len() > IDENTIFIER_BYTES {
        causes.push(too_long(field, IDENTIFIER_BYTES));
    }
    let has_form = !text.is_empty()
        && !text.starts_with(|first: char| first.is_ascii_digit())
        && text
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_');
    if !has_form {
        causes.push(invalid(field, text, NOT_AN_IDENTIFIER));
    }
}

/// IDs of shares.
pub(super) fn uid(causes: &mut Causes, field: &str, text: &str) {
    match Uuid::try_parse(text) {
        Ok(uuid) if uuid.hyphenated().to_string() == text => {}
        Ok(_) => causes.push(invalid(field, text, NOT_NORMALIZED)),
        Err(_) => {
            let why = match text.len() {
                32 | 36 | 38 | 45 => "error validating uid: invalid UUID format".to_owned(),
                length => format!("error validating uid: invalid UUID length: {length}"),
            };
            causes.push(invalid(field, text, &why));
        }
    }
}
