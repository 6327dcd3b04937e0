//! Which event is written next: the same told again is counted instead of written anew, an object that is told of too often waits, what
//! finds no room is counted. Pure: whoever asks says what time it is.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::{About, Kind, Told};
use nodedock_model::limit;

/// Tokens that come back with time.
#[derive(Debug, Clone)]
struct Bucket {
    tokens: u32,
    max: u32,
    every: tokio::time::Duration,
    /// Since when the next token is on its way.
    at: Instant,
}

impl Bucket {
    fn full(max: u32, every: tokio::time::Duration, now: Instant) -> Self {
        Self { tokens: max, max, every, at: now }
    }

    fn fill(&mut self, now: Instant) {
        while self.tokens < self.max && self.at + self.every <= now {
            self.tokens += 1;
            self.at += self.every;
        }
        if self.tokens == self.max {
            self.at = now;
        }
    }

    /// When there is a token.
    fn due(&mut self, now: Instant) -> Instant {
        self.fill(now);
        if self.tokens > 0 { now } else { self.at + self.every }
    }

    fn take(&mut self, now: Instant) {
        self.fill(now);
        self.tokens = self.tokens.saturating_sub(1);
    }

    fn is_full(&mut self, now: Instant) -> bool {
        self.fill(now);
        self.tokens == self.max
    }
}

/// What is one event, however often it is told.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    about: About,
    reason: String,
    message: String,
}

#[derive(Debug, Clone)]
struct Series {
    kind: Kind,
    /// Name of the written event.
    name: Option<String>,
    /// Name of one that may have been written: no answer came.
    tried: Option<String>,
    count: u32,
    written: u32,
    first_ms: u64,
    last_ms: u64,
    last: Instant,
    /// When the oldest of what is not written was told.
    waits_since: Instant,
    /// Its count is not written again before.
    not_before: Instant,
}

/// An event to write.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Write {
    pub(super) key: Key,
    pub(super) about: About,
    pub(super) reason: String,
    pub(super) message: String,
    pub(super) kind: Kind,
    pub(super) count: u32,
    pub(super) first_ms: u64,
    pub(super) last_ms: u64,
    /// The event that is to have another count; None: a new one.
    pub(super) name: Option<String>,
    /// Name of a new one that may be there already.
    pub(super) tried: Option<String>,
}

#[derive(Debug, PartialEq)]
pub(super) enum Next {
    Write(Box<Write>),
    /// Nothing until then, or until somebody tells something.
    Idle(Option<Instant>),
}

pub(super) struct Ledger {
    series: BTreeMap<Key, Series>,
    objects: BTreeMap<About, Bucket>,
    all: Bucket,
    /// Until when nothing is written into namespaces where it was forbidden. Other namespaces do not wait for it.
    held_back: BTreeMap<String, Instant>,
    /// Never written: too old, or no room.
    dropped: u64,
}

impl Series {
    fn is_clean(&self) -> bool {
        self.count == self.written
    }
}

impl Ledger {
    pub(super) fn new(now: Instant) -> Self {
        let all = Bucket::full(limit::EVENTS_BURST, limit::EVENTS_EVERY, now);
        Self {
            series: BTreeMap::new(),
            objects: BTreeMap::new(),
            all,
            held_back: BTreeMap::new(),
            dropped: 0,
        }
    }

    pub(super) fn tell(&mut self, told: Told, now: Instant, now_ms: u64) {
        let key = Key { about: told.about, reason: told.reason, message: told.message };
        self.forget(now);
        if let Some(series) = self.series.get_mut(&key) {
            if series.is_clean() {
                series.waits_since = now;
            }
            series.count = series.count.saturating_add(1);
            (series.last, series.last_ms) = (now, now_ms);
            return;
        }
        self.make_room();
        let series = Series {
            kind: told.kind,
            name: None,
            tried: None,
            count: 1,
            written: 0,
            first_ms: now_ms,
            last_ms: now_ms,
            last: now,
            waits_since: now,
            not_before: now,
        };
        self.series.insert(key, series);
    }

