use proptest::prelude::*;

use super::*;
use nodedock_model::limit::{QUARANTINE_FAILURES, QUARANTINE_MAX, QUARANTINE_MIN};

/// A quarantine and the time.
struct Story {
    quarantine: Quarantine,
    now: Instant,
}

impl Story {
    fn new() -> Self {
        Self { quarantine: Quarantine::default(), now: Instant::now() }
    }

    fn enter(&mut self) -> Option<Entry> {
        self.quarantine.admit(self.now).ok()
    }

    fn fail(&mut self, entry: Entry, function: Operation) {
        self.quarantine.failed(entry, function, || "it trapped".to_owned(), self.now, 0);
    }

    fn fail_times(&mut self, function: Operation, times: u32) {
        for _ in 0..times {
            let entry = self.enter().expect("it is not held yet");
            self.fail(entry, function);
        }
    }

    fn quarantined() -> Self {
        let mut story = Self::new();
        story.fail_times(Operation::Prepare, QUARANTINE_FAILURES);
        story
    }

    fn left(&self) -> Option<Duration> {
        self.quarantine.hold().map(|hold| hold.until - self.now)
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    /// The probe, as soon as there may be one.
    fn probe(&mut self) -> Entry {
        self.pass(self.left().expect("it is held"));
        self.enter().expect("the time is over")
    }
}

#[test]
fn failures_in_a_row_hold_the_driver_and_fewer_do_not() {
    let mut story = Story::new();
    story.fail_times(Operation::Prepare, QUARANTINE_FAILURES - 1);
    assert_eq!(story.left(), None);
    story.fail_times(Operation::Prepare, 1);
    assert_eq!(story.left(), Some(QUARANTINE_MIN));
    let hold = story.quarantine.hold().unwrap();
    assert_eq!((hold.failures, hold.why.as_str()), (QUARANTINE_FAILURES, "it trapped"));
    assert_eq!(story.enter(), None);
    story.pass(QUARANTINE_MIN - Duration::from_millis(1));
    assert_eq!(story.enter(), None);
}

#[test]
fn a_success_between_failures_of_a_function_breaks_their_row() {
    let mut story = Story::new();
    for _ in 0..10 {
        story.fail_times(Operation::Prepare, QUARANTINE_FAILURES - 1);
        let entry = story.enter().unwrap();
        story.quarantine.succeeded(entry, Operation::Prepare);
    }
    assert_eq!(story.left(), None);
}

/// A driver that answered each look well and trapped in each prepare was never left alone.
#[test]
fn a_success_does_not_speak_for_other_functions() {
    let mut story = Story::new();
    for _ in 0..QUARANTINE_FAILURES {
        assert_eq!(story.left(), None);
        story.fail_times(Operation::Prepare, 1);
        story.quarantine.succeeded(Entry::Ordinary, Operation::Discover);
    }
    assert_eq!(story.left(), Some(QUARANTINE_MIN));
    let look = story.probe();
    story.quarantine.succeeded(look, Operation::Discover);
    assert_eq!(story.left(), None, "a success ends it");
    story.fail_times(Operation::Prepare, 1);
    assert_eq!(story.left(), Some(QUARANTINE_MIN * 2), "and one more failure of the other is enough");
}

#[test]
fn each_probe_that_fails_doubles_the_time_up_to_the_longest() {
    let mut story = Story::quarantined();
    let since = story.quarantine.hold().unwrap().since;
    for doubled in [10, 20, 40, 80, 160, 300, 300] {
        let probe = story.probe();
        story.fail(probe, Operation::Prepare);
        assert_eq!(story.left(), Some(Duration::from_secs(doubled)));
    }
    assert_eq!(story.quarantine.hold().unwrap().since, since);
}

#[test]
fn a_probe_that_succeeds_ends_it_and_the_next_begins_with_the_shortest_time() {
    let mut story = Story::quarantined();
    let probe = story.probe();
    story.fail(probe, Operation::Prepare);
    let probe = story.probe();
    assert_eq!(story.enter(), None, "one probe at a time");
    story.quarantine.succeeded(probe, Operation::Prepare);
    assert_eq!((story.left(), story.enter()), (None, Some(Entry::Ordinary)));
    story.fail_times(Operation::Prepare, QUARANTINE_FAILURES);
    assert_eq!(story.left(), Some(QUARANTINE_MIN));
}

#[test]
fn a_probe_that_is_given_up_gives_its_place_back() {
    let mut story = Story::quarantined();
    let first = story.probe();
    story.quarantine.left(first);
    let second = story.enter().expect("the place is free");
    assert_ne!(first, second);
    // What the first one says now means nothing.
    story.quarantine.left(first);
    story.quarantine.succeeded(first, Operation::Prepare);
    assert_eq!(story.enter(), None);
}

#[test]
fn calls_that_began_before_neither_end_nor_lengthen_it() {
    let mut story = Story::quarantined();
    story.fail(Entry::Ordinary, Operation::Prepare);
    story.quarantine.succeeded(Entry::Ordinary, Operation::Unprepare);
    assert_eq!(story.left(), Some(QUARANTINE_MIN));
}

#[test]
fn an_operator_ends_it_also_while_a_probe_runs() {
    let mut story = Story::quarantined();
    let probe = story.probe();
    assert!(story.quarantine.resume());
    assert!(!story.quarantine.resume());
    story.fail(probe, Operation::Prepare);
    assert_eq!((story.left(), story.quarantine.failures()), (None, 1));
}

#[derive(Debug, Clone)]
enum Step {
    Enter,
    Succeed(prop::sample::Index, u8),
    Fail(prop::sample::Index, u8, u64),
    Leave(prop::sample::Index),
    Pass(u32),
    Resume,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let index = any::<prop::sample::Index>;
    let step = prop_oneof![
        6 => Just(Step::Enter),
        2 => (index(), 0..6u8).prop_map(|(of, function)| Step::Succeed(of, function)),
        6 => (index(), 0..6u8, any::<u64>()).prop_map(|(of, function, chance)| Step::Fail(of, function, chance)),
        1 => index().prop_map(Step::Leave),
        3 => (0..400_000u32).prop_map(Step::Pass),
        1 => Just(Step::Resume),
    ];
    prop::collection::vec(step, 0..200)
}

fn function(number: u8) -> Operation {
    use Operation::*;
    [Describe, Discover, Health, Validate, Prepare, Unprepare][usize::from(number)]
}

/// Carries a step out. `open` are the calls under way.
fn take(story: &mut Story, open: &mut Vec<Entry>, step: &Step) {
    let mut end = |of: &prop::sample::Index| match open.is_empty() {
        true => None,
        false => Some(open.swap_remove(of.index(open.len()))),
    };
    match step {
        Step::Enter => open.extend(story.enter()),
        Step::Pass(ms) => story.pass(Duration::from_millis((*ms).into())),
        Step::Resume => {
            story.quarantine.resume();
        }
        Step::Leave(of) => end(of).into_iter().for_each(|entry| story.quarantine.left(entry)),
        Step::Succeed(of, number) => {
            let succeed = |entry| story.quarantine.succeeded(entry, function(*number));
            end(of).into_iter().for_each(succeed);
        }
        Step::Fail(of, number, chance) => {
            let now = story.now;
            let fail = |entry| story.quarantine.failed(entry, function(*number), String::new, now, *chance);
            end(of).into_iter().for_each(fail);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_there_is_one_probe_at_most_and_every_hold_is_bounded(steps in steps()) {
        let (mut story, mut open) = (Story::new(), Vec::new());
        for step in &steps {
            let before = story.quarantine.hold().cloned();
            take(&mut story, &mut open, step);
            let probes = open.iter().filter(|entry| story.quarantine.is_the_probe(**entry)).count();
            let hold = story.quarantine.hold();
            prop_assert_eq!(probes, usize::from(hold.is_some_and(Hold::is_probed)), "a probe is lost, or one too many");
            match (&before, hold) {
                (Some(known), Some(hold)) if known.until == hold.until => {
                    let entered = matches!(step, Step::Enter) && open.last().is_some_and(|e| *e != Entry::Ordinary) && !known.is_probed() && hold.is_probed();
                    prop_assert!(!entered || story.now >= hold.until, "it was tried too early");
                }
                (_, Some(hold)) => {
                    let left = hold.until - story.now;
                    prop_assert!(left >= QUARANTINE_MIN * 3 / 4 && left <= QUARANTINE_MAX, "{left:?}");
                    prop_assert!(before.is_some() || story.quarantine.failures() >= QUARANTINE_FAILURES);
                }
                (_, None) => prop_assert!(story.enter().is_some(), "what is not held may be called"),
            }
        }
    }
}
