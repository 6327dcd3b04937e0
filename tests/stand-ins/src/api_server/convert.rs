//! Between the version that an object is stored in and the one that a request is in.
//!
//! Stored are `v1` of every group, and events as the core group has them.

use serde_json::{Map, Value};

use super::resources::{EVENTS, Resource};

/// Fields of a device that are not in `basic`, in `v1beta1`.
const BESIDE_BASIC: [&str; 1] = ["name"];
/// Fields of a request that are not in `exactly`, in `v1`.
const BESIDE_EXACTLY: [&str; 2] = ["name", "firstAvailable"];
/// Events: their names in core and in `events.k8s.io`.
const EVENT_FIELDS: [(&str, &str); 7] = [
    ("message", "note"),
    ("involvedObject", "regarding"),
    ("source", "deprecatedSource"),
    ("firstTimestamp", "deprecatedFirstTimestamp"),
    ("lastTimestamp", "deprecatedLastTimestamp"),
    ("count", "deprecatedCount"),
    ("reportingComponent", "reportingController"),
];

/// From the version of a request.
pub(super) fn to_storage(resource: &Resource, group: &str, version: &str, mut object: Value) -> Value {
    match (resource.plural, version) {
        ("events", _) if group == EVENTS => rename(&mut object, |(core, new)| (new, core)),
        ("resourceslices", "v1beta1") => {
            each(&mut object, &["spec", "devices"], |device| flatten(device, "basic"))
        }
        ("resourceclaims", "v1beta1") => requests(&mut object, &["spec", "devices", "requests"], to_exactly),
        ("resourceclaimtemplates", "v1beta1") => {
            requests(&mut object, &["spec", "spec", "devices", "requests"], to_exactly);
        }
        _ => {}
    }
    let storage = if resource.group.is_empty() { "v1".to_owned() } else { format!("{}/v1", resource.group) };
    stamp(&mut object, resource, &storage);
    object
}

/// To the version of a request.
pub(super) fn from_storage(resource: &Resource, group: &str, version: &str, mut object: Value) -> Value {
    match (resource.plural, version) {
        ("events", _) if group == EVENTS => rename(&mut object, |(core, new)| (core, new)),
        ("resourceslices", "v1beta1") => {
            each(&mut object, &["spec", "devices"], |device| nest(device, "basic", &BESIDE_BASIC));
        }
        ("resourceclaims", "v1beta1") => {
            requests(&mut object, &["spec", "devices", "requests"], |request| flatten(request, "exactly"));
        }
        ("resourceclaimtemplates", "v1beta1") => {
            requests(&mut object, &["spec", "spec", "devices", "requests"], |request| {
                flatten(request, "exactly")
            });
        }
        _ => {}
    }
    let asked = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    stamp(&mut object, resource, &asked);
    object
}

fn stamp(object: &mut Value, resource: &Resource, api_version: &str) {
    if let Some(object) = object.as_object_mut() {
        object.insert("kind".into(), resource.kind.into());
        object.insert("apiVersion".into(), api_version.into());
    }
}

fn requests(object: &mut Value, path: &[&str], change: impl Fn(&mut Map<String, Value>)) {
    each(object, path, change);
}

fn to_exactly(request: &mut Map<String, Value>) {
    if !request.contains_key("firstAvailable") {
        nest(request, "exactly", &BESIDE_EXACTLY);
    }
}

/// Changes each object of a list.
fn each(object: &mut Value, path: &[&str], change: impl Fn(&mut Map<String, Value>)) {
    let at = path.iter().try_fold(object, |at, key| at.get_mut(*key));
    for item in at.and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(item) = item.as_object_mut() {
            change(item);
        }
    }
}

/// Moves what is in `inner` beside it.
fn flatten(item: &mut Map<String, Value>, inner: &str) {
    if let Some(Value::Object(fields)) = item.remove(inner) {
        item.extend(fields);
    }
}

/// Moves everything but what stays into `inner`.
fn nest(item: &mut Map<String, Value>, inner: &str, stays: &[&str]) {
    let (outside, inside): (Map<_, _>, Map<_, _>) =
        std::mem::take(item).into_iter().partition(|(key, _)| stays.contains(&key.as_str()));
    *item = outside;
    item.insert(inner.to_owned(), inside.into());
}

type Names = (&'static str, &'static str);

fn rename(object: &mut Value, direction: impl Fn(Names) -> Names) {
    let Some(object) = object.as_object_mut() else { return };
    for names in EVENT_FIELDS {
        let (from, to) = direction(names);
        if let Some(value) = object.remove(from) {
            object.insert(to.to_owned(), value);
        }
    }
}
