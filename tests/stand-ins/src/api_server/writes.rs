//! Create, update, patch and delete.
//!
//! A claim's opaque parameters are stored byte by byte. A claim that was made with space between the parts of its parameters
//! ([`super::Allocated::with_spaced_parameters`]) is compared with the same parameters as a server writes them, without: every later
//! write of its status in JSON, of whatever kind, looks like a change of `status.allocation` and is refused. That is how a recorded apply
//! was refused.

use std::sync::Arc;

use serde_json::{Value, json};

use super::convert::{from_storage, to_storage};
use super::patch;
use super::resources::EVENTS;
use super::route::Route;
use super::state::{Key, State, key};
use super::status::{self, Refusal};
use super::{selector::Selector, validate};

/// Letters of generated names.
const SUFFIX: &[u8] = b"bcdfghjklmnpqrstvwxz2456789";
const SUFFIX_LENGTH: usize = 5;
/// Of a generated name, before its suffix.
const PREFIX_MOST: usize = 58;

/// A request that writes.
#[derive(Debug)]
pub(super) struct Write<'a> {
    pub(super) route: &'a Route,
    pub(super) body: Value,
    pub(super) content_type: &'a str,
    pub(super) user_agent: &'a str,
    /// Fields that this server does not know.
    pub(super) drops: Vec<String>,
}

/// What a write comes to: its code, and the object as stored.
pub(super) type Written = (u16, Value);

pub(super) fn now() -> Value {
    jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string().into()
}

impl Write<'_> {
    fn manager(&self) -> String {
        match self.route.asked("fieldManager") {
            "" => self.user_agent.split('/').next().unwrap_or("unknown").to_owned(),
            manager => manager.to_owned(),
        }
    }

    /// As sent, in the stored version, without what this server does not know.
    fn stored(&self, mut body: Value) -> Result<Value, Refusal> {
        let route = self.route;
        for drop in &self.drops {
            patch::drop_field(&mut body, drop);
        }
        let (api_version, kind) = (route.api_version(), route.resource.kind);
        for (field, expected) in [("kind", kind), ("apiVersion", &api_version)] {
            if let Some(found) = body[field].as_str().filter(|found| *found != expected) {
                return Err(status::bad_request(format!("the data is of {field} {found}, not {expected}")));
            }
        }
        if route.resource.plural == "resourceslices" && validate::has_unreadable_quantity(&body) {
            let why = format!(
                "{kind} in version \"{}\" cannot be handled as a {kind}: quantities must match the regular expression '{}'",
                route.version,
                validate::QUANTITY
            );
            return Err(status::bad_request(why));
        }
        Ok(to_storage(route, body))
    }
}

/// A name that was not there before.
fn generated(prefix: &str) -> String {
    let random = uuid::Uuid::new_v4();
    let letters = random.as_bytes().iter().take(SUFFIX_LENGTH);
    let suffix: String = letters.map(|byte| char::from(SUFFIX[usize::from(*byte) % SUFFIX.len()])).collect();
    let prefix: String = prefix.chars().take(PREFIX_MOST).collect();
    format!("{prefix}{suffix}")
}

pub(super) fn create(state: &mut State, write: &Write<'_>) -> Result<Written, Refusal> {
    let route = write.route;
    if !write.body.is_object() {
        return Err(status::bad_request("the body of a create is an object"));
    }
    let mut object = write.stored(write.body.clone())?;
    object["metadata"] = new_metadata(route, &object["metadata"])?;
    let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    if route.resource.namespaced && is_terminating(state, &route.namespace) {
        return Err(status::terminating(route, &name));
    }
    if state.objects.contains_key(&key(route.resource, &object)) {
        return Err(status::exists(route, &name));
    }
    defaults(route, &mut object);
    let mut causes = validate::object(route.resource, &object, None);
    if route.resource.plural == "events" {
        causes.extend(validate::event(&object, route.group == EVENTS));
    }
    if !causes.is_empty() {
        return Err(status::invalid(route, &name, &causes));
    }
    manage(&mut object, write, "Update");
    Ok((201, state.store(route.resource, object).as_ref().clone()))
}

/// What a new object's metadata comes to.
fn new_metadata(route: &Route, asked: &Value) -> Result<Value, Refusal> {
    let mut metadata = asked.as_object().cloned().unwrap_or_default();
    if metadata.get("resourceVersion").and_then(Value::as_str).is_some_and(|version| !version.is_empty()) {
        return Err(status::bad_request("resourceVersion should not be set on objects to be created"));
    }
    if route.resource.namespaced {
        metadata.insert("namespace".into(), route.namespace.clone().into());
    }
    let name = metadata.get("name").and_then(Value::as_str).unwrap_or_default();
    let prefix = metadata.get("generateName").and_then(Value::as_str).unwrap_or_default();
    if name.is_empty() && !prefix.is_empty() {
        let name = generated(prefix);
        metadata.insert("name".into(), name.into());
    }
    for given in ["deletionTimestamp", "deletionGracePeriodSeconds", "managedFields", "selfLink"] {
        metadata.remove(given);
    }
    metadata.insert("uid".into(), uuid::Uuid::new_v4().to_string().into());
    metadata.insert("creationTimestamp".into(), now());
    metadata.remove("generation");
    if route.resource.generation {
        metadata.insert("generation".into(), 1.into());
    }
    Ok(Value::Object(metadata))
}

