//! Parses the output of `cargo test` line by line while it is printed: which tests ran, and their outcome.
//!
//! Cargo names each binary on standard error before it starts it; the binary lists its tests on standard output. The parser matches
//! the two by their order. Doc tests come last, and those of one crate may run in several parts: their paths differ, so they all
//! count as the binary `doc`.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};

/// Outcome of a test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Passed,
    Failed,
    Ignored,
    /// It passed without running its checks, for this reason.
    Skipped(String),
    /// It exists and did not run.
    Listed,
}

/// Binary name of doc tests.
const DOC_TESTS: &str = "doc";

/// Every test of a run, by `BINARY PATH`.
pub(crate) type Outcomes = BTreeMap<String, Outcome>;

/// Parses standard error of a run.
#[derive(Debug, Default)]
pub(crate) struct Binaries {
    names: Vec<String>,
    /// Crates whose doc tests ran.
    documented: usize,
    /// Index of the binary, path of the test, the skipped part and the reason.
    skipped: Vec<(usize, String, String)>,
}

impl Binaries {
    pub(crate) fn line(&mut self, line: &str) {
        let line = line.trim();
        if line.starts_with("Doc-tests ") {
            self.documented += 1;
        } else if let Some(name) = line.strip_prefix("Running ").and_then(binary) {
            self.names.push(name.to_owned());
        } else if let Some((path, why)) = line
            .strip_prefix("skipped in ")
            .and_then(|rest| rest.split_once(": "))
        {
            let number = self.names.len().saturating_sub(1);
            self.skipped.push((number, path.to_owned(), why.to_owned()));
        }
    }
}

/// Parses the name in `tests/crash/main.rs (target/debug/deps/crash-0123456789abcdef)`.
fn binary(running: &str) -> Option<&str> {
    let path = running.strip_suffix(')')?.rsplit_once(" (")?.1;
    let file = path.rsplit('/').next()?;
    file.rsplit_once('-').map(|(name, _hash)| name)
}

/// Parses standard output of a run: the tests of each binary.
#[derive(Debug, Default)]
pub(crate) struct Results {
    runs: Vec<Vec<(String, Outcome)>>,
    /// Tests of the current binary.
    listed: Vec<(String, Outcome)>,
}

impl Results {
    pub(crate) fn line(&mut self, line: &str) {
        let line = line.trim_end();
        if let Some(result) = line.strip_prefix("test ").and_then(result) {
            self.runs
                .last_mut()
                .into_iter()
                .for_each(|run| run.push(result.clone()));
        } else if let Some(path) = line.strip_suffix(": test") {
            self.listed.push((path.to_owned(), Outcome::Listed));
        } else if is_count(line, "running ", &[" test", " tests"]) {
            self.runs.push(Vec::new());
        } else if is_count(line, "", &[" tests, 0 benchmarks", " test, 0 benchmarks"]) {
            self.runs.push(std::mem::take(&mut self.listed));
        }
    }

    /// Returns every test that ran, with the binaries' names.
    ///
    /// # Errors
    ///
    /// A binary that cargo named listed no tests, or an unnamed binary did.
    pub(crate) fn named(self, binaries: Binaries) -> Result<Outcomes> {
        let (named, documented, ran) = (binaries.names.len(), binaries.documented, self.runs.len());
        let (own, docs) = self.runs.split_at(named.min(ran));
        let in_order = own.iter().all(|run| count_of_docs(run) == 0)
            && docs.iter().all(|run| count_of_docs(run) == run.len());
        ensure!(
            ran >= named + documented && (documented > 0 || ran == named) && in_order,
            "cargo named {named} test binaries and {documented} crates with doc tests, and {ran} listed tests: \
             its output is not understood"
        );
        let mut outcomes = Outcomes::new();
        let names = binaries
            .names
            .iter()
            .map(String::as_str)
            .chain(std::iter::repeat(DOC_TESTS));
        for (name, run) in names.zip(self.runs) {
            outcomes.extend(
                run.into_iter()
                    .map(|(path, outcome)| (format!("{name} {path}"), outcome)),
            );
        }
        for (number, path, why) in binaries.skipped {
            let name = binaries.names.get(number).map_or("", String::as_str);
            if let Some(outcome @ Outcome::Passed) = outcomes.get_mut(&format!("{name} {path}")) {
                *outcome = Outcome::Skipped(why);
            }
        }
        Ok(outcomes)
    }
}

fn count_of_docs(run: &[(String, Outcome)]) -> usize {
    run.iter()
        .filter(|(path, _)| path.contains(".rs - "))
        .count()
}

/// Parses path and outcome in `PATH ... ok`; a test that must panic is marked between them.
fn result(text: &str) -> Option<(String, Outcome)> {
    let (path, end) = text.split_once(" ... ")?;
    let outcome = match end.split(',').next()? {
        "ok" => Outcome::Passed,
        "FAILED" => Outcome::Failed,
        "ignored" => Outcome::Ignored,
        _ => return None,
    };
    Some((path.trim_end_matches(" - should panic").to_owned(), outcome))
}

