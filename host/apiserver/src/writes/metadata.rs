//! The metadata of objects: what a client may set, what stays, and what a client says that it has seen.

use serde_json::Value;

use crate::route::Route;
use crate::state::Snapshot;
use crate::status::{self, Refusal};

/// Letters of generated names.
const SUFFIX: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
const SUFFIX_LENGTH: usize = 5;
/// Maximum length of a generated name before its suffix.
const PREFIX_MOST: usize = 58;
/// Generated names that are tried: one that is taken is rare.
const NAMES_TRIED: usize = 8;
/// Set by the server alone, or once.
const KEPT: [&str; 9] = [
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "generation",
    "generateName",
    "managedFields",
    "resourceVersion",
    "namespace",
];

pub(crate) fn now() -> Value {
    written(jiff::Timestamp::now()).into()
}

/// A time as metadata has it. Earlier times are less as texts too.
pub(super) fn written(time: jiff::Timestamp) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%SZ").to_string()
}

/// The metadata of a new object.
pub(super) fn of_new(route: &Route, asked: &Value, snapshot: &Snapshot) -> Result<Value, Refusal> {
    let mut metadata = asked.as_object().cloned().unwrap_or_default();
    if metadata
        .get("resourceVersion")
        .and_then(Value::as_str)
        .is_some_and(|version| !version.is_empty())
    {
        return Err(status::bad_request(
            "resourceVersion should not be set on objects to be created",
        ));
    }
    if route.resource.namespaced {
        metadata.insert("namespace".into(), route.namespace.clone().into());
    } else {
        metadata.remove("namespace");
    }
    let name = metadata
        .get("name")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let prefix = metadata
        .get("generateName")
        .and_then(Value::as_str)
        .unwrap_or_default();
    if name.is_empty() && !prefix.is_empty() {
        let mut names = std::iter::repeat_with(|| generated(prefix)).take(NAMES_TRIED);
        let name = names
            .find(|name| {
                snapshot
                    .object(route.resource, &route.namespace, name)
                    .is_none()
            })
            .ok_or_else(|| status::exists(route, prefix))?;
        metadata.insert("name".into(), name.into());
    }
    for given in [
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "managedFields",
        "selfLink",
        "generation",
    ] {
        metadata.remove(given);
    }
    metadata.insert("uid".into(), uuid::Uuid::new_v4().to_string().into());
    metadata.insert("creationTimestamp".into(), now());
    if route.resource.generation {
        metadata.insert("generation".into(), 1.into());
    }
    Ok(Value::Object(metadata))
}

fn generated(prefix: &str) -> String {
    let random = uuid::Uuid::new_v4();
    let letters = random.as_bytes().iter().take(SUFFIX_LENGTH);
    let suffix: String = letters
        .filter_map(|byte| {
            SUFFIX
                .get(usize::from(*byte) % SUFFIX.len())
                .map(|letter| char::from(*letter))
        })
        .collect();
    let prefix: String = prefix.chars().take(PREFIX_MOST).collect();
    format!("{prefix}{suffix}")
}

/// Refuses an object of another namespace than its address has.
pub(super) fn check_namespace(route: &Route, object: &Value) -> Result<(), Refusal> {
    match object["metadata"]["namespace"].as_str() {
        Some(namespace)
            if route.resource.namespaced
                && !namespace.is_empty()
                && namespace != route.namespace =>
        {
            Err(status::other_namespace(namespace, route))
        }
        _ => Ok(()),
    }
}

/// The UID and the version that a writer has seen.
pub(super) fn preconditions(route: &Route, asked: &Value, found: &Value) -> Result<(), Refusal> {
    if differs(asked, found, "uid") {
        let [asked, found] =
            [asked, found].map(|metadata| metadata["uid"].as_str().unwrap_or_default());
        return Err(status::precondition(route, "UID", asked, found));
    }
    match differs(asked, found, "resourceVersion") {
        true => Err(status::modified(route)),
        false => Ok(()),
    }
}

fn differs(asked: &Value, found: &Value, field: &str) -> bool {
    asked[field]
        .as_str()
        .is_some_and(|asked| !asked.is_empty() && found[field] != asked)
}

/// The same for a delete, which gives them on their own.
pub(super) fn preconditions_of_delete(
    route: &Route,
    asked: &Value,
    found: &Value,
) -> Result<(), Refusal> {
    for (key, named) in [("uid", "UID"), ("resourceVersion", "ResourceVersion")] {
        let (asked, found) = (
            asked[key].as_str().unwrap_or_default(),
            found[key].as_str().unwrap_or_default(),
        );
        if !asked.is_empty() && asked != found {
            return Err(status::precondition_of_delete(route, named, asked, found));
        }
    }
    Ok(())
}

/// Takes from the old object what this request cannot change.
pub(super) fn keep(route: &Route, new: &mut Value, old: &Value) {
    if route.subresource == "status" {
        let status = new["status"].take();
        *new = old.clone();
        set_status(new, status);
        return;
    }
    if route.resource.status {
        set_status(new, old["status"].clone());
    }
    for field in KEPT {
        match &old["metadata"][field] {
            Value::Null => drop(
                new["metadata"]
                    .as_object_mut()
                    .map(|metadata| metadata.remove(field)),
            ),
            value => new["metadata"][field] = value.clone(),
        }
    }
}

fn set_status(object: &mut Value, status: Value) {
    if status.is_null() {
        object.as_object_mut().map(|fields| fields.remove("status"));
    } else {
        object["status"] = status;
    }
}
