//! A ResourceClaim of any version of `resource.k8s.io` as the node's claim.
//!
//! What a node needs of a claim (who it is, its allocation, its consumers) has the same form in `v1`, `v1beta2` and `v1beta1`; requests,
//! which differ, are not needed. So only these fields are read, once, and what else there is does no harm.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::NodeSelector;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationResult, ResourceClaim, ResourceClaimConsumerReference,
    ResourceClaimStatus,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use serde::Deserialize;
use serde_json::Value;

use super::CachedClaim;
use nodedock_base::error::chain;
use nodedock_base::printable::one_line;
use nodedock_core::manifest::{self, ManifestError};
use nodedock_model::{Claim, Problem, ProblemCode, limit};

/// A claim as an API server has it, with the fields that are used.
#[derive(Debug, Deserialize)]
struct Object {
    kind: Option<String>,
    #[serde(default)]
    metadata: Metadata,
    #[serde(default)]
    status: Option<Status>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    annotations: Option<BTreeMap<String, String>>,
    owner_references: Option<Vec<OwnerReference>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Status {
    allocation: Option<Allocation>,
    reserved_for: Option<Vec<ResourceClaimConsumerReference>>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Allocation {
    devices: Option<DeviceAllocationResult>,
    node_selector: Option<NodeSelector>,
    /// A time; what it is else is no error.
    allocation_timestamp: Option<Value>,
}

/// A claim that was read, and what else of it is used.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct ReadClaim {
    pub(super) state: CachedClaim,
    /// Time of the allocation, in milliseconds since the Unix epoch; 0: the object does not say it.
    pub(super) allocated_ms: u64,
}

/// Reads the text of a claim, in JSON. The outer error: it is no JSON.
pub(super) fn of_text(text: &[u8]) -> serde_json::Result<Result<ReadClaim, Problem>> {
    match serde_json::from_slice(text) {
        Ok(object) => Ok(read(object)),
        // Once more, slowly, for the name and the place.
        Err(_) => Ok(of_value(&serde_json::from_slice(text)?)),
    }
}

/// Reads a claim of a watch.
pub(super) fn of_value(object: &Value) -> Result<ReadClaim, Problem> {
    match serde_path_to_error::deserialize(object) {
        Ok(object) => read(object),
        Err(error) => {
            let what = format!("not a valid ResourceClaim: field {error}");
            Err(malformed(&name_of(object), &what))
        }
    }
}

/// Converts a claim of the local API.
pub(super) fn of_typed(claim: &ResourceClaim) -> Result<Claim, Problem> {
    let meta = &claim.metadata;
    let name = shown_name(meta.namespace.as_deref(), meta.name.as_deref());
    check_parameters(claim, &name)?;
    manifest::claim_of(claim).map_err(|error| malformed(&name, &spoken(&error)))
}

fn read(object: Object) -> Result<ReadClaim, Problem> {
    let Metadata {
        name,
        namespace,
        uid,
        resource_version,
        annotations,
        owner_references,
    } = object.metadata;
    if let Some(kind) = object.kind.filter(|kind| kind != "ResourceClaim") {
        let name = shown_name(namespace.as_deref(), name.as_deref());
        let kind = one_line(&format!("{kind:?}"), 64);
        let what = format!("the API server gave an object of kind {kind}");
        return Err(malformed(&name, &what));
    }
    let (mut allocated_ms, mut status) = (0, ResourceClaimStatus::default());
    if let Some(found) = object.status {
        status.reserved_for = found.reserved_for;
        status.allocation = found.allocation.map(|allocation| {
            allocated_ms = allocation.allocation_timestamp.as_ref().map_or(0, millis);
            AllocationResult {
                devices: allocation.devices,
                node_selector: allocation.node_selector,
                ..AllocationResult::default()
            }
        });
    }
    let claim = ResourceClaim {
        metadata: ObjectMeta {
            name,
            namespace,
            uid,
            annotations,
            owner_references,
            ..ObjectMeta::default()
        },
        status: Some(status),
        ..ResourceClaim::default()
    };
    let state = CachedClaim {
        claim: of_typed(&claim)?,
        version: resource_version.and_then(|version| version.parse().ok()),
    };
    Ok(ReadClaim {
        state,
        allocated_ms,
    })
}

fn millis(time: &Value) -> u64 {
    // no error: the API server writes times, and one that is none says nothing
    let time = time
        .as_str()
        .and_then(|text| text.parse::<jiff::Timestamp>().ok());
    time.and_then(|time| u64::try_from(time.as_millisecond()).ok())
        .unwrap_or(0)
}

fn malformed(name: &str, what: &str) -> Problem {
    let what = one_line(what, limit::API_WORDS_BYTES_MAX);
    Problem::invalid(ProblemCode::ClaimMalformed, format!("claim {name}: {what}"))
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

fn name_of(object: &Value) -> String {
    let metadata = object.get("metadata");
    let field = |field: &str| metadata.and_then(|metadata| metadata.get(field)?.as_str());
    shown_name(field("namespace"), field("name"))
}

fn shown_name(namespace: Option<&str>, name: Option<&str>) -> String {
    let name = format!("{}/{}", namespace.unwrap_or("?"), name.unwrap_or("?"));
    one_line(&name, 512)
}

/// Opaque parameters are JSON objects; a driver is not called with anything else.
fn check_parameters(claim: &ResourceClaim, name: &str) -> Result<(), Problem> {
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let configs = devices.and_then(|devices| devices.config.as_ref());
    for (index, config) in configs.into_iter().flatten().enumerate() {
        let Some(opaque) = &config.opaque else {
            continue;
        };
        let what = match &opaque.parameters.0 {
            Value::Object(_) => continue,
            Value::Null => "missing",
            Value::Array(_) => "a list",
            Value::String(_) => "a text",
            Value::Number(_) => "a number",
            Value::Bool(_) => "a truth value",
        };
        let driver = one_line(&opaque.driver, 63);
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
