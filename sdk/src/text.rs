//! Texts of configs, paths and devices.

/// Returns the last segment of a path: `vfio-pci` of `bus/pci/drivers/vfio-pci`.
pub fn last_segment(path: &str) -> String {
    path.rsplit('/').next().unwrap_or(path).to_owned()
}

/// Returns whether a whole text matches a pattern in which `*` is any text and `?` any byte.
///
/// ```
/// use nodedock_sdk::matches_wildcards;
///
/// assert!(matches_wildcards("0000:3b:00.*", "0000:3b:00.1"));
/// assert!(!matches_wildcards("ens*", "eth0"));
/// ```
pub fn matches_wildcards(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut at, mut position) = (0, 0);
    // The last star, and the position in the text up to which it matches.
    let mut star = None;
    while position < text.len() {
        match (pattern.get(at), star) {
            (Some(b'*'), _) => {
                star = Some((at, position));
                at += 1;
            }
            (Some(byte), _) if *byte == b'?' || *byte == text[position] => {
                at += 1;
                position += 1;
            }
            (_, Some((star_at, matched))) => {
                star = Some((star_at, matched + 1));
                at = star_at + 1;
                position = matched + 1;
            }
            _ => return false,
        }
    }
    pattern[at..].iter().all(|byte| *byte == b'*')
}

/// Returns at most this many bytes of a text, without a part of a character, as for an attribute of at most 64 bytes.
///
/// ```
/// use nodedock_sdk::beginning;
///
/// assert_eq!(beginning("Jäger", 2), "J");
/// assert_eq!(beginning("Jäger", 64), "Jäger");
/// ```
pub fn beginning(text: &str, bytes_max: usize) -> &str {
    let end = (0..=bytes_max.min(text.len()))
        .rev()
        .find(|end| text.is_char_boundary(*end))
        .unwrap_or(0);
    &text[..end]
}

/// Returns what a device calls itself, without spaces at the ends. A device may send any bytes: everything except letters, digits, ASCII
/// punctuation and spaces becomes `_`. `None` if it is blank.
///
/// ```
/// use nodedock_sdk::printable;
///
/// assert_eq!(printable(b" FTDI \n").as_deref(), Some("FTDI"));
/// assert_eq!(printable(b"a\0b\x1b[2Jc\xff").as_deref(), Some("a_b_[2Jc_"));
/// assert_eq!(printable(b" \n"), None);
/// ```
pub fn printable(bytes: &[u8]) -> Option<String> {
    let is_printable = |c: char| c.is_alphanumeric() || c.is_ascii_graphic() || c == ' ';
    let text: String = String::from_utf8_lossy(bytes)
        .trim()
        .chars()
        .map(|c| if is_printable(c) { c } else { '_' })
        .collect();
    (!text.is_empty()).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printable_keeps_letters_and_punctuation() {
        assert_eq!(
            printable("Jäger\u{202e}x".as_bytes()),
            Some("Jäger_x".to_owned())
        );
        assert_eq!(
            printable(b"a\0b\x1b[2Jc\xff/..\n"),
            Some("a_b_[2Jc_/..".to_owned())
        );
        assert_eq!((printable(b""), printable(b" \n")), (None, None));
    }

    #[test]
    fn beginning_ends_between_two_characters() {
        assert_eq!(beginning(&"ä".repeat(40), 64).len(), 64);
        assert_eq!(beginning(&format!("a{}", "ä".repeat(40)), 64).len(), 63);
    }

    #[test]
    fn patterns_match_whole_texts() {
        for (pattern, text, is_match) in [
            ("0000:3b:00.*", "0000:3b:00.1", true),
            ("0000:3?:*.0", "0000:3b:00.0", true),
            ("*.0", "0000:3b:00.1", false),
            ("0000:3b", "0000:3b:00.1", false),
            ("*b*1", "0000:3b:00.1", true),
            ("", "", true),
        ] {
            assert_eq!(
                matches_wildcards(pattern, text),
                is_match,
                "{pattern} {text}"
            );
        }
    }
}
