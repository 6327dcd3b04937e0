//! Bodies in Kubernetes' protobuf, which Go's clientset sends: slices, namespaces (of `kubectl create namespace`) and the options of
//! deletes, as the JSON that they stand for.
//!
//! The numbers are those of `k8s.io/api/resource/v1`, `k8s.io/apimachinery` and `k8s.io/api/core/v1` 0.37. What has no message here is
//! refused as a server refuses an encoding that it does not know.

use std::collections::BTreeMap;

use prost::{Message, Oneof};
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

pub const CONTENT_TYPE: &str = "application/vnd.kubernetes.protobuf";
/// What an encoded object begins with.
const MAGIC: &[u8] = b"k8s\0";

/// The object as JSON; `None`: it is no object, or of a kind that is not known here.
pub fn to_json(body: &[u8]) -> Option<Value> {
    let envelope = Envelope::decode(body.strip_prefix(MAGIC)?).ok()?;
    let TypeMeta { api_version, kind } = envelope.type_meta?;
    let mut json = match (api_version.as_str(), kind.as_str()) {
        ("resource.k8s.io/v1", "ResourceSlice") => {
            serde_json::to_value(ResourceSlice::decode(&*envelope.raw).ok()?).ok()?
        }
        ("v1", "Namespace") => serde_json::to_value(Namespace::decode(&*envelope.raw).ok()?).ok()?,
        (_, "DeleteOptions") => serde_json::to_value(DeleteOptions::decode(&*envelope.raw).ok()?).ok()?,
        _ => return None,
    };
    drop_unset(&mut json);
    json["apiVersion"] = api_version.into();
    json["kind"] = kind.into();
    Some(json)
}

/// Protobuf has no difference between what is not set and what is empty, as far as JSON's `omitempty` goes.
fn drop_unset(json: &mut Value) {
    match json {
        Value::Object(fields) => {
            // An empty text is the value of an attribute.
            fields
                .iter_mut()
                .filter(|(name, _)| *name != "attributes")
                .for_each(|(_, value)| drop_unset(value));
            let is_unset = |value: &Value| match value {
                Value::Null => true,
                Value::Array(list) => list.is_empty(),
                Value::String(text) => text.is_empty(),
                Value::Object(fields) => fields.is_empty(),
                _ => false,
            };
            fields.retain(|_, value| !is_unset(value));
        }
        Value::Array(list) => list.iter_mut().for_each(drop_unset),
        _ => {}
    }
}

