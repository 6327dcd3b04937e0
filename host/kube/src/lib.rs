//! The Kubernetes API: claims from it, slices, status and events to it.

pub mod api;
pub mod bridge;
pub mod claims;
pub mod events;
pub mod exchange;
pub mod facts;
pub mod reconcile;
pub mod slices;
pub mod status;

use nodedock_model::ObjectRef;

/// Path of a claim, below the group and version that the API server serves.
fn claim_path(api: &str, claim: &ObjectRef) -> String {
    format!("/apis/{api}/namespaces/{}/resourceclaims/{}", claim.namespace, claim.name)
}

/// A claim as the subject of a request.
fn claim_subject(claim: &ObjectRef) -> exchange::Subject<'_> {
    exchange::Subject {
        group: "resource.k8s.io",
        resource: "resourceclaims",
        kind: "ResourceClaim",
        name: claim.name.as_str(),
    }
}
