//! Server-side apply.

use serde_json::{Value, json};

use super::fields::FieldSet;
use super::managed::{self, Entry, Operation, Writer, owned, written};
use super::schema::{self, Field, Kind};
use super::walk::{check, compare, drop_nulls, field_set, fill, merge, remove};
use super::{DEPTH_MAX, is_deeper};

/// Owner of the fields of an object that had no owners before it was applied.
const BEFORE_FIRST: &str = "before-first-apply";

/// The manager whose annotation of client-side apply counts as ownership.
const KUBECTL: &str = "kubectl";

/// Annotation in which client-side `kubectl apply` stores the object that it applied.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// An apply that is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ApplyError {
    /// Other managers own fields that would change: 409.
    #[error("{}", .0.message)]
    Conflict(Conflict),
    /// The configuration is malformed: 400.
    #[error("{0}")]
    Invalid(String),
}

/// A conflict with other managers, as a `Status` of reason `Conflict` has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Conflict {
    pub(crate) message: String,
    pub(crate) causes: Vec<Cause>,
}

/// A cause of the reason `FieldManagerConflict`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cause {
    /// `conflict with "kubectl" using v1`.
    pub(crate) message: String,
    /// `.spec.devices`.
    pub(crate) field: String,
}

/// Returns the object after `writer` applied its configuration to `live` (none: it is created), with `metadata.managedFields`.
///
/// Fields that the writer applied before and not now are removed, unless another manager owns them. With `force`, fields of other
/// managers become the writer's own. The caller leaves out what the endpoint does not write (`spec` for `status`), as with an update, and
/// stores nothing if [`super::is_same_but_times`] holds for the result.
///
/// # Errors
/// [`ApplyError::Conflict`] without `force`, if fields that other managers own would change; [`ApplyError::Invalid`] if the configuration
/// is no object, too deep, of another version, sets `managedFields`, or has items in lists without keys or twice.
pub(crate) fn apply(
    kind: &str,
    live: Option<&Value>,
    applied: &Value,
    writer: &Writer<'_>,
    force: bool,
) -> Result<Value, ApplyError> {
    let apply = Apply {
        kind,
        of_kind: schema::of(kind),
        writer,
        applied,
    };
    apply.check()?;
    let entries = match live {
        Some(live) => managed::read(live).map_err(|why| {
            ApplyError::Invalid(format!("failed to decode managed fields: {why}"))
        })?,
        None => Vec::new(),
    };
    let bare = live.map(managed::without_entries);
    let entries = match &bare {
        Some(live) if entries.is_empty() => apply.first_entries(live),
        _ => entries,
    };
    let live = bare.unwrap_or_else(|| json!({}));
    let merged = apply.merge(&live, entries, force)?;
    Ok(apply.with_last_applied(merged))
}

struct Apply<'a> {
    kind: &'a str,
    of_kind: &'static Kind,
    writer: &'a Writer<'a>,
    applied: &'a Value,
}

