//! Refuses terms that the project replaced by terms of the field, in sources and documents.
//!
//! Given the rules of `xtask/words.txt` and the path and text of each file, it returns the refused terms and counts the allowed
//! ones. No IO.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;

/// Components of a path by which allowed terms are counted, such as `host/core/src/claims`.
const DIRECTORY_DEPTH: usize = 4;

/// The parsed `xtask/words.txt`.
pub(crate) struct Rules {
    refused: Vec<Term>,
    allowed: Vec<Allowance>,
}

/// A refused term: one word, or several in a row, and its replacement.
struct Term {
    words: Vec<String>,
    replacement: String,
}

/// A place where a term is allowed.
struct Allowance {
    /// Line of the rule.
    line: usize,
    /// `None`: every term.
    term: Option<Vec<String>>,
    scope: Scope,
}

enum Scope {
    /// A file, or a directory with everything below it.
    Path(String),
    /// A text that contains the term, such as the name of an API field.
    Phrase(String),
}

/// A refused term in a file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    path: String,
    line: usize,
    term: String,
    replacement: String,
}

/// Result for all files.
#[derive(Default)]
pub(crate) struct Report {
    pub(crate) findings: Vec<Finding>,
    /// Number of terms that rules for paths allow, by directory.
    pub(crate) allowed: BTreeMap<String, usize>,
    /// Lines of the rules that allowed a term.
    used: BTreeSet<usize>,
}

impl Rules {
    /// Parses the rules: `refuse TERM, TERM: REPLACEMENT`, `allow TERM phrase TEXT: REASON` and `allow TERM path PATH: REASON`,
    /// where `*` is every term. Empty lines and lines with `#` are comments. The error names each invalid line.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut rules = Self {
            refused: Vec::new(),
            allowed: Vec::new(),
        };
        let mut invalid = Vec::new();
        for (number, line) in (1..).zip(text.lines()) {
            let is_comment = line.trim().is_empty() || line.starts_with('#');
            if !is_comment && rules.add(number, line).is_none() {
                invalid.push(format!("line {number} is not a rule: {line}"));
            }
        }
        if invalid.is_empty() {
            Ok(rules)
        } else {
            Err(invalid.join("\n"))
        }
    }

    fn add(&mut self, number: usize, line: &str) -> Option<()> {
        let (rule, explanation) = line.rsplit_once(": ")?;
        if let Some(terms) = rule.strip_prefix("refuse ") {
            self.refused.extend(terms.split(", ").map(|term| Term {
                words: words_of(term),
                replacement: explanation.to_owned(),
            }));
            return Some(());
        }
        let rule = rule.strip_prefix("allow ")?;
        let (term, scope) = match (rule.split_once(" phrase "), rule.split_once(" path ")) {
            (Some((term, text)), None) => (term, Scope::Phrase(text.to_owned())),
            (None, Some((term, path))) => (term, Scope::Path(path.to_owned())),
            _ => return None,
        };
        let term = (term != "*").then(|| words_of(term));
        self.allowed.push(Allowance {
            line: number,
            term,
            scope,
        });
        Some(())
    }

    /// Returns the rules that allow a term at this place of a line.
    fn allowances<'a>(
        &'a self,
        term: &'a Term,
        path: &'a str,
        line: &'a str,
        at: &'a Range<usize>,
    ) -> impl Iterator<Item = &'a Allowance> {
        self.allowed
            .iter()
            .filter(|rule| rule.term.as_ref().is_none_or(|words| *words == term.words))
            .filter(|rule| rule.scope.contains(path, line, at))
    }
}

impl Scope {
    fn contains(&self, path: &str, line: &str, at: &Range<usize>) -> bool {
        match self {
            Self::Path(prefix) => path
                .strip_prefix(prefix.as_str())
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/')),
            Self::Phrase(phrase) => line
                .match_indices(phrase.as_str())
                .any(|(start, _)| start <= at.start && at.end <= start + phrase.len()),
        }
    }
}

impl Report {
    /// Checks a file.
    pub(crate) fn file(&mut self, rules: &Rules, path: &str, text: &str) {
        for (number, line) in (1..).zip(text.lines()) {
            let words = words_in(line);
            for term in &rules.refused {
                for at in occurrences(&words, line, &term.words) {
                    self.occurrence(rules, term, (path, number, line), &at);
                }
            }
        }
    }

    fn occurrence(
        &mut self,
        rules: &Rules,
        term: &Term,
        (path, number, line): (&str, usize, &str),
        at: &Range<usize>,
    ) {
        let allowances: Vec<_> = rules.allowances(term, path, line, at).collect();
        self.used.extend(allowances.iter().map(|rule| rule.line));
        if allowances
            .iter()
            .any(|rule| matches!(rule.scope, Scope::Phrase(_)))
        {
            return;
        }
        if allowances.is_empty() {
            self.findings.push(Finding {
                path: path.to_owned(),
                line: number,
                term: line[at.clone()].to_owned(),
                replacement: term.replacement.clone(),
            });
        } else {
            *self.allowed.entry(directory_of(path)).or_default() += 1;
        }
    }

