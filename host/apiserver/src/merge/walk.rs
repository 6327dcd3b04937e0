//! Walks over typed documents: which fields a document has, what differs between two, their merge, and a document without some fields.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::fields::{FieldSet, Step};
use super::kind_of;
use super::schema::{Field, Rule};

/// A value as its rule sees it.
#[derive(Debug)]
enum Shape<'a> {
    /// It has no parts with owners of their own.
    Leaf,
    Object(&'a Map<String, Value>),
    Items(Vec<(Step, &'a Value)>),
}

fn shape<'a>(field: &Field, value: &'a Value) -> Shape<'a> {
    match (field.rule, value) {
        (Rule::Atomic, _) => Shape::Leaf,
        (_, Value::Object(fields)) => Shape::Object(fields),
        (Rule::Set | Rule::Keys(_), Value::Array(list)) => {
            let steps = list.iter().map(|item| Ok((step(field.rule, item)?, item)));
            steps
                .collect::<Result<_, String>>()
                .map_or(Shape::Leaf, Shape::Items)
        }
        _ => Shape::Leaf,
    }
}

/// Returns what an item of a list is known by.
fn step(rule: Rule, item: &Value) -> Result<Step, String> {
    let Rule::Keys(keys) = rule else {
        return match item {
            Value::Object(_) => {
                Err("associative list without keys has an element that's a map type".to_owned())
            }
            Value::Array(_) => {
                Err("not supported: associative list with lists as elements".to_owned())
            }
            Value::Null => Err(
                "associative list without keys has an element that's an explicit null".to_owned(),
            ),
            scalar => Ok(Step::value(scalar)),
        };
    };
    let Value::Object(fields) = item else {
        return Err("associative list with keys may not have non-map elements".to_owned());
    };
    let keys = keys.split(',').map(|key| {
        key.split_once('=')
            .map_or((key, None), |(key, value)| (key, Some(value)))
    });
    let found = keys.clone().filter_map(|(key, default)| {
        let value = fields
            .get(key)
            .cloned()
            .or_else(|| default.map(Value::from))?;
        Some((key, value))
    });
    if found.clone().next().is_none() {
        let names: Vec<_> = keys.map(|(key, _)| format!("{key:?}")).collect();
        return Err(format!(
            "associative list with keys has an element that omits all key fields [{}] (and doesn't have default values for any key fields)",
            names.join(" ")
        ));
    }
    Ok(Step::keys(found))
}

/// Fails if a list of `value` has an item without keys, or two items with the same: the path, and why.
pub(super) fn check(field: &Field, value: &Value, path: &str) -> Result<(), String> {
    match (field.rule, value) {
        (Rule::Atomic, _) => Ok(()),
        (Rule::Set | Rule::Keys(_), Value::Array(list)) => {
            let mut seen = BTreeSet::new();
            for (index, item) in list.iter().enumerate() {
                let step = step(field.rule, item)
                    .map_err(|why| format!("{path}: element {index}: {why}"))?;
                check(field.element(), item, &format!("{path}{step}"))?;
                if let Some(step) = seen.replace(step) {
                    return Err(format!("{path}: duplicate entries for key {step}"));
                }
            }
            Ok(())
        }
        (Rule::Set | Rule::Keys(_), Value::Null) => Ok(()),
        (Rule::Set | Rule::Keys(_), other) => {
            Err(format!("{path}: expected list, got {}", kind_of(other)))
        }
        (_, Value::Object(fields)) => fields.iter().try_for_each(|(name, value)| {
            check(field.child(name), value, &format!("{path}.{name}"))
        }),
        _ => Ok(()),
    }
}

/// Returns the paths of a value: its leaves and the items of its lists.
pub(super) fn field_set(field: &Field, value: &Value) -> FieldSet {
    let mut set = FieldSet::default();
    match shape(field, value) {
        Shape::Object(fields) if !fields.is_empty() => {
            for (name, value) in fields {
                set.put(Step::field(name), field_set(field.child(name), value));
            }
        }
        Shape::Items(items) => {
            for (step, values) in grouped(items) {
                let mut item = match values.as_slice() {
                    [value] => field_set(field.element(), value),
                    _ => FieldSet::default(),
                };
                item.is_member = true;
                set.put(step, item);
            }
        }
        _ => return FieldSet::leaf(),
    }
    set
}

/// Returns the items by what they are known by; more than one only in lists that apply did not make.
fn grouped(items: Vec<(Step, &Value)>) -> BTreeMap<Step, Vec<&Value>> {
    items
        .into_iter()
        .fold(BTreeMap::new(), |mut groups, (step, value)| {
            groups.entry(step).or_default().push(value);
            groups
        })
}

