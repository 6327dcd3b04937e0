//! Texts that a device sends: their characters, their bounds, and globs on them.

use nodedock_sdk::{Host, Problem, ProblemKind};

use crate::read::optional;

/// The bound of text attributes.
const ATTRIBUTE_BYTES_MAX: usize = 64;

/// Returns a string descriptor of a USB device. A device may send any bytes: everything except letters, digits, ASCII punctuation and
/// spaces becomes `_`. `None` if the device has no such descriptor, if it is blank, or if the operator does not grant the file.
pub(crate) fn descriptor(host: &Host, path: &str) -> Result<Option<String>, Problem> {
    match optional(host.sysfs().read_bytes(path)) {
        Err(problem) if problem.kind == ProblemKind::Denied => Ok(None),
        bytes => Ok(bytes?.and_then(|bytes| clean(&bytes))),
    }
}

fn clean(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let text: String = text
        .trim()
        .chars()
        .map(|c| {
            if c.is_alphanumeric() || c.is_ascii_graphic() || c == ' ' {
                c
            } else {
                '_'
            }
        })
        .collect();
    (!text.is_empty()).then_some(text)
}

/// Returns a text for people as an attribute: its beginning, if it is too long.
pub(crate) fn shortened(text: &str) -> String {
    beginning(text, ATTRIBUTE_BYTES_MAX).to_owned()
}

/// Returns at most this many bytes of a text, without a part of a character.
pub(crate) fn beginning(text: &str, bytes_max: usize) -> &str {
    let ends = (0..=bytes_max.min(text.len())).rev();
    let end = ends
        .into_iter()
        .find(|end| text.is_char_boundary(*end))
        .unwrap_or(0);
    &text[..end]
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
    fn descriptors_keep_only_printable_ascii() {
        assert_eq!(clean(b" FTDI \n"), Some("FTDI".to_owned()));
        assert_eq!(
            clean(b"a\0b\x1b[2Jc\xff/..\n"),
            Some("a_b_[2Jc_/..".to_owned())
        );
        assert_eq!(
            clean("Jäger\u{202e}x".as_bytes()),
            Some("Jäger_x".to_owned())
        );
        assert_eq!((clean(b""), clean(b" \n")), (None, None));
    }

    #[test]
    fn attributes_end_between_two_characters() {
        assert_eq!(shortened(&"ä".repeat(40)).len(), 64);
        assert_eq!(shortened(&format!("a{}", "ä".repeat(40))).len(), 63);
        assert_eq!(
            (whole(&"a".repeat(65)), whole("a")),
            (None, Some("a".to_owned()))
        );
    }
}
