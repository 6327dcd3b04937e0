//! The objects, their changes, and what was asked for. One lock, held for moments and never over a wait.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::Value;
use tokio::sync::watch;

use super::fault::Faults;
use super::resources::{self, Resource, Served};
use super::route::{Query, Route};
use super::status::{self, Refusal};

/// The first object of a server gets the next one.
const FIRST_REVISION: u64 = 100;
/// Of the requests in the story of a wait that failed.
const STORY_LINES: usize = 60;

/// Resource, namespace and name.
pub(super) type Key = (&'static str, String, String);

/// One change of one object, in the version that it is stored in (`v1`; an event as core has it).
#[derive(Debug)]
pub(super) struct Change {
    /// The plural.
    pub(super) resource: &'static str,
    pub(super) revision: u64,
    /// The object after the change; of a deleted one its last state, with the resource version of the deletion.
    pub(super) object: Arc<Value>,
    /// The object before the change.
    pub(super) before: Option<Arc<Value>>,
    pub(super) is_deletion: bool,
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
    pub query: Query,
    pub user_agent: String,
    pub content_type: String,
    /// What was sent, if it was JSON.
    pub body: Option<Value>,
    /// Of the answer; 0 if the connection was closed instead.
    pub code: u16,
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
#[derive(Debug, Default)]
pub struct State {
    pub(super) objects: BTreeMap<Key, Arc<Value>>,
    pub(super) log: Vec<Change>,
    pub(super) revision: u64,
    /// The last resource version that is forgotten.
    pub(super) compacted: u64,
    pub(super) requests: Vec<Seen>,
    pub(super) faults: Faults,
    pub(super) served: Served,
    /// Of Kubernetes 1, as `/version` reports it.
    pub(super) minor_version: String,
    pub(super) tokens: Vec<String>,
    pub(super) denied: Vec<(String, String)>,
    pub(super) rules: Option<Vec<Value>>,
    /// Claims by UID whose stored parameters have space between their parts, see [`super::writes`].
    pub(super) spaced: BTreeSet<String>,
    /// What each manager applied last to a status, by the object's UID and the manager.
    pub(super) applied: BTreeMap<(String, String), Value>,
    /// Open watches: the resource of each, by number.
    pub(super) watches: BTreeMap<u64, &'static str>,
    pub(super) last_watch: u64,
    pub(super) watch_epoch: u64,
    pub(super) bookmarks: u64,
}

impl State {
    fn new() -> Self {
        Self {
            revision: FIRST_REVISION,
            compacted: FIRST_REVISION - 1,
            served: Served { versions: vec!["v1".to_owned()], taint_rules: false },
            minor_version: "36".to_owned(),
            ..Self::default()
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

    /// The object that a request names.
    pub(super) fn current(&self, route: &Route) -> Result<Arc<Value>, Refusal> {
        let key = (route.resource.plural, route.namespace.clone(), route.name.clone());
        self.objects.get(&key).cloned().ok_or_else(|| status::not_found(route))
    }

    pub(super) fn entries(&self, plural: &'static str) -> impl Iterator<Item = (&Key, &Arc<Value>)> {
        let first = (plural, String::new(), String::new());
        self.objects.range(first..).take_while(move |(key, _)| key.0 == plural)
    }

    /// Stores an object with the next resource version.
    pub(super) fn store(&mut self, resource: &'static Resource, object: Value) -> Arc<Value> {
        let key = key(resource, &object);
        let object = self.log(resource.plural, object, self.objects.get(&key).cloned(), false);
        self.objects.insert(key, Arc::clone(&object));
        object
    }

    /// Removes an object, whatever finalizers it has.
    pub(super) fn remove(&mut self, key: &Key) -> Option<Arc<Value>> {
        let before = self.objects.remove(key)?;
        Some(self.log(key.0, before.as_ref().clone(), Some(before), true))
    }

    fn log(
        &mut self,
        resource: &'static str,
        mut object: Value,
        before: Option<Arc<Value>>,
        is_deletion: bool,
    ) -> Arc<Value> {
        self.revision += 1;
        let revision = self.revision;
        object["metadata"]["resourceVersion"] = revision.to_string().into();
        let object = Arc::new(object);
        self.log.push(Change { resource, revision, object: Arc::clone(&object), before, is_deletion });
        object
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

    /// For looking. A test that failed while it looked has reported why.
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
