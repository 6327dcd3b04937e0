//! Strategic merge patch: what `kubectl apply`, `kubectl patch` and `kubectl edit` send for kinds that they know.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde_json::{Map, Value};

use super::schema::{self, Field};
use super::{PatchError, check_patch, kind_of};

const DIRECTIVE: &str = "$patch";
const RETAIN_KEYS: &str = "$retainKeys";
const DELETE_PREFIX: &str = "$deleteFromPrimitiveList";
const ORDER_PREFIX: &str = "$setElementOrder";

type Object = Map<String, Value>;

/// Returns `document`, an object of `kind`, with the changes of a strategic merge patch.
///
/// # Errors
/// 400 for a patch that is no object, too deep, or whose directives are malformed or contradict it; 422 for lists of lists. An API server
/// answers 500 to some of these.
pub(crate) fn strategic_merge_patch(
    kind: &str,
    document: &Value,
    patch: &Value,
) -> Result<Value, PatchError> {
    check_patch(patch)?;
    match (document, patch) {
        (Value::Object(document), Value::Object(patch)) => {
            merge_objects(document.clone(), patch.clone(), &schema::of(kind).root)
                .map(Value::Object)
        }
        _ => Err(bad("invalid JSON document")),
    }
}

fn bad(message: impl Into<String>) -> PatchError {
    PatchError::BadRequest(message.into())
}

fn merge_objects(
    mut original: Object,
    mut patch: Object,
    field: &Field,
) -> Result<Object, PatchError> {
    if let Some(directive) = patch.remove(DIRECTIVE) {
        return match directive.as_str() {
            Some("replace") => Ok(cleaned_object(patch)),
            Some("delete") => Ok(Object::new()),
            _ => Err(unknown_directive(&directive, &patch)),
        };
    }
    retain_keys(&mut original, &mut patch)?;
    set_orders(&mut original, &mut patch, field)?;
    delete_scalars(&mut original, &mut patch)?;
    for (name, value) in patch {
        let merged =
            match (original.remove(&name), value) {
                (_, Value::Null) => None,
                (Some(Value::Object(original)), Value::Object(patch)) => Some(Value::Object(
                    merge_objects(original, patch, field.child(&name))?,
                )),
                (Some(Value::Array(original)), Value::Array(patch)) => Some(Value::Array(
                    merge_lists(original, patch, &name, field.child(&name))?,
                )),
                (_, value) => cleaned(value),
            };
        original.extend(merged.map(|merged| (name, merged)));
    }
    Ok(original)
}

fn unknown_directive(directive: &Value, patch: &Object) -> PatchError {
    let shown = directive
        .as_str()
        .map_or_else(|| directive.to_string(), str::to_owned);
    bad(format!(
        "unknown patch type: {shown} in map: {}",
        Value::Object(patch.clone())
    ))
}

/// Returns a value without directives and nulls; none for a value that is a directive.
fn cleaned(value: Value) -> Option<Value> {
    match value {
        Value::Object(fields) if fields.contains_key(DIRECTIVE) => None,
        Value::Object(fields) => Some(Value::Object(cleaned_object(fields))),
        Value::Array(items) => Some(Value::Array(
            items.into_iter().filter_map(cleaned).collect(),
        )),
        scalar => Some(scalar),
    }
}

fn cleaned_object(fields: Object) -> Object {
    let kept = fields
        .into_iter()
        .filter(|(name, value)| !value.is_null() && !is_directive(name));
    kept.filter_map(|(name, value)| Some((name, cleaned(value)?)))
        .collect()
}

fn is_directive(name: &str) -> bool {
    name == RETAIN_KEYS
        || list_of(name, DELETE_PREFIX).is_some()
        || list_of(name, ORDER_PREFIX).is_some()
}

/// Returns the list that a directive is for: `$setElementOrder/finalizers`.
fn list_of<'a>(name: &'a str, prefix: &str) -> Option<&'a str> {
    name.strip_prefix(prefix)?.strip_prefix('/')
}

/// Takes the directives with a prefix from a patch: the list's name, and the value.
fn take_lists(patch: &mut Object, prefix: &str) -> Result<Vec<(String, Vec<Value>)>, PatchError> {
    let names: Vec<_> = patch
        .keys()
        .filter(|name| name.starts_with(prefix))
        .cloned()
        .collect();
    let lists = names
        .iter()
        .map(|name| match (list_of(name, prefix), patch.remove(name)) {
            (Some(list), Some(Value::Array(items))) => Ok((list.to_owned(), items)),
            _ if prefix == DELETE_PREFIX => Err(bad("invalid patch format of primitive list")),
            _ => Err(bad("invalid patch format of setElementOrder list")),
        });
    lists.collect()
}

