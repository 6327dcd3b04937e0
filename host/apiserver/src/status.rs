//! Refusals, with the codes and reasons of Kubernetes' API server.

use serde_json::{Map, Value, json};

use crate::route::Route;

/// An answer that is no success: its code and its `Status`.
#[derive(Clone, Debug)]
pub struct Refusal {
    pub code: u16,
    pub status: Value,
    /// Seconds, for the header `Retry-After`.
    pub retry_after: Option<u64>,
}

/// Problem with one field.
#[derive(Clone, Debug)]
pub struct Cause {
    pub reason: &'static str,
    pub message: String,
    pub field: String,
}

impl Cause {
    /// `shown` is the value as the message shows it: a string in quotes, anything else as JSON.
    pub fn invalid(field: impl Into<String>, shown: impl std::fmt::Display, why: &str) -> Self {
        let message = format!("Invalid value: {shown}: {why}");
        Self {
            reason: "FieldValueInvalid",
            message,
            field: field.into(),
        }
    }

    pub fn required(field: impl Into<String>, why: &str) -> Self {
        let message = if why.is_empty() {
            "Required value".to_owned()
        } else {
            format!("Required value: {why}")
        };
        Self {
            reason: "FieldValueRequired",
            message,
            field: field.into(),
        }
    }

    pub fn forbidden(field: impl Into<String>, why: &str) -> Self {
        Self {
            reason: "FieldValueForbidden",
            message: format!("Forbidden: {why}"),
            field: field.into(),
        }
    }

    pub fn duplicate(field: impl Into<String>, shown: impl std::fmt::Display) -> Self {
        let message = format!("Duplicate value: {shown}");
        Self {
            reason: "FieldValueDuplicate",
            message,
            field: field.into(),
        }
    }

    /// Returns the cause for a changed immutable structure, whose value is not shown in the message.
    pub fn immutable(field: impl Into<String>) -> Self {
        Self {
            reason: "FieldValueInvalid",
            message: "Invalid value: field is immutable".to_owned(),
            field: field.into(),
        }
    }

    fn json(&self) -> Value {
        json!({ "reason": self.reason, "message": self.message, "field": self.field })
    }

    pub fn too_many(field: impl Into<String>, count: usize, most: usize) -> Self {
        let message = format!("Too many: {count}: must have at most {most} items");
        Self {
            reason: "FieldValueTooMany",
            message,
            field: field.into(),
        }
    }
}

fn refusal(code: u16, reason: &str, message: impl Into<String>, details: Value) -> Refusal {
    let mut status = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": message.into(), "code": code,
    });
    if !reason.is_empty() {
        status["reason"] = reason.into();
    }
    if !details.is_null() {
        status["details"] = details;
    }
    Refusal {
        code,
        status,
        retry_after: None,
    }
}

/// The details of a refusal for an object; what is empty is left out.
fn details(group: &str, name: &str, kind: &str) -> Value {
    let fields = [("name", name), ("group", group), ("kind", kind)];
    let given = fields.into_iter().filter(|(_, value)| !value.is_empty());
    Value::Object(
        given
            .map(|(key, value)| (key.to_owned(), value.into()))
            .collect::<Map<_, _>>(),
    )
}

/// A refusal that is about the object `name`, which the message names first.
fn about(route: &Route, name: &str, code: u16, reason: &str, what: &str) -> Refusal {
    let message = format!(
        "{} \"{name}\" {what}",
        route.resource.qualified(&route.group)
    );
    refusal(
        code,
        reason,
        message,
        details(&route.group, name, route.resource.plural),
    )
}

pub fn not_found(route: &Route) -> Refusal {
    about(route, &route.name, 404, "NotFound", "not found")
}

pub fn no_such_method() -> Refusal {
    let message = "the server does not allow this method on the requested resource";
    refusal(405, "MethodNotAllowed", message, json!({}))
}

pub fn forbidden(route: &Route, resource: &str, user: &str) -> Refusal {
    let scope = match route.namespace.as_str() {
        "" => "at the cluster scope".to_owned(),
        namespace => format!("in the namespace \"{namespace}\""),
    };
    let subject = route.resource.qualified(&route.group);
    let subject = if route.name.is_empty() {
        subject
    } else {
        format!("{subject} \"{}\"", route.name)
    };
    let message = format!(
        "{subject} is forbidden: User \"{user}\" cannot {} resource \"{resource}\" in API group \"{}\" {scope}",
        route.verb, route.group
    );
    refusal(
        403,
        "Forbidden",
        message,
        details(&route.group, &route.name, route.resource.plural),
    )
}

