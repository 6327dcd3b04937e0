//! Patches by their content type, and which manager owns which fields.

use serde_json::Value;

use crate::convert::from_storage;
use crate::merge::{self, ApplyError, Conflict, PatchError, Writer};
use crate::resources::api_version;
use crate::route::Route;
use crate::state::Draft;
use crate::status::{self, Refusal};
use crate::validate;

use super::{Operation, Write, Written, create_object, now, replace};

/// The encodings of a patch.
pub(crate) const PATCHES: [&str; 4] = [JSON_PATCH, MERGE, STRATEGIC, APPLY];
const JSON_PATCH: &str = "application/json-patch+json";
const MERGE: &str = "application/merge-patch+json";
const STRATEGIC: &str = "application/strategic-merge-patch+json";
pub(crate) const APPLY: &str = "application/apply-patch+yaml";

pub(crate) fn patch(draft: &mut Draft, write: &Write<'_>) -> Result<Written, Refusal> {
    let route = write.route;
    if write.media_type() == APPLY {
        return apply(draft, write);
    }
    let old = draft.snapshot().current(route)?;
    let document = from_storage(route, old.as_ref().clone());
    let patched = match write.media_type() {
        JSON_PATCH => merge::json_patch(&document, &write.body),
        MERGE => merge::merge_patch(&document, &write.body),
        STRATEGIC => merge::strategic_merge_patch(route.resource.kind, &document, &write.body),
        _ => return Err(status::unsupported_type(&PATCHES)),
    };
    let new = write.stored(draft, patched.map_err(|error| refused(&error))?)?;
    same_name(route, &new)?;
    replace(draft, write, &old, new, Operation::Update)
}

fn refused(error: &PatchError) -> Refusal {
    status::patch(error.code(), &error.to_string())
}

fn same_name(route: &Route, new: &Value) -> Result<(), Refusal> {
    match new["metadata"]["name"].as_str() {
        Some(name) if name == route.name => Ok(()),
        name => Err(status::other_name(name.unwrap_or_default(), route)),
    }
}

/// Server-side apply, which creates an object that is not there.
fn apply(draft: &mut Draft, write: &Write<'_>) -> Result<Written, Refusal> {
    let route = write.route;
    if route.asked("fieldManager").is_empty() {
        return Err(status::no_field_manager());
    }
    let mut applied = write.stored(draft, write.body.clone())?;
    match applied["metadata"]["name"].as_str() {
        // The address names it.
        None => applied["metadata"]["name"] = route.name.clone().into(),
        Some(_) => same_name(route, &applied)?,
    }
    let old = match draft.snapshot().current(route) {
        Ok(old) => Some(old),
        Err(_) if route.subresource.is_empty() => None,
        Err(not_found) => return Err(not_found),
    };
    if let Some(old) = &old {
        let uid = &applied["metadata"]["uid"];
        if uid.is_string() && *uid != old["metadata"]["uid"] {
            return Err(status::invalid(
                route,
                &route.name,
                &[validate::immutable_uid(uid)],
            ));
        }
    }
    let manager = write.manager();
    let (version, now) = (api_version(route.resource.group), now());
    let writer = writer(write, &manager, &version, &now);
    let merged = merge::apply(
        route.resource.kind,
        old.as_deref(),
        &applied,
        &writer,
        route.flag("force"),
    );
    let merged = merged.map_err(|error| match error {
        ApplyError::Conflict(conflict) => conflicting(conflict),
        ApplyError::Invalid(why) => status::bad_request(why),
    })?;
    match old {
        Some(old) => replace(draft, write, &old, merged, Operation::Apply),
        None => create_object(draft, write, merged, Operation::Apply),
    }
}

fn conflicting(conflict: Conflict) -> Refusal {
    let causes = conflict.causes.into_iter();
    status::apply_conflict(
        conflict.message,
        causes.map(|cause| (cause.field, cause.message)),
    )
}

fn writer<'a>(
    write: &'a Write<'_>,
    manager: &'a str,
    version: &'a str,
    now: &'a Value,
) -> Writer<'a> {
    Writer {
        manager,
        api_version: version,
        subresource: &write.route.subresource,
        now: now.as_str().unwrap_or_default(),
    }
}

/// Enters the fields that an update or a creation wrote in `managedFields`.
pub(super) fn manage(write: &Write<'_>, old: Option<&Value>, new: Value) -> Value {
    let manager = write.manager();
    let (version, now) = (api_version(write.route.resource.group), now());
    merge::managed_after_update(
        write.route.resource.kind,
        old,
        new,
        &writer(write, &manager, &version, &now),
    )
}
