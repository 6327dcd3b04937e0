//! Locks by key, such as a claim: one operation at a time for each key, and no waiting between keys.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;

use crate::woken;

type Entries<K> = HashMap<K, Arc<tokio::sync::Mutex<()>>>;

#[derive(Clone)]
pub struct Locks<K>(Arc<Mutex<Entries<K>>>);

impl<K> Default for Locks<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// The guard of a key; dropping it releases the key.
pub struct LockGuard<K: Eq + Hash> {
    locks: Locks<K>,
    key: K,
    guard: Option<OwnedMutexGuard<()>>,
}

impl<K: Clone + Ord + Hash> Locks<K> {
    /// Locks the keys in ascending order, so that two requests cannot deadlock.
    pub async fn take(&self, keys: impl IntoIterator<Item = K>) -> Vec<LockGuard<K>> {
        let mut keys: Vec<_> = keys.into_iter().collect();
        keys.sort();
        keys.dedup();
        let mut held = Vec::with_capacity(keys.len());
        for key in keys {
            let entry = self.0.lock().entry(key.clone()).or_default().clone();
            // A cancelled waiter also removes the entry of a key without owner.
            let mut next = LockGuard {
                locks: self.clone(),
                key,
                guard: None,
            };
            next.guard = Some(entry.lock_owned().await);
            held.push(next);
        }
        held
    }

    /// Returns the keys that are locked, or waited for.
    pub fn keys(&self) -> Vec<K> {
        self.0.lock().keys().cloned().collect()
    }

    /// Returns the guard of a key, unless the key is locked.
    pub fn try_take(&self, key: &K) -> Option<LockGuard<K>> {
        let mut entries = self.0.lock();
        let guard = entries
            .entry(key.clone())
            .or_default()
            .clone()
            .try_lock_owned()
            .ok()?;
        Some(LockGuard {
            locks: self.clone(),
            key: key.clone(),
            guard: Some(guard),
        })
    }
}

impl<K: Eq + Hash> Drop for LockGuard<K> {
    fn drop(&mut self) {
        let mut entries = self.locks.0.lock();
        self.guard = None;
        // Only the map has a reference, so there is no owner and no waiter.
        if entries
            .get(&self.key)
            .is_some_and(|entry| Arc::strong_count(entry) == 1)
        {
            entries.remove(&self.key);
        } else {
            woken::note();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn keys_are_locked_independently() {
        let locks = Locks::default();
        let first = locks.take(["a", "b", "a"]).await;
        assert_eq!(first.len(), 2);
        let waiting = tokio::spawn({
            let locks = locks.clone();
            async move { locks.take(["b"]).await.len() }
        });
        assert_eq!(locks.take(["c"]).await.len(), 1);
        assert!(!waiting.is_finished());
        let mut keys = locks.keys();
        keys.sort_unstable();
        assert_eq!(keys, ["a", "b"]);
        assert!(locks.try_take(&"b").is_none() && locks.try_take(&"d").is_some());
        drop(first);
        assert_eq!(waiting.await.unwrap(), 1);
        assert!(locks.0.lock().is_empty());
    }

    #[tokio::test]
    async fn cancelled_wait_leaves_no_lock() {
        let locks = Locks::default();
        let held = locks.take(["a"]).await;
        let mut waiting = Box::pin(locks.take(["a"]));
        assert!(futures::poll!(&mut waiting).is_pending());
        drop(held);
        drop(waiting);
        assert!(locks.0.lock().is_empty());
    }
}
