//! Requests that the server answered.

use nodedock_apiserver::Query;
use serde_json::Value;

/// A request and its answer.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The verb as RBAC names it; the method in lower case for a path that is not a resource.
    pub verb: String,
    pub group: String,
    pub version: String,
    /// The plural; empty for what is no resource.
    pub resource: String,
    pub subresource: String,
    pub namespace: String,
    pub name: String,
    pub path: String,
    pub query: Query,
    pub user_agent: String,
    pub content_type: String,
    /// The body, if it was JSON.
    pub body: Option<Value>,
    /// Status code of the answer; 0 if the connection was closed instead.
    pub code: u16,
}

impl Seen {
    /// Returns the resource with its subresource, as RBAC names it.
    pub fn full_resource(&self) -> String {
        match self.subresource.as_str() {
            "" => self.resource.clone(),
            subresource => format!("{}/{subresource}", self.resource),
        }
    }
}
