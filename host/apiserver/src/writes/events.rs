//! The end of events, which are deleted after a time without a request.

use jiff::{SignedDuration, Timestamp};

use crate::resources::Resource;
use crate::state::Draft;
use crate::storage::ObjectKey;

use super::metadata::written;

/// Time for which an event is kept: the default of an API server's `--event-ttl`.
const TTL: SignedDuration = SignedDuration::from_hours(1);
/// Events that one write deletes: so many at most are in one commit.
const EXPIRED_MAX: usize = 100;

/// Deletes events that are older than [`TTL`], at most [`EXPIRED_MAX`] of them.
pub(super) fn expire(draft: &mut Draft, events: &'static Resource) {
    let Ok(oldest) = Timestamp::now().checked_sub(TTL).map(written) else {
        return;
    };
    let expired = draft.snapshot().objects(events).filter(|(_, event)| {
        event["metadata"]["creationTimestamp"]
            .as_str()
            .is_some_and(|made| made < oldest.as_str())
    });
    let expired: Vec<ObjectKey> = expired
        .map(|(key, _)| key.clone())
        .take(EXPIRED_MAX)
        .collect();
    for key in &expired {
        draft.remove(key);
    }
}
