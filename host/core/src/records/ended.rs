//! Claims that were unprepared: those of the last day, bounded in number and bytes. Pure: which of them are kept.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nodedock_model::{EndedRecord, Uid};

/// Time for which an ended claim is listed, in milliseconds.
pub(crate) const ENDED_AGE_MS: u64 = 24 * 60 * 60 * 1000;
/// Ended claims that are kept.
pub(crate) const ENDED_MAX: usize = 1000;
/// Bytes of their JSON: a list of all of them fits into one gRPC message.
pub(crate) const ENDED_BYTES_MAX: usize = 2 << 20;
/// Part of a bound that is free after it was exceeded. The oldest claims are removed together, since records beside each other are in few
/// pages of the checkpoint, and not one with each claim that ends.
const FREED_PART: usize = 32;

/// The ended claims, by UID and by age.
#[derive(Debug, Default)]
pub(crate) struct EndedClaims {
    claims: BTreeMap<Uid, (Arc<EndedRecord>, usize)>,
    by_age: BTreeSet<(u64, Uid)>,
    bytes: usize,
}

impl EndedClaims {
    /// Those of a checkpoint. Claims beyond a bound are among them until the next one ends.
    pub(crate) fn new(records: Vec<EndedRecord>) -> Self {
        let mut ended = Self::default();
        records
            .into_iter()
            .for_each(|record| ended.insert(Arc::new(record)));
        ended
    }

    /// Returns those of the last day, the oldest first.
    pub(crate) fn list(&self, now_ms: u64) -> Vec<Arc<EndedRecord>> {
        let mut listed = Vec::new();
        for (at_ms, uid) in &self.by_age {
            let record = self.claims.get(uid);
            let record = record.filter(|_| !is_old(*at_ms, now_ms));
            listed.extend(record.map(|(record, _)| record.clone()));
        }
        listed
    }

    /// Returns the claims that are not kept, the oldest first, if these end now: of `new`, those that have no place.
    pub(crate) fn outdated(&self, new: &[Arc<EndedRecord>], now_ms: u64) -> Vec<Uid> {
        let news: BTreeSet<_> = new.iter().map(|record| &record.id.uid).collect();
        let replaced = news.iter().filter_map(|uid| self.claims.get(*uid));
        let (replaced, freed) = replaced.fold((0, 0), |(number, sum), (_, bytes)| {
            (number + 1, sum + bytes)
        });
        let mut number = self.claims.len() - replaced + news.len();
        let mut bytes =
            self.bytes - freed + new.iter().map(|record| bytes_of(record)).sum::<usize>();
        let mut outdated = Vec::new();
        let known = self.by_age.iter().filter(|(_, uid)| !news.contains(uid));
        let known = known.filter_map(|(at_ms, uid)| Some((*at_ms, uid, self.claims.get(uid)?.1)));
        let new = new
            .iter()
            .map(|record| (record.at_ms, &record.id.uid, bytes_of(record)));
        let freed = usize::from(is_over(number, bytes, 0));
        let of_known = known.map(|known| (known, freed));
        for ((at_ms, uid, its_bytes), freed) in of_known.chain(new.map(|new| (new, 0))) {
            if !is_over(number, bytes, freed) && !is_old(at_ms, now_ms) {
                break;
            }
            number -= 1;
            bytes -= its_bytes;
            outdated.push(uid.clone());
        }
        outdated
    }

    /// Takes claims that ended, and forgets others.
    pub(crate) fn put(&mut self, new: Vec<Arc<EndedRecord>>, outdated: &[Uid]) {
        new.into_iter().for_each(|record| self.insert(record));
        outdated.iter().for_each(|uid| self.remove(uid));
    }

    fn insert(&mut self, record: Arc<EndedRecord>) {
        let (uid, bytes) = (record.id.uid.clone(), bytes_of(&record));
        self.remove(&uid);
        self.by_age.insert((record.at_ms, uid.clone()));
        self.bytes += bytes;
        self.claims.insert(uid, (record, bytes));
    }

    fn remove(&mut self, uid: &Uid) {
        if let Some((record, bytes)) = self.claims.remove(uid) {
            self.by_age.remove(&(record.at_ms, uid.clone()));
            self.bytes -= bytes;
        }
    }
}

