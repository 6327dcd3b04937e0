//! Parses `tests/parity.md`, the table of the tests of a kubelet and of its driver library with the equivalent tests here, and
//! compares it with a test run.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::output::{Outcome, Outcomes};

/// The sets of the table, and how many rows each has.
const SETS: [(&str, usize); 11] = [
    ("DC", 17),
    ("DH", 7),
    ("DM", 36),
    ("DP", 17),
    ("DS", 2),
    ("DV", 40),
    ("PM", 24),
    ("PR", 18),
    ("KP", 10),
    ("RS", 8),
    ("RC", 15),
];

/// Status of a row besides its tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Remark {
    Covered,
    Different,
    NotHere,
    NotYet,
}

impl Remark {
    const WRITTEN: [Self; 3] = [Self::Different, Self::NotHere, Self::NotYet];

    fn as_str(self) -> &'static str {
        match self {
            Self::Covered => "covered",
            Self::Different => "different",
            Self::NotHere => "not here",
            Self::NotYet => "not yet",
        }
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Row {
    id: String,
    line: usize,
    remark: Remark,
    /// Tests as `BINARY PATH`.
    tests: Vec<String>,
}

/// The parsed table.
#[derive(Debug)]
pub(crate) struct Parity(Vec<Row>);

/// Comparison of the table with a run.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ParityReport {
    counts: BTreeMap<&'static str, usize>,
    /// Rows of which a test skipped its checks, with the reason.
    skipped: Vec<String>,
    /// Rows that name a test that does not exist, did not run, or failed.
    pub(crate) broken: Vec<String>,
}

impl Parity {
    /// Parses the table. The error has a line for each defect.
    pub(crate) fn parse(text: &str) -> Result<Self, Vec<String>> {
        let (mut rows, mut wrong) = (Vec::<Row>::new(), Vec::new());
        for (line, text) in (1..).zip(text.lines()) {
            if let Some(id) = text
                .strip_prefix("**")
                .and_then(|rest| rest.split_once("**"))
                .map(|(id, _)| id)
            {
                rows.push(Row {
                    id: id.to_owned(),
                    line,
                    remark: Remark::Covered,
                    tests: Vec::new(),
                });
            } else if let Some(item) = text.strip_prefix("- ")
                && let Some(row) = rows.last_mut()
                && let Err(why) = row.add(item)
            {
                wrong.push(format!("line {line}: {}: {why}", row.id));
            }
        }
        wrong.extend(rows.iter().filter_map(Row::wrong));
        wrong.extend(wrong_ids(&rows));
        if wrong.is_empty() {
            Ok(Self(rows))
        } else {
            Err(wrong)
        }
    }

    pub(crate) fn judge(&self, outcomes: &Outcomes) -> ParityReport {
        let mut verdict = ParityReport::default();
        for row in &self.0 {
            *verdict.counts.entry(row.remark.as_str()).or_default() += 1;
            for test in &row.tests {
                let at = format!("line {}: {}: {test}", row.line, row.id);
                match outcomes.get(test) {
                    Some(Outcome::Passed | Outcome::Listed) => {}
                    Some(Outcome::Skipped(why)) => verdict.skipped.push(format!("{at}: {why}")),
                    Some(Outcome::Failed) => verdict.broken.push(format!("{at} failed")),
                    Some(Outcome::Ignored) => verdict.broken.push(format!("{at} is ignored")),
                    None => verdict.broken.push(format!("{at} does not exist")),
                }
            }
        }
        verdict
    }
}

impl Row {
    fn add(&mut self, item: &str) -> Result<(), String> {
        if let Some(test) = item.strip_prefix('`') {
            let test = test
                .strip_suffix('`')
                .ok_or("a test is the whole line, in backquotes")?;
            let is_whole =
                test.split(' ').count() == 2 && test.split(' ').all(|word| !word.is_empty());
            if !is_whole {
                return Err(format!("{test:?} is not a binary and the path of a test"));
            }
            if self.tests.iter().any(|known| known == test) {
                return Err(format!("{test:?} occurs twice"));
            }
            self.tests.push(test.to_owned());
            return Ok(());
        }
        let (word, why) = item
            .split_once(": ")
            .ok_or("a test in backquotes or a reason is wanted")?;
        let known = Remark::WRITTEN
            .into_iter()
            .find(|remark| remark.as_str() == word);
        let remark =
            known.ok_or_else(|| format!("{word:?} is none of different, not here, not yet"))?;
        if self.remark != Remark::Covered {
            return Err("one reason is enough".to_owned());
        }
        if why.trim().is_empty() {
            return Err("the reason is empty".to_owned());
        }
        self.remark = remark;
        Ok(())
    }

    fn wrong(&self) -> Option<String> {
        let says_nothing = self.tests.is_empty() && self.remark == Remark::Covered;
        says_nothing.then(|| {
            format!(
                "line {}: {} has neither a test nor a reason",
                self.line, self.id
            )
        })
    }
}

