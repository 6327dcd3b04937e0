//! `metadata.managedFields`: the owners of an object's fields, and how an update changes them.

use serde_json::{Map, Value, json};

use super::fields::FieldSet;
use super::schema::{self, Kind};
use super::walk::{compare, fill};

/// Owners by update that an object has; older ones are merged.
const UPDATERS_MAX: usize = 10;

/// Owner of the fields whose owners were merged.
const ANCIENT: &str = "ancient-changes";

/// Fields of every object that have no owner.
const UNOWNED: &[&[&str]] = &[
    &["apiVersion"],
    &["kind"],
    &["metadata"],
    &["metadata", "name"],
    &["metadata", "namespace"],
    &["metadata", "creationTimestamp"],
    &["metadata", "selfLink"],
    &["metadata", "uid"],
    &["metadata", "clusterName"],
    &["metadata", "generation"],
    &["metadata", "managedFields"],
    &["metadata", "resourceVersion"],
];

/// Manager, endpoint and time of a write.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Writer<'a> {
    /// The field manager; `unknown` if it is empty.
    pub(crate) manager: &'a str,
    /// `resource.k8s.io/v1`, of the documents.
    pub(crate) api_version: &'a str,
    /// `status`, or nothing.
    pub(crate) subresource: &'a str,
    /// RFC 3339, in seconds and UTC.
    pub(crate) now: &'a str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Operation {
    Apply,
    Update,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Self::Apply => "Apply",
            Self::Update => "Update",
        }
    }
}

/// An entry of `managedFields`.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) manager: String,
    pub(super) operation: Operation,
    pub(super) api_version: String,
    pub(super) subresource: String,
    pub(super) time: Option<String>,
    pub(super) fields: FieldSet,
}

impl Entry {
    pub(super) fn new(writer: &Writer<'_>, operation: Operation) -> Self {
        Self {
            manager: if writer.manager.is_empty() {
                "unknown"
            } else {
                writer.manager
            }
            .to_owned(),
            operation,
            api_version: writer.api_version.to_owned(),
            subresource: writer.subresource.to_owned(),
            time: Some(writer.now.to_owned()),
            fields: FieldSet::default(),
        }
    }

    /// Returns whether both are entries of the same owner. One that applies is the same in every version.
    pub(super) fn is_same_owner(&self, other: &Self) -> bool {
        let is_same_version =
            self.operation == Operation::Apply || self.api_version == other.api_version;
        (&self.manager, self.operation, &self.subresource)
            == (&other.manager, other.operation, &other.subresource)
            && is_same_version
    }

    fn read(entry: &Value) -> Result<Self, String> {
        let operation = match entry["operation"].as_str() {
            Some("Apply") => Operation::Apply,
            Some("Update") => Operation::Update,
            _ => return Err("operation must be `Apply` or `Update`".to_owned()),
        };
        if text(entry, "apiVersion").is_empty() {
            return Err("apiVersion must not be empty".to_owned());
        }
        if entry["fieldsType"] != "FieldsV1" {
            return Err(format!("invalid fieldsType {}", entry["fieldsType"]));
        }
        let fields = match &entry["fieldsV1"] {
            Value::Null => FieldSet::default(),
            fields => FieldSet::read(fields)?,
        };
        Ok(Self {
            manager: text(entry, "manager"),
            operation,
            api_version: text(entry, "apiVersion"),
            subresource: text(entry, "subresource"),
            time: entry["time"].as_str().map(str::to_owned),
            fields,
        })
    }

    fn to_value(&self) -> Value {
        let mut entry = json!({
            "manager": self.manager, "operation": self.operation.name(), "apiVersion": self.api_version,
            "fieldsType": "FieldsV1", "fieldsV1": self.fields.to_value(),
        });
        if let Some(time) = &self.time {
            entry["time"] = time.clone().into();
        }
        if !self.subresource.is_empty() {
            entry["subresource"] = self.subresource.clone().into();
        }
        entry
    }
}

fn text(entry: &Value, field: &str) -> String {
    entry[field].as_str().unwrap_or_default().to_owned()
}

/// Reads the owners of an object's fields.
///
/// # Errors
/// An entry that is malformed: its index, and why.
pub(super) fn read(object: &Value) -> Result<Vec<Entry>, String> {
    let entries = object["metadata"]["managedFields"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    entries
        .iter()
        .enumerate()
        .map(|(index, entry)| {
            Entry::read(entry).map_err(|why| format!("managed fields entry {index}: {why}"))
        })
        .collect()
}

/// Returns the object with these owners, in the order of a server: by operation, time, name, version, subresource.
pub(super) fn with_entries(mut object: Value, mut entries: Vec<Entry>) -> Value {
    let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) else {
        return object;
    };
    entries.retain(|entry| !entry.fields.is_empty());
    if entries.is_empty() {
        metadata.remove("managedFields");
        return object;
    }
    entries.sort_by_key(|entry| {
        (
            entry.operation,
            entry.time.clone(),
            entry.manager.clone(),
            entry.api_version.clone(),
            entry.subresource.clone(),
        )
    });
    metadata.insert(
        "managedFields".into(),
        entries.iter().map(Entry::to_value).collect(),
    );
    object
}

