//! Create, update, patch and delete.
//!
//! A claim's opaque parameters are stored byte by byte. A claim that was made with space between the parts of its parameters is
//! compared with the same parameters as a server writes them, without: every later write of its status in JSON, of whatever kind,
//! looks like a change of `status.allocation` and is refused. That is how a recorded apply was refused.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Map, Value, json};

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
const POD_GRACE_SECONDS: i64 = 30;

/// A request that writes.
#[derive(Debug)]
pub(super) struct Write<'a> {
    pub(super) route: &'a Route,
    pub(super) body: Value,
    /// Whether the opaque parameters in the body have space between their parts.
    pub(super) spaced: bool,
    pub(super) content_type: &'a str,
    pub(super) user_agent: &'a str,
    /// Fields that this server does not know.
    pub(super) drops: Vec<String>,
}

/// What a write comes to: its code, and the object as stored.
pub(super) type Written = (u16, Value);

pub(super) fn now() -> Value {
    time(Timestamp::now())
}

fn time(at: Timestamp) -> Value {
    at.strftime("%Y-%m-%dT%H:%M:%SZ").to_string().into()
}

impl Write<'_> {
    fn manager(&self) -> String {
        match self.route.asked("fieldManager") {
            "" => self.user_agent.split('/').next().unwrap_or("unknown").to_owned(),
            manager => manager.to_owned(),
        }
    }

    fn dry_run(&self) -> bool {
        self.route.asked("dryRun") == "All"
    }

    /// As sent, in the stored version, without what this server does not know.
    fn stored(&self, mut body: Value) -> Result<Value, Refusal> {
        let route = self.route;
        for drop in &self.drops {
            patch::drop_field(&mut body, drop);
        }
        let (api_version, kind) = (route.api_version(), route.resource.kind);
        if body["kind"].as_str().is_some_and(|found| found != kind) {
            let found = body["kind"].as_str().unwrap_or_default();
            return Err(status::bad_request(format!(
                "{found} in version {api_version:?} cannot be handled as a {kind}"
            )));
        }
        if body["apiVersion"].as_str().is_some_and(|found| found != api_version) {
            let found = body["apiVersion"].as_str().unwrap_or_default();
            return Err(status::bad_request(format!(
                "the API version in the data ({found}) does not match the expected API version ({api_version})"
            )));
        }
        Ok(to_storage(route.resource, &route.group, &route.version, body))
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
    let metadata = new_metadata(route, &object["metadata"])?;
    object["metadata"] = metadata;
    let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
    if route.resource.namespaced && is_terminating(state, &route.namespace) {
        return Err(status::terminating(route, &name));
    }
    if state.objects.contains_key(&key(route.resource, &object)) {
        return Err(status::exists(route, &name));
    }
    defaults(route, &mut object, None);
    let mut causes =
        validate::object(route.resource, &object, None, has_admin_access(state, &route.namespace));
    if route.resource.plural == "events" {
        causes.extend(validate::event(&object, route.group == EVENTS));
    }
    if !causes.is_empty() {
        return Err(status::invalid(route, &name, &causes));
    }
    let operation = if write.content_type.contains("apply") { "Apply" } else { "Update" };
    manage(&mut object, write, operation);
    if write.dry_run() {
        return Ok((201, object));
    }
    if write.spaced {
        state.spaced.insert(object["metadata"]["uid"].as_str().unwrap_or_default().to_owned());
    }
    Ok((201, state.store(route.resource, object).as_ref().clone()))
}

/// What a new object's metadata comes to.
fn new_metadata(route: &Route, asked: &Value) -> Result<Value, Refusal> {
    let mut metadata = asked.as_object().cloned().unwrap_or_default();
    if metadata.get("resourceVersion").and_then(Value::as_str).is_some_and(|version| !version.is_empty()) {
        return Err(status::bad_request("resourceVersion should not be set on objects to be created"));
    }
    if route.resource.namespaced {
        let named = metadata.get("namespace").and_then(Value::as_str).unwrap_or(&route.namespace);
        if named != route.namespace {
            let why = "the namespace of the provided object does not match the namespace sent on the request";
            return Err(status::bad_request(why));
        }
        metadata.insert("namespace".into(), route.namespace.clone().into());
    } else {
        metadata.remove("namespace");
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

fn namespace<'a>(state: &'a State, name: &str) -> Option<&'a Arc<Value>> {
    state.objects.get(&("namespaces", String::new(), name.to_owned()))
}

