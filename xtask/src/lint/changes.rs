//! Compares the table of what a change touches with the files that have its examples.

use std::collections::BTreeSet;

use super::swallowed::is_production;

/// The page with the table.
pub(super) const PAGE: &str = "CONTRIBUTING.md";
const HEADING: &str = "## What a change touches";

/// A kind of change.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Change {
    what: String,
    /// Names of an example.
    words: Vec<String>,
    files: BTreeSet<String>,
}

/// Reads the rows of the table. The error names what is wrong.
pub(super) fn parse(text: &str) -> Result<Vec<Change>, String> {
    let (_, section) = text
        .split_once(HEADING)
        .ok_or_else(|| format!("{PAGE} has no heading {HEADING:?}"))?;
    let section = section.split("\n## ").next().unwrap_or(section);
    // The first two rows are the head.
    let rows = section.lines().filter(|line| line.starts_with('|')).skip(2);
    let changes: Vec<_> = rows.map(change).collect::<Result<_, _>>()?;
    match changes.is_empty() {
        true => Err(format!("{PAGE} has no table below {HEADING:?}")),
        false => Ok(changes),
    }
}

fn change(row: &str) -> Result<Change, String> {
    let cells: Vec<_> = row.trim_matches('|').split('|').map(str::trim).collect();
    let [what, words, files] = cells[..] else {
        return Err(format!("{PAGE}: not three cells: {row}"));
    };
    let (words, files) = (quoted(words), quoted(files));
    if words.is_empty() || files.is_empty() {
        return Err(format!("{PAGE}: no example or no file in backticks: {row}"));
    }
    Ok(Change {
        what: what.to_owned(),
        words,
        files: files.into_iter().collect(),
    })
}

/// Returns what is in backticks.
fn quoted(cell: &str) -> Vec<String> {
    cell.split('`')
        .skip(1)
        .step_by(2)
        .map(str::to_owned)
        .collect()
}

/// Returns whether a file is one that a change may touch: shipped code, the contract, the protocols and the docs, without tests and
/// decisions.
pub(super) fn is_looked_at(path: &str) -> bool {
    let is_doc = path.starts_with("docs/") && !path.starts_with("docs/decisions/");
    is_production(path) && !is_beside_code(path)
        || path.ends_with(".proto")
        || path.starts_with("wit/")
        || path == "README.md"
        || is_doc
}

fn is_beside_code(path: &str) -> bool {
    path.ends_with("/fixtures.rs") || path.ends_with("_tests.rs")
}

/// Returns the differences between a row and the files, each with its content.
pub(super) fn differences(change: &Change, files: &[(String, String)]) -> Vec<String> {
    let found: BTreeSet<_> = files
        .iter()
        .filter(|(_, text)| has_one(without_tests(text), &change.words))
        .map(|(path, _)| path.clone())
        .collect();
    let Change { what, words, .. } = change;
    let words = words.join(", ");
    let not_listed = found.difference(&change.files);
    let not_listed = not_listed.map(|path| format!("{what}: {path} has {words} and is not listed"));
    let not_found = change.files.difference(&found);
    let not_found = not_found.map(|path| format!("{what}: {path} is listed and has no {words}"));
    not_listed.chain(not_found).collect()
}

fn has_one(text: &str, words: &[String]) -> bool {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == '-'))
        .any(|word| words.iter().any(|known| known == word))
}

fn without_tests(text: &str) -> &str {
    text.split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "# Page\n## What a change touches\n\n| change | example | files |\n| --- | --- | --- |\n\
        | a metric | `a_b` `A_B` | `docs/x.md` `host/y/src/lib.rs` |\n\n## Next\n| no | `row` | `here` |\n";

    fn files(found: &[(&str, &str)]) -> Vec<(String, String)> {
        found
            .iter()
            .map(|(path, text)| ((*path).to_owned(), (*text).to_owned()))
            .collect()
    }

    #[test]
    fn rows_are_compared_with_files() {
        let changes = parse(TEXT).unwrap();
        assert_eq!(changes.len(), 1);
        let all = files(&[
            ("docs/x.md", "the `a_b`"),
            ("host/y/src/lib.rs", "const A_B: u8"),
            (
                "host/z/src/lib.rs",
                "a_bc, xa_b\n#[cfg(test)]\nmod tests { a_b }",
            ),
        ]);
        assert_eq!(differences(&changes[0], &all), Vec::<String>::new());
        let other = files(&[
            ("docs/x.md", "-"),
            ("host/y/src/lib.rs", "A_B"),
            ("wit/z.wit", "a_b"),
        ]);
        let found = differences(&changes[0], &other);
        assert_eq!(found.len(), 2);
        assert!(
            found[0].contains("wit/z.wit has a_b, A_B and is not listed"),
            "{found:?}"
        );
        assert!(
            found[1].contains("docs/x.md is listed and has no a_b"),
            "{found:?}"
        );
    }

    #[test]
    fn page_without_the_table_is_refused() {
        for (text, word) in [
            ("# Page", "no heading"),
            ("## What a change touches\nnothing", "no table"),
            (
                "## What a change touches\n| a |\n| - |\n| a | `b` |",
                "not three cells",
            ),
            (
                "## What a change touches\n| a |\n| - |\n| a | b | `c` |",
                "no example",
            ),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn tests_and_decisions_are_skipped() {
        for path in [
            "host/core/src/lib.rs",
            "wit/host.wit",
            "docs/metrics.md",
            "README.md",
        ] {
            assert!(is_looked_at(path), "{path}");
        }
        for path in [
            "host/core/src/tests.rs",
            "docs/decisions/1.md",
            "tests/src/lib.rs",
            "sdk/src/testing/fake.rs",
        ] {
            assert!(!is_looked_at(path), "{path}");
        }
    }
}