impl Apply<'_> {
    fn root(&self) -> &'static Field {
        &self.of_kind.root
    }

    fn check(&self) -> Result<(), ApplyError> {
        let applied = self.applied;
        if !applied.is_object() || is_deeper(applied, DEPTH_MAX) {
            let why =
                format!("error decoding YAML: expected an object of at most {DEPTH_MAX} levels");
            return Err(ApplyError::Invalid(why));
        }
        if !applied["metadata"]["managedFields"].is_null() {
            return Err(ApplyError::Invalid(
                "metadata.managedFields must be nil".to_owned(),
            ));
        }
        if let Some(version) = applied["apiVersion"]
            .as_str()
            .filter(|version| *version != self.writer.api_version)
        {
            return Err(ApplyError::Invalid(format!(
                "Incorrect version specified in apply patch. Specified patch version: {version}, expected: {}",
                self.writer.api_version
            )));
        }
        check(self.root(), applied, "").map_err(|why| {
            let metadata = &applied["metadata"];
            ApplyError::Invalid(format!(
                "failed to create typed patch object ({}/{}; {}, Kind={}): {why}",
                metadata["namespace"].as_str().unwrap_or_default(),
                metadata["name"].as_str().unwrap_or_default(),
                self.writer.api_version,
                self.kind
            ))
        })
    }

    fn first_entries(&self, live: &Value) -> Vec<Entry> {
        let writer = Writer {
            manager: BEFORE_FIRST,
            ..*self.writer
        };
        managed::after_update(
            self.kind,
            self.of_kind,
            Vec::new(),
            (&json!({}), live),
            &writer,
        )
    }

    fn merge(
        &self,
        live: &Value,
        mut entries: Vec<Entry>,
        force: bool,
    ) -> Result<Value, ApplyError> {
        let mut own = Entry::new(self.writer, Operation::Apply);
        own.fields = written(
            field_set(self.root(), self.applied),
            self.kind,
            self.writer.subresource,
        );
        own.fields.is_member = false;
        let index = entries.iter().position(|entry| entry.is_same_owner(&own));
        let last = index.map(|index| entries.swap_remove(index));
        let merged = merge(self.root(), live, self.applied);
        let merged = match &last {
            Some(last) => self.prune(merged, &last.fields, &entries, &own),
            None => merged,
        };
        self.take(live, &merged, &mut entries, force)?;
        let merged = drop_nulls(self.root(), merged, live);
        own.fields = owned(own.fields, self.kind, self.writer.subresource);
        if let Some(last) = last.filter(|_| merged == *live) {
            own.time = last.time;
        }
        entries.push(own);
        Ok(managed::with_entries(merged, entries))
    }

    /// Removes what the manager applied last and not now. Fields of others stay, and fields without an owner beside those that stay.
    fn prune(&self, merged: Value, last: &FieldSet, others: &[Entry], own: &Entry) -> Value {
        let root = self.root();
        let set = |value: &Value| field_set(root, value).with_parents();
        let last = last.with_parents();
        let all = others
            .iter()
            .chain([own])
            .fold(FieldSet::default(), |all, entry| {
                all.union(entry.fields.clone())
            });
        let of_merged = set(&merged);
        let kept = set(&remove(root, &merged, &last)).union(all.with_parents());
        let kept = set(&remove(root, &merged, &of_merged.difference(&kept)));
        remove(
            root,
            &merged,
            &of_merged.difference(&kept).intersection(&last),
        )
    }

    /// Takes the fields that change from their owners.
    fn take(
        &self,
        live: &Value,
        merged: &Value,
        others: &mut [Entry],
        force: bool,
    ) -> Result<(), ApplyError> {
        let minimal = &self.of_kind.minimal;
        let difference = compare(
            self.root(),
            Some(&fill(live, minimal)),
            Some(&fill(merged, minimal)),
        );
        let changed = written(difference.changed, self.kind, self.writer.subresource);
        let removed = written(difference.removed, self.kind, self.writer.subresource);
        let mut conflicts: Vec<(&Entry, FieldSet)> = others
            .iter()
            .map(|entry| (entry, entry.fields.intersection(&changed)))
            .filter(|(_, conflict)| !conflict.is_empty())
            .collect();
        if !force && !conflicts.is_empty() {
            let allowed = self.allowed_by_annotation(live);
            let rest = conflicts
                .iter()
                .map(|(entry, conflict)| (*entry, conflict.difference(&allowed)));
            conflicts = rest.filter(|(_, conflict)| !conflict.is_empty()).collect();
            if !conflicts.is_empty() {
                return Err(ApplyError::Conflict(conflict(&conflicts)));
            }
        }
        for entry in others {
            entry.fields = entry.fields.difference(&changed).difference(&removed);
        }
        Ok(())
    }

    /// Returns the fields that client-side apply set and that are as it set them: `kubectl` takes them from its former self.
    fn allowed_by_annotation(&self, live: &Value) -> FieldSet {
        let last = live["metadata"]["annotations"][LAST_APPLIED]
            .as_str()
            .filter(|_| self.writer.manager == KUBECTL);
        let Some(last) = last.and_then(|last| serde_json::from_str::<Value>(last).ok()) else {
            return FieldSet::default();
        };
        if last["apiVersion"] != self.writer.api_version || check(self.root(), &last, "").is_err() {
            return FieldSet::default();
        }
        let difference = compare(self.root(), Some(&last), Some(live));
        field_set(self.root(), &last)
            .difference(&difference.changed)
            .difference(&difference.removed)
    }

    /// Keeps the annotation of client-side apply up to date, if there is one.
    fn with_last_applied(&self, mut object: Value) -> Value {
        let annotation = object
            .pointer_mut("/metadata/annotations")
            .and_then(|annotations| annotations.get_mut(LAST_APPLIED))
            .filter(|annotation| annotation.as_str().is_some_and(|text| !text.is_empty()));
        if let Some(annotation) = annotation.filter(|_| self.writer.manager == KUBECTL) {
            let mut applied = self.applied.clone();
            let annotations = applied
                .pointer_mut("/metadata/annotations")
                .and_then(Value::as_object_mut);
            annotations.map(|annotations| annotations.remove(LAST_APPLIED));
            *annotation = format!("{applied}\n").into();
        }
        object
    }
}

fn conflict(conflicts: &[(&Entry, FieldSet)]) -> Conflict {
    let mut conflicts: Vec<_> = conflicts
        .iter()
        .map(|(entry, fields)| (shown(entry), fields.paths()))
        .collect();
    conflicts.sort();
    let causes = conflicts.iter().flat_map(|(manager, paths)| {
        paths.iter().map(move |path| Cause {
            message: format!("conflict with {manager}"),
            field: path.clone(),
        })
    });
    let causes: Vec<_> = causes.collect();
    let message = match causes.as_slice() {
        [cause] => format!(
            "Apply failed with 1 conflict: {}: {}",
            cause.message, cause.field
        ),
        _ => {
            let lines = conflicts.iter().flat_map(|(manager, paths)| {
                let head = format!("conflicts with {manager}:");
                std::iter::once(head).chain(paths.iter().map(|path| format!("- {path}")))
            });
            let lines: Vec<_> = lines.collect();
            format!(
                "Apply failed with {} conflicts: {}",
                causes.len(),
                lines.join("\n")
            )
        }
    };
    Conflict { message, causes }
}

/// Returns a manager as messages name it: `"kubelet" with subresource "status" using v1`.
fn shown(entry: &Entry) -> String {
    let mut shown = format!("{:?}", entry.manager);
    if !entry.subresource.is_empty() {
        shown.push_str(&format!(" with subresource {:?}", entry.subresource));
    }
    if entry.operation == Operation::Update {
        shown.push_str(&format!(" using {}", entry.api_version));
    }
    shown
}
