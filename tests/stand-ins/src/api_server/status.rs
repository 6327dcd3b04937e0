//! Refusals, in the words and codes of a real server.

use serde_json::{Map, Value, json};

use super::route::Route;

/// An answer that is no success: its code and its `Status`.
#[derive(Clone, Debug)]
pub(super) struct Refusal {
    pub(super) code: u16,
    pub(super) status: Value,
    /// Seconds, for the header `Retry-After`.
    pub(super) retry_after: Option<u64>,
}

/// What is wrong with one field.
#[derive(Clone, Debug)]
pub(super) struct Cause {
    pub(super) reason: &'static str,
    pub(super) message: String,
    pub(super) field: String,
}

impl Cause {
    /// `shown` is the value as the message shows it: a string in quotes, anything else as JSON.
    pub(super) fn invalid(field: impl Into<String>, shown: impl std::fmt::Display, why: &str) -> Self {
        let message = format!("Invalid value: {shown}: {why}");
        Self { reason: "FieldValueInvalid", message, field: field.into() }
    }

    pub(super) fn required(field: impl Into<String>, why: &str) -> Self {
        let message =
            if why.is_empty() { "Required value".to_owned() } else { format!("Required value: {why}") };
        Self { reason: "FieldValueRequired", message, field: field.into() }
    }

    pub(super) fn forbidden(field: impl Into<String>, why: &str) -> Self {
        Self { reason: "FieldValueForbidden", message: format!("Forbidden: {why}"), field: field.into() }
    }

    pub(super) fn duplicate(field: impl Into<String>, shown: impl std::fmt::Display) -> Self {
        let message = format!("Duplicate value: {shown}");
        Self { reason: "FieldValueDuplicate", message, field: field.into() }
    }

    pub(super) fn too_many(field: impl Into<String>, count: usize, most: usize) -> Self {
        let message = format!("Too many: {count}: must have at most {most} items");
        Self { reason: "FieldValueTooMany", message, field: field.into() }
    }
}

fn refusal(code: u16, reason: &str, message: impl Into<String>, details: Value) -> Refusal {
    let mut status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message.into(), "reason": reason, "code": code,
    });
    if !details.is_null() {
        status["details"] = details;
    }
    Refusal { code, status, retry_after: None }
}

/// The details of a refusal for an object; what is empty is left out.
fn details(group: &str, name: &str, kind: &str) -> Value {
    let fields = [("name", name), ("group", group), ("kind", kind)];
    let given = fields.into_iter().filter(|(_, value)| !value.is_empty());
    Value::Object(given.map(|(key, value)| (key.to_owned(), value.into())).collect::<Map<_, _>>())
}

/// A refusal that is about the object `name`, which the message names first.
fn about(route: &Route, name: &str, code: u16, reason: &str, what: &str) -> Refusal {
    let message = format!("{} \"{name}\" {what}", route.resource.qualified(&route.group));
    refusal(code, reason, message, details(&route.group, name, route.resource.plural))
}

pub(super) fn not_found(route: &Route) -> Refusal {
    about(route, &route.name, 404, "NotFound", "not found")
}

pub(super) fn no_such_method() -> Refusal {
    let message = "the server does not allow this method on the requested resource";
    refusal(405, "MethodNotAllowed", message, json!({}))
}

pub(super) fn forbidden(route: &Route, resource: &str, user: &str) -> Refusal {
    let scope = match route.namespace.as_str() {
        "" => "at the cluster scope".to_owned(),
        namespace => format!("in the namespace \"{namespace}\""),
    };
    let subject = route.resource.qualified(&route.group);
    let subject = if route.name.is_empty() { subject } else { format!("{subject} \"{}\"", route.name) };
    let message = format!(
        "{subject} is forbidden: User \"{user}\" cannot {} resource \"{resource}\" in API group \"{}\" {scope}",
        route.verb, route.group
    );
    refusal(403, "Forbidden", message, details(&route.group, &route.name, route.resource.plural))
}

/// What cannot be created in a namespace that is being deleted.
pub(super) fn terminating(route: &Route, name: &str) -> Refusal {
    let namespace = &route.namespace;
    let what = format!(
        "is forbidden: unable to create new content in namespace {namespace} because it is being terminated"
    );
    let mut refusal = about(route, name, 403, "Forbidden", &what);
    refusal.status["details"]["causes"] = json!([{
        "reason": "NamespaceTerminating",
        "message": format!("namespace {namespace} is being terminated"),
        "field": "metadata.namespace",
    }]);
    refusal
}

