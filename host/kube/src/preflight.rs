//! Checks, before a daemon runs on a node, that the API server offers what it needs.

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::{Node, NodeSystemInfo};
use kube::Api;
use kube::api::PostParams;

use crate::client::{ApiError, DraVersion, KubeClient};
use nodedock_model::ObjectName;

/// Verbs on a resource of a group, `resource/subresource`, that the daemon uses. The role of the deployment has the same.
pub const RIGHTS: [(&str, &str, &[&str]); 9] = [
    (
        "resource.k8s.io",
        "resourceclaims",
        &["get", "list", "watch"],
    ),
    ("resource.k8s.io", "resourceclaims/status", &["patch"]),
    (
        "resource.k8s.io",
        "resourceclaims/driver",
        &["associated-node:patch"],
    ),
    (
        "resource.k8s.io",
        "resourceslices",
        &["list", "watch", "create", "update", "delete"],
    ),
    ("resource.k8s.io", "devicetaintrules", &["list", "watch"]),
    ("resource.k8s.io", "deviceclasses", &["list", "watch"]),
    ("", "nodes", &["get"]),
    ("", "pods", &["get", "list", "watch"]),
    ("events.k8s.io", "events", &["create", "patch"]),
];

/// The resources of [`RIGHTS`] without which the daemon does its work, but for what the deployment documents.
const OPTIONAL: [&str; 3] = ["devicetaintrules", "deviceclasses", "pods"];

/// A right that the account does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingRight {
    /// `VERB RESOURCE.GROUP`
    pub name: String,
    pub is_optional: bool,
}

/// The API server as the node sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Server {
    /// Such as `v1.36.2`.
    pub version: String,
    /// The newest version of `resource.k8s.io` that it serves, or why there is none.
    pub dra: Result<DraVersion, ApiError>,
}

/// Asks the API server for its versions.
pub async fn server(client: &KubeClient) -> Result<Server, ApiError> {
    let version = client.client().apiserver_version().await?.git_version;
    Ok(Server {
        version,
        dra: client.dra_version().await,
    })
}

/// Returns what the kubelet says of itself in the Node object; `None` if there is no such object.
pub async fn node(
    client: &KubeClient,
    name: &ObjectName,
) -> Result<Option<NodeSystemInfo>, ApiError> {
    let node = Api::<Node>::all(client.client())
        .get_opt(name.as_str())
        .await?;
    Ok(node.map(|node| {
        node.status
            .and_then(|status| status.node_info)
            .unwrap_or_default()
    }))
}

/// Returns those of [`RIGHTS`] that the account does not have.
pub async fn missing_rights(client: &KubeClient) -> Result<Vec<MissingRight>, ApiError> {
    let mut missing = Vec::new();
    for (group, resource, verbs) in RIGHTS {
        for verb in verbs {
            if !has_right(client, group, resource, verb).await? {
                let dot = if group.is_empty() { "" } else { "." };
                let name = format!("{verb} {resource}{dot}{group}");
                missing.push(MissingRight {
                    name,
                    is_optional: OPTIONAL.contains(&resource),
                });
            }
        }
    }
    Ok(missing)
}

async fn has_right(
    client: &KubeClient,
    group: &str,
    resource: &str,
    verb: &str,
) -> Result<bool, ApiError> {
    let (resource, subresource) = match resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
        None => (resource, None),
    };
    let attributes = ResourceAttributes {
        group: Some(group.to_owned()),
        resource: Some(resource.to_owned()),
        subresource,
        verb: Some(verb.to_owned()),
        ..ResourceAttributes::default()
    };
    let spec = SelfSubjectAccessReviewSpec {
        resource_attributes: Some(attributes),
        ..SelfSubjectAccessReviewSpec::default()
    };
    let review = SelfSubjectAccessReview {
        spec,
        ..SelfSubjectAccessReview::default()
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.client());
    let reviewed = reviews.create(&PostParams::default(), &review).await?;
    Ok(reviewed.status.is_some_and(|status| status.allowed))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use serde_json::Value;

    use super::*;

    #[test]
    fn preflight_rights_match_the_deployed_role() {
        let file =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/kustomize/base/rbac.yaml");
        let text = std::fs::read_to_string(file).unwrap();
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
        let role = objects
            .into_iter()
            .find(|object| object["kind"] == "ClusterRole")
            .unwrap();
        let texts = |list: &Value| -> Vec<String> { serde_json::from_value(list.clone()).unwrap() };
        let mut of_role = BTreeSet::new();
        for rule in role["rules"].as_array().unwrap() {
            for group in texts(&rule["apiGroups"]) {
                for resource in texts(&rule["resources"]) {
                    let verbs = texts(&rule["verbs"]).into_iter();
                    of_role.extend(verbs.map(|verb| (group.clone(), resource.clone(), verb)));
                }
            }
        }
        let asked = RIGHTS.iter().flat_map(|(group, resource, verbs)| {
            verbs.iter().map(|verb| {
                (
                    (*group).to_owned(),
                    (*resource).to_owned(),
                    (*verb).to_owned(),
                )
            })
        });
        assert_eq!(asked.collect::<BTreeSet<_>>(), of_role);
    }
}
