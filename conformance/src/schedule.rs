//! The order of the cases of a run: which may begin now, and which are not run because one that they need did not pass. Pure.

use crate::list::Case;
use crate::report::Outcome;

/// Cases that take long: each begins as soon as it can, and the others run beside it.
pub(crate) const LONG: [&str; 4] = [
    "conduct.memory",
    "crash.in-prepare",
    "crash.in-unprepare",
    "features.health-list",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    Running,
    Ended { has_passed: bool },
}

/// The cases of a run in the order of the list, each after those that it needs.
#[derive(Debug)]
pub(crate) struct Schedule<'a> {
    cases: Vec<(&'a Case, State)>,
    long_first: bool,
}

impl<'a> Schedule<'a> {
    /// Without `long_first` cases begin in the order of the list.
    pub(crate) fn new(cases: impl IntoIterator<Item = &'a Case>, long_first: bool) -> Self {
        let cases = cases.into_iter().map(|case| (case, State::Waiting));
        Self {
            cases: cases.collect(),
            long_first,
        }
    }

    /// Begins a case whose needs have ended: its place, and the case. `None`: all have begun, or the others wait for one that runs.
    pub(crate) fn begin(&mut self) -> Option<(usize, &'a Case)> {
        let ready = (0..self.cases.len()).filter(|place| {
            let (case, state) = self.cases[*place];
            state == State::Waiting
                && self
                    .needs(case)
                    .all(|(_, state)| matches!(state, State::Ended { .. }))
        });
        let place = ready.min_by_key(|place| {
            let is_long = LONG.contains(&self.cases[*place].0.id.as_str());
            (!(self.long_first && is_long), *place)
        })?;
        self.cases[place].1 = State::Running;
        Some((place, self.cases[place].0))
    }

    pub(crate) fn end(&mut self, place: usize, outcome: &Outcome) {
        self.cases[place].1 = State::Ended {
            has_passed: *outcome == Outcome::Passed,
        };
    }

    /// Why a case says nothing: one that it needs did not pass.
    pub(crate) fn blocks(&self, case: &Case) -> Option<Outcome> {
        let mut needs = self.needs(case);
        let (before, _) = needs.find(|(_, state)| *state == State::Ended { has_passed: false })?;
        Some(Outcome::NotDeclared(format!(
            "not run: it needs {}",
            before.id
        )))
    }

    /// Cases that a case needs, with their states.
    fn needs(&self, case: &Case) -> impl Iterator<Item = (&'a Case, State)> {
        let cases = self.cases.iter().copied();
        cases.filter(move |(other, _)| case.after.contains(&other.id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(id: &str, after: &[&str]) -> Case {
        Case {
            id: id.to_owned(),
            sentence: "It is so.".to_owned(),
            expect: None,
            source: "a page".to_owned(),
            after: after.iter().map(ToString::to_string).collect(),
            condition: None,
        }
    }

    fn cases() -> [Case; 4] {
        [
            case("wire.a", &[]),
            case("wire.b", &["wire.a"]),
            case("wire.c", &["wire.a"]),
            case("conduct.memory", &["wire.a"]),
        ]
    }

    fn begun(schedule: &mut Schedule<'_>) -> Vec<String> {
        std::iter::from_fn(|| schedule.begin().map(|(_, case)| case.id.clone())).collect()
    }

    #[test]
    fn cases_begin_when_needs_end() {
        let cases = cases();
        for (long_first, expected) in [
            (true, ["conduct.memory", "wire.b", "wire.c"]),
            (false, ["wire.b", "wire.c", "conduct.memory"]),
        ] {
            let mut schedule = Schedule::new(&cases, long_first);
            assert_eq!(begun(&mut schedule), ["wire.a"]);
            schedule.end(0, &Outcome::Passed);
            assert_eq!(begun(&mut schedule), expected);
            assert_eq!(schedule.begin(), None);
        }
    }

    #[test]
    fn failed_needs_block_a_case() {
        let cases = cases();
        let why = "not run: it needs wire.a".to_owned();
        for (outcome, blocked) in [
            (Outcome::Passed, None),
            (
                Outcome::Failed("no".to_owned()),
                Some(Outcome::NotDeclared(why.clone())),
            ),
            (
                Outcome::NotDeclared("none".to_owned()),
                Some(Outcome::NotDeclared(why.clone())),
            ),
        ] {
            let mut schedule = Schedule::new(&cases, false);
            assert_eq!(schedule.blocks(&cases[1]), None, "it has not ended");
            schedule.begin();
            schedule.end(0, &outcome);
            assert_eq!(schedule.blocks(&cases[1]), blocked);
            assert_eq!(schedule.blocks(&cases[0]), None);
        }
    }

    #[test]
    fn every_case_runs_once() {
        let list = crate::list::cases().unwrap();
        for long_first in [true, false] {
            let mut schedule = Schedule::new(&list, long_first);
            let mut places = Vec::new();
            while let Some((place, _)) = schedule.begin() {
                schedule.end(place, &Outcome::Passed);
                places.push(place);
            }
            places.sort_unstable();
            assert!(places.into_iter().eq(0..list.len()));
        }
        let is_case = |id: &&str| list.iter().any(|case| case.id == **id);
        assert!(LONG.iter().all(is_case));
    }
}
