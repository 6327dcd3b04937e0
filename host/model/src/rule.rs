//! Rules of texts from drivers, plugins and APIs that have no type of their own.

use std::sync::LazyLock;

use regex::Regex;
use unicode_general_category::{GeneralCategory, get_general_category};

use crate::limit::{
    ENV_NAME_BYTES_MAX, PATH_BYTES_MAX, PROBLEM_CODE_BYTES_MAX, QUANTITY_BYTES_MAX,
    READING_NAME_BYTES_MAX,
};

static QUANTITY: LazyLock<Regex> = LazyLock::new(|| {
    let quantity = r"^\+?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,3}|[numkMGTPE]|[KMGTPE]i)?$";
    Regex::new(quantity).expect("it is a regular expression")
});

/// Returns whether a character begins an escape sequence of a terminal, fakes a line, changes the order of the text around it, or is not
/// seen: the general categories of control, format, separating, private and unassigned characters, and characters that Unicode lets a
/// program ignore (`Default_Ignorable_Code_Point`), except the two selectors that say how an emoji looks. It is the rule for every text that
/// is refused, and for every line that is written.
pub fn is_unprintable(c: char) -> bool {
    use GeneralCategory::{
        Control, Format, LineSeparator, ParagraphSeparator, PrivateUse, Surrogate, Unassigned,
    };
    if c.is_ascii() {
        return c.is_ascii_control();
    }
    let category = get_general_category(c);
    matches!(
        category,
        Control | Format | LineSeparator | ParagraphSeparator | PrivateUse | Surrogate | Unassigned
    ) || matches!(
        c,
        '\u{34f}'
            | '\u{115f}'..='\u{1160}'
            | '\u{17b4}'..='\u{17b5}'
            | '\u{180b}'..='\u{180f}'
            | '\u{3164}'
            | '\u{fe00}'..='\u{fe0d}'
            | '\u{ffa0}'
            | '\u{e0100}'..='\u{e01ef}'
    )
}

/// A quantity in Kubernetes' notation (apimachinery, `resource.Quantity`), not negative, at most [`QUANTITY_BYTES_MAX`] bytes.
pub fn is_quantity(text: &str) -> bool {
    text.len() <= QUANTITY_BYTES_MAX && QUANTITY.is_match(text)
}

/// Name of an environment variable: a letter or `_`, then letters, digits, `_`, `-` and `.`.
pub fn is_env_name(text: &str) -> bool {
    let first = text
        .bytes()
        .next()
        .is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    let plain = text
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'));
    first && plain && text.len() <= ENV_NAME_BYTES_MAX
}

/// An absolute path without empty, `.` or `..` segments, of printable characters.
pub fn is_plain_path(text: &str) -> bool {
    let bounded = text.len() <= PATH_BYTES_MAX && !text.contains(is_unprintable);
    bounded
        && (text == "/"
            || text
                .strip_prefix('/')
                .is_some_and(|rest| !rest.split('/').any(|part| matches!(part, "" | "." | ".."))))
}

/// A name that the kernel takes for a network interface (`dev_valid_name`).
pub fn is_interface_name(text: &str) -> bool {
    let plain = text
        .bytes()
        .all(|b| b.is_ascii_graphic() && !matches!(b, b'/' | b':'));
    !text.is_empty() && text.len() <= 15 && plain && !matches!(text, "." | "..")
}

/// Permissions of a device node: a subset of `rwm`, not empty.
pub fn is_node_permissions(text: &str) -> bool {
    let mut left = "rwm".to_owned();
    !text.is_empty()
        && text
            .chars()
            .all(|c| left.find(c).map(|at| left.remove(at)).is_some())
}

/// A problem's code: lower-case letters, digits and dashes.
pub fn is_problem_code(text: &str) -> bool {
    let plain = text
        .bytes()
        .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    !text.is_empty() && text.len() <= PROBLEM_CODE_BYTES_MAX && plain
}

/// Returns whether a text can be the name of a reading: snake case that begins with a letter, as Prometheus recommends for metrics.
pub fn is_reading_name(text: &str) -> bool {
    let part = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_';
    (1..=READING_NAME_BYTES_MAX).contains(&text.len())
        && text.starts_with(|first: char| first.is_ascii_lowercase())
        && text.bytes().all(part)
}

