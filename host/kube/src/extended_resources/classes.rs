//! DeviceClasses for extended resources: what an operator applies, and what the cluster has. Pure.
//!
//! One class for each resource name, the same on every node: it selects the devices of the driver that carry the attribute
//! `nodedock.dev/extendedResource`, which the host adds in slices. Every class also has the implicit extended resource
//! `deviceclass.resource.kubernetes.io/CLASS`. A node does not write classes: they are objects of the cluster.

use kube::ResourceExt;
use kube::api::DynamicObject;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::client::ApiError;
use nodedock_base::printable::one_line;
use nodedock_model::limit::{ATTRIBUTE_TEXT_MAX, SUBDOMAIN_BYTES_MAX};
use nodedock_model::{DriverName, ExtendedResource, Problem, ProblemCode};

/// Domain and name of the attribute of devices in pools with an extended-resource name.
const ATTRIBUTE_DOMAIN: &str = "nodedock.dev";
const ATTRIBUTE_NAME: &str = "extendedResource";
/// The attribute in slices.
pub(crate) const ATTRIBUTE: &str = "nodedock.dev/extendedResource";

/// Digits of a hash that keeps shortened names apart.
const HASH_DIGITS: usize = 16;

const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
const NODEDOCK: &str = "nodedock";

/// Bytes of another's text, and classes, that a message names.
const QUOTED_BYTES_MAX: usize = 512;
const CLASSES_NAMED_MAX: usize = 4;

/// A DeviceClass of the cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Class {
    pub(super) name: String,
    pub(super) is_labelled: bool,
    pub(super) extended_resource: Option<String>,
    /// CEL expressions.
    pub(super) selectors: Vec<String>,
}

impl Class {
    /// Reads what is judged of an object of `resource.k8s.io/v1`.
    pub(super) fn of(class: &DynamicObject) -> Self {
        let spec = &class.data["spec"];
        let expression =
            |selector: &Value| Some(selector.pointer("/cel/expression")?.as_str()?.to_owned());
        let selectors = spec["selectors"].as_array().into_iter().flatten();
        Self {
            name: class.name_any(),
            is_labelled: class
                .labels()
                .get(MANAGED_BY)
                .is_some_and(|by| by == NODEDOCK),
            extended_resource: spec["extendedResourceName"].as_str().map(str::to_owned),
            selectors: selectors.filter_map(expression).collect(),
        }
    }
}

/// Returns the value of the attribute: the resource's name, shortened if the API allows no text of its length.
pub fn attribute(resource: &ExtendedResource) -> String {
    shortened(resource.as_str(), resource.as_str(), ATTRIBUTE_TEXT_MAX)
}

/// Returns the name of the class of a resource: `example.com-gpu` for `example.com/gpu`.
pub fn class_name(resource: &ExtendedResource) -> String {
    let (domain, name) = resource
        .as_str()
        .split_once('/')
        .unwrap_or(("", resource.as_str()));
    let letter = |letter: char| match letter.to_ascii_lowercase() {
        letter @ ('a'..='z' | '0'..='9') => letter,
        _ => '-',
    };
    let plain: String = name.chars().map(letter).collect();
    let readable = format!("{domain}-{plain}");
    if plain == name && readable.len() <= SUBDOMAIN_BYTES_MAX {
        return readable;
    }
    // Other resources may have the same letters.
    let keep = readable
        .chars()
        .take(SUBDOMAIN_BYTES_MAX - HASH_DIGITS - 1)
        .collect::<String>();
    format!(
        "{}-{}",
        keep.trim_end_matches(['-', '.']),
        hash(resource.as_str())
    )
}

fn shortened(text: &str, of: &str, bytes_max: usize) -> String {
    if text.len() <= bytes_max {
        return text.to_owned();
    }
    // Names of resources are ASCII.
    let keep: String = text.chars().take(bytes_max - HASH_DIGITS - 1).collect();
    format!("{keep}-{}", hash(of))
}

