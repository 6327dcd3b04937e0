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
    let key = (route.resource.plural, route.namespace.clone(), route.name.clone());
    let found = state.objects.get(&key).ok_or_else(|| status::not_found(route, &route.name))?;
    Ok(shown(route, found.as_ref().clone()))
}

/// In the version of the request.
pub(super) fn shown(route: &Route, object: Value) -> Value {
    from_storage(route.resource, &route.group, &route.version, object)
}

/// The items of a list do not say what they are.
fn item(route: &Route, object: Value) -> Value {
    let mut object = shown(route, object);
    if let Some(fields) = object.as_object_mut() {
        fields.remove("kind");
        fields.remove("apiVersion");
    }
    object
}

pub(super) fn list_of(route: &Route, revision: u64, items: Vec<Value>) -> Value {
    json!({
        "kind": format!("{}List", route.resource.kind),
        "apiVersion": route.api_version(),
        "metadata": { "resourceVersion": revision.to_string() },
        "items": items.into_iter().map(|object| item(route, object)).collect::<Vec<_>>(),
    })
}

pub(super) fn list(state: &State, route: &Route) -> Result<Value, Refusal> {
    let selector = Selector::of(route)?;
    let page = page(state, route)?;
    check_version(state, route)?;
    let (revision, after) = page.unwrap_or((state.revision, None));
    let limit = route.asked("limit").parse().ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
    let entries = state.entries(route.resource.plural).filter(|(_, object)| selector.matches(object));
    let mut rest = entries.filter(|((_, namespace, name), _)| {
        after.as_ref().is_none_or(|after| (namespace, name) > (&after.0, &after.1))
    });
    let taken: Vec<_> = rest.by_ref().take(limit).collect();
    let remaining = rest.count();
    let items = taken.iter().map(|(_, object)| object.as_ref().clone()).collect();
    let mut list = list_of(route, revision, items);
    if let Some((key, _)) = taken.last().filter(|_| remaining > 0) {
        let token = json!({ "v": "meta.k8s.io/v1", "rv": revision, "start": [key.1, key.2] });
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
    let bad = || status::bad_request("continue key is not valid: the provided token cannot be read");
    let bytes = URL_SAFE_NO_PAD.decode(token).map_err(|_| bad())?;
    let token: Value = serde_json::from_slice(&bytes).map_err(|_| bad())?;
    let revision = token["rv"].as_u64().ok_or_else(bad)?;
    let part = |index: usize| token["start"][index].as_str().map(str::to_owned).ok_or_else(bad);
    if revision < state.compacted {
        return Err(status::expired_page());
    }
    Ok(Some((revision, Some((part(0)?, part(1)?)))))
}

fn check_version(state: &State, route: &Route) -> Result<(), Refusal> {
    let asked = route.asked("resourceVersion");
    if asked.is_empty() || asked == "0" {
        return Ok(());
    }
    let bad = || status::bad_request(format!("resourceVersion: Invalid value: {asked:?}: must be a number"));
    let asked: u64 = asked.parse().map_err(|_| bad())?;
    if !route.asked("continue").is_empty() {
        return Err(status::bad_request("specifying resource version is not allowed when using continue"));
    }
    if asked > state.revision {
        return Err(status::ahead(asked, state.revision));
    }
    if route.asked("resourceVersionMatch") == "Exact" && asked < state.revision {
        return Err(status::expired(asked, state.revision));
    }
    Ok(())
}

/// What is asked for with `as=PartialObjectMetadata`.
pub(super) fn metadata_only(mut object: Value) -> Value {
    if let Some(items) = object.get_mut("items").and_then(Value::as_array_mut) {
        for item in items {
            *item = json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": item["metadata"] });
        }
        object["kind"] = "PartialObjectMetadataList".into();
        object["apiVersion"] = "meta.k8s.io/v1".into();
        return object;
    }
    json!({ "kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": object["metadata"] })
}
