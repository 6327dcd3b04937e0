//! The objects, their changes, and what was asked for. One lock, held for moments and never over a wait.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::Value;
use tokio::sync::watch;
use tokio::time::Instant;

use super::fault::Faults;
use super::resources::{self, Resource};

/// The first object of a server gets the next one.
const FIRST_REVISION: u64 = 100;
/// Of the requests in the story of a wait that failed.
const STORY_LINES: usize = 60;

/// Resource, namespace and name.
pub(super) type Key = (&'static str, String, String);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    Added,
    Modified,
    Deleted,
}

/// One change of one object, in the version that it is stored in (`v1`; an event as core has it).
#[derive(Clone, Debug)]
pub struct Change {
    pub kind: ChangeKind,
    /// The plural.
    pub resource: &'static str,
    pub revision: u64,
    /// The object after the change; of a deleted one its last state, with the resource version of the deletion.
    pub object: Arc<Value>,
    /// The object before the change.
    pub before: Option<Arc<Value>>,
}

/// A request and its answer.
#[derive(Clone, Debug)]
pub struct Seen {
    /// As RBAC names it; for what is no resource the method in small letters.
    pub verb: String,
    pub group: String,
    pub version: String,
    /// The plural; empty for what is no resource.
    pub resource: String,
    pub subresource: String,
    pub namespace: String,
    pub name: String,
    pub path: String,
    pub query: BTreeMap<String, String>,
    pub user_agent: String,
    pub content_type: String,
    /// What was sent, if it was JSON.
    pub body: Option<Value>,
    /// Of the answer; 0 if the connection was closed instead.
    pub code: u16,
    /// When it came.
    pub at: Instant,
}

impl Seen {
    /// With the subresource, as RBAC names it.
    pub fn full_resource(&self) -> String {
        match self.subresource.as_str() {
            "" => self.resource.clone(),
            subresource => format!("{}/{subresource}", self.resource),
        }
    }
}

/// Everything that the server holds.
#[derive(Debug)]
pub struct State {
    pub(super) objects: BTreeMap<Key, Arc<Value>>,
    pub(super) log: Vec<Change>,
    pub(super) revision: u64,
    /// The last resource version that is forgotten.
    pub(super) compacted: u64,
    pub(super) requests: Vec<Seen>,
    pub(super) faults: Faults,
    pub(super) versions: Vec<String>,
    /// Of Kubernetes 1, as `/version` reports it.
    pub(super) minor_version: String,
    pub(super) tokens: Vec<String>,
    pub(super) denied: Vec<(String, String)>,
    pub(super) rules: Option<Vec<Value>>,
    /// Claims by UID whose stored parameters have space between their parts, see [`super::writes`].
    pub(super) spaced: BTreeSet<String>,
    /// What each manager applied last, by the object's UID, the subresource and the manager.
    pub(super) applied: BTreeMap<(String, String, String), Value>,
    /// Open watches: the resource of each, by number.
    pub(super) watches: BTreeMap<u64, &'static str>,
    pub(super) last_watch: u64,
    pub(super) watch_epoch: u64,
    pub(super) bookmarks: u64,
}

impl State {
    fn new() -> Self {
        Self {
            objects: BTreeMap::new(),
            log: Vec::new(),
            revision: FIRST_REVISION,
            compacted: FIRST_REVISION - 1,
            requests: Vec::new(),
            faults: Faults::default(),
            versions: vec!["v1".to_owned()],
            minor_version: "36".to_owned(),
            tokens: Vec::new(),
            denied: Vec::new(),
            rules: None,
            spaced: BTreeSet::new(),
            applied: BTreeMap::new(),
            watches: BTreeMap::new(),
            last_watch: 0,
            watch_epoch: 0,
            bookmarks: 0,
        }
    }

    /// The objects of a resource (`resourceslices`), in the order of namespace and name.
    pub fn objects(&self, resource: &str) -> Vec<&Value> {
        let plural = resources::named(resource).plural;
        self.entries(plural).map(|(_, object)| object.as_ref()).collect()
    }

    /// `namespace` is empty for an object of the cluster.
    pub fn object(&self, resource: &str, namespace: &str, name: &str) -> Option<&Value> {
        let plural = resources::named(resource).plural;
        self.objects.get(&(plural, namespace.to_owned(), name.to_owned())).map(Arc::as_ref)
    }