/// A message whose field names in JSON are those in camel case.
macro_rules! message {
    ($name:ident { $($(#[$attribute:meta])* $field:ident: $type:ty,)* }) => {
        #[derive(Clone, PartialEq, Message, Serialize)]
        #[serde(rename_all = "camelCase")]
        struct $name {
            $($(#[$attribute])* $field: $type,)*
        }
    };
}

#[derive(Clone, PartialEq, Message)]
struct Envelope {
    #[prost(message, optional, tag = "1")]
    type_meta: Option<TypeMeta>,
    #[prost(bytes = "vec", tag = "2")]
    raw: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct TypeMeta {
    #[prost(string, tag = "1")]
    api_version: String,
    #[prost(string, tag = "2")]
    kind: String,
}

/// A quantity, a text in JSON.
#[derive(Clone, PartialEq, Message)]
struct Quantity {
    #[prost(string, tag = "1")]
    text: String,
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.text)
    }
}

/// A moment in seconds, a text in JSON.
#[derive(Clone, PartialEq, Message)]
struct Time {
    #[prost(int64, tag = "1")]
    seconds: i64,
}

impl Serialize for Time {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let moment = jiff::Timestamp::from_second(self.seconds).unwrap_or_default();
        to.collect_str(&moment.strftime("%Y-%m-%dT%H:%M:%SZ"))
    }
}

message!(DeleteOptions {
    #[prost(int64, optional, tag = "1")]
    grace_period_seconds: Option<i64>,
    #[prost(message, optional, tag = "2")]
    preconditions: Option<Preconditions>,
    #[prost(string, optional, tag = "4")]
    propagation_policy: Option<String>,
});

message!(Preconditions {
    #[prost(string, optional, tag = "1")]
    uid: Option<String>,
    #[prost(string, optional, tag = "2")]
    resource_version: Option<String>,
});

message!(ObjectMeta {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    generate_name: String,
    #[prost(string, tag = "5")]
    uid: String,
    #[prost(string, tag = "6")]
    resource_version: String,
    #[prost(message, optional, tag = "8")]
    creation_timestamp: Option<Time>,
    #[prost(btree_map = "string, string", tag = "11")]
    labels: BTreeMap<String, String>,
    #[prost(btree_map = "string, string", tag = "12")]
    annotations: BTreeMap<String, String>,
    #[prost(message, repeated, tag = "13")]
    owner_references: Vec<OwnerReference>,
    #[prost(string, repeated, tag = "14")]
    finalizers: Vec<String>,
});

message!(OwnerReference {
    #[prost(string, tag = "5")]
    api_version: String,
    #[prost(string, tag = "1")]
    kind: String,
    #[prost(string, tag = "3")]
    name: String,
    #[prost(string, tag = "4")]
    uid: String,
    #[prost(bool, optional, tag = "6")]
    controller: Option<bool>,
    #[prost(bool, optional, tag = "7")]
    block_owner_deletion: Option<bool>,
});

message!(Namespace {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ObjectMeta>,
});

message!(ResourceSlice {
    #[prost(message, optional, tag = "1")]
    metadata: Option<ObjectMeta>,
    #[prost(message, optional, tag = "2")]
    spec: Option<Spec>,
});

message!(Spec {
    #[prost(string, tag = "1")]
    driver: String,
    #[prost(message, optional, tag = "2")]
    pool: Option<Pool>,
    #[prost(string, optional, tag = "3")]
    node_name: Option<String>,
    #[prost(message, optional, tag = "4")]
    node_selector: Option<NodeSelector>,
    #[prost(bool, optional, tag = "5")]
    all_nodes: Option<bool>,
    #[prost(message, repeated, tag = "6")]
    devices: Vec<Device>,
    #[prost(bool, optional, tag = "7")]
    per_device_node_selection: Option<bool>,
    #[prost(message, repeated, tag = "8")]
    shared_counters: Vec<CounterSet>,
    #[prost(string, optional, tag = "9")]
    partition_type_attribute: Option<String>,
    #[prost(string, repeated, tag = "10")]
    skip_node_operations: Vec<String>,
});

message!(Pool {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(int64, tag = "2")]
    generation: i64,
    #[prost(int64, tag = "3")]
    resource_slice_count: i64,
});

message!(NodeSelector {
    #[prost(message, repeated, tag = "1")]
    node_selector_terms: Vec<NodeSelectorTerm>,
});

message!(NodeSelectorTerm {
    #[prost(message, repeated, tag = "1")]
    match_expressions: Vec<NodeSelectorRequirement>,
    #[prost(message, repeated, tag = "2")]
    match_fields: Vec<NodeSelectorRequirement>,
});

message!(NodeSelectorRequirement {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    operator: String,
    #[prost(string, repeated, tag = "3")]
    values: Vec<String>,
});

message!(Device {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(btree_map = "string, message", tag = "2")]
    attributes: BTreeMap<String, Attribute>,
    #[prost(btree_map = "string, message", tag = "3")]
    capacity: BTreeMap<String, Capacity>,
    #[prost(message, repeated, tag = "4")]
    consumes_counters: Vec<Consumption>,
    #[prost(string, optional, tag = "5")]
    node_name: Option<String>,
    #[prost(message, optional, tag = "6")]
    node_selector: Option<NodeSelector>,
    #[prost(bool, optional, tag = "7")]
    all_nodes: Option<bool>,
    #[prost(message, repeated, tag = "8")]
    taints: Vec<Taint>,
    #[prost(bool, optional, tag = "9")]
    binds_to_node: Option<bool>,
    #[prost(string, repeated, tag = "10")]
    binding_conditions: Vec<String>,
    #[prost(string, repeated, tag = "11")]
    binding_failure_conditions: Vec<String>,
    #[prost(bool, optional, tag = "12")]
    allow_multiple_allocations: Option<bool>,
    #[prost(btree_map = "string, message", tag = "14")]
    node_allocatable_resources: BTreeMap<String, NodeAllocatable>,
});

/// One value, or lists; the key in JSON is the type. An empty text is a value.
#[derive(Clone, PartialEq, Message)]
struct Attribute {
    #[prost(oneof = "Single", tags = "2, 3, 4, 5")]
    single: Option<Single>,
    #[prost(int64, repeated, tag = "6")]
    ints: Vec<i64>,
    #[prost(bool, repeated, tag = "7")]
    bools: Vec<bool>,
    #[prost(string, repeated, tag = "8")]
    strings: Vec<String>,
    #[prost(string, repeated, tag = "9")]
    versions: Vec<String>,
}

#[derive(Clone, PartialEq, Oneof, Serialize)]
#[serde(rename_all = "camelCase")]
enum Single {
    #[prost(int64, tag = "2")]
    Int(i64),
    #[prost(bool, tag = "3")]
    Bool(bool),
    #[prost(string, tag = "4")]
    String(String),
    #[prost(string, tag = "5")]
    Version(String),
}

impl Serialize for Attribute {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let lists = [
            ("ints", json!(self.ints)),
            ("bools", json!(self.bools)),
            ("strings", json!(self.strings)),
            ("versions", json!(self.versions)),
        ];
        match &self.single {
            Some(single) => single.serialize(to),
            None => to.collect_map(lists.into_iter().filter(|(_, list)| *list != json!([]))),
        }
    }
}

message!(Capacity {
    #[prost(message, optional, tag = "1")]
    value: Option<Quantity>,
    #[prost(message, optional, tag = "2")]
    request_policy: Option<RequestPolicy>,
});

message!(RequestPolicy {
    #[prost(message, optional, tag = "1")]
    default: Option<Quantity>,
    #[prost(message, repeated, tag = "3")]
    valid_values: Vec<Quantity>,
    #[prost(message, optional, tag = "4")]
    valid_range: Option<Range>,
});

