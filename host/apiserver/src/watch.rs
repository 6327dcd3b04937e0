//! A watch: changes from a resource version on, as lines of JSON.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, stream};
use serde_json::{Value, json};
use tokio::sync::watch::Receiver;
use tokio::time::Instant;

use crate::convert::from_storage;
use crate::reads::{asked_version, unknown_match};
use crate::route::Route;
use crate::selector::Selector;
use crate::shape::Shape;
use crate::state::{Entry, News, ObjectStore};
use crate::status::{self, Cause, Refusal};

const BOOKMARK_EVERY: Duration = Duration::from_secs(60);
/// Duration of a watch that requested none.
const TIME: Duration = Duration::from_secs(1800);
/// Maximum duration of a watch.
const TIME_MAX: Duration = Duration::from_secs(24 * 3600);
/// The bookmark after the initial events has this annotation, for clients that stream a list.
const INITIAL_EVENTS_END: &str = "k8s.io/initial-events-end";

/// An open watch. It is closed when this is dropped.
#[derive(Debug)]
pub(crate) struct Watching {
    shared: Arc<ObjectStore>,
    ticks: Receiver<()>,
    route: Route,
    shape: Shape,
    selector: Selector,
    number: u64,
    epoch: u64,
    bookmarks: u64,
    next_bookmark: Instant,
    end: Instant,
    /// Changes until this resource version are sent.
    sent: u64,
    /// The last resource version that the client knows.
    revision: u64,
    lines: VecDeque<Bytes>,
    over: bool,
}

impl Watching {
    pub(crate) fn open(
        shared: &Arc<ObjectStore>,
        route: Route,
        shape: Shape,
    ) -> Result<Self, Refusal> {
        let ticks = shared.ticks();
        let selector = Selector::of(&route)?;
        watch_options(&route)?;
        let from = asked_version(&route)?;
        let seconds = route
            .asked("timeoutSeconds")
            .parse()
            .ok()
            .filter(|seconds| *seconds > 0);
        let now = Instant::now();
        let mut watching = shared.change(|state| {
            state.last_watch += 1;
            state
                .watches
                .insert(state.last_watch, route.resource.plural);
            Self {
                shared: Arc::clone(shared),
                ticks,
                selector,
                number: state.last_watch,
                epoch: state.watch_epoch,
                bookmarks: state.bookmarks,
                next_bookmark: now + BOOKMARK_EVERY,
                end: now + seconds.map_or(TIME, Duration::from_secs).min(TIME_MAX),
                sent: state.now.revision,
                revision: state.now.revision,
                lines: VecDeque::new(),
                over: false,
                route,
                shape,
            }
        });
        watching.begin(from);
        Ok(watching)
    }

    /// Begins the watch: sends all objects first, or continues from a version, or fails if that version is forgotten or ahead of the
    /// server.
    fn begin(&mut self, from: Option<u64>) {
        let shared = Arc::clone(&self.shared);
        let (now, forgotten) = {
            let state = shared.lock();
            (state.now.clone(), state.forgotten)
        };
        // `false` is a watch as without the parameter; but from no version, it sends no objects either.
        let initial = self
            .route
            .query
            .get("sendInitialEvents")
            .map(String::as_str);
        let streams_list = matches!(initial, Some("true" | "1"));
        match from {
            // Of a server that had other objects: its client lists again, where it would wait for versions that it knows already.
            Some(from) if from > now.revision => {
                self.fail(&status::expired_ahead(from, now.revision))
            }
            Some(from) if from < forgotten && !streams_list => {
                self.fail(&status::expired(from, forgotten))
            }
            Some(from) if !streams_list => {
                self.sent = from;
                self.revision = from;
            }
            None if initial.is_some() && !streams_list => {
                self.sent = now.revision;
                self.revision = now.revision;
            }
            _ => {
                self.sent = now.revision;
                self.revision = now.revision;
                for (_, object) in now.objects(self.route.resource) {
                    if self.selector.matches(object) {
                        self.report("ADDED", object.as_ref().clone());
                    }
                }
                if streams_list && self.route.flag("allowWatchBookmarks") {
                    self.bookmark(json!({ INITIAL_EVENTS_END: "true" }));
                }
            }
        }
    }

    /// Ends the watch with an error in its place in the stream, as a server does that has sent its 200.
    fn fail(&mut self, refusal: &Refusal) {
        self.lines.clear();
        self.line("ERROR", &refusal.status);
        self.over = true;
    }

    fn line(&mut self, kind: &str, object: &Value) {
        self.lines.push_back(Bytes::from(format!(
            "{}\n",
            json!({ "type": kind, "object": object })
        )));
    }

    fn report(&mut self, kind: &str, object: Value) {
        let object = self
            .shape
            .of_object(&self.route, from_storage(&self.route, object));
        self.line(kind, &object);
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
            "resourceclaims" => {
                json!({ "spec": { "devices": { "requests": null } }, "status": {} })
            }
            _ => json!({}),
        };
        if let (Some(object), Value::Object(empty)) = (object.as_object_mut(), empty) {
            object.extend(empty);
        }
        let object = self.shape.of_bookmark(&self.route, object);
        self.line("BOOKMARK", &object);
    }

    /// A change, as this watch sees it through its selector.
    fn change(&mut self, change: &Entry) {
        let before = change
            .before
            .as_deref()
            .filter(|before| self.selector.matches(before));
        match (
            before,
            !change.is_deletion && self.selector.matches(&change.object),
        ) {
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
    fn look(&mut self, news: News) {
        if self.epoch != news.watch_epoch {
            self.over = true;
            return;
        }
        if self.sent < news.trimmed {
            // Its client is too slow for what is kept.
            self.fail(&status::expired(self.sent, news.trimmed));
            return;
        }
        news.changes.iter().for_each(|change| self.change(change));
        self.sent = self.sent.max(news.revision);
        self.revision = self.revision.max(news.revision);
        let wanted = self.bookmarks != news.bookmarks || Instant::now() >= self.next_bookmark;
        if wanted {
            self.bookmarks = news.bookmarks;
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
            let news = self
                .shared
                .lock()
                .since(self.sent, self.route.resource.plural);
            self.look(news);
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
    pub(crate) fn lines(self) -> impl Stream<Item = Bytes> + Send {
        stream::unfold(self, |mut watching| async {
            let line = watching.next_line().await?;
            Some((line, watching))
        })
    }
}

/// Checks that the options of a watch can be combined.
fn watch_options(route: &Route) -> Result<(), Refusal> {
    const FIELD: &str = "resourceVersionMatch";
    let how = route.asked(FIELD);
    let streams = route.query.contains_key("sendInitialEvents");
    let mut causes = Vec::new();
    if streams && how != "NotOlderThan" {
        let why = "sendInitialEvents requires setting resourceVersionMatch to NotOlderThan";
        causes.push(Cause::forbidden(FIELD, why));
    }
    if !how.is_empty() {
        if !streams {
            let why =
                "resourceVersionMatch is forbidden for watch unless sendInitialEvents is provided";
            causes.push(Cause::forbidden(FIELD, why));
        }
        if how != "NotOlderThan" {
            causes.push(unknown_match(how, "\"NotOlderThan\""));
        }
    }
    if causes.is_empty() {
        Ok(())
    } else {
        Err(status::invalid_options(&causes))
    }
}

impl Drop for Watching {
    fn drop(&mut self) {
        let number = self.number;
        self.shared.change(|state| state.watches.remove(&number));
    }
}