    /// What may be written now: that which waits longest, of objects that may be told of.
    pub(super) fn next(&mut self, now: Instant) -> Next {
        self.forget(now);
        let mut waiting: Vec<_> = self.series.iter().filter(|(_, series)| !series.is_clean()).collect();
        if waiting.is_empty() {
            return Next::Idle(None);
        }
        waiting.sort_by_key(|(_, series)| series.waits_since);
        let all = self.all.due(now);
        let mut soonest: Option<Instant> = None;
        for (key, series) in waiting {
            let object = self.objects.get_mut(&key.about).map_or(now, |bucket| bucket.due(now));
            let held_back = self.held_back.get(key.about.namespace()).copied().unwrap_or(now);
            let due = all.max(object).max(series.not_before).max(held_back);
            if due > now {
                soonest = Some(soonest.map_or(due, |soonest| soonest.min(due)));
                continue;
            }
            let write = write(key, series);
            let full = || Bucket::full(limit::OBJECT_EVENTS_BURST, limit::OBJECT_EVENTS_EVERY, now);
            self.objects.entry(key.about.clone()).or_insert_with(full).take(now);
            self.all.take(now);
            return Next::Write(Box::new(write));
        }
        Next::Idle(soonest)
    }

    /// It was written, under that name.
    pub(super) fn written(&mut self, write: &Write, name: String, now: Instant) {
        let Some(series) = self.series.get_mut(&write.key) else { return };
        self.held_back.remove(write.about.namespace());
        (series.name, series.tried) = (Some(name), None);
        series.written = write.count;
        series.waits_since = now;
        series.not_before = now + limit::EVENT_COUNT_PACE;
    }

    /// Whether a new one was written under that name is not known.
    pub(super) fn tried(&mut self, write: &Write, name: String) {
        if let Some(series) = self.series.get_mut(&write.key) {
            series.tried = Some(name);
        }
    }

    /// Nothing may be written into its namespace. It is tried again later, with whatever waits longest then.
    pub(super) fn forbidden(&mut self, write: &Write, now: Instant) {
        let until = now + limit::KUBE_FORBIDDEN_PAUSE;
        self.held_back.insert(write.about.namespace().to_owned(), until);
    }

    /// Whether something waits that may not be written.
    pub(super) fn is_held_back(&self, namespace: &str) -> bool {
        self.held_back.contains_key(namespace)
    }

    /// The event whose count was to change is gone: a new one has to be written.
    pub(super) fn gone(&mut self, write: &Write) {
        let Some(series) = self.series.get_mut(&write.key) else { return };
        (series.name, series.tried) = (None, None);
        series.count -= series.written.min(series.count.saturating_sub(1));
        series.written = 0;
    }

    /// It is refused for good.
    pub(super) fn refused(&mut self, write: &Write) {
        if let Some(series) = self.series.get_mut(&write.key) {
            series.written = series.count;
        }
    }

    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }

    /// What is long past is no series any more, and what could not be written for so long is of no use.
    fn forget(&mut self, now: Instant) {
        let dropped = &mut self.dropped;
        self.series.retain(|_, series| {
            let too_old = !series.is_clean() && series.waits_since + limit::EVENT_SERIES <= now;
            // A count that is not written is no lost event.
            *dropped += u64::from(too_old && series.name.is_none());
            !too_old && (!series.is_clean() || series.last + limit::EVENT_SERIES > now)
        });
        let series = &self.series;
        // Series are in the order of their objects.
        let is_told = |about: &About| {
            let first = Key { about: about.clone(), reason: String::new(), message: String::new() };
            series.range(first..).next().is_some_and(|(key, _)| key.about == *about)
        };
        self.objects.retain(|about, bucket| !bucket.is_full(now) || is_told(about));
        let waits = |namespace: &str| {
            series.iter().any(|(key, series)| !series.is_clean() && key.about.namespace() == namespace)
        };
        self.held_back.retain(|namespace, _| waits(namespace));
    }

    /// The oldest that is written goes first; where none is, the oldest that waits.
    fn make_room(&mut self) {
        if self.series.len() < limit::EVENTS_MAX {
            return;
        }
        let oldest = self.series.iter().min_by_key(|(_, series)| (!series.is_clean(), series.last));
        let Some((key, series)) = oldest.map(|(key, series)| (key.clone(), series)) else { return };
        self.dropped += u64::from(!series.is_clean());
        self.series.remove(&key);
    }
}

