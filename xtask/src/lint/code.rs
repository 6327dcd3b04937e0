//! Rust code without its comments and texts.

/// The attribute of a module whose file has another name.
const PATH: &str = "#[path = ";

/// Returns the text with blanks in place of comments and of what is in quotes, so that offsets stay. The path of a module stays.
pub(super) fn code_of(text: &str) -> String {
    let mut code = String::with_capacity(text.len());
    let mut rest = text;
    let mut is_word = false;
    while let Some(next) = rest.chars().next() {
        let length = match next {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '"' => quoted(rest, '"'),
            '\'' if is_char(rest) => quoted(rest, '\''),
            'r' if !is_word => raw(rest),
            'b' if !is_word && rest.starts_with("br") => match raw(&rest[1..]) {
                0 => 0,
                length => length + 1,
            },
            _ => 0,
        };
        is_word = length == 0 && (next.is_alphanumeric() || next == '_');
        let taken = length.max(next.len_utf8());
        match length {
            0 => code.push(next),
            _ if code.ends_with(PATH) => code.push_str(&rest[..taken]),
            _ => code.extend(
                rest[..taken]
                    .bytes()
                    .map(|byte| if byte == b'\n' { '\n' } else { ' ' }),
            ),
        }
        rest = &rest[taken..];
    }
    code
}

/// A lifetime has no second quote.
fn is_char(text: &str) -> bool {
    let mut chars = text.chars().skip(1);
    chars.next() == Some('\\') || chars.next() == Some('\'')
}

fn quoted(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            c if c == quote => return at + c.len_utf8(),
            _ => {}
        }
    }
    text.len()
}

/// Bytes of a raw string at the start of a text; 0: there is none.
fn raw(text: &str) -> usize {
    let hashes = text[1..].bytes().take_while(|byte| *byte == b'#').count();
    if !text[1 + hashes..].starts_with('"') {
        return 0;
    }
    let start = hashes + 2;
    let end = format!("\"{}", "#".repeat(hashes));
    text[start..]
        .find(&end)
        .map_or(text.len(), |at| start + at + end.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_comments_become_blanks() {
        let blank = |text: &str| " ".repeat(text.len());
        for text in [
            "\"a\\\"b\"",
            "r#\"a \"b\" {\"#",
            "br\"a\\\"",
            "// a",
            "'\"'",
        ] {
            assert_eq!(
                code_of(&format!("x {text}\ny")),
                format!("x {}\ny", blank(text))
            );
        }
        for kept in ["for<'a> r#type bar r[0]", "#[path = \"a.rs\"] mod b;"] {
            assert_eq!(code_of(kept), kept);
        }
    }
}