/// The paths that differ between two documents.
#[derive(Debug, Default)]
pub(super) struct Difference {
    /// Added or modified.
    pub(super) changed: FieldSet,
    pub(super) removed: FieldSet,
}

impl Difference {
    fn put(&mut self, step: Step, below: Self) {
        self.changed.put(step.clone(), below.changed);
        self.removed.put(step, below.removed);
    }
}

/// Returns what differs; an absent value and `null` are the same as an empty container where the other value is one.
pub(super) fn compare(field: &Field, old: Option<&Value>, new: Option<&Value>) -> Difference {
    let mut difference = Difference::default();
    let shapes = [old, new].map(|side| {
        side.filter(|value| !value.is_null())
            .map(|value| shape(field, value))
    });
    match shapes {
        [Some(Shape::Object(old)), Some(Shape::Object(new))]
            if !(old.is_empty() && new.is_empty()) =>
        {
            compare_fields(field, old, new, &mut difference);
        }
        [Some(Shape::Object(old)), None] if !old.is_empty() => {
            compare_fields(field, old, &Map::new(), &mut difference);
            difference.removed.is_member = new.is_none();
        }
        [None, Some(Shape::Object(new))] if !new.is_empty() => {
            compare_fields(field, &Map::new(), new, &mut difference);
            difference.changed.is_member = old.is_none();
        }
        [Some(Shape::Items(old)), Some(Shape::Items(new))] => {
            compare_items(field, old, new, &mut difference);
        }
        [Some(Shape::Items(old)), None] if !old.is_empty() => {
            compare_items(field, old, Vec::new(), &mut difference);
            difference.removed.is_member = new.is_none();
        }
        [None, Some(Shape::Items(new))] if !new.is_empty() => {
            compare_items(field, Vec::new(), new, &mut difference);
            difference.changed.is_member = old.is_none();
        }
        _ => {
            difference.changed.is_member = new.is_some() && old != new;
            difference.removed.is_member = new.is_none() && old.is_some();
        }
    }
    difference
}

fn compare_fields(
    field: &Field,
    old: &Map<String, Value>,
    new: &Map<String, Value>,
    out: &mut Difference,
) {
    let added = new.keys().filter(|name| !old.contains_key(*name));
    for name in old.keys().chain(added) {
        out.put(
            Step::field(name),
            compare(field.child(name), old.get(name), new.get(name)),
        );
    }
}

fn compare_items(
    field: &Field,
    old: Vec<(Step, &Value)>,
    new: Vec<(Step, &Value)>,
    out: &mut Difference,
) {
    let (old, mut new) = (grouped(old), grouped(new));
    let old = old.into_iter().map(|(step, old)| {
        let new = new.remove(&step).unwrap_or_default();
        (step, old, new)
    });
    let old: Vec<_> = old.collect();
    for (step, old, new) in old
        .into_iter()
        .chain(new.into_iter().map(|(step, new)| (step, Vec::new(), new)))
    {
        let difference = match (old.as_slice(), new.as_slice()) {
            ([] | [_], [] | [_]) => {
                compare(field.element(), old.first().copied(), new.first().copied())
            }
            _ => Difference {
                changed: FieldSet::leaf_if(!new.is_empty() && old != new),
                removed: FieldSet::leaf_if(new.is_empty()),
            },
        };
        out.put(step, difference);
    }
}

/// Returns `live` with what `applied` sets. Items of lists keep their order where `applied` does not change it.
pub(super) fn merge(field: &Field, live: &Value, applied: &Value) -> Value {
    match (shape(field, live), shape(field, applied)) {
        (Shape::Object(live), Shape::Object(applied)) => {
            let mut merged = live.clone();
            for (name, value) in applied {
                let value = match live.get(name) {
                    Some(live) => merge(field.child(name), live, value),
                    None => value.clone(),
                };
                merged.insert(name.clone(), value);
            }
            Value::Object(merged)
        }
        (Shape::Items(live), Shape::Items(applied)) => {
            Value::Array(merge_items(field, &live, &applied))
        }
        (Shape::Object(fields), Shape::Leaf) if applied.is_null() && !fields.is_empty() => {
            live.clone()
        }
        (Shape::Items(items), Shape::Leaf) if applied.is_null() && !items.is_empty() => {
            live.clone()
        }
        _ => applied.clone(),
    }
}

