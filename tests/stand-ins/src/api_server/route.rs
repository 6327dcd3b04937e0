//! What a request asks for, from its method and address.

use std::collections::BTreeMap;

use http::{Method, Uri};

use super::resources::{self, Resource};

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
        match self.group.as_str() {
            "" => self.version.clone(),
            group => format!("{group}/{}", self.version),
        }
    }

    pub(super) fn asked(&self, key: &str) -> &str {
        self.query.get(key).map_or("", String::as_str)
    }

    pub(super) fn flag(&self, key: &str) -> bool {
        matches!(self.asked(key), "true" | "1")
    }
}

/// The parts of a path that are not empty, decoded.
pub(super) fn parts(uri: &Uri) -> Vec<String> {
    uri.path().split('/').filter(|part| !part.is_empty()).map(|part| decoded(part, false)).collect()
}

pub(super) fn query(uri: &Uri) -> Query {
    let pairs = uri.query().unwrap_or_default().split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decoded(key, true), decoded(value, true))
        })
        .collect()
}

fn decoded(text: &str, plus: bool) -> String {
    let mut bytes = text.as_bytes().iter();
    let mut out = Vec::with_capacity(text.len());
    while let Some(&byte) = bytes.next() {
        let rest = bytes.as_slice();
        let hex = rest.get(..2).and_then(|hex| u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok());
        match (byte, hex) {
            (b'%', Some(value)) => {
                out.push(value);
                bytes.nth(1);
            }
            (b'+', _) if plus => out.push(b' '),
            _ => out.push(byte),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// `None` for what is no resource here, by any method.
pub(super) fn route(versions: &[String], method: &Method, path: &[String], query: Query) -> Option<Route> {
    let path: Vec<&str> = path.iter().map(String::as_str).collect();
    let (group, version, rest) = match path.as_slice() {
        ["api", version, rest @ ..] => ("", *version, rest),
        ["apis", group, version, rest @ ..] => (*group, *version, rest),
        _ => return None,
    };
    let find = |plural: &str| resources::find(versions, group, version, plural);
    let (namespace, rest) = match rest {
        ["namespaces", namespace, plural, ..] if find(plural).is_some() => (*namespace, &rest[2..]),
        _ => ("", rest),
    };
    let (plural, name, subresource) = match rest {
        [plural] => (*plural, "", ""),
        [plural, name] => (*plural, *name, ""),
        [plural, name, "status"] => (*plural, *name, "status"),
        _ => return None,
    };
    let resource = find(plural)?;
    let scoped = resource.namespaced != namespace.is_empty();
    // All namespaces at once can be read, and nothing else.
    let everywhere = resource.namespaced && name.is_empty();
    if !(scoped || everywhere) || (subresource == "status" && !resource.status) {
        return None;
    }
    let watch = matches!(query.get("watch").map(String::as_str), Some("true" | "1"));
    let verb = match (method, name.is_empty()) {
        (&Method::GET, true) if watch => "watch",
        (&Method::GET, true) => "list",
        (&Method::GET, false) => "get",
        (&Method::POST, true) => "create",
        (&Method::PUT, false) => "update",
        (&Method::PATCH, false) => "patch",
        (&Method::DELETE, false) => "delete",
        (&Method::DELETE, true) => "deletecollection",
        _ => "",
    };
    Some(Route {
        verb,
        group: group.to_owned(),
        version: version.to_owned(),
        resource,
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        subresource: subresource.to_owned(),
        query,
    })
}
