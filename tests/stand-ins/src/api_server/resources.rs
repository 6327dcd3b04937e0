//! The resources that are served, and what discovery says of them.

use serde_json::{Value, json};

pub(super) const DRA: &str = "resource.k8s.io";
pub(super) const EVENTS: &str = "events.k8s.io";
/// Not in every version of the group.
const TAINT_RULES: &str = "devicetaintrules";
const TAINT_RULE_VERSIONS: [&str; 3] = ["v1", "v1beta2", "v1alpha3"];

/// What is served of the group of claims and slices.
#[derive(Debug, Default)]
pub(super) struct Served {
    /// Preferred first.
    pub(super) versions: Vec<String>,
    pub(super) taint_rules: bool,
}

impl Served {
    fn has(&self, resource: &Resource, version: &str) -> bool {
        self.versions.iter().any(|served| served == version)
            && (resource.plural != TAINT_RULES
                || (self.taint_rules && TAINT_RULE_VERSIONS.contains(&version)))
    }
}

/// One kind of object, in whichever groups and versions it is served.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Resource {
    /// The group it belongs to; events are served in a second one.
    pub(super) group: &'static str,
    pub(super) plural: &'static str,
    pub(super) kind: &'static str,
    pub(super) namespaced: bool,
    /// Whether it has a `status` that only the subresource changes.
    pub(super) status: bool,
    /// Whether `metadata.generation` counts changes of the spec.
    pub(super) generation: bool,
}

const fn cluster(group: &'static str, plural: &'static str, kind: &'static str) -> Resource {
    Resource { group, plural, kind, namespaced: false, status: false, generation: false }
}

const fn namespaced(group: &'static str, plural: &'static str, kind: &'static str) -> Resource {
    Resource { namespaced: true, ..cluster(group, plural, kind) }
}

static RESOURCES: [Resource; 9] = [
    Resource { status: true, ..cluster("", "namespaces", "Namespace") },
    Resource { status: true, ..cluster("", "nodes", "Node") },
    Resource { status: true, generation: true, ..namespaced("", "pods", "Pod") },
    namespaced("", "events", "Event"),
    Resource { generation: true, ..cluster(DRA, "deviceclasses", "DeviceClass") },
    Resource { status: true, ..namespaced(DRA, "resourceclaims", "ResourceClaim") },
    Resource { status: true, generation: true, ..cluster(DRA, TAINT_RULES, "DeviceTaintRule") },
    namespaced(DRA, "resourceclaimtemplates", "ResourceClaimTemplate"),
    Resource { generation: true, ..cluster(DRA, "resourceslices", "ResourceSlice") },
];

/// By plural; by kind too, for the methods of tests.
pub(super) fn named(name: &str) -> &'static Resource {
    let found = RESOURCES.iter().find(|resource| resource.plural == name || resource.kind == name);
    found.unwrap_or_else(|| panic!("the stand-in has no resource {name:?}"))
}

pub(super) fn api_version(group: &str, version: &str) -> String {
    if group.is_empty() { version.to_owned() } else { format!("{group}/{version}") }
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
            "name": self.plural, "singularName": self.kind.to_lowercase(), "namespaced": self.namespaced,
            "kind": self.kind, "verbs": verbs, "storageVersionHash": "AAAAAAAAAAA=",
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

/// The resource `plural` of a group and version that is served.
pub(super) fn find(served: &Served, group: &str, version: &str, plural: &str) -> Option<&'static Resource> {
    let is_served = |resource: &Resource| match group {
        DRA => served.has(resource, version),
        _ => version == "v1",
    };
    RESOURCES
        .iter()
        .find(|resource| resource.plural == plural && resource.served_in(group) && is_served(resource))
}

/// What is said of the group of claims and slices, and of a version of it.
pub(super) fn discovery(served: &Served, path: &[&str]) -> Option<Value> {
    let named = |version: &String| json!({ "groupVersion": format!("{DRA}/{version}"), "version": version });
    let versions = &served.versions;
    match path {
        ["apis", DRA] => Some(json!({
            "kind": "APIGroup", "apiVersion": "v1", "name": DRA,
            "versions": versions.iter().map(named).collect::<Vec<_>>(),
            "preferredVersion": named(versions.first()?),
        })),
        ["apis", DRA, version] if versions.iter().any(|served| served == version) => {
            let is_here = |resource: &&Resource| resource.served_in(DRA) && served.has(resource, version);
            let resources = RESOURCES.iter().filter(is_here);
            Some(json!({
                "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": format!("{DRA}/{version}"),
                "resources": resources.flat_map(Resource::discovered).collect::<Vec<_>>(),
            }))
        }
        _ => None,
    }
}
