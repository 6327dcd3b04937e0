//! Conversion between the group that an event is stored in and the one that a request is in. All other objects are stored as they are
//! served.

use serde_json::{Value, json};

use crate::resources::{EVENTS_GROUP, Resource, api_version};
use crate::route::Route;

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

/// Converts an object from the group of a request to the stored one.
pub(crate) fn to_storage(route: &Route, mut object: Value) -> Value {
    if route.group == EVENTS_GROUP {
        EVENT_FIELDS
            .iter()
            .for_each(|(core, new)| rename(&mut object, new, core));
    }
    stamp(
        &mut object,
        route.resource,
        &api_version(route.resource.group),
    );
    object
}

/// Converts a stored object to the group of a request.
pub(crate) fn from_storage(route: &Route, mut object: Value) -> Value {
    if route.group == EVENTS_GROUP {
        EVENT_FIELDS
            .iter()
            .for_each(|(core, new)| rename(&mut object, core, new));
        if let Some(event) = object.as_object_mut() {
            event.entry("deprecatedSource").or_insert_with(|| json!({}));
        }
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

fn rename(object: &mut Value, from: &str, to: &str) {
    if let Some(fields) = object.as_object_mut()
        && let Some(value) = fields.remove(from)
    {
        fields.insert(to.to_owned(), value);
    }
}
