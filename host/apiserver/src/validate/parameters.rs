//! The opaque parameters of an object, which the drivers that they are for check.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_model::limit::CLAIM_CONFIGS_MAX;
use serde_json::Value;

use super::fields::{list, text};
use crate::options::{InvalidParameters, OpaqueParameters, ParametersCheck};
use crate::resources::Resource;
use crate::status::Cause;

/// Returns the opaque parameters of an object, each with its field: of an object that replaces `old` those that are not in `old`. A spec that
/// cannot change has none.
pub(crate) fn new_parameters(
    resource: &Resource,
    new: &Value,
    old: Option<&Value>,
) -> Vec<(String, OpaqueParameters)> {
    let (at, pointer) = match resource.plural {
        "deviceclasses" => ("spec", "/spec"),
        "resourceclaims" if old.is_none() => ("spec.devices", "/spec/devices"),
        "resourceclaimtemplates" if old.is_none() => ("spec.spec.devices", "/spec/spec/devices"),
        _ => return Vec::new(),
    };
    let configs = |object: &Value| -> Vec<Value> {
        let found = object.pointer(pointer);
        found.map_or_else(Vec::new, |object| list(object, "config").to_vec())
    };
    let known = old.map(configs).unwrap_or_default();
    let configs = configs(new).into_iter().take(CLAIM_CONFIGS_MAX).enumerate();
    let added = configs.filter(|(_, config)| !known.contains(config));
    let opaque = added.filter_map(|(index, config)| {
        let opaque = &config["opaque"];
        let parameters = OpaqueParameters {
            driver: text(opaque, "driver").to_owned(),
            parameters: opaque["parameters"].to_string(),
        };
        let is_set = opaque["parameters"].is_object();
        is_set.then(|| {
            (
                format!("{at}.config[{index}].opaque.parameters"),
                parameters,
            )
        })
    });
    opaque.collect()
}

/// Verdicts on parameters.
#[derive(Debug, Default)]
pub(crate) struct Verdicts(BTreeMap<OpaqueParameters, Option<InvalidParameters>>);

impl Verdicts {
    /// The parameters without a verdict.
    pub(crate) fn missing(
        &self,
        parameters: &[(String, OpaqueParameters)],
    ) -> BTreeSet<OpaqueParameters> {
        let all = parameters.iter().map(|(_, parameters)| parameters);
        all.filter(|parameters| !self.0.contains_key(*parameters))
            .cloned()
            .collect()
    }

    /// Asks the drivers.
    pub(crate) async fn add(
        &mut self,
        check: &ParametersCheck,
        parameters: BTreeSet<OpaqueParameters>,
    ) {
        for parameters in parameters {
            let verdict = check(parameters.clone()).await;
            self.0.insert(parameters, verdict);
        }
    }

    /// The causes by which an object with these parameters is refused.
    pub(crate) fn causes(&self, parameters: &[(String, OpaqueParameters)]) -> Vec<Cause> {
        let causes = parameters.iter().filter_map(|(field, parameters)| {
            let InvalidParameters { path, why } = self.0.get(parameters)?.as_ref()?;
            Some(Cause {
                reason: "FieldValueInvalid",
                message: format!("Invalid value: {why}"),
                field: field.clone() + &field_path(path),
            })
        });
        causes.collect()
    }
}

/// A JSON Pointer (RFC 6901) in the notation of field paths: `/ports/1/name` is `.ports[1].name`.
fn field_path(pointer: &str) -> String {
    let segments = pointer.split('/').skip(1).map(|segment| {
        match !segment.is_empty() && segment.bytes().all(|byte| byte.is_ascii_digit()) {
            true => format!("[{segment}]"),
            false => format!(".{}", segment.replace("~1", "/").replace("~0", "~")),
        }
    });
    segments.collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::resources::resource;

    #[test]
    fn pointer_becomes_field_path() {
        for (pointer, path) in [
            ("", ""),
            ("/ports/1/name", ".ports[1].name"),
            ("/a~1b/~01", ".a/b.~1"),
        ] {
            assert_eq!(field_path(pointer), path);
        }
    }

    #[test]
    fn only_new_parameters_are_checked() {
        let config = |parameters: Value| json!({ "opaque": { "driver": "d.dev", "parameters": parameters } });
        let devices = json!({ "config": [config(json!({ "a": 1 })), config(json!({ "b": 2 }))] });
        let fields = |plural: &str, new: &Value, old: Option<&Value>| {
            let found = new_parameters(resource(plural).unwrap(), new, old);
            let fields = found.into_iter().map(|(field, opaque)| {
                assert_eq!(opaque.driver, "d.dev");
                (field, opaque.parameters)
            });
            fields.collect::<Vec<_>>()
        };
        let at = |field: &str, parameters: &str| (field.to_owned(), parameters.to_owned());
        let claim = json!({ "spec": { "devices": devices } });
        assert_eq!(
            fields("resourceclaims", &claim, None),
            [
                at("spec.devices.config[0].opaque.parameters", r#"{"a":1}"#),
                at("spec.devices.config[1].opaque.parameters", r#"{"b":2}"#),
            ]
        );
        assert!(fields("resourceclaims", &claim, Some(&json!({}))).is_empty());
        let template = json!({ "spec": { "spec": { "devices": devices } } });
        assert_eq!(
            fields("resourceclaimtemplates", &template, None)[1].0,
            "spec.spec.devices.config[1].opaque.parameters"
        );
        let (class, old) = (
            json!({ "spec": devices }),
            json!({ "spec": { "config": [config(json!({ "a": 1 }))] } }),
        );
        assert_eq!(
            fields("deviceclasses", &class, Some(&old)),
            [at("spec.config[1].opaque.parameters", r#"{"b":2}"#)]
        );
        assert!(fields("pods", &class, None).is_empty());
    }
}
