//! Create, update, patch and delete.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::convert::{from_storage, to_storage};
use crate::merge::{DEPTH_MAX, is_deeper, is_same_but_times};
use crate::options::{Check, ObjectWrite, OpaqueParameters, Options};
use crate::resources::{self, EVENTS_GROUP, VERSION};
use crate::route::Route;
use crate::selector::Selector;
use crate::state::{Draft, Snapshot, key};
use crate::status::{self, Cause, Refusal};
use crate::storage::ObjectKey;
use crate::validate::{Compiled, Verdicts};
use crate::{defaults, openapi, validate};

mod events;
pub(crate) mod garbage;
mod metadata;
mod patches;

pub(crate) use metadata::now;
pub(crate) use patches::{APPLY, PATCHES, patch};

/// Largest object that is stored, in bytes as JSON: what etcd takes of a cluster's API server.
const OBJECT_BYTES_MAX: usize = 1_572_864;
/// All objects together, in bytes as JSON with something for each: they are in memory, where they take several times as much.
pub(crate) const STORED_BYTES_MAX: usize = 256 << 20;

/// A request that writes.
pub(crate) struct Write<'a> {
    pub(crate) options: &'a Options,
    pub(crate) check: Option<&'a Check>,
    pub(crate) route: &'a Route,
    pub(crate) body: Value,
    pub(crate) content_type: &'a str,
    pub(crate) user_agent: &'a str,
    pub(crate) compiled: Compiled,
    /// Expressions of the object that are not compiled yet: the write was refused for them, and can be tried again.
    pub(crate) to_compile: Mutex<BTreeSet<String>>,
    /// Verdicts of drivers on opaque parameters.
    pub(crate) verdicts: Verdicts,
    /// Parameters of the object without a verdict: as for expressions.
    pub(crate) to_validate: Mutex<BTreeSet<OpaqueParameters>>,
}

/// Operation of a write in `managedFields`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Update,
    /// The entries are in the object already.
    Apply,
}

/// The code of the answer, and the object as stored.
pub(crate) type Written = (u16, Value);

