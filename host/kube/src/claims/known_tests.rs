use std::time::Duration;

use super::super::convert;
use super::super::convert::tests::fixture;
use super::*;

const NODE: &str = "node-1";

fn key(name: &str) -> Key {
    (ObjectName::new("default").unwrap(), ObjectName::new(name).unwrap())
}

fn uid(text: &str) -> Uid {
    Uid::new(text).unwrap()
}

fn word(name: &str, of: &str, version: u64) -> Word {
    let mut claim = convert::claim(&fixture("claim-one-gpu.json")).unwrap();
    claim.id = ObjectRef { namespace: key(name).0, name: key(name).1, uid: uid(of) };
    Word { claim, version: Some(version) }
}

fn live(_: &u32) -> bool {
    true
}

#[test]
fn only_a_watched_claim_of_the_wanted_uid_is_fresh() {
    let now = Instant::now();
    let mut known: Known<u32> = Known::default();
    assert_eq!(known.learn(&key("a"), word("a", "u-1", 5), NODE, now), None);
    assert_eq!(known.fresh(&key("a"), &uid("u-1"), now, live), None);
    assert_eq!(known.to_follow(), Some(key("a")));
    known.followed_by(&key("a"), 7);
    assert_eq!(known.to_follow(), None);
    assert!(known.fresh(&key("a"), &uid("u-1"), now, live).is_some());
    assert_eq!(known.fresh(&key("a"), &uid("u-1"), now, |_| false), None);
    assert!(known.last(&key("a"), &uid("u-1"), now).is_some());
    assert_eq!(known.fresh(&key("a"), &uid("u-2"), now, live), None);
    assert_eq!(known.last(&key("a"), &uid("u-2"), now), None);
    known.doubt(&key("a"));
    assert_eq!(known.fresh(&key("a"), &uid("u-1"), now, live), None);
    assert_eq!(known.last(&key("a"), &uid("u-1"), now), None);
    known.learn(&key("a"), word("a", "u-1", 6), NODE, now);
    assert!(known.fresh(&key("a"), &uid("u-1"), now, live).is_some());
}

#[test]
fn a_get_that_the_watch_overtook_changes_nothing() {
    let now = Instant::now();
    let mut known: Known<u32> = Known::default();
    let mut newer = word("a", "u-1", 9);
    newer.claim.annotations.insert("newer".to_owned(), "yes".to_owned());
    known.learn(&key("a"), newer.clone(), NODE, now);
    known.learn(&key("a"), word("a", "u-1", 8), NODE, now);
    assert_eq!(known.last(&key("a"), &uid("u-1"), now), Some(newer.claim.clone()));
    // Nor does what is said late of the claim that had the name before.
    assert_eq!(known.learn(&key("a"), word("a", "u-0", 8), NODE, now), None);
    assert_eq!(known.deleted(&key("a"), Some("u-0")), None);
    assert_eq!(known.last(&key("a"), &uid("u-1"), now), Some(newer.claim));
    // One that came later is another claim.
    let lost = known.learn(&key("a"), word("a", "u-2", 10), NODE, now);
    assert_eq!(lost.unwrap().uid, uid("u-1"));
    // Versions that are no numbers are taken as they come.
    let odd = Word { version: None, ..word("a", "u-2", 0) };
    assert_eq!(known.learn(&key("a"), odd, NODE, now), None);
    assert_eq!(known.deleted(&key("a"), Some("u-2")).unwrap().uid, uid("u-2"));
}

#[test]
fn a_claim_that_is_allocated_no_more_or_elsewhere_is_lost() {
    let now = Instant::now();
    let elsewhere = |mut word: Word| {
        word.claim.allocation.as_mut().unwrap().node_name = Some("node-2".to_owned());
        word
    };
    let unallocated = |mut word: Word| {
        word.claim.allocation = None;
        word
    };
    let mut known: Known<u32> = Known::default();
    for wrong in [elsewhere(word("a", "u-1", 1)), unallocated(word("a", "u-1", 1))] {
        assert_eq!(known.learn(&key("a"), wrong, NODE, now), None);
        assert_eq!(known.len(), 0);
    }
    for wrong in [elsewhere(word("a", "u-1", 2)), unallocated(word("a", "u-1", 2))] {
        known.learn(&key("a"), word("a", "u-1", 1), NODE, now);
        assert_eq!(known.learn(&key("a"), wrong, NODE, now).unwrap().uid, uid("u-1"));
        assert_eq!(known.len(), 0);
    }
    known.learn(&key("a"), word("a", "u-1", 1), NODE, now);
    assert_eq!(known.gone(&key("a")).unwrap().uid, uid("u-1"));
    assert_eq!(known.gone(&key("a")), None);
}

