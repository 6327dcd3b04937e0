//! Files that operators write beside drivers: YAML of a bounded size, of which an error names line and column. Pure.

use serde::Deserialize;
use serde_saphyr::Spanned;

use crate::limit;

/// An invalid file.
#[derive(Debug, thiserror::Error)]
pub enum SideFileError {
    #[error("the file has {0} bytes, at most {max} are allowed", max = limit::SIDE_FILE_BYTES_MAX)]
    TooLarge(u64),
    #[error("line {line}, column {column}: {message}")]
    At {
        line: u64,
        column: u64,
        message: String,
    },
    #[error("{0}")]
    Whole(String),
}

impl SideFileError {
    pub(crate) fn at<T>(entry: &Spanned<T>, message: String) -> Self {
        Self::At {
            line: entry.referenced.line(),
            column: entry.referenced.column(),
            message,
        }
    }
}

/// Reads a file's text, of at most [`limit::SIDE_FILE_BYTES_MAX`] bytes.
pub(crate) fn parse<'a, T: Deserialize<'a>>(text: &'a str) -> Result<T, SideFileError> {
    if text.len() as u64 > limit::SIDE_FILE_BYTES_MAX {
        return Err(SideFileError::TooLarge(text.len() as u64));
    }
    serde_saphyr::from_str(text).map_err(|error| {
        // The location is a separate field; the text repeats it.
        let plain = error.without_snippet();
        let message = plain.to_string();
        match plain.location() {
            Some(at) => {
                let message = message
                    .split(" at line ")
                    .next()
                    .unwrap_or(&message)
                    .to_owned();
                SideFileError::At {
                    line: at.line(),
                    column: at.column(),
                    message,
                }
            }
            None => SideFileError::Whole(message),
        }
    })
}

/// Checks `apiVersion` or `kind`.
pub(crate) fn expect(
    entry: &Spanned<String>,
    key: &str,
    wanted: &str,
) -> Result<(), SideFileError> {
    if entry.value == wanted {
        return Ok(());
    }
    Err(SideFileError::at(
        entry,
        format!("{key} is {:?}, and {wanted:?} is wanted", entry.value),
    ))
}
