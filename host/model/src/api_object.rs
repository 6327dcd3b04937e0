//! Objects of the local API as the checkpoint has them.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Uid;

/// Key of the record that holds the resource version of the last deletion: after a restart no newer object would show it.
pub const DELETED_REVISION_KEY: &str = "deleted-revision";

/// An object of the local API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ApiObject {
    /// UID of the object, or [`DELETED_REVISION_KEY`].
    pub uid: Uid,
    /// Plural of its kind, such as `resourceclaims`; empty under [`DELETED_REVISION_KEY`].
    pub resource: String,
    /// The object as it is served in the stored version.
    pub object: Arc<Value>,
}
