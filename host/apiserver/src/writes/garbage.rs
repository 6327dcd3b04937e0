//! Deletion of the objects that a cluster's controllers delete after a deletion: dependents without an owner, and the objects of a
//! namespace.

use std::sync::Arc;

use serde_json::Value;

use crate::resources::{self, RESOURCES, Resource};
use crate::state::{Draft, Snapshot};
use crate::storage::ObjectKey;

use super::end;

fn references(object: &Value) -> &[Value] {
    object["metadata"]["ownerReferences"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default()
}

/// Returns true if an owner is known to be gone. An owner of a kind that this server does not have is never known to be gone.
fn is_gone(snapshot: &Snapshot, reference: &Value) -> bool {
    let [version, kind, uid] = ["apiVersion", "kind", "uid"].map(|key| text(&reference[key]));
    let resource = resources::of_type(version, kind);
    resource.is_some_and(|resource| !snapshot.has_uid(resource, uid))
}

/// Returns true if an object has owners, and all of them are gone.
fn is_garbage(snapshot: &Snapshot, object: &Value) -> bool {
    let mut references = references(object).iter();
    !references.as_slice().is_empty() && references.all(|reference| is_gone(snapshot, reference))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// Makes the dependents of an owner independent of it.
pub(crate) fn orphan(draft: &mut Draft, owner: &Value) {
    let uid = &owner["metadata"]["uid"];
    for (key, dependent) in draft.snapshot().dependents(text(uid)) {
        let Some(resource) = resources::resource(key.resource) else {
            continue;
        };
        let mut freed = dependent.as_ref().clone();
        let references = freed
            .pointer_mut("/metadata/ownerReferences")
            .and_then(Value::as_array_mut);
        if let Some(references) = references {
            references.retain(|reference| reference["uid"] != *uid);
        }
        draft.store(resource, freed);
    }
}

fn content<'a>(
    snapshot: &'a Snapshot,
    namespace: &str,
) -> impl Iterator<Item = (&'a ObjectKey, &'a Arc<Value>)> {
    let namespace = namespace.to_owned();
    snapshot
        .all()
        .filter(move |(key, _)| key.namespace == namespace)
}

/// Returns true if an object is a namespace with objects.
pub(crate) fn has_content(snapshot: &Snapshot, key: &ObjectKey) -> bool {
    let mut namespaced = RESOURCES.iter().filter(|resource| resource.namespaced);
    key.resource == "namespaces" && namespaced.any(|resource| snapshot.has_any(resource, &key.name))
}

/// Deletes after the changes of a draft what is without an owner or in a namespace that is being deleted, until there is no more of it.
pub(crate) fn collect(draft: &mut Draft) {
    let mut at = 0;
    while let Some(entry) = draft.changes.get(at).cloned() {
        at += 1;
        if entry.is_deletion {
            after_deletion(draft, &entry.key, &entry.object);
        } else if entry.before.is_none()
            && !references(&entry.object).is_empty()
            && is_garbage(draft.snapshot(), &entry.object)
        {
            end(draft, &entry.key, &entry.object, true);
        } else if entry.key.resource == "namespaces" && is_terminating(&entry.object) {
            let content: Vec<_> = content(draft.snapshot(), &entry.key.name)
                .map(|(key, object)| (key.clone(), Arc::clone(object)))
                .collect();
            for (key, object) in content {
                end(draft, &key, &object, true);
            }
        }
    }
}

fn is_terminating(object: &Value) -> bool {
    object["metadata"]["deletionTimestamp"].is_string()
}

fn after_deletion(draft: &mut Draft, key: &ObjectKey, removed: &Value) {
    let uid = text(&removed["metadata"]["uid"]);
    for (key, _) in draft.snapshot().dependents(uid) {
        // A dependent may have been deleted with another one.
        let Some(dependent) = draft.snapshot().at(&key).cloned() else {
            continue;
        };
        if is_garbage(draft.snapshot(), &dependent) {
            end(draft, &key, &dependent, true);
        }
    }
    let namespaces: Option<&'static Resource> = resources::resource("namespaces");
    let Some(namespaces) = namespaces.filter(|_| !key.namespace.is_empty()) else {
        return;
    };
    let found = draft
        .snapshot()
        .object(namespaces, "", &key.namespace)
        .cloned();
    if let Some(namespace) = found.filter(|namespace| is_terminating(namespace)) {
        let key = ObjectKey {
            resource: namespaces.plural,
            namespace: String::new(),
            name: key.namespace.clone(),
        };
        end(draft, &key, &namespace, true);
    }
}
