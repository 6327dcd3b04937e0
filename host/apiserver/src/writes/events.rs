//! The end of events, which are deleted after a time without a request.

use jiff::{SignedDuration, Timestamp};
use serde_json::Value;

use crate::resources::Resource;
use crate::state::Draft;
use crate::storage::ObjectKey;

use super::metadata::written;

/// Time for which an event is kept: the default of an API server's `--event-ttl`.
const TTL: SignedDuration = SignedDuration::from_hours(1);
/// Events that one write deletes: so many at most are in one commit.
const EXPIRED_MAX: usize = 100;

/// Deletes events that were last written longer than [`TTL`] ago, at most [`EXPIRED_MAX`] of them.
pub(super) fn expire(draft: &mut Draft, events: &'static Resource) {
    let Ok(oldest) = Timestamp::now().checked_sub(TTL).map(written) else {
        return;
    };
    let expired = draft
        .snapshot()
        .objects(events)
        .filter(|(_, event)| last_written(event).is_some_and(|written| written < oldest.as_str()));
    let expired: Vec<ObjectKey> = expired
        .map(|(key, _)| key.clone())
        .take(EXPIRED_MAX)
        .collect();
    for key in &expired {
        draft.remove(key);
    }
}

/// Each write of an event says when it was last seen, and an API server keeps it so long from then.
fn last_written(event: &Value) -> Option<&str> {
    let times = [
        &event["metadata"]["creationTimestamp"],
        &event["lastTimestamp"],
        &event["series"]["lastObservedTime"],
    ];
    times.into_iter().filter_map(Value::as_str).max()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn repeated_event_outlives_its_creation() {
        let made = json!({ "metadata": { "creationTimestamp": "2026-01-01T00:00:00Z" }, "lastTimestamp": null });
        assert_eq!(last_written(&made), Some("2026-01-01T00:00:00Z"));
        let mut series = made.clone();
        series["series"] = json!({ "count": 2, "lastObservedTime": "2026-01-01T01:00:00.000000Z" });
        assert_eq!(last_written(&series), Some("2026-01-01T01:00:00.000000Z"));
        let mut counted = made;
        counted["lastTimestamp"] = json!("2026-01-01T00:30:00Z");
        assert_eq!(last_written(&counted), Some("2026-01-01T00:30:00Z"));
        assert_eq!(last_written(&json!({})), None);
    }
}
