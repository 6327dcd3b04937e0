//! The operations on a kind of object, with the parameters that kubectl looks for.

use serde_json::{Map, Value, json};

use super::Kind;

/// Parameters of operations that write. kubectl lets the server check fields only if `fieldValidation` is among those of a patch.
const WRITE: [(&str, &str); 3] = [
    ("dryRun", "string"),
    ("fieldManager", "string"),
    ("fieldValidation", "string"),
];
const APPLY: [(&str, &str); 1] = [("force", "boolean")];
const DELETE: [(&str, &str); 3] = [
    ("dryRun", "string"),
    ("gracePeriodSeconds", "integer"),
    ("propagationPolicy", "string"),
];
const LIST: [(&str, &str); 8] = [
    ("allowWatchBookmarks", "boolean"),
    ("fieldSelector", "string"),
    ("labelSelector", "string"),
    ("resourceVersion", "string"),
    ("resourceVersionMatch", "string"),
    ("sendInitialEvents", "boolean"),
    ("timeoutSeconds", "integer"),
    ("watch", "boolean"),
];
/// Strategic merge patches are served but not named: kubectl makes one from its own types then, which know by what the items of a list are
/// merged. These schemas do not.
const PATCHES: [&str; 3] = [
    "application/apply-patch+yaml",
    "application/json-patch+json",
    "application/merge-patch+json",
];

/// Returns the paths of a kind, each with its operations.
pub(super) fn of(kind: &Kind, has_status: bool) -> Map<String, Value> {
    let base = format!("/{}", kind.group_path());
    let scope = if kind.namespaced {
        "/namespaces/{namespace}"
    } else {
        ""
    };
    let all = format!("{base}{scope}/{}", kind.plural);
    let one = format!("{all}/{{name}}");
    let mut paths = Map::new();
    let get = operation(kind, "get", &[]);
    let put = with_body(
        operation(kind, "put", &[&WRITE]),
        &["application/json"],
        object(kind),
    );
    let patch = with_body(
        operation(kind, "patch", &[&WRITE, &APPLY]),
        &PATCHES,
        json!({ "type": "object" }),
    );
    if has_status {
        let path = json!({
            "parameters": in_path(kind, true), "get": get.clone(), "put": put.clone(), "patch": patch.clone(),
        });
        paths.insert(format!("{one}/status"), path);
    }
    let delete = operation(kind, "delete", &[&DELETE]);
    paths.insert(
        one,
        json!({ "parameters": in_path(kind, true), "get": get, "put": put, "patch": patch, "delete": delete }),
    );
    let list = operation(kind, "list", &[&LIST]);
    if kind.namespaced {
        paths.insert(
            format!("{base}/{}", kind.plural),
            json!({ "get": list.clone() }),
        );
    }
    let post = with_body(
        operation(kind, "post", &[&WRITE]),
        &["application/json"],
        object(kind),
    );
    let delete = operation(kind, "deletecollection", &[&DELETE, &LIST]);
    let path =
        json!({ "parameters": in_path(kind, false), "get": list, "post": post, "delete": delete });
    paths.insert(all, path);
    paths
}

fn object(kind: &Kind) -> Value {
    json!({ "$ref": format!("#/components/schemas/{}", kind.schema) })
}

fn operation(kind: &Kind, action: &str, parameters: &[&[(&str, &str)]]) -> Value {
    let parameters = parameters.iter().flat_map(|list| list.iter());
    let parameters: Vec<Value> = parameters
        .map(|(name, kind)| json!({ "in": "query", "name": name, "schema": { "type": kind, "uniqueItems": true } }))
        .collect();
    let content = match action {
        "get" | "put" | "patch" | "post" => {
            json!({ "application/json": { "schema": object(kind) } })
        }
        _ => json!({ "application/json": { "schema": { "type": "object" } } }),
    };
    json!({
        "parameters": parameters,
        "responses": { "200": { "description": "OK", "content": content } },
        "x-kubernetes-action": action,
        "x-kubernetes-group-version-kind": kind.gvk(),
    })
}

fn with_body(mut operation: Value, media_types: &[&str], schema: Value) -> Value {
    let content: Map<String, Value> = media_types
        .iter()
        .map(|media_type| ((*media_type).to_owned(), json!({ "schema": schema })))
        .collect();
    operation["requestBody"] = json!({ "content": content, "required": true });
    operation
}

/// The parameters in the path itself.
fn in_path(kind: &Kind, has_name: bool) -> Vec<Value> {
    let names = [("namespace", kind.namespaced), ("name", has_name)]
        .into_iter()
        .filter(|(_, is_there)| *is_there);
    names
        .map(|(name, _)| json!({ "in": "path", "name": name, "required": true, "schema": { "type": "string" } }))
        .collect()
}