/// Parses a line of `prefix`, a number, and one of `suffixes`.
fn is_count(line: &str, prefix: &str, suffixes: &[&str]) -> bool {
    let rest = line.strip_prefix(prefix);
    let count = rest.and_then(|rest| suffixes.iter().find_map(|suffix| rest.strip_suffix(suffix)));
    count.is_some_and(|count| !count.is_empty() && count.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ERRORS: &str = "\
   Compiling nodedock v0.1.0
     Running unittests src/lib.rs (target/debug/deps/nodedock-0f1e)
     Running unittests src/main.rs (target/debug/deps/nodedock-aaaa)
     Running tests/inter op/main.rs (/t (1)/debug/deps/inter_op-1-2b3c)
skipped in go::list: an agent in Go: Go is not installed: really
skipped in never::ran: nothing: no
   Doc-tests nodedock_sdk
";
    const RESULTS: &str = "
running 3 tests
test a::good ... ok
test a::panics - should panic ... ok
test a::costly ... ignored, takes a day

test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.1s

running 0 tests

test result: ok. 0 passed

running 1 test
test go::list has been running for over 60 seconds
test go::list ... ok

running 1 test
test sdk/src/lib.rs - claim (line 7) ... FAILED

running 1 test
test sdk/src/lib.rs - export (line 9) - compile fail ... ok
";

    fn outcomes(errors: &str, results: &str) -> Vec<(String, Outcome)> {
        let (mut binaries, mut read) = (Binaries::default(), Results::default());
        errors.lines().for_each(|line| binaries.line(line));
        results.lines().for_each(|line| read.line(line));
        read.named(binaries).unwrap().into_iter().collect()
    }

    /// Returns why the output of a run cannot be parsed.
    fn misunderstood(errors: &str, results: &str) -> String {
        let (mut binaries, mut read) = (Binaries::default(), Results::default());
        errors.lines().for_each(|line| binaries.line(line));
        results.lines().for_each(|line| read.line(line));
        read.named(binaries).unwrap_err().to_string()
    }

    fn with_names(expected: &[(&str, Outcome)]) -> Vec<(String, Outcome)> {
        expected
            .iter()
            .map(|(name, outcome)| ((*name).to_owned(), outcome.clone()))
            .collect()
    }

    #[test]
    fn tests_are_keyed_by_their_binary() {
        let why = Outcome::Skipped("an agent in Go: Go is not installed: really".to_owned());
        let expected = [
            ("doc sdk/src/lib.rs - claim (line 7)", Outcome::Failed),
            (
                "doc sdk/src/lib.rs - export (line 9) - compile fail",
                Outcome::Passed,
            ),
            ("inter_op-1 go::list", why),
            ("nodedock a::costly", Outcome::Ignored),
            ("nodedock a::good", Outcome::Passed),
            ("nodedock a::panics", Outcome::Passed),
        ];
        assert_eq!(outcomes(ERRORS, RESULTS), with_names(&expected));
    }

    #[test]
    fn a_list_tells_what_is_there() {
        let list = "a::good: test\n\n1 test, 0 benchmarks\na::costly: test\n\n1 test, 0 benchmarks\n\
                    go::list: test\n\n1 test, 0 benchmarks\n\n0 tests, 0 benchmarks\n";
        let expected = [
            ("inter_op-1 go::list", Outcome::Listed),
            ("nodedock a::costly", Outcome::Listed),
            ("nodedock a::good", Outcome::Listed),
        ];
        assert_eq!(outcomes(ERRORS, list), with_names(&expected));
    }

    #[test]
    fn failed_test_is_not_skipped() {
        let found = outcomes(
            ERRORS,
            &RESULTS.replace("go::list ... ok", "go::list ... FAILED"),
        );
        assert_eq!(found[2].1, Outcome::Failed);
    }

    #[test]
    fn lines_outside_the_harness_are_ignored() {
        let noise =
            "test of patience\ntest a ... maybe\nrunning tests\nrunning 1 errand\n2 tests\n";
        assert_eq!(
            outcomes("Running late\nRunning a (b)\nskipped in haste\n", noise),
            []
        );
        assert_eq!(outcomes("", "test a ... ok\n"), []);
    }

    #[test]
    fn binaries_and_results_have_to_match() {
        assert!(
            misunderstood("", RESULTS)
                .contains("cargo named 0 test binaries and 0 crates with doc tests, and 5 listed")
        );
        assert!(
            misunderstood(ERRORS, "")
                .contains("cargo named 3 test binaries and 1 crates with doc tests, and 0 listed")
        );
        // The output that a terminal would show.
        let coloured = ERRORS.replace("Running", "\u{1b}[1m\u{1b}[92mRunning\u{1b}[0m");
        assert!(
            misunderstood(&coloured, RESULTS).contains("named 0 test"),
            "cargo must not colour its output"
        );
    }
}
