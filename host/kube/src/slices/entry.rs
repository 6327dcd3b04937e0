//! A device or a counter set of a ResourceSlice: when two of them are equal, and what a server dropped of them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;
use serde_json::{Value, json};

use super::health::UnhealthyTaint;
use nodedock_model::quantity;

/// Key of the taint of devices that their driver reports unhealthy.
pub(super) const UNHEALTHY: &str = "nodedock.dev/unhealthy";
/// Key of the taint of devices that could not be prepared before their pod was bound.
pub(super) const PREPARE_FAILED: &str = "nodedock.dev/prepare-failed";

/// Fields that hold a quantity, outside of attributes and taints.
const QUANTITY_FIELDS: [&str; 10] = [
    "value",
    "default",
    "validValues",
    "min",
    "max",
    "step",
    "capacityMultiplier",
    "deviceMultiplier",
    "perPod",
    "perContainer",
];
/// Attributes that are lists: a slice with one of them holds fewer devices.
const LIST_ATTRIBUTES: [&str; 4] = ["ints", "bools", "strings", "versions"];

/// A device or a counter set in the JSON of `resource.k8s.io/v1`.
///
/// Two entries are equal if a reader of the API cannot tell them apart, apart from when their taints were added.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    json: Arc<Value>,
    normalized: Arc<Value>,
    /// Length as JSON.
    pub(super) bytes: usize,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.normalized, &other.normalized) || self.normalized == other.normalized
    }
}

impl From<Value> for Entry {
    fn from(mut json: Value) -> Self {
        // `v1beta1` has all fields of a device but the name one level deeper.
        if let Some(Value::Object(mut basic)) = json.get_mut("basic").map(Value::take) {
            basic.insert("name".to_owned(), json["name"].take());
            json = Value::Object(basic);
        }
        let mut normalized = json.clone();
        normalize(&mut normalized, false);
        if let Some(fields) = normalized.as_object_mut() {
            fields.retain(|_, value| *value != Value::Bool(false));
        }
        let bytes = json.to_string().len();
        Self {
            json: Arc::new(json),
            normalized: Arc::new(normalized),
            bytes,
        }
    }
}

impl Entry {
    /// Makes the entry of a type of the API.
    pub(super) fn of(object: &impl Serialize) -> Self {
        serde_json::to_value(object)
            .expect("types of the API have texts as keys")
            .into()
    }

    pub(super) fn json(&self) -> &Value {
        &self.json
    }

    /// Returns whether a slice with this device holds fewer devices.
    pub(super) fn is_heavy(&self) -> bool {
        self.normalized.get("taints").is_some()
            || self.normalized.get("consumesCounters").is_some()
            || self.list_attributes().next().is_some()
    }

    /// Names of the attributes that are lists.
    pub(super) fn list_attributes(&self) -> impl Iterator<Item = &String> {
        let attributes = self
            .json
            .get("attributes")
            .and_then(Value::as_object)
            .into_iter()
            .flatten();
        attributes
            .filter(|(_, value)| {
                let mut lists = LIST_ATTRIBUTES.iter();
                lists.any(|list| value.get(*list).is_some())
            })
            .map(|(name, _)| name)
    }

    pub(super) fn without_lists(&self) -> Self {
        let mut json = (*self.json).clone();
        if let Some(attributes) = json.get_mut("attributes").and_then(Value::as_object_mut) {
            self.list_attributes()
                .for_each(|name| drop(attributes.remove(name)));
        }
        json.into()
    }

    /// Returns what distinguishes each taint from the device's others, and the time at which it was added.
    pub(super) fn taints(&self) -> impl Iterator<Item = (String, Option<&str>)> {
        let added = list(&self.json, "taints")
            .iter()
            .map(|taint| taint.get("timeAdded")?.as_str());
        list(&self.normalized, "taints")
            .iter()
            .map(Value::to_string)
            .zip(added)
    }

