//! Makes external text safe for a line of output.

pub use nodedock_model::rule::is_unprintable;

/// Returns the text with spaces for unprintable characters, truncated to a number of bytes.
pub fn printable(text: &str, bytes_max: usize) -> String {
    let mut clean = String::new();
    push(&mut clean, text, bytes_max);
    clean
}

/// Appends such text, within a bound of the whole.
pub fn push(line: &mut String, text: &str, bytes_max: usize) {
    for c in text.chars() {
        let c = if is_unprintable(c) { ' ' } else { c };
        if line.len() + c.len_utf8() > bytes_max {
            return;
        }
        line.push(c);
    }
}

/// Truncates to a number of bytes at a character boundary.
pub fn cut(text: &str, max: usize) -> String {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// Truncates to one line of bounded length, with a mark.
pub fn one_line(text: &str, max: usize) -> String {
    let whole = cut(text, max);
    let end = if whole.len() < text.len() { "…" } else { "" };
    whole.replace(is_unprintable, " ") + end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unprintable_characters_become_spaces_within_bound() {
        assert_eq!(
            printable("a\r\nb\u{1b}[31m\0\u{202e}\u{200b}c", 64),
            "a  b [31m   c"
        );
        assert_eq!(printable("ééé", 5), "éé");
        let mut line = "x=".to_owned();
        push(&mut line, "1234", 4);
        assert_eq!(line, "x=12");
    }

    #[test]
    fn line_is_printable_and_marks_truncation() {
        assert_eq!(one_line("a\r\nb\u{1b}[2J\u{202e}c", 64), "a  b [2J c");
        assert_eq!(one_line("ééé", 3), "é…");
        assert_eq!(one_line("ééé", 6), "ééé");
    }
}
