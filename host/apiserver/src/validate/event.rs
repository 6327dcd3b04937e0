//! The rules of events, which differ with the group in which one is made.

use serde_json::Value;

use super::fields::{invalid, text};
use crate::status::Cause;

const FIELD_CHARACTERS: usize = 128;
const NOTE_BYTES: usize = 1024;
/// Fields that an event of `events.k8s.io` has: as stored, and as the group names them.
const REQUIRED: [(&str, &str); 5] = [
    ("eventTime", "eventTime"),
    ("reportingComponent", "reportingController"),
    ("reportingInstance", "reportingInstance"),
    ("action", "action"),
    ("reason", "reason"),
];

/// Returns what is wrong with an event that is made; `event` is as stored, `new_group` whether it came to `events.k8s.io`.
pub(crate) fn event(event: &Value, new_group: bool) -> Vec<Cause> {
    let mut causes = vec![];
    let namespace = text(&event["metadata"], "namespace");
    let about = text(&event["involvedObject"], "namespace");
    let is_here =
        about == namespace || (about.is_empty() && matches!(namespace, "default" | "kube-system"));
    // Events that have the field are of the new kind, which may be about another namespace.
    if event["eventTime"].is_null() && !is_here {
        causes.push(invalid(
            "involvedObject.namespace",
            about,
            "does not match event.namespace",
        ));
    }
    if !new_group {
        return causes;
    }
    for (stored, named) in REQUIRED {
        let value = text(event, stored);
        if value.is_empty() {
            causes.push(Cause::required(named, ""));
        } else if value.len() > FIELD_CHARACTERS {
            causes.push(invalid(named, value, "can have at most 128 characters"));
        }
    }
    let kind = text(event, "type");
    if !matches!(kind, "Normal" | "Warning") {
        causes.push(invalid("type", kind, "must be Normal or Warning"));
    }
    if text(event, "message").len() > NOTE_BYTES {
        causes.push(invalid("note", "", "can have at most 1024 characters"));
    }
    causes
}
