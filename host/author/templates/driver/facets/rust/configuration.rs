//! The operator's config and the parameters of claims: schemas, and checks of what a schema cannot express.

use nodedock_sdk::*;

use crate::NodeDriver;

const CONFIG_SCHEMA: &str = r#"{"type": "object", "properties": {}, "additionalProperties": false}"#;

impl Configuration for NodeDriver {
    fn config_schema() -> Option<String> {
        Some(CONFIG_SCHEMA.to_owned())
    }

    fn validate_parameters(_: &str) -> Result<(), Problem> {
        Err(Problem::invalid("bad-parameters", "this driver has no parameters"))
    }
}
