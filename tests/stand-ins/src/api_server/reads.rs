//! Get and list.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use serde_json::{Value, json};

use super::convert::from_storage;
use super::route::Route;
use super::selector::Selector;
use super::state::State;
use super::status::{self, Refusal};

pub(super) fn get(state: &State, route: &Route) -> Result<Value, Refusal> {
    state.current(route).map(|found| from_storage(route, found.as_ref().clone()))
}

pub(super) fn list_of(route: &Route, revision: u64, items: impl Iterator<Item = Value>) -> Value {
    // The items of a list do not say what they are.
    let item = |object| {
        let mut object = from_storage(route, object);
        object.as_object_mut().map(|fields| ["kind", "apiVersion"].map(|field| fields.remove(field)));
        object
    };
    json!({
        "kind": format!("{}List", route.resource.kind),
        "apiVersion": route.api_version(),
        "metadata": { "resourceVersion": revision.to_string() },
        "items": items.map(item).collect::<Vec<_>>(),
    })
}

/// The newest state, whichever older one may be asked for.
pub(super) fn list(state: &State, route: &Route) -> Result<Value, Refusal> {
    let selector = Selector::of(route)?;
    let (revision, after) = page(state, route)?.unwrap_or((state.revision, None));
    let limit = route.asked("limit").parse().ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let entries = state.entries(route.resource.plural).filter(|(_, object)| selector.matches(object));
    let mut rest = entries.filter(|((_, namespace, name), _)| {
        after.as_ref().is_none_or(|after| (namespace, name) > (&after.0, &after.1))
    });
    let taken: Vec<_> = rest.by_ref().take(limit).collect();
    let remaining = rest.count();
    let mut list = list_of(route, revision, taken.iter().map(|(_, object)| object.as_ref().clone()));
    if let Some((key, _)) = taken.last().filter(|_| remaining > 0) {
        let token = json!([revision, key.1, key.2]);
        list["metadata"]["continue"] = URL_SAFE_NO_PAD.encode(token.to_string()).into();
        list["metadata"]["remainingItemCount"] = remaining.into();
    }
    Ok(list)
}

/// The last object of a page: its namespace and name.
type Last = (String, String);

/// The resource version of a list's first page, and where the last page ended.
fn page(state: &State, route: &Route) -> Result<Option<(u64, Option<Last>)>, Refusal> {
    let token = route.asked("continue");
    if token.is_empty() {
        return Ok(None);
    }
    let bytes = URL_SAFE_NO_PAD.decode(token).unwrap_or_default();
    let Ok((revision, namespace, name)) = serde_json::from_slice(&bytes) else {
        return Err(status::bad_request("continue key is not valid: the provided token cannot be read"));
    };
    if revision < state.compacted {
        return Err(status::expired(revision, state.compacted));
    }
    Ok(Some((revision, Some((namespace, name)))))
}

/// What is asked for with `as=PartialObjectMetadata`.
pub(super) fn metadata_only(object: &Value) -> Value {
    json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"] })
}
