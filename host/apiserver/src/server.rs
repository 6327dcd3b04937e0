//! The server: it opens with stored objects, decides on writes one at a time, and makes them durable, several at once, before it answers.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::options::{Access, Check, Options};
use crate::resources;
use crate::route::{self, Route};
use crate::state::{Draft, FIRST_REVISION, ObjectStore, Snapshot, key};
use crate::status::Refusal;
use crate::storage::{Loaded, Storage, StorageError};
use crate::writes::{garbage, now};

/// A server that cannot begin with what is stored.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error(
        "the stored object {number} (kind {kind:?}, apiVersion {api_version:?}, name {name:?}) {why}"
    )]
    Object {
        number: usize,
        kind: String,
        api_version: String,
        name: String,
        why: &'static str,
    },
    #[error("cannot store the namespace default")]
    Storage(#[from] Arc<StorageError>),
}

/// An API server. Clones are the same server.
#[derive(Clone)]
pub struct Server {
    pub(crate) shared: Arc<ObjectStore>,
    /// Instead of that of the options.
    pub(crate) check: Option<Check>,
    /// `None`: every request is answered.
    pub(crate) access: Option<Access>,
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("shared", &self.shared)
            .finish_non_exhaustive()
    }
}

fn load(loaded: Loaded) -> Result<Snapshot, OpenError> {
    let mut snapshot = Snapshot::new(loaded.revision.max(FIRST_REVISION));
    for (number, object) in loaded.objects.into_iter().enumerate() {
        let (kind, api_version) = (text(&object["kind"]), text(&object["apiVersion"]));
        let name = text(&object["metadata"]["name"]);
        let version = object["metadata"]["resourceVersion"]
            .as_str()
            .and_then(|version| version.parse().ok());
        let (resource, version): (_, u64) = match (resources::of_type(&api_version, &kind), version)
        {
            (None, _) => {
                let why = "is of a kind that this server does not have";
                return Err(OpenError::Object {
                    number,
                    kind,
                    api_version,
                    name,
                    why,
                });
            }
            (_, None) => {
                let why = "has no resource version";
                return Err(OpenError::Object {
                    number,
                    kind,
                    api_version,
                    name,
                    why,
                });
            }
            (Some(resource), Some(version)) => (resource, version),
        };
        if name.is_empty() {
            let why = "has no name";
            return Err(OpenError::Object {
                number,
                kind,
                api_version,
                name,
                why,
            });
        }
        snapshot.revision = snapshot.revision.max(version);
        snapshot.load(key(resource, &object), Arc::new(object));
    }
    Ok(snapshot)
}

