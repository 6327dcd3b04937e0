//! Codes of problems, which are those of conditions too, and names of fail points.
//!
//! The codes stand in the sources of the host, in whatever crate: as texts that a problem is made with, or as an enum `…Code`.

use std::collections::BTreeSet;
use std::path::Path;

use nodedock_base::failpoint::Point;
use regex::Regex;

use crate::protocol::files_below;
use crate::{assert_frozen, fixture};

/// The host's sources without tests, fuzzing and comments.
fn sources() -> String {
    let host = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host");
    let others =
        Regex::new(r"(^|/)(tests|testing|fuzz|target)/|(tests?|_tests.*|/fixtures|/fuzz)\.rs$|/fake\w*\.rs$")
            .unwrap();
    let files = files_below(&host, "rs").into_iter();
    let files = files.filter(|file| !others.is_match(file.strip_prefix(&host).unwrap().to_str().unwrap()));
    let code = files.flat_map(|file| {
        let text = std::fs::read_to_string(&file).expect("read a source file");
        let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
        lines.map(|line| format!("{line}\n")).collect::<Vec<_>>()
    });
    code.collect()
}

/// First groups of all matches.
fn matches(rule: &str, text: &str) -> BTreeSet<String> {
    let rule = Regex::new(rule).expect("a regular expression");
    rule.captures_iter(text).map(|found| found[1].to_owned()).collect()
}

/// Codes that problems are made with, as far as that can be seen from the text.
fn made(sources: &str) -> BTreeSet<String> {
    const KINDS: &str =
        r"(?:invalid|denied|not_found|conflict|unavailable|internal)\(\s*|ProblemKind::\w+,\s*";
    let mut codes = matches(&format!(r#"(?:{KINDS})"([a-z][-a-z0-9]*)""#), sources);
    for name in matches(&format!(r"(?:{KINDS})(?:\w+::)*([A-Z][A-Z_]+)\s*[,)]"), sources) {
        codes.extend(matches(&format!(r#"const {name}: &str =\s*"([a-z][-a-z0-9]*)""#), sources));
    }
    for body in matches(r"(?s)fn code\(&?self\)[^{]*\{(.*?)\n    \}", sources) {
        codes.extend(matches(r#"=> "([a-z][-a-z0-9]*)""#, &body));
    }
    codes.extend(variants(sources));
    codes
}

/// Variants of enums that are named `…Code`, with dashes.
fn variants(sources: &str) -> BTreeSet<String> {
    let bodies = matches(r"(?s)enum \w*Code \{(.*?)\n\}", sources);
    let names = bodies.iter().flat_map(|body| matches(r"(?m)^    ([A-Z]\w*)", body));
    let upper = Regex::new("([a-z0-9])([A-Z])").expect("a regular expression");
    names.map(|name| upper.replace_all(&name, "$1-$2").to_lowercase()).collect()
}

#[test]
fn codes_of_problems_and_conditions_are_those_that_are_recorded() {
    let sources = sources();
    let path = fixture("problem-codes.txt");
    let recorded = std::fs::read_to_string(path).unwrap_or_default();
    let (made, variants) = (made(&sources), variants(&sources));
    assert!(made.len() > 100, "the codes are not found where they were: {made:?}");
    let is_there = |code: &&str| sources.contains(&format!("\"{code}\"")) || variants.contains(*code);
    let kept = recorded.lines().filter(is_there).map(str::to_owned);
    let found: BTreeSet<_> = kept.chain(made).collect();
    assert_frozen("problem-codes.txt", &found.iter().map(|code| format!("{code}\n")).collect::<String>());
}

#[test]
fn a_code_is_found_however_it_is_written() {
    let text = "Problem::denied(\n    \"a-b\", m); Problem::invalid(own::NO_WAY, m);\nconst NO_WAY: &str = \"no-way\";\n\
        (ProblemKind::Internal, \"c\")\nimpl A {\n    fn code(&self) -> &str {\n        match self {\n            A => \"d-e\",\n        }\n    }\n}\n\
        pub enum ProblemCode {\n    /// One.\n    OneTwo,\n}\n";
    assert_eq!(Vec::from_iter(made(text)), ["a-b", "c", "d-e", "no-way", "one-two"]);
}

#[test]
fn fail_points_are_those_that_are_recorded() {
    let names: Vec<_> = Point::ALL.iter().map(|point| point.name()).collect();
    assert_frozen("fail-points.txt", &(names.join("\n") + "\n"));
}
