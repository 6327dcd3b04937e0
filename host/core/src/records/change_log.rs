//! The newest changes of claims in the table, for those who follow the claims without reading all of them again. Pure.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use nodedock_model::{ClaimRecord, Uid};

/// Changes that are kept: several seconds of the fastest prepares. Who misses more reads every claim.
const CHANGES_KEPT: usize = 1024;

/// Claims that changed since a revision.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ClaimChanges {
    /// Revision of this answer.
    pub revision: u64,
    /// These are all claims that there are.
    pub is_all: bool,
    /// Claims as they are now, each once, by UID; `None`: it is gone.
    pub claims: Vec<(Uid, Option<Arc<ClaimRecord>>)>,
}

/// The log of a table.
#[derive(Debug, Default)]
pub(super) struct ChangeLog {
    /// Number of the newest change.
    revision: u64,
    newest: VecDeque<Uid>,
}

impl ChangeLog {
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn note(&mut self, claim: &Uid) {
        self.revision += 1;
        if self.newest.len() == CHANGES_KEPT {
            self.newest.pop_front();
        }
        self.newest.push_back(claim.clone());
    }

    /// Returns the claims that changed since a revision. `None`: some of these changes are not kept.
    pub(super) fn since(&self, seen: u64) -> Option<BTreeSet<&Uid>> {
        let missed = usize::try_from(self.revision.checked_sub(seen)?).ok()?;
        let known = self.newest.len().checked_sub(missed)?;
        Some(self.newest.range(known..).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::records::table::ClaimTable;
    use nodedock_model::{ClaimState, ObjectRef};

    fn record(name: usize, state: ClaimState) -> Arc<ClaimRecord> {
        let id = ObjectRef::new("default", &format!("c{name}"), &format!("u{name}")).unwrap();
        Arc::new(ClaimRecord::new(id, state, "boot-1"))
    }

    /// Claims as a reader knows them that follows the changes.
    #[derive(Default)]
    struct Follower {
        seen: Option<u64>,
        claims: BTreeMap<Uid, Arc<ClaimRecord>>,
    }

    impl Follower {
        /// Returns how many claims it was given.
        fn follow(&mut self, table: &ClaimTable) -> usize {
            let changes = table.changes_since(self.seen);
            self.seen = Some(changes.revision);
            if changes.is_all {
                self.claims.clear();
            }
            let number = changes.claims.len();
            for (uid, record) in changes.claims {
                match record {
                    Some(record) => drop(self.claims.insert(uid, record)),
                    None => drop(self.claims.remove(&uid)),
                }
            }
            number
        }
    }

    proptest! {
        /// Whatever changes between two answers, also more than is kept, a reader has the table's claims after each.
        #[test]
        fn followers_know_the_table(steps in proptest::collection::vec((0usize..6, 0usize..3, 0usize..700), 0..24)) {
            let (mut table, mut follower) = (ClaimTable::default(), Follower::default());
            for (claim, what, times) in steps {
                for _ in 0..=times {
                    match what {
                        0 => drop(table.put(record(claim, ClaimState::Preparing))),
                        1 => drop(table.put(record(claim, ClaimState::Prepared))),
                        _ => drop(table.remove(&Uid::new(format!("u{claim}")).unwrap())),
                    }
                }
                follower.follow(&table);
                let known: Vec<_> = table.claims().cloned().collect();
                prop_assert_eq!(follower.claims.values().cloned().collect::<Vec<_>>(), known);
            }
        }
    }

    #[test]
    fn follower_reads_only_what_changed() {
        let claims = (0..5000).map(|n| ClaimRecord::clone(&record(n, ClaimState::Prepared)));
        let mut table = ClaimTable::new(claims.collect(), Vec::new());
        let mut follower = Follower::default();
        assert_eq!(follower.follow(&table), 5000);
        assert_eq!(follower.follow(&table), 0);
        for n in 0..CHANGES_KEPT / 2 {
            drop(table.put(record(n % 2, ClaimState::Preparing)));
            drop(table.remove(&Uid::new("u7").unwrap()));
            table.put(record(7, ClaimState::Prepared));
            assert_eq!(follower.follow(&table), 2, "each claim once");
        }
    }
}