pub(super) fn exists(route: &Route, name: &str) -> Refusal {
    about(route, name, 409, "AlreadyExists", "already exists")
}

/// The object is at another version than the writer has.
pub(super) fn modified(route: &Route) -> Refusal {
    conflict(
        route,
        "the object has been modified; please apply your changes to the latest version and try again",
    )
}

/// `field` is `UID` or `ResourceVersion`.
pub(super) fn precondition(route: &Route, field: &str, asked: &str, found: &str) -> Refusal {
    let why =
        format!("Precondition failed: {field} in precondition: {asked}, {field} in object meta: {found}");
    conflict(route, &why)
}

/// The same for a delete, which names the kind.
pub(super) fn precondition_of_delete(route: &Route, field: &str, asked: &str, found: &str) -> Refusal {
    let mut refusal = precondition(route, field, asked, found);
    refusal.status["details"]["kind"] = route.resource.kind.into();
    refusal
}

fn conflict(route: &Route, why: &str) -> Refusal {
    let (subject, name) = (route.resource.qualified(&route.group), &route.name);
    let message = format!("Operation cannot be fulfilled on {subject} \"{name}\": {why}");
    refusal(409, "Conflict", message, details(&route.group, name, route.resource.plural))
}

pub(super) fn invalid(route: &Route, name: &str, causes: &[Cause]) -> Refusal {
    let kind = route.resource.kind;
    // An event is checked as one of the core group, in whichever group it came.
    let group = if route.resource.plural == "events" { "" } else { &route.group };
    let subject = if group.is_empty() { kind.to_owned() } else { format!("{kind}.{group}") };
    let mut lines: Vec<String> =
        causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
    lines.dedup();
    let lines = if lines.len() == 1 { lines[0].clone() } else { format!("[{}]", lines.join(", ")) };
    let mut details = details(group, name, kind);
    details["causes"] = causes
        .iter()
        .map(|cause| json!({ "reason": cause.reason, "message": cause.message, "field": cause.field }))
        .collect();
    refusal(422, "Invalid", format!("{subject} \"{name}\" is invalid: {lines}"), details)
}

pub(super) fn bad_request(message: impl Into<String>) -> Refusal {
    refusal(400, "BadRequest", message, Value::Null)
}

/// An apply without a field manager.
pub(super) fn no_field_manager() -> Refusal {
    let message =
        "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch";
    refusal(422, "Invalid", message, json!({}))
}

pub(super) fn unsupported_type(found: &str) -> Refusal {
    let message = format!(
        "the body of the request was in an unknown format - accepted media types include: application/json, \
         application/merge-patch+json, application/apply-patch+yaml; not {found}"
    );
    refusal(415, "UnsupportedMediaType", message, json!({}))
}

pub(super) fn too_many(seconds: u64) -> Refusal {
    let message = "too many requests, please try again later";
    let mut answer = refusal(429, "TooManyRequests", message, json!({ "retryAfterSeconds": seconds }));
    answer.retry_after = Some(seconds);
    answer
}

/// A resource version that is not kept any more.
pub(super) fn expired(asked: u64, oldest: u64) -> Refusal {
    refusal(410, "Expired", format!("too old resource version: {asked} ({oldest})"), Value::Null)
}

/// A code on request, and what a server answers that knows no more.
pub(super) fn plain(code: u16) -> Refusal {
    let (reason, message) = match code {
        401 => return refusal(401, "Unauthorized", "Unauthorized", Value::Null),
        403 => ("Forbidden", "forbidden"),
        404 => ("NotFound", "the server could not find the requested resource"),
        409 => ("Conflict", "the object has been modified"),
        413 => ("RequestEntityTooLarge", "Request entity too large"),
        422 => ("Invalid", "the server rejected our request due to an error in our request"),
        503 => ("ServiceUnavailable", "the server is currently unable to handle the request"),
        _ => ("InternalError", "Internal error occurred: etcdserver: request timed out"),
    };
    refusal(code, reason, message, json!({}))
}