/// Removes fields that `$retainKeys` does not name.
fn retain_keys(original: &mut Object, patch: &mut Object) -> Result<(), PatchError> {
    let Some(keys) = patch.remove(RETAIN_KEYS) else {
        return Ok(());
    };
    let keys: BTreeSet<&str> = keys
        .as_array()
        .ok_or_else(malformed)?
        .iter()
        .filter_map(Value::as_str)
        .collect();
    if !patch
        .iter()
        .all(|(name, value)| value.is_null() || is_directive(name) || keys.contains(name.as_str()))
    {
        return Err(malformed());
    }
    original.retain(|name, _| keys.contains(name.as_str()));
    Ok(())
}

fn malformed() -> PatchError {
    bad("invalid patch format of retainKeys")
}

/// Removes scalars from lists: `$deleteFromPrimitiveList`.
fn delete_scalars(original: &mut Object, patch: &mut Object) -> Result<(), PatchError> {
    for (name, gone) in take_lists(patch, DELETE_PREFIX)? {
        if let Some(Value::Array(items)) = original.get_mut(&name) {
            let gone: HashSet<&Value> = gone.iter().collect();
            items.retain(|item| !gone.contains(item));
        }
    }
    Ok(())
}

/// Merges the lists that have an order: `$setElementOrder`.
fn set_orders(original: &mut Object, patch: &mut Object, field: &Field) -> Result<(), PatchError> {
    for (name, order) in take_lists(patch, ORDER_PREFIX)? {
        let field = field.child(&name);
        let key = field.merge_key.unwrap_or_default();
        let (live, patched) = (take_list(original, &name)?, take_list(patch, &name)?);
        check_order(patched.as_deref().unwrap_or_default(), &order, key)?;
        let merged = match (live.clone(), patched) {
            (None, None) => continue,
            (Some(live), None) => live,
            (None, Some(patched)) => patched.into_iter().filter_map(cleaned).collect(),
            (Some(live), Some(patched)) => merge_lists(live, patched, &name, field)?,
        };
        let ordered = in_order(merged, &order, &live.unwrap_or_default(), key)?;
        original.insert(name, Value::Array(ordered));
    }
    Ok(())
}

fn take_list(from: &mut Object, name: &str) -> Result<Option<Vec<Value>>, PatchError> {
    match from.remove(name) {
        None => Ok(None),
        Some(Value::Array(items)) => Ok(Some(items)),
        Some(other) => Err(bad(format!(
            "expected a list, but received: {}",
            kind_of(&other)
        ))),
    }
}

/// Returns what a list's items are known by: the merge key, or a scalar itself.
fn id<'a>(item: &'a Value, key: &str) -> Result<&'a Value, PatchError> {
    match item {
        item if key.is_empty() => Ok(item),
        Value::Object(fields) => fields.get(key).ok_or_else(|| {
            bad(format!(
                "map: {item} does not contain declared merge key: {key}"
            ))
        }),
        other => Err(bad(format!(
            "expected an object, but received: {}",
            kind_of(other)
        ))),
    }
}

/// Fails if the items of a patch are not in `order`.
fn check_order(patched: &[Value], order: &[Value], key: &str) -> Result<(), PatchError> {
    if order.is_empty() {
        return Ok(());
    }
    let mut rest = order.iter();
    for item in patched.iter().filter(|item| item.get(DIRECTIVE).is_none()) {
        let item = id(item, key)?;
        let mut is_found = false;
        for other in rest.by_ref() {
            is_found = id(other, key)? == item;
            if is_found {
                break;
            }
        }
        if !is_found {
            let (patched, order) = (Value::from(patched), Value::from(order));
            let message = format!(
                "The order in patch list:\n{patched}\n doesn't match {ORDER_PREFIX} list:\n{order}\n"
            );
            return Err(bad(message));
        }
    }
    Ok(())
}

