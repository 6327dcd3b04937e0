//! The node that devices are allocated for, and whether a node selector selects it.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};

/// The only field of a node that a selector may name.
pub(super) const NAME_FIELD: &str = "metadata.name";

/// A node, as node selectors see it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeRef {
    pub name: String,
    pub labels: BTreeMap<String, String>,
}

/// Node selection of a slice or a device.
pub(super) struct NodeSelection<'a> {
    pub(super) node_name: Option<&'a str>,
    pub(super) all_nodes: bool,
    pub(super) selector: Option<&'a NodeSelector>,
}

impl NodeSelection<'_> {
    /// Fails with a sentence about the first part of a selector that has no meaning.
    pub(super) fn includes(&self, node: &NodeRef) -> Result<bool, String> {
        match (
            self.node_name.filter(|name| !name.is_empty()),
            self.selector,
        ) {
            (Some(name), _) => Ok(name == node.name),
            (None, _) if self.all_nodes => Ok(true),
            (None, Some(selector)) => selects(selector, node),
            (None, None) => Ok(false),
        }
    }
}

/// One term must match, and in it every requirement. A term without requirements matches no node.
fn selects(selector: &NodeSelector, node: &NodeRef) -> Result<bool, String> {
    let mut selected = false;
    for term in &selector.node_selector_terms {
        selected |= term_matches(term, node)?;
    }
    Ok(selected)
}

fn term_matches(term: &NodeSelectorTerm, node: &NodeRef) -> Result<bool, String> {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    let mut matches = !(expressions.is_empty() && fields.is_empty());
    for requirement in expressions {
        let value = node.labels.get(&requirement.key).map(String::as_str);
        matches &= label_matches(requirement, value)?;
    }
    for requirement in fields {
        matches &= field_matches(requirement, node)?;
    }
    Ok(matches)
}

fn label_matches(
    requirement: &NodeSelectorRequirement,
    value: Option<&str>,
) -> Result<bool, String> {
    let values = requirement.values.as_deref().unwrap_or_default();
    let is_listed = value.is_some_and(|value| values.iter().any(|known| known == value));
    match requirement.operator.as_str() {
        "In" => Ok(is_listed),
        "NotIn" => Ok(!is_listed),
        "Exists" => Ok(value.is_some()),
        "DoesNotExist" => Ok(value.is_none()),
        "Gt" => {
            Ok(compared(requirement, values, value)?.is_some_and(|(value, limit)| value > limit))
        }
        "Lt" => {
            Ok(compared(requirement, values, value)?.is_some_and(|(value, limit)| value < limit))
        }
        other => Err(format!(
            "node selector has operator {other:?} for label {:?}",
            requirement.key
        )),
    }
}

/// Returns the label's number and the requirement's; none if the label is absent or no number.
fn compared(
    requirement: &NodeSelectorRequirement,
    values: &[String],
    value: Option<&str>,
) -> Result<Option<(i64, i64)>, String> {
    let [limit] = values else {
        return Err(format!(
            "node selector compares label {:?} with {} values",
            requirement.key,
            values.len()
        ));
    };
    let limit: i64 = limit.parse().map_err(|_| {
        format!(
            "node selector compares label {:?} with {limit:?}",
            requirement.key
        )
    })?;
    Ok(value
        .and_then(|value| value.parse().ok())
        .map(|value| (value, limit)))
}

fn field_matches(requirement: &NodeSelectorRequirement, node: &NodeRef) -> Result<bool, String> {
    let [value] = requirement.values.as_deref().unwrap_or_default() else {
        return Err(format!(
            "node selector has not one value for field {:?}",
            requirement.key
        ));
    };
    let own = if requirement.key == NAME_FIELD {
        node.name.as_str()
    } else {
        ""
    };
    match requirement.operator.as_str() {
        "In" => Ok(own == value),
        "NotIn" => Ok(own != value),
        other => Err(format!(
            "node selector has operator {other:?} for field {:?}",
            requirement.key
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node() -> NodeRef {
        let labels = [("zone", "a"), ("cores", "8")];
        let labels = labels
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into();
        NodeRef {
            name: "node-1".into(),
            labels,
        }
    }

    fn requirement(key: &str, operator: &str, values: &[&str]) -> NodeSelectorRequirement {
        let values = Some(values.iter().map(|value| (*value).to_owned()).collect());
        NodeSelectorRequirement {
            key: key.into(),
            operator: operator.into(),
            values,
        }
    }

    fn selected(fields: bool, requirements: &[NodeSelectorRequirement]) -> Result<bool, String> {
        let requirements = Some(requirements.to_vec());
        let term = match fields {
            true => NodeSelectorTerm {
                match_fields: requirements,
                ..Default::default()
            },
            false => NodeSelectorTerm {
                match_expressions: requirements,
                ..Default::default()
            },
        };
        selects(
            &NodeSelector {
                node_selector_terms: vec![NodeSelectorTerm::default(), term],
            },
            &node(),
        )
    }

    #[test]
    fn selector_matches_labels_and_node_name() {
        for (key, operator, values, expected) in [
            ("zone", "In", &["a", "b"][..], true),
            ("zone", "In", &["b"], false),
            ("rack", "In", &["a"], false),
            ("zone", "NotIn", &["a"], false),
            ("rack", "NotIn", &["a"], true),
            ("zone", "Exists", &[], true),
            ("zone", "DoesNotExist", &[], false),
            ("cores", "Gt", &["7"], true),
            ("cores", "Gt", &["8"], false),
            ("cores", "Lt", &["9"], true),
            ("zone", "Lt", &["9"], false),
        ] {
            let selected = selected(false, &[requirement(key, operator, values)]);
            assert_eq!(selected, Ok(expected), "{key} {operator} {values:?}");
        }
        assert_eq!(
            selected(true, &[requirement(NAME_FIELD, "In", &["node-1"])]),
            Ok(true)
        );
        assert_eq!(
            selected(true, &[requirement(NAME_FIELD, "NotIn", &["node-1"])]),
            Ok(false)
        );
        assert_eq!(selected(false, &[]), Ok(false));
        let both = [
            requirement("zone", "In", &["a"]),
            requirement("rack", "Exists", &[]),
        ];
        assert_eq!(selected(false, &both), Ok(false));
    }

    #[test]
    fn malformed_selector_error_names_its_key() {
        for (fields, requirement) in [
            (false, requirement("zone", "Like", &["a"])),
            (false, requirement("zone", "Gt", &["a"])),
            (false, requirement("zone", "Gt", &[])),
            (true, requirement("zone", "Exists", &["a"])),
            (true, requirement("zone", "In", &[])),
        ] {
            let error = selected(fields, &[requirement]).expect_err("no meaning");
            assert!(error.contains("\"zone\""), "{error}");
        }
    }

    #[test]
    fn node_name_overrides_all_nodes() {
        let selection = |node_name, all_nodes| NodeSelection {
            node_name,
            all_nodes,
            selector: None,
        };
        assert_eq!(selection(Some("node-2"), true).includes(&node()), Ok(false));
        assert_eq!(selection(Some(""), true).includes(&node()), Ok(true));
        assert_eq!(selection(None, false).includes(&node()), Ok(false));
    }
}