fn namespace_object(name: &str) -> Value {
    json!({
        "kind": "Namespace", "apiVersion": "v1",
        "metadata": {
            "name": name, "uid": uuid::Uuid::new_v4().to_string(), "creationTimestamp": now(),
            "labels": { "kubernetes.io/metadata.name": name },
        },
        "spec": { "finalizers": ["kubernetes"] },
        "status": { "phase": "Active" },
    })
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

impl Server {
    /// Opens a server with the objects that are stored. Resource versions continue from the highest of them, and a watch from a version
    /// before that is refused with 410, so its client lists again.
    ///
    /// # Errors
    ///
    /// Fails if a stored object is of no kind that the server has, or has no name or resource version; or if the namespace `default`, which
    /// is made when it does not exist, cannot be stored.
    pub async fn open(
        options: Options,
        storage: Arc<dyn Storage>,
        loaded: Loaded,
    ) -> Result<Self, OpenError> {
        let controllers = options.controllers;
        let server = Self {
            shared: Arc::new(ObjectStore::new(options, storage, load(loaded)?)),
            check: None,
            access: None,
        };
        if controllers {
            server.ensure_namespace("default").await?;
        }
        Ok(server)
    }

    /// The same server for other clients, whose writes are checked by this instead of [`Options::check`].
    #[must_use]
    pub fn with_check(&self, check: Check) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            check: Some(check),
            access: self.access.clone(),
        }
    }

    /// The same server for clients that may do less.
    #[must_use]
    pub fn with_access(&self, access: Access) -> Self {
        Self {
            access: Some(access),
            ..self.clone()
        }
    }

    /// Makes a namespace if there is none of this name.
    ///
    /// # Errors
    ///
    /// It cannot be stored.
    pub async fn ensure_namespace(&self, name: &str) -> Result<(), Arc<StorageError>> {
        let Some(namespaces) = resources::resource("namespaces") else {
            return Ok(());
        };
        if self.snapshot().object(namespaces, "", name).is_some() {
            return Ok(());
        }
        let decided = self.decide(false, |draft| {
            if draft.next.object(namespaces, "", name).is_none() {
                draft.store(namespaces, namespace_object(name));
            }
            Ok(())
        });
        decided.await.map(|_| ())
    }

    /// The objects as they are now.
    pub fn snapshot(&self) -> Snapshot {
        self.shared.lock().now.clone()
    }

    /// Returns the route of a request; `None` for a path that is no resource.
    pub fn route(&self, method: &http::Method, uri: &http::Uri) -> Option<Route> {
        route::route(
            self.shared.options.taint_rules,
            method,
            &route::parts(uri),
            route::query(uri),
        )
    }

    /// A signal after each change, and when a watch opens or ends.
    pub fn ticks(&self) -> watch::Receiver<()> {
        self.shared.ticks()
    }

    /// Counts the open watches of each resource, by plural.
    pub fn watches(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for plural in self.shared.lock().watches.values() {
            *counts.entry(*plural).or_default() += 1;
        }
        counts
    }

    /// Returns the objects with the writes that are decided and not durable yet, for a [`Check`] of another write.
    pub fn decided(&self) -> Snapshot {
        self.shared.head().snapshot
    }

    /// Decides on the current state, commits, publishes: `decide` runs while no other one does. Gives the warnings of the draft too.
    ///
    /// # Errors
    ///
    /// What `decide` refuses, and 500 if the changes cannot be stored; nothing is changed then.
    pub(crate) async fn write<T>(
        &self,
        dry_run: bool,
        decide: impl FnOnce(&mut Draft) -> Result<T, Refusal>,
    ) -> Result<(T, Vec<String>), Refusal> {
        let controllers = self.shared.options.controllers;
        let decided = self.decide(dry_run, |draft| {
            let done = decide(draft)?;
            let warnings = std::mem::take(&mut draft.warnings);
            if controllers {
                garbage::collect(draft);
            }
            Ok((done, warnings))
        });
        let decided = decided.await;
        decided.unwrap_or_else(|error| Err(crate::status::not_stored(&error)))
    }

    /// Returns the decision when it is durable, with everything that it was decided on. Writes that are decided during a commit share the next one.
    async fn decide<T>(
        &self,
        dry_run: bool,
        decide: impl FnOnce(&mut Draft) -> Result<T, Refusal>,
    ) -> Result<Result<T, Refusal>, Arc<StorageError>> {
        let turn = self.shared.turn().await;
        let head = self.shared.head();
        let mut draft = Draft {
            dry_run,
            ..Draft::of(head.snapshot.clone())
        };
        let decided = decide(&mut draft);
        let is_stored = decided.is_ok() && !dry_run && !draft.changes.is_empty();
        let end = self.shared.stage(&head, is_stored.then_some(draft), turn)?;
        let Some(mut end) = end else {
            return Ok(decided);
        };
        let ended = end.wait_for(Option::is_some).await;
        match ended.map(|ended| ended.clone()) {
            Ok(Some(stored)) => stored.map(|()| decided),
            Ok(None) | Err(_) => Err(Arc::new(StorageError {
                changes: 0,
                is_reported: false,
                source: "the commit did not end".into(),
            })),
        }
    }

    /// Changes objects without a request, a check, or the storage: for servers whose storage is [`crate::Memory`]. It waits on the thread
    /// for a write under way.
    pub fn change_unstored<T>(&self, change: impl FnOnce(&mut Draft) -> T) -> T {
        let turn = loop {
            match self.shared.try_turn() {
                // A write that is decided and not published yet would undo the change.
                Some(turn) if self.shared.is_published() => break turn,
                _ => std::thread::yield_now(),
            }
        };
        let mut draft = Draft::of(self.snapshot());
        let done = change(&mut draft);
        self.shared.publish(draft);
        drop(turn);
        done
    }

    /// Forgets the changes until now: a watch that would continue from one of them gets 410. Open watches continue.
    pub fn forget_history(&self) {
        self.shared
            .change(|state| state.forgotten = state.now.revision);
    }

    /// Sends every watch that asked for bookmarks one, at once.
    pub fn send_bookmarks(&self) {
        self.shared.change(|state| state.bookmarks += 1);
    }

    /// Ends every watch in order.
    pub fn end_watches(&self) {
        self.shared.change(|state| state.watch_epoch += 1);
    }

    /// Raises the resource version, as changes do of objects that this server does not have. Not stored.
    pub fn skip_versions(&self, count: u64) {
        self.change_unstored(|draft| draft.next.revision += count);
    }
}