#[test]
fn what_is_held_stays_and_what_was_held_is_forgotten_at_once() {
    let now = Instant::now();
    let mut known: Known<u32> = Known::default();
    for name in ["a", "b", "c"] {
        known.learn(&key(name), word(name, &format!("u-{name}"), 1), NODE, now);
    }
    let id = |name: &str| word(name, &format!("u-{name}"), 1).claim.id;
    known.hold(&[id("a"), id("b"), id("unknown")], now);
    let later = now + limit::CLAIM_FOLLOW_IDLE;
    known.forget_idle(later);
    assert_eq!(known.len(), 2);
    known.hold(&[id("b")], later);
    assert_eq!((known.len(), known.last(&key("a"), &uid("u-a"), later)), (1, None));
    // Of the same name and another UID: not what is meant.
    known.forget(&ObjectRef { uid: uid("other"), ..id("b") });
    assert_eq!(known.len(), 1);
    known.forget(&id("b"));
    assert_eq!(known.len(), 0);
}

#[test]
fn both_bounds_hold_and_the_longest_forgotten_goes_first() {
    let start = Instant::now();
    let at = |n: usize| start + Duration::from_millis(n as u64);
    let mut known: Known<usize> = Known::default();
    let name = |n: usize| format!("c-{n}");
    let learn = |known: &mut Known<usize>, n: usize| {
        known.learn(&key(&name(n)), word(&name(n), &format!("u-{n}"), 1), NODE, at(n));
        while let Some(key) = known.to_follow() {
            known.followed_by(&key, n);
        }
    };
    for n in 0..limit::KNOWN_CLAIMS_MAX {
        learn(&mut known, n);
    }
    assert_eq!((known.len(), known.followed()), (limit::KNOWN_CLAIMS_MAX, limit::FOLLOWED_CLAIMS_MAX));
    known.hold(&[word(&name(0), "u-0", 1).claim.id], at(limit::KNOWN_CLAIMS_MAX));
    learn(&mut known, limit::KNOWN_CLAIMS_MAX);
    assert_eq!((known.len(), known.followed()), (limit::KNOWN_CLAIMS_MAX, limit::FOLLOWED_CLAIMS_MAX));
    let mut is_known = |n: usize| known.last(&key(&name(n)), &uid(&format!("u-{n}")), at(9999)).is_some();
    assert!(is_known(0) && !is_known(1) && is_known(2) && is_known(limit::KNOWN_CLAIMS_MAX));
}

#[test]
fn when_all_are_held_a_new_one_is_not_known() {
    let now = Instant::now();
    let mut known: Known<u32> = Known::default();
    let ids: Vec<_> = (0..limit::KNOWN_CLAIMS_MAX)
        .map(|n| {
            let word = word(&format!("c-{n}"), &format!("u-{n}"), 1);
            let id = word.claim.id.clone();
            known.learn(&key(&format!("c-{n}")), word, NODE, now);
            id
        })
        .collect();
    known.hold(&ids, now);
    known.learn(&key("more"), word("more", "u-more", 1), NODE, now);
    assert_eq!((known.len(), known.last(&key("more"), &uid("u-more"), now)), (limit::KNOWN_CLAIMS_MAX, None));
}

#[test]
fn an_answer_that_came_while_one_waited_is_ones_own() {
    let now = Instant::now();
    let mut known: Known<u32> = Known::default();
    let before = known.words();
    known.learn(&key("a"), word("a", "u-1", 1), NODE, now);
    assert!(known.learned_after(before, &key("a"), &uid("u-1")).is_some());
    assert_eq!(known.learned_after(before, &key("a"), &uid("u-2")), None);
    assert_eq!(known.learned_after(known.words(), &key("a"), &uid("u-1")), None);
    known.doubt(&key("a"));
    assert_eq!(known.learned_after(before, &key("a"), &uid("u-1")), None);
}
