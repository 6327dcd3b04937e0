//! The cache of claims: the last state of each, which of them are watched, and which leaves first. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering::Relaxed;

use tokio::time::Instant;

use super::{CLAIM_FOLLOW_AFTER, ClaimWatch, KNOWN_CLAIMS_MAX};
use nodedock_model::{Claim, ObjectName, Uid};

/// Concurrently watched claims: each is a stream of the connection, and thousands of nodes share the API server.
pub(crate) const FOLLOWED_CLAIMS_MAX: usize = 32;

/// Namespace and name.
pub(super) type Key = (ObjectName, ObjectName);

/// The state of a claim, by a get or a watch.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CachedClaim {
    pub(super) claim: Claim,
    /// The resource version, where it is a number: the higher is the newer.
    pub(super) version: Option<u64>,
}

/// Claims that are allocated, to this node as far as they say.
#[derive(Default)]
pub(super) struct ClaimCache {
    entries: BTreeMap<Key, Entry>,
    /// Claims that this node has prepared, cached or not.
    held: BTreeSet<Uid>,
    updates: u64,
}

struct Entry {
    state: CachedClaim,
    /// The number of the update that brought it.
    update: u64,
    read_at: Instant,
    /// Time since which this node has it prepared.
    held_since: Option<Instant>,
    /// It was answered without the server since it was read.
    recalled: bool,
    /// A scheduler waits for it, and then a kubelet requests it.
    expected: bool,
    /// Its newest state cannot be read: it has to be got again.
    invalid: bool,
    watch: Option<ClaimWatch>,
}

impl ClaimCache {
    /// The last state of the claim, if it has that UID, and whether it is watched.
    pub(super) fn last(&self, key: &Key, uid: &Uid) -> Option<(Claim, bool)> {
        let entry = self
            .entries
            .get(key)
            .filter(|entry| entry.state.claim.id.uid == *uid)?;
        let is_watched = entry
            .watch
            .as_ref()
            .is_some_and(|watch| watch.live.load(Relaxed));
        (!entry.invalid).then(|| (entry.state.claim.clone(), is_watched))
    }

    /// The last state of the claim, if it has that UID, to be used although the server does not confirm it.
    pub(super) fn recall(&mut self, key: &Key, uid: &Uid) -> Option<Claim> {
        let (claim, _) = self.last(key, uid)?;
        self.entries.get_mut(key)?.recalled = true;
        Some(claim)
    }

    /// Returns the number of updates so far, for `updated_after`.
    pub(super) fn updates(&self) -> u64 {
        self.updates
    }

    /// The claim, if it has that UID and a later update brought it.
    pub(super) fn updated_after(&self, update: u64, key: &Key, uid: &Uid) -> Option<Claim> {
        let entry = self
            .entries
            .get(key)
            .filter(|entry| !entry.invalid && entry.update > update)?;
        let claim = &entry.state.claim;
        (claim.id.uid == *uid).then(|| claim.clone())
    }

    /// Takes a state. Returns whether the claim that was cached is lost by it.
    pub(super) fn update(
        &mut self,
        key: &Key,
        state: CachedClaim,
        node_name: &str,
        now: Instant,
    ) -> bool {
        self.updates += 1;
        let Some(entry) = self.entries.get_mut(key) else {
            self.add(key, state, node_name, now);
            return false;
        };
        if entry
            .state
            .version
            .zip(state.version)
            .is_some_and(|(old, new)| new < old)
        {
            // A get that the watch overtook, or a late event of the claim that had the name before.
            return false;
        }
        if !is_allocated_to(&state.claim, node_name) {
            return self.remove(key);
        }
        let same = entry.state.claim.id.uid == state.claim.id.uid;
        let is_held = self.held.contains(&state.claim.id.uid);
        let held_since = entry.held_since.filter(|_| same).or(is_held.then_some(now));
        let watch = entry.watch.take();
        *entry = Entry {
            held_since,
            expected: entry.expected && same,
            watch,
            ..Entry::new(state, self.updates, now)
        };
        !same
    }

