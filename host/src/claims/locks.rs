//! One operation at a time for each claim; different claims do not wait for each other.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::OwnedMutexGuard;

use crate::model::Uid;

type Entries = HashMap<Uid, Arc<tokio::sync::Mutex<()>>>;

#[derive(Clone, Default)]
pub(super) struct Locks(Arc<Mutex<Entries>>);

/// The right to work on one claim; given back when it is dropped.
pub(super) struct Held {
    locks: Locks,
    uid: Uid,
    guard: Option<OwnedMutexGuard<()>>,
}

impl Locks {
    /// Takes the claims in ascending order of their UIDs, which is what keeps two requests from waiting for each other.
    pub(super) async fn take(&self, uids: impl IntoIterator<Item = Uid>) -> Vec<Held> {
        let mut uids: Vec<_> = uids.into_iter().collect();
        uids.sort();
        uids.dedup();
        let mut held = Vec::with_capacity(uids.len());
        for uid in uids {
            let entry = self.entries().entry(uid.clone()).or_default().clone();
            let guard = entry.lock_owned().await;
            held.push(Held { locks: self.clone(), uid, guard: Some(guard) });
        }
        held
    }

    /// The claim, unless somebody has it.
    pub(super) fn try_take(&self, uid: &Uid) -> Option<Held> {
        let mut entries = self.entries();
        let guard = entries.entry(uid.clone()).or_default().clone().try_lock_owned().ok()?;
        Some(Held { locks: self.clone(), uid: uid.clone(), guard: Some(guard) })
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut entries = self.locks.entries();
        self.guard = None;
        // Nobody waits for it: only the map itself has it.
        if entries.get(&self.uid).is_some_and(|entry| Arc::strong_count(entry) == 1) {
            entries.remove(&self.uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uid(text: &str) -> Uid {
        Uid::new(text).unwrap()
    }

    #[tokio::test]
    async fn a_claim_is_worked_on_by_one_at_a_time_and_others_go_on() {
        let locks = Locks::default();
        let first = locks.take([uid("a"), uid("b"), uid("a")]).await;
        assert_eq!(first.len(), 2);
        let waiting = tokio::spawn({
            let locks = locks.clone();
            async move { locks.take([uid("b")]).await.len() }
        });
        assert_eq!(locks.take([uid("c")]).await.len(), 1);
        assert!(!waiting.is_finished());
        assert!(locks.try_take(&uid("b")).is_none() && locks.try_take(&uid("d")).is_some());
        drop(first);
        assert_eq!(waiting.await.unwrap(), 1);
        assert!(locks.entries().is_empty());
    }
}