fn hash(text: &str) -> String {
    let digits = hex::encode(Sha256::digest(text));
    digits[..HASH_DIGITS].to_owned()
}

/// The expression that selects the devices of a resource. An attribute that a device does not have would end an allocation with an error.
fn selector(resource: &ExtendedResource, driver: &DriverName) -> String {
    let value = attribute(resource);
    let attributes = format!("device.attributes[\"{ATTRIBUTE_DOMAIN}\"]");
    format!(
        "device.driver == \"{driver}\" && \"{ATTRIBUTE_NAME}\" in {attributes} && {attributes}.{ATTRIBUTE_NAME} == \"{value}\""
    )
}

/// Returns the DeviceClass of a resource, as it is applied.
pub fn manifest(resource: &ExtendedResource, driver: &DriverName) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": { "name": class_name(resource), "labels": { MANAGED_BY: NODEDOCK } },
        "spec": {
            "extendedResourceName": resource.as_str(),
            "selectors": [{ "cel": { "expression": selector(resource, driver) } }],
        },
    })
}

/// Returns what keeps pods from devices of a resource, or gives them others: `None` if the cluster has the class that is applied, and no other.
pub(super) fn judge(
    resource: &ExtendedResource,
    driver: &DriverName,
    classes: &[Class],
) -> Option<Problem> {
    let name = class_name(resource);
    let is_of_resource =
        |class: &&Class| class.extended_resource.as_deref() == Some(resource.as_str());
    let conflict = |message| Some(Problem::conflict(ProblemCode::DeviceClassConflict, message));
    let own = classes.iter().find(|class| class.name == name);
    if let Some(own) = own.filter(|own| own.selectors != [selector(resource, driver)]) {
        let of = own.extended_resource.as_deref();
        let of = of.map_or("no extended resource".to_owned(), |of| {
            one_line(of, QUOTED_BYTES_MAX)
        });
        return conflict(format!(
            "DeviceClass {name} is of {of} and has other selectors than the class for {resource} of the driver {driver} that nodedock \
             get classmanifests prints: it belongs to another owner, or to another driver"
        ));
    }
    match own.map(|own| own.extended_resource.as_deref()) {
        Some(None) => {
            return conflict(format!(
                "DeviceClass {name} has no spec.extendedResourceName: the API server dropped it, or it was applied without; without the \
                 feature DRAExtendedResource set kubernetes.extendedResources to device-plugin"
            ));
        }
        Some(Some(of)) if of != resource.as_str() => {
            let of = one_line(of, QUOTED_BYTES_MAX);
            return conflict(format!(
                "DeviceClass {name} is of {of}: it belongs to another owner"
            ));
        }
        _ => {}
    }
    let of_resource: Vec<_> = classes.iter().filter(is_of_resource).collect();
    let others = of_resource
        .iter()
        .filter(|class| class.name != name && !class.is_labelled);
    let others = others.map(|class| one_line(&class.name, QUOTED_BYTES_MAX));
    let others: Vec<_> = others.take(CLASSES_NAMED_MAX).collect();
    if !others.is_empty() {
        return conflict(format!(
            "DeviceClass {} has the extended-resource name {resource} as well, and is not of nodedock: the scheduler takes the devices of \
             the newest class; if that is intended, give it the label {MANAGED_BY}={NODEDOCK}",
            others.join(", ")
        ));
    }
    of_resource.is_empty().then(|| {
        let message = format!(
            "no DeviceClass has the extended-resource name {resource}, so the scheduler gives its devices to no pod; apply what \
             nodedock get classmanifests prints. Until then a pool that the kubelet's device manager has stays there"
        );
        Problem::unavailable(ProblemCode::DeviceClassMissing, message)
    })
}

