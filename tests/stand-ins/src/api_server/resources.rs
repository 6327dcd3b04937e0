//! The resources that are served, and what discovery says of them.

use serde_json::{Value, json};

pub(super) const DRA: &str = "resource.k8s.io";
pub(super) const EVENTS: &str = "events.k8s.io";

/// One kind of object, in whichever groups and versions it is served.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Resource {
    /// The group it belongs to; events are served in a second one.
    pub(super) group: &'static str,
    pub(super) plural: &'static str,
    pub(super) singular: &'static str,
    pub(super) kind: &'static str,
    pub(super) namespaced: bool,
    /// Whether it has a `status` that only the subresource changes.
    pub(super) status: bool,
    /// Whether `metadata.generation` counts changes of the spec.
    pub(super) generation: bool,
}

const fn cluster(group: &'static str, plural: &'static str, kind: &'static str) -> Resource {
    Resource { group, plural, singular: plural, kind, namespaced: false, status: false, generation: false }
}

const fn namespaced(group: &'static str, plural: &'static str, kind: &'static str) -> Resource {
    Resource { namespaced: true, ..cluster(group, plural, kind) }
}

pub(super) static RESOURCES: [Resource; 8] = [
    Resource { singular: "namespace", status: true, ..cluster("", "namespaces", "Namespace") },
    Resource { singular: "node", status: true, ..cluster("", "nodes", "Node") },
    Resource { singular: "pod", status: true, generation: true, ..namespaced("", "pods", "Pod") },
    Resource { singular: "event", ..namespaced("", "events", "Event") },
    Resource { singular: "deviceclass", generation: true, ..cluster(DRA, "deviceclasses", "DeviceClass") },
    Resource {
        singular: "resourceclaim",
        status: true,
        ..namespaced(DRA, "resourceclaims", "ResourceClaim")
    },
    Resource {
        singular: "resourceclaimtemplate",
        ..namespaced(DRA, "resourceclaimtemplates", "ResourceClaimTemplate")
    },
    Resource {
        singular: "resourceslice",
        generation: true,
        ..cluster(DRA, "resourceslices", "ResourceSlice")
    },
];

/// By plural; by kind too, for the methods of tests.
pub(super) fn named(name: &str) -> &'static Resource {
    let found = RESOURCES.iter().find(|resource| resource.plural == name || resource.kind == name);
    found.unwrap_or_else(|| panic!("the stand-in has no resource {name:?}"))
}

impl Resource {
    fn served_in(&self, group: &str) -> bool {
        self.group == group || (self.plural == "events" && group == EVENTS)
    }

    /// As error messages name it.
    pub(super) fn qualified(&self, group: &str) -> String {
        if group.is_empty() { self.plural.to_owned() } else { format!("{}.{group}", self.plural) }
    }

    fn discovered(&self) -> Vec<Value> {
        let verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"];
        let mut found = vec![json!({
            "name": self.plural, "singularName": self.singular, "namespaced": self.namespaced,
            "kind": self.kind, "verbs": verbs, "storageVersionHash": storage_hash(self.plural),
        })];
        if self.status {
            found.push(json!({
                "name": format!("{}/status", self.plural), "singularName": "",
                "namespaced": self.namespaced, "kind": self.kind, "verbs": ["get", "patch", "update"],
            }));
        }
        found
    }
}

/// Opaque to clients: the same for the same storage.
fn storage_hash(plural: &str) -> String {
    use base64::Engine;
    let sum = plural
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |sum, byte| (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    base64::engine::general_purpose::STANDARD.encode(sum.to_be_bytes())
}

/// The resource `plural` of a group and version that is served.
pub(super) fn find(
    versions: &[String],
    group: &str,
    version: &str,
    plural: &str,
) -> Option<&'static Resource> {
    is_served(versions, group, version)
        .then(|| RESOURCES.iter().find(|resource| resource.plural == plural && resource.served_in(group)))
        .flatten()
}

fn is_served(versions: &[String], group: &str, version: &str) -> bool {
    match group {
        DRA => versions.iter().any(|served| served == version),
        "" | EVENTS => version == "v1",
        _ => false,
    }
}

/// `/api`, `/apis` and below, as far as no resource is named.
pub(super) fn discovery(versions: &[String], path: &[&str]) -> Option<Value> {
    match path {
        ["api"] => Some(json!({ "kind": "APIVersions", "versions": ["v1"] })),
        ["apis"] => {
            let groups: Vec<Value> =
                [EVENTS, DRA].into_iter().filter_map(|name| group(versions, name)).collect();
            Some(json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups }))
        }
        ["api", "v1"] => Some(list("", "v1")),
        ["apis", name] => {
            let mut found = group(versions, name)?;
            found["kind"] = "APIGroup".into();
            found["apiVersion"] = "v1".into();
            Some(found)
        }
        ["apis", group, version] if is_served(versions, group, version) => Some(list(group, version)),
        _ => None,
    }
}

fn group(versions: &[String], name: &str) -> Option<Value> {
    let served: Vec<&str> = match name {
        DRA => versions.iter().map(String::as_str).collect(),
        EVENTS => vec!["v1"],
        _ => vec![],
    };
    let named = |version: &&str| json!({ "groupVersion": format!("{name}/{version}"), "version": version });
    let preferred = named(served.first()?);
    let all: Vec<Value> = served.iter().map(named).collect();
    Some(json!({ "name": name, "versions": all, "preferredVersion": preferred }))
}

fn list(group: &str, version: &str) -> Value {
    let name = if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") };
    let resources = RESOURCES.iter().filter(|resource| resource.served_in(group));
    let resources: Vec<Value> = resources.flat_map(Resource::discovered).collect();
    json!({ "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": name, "resources": resources })
}