fn is_terminating(state: &State, name: &str) -> bool {
    let namespace = state.objects.get(&("namespaces", String::new(), name.to_owned()));
    namespace.is_some_and(|found| found["metadata"]["deletionTimestamp"].is_string())
}

/// Fills in what the writer left out.
fn defaults(route: &Route, object: &mut Value) {
    match route.resource.plural {
        "resourceslices" => {
            let devices = object["spec"].get_mut("devices").and_then(Value::as_array_mut);
            for device in devices.into_iter().flatten() {
                let taints = device.get_mut("taints").and_then(Value::as_array_mut);
                for taint in taints.into_iter().flatten().filter(|taint| taint["timeAdded"].is_null()) {
                    taint["timeAdded"] = now();
                }
            }
        }
        "events" => {
            for (field, value) in [
                ("eventTime", Value::Null),
                ("reportingComponent", "".into()),
                ("reportingInstance", "".into()),
            ] {
                if object[field].is_null() {
                    object[field] = value;
                }
            }
        }
        _ => {}
    }
}

/// Names the writer in `managedFields`, without the fields.
fn manage(object: &mut Value, write: &Write<'_>, operation: &str) {
    let entry = json!({
        "manager": write.manager(), "operation": operation, "apiVersion": write.route.api_version(),
        "time": now(), "fieldsType": "FieldsV1", "fieldsV1": {},
    });
    let Some(metadata) = object["metadata"].as_object_mut() else { return };
    let entries = metadata.entry("managedFields").or_insert_with(|| json!([]));
    let Some(entries) = entries.as_array_mut() else { return };
    entries.retain(|other| ["manager", "operation"].iter().any(|key| other[*key] != entry[*key]));
    entries.push(entry);
}

pub(super) fn update(state: &mut State, write: &Write<'_>) -> Result<Written, Refusal> {
    let route = write.route;
    let new = write.stored(write.body.clone())?;
    if new["metadata"]["name"] != *route.name {
        return Err(status::bad_request("the name of the object does not match the name on the URL"));
    }
    let old = state.current(route)?;
    replace(state, write, &old, new, "Update")
}

fn at(route: &Route) -> Key {
    (route.resource.plural, route.namespace.clone(), route.name.clone())
}

pub(super) fn patch(state: &mut State, write: &Write<'_>) -> Result<Written, Refusal> {
    let route = write.route;
    let kind = write.content_type.split(';').next().unwrap_or_default().trim();
    let is_apply = kind == "application/apply-patch+yaml" && route.subresource == "status";
    if is_apply && route.asked("fieldManager").is_empty() {
        return Err(status::no_field_manager());
    }
    let old = state.current(route)?;
    let mut document = from_storage(route, old.as_ref().clone());
    let manager = (old["metadata"]["uid"].to_string(), write.manager());
    match kind {
        "application/merge-patch+json" => patch::merge(&mut document, &write.body),
        _ if is_apply => {
            let uid = &write.body["metadata"]["uid"];
            if uid.is_string() && *uid != old["metadata"]["uid"] {
                return Err(status::invalid(route, &route.name, &validate::immutable_uid(uid)));
            }
            for field in ["uid", "resourceVersion"] {
                let asked = &write.body["metadata"][field];
                if !asked.is_null() {
                    document["metadata"][field] = asked.clone();
                }
            }
            patch::apply(&mut document, state.applied.get(&manager), &write.body);
        }
        other => return Err(status::unsupported_type(other)),
    }
    let new = write.stored(document)?;
    let written = replace(state, write, &old, new, if is_apply { "Apply" } else { "Update" })?;
    if is_apply {
        state.applied.insert(manager, write.body.clone());
    }
    Ok(written)
}

/// Puts `new` in the place of `old`, as far as the request may.
fn replace(
    state: &mut State,
    write: &Write<'_>,
    old: &Arc<Value>,
    mut new: Value,
    operation: &str,
) -> Result<Written, Refusal> {
    let route = write.route;
    preconditions(route, &new["metadata"], &old["metadata"])?;
    keep(route, &mut new, old);
    defaults(route, &mut new);
    let mut causes = validate::object(route.resource, &new, Some(old));
    if changes_spaces(state, route, &new, old)
        && !causes.iter().any(|cause| cause.field == "status.allocation")
    {
        causes.push(validate::immutable_allocation(&new["status"]["allocation"]));
    }
    if !causes.is_empty() {
        return Err(status::invalid(route, &route.name, &causes));
    }
    if same(&new, old) {
        return Ok((200, old.as_ref().clone()));
    }
    if route.resource.generation && new["spec"] != old["spec"] {
        new["metadata"]["generation"] =
            (old["metadata"]["generation"].as_i64().unwrap_or_default() + 1).into();
    }
    manage(&mut new, write, operation);
    if new["metadata"]["deletionTimestamp"].is_string() && !has_finalizers(&new) {
        let last = state.remove(&at(route));
        return Ok((200, last.map_or(new, |last| last.as_ref().clone())));
    }
    Ok((200, state.store(route.resource, new).as_ref().clone()))
}

