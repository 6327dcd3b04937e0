//! Texts that a device sends: their characters, their bounds, and globs on them.

use nodedock_sdk::{Host, Problem, ProblemKind, beginning, printable};

use crate::read::optional;

/// The bound of text attributes.
const ATTRIBUTE_BYTES_MAX: usize = 64;

/// Returns a string descriptor of a USB device. `None` if the device has no such descriptor, if it is blank, or if the operator does not
/// grant the file.
pub(crate) fn descriptor(host: &Host, path: &str) -> Result<Option<String>, Problem> {
    match optional(host.sysfs().read_bytes(path)) {
        Err(problem) if problem.kind == ProblemKind::Denied => Ok(None),
        bytes => Ok(bytes?.and_then(|bytes| printable(&bytes))),
    }
}

/// Returns a text for people as an attribute: its beginning, if it is too long.
pub(crate) fn shortened(text: &str) -> String {
    beginning(text, ATTRIBUTE_BYTES_MAX).to_owned()
}

/// Returns a text that identifies a device as an attribute: none if it is too long, because its beginning may be that of another device.
pub(crate) fn whole(text: &str) -> Option<String> {
    (text.len() <= ATTRIBUTE_BYTES_MAX).then(|| text.to_owned())
}

/// Returns whether a glob matches a whole text: `*` matches any characters, `?` one.
pub(crate) fn matches(glob: &str, text: &str) -> bool {
    let (glob, text): (Vec<char>, Vec<char>) = (glob.chars().collect(), text.chars().collect());
    let (mut at, mut position) = (0, 0);
    // After the last `*`, and the position in the text up to which it has matched.
    let mut star: Option<(usize, usize)> = None;
    while position < text.len() {
        match glob.get(at) {
            Some('*') => {
                at += 1;
                star = Some((at, position));
            }
            Some(c) if *c == '?' || *c == text[position] => {
                at += 1;
                position += 1;
            }
            _ => {
                let Some((after, matched)) = star else {
                    return false;
                };
                star = Some((after, matched + 1));
                (at, position) = (after, matched + 1);
            }
        }
    }
    glob[at..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_match_whole_texts() {
        for (glob, text) in [
            ("", ""),
            ("*", ""),
            ("A*", "A50285BI"),
            ("*-2.?", "1-2.3"),
            ("a*b*c", "aXbbYc"),
        ] {
            assert!(matches(glob, text), "{glob} {text}");
        }
        for (glob, text) in [
            ("", "a"),
            ("?", ""),
            ("A*", "BA"),
            ("1-2", "1-2.3"),
            ("a*b", "abc"),
            ("[a]", "a"),
        ] {
            assert!(!matches(glob, text), "{glob} {text}");
        }
    }

    #[test]
    fn glob_of_many_stars_matches_quickly() {
        assert!(!matches(&"*a".repeat(60), &"a".repeat(59)));
        assert!(!matches(
            &format!("{}b", "*a".repeat(30)),
            &"a".repeat(4000)
        ));
    }

    #[test]
    fn attributes_are_whole_or_absent() {
        assert_eq!(shortened(&"a".repeat(65)).len(), 64);
        assert_eq!(
            (whole(&"a".repeat(65)), whole("a")),
            (None, Some("a".to_owned()))
        );
    }
}
