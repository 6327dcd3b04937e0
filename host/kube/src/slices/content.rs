//! What stands in slices: devices and counter sets as JSON in the form of `resource.k8s.io/v1`, and when two of them are the same.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::quantity;
use nodedock_model::{
    AttributeValue, Capacity, CapacityChoice, CapacityPolicy, CounterSet, Device, DeviceName, Pool,
    QualifiedName, TaintEffect, limit,
};

/// Key of the taint of devices that their driver says are unhealthy.
pub const UNHEALTHY: &str = "nodedock.dev/unhealthy";

/// Lists among attributes: they make a slice a smaller one.
const LISTS: [&str; 4] = ["ints", "bools", "strings", "versions"];

/// A device or a counter set. Two are equal if a reader of the API could not tell them apart, but for when a taint was added.
#[derive(Debug, Clone)]
pub struct Entry {
    json: Arc<Value>,
    normal: Arc<Value>,
    bytes: usize,
    heavy: bool,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.normal, &other.normal) || self.normal == other.normal
    }
}

impl Entry {
    pub fn new(json: Value) -> Self {
        let mut normal = json.clone();
        make_normal(&mut normal);
        let bytes = json.to_string().len();
        Self { heavy: is_heavy(&normal), json: Arc::new(json), normal: Arc::new(normal), bytes }
    }

    pub fn json(&self) -> &Value {
        &self.json
    }

    /// Bytes of its JSON.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether a slice with it has room for fewer devices.
    pub(super) fn is_heavy(&self) -> bool {
        self.heavy
    }

    /// Its taints as far as they are told apart, each with when it was added.
    pub(super) fn taints(&self) -> impl Iterator<Item = (TaintKey, Option<&str>)> {
        let taints = self.json.get("taints").and_then(Value::as_array);
        taints.into_iter().flatten().map(|taint| {
            (
                TaintKey::of(taint),
                taint.get("timeAdded").and_then(Value::as_str).filter(|time| !time.is_empty()),
            )
        })
    }

    /// The same, its taints with the times that are known of them.
    pub(super) fn with_times(&self, time: impl Fn(&TaintKey) -> Option<String>) -> Value {
        let mut json = (*self.json).clone();
        let taints = json.get_mut("taints").and_then(Value::as_array_mut);
        for taint in taints.into_iter().flatten() {
            if let (Some(time), Some(fields)) = (time(&TaintKey::of(taint)), taint.as_object_mut()) {
                fields.insert("timeAdded".to_owned(), Value::String(time));
            }
        }
        json
    }

    /// Names of fields that this one has and `other`, which came back for it, has not, or has otherwise.
    pub(super) fn lost_in(&self, other: &Self) -> BTreeSet<String> {
        let (Some(sent), Some(back)) = (self.normal.as_object(), other.normal.as_object()) else {
            return BTreeSet::new();
        };
        let lost = sent.iter().filter(|(field, value)| back.get(*field) != Some(value));
        lost.flat_map(|(field, value)| within(field, value, back.get(field))).collect()
    }
}

/// Goes one step into what came back otherwise, so that a policy that was dropped is told as that.
fn within(field: &str, sent: &Value, back: Option<&Value>) -> Vec<String> {
    let (Some(sent), Some(back)) = (sent.as_object(), back.and_then(Value::as_object)) else {
        return vec![field.to_owned()];
    };
    let differing = sent.iter().filter(|(key, value)| back.get(*key) != Some(value));
    let mut fields = Vec::new();
    for (key, value) in differing {
        let (Some(parts), Some(others)) = (value.as_object(), back.get(key).and_then(Value::as_object))
        else {
            return vec![field.to_owned()];
        };
        let missing = parts.keys().filter(|part| others.get(*part) != parts.get(*part));
        fields.extend(missing.map(|part| format!("{field}[].{part}")));
    }
    fields
}

/// What makes a taint of a device that one and no other.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct TaintKey {
    key: String,
    value: String,
    effect: String,
}

impl TaintKey {
    fn of(taint: &Value) -> Self {
        let text = |field: &str| taint.get(field).and_then(Value::as_str).unwrap_or_default().to_owned();
        Self { key: text("key"), value: text("value"), effect: text("effect") }
    }

    pub(super) fn is_of_health(&self) -> bool {
        self.key == UNHEALTHY
    }
}

/// The devices and counter sets of a slice or of a whole pool, by name.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Content {
    pub devices: BTreeMap<String, Entry>,
    pub counters: BTreeMap<String, Entry>,
}

impl Content {
    pub fn is_empty(&self) -> bool {
        self.devices.is_empty() && self.counters.is_empty()
    }

