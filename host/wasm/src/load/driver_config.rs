//! An operator's YAML config of a driver, as the JSON text that the driver gets.

#[derive(Debug, thiserror::Error)]
pub enum DriverConfigError {
    #[error("not valid YAML")]
    Syntax(#[source] Box<serde_saphyr::Error>),
    #[error("a mapping is wanted, keys and values, and this is {0}")]
    NotAMapping(&'static str),
}

/// A driver's config, from YAML to the JSON text that the driver gets. An empty file is an empty mapping.
pub fn driver_config(yaml: &str) -> Result<String, DriverConfigError> {
    use serde_json::Value;
    let value: Value =
        serde_saphyr::from_str(yaml).map_err(|error| DriverConfigError::Syntax(Box::new(error)))?;
    match value {
        Value::Object(_) => Ok(value.to_string()),
        Value::Null => Ok("{}".to_owned()),
        Value::Array(_) => Err(DriverConfigError::NotAMapping("a list")),
        Value::String(_) => Err(DriverConfigError::NotAMapping("a text")),
        Value::Bool(_) | Value::Number(_) => Err(DriverConfigError::NotAMapping("a single value")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_base::error::chain;

    #[test]
    fn driver_config_becomes_json() {
        assert_eq!(
            driver_config("pools:\n- {name: misc}\n").unwrap(),
            r#"{"pools":[{"name":"misc"}]}"#
        );
        assert_eq!(driver_config("# nothing\n").unwrap(), "{}");
        assert!(matches!(
            driver_config("- a\n"),
            Err(DriverConfigError::NotAMapping("a list"))
        ));
        let error = chain(&driver_config("a: 1\nb: [1,\n").unwrap_err());
        assert!(error.contains("line"), "{error}");
    }
}