/// Returns whether claims exceed a bound. `freed`: the parts of the bounds that are to be free.
fn is_over(number: usize, bytes: usize, freed: usize) -> bool {
    number > ENDED_MAX - freed * (ENDED_MAX / FREED_PART)
        || bytes > ENDED_BYTES_MAX - freed * (ENDED_BYTES_MAX / FREED_PART)
}

/// A clock that was set back makes no claim old.
fn is_old(at_ms: u64, now_ms: u64) -> bool {
    now_ms.saturating_sub(at_ms) > ENDED_AGE_MS
}

/// Bytes of a record's JSON. One that has none could not be stored either, and takes the whole place.
fn bytes_of(record: &EndedRecord) -> usize {
    serde_json::to_string(record).map_or(ENDED_BYTES_MAX, |json| json.len())
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use nodedock_model::{ObjectRef, Transition};

    fn ended(name: &str, at_ms: u64, cause_bytes: usize) -> Arc<EndedRecord> {
        let entry = Transition {
            cause: "x".repeat(cause_bytes),
            ..Transition::default()
        };
        Arc::new(EndedRecord {
            id: ObjectRef::new("default", name, name).unwrap(),
            at_ms,
            pods: [].into(),
            devices: BTreeMap::new(),
            timeline: VecDeque::from([entry]),
            unknown: BTreeMap::new(),
        })
    }

    /// Ends claims as a commit does.
    fn end(claims: &mut EndedClaims, new: Vec<Arc<EndedRecord>>, now_ms: u64) -> Vec<String> {
        let outdated = claims.outdated(&new, now_ms);
        claims.put(new, &outdated);
        outdated.iter().map(Uid::to_string).collect()
    }

    fn names(claims: &EndedClaims, now_ms: u64) -> Vec<String> {
        let listed = claims.list(now_ms).into_iter();
        listed.map(|record| record.id.name.to_string()).collect()
    }

    #[test]
    fn old_claims_end_with_a_day() {
        let mut claims = EndedClaims::default();
        end(&mut claims, vec![ended("a", 1, 1), ended("b", 2, 1)], 2);
        assert_eq!(names(&claims, ENDED_AGE_MS + 1), ["a", "b"]);
        assert_eq!(names(&claims, ENDED_AGE_MS + 2), ["b"], "without a write");
        let later = ENDED_AGE_MS + 2;
        assert_eq!(end(&mut claims, vec![ended("c", later, 1)], later), ["a"]);
        assert_eq!(names(&claims, later), ["b", "c"]);
        assert_eq!(names(&claims, 0), ["b", "c"], "a clock that was set back");
    }

    #[test]
    fn number_is_bounded() {
        let mut claims = EndedClaims::default();
        for n in 0..ENDED_MAX {
            let new = vec![ended(&format!("n{n}"), n as u64, 1)];
            assert!(end(&mut claims, new, n as u64).is_empty());
        }
        let now = ENDED_MAX as u64;
        let again = vec![ended("n0", now, 1)];
        assert!(end(&mut claims, again, now).is_empty(), "it is replaced");
        let new = vec![ended("x", now, 1), ended("y", now, 1)];
        let removed = end(&mut claims, new, now);
        assert_eq!((&*removed[0], &*removed[1]), ("n1", "n2"), "the oldest");
        let kept = ENDED_MAX - ENDED_MAX / FREED_PART;
        assert_eq!(removed.len(), ENDED_MAX + 2 - kept);
        assert_eq!(claims.list(now).len(), kept);
        for n in kept..ENDED_MAX {
            let new = vec![ended(&format!("z{n}"), now, 1)];
            assert!(end(&mut claims, new, now).is_empty(), "there is room");
        }
        assert_eq!(claims.list(now).len(), ENDED_MAX);
    }

    #[test]
    fn bytes_are_bounded() {
        let mut claims = EndedClaims::default();
        let half = ENDED_BYTES_MAX / 2;
        end(&mut claims, vec![ended("a", 1, half)], 1);
        assert_eq!(end(&mut claims, vec![ended("b", 2, half)], 2), ["a"]);
        assert_eq!(names(&claims, 2), ["b"]);
        let huge = vec![ended("c", 3, ENDED_BYTES_MAX)];
        assert_eq!(end(&mut claims, huge, 3), ["b", "c"], "it has no place");
        assert_eq!((names(&claims, 3).len(), claims.bytes), (0, 0));
    }
}
