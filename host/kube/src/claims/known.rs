//! What is known of claims: the last word on each, which are watched, and which is forgotten first.

use std::collections::{BTreeMap, BTreeSet};

use tokio::time::Instant;

use nodedock_model::{Claim, ObjectName, ObjectRef, Uid, limit};

/// Namespace and name.
pub(super) type Key = (ObjectName, ObjectName);

/// What a get or a watch says of a claim.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Word {
    pub(super) claim: Claim,
    /// The resource version, where it is a number: the higher is the newer.
    pub(super) version: Option<u64>,
}

/// Of claims that are allocated, to this node as far as they say. `W` is what keeps one watched.
#[derive(Debug)]
pub(super) struct Known<W> {
    entries: BTreeMap<Key, Entry<W>>,
    /// Counts what is learned.
    words: u64,
}

#[derive(Debug)]
struct Entry<W> {
    word: Word,
    /// When it was learned, by the count of words.
    number: u64,
    asked_at: Instant,
    held: bool,
    /// What was learned last cannot be read: it is to be asked again.
    doubtful: bool,
    watch: Option<W>,
}

impl<W> Default for Known<W> {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), words: 0 }
    }
}

impl<W> Known<W> {
    /// The claim, if it is watched and has that UID.
    pub(super) fn fresh(
        &mut self,
        key: &Key,
        uid: &Uid,
        now: Instant,
        is_live: impl Fn(&W) -> bool,
    ) -> Option<Claim> {
        let entry = self.of(key, uid, now)?;
        let live = !entry.doubtful && entry.watch.as_ref().is_some_and(is_live);
        live.then(|| entry.word.claim.clone())
    }

    /// The claim as it was last, if it has that UID.
    pub(super) fn last(&mut self, key: &Key, uid: &Uid, now: Instant) -> Option<Claim> {
        let entry = self.of(key, uid, now)?;
        (!entry.doubtful).then(|| entry.word.claim.clone())
    }

    /// How many words there were: what `learned_after` compares with.
    pub(super) fn words(&self) -> u64 {
        self.words
    }

    /// The claim, if it has that UID and was learned after so many words.
    pub(super) fn learned_after(&self, words: u64, key: &Key, uid: &Uid) -> Option<Claim> {
        let entry = self.entries.get(key).filter(|entry| !entry.doubtful && entry.number > words)?;
        let claim = &entry.word.claim;
        (claim.id.uid == *uid).then(|| claim.clone())
    }

    fn of(&mut self, key: &Key, uid: &Uid, now: Instant) -> Option<&Entry<W>> {
        let entry = self.entries.get_mut(key).filter(|entry| entry.word.claim.id.uid == *uid)?;
        entry.asked_at = now;
        Some(entry)
    }

    /// Takes a word. Gives the claim that is lost by it.
    pub(super) fn learn(
        &mut self,
        key: &Key,
        word: Word,
        node_name: &str,
        now: Instant,
    ) -> Option<ObjectRef> {
        self.words += 1;
        let Some(entry) = self.entries.get_mut(key) else {
            self.add(key, word, node_name, now);
            return None;
        };
        let same = entry.word.claim.id.uid == word.claim.id.uid;
        if entry.word.version.zip(word.version).is_some_and(|(old, new)| new < old) {
            // A get that was overtaken by the watch, or a watch that still tells of the claim that had the name before.
            return None;
        }
        let lost = entry.word.claim.id.clone();
        if !is_of(&word.claim, node_name) {
            self.entries.remove(key);
            return Some(lost);
        }
        (entry.word, entry.number, entry.doubtful) = (word, self.words, false);
        entry.held &= same;
        (!same).then_some(lost)
    }

    fn add(&mut self, key: &Key, word: Word, node_name: &str, now: Instant) {
        if !is_of(&word.claim, node_name) {
            return;
        }
        if self.entries.len() >= limit::KNOWN_CLAIMS_MAX && !self.evict() {
            return;
        }
        let entry =
            Entry { word, number: self.words, asked_at: now, held: false, doubtful: false, watch: None };
        self.entries.insert(key.clone(), entry);
    }

    /// Forgets the one that is not held and was asked for the longest ago.
    fn evict(&mut self) -> bool {
        let idle = self.entries.iter().filter(|(_, entry)| !entry.held);
        let first = idle.min_by_key(|(_, entry)| entry.asked_at).map(|(key, _)| key.clone());
        first.and_then(|key| self.entries.remove(&key)).is_some()
    }

    /// The claim is not there. Gives the one that was.
    pub(super) fn gone(&mut self, key: &Key) -> Option<ObjectRef> {
        self.entries.remove(key).map(|entry| entry.word.claim.id)
    }

    /// The claim of that UID was deleted. One that has had its name since stays.
    pub(super) fn deleted(&mut self, key: &Key, uid: Option<&str>) -> Option<ObjectRef> {
        let known = &self.entries.get(key)?.word.claim.id.uid;
        let is_other = uid.is_some_and(|uid| uid != known.as_str());
        if is_other { None } else { self.gone(key) }
    }

    /// What came of the claim cannot be read.
    pub(super) fn doubt(&mut self, key: &Key) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.doubtful = true;
        }
    }

    pub(super) fn forget(&mut self, claim: &ObjectRef) {
        let key = (claim.namespace.clone(), claim.name.clone());
        if self.entries.get(&key).is_some_and(|entry| entry.word.claim.id.uid == claim.uid) {
            self.entries.remove(&key);
        }
    }

    /// These are held, and no others. What was held is forgotten.
    pub(super) fn hold(&mut self, held: &[ObjectRef], now: Instant) {
        let held: BTreeSet<&Uid> = held.iter().map(|claim| &claim.uid).collect();
        self.entries.retain(|_, entry| {
            let is_held = held.contains(&entry.word.claim.id.uid);
            let was_held = std::mem::replace(&mut entry.held, is_held);
            if is_held {
                entry.asked_at = now;
            }
            is_held || !was_held
        });
    }

    pub(super) fn forget_idle(&mut self, now: Instant) {
        let idle =
            |entry: &Entry<W>| now.saturating_duration_since(entry.asked_at) >= limit::CLAIM_FOLLOW_IDLE;
        self.entries.retain(|_, entry| entry.held || !idle(entry));
    }

    /// One that is to be watched and is not, if there is room: what was asked for last comes first.
    pub(super) fn to_follow(&self) -> Option<Key> {
        if self.followed() >= limit::FOLLOWED_CLAIMS_MAX {
            return None;
        }
        let unwatched = self.entries.iter().filter(|(_, entry)| entry.watch.is_none());
        unwatched.max_by_key(|(_, entry)| entry.asked_at).map(|(key, _)| key.clone())
    }

    pub(super) fn followed_by(&mut self, key: &Key, watch: W) {
        if let Some(entry) = self.entries.get_mut(key) {
            entry.watch = Some(watch);
        }
    }

    pub(super) fn followed(&self) -> usize {
        self.entries.values().filter(|entry| entry.watch.is_some()).count()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
}

/// Whether it is allocated, and not to another node.
fn is_of(claim: &Claim, node_name: &str) -> bool {
    let allocation = claim.allocation.as_ref();
    allocation.is_some_and(|allocation| allocation.node_name.as_deref().is_none_or(|node| node == node_name))
}

#[cfg(test)]
#[path = "known_tests.rs"]
mod tests;