/// Checks that every id of the sets occurs once, and no other.
fn wrong_ids(rows: &[Row]) -> Vec<String> {
    let mut missing: BTreeSet<String> = SETS
        .into_iter()
        .flat_map(|(set, count)| (1..=count).map(move |n| format!("{set}{n:02}")))
        .collect();
    let all = missing.clone();
    let mut wrong = Vec::new();
    for Row { id, line, .. } in rows {
        if !missing.remove(id) {
            let why = if all.contains(id) {
                "is there twice"
            } else {
                "is of no set"
            };
            wrong.push(format!("line {line}: {id} {why}"));
        }
    }
    wrong.extend(missing.iter().map(|id| format!("{id} is missing")));
    wrong
}

impl fmt::Display for ParityReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let counts: Vec<_> = self
            .counts
            .iter()
            .map(|(what, count)| format!("{count} {what}"))
            .collect();
        write!(f, "parity with a kubelet: {}", counts.join(", "))?;
        for row in &self.skipped {
            write!(f, "\nskipped: parity: {row}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table with every id, each with the test `t a`, except for the given rows.
    fn table(rows: &[(&str, &str)]) -> String {
        let ids = SETS
            .into_iter()
            .flat_map(|(set, count)| (1..=count).map(move |n| format!("{set}{n:02}")));
        let row = |id: String| {
            let given = rows
                .iter()
                .find(|(known, _)| *known == id)
                .map_or("- `t a`", |(_, items)| *items);
            format!("**{id}** something\n\n{given}\n")
        };
        format!(
            "# Title\n\n- a list of the introduction\n\n{}",
            ids.map(row).collect::<String>()
        )
    }

    fn errors(text: &str) -> String {
        Parity::parse(text).unwrap_err().join("\n")
    }

    fn outcomes(pairs: &[(&str, Outcome)]) -> Outcomes {
        pairs
            .iter()
            .map(|(test, outcome)| ((*test).to_owned(), outcome.clone()))
            .collect()
    }

    #[test]
    fn parity_table_of_repository_parses() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity.md");
        let text = std::fs::read_to_string(path).unwrap();
        assert_eq!(Parity::parse(&text).unwrap().0.len(), 194);
    }

    #[test]
    fn rows_are_counted_by_their_kind() {
        let text = table(&[
            ("DC02", "- `t b`\n- different: because"),
            ("DC03", "- not here: because"),
            ("DC04", "- not yet: because"),
        ]);
        let verdict = Parity::parse(&text).unwrap().judge(&outcomes(&[
            ("t a", Outcome::Passed),
            ("t b", Outcome::Passed),
        ]));
        assert_eq!(verdict.broken, Vec::<String>::new());
        assert_eq!(
            verdict.to_string(),
            "parity with a kubelet: 191 covered, 1 different, 1 not here, 1 not yet"
        );
    }

    #[test]
    fn row_is_broken_without_passed_test() {
        let text = table(&[
            ("DC02", "- `t a`\n- `t b`"),
            ("PR18", "- `t c`"),
            ("PR17", "- `t d`"),
            ("PR16", "- `t e`"),
        ]);
        let run = [
            ("t a", Outcome::Passed),
            ("t c", Outcome::Failed),
            ("t d", Outcome::Ignored),
            ("t e", Outcome::Skipped("no Go".to_owned())),
            ("u b", Outcome::Passed),
        ];
        let verdict = Parity::parse(&text).unwrap().judge(&outcomes(&run));
        let ends: Vec<_> = verdict
            .broken
            .iter()
            .map(|row| row.split_once(": ").unwrap().1)
            .collect();
        assert_eq!(
            ends,
            [
                "DC02: t b does not exist",
                "PR17: t d is ignored",
                "PR18: t c failed"
            ]
        );
        assert!(
            verdict
                .to_string()
                .contains("\nskipped: parity: line 480: PR16: t e: no Go"),
            "{verdict}"
        );
    }

    #[test]
    fn empty_item_names_its_line() {
        for (items, why) in [
            ("", "line 5: DC01 has neither a test nor a reason"),
            (
                "- t a",
                "line 7: DC01: a test in backquotes or a reason is wanted",
            ),
            ("- `t a` and more", "line 7: DC01: a test is the whole line"),
            (
                "- `a`",
                "line 7: DC01: \"a\" is not a binary and the path of a test",
            ),
            ("- `t  a`", "is not a binary and the path of a test"),
            ("- `t a`\n- `t a`", "line 8: DC01: \"t a\" occurs twice"),
            (
                "- later: because",
                "line 7: DC01: \"later\" is none of different, not here, not yet",
            ),
            ("- not yet:  ", "the reason is empty"),
            (
                "- not yet: a\n- different: b",
                "line 8: DC01: one reason is enough",
            ),
        ] {
            let said = errors(&table(&[("DC01", items)]));
            assert!(said.contains(why), "{items:?}: {said}");
        }
    }

    #[test]
    fn every_id_occurs_exactly_once() {
        let good = table(&[]);
        assert_eq!(
            errors(&good.replace("**DV40**", "**DV41**")),
            "line 359: DV41 is of no set\nDV40 is missing"
        );
        assert_eq!(
            errors(&good.replace("**PM02**", "**PM01**")),
            "line 365: PM01 is there twice\nPM02 is missing"
        );
        assert!(errors("").contains("DS02 is missing"));
    }
}