/// Returns whether a text names a resource of a node that is not extended: `cpu`, `memory` and the like (Kubernetes, `status.allocatable`).
pub fn is_node_resource(text: &str) -> bool {
    matches!(text, "cpu" | "memory" | "ephemeral-storage") || text.starts_with("hugepages-")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a rule against texts that it accepts and texts that it refuses.
    fn check(rule: fn(&str) -> bool, accepted: &[&str], refused: &[&str]) {
        accepted
            .iter()
            .for_each(|text| assert!(rule(text), "{text:?} is refused"));
        refused
            .iter()
            .for_each(|text| assert!(!rule(text), "{text:?} is accepted"));
    }

    #[test]
    fn what_is_not_seen_is_unprintable() {
        let seen = "aZ0 ~é漢가\u{301}👍🏽⚠\u{fe0f}→\u{fffd}";
        let found: String = seen.chars().filter(|c| is_unprintable(*c)).collect();
        assert_eq!(found, "");
        for c in [
            // Control characters and separators.
            '\0',
            '\n',
            '\t',
            '\u{1b}',
            '\u{7f}',
            '\u{85}',
            '\u{9b}',
            '\u{2028}',
            '\u{2029}',
            // The order of the text.
            '\u{61c}',
            '\u{200e}',
            '\u{200f}',
            '\u{202e}',
            '\u{2066}',
            '\u{2069}',
            // No width.
            '\u{ad}',
            '\u{200b}',
            '\u{200d}',
            '\u{2060}',
            '\u{feff}',
            '\u{34f}',
            '\u{3164}',
            '\u{180e}',
            // Tags and selectors, in which a text can be hidden.
            '\u{e0041}',
            '\u{e007f}',
            '\u{fe00}',
            '\u{e0100}',
            '\u{e01ef}',
            // Private, unassigned, and no characters.
            '\u{e000}',
            '\u{f0000}',
            '\u{10ffff}',
            '\u{378}',
            '\u{fdd0}',
        ] {
            assert!(is_unprintable(c), "{c:?}");
        }
    }

    /// The standard library escapes what it cannot print, by its own tables.
    #[test]
    fn unprintable_table_covers_standard_library() {
        let is_escaped = |c: char| c.escape_debug().to_string().starts_with("\\u{");
        let is_extender = |c: char| format!("a{c}").escape_debug().count() == 2;
        let missed: Vec<_> = ('\0'..=char::MAX)
            .filter(|c| {
                is_escaped(*c) && !is_extender(*c) && !c.is_whitespace() && !is_unprintable(*c)
            })
            .collect();
        assert!(missed.is_empty(), "{missed:?}");
    }

    #[test]
    fn each_rule_accepts_and_refuses() {
        check(
            is_quantity,
            &[
                "0", "4", "80Gi", "500m", "1.5", ".5", "1e3", "1E-3", "+1", "1k", "3n",
            ],
            &[
                "",
                "Gi",
                "-1",
                "1 Gi",
                "1GiB",
                "1.2.3",
                "1e",
                "1K",
                ".",
                "1e+",
                "0x1",
                "１",
                &"1".repeat(65),
            ],
        );
        check(
            is_env_name,
            &["A", "_a-b.c1"],
            &["", "1A", "A=B", "A B", &"A".repeat(257)],
        );
        check(
            is_plain_path,
            &["/", "/dev/fuse"],
            &[
                "",
                "dev",
                "/dev/",
                "/dev//a",
                "/dev/../etc",
                "/./a",
                "/a\nb",
                "/a\u{200b}b",
            ],
        );
        check(
            is_interface_name,
            &["eth0", "a.b"],
            &["", ".", "..", "a/b", "a:b", "a b", &"e".repeat(16)],
        );
        check(
            is_node_permissions,
            &["r", "rwm", "mr"],
            &["", "x", "rr", "rwmr"],
        );
        check(
            is_problem_code,
            &["no-such-profile", "a1"],
            &["", "No", "a b", "a_b", &"a".repeat(64)],
        );
    }
}