fn write(key: &Key, series: &Series) -> Write {
    Write {
        key: key.clone(),
        about: key.about.clone(),
        reason: key.reason.clone(),
        message: key.message.clone(),
        kind: series.kind,
        count: series.count,
        first_ms: series.first_ms,
        last_ms: series.last_ms,
        name: series.name.clone(),
        tried: series.tried.clone(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tokio::time::Duration;

    use super::*;
    use nodedock_model::ObjectRef;

    fn told(object: u32, message: &str) -> Told {
        let claim = ObjectRef::new("default", "a", &format!("uid-{object}")).unwrap();
        Told {
            about: About::Claim(claim),
            kind: Kind::Warning,
            reason: "DeviceHeld".to_owned(),
            message: message.to_owned(),
        }
    }

    fn wrote(ledger: &mut Ledger, now: Instant) -> Option<Write> {
        let Next::Write(write) = ledger.next(now) else { return None };
        ledger.written(&write, "a.1".to_owned(), now);
        Some(*write)
    }

    #[test]
    fn the_same_told_again_is_counted_and_much_later_it_is_a_new_event() {
        let begin = Instant::now();
        let mut ledger = Ledger::new(begin);
        ledger.tell(told(1, "a"), begin, 1000);
        let first = wrote(&mut ledger, begin).unwrap();
        assert_eq!((first.name, first.count), (None, 1));
        assert_eq!(ledger.next(begin), Next::Idle(None));
        ledger.tell(told(1, "a"), begin, 2000);
        ledger.tell(told(1, "a"), begin, 3000);
        let pace = begin + limit::EVENT_COUNT_PACE;
        assert_eq!(ledger.next(begin), Next::Idle(Some(pace)));
        let again = wrote(&mut ledger, pace).unwrap();
        assert_eq!((again.name.as_deref(), again.count), (Some("a.1"), 3));
        assert_eq!((again.first_ms, again.last_ms), (1000, 3000));
        let later = pace + limit::EVENT_SERIES;
        ledger.tell(told(1, "a"), later, 4000);
        let new = wrote(&mut ledger, later).unwrap();
        assert_eq!((new.name, new.count, new.first_ms), (None, 1, 4000));
    }

    #[test]
    fn an_event_that_is_gone_is_written_anew_with_what_was_not_yet_counted() {
        let now = Instant::now();
        let mut ledger = Ledger::new(now);
        ledger.tell(told(1, "a"), now, 1000);
        wrote(&mut ledger, now).unwrap();
        ledger.tell(told(1, "a"), now, 1000);
        let later = now + limit::EVENT_COUNT_PACE;
        let Next::Write(write) = ledger.next(later) else { panic!() };
        ledger.gone(&write);
        let new = wrote(&mut ledger, later).unwrap();
        assert_eq!((new.name, new.count), (None, 1));
        assert_eq!(ledger.next(later), Next::Idle(None));
    }

    #[test]
    fn one_object_that_is_told_of_all_the_time_leaves_the_others_their_turn() {
        let now = Instant::now();
        let mut ledger = Ledger::new(now);
        (0..100).for_each(|i| ledger.tell(told(1, &i.to_string()), now, 0));
        ledger.tell(told(2, "a"), now, 0);
        let written: Vec<_> = std::iter::from_fn(|| wrote(&mut ledger, now)).collect();
        assert_eq!(written.len(), limit::OBJECT_EVENTS_BURST as usize + 1);
        let due = now + limit::OBJECT_EVENTS_EVERY;
        assert_eq!(ledger.next(now), Next::Idle(Some(due)));
        assert!(wrote(&mut ledger, due).is_some());
        assert!(wrote(&mut ledger, due).is_none());
        // What waits too long is of no use.
        let late = now + limit::EVENT_SERIES;
        assert_eq!(ledger.next(late), Next::Idle(None));
        assert_eq!(ledger.dropped(), 100 - u64::from(limit::OBJECT_EVENTS_BURST) - 1);
    }

    #[test]
    fn a_namespace_where_it_is_forbidden_keeps_no_other_waiting() {
        let now = Instant::now();
        let mut ledger = Ledger::new(now);
        (0..5).for_each(|i| ledger.tell(told(1, &i.to_string()), now, 0));
        let node = Told { about: About::Node, ..told(2, "a") };
        ledger.tell(Told { about: About::Claim(ObjectRef::new("other", "a", "b").unwrap()), ..node }, now, 0);
        let Next::Write(write) = ledger.next(now) else { panic!() };
        ledger.forbidden(&write, now);
        assert_eq!(wrote(&mut ledger, now).unwrap().about.namespace(), "other");
        let later = now + limit::KUBE_FORBIDDEN_PAUSE;
        assert_eq!(ledger.next(now), Next::Idle(Some(later)));
        // One try tells whether it is allowed now, and then all of them go.
        assert!(wrote(&mut ledger, later).is_some() && !ledger.is_held_back("default"));
        assert!(wrote(&mut ledger, later).is_some());
        let Next::Write(write) = ledger.next(later) else { panic!() };
        ledger.forbidden(&write, later);
        let end = now + limit::EVENT_SERIES;
        assert_eq!(ledger.next(end), Next::Idle(None));
        assert!(!ledger.is_held_back("default"), "nobody waits any more");
    }

    #[test]
    fn all_together_have_a_bound_in_number_and_in_time() {
        let now = Instant::now();
        let mut ledger = Ledger::new(now);
        let more = u32::try_from(limit::EVENTS_MAX).unwrap() + 10;
        (0..more).for_each(|i| ledger.tell(told(i, "a"), now + Duration::from_millis(u64::from(i)), 0));
        assert_eq!((ledger.series.len(), ledger.dropped()), (limit::EVENTS_MAX, 10));
        let now = now + Duration::from_secs(1);
        let first = wrote(&mut ledger, now).unwrap();
        // The oldest were dropped.
        assert_eq!(first.about, told(10, "a").about);
        let written = 1 + std::iter::from_fn(|| wrote(&mut ledger, now)).count();
        assert_eq!(written, limit::EVENTS_BURST as usize);
    }

    proptest! {
        /// Whatever is told when: never more writes than the buckets hold, never more memory than the bound, and nothing is lost but
        /// what was counted as dropped or is part of a count.
        #[test]
        fn bounds_hold(steps in proptest::collection::vec((0u32..6, 0u32..4, 0u64..40_000, any::<bool>()), 1..200)) {
            let begin = Instant::now();
            let mut ledger = Ledger::new(begin);
            let mut now = begin;
            let mut written = 0u32;
            for (object, message, pause, fails) in steps {
                now += Duration::from_millis(pause);
                ledger.tell(told(object, &message.to_string()), now, 0);
                match ledger.next(now) {
                    Next::Write(write) if fails => ledger.gone(&write),
                    Next::Write(write) => {
                        ledger.written(&write, "a.1".to_owned(), now);
                        written += 1;
                    }
                    Next::Idle(until) => prop_assert!(until.is_none_or(|until| until > now)),
                }
                prop_assert!(ledger.series.len() <= 24 && ledger.objects.len() <= 6);
                prop_assert!(ledger.series.values().all(|series| series.count >= series.written));
            }
            let seconds = (now - begin).as_millis() / limit::EVENTS_EVERY.as_millis();
            prop_assert!(u128::from(written) <= u128::from(limit::EVENTS_BURST) + seconds + 1);
        }
    }
}