/// Merges two lists of items. Items that both have come in the order of `applied`; items that only `live` has keep their order, each
/// before the common item that follows it there.
fn merge_items(field: &Field, live: &[(Step, &Value)], applied: &[(Step, &Value)]) -> Vec<Value> {
    let steps: BTreeSet<&Step> = applied.iter().map(|(step, _)| step).collect();
    let mut in_live: BTreeMap<&Step, Option<&Value>> = BTreeMap::new();
    for (step, value) in live {
        // Of an item that is there twice, nothing is kept.
        in_live
            .entry(step)
            .and_modify(|item| *item = None)
            .or_insert(Some(value));
    }

    let mut common = applied
        .iter()
        .map(|(step, _)| step)
        .filter(|step| in_live.contains_key(step));
    let mut next_common = common.next();
    let (mut merged, mut taken) = (Vec::new(), BTreeSet::new());
    let (mut live, mut applied) = (live.iter().peekable(), applied.iter().peekable());
    loop {
        match (live.peek(), applied.peek()) {
            (None, None) => return merged,
            (Some((here, _)), Some((there, _))) if here == there => {
                live.next();
            }
            // It is common, but comes later in `applied`.
            (Some((here, _)), Some(_))
                if steps.contains(here) && next_common.is_some_and(|next| next != here) =>
            {
                live.next();
                continue;
            }
            (Some((here, value)), _) if !steps.contains(here) => {
                merged.push((*value).clone());
                live.next();
                continue;
            }
            (Some((here, _)), _) if taken.contains(here) => {
                live.next();
            }
            _ => {}
        }
        if let Some((step, value)) = applied.next() {
            taken.insert(step);
            merged.push(match in_live.get(step) {
                Some(Some(live)) => merge(field.element(), live, value),
                _ => (*value).clone(),
            });
            if next_common == Some(step) {
                next_common = common.next();
            }
        }
    }
}

/// Returns the value without the paths of `gone`; `null` if nothing is left of it.
pub(super) fn remove(field: &Field, value: &Value, gone: &FieldSet) -> Value {
    match shape(field, value) {
        Shape::Object(fields) => {
            let left: Map<_, _> = fields
                .iter()
                .filter_map(|(name, value)| {
                    let value =
                        remove_part(field.child(name), value, gone.get(&Step::field(name)))?;
                    Some((name.clone(), value))
                })
                .collect();
            if left.is_empty() {
                Value::Null
            } else {
                Value::Object(left)
            }
        }
        Shape::Items(items) => {
            let left = items
                .iter()
                .filter_map(|(step, item)| remove_part(field.element(), item, gone.get(step)));
            let left: Vec<_> = left.collect();
            if left.is_empty() {
                Value::Null
            } else {
                Value::Array(left)
            }
        }
        Shape::Leaf => value.clone(),
    }
}

fn remove_part(field: &Field, value: &Value, gone: Option<&FieldSet>) -> Option<Value> {
    match gone {
        None => Some(value.clone()),
        Some(gone) if gone.is_member => None,
        Some(gone) => Some(remove(field, value, gone)),
    }
}

/// Adds to an object the fields of `minimal` that it lacks.
pub(super) fn fill(value: &Value, minimal: &Value) -> Value {
    let (Value::Object(fields), Value::Object(minimal)) = (value, minimal) else {
        return value.clone();
    };
    let mut filled = fields.clone();
    for (name, minimal) in minimal {
        let value = fields
            .get(name)
            .map_or_else(|| minimal.clone(), |value| fill(value, minimal));
        filled.insert(name.clone(), value);
    }
    Value::Object(filled)
}

/// Removes fields that are `null` in `value` and not in `live`: apply sets no field to `null`.
pub(super) fn drop_nulls(field: &Field, value: Value, live: &Value) -> Value {
    match value {
        Value::Object(fields) if !matches!(field.rule, Rule::Atomic) => {
            let kept = fields.into_iter().filter_map(|(name, value)| {
                let live = live.get(&name);
                if value.is_null() && !live.is_some_and(Value::is_null) {
                    return None;
                }
                let value = drop_nulls(field.child(&name), value, live.unwrap_or(&Value::Null));
                Some((name, value))
            });
            Value::Object(kept.collect())
        }
        Value::Array(items)
            if matches!(field.rule, Rule::Keys(_)) && live.as_array() != Some(&items) =>
        {
            let items = items
                .into_iter()
                .map(|item| drop_nulls(field.element(), item, &Value::Null));
            Value::Array(items.collect())
        }
        other => other,
    }
}