fn is_terminating(state: &State, name: &str) -> bool {
    namespace(state, name).is_some_and(|found| found["metadata"]["deletionTimestamp"].is_string())
}

fn has_admin_access(state: &State, name: &str) -> bool {
    let label =
        |found: &Arc<Value>| found["metadata"]["labels"]["resource.kubernetes.io/admin-access"] == "true";
    namespace(state, name).is_some_and(label)
}

/// Fills in what the writer left out.
fn defaults(route: &Route, object: &mut Value, old: Option<&Value>) {
    match route.resource.plural {
        "resourceclaims" => {
            claim_defaults(&mut object["spec"]["devices"]);
            if old.is_none() {
                object["status"] = json!({});
            }
        }
        "resourceclaimtemplates" => {
            claim_defaults(&mut object["spec"]["spec"]["devices"]);
            if object["spec"]["metadata"].is_null() {
                object["spec"]["metadata"] = json!({});
            }
        }
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
        "pods" if old.is_none() => object["status"] = json!({ "phase": "Pending", "qosClass": "BestEffort" }),
        _ => {}
    }
}

fn claim_defaults(devices: &mut Value) {
    let fill = |request: &mut Value| {
        if request["allocationMode"].is_null() {
            request["allocationMode"] = "ExactCount".into();
        }
        if request["allocationMode"] == "ExactCount" && request["count"].is_null() {
            request["count"] = 1.into();
        }
    };
    for request in devices.get_mut("requests").and_then(Value::as_array_mut).into_iter().flatten() {
        if let Some(exactly) = request.get_mut("exactly") {
            fill(exactly);
        }
        for choice in request.get_mut("firstAvailable").and_then(Value::as_array_mut).into_iter().flatten() {
            fill(choice);
        }
    }
}

/// Names in `managedFields` what a request had.
fn manage(object: &mut Value, write: &Write<'_>, operation: &str) {
    let (manager, subresource) = (write.manager(), &write.route.subresource);
    let mut entry = json!({
        "manager": manager, "operation": operation, "apiVersion": write.route.api_version(), "time": now(),
        "fieldsType": "FieldsV1", "fieldsV1": fields(&write.body),
    });
    if !subresource.is_empty() {
        entry["subresource"] = subresource.as_str().into();
    }
    let Some(metadata) = object["metadata"].as_object_mut() else { return };
    let entries = metadata.entry("managedFields").or_insert_with(|| json!([]));
    let Some(entries) = entries.as_array_mut() else { return };
    let same =
        |other: &Value| ["manager", "operation", "subresource"].iter().all(|key| other[*key] == entry[*key]);
    entries.retain(|other| !same(other));
    entries.push(entry);
}

fn fields(body: &Value) -> Value {
    let Value::Object(body) = body else { return json!({}) };
    let told = body.iter().filter(|(key, _)| !matches!(key.as_str(), "kind" | "apiVersion" | "metadata"));
    Value::Object(told.map(|(key, value)| (format!("f:{key}"), fields(value))).collect::<Map<_, _>>())
}

pub(super) fn update(state: &mut State, write: &Write<'_>) -> Result<Written, Refusal> {
    let route = write.route;
    let new = write.stored(write.body.clone())?;
    let named = new["metadata"]["name"].as_str().unwrap_or_default();
    if named != route.name {
        return Err(status::bad_request(format!(
            "the name of the object ({named}) does not match the name on the URL ({})",
            route.name
        )));
    }
    let old = current(state, route)?;
    replace(state, write, &old, new, "Update")
}

fn at(route: &Route) -> Key {
    (route.resource.plural, route.namespace.clone(), route.name.clone())
}

fn current(state: &State, route: &Route) -> Result<Arc<Value>, Refusal> {
    state.objects.get(&at(route)).cloned().ok_or_else(|| status::not_found(route, &route.name))
}