/// The problem of a resource whose class the account may not see.
pub(super) fn unreadable(error: &ApiError) -> Problem {
    let message = format!(
        "DeviceClasses cannot be read, so it is not known whether the resource has one: give the account the right to list and watch \
         deviceclasses of resource.k8s.io: {error}"
    );
    Problem::denied(ProblemCode::DeviceClassMissing, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn resource(name: &str) -> ExtendedResource {
        ExtendedResource::new(name).unwrap()
    }

    fn driver() -> DriverName {
        DriverName::new("gpu.example.com").unwrap()
    }

    fn own() -> Class {
        let manifest = manifest(&resource("example.com/gpu"), &driver());
        Class::of(&serde_json::from_value(manifest).unwrap())
    }

    fn judged(classes: &[Class]) -> Option<(String, String)> {
        let problem = judge(&resource("example.com/gpu"), &driver(), classes)?;
        Some((problem.code, problem.message))
    }

    #[test]
    fn manifest_selects_the_drivers_devices() {
        let manifest = manifest(&resource("example.com/gpu"), &driver());
        assert_eq!(
            manifest,
            json!({
                "apiVersion": "resource.k8s.io/v1",
                "kind": "DeviceClass",
                "metadata": {"name": "example.com-gpu", "labels": {"app.kubernetes.io/managed-by": "nodedock"}},
                "spec": {
                    "extendedResourceName": "example.com/gpu",
                    "selectors": [{"cel": {"expression": "device.driver == \"gpu.example.com\" && \"extendedResource\" in device.attributes[\"nodedock.dev\"] && device.attributes[\"nodedock.dev\"].extendedResource == \"example.com/gpu\""}}],
                },
            })
        );
    }

    #[test]
    fn class_names_are_valid_and_distinct() {
        assert_eq!(class_name(&resource("example.com/gpu")), "example.com-gpu");
        let upper = class_name(&resource("example.com/GPU"));
        assert!(
            upper.starts_with("example.com-gpu-")
                && upper.len() == "example.com-gpu-".len() + HASH_DIGITS
        );
        assert_ne!(
            class_name(&resource("example.com/a_b")),
            class_name(&resource("example.com/a.b"))
        );
    }

    proptest! {
        #[test]
        fn classes_and_attributes_satisfy_the_api(
            domain in "[a-z]{1,60}(\\.[a-z]{1,60}){0,3}", name in "[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?",
        ) {
            let Ok(resource) = ExtendedResource::new(format!("{domain}/{name}")) else { return Ok(()) };
            let class = class_name(&resource);
            prop_assert!(nodedock_model::ObjectName::new(&class).is_ok(), "{class}");
            prop_assert!(attribute(&resource).len() <= ATTRIBUTE_TEXT_MAX);
        }
    }

    #[test]
    fn missing_class_is_reported() {
        assert_eq!(judged(&[own()]), None);
        let (code, message) = judged(&[]).unwrap();
        assert!(
            code == "device-class-missing" && message.contains("example.com/gpu"),
            "{message}"
        );
        // An operator's own class, which says so.
        let labelled = Class {
            name: "gpus".to_owned(),
            is_labelled: true,
            ..own()
        };
        assert_eq!(judged(&[labelled]), None);
    }

    #[test]
    fn foreign_or_incomplete_class_is_reported() {
        let another = Class {
            selectors: vec!["true".to_owned()],
            is_labelled: false,
            ..own()
        };
        let dropped = Class {
            extended_resource: None,
            ..own()
        };
        let same_name = Class {
            name: "gpus".to_owned(),
            is_labelled: false,
            ..own()
        };
        for (classes, texts) in [
            (
                vec![another.clone()],
                ["DeviceClass example.com-gpu", "another owner"],
            ),
            (
                vec![Class {
                    extended_resource: None,
                    ..another
                }],
                ["no extended resource", "another owner"],
            ),
            (vec![dropped], ["spec.extendedResourceName", "dropped"]),
            (vec![same_name.clone()], ["DeviceClass gpus", "newest"]),
            (vec![own(), same_name], ["DeviceClass gpus", "newest"]),
        ] {
            let (code, message) = judged(&classes).unwrap();
            assert_eq!(code, "device-class-conflict");
            assert!(texts.iter().all(|text| message.contains(text)), "{message}");
        }
    }
}