    /// Returns the taint of unhealthy devices, if the device has it, with the time since it was added; zero if that is not known.
    pub(super) fn unhealthy(&self, now: Timestamp) -> Option<(UnhealthyTaint, Duration)> {
        let taint = list(&self.json, "taints")
            .iter()
            .find(|taint| taint["key"] == UNHEALTHY)?;
        let value = taint["value"].as_str().unwrap_or_default().to_owned();
        let added = taint["timeAdded"]
            .as_str()
            .and_then(|time| time.parse::<Timestamp>().ok());
        let age = added.and_then(|added| Duration::try_from(now.duration_since(added)).ok());
        Some((
            UnhealthyTaint {
                value,
                evicts: taint["effect"] == "NoExecute",
            },
            age.unwrap_or_default(),
        ))
    }

    /// Returns the entry with the times at which its taints were added, as far as they are known.
    pub(super) fn with_times(&self, time: impl Fn(String) -> Option<String>) -> Self {
        let mut json = Arc::clone(&self.json);
        for (index, taint) in list(&self.normalized, "taints").iter().enumerate() {
            let added = Arc::make_mut(&mut json)["taints"]
                .get_mut(index)
                .and_then(Value::as_object_mut);
            if let (Some(added), Some(time)) = (added, time(taint.to_string())) {
                added.insert("timeAdded".to_owned(), Value::String(time));
            }
        }
        Self {
            json,
            ..self.clone()
        }
    }

    /// Returns the device as `v1beta1` has it.
    pub(super) fn v1beta1(&self) -> Self {
        let mut fields = (*self.json).clone();
        let name = fields
            .as_object_mut()
            .and_then(|fields| fields.remove("name"));
        Self {
            json: Arc::new(json!({ "name": name, "basic": fields })),
            ..self.clone()
        }
    }

    /// Adds the fields of this entry that `returned`, which the server made of it, lacks or has otherwise.
    pub(super) fn dropped_in(
        &self,
        returned: Option<&Self>,
        path: &str,
        fields: &mut BTreeSet<String>,
    ) {
        dropped(
            &self.normalized,
            returned.map(|entry| &*entry.normalized),
            path,
            fields,
        );
    }
}

fn dropped(sent: &Value, returned: Option<&Value>, path: &str, fields: &mut BTreeSet<String>) {
    match (sent, returned) {
        (Value::Object(sent), Some(Value::Object(returned))) => {
            for (field, sent) in sent
                .iter()
                .filter(|(field, sent)| returned.get(*field) != Some(sent))
            {
                dropped(
                    sent,
                    returned.get(field),
                    &format!("{path}.{field}"),
                    fields,
                );
            }
        }
        _ => drop(fields.insert(path.to_owned())),
    }
}

/// Removes what makes no difference: the notation of quantities, empty fields, and the times of taints.
fn normalize(value: &mut Value, is_quantity: bool) {
    match value {
        Value::String(text) if is_quantity => *text = quantity::normalized(text),
        // An API server takes a number for a quantity and returns a text.
        Value::Number(number) if is_quantity => {
            *value = quantity::normalized(&number.to_string()).into()
        }
        Value::Array(list) => list
            .iter_mut()
            .for_each(|item| normalize(item, is_quantity)),
        Value::Object(fields) => {
            for (field, value) in fields.iter_mut() {
                match field.as_str() {
                    "attributes" => {}
                    "taints" => normalize_taints(value),
                    field => normalize(value, QUANTITY_FIELDS.contains(&field)),
                }
            }
            fields.retain(|_, value| !is_empty(value));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn normalize_taints(taints: &mut Value) {
    let taints = taints.as_array_mut().into_iter().flatten();
    for fields in taints.filter_map(Value::as_object_mut) {
        fields.retain(|field, value| field != "timeAdded" && value.as_str() != Some(""));
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn list<'a>(object: &'a Value, field: &str) -> &'a [Value] {
    object
        .get(field)
        .and_then(Value::as_array)
        .map(Vec::as_slice)
        .unwrap_or_default()
}
