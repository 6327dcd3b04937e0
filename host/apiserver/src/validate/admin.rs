//! Admin access to devices, which only claims in a namespace with a label may ask for.

use serde_json::Value;

use super::fields::{internal, list, text};
use crate::resources::Resource;
use crate::status::Cause;

const LABEL: &str = "resource.kubernetes.io/admin-access";

/// Returns what is wrong with a claim or template that asks for admin access, or a claim that gets it; `namespace` is the object of its
/// namespace, `None` if there is none. An API server lists this cause before those of [`super::object`].
pub(crate) fn admin_access(
    resource: &Resource,
    new: &Value,
    old: Option<&Value>,
    namespace: Option<&Value>,
) -> Option<Cause> {
    let field = match (resource.plural, old) {
        ("resourceclaims", None) => requested(&new["spec"])?,
        ("resourceclaimtemplates", None) => requested(&new["spec"]["spec"])?,
        // What was granted cannot change.
        ("resourceclaims", Some(old)) if granted(old).is_none() => granted(new)?,
        _ => return None,
    };
    let Some(namespace) = namespace else {
        let name = text(&new["metadata"], "namespace");
        let why = format!(
            "could not retrieve namespace to verify admin access: namespaces \"{name}\" not found"
        );
        return Some(internal(field, &why));
    };
    let is_allowed = namespace["metadata"]["labels"][LABEL] == "true";
    let why = format!(
        "admin access to devices requires the `{LABEL}: true` label on the containing namespace"
    );
    (!is_allowed).then(|| Cause::forbidden(field, &why))
}

/// The first request for admin access. Its path has no `exactly`, nor a template's second `spec`.
fn requested(spec: &Value) -> Option<String> {
    let requests = list(&spec["devices"], "requests");
    let index = requests
        .iter()
        .position(|request| request["exactly"]["adminAccess"] == true)?;
    Some(format!("spec.devices.requests[{index}].adminAccess"))
}

fn granted(claim: &Value) -> Option<String> {
    let results = list(&claim["status"]["allocation"]["devices"], "results");
    let index = results
        .iter()
        .position(|result| result["adminAccess"] == true)?;
    Some(format!(
        "status.allocation.devices.results[{index}].adminAccess"
    ))
}
