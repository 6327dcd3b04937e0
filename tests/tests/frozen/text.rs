//! Texts without what differs from machine to machine, from run to run and from wording to wording.

use std::sync::LazyLock;

use nodedock_tests::Root;
use regex::Regex;

/// Fields with sentences for people, which may be reworded: whether there is one counts.
const SENTENCES: [&str; 8] = [
    "message", "reason", "summary", "cause", "problem", "error", "next", "findings",
];

/// Patterns of volatile texts, and their replacements.
static VOLATILE: LazyLock<Vec<(Regex, &str)>> = LazyLock::new(|| {
    let version = env!("CARGO_PKG_VERSION").replace('.', "\\.");
    let rules = [
        (r"sha256:[0-9a-f]{64}".to_owned(), "sha256:DIGEST"),
        (
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z".to_owned(),
            "TIME",
        ),
        (r"\b1[6-9]\d{11}\b".to_owned(), "MILLISECONDS"),
        (
            r#"(?m)("?(?:duration_?[uU]s|size|bytes|pid|uid|inode)"?: )\d+(,?)$"#.to_owned(),
            "${1}NUMBER${2}",
        ),
        (r#"("?user"?: )"?[a-z][-\w]*"?"#.to_owned(), "${1}USER"),
        // The user of native plugins is that of the test.
        (r#"(kind\W+plugin\W+name\W+)\d+"#.to_owned(), "${1}USER"),
        (
            format!(r#"("?(?:driver_?)?[vV]ersion"?: ?)["']?{version}["']?"#),
            "${1}VERSION",
        ),
        (format!("nodedock {version}"), "nodedock VERSION"),
    ];
    rules
        .map(|(rule, to)| (Regex::new(&rule).expect("a regular expression"), to))
        .into()
});

/// A text with fixed words for what is volatile.
pub(crate) fn without_volatile(text: &str, root: &Root) -> String {
    let text = text.replace(
        root.path().to_str().expect("the root's path is text"),
        "ROOT",
    );
    // The tag of a daemon derives from its root.
    let tag = regex::Regex::new("nodedock-metadata-[0-9a-f]{8}").expect("a valid pattern");
    let text = tag.replace_all(&text, "nodedock-metadata-TAG").into_owned();
    VOLATILE.iter().fold(text, |text, (rule, to)| {
        rule.replace_all(&text, *to).into_owned()
    })
}

/// The same for JSON or YAML, without sentences and comments.
pub(crate) fn normalised(text: &str, root: &Root) -> String {
    without_sentences(&without_volatile(text, root))
}

fn indent(line: &str) -> usize {
    line.len() - line.trim_start().len()
}

/// Replaces values of the fields for people, of several lines by one, and leaves out comments.
pub(crate) fn without_sentences(text: &str) -> String {
    let (mut lines, mut within) = (String::new(), None);
    for line in text
        .lines()
        .filter(|line| !line.trim_start().starts_with('#'))
    {
        let is_entry = || line.trim_start().starts_with("- ");
        if within.is_some_and(|depth| {
            indent(line) > depth
                || (indent(line) == depth && (is_entry() || line.trim_start().starts_with(']')))
        }) {
            continue;
        }
        within = None;
        match sentence(line) {
            Some((key, value)) => {
                lines.push_str(&format!("{key}: SENTENCE\n"));
                let several = ["", "[", ">", "|", ">-", "|-"].contains(&value);
                within = several.then(|| {
                    indent(line)
                        + if line.trim_start().starts_with("- ") {
                            2
                        } else {
                            0
                        }
                });
            }
            None => lines.push_str(&format!("{line}\n")),
        }
    }
    lines
}

/// Key and value, where the key is one with a sentence and the value is one.
fn sentence(line: &str) -> Option<(&str, &str)> {
    let (key, value) = line.split_once(':')?;
    let name = key.trim_start_matches(['-', ' ']).trim_matches('"');
    let value = value.trim().trim_end_matches(',');
    let none = ["null", "\"\"", "''", "[]", "{"].contains(&value)
        || (name == "problem" && value.is_empty());
    // An entry of a history is the name of a state, or a sentence.
    let is_sentence = SENTENCES.contains(&name) || (name == "what" && value.contains(' '));
    (is_sentence && !none).then_some((key, value))
}

#[test]
fn sentences_are_compared_by_presence_only() {
    let json = "{\n  \"message\": \"no: way\",\n  \"next\": [\n    \"a\",\n    \"b\"\n  ],\n  \"code\": \"x\",\n  \"what\": \"a b\",\n  \"reason\": \"\"\n}\n";
    let expected = "{\n  \"message\": SENTENCE\n  \"next\": SENTENCE\n  \"code\": \"x\",\n  \"what\": SENTENCE\n  \"reason\": \"\"\n}\n";
    assert_eq!(without_sentences(json), expected);
    let yaml = "- message: >-\n    no\n    way\n  next:\n  - a\n  - b\n  problem:\n    code: x\n  cause: ''\n";
    let expected = "- message: SENTENCE\n  next: SENTENCE\n  problem:\n    code: x\n  cause: ''\n";
    assert_eq!(without_sentences(yaml), expected);
}