fn merge_lists(
    original: Vec<Value>,
    patch: Vec<Value>,
    name: &str,
    field: &Field,
) -> Result<Vec<Value>, PatchError> {
    let Some(key) = field.merge_key else {
        return Ok(patch.into_iter().filter_map(cleaned).collect());
    };
    if original.is_empty() && patch.is_empty() {
        return Ok(original);
    }
    check_types(&original, &patch)?;
    if !original.iter().chain(&patch).any(Value::is_object) {
        let mut seen = HashSet::new();
        let merged = original
            .iter()
            .chain(&patch)
            .filter(|item| seen.insert(*item))
            .cloned()
            .collect();
        return in_order(merged, &patch, &original, "");
    }
    if key.is_empty() {
        return Err(bad(format!(
            "cannot merge lists without merge key for {name}"
        )));
    }
    let (mut merged, patch) = without_directives(original, patch, key)?;
    let live = merged.clone();
    let mut places = places(&live, key)?;
    for item in &patch {
        let place = *places.entry(id(item, key)?).or_insert(merged.len());
        match (merged.get_mut(place), item) {
            (Some(Value::Object(found)), Value::Object(item)) => {
                *found = merge_objects(std::mem::take(found), item.clone(), field.element())?;
            }
            _ => merged.extend(cleaned(item.clone())),
        }
    }
    in_order(merged, &patch, &live, key)
}

/// Fails for lists of lists, and for items of different types.
fn check_types(original: &[Value], patch: &[Value]) -> Result<(), PatchError> {
    let mut kinds = original.iter().chain(patch).map(kind_of);
    match kinds.next() {
        Some("array") => Err(PatchError::Unprocessable(
            "lists of lists are not supported".to_owned(),
        )),
        Some(first) if kinds.any(|kind| kind != first) => {
            let lists = Value::from(vec![Value::from(original), Value::from(patch)]);
            Err(bad(format!(
                "list element types are not identical: {lists}"
            )))
        }
        _ => Ok(()),
    }
}

/// Applies the items of a patch that are directives: returns the list that is left, and the other items of the patch.
fn without_directives(
    mut original: Vec<Value>,
    patch: Vec<Value>,
    key: &str,
) -> Result<(Vec<Value>, Vec<Value>), PatchError> {
    let mut rest = Vec::new();
    let mut is_replaced = false;
    for item in patch {
        match item.get(DIRECTIVE) {
            None => rest.push(item),
            Some(Value::String(directive)) if directive == "delete" => {
                let gone = id(&item, key)?;
                original.retain(|other| other.get(key) != Some(gone));
            }
            Some(Value::String(directive)) if directive == "replace" => is_replaced = true,
            Some(Value::String(directive)) if directive == "merge" => {
                return Err(bad("merging lists cannot yet be specified in the patch"));
            }
            Some(directive) => {
                return Err(unknown_directive(
                    directive,
                    &item.as_object().cloned().unwrap_or_default(),
                ));
            }
        }
    }
    match is_replaced {
        true => Ok((rest.into_iter().filter_map(cleaned).collect(), Vec::new())),
        false => Ok((original, rest)),
    }
}

/// Returns where the items of a list are first, by what they are known by.
fn places<'a>(list: &'a [Value], key: &str) -> Result<HashMap<&'a Value, usize>, PatchError> {
    let mut places = HashMap::new();
    for (place, item) in list.iter().enumerate() {
        places.entry(id(item, key)?).or_insert(place);
    }
    Ok(places)
}

/// Returns the items in the order of `order`. Items that it does not name keep their order in `live`, each before the first item that
/// follows it there.
fn in_order(
    items: Vec<Value>,
    order: &[Value],
    live: &[Value],
    key: &str,
) -> Result<Vec<Value>, PatchError> {
    let (order, live) = (places(order, key)?, places(live, key)?);
    items.iter().try_for_each(|item| id(item, key).map(drop))?;
    let (mut named, mut others): (Vec<_>, Vec<_>) = items
        .into_iter()
        .partition(|item| place(&order, item, key).is_some());
    named.sort_by_key(|item| place(&order, item, key));
    others.sort_by_key(|item| place(&live, item, key).unwrap_or(usize::MAX));
    let (mut named, mut others) = (named.into_iter().peekable(), others.into_iter().peekable());
    let mut ordered = Vec::new();
    while let (Some(next), Some(other)) = (named.peek(), others.peek()) {
        let is_before = match (place(&live, other, key), place(&live, next, key)) {
            (Some(other), Some(next)) => other < next,
            _ => false,
        };
        ordered.extend(if is_before {
            others.next()
        } else {
            named.next()
        });
    }
    ordered.extend(named.chain(others));
    Ok(ordered)
}