    /// The ResourceSlices of a driver.
    pub fn slices(&self, driver: &str) -> Vec<&Value> {
        self.objects("resourceslices").into_iter().filter(|slice| slice["spec"]["driver"] == driver).collect()
    }

    pub fn requests(&self) -> &[Seen] {
        &self.requests
    }

    /// How many watches of a resource are open.
    pub fn watches(&self, resource: &str) -> usize {
        self.watches.values().filter(|watched| **watched == resource).count()
    }

    /// The current resource version.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn entries(&self, plural: &'static str) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        let first = (plural, String::new(), String::new());
        self.objects.range(first..).take_while(move |(key, _)| key.0 == plural)
    }

    pub(super) fn next_revision(&mut self) -> u64 {
        self.revision += 1;
        self.revision
    }

    /// Puts an object in its place with the next resource version, and tells it.
    pub(super) fn store(&mut self, resource: &'static Resource, mut object: Value) -> Arc<Value> {
        let key = key(resource, &object);
        let revision = self.next_revision();
        object["metadata"]["resourceVersion"] = revision.to_string().into();
        let object = Arc::new(object);
        let before = self.objects.insert(key, Arc::clone(&object));
        let kind = if before.is_some() { ChangeKind::Modified } else { ChangeKind::Added };
        let told = Arc::clone(&object);
        self.log.push(Change { kind, resource: resource.plural, revision, object: told, before });
        object
    }

    /// Takes an object away, whatever holds it, and tells it.
    pub(super) fn remove(&mut self, key: &Key) -> Option<Arc<Value>> {
        let before = self.objects.remove(key)?;
        let revision = self.next_revision();
        let mut last = before.as_ref().clone();
        last["metadata"]["resourceVersion"] = revision.to_string().into();
        let object = Arc::new(last);
        let (kind, told) = (ChangeKind::Deleted, Arc::clone(&object));
        self.log.push(Change { kind, resource: key.0, revision, object: told, before: Some(before) });
        Some(object)
    }

    pub(super) fn compact(&mut self) {
        self.compacted = self.revision;
    }

    /// The newest requests and the open watches, for a wait that failed.
    pub(super) fn story(&self) -> String {
        let from = self.requests.len().saturating_sub(STORY_LINES);
        let mut story = String::new();
        for seen in &self.requests[from..] {
            let query: Vec<String> = seen.query.iter().map(|(key, value)| format!("{key}={value}")).collect();
            let _ = writeln!(story, "  {} {}?{} -> {}", seen.verb, seen.path, query.join("&"), seen.code);
        }
        let _ = write!(story, "  {} requests, open watches: {:?}", self.requests.len(), self.watches);
        for (resource, namespace, name) in self.objects.keys() {
            let _ = write!(story, "\n  {resource} {namespace}/{name}");
        }
        story
    }
}

pub(super) fn key(resource: &'static Resource, object: &Value) -> Key {
    let part = |name: &str| object["metadata"][name].as_str().unwrap_or_default().to_owned();
    let namespace = if resource.namespaced { part("namespace") } else { String::new() };
    (resource.plural, namespace, part("name"))
}

/// The state, and a signal after each change of it.
#[derive(Debug)]
pub(super) struct Shared {
    state: Mutex<State>,
    tick: watch::Sender<()>,
}

impl Shared {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(State::new()), tick: watch::Sender::new(()) }
    }

    /// For looking. A test that failed while it looked has told why.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let done = change(&mut self.lock());
        self.tick.send_replace(());
        done
    }

    pub(super) fn ticks(&self) -> watch::Receiver<()> {
        self.tick.subscribe()
    }
}

/// The changes of objects, one after the other.
#[derive(Debug)]
pub struct Changes {
    shared: Arc<Shared>,
    ticks: watch::Receiver<()>,
    next: usize,
}

impl Changes {
    pub(super) fn from_now(shared: Arc<Shared>) -> Self {
        let (ticks, next) = (shared.ticks(), shared.lock().log.len());
        Self { shared, ticks, next }
    }

    /// The next change that has happened, if there is one.
    pub fn try_next(&mut self) -> Option<Change> {
        let change = self.shared.lock().log.get(self.next).cloned()?;
        self.next += 1;
        Some(change)
    }

    /// Waits for the next change, for as long as it takes.
    pub async fn next(&mut self) -> Change {
        loop {
            self.ticks.mark_unchanged();
            if let Some(change) = self.try_next() {
                return change;
            }
            let _ = self.ticks.changed().await;
        }
    }
}
