//! Between the version that an object is stored in and the one that a request is in.
//!
//! Stored are `v1` of every group, and events as the core group has them. The requests of a claim are as in `v1` in every version: a node
//! does not read them.

use serde_json::{Map, Value, json};

use super::resources::{EVENTS, Resource, api_version};
use super::route::Route;

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
pub(super) fn to_storage(route: &Route, mut object: Value) -> Value {
    match (route.resource.plural, route.group.as_str(), route.version.as_str()) {
        ("events", EVENTS, _) => {
            EVENT_FIELDS.iter().for_each(|(core, new)| rename(&mut object, new, core));
        }
        ("resourceslices", _, "v1beta1") => for_each_device(&mut object, |mut device| {
            let Some(Value::Object(mut fields)) = device.remove("basic") else { return device };
            fields.extend(device);
            fields
        }),
        _ => {}
    }
    stamp(&mut object, route.resource, &api_version(route.resource.group, "v1"));
    object
}

/// To the version of a request.
pub(super) fn from_storage(route: &Route, mut object: Value) -> Value {
    match (route.resource.plural, route.group.as_str(), route.version.as_str()) {
        ("events", EVENTS, _) => {
            EVENT_FIELDS.iter().for_each(|(core, new)| rename(&mut object, core, new));
            if let Some(event) = object.as_object_mut() {
                event.entry("deprecatedSource").or_insert_with(|| json!({}));
            }
        }
        ("resourceslices", _, "v1beta1") => for_each_device(&mut object, |mut device| {
            let name = device.remove("name");
            Map::from_iter([("name".to_owned(), json!(name)), ("basic".to_owned(), device.into())])
        }),
        _ => {}
    }
    stamp(&mut object, route.resource, &route.api_version());
    object
}

fn stamp(object: &mut Value, resource: &Resource, api_version: &str) {
    if let Some(object) = object.as_object_mut() {
        object.insert("kind".into(), resource.kind.into());
        object.insert("apiVersion".into(), api_version.into());
    }
}

fn for_each_device(slice: &mut Value, change: impl Fn(Map<String, Value>) -> Map<String, Value>) {
    let devices = slice.pointer_mut("/spec/devices").and_then(Value::as_array_mut);
    for device in devices.into_iter().flatten().filter_map(Value::as_object_mut) {
        *device = change(std::mem::take(device));
    }
}

fn rename(object: &mut Value, from: &str, to: &str) {
    if let Some(fields) = object.as_object_mut()
        && let Some(value) = fields.remove(from)
    {
        fields.insert(to.to_owned(), value);
    }
}
