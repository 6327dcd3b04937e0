//! Results of the cases.

use std::time::Duration;

use anyhow::{Context, Result};
use quick_junit::{NonSuccessKind, TestCase, TestCaseStatus, TestSuite};
use serde::Serialize;

use crate::list::Case;

/// The result of a case.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", content = "reason", rename_all = "kebab-case")]
pub enum Outcome {
    Passed,
    Failed(String),
    /// The driver does not have what the case is about, or it was not run.
    NotDeclared(String),
}

impl Outcome {
    /// Reason of the cases that are not run because the driver did not come up.
    pub(crate) const NOTHING_REGISTERED: &str = "not run: nothing registered";

    /// Returns whether the case was not run because the driver did not come up, as all others.
    pub fn is_without_driver(&self) -> bool {
        matches!(self, Self::NotDeclared(why) if why == Self::NOTHING_REGISTERED)
    }
}

/// A case with its outcome.
#[derive(Debug, Clone, Serialize)]
pub struct CaseResult {
    #[serde(flatten)]
    pub case: Case,
    #[serde(flatten)]
    pub outcome: Outcome,
    #[serde(rename = "seconds", serialize_with = "seconds")]
    pub took: Duration,
    /// Messages exchanged with the driver in a failed case, in order, and the end of its output.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub messages: Vec<String>,
}

fn seconds<S: serde::Serializer>(time: &Duration, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(time.as_secs_f64())
}

/// The verdicts, in the order of the list.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    pub verdicts: Vec<CaseResult>,
}

impl Report {
    /// IDs of the cases that failed.
    pub fn failed(&self) -> Vec<&str> {
        let failed = self
            .verdicts
            .iter()
            .filter(|verdict| matches!(verdict.outcome, Outcome::Failed(_)));
        failed.map(|verdict| verdict.case.id.as_str()).collect()
    }

    /// Returns the numbers of cases that passed, failed and are not declared.
    pub fn counts(&self) -> [usize; 3] {
        let mut counts = [0; 3];
        for verdict in &self.verdicts {
            let index = match verdict.outcome {
                Outcome::Passed => 0,
                Outcome::Failed(_) => 1,
                Outcome::NotDeclared(_) => 2,
            };
            counts[index] += 1;
        }
        counts
    }

    /// Adds a result, after `progress` has seen it.
    pub(crate) fn add(&mut self, result: CaseResult, progress: &mut impl FnMut(&CaseResult)) {
        progress(&result);
        self.verdicts.push(result);
    }

    /// The report as JUnit has it: a suite for each level, what is not declared as skipped.
    ///
    /// # Errors
    ///
    /// None that is known: the text is written to memory.
    pub fn junit(&self) -> Result<String> {
        let mut junit = quick_junit::Report::new("nodedock conform");
        for level in self
            .verdicts
            .chunk_by(|a, b| a.case.level() == b.case.level())
        {
            let name = level[0].case.id.split('.').next().unwrap_or_default();
            let mut suite = TestSuite::new(name);
            for verdict in level {
                suite.add_test_case(verdict.junit());
            }
            junit.add_test_suite(suite);
        }
        junit.to_string().context("write JUnit")
    }
}

impl CaseResult {
    fn junit(&self) -> TestCase {
        let status = match &self.outcome {
            Outcome::Passed => TestCaseStatus::success(),
            Outcome::Failed(why) => {
                let mut status = TestCaseStatus::non_success(NonSuccessKind::Failure);
                status
                    .set_message(why)
                    .set_description(self.messages.join("\n"));
                status
            }
            Outcome::NotDeclared(why) => {
                let mut status = TestCaseStatus::skipped();
                status.set_message(why);
                status
            }
        };
        let mut case = TestCase::new(&self.case.id, status);
        case.set_time(self.took).set_classname(&self.case.sentence);
        case
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdict(id: &str, outcome: Outcome) -> CaseResult {
        let case = Case {
            id: id.to_owned(),
            sentence: "It is so.".to_owned(),
            expect: None,
            source: "a page".to_owned(),
            after: Vec::new(),
            condition: None,
        };
        CaseResult {
            case,
            outcome,
            took: Duration::from_millis(1500),
            messages: vec!["call <1>".to_owned()],
        }
    }

    #[test]
    fn report_separates_skips_and_explains_failures() {
        let verdicts = vec![
            verdict("wire.a", Outcome::Passed),
            verdict("wire.b", Outcome::Failed("no & yes".to_owned())),
            verdict("slices.c", Outcome::NotDeclared("none".to_owned())),
        ];
        let report = Report { verdicts };
        assert_eq!(
            (report.failed(), report.counts()),
            (vec!["wire.b"], [1, 1, 1])
        );
        let junit = report.junit().unwrap();
        for part in [
            r#"<testsuite name="wire" tests="2" skipped="0" errors="0" failures="1">"#,
            r#"<failure message="no &amp; yes">call &lt;1&gt;</failure>"#,
            r#"<skipped message="none"/>"#,
            r#"time="1.500""#,
        ] {
            assert!(junit.contains(part), "{part} is not in {junit}");
        }
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(json["verdicts"][1]["outcome"], "failed");
        assert_eq!(json["verdicts"][1]["seconds"], 1.5);
    }
}
