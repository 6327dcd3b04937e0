//! Discovery of groups, versions and resources: of each group and aggregated, and the version of the server.

use serde_json::{Value, json};

use crate::options::Options;
use crate::resources::{
    DRA_GROUP, EVENTS_GROUP, RESOURCES, Resource, TAINT_RULES, VERSION, api_version,
};
use crate::reviews::REVIEWS;

/// The content type of aggregated discovery, by which clients know it.
pub(crate) const AGGREGATED: &str =
    "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
/// The version of Kubernetes that the server behaves as.
const MINOR: &str = "36";
const VERBS: [&str; 8] = [
    "create",
    "delete",
    "deletecollection",
    "get",
    "list",
    "patch",
    "update",
    "watch",
];
const STATUS_VERBS: [&str; 3] = ["get", "patch", "update"];

fn named_groups() -> Vec<&'static str> {
    let mut groups = vec![DRA_GROUP, EVENTS_GROUP];
    for review in &REVIEWS {
        if !groups.contains(&review.group) {
            groups.push(review.group);
        }
    }
    groups
}

fn served(options: &Options, group: &str) -> impl Iterator<Item = &'static Resource> {
    let taint_rules = options.taint_rules;
    let group = group.to_owned();
    RESOURCES.iter().filter(move |resource| {
        resource.served_in(&group) && (taint_rules || resource.plural != TAINT_RULES)
    })
}

/// The `APIGroup` of a group that is served in `versions`, preferred first; `None` without versions.
pub fn discovered_group(group: &str, versions: &[&str]) -> Option<Value> {
    Some(json!({
        "kind": "APIGroup", "apiVersion": "v1", "name": group,
        "versions": versions.iter().map(|version| group_version(group, version)).collect::<Vec<_>>(),
        "preferredVersion": group_version(group, versions.first()?),
    }))
}

fn group_version(group: &str, version: &str) -> Value {
    json!({ "groupVersion": format!("{group}/{version}"), "version": version })
}

/// The `APIResourceList` of a group and version that has these resources.
pub fn discovered_resources<'a>(
    group_version: &str,
    resources: impl IntoIterator<Item = &'a Resource>,
) -> Value {
    json!({
        "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version,
        "resources": resources.into_iter().flat_map(discovered).collect::<Vec<_>>(),
    })
}

fn discovered(resource: &Resource) -> Vec<Value> {
    let mut whole = json!({
        "name": resource.plural, "singularName": resource.kind.to_lowercase(), "namespaced": resource.namespaced,
        "kind": resource.kind, "verbs": VERBS, "storageVersionHash": "AAAAAAAAAAA=",
    });
    if !resource.short_names.is_empty() {
        whole["shortNames"] = json!(resource.short_names);
    }
    if resource.plural == "pods" {
        whole["categories"] = json!(["all"]);
    }
    let status = resource.status.then(|| {
        json!({
            "name": format!("{}/status", resource.plural), "singularName": "",
            "namespaced": resource.namespaced, "kind": resource.kind, "verbs": STATUS_VERBS,
        })
    });
    std::iter::once(whole).chain(status).collect()
}

fn resources_of(options: &Options, group: &str) -> Value {
    let mut list = discovered_resources(&api_version(group), served(options, group));
    if let Some(resources) = list["resources"].as_array_mut() {
        resources.extend(REVIEWS.iter().filter(|review| review.group == group).map(|review| {
            json!({
                "name": review.plural, "singularName": review.kind.to_lowercase(), "namespaced": false,
                "kind": review.kind, "verbs": ["create"],
            })
        }));
    }
    list
}

/// The answer to `GET` of a path that is no resource and no document of OpenAPI.
pub(crate) fn document(options: &Options, path: &[&str]) -> Option<Value> {
    match path {
        ["version"] => Some(version()),
        ["api"] => Some(json!({
            "kind": "APIVersions", "versions": [VERSION],
            "serverAddressByClientCIDRs": [],
        })),
        ["apis"] => {
            let groups: Vec<Value> = named_groups()
                .into_iter()
                .filter_map(group_document)
                .collect();
            Some(json!({ "kind": "APIGroupList", "apiVersion": "v1", "groups": groups }))
        }
        ["api", VERSION] => Some(resources_of(options, "")),
        ["apis", group] if named_groups().contains(group) => group_document(group),
        ["apis", group, VERSION] if named_groups().contains(group) => {
            Some(resources_of(options, group))
        }
        _ => None,
    }
}

fn group_document(group: &str) -> Option<Value> {
    discovered_group(group, &[VERSION])
}

fn version() -> Value {
    json!({
        "major": "1", "minor": MINOR, "gitVersion": format!("v1.{MINOR}.2"), "gitCommit": "", "gitTreeState": "clean",
        "buildDate": "2026-06-16T00:00:00Z", "goVersion": "go1.26", "compiler": "gc", "platform": "linux/amd64",
    })
}

/// Everything of `/api` or `/apis` in one document.
pub(crate) fn aggregated(options: &Options, root: &str) -> Value {
    let groups = if root == "api" {
        vec![""]
    } else {
        named_groups()
    };
    let items: Vec<Value> = groups
        .into_iter()
        .map(|group| aggregated_group(options, group))
        .collect();
    json!({ "kind": "APIGroupDiscoveryList", "apiVersion": "apidiscovery.k8s.io/v2", "metadata": {}, "items": items })
}

fn aggregated_group(options: &Options, group: &str) -> Value {
    let metadata = if group.is_empty() {
        json!({})
    } else {
        json!({ "name": group })
    };
    let mut resources: Vec<Value> = served(options, group)
        .map(|resource| aggregated_resource(group, resource))
        .collect();
    resources.extend(
        REVIEWS
            .iter()
            .filter(|review| review.group == group)
            .map(|review| {
                json!({
                    "resource": review.plural, "scope": "Cluster",
                    "responseKind": { "group": group, "version": VERSION, "kind": review.kind },
                    "singularResource": review.kind.to_lowercase(), "verbs": ["create"],
                })
            }),
    );
    json!({ "metadata": metadata, "versions": [{ "version": VERSION, "resources": resources, "freshness": "Current" }] })
}

fn aggregated_resource(group: &str, resource: &Resource) -> Value {
    let kind = json!({ "group": group, "version": VERSION, "kind": resource.kind });
    let mut item = json!({
        "resource": resource.plural, "responseKind": kind,
        "scope": if resource.namespaced { "Namespaced" } else { "Cluster" },
        "singularResource": resource.kind.to_lowercase(), "verbs": VERBS,
    });
    if !resource.short_names.is_empty() {
        item["shortNames"] = json!(resource.short_names);
    }
    if resource.plural == "pods" {
        item["categories"] = json!(["all"]);
    }
    if resource.status {
        let status =
            json!({ "subresource": "status", "responseKind": kind, "verbs": STATUS_VERBS });
        item["subresources"] = json!([status]);
    }
    item
}
