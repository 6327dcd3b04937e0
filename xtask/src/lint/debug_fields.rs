//! Finds fields of log lines in the form in which Rust shows its types: `tracing::info!(?counters, "…")`.
//!
//! Given the path and text of a file of production code, it returns the lines of macros of `tracing` with such a field. No IO.

use super::code::code_of;

const MACROS: [&str; 5] = ["trace!(", "debug!(", "info!(", "warn!(", "error!("];
const PREFIX: &str = "tracing::";

/// Returns `PATH:LINE` of each finding.
pub(super) fn findings(path: &str, text: &str) -> Vec<String> {
    let text = text
        .split("#[cfg(test)]\nmod tests")
        .next()
        .unwrap_or_default();
    let code = code_of(text);
    let calls = code.match_indices(PREFIX).filter_map(|(at, _)| {
        let rest = &code[at + PREFIX.len()..];
        let name = MACROS.iter().find(|name| rest.starts_with(**name))?;
        Some((at, arguments(&rest[name.len()..])))
    });
    let found = calls.filter(|(_, arguments)| has_debug_field(arguments));
    found
        .map(|(at, _)| format!("{path}:{}", 1 + code[..at].matches('\n').count()))
        .collect()
}

/// Returns the text up to the parenthesis that closes the one before it.
fn arguments(code: &str) -> &str {
    let mut depth = 1;
    for (at, c) in code.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &code[..at];
        }
    }
    code
}

/// Returns whether a `?` is where a value begins. The operator follows a value.
fn has_debug_field(arguments: &str) -> bool {
    let mut before = ',';
    for c in arguments.chars().filter(|c| !c.is_whitespace()) {
        if c == '?' && matches!(before, ',' | '=') {
            return true;
        }
        before = c;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_fields_are_found() {
        for bad in [
            "tracing::info!(?counters, \"served\");",
            "tracing::warn!(%driver, code = ?status.code(), \"ended\");",
            "tracing::debug!(\n    driver,\n    ?message\n);",
        ] {
            assert_eq!(findings("a.rs", bad), ["a.rs:1"], "{bad}");
        }
        for good in [
            "tracing::info!(%driver, first, \"does ?this\");",
            "tracing::info!(driver = name()?, \"loaded\");",
            "let x = f(a, b)?; // tracing::info!(?x)",
            "#[cfg(test)]\nmod tests { tracing::info!(?a); }",
        ] {
            assert!(findings("a.rs", good).is_empty(), "{good}");
        }
    }
}
