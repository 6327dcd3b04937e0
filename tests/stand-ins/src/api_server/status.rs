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
    pub(super) fn invalid(field: impl Into<String>, shown: &Value, why: &str) -> Self {
        Self {
            reason: "FieldValueInvalid",
            message: format!("Invalid value: {shown}: {why}"),
            field: field.into(),
        }
    }

    pub(super) fn required(field: impl Into<String>, why: &str) -> Self {
        let message =
            if why.is_empty() { "Required value".to_owned() } else { format!("Required value: {why}") };
        Self { reason: "FieldValueRequired", message, field: field.into() }
    }

    pub(super) fn forbidden(field: impl Into<String>, why: &str) -> Self {
        Self { reason: "FieldValueForbidden", message: format!("Forbidden: {why}"), field: field.into() }
    }

    pub(super) fn duplicate(field: impl Into<String>, shown: &Value) -> Self {
        Self {
            reason: "FieldValueDuplicate",
            message: format!("Duplicate value: {shown}"),
            field: field.into(),
        }
    }

    pub(super) fn too_many(field: impl Into<String>, count: usize, most: usize) -> Self {
        let message = format!("Too many: {count}: must have at most {most} items");
        Self { reason: "FieldValueTooMany", message, field: field.into() }
    }
}

pub(super) fn refusal(code: u16, reason: &str, message: impl Into<String>, details: Value) -> Refusal {
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
fn details(route: &Route, name: &str, kind: &str) -> Value {
    let fields = [("name", name), ("group", &route.group), ("kind", kind)];
    let given = fields.into_iter().filter(|(_, value)| !value.is_empty());
    Value::Object(given.map(|(key, value)| (key.to_owned(), value.into())).collect::<Map<_, _>>())
}

pub(super) fn not_found(route: &Route, name: &str) -> Refusal {
    let message = format!("{} \"{name}\" not found", route.resource.qualified(&route.group));
    refusal(404, "NotFound", message, details(route, name, route.resource.plural))
}

/// A path that nothing is at.
pub(super) fn no_such_path() -> Refusal {
    refusal(404, "NotFound", "the server could not find the requested resource", json!({}))
}

pub(super) fn no_such_method() -> Refusal {
    refusal(
        405,
        "MethodNotAllowed",
        "the server does not allow this method on the requested resource",
        json!({}),
    )
}

pub(super) fn unauthorized() -> Refusal {
    refusal(401, "Unauthorized", "Unauthorized", Value::Null)
}

pub(super) fn forbidden(route: &Route, user: &str) -> Refusal {
    let resource = if route.subresource.is_empty() {
        route.resource.plural.to_owned()
    } else {
        format!("{}/{}", route.resource.plural, route.subresource)
    };
    let at = if route.namespace.is_empty() {
        "at the cluster scope".to_owned()
    } else {
        format!("in the namespace \"{}\"", route.namespace)
    };
    let subject = route.resource.qualified(&route.group);
    let subject = if route.name.is_empty() { subject } else { format!("{subject} \"{}\"", route.name) };
    let message = format!(
        "{subject} is forbidden: User \"{user}\" cannot {} resource \"{resource}\" in API group \"{}\" {at}",
        route.verb, route.group
    );
    refusal(403, "Forbidden", message, details(route, &route.name, route.resource.plural))
}

/// What cannot be made in a namespace that goes.
pub(super) fn terminating(route: &Route, name: &str) -> Refusal {
    let namespace = &route.namespace;
    let message = format!(
        "{} \"{name}\" is forbidden: unable to create new content in namespace {namespace} because it is being terminated",
        route.resource.qualified(&route.group)
    );
    let mut details = details(route, name, route.resource.plural);
    details["causes"] = json!([{
        "reason": "NamespaceTerminating",
        "message": format!("namespace {namespace} is being terminated"),
        "field": "metadata.namespace",
    }]);
    refusal(403, "Forbidden", message, details)
}

pub(super) fn exists(route: &Route, name: &str) -> Refusal {
    let message = format!("{} \"{name}\" already exists", route.resource.qualified(&route.group));
    refusal(409, "AlreadyExists", message, details(route, name, route.resource.plural))
}

/// Another version is there than the writer thinks.
pub(super) fn modified(route: &Route, name: &str) -> Refusal {
    conflict(
        route,
        name,
        "the object has been modified; please apply your changes to the latest version and try again",
    )
}

/// `field` is `UID` or `ResourceVersion`.
pub(super) fn precondition(route: &Route, name: &str, field: &str, asked: &str, found: &str) -> Refusal {
    let why =
        format!("Precondition failed: {field} in precondition: {asked}, {field} in object meta: {found}");
    conflict(route, name, &why)
}

fn conflict(route: &Route, name: &str, why: &str) -> Refusal {
    let subject = route.resource.qualified(&route.group);
    let message = format!("Operation cannot be fulfilled on {subject} \"{name}\": {why}");
    refusal(409, "Conflict", message, details(route, name, route.resource.plural))
}

/// Fields that another manager set, of an apply that is not forced.
pub(super) fn apply_conflict(fields: &[String]) -> Refusal {
    let count = match fields.len() {
        1 => "1 conflict".to_owned(),
        count => format!("{count} conflicts"),
    };
    let message = format!("Apply failed with {count}: conflict with another manager: {}", fields.join(", "));
    let causes: Vec<Value> = fields
        .iter()
        .map(|field| {
            json!({ "reason": "FieldManagerConflict", "message": "conflict with another manager", "field": field })
        })
        .collect();
    refusal(409, "Conflict", message, json!({ "causes": causes }))
}

pub(super) fn invalid(route: &Route, name: &str, causes: &[Cause]) -> Refusal {
    let kind = route.resource.kind;
    let subject = if route.group.is_empty() { kind.to_owned() } else { format!("{kind}.{}", route.group) };
    let told: Vec<String> =
        causes.iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect();
    let told = if told.len() == 1 { told[0].clone() } else { format!("[{}]", told.join(", ")) };
    let mut details = details(route, name, kind);
    details["causes"] = causes
        .iter()
        .map(|cause| json!({ "reason": cause.reason, "message": cause.message, "field": cause.field }))
        .collect();
    refusal(422, "Invalid", format!("{subject} \"{name}\" is invalid: {told}"), details)
}

pub(super) fn bad_request(message: impl Into<String>) -> Refusal {
    refusal(400, "BadRequest", message, Value::Null)
}

pub(super) fn unsupported_type(found: &str) -> Refusal {
    let message = format!(
        "the body of the request was in an unknown format - accepted media types include: application/json, \
         application/merge-patch+json, application/json-patch+json, application/apply-patch+yaml; not {found}"
    );
    refusal(415, "UnsupportedMediaType", message, json!({}))
}

pub(super) fn too_large(most: usize) -> Refusal {
    let message = format!("Request entity too large: limit is {most}");
    refusal(413, "RequestEntityTooLarge", message, json!({}))
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

/// A page of a list of which the first is not kept any more.
pub(super) fn expired_page() -> Refusal {
    let message = "The provided continue parameter is too old to display a consistent list result. You can \
                   start a new list without the continue parameter.";
    refusal(410, "Expired", message, Value::Null)
}

/// A resource version that this server has not reached.
pub(super) fn ahead(asked: u64, current: u64) -> Refusal {
    let cause = json!({ "reason": "ResourceVersionTooLarge", "message": "Too large resource version" });
    let message = format!("Timeout: Too large resource version: {asked}, current: {current}");
    let mut answer = refusal(504, "Timeout", message, json!({ "causes": [cause], "retryAfterSeconds": 1 }));
    answer.retry_after = Some(1);
    answer
}

/// A code on request.
pub(super) fn plain(code: u16) -> Refusal {
    let (reason, message) = match code {
        400 => ("BadRequest", "the server rejected our request for an unknown reason"),
        401 => ("Unauthorized", "Unauthorized"),
        403 => ("Forbidden", "forbidden"),
        404 => ("NotFound", "the server could not find the requested resource"),
        409 => ("Conflict", "the object has been modified"),
        410 => ("Expired", "The resourceVersion for the provided list is too old."),
        422 => ("Invalid", "the server rejected our request due to an error in our request"),
        429 => ("TooManyRequests", "too many requests, please try again later"),
        503 => ("ServiceUnavailable", "the server is currently unable to handle the request"),
        504 => ("Timeout", "request did not complete within the allotted timeout"),
        _ => ("InternalError", "Internal error occurred: etcdserver: request timed out"),
    };
    refusal(code, reason, message, json!({}))
}
