use futures::FutureExt;
use proptest::prelude::*;

use super::*;
use nodedock_model::limit::CALLS_PER_DRIVER;

fn ask(owner: u64) -> Ask {
    Ask { owner, slow: false, memories: 1, bytes: CALL_MEMORY, own_max: CALLS_PER_DRIVER }
}

fn slow(owner: u64) -> Ask {
    Ask { slow: true, ..ask(owner) }
}

/// As many places as there are at once.
fn take_all(places: &Places, ask: Ask) -> Vec<Place> {
    std::iter::from_fn(|| places.take(ask).now_or_never()).collect()
}

#[test]
fn a_driver_alone_gets_its_number_and_greedy_ones_leave_something_for_the_next() {
    let places = Places::default();
    let mut held = Vec::new();
    let counts: Vec<_> = (1..=5)
        .map(|owner| {
            let taken = take_all(&places, ask(owner));
            let count = taken.len();
            held.push(taken);
            count
        })
        .collect();
    assert_eq!(counts, [CALLS_PER_DRIVER, 8, 4, 2, 1]);
    held.clear();
    assert_eq!(take_all(&places, ask(9)).len(), CALLS_PER_DRIVER);
    assert_eq!(places.state().held.all, Load::default());
}

#[test]
fn slow_drivers_share_a_part_and_the_rest_is_for_the_others() {
    let places = Places::default();
    let held: Vec<_> = (0..10).flat_map(|owner| take_all(&places, slow(owner))).collect();
    assert_eq!(held.len(), SLOW_CALLS_MAX);
    assert_eq!(places.state().held.owners[&0].all.calls, SLOW_CALLS_PER_DRIVER);
    assert_eq!(take_all(&places, ask(77)).len(), 8, "half of what is left");
}

#[test]
fn calls_with_much_memory_are_few_and_leave_room_for_small_ones() {
    let places = Places::default();
    let large = |owner| Ask { bytes: nodedock_model::limit::CALL_MEMORY_MAX, ..ask(owner) };
    let held: Vec<_> = (0..8).flat_map(|owner| take_all(&places, large(owner))).collect();
    assert_eq!(held.len(), 3);
    assert!(!take_all(&places, ask(77)).is_empty());
}

/// Components with sixteen memories used up the slots of all with four calls.
#[test]
fn an_instance_counts_by_its_memories() {
    let places = Places::default();
    let wide = Ask { memories: 16, bytes: 1, ..ask(1) };
    assert_eq!(take_all(&places, wide).len(), 2);
    assert_eq!(take_all(&places, Ask { slow: true, ..wide }).len(), 1);
}

#[test]
fn who_waits_is_served_in_turn_and_holds_up_no_other_driver() {
    let places = Places::default();
    let mut held: Vec<_> =
        (0..SLOW_CALLS_PER_DRIVER).filter_map(|_| places.take(slow(1)).now_or_never()).collect();
    let (mut first, mut second) = (Box::pin(places.take(slow(1))), Box::pin(places.take(ask(1))));
    assert!((&mut first).now_or_never().is_none());
    assert!((&mut second).now_or_never().is_none(), "it came later");
    let other = places.take(slow(2)).now_or_never();
    assert!(other.is_some());
    held.pop();
    let first = (&mut first).now_or_never().expect("it is served");
    let second = (&mut second).now_or_never().expect("it fits, and nobody is before it");
    drop((first, second));
}

#[test]
fn a_wait_that_is_given_up_leaves_nothing() {
    let places = Places::default();
    let mut held = take_all(&places, slow(1));
    {
        let mut gone = Box::pin(places.take(slow(1)));
        assert!((&mut gone).now_or_never().is_none());
        held.pop();
        // Its place is under way to it.
    }
    let mut next = Box::pin(places.take(slow(1)));
    assert!((&mut next).now_or_never().is_some());
    drop((held, next));
    assert_eq!(places.state().held.all, Load::default());
    assert!(places.state().held.owners.is_empty());
}

#[test]
fn who_waits_behind_one_that_gives_up_waits_no_longer() {
    let places = Places::default();
    let _held: Vec<_> = (2..10).flat_map(|owner| take_all(&places, slow(owner))).collect();
    let mut first = Box::pin(places.take(slow(1)));
    assert!((&mut first).now_or_never().is_none());
    let mut behind = Box::pin(places.take(ask(1)));
    assert!((&mut behind).now_or_never().is_none(), "it came later");
    drop(first);
    assert!((&mut behind).now_or_never().is_some());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_bounds_hold_and_everybody_is_served_in_the_end(
        asks in prop::collection::vec((0..6u64, any::<bool>(), 1..17usize, 1..9usize), 1..120),
        ends in prop::collection::vec(any::<prop::sample::Index>(), 0..120),
    ) {
        let places = Places::default();
        let (mut held, mut waiting) = (Vec::new(), Vec::new());
        let ask = |&(owner, slow, memories, part): &(u64, bool, usize, usize)| Ask { owner, slow, memories, bytes: part * CALL_MEMORY, own_max: CALLS_PER_DRIVER };
        for asked in &asks {
            let mut wait = Box::pin(places.take(ask(asked)));
            match (&mut wait).now_or_never() {
                Some(place) => held.push(place),
                None => waiting.push(wait),
            }
        }
        let mut ends = ends.into_iter();
        while !(held.is_empty() && waiting.is_empty()) {
            {
                let state = places.state();
                let (all, slow) = (state.held.all, state.held.slow);
                prop_assert!(all.memories <= CALLS_MAX && all.bytes <= CALLS_MEMORY_MAX);
                prop_assert!(slow.calls <= SLOW_CALLS_MAX && slow.bytes <= SLOW_CALLS_MEMORY_MAX);
                prop_assert!(state.held.owners.values().all(|own| own.all.calls <= CALLS_PER_DRIVER));
            }
            prop_assert!(!held.is_empty(), "{} wait and nobody holds anything", waiting.len());
            let last = held.len() - 1;
            drop(held.swap_remove(ends.next().map_or(last, |index| index.index(held.len()))));
            let (served, still): (Vec<_>, Vec<_>) = waiting.into_iter().map(|mut wait| {
                let place = (&mut wait).now_or_never();
                (place, wait)
            }).partition(|(place, _)| place.is_some());
            held.extend(served.into_iter().filter_map(|(place, _)| place));
            waiting = still.into_iter().map(|(_, wait)| wait).collect();
        }
        prop_assert!(places.state().held.owners.is_empty());
    }
}