/// Returns the object without `metadata.managedFields`.
pub(super) fn without_entries(object: &Value) -> Value {
    let mut object = object.clone();
    object
        .get_mut("metadata")
        .and_then(Value::as_object_mut)
        .map(|metadata| metadata.remove("managedFields"));
    object
}

/// Returns the paths without those that no writer owns and those that this endpoint does not write.
pub(super) fn owned(set: FieldSet, kind: &str, subresource: &str) -> FieldSet {
    let set = UNOWNED.iter().fold(set, |set, path| set.without(path));
    written(set, kind, subresource)
}

/// Returns the paths without those that this endpoint does not write.
pub(super) fn written(set: FieldSet, kind: &str, subresource: &str) -> FieldSet {
    schema::unwritten(kind, subresource)
        .iter()
        .fold(set, |set, path| set.without_tree(path))
}

/// Returns `new` with `metadata.managedFields` after `writer` created it (`old` is none), replaced `old` with it or patched it: fields
/// that it changed become its own and no other owner's, fields that it removed have no owner.
///
/// Entries in `new` are taken as the writer sent them, those of `old` if `new` has none; a writer that sends an empty list, or a list of
/// one empty entry, ends the tracking of owners. A write by a subresource cannot set them. Malformed entries count as none.
pub(crate) fn managed_after_update(
    kind: &str,
    old: Option<&Value>,
    new: Value,
    writer: &Writer<'_>,
) -> Value {
    let entries = entries_before(old, &new, !writer.subresource.is_empty());
    let new = without_entries(&new);
    if entries.is_empty() && old.is_some() {
        return new;
    }
    let of_kind = schema::of(kind);
    let minimal = json!({});
    let before = old.map_or(minimal, without_entries);
    let entries = after_update(kind, of_kind, entries, (&before, &new), writer);
    with_entries(new, merge_oldest(entries))
}

/// Returns the entries after a writer replaced the first document with the second.
pub(super) fn after_update(
    kind: &str,
    of_kind: &Kind,
    mut entries: Vec<Entry>,
    (before, after): (&Value, &Value),
    writer: &Writer<'_>,
) -> Vec<Entry> {
    let minimal = &of_kind.minimal;
    let difference = compare(
        &of_kind.root,
        Some(&fill(before, minimal)),
        Some(&fill(after, minimal)),
    );
    let changed = written(difference.changed, kind, writer.subresource);
    let removed = written(difference.removed, kind, writer.subresource);
    for entry in &mut entries {
        entry.fields = entry.fields.difference(&changed).difference(&removed);
    }
    let changed = owned(changed, kind, writer.subresource);
    if changed.is_empty() {
        return entries;
    }
    let mut own = Entry::new(writer, Operation::Update);
    own.fields = match entries.iter().position(|entry| entry.is_same_owner(&own)) {
        Some(index) => changed.union(entries.swap_remove(index).fields),
        None => changed,
    };
    entries.push(own);
    entries
}

fn entries_before(old: Option<&Value>, new: &Value, is_subresource: bool) -> Vec<Entry> {
    let is_reset = match new["metadata"]["managedFields"]
        .as_array()
        .map(Vec::as_slice)
    {
        Some([]) => true,
        Some([entry]) => entry.as_object().is_some_and(Map::is_empty),
        _ => false,
    };
    match read(new) {
        _ if is_reset && !is_subresource => Vec::new(),
        Ok(entries) if !entries.is_empty() && !is_subresource => entries,
        _ => old.and_then(|old| read(old).ok()).unwrap_or_default(),
    }
}

/// Merges the oldest owners by update of a version until there are [`UPDATERS_MAX`].
fn merge_oldest(entries: Vec<Entry>) -> Vec<Entry> {
    let (mut updaters, mut entries): (Vec<_>, Vec<_>) = entries
        .into_iter()
        .partition(|entry| entry.operation == Operation::Update);
    updaters.sort_by(|a, b| (&a.time, &a.manager).cmp(&(&b.time, &b.manager)));
    while updaters.len() > UPDATERS_MAX {
        let mut numbered = updaters.iter().enumerate();
        let of_one_version = numbered.find_map(|(index, entry)| {
            let mut later = updaters.iter().enumerate().skip(index + 1);
            let next = later.find(|(_, other)| other.api_version == entry.api_version)?;
            Some((index, next.0))
        });
        let Some((first, second)) = of_one_version else {
            break;
        };
        let newer = updaters.remove(second);
        let Some(older) = updaters.get_mut(first) else {
            break;
        };
        older.fields = std::mem::take(&mut older.fields).union(newer.fields);
        older.time = newer.time;
        older.manager = ANCIENT.to_owned();
        older.subresource = String::new();
    }
    entries.extend(updaters);
    entries
}

/// Returns whether two objects are the same but for the times in `managedFields`: such a write is not stored.
pub(crate) fn is_same_but_times(a: &Value, b: &Value) -> bool {
    without_times(a) == without_times(b)
}

fn without_times(object: &Value) -> Value {
    let mut object = object.clone();
    let entries = object
        .pointer_mut("/metadata/managedFields")
        .and_then(Value::as_array_mut);
    let entries = entries
        .into_iter()
        .flatten()
        .filter_map(Value::as_object_mut);
    entries.for_each(|entry| drop(entry.remove("time")));
    object
}
