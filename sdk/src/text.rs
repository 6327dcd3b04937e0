//! Texts of configs and paths.

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

#[cfg(test)]
mod tests {
    use super::*;

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