    /// What is in this one and in `other` as well, by name.
    pub(super) fn only_of(&self, other: &Self) -> Self {
        let of = |own: &BTreeMap<String, Entry>, other: &BTreeMap<String, Entry>| {
            own.iter()
                .filter(|(name, _)| other.contains_key(*name))
                .map(|(n, e)| (n.clone(), e.clone()))
                .collect()
        };
        Self { devices: of(&self.devices, &other.devices), counters: of(&self.counters, &other.counters) }
    }

    /// Fields that are in this one and not in `back`, which came back for it, as a person names them.
    pub fn lost_in(&self, back: &Self) -> BTreeSet<String> {
        let empty = Entry::new(json!({}));
        let of = |kind: &str, sent: &BTreeMap<String, Entry>, back: &BTreeMap<String, Entry>| {
            let lost = sent.iter().flat_map(|(name, entry)| entry.lost_in(back.get(name).unwrap_or(&empty)));
            let gone = sent.keys().any(|name| !back.contains_key(name));
            match gone {
                true => BTreeSet::from([kind.to_owned()]),
                false => lost.map(|field| format!("{kind}[].{field}")).collect(),
            }
        };
        let mut lost = of("devices", &self.devices, &back.devices);
        lost.extend(of("sharedCounters", &self.counters, &back.counters));
        lost
    }
}

/// A pool as it is to stand in slices. `sick` devices have the taint of unhealthy ones, with `effect`.
pub(super) fn of_pool(pool: &Pool, sick: &BTreeSet<DeviceName>, effect: TaintEffect) -> Content {
    let devices = pool.devices.iter().map(|(name, device)| {
        let taint = sick.contains(name).then_some(effect);
        (name.as_str().to_owned(), Entry::new(of_device(name, device, taint)))
    });
    let devices: BTreeMap<_, _> = devices.collect();
    // Counters of a pool without devices count nothing, and a pool without devices is not told of.
    let sets = pool.shared_counters.iter().filter(|_| !devices.is_empty());
    let counters = sets
        .map(|set| (set.name.clone(), Entry::new(json!({ "name": set.name, "counters": counters(set) }))));
    Content { counters: counters.collect(), devices }
}

fn of_device(name: &DeviceName, device: &Device, unhealthy: Option<TaintEffect>) -> Value {
    let mut json = Map::new();
    json.insert("name".to_owned(), name.as_str().into());
    let mut put = |field: &str, value: Value, is_there: bool| {
        if is_there {
            json.insert(field.to_owned(), value);
        }
    };
    put("attributes", attributes(device), !device.attributes.is_empty());
    put("capacity", capacities(device), !device.capacities.is_empty());
    let consumes = device.consumes.iter();
    let consumes = consumes.map(|set| json!({ "counterSet": set.name, "counters": counters(set) }));
    put("consumesCounters", consumes.collect(), !device.consumes.is_empty());
    put("allowMultipleAllocations", true.into(), device.allow_multiple_allocations);
    let taints = taints(device, unhealthy);
    let any = !taints.is_empty();
    put("taints", taints.into(), any);
    Value::Object(json)
}

