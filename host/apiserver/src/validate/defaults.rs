//! Defaults that an API server sets for fields which a writer omitted.

use jiff::Timestamp;
use serde_json::{Map, Value, json};

/// Fills in the defaults of an object of a kind, but for the status with which it begins; `now` is the time of taints without one. What
/// has a wrong type is left as it is.
pub(crate) fn defaults(kind: &str, object: &mut Value, now: Timestamp) {
    match kind {
        "ResourceClaim" => {
            requests(object.pointer_mut("/spec/devices"));
            let results = items(object.pointer_mut("/status/allocation/devices"), "results");
            results.for_each(tolerations);
        }
        "ResourceClaimTemplate" => requests(object.pointer_mut("/spec/spec/devices")),
        "ResourceSlice" => {
            for device in items(object.get_mut("spec"), "devices") {
                items(Some(device), "taints").for_each(|taint| time_added(taint, now));
            }
        }
        "DeviceTaintRule" => {
            object
                .pointer_mut("/spec/taint")
                .into_iter()
                .for_each(|taint| time_added(taint, now));
        }
        "Event" => {
            set(object, "eventTime", Value::Null);
            set(object, "reportingComponent", "".into());
            set(object, "reportingInstance", "".into());
        }
        "Pod" => pod(object),
        _ => {}
    }
}

/// The objects in the list `key`.
fn items<'a>(object: Option<&'a mut Value>, key: &str) -> impl Iterator<Item = &'a mut Value> {
    object
        .and_then(|object| object.get_mut(key))
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}

/// Sets a field that is not there, or null.
fn set(object: &mut Value, key: &str, value: Value) {
    let Some(fields): Option<&mut Map<String, Value>> = object.as_object_mut() else {
        return;
    };
    let field = fields.entry(key).or_insert(Value::Null);
    if field.is_null() {
        *field = value;
    }
}

/// Sets a text that is not there, null or empty.
fn set_text(object: &mut Value, key: &str, value: &str) {
    if object
        .get(key)
        .is_none_or(|found| found.is_null() || found == "")
    {
        let Some(fields) = object.as_object_mut() else {
            return;
        };
        fields.insert(key.to_owned(), value.into());
    }
}

fn requests(devices: Option<&mut Value>) {
    for request in items(devices, "requests") {
        items(Some(request), "firstAvailable").for_each(devices_of);
        request.get_mut("exactly").into_iter().for_each(devices_of);
    }
}

/// Sets the defaults of an exact request or a subrequest.
fn devices_of(request: &mut Value) {
    set_text(request, "allocationMode", "ExactCount");
    let has_count = request
        .get("count")
        .is_some_and(|count| !count.is_null() && *count != 0);
    if request["allocationMode"] == "ExactCount" && !has_count {
        let Some(fields) = request.as_object_mut() else {
            return;
        };
        fields.insert("count".to_owned(), 1.into());
    }
    tolerations(request);
}

fn tolerations(object: &mut Value) {
    items(Some(object), "tolerations")
        .for_each(|toleration| set_text(toleration, "operator", "Equal"));
}

fn time_added(taint: &mut Value, now: Timestamp) {
    set(
        taint,
        "timeAdded",
        now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string().into(),
    );
}

fn pod(pod: &mut Value) {
    let Some(spec) = pod.get_mut("spec") else {
        return;
    };
    set_text(spec, "restartPolicy", "Always");
    set_text(spec, "dnsPolicy", "ClusterFirst");
    set_text(spec, "schedulerName", "default-scheduler");
    set(spec, "terminationGracePeriodSeconds", 30.into());
    set(spec, "enableServiceLinks", true.into());
    set(spec, "securityContext", json!({}));
    for key in ["containers", "initContainers"] {
        for container in items(Some(spec), key) {
            let image = container["image"].as_str().unwrap_or_default();
            let pull = if is_latest(image) {
                "Always"
            } else {
                "IfNotPresent"
            };
            set_text(container, "imagePullPolicy", pull);
            set_text(container, "terminationMessagePath", "/dev/termination-log");
            set_text(container, "terminationMessagePolicy", "File");
            set(container, "resources", json!({}));
        }
    }
}

/// Returns true if an image has the tag `latest` or no tag, and no digest.
fn is_latest(image: &str) -> bool {
    let name = image.rsplit('/').next().unwrap_or_default();
    !name.contains('@') && name.split_once(':').is_none_or(|(_, tag)| tag == "latest")
}
