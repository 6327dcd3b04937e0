//! What a request asks for, from its method and address.

use std::collections::BTreeMap;

use http::{Method, Uri};

use super::resources::{self, Resource, Served};

/// A request for a resource.
#[derive(Clone, Debug)]
pub(super) struct Route {
    pub(super) verb: &'static str,
    pub(super) group: String,
    pub(super) version: String,
    pub(super) resource: &'static Resource,
    /// Empty for an object of the cluster and for all namespaces.
    pub(super) namespace: String,
    /// Empty for a collection.
    pub(super) name: String,
    /// `status` or empty.
    pub(super) subresource: String,
    pub(super) query: Query,
}

pub(super) type Query = BTreeMap<String, String>;

impl Route {
    /// As `apiVersion` of what it answers.
    pub(super) fn api_version(&self) -> String {
        resources::api_version(&self.group, &self.version)
    }

    /// A parameter of the query; empty if it is not there.
    pub(super) fn asked(&self, key: &str) -> &str {
        self.query.get(key).map_or("", String::as_str)
    }

    pub(super) fn flag(&self, key: &str) -> bool {
        is_true(&self.query, key)
    }
}

fn is_true(query: &Query, key: &str) -> bool {
    matches!(query.get(key).map(String::as_str), Some("true" | "1"))
}

/// The parts of a path. Names of objects need no percent-encoding.
pub(super) fn parts(uri: &Uri) -> Vec<&str> {
    uri.path().split('/').filter(|part| !part.is_empty()).collect()
}

pub(super) fn query(uri: &Uri) -> Query {
    form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes()).into_owned().collect()
}

/// `None` for what is no resource here, by any method.
pub(super) fn route(served: &Served, method: &Method, path: &[&str], query: Query) -> Option<Route> {
    let (group, version, rest) = match path {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return None,
    };
    let find = |plural: &str| resources::find(served, group, version, plural);
    let (namespace, rest) = match rest {
        ["namespaces", namespace, rest @ ..] if rest.first().is_some_and(|plural| find(plural).is_some()) => {
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
        (&Method::POST, true) => "create",
        (&Method::PUT, false) => "update",
        (&Method::PATCH, false) => "patch",
        (&Method::DELETE, false) => "delete",
        (&Method::DELETE, true) => "deletecollection",
        _ => "",
    };
    let [group, version, namespace, name, subresource] =
        [group, version, namespace, name, subresource].map(str::to_owned);
    Some(Route { verb, group, version, resource, namespace, name, subresource, query })
}