pub(super) fn patch(state: &mut State, write: &Write<'_>) -> Result<Written, Refusal> {
    let route = write.route;
    let kind = write.content_type.split(';').next().unwrap_or_default().trim();
    let apply = kind == "application/apply-patch+yaml";
    if apply {
        check_apply(write)?;
    }
    let old = match current(state, route) {
        Ok(old) => old,
        Err(_) if apply && route.subresource.is_empty() => {
            let mut body = write.body.clone();
            body["metadata"]["name"] = route.name.clone().into();
            let create_it = Write { body, drops: write.drops.clone(), ..*write };
            let (code, made) = create(state, &create_it)?;
            remember(state, write, &made);
            return Ok((code, made));
        }
        Err(refusal) => return Err(refusal),
    };
    let mut document = from_storage(route.resource, &route.group, &route.version, old.as_ref().clone());
    match kind {
        "application/merge-patch+json" => patch::merge(&mut document, &write.body),
        "application/strategic-merge-patch+json" => patch::strategic(&mut document, &write.body),
        "application/json-patch+json" => patch::json(&mut document, &write.body)
            .map_err(|why| status::refusal(422, "Invalid", why, json!({})))?,
        _ if apply => {
            let last = state.applied.get(&remembered(write, &old));
            if !route.flag("force") {
                let foreign = patch::foreign(&document, last, &write.body, "");
                if !foreign.is_empty() {
                    return Err(status::apply_conflict(&foreign));
                }
            }
            patch::apply(&mut document, last, &write.body);
        }
        other => return Err(status::unsupported_type(other)),
    }
    if document["metadata"]["name"] != old["metadata"]["name"] {
        return Err(status::bad_request("the name of the object may not be changed"));
    }
    let new = write.stored(document)?;
    let written = replace(state, write, &old, new, if apply { "Apply" } else { "Update" })?;
    if apply && !write.dry_run() {
        remember(state, write, &old);
    }
    Ok(written)
}

fn check_apply(write: &Write<'_>) -> Result<(), Refusal> {
    if write.route.asked("fieldManager").is_empty() {
        let message = "PatchOptions.meta.k8s.io \"\" is invalid: fieldManager: Required value: is required for apply patch";
        return Err(status::refusal(422, "Invalid", message, json!({})));
    }
    if write.body["apiVersion"].is_null() || write.body["kind"].is_null() {
        return Err(status::bad_request(
            "Incorrect version specified in apply patch. Specified patch version: , expected: ",
        ));
    }
    if !write.body["metadata"]["managedFields"].is_null() {
        return Err(status::bad_request("metadata.managedFields must be nil"));
    }
    Ok(())
}

/// Where the last apply of this manager is kept.
fn remembered(write: &Write<'_>, object: &Value) -> (String, String, String) {
    let uid = object["metadata"]["uid"].as_str().unwrap_or_default();
    (uid.to_owned(), write.route.subresource.clone(), write.manager())
}

