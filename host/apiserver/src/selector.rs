//! Selection of the objects of a list, watch or deletecollection: by namespace, labels and fields.

use serde_json::Value;

use crate::resources::Resource;
use crate::route::Route;
use crate::status::{Refusal, bad_request};

mod labels;

use labels::Requirement;

/// Longest selector that is read: every term of it is looked at for every object.
const SELECTOR_BYTES_MAX: usize = 64 * 1024;

/// A namespace and what the labels and fields of an object must be.
#[derive(Clone, Debug)]
pub(crate) struct Selector {
    namespace: String,
    labels: Vec<Requirement>,
    fields: Vec<FieldTerm>,
}

#[derive(Clone, Debug)]
struct FieldTerm {
    path: Vec<&'static str>,
    /// True if the field must have the value; false if it must have another one.
    is_wanted: bool,
    value: String,
}

/// Fields beside `metadata.name` and `metadata.namespace`, as the API server has them; of an event by the names of the core group.
fn fields(resource: &Resource) -> &'static [&'static str] {
    match resource.plural {
        "pods" => &[
            "spec.nodeName",
            "spec.restartPolicy",
            "spec.schedulerName",
            "spec.serviceAccountName",
            "status.nominatedNodeName",
            "status.phase",
            "status.podIP",
        ],
        "resourceslices" => &["spec.nodeName", "spec.driver"],
        "nodes" => &["spec.unschedulable"],
        "namespaces" => &["status.phase"],
        "events" => &[
            "involvedObject.kind",
            "involvedObject.namespace",
            "involvedObject.name",
            "involvedObject.uid",
            "involvedObject.apiVersion",
            "involvedObject.resourceVersion",
            "involvedObject.fieldPath",
            "reason",
            "reportingComponent",
            "source",
            "type",
        ],
        _ => &[],
    }
}

impl Selector {
    pub(crate) fn of(route: &Route) -> Result<Self, Refusal> {
        let [labels, fields] = ["labelSelector", "fieldSelector"].map(|key| route.asked(key));
        for selector in [labels, fields] {
            if selector.len() > SELECTOR_BYTES_MAX {
                return Err(bad_request(format!(
                    "a selector has at most {SELECTOR_BYTES_MAX} bytes"
                )));
            }
        }
        let labels = labels::parse(labels).map_err(bad_request)?;
        let fields = terms(fields)
            .filter(|term| !term.is_empty())
            .map(|term| field(route.resource, fields, term))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            namespace: route.namespace.clone(),
            labels,
            fields,
        })
    }

    /// Returns true if everything in the namespace is selected.
    pub(crate) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    pub(crate) fn matches(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        (self.namespace.is_empty() || object["metadata"]["namespace"] == *self.namespace)
            && self
                .labels
                .iter()
                .all(|requirement| requirement.matches(labels))
            && self.fields.iter().all(|term| term.matches(object))
    }
}

impl FieldTerm {
    fn matches(&self, object: &Value) -> bool {
        let found = self.path.iter().fold(object, |at, key| &at[*key]);
        let text = match found {
            Value::Bool(value) => value.to_string(),
            // The one field that is yes or no is not there for no; the source of an event is its component.
            Value::Null if self.path == ["spec", "unschedulable"] => "false".to_owned(),
            Value::Object(source) => source
                .get("component")
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned(),
            other => other.as_str().unwrap_or_default().to_owned(),
        };
        (text == self.value) == self.is_wanted
    }
}

/// The terms between commas that no backslash is before.
fn terms(selector: &str) -> impl Iterator<Item = &str> {
    let mut is_escaped = false;
    selector.split(move |character| {
        let is_end = character == ',' && !is_escaped;
        is_escaped = character == '\\' && !is_escaped;
        is_end
    })
}

fn field(resource: &Resource, selector: &str, term: &str) -> Result<FieldTerm, Refusal> {
    let (key, value) = term.split_once('=').ok_or_else(|| {
        bad_request(format!(
            "invalid selector: '{selector}'; can't understand '{term}'"
        ))
    })?;
    let (key, is_wanted) = match key.strip_suffix('!') {
        Some(key) => (key, false),
        None => (key, true),
    };
    let value = value
        .strip_prefix('=')
        .filter(|_| is_wanted)
        .unwrap_or(value);
    let mut known = fields(resource)
        .iter()
        .chain(&["metadata.name", "metadata.namespace"]);
    let known = known.find(|known| **known == key);
    let known = known.ok_or_else(|| bad_request(format!("field label not supported: {key}")))?;
    Ok(FieldTerm {
        path: known.split('.').collect(),
        is_wanted,
        value: unescaped(value)?,
    })
}

fn unescaped(value: &str) -> Result<String, Refusal> {
    let mut text = String::new();
    let mut characters = value.chars();
    while let Some(character) = characters.next() {
        match character {
            '\\' => match characters.next() {
                Some(escaped @ ('\\' | ',' | '=')) => text.push(escaped),
                other => {
                    let sequence: String = std::iter::once('\\').chain(other).collect();
                    let message =
                        format!("invalid field selector: invalid escape sequence: {sequence}");
                    return Err(bad_request(message));
                }
            },
            ',' | '=' => {
                let message = format!(
                    "invalid field selector: unescaped character in value: {}",
                    u32::from(character)
                );
                return Err(bad_request(message));
            }
            other => text.push(other),
        }
    }
    Ok(text)
}
