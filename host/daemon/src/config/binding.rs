//! The section `kubernetes.bindingConditions`: devices that have to be prepared before a scheduler binds the pod of their claim (KEP-5007).

use serde::de::Error;
use serde::{Deserialize, Deserializer};

use nodedock_kube::slices::BindingRule;
use nodedock_model::check::{self, Findings};
use nodedock_model::{BindingConditions, DriverName, PoolName};

/// Rules of the section.
const RULES_MAX: usize = 256;

/// Rule of binding conditions. Without lists the conditions are those that the host sets.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Rule {
    driver: DriverName,
    pool: Option<PoolName>,
    conditions: Option<Vec<String>>,
    failure_conditions: Option<Vec<String>>,
}

/// Reads the rules. Their conditions are such as an API server accepts.
pub(super) fn rules<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<BindingRule>, D::Error> {
    let rules = Option::<Vec<Rule>>::deserialize(deserializer)?.unwrap_or_default();
    if rules.len() > RULES_MAX {
        return Err(D::Error::custom(format!(
            "{} rules, at most {RULES_MAX} are allowed",
            rules.len()
        )));
    }
    rules
        .into_iter()
        .map(binding)
        .collect::<Result<_, _>>()
        .map_err(D::Error::custom)
}

fn binding(rule: Rule) -> Result<BindingRule, String> {
    let conditions = BindingConditions {
        conditions: rule
            .conditions
            .unwrap_or_else(|| vec![BindingConditions::PREPARED.to_owned()]),
        failures: rule
            .failure_conditions
            .unwrap_or_else(|| vec![BindingConditions::PREPARE_FAILED.to_owned()]),
    };
    let place = rule.pool.as_ref().map_or_else(
        || rule.driver.to_string(),
        |pool| format!("{}/{pool}", rule.driver),
    );
    Findings::of(|found| check::binding_conditions(found, &conditions))
        .map_err(|error| format!("bindingConditions of {place}: {error}"))?;
    if conditions.is_empty() {
        return Err(format!(
            "bindingConditions of {place}: the lists are empty; leave the rule out"
        ));
    }
    Ok(BindingRule {
        driver: rule.driver,
        pool: rule.pool,
        conditions,
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::config::ConfigFile;
    use nodedock_base::error::chain;

    fn read(rules: &str) -> Result<ConfigFile, String> {
        let text = format!("kubernetes:\n  bindingConditions: {rules}\n");
        ConfigFile::parse(&text, Path::new("config.yaml")).map_err(|error| chain(&error))
    }

    #[test]
    fn binding_rule_defaults_to_host_conditions() {
        let read = read(
            "[{driver: gpu.example.com}, {driver: gpu.example.com, pool: gpus, conditions: [nodedock.dev/prepared, example.com/attached], \
             failureConditions: [example.com/failed]}]",
        );
        let [every, gpus] = &read.unwrap().kubernetes.binding_conditions[..] else {
            panic!("two rules")
        };
        assert_eq!(
            (every.driver.as_str(), &every.pool),
            ("gpu.example.com", &None)
        );
        assert_eq!(every.conditions.conditions, ["nodedock.dev/prepared"]);
        assert_eq!(every.conditions.failures, ["nodedock.dev/prepare-failed"]);
        assert_eq!(gpus.pool.as_ref().map(|pool| pool.as_str()), Some("gpus"));
        assert_eq!(
            gpus.conditions.conditions,
            ["nodedock.dev/prepared", "example.com/attached"]
        );
    }

    #[test]
    fn unpublishable_rule_is_refused_with_reason() {
        for (rule, part) in [
            (
                "[{driver: gpu.example.com, conditions: [A, B, C, D, E]}]",
                "5 binding-conditions, at most 4",
            ),
            (
                "[{driver: g.example.com, pool: p, conditions: [a b]}]",
                "g.example.com/p: binding-conditions[0] \"a b\" is no type",
            ),
            (
                "[{driver: gpu.example.com, conditions: [nodedock.dev/prepare-failed]}]",
                "is one of the binding conditions too",
            ),
            (
                "[{driver: gpu.example.com, conditions: []}]",
                "need binding conditions",
            ),
            (
                "[{driver: gpu.example.com, failureConditions: []}]",
                "need failure conditions",
            ),
            (
                "[{driver: gpu.example.com, conditions: [], failureConditions: []}]",
                "the lists are empty",
            ),
            ("[{driver: Gpu_}]", "Gpu_"),
            ("[{pool: gpus}]", "driver"),
            ("[{driver: gpu.example.com, condition: [A]}]", "condition"),
        ] {
            let refused = read(rule).unwrap_err();
            assert!(refused.contains(part), "{rule}: {refused}");
        }
        let many = vec!["{driver: gpu.example.com}"; 257].join(", ");
        assert!(
            read(&format!("[{many}]"))
                .unwrap_err()
                .contains("257 rules")
        );
    }
}
