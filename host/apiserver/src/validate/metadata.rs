//! The rules of `metadata`, which are the same for every kind but for the form of names.

use serde_json::Value;

use super::fields::{Causes, entries, flag, integer, invalid, list, text, too_long};
use super::names;
use crate::resources::Resource;
use crate::status::Cause;

/// Maximum bytes of all keys and values of `metadata.annotations` together.
const ANNOTATION_BYTES: usize = 256 * 1024;
const ORPHAN: &str = "orphan";
const FOREGROUND: &str = "foregroundDeletion";
/// Finalizers without a domain.
const STANDARD_FINALIZERS: [&str; 3] = ["kubernetes", ORPHAN, FOREGROUND];
/// Fields of the metadata that a template gives its claims, beside labels and annotations.
const NOT_IN_TEMPLATES: [&str; 13] = [
    "name",
    "generateName",
    "namespace",
    "selfLink",
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "ownerReferences",
    "finalizers",
    "managedFields",
];

/// Checks `metadata` of an object that has got its name.
pub(super) fn check(causes: &mut Causes, resource: &Resource, new: &Value, old: Option<&Value>) {
    let metadata = &new["metadata"];
    name(causes, resource, metadata);
    match (resource.namespaced, text(metadata, "namespace")) {
        (true, "") => causes.push(Cause::required("metadata.namespace", "")),
        (true, namespace) => {
            names::refuse(
                causes,
                "metadata.namespace",
                namespace,
                names::label(namespace),
            );
        }
        (false, "") => {}
        (false, _) => causes.push(Cause::forbidden(
            "metadata.namespace",
            "not allowed on this type",
        )),
    }
    if integer(metadata, "generation") < 0 {
        let why = "must be greater than or equal to 0";
        causes.push(Cause::invalid(
            "metadata.generation",
            integer(metadata, "generation"),
            why,
        ));
    }
    labels(causes, "metadata", metadata);
    annotations(causes, "metadata", metadata);
    owners(causes, list(metadata, "ownerReferences"));
    finalizers(causes, resource, metadata);
    if let Some(old) = old.filter(|old| !old["metadata"]["deletionTimestamp"].is_null()) {
        no_new_finalizers(causes, metadata, &old["metadata"]);
    }
}

fn name(causes: &mut Causes, resource: &Resource, metadata: &Value) {
    let form = match resource.plural {
        "namespaces" => names::label,
        "events" => names::path_segment,
        _ => names::subdomain,
    };
    let (name, prefix) = (text(metadata, "name"), text(metadata, "generateName"));
    // Of a class, the name that was made of the prefix is checked alone.
    if !prefix.is_empty() && resource.plural != "deviceclasses" {
        names::refuse(
            causes,
            "metadata.generateName",
            prefix,
            form(&as_name(prefix)),
        );
    }
    match name {
        "" => causes.push(Cause::required(
            "metadata.name",
            "name or generateName is required",
        )),
        name => names::refuse(causes, "metadata.name", name, form(name)),
    }
}

/// A prefix of names may end in a dash. An API server replaces the last two letters, not one.
fn as_name(prefix: &str) -> String {
    let start = prefix
        .len()
        .checked_sub(2)
        .and_then(|end| prefix.get(..end));
    match start {
        Some(start) if prefix.ends_with('-') => format!("{start}a"),
        _ => prefix.to_owned(),
    }
}

fn labels(causes: &mut Causes, at: &str, metadata: &Value) {
    let field = format!("{at}.labels");
    for (key, value) in entries(metadata, "labels") {
        names::refuse(causes, &field, key, names::label_key(key));
        let value = value.as_str().unwrap_or_default();
        names::refuse(causes, &field, value, names::label_value(value));
    }
}

fn annotations(causes: &mut Causes, at: &str, metadata: &Value) {
    let field = format!("{at}.annotations");
    let mut bytes = 0;
    for (key, value) in entries(metadata, "annotations") {
        names::refuse(causes, &field, key, names::label_key(&key.to_lowercase()));
        bytes += key.len() + value.as_str().map_or(0, str::len);
    }
    if bytes > ANNOTATION_BYTES {
        causes.push(too_long(field, ANNOTATION_BYTES));
    }
}

fn owners(causes: &mut Causes, owners: &[Value]) {
    const FIELD: &str = "metadata.ownerReferences";
    let mut controller: Option<String> = None;
    for owner in owners {
        let [api_version, kind, name] = ["apiVersion", "kind", "name"].map(|key| text(owner, key));
        let has_version = match api_version.split_once('/') {
            Some((_, version)) => !version.is_empty() && !version.contains('/'),
            None => !api_version.is_empty(),
        };
        if !has_version {
            causes.push(invalid(
                format!("{FIELD}.apiVersion"),
                api_version,
                "version must not be empty",
            ));
        }
        for key in ["kind", "name", "uid"]
            .into_iter()
            .filter(|key| text(owner, key).is_empty())
        {
            causes.push(invalid(format!("{FIELD}.{key}"), "", "must not be empty"));
        }
        if (api_version, kind) == ("v1", "Event") {
            causes.push(invalid(FIELD, name, "an Event cannot be an owner"));
        }
        if flag(owner, "controller") {
            let this = format!("{kind}/{name}");
            match &controller {
                Some(first) => {
                    let why = format!("cannot be a controller beside {first}");
                    causes.push(invalid(FIELD, &this, &why));
                }
                None => controller = Some(this),
            }
        }
    }
}

fn finalizers(causes: &mut Causes, resource: &Resource, metadata: &Value) {
    const FIELD: &str = "metadata.finalizers";
    let items: Vec<&str> = list(metadata, "finalizers")
        .iter()
        .filter_map(Value::as_str)
        .collect();
    for name in &items {
        names::refuse(causes, FIELD, name, names::label_key(name));
    }
    if [ORPHAN, FOREGROUND].iter().all(|name| items.contains(name)) {
        let why = format!("cannot be set beside {FOREGROUND}");
        causes.push(invalid(FIELD, ORPHAN, &why));
    }
    if resource.plural == "events" {
        return;
    }
    let short = |name: &str| !name.contains('/') && !STANDARD_FINALIZERS.contains(&name);
    for (index, name) in items.iter().enumerate().filter(|(_, name)| short(name)) {
        let why = "must be a standard finalizer or have a domain";
        causes.push(invalid(format!("{FIELD}[{index}]"), name, why));
    }
}

fn no_new_finalizers(causes: &mut Causes, new: &Value, old: &Value) {
    let old = list(old, "finalizers");
    let mut added: Vec<String> = list(new, "finalizers")
        .iter()
        .filter(|name| !old.contains(name))
        .map(|name| name.to_string())
        .collect();
    added.sort();
    added.dedup();
    if !added.is_empty() {
        let why = format!(
            "cannot be added to an object that is being deleted: {}",
            added.join(", ")
        );
        causes.push(Cause::forbidden("metadata.finalizers", &why));
    }
}

/// Checks the metadata that a template gives its claims: labels and annotations, and nothing else.
pub(super) fn of_template(causes: &mut Causes, at: &str, metadata: &Value) {
    annotations(causes, at, metadata);
    labels(causes, at, metadata);
    let is_set = |field: &&str| !metadata[*field].is_null() && metadata[*field] != "";
    for field in NOT_IN_TEMPLATES.into_iter().filter(is_set) {
        causes.push(Cause::forbidden(format!("{at}.{field}"), "cannot be set"));
    }
}
