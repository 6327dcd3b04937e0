//! Slices as the API server writes them, in each version of `resource.k8s.io`.

use serde_json::{Map, Value, json};

use super::content::{Content, Entry};
use super::planner::{Draft, Held, Owner, PoolKey};
use crate::api::Version;
use nodedock_model::{DriverName, NameError, PoolName};

/// Label of every slice of ours, and its value: what is left of drivers that are gone is known by it.
const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
const US: &str = "nodedock";

/// Why what a server said is no slice.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    #[error("the slice {slice:?} has no {field}, or another kind of value there")]
    Field { slice: String, field: &'static str },
    #[error("the slice {slice:?} has a name that is none")]
    Name { slice: String, source: NameError },
}

/// A slice to be created.
pub(super) fn created(version: Version, generate_name: &str, draft: &Draft) -> Value {
    let metadata = json!({
        "generateName": generate_name,
        "labels": { MANAGED_BY: US },
        "ownerReferences": [owner_reference(&draft.owner)],
    });
    object(version, metadata, draft)
}

/// A slice to be written over another: what others put into its metadata stays.
pub(super) fn updated(version: Version, was: &Held, draft: &Draft) -> Value {
    let mut metadata = Map::new();
    let kept = ["annotations", "labels", "finalizers", "ownerReferences", "generateName"];
    for field in kept {
        if let Some(value) = was.metadata.get(field) {
            metadata.insert(field.to_owned(), value.clone());
        }
    }
    metadata.insert("name".to_owned(), was.name.clone().into());
    metadata.insert("uid".to_owned(), was.uid.clone().into());
    metadata.insert("resourceVersion".to_owned(), was.resource_version.clone().into());
    let labels = metadata.entry("labels").or_insert_with(|| json!({}));
    match labels.as_object_mut() {
        Some(labels) => drop(labels.insert(MANAGED_BY.to_owned(), US.into())),
        None => *labels = json!({ MANAGED_BY: US }),
    }
    let owners = metadata.remove("ownerReferences");
    let others = owners.as_ref().and_then(Value::as_array).into_iter().flatten();
    let others = others.filter(|owner| !is_node(owner) && owner["controller"] != Value::Bool(true)).cloned();
    let owners: Vec<Value> = others.chain([owner_reference(&draft.owner)]).collect();
    metadata.insert("ownerReferences".to_owned(), owners.into());
    object(version, metadata.into(), draft)
}

/// Whether a slice says that it is ours, and of this Node object.
pub(super) fn is_marked(metadata: &Value, owner: &Owner) -> bool {
    let owners = metadata.get("ownerReferences").and_then(Value::as_array);
    let mut nodes = owners.into_iter().flatten().filter(|owner| is_node(owner));
    let is_owned = nodes.next().is_some_and(|found| {
        found["uid"] == owner.uid.as_str()
            && found["name"] == *owner.name
            && found["controller"] == Value::Bool(true)
    });
    is_owned && nodes.next().is_none() && is_ours(metadata)
}

/// Whether a slice says that it is ours.
pub(super) fn is_ours(metadata: &Value) -> bool {
    metadata["labels"][MANAGED_BY] == US
}

/// Who wrote the object, as its metadata say, but for us.
pub(super) fn writers(metadata: &Value, us: &str) -> Vec<String> {
    let fields = metadata.get("managedFields").and_then(Value::as_array);
    let managers = fields.into_iter().flatten().filter_map(|field| field.get("manager")?.as_str());
    let mut others: Vec<_> = managers.filter(|manager| *manager != us).map(str::to_owned).collect();
    others.sort_unstable();
    others.dedup();
    others
}

fn is_node(owner: &Value) -> bool {
    owner["kind"] == "Node" && owner["apiVersion"] == "v1"
}

fn owner_reference(owner: &Owner) -> Value {
    json!({ "apiVersion": "v1", "kind": "Node", "name": owner.name, "uid": owner.uid.as_str(), "controller": true })
}

