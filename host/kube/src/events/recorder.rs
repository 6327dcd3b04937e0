//! Writes Events of `events.k8s.io/v1`.
//!
//! Given an event and its object, it creates an Event, or counts it in the series of the one that is there. The API group lets no client change
//! the note of an Event; the core group does, for which the daemon has the right at the local API alone.
//! Names and texts are as long as an API server accepts, whatever the names of objects and nodes are.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Event as CoreObject, ObjectReference};
use k8s_openapi::api::events::v1::{Event as Object, EventSeries};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Api;
use kube::api::{ObjectMeta, Patch, PatchParams, PostParams};
use kube::runtime::events::{Event, EventType};
use serde_json::json;

use super::namespace;
use nodedock_base::printable::cut;
use nodedock_model::ObjectName;
use nodedock_model::limit::SUBDOMAIN_BYTES_MAX;

const CONTROLLER: &str = "nodedock";
/// Length of the field `reportingInstance`.
const INSTANCE_BYTES_MAX: usize = 128;
/// Time for which a series is known after its last event, as in client-go.
const SERIES_TTL: SignedDuration = SignedDuration::from_mins(6);

/// Reference to an object, without what an event of it does not tell apart.
type Identity = [Option<String>; 4];

/// What events of one series have in common: whether it is a warning, action, reason, object and related object.
type Key = (bool, String, String, Identity, Option<Identity>);

/// The last write of an Event.
struct Written {
    name: String,
    count: i32,
    at: Timestamp,
}

/// Writes Events, and knows the series of the last minutes.
pub(crate) struct Recorder {
    writer: EventWriter,
    written: BTreeMap<Key, Written>,
}

impl Recorder {
    pub(crate) fn new(writer: EventWriter) -> Self {
        let written = BTreeMap::new();
        Self { writer, written }
    }

    /// Writes an event, in the series of its kind if there is one.
    ///
    /// # Errors
    ///
    /// The API server does not store it. After `NotFound` the series is gone, and a new recorder begins another.
    pub(crate) async fn publish(
        &mut self,
        event: &Event,
        regarding: &ObjectReference,
    ) -> Result<(), kube::Error> {
        let now = Timestamp::now();
        self.written
            .retain(|_, written| now.duration_since(written.at) < SERIES_TTL);
        let key = key(event, regarding);
        let (name, count) = match self.written.get(&key) {
            None => (self.writer.create(event, regarding, 1).await?, 1),
            Some(Written { name, count, .. }) => {
                let count = count.saturating_add(1);
                self.writer.count(regarding, name, count).await?;
                (name.clone(), count)
            }
        };
        let at = now;
        self.written.insert(key, Written { name, count, at });
        Ok(())
    }
}

fn key(event: &Event, regarding: &ObjectReference) -> Key {
    (
        matches!(event.type_, EventType::Warning),
        event.action.clone(),
        event.reason.clone(),
        identity(regarding),
        event.secondary.as_ref().map(identity),
    )
}

fn identity(of: &ObjectReference) -> Identity {
    [&of.kind, &of.namespace, &of.name, &of.uid].map(Clone::clone)
}

/// Creates and updates Events in the name of this node's daemon.
#[derive(Clone)]
pub(crate) struct EventWriter {
    client: kube::Client,
    instance: String,
}

impl EventWriter {
    pub(crate) fn new(client: kube::Client, node: &ObjectName) -> Self {
        let instance = node.within(INSTANCE_BYTES_MAX).to_string();
        Self { client, instance }
    }

    /// Creates an Event that was seen `count` times, and returns its name.
    ///
    /// # Errors
    ///
    /// The API server does not store it.
    pub(crate) async fn create(
        &self,
        event: &Event,
        regarding: &ObjectReference,
        count: i32,
    ) -> Result<String, kube::Error> {
        let now = Timestamp::now();
        let object = self.object(event, regarding, series(count, now), now);
        let name = object.metadata.name.clone().unwrap_or_default();
        let api = Api::<Object>::namespaced(self.client.clone(), namespace(regarding));
        api.create(&PostParams::default(), &object).await?;
        Ok(name)
    }

    /// Writes how often the Event of this name was seen.
    ///
    /// # Errors
    ///
    /// The API server does not store it.
    async fn count(
        &self,
        regarding: &ObjectReference,
        name: &str,
        count: i32,
    ) -> Result<(), kube::Error> {
        let patch = Patch::Merge(json!({ "series": series(count, Timestamp::now()) }));
        let api = Api::<Object>::namespaced(self.client.clone(), namespace(regarding));
        api.patch(name, &PatchParams::default(), &patch)
            .await
            .map(drop)
    }

    /// Writes how often the Event of this name was seen, and its newest note, by the core group.
    ///
    /// # Errors
    ///
    /// The API server does not store it.
    pub(crate) async fn replace(
        &self,
        event: &Event,
        regarding: &ObjectReference,
        name: &str,
        count: i32,
    ) -> Result<(), kube::Error> {
        let series = series(count, Timestamp::now());
        let patch = Patch::Merge(json!({ "message": event.note, "series": series }));
        let api = Api::<CoreObject>::namespaced(self.client.clone(), namespace(regarding));
        api.patch(name, &PatchParams::default(), &patch)
            .await
            .map(drop)
    }

    fn object(
        &self,
        event: &Event,
        regarding: &ObjectReference,
        series: Option<EventSeries>,
        now: Timestamp,
    ) -> Object {
        let kind = match event.type_ {
            EventType::Normal => "Normal",
            EventType::Warning => "Warning",
        };
        Object {
            metadata: ObjectMeta {
                namespace: Some(namespace(regarding).to_owned()),
                name: Some(event_name(regarding.name.as_deref(), now)),
                ..ObjectMeta::default()
            },
            action: Some(event.action.clone()),
            reason: Some(event.reason.clone()),
            note: event.note.clone(),
            event_time: Some(MicroTime(now)),
            regarding: Some(regarding.clone()),
            related: event.secondary.clone(),
            reporting_controller: Some(CONTROLLER.to_owned()),
            reporting_instance: Some(self.instance.clone()),
            series,
            type_: Some(kind.to_owned()),
            ..Object::default()
        }
    }
}

/// None: it was seen once.
fn series(count: i32, now: Timestamp) -> Option<EventSeries> {
    (count > 1).then_some(EventSeries {
        count,
        last_observed_time: MicroTime(now),
    })
}

/// The name of the object and a number, as kubectl and client-go name Events; of a long name its begin.
fn event_name(object: Option<&str>, now: Timestamp) -> String {
    let number = format!(".{:x}", now.as_nanosecond());
    let begin = cut(
        object.unwrap_or(CONTROLLER),
        SUBDOMAIN_BYTES_MAX - number.len(),
    );
    begin.trim_end_matches(['-', '.']).to_owned() + &number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_of_longest_name_has_one() {
        let name = event_name(Some("node-1"), Timestamp::UNIX_EPOCH);
        assert_eq!(name, "node-1.0");
        let now = Timestamp::now();
        for object in ["n".repeat(253), "n".repeat(235) + ".-n"] {
            let name = event_name(Some(&object), now);
            assert!(ObjectName::new(&name).is_ok(), "{name}");
            assert!(name.starts_with("nnn"), "{name}");
        }
        assert!(event_name(None, now).starts_with("nodedock."));
    }
}
