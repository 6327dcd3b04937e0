//! Tokens of Rust code whose comments and texts are blank.

/// Tokens that are read from the front.
pub(super) struct Tokens<'a>(std::vec::IntoIter<&'a str>);

impl<'a> Tokens<'a> {
    pub(super) fn new(tokens: Vec<&'a str>) -> Self {
        Self(tokens.into_iter())
    }

    pub(super) fn next(&mut self) -> Option<&'a str> {
        self.0.next()
    }

    pub(super) fn peek(&self) -> Option<&'a str> {
        self.rest().first().copied()
    }

    pub(super) fn rest(&self) -> &[&'a str] {
        self.0.as_slice()
    }
}

/// Words, `::`, and each other sign.
pub(super) fn tokens(code: &str) -> Vec<&str> {
    let mut tokens = Vec::new();
    let mut rest = code.trim_start();
    while let Some(next) = rest.chars().next() {
        let is_in_word = |c: char| c.is_alphanumeric() || c == '_';
        let length = match next {
            _ if rest.starts_with("::") => 2,
            next if is_in_word(next) => rest.find(|c| !is_in_word(c)).unwrap_or(rest.len()),
            next => next.len_utf8(),
        };
        tokens.push(&rest[..length]);
        rest = rest[length..].trim_start();
    }
    tokens
}

pub(super) fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Removes what only tests or builds with a feature have: the item, field or arm after each such attribute.
pub(super) fn without_tests(tokens: Vec<&str>) -> Vec<&str> {
    let mut kept = Vec::with_capacity(tokens.len());
    let mut at = 0;
    while at < tokens.len() {
        if !tokens[at..].starts_with(&["#", "[", "cfg"]) {
            kept.push(tokens[at]);
            at += 1;
            continue;
        }
        let end = at + 2 + group(&tokens[at + 1..]);
        let condition = &tokens[at..end.min(tokens.len())];
        let has = |word: &str| condition.contains(&word);
        at = end;
        if (has("test") || has("feature")) && !has("not") {
            at += item(&tokens[at.min(tokens.len())..]);
        }
    }
    kept
}

/// The index of the bracket that closes the first one.
pub(super) fn group(tokens: &[&str]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match *token {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    tokens.len()
}

/// The index of the bracket that closes the angle bracket at the start.
pub(super) fn angles(tokens: &[&str]) -> usize {
    let mut depth = 0;
    for (at, token) in tokens.iter().enumerate() {
        match *token {
            "<" => depth += 1,
            // Not of `->`.
            ">" if at > 0 && tokens[at - 1] != "-" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at;
        }
    }
    tokens.len()
}

/// The tokens of an item, with its attributes.
fn item(tokens: &[&str]) -> usize {
    let mut at = 0;
    while at < tokens.len() {
        match tokens[at] {
            ";" | "," => return at + 1,
            "{" => return at + group(&tokens[at..]) + 1,
            // The end of what the item is in.
            "}" | ")" | "]" => return at,
            "(" | "[" => at += group(&tokens[at..]) + 1,
            _ => at += 1,
        }
    }
    at
}
