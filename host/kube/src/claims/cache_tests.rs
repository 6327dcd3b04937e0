use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::super::convert::tests::{claim, fixture};
use super::*;
use crate::claims::cache::FOLLOWED_CLAIMS_MAX;
use crate::claims::{CLAIM_FOLLOW_AFTER, KNOWN_CLAIMS_MAX};
use nodedock_model::ObjectRef;

const NODE: &str = "node-1";

fn key(name: &str) -> Key {
    (
        ObjectName::new("default").unwrap(),
        ObjectName::new(name).unwrap(),
    )
}

fn uid(text: &str) -> Uid {
    Uid::new(text).unwrap()
}

fn state(name: &str, of: &str, version: u64) -> CachedClaim {
    let mut claim = claim(&fixture("claim-one-gpu.json")).unwrap();
    claim.id = ObjectRef {
        namespace: key(name).0,
        name: key(name).1,
        uid: uid(of),
    };
    CachedClaim {
        claim,
        version: Some(version),
    }
}

/// Holds these claims and no others.
fn hold(cache: &mut ClaimCache, held: &[ObjectRef], now: Instant) {
    let held = held.iter().map(|claim| (claim.uid.clone(), true));
    cache.hold(true, held, now);
}

fn last(cache: &ClaimCache, name: &str, of: &str) -> Option<Claim> {
    cache.last(&key(name), &uid(of)).map(|(claim, _)| claim)
}

/// The claim `a`, if it is watched.
fn watched(cache: &ClaimCache, of: &str) -> Option<Claim> {
    cache
        .last(&key("a"), &uid(of))
        .filter(|(_, is_watched)| *is_watched)
        .map(|(claim, _)| claim)
}

fn watch(is_live: bool) -> ClaimWatch {
    ClaimWatch {
        live: Arc::new(is_live.into()),
        _end: CancellationToken::new().drop_guard(),
    }
}

#[test]
fn only_watched_matching_claim_is_fresh() {
    let now = Instant::now();
    let mut cache = ClaimCache::default();
    assert!(!cache.update(&key("a"), state("a", "u-1", 5), NODE, now));
    assert_eq!(watched(&cache, "u-1"), None);
    cache.watched_by(&key("a"), watch(false));
    assert_eq!(watched(&cache, "u-1"), None);
    cache.watched_by(&key("a"), watch(true));
    assert!(watched(&cache, "u-1").is_some());
    assert!(last(&cache, "a", "u-1").is_some());
    assert_eq!(watched(&cache, "u-2"), None);
    assert_eq!(last(&cache, "a", "u-2"), None);
    cache.invalidate(&key("a"));
    assert_eq!(watched(&cache, "u-1"), None);
    assert_eq!(last(&cache, "a", "u-1"), None);
    cache.update(&key("a"), state("a", "u-1", 6), NODE, now);
    assert!(watched(&cache, "u-1").is_some());
}

#[test]
fn long_held_claim_is_watched() {
    let (start, later) = (Instant::now(), Instant::now() + CLAIM_FOLLOW_AFTER);
    let mut cache = ClaimCache::default();
    for name in ["a", "b"] {
        cache.update(&key(name), state(name, name, 5), NODE, start);
    }
    assert_eq!(cache.to_watch(later), None, "none is held");
    let id = |name: &str| state(name, name, 5).claim.id;
    hold(&mut cache, &[id("a")], start);
    // Another read changes nothing of that.
    cache.update(
        &key("a"),
        state("a", "a", 6),
        NODE,
        later - Duration::from_millis(1),
    );
    hold(&mut cache, &[id("a")], later - Duration::from_millis(1));
    assert_eq!(cache.to_watch(later - Duration::from_millis(1)), None);
    assert_eq!(cache.to_watch(later), Some((key("a"), Some(6))));
    assert!(cache.recall(&key("b"), &uid("b")).is_some());
    assert_eq!(cache.to_watch(start), None, "it is not held");
    hold(&mut cache, &[id("a"), id("b")], start);
    assert_eq!(cache.to_watch(start), Some((key("b"), Some(5))));
    cache.update(&key("b"), state("b", "b", 5), NODE, start);
    assert_eq!(cache.to_watch(start), None, "the server confirmed it");
}

#[test]
fn expected_claim_is_watched_at_once() {
    let now = Instant::now();
    let mut cache = ClaimCache::default();
    for name in ["a", "b"] {
        cache.update(&key(name), state(name, name, 5), NODE, now);
    }
    cache.expect_request(&key("a"));
    assert_eq!(cache.to_watch(now), Some((key("a"), Some(5))));
    cache.update(&key("a"), state("a", "a", 6), NODE, now);
    assert_eq!(cache.to_watch(now), Some((key("a"), Some(6))));
    cache.update(&key("a"), state("a", "other", 7), NODE, now);
    assert_eq!(cache.to_watch(now), None, "it is another claim");
}

#[test]
fn reread_held_claim_stays_cached() {
    let (start, later) = (Instant::now(), Instant::now() + 2 * CLAIM_FOLLOW_AFTER);
    let mut cache = ClaimCache::default();
    cache.hold(true, [(uid("u-1"), true)], start);
    cache.update(&key("a"), state("a", "u-1", 5), NODE, start);
    cache.forget_idle(later);
    assert_eq!(cache.to_watch(later), Some((key("a"), Some(5))));
    cache.hold(false, [(uid("u-1"), false)], later);
    assert_eq!(cache.len(), 0);
}

