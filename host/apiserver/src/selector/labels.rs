//! Label selectors: `a=b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`, `a>1`, `a<1`, each after a comma.

use nodedock_model::limit::LABEL_BYTES_MAX;
use nodedock_model::{is_label_key, is_label_value};
use serde_json::Value;

/// Requirement for the label of one key.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Requirement {
    key: String,
    condition: Condition,
}

#[derive(Clone, Debug, PartialEq)]
enum Condition {
    Exists,
    Absent,
    In(Vec<String>),
    /// Also true without the label.
    NotIn(Vec<String>),
    Above(i64),
    Below(i64),
}

impl Requirement {
    pub(super) fn matches(&self, labels: &Value) -> bool {
        let found = labels.get(&self.key).and_then(Value::as_str);
        let is_one_of = |values: &[String]| {
            found.is_some_and(|found| values.iter().any(|value| value == found))
        };
        let number = || found.and_then(|found| found.parse::<i64>().ok());
        match &self.condition {
            Condition::Exists => found.is_some(),
            Condition::Absent => found.is_none(),
            Condition::In(values) => is_one_of(values),
            Condition::NotIn(values) => !is_one_of(values),
            Condition::Above(least) => number().is_some_and(|number| number > *least),
            Condition::Below(most) => number().is_some_and(|number| number < *most),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Symbol(&'static str),
    End,
}

impl Token {
    fn shown(&self) -> &str {
        match self {
            Self::Word(word) => word,
            Self::Symbol(symbol) => symbol,
            Self::End => "",
        }
    }

    fn is(&self, text: &str) -> bool {
        matches!(self, Self::Symbol(symbol) if *symbol == text)
    }
}

/// Longest first.
const SYMBOLS: [&str; 9] = ["==", "!=", "=", "!", "(", ")", ",", ">", "<"];

fn tokens(mut text: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    loop {
        text = text.trim_start_matches([' ', '\t', '\r', '\n']);
        if text.is_empty() {
            tokens.push(Token::End);
            return tokens;
        }
        if let Some(symbol) = SYMBOLS.iter().find(|symbol| text.starts_with(**symbol)) {
            tokens.push(Token::Symbol(symbol));
            text = text.get(symbol.len()..).unwrap_or_default();
            continue;
        }
        let end = text
            .find([' ', '\t', '\r', '\n', '=', '!', '(', ')', ',', '>', '<'])
            .unwrap_or(text.len());
        let (word, rest) = text.split_at(end);
        tokens.push(Token::Word(word.to_owned()));
        text = rest;
    }
}

/// The requirements, or what cannot be understood in the words of an API server.
pub(super) fn parse(selector: &str) -> Result<Vec<Requirement>, String> {
    let mut parser = Parser {
        tokens: tokens(selector),
        at: 0,
    };
    let mut requirements = Vec::new();
    if parser.peek() == &Token::End {
        return Ok(requirements);
    }
    match parser.peek() {
        Token::Word(_) | Token::Symbol("!") => {}
        other => {
            return Err(format!(
                "found '{}', expected: !, identifier, or 'end of string'",
                other.shown()
            ));
        }
    }
    loop {
        let requirement = parser.requirement();
        requirements
            .push(requirement.map_err(|why| format!("unable to parse requirement: {why}"))?);
        match parser.next() {
            Token::End => return Ok(requirements),
            token if token.is(",") => {}
            other => {
                return Err(format!(
                    "found '{}', expected: ',' or 'end of string'",
                    other.shown()
                ));
            }
        }
        match parser.peek() {
            Token::Word(_) | Token::Symbol("!") => {}
            other => {
                return Err(format!(
                    "found '{}', expected: identifier after ','",
                    other.shown()
                ));
            }
        }
    }
}

struct Parser {
    tokens: Vec<Token>,
    at: usize,
}

impl Parser {
    fn peek(&self) -> &Token {
        self.tokens.get(self.at).unwrap_or(&Token::End)
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        self.at += 1;
        token
    }

    fn requirement(&mut self) -> Result<Requirement, String> {
        let is_absent = self.peek().is("!");
        if is_absent {
            self.at += 1;
        }
        let key = match self.next() {
            Token::Word(key) => key,
            other => return Err(format!("found '{}', expected: identifier", other.shown())),
        };
        if !is_label_key(&key) {
            return Err(format!(
                "<nil>: Invalid value: \"{key}\": a label key is a name of at most {LABEL_BYTES_MAX} letters, digits, \
                                '-', '_' and '.', after a DNS subdomain and '/' if it has one"
            ));
        }
        if is_absent {
            return Ok(Requirement {
                key,
                condition: Condition::Absent,
            });
        }
        if matches!(self.peek(), Token::End) || self.peek().is(",") {
            return Ok(Requirement {
                key,
                condition: Condition::Exists,
            });
        }
        let operator = self.next();
        let condition = match operator.shown() {
            "=" | "==" => Condition::In(vec![self.value()?]),
            "!=" => Condition::NotIn(vec![self.value()?]),
            "in" => Condition::In(self.values()?),
            "notin" => Condition::NotIn(self.values()?),
            ">" => Condition::Above(self.number()?),
            "<" => Condition::Below(self.number()?),
            other => {
                return Err(format!(
                    "found '{other}', expected: in, notin, =, ==, !=, gt, lt"
                ));
            }
        };
        Ok(Requirement { key, condition })
    }

    /// One value, which may be empty.
    fn value(&mut self) -> Result<String, String> {
        if matches!(self.peek(), Token::End) || self.peek().is(",") {
            return Ok(String::new());
        }
        match self.next() {
            Token::Word(value) => checked_value(value),
            other => Err(format!("found '{}', expected: identifier", other.shown())),
        }
    }

    fn number(&mut self) -> Result<i64, String> {
        let value = self.value()?;
        let why = "for 'Gt', 'Lt' operators, the value must be an integer";
        value
            .parse()
            .map_err(|_| format!("values[0]: Invalid value: \"{value}\": {why}"))
    }

    /// Values between parentheses, each of which may be empty.
    fn values(&mut self) -> Result<Vec<String>, String> {
        let open = self.next();
        if !open.is("(") {
            return Err(format!("found '{}' expected: '('", open.shown()));
        }
        let mut values = Vec::new();
        loop {
            let value = match self.peek() {
                Token::Word(value) => checked_value(value.clone())?,
                _ => String::new(),
            };
            if matches!(self.peek(), Token::Word(_)) {
                self.at += 1;
            }
            values.push(value);
            match self.next() {
                token if token.is(")") => return Ok(values),
                token if token.is(",") => {}
                other => return Err(format!("found '{}', expected: ',' or ')'", other.shown())),
            }
        }
    }
}

fn checked_value(value: String) -> Result<String, String> {
    match is_label_value(&value) {
        true => Ok(value),
        false => Err(format!(
            "values[0]: Invalid value: \"{value}\": a valid label must be an empty string or consist of alphanumeric characters, \
             '-', '_' or '.', and must start and end with an alphanumeric character"
        )),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn matches(selector: &str, labels: &Value) -> bool {
        parse(selector)
            .unwrap()
            .iter()
            .all(|requirement| requirement.matches(labels))
    }

    #[test]
    fn selector_matches_equality_sets_and_presence() {
        let labels = json!({ "a": "b", "example.com/tier": "gold", "n": "7", "empty": "" });
        let all = [
            "",
            "a",
            "a=b",
            "a==b",
            "a!=c",
            "x!=b",
            "!x",
            "a in (b, c)",
            "x notin (b)",
            "a notin (c,d)",
            "n>6",
            "n<8",
            "a=b,example.com/tier in (gold),!x",
            "empty=",
            "empty in ()",
            "empty in (,b)",
            " a = b ",
            "a in (b),!y",
        ];
        for selector in all {
            assert!(matches(selector, &labels), "{selector}");
        }
        for selector in [
            "x",
            "a=c",
            "a!=b",
            "!a",
            "a in (c)",
            "a notin (b)",
            "n>7",
            "n<7",
            "a>1",
            "a=b,x",
            "in in (x)",
        ] {
            assert!(!matches(selector, &labels), "{selector}");
        }
        assert!(!matches("a", &Value::Null) && matches("!a", &Value::Null));
    }

    #[test]
    fn malformed_selector_error_has_position() {
        let unexpected = |text: &str| format!("unable to parse requirement: {text}");
        for (selector, message) in [
            (
                ",",
                "found ',', expected: !, identifier, or 'end of string'".to_owned(),
            ),
            ("a,", "found '', expected: identifier after ','".to_owned()),
            (
                "a b",
                unexpected("found 'b', expected: in, notin, =, ==, !=, gt, lt"),
            ),
            (
                "a=b c",
                "found 'c', expected: ',' or 'end of string'".to_owned(),
            ),
            ("a in b", unexpected("found 'b' expected: '('")),
            ("a in (b", unexpected("found '', expected: ',' or ')'")),
            ("!", unexpected("found '', expected: identifier")),
            ("a=(", unexpected("found '(', expected: identifier")),
            (
                "n>x",
                unexpected(
                    "values[0]: Invalid value: \"x\": for 'Gt', 'Lt' operators, the value must be an integer",
                ),
            ),
        ] {
            assert_eq!(parse(selector), Err(message), "{selector}");
        }
        for selector in ["-a=b", "a/b/c", "A.B/c", "a=-b", "a=b/c", "a in (b/c)"] {
            assert!(parse(selector).is_err(), "{selector}");
        }
        assert!(parse(&format!("{}=b", "a".repeat(64))).is_err());
    }
}
