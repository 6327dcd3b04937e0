//! Behaviour of a server, and the check of writes that its owner adds.

use std::sync::Arc;

use futures::future::BoxFuture;
use serde_json::Value;

use crate::route::Route;
use crate::status::{Cause, Refusal};

/// Size of the changes from which a watch can continue, as JSON: thousands of changes of claims, about a hundred of full ResourceSlices. In
/// memory they take several times as much.
const HISTORY_BYTES_MAX: usize = 4 << 20;

/// A check beyond the published rules of an object.
pub type Check = Arc<dyn Fn(&Route, ObjectWrite<'_>) -> Vec<Cause> + Send + Sync>;

/// Opaque parameters of a claim, a template or a class.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct OpaqueParameters {
    pub driver: String,
    /// JSON text.
    pub parameters: String,
}

/// Violation by opaque parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidParameters {
    /// JSON Pointer of the wrong value; empty for the parameters as a whole.
    pub path: String,
    pub why: String,
}

/// A check of opaque parameters by their driver. Runs while other writes are decided. Returns the violation.
pub type ParametersCheck =
    Arc<dyn Fn(OpaqueParameters) -> BoxFuture<'static, Option<InvalidParameters>> + Send + Sync>;

/// A decision whether a request for a resource is answered.
pub type Access = Arc<dyn Fn(&Route) -> Result<(), Refusal> + Send + Sync>;

/// Write of an object by a request.
#[derive(Clone, Copy, Debug)]
pub enum ObjectWrite<'a> {
    Created(&'a Value),
    Updated { new: &'a Value, old: &'a Value },
    Deleted(&'a Value),
}

impl<'a> ObjectWrite<'a> {
    /// The object as the request leaves it, or as it was before its deletion.
    pub fn object(self) -> &'a Value {
        match self {
            Self::Created(object) | Self::Updated { new: object, .. } | Self::Deleted(object) => {
                object
            }
        }
    }
}

/// Behaviour of a server.
#[derive(Clone)]
pub struct Options {
    /// True if the server does the work of a cluster's controllers: the namespace `default` exists, other namespaces must exist before
    /// their objects and are deleted with them, and objects are deleted after their owners.
    pub controllers: bool,
    /// True if DeviceTaintRules are served in `v1`.
    pub taint_rules: bool,
    /// Maximum size of the changes that are kept for watches, in bytes as JSON.
    pub history_bytes_max: usize,
    /// Refuses objects beyond the published rules.
    pub check: Option<Check>,
    /// Refuses new objects for their opaque parameters.
    pub parameters: Option<ParametersCheck>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            controllers: true,
            taint_rules: false,
            history_bytes_max: HISTORY_BYTES_MAX,
            check: None,
            parameters: None,
        }
    }
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options")
            .field("controllers", &self.controllers)
            .field("taint_rules", &self.taint_rules)
            .field("history_bytes_max", &self.history_bytes_max)
            .finish_non_exhaustive()
    }
}