fn by_name<'a, T: 'a>(
    entries: impl Iterator<Item = (&'a QualifiedName, &'a T)>,
    json: impl Fn(&'a T) -> Value,
) -> Value {
    entries.map(|(name, value)| (name.as_str().to_owned(), json(value))).collect::<Map<_, _>>().into()
}

fn attributes(device: &Device) -> Value {
    by_name(device.attributes.iter(), |value| {
        let texts = |list: &[semver::Version]| list.iter().map(ToString::to_string).collect::<Vec<_>>();
        match value {
            AttributeValue::Int(value) => json!({ "int": value }),
            AttributeValue::Bool(value) => json!({ "bool": value }),
            AttributeValue::Text(value) => json!({ "string": value }),
            AttributeValue::Version(value) => json!({ "version": value.to_string() }),
            AttributeValue::Ints(list) => json!({ "ints": list }),
            AttributeValue::Bools(list) => json!({ "bools": list }),
            AttributeValue::Texts(list) => json!({ "strings": list }),
            AttributeValue::Versions(list) => json!({ "versions": texts(list) }),
        }
    })
}

fn capacities(device: &Device) -> Value {
    by_name(device.capacities.iter(), |capacity: &Capacity| {
        let mut json = Map::from_iter([("value".to_owned(), capacity.value.clone().into())]);
        if let Some(policy) = capacity.policy.as_ref().and_then(policy) {
            json.insert("requestPolicy".to_owned(), policy);
        }
        json.into()
    })
}

/// None: it rules nothing.
fn policy(policy: &CapacityPolicy) -> Option<Value> {
    let mut json = Map::new();
    if let Some(amount) = &policy.default_amount {
        json.insert("default".to_owned(), amount.clone().into());
    }
    match &policy.choice {
        CapacityChoice::Any => {}
        CapacityChoice::Values(values) => {
            json.insert("validValues".to_owned(), values.clone().into());
        }
        CapacityChoice::Range { min, max, step } => {
            let bounds = [("min", Some(min)), ("max", max.as_ref()), ("step", step.as_ref())];
            let bounds =
                bounds.into_iter().filter_map(|(name, bound)| Some((name.to_owned(), bound?.clone().into())));
            json.insert("validRange".to_owned(), bounds.collect::<Map<_, _>>().into());
        }
    }
    (!json.is_empty()).then(|| json.into())
}

fn counters(set: &CounterSet) -> Value {
    let counters = set.counters.iter().map(|(name, value)| (name.clone(), json!({ "value": value })));
    counters.collect::<Map<_, _>>().into()
}

fn taints(device: &Device, unhealthy: Option<TaintEffect>) -> Vec<Value> {
    let json = |key: &str, value: &str, effect: TaintEffect| match value {
        "" => json!({ "key": key, "effect": word(effect) }),
        value => json!({ "key": key, "value": value, "effect": word(effect) }),
    };
    let own = device.taints.iter();
    let mut taints: Vec<_> = own.map(|taint| json(&taint.key, &taint.value, taint.effect)).collect();
    // A driver that says it itself, with as many taints as there may be, says it well enough.
    let said = device.taints.iter().any(|taint| taint.key == UNHEALTHY);
    if let Some(effect) = unhealthy.filter(|_| !said && taints.len() < limit::TAINTS_MAX) {
        taints.push(json(UNHEALTHY, "", effect));
    }
    taints
}

fn word(effect: TaintEffect) -> &'static str {
    match effect {
        TaintEffect::None => "None",
        TaintEffect::NoSchedule => "NoSchedule",
        TaintEffect::NoExecute => "NoExecute",
    }
}

fn is_heavy(normal: &Value) -> bool {
    let attributes = normal.get("attributes").and_then(Value::as_object);
    let mut values = attributes.into_iter().flat_map(Map::values).filter_map(Value::as_object);
    normal.get("taints").is_some()
        || normal.get("consumesCounters").is_some()
        || values.any(|value| LISTS.iter().any(|list| value.contains_key(*list)))
}

/// Takes away what makes no difference: how amounts are written, what is empty, and when taints were added.
fn make_normal(entry: &mut Value) {
    let Some(fields) = entry.as_object_mut() else { return };
    each(fields.get_mut("capacity"), |capacity| {
        if let Some(capacity) = capacity.as_object_mut() {
            capacity.get_mut("value").map(amount);
            if let Some(policy) = capacity.get_mut("requestPolicy") {
                policy.get_mut("default").map(amount);
                each(policy.get_mut("validValues"), amount);
                each(policy.get_mut("validRange"), amount);
                drop_empty(policy);
            }
            capacity.retain(|_, value| !is_nothing(value));
        }
    });
    each(fields.get_mut("counters"), counter);
    each(fields.get_mut("consumesCounters"), |set| each(set.get_mut("counters"), counter));
    each(fields.get_mut("taints"), |taint| {
        if let Some(taint) = taint.as_object_mut() {
            taint.remove("timeAdded");
            taint.retain(|_, value| value.as_str() != Some(""));
        }
    });
    fields.retain(|_, value| !is_nothing(value) && *value != Value::Bool(false));
}

fn counter(counter: &mut Value) {
    counter.get_mut("value").map(amount);
}

/// Go's types write a number of JSON as the text of the amount.
fn amount(value: &mut Value) {
    let text = match value {
        Value::String(text) => quantity::normal(text),
        Value::Number(number) => quantity::normal(&number.to_string()),
        _ => return,
    };
    *value = Value::String(text);
}

fn each(value: Option<&mut Value>, change: impl FnMut(&mut Value)) {
    match value {
        Some(Value::Object(entries)) => entries.values_mut().for_each(change),
        Some(Value::Array(entries)) => entries.iter_mut().for_each(change),
        _ => {}
    }
}

fn drop_empty(value: &mut Value) {
    if let Some(fields) = value.as_object_mut() {
        fields.retain(|_, value| !is_nothing(value));
    }
}

fn is_nothing(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}
