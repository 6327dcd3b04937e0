//! Text of drivers in lines of ours.

/// Begins an escape sequence of a terminal, feigns a line, or turns the order of what follows.
pub(super) fn is_unprintable(c: char) -> bool {
    c.is_control() || matches!(c, '\u{2028}' | '\u{2029}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// At most so many bytes, whole characters.
pub(super) fn cut(text: &str, max: usize) -> String {
    let mut end = text.len().min(max);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

/// One line of bounded length: what is cut off is marked.
pub(super) fn one_line(text: &str, max: usize) -> String {
    let whole = cut(text, max);
    let end = if whole.len() < text.len() { "…" } else { "" };
    whole.replace(is_unprintable, " ") + end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_and_says_where_it_is_cut() {
        assert_eq!(one_line("a\r\nb\u{1b}[2J\u{202e}c", 64), "a  b [2J c");
        assert_eq!(one_line("ééé", 3), "é…");
        assert_eq!(one_line("ééé", 6), "ééé");
    }
}
