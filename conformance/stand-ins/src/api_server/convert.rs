//! The versions of `resource.k8s.io` before `v1`, which the engine does not have: addresses, bodies and answers are converted.
//!
//! The requests of a claim are as in `v1` in every version: a node does not read them.

use http::Uri;
use nodedock_apiserver::{DRA_GROUP, Resource};
use serde_json::{Map, Value, json};

/// Not in every version of the group.
const TAINT_RULES: &str = "devicetaintrules";
const TAINT_RULE_VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1alpha3"];

/// The served versions and resources of the group of claims and slices.
#[derive(Debug)]
pub(super) struct Served {
    /// Preferred first.
    pub(super) versions: Vec<String>,
    pub(super) taint_rules: bool,
}

impl Served {
    pub(super) fn has_version(&self, version: &str) -> bool {
        self.versions.iter().any(|served| served == version)
    }

    pub(super) fn has(&self, resource: &Resource, version: &str) -> bool {
        let has_rules = || self.taint_rules && TAINT_RULE_VERSIONS.contains(&version);
        self.has_version(version) && (resource.plural != TAINT_RULES || has_rules())
    }
}

/// The version in an address of the group; `None` for another address.
pub(super) fn version(uri: &Uri) -> Option<&str> {
    let mut parts = uri.path().strip_prefix("/apis/")?.split('/');
    (parts.next() == Some(DRA_GROUP))
        .then(|| parts.next())
        .flatten()
}

/// The same address in `v1`.
pub(super) fn in_v1(uri: &Uri, version: &str) -> Uri {
    let old = format!("/apis/{DRA_GROUP}/{version}/");
    let text = uri
        .to_string()
        .replacen(&old, &format!("/apis/{DRA_GROUP}/v1/"), 1);
    text.parse()
        .expect("an address with another version is an address")
}

/// A body of a request in `version` as the engine takes it.
pub(super) fn to_v1(version: &str, resource: &Resource, object: &mut Value) {
    if object["apiVersion"] == format!("{DRA_GROUP}/{version}") {
        object["apiVersion"] = format!("{DRA_GROUP}/v1").into();
    }
    if version == "v1beta1" && resource.plural == "resourceslices" {
        for_each_device(object, |mut device| {
            let Some(Value::Object(mut fields)) = device.remove("basic") else {
                return device;
            };
            fields.extend(device);
            fields
        });
    }
}

/// An answer of the engine, an object or a list, in `version`.
pub(super) fn from_v1(version: &str, resource: &Resource, answer: &mut Value) {
    if answer["apiVersion"] != format!("{DRA_GROUP}/v1") {
        return;
    }
    answer["apiVersion"] = format!("{DRA_GROUP}/{version}").into();
    if version != "v1beta1" || resource.plural != "resourceslices" {
        return;
    }
    let in_basic = |mut device: Map<String, Value>| {
        let name = device.remove("name");
        Map::from_iter([
            ("name".to_owned(), json!(name)),
            ("basic".to_owned(), device.into()),
        ])
    };
    match answer.get_mut("items").and_then(Value::as_array_mut) {
        Some(items) => items
            .iter_mut()
            .for_each(|item| for_each_device(item, in_basic)),
        None => for_each_device(answer, in_basic),
    }
}

fn for_each_device(slice: &mut Value, change: impl Fn(Map<String, Value>) -> Map<String, Value>) {
    let devices = slice
        .pointer_mut("/spec/devices")
        .and_then(Value::as_array_mut);
    for device in devices
        .into_iter()
        .flatten()
        .filter_map(Value::as_object_mut)
    {
        *device = change(std::mem::take(device));
    }
}
