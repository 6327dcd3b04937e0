//! Error chains in one line.

use std::error::Error;

/// Formats an error and its causes, joined by `: `.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        // Some libraries repeat the cause in their own text.
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_chain_names_each_cause_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("read the grant")]
        struct Outer(#[source] std::io::Error);
        let error = Outer(std::io::Error::other("line 3: no such key"));
        assert_eq!(super::chain(&error), "read the grant: line 3: no such key");
    }
}
