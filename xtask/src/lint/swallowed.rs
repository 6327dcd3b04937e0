//! Finds reads of the kernel, of the disk and of the API whose failure looks like nothing: `fs::read_dir(path).into_iter().flatten()`.
//!
//! Given the path and text of each file, it returns the statements of production code that read and drop the error, without a comment
//! `// no error: WHY` in them or right above them, and without `//! no error: WHY` in the header of their module. It knows calls by name and no types: a function of the project that drops an error is
//! found where it does so, not where it is called. No IO.

use std::fmt;

use super::code::code_of;

/// Expressions that hide the failure of a read.
const DROPS: [&str; 8] = [
    ".ok()",
    "Result::ok",
    ".flatten()",
    ".unwrap_or_default()",
    ".unwrap_or(",
    ".unwrap_or_else(|_|",
    ".is_ok",
    ".is_err()",
];

/// Calls that read.
const READS: [&str; 19] = [
    "fs::read",
    "fs::metadata(",
    "fs::symlink_metadata(",
    "fs::canonicalize(",
    "fs::stat",
    "fs::open",
    "File::open(",
    "file::",
    "beneath::",
    "sysfs.",
    "hardware.node(",
    ".read_dir(",
    ".metadata()",
    ".symlink_metadata()",
    ".canonicalize()",
    ".read_link(",
    ".file_type()",
    "read_to_string(",
    "read_to_end(",
];

/// Drops the errors of single entries of a directory.
const ENTRIES: [&str; 2] = ["entries.flatten()", "entries.filter_map(Result::ok)"];
/// The metadata of a gRPC request, which is in memory.
const HEADERS: &str = "request.metadata()";

/// Looks at a path that have no error at all, and the words before them that are no paths.
const LOOKS: [&str; 3] = [".exists()", ".is_file()", ".is_dir()"];
const NO_PATHS: [&str; 5] = ["found", "kind", "metadata", "before", "program"];

/// An answer of another task or process, and what drops its error.
const AWAITS: [&str; 4] = [
    ".await.ok()",
    ".await.unwrap_or_default()",
    ".await.unwrap_or(",
    ".await.unwrap_or_else(|_|",
];

const REASON: &str = "// no error: ";
const MODULE_REASON: &str = "//! no error: ";

/// A statement that drops the error of a read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Finding {
    path: String,
    line: usize,
    statement: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.path, self.line, self.statement)
    }
}

/// Returns whether a file is code of a program or a library that is shipped.
pub(super) fn is_production(path: &str) -> bool {
    let is_source = path.ends_with(".rs") && path.contains("/src/");
    let is_ours = ["host/", "sdk/", "proto/", "conformance/"]
        .iter()
        .any(|part| path.starts_with(part));
    is_source && is_ours && !path.split('/').any(is_of_tests)
}

fn is_of_tests(part: &str) -> bool {
    let name = part.strip_suffix(".rs").unwrap_or(part);
    matches!(
        name,
        "tests" | "testing" | "fuzz" | "templates" | "test_support"
    ) || name.ends_with("_tests")
        || name.starts_with("fake")
}

/// Returns the findings of a file.
pub(super) fn findings(path: &str, text: &str) -> Vec<Finding> {
    let text = text
        .split("#[cfg(test)]\nmod tests")
        .next()
        .unwrap_or_default();
    if text
        .lines()
        .take_while(|line| line.starts_with("//!"))
        .any(|line| line.starts_with(MODULE_REASON))
    {
        return Vec::new();
    }
    let code = code_of(text);
    let mut found = Vec::new();
    let mut start = 0;
    for (end, _) in code.match_indices([';', '{', '}']) {
        let statement = &code[start..end];
        let first = start + statement.len() - statement.trim_start().len();
        if drops_error(statement) && !has_reason(text, first, end) {
            let shown: Vec<_> = text[first..end].split_whitespace().collect();
            let line = 1 + text[..first].matches('\n').count();
            found.push(Finding {
                path: path.to_owned(),
                line,
                statement: shown.join(" "),
            });
        }
        start = end + 1;
    }
    found
}