#[test]
fn get_older_than_watch_is_ignored() {
    let now = Instant::now();
    let mut cache = ClaimCache::default();
    let mut newer = state("a", "u-1", 9);
    newer
        .claim
        .annotations
        .insert("newer".to_owned(), "yes".to_owned());
    cache.update(&key("a"), newer.clone(), NODE, now);
    cache.update(&key("a"), state("a", "u-1", 8), NODE, now);
    assert_eq!(last(&cache, "a", "u-1"), Some(newer.claim.clone()));
    // Nor does what is said late of the claim that had the name before.
    assert!(!cache.update(&key("a"), state("a", "u-0", 8), NODE, now));
    assert!(!cache.deleted(&key("a"), Some("u-0")));
    assert_eq!(last(&cache, "a", "u-1"), Some(newer.claim));
    // One that came later is another claim.
    assert!(cache.update(&key("a"), state("a", "u-2", 10), NODE, now));
    // Versions that are no numbers are taken as they come.
    let odd = CachedClaim {
        version: None,
        ..state("a", "u-2", 0)
    };
    assert!(!cache.update(&key("a"), odd, NODE, now));
    assert!(cache.deleted(&key("a"), Some("u-2")) && cache.len() == 0);
}

#[test]
fn deallocated_or_moved_claim_is_lost() {
    let now = Instant::now();
    let elsewhere = |mut state: CachedClaim| {
        state.claim.allocation.as_mut().unwrap().node_name = Some("node-2".to_owned());
        state
    };
    let unallocated = |mut state: CachedClaim| {
        state.claim.allocation = None;
        state
    };
    let mut cache = ClaimCache::default();
    for wrong in [
        elsewhere(state("a", "u-1", 1)),
        unallocated(state("a", "u-1", 1)),
    ] {
        assert!(!cache.update(&key("a"), wrong, NODE, now));
        assert_eq!(cache.len(), 0);
    }
    for wrong in [
        elsewhere(state("a", "u-1", 2)),
        unallocated(state("a", "u-1", 2)),
    ] {
        cache.update(&key("a"), state("a", "u-1", 1), NODE, now);
        assert!(cache.update(&key("a"), wrong, NODE, now));
        assert_eq!(cache.len(), 0);
    }
    cache.update(&key("a"), state("a", "u-1", 1), NODE, now);
    assert!(cache.remove(&key("a")));
    assert!(!cache.remove(&key("a")));
}

#[test]
fn only_held_claims_stay_cached() {
    let now = Instant::now();
    let mut cache = ClaimCache::default();
    for name in ["a", "b", "c"] {
        cache.update(&key(name), state(name, &format!("u-{name}"), 1), NODE, now);
    }
    let id = |name: &str| state(name, &format!("u-{name}"), 1).claim.id;
    hold(&mut cache, &[id("a"), id("b"), id("unknown")], now);
    let later = now + CLAIM_FOLLOW_AFTER;
    cache.forget_idle(later - Duration::from_millis(1));
    assert_eq!(cache.len(), 3);
    cache.forget_idle(later);
    assert_eq!(cache.len(), 2);
    hold(&mut cache, &[id("b")], later);
    assert_eq!((cache.len(), last(&cache, "a", "u-a")), (1, None));
}

#[test]
fn cache_is_bounded_and_evicts_oldest() {
    let start = Instant::now();
    let at = |n: usize| start + Duration::from_millis(n as u64);
    let mut cache = ClaimCache::default();
    let name = |n: usize| format!("c-{n}");
    let learn = |cache: &mut ClaimCache, n: usize| {
        cache.update(
            &key(&name(n)),
            state(&name(n), &format!("u-{n}"), 1),
            NODE,
            at(n),
        );
    };
    for n in 0..KNOWN_CLAIMS_MAX {
        learn(&mut cache, n);
    }
    hold(
        &mut cache,
        &[state(&name(0), "u-0", 1).claim.id],
        at(KNOWN_CLAIMS_MAX),
    );
    learn(&mut cache, KNOWN_CLAIMS_MAX);
    assert_eq!(cache.len(), KNOWN_CLAIMS_MAX);
    let is_cached = |n: usize| last(&cache, &name(n), &format!("u-{n}")).is_some();
    assert!(is_cached(0) && !is_cached(1) && is_cached(2) && is_cached(KNOWN_CLAIMS_MAX));
    // Where all are held, a new one is not cached.
    let held: Vec<_> = cache
        .entries
        .values()
        .map(|entry| entry.state.claim.id.clone())
        .collect();
    hold(&mut cache, &held, at(9999));
    learn(&mut cache, 9999);
    while let Some((key, _)) = cache.to_watch(at(9999) + CLAIM_FOLLOW_AFTER) {
        cache.watched_by(&key, watch(true));
    }
    assert_eq!(
        (cache.len(), cache.watched()),
        (KNOWN_CLAIMS_MAX, FOLLOWED_CLAIMS_MAX)
    );
    assert_eq!(last(&cache, &name(9999), "u-9999"), None);
}

#[test]
fn update_during_wait_answers_caller() {
    let now = Instant::now();
    let mut cache = ClaimCache::default();
    let before = cache.updates();
    cache.update(&key("a"), state("a", "u-1", 1), NODE, now);
    assert!(
        cache
            .updated_after(before, &key("a"), &uid("u-1"))
            .is_some()
    );
    assert_eq!(cache.updated_after(before, &key("a"), &uid("u-2")), None);
    assert_eq!(
        cache.updated_after(cache.updates(), &key("a"), &uid("u-1")),
        None
    );
    cache.invalidate(&key("a"));
    assert_eq!(cache.updated_after(before, &key("a"), &uid("u-1")), None);
}
