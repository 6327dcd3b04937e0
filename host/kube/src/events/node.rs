//! Events about the node: when a condition is set, and when it is cleared.

use std::collections::BTreeMap;

use kube::runtime::events::{Event, EventType};

use super::{Events, camel_case, named, warning};
use nodedock_base::changes::Changes;
use nodedock_base::conditions::{Condition, Conditions};
use nodedock_base::tasks::Tasks;
use nodedock_model::{ChangedKind, ProblemCode};

/// Messages of conditions by code and subject.
type Messages = BTreeMap<(String, String), String>;

/// Publishes the node's conditions, which change on `changes`.
pub fn publish_conditions(
    tasks: &Tasks,
    events: Events,
    conditions: Conditions,
    changes: &Changes,
) {
    let mut changes = changes.signal_of(ChangedKind::Node);
    tasks.spawn_until_stopped("node-events", async move {
        let mut known = Messages::new();
        loop {
            let now = messages(conditions.list());
            for (subject, type_, reason, note) in differences(&known, &now) {
                // The recorder tells conditions of one reason apart by the related object.
                let event = Event {
                    type_,
                    ..warning(&reason, "Check", note, Some(named(subject)))
                };
                events.publish(events.node(), event);
            }
            known = now;
            if changes.changed().await.is_err() {
                return;
            }
        }
    });
}

/// Returns whether a condition belongs on the Node object: its drivers or its records do not work. `nodedock get node` shows the others.
fn is_published(code: &str) -> bool {
    code == ProblemCode::DriverQuarantined.as_str() || code.starts_with("checkpoint-")
}

fn messages(conditions: Vec<Condition>) -> Messages {
    let published = conditions
        .into_iter()
        .filter(|condition| is_published(&condition.problem.code));
    published
        .map(|known| ((known.problem.code, known.subject), known.problem.message))
        .collect()
}

/// Returns subject, type, reason and note of the events between two states.
fn differences(known: &Messages, now: &Messages) -> Vec<(String, EventType, String, String)> {
    let set = now.iter().filter(|(key, _)| !known.contains_key(*key)).map(
        |((code, subject), message)| {
            // Most messages name their subject.
            let note = match message.contains(subject.as_str()) {
                true => message.clone(),
                false => format!("{subject}: {message}"),
            };
            (subject.clone(), EventType::Warning, camel_case(code), note)
        },
    );
    let cleared = known.iter().filter(|(key, _)| !now.contains_key(*key));
    let cleared = cleared.map(|((code, subject), message)| {
        let note = format!("{subject}: no more: {message}");
        (
            subject.clone(),
            EventType::Normal,
            camel_case(code) + "Over",
            note,
        )
    });
    set.chain(cleared).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::Problem;

    #[test]
    fn condition_events_mark_set_and_clear() {
        let conditions = Conditions::default();
        conditions.set(
            "gpu.example.com",
            Problem::unavailable("driver-quarantined", "driver gpu.example.com fails"),
        );
        conditions.set(
            "/x",
            Problem::unavailable("checkpoint-disk-full", "no space"),
        );
        conditions.set("config", Problem::invalid("config-refused", "line 3"));
        let first = messages(conditions.list());
        let events = differences(&Messages::new(), &first);
        let brief: Vec<_> = events
            .iter()
            .map(|(_, type_, reason, note)| (*type_, reason.as_str(), note.as_str()))
            .collect();
        let expected = [
            (EventType::Warning, "CheckpointDiskFull", "/x: no space"),
            (
                EventType::Warning,
                "DriverQuarantined",
                "driver gpu.example.com fails",
            ),
        ];
        assert_eq!(brief, expected);
        assert_eq!(differences(&first, &first), []);
        conditions.clear(ProblemCode::DriverQuarantined, "gpu.example.com");
        let cleared = differences(&first, &messages(conditions.list()));
        assert_eq!(
            (cleared.len(), cleared[0].1, cleared[0].2.as_str()),
            (1, EventType::Normal, "DriverQuarantinedOver")
        );
    }
}
