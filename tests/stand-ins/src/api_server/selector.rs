//! Field selectors. A label selector is refused: a node's driver has none.

use serde_json::Value;

use super::resources::Resource;
use super::route::Route;
use super::status::{Refusal, bad_request};

/// What a list, watch or deletecollection is about.
#[derive(Clone, Debug)]
pub(super) struct Selector {
    namespace: String,
    /// Paths, and whether they are to have the value or any other.
    fields: Vec<(Vec<&'static str>, bool, String)>,
}

/// Fields beside `metadata.name` and `metadata.namespace`.
fn fields(resource: &Resource) -> &'static [&'static str] {
    match resource.plural {
        "pods" => &["spec.nodeName", "status.nominatedNodeName", "status.phase"],
        "resourceslices" => &["spec.nodeName", "spec.driver"],
        _ => &[],
    }
}

impl Selector {
    pub(super) fn of(route: &Route) -> Result<Self, Refusal> {
        if !route.asked("labelSelector").is_empty() {
            return Err(bad_request("the stand-in has no label selectors"));
        }
        let terms = route.asked("fieldSelector").split(',').filter(|term| !term.is_empty());
        let fields = terms.map(|term| field(route.resource, term)).collect::<Result<_, _>>()?;
        Ok(Self { namespace: route.namespace.clone(), fields })
    }

    pub(super) fn matches(&self, object: &Value) -> bool {
        (self.namespace.is_empty() || object["metadata"]["namespace"] == *self.namespace)
            && self.fields.iter().all(|(path, is_wanted, value)| {
                let found = path.iter().fold(object, |at, key| &at[*key]);
                (found.as_str().unwrap_or_default() == value) == *is_wanted
            })
    }
}

fn field(resource: &Resource, term: &str) -> Result<(Vec<&'static str>, bool, String), Refusal> {
    let (key, value) = term
        .split_once('=')
        .ok_or_else(|| bad_request(format!("invalid selector: '{term}'; can't understand '{term}'")))?;
    let (key, is_wanted) = match key.strip_suffix('!') {
        Some(key) => (key, false),
        None => (key, true),
    };
    let mut known = fields(resource).iter().chain(&["metadata.name", "metadata.namespace"]);
    let known = known.find(|known| **known == key);
    let known = known.ok_or_else(|| bad_request(format!("field label not supported: {key}")))?;
    Ok((known.split('.').collect(), is_wanted, value.trim_start_matches('=').to_owned()))
}