message!(Range {
    #[prost(message, optional, tag = "1")]
    min: Option<Quantity>,
    #[prost(message, optional, tag = "2")]
    max: Option<Quantity>,
    #[prost(message, optional, tag = "3")]
    step: Option<Quantity>,
});

message!(Consumption {
    #[prost(string, tag = "1")]
    counter_set: String,
    #[prost(btree_map = "string, message", tag = "2")]
    counters: BTreeMap<String, Counter>,
    #[prost(string, repeated, tag = "3")]
    compatibility_groups: Vec<String>,
});

message!(CounterSet {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(btree_map = "string, message", tag = "2")]
    counters: BTreeMap<String, Counter>,
});

message!(Counter {
    #[prost(message, optional, tag = "1")]
    value: Option<Quantity>,
});

message!(Taint {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(string, tag = "2")]
    value: String,
    #[prost(string, tag = "3")]
    effect: String,
    #[prost(message, optional, tag = "4")]
    time_added: Option<Time>,
});

message!(NodeAllocatable {
    #[prost(message, optional, tag = "3")]
    mapping: Option<Mapping>,
    #[prost(message, optional, tag = "4")]
    overhead: Option<Overhead>,
});

message!(Mapping {
    #[prost(string, optional, tag = "1")]
    capacity_key: Option<String>,
    #[prost(message, optional, tag = "2")]
    capacity_multiplier: Option<Quantity>,
    #[prost(message, optional, tag = "3")]
    device_multiplier: Option<Quantity>,
});

message!(Overhead {
    #[prost(message, optional, tag = "1")]
    per_pod: Option<Quantity>,
    #[prost(message, optional, tag = "2")]
    per_container: Option<Quantity>,
});

#[cfg(test)]
mod tests {
    use super::*;

    fn encoded(api_version: &str, kind: &str, message: &impl Message) -> Vec<u8> {
        let type_meta = TypeMeta { api_version: api_version.to_owned(), kind: kind.to_owned() };
        let envelope = Envelope { type_meta: Some(type_meta), raw: message.encode_to_vec() };
        [MAGIC, &envelope.encode_to_vec()].concat()
    }

    #[test]
    fn a_slice_is_the_json_that_it_stands_for() {
        let quantity = |text: &str| Some(Quantity { text: text.to_owned() });
        let attribute = |single| Attribute { single: Some(single), ..Attribute::default() };
        let device = Device {
            name: "gpu-0".to_owned(),
            attributes: [
                ("n".to_owned(), attribute(Single::Int(0))),
                ("t".to_owned(), attribute(Single::String(String::new()))),
                ("l".to_owned(), Attribute { ints: vec![1, 2], ..Attribute::default() }),
            ]
            .into(),
            capacity: [("memory".to_owned(), Capacity { value: quantity("1Gi"), request_policy: None })]
                .into(),
            taints: vec![Taint {
                key: "k".to_owned(),
                effect: "NoSchedule".to_owned(),
                time_added: Some(Time { seconds: 0 }),
                ..Taint::default()
            }],
            ..Device::default()
        };
        let slice = ResourceSlice {
            metadata: Some(ObjectMeta { generate_name: "a-".to_owned(), ..ObjectMeta::default() }),
            spec: Some(Spec {
                driver: "d".to_owned(),
                pool: Some(Pool { name: "p".to_owned(), generation: 0, resource_slice_count: 1 }),
                node_name: Some("n".to_owned()),
                devices: vec![device],
                ..Spec::default()
            }),
        };
        let json = to_json(&encoded("resource.k8s.io/v1", "ResourceSlice", &slice)).unwrap();
        let device = json!({
            "name": "gpu-0",
            "attributes": { "n": { "int": 0 }, "t": { "string": "" }, "l": { "ints": [1, 2] } },
            "capacity": { "memory": { "value": "1Gi" } },
            "taints": [{ "key": "k", "effect": "NoSchedule", "timeAdded": "1970-01-01T00:00:00Z" }],
        });
        let expected = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": { "generateName": "a-" },
            "spec": {
                "driver": "d", "nodeName": "n", "devices": [device],
                "pool": { "name": "p", "generation": 0, "resourceSliceCount": 1 },
            },
        });
        assert_eq!(json, expected);
    }

    #[test]
    fn a_namespace_is_its_metadata() {
        let metadata = ObjectMeta { name: "team".to_owned(), ..ObjectMeta::default() };
        let namespace = encoded("v1", "Namespace", &Namespace { metadata: Some(metadata) });
        let expected = json!({ "apiVersion": "v1", "kind": "Namespace", "metadata": { "name": "team" } });
        assert_eq!(to_json(&namespace), Some(expected));
    }

    #[test]
    fn what_is_no_known_object_is_none() {
        let slice = encoded("resource.k8s.io/v1", "ResourceSlice", &ResourceSlice::default());
        assert!(to_json(&slice).is_some() && to_json(&slice[1..]).is_none());
        assert!(to_json(&slice[..slice.len() / 2]).is_none() && to_json(b"{}").is_none());
        assert!(to_json(&encoded("v1", "Pod", &ResourceSlice::default())).is_none());
    }
}
