//! Bodies in YAML.

use nodedock_model::yaml::whole_numbers;
use serde_json::Value;

use crate::status::{self, Refusal};

/// Nesting of a body, as `serde_json` has it for JSON.
const DEPTH_MAX: usize = 128;
/// Stack of the parser: it takes some 20 KiB for each level in a debug build.
const STACK_SIZE: usize = DEPTH_MAX * 128 * 1024;

/// Returns the JSON that one document is, with whole numbers as Go reads them. Mostly it is JSON itself, of which more is read as it was written.
/// Aliases, with which a body would have more content than bytes, are refused.
pub(crate) fn parsed(body: &[u8]) -> Result<Value, Refusal> {
    let mut parsed = serde_json::from_slice(body).or_else(|_| parsed_apart(body))?;
    whole_numbers(&mut parsed);
    Ok(parsed)
}

/// Parses a body on a thread whose stack is large enough for the parser.
fn parsed_apart(body: &[u8]) -> Result<Value, Refusal> {
    let parsed = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("yaml".to_owned())
            .stack_size(STACK_SIZE);
        let parsing = thread
            .spawn_scoped(scope, || parse(body))
            .map_err(|error| error.to_string())?;
        // A panic of the parser ends as an error of the thread.
        parsing
            .join()
            .unwrap_or_else(|_| Err("the parser failed".to_owned()))
    });
    parsed.map_err(|why| status::bad_request(format!("error converting YAML to JSON: {why}")))
}

fn parse(body: &[u8]) -> Result<Value, String> {
    let budget = serde_saphyr::budget! { max_depth: DEPTH_MAX, max_aliases: 0 };
    let options =
        serde_saphyr::options! { budget: budget, with_snippet: false, legacy_octal_numbers: true };
    serde_saphyr::from_slice_with_options(body, options).map_err(|error| error.to_string())
}
