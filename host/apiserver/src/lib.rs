//! An API server for one machine: the objects of `resource.k8s.io` and what drivers, kubectl and Go clients use of the core group.
//!
//! [`Server`] holds the objects in memory and gives each change to a [`Storage`] before it answers. It speaks HTTP in-process
//! ([`Server::handle`]), on a Unix socket ([`serve_unix`]) and with TLS and a token on a loopback address ([`serve_tls`]).
//!
//! There is one user, who may do everything. A list is always of the newest resource version, a pod that is deleted is gone at once, and
//! the deletion of an owner deletes its dependents in the same step, whether it is asked for in the background or in the foreground.

mod convert;
mod defaults;
mod discovery;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod identity;
mod merge;
mod negotiate;
mod openapi;
mod options;
mod peer;
mod protobuf;
mod reads;
mod resources;
mod respond;
mod reviews;
mod route;
mod selector;
mod serve;
mod server;
mod shape;
mod state;
pub mod status;
mod storage;
mod strangers;
mod table;
#[cfg(test)]
mod tests;
mod validate;
mod watch;
mod writes;
mod yaml;

pub use discovery::{discovered_group, discovered_resources};
pub use identity::{Identity, IdentityError, KUBECONFIG_NAME, kubeconfig};
pub use options::{
    Access, Check, InvalidParameters, ObjectWrite, OpaqueParameters, Options, ParametersCheck,
};
pub use protobuf::{CONTENT_TYPE as PROTOBUF, to_json as protobuf_to_json};
pub use resources::{DRA_GROUP, EVENTS_GROUP, Resource, resource, resources};
pub use respond::Body;
pub use route::{Query, Route};
pub use serve::{ServeError, serve_tls, serve_unix, serve_unix_by_user};
pub use server::{OpenError, Server};
pub use state::{Draft, Snapshot};
pub use status::{Cause, Refusal};
pub use storage::{Change, Loaded, Memory, ObjectKey, Storage, StorageError};
pub use table::{age, claim_state};

/// The refusal of a claim's status that changes its allocation, for a [`Check`].
pub fn immutable_allocation() -> Cause {
    validate::immutable_allocation()
}

/// Returns the fields of an object that its kind does not have, in the words of a strict decoder: `unknown field "spec.nosuch"`. At most 100; none
/// for a kind that is not served.
pub fn unknown_fields(kind: &str, object: &serde_json::Value) -> Vec<String> {
    openapi::unknown_fields(kind, object)
}