    /// Returns the lines of rules that allowed nothing.
    pub(crate) fn unused(&self, rules: &Rules) -> Vec<usize> {
        let lines = rules.allowed.iter().map(|rule| rule.line);
        lines.filter(|line| !self.used.contains(line)).collect()
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}:{}: `{}` (say: {})",
            self.path, self.line, self.term, self.replacement
        )
    }
}

fn directory_of(path: &str) -> String {
    let parents = path.rsplit_once('/').map_or("", |(parents, _)| parents);
    parents
        .split('/')
        .take(DIRECTORY_DEPTH)
        .collect::<Vec<_>>()
        .join("/")
}

fn words_of(term: &str) -> Vec<String> {
    words_in(term)
        .into_iter()
        .map(|at| term[at].to_lowercase())
        .collect()
}

/// Returns the places of the words in a line. Underscores, dashes and changes of case separate the words of an identifier.
fn words_in(line: &str) -> Vec<Range<usize>> {
    let bytes = line.as_bytes();
    let mut words: Vec<Range<usize>> = Vec::new();
    for at in (0..bytes.len()).filter(|at| bytes[*at].is_ascii_alphabetic()) {
        match words.last_mut() {
            Some(word) if word.end == at && !starts_word(bytes, at) => word.end = at + 1,
            _ => words.push(at..at + 1),
        }
    }
    words
}

/// Returns whether a letter that follows a letter starts a word: `D` in `driverDir`, `F` in `CDIFile`.
fn starts_word(bytes: &[u8], at: usize) -> bool {
    bytes[at].is_ascii_uppercase()
        && [at - 1, at + 1]
            .into_iter()
            .any(|beside| bytes.get(beside).is_some_and(u8::is_ascii_lowercase))
}

/// Returns the places of a term: its words in a row, with at most a space, a dash or an underscore between them.
fn occurrences<'a>(
    words: &'a [Range<usize>],
    line: &'a str,
    term: &'a [String],
) -> impl Iterator<Item = Range<usize>> + 'a {
    words.windows(term.len()).filter_map(move |places| {
        let equal = places
            .iter()
            .zip(term)
            .all(|(at, word)| line[at.clone()].eq_ignore_ascii_case(word));
        let place = places[0].start..places[term.len() - 1].end;
        (equal
            && places
                .windows(2)
                .all(|pair| matches!(&line[pair[0].end..pair[1].start], "" | " " | "-" | "_")))
        .then_some(place)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(rules: &str, path: &str, text: &str) -> Report {
        let mut report = Report::default();
        report.file(&Rules::parse(rules).unwrap(), path, text);
        report
    }

    fn refused(terms: &str, text: &str) -> Vec<String> {
        let report = report(&format!("refuse {terms}: a better word"), "a.md", text);
        report
            .findings
            .into_iter()
            .map(|finding| finding.term)
            .collect()
    }

    #[test]
    fn term_is_found_as_whole_word() {
        let text = "Folder my_folder FOLDER driversFolder FolderOf CDIFolder folders unfolder";
        assert_eq!(
            refused("folder", text),
            ["Folder", "folder", "FOLDER", "Folder", "Folder", "Folder"]
        );
    }

    #[test]
    fn multiword_term_is_found_everywhere() {
        let text = "give up, give_up GiveUp give-up; give. Up gives up";
        assert_eq!(
            refused("give up", text),
            ["give up", "give_up", "GiveUp", "give-up"]
        );
    }

    #[test]
    fn finding_names_place_and_replacement() {
        let report = report(
            "refuse folder, folders: directory",
            "docs/a.md",
            "a\nß folders",
        );
        assert_eq!(
            report.findings[0].to_string(),
            "docs/a.md:2: `folders` (say: directory)"
        );
    }

    #[test]
    fn phrase_allows_only_terms_inside_it() {
        let rules = "refuse folder: directory\nallow folder phrase not-a-folder: a problem code";
        let report = report(rules, "a.rs", "\"not-a-folder\", a folder");
        assert_eq!(report.findings.len(), 1);
        assert!(report.allowed.is_empty());
    }

    #[test]
    fn path_rule_covers_file_or_directory() {
        let rules = "refuse folder: directory\nallow * path host/a: not rewritten yet";
        assert_eq!(
            report(rules, "host/a/b/c/d.rs", "folder folder").allowed["host/a/b/c"],
            2
        );
        assert!(report(rules, "host/a", "folder").findings.is_empty());
        assert_eq!(report(rules, "host/ab", "folder").findings.len(), 1);
    }

    #[test]
    fn rule_allows_only_its_term() {
        let rules = "refuse folder: directory\nrefuse nobody: no one\nallow nobody path a: a user";
        assert_eq!(
            report(rules, "a", "nobody has a folder").findings[0].term,
            "folder"
        );
    }

    #[test]
    fn unused_rule_is_reported() {
        let text =
            "# Words\n\nrefuse folder: directory\nallow folder path a: x\nallow folder path b: x";
        let report = report(text, "a", "folder");
        assert_eq!(report.unused(&Rules::parse(text).unwrap()), [5]);
    }

    #[test]
    fn line_without_a_rule_is_error() {
        for line in [
            "refuse folder",
            "allow folder: x",
            "deny folder: x",
            "allow a path b phrase c: x",
        ] {
            assert!(Rules::parse(line).is_err(), "{line}");
        }
    }
}