fn object(version: Version, metadata: Value, draft: &Draft) -> Value {
    let pool = json!({
        "name": draft.key.pool.as_str(),
        "generation": draft.generation,
        "resourceSliceCount": draft.count,
    });
    let mut spec = Map::from_iter([
        ("driver".to_owned(), draft.key.driver.as_str().into()),
        ("nodeName".to_owned(), draft.owner.name.clone().into()),
        ("pool".to_owned(), pool),
    ]);
    if !draft.devices.is_empty() {
        let devices = draft.devices.iter().cloned().map(|device| device_in(version, device));
        spec.insert("devices".to_owned(), devices.collect());
    }
    if !draft.counters.is_empty() {
        spec.insert("sharedCounters".to_owned(), draft.counters.clone().into());
    }
    json!({
        "apiVersion": version.api_version(),
        "kind": "ResourceSlice",
        "metadata": metadata,
        "spec": spec,
    })
}

/// A device in the form of a version: `v1beta1` has all but the name one level deeper.
fn device_in(version: Version, device: Value) -> Value {
    match (version, device) {
        (Version::V1beta1, Value::Object(mut fields)) => {
            let name = fields.remove("name").unwrap_or_default();
            json!({ "name": name, "basic": fields })
        }
        (_, device) => device,
    }
}

fn device_from(version: Version, device: Value) -> Value {
    match (version, device) {
        (Version::V1beta1, Value::Object(mut fields)) => {
            if let Some(Value::Object(basic)) = fields.remove("basic") {
                fields.extend(basic);
            }
            fields.into()
        }
        (_, device) => device,
    }
}

/// Reads a slice that a server sent.
pub(super) fn held(version: Version, mut object: Value) -> Result<Held, WireError> {
    let mut part = |field: &str| object.get_mut(field).map(Value::take).unwrap_or_default();
    let (mut metadata, mut spec) = (part("metadata"), part("spec"));
    let name = metadata["name"].as_str().unwrap_or_default().to_owned();
    let missing = |field| WireError::Field { slice: name.clone(), field };
    let misnamed = |source| WireError::Name { slice: name.clone(), source };
    let text = |value: &Value, field| value.as_str().map(str::to_owned).ok_or_else(|| missing(field));
    let key = PoolKey {
        driver: DriverName::new(text(&spec["driver"], "driver")?).map_err(misnamed)?,
        pool: PoolName::new(text(&spec["pool"]["name"], "pool name")?).map_err(misnamed)?,
    };
    let generation = spec["pool"]["generation"].as_i64().unwrap_or(0);
    let count = spec["pool"]["resourceSliceCount"].as_i64().unwrap_or(0);
    let mut list = |field: &str| spec.get_mut(field).map(Value::take).unwrap_or_default();
    let devices = entries(list("devices"), |device| device_from(version, device));
    let counters = entries(list("sharedCounters"), |set| set);
    let uid = text(&metadata["uid"], "UID")?;
    let resource_version = text(&metadata["resourceVersion"], "resource version")?;
    if name.is_empty() {
        return Err(missing("name"));
    }
    slim(&mut metadata);
    let content = Content { devices, counters };
    Ok(Held { key, name, uid, resource_version, generation, count, metadata, content, sent: None })
}

/// Leaves out of the metadata what takes memory and is not looked at.
fn slim(metadata: &mut Value) {
    for field in metadata.get_mut("managedFields").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(field) = field.as_object_mut() {
            field.retain(|name, _| name == "manager");
        }
    }
}

/// What has no name, which no server sends, is left out: it differs from what is wanted, and is written over.
fn entries(list: Value, form: impl Fn(Value) -> Value) -> std::collections::BTreeMap<String, Entry> {
    let Value::Array(list) = list else { return Default::default() };
    let entries = list.into_iter().map(form).filter_map(|entry| {
        let name = entry.get("name")?.as_str()?.to_owned();
        Some((name, Entry::new(entry)))
    });
    entries.collect()
}