/// Refuses the creation of an object in a namespace that is being deleted.
pub fn terminating(route: &Route, name: &str) -> Refusal {
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

pub fn exists(route: &Route, name: &str) -> Refusal {
    about(route, name, 409, "AlreadyExists", "already exists")
}

/// The object is at another version than the writer has.
pub fn modified(route: &Route) -> Refusal {
    conflict(
        route,
        "the object has been modified; please apply your changes to the latest version and try again",
    )
}

/// `field` is `UID` or `ResourceVersion`.
pub fn precondition(route: &Route, field: &str, asked: &str, found: &str) -> Refusal {
    let why = format!(
        "Precondition failed: {field} in precondition: {asked}, {field} in object meta: {found}"
    );
    conflict(route, &why)
}

/// The same for a delete, which names the kind.
pub fn precondition_of_delete(route: &Route, field: &str, asked: &str, found: &str) -> Refusal {
    let mut refusal = precondition(route, field, asked, found);
    refusal.status["details"]["kind"] = route.resource.kind.into();
    refusal
}

fn conflict(route: &Route, why: &str) -> Refusal {
    let (subject, name) = (route.resource.qualified(&route.group), &route.name);
    let message = format!("Operation cannot be fulfilled on {subject} \"{name}\": {why}");
    refusal(
        409,
        "Conflict",
        message,
        details(&route.group, name, route.resource.plural),
    )
}

pub fn invalid(route: &Route, name: &str, causes: &[Cause]) -> Refusal {
    let kind = route.resource.kind;
    // An event is checked as one of the core group, in whichever group it came.
    let group = if route.resource.plural == "events" {
        ""
    } else {
        &route.group
    };
    let subject = if group.is_empty() {
        kind.to_owned()
    } else {
        format!("{kind}.{group}")
    };
    let lines: Vec<String> = causes
        .iter()
        .map(|cause| format!("{}: {}", cause.field, cause.message))
        .collect();
    let lines = match lines.as_slice() {
        [line] => line.clone(),
        lines => format!("[{}]", lines.join(", ")),
    };
    let mut details = details(group, name, kind);
    details["causes"] = causes.iter().map(Cause::json).collect();
    refusal(
        422,
        "Invalid",
        format!("{subject} \"{name}\" is invalid: {lines}"),
        details,
    )
}

pub fn bad_request(message: impl Into<String>) -> Refusal {
    refusal(400, "BadRequest", message, Value::Null)
}

/// An apply without a field manager.
pub fn no_field_manager() -> Refusal {
    let message = "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch";
    refusal(422, "Invalid", message, json!({}))
}

/// A body in an encoding that the request cannot have; `accepted` are those it can.
pub fn unsupported_type(accepted: &[&str]) -> Refusal {
    let message = format!(
        "the body of the request was in an unknown format - accepted media types include: {}",
        accepted.join(", ")
    );
    refusal(415, "UnsupportedMediaType", message, Value::Null)
}

/// No encoding that the caller accepts is one of the server.
pub fn not_acceptable() -> Refusal {
    refusal(
        406,
        "NotAcceptable",
        "only the following media types are accepted: application/json",
        Value::Null,
    )
}

/// A body of more than `limit` bytes.
pub fn too_large(limit: usize) -> Refusal {
    let message = format!("Request entity too large: limit is {limit}");
    refusal(413, "RequestEntityTooLarge", message, Value::Null)
}

/// An object that is larger than a storage of Kubernetes takes.
pub fn object_too_large() -> Refusal {
    refusal(500, "", "etcdserver: request is too large", Value::Null)
}

/// An object for which a storage of Kubernetes has no space.
pub fn no_space() -> Refusal {
    refusal(
        500,
        "",
        "etcdserver: mvcc: database space exceeded",
        Value::Null,
    )
}

/// A body that does not arrive in time.
pub fn body_timeout() -> Refusal {
    let message = "Timeout: request did not complete within the allotted timeout";
    refusal(504, "Timeout", message, json!({}))
}

/// Changes that the storage does not take.
pub fn not_stored(error: &crate::StorageError) -> Refusal {
    let text = format!("{error}: {}", error.source);
    let details = json!({ "causes": [{ "message": text }] });
    refusal(
        500,
        "InternalError",
        format!("Internal error occurred: {text}"),
        details,
    )
}

/// A namespace that an object cannot be created in, because it is not there.
pub fn no_namespace(namespace: &str) -> Refusal {
    let message = format!("namespaces \"{namespace}\" not found");
    refusal(
        404,
        "NotFound",
        message,
        details("", namespace, "namespaces"),
    )
}

/// A namespace that is always there.
pub fn namespace_stays(route: &Route) -> Refusal {
    about(
        route,
        &route.name,
        403,
        "Forbidden",
        "is forbidden: this namespace may not be deleted",
    )
}

/// Options of a list or watch that do not go together.
pub fn invalid_options(causes: &[Cause]) -> Refusal {
    let lines: Vec<String> = causes
        .iter()
        .map(|cause| format!("{}: {}", cause.field, cause.message))
        .collect();
    let lines = if lines.len() == 1 {
        lines.concat()
    } else {
        format!("[{}]", lines.join(", "))
    };
    let mut details = details("meta.k8s.io", "", "ListOptions");
    details["causes"] = causes.iter().map(Cause::json).collect();
    refusal(
        422,
        "Invalid",
        format!("ListOptions.meta.k8s.io \"\" is invalid: {lines}"),
        details,
    )
}

/// A list of a resource version that is not reached yet.
pub fn version_ahead(asked: u64, current: u64) -> Refusal {
    let message = format!("Timeout: Too large resource version: {asked}, current: {current}");
    let cause =
        json!({ "reason": "ResourceVersionTooLarge", "message": "Too large resource version" });
    let mut answer = refusal(
        504,
        "Timeout",
        message,
        json!({ "causes": [cause], "retryAfterSeconds": 1 }),
    );
    answer.retry_after = Some(1);
    answer
}

/// A list of a resource version that there is no state of any more.
pub fn list_expired() -> Refusal {
    refusal(
        410,
        "Expired",
        "The resourceVersion for the provided list is too old.",
        Value::Null,
    )
}

/// A patch that is malformed (400), cannot be applied (422) or is too large (413).
pub fn patch(code: u16, message: &str) -> Refusal {
    let reason = match code {
        413 => "RequestEntityTooLarge",
        422 => "Invalid",
        _ => "BadRequest",
    };
    refusal(code, reason, message, Value::Null)
}

/// An apply that would change fields of other managers: each with the message about it.
pub fn apply_conflict(message: String, causes: impl Iterator<Item = (String, String)>) -> Refusal {
    let causes: Vec<_> = causes
        .map(|(field, message)| json!({ "reason": "FieldManagerConflict", "message": message, "field": field }))
        .collect();
    refusal(409, "Conflict", message, json!({ "causes": causes }))
}

/// An update whose object is another one than its address names.
pub fn other_name(object: &str, route: &Route) -> Refusal {
    let name = &route.name;
    bad_request(format!(
        "the name of the object ({object}) does not match the name on the URL ({name})"
    ))
}

/// An object of another namespace than its address names.
pub fn other_namespace(object: &str, route: &Route) -> Refusal {
    let namespace = &route.namespace;
    bad_request(format!(
        "the namespace of the object ({object}) does not match the namespace on the request ({namespace})"
    ))
}

pub fn too_many(seconds: u64) -> Refusal {
    let message = "too many requests, please try again later";
    let mut answer = refusal(
        429,
        "TooManyRequests",
        message,
        json!({ "retryAfterSeconds": seconds }),
    );
    answer.retry_after = Some(seconds);
    answer
}

/// A resource version that is not kept any more.
pub fn expired(asked: u64, oldest: u64) -> Refusal {
    refusal(
        410,
        "Expired",
        format!("too old resource version: {asked} ({oldest})"),
        Value::Null,
    )
}

/// A watch from a resource version that is not reached yet.
pub fn expired_ahead(asked: u64, current: u64) -> Refusal {
    let message = format!("too large resource version: {asked} ({current})");
    refusal(410, "Expired", message, Value::Null)
}

/// A code on request, and what a server answers that knows no more.
pub fn plain(code: u16) -> Refusal {
    let (reason, message) = match code {
        401 => return refusal(401, "Unauthorized", "Unauthorized", Value::Null),
        403 => ("Forbidden", "forbidden"),
        404 => (
            "NotFound",
            "the server could not find the requested resource",
        ),
        409 => ("Conflict", "the object has been modified"),
        413 => ("RequestEntityTooLarge", "Request entity too large"),
        422 => (
            "Invalid",
            "the server rejected our request due to an error in our request",
        ),
        503 => (
            "ServiceUnavailable",
            "the server is currently unable to handle the request",
        ),
        _ => (
            "InternalError",
            "Internal error occurred: etcdserver: request timed out",
        ),
    };
    refusal(code, reason, message, json!({}))
}
