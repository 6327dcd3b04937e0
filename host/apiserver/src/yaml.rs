//! Bodies in YAML.

use nodedock_model::yaml::{self, Aliases, whole_numbers};
use serde_json::Value;

use crate::status::{self, Refusal};

/// Returns the JSON that one document is, with whole numbers as Go reads them. Mostly it is JSON itself, of which more is read as it was written.
/// Aliases, with which a body would have more content than bytes, are refused.
pub(crate) fn parsed(body: &[u8]) -> Result<Value, Refusal> {
    let mut parsed = serde_json::from_slice(body).or_else(|_| {
        parse(body)
            .map_err(|why| status::bad_request(format!("error converting YAML to JSON: {why}")))
    })?;
    whole_numbers(&mut parsed);
    Ok(parsed)
}

fn parse(body: &[u8]) -> Result<Value, String> {
    let text = str::from_utf8(body).map_err(|error| error.to_string())?;
    yaml::document(text, Aliases::Refused).map_err(|error| error.to_string())
}
