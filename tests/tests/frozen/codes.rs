//! Codes of problems, which are those of conditions too, and names of fail points.

use std::path::Path;

use nodedock_base::failpoint::Point;
use nodedock_model::ProblemCode;
use regex::Regex;

use crate::assert_frozen;
use crate::protocol::files_below;

/// The host's sources without tests, fuzzing, templates of drivers and comments, and without the crates that speak of fields of objects.
fn sources() -> String {
    let host = Path::new(env!("CARGO_MANIFEST_DIR")).join("../host");
    let others = Regex::new(
        r"^(apiserver|allocator/src/(allocate|selector))/|(^|/)(tests|testing|fuzz|target|templates)/|(tests?|_tests.*|/fixtures|/fuzz)\.rs$|/fake\w*\.rs$",
    )
    .unwrap();
    let files = files_below(&host, "rs").into_iter();
    let files =
        files.filter(|file| !others.is_match(file.strip_prefix(&host).unwrap().to_str().unwrap()));
    let code = files.flat_map(|file| {
        let text = std::fs::read_to_string(&file).expect("read a source file");
        let code = text
            .split("#[cfg(test)]\nmod tests {")
            .next()
            .unwrap_or_default();
        let lines = code
            .lines()
            .filter(|line| !line.trim_start().starts_with("//"));
        lines.map(|line| format!("{line}\n")).collect::<Vec<_>>()
    });
    code.collect()
}

/// Codes that problems are made with as texts.
fn literal_codes(sources: &str) -> Vec<String> {
    const KINDS: &str =
        r"(?:invalid|denied|not_found|conflict|unavailable|internal)\(\s*|ProblemKind::\w+,\s*";
    let rule =
        Regex::new(&format!(r#"(?:{KINDS})"([a-z][-a-z0-9]*)""#)).expect("a regular expression");
    rule.captures_iter(sources)
        .map(|found| found[1].to_owned())
        .collect()
}

#[test]
fn problem_and_condition_codes_are_unchanged() {
    let codes: String = ProblemCode::all().map(|code| format!("{code}\n")).collect();
    assert_frozen("problem-codes.txt", &codes);
}

#[test]
fn host_uses_exactly_the_enum_codes() {
    let sources = sources();
    assert_eq!(literal_codes(&sources), Vec::<String>::new());
    let unused =
        ProblemCode::all().filter(|code| !sources.contains(&format!("ProblemCode::{code:?}")));
    assert_eq!(
        unused.map(ProblemCode::as_str).collect::<Vec<_>>(),
        Vec::<&str>::new()
    );
}

#[test]
fn literal_codes_are_found_anywhere() {
    let text = "Problem::denied(\n    \"a-b\", m);\n(ProblemKind::Internal, \"c\")\nProblem::new(kind, code)";
    assert_eq!(literal_codes(text), ["a-b", "c"]);
}

#[test]
fn fail_points_are_unchanged() {
    let names: Vec<_> = Point::ALL.iter().map(|point| point.as_str()).collect();
    assert_frozen("fail-points.txt", &(names.join("\n") + "\n"));
}
