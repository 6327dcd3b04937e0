//! The section `kubernetes.overhead`: what devices cost of the node's own resources, which a scheduler then counts for their pods.

use std::collections::BTreeMap;

use serde::de::Error;
use serde::{Deserialize, Deserializer};

use nodedock_kube::slices::Overhead;
use nodedock_model::rule::is_node_resource;
use nodedock_model::{DriverName, NodeAllocatable, PoolName, limit, quantity};

/// Rules of the section.
const RULES_MAX: usize = 256;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rule {
    driver: DriverName,
    pool: Option<PoolName>,
    resources: BTreeMap<String, Amounts>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Amounts {
    per_pod: Option<String>,
    per_container: Option<String>,
}

/// Reads the rules. A resource of a node, and quantities above 0.
pub(super) fn rules<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Overhead>, D::Error> {
    let rules = Option::<Vec<Rule>>::deserialize(deserializer)?.unwrap_or_default();
    if rules.len() > RULES_MAX {
        return Err(D::Error::custom(format!(
            "{} rules, at most {RULES_MAX} are allowed",
            rules.len()
        )));
    }
    rules
        .into_iter()
        .map(overhead)
        .collect::<Result<_, _>>()
        .map_err(D::Error::custom)
}

fn overhead(rule: Rule) -> Result<Overhead, String> {
    if rule.resources.is_empty() || rule.resources.len() > limit::NODE_ALLOCATABLE_MAX {
        let most = limit::NODE_ALLOCATABLE_MAX;
        return Err(format!(
            "{} resources, and 1 to {most} are allowed",
            rule.resources.len()
        ));
    }
    let resources = rule
        .resources
        .into_iter()
        .map(resource)
        .collect::<Result<_, _>>()?;
    Ok(Overhead {
        driver: rule.driver,
        pool: rule.pool,
        resources,
    })
}

fn resource((name, amounts): (String, Amounts)) -> Result<(String, NodeAllocatable), String> {
    if !is_node_resource(&name) {
        return Err(format!(
            "{name:?} is not cpu, memory, ephemeral-storage or hugepages-SIZE"
        ));
    }
    let Amounts {
        per_pod,
        per_container,
    } = amounts;
    if per_pod.is_none() && per_container.is_none() {
        return Err(format!("{name} has neither perPod nor perContainer"));
    }
    match per_pod
        .iter()
        .chain(&per_container)
        .find(|text| quantity::nanos(text).is_none_or(|nanos| nanos <= 0))
    {
        Some(wrong) => Err(format!(
            "{name}: {wrong:?} is not a quantity above 0, such as 500m or 1Gi"
        )),
        None => Ok((
            name,
            NodeAllocatable {
                mapping: None,
                per_pod,
                per_container,
            },
        )),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::config::ConfigFile;
    use nodedock_base::error::chain;

    fn read(rules: &str) -> Result<ConfigFile, String> {
        let text = format!("kubernetes:\n  overhead: {rules}\n");
        ConfigFile::parse(&text, Path::new("config.yaml")).map_err(|error| chain(&error))
    }

    #[test]
    fn overhead_rule_has_driver_and_quantities() {
        let read = read(
            "[{driver: gpu.example.com, pool: gpus, resources: {cpu: {perPod: \"2\"}, memory: {perContainer: 1Gi}}}]",
        );
        let rule = &read.unwrap().kubernetes.overhead[0];
        assert_eq!(
            (rule.driver.as_str(), rule.resources.len()),
            ("gpu.example.com", 2)
        );
        assert_eq!(rule.resources["cpu"].per_pod.as_deref(), Some("2"));
        assert_eq!(
            rule.resources["memory"].per_container.as_deref(),
            Some("1Gi")
        );
    }

    #[test]
    fn unpublishable_rule_is_refused_with_reason() {
        for (rule, part) in [
            ("[{driver: gpu.example.com, resources: {}}]", "0 resources"),
            (
                "[{driver: gpu.example.com, resources: {nvidia.com/gpu: {perPod: \"1\"}}}]",
                "nvidia.com/gpu",
            ),
            (
                "[{driver: gpu.example.com, resources: {cpu: {}}}]",
                "neither perPod nor perContainer",
            ),
            (
                "[{driver: gpu.example.com, resources: {cpu: {perPod: much}}}]",
                "\"much\" is not a quantity",
            ),
            (
                "[{driver: gpu.example.com, resources: {cpu: {perPod: \"-1\"}}}]",
                "above 0",
            ),
            (
                "[{driver: Gpu_, resources: {cpu: {perPod: \"1\"}}}]",
                "Gpu_",
            ),
            (
                "[{driver: gpu.example.com, each: 1, resources: {cpu: {perPod: \"1\"}}}]",
                "each",
            ),
        ] {
            let refused = read(rule).unwrap_err();
            assert!(refused.contains(part), "{rule}: {refused}");
        }
    }
}
