//! The current conditions of the node: each is set once, until it is cleared. `nodedock get node` and health show them.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::changes::Changes;
use crate::clock::now_ms;
use nodedock_model::{ChangedKind, Problem, ProblemCode};

/// A condition, and the time since when it exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Condition {
    /// The object of the condition: a file's path, a claim, or empty for the daemon itself.
    pub subject: String,
    pub problem: Problem,
    /// Milliseconds since the Unix epoch.
    pub since_ms: u64,
}

/// Handle to the node's conditions, which are keyed by the problem's code and the subject.
#[derive(Clone, Default)]
pub struct Conditions {
    current: Arc<Mutex<BTreeMap<(String, String), Condition>>>,
    changes: Changes,
}

impl Conditions {
    pub fn new(changes: Changes) -> Self {
        Self {
            current: Arc::default(),
            changes,
        }
    }

    /// Sets a condition. An existing one keeps its time and gets the new message; only a new one is logged.
    pub fn set(&self, subject: &str, problem: Problem) {
        let key = (problem.code.clone(), subject.to_owned());
        let mut current = self.current.lock();
        if let Some(known) = current.get_mut(&key) {
            known.problem = problem;
            return;
        }
        let code = problem.code.clone();
        tracing::warn!(subject, code, %problem, "the node has a problem");
        current.insert(
            key,
            Condition {
                subject: subject.to_owned(),
                problem,
                since_ms: now_ms(),
            },
        );
        drop(current);
        self.changes.report(ChangedKind::Node, subject, &code);
    }

    /// Clears a condition. Clearing an unknown one is no error.
    pub fn clear(&self, code: ProblemCode, subject: &str) {
        let Some(condition) = self
            .current
            .lock()
            .remove(&(code.into(), subject.to_owned()))
        else {
            return;
        };
        tracing::info!(subject, %code, problem = %condition.problem, "the node's problem is over");
        self.changes.report(ChangedKind::Node, subject, "over");
    }

    /// Sets the condition of a code, or clears it where there is no problem.
    pub fn update(&self, code: ProblemCode, subject: &str, problem: Option<Problem>) {
        match problem {
            Some(problem) => self.set(subject, problem),
            None => self.clear(code, subject),
        }
    }

    /// Returns whether a condition of a code is set for a subject.
    pub fn is_set(&self, code: ProblemCode, subject: &str) -> bool {
        let key = (code.into(), subject.to_owned());
        self.current.lock().contains_key(&key)
    }

    /// Clears the conditions of a code whose subject is not in `subjects`, for a caller that finds all of them at once.
    pub fn retain(&self, code: ProblemCode, subjects: impl Fn(&str) -> bool) {
        let current = self.current.lock();
        let over = current
            .keys()
            .filter(|(of, subject)| *of == code && !subjects(subject));
        let over: Vec<_> = over.map(|(_, subject)| subject.clone()).collect();
        drop(current);
        over.iter().for_each(|subject| self.clear(code, subject));
    }

    /// Sets these conditions of a code, by their subjects, and clears its others. Problems of other codes do not count.
    pub fn replace(&self, code: ProblemCode, problems: &BTreeMap<String, Problem>) {
        let is_of_code = |problem: &Problem| problem.code == code;
        self.retain(code, |subject| {
            problems.get(subject).is_some_and(is_of_code)
        });
        for (subject, problem) in problems.iter().filter(|(_, of)| is_of_code(of)) {
            self.set(subject, problem.clone());
        }
    }

    /// Returns the conditions, sorted by code and subject.
    pub fn list(&self) -> Vec<Condition> {
        self.current.lock().values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(words: &str) -> Problem {
        Problem::unavailable(ProblemCode::CheckpointDiskFull, words)
    }

    #[test]
    fn condition_is_published_until_cleared() {
        let changes = Changes::default();
        let mut listener = changes.listen();
        let conditions = Conditions::new(changes);
        conditions.set("/var", full("no space"));
        let since = conditions.list()[0].since_ms;
        conditions.set("/var", full("still no space"));
        assert_eq!(conditions.list().len(), 1);
        assert_eq!(conditions.list()[0].problem.message, "still no space");
        assert_eq!(conditions.list()[0].since_ms, since);
        assert!(conditions.is_set(ProblemCode::CheckpointDiskFull, "/var"));
        assert!(!conditions.is_set(ProblemCode::CheckpointDiskFull, "/tmp"));
        conditions.clear(ProblemCode::CheckpointDiskFull, "/tmp");
        conditions.clear(ProblemCode::CheckpointDiskFull, "/var");
        conditions.clear(ProblemCode::CheckpointDiskFull, "/var");
        assert_eq!(conditions.list(), []);
        let states: Vec<_> = std::iter::from_fn(|| listener.try_recv().ok())
            .map(|change| change.state)
            .collect();
        assert_eq!(states, ["checkpoint-disk-full", "over"]);
    }

    #[test]
    fn retain_clears_conditions_not_found() {
        let conditions = Conditions::default();
        conditions.set("a", full("no space"));
        conditions.set("b", full("no space"));
        conditions.set("a", Problem::internal("other", "something else"));
        conditions.retain(ProblemCode::CheckpointDiskFull, |subject| subject == "b");
        let left: Vec<_> = conditions
            .list()
            .into_iter()
            .map(|c| (c.problem.code, c.subject))
            .collect();
        assert_eq!(
            left,
            [
                ("checkpoint-disk-full".to_owned(), "b".to_owned()),
                ("other".to_owned(), "a".to_owned())
            ]
        );
    }
}
