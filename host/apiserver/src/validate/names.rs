//! The formats of names, labels and identifiers, and the rule of each. Each function returns the rule that a text breaks, if any.

use nodedock_model::limit::{DRIVER_NAME_BYTES_MAX, IDENTIFIER_BYTES_MAX, SUBDOMAIN_BYTES_MAX};
use nodedock_model::{
    is_c_identifier, is_dns_label, is_dns_subdomain, is_label_key, is_label_value,
};
use uuid::Uuid;

use super::fields::{Causes, invalid, too_long};
use crate::status::Cause;

const LABEL: &str =
    "must be an RFC 1123 label: 1 to 63 of a-z, 0-9 and '-', without '-' at its ends";
const SUBDOMAIN: &str = "must be an RFC 1123 subdomain: at most 253 bytes, labels of a-z, 0-9 and '-' with dots between them";
const PATH_SEGMENT: &str =
    "must be one segment of a path: neither '.' nor '..', and without '/' and '%'";
const LABEL_KEY: &str = "must be a label key: 1 to 63 of A-Z, a-z, 0-9, '-', '_' and '.', with a letter or digit at its ends, and before it \
     an RFC 1123 subdomain and '/', or nothing";
const LABEL_VALUE: &str = "must be empty or at most 63 of A-Z, a-z, 0-9, '-', '_' and '.', with a letter or digit at its ends";
const IDENTIFIER: &str =
    "must be a C identifier: A-Z, a-z, 0-9 and '_', not beginning with a digit";
const QUALIFIED: &str = "must be a domain and a C identifier with '/' between them";
const NORMALIZED_UUID: &str = "must be a UUID in lower case with dashes";

/// Names of up to 63 bytes without dots.
pub(super) fn label(text: &str) -> Option<&'static str> {
    (!is_dns_label(text)).then_some(LABEL)
}

/// Names of labels with dots between them, up to 253 bytes.
pub(super) fn subdomain(text: &str) -> Option<&'static str> {
    (!is_dns_subdomain(text)).then_some(SUBDOMAIN)
}

/// Names that only have to be one segment of a path.
pub(super) fn path_segment(text: &str) -> Option<&'static str> {
    (matches!(text, "." | "..") || text.contains(['/', '%'])).then_some(PATH_SEGMENT)
}

/// Keys of labels, names of finalizers and types of conditions.
pub(super) fn label_key(text: &str) -> Option<&'static str> {
    (!is_label_key(text)).then_some(LABEL_KEY)
}

/// Values of labels.
pub(super) fn label_value(text: &str) -> Option<&'static str> {
    (!is_label_value(text)).then_some(LABEL_VALUE)
}

/// Refuses `text` at `field` if it breaks a rule.
pub(super) fn refuse(causes: &mut Causes, field: &str, text: &str, rule: Option<&str>) {
    causes.extend(rule.map(|rule| invalid(field, text, rule)));
}

/// Names of drivers, and the domains of attributes: capital letters are let through.
pub(super) fn driver(causes: &mut Causes, field: &str, text: &str) {
    if text.is_empty() {
        causes.push(Cause::required(field, ""));
    } else if text.len() > DRIVER_NAME_BYTES_MAX {
        causes.push(too_long(field, DRIVER_NAME_BYTES_MAX));
    } else {
        refuse(causes, field, text, subdomain(&text.to_lowercase()));
    }
}

/// Names of pools: subdomains with slashes between them.
pub(super) fn pool(causes: &mut Causes, field: &str, text: &str) {
    if text.is_empty() {
        causes.push(Cause::required(field, ""));
    } else if text.len() > SUBDOMAIN_BYTES_MAX {
        causes.push(too_long(field, SUBDOMAIN_BYTES_MAX));
    } else {
        refuse(causes, field, text, text.split('/').find_map(subdomain));
    }
}

/// Names of attributes and capacities, with a domain or without. More than one slash is not refused by an API server either.
pub(super) fn qualified(causes: &mut Causes, field: &str, text: &str) {
    match text.split('/').collect::<Vec<_>>().as_slice() {
        [id] => identifier(causes, field, id),
        ["", _] | [_, ""] => causes.push(invalid(field, text, QUALIFIED)),
        [domain, id] => {
            driver(causes, field, domain);
            identifier(causes, field, id);
        }
        _ => {}
    }
}

/// Checks a name like [`qualified`], and refuses one without a domain.
pub(super) fn fully_qualified(causes: &mut Causes, field: &str, text: &str) {
    match text.contains('/') {
        true => qualified(causes, field, text),
        false => causes.push(invalid(field, text, QUALIFIED)),
    }
}

fn identifier(causes: &mut Causes, field: &str, text: &str) {
    if text.len() > IDENTIFIER_BYTES_MAX {
        causes.push(too_long(field, IDENTIFIER_BYTES_MAX));
    } else {
        let is_none = !is_c_identifier(text);
        refuse(causes, field, text, is_none.then_some(IDENTIFIER));
    }
}

/// IDs of shares.
pub(super) fn uid(causes: &mut Causes, field: &str, text: &str) {
    let is_normalized =
        Uuid::try_parse(text).is_ok_and(|uuid| uuid.hyphenated().to_string() == text);
    refuse(
        causes,
        field,
        text,
        (!is_normalized).then_some(NORMALIZED_UUID),
    );
}
