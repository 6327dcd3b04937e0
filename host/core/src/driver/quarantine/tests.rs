use proptest::prelude::*;

use super::*;

/// A quarantine and the time.
struct Story {
    quarantine: Quarantine,
    now: Instant,
}

impl Story {
    fn new() -> Self {
        Self {
            quarantine: Quarantine::default(),
            now: Instant::now(),
        }
    }

    fn enter(&mut self) -> Option<Admitted> {
        self.quarantine.admit(self.now).ok()
    }

    fn fail(&mut self, entry: Admitted, function: Operation) {
        self.quarantine
            .failed(entry, function, || "it trapped".to_owned(), self.now, 0);
    }

    fn fail_times(&mut self, function: Operation, times: u32) {
        for _ in 0..times {
            let entry = self.enter().expect("it is not held yet");
            self.fail(entry, function);
        }
    }

    fn quarantined() -> Self {
        let mut story = Self::new();
        story.fail_times(Operation::Prepare, FAILURES_MAX);
        story
    }

    fn left(&self) -> Option<Duration> {
        self.quarantine
            .period()
            .map(|period| period.until - self.now)
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    /// The probe, as soon as there may be one.
    fn probe(&mut self) -> Admitted {
        self.pass(self.left().expect("it is held"));
        self.enter().expect("the time is over")
    }
}

#[test]
fn consecutive_failures_start_a_quarantine() {
    let mut story = Story::new();
    story.fail_times(Operation::Prepare, FAILURES_MAX - 1);
    assert_eq!(story.left(), None);
    story.fail_times(Operation::Prepare, 1);
    assert_eq!(story.left(), Some(PERIOD_MIN));
    let period = story.quarantine.period().unwrap();
    assert_eq!(
        (period.failures, period.why.as_str()),
        (FAILURES_MAX, "it trapped")
    );
    assert_eq!(story.enter(), None);
    story.pass(PERIOD_MIN - Duration::from_millis(1));
    assert_eq!(story.enter(), None);
}

#[test]
fn success_resets_failures_of_its_function() {
    let mut story = Story::new();
    for _ in 0..10 {
        story.fail_times(Operation::Prepare, FAILURES_MAX - 1);
        let entry = story.enter().unwrap();
        story.quarantine.succeeded(entry, Operation::Prepare);
    }
    assert_eq!(story.left(), None);
}

/// A driver that answered each discover and trapped in each prepare was never quarantined.
#[test]
fn success_keeps_failures_of_other_functions() {
    let mut story = Story::new();
    for _ in 0..FAILURES_MAX {
        assert_eq!(story.left(), None);
        story.fail_times(Operation::Prepare, 1);
        story
            .quarantine
            .succeeded(Admitted::Ordinary, Operation::Discover);
    }
    assert_eq!(story.left(), Some(PERIOD_MIN));
    let look = story.probe();
    story.quarantine.succeeded(look, Operation::Discover);
    assert_eq!(story.left(), None, "a success ends it");
    story.fail_times(Operation::Prepare, 1);
    assert_eq!(
        story.left(),
        Some(PERIOD_MIN * 2),
        "and one more failure of the other is enough"
    );
}

#[test]
fn failed_probe_doubles_period_to_maximum() {
    let mut story = Story::quarantined();
    let since = story.quarantine.period().unwrap().since;
    for doubled in [10, 20, 40, 80, 160, 300, 300] {
        let probe = story.probe();
        story.fail(probe, Operation::Prepare);
        assert_eq!(story.left(), Some(Duration::from_secs(doubled)));
    }
    assert_eq!(story.quarantine.period().unwrap().since, since);
}

#[test]
fn quarantine_ends_when_a_probe_succeeds() {
    let mut story = Story::quarantined();
    let probe = story.probe();
    story.fail(probe, Operation::Prepare);
    let probe = story.probe();
    assert_eq!(story.enter(), None, "one probe at a time");
    story.quarantine.succeeded(probe, Operation::Prepare);
    assert_eq!(
        (story.left(), story.enter()),
        (None, Some(Admitted::Ordinary))
    );
    story.fail_times(Operation::Prepare, FAILURES_MAX);
    assert_eq!(story.left(), Some(PERIOD_MIN));
}

#[test]
fn cancelled_probe_admits_another() {
    let mut story = Story::quarantined();
    let first = story.probe();
    story.quarantine.cancelled(first);
    let second = story.enter().expect("the place is free");
    assert_ne!(first, second);
    // What the first one says now means nothing.
    story.quarantine.cancelled(first);
    story.quarantine.succeeded(first, Operation::Prepare);
    assert_eq!(story.enter(), None);
}

#[test]
fn earlier_calls_do_not_affect_quarantine() {
    let mut story = Story::quarantined();
    story.fail(Admitted::Ordinary, Operation::Prepare);
    story
        .quarantine
        .succeeded(Admitted::Ordinary, Operation::Unprepare);
    assert_eq!(story.left(), Some(PERIOD_MIN));
}

#[test]
fn operator_ends_quarantine_during_probe() {
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
fn take(story: &mut Story, open: &mut Vec<Admitted>, step: &Step) {
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
        Step::Leave(of) => end(of)
            .into_iter()
            .for_each(|entry| story.quarantine.cancelled(entry)),
        Step::Succeed(of, number) => {
            let succeed = |entry| story.quarantine.succeeded(entry, function(*number));
            end(of).into_iter().for_each(succeed);
        }
        Step::Fail(of, number, chance) => {
            let now = story.now;
            let fail = |entry| {
                story
                    .quarantine
                    .failed(entry, function(*number), String::new, now, *chance)
            };
            end(of).into_iter().for_each(fail);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn probes_and_periods_stay_bounded(steps in steps()) {
        let (mut story, mut open) = (Story::new(), Vec::new());
        for step in &steps {
            let before = story.quarantine.period().cloned();
            take(&mut story, &mut open, step);
            let probes = open.iter().filter(|entry| story.quarantine.is_the_probe(**entry)).count();
            let period = story.quarantine.period();
            prop_assert_eq!(probes, usize::from(period.is_some_and(QuarantinePeriod::is_probed)), "a probe is lost, or one too many");
            match (&before, period) {
                (Some(known), Some(period)) if known.until == period.until => {
                    let entered = matches!(step, Step::Enter) && open.last().is_some_and(|e| *e != Admitted::Ordinary) && !known.is_probed() && period.is_probed();
                    prop_assert!(!entered || story.now >= period.until, "it was tried too early");
                }
                (_, Some(period)) => {
                    let left = period.until - story.now;
                    prop_assert!(left >= PERIOD_MIN * 3 / 4 && left <= PERIOD_MAX, "{left:?}");
                    prop_assert!(before.is_some() || story.quarantine.failures() >= FAILURES_MAX);
                }
                (_, None) => prop_assert!(story.enter().is_some(), "what is not held may be called"),
            }
        }
    }
}
