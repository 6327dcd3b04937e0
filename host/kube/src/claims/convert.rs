//! A ResourceClaim of any version of `resource.k8s.io` as the node's claim.
//!
//! What a node needs of a claim (who it is, its allocation, its consumers) has the same form in `v1`, `v1beta2` and `v1beta1`; requests,
//! which differ, are not needed. So only these fields are taken, and what else there is does no harm.

use serde_json::{Map, Value, json};

use nodedock_base::error::chain;
use nodedock_base::printable::one_line;
use nodedock_core::manifest::{self, ManifestError};
use nodedock_model::{Claim, Problem, ProblemCode, limit};

/// Fields that are read. Lists of objects are taken whole.
const METADATA: [&str; 5] = ["name", "namespace", "uid", "annotations", "ownerReferences"];
const ALLOCATION: [&str; 2] = ["devices", "nodeSelector"];

pub(super) fn claim(object: &Value) -> Result<Claim, Problem> {
    let name = name_of(object);
    let malformed = |what: String| {
        Problem::invalid(ProblemCode::ClaimMalformed, format!("claim {name}: {what}"))
    };
    if let Some(kind) = object.get("kind").filter(|kind| *kind != "ResourceClaim") {
        let kind = one_line(&kind.to_string(), 64);
        return Err(malformed(format!(
            "the API server gave an object of kind {kind}"
        )));
    }
    check_parameters(object, &name)?;
    let at = |path: &[&str]| path.iter().try_fold(object, |value, key| value.get(key));
    let mut status = Map::new();
    if let Some(allocation) =
        at(&["status", "allocation"]).filter(|allocation| !allocation.is_null())
    {
        status.insert("allocation".to_owned(), some(allocation, &ALLOCATION));
    }
    if let Some(consumers) = at(&["status", "reservedFor"]) {
        status.insert("reservedFor".to_owned(), consumers.clone());
    }
    let whole = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": some(object.get("metadata").unwrap_or(&Value::Null), &METADATA),
        "spec": {},
        "status": status,
    });
    manifest::claim_of(whole).map_err(|error| malformed(spoken(&error)))
}

/// Time of the allocation, in milliseconds since the Unix epoch; 0: the object does not say it.
pub(super) fn allocated_ms(object: &Value) -> u64 {
    let time = object
        .pointer("/status/allocation/allocationTimestamp")
        .and_then(Value::as_str);
    let time = time.and_then(|text| text.parse::<jiff::Timestamp>().ok());
    time.and_then(|time| u64::try_from(time.as_millisecond()).ok())
        .unwrap_or(0)
}

/// The error without the document's number: there is one only.
fn spoken(error: &ManifestError) -> String {
    let words = match error {
        ManifestError::Shape { what, .. } => what.clone(),
        ManifestError::Mismatch {
            place,
            kind,
            source,
            ..
        } => format!("not a valid {kind}: {place}: {source}"),
        ManifestError::Name { field, source, .. } => format!("{field}: {}", chain(source)),
        other => chain(other),
    };
    one_line(&words, limit::API_WORDS_BYTES_MAX)
}

fn some(object: &Value, fields: &[&str]) -> Value {
    Value::Object(
        fields
            .iter()
            .filter_map(|name| Some(((*name).to_owned(), object.get(*name)?.clone())))
            .collect(),
    )
}

fn name_of(object: &Value) -> String {
    let meta = |field: &str| {
        object
            .get("metadata")
            .and_then(|meta| meta.get(field)?.as_str())
            .unwrap_or("?")
    };
    one_line(&format!("{}/{}", meta("namespace"), meta("name")), 512)
}

/// Opaque parameters are JSON objects; a driver is not called with anything else.
fn check_parameters(object: &Value, name: &str) -> Result<(), Problem> {
    let configs = object
        .pointer("/status/allocation/devices/config")
        .and_then(Value::as_array);
    for (index, config) in configs.into_iter().flatten().enumerate() {
        let Some(opaque) = config.get("opaque").filter(|opaque| !opaque.is_null()) else {
            continue;
        };
        let what = match opaque.get("parameters") {
            Some(Value::Object(_)) => continue,
            None | Some(Value::Null) => "missing",
            Some(Value::Array(_)) => "a list",
            Some(Value::String(_)) => "a text",
            Some(Value::Number(_)) => "a number",
            Some(Value::Bool(_)) => "a truth value",
        };
        let driver = one_line(
            opaque.get("driver").and_then(Value::as_str).unwrap_or("?"),
            63,
        );
        let path = format!("status.allocation.devices.config[{index}].opaque.parameters");
        let message = format!(
            "claim {name}: {path} for driver {driver} is {what}, and a JSON object is wanted"
        );
        return Err(Problem::invalid(
            ProblemCode::ClaimParametersMalformed,
            message,
        ));
    }
    Ok(())
}

#[cfg(test)]
#[path = "convert_tests.rs"]
pub(super) mod tests;
