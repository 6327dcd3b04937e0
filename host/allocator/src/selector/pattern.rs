//! Regular expressions in the notation of Go, which CEL prescribes, for the crate `regex`.

use regex::{Regex, RegexBuilder};

use super::EvaluationError;

/// Bytes of a compiled pattern. It bounds the time of the compilation too, and that of a search in a byte of text.
const SIZE_MAX: usize = 256 * 1024;

/// Bytes of the cache of a search.
const CACHE_SIZE: usize = 256 * 1024;

/// Repetitions of a part, as Go allows them.
const REPETITIONS_MAX: u32 = 1_000;

/// Bytes of a pattern's text: its compilation is not free even if it fails.
const LENGTH_MAX: usize = 1024;

/// Compiles a pattern.
///
/// # Errors
///
/// Fails if it is malformed, or larger than a selector needs.
pub(super) fn compile(pattern: &str) -> Result<Regex, EvaluationError> {
    if pattern.len() > LENGTH_MAX {
        return Err(malformed(pattern));
    }
    RegexBuilder::new(&translated(pattern).ok_or_else(|| malformed(pattern))?)
        .size_limit(SIZE_MAX)
        .dfa_size_limit(CACHE_SIZE)
        .nest_limit(32)
        .build()
        .map_err(|_| malformed(pattern))
}

fn malformed(pattern: &str) -> EvaluationError {
    EvaluationError::MalformedPattern {
        pattern: pattern.chars().take(64).collect(),
    }
}

/// Rewrites what the two notations do not have in common: in Go, the classes `\d`, `\w`, `\s` and `\b` know ASCII only, and within brackets
/// `[`, `&`, `~` are characters as any other. `None` for what only the crate `regex` takes: a repetition of a repetition.
fn translated(pattern: &str) -> Option<String> {
    let mut translated = String::with_capacity(pattern.len());
    let mut characters = pattern.chars().peekable();
    let mut in_class = false;
    let mut repetition = Repetition::None;
    while let Some(character) = characters.next() {
        repetition = match (character, repetition) {
            _ if in_class => Repetition::None,
            ('*' | '+' | '?' | '{', Repetition::None) => Repetition::Greedy,
            ('?', Repetition::Greedy) => Repetition::Lazy,
            ('*' | '+' | '?' | '{', _) => return None,
            _ => Repetition::None,
        };
        match character {
            '\\' => match characters.next() {
                Some('d') => translated.push_str("[0-9]"),
                Some('D') => translated.push_str("[^0-9]"),
                Some('w') => translated.push_str("[0-9A-Za-z_]"),
                Some('W') => translated.push_str("[^0-9A-Za-z_]"),
                Some('s') => translated.push_str(r"[\t\n\f\r ]"),
                Some('S') => translated.push_str(r"[^\t\n\f\r ]"),
                Some('b') if !in_class => translated.push_str(r"(?-u:\b)"),
                Some('B') if !in_class => translated.push_str(r"(?-u:\B)"),
                Some(other) => translated.extend(['\\', other]),
                None => translated.push('\\'),
            },
            '{' if !in_class => {
                translated.push('{');
                let mut count = 0_u32;
                while let Some(digit) =
                    characters.next_if(|next| next.is_ascii_digit() || *next == ',')
                {
                    translated.push(digit);
                    count = digit
                        .to_digit(10)
                        .map_or(0, |digit| count.saturating_mul(10) + digit);
                    if count > REPETITIONS_MAX {
                        return None;
                    }
                }
                translated.extend(characters.next_if_eq(&'}'));
            }
            '[' if !in_class => {
                in_class = true;
                translated.push('[');
                if characters.next_if_eq(&'^').is_some() {
                    translated.push('^');
                }
                // A bracket that closes is a character at the beginning.
                if characters.next_if_eq(&']').is_some() {
                    translated.push_str(r"\]");
                }
            }
            // Within brackets, `[:` begins a named class in both notations.
            '[' if characters.peek() == Some(&':') => {
                translated.push('[');
                for character in characters.by_ref() {
                    translated.push(character);
                    if character == ']' {
                        break;
                    }
                }
            }
            '[' | '&' | '~' if in_class => translated.extend(['\\', character]),
            ']' => {
                in_class = false;
                translated.push(']');
            }
            other => translated.push(other),
        }
    }
    Some(translated)
}

/// Repetition at the end of the part of the pattern before a character.
#[derive(Clone, Copy)]
enum Repetition {
    None,
    Greedy,
    Lazy,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_as_in_go() {
        for (pattern, text, matches) in [
            (r"^\d+$", "12", true),
            (r"^\d$", "٣", false),
            (r"^[\d\w]+$", "a1_", true),
            (r"^\W$", "é", true),
            (r"\bfast\b", "a fast lane", true),
            ("^[[&~]+$", "[&~", true),
            ("^[]a]+$", "]a", true),
            ("^[^]]$", "a", true),
            ("^[[:alpha:]_]+$", "a_", true),
            ("(?i)ÉA", "éa", true),
            ("^.$", "é", true),
            (
                r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
                "gpu.example.com",
                true,
            ),
            (
                r"^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?$",
                "1.2.3-rc.1",
                true,
            ),
            ("^[^,]{1,63}$", "a100", true),
            ("^.{1,63}$", "a100", true),
            ("^a{2,}?b+?c??$", "aab", true),
        ] {
            assert_eq!(
                compile(pattern).map(|it| it.is_match(text)),
                Ok(matches),
                "{pattern} {text}"
            );
        }
    }

    #[test]
    fn malformed_and_large_patterns_are_refused() {
        for pattern in [
            "(",
            "[a",
            "a**",
            "a{2}+",
            "a+??",
            "a{1001}",
            r"\",
            "(?=a)",
            "((a{100}){100}){100}",
            &"a".repeat(2_000),
        ] {
            assert!(
                matches!(
                    compile(pattern),
                    Err(EvaluationError::MalformedPattern { .. })
                ),
                "{pattern}"
            );
        }
    }
}
