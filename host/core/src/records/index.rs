//! An index of records by a key that several records may have. Pure.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use nodedock_model::{Few, Uid};

/// UIDs by key. A key without UIDs is not in it.
#[derive(Debug)]
pub(super) struct Index<K>(BTreeMap<K, Few<Uid>>);

impl<K> Default for Index<K> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<K: Ord> Index<K> {
    pub(super) fn get<'a, Q: Ord + ?Sized>(
        &'a self,
        key: &Q,
    ) -> impl Iterator<Item = &'a Uid> + use<'a, K, Q>
    where
        K: Borrow<Q>,
    {
        self.0.get(key).into_iter().flatten()
    }

    /// The UIDs of all keys of a range, each once.
    pub(super) fn range(&self, keys: std::ops::Range<K>) -> BTreeSet<&Uid> {
        self.0.range(keys).flat_map(|(_, uids)| uids).collect()
    }

    /// The first key that is not before another.
    pub(super) fn first_from<Q: Ord + ?Sized>(&self, key: &Q) -> Option<&K>
    where
        K: Borrow<Q>,
    {
        self.0
            .range((Bound::Included(key), Bound::Unbounded))
            .next()
            .map(|(found, _)| found)
    }

    pub(super) fn contains<Q: Ord + ?Sized>(&self, key: &Q) -> bool
    where
        K: Borrow<Q>,
    {
        self.0.contains_key(key)
    }

    pub(super) fn add(&mut self, key: K, uid: &Uid) {
        self.0.entry(key).or_default().insert(uid.clone());
    }

    pub(super) fn remove<Q: Ord + ?Sized>(&mut self, key: &Q, uid: &Uid)
    where
        K: Borrow<Q>,
    {
        let Some(uids) = self.0.get_mut(key) else {
            return;
        };
        uids.remove(uid);
        if uids.is_empty() {
            self.0.remove(key);
        }
    }
}
