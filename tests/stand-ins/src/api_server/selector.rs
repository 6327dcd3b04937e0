//! Label and field selectors.

use serde_json::Value;

use super::resources::Resource;
use super::route::Route;
use super::status::{Refusal, bad_request};

/// What a list, watch or deletecollection is about.
#[derive(Clone, Debug, Default)]
pub(super) struct Selector {
    namespace: String,
    fields: Vec<(Vec<&'static str>, bool, String)>,
    labels: Vec<Label>,
}

#[derive(Clone, Debug)]
enum Label {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Missing(String),
}

/// Fields beside `metadata.name` and `metadata.namespace`.
fn fields(resource: &Resource) -> &'static [&'static str] {
    match resource.plural {
        "pods" => &["spec.nodeName", "status.phase", "spec.serviceAccountName", "spec.schedulerName"],
        "resourceslices" => &["spec.nodeName", "spec.driver"],
        "nodes" => &["spec.unschedulable"],
        "namespaces" => &["status.phase"],
        "events" => &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "reason",
            "type",
        ],
        _ => &[],
    }
}

impl Selector {
    pub(super) fn of(route: &Route) -> Result<Self, Refusal> {
        let mut selector = Self { namespace: route.namespace.clone(), ..Self::default() };
        for term in route.asked("fieldSelector").split(',').filter(|term| !term.is_empty()) {
            selector.fields.push(field(route.resource, term)?);
        }
        for term in label_terms(route.asked("labelSelector")) {
            selector.labels.push(label(term.trim())?);
        }
        Ok(selector)
    }

    pub(super) fn matches(&self, object: &Value) -> bool {
        let metadata = &object["metadata"];
        let labels = &metadata["labels"];
        (self.namespace.is_empty() || metadata["namespace"] == *self.namespace)
            && self.fields.iter().all(|(path, wanted, value)| {
                let found = path.iter().fold(object, |at, key| &at[*key]);
                (found.as_str().unwrap_or_default() == value) == *wanted
            })
            && self.labels.iter().all(|label| match label {
                Label::In(key, values) => {
                    labels[key].as_str().is_some_and(|found| values.iter().any(|value| value == found))
                }
                Label::NotIn(key, values) => {
                    !labels[key].as_str().is_some_and(|found| values.iter().any(|value| value == found))
                }
                Label::Exists(key) => labels[key].is_string(),
                Label::Missing(key) => !labels[key].is_string(),
            })
    }
}

fn field(resource: &Resource, term: &str) -> Result<(Vec<&'static str>, bool, String), Refusal> {
    let (key, wanted, value) = if let Some((key, value)) = term.split_once("!=") {
        (key, false, value)
    } else if let Some((key, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        (key, true, value)
    } else {
        return Err(bad_request(format!("invalid selector: '{term}'; can't understand '{term}'")));
    };
    let everywhere: &[&str] =
        if resource.namespaced { &["metadata.name", "metadata.namespace"] } else { &["metadata.name"] };
    let known = everywhere.iter().chain(fields(resource)).find(|known| **known == key);
    let known = known.ok_or_else(|| bad_request(format!("field label not supported: {key}")))?;
    Ok((known.split('.').collect(), wanted, value.to_owned()))
}

/// Terms between commas that are in no parentheses.
fn label_terms(text: &str) -> Vec<&str> {
    let mut depth = 0;
    let split = text.split(move |char| {
        match char {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        char == ',' && depth == 0
    });
    split.filter(|term| !term.trim().is_empty()).collect()
}

fn label(term: &str) -> Result<Label, Refusal> {
    let bad = || bad_request(format!("unable to parse requirement: {term}"));
    let values = |list: &str| -> Option<Vec<String>> {
        let list = list.trim().strip_prefix('(')?.strip_suffix(')')?;
        Some(list.split(',').map(|value| value.trim().to_owned()).collect())
    };
    if let Some((key, value)) = term.split_once("!=") {
        return Ok(Label::NotIn(key.trim().to_owned(), vec![value.trim().to_owned()]));
    }
    if let Some((key, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        return Ok(Label::In(key.trim().to_owned(), vec![value.trim().to_owned()]));
    }
    if let Some((key, list)) = term.split_once(" notin ") {
        return Ok(Label::NotIn(key.trim().to_owned(), values(list).ok_or_else(bad)?));
    }
    if let Some((key, list)) = term.split_once(" in ") {
        return Ok(Label::In(key.trim().to_owned(), values(list).ok_or_else(bad)?));
    }
    if term.contains(char::is_whitespace) {
        return Err(bad());
    }
    Ok(match term.strip_prefix('!') {
        Some(key) => Label::Missing(key.to_owned()),
        None => Label::Exists(term.to_owned()),
    })
}