fn remember(state: &mut State, write: &Write<'_>, object: &Value) {
    let mut applied = write.body.clone();
    applied["metadata"].as_object_mut().map(|metadata| metadata.remove("resourceVersion"));
    state.applied.insert(remembered(write, object), applied);
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
    defaults(route, &mut new, Some(old));
    if new["status"]["allocation"].is_null()
        && !old["status"]["allocation"].is_null()
        && route.subresource == "status"
    {
        // What was reported of devices goes with them.
        new["status"].as_object_mut().map(|status| status.remove("devices"));
    }
    let mut causes = validate::object(route.resource, &new, Some(old), true);
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
    if write.dry_run() {
        return Ok((200, new));
    }
    let finalizers = new["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty());
    if new["metadata"]["deletionTimestamp"].is_string() && !finalizers && route.resource.plural != "pods" {
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

/// What a writer says that it has seen.
fn preconditions(route: &Route, asked: &Value, found: &Value) -> Result<(), Refusal> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let (uid, version) = (text(&asked["uid"]), text(&asked["resourceVersion"]));
    if !uid.is_empty() && uid != text(&found["uid"]) {
        return Err(status::precondition(route, &route.name, "UID", &uid, &text(&found["uid"])));
    }
    if !version.is_empty() && version != text(&found["resourceVersion"]) {
        return Err(status::modified(route, &route.name));
    }
    Ok(())
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
    let old = current(state, route)?;
    let options = &write.body;
    let asked = &options["preconditions"];
    let found = &old["metadata"];
    for (key, named) in [("uid", "UID"), ("resourceVersion", "ResourceVersion")] {
        let (asked, found) =
            (asked[key].as_str().unwrap_or_default(), found[key].as_str().unwrap_or_default());
        if !asked.is_empty() && asked != found {
            return Err(status::precondition(route, &route.name, named, asked, found));
        }
    }
    if write.dry_run() {
        return Ok((200, old.as_ref().clone()));
    }
    Ok((200, end(state, write, &at(route), &old)))
}

/// Takes an object away, or marks it if something holds it.
fn end(state: &mut State, write: &Write<'_>, key: &Key, old: &Arc<Value>) -> Value {
    let route = write.route;
    let grace = grace(write, old);
    let held = old["metadata"]["finalizers"].as_array().is_some_and(|list| !list.is_empty());
    let mut marked = old.as_ref().clone();
    let metadata = &mut marked["metadata"];
    let sooner = metadata["deletionGracePeriodSeconds"].as_i64().is_some_and(|before| grace < before);
    if metadata["deletionTimestamp"].is_null() || sooner {
        metadata["deletionTimestamp"] = time(Timestamp::now() + jiff::SignedDuration::from_secs(grace));
        metadata["deletionGracePeriodSeconds"] = grace.into();
        if route.resource.plural == "pods" {
            metadata["generation"] = (metadata["generation"].as_i64().unwrap_or(1) + 1).into();
        }
    } else if held || grace > 0 {
        return marked;
    }
    if held || grace > 0 {
        return state.store(route.resource, marked).as_ref().clone();
    }
    let last = state.remove(key);
    if route.resource.plural == "pods" { marked } else { last.map_or(marked, |last| last.as_ref().clone()) }
}

/// A pod on a node goes when its kubelet says so, or when it is forced.
fn grace(write: &Write<'_>, object: &Value) -> i64 {
    if write.route.resource.plural != "pods" || object["spec"]["nodeName"].as_str().is_none_or(str::is_empty)
    {
        return 0;
    }
    let asked = write.route.asked("gracePeriodSeconds").parse().ok();
    let own = object["spec"]["terminationGracePeriodSeconds"].as_i64();
    asked.or(write.body["gracePeriodSeconds"].as_i64()).or(own).unwrap_or(POD_GRACE_SECONDS)
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
    if !write.dry_run() {
        for (key, object) in &found {
            end(state, write, key, object);
        }
    }
    Ok(found.into_iter().map(|(_, object)| object.as_ref().clone()).collect())
}

/// Whether the opaque parameters of a claim have space between their parts, as they were sent.
pub(super) fn has_spaced_parameters(body: &[u8]) -> bool {
    #[derive(serde::Deserialize)]
    struct Claim<'a> {
        #[serde(borrow)]
        spec: Spec<'a>,
    }
    #[derive(serde::Deserialize)]
    struct Spec<'a> {
        #[serde(borrow)]
        devices: Devices<'a>,
    }
    #[derive(serde::Deserialize)]
    struct Devices<'a> {
        #[serde(borrow, default)]
        config: Vec<Config<'a>>,
    }
    #[derive(serde::Deserialize)]
    struct Config<'a> {
        #[serde(borrow)]
        opaque: Opaque<'a>,
    }
    #[derive(serde::Deserialize)]
    struct Opaque<'a> {
        #[serde(borrow)]
        parameters: &'a serde_json::value::RawValue,
    }
    let Ok(claim) = serde_json::from_slice::<Claim<'_>>(body) else { return false };
    claim.spec.devices.config.iter().any(|config| has_space(config.opaque.parameters.get()))
}

fn has_space(json: &str) -> bool {
    let (mut quoted, mut escaped) = (false, false);
    json.chars().any(|char| {
        let found = !quoted && char.is_whitespace();
        match char {
            _ if escaped => escaped = false,
            '\\' if quoted => escaped = true,
            '"' => quoted = !quoted,
            _ => {}
        }
        found
    })
}