fn place(places: &HashMap<&Value, usize>, item: &Value, key: &str) -> Option<usize> {
    places.get(id(item, key).ok()?).copied()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn patched(document: &Value, patch: Value) -> Value {
        strategic_merge_patch("Pod", document, &patch).expect("it applies")
    }

    #[test]
    fn keyed_lists_merge_and_others_replace() {
        let document = json!({"metadata": {"labels": {"a": "1", "b": "2"}, "finalizers": ["x", "y"]}, "spec": {
            "containers": [{"name": "one", "image": "i", "env": [{"name": "A", "value": "1"}]}, {"name": "two"}],
            "tolerations": [{"key": "t"}]}});
        let patch = json!({"metadata": {"labels": {"a": null, "c": "3"}, "finalizers": ["z"]}, "spec": {
            "containers": [{"name": "one", "env": [{"name": "B", "value": null}]}, {"name": "three"}],
            "tolerations": [{"key": "u"}]}});
        let expected = json!({"metadata": {"labels": {"b": "2", "c": "3"}, "finalizers": ["z", "x", "y"]}, "spec": {
            "containers": [
                {"name": "one", "image": "i", "env": [{"name": "B"}, {"name": "A", "value": "1"}]},
                {"name": "three"}, {"name": "two"}],
            "tolerations": [{"key": "u"}]}});
        assert_eq!(patched(&document, patch), expected);
    }

    #[test]
    fn directives_delete_replace_retain_and_order() {
        let document = json!({"metadata": {"finalizers": ["a", "b", "c"], "labels": {"x": "1"}}, "spec": {
            "containers": [{"name": "one"}, {"name": "two"}],
            "volumes": [{"name": "v", "emptyDir": {}}, {"name": "w"}]}});
        let patch = json!({
            "metadata": {"$deleteFromPrimitiveList/finalizers": ["b"], "labels": {"$patch": "replace", "y": "2"}},
            "spec": {
                "$setElementOrder/containers": [{"name": "two"}, {"name": "three"}],
                "containers": [{"name": "three"}, {"name": "one", "$patch": "delete"}],
                "$setElementOrder/volumes": [{"name": "w"}, {"name": "v"}],
                "volumes": [{"name": "v", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/"}}]}});
        let expected = json!({"metadata": {"finalizers": ["a", "c"], "labels": {"y": "2"}}, "spec": {
            "containers": [{"name": "two"}, {"name": "three"}],
            "volumes": [{"name": "w"}, {"name": "v", "hostPath": {"path": "/"}}]}});
        assert_eq!(patched(&document, patch), expected);
        let replaced = patched(
            &document,
            json!({"spec": {"containers": [{"name": "only"}, {"$patch": "replace"}]}}),
        );
        assert_eq!(replaced["spec"]["containers"], json!([{"name": "only"}]));
        assert_eq!(
            patched(&document, json!({"spec": {"$patch": "delete"}}))["spec"],
            json!({})
        );
    }

    #[test]
    fn malformed_directives_are_refused() {
        let document =
            json!({"metadata": {"finalizers": ["a"]}, "spec": {"containers": [{"name": "one"}]}});
        for (patch, message) in [
            (
                json!({"$patch": "merge"}),
                "unknown patch type: merge in map: {}",
            ),
            (
                json!({"spec": {"containers": [{"image": "i"}]}}),
                "map: {\"image\":\"i\"} does not contain declared merge key: name",
            ),
            (
                json!({"metadata": {"$deleteFromPrimitiveList/finalizers": 1}}),
                "invalid patch format of primitive list",
            ),
            (
                json!({"spec": {"$setElementOrder": []}}),
                "invalid patch format of setElementOrder list",
            ),
            (
                json!({"spec": {"$retainKeys": ["x"], "y": 1}}),
                "invalid patch format of retainKeys",
            ),
            (
                json!({"metadata": {"finalizers": [1]}}),
                "list element types are not identical: [[\"a\"],[1]]",
            ),
            (
                json!([]),
                "error decoding patch: json: cannot unmarshal array into an object",
            ),
        ] {
            let refused = strategic_merge_patch("Pod", &document, &patch);
            assert_eq!(
                refused,
                Err(PatchError::BadRequest(message.into())),
                "{patch}"
            );
        }
        let lists = strategic_merge_patch(
            "Pod",
            &document,
            &json!({"metadata": {"finalizers": [["a"]]}}),
        );
        assert!(lists.is_err_and(|error| error.to_string().contains("not identical")));
    }
}