impl Write<'_> {
    fn media_type(&self) -> &str {
        self.content_type
            .split(';')
            .next()
            .unwrap_or_default()
            .trim()
    }

    fn manager(&self) -> String {
        match self.route.asked("fieldManager") {
            "" => self
                .user_agent
                .split('/')
                .next()
                .unwrap_or("unknown")
                .to_owned(),
            manager => manager.to_owned(),
        }
    }

    /// An object of this request's type as it is stored, or why it is none.
    fn stored(&self, draft: &mut Draft, body: Value) -> Result<Value, Refusal> {
        let route = self.route;
        let (api_version, kind) = (route.api_version(), route.resource.kind);
        if !body.is_object() || !(body["metadata"].is_object() || body["metadata"].is_null()) {
            return Err(status::bad_request(format!(
                "{kind} in version \"{VERSION}\" cannot be handled as a {kind}: an object with metadata is expected"
            )));
        }
        if is_deeper(&body, DEPTH_MAX) {
            return Err(status::bad_request(format!(
                "{kind} in version \"{VERSION}\" cannot be handled as a {kind}: exceeded max depth of {DEPTH_MAX}"
            )));
        }
        for (field, expected) in [("kind", kind), ("apiVersion", &api_version)] {
            if let Some(found) = body[field].as_str().filter(|found| *found != expected) {
                return Err(status::bad_request(format!(
                    "the data is of {field} {found}, not {expected}"
                )));
            }
        }
        let mut object = to_storage(route, body);
        match object["metadata"].as_object_mut() {
            Some(metadata) => metadata.retain(|_, value| !value.is_null()),
            None => object["metadata"] = json!({}),
        }
        if let Some(why) = openapi::decode_error(kind, VERSION, &object) {
            return Err(status::bad_request(why));
        }
        self.drop_unknown(draft, &mut object)?;
        Ok(object)
    }

    /// Drops the fields that the kind does not have, with a refusal or warnings as the request wants it.
    fn drop_unknown(&self, draft: &mut Draft, object: &mut Value) -> Result<(), Refusal> {
        let kind = self.route.resource.kind;
        match self.route.asked("fieldValidation") {
            "Ignore" => {}
            how @ ("" | "Warn" | "Strict") => {
                let unknown = openapi::unknown_fields(kind, object);
                if how == "Strict" && !unknown.is_empty() {
                    return Err(status::bad_request(openapi::strict_error(
                        kind, VERSION, &unknown,
                    )));
                }
                draft.warnings.extend(unknown);
            }
            other => {
                return Err(status::bad_request(format!(
                    "fieldValidation: Unsupported value: \"{other}\": supported values: \"\", \"Ignore\", \"Strict\", \"Warn\""
                )));
            }
        }
        openapi::prune(kind, object);
        Ok(())
    }

    /// Takes the expressions that [`published_rules`] needs compiled.
    pub(crate) fn take_to_compile(&self) -> BTreeSet<String> {
        std::mem::take(&mut *lock(&self.to_compile))
    }

    /// Takes the parameters of which [`Self::parameters`] needs a verdict.
    pub(crate) fn take_to_validate(&self) -> BTreeSet<OpaqueParameters> {
        std::mem::take(&mut *lock(&self.to_validate))
    }

    /// Returns the causes by which drivers refuse the opaque parameters of an object that is valid otherwise.
    ///
    /// # Errors
    ///
    /// Fails if drivers have to check them first, which is not done while other writes wait.
    fn parameters(&self, new: &Value, old: Option<&Value>) -> Result<Vec<Cause>, Refusal> {
        if self.options.parameters.is_none() {
            return Ok(Vec::new());
        }
        let parameters = validate::new_parameters(self.route.resource, new, old);
        let missing = self.verdicts.missing(&parameters);
        if !missing.is_empty() {
            *lock(&self.to_validate) = missing;
            return Err(status::too_many(1));
        }
        Ok(self.verdicts.causes(&parameters))
    }

    /// Refuses an object that no storage of a cluster takes.
    fn sized(&self, object: &Value) -> Result<(), Refusal> {
        match serde_json::to_vec(object) {
            Ok(bytes) if bytes.len() <= OBJECT_BYTES_MAX => Ok(()),
            _ => Err(status::object_too_large()),
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn create(draft: &mut Draft, write: &Write<'_>) -> Result<Written, Refusal> {
    let object = write.stored(draft, write.body.clone())?;
    create_object(draft, write, object, Operation::Update)
}

fn create_object(
    draft: &mut Draft,
    write: &Write<'_>,
    mut object: Value,
    operation: Operation,
) -> Result<Written, Refusal> {
    let route = write.route;
    metadata::check_namespace(route, &object)?;
    let managed = object["metadata"]["managedFields"].take();
    object["metadata"] = metadata::of_new(route, &object["metadata"], draft.snapshot())?;
    let name = object["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    can_hold_new(write, draft.snapshot(), &name)?;
    if draft.snapshot().at(&key(route.resource, &object)).is_some() {
        return Err(status::exists(route, &name));
    }
    write.sized(&object)?;
    defaults::begin(route, &mut object);
    validate::defaults(route.resource.kind, &mut object, jiff::Timestamp::now());
    let mut causes = published_rules(draft.snapshot(), write, &object, None)?;
    if route.resource.plural == "events" {
        causes.extend(validate::event(&object, route.group == EVENTS_GROUP));
    }
    if let Some(check) = write.check {
        causes.extend(check(route, ObjectWrite::Created(&object)));
    }
    if causes.is_empty() {
        causes = write.parameters(&object, None)?;
    }
    if !causes.is_empty() {
        return Err(status::invalid(route, &name, &causes));
    }
    object = match operation {
        Operation::Update => patches::manage(write, None, object),
        Operation::Apply => with_managed(object, managed),
    };
    write.sized(&object)?;
    let bytes = draft.snapshot().bytes;
    let stored = draft.store(route.resource, object);
    if route.resource.plural == "events" {
        events::expire(draft, route.resource);
    }
    has_space(draft, bytes)?;
    Ok((201, stored.as_ref().clone()))
}

/// Returns the violations of the published rules by an object. A server without controllers need not have the object's namespace; without
/// the namespace, admin access is not checked.
///
/// # Errors
///
/// Fails if expressions have to be compiled first, which is not done while other writes wait.
fn published_rules(
    snapshot: &Snapshot,
    write: &Write<'_>,
    new: &Value,
    old: Option<&Value>,
) -> Result<Vec<Cause>, Refusal> {
    let resource = write.route.resource;
    let namespace = resources::resource("namespaces")
        .and_then(|namespaces| snapshot.object(namespaces, "", &write.route.namespace))
        .map(Arc::as_ref);
    let mut causes = Vec::new();
    if write.options.controllers || namespace.is_some() {
        causes.extend(validate::admin_access(resource, new, old, namespace));
    }
    match validate::new_expressions(resource, new, old) {
        Ok(expressions) => {
            let missing = write.compiled.missing(&expressions);
            if !missing.is_empty() {
                *lock(&write.to_compile) = missing;
                return Err(status::too_many(1));
            }
        }
        Err(cause) => causes.push(cause),
    }
    causes.extend(validate::object(resource, new, old, &write.compiled));
    Ok(causes)
}

/// Refuses a write after which the objects take more than [`STORED_BYTES_MAX`], and more than the `bytes` before it.
fn has_space(draft: &Draft, bytes: usize) -> Result<(), Refusal> {
    let now = draft.snapshot().bytes;
    if now > STORED_BYTES_MAX && now > bytes {
        Err(status::no_space())
    } else {
        Ok(())
    }
}

/// Fails if the namespace of a new object does not accept one.
fn can_hold_new(write: &Write<'_>, snapshot: &Snapshot, name: &str) -> Result<(), Refusal> {
    let route = write.route;
    let Some(namespaces) = resources::resource("namespaces").filter(|_| route.resource.namespaced)
    else {
        return Ok(());
    };
    match snapshot.object(namespaces, "", &route.namespace) {
        Some(found) if found["metadata"]["deletionTimestamp"].is_string() => {
            Err(status::terminating(route, name))
        }
        None if write.options.controllers => Err(status::no_namespace(&route.namespace)),
        _ => Ok(()),
    }
}

pub(crate) fn update(draft: &mut Draft, write: &Write<'_>) -> Result<Written, Refusal> {
    let route = write.route;
    let new = write.stored(draft, write.body.clone())?;
    let name = new["metadata"]["name"].as_str().unwrap_or_default();
    if name != route.name {
        return Err(status::other_name(name, route));
    }
    metadata::check_namespace(route, &new)?;
    let old = draft.snapshot().current(route)?;
    replace(draft, write, &old, new, Operation::Update)
}

fn at(route: &Route) -> ObjectKey {
    let (namespace, name) = (route.namespace.clone(), route.name.clone());
    ObjectKey {
        resource: route.resource.plural,
        namespace,
        name,
    }
}

/// Puts `new` in the place of `old`, as far as the request may.
fn replace(
    draft: &mut Draft,
    write: &Write<'_>,
    old: &Arc<Value>,
    mut new: Value,
    operation: Operation,
) -> Result<Written, Refusal> {
    let route = write.route;
    metadata::preconditions(route, &new["metadata"], &old["metadata"])?;
    let managed = new["metadata"]["managedFields"].take();
    metadata::keep(route, &mut new, old);
    write.sized(&new)?;
    validate::defaults(route.resource.kind, &mut new, jiff::Timestamp::now());
    if route.resource.plural == "resourceclaims" {
        validate::drop_deallocated_devices(&mut new, old);
    }
    let mut causes = published_rules(draft.snapshot(), write, &new, Some(old))?;
    if let Some(check) = write.check {
        let more = check(route, ObjectWrite::Updated { new: &new, old });
        causes.extend(
            more.into_iter()
                .filter(|more| !causes_name(&causes, &more.field))
                .collect::<Vec<_>>(),
        );
    }
    if causes.is_empty() {
        causes = write.parameters(&new, Some(old))?;
    }
    if !causes.is_empty() {
        return Err(status::invalid(route, &route.name, &causes));
    }
    if route.resource.generation && new["spec"] != old["spec"] {
        let generation = old["metadata"]["generation"].as_i64().unwrap_or_default() + 1;
        new["metadata"]["generation"] = generation.into();
    }
    new = with_managed(new, managed);
    if operation == Operation::Update {
        new = patches::manage(write, Some(old), new);
    }
    if is_same_but_times(&new, old) {
        return Ok((200, old.as_ref().clone()));
    }
    write.sized(&new)?;
    if new["metadata"]["deletionTimestamp"].is_string() && !has_finalizers(&new) {
        let last = draft.remove(&at(route));
        return Ok((200, last.map_or(new, |last| last.as_ref().clone())));
    }
    let bytes = draft.snapshot().bytes;
    let stored = draft.store(route.resource, new);
    has_space(draft, bytes)?;
    Ok((200, stored.as_ref().clone()))
}

/// Sets `managedFields` to the given entries, unless they are null.
fn with_managed(mut object: Value, managed: Value) -> Value {
    if !managed.is_null() {
        object["metadata"]["managedFields"] = managed;
    }
    object
}

fn causes_name(causes: &[Cause], field: &str) -> bool {
    causes.iter().any(|cause| cause.field == field)
}

fn has_finalizers(object: &Value) -> bool {
    object["metadata"]["finalizers"]
        .as_array()
        .is_some_and(|list| !list.is_empty())
}

pub(crate) fn delete(draft: &mut Draft, write: &Write<'_>) -> Result<Written, Refusal> {
    let route = write.route;
    let old = draft.snapshot().current(route)?;
    metadata::preconditions_of_delete(route, &write.body["preconditions"], &old["metadata"])?;
    if write.options.controllers && route.resource.plural == "namespaces" && route.name == "default"
    {
        return Err(status::namespace_stays(route));
    }
    can_be_deleted(write, &old)?;
    let policy = match (
        &write.body["propagationPolicy"],
        &write.body["orphanDependents"],
    ) {
        (Value::String(policy), _) => policy,
        // What clients sent before there were policies.
        (_, Value::Bool(true)) => "Orphan",
        (_, Value::Bool(false)) => "Background",
        _ => route.asked("propagationPolicy"),
    };
    match policy {
        "" | "Background" | "Foreground" => {}
        "Orphan" => garbage::orphan(draft, &old),
        other => {
            return Err(status::bad_request(format!(
                "DeleteOptions.propagationPolicy: Unsupported value: \"{other}\": supported values: \
                 \"Foreground\", \"Background\", \"Orphan\""
            )));
        }
    }
    Ok((200, end(draft, &at(route), &old, write.options.controllers)))
}

/// Fails if the check refuses a deletion.
fn can_be_deleted(write: &Write<'_>, object: &Value) -> Result<(), Refusal> {
    let causes = write
        .check
        .map(|check| check(write.route, ObjectWrite::Deleted(object)));
    match causes.filter(|causes| !causes.is_empty()) {
        Some(causes) => {
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            Err(status::invalid(write.route, name, &causes))
        }
        None => Ok(()),
    }
}

/// Removes an object, or marks it if it has finalizers or is a namespace with objects. A pod goes at once, as one does that is deleted by
/// force. Gives the answer to its deletion.
pub(crate) fn end(
    draft: &mut Draft,
    key: &ObjectKey,
    old: &Arc<Value>,
    controllers: bool,
) -> Value {
    let mut marked = old.as_ref().clone();
    let Some(resource) = resources::resource(key.resource) else {
        return marked;
    };
    let holds = has_finalizers(old) || (controllers && garbage::has_content(draft.snapshot(), key));
    let metadata = &mut marked["metadata"];
    if metadata["deletionTimestamp"].is_null() {
        metadata["deletionTimestamp"] = now();
        metadata["deletionGracePeriodSeconds"] = 0.into();
        if key.resource == "pods" {
            metadata["generation"] = (metadata["generation"].as_i64().unwrap_or(1) + 1).into();
        }
        if key.resource == "namespaces" && marked["status"].is_object() {
            marked["status"]["phase"] = "Terminating".into();
        }
        if holds {
            return draft.store(resource, marked).as_ref().clone();
        }
    } else if holds {
        return marked;
    }
    let last = draft.remove(key).filter(|_| key.resource != "pods");
    last.map_or(marked, |last| last.as_ref().clone())
}

/// The objects that were there, as they were.
pub(crate) fn delete_all(draft: &mut Draft, write: &Write<'_>) -> Result<Vec<Value>, Refusal> {
    let route = write.route;
    let selector = Selector::of(route)?;
    let found: Vec<(ObjectKey, Arc<Value>)> = draft
        .snapshot()
        .objects(route.resource)
        .filter(|(_, object)| selector.matches(object))
        .filter(|(key, _)| !(write.options.controllers && is_default_namespace(key)))
        .map(|(key, object)| (key.clone(), Arc::clone(object)))
        .collect();
    found
        .iter()
        .try_for_each(|(_, object)| can_be_deleted(write, object))?;
    for (key, object) in &found {
        end(draft, key, object, write.options.controllers);
    }
    Ok(found
        .into_iter()
        .map(|(_, object)| object.as_ref().clone())
        .collect())
}

fn is_default_namespace(key: &ObjectKey) -> bool {
    key.resource == "namespaces" && key.name == "default"
}

/// An object of the draft as a client of this request has it.
pub(crate) fn served(route: &Route, written: Written) -> Written {
    (written.0, from_storage(route, written.1))
}