fn changes_spaces(state: &State, route: &Route, new: &Value, old: &Value) -> bool {
    let allocation = &new["status"]["allocation"];
    route.subresource == "status"
        && state.spaced.contains(old["metadata"]["uid"].as_str().unwrap_or_default())
        && !old["status"]["allocation"].is_null()
        && allocation["devices"]["config"].as_array().is_some_and(|config| !config.is_empty())
}

fn has_finalizers(object: &Value) -> bool {
    object["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty())
}

/// What a writer says that it has seen.
fn preconditions(route: &Route, asked: &Value, found: &Value) -> Result<(), Refusal> {
    let differs =
        |field: &str| asked[field].as_str().is_some_and(|asked| !asked.is_empty() && found[field] != asked);
    if differs("uid") {
        let text = |metadata: &Value| metadata["uid"].as_str().unwrap_or_default().to_owned();
        return Err(status::precondition(route, "UID", &text(asked), &text(found)));
    }
    match differs("resourceVersion") {
        true => Err(status::modified(route)),
        false => Ok(()),
    }
}

/// Takes from the old object what this request cannot change.
fn keep(route: &Route, new: &mut Value, old: &Value) {
    if route.subresource == "status" {
        let status = new["status"].take();
        *new = old.clone();
        new["status"] = status;
        return;
    }
    if route.resource.status {
        new["status"] = old["status"].clone();
    }
    let kept = [
        "uid",
        "creationTimestamp",
        "deletionTimestamp",
        "deletionGracePeriodSeconds",
        "generation",
        "generateName",
        "managedFields",
        "resourceVersion",
        "namespace",
    ];
    for field in kept {
        match &old["metadata"][field] {
            Value::Null => drop(new["metadata"].as_object_mut().map(|metadata| metadata.remove(field))),
            value => new["metadata"][field] = value.clone(),
        }
    }
}

/// Whether nothing is changed but what a server writes itself.
fn same(new: &Value, old: &Value) -> bool {
    let stripped = |object: &Value| {
        let mut object = object.clone();
        if let Some(metadata) = object["metadata"].as_object_mut() {
            metadata.remove("managedFields");
            metadata.retain(|_, value| !value.is_null());
        }
        object
    };
    stripped(new) == stripped(old)
}

pub(super) fn delete(state: &mut State, write: &Write<'_>) -> Result<Written, Refusal> {
    let route = write.route;
    let old = state.current(route)?;
    let (asked, found) = (&write.body["preconditions"], &old["metadata"]);
    for (key, named) in [("uid", "UID"), ("resourceVersion", "ResourceVersion")] {
        let (asked, found) =
            (asked[key].as_str().unwrap_or_default(), found[key].as_str().unwrap_or_default());
        if !asked.is_empty() && asked != found {
            return Err(status::precondition_of_delete(route, named, asked, found));
        }
    }
    Ok((200, end(state, route, &at(route), &old)))
}

/// Removes an object, or marks it if it has finalizers. A pod goes at once, as one does that is deleted by force.
fn end(state: &mut State, route: &Route, key: &Key, old: &Arc<Value>) -> Value {
    let mut marked = old.as_ref().clone();
    let metadata = &mut marked["metadata"];
    if metadata["deletionTimestamp"].is_null() {
        metadata["deletionTimestamp"] = now();
        metadata["deletionGracePeriodSeconds"] = 0.into();
        if route.resource.plural == "pods" {
            metadata["generation"] = (metadata["generation"].as_i64().unwrap_or(1) + 1).into();
        }
        if has_finalizers(old) {
            return state.store(route.resource, marked).as_ref().clone();
        }
    } else if has_finalizers(old) {
        return marked;
    }
    let last = state.remove(key).filter(|_| route.resource.plural != "pods");
    last.map_or(marked, |last| last.as_ref().clone())
}

/// The objects that were there, as they were.
pub(super) fn delete_all(state: &mut State, write: &Write<'_>) -> Result<Vec<Value>, Refusal> {
    let route = write.route;
    let selector = Selector::of(route)?;
    let found: Vec<(Key, Arc<Value>)> = state
        .entries(route.resource.plural)
        .filter(|(_, object)| selector.matches(object))
        .map(|(key, object)| (key.clone(), Arc::clone(object)))
        .collect();
    found.iter().for_each(|(key, object)| drop(end(state, route, key, object)));
    Ok(found.into_iter().map(|(_, object)| object.as_ref().clone()).collect())
}