fn drops_error(statement: &str) -> bool {
    // Another error in its place, and the header of a request, drop nothing.
    let in_a_row: String = statement.split_whitespace().collect();
    let in_a_row = in_a_row
        .replace(".unwrap_or(Err(", "")
        .replace(".unwrap_or_else(|_|Err(", "")
        .replace(HEADERS, "");
    READS.iter().any(|read| drops_error_of(&in_a_row, read))
        || LOOKS.iter().any(|look| looks_at_path(statement, look))
        || AWAITS
            .iter()
            .chain(&ENTRIES)
            .any(|dropped| in_a_row.contains(dropped))
}

fn drops_error_of(in_a_row: &str, read: &str) -> bool {
    in_a_row.match_indices(read).any(|(at, _)| {
        let rest = &in_a_row[at..];
        // A `?` between them has returned the error.
        (in_a_row[..at].contains("letOk(") && !rest.contains('?'))
            || !DROPS.iter().all(|drop| {
                rest.split_once(*drop)
                    .is_none_or(|(between, _)| between.contains('?'))
            })
    })
}

fn looks_at_path(statement: &str, look: &str) -> bool {
    statement.match_indices(look).any(|(at, _)| {
        let before = &statement[..at];
        let word = before
            .rsplit(|c: char| !c.is_alphanumeric() && c != '_')
            .next()
            .unwrap_or_default();
        !before.ends_with('?') && !NO_PATHS.contains(&word)
    })
}

/// Returns whether the reason is in the statement, or in the comment right above it.
fn has_reason(text: &str, first: usize, end: usize) -> bool {
    let above = text[..first]
        .lines()
        .rev()
        .skip(usize::from(!text[..first].ends_with('\n')));
    let mut comment = above.take_while(|line| line.trim_start().starts_with("//"));
    let rest_of_line = text[end..].lines().next().unwrap_or_default();
    text[first..end].contains(REASON)
        || rest_of_line.contains(REASON)
        || comment.any(|line| line.contains(REASON))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str) -> Vec<usize> {
        findings("host/core/src/a.rs", text)
            .into_iter()
            .map(|found| found.line)
            .collect()
    }

    #[test]
    fn dropped_read_error_is_found() {
        for dropped in [
            "let a = std::fs::read_to_string(path).unwrap_or_default();",
            "for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {",
            "let names = entries.filter_map(Result::ok).collect();",
            "let Ok(found) = std::fs::metadata(path) else { return None };",
            "if let Ok(text) = fs::read(path) {",
            "let there = path.symlink_metadata().is_ok_and(|found| found.is_file());",
            "let path = sysfs.resolve(path).ok()?;",
            "if !path.exists() {",
            "let node = client\n    .get(name)\n    .await\n    .ok();",
        ] {
            assert_eq!(lines(&format!("\n{dropped}\n}}")), [2], "{dropped}");
        }
    }

    #[test]
    fn handled_error_is_not_reported() {
        for kept in [
            "let a = std::fs::read_to_string(path)?;",
            "let a = sysfs.find(path)?.unwrap_or_default();",
            "if found.is_file() && file.metadata()?.is_dir() {",
            "let number = text.parse().ok();",
            "// no error: it is written again\nlet a = std::fs::read(path).ok();",
            "let a = std::fs::read(path).ok(); // no error: it is written again",
            "// std::fs::read(path).ok();\n",
            "let a = \"std::fs::read(path).ok();\";",
            "#[cfg(test)]\nmod tests {\nlet a = std::fs::read(path).ok();",
            "//! no error: it is simulated\n\nlet a = std::fs::read(path).ok();",
            "let a = task.await.unwrap_or_else(|_| Err(stopped()));",
            "let id = request.metadata().get(name).and_then(|id| id.to_str().ok());",
        ] {
            assert_eq!(lines(&format!("{kept}\n}}")), Vec::<usize>::new(), "{kept}");
        }
    }

    #[test]
    fn quotes_and_lifetimes_hide_no_code() {
        let text = "fn a<'a>(b: &'a str) { b.split('\"'); }\nlet a = std::fs::read(path).ok();\n";
        assert_eq!(lines(text), [2]);
    }

    #[test]
    fn tests_are_no_production_code() {
        for path in [
            "host/core/src/a.rs",
            "sdk/src/host.rs",
            "conformance/src/cases/crash.rs",
        ] {
            assert!(is_production(path), "{path}");
        }
        for path in [
            "host/core/src/a/tests.rs",
            "host/core/src/tests/a.rs",
            "tests/src/a.rs",
            "sdk/src/testing/fake.rs",
            "host/a.md",
        ] {
            assert!(!is_production(path), "{path}");
        }
    }
}
