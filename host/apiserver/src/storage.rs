//! Storage interface of the server: a durable commit of a few changes at once.

use std::sync::Arc;

use futures::future::BoxFuture;
use serde_json::Value;

/// Key under which an object is stored.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectKey {
    /// The plural (`resourceclaims`), which is unique among the resources of the server.
    pub resource: &'static str,
    /// Empty for an object of the cluster.
    pub namespace: String,
    pub name: String,
}

/// One change of one object.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    pub key: ObjectKey,
    /// The whole object with `kind` and `apiVersion`, or `None` if it is deleted.
    pub object: Option<Arc<Value>>,
    /// The resource version of the change, higher than that of every change before it.
    pub revision: u64,
}

/// A change that is not stored.
#[derive(Debug, thiserror::Error)]
#[error("cannot store {changes} changes of objects")]
pub struct StorageError {
    pub changes: usize,
    /// The storage reports it by itself, once for many refused writes.
    pub is_reported: bool,
    pub source: Box<dyn std::error::Error + Send + Sync>,
}

/// Keeps the objects of a server beyond its process.
///
/// The server gives the changes of several writes in one call, and after an error those of each write in a call of its own.
pub trait Storage: Send + Sync {
    /// Stores all changes or none of them. They are durable when it returns; after an error, none may be there after a restart. The
    /// server makes one call at a time, with the changes of one or more writes, and completes the call if the client goes away.
    fn commit(&self, changes: Vec<Change>) -> BoxFuture<'_, Result<(), StorageError>>;
}

/// A storage that keeps nothing: the objects are gone with the server.
#[derive(Clone, Copy, Debug, Default)]
pub struct Memory;

impl Storage for Memory {
    fn commit(&self, _changes: Vec<Change>) -> BoxFuture<'_, Result<(), StorageError>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

/// The stored state that a server begins with.
#[derive(Clone, Debug, Default)]
pub struct Loaded {
    /// Each with `kind`, `apiVersion`, a name and its resource version, as [`Change::object`] had it.
    pub objects: Vec<Value>,
    /// Highest [`Change::revision`] ever committed, also that of a deletion: versions continue from here.
    pub revision: u64,
}