    fn add(&mut self, key: &Key, state: CachedClaim, node_name: &str, now: Instant) {
        let is_full = self.entries.len() >= KNOWN_CLAIMS_MAX;
        if !is_allocated_to(&state.claim, node_name) || (is_full && !self.evict()) {
            return;
        }
        let is_held = self.held.contains(&state.claim.id.uid);
        let entry = Entry {
            held_since: is_held.then_some(now),
            ..Entry::new(state, self.updates, now)
        };
        self.entries.insert(key.clone(), entry);
    }

    /// Removes the claim that is not held and was read the longest ago.
    fn evict(&mut self) -> bool {
        let idle = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.held_since.is_none());
        let first = idle
            .min_by_key(|(_, entry)| entry.read_at)
            .map(|(key, _)| key.clone());
        first.and_then(|key| self.entries.remove(&key)).is_some()
    }

    /// The claim does not exist. Returns whether it was cached.
    pub(super) fn remove(&mut self, key: &Key) -> bool {
        self.entries.remove(key).is_some()
    }

    /// The claim of that UID was deleted. One that has had its name since stays. Returns whether it was cached.
    pub(super) fn deleted(&mut self, key: &Key, uid: Option<&str>) -> bool {
        let cached = self
            .entries
            .get(key)
            .map(|entry| entry.state.claim.id.uid.as_str());
        uid.is_none_or(|uid| cached == Some(uid)) && self.remove(key)
    }

    /// The newest state of the claim cannot be read.
    pub(super) fn invalidate(&mut self, key: &Key) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.invalid = true;
        }
    }

    /// Takes which claims are held; no others are, if `is_all`. Those that were held and are not any more are forgotten.
    pub(super) fn hold(
        &mut self,
        is_all: bool,
        claims: impl IntoIterator<Item = (Uid, bool)>,
        now: Instant,
    ) {
        if is_all {
            self.held.clear();
        }
        for (uid, is_held) in claims {
            match is_held {
                true => self.held.insert(uid),
                false => self.held.remove(&uid),
            };
        }
        let held = &self.held;
        self.entries.retain(|_, entry| {
            let is_held = held.contains(&entry.state.claim.id.uid);
            let held_since = entry.held_since.take();
            entry.held_since = is_held.then(|| held_since.unwrap_or(now));
            is_held || held_since.is_none()
        });
    }

    /// A kubelet is about to request the claim.
    pub(super) fn expect_request(&mut self, key: &Key) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.expected = true;
        }
    }

    /// Forgets claims that are not held and were read some time ago: they may have been allocated again.
    pub(super) fn forget_idle(&mut self, now: Instant) {
        self.entries.retain(|_, entry| {
            entry.held_since.is_some()
                || now.saturating_duration_since(entry.read_at) < CLAIM_FOLLOW_AFTER
        });
    }

    /// A claim to be watched and the version that is known, if the bound allows one more: the one that was read last comes first.
    pub(super) fn to_watch(&self, now: Instant) -> Option<(Key, Option<u64>)> {
        if self.watched() >= FOLLOWED_CLAIMS_MAX {
            return None;
        }
        let due = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.watch.is_none() && entry.is_due(now));
        let first = due.max_by_key(|(_, entry)| (entry.recalled || entry.expected, entry.read_at));
        first.map(|(key, entry)| (key.clone(), entry.state.version))
    }

    pub(super) fn watched_by(&mut self, key: &Key, watch: ClaimWatch) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.watch = Some(watch);
        }
    }

    pub(super) fn watched(&self) -> usize {
        self.entries
            .values()
            .filter(|entry| entry.watch.is_some())
            .count()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

impl Entry {
    fn new(state: CachedClaim, update: u64, now: Instant) -> Self {
        Self {
            state,
            update,
            read_at: now,
            held_since: None,
            recalled: false,
            expected: false,
            invalid: false,
            watch: None,
        }
    }

    /// Returns whether the claim is to be watched: most claims are unprepared before a watch is worth its request.
    fn is_due(&self, now: Instant) -> bool {
        if self.expected {
            return true;
        }
        let held_for = self
            .held_since
            .map(|since| now.saturating_duration_since(since));
        held_for.is_some_and(|held_for| self.recalled || held_for >= CLAIM_FOLLOW_AFTER)
    }
}

fn is_allocated_to(claim: &Claim, node_name: &str) -> bool {
    let allocation = claim.allocation.as_ref();
    allocation.is_some_and(|allocation| {
        allocation
            .node_name
            .as_deref()
            .is_none_or(|node| node == node_name)
    })
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
