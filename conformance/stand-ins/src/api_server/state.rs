//! Requests, injected faults and settings, beside the objects of the engine. One lock, held briefly and never across an await; the engine
//! does not write while it is held.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard};

use nodedock_apiserver::{
    Cause, Check, Loaded, Memory, ObjectWrite, Options, Resource, Route, Server, Snapshot,
    immutable_allocation,
};
use serde_json::Value;
use tokio::sync::watch;

use super::convert::Served;
use super::fault::Faults;
use super::seen::Seen;

/// Number of requests in the report of a wait that failed.
const STORY_LINES: usize = 60;

/// Everything that the server holds.
#[derive(Debug)]
pub struct State {
    objects: Snapshot,
    /// Open watches by resource.
    watches: BTreeMap<&'static str, usize>,
    pub(super) requests: Vec<Seen>,
    pub(super) faults: Faults,
    pub(super) served: Served,
    /// Minor version of Kubernetes 1, as `/version` reports it.
    pub(super) minor_version: String,
    pub(super) tokens: Vec<String>,
    pub(super) denied: Vec<(String, String)>,
    pub(super) rules: Option<Vec<Value>>,
}

/// Returns the resource of a plural or kind.
pub(super) fn named(name: &str) -> &'static Resource {
    nodedock_apiserver::resource(name)
        .unwrap_or_else(|| panic!("the stand-in has no resource {name:?}"))
}

impl State {
    fn new(objects: Snapshot) -> Self {
        Self {
            objects,
            watches: BTreeMap::new(),
            requests: Vec::new(),
            faults: Faults::default(),
            served: Served {
                versions: vec!["v1".to_owned()],
                taint_rules: false,
            },
            minor_version: "36".to_owned(),
            tokens: Vec::new(),
            denied: Vec::new(),
            rules: None,
        }
    }

    /// The objects of a resource (`resourceslices`), in the order of namespace and name.
    pub fn objects(&self, resource: &str) -> Vec<&Value> {
        self.objects
            .objects(named(resource))
            .map(|(_, object)| object.as_ref())
            .collect()
    }

    /// `namespace` is empty for an object of the cluster.
    pub fn object(&self, resource: &str, namespace: &str, name: &str) -> Option<&Value> {
        self.objects
            .object(named(resource), namespace, name)
            .map(Arc::as_ref)
    }

    /// The ResourceSlices of a driver.
    pub fn slices(&self, driver: &str) -> Vec<&Value> {
        self.objects("resourceslices")
            .into_iter()
            .filter(|slice| slice["spec"]["driver"] == driver)
            .collect()
    }

    pub fn requests(&self) -> &[Seen] {
        &self.requests
    }

    /// Returns the number of open watches of a resource.
    pub fn watches(&self, resource: &str) -> usize {
        self.watches.get(resource).copied().unwrap_or_default()
    }

    /// The newest requests and the open watches, for a wait that failed.
    pub(super) fn story(&self) -> String {
        let from = self.requests.len().saturating_sub(STORY_LINES);
        let mut story = String::new();
        for seen in &self.requests[from..] {
            let query: Vec<String> = seen
                .query
                .iter()
                .map(|(key, value)| format!("{key}={value}"))
                .collect();
            let _ = writeln!(
                story,
                "  {} {}?{} -> {}",
                seen.verb,
                seen.path,
                query.join("&"),
                seen.code
            );
        }
        let _ = write!(
            story,
            "  {} requests, open watches: {:?}",
            self.requests.len(),
            self.watches
        );
        for (key, _) in self.objects.all() {
            let _ = write!(story, "\n  {} {}/{}", key.resource, key.namespace, key.name);
        }
        story
    }
}

/// The engine, the state, and a signal after each change of the state.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) server: Server,
    state: Mutex<State>,
    spaced: Spaced,
    tick: watch::Sender<()>,
}

/// Claims by UID whose stored parameters have space between their parts, see [`super::Allocated::with_spaced_parameters`].
type Spaced = Arc<Mutex<BTreeSet<String>>>;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // A test that failed while it looked has reported why.
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

impl Shared {
    pub(super) async fn new() -> Self {
        let spaced = Spaced::default();
        let checked = Arc::clone(&spaced);
        let check: Check =
            Arc::new(move |route, write| changes_spaces(&locked(&checked), route, write));
        let options = Options {
            controllers: false,
            taint_rules: true,
            history_bytes_max: usize::MAX,
            check: Some(check),
            parameters: None,
        };
        let server = Server::open(options, Arc::new(Memory), Loaded::default()).await;
        let server = server.expect("a server without objects opens");
        let state = Mutex::new(State::new(server.snapshot()));
        Self {
            server,
            state,
            spaced,
            tick: watch::Sender::new(()),
        }
    }

    /// Locks the state after updating its copy of the objects.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = locked(&self.state);
        state.objects = self.server.snapshot();
        state.watches = self.server.watches();
        state
    }

    pub(super) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let done = change(&mut self.lock());
        self.tick.send_replace(());
        done
    }

    /// Takes a claim for one that was made with space in its parameters.
    pub(super) fn space(&self, uid: &str) {
        locked(&self.spaced).insert(uid.to_owned());
    }

    /// Returns receivers for changes of the state and of the objects.
    pub(super) fn ticks(&self) -> [watch::Receiver<()>; 2] {
        [self.tick.subscribe(), self.server.ticks()]
    }
}

/// A status of a claim with spaced parameters, which looks like a change of its allocation.
fn changes_spaces(spaced: &BTreeSet<String>, route: &Route, write: ObjectWrite<'_>) -> Vec<Cause> {
    let ObjectWrite::Updated { new, old } = write else {
        return Vec::new();
    };
    if route.subresource != "status" {
        return Vec::new();
    }
    let is_changed = spaced.contains(old["metadata"]["uid"].as_str().unwrap_or_default())
        && !old["status"]["allocation"].is_null()
        && new["status"]["allocation"]["devices"]["config"]
            .as_array()
            .is_some_and(|config| !config.is_empty());
    if is_changed {
        vec![immutable_allocation()]
    } else {
        Vec::new()
    }
}
