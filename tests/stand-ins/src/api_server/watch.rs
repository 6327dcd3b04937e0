//! A watch: changes from a resource version on, as lines of JSON.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, stream};
use serde_json::{Value, json};
use tokio::sync::watch::Receiver;
use tokio::time::Instant;

use super::convert::from_storage;
use super::route::Route;
use super::selector::Selector;
use super::state::{Change, Shared, State};
use super::status::{self, Refusal};

const BOOKMARK_EVERY: Duration = Duration::from_secs(60);
/// Of a watch that asked for no time.
const TIME: Duration = Duration::from_secs(1800);

/// An open watch. It is closed when this is dropped.
#[derive(Debug)]
pub(super) struct Watching {
    shared: Arc<Shared>,
    ticks: Receiver<()>,
    route: Route,
    selector: Selector,
    number: u64,
    epoch: u64,
    bookmarks: u64,
    next_bookmark: Instant,
    end: Instant,
    /// Changes before this one in the log are sent.
    next: usize,
    /// The last resource version that the client knows.
    revision: u64,
    lines: VecDeque<Bytes>,
    over: bool,
}

impl Watching {
    pub(super) fn open(shared: &Arc<Shared>, route: Route) -> Result<Self, Refusal> {
        let ticks = shared.ticks();
        let selector = Selector::of(&route)?;
        let from = match route.asked("resourceVersion") {
            "" | "0" => None,
            asked => Some(asked.parse::<u64>().map_err(|_| {
                status::bad_request(format!("resourceVersion: Invalid value: {asked:?}: must be a number"))
            })?),
        };
        let seconds = route.asked("timeoutSeconds").parse().ok().filter(|seconds| *seconds > 0);
        let now = Instant::now();
        let mut watching = shared.change(|state| {
            state.last_watch += 1;
            state.watches.insert(state.last_watch, route.resource.plural);
            Self {
                shared: Arc::clone(shared),
                ticks,
                selector,
                number: state.last_watch,
                epoch: state.watch_epoch,
                bookmarks: state.bookmarks,
                next_bookmark: now + BOOKMARK_EVERY,
                end: now + seconds.map_or(TIME, Duration::from_secs),
                next: state.log.len(),
                revision: state.revision,
                lines: VecDeque::new(),
                over: false,
                route,
            }
        });
        watching.begin(from);
        Ok(watching)
    }

    /// What is sent first: everything there is, or the changes since then, or that they are forgotten.
    fn begin(&mut self, from: Option<u64>) {
        let shared = Arc::clone(&self.shared);
        let state = shared.lock();
        let initial = self.route.flag("sendInitialEvents");
        match from {
            Some(from) if from < state.compacted && !initial => {
                let refusal = status::expired(from, state.compacted);
                self.fail(&refusal);
            }
            Some(from) if !initial => {
                self.next = state.log.partition_point(|change| change.revision <= from);
                self.revision = from.max(state.compacted);
            }
            _ => {
                self.next = state.log.len();
                self.revision = state.revision;
                let found: Vec<Arc<Value>> = state
                    .entries(self.route.resource.plural)
                    .filter(|(_, object)| self.selector.matches(object))
                    .map(|(_, object)| Arc::clone(object))
                    .collect();
                for object in found {
                    self.report("ADDED", object.as_ref().clone());
                }
                if initial && self.route.flag("allowWatchBookmarks") {
                    self.bookmark(json!({ "k8s.io/initial-events-end": "true" }));
                }
            }
        }
    }

    /// Ends the watch with an error in its place in the stream, as a server does that has sent its 200.
    pub(super) fn fail(&mut self, refusal: &Refusal) {
        self.lines.clear();
        self.line("ERROR", refusal.status.clone());
        self.over = true;
    }

    fn line(&mut self, kind: &str, object: Value) {
        self.lines.push_back(Bytes::from(format!("{}\n", json!({ "type": kind, "object": object }))));
    }

    fn report(&mut self, kind: &str, object: Value) {
        self.line(kind, from_storage(&self.route, object));
    }

    fn bookmark(&mut self, annotations: Value) {
        let mut object = json!({
            "kind": self.route.resource.kind, "apiVersion": self.route.api_version(),
            "metadata": { "resourceVersion": self.revision.to_string() },
        });
        if !annotations.is_null() {
            object["metadata"]["annotations"] = annotations;
        }
        let empty = match self.route.resource.plural {
            "resourceclaims" => json!({ "spec": { "devices": { "requests": null } }, "status": {} }),
            _ => json!({}),
        };
        if let (Some(object), Value::Object(empty)) = (object.as_object_mut(), empty) {
            object.extend(empty);
        }
        self.line("BOOKMARK", object);
    }

    /// A change, as this watch sees it through its selector.
    fn change(&mut self, change: &Change) {
        if change.resource != self.route.resource.plural {
            return;
        }
        let before = change.before.as_deref().filter(|before| self.selector.matches(before));
        match (before, !change.is_deletion && self.selector.matches(&change.object)) {
            (None, true) => self.report("ADDED", change.object.as_ref().clone()),
            (Some(_), true) => self.report("MODIFIED", change.object.as_ref().clone()),
            (Some(before), false) => {
                // As it was when it was last seen, with the version of the change.
                let mut last = before.clone();
                last["metadata"]["resourceVersion"] = change.revision.to_string().into();
                self.report("DELETED", last);
            }
            (None, false) => {}
        }
    }

    /// Takes what has happened since it looked last.
    fn look(&mut self, state: &State) {
        if self.epoch != state.watch_epoch {
            self.over = true;
            return;
        }
        while let Some(change) = state.log.get(self.next) {
            self.next += 1;
            self.change(change);
        }
        self.revision = self.revision.max(state.revision);
        let wanted = self.bookmarks != state.bookmarks || Instant::now() >= self.next_bookmark;
        if wanted {
            self.bookmarks = state.bookmarks;
            self.next_bookmark = Instant::now() + BOOKMARK_EVERY;
            if self.route.flag("allowWatchBookmarks") {
                self.bookmark(Value::Null);
            }
        }
    }

    async fn next_line(&mut self) -> Option<Bytes> {
        loop {
            if let Some(line) = self.lines.pop_front() {
                return Some(line);
            }
            if self.over || Instant::now() >= self.end {
                return None;
            }
            self.ticks.mark_unchanged();
            let shared = Arc::clone(&self.shared);
            self.look(&shared.lock());
            if self.over || !self.lines.is_empty() {
                continue;
            }
            let until = self.next_bookmark.min(self.end);
            tokio::select! {
                _ = self.ticks.changed() => {}
                () = tokio::time::sleep_until(until) => {}
            }
        }
    }

    /// The body of the answer.
    pub(super) fn lines(self) -> impl Stream<Item = Bytes> + Send {
        stream::unfold(self, |mut watching| async {
            let line = watching.next_line().await?;
            Some((line, watching))
        })
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let number = self.number;
        self.shared.change(|state| state.watches.remove(&number));
    }
}
