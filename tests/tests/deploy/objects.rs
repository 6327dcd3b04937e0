//! Objects as the API server reads them: by the types of the Kubernetes API, where a field that it does not know is an error.

use std::path::{Path, PathBuf};

use k8s_openapi::api::admissionregistration::v1::{
    ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
};
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The directory `deploy/` of the repository.
pub(crate) fn deploy() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy")
}

/// The objects of a text with one or several YAML documents.
pub(crate) fn parse(text: &str) -> Vec<Value> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(text).expect("the objects are YAML");
    documents
        .into_iter()
        .filter(|document| !document.is_null())
        .collect()
}

/// All objects of the kustomize base, in the order of its list.
pub(crate) fn base() -> Vec<Value> {
    let dir = deploy().join("kustomize/base");
    let read = |name: &str| {
        std::fs::read_to_string(dir.join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
    };
    let list = parse(&read("kustomization.yaml"));
    let files = list[0]["resources"]
        .as_array()
        .expect("the base lists its files");
    files
        .iter()
        .flat_map(|file| parse(&read(file.as_str().expect("a file's name"))))
        .collect()
}

pub(crate) fn of_kind<'a>(objects: &'a [Value], kind: &str) -> Vec<&'a Value> {
    objects
        .iter()
        .filter(|object| object["kind"] == kind)
        .collect()
}

/// The only object of a kind.
pub(crate) fn one<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    let found = of_kind(objects, kind);
    assert_eq!(found.len(), 1, "one {kind}");
    found[0]
}

/// Returns the fields of an object that a type keeps; unknown fields are lost.
fn kept<T: DeserializeOwned + Serialize>(object: &Value) -> Result<Value, String> {
    let typed: T = serde_json::from_value(object.clone()).map_err(|error| error.to_string())?;
    serde_json::to_value(typed).map_err(|error| error.to_string())
}

/// Paths of what is in the first and not in the second.
fn lost(before: &Value, after: &Value, path: &str, found: &mut Vec<String>) {
    match (before, after) {
        (Value::Object(before), Value::Object(after)) => {
            for (key, value) in before {
                match after.get(key) {
                    Some(other) => lost(value, other, &format!("{path}.{key}"), found),
                    // An empty list or object means what a missing one means.
                    None if is_empty(value) => {}
                    None => found.push(format!("{path}.{key}")),
                }
            }
        }
        (Value::Array(before), Value::Array(after)) if before.len() == after.len() => {
            for (n, (value, other)) in before.iter().zip(after).enumerate() {
                lost(value, other, &format!("{path}[{n}]"), found);
            }
        }
        (before, after) if before == after => {}
        _ => found.push(path.to_owned()),
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

/// Returns the defects of an object: it does not parse, or has fields that the API does not know.
pub(crate) fn defects(object: &Value) -> Vec<String> {
    let kind = format!(
        "{}/{}",
        object["apiVersion"].as_str().unwrap_or(""),
        object["kind"].as_str().unwrap_or("")
    );
    let kept = match kind.as_str() {
        "v1/Namespace" => kept::<Namespace>(object),
        "v1/ServiceAccount" => kept::<ServiceAccount>(object),
        "v1/ConfigMap" => kept::<ConfigMap>(object),
        "apps/v1/DaemonSet" => kept::<DaemonSet>(object),
        "rbac.authorization.k8s.io/v1/ClusterRole" => kept::<ClusterRole>(object),
        "rbac.authorization.k8s.io/v1/ClusterRoleBinding" => kept::<ClusterRoleBinding>(object),
        "networking.k8s.io/v1/NetworkPolicy" => kept::<NetworkPolicy>(object),
        "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicy" => {
            kept::<ValidatingAdmissionPolicy>(object)
        }
        "admissionregistration.k8s.io/v1/ValidatingAdmissionPolicyBinding" => {
            kept::<ValidatingAdmissionPolicyBinding>(object)
        }
        // The type is another project's; what there is of it is in the chart's own test.
        "monitoring.coreos.com/v1/PodMonitor" => Ok(object.clone()),
        other => Err(format!("no object of this kind is expected: {other}")),
    };
    match kept {
        Err(why) => vec![format!("{kind}: {why}")],
        Ok(after) => {
            let mut found = Vec::new();
            lost(object, &after, &kind, &mut found);
            found
        }
    }
}

#[test]
fn base_has_only_known_api_fields() {
    let objects = base();
    let wrong: Vec<_> = objects.iter().flat_map(defects).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(objects.len() >= 8, "{} objects", objects.len());
}

#[test]
fn unknown_api_field_is_found() {
    let object = |line: &str| {
        parse(&format!(
            "apiVersion: v1\nkind: ServiceAccount\nmetadata: {{name: a}}\n{line}"
        ))
    };
    assert!(defects(&object("")[0]).is_empty());
    assert_eq!(
        defects(&object("automount: true")[0]),
        ["v1/ServiceAccount.automount"]
    );
    assert_eq!(defects(&object("secrets: 3")[0]).len(), 1);
}

/// The names by which objects refer to each other lead somewhere.
#[test]
fn references_within_the_base_lead_somewhere() {
    let objects = base();
    let pod = &one(&objects, "DaemonSet")["spec"]["template"];
    let name = |kind: &str| one(&objects, kind)["metadata"]["name"].clone();
    assert_eq!(pod["spec"]["serviceAccountName"], name("ServiceAccount"));
    assert_eq!(
        one(&objects, "ClusterRoleBinding")["roleRef"]["name"],
        name("ClusterRole")
    );
    assert_eq!(
        one(&objects, "ClusterRoleBinding")["subjects"][0]["name"],
        name("ServiceAccount")
    );
    assert_eq!(
        one(&objects, "ValidatingAdmissionPolicyBinding")["spec"]["policyName"],
        name("ValidatingAdmissionPolicy")
    );
    let volumes = pod["spec"]["volumes"].as_array().unwrap();
    let config = volumes
        .iter()
        .find(|volume| volume["name"] == "config")
        .unwrap();
    assert_eq!(config["configMap"]["name"], name("ConfigMap"));
    let selector = &one(&objects, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"];
    for (label, value) in selector.as_object().unwrap() {
        assert_eq!(&pod["metadata"]["labels"][label], value, "{label}");
    }
    for container in pod["spec"]["containers"].as_array().unwrap() {
        for mount in container["volumeMounts"].as_array().unwrap() {
            assert!(
                volumes.iter().any(|volume| volume["name"] == mount["name"]),
                "{mount}"
            );
        }
    }
    assert_eq!(
        volumes.len(),
        pod["spec"]["containers"][0]["volumeMounts"]
            .as_array()
            .unwrap()
            .len()
    );
}

/// The condition of the admission policy names the service account of the pods.
#[test]
fn admission_policy_names_our_service_account() {
    let objects = base();
    let account = one(&objects, "ServiceAccount");
    let user = format!(
        "system:serviceaccount:{}:{}",
        account["metadata"]["namespace"].as_str().unwrap(),
        account["metadata"]["name"].as_str().unwrap()
    );
    let condition =
        &one(&objects, "ValidatingAdmissionPolicy")["spec"]["matchConditions"][0]["expression"];
    assert!(
        condition.as_str().unwrap().contains(&format!("\"{user}\"")),
        "{condition}"
    );
}
