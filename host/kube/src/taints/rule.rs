//! DeviceTaintRules: which devices the rule of an admin taints, and with what. Pure.

use std::collections::BTreeMap;

use kube::api::DynamicObject;
use serde_json::Value;

use nodedock_base::printable::one_line;
use nodedock_model::{
    DeviceName, DriverName, ObjectName, PoolName, is_label_key, is_label_value, limit,
};

/// Rules that are kept: a cluster has few. Of more the first that were read are kept.
pub(super) const TAINT_RULES_MAX: usize = 4096;

/// Bytes of a text of a rule. The longest is a key: a DNS subdomain, `/` and a name.
const TEXT_BYTES_MAX: usize = limit::SUBDOMAIN_BYTES_MAX + 1 + limit::LABEL_BYTES_MAX;

/// The taint that a rule adds to a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleTaint {
    pub rule: ObjectName,
    pub key: String,
    pub value: String,
    /// `None`, `NoSchedule`, `NoExecute`, or one that is not known here: that counts as `None`.
    pub effect: String,
}

/// A device as ResourceSlices name it.
#[derive(Debug, Clone, Copy)]
pub(super) struct PublishedDevice<'a> {
    pub(super) driver: &'a DriverName,
    pub(super) pool: &'a PoolName,
    pub(super) device: &'a DeviceName,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct TaintRule {
    selector: Selector,
    taint: RuleTaint,
}

/// The devices that a rule taints; a criterion that is not set is satisfied by all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Selector {
    driver: Option<String>,
    pool: Option<String>,
    device: Option<String>,
}

/// Why a rule is left out.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("DeviceTaintRule {rule:?}: {field} {why}")]
pub(super) struct RuleError {
    rule: String,
    field: String,
    why: String,
}

/// The rules of the cluster that taint any device.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct TaintRules(BTreeMap<String, TaintRule>);

impl TaintRules {
    /// Takes a rule that is new or has changed. Fails if it is left out from now on.
    pub(super) fn apply(&mut self, object: &DynamicObject) -> Result<(), RuleError> {
        let name = object.metadata.name.clone().unwrap_or_default();
        self.0.remove(&name);
        let Some(rule) = parse(&name, &object.data)? else {
            return Ok(());
        };
        if self.0.len() >= TAINT_RULES_MAX {
            return Err(error(
                &name,
                "metadata.name",
                format!("is that of a rule beyond the first {TAINT_RULES_MAX}"),
            ));
        }
        self.0.insert(name, rule);
        Ok(())
    }

    pub(super) fn remove(&mut self, object: &DynamicObject) {
        self.0
            .remove(object.metadata.name.as_deref().unwrap_or_default());
    }

    /// Returns the taints of a device: the first of them, at most as many as a device can have in a slice, and the number of the others.
    pub(super) fn of(&self, device: PublishedDevice<'_>) -> (Vec<RuleTaint>, usize) {
        let mut matching = self.0.values().filter(|rule| rule.selector.matches(device));
        let first = matching
            .by_ref()
            .take(limit::TAINTS_MAX)
            .map(|rule| rule.taint.clone())
            .collect();
        (first, matching.count())
    }
}

impl Selector {
    fn matches(&self, device: PublishedDevice<'_>) -> bool {
        is_met(&self.driver, device.driver.as_str())
            && is_met(&self.pool, device.pool.as_str())
            && is_met(&self.device, device.device.as_str())
    }
}

fn is_met(criterion: &Option<String>, name: &str) -> bool {
    criterion.as_deref().is_none_or(|of| of == name)
}

/// Returns `None` for a rule without a selector, which taints nothing. The empty selector taints every device.
fn parse(name: &str, object: &Value) -> Result<Option<TaintRule>, RuleError> {
    let rule =
        ObjectName::new(name).map_err(|why| error(name, "metadata.name", why.to_string()))?;
    let spec = &object["spec"];
    let selector = match &spec["deviceSelector"] {
        Value::Null => return Ok(None),
        Value::Object(fields) => fields,
        _ => return Err(error(name, "spec.deviceSelector", "is no object")),
    };
    let mut criteria = Selector::default();
    for (field, value) in selector {
        let criterion = match field.as_str() {
            "driver" => &mut criteria.driver,
            "pool" => &mut criteria.pool,
            "device" => &mut criteria.device,
            // Those of Kubernetes 1.33 and 1.34, such as CEL expressions, or of the future.
            _ => {
                let why = "is not evaluated here, so it is not known which devices the rule taints";
                return Err(error(name, &format!("spec.deviceSelector.{field}"), why));
            }
        };
        *criterion = text(name, &format!("spec.deviceSelector.{field}"), value)?;
    }
    let of_taint = |field: &str| text(name, &format!("spec.taint.{field}"), &spec["taint"][field]);
    let (key, value) = (
        of_taint("key")?.unwrap_or_default(),
        of_taint("value")?.unwrap_or_default(),
    );
    if !is_label_key(&key) {
        return Err(error(
            name,
            "spec.taint.key",
            format!("{key:?} is no label key"),
        ));
    }
    if !is_label_value(&value) {
        return Err(error(
            name,
            "spec.taint.value",
            format!("{value:?} is no label value"),
        ));
    }
    let effect = of_taint("effect")?.unwrap_or_default();
    if effect.is_empty() || !effect.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Err(error(
            name,
            "spec.taint.effect",
            format!("{effect:?} is no effect"),
        ));
    }
    Ok(Some(TaintRule {
        selector: criteria,
        taint: RuleTaint {
            rule,
            key,
            value,
            effect,
        },
    }))
}

