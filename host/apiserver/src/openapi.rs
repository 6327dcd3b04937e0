//! Description of the server's types: OpenAPI v3 documents for kubectl and clients, made once, at first use, from the schemas that
//! `k8s-openapi` generates. The same schemas give the fields and types of objects that clients send.
//!
//! The document of `/openapi/v2` has no types: kubectl reads it for manifests of kinds that are not in version 3, such as List.

mod decode;
mod paths;
mod shapes;
#[cfg(test)]
mod tests;

use std::any::TypeId;
use std::collections::BTreeMap;
use std::sync::LazyLock;

use k8s_openapi::api::{core, events, resource};
use k8s_openapi::schemars::generate::SchemaSettings;
use k8s_openapi::schemars::{JsonSchema, SchemaGenerator};
use k8s_openapi::{ClusterResourceScope, Resource};
use serde_json::{Map, Value, json};
use uuid::Uuid;

pub(crate) use decode::{decode_error, prune, strict_error, unknown_fields};

/// The documents and their list, as JSON.
struct OpenApi {
    index: String,
    documents: BTreeMap<String, String>,
}

static OPENAPI: LazyLock<OpenApi> = LazyLock::new(|| {
    let mut documents = BTreeMap::new();
    let mut index = Map::new();
    for group in [core_group, events_group, resource_group] {
        let mut generator = generator();
        let kinds = group(&mut generator);
        let Some(first) = kinds.first() else { continue };
        let path = first.group_path();
        let text = document(&kinds, generator.take_definitions(true)).to_string();
        // kubectl keeps a document on disk for as long as its hash is the same.
        let hash = Uuid::new_v5(&Uuid::NAMESPACE_URL, text.as_bytes()).simple();
        index.insert(
            path.clone(),
            json!({ "serverRelativeURL": format!("/openapi/v3/{path}?hash={hash}") }),
        );
        documents.insert(path, text);
    }
    OpenApi {
        index: json!({ "paths": index }).to_string(),
        documents,
    }
});

/// Content type of [`V2`], the only one that clients request.
pub(crate) const V2_CONTENT_TYPE: &str =
    "application/com.github.proto-openapi.spec.v2.v1.0+protobuf";
/// Body of `/openapi/v2`: a message of protobuf with the version of OpenAPI alone.
pub(crate) const V2: &str = "\n\u{3}2.0";

/// Returns the body of `/openapi/v3` as JSON: the documents that there are, each with a hash of its text.
pub(crate) fn index() -> &'static str {
    &OPENAPI.index
}

/// Returns the document of a group and version as JSON; `path` is `api/v1` or `apis/resource.k8s.io/v1`, what follows `/openapi/v3/`.
pub(crate) fn document_of(path: &str) -> Option<&'static str> {
    OPENAPI.documents.get(path).map(String::as_str)
}

/// A kind of object that a document describes.
struct Kind {
    group: &'static str,
    version: &'static str,
    kind: &'static str,
    plural: &'static str,
    namespaced: bool,
    /// The name of its schema.
    schema: String,
}

impl Kind {
    fn group_path(&self) -> String {
        match self.group {
            "" => format!("api/{}", self.version),
            group => format!("apis/{group}/{}", self.version),
        }
    }

    fn gvk(&self) -> Value {
        json!({ "group": self.group, "kind": self.kind, "version": self.version })
    }
}

fn generator() -> SchemaGenerator {
    SchemaSettings::openapi3()
        .with(|settings| settings.meta_schema = None)
        .into_generator()
}

/// Adds the schema of a kind, and those of the types in it, to a generator.
fn kind<T: Resource<Scope: 'static> + JsonSchema>(generator: &mut SchemaGenerator) -> Kind {
    generator.subschema_for::<T>();
    Kind {
        group: T::GROUP,
        version: T::VERSION,
        kind: T::KIND,
        plural: T::URL_PATH_SEGMENT,
        namespaced: TypeId::of::<T::Scope>() != TypeId::of::<ClusterResourceScope>(),
        schema: T::schema_name().into_owned(),
    }
}

fn core_group(generator: &mut SchemaGenerator) -> Vec<Kind> {
    vec![
        kind::<core::v1::Namespace>(generator),
        kind::<core::v1::Node>(generator),
        kind::<core::v1::Pod>(generator),
        kind::<core::v1::Event>(generator),
    ]
}

fn events_group(generator: &mut SchemaGenerator) -> Vec<Kind> {
    vec![kind::<events::v1::Event>(generator)]
}

fn resource_group(generator: &mut SchemaGenerator) -> Vec<Kind> {
    vec![
        kind::<resource::v1::DeviceClass>(generator),
        kind::<resource::v1::ResourceClaim>(generator),
        kind::<resource::v1::ResourceClaimTemplate>(generator),
        kind::<resource::v1::ResourceSlice>(generator),
    ]
}

/// Kinds as they are stored: beside those of a document, taint rules, which are in `v1` from Kubernetes 1.37 on with the same fields.
fn stored_kinds(generator: &mut SchemaGenerator) -> Vec<Kind> {
    let mut kinds = core_group(generator);
    kinds.extend(resource_group(generator));
    kinds.push(kind::<resource::v1beta2::DeviceTaintRule>(generator));
    kinds
}

fn document(kinds: &[Kind], mut schemas: Map<String, Value>) -> Value {
    let mut operations = Map::new();
    for kind in kinds {
        let Some(schema) = schemas.get_mut(&kind.schema) else {
            continue;
        };
        schema["x-kubernetes-group-version-kind"] = json!([kind.gvk()]);
        // The generated types want it; the API does not.
        if let Some(required) = schema.get_mut("required").and_then(Value::as_array_mut) {
            required.retain(|field| field != "metadata");
        }
        let has_status = schema["properties"].get("status").is_some();
        operations.extend(paths::of(kind, has_status));
    }
    json!({
        "openapi": "3.0.0",
        "info": { "title": "Nodedock", "version": env!("CARGO_PKG_VERSION") },
        "paths": operations,
        "components": { "schemas": schemas },
    })
}
