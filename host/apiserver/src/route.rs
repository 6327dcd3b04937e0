//! Target of a request, from its method and address.

use std::collections::BTreeMap;

use http::{Method, Uri};

use crate::resources::{RESOURCES, Resource, TAINT_RULES, VERSION, api_version};

/// A request for a resource.
#[derive(Clone, Debug)]
pub struct Route {
    /// Verb, as RBAC names it: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`, `deletecollection`; empty for a method that
    /// the resource does not have.
    pub verb: &'static str,
    pub group: String,
    pub resource: &'static Resource,
    /// Empty for an object of the cluster and for all namespaces.
    pub namespace: String,
    /// Empty for a collection.
    pub name: String,
    /// `status` or empty.
    pub subresource: String,
    pub query: Query,
}

/// The parameters of a request; of one that is given twice the last.
pub type Query = BTreeMap<String, String>;

impl Route {
    /// Returns the `apiVersion` of the objects in the response.
    pub(crate) fn api_version(&self) -> String {
        api_version(&self.group)
    }

    /// A parameter of the query; empty if it is not there.
    pub(crate) fn asked(&self, key: &str) -> &str {
        self.query.get(key).map_or("", String::as_str)
    }

    pub(crate) fn flag(&self, key: &str) -> bool {
        is_true(&self.query, key)
    }
}

fn is_true(query: &Query, key: &str) -> bool {
    matches!(query.get(key).map(String::as_str), Some("true" | "1"))
}

/// The parts of a path. Names of objects need no percent-encoding.
pub(crate) fn parts(uri: &Uri) -> Vec<&str> {
    uri.path()
        .split('/')
        .filter(|part| !part.is_empty())
        .collect()
}

pub(crate) fn query(uri: &Uri) -> Query {
    form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes())
        .into_owned()
        .collect()
}

fn find(taint_rules: bool, group: &str, plural: &str) -> Option<&'static Resource> {
    let mut served = RESOURCES
        .iter()
        .filter(|resource| taint_rules || resource.plural != TAINT_RULES);
    served.find(|resource| resource.plural == plural && resource.served_in(group))
}

/// `None` for what is no resource here, by any method.
pub(crate) fn route(
    taint_rules: bool,
    method: &Method,
    path: &[&str],
    query: Query,
) -> Option<Route> {
    let (group, rest) = match path {
        ["api", VERSION, rest @ ..] => ("", rest),
        ["apis", group, VERSION, rest @ ..] if !group.is_empty() => (*group, rest),
        _ => return None,
    };
    let find = |plural: &str| find(taint_rules, group, plural);
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..]
            if rest.first().is_some_and(|plural| find(plural).is_some()) =>
        {
            (*namespace, rest)
        }
        _ => ("", rest),
    };
    let (plural, name, subresource) = match rest {
        [plural] => (*plural, "", ""),
        [plural, name] => (*plural, *name, ""),
        [plural, name, "status"] => (*plural, *name, "status"),
        _ => return None,
    };
    let resource = find(plural)?;
    let is_scoped = resource.namespaced != namespace.is_empty();
    // All namespaces at once can be read, and nothing else.
    let is_everywhere = resource.namespaced && name.is_empty();
    if !(is_scoped || is_everywhere) || (subresource == "status" && !resource.status) {
        return None;
    }
    let verb = match (method, name.is_empty()) {
        (&Method::GET, true) if is_true(&query, "watch") => "watch",
        (&Method::GET, true) => "list",
        (&Method::GET, false) => "get",
        // In no namespace, an object with one cannot be created.
        (&Method::POST, true) if is_scoped => "create",
        (&Method::PUT, false) => "update",
        (&Method::PATCH, false) => "patch",
        (&Method::DELETE, false) if subresource.is_empty() => "delete",
        (&Method::DELETE, true) if is_scoped => "deletecollection",
        _ => "",
    };
    let [group, namespace, name, subresource] =
        [group, namespace, name, subresource].map(str::to_owned);
    Some(Route {
        verb,
        group,
        resource,
        namespace,
        name,
        subresource,
        query,
    })
}