fn text(rule: &str, field: &str, value: &Value) -> Result<Option<String>, RuleError> {
    match value {
        Value::Null => Ok(None),
        Value::String(text) if text.len() <= TEXT_BYTES_MAX => Ok(Some(text.clone())),
        Value::String(_) => Err(error(
            rule,
            field,
            format!("has more than {TEXT_BYTES_MAX} bytes"),
        )),
        _ => Err(error(rule, field, "is no text")),
    }
}

fn error(rule: &str, field: &str, why: impl AsRef<str>) -> RuleError {
    RuleError {
        rule: short(rule),
        field: short(field),
        why: short(why.as_ref()),
    }
}

fn short(text: &str) -> String {
    one_line(text, limit::API_WORDS_BYTES_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn object(name: &str, spec: &Value) -> DynamicObject {
        let object = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceTaintRule", "metadata": { "name": name }, "spec": spec,
        });
        serde_json::from_value(object).unwrap()
    }

    fn rule(selector: &Value) -> Value {
        json!({ "deviceSelector": selector, "taint": { "key": "example.com/worn", "value": "x", "effect": "NoSchedule" } })
    }

    /// The names of the rules that taint `gpu.example.com/POOL/DEVICE`.
    fn rules_of(rules: &TaintRules, pool: &str, device: &str) -> Vec<String> {
        let driver = DriverName::new("gpu.example.com").unwrap();
        let (pool, device) = (
            PoolName::new(pool).unwrap(),
            DeviceName::new(device).unwrap(),
        );
        let (taints, _) = rules.of(PublishedDevice {
            driver: &driver,
            pool: &pool,
            device: &device,
        });
        taints
            .into_iter()
            .map(|taint| taint.rule.to_string())
            .collect()
    }

    #[test]
    fn rule_taints_matching_devices_only() {
        let mut rules = TaintRules::default();
        for (name, selector) in [
            ("all", json!({})),
            (
                "nulls",
                json!({ "driver": null, "pool": null, "device": null }),
            ),
            ("none", Value::Null),
            ("driver", json!({ "driver": "gpu.example.com" })),
            ("pool", json!({ "pool": "node-1/gpus" })),
            ("device", json!({ "device": "gpu-0" })),
            (
                "one",
                json!({ "driver": "gpu.example.com", "pool": "node-1/gpus", "device": "gpu-0" }),
            ),
            (
                "other-driver",
                json!({ "driver": "nic.example.com", "device": "gpu-0" }),
            ),
            (
                "other-pool",
                json!({ "driver": "gpu.example.com", "pool": "gpus" }),
            ),
            ("empty-driver", json!({ "driver": "" })),
        ] {
            rules.apply(&object(name, &rule(&selector))).unwrap();
        }
        let named = ["all", "device", "driver", "nulls", "one", "pool"];
        assert_eq!(rules_of(&rules, "node-1/gpus", "gpu-0"), named);
        assert_eq!(
            rules_of(&rules, "node-1/gpus", "gpu-1"),
            ["all", "driver", "nulls", "pool"]
        );
        assert_eq!(
            rules_of(&rules, "node-2/gpus", "gpu-1"),
            ["all", "driver", "nulls"]
        );
        // A change, and a removal.
        rules
            .apply(&object("all", &rule(&json!({ "device": "gpu-7" }))))
            .unwrap();
        rules.remove(&object("nulls", &Value::Null));
        assert_eq!(rules_of(&rules, "node-2/gpus", "gpu-1"), ["driver"]);
        let mut without_selector = rule(&Value::Null);
        without_selector
            .as_object_mut()
            .unwrap()
            .remove("deviceSelector");
        rules.apply(&object("driver", &without_selector)).unwrap();
        assert_eq!(
            rules_of(&rules, "node-2/gpus", "gpu-1"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn unknown_taint_effect_is_shown() {
        let mut rules = TaintRules::default();
        let taint = json!({ "key": "worn", "effect": "NoExecuteGently", "timeAdded": "2026-11-20T08:16:05Z" });
        rules
            .apply(&object(
                "a",
                &json!({ "deviceSelector": {}, "taint": taint }),
            ))
            .unwrap();
        let text = str::to_owned;
        let expected = RuleTaint {
            rule: ObjectName::new("a").unwrap(),
            key: text("worn"),
            value: String::new(),
            effect: text("NoExecuteGently"),
        };
        assert_eq!(rules.0["a"].taint, expected);
    }

    #[test]
    fn unreadable_rule_is_left_out() {
        let with = |pointer: &str, value: Value| {
            let mut spec = rule(&json!({}));
            *spec.pointer_mut(pointer).unwrap() = value;
            spec
        };
        let long = "a".repeat(318);
        for (name, spec, parts) in [
            ("Bad\nname", rule(&json!({})), ["metadata.name", "Bad"]),
            ("a", json!("text"), ["a", "spec.taint.key"]),
            (
                "a",
                with("/deviceSelector", json!(["driver"])),
                ["spec.deviceSelector", "is no object"],
            ),
            (
                "a",
                rule(&json!({ "driver": 7 })),
                ["spec.deviceSelector.driver", "is no text"],
            ),
            (
                "a",
                rule(&json!({ "pool": long })),
                ["spec.deviceSelector.pool", "317 bytes"],
            ),
            (
                "a",
                rule(&json!({ "selectors": [{ "cel": {} }] })),
                ["spec.deviceSelector.selectors", "not evaluated"],
            ),
            (
                "a",
                rule(&json!({ "deviceClassName": "gpu" })),
                ["deviceSelector.deviceClassName", "not evaluated"],
            ),
            (
                "a",
                with("/taint", Value::Null),
                ["spec.taint.key", "no label key"],
            ),
            (
                "a",
                with("/taint/key", json!("a b")),
                ["spec.taint.key", "\"a b\" is no label key"],
            ),
            (
                "a",
                with("/taint/value", json!("-")),
                ["spec.taint.value", "\"-\" is no label value"],
            ),
            (
                "a",
                with("/taint/value", json!("a".repeat(64))),
                ["spec.taint.value", "no label value"],
            ),
            (
                "a",
                with("/taint/effect", Value::Null),
                ["spec.taint.effect", "no effect"],
            ),
            (
                "a",
                with("/taint/effect", json!("No\u{1b}[0m")),
                ["spec.taint.effect", "no effect"],
            ),
        ] {
            // It had been good before.
            let mut rules = TaintRules::default();
            rules.apply(&object("a", &rule(&json!({})))).unwrap();
            let Err(error) = rules.apply(&object(name, &spec)) else {
                // `spec` of another kind has no selector.
                assert_eq!(spec, json!("text"));
                assert_eq!(rules, TaintRules::default());
                continue;
            };
            let error = error.to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
            assert!(
                error.starts_with("DeviceTaintRule \"") && !error.contains('\n'),
                "{error}"
            );
            assert_eq!(rules.0.contains_key("a"), name != "a", "{error}");
        }
    }

    #[test]
    fn rules_and_taints_are_bounded() {
        let mut rules = TaintRules::default();
        for i in 0..TAINT_RULES_MAX {
            rules
                .apply(&object(&format!("r{i:05}"), &rule(&json!({}))))
                .unwrap();
        }
        let error = rules
            .apply(&object("zz", &rule(&json!({}))))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("\"zz\"") && error.contains("4096"),
            "{error}"
        );
        rules
            .apply(&object("r00000", &rule(&json!({ "device": "x" }))))
            .unwrap();
        let driver = DriverName::new("gpu.example.com").unwrap();
        let (pool, device) = (PoolName::new("p").unwrap(), DeviceName::new("d").unwrap());
        let (taints, more) = rules.of(PublishedDevice {
            driver: &driver,
            pool: &pool,
            device: &device,
        });
        assert_eq!((taints.len(), more), (16, TAINT_RULES_MAX - 1 - 16));
        assert_eq!(taints[0].rule.as_str(), "r00001");
    }

    proptest! {
        /// Checks that a rule with any spec is accepted, or refused with its name, and that a refused rule taints nothing.
        #[test]
        fn any_spec_is_taken_or_refused(
            texts in proptest::collection::vec(prop_oneof![Just("gpu-0".to_owned()), ".{0,80}"], 6),
            kinds in proptest::collection::vec(0u8..4, 6),
        ) {
            let value = |i: usize| match kinds[i] {
                0 => Value::Null,
                1 => json!([texts[i]]),
                _ => json!(texts[i]),
            };
            let spec = json!({
                "deviceSelector": { "driver": value(0), "pool": value(1), "device": value(2) },
                "taint": { "key": value(3), "value": value(4), "effect": value(5) },
            });
            let mut rules = TaintRules::default();
            match rules.apply(&object("a", &spec)) {
                Ok(()) => {
                    let taint = &rules.0["a"].taint;
                    prop_assert!(is_label_key(&taint.key) && is_label_value(&taint.value));
                    prop_assert!(!taint.effect.is_empty());
                }
                Err(error) => {
                    prop_assert!(error.to_string().contains("\"a\"") && rules.0.is_empty());
                }
            }
        }
    }
}
