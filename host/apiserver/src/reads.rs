//! Get and list.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use crate::convert::from_storage;
use crate::negotiate::MetaVersion;
use crate::route::Route;
use crate::selector::Selector;
use crate::state::Snapshot;
use crate::status::{self, Cause, Refusal};

pub(crate) fn get(snapshot: &Snapshot, route: &Route) -> Result<Value, Refusal> {
    snapshot
        .current(route)
        .map(|found| from_storage(route, found.as_ref().clone()))
}

pub(crate) fn list_of(route: &Route, revision: u64, items: impl Iterator<Item = Value>) -> Value {
    // The items of a list have neither kind nor version.
    json!({
        "kind": format!("{}List", route.resource.kind),
        "apiVersion": route.api_version(),
        "metadata": { "resourceVersion": revision.to_string() },
        "items": items.map(|object| {
        let mut object = from_storage(route, object);
        object
            .as_object_mut()
            .map(|fields| ["kind", "apiVersion"].map(|field| fields.remove(field)));
        object
    }).collect::<Vec<_>>(),
    })
}

/// The newest state. A page after the first is of the newest state too, with the version of the first.
pub(crate) fn list(snapshot: &Snapshot, forgotten: u64, route: &Route) -> Result<Value, Refusal> {
    let selector = Selector::of(route)?;
    list_options(snapshot, route)?;
    let (revision, after) = page(forgotten, route)?.unwrap_or((snapshot.revision, None));
    let limit = route
        .asked("limit")
        .parse()
        .ok()
        .filter(|limit| *limit > 0)
        .unwrap_or(usize::MAX);
    let entries = snapshot
        .objects(route.resource)
        .filter(|(_, object)| selector.matches(object));
    let mut rest = entries.filter(|(key, _)| {
        after
            .as_ref()
            .is_none_or(|after| (&key.namespace, &key.name) > (&after.0, &after.1))
    });
    let taken: Vec<_> = rest.by_ref().take(limit).collect();
    let remaining = rest.count();
    let mut list = list_of(
        route,
        revision,
        taken.iter().map(|(_, object)| object.as_ref().clone()),
    );
    if let Some((key, _)) = taken.last().filter(|_| remaining > 0) {
        let token = json!([revision, key.namespace, key.name]);
        list["metadata"]["continue"] = URL_SAFE_NO_PAD.encode(token.to_string()).into();
        // Through a selector, a server does not count them.
        if selector.is_empty() {
            list["metadata"]["remainingItemCount"] = remaining.into();
        }
    }
    Ok(list)
}

/// A resource version as a number; `None` if none is asked for, or any will do.
pub(crate) fn asked_version(route: &Route) -> Result<Option<u64>, Refusal> {
    match route.asked("resourceVersion") {
        "" | "0" => Ok(None),
        asked => asked.parse().map(Some).map_err(|_| {
            status::bad_request(format!(
                "resourceVersion: Invalid value: {asked:?}: must be a number"
            ))
        }),
    }
}

fn list_options(snapshot: &Snapshot, route: &Route) -> Result<(), Refusal> {
    let (version, how) = (
        route.asked("resourceVersion"),
        route.asked("resourceVersionMatch"),
    );
    let mut causes = Vec::new();
    let mut forbid = |field: &str, why: &str| causes.push(Cause::forbidden(field, why));
    if !how.is_empty() {
        if version.is_empty() {
            forbid(
                "resourceVersionMatch",
                "resourceVersionMatch is forbidden unless resourceVersion is provided",
            );
        }
        if !route.asked("continue").is_empty() {
            forbid(
                "resourceVersionMatch",
                "resourceVersionMatch is forbidden when continue is provided",
            );
        }
        if how == "Exact" && version == "0" {
            forbid(
                "resourceVersionMatch",
                "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"",
            );
        }
    }
    if route.query.contains_key("sendInitialEvents") {
        forbid(
            "sendInitialEvents",
            "sendInitialEvents is forbidden for list",
        );
    }
    if !matches!(how, "" | "Exact" | "NotOlderThan") {
        causes.push(unknown_match(how, "\"Exact\", \"NotOlderThan\", \"\""));
    }
    if !causes.is_empty() {
        return Err(status::invalid_options(&causes));
    }
    match asked_version(route)? {
        Some(asked) if asked > snapshot.revision => {
            Err(status::version_ahead(asked, snapshot.revision))
        }
        Some(asked) if how == "Exact" && asked < snapshot.revision => Err(status::list_expired()),
        _ => Ok(()),
    }
}

pub(crate) fn unknown_match(how: &str, supported: &str) -> Cause {
    let message = format!("Unsupported value: \"{how}\": supported values: {supported}");
    Cause {
        reason: "FieldValueNotSupported",
        message,
        field: "resourceVersionMatch".to_owned(),
    }
}

/// The last object of a page: its namespace and name.
type Last = (String, String);

/// The resource version of a list's first page, and where the last page ended.
fn page(forgotten: u64, route: &Route) -> Result<Option<(u64, Option<Last>)>, Refusal> {
    let token = route.asked("continue");
    if token.is_empty() {
        return Ok(None);
    }
    let bytes = URL_SAFE_NO_PAD.decode(token).unwrap_or_default();
    let Ok((revision, namespace, name)) = serde_json::from_slice(&bytes) else {
        return Err(status::bad_request(
            "continue key is not valid: the provided token cannot be read",
        ));
    };
    if revision < forgotten {
        return Err(status::expired(revision, forgotten));
    }
    Ok(Some((revision, Some((namespace, name)))))
}

/// An object, or each of a list, without anything but its metadata.
pub(crate) fn metadata_only(object: &Value, version: MetaVersion) -> Value {
    match object["items"].as_array() {
        Some(items) => json!({
            "kind": "PartialObjectMetadataList", "apiVersion": version.api_version(),
            "metadata": object["metadata"], "items": items.iter().map(|object| brief(object, version)).collect::<Vec<_>>(),
        }),
        None => brief(object, version),
    }
}

fn brief(object: &Value, version: MetaVersion) -> Value {
    json!({
        "kind": "PartialObjectMetadata", "apiVersion": version.api_version(), "metadata": object["metadata"],
    })
}
