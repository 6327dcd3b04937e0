//! Claims and pods out of ordinary Kubernetes YAML or JSON.
//!
//! Reads `resource.k8s.io/v1` ResourceClaims and `v1` Pods, and Lists of them; other kinds are skipped, because people keep
//! several objects in one file. Numbers are those of YAML 1.1, as `kubectl` reads them.

mod limits;
mod place;

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::{Container, Pod};
use k8s_openapi::api::resource::v1 as resource;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::de::DeserializeOwned;
use serde_json::Value;

use self::place::Place;
use nodedock_model::check::{self, Findings};
use nodedock_model::yaml;
use nodedock_model::{
    AllocatedDevice, Allocation, BindingConditions, Claim, ClaimReference, Consumer,
    ContainerClaim, ContainerKind, DeviceName, DriverName, NameError, ObjectName, ObjectRef,
    OpaqueConfig, PodContainer, PodRequest, PoolName, Uid,
};

/// A claims file or a command's input file.
const MANIFEST_BYTES_MAX: u64 = 4 << 20;

/// Name of the claim for a pod's extended resources, among the pod's own names for claims.
const EXTENDED_RESOURCES: &str = "extended-resources";

/// The claims and pods of a file.
#[derive(Debug, Default)]
pub struct Objects {
    pub claims: Vec<Claim>,
    pub pods: Vec<PodRequest>,
    /// Objects of other kinds, each as `document 2: Service web (v1)`.
    pub skipped: Vec<String>,
}

/// How objects are read that a person wrote for one command, as opposed to those that an API server wrote.
#[derive(Debug, Clone, Copy)]
pub struct Written<'a> {
    /// Returns the fields of an object of a kind that the kind does not have.
    pub unknown_fields: fn(kind: &str, object: &Value) -> Vec<String>,
    /// Namespace of objects that name none.
    pub namespace: &'a str,
    /// Makes the UID of a pod without one, from its namespace and its name.
    pub pod_uid: fn(namespace: &str, name: &str) -> Uid,
}

impl Written<'_> {
    /// Checks the fields of an object, and adds its namespace, and the UID of a pod.
    fn completed(
        &self,
        mut object: Value,
        kind: &str,
        document: usize,
    ) -> Result<Value, ManifestError> {
        let fields = (self.unknown_fields)(kind, &object);
        let metadata = object.get_mut("metadata").and_then(Value::as_object_mut);
        let name = metadata.as_ref().and_then(|metadata| metadata.get("name"));
        let name = name.and_then(Value::as_str).unwrap_or_default().to_owned();
        if !fields.is_empty() {
            let (kind, fields) = (kind.to_owned(), fields.join(", "));
            return Err(ManifestError::UnknownFields {
                document,
                kind,
                name,
                fields,
            });
        }
        if let Some(metadata) = metadata {
            metadata
                .entry("namespace")
                .or_insert_with(|| self.namespace.into());
            if kind == "Pod"
                && let Some(namespace) = metadata["namespace"].as_str()
            {
                let uid = (self.pod_uid)(namespace, &name);
                metadata.entry("uid").or_insert_with(|| uid.as_str().into());
            }
        }
        Ok(object)
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ManifestError {
    #[error("read {path}")]
    Io {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{0} is larger than {max} bytes", max = MANIFEST_BYTES_MAX)]
    TooLarge(PathBuf),
    #[error("{0} is not YAML or JSON")]
    Syntax(String, #[source] yaml::SyntaxError),
    #[error("document {document}: {what}")]
    Shape { document: usize, what: String },
    #[error("document {document}, {place}: not a valid {kind}")]
    Mismatch {
        document: usize,
        place: Place,
        kind: String,
        source: serde_json::Error,
    },
    #[error("document {document}, {kind} {name}: {fields}")]
    UnknownFields {
        document: usize,
        kind: String,
        name: String,
        fields: String,
    },
    #[error("document {document}: {what}: {field}")]
    Name {
        document: usize,
        what: String,
        field: &'static str,
        source: NameError,
    },
    #[error(
        "{pod}: claim {claim:?} is made from a template, and the pod's status does not say yet which claim it became"
    )]
    NotCreatedYet { pod: String, claim: String },
    #[error("{pod}: claim {claim:?} has neither resourceClaimName nor resourceClaimTemplateName")]
    NoClaimName { pod: String, claim: String },
    #[error(
        "{pod}: container {container:?} uses claim {claim:?}, which spec.resourceClaims does not have"
    )]
    UnknownClaim {
        pod: String,
        container: String,
        claim: String,
    },
}

impl ManifestError {
    /// Returns the same for an item of a list.
    fn in_item(self, index: usize) -> Self {
        self.map_place(|place| place.in_item(index))
    }

    /// Returns the same with the line in the text that was read.
    /// `empty`: number of empty documents before it, which the reader of lines does not count.
    fn in_text(self, text: &str, empty: usize) -> Self {
        let Self::Mismatch { document, .. } = self else {
            return self;
        };
        self.map_place(|place| place.in_text(text, document.saturating_sub(empty)))
    }

    fn map_place(self, change: impl FnOnce(Place) -> Place) -> Self {
        match self {
            Self::Mismatch {
                document,
                place,
                kind,
                source,
            } => Self::Mismatch {
                document,
                place: change(place),
                kind,
                source,
            },
            other => other,
        }
    }
}

pub fn read(path: &Path) -> Result<Objects, ManifestError> {
    parse(&text_of(path)?, &path.display().to_string())
}

/// Reads the objects of a text as they are, those of lists too. `name` is for errors.
pub fn documents(text: &str, name: &str) -> Result<Vec<Value>, ManifestError> {
    let documents = split(text, name)?;
    let objects =
        documents
            .into_iter()
            .flat_map(|document| match kind_of(&document).strip_suffix("List") {
                Some(kind) => items(&document, kind),
                None => vec![document],
            });
    Ok(objects.filter(|object| !object.is_null()).collect())
}

/// Returns the text of a file of at most 4 MiB.
pub fn text_of(path: &Path) -> Result<String, ManifestError> {
    let file = std::fs::File::open(path).map_err(|source| ManifestError::Io {
        path: path.to_owned(),
        source,
    })?;
    text_from(file, path)
}

/// Reads at most 4 MiB. `path` is for errors.
pub fn text_from(reader: impl Read, path: &Path) -> Result<String, ManifestError> {
    let mut text = String::new();
    reader
        .take(MANIFEST_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .map_err(|source| ManifestError::Io {
            path: path.to_owned(),
            source,
        })?;
    if text.len() as u64 > MANIFEST_BYTES_MAX {
        return Err(ManifestError::TooLarge(path.to_owned()));
    }
    Ok(text)
}

fn split(text: &str, name: &str) -> Result<Vec<Value>, ManifestError> {
    yaml::documents(text).map_err(|error| ManifestError::Syntax(name.to_owned(), error))
}

/// Parses a text with one or several documents. `name` is for errors.
pub fn parse(text: &str, name: &str) -> Result<Objects, ManifestError> {
    parse_as(text, name, None)
}

/// Parses a text like [`parse`], more strictly, and with what a person need not write.
pub fn parse_written(
    text: &str,
    name: &str,
    written: &Written<'_>,
) -> Result<Objects, ManifestError> {
    parse_as(text, name, Some(written))
}

fn parse_as(
    text: &str,
    name: &str,
    written: Option<&Written<'_>>,
) -> Result<Objects, ManifestError> {
    let documents = split(text, name)?;
    let mut objects = Objects::default();
    let mut empty = 0;
    for (index, document) in documents.into_iter().enumerate() {
        let is_empty = document.is_null();
        take(document, index + 1, written, &mut objects)
            .map_err(|error| error.in_text(text, empty))?;
        empty += usize::from(is_empty);
    }
    Ok(objects)
}

/// The claim that an object of `resource.k8s.io/v1` is.
pub fn claim_of(object: &resource::ResourceClaim) -> Result<Claim, ManifestError> {
    claim(object, 1)
}

/// The pod that an object of `v1` is.
pub fn pod_of(object: Value) -> Result<PodRequest, ManifestError> {
    pod(&typed(&object, 1, "Pod")?, 1)
}

fn take(
    document: Value,
    index: usize,
    written: Option<&Written<'_>>,
    objects: &mut Objects,
) -> Result<(), ManifestError> {
    if document.is_null() {
        return Ok(());
    }
    let wrong = |what: String| {
        Err(ManifestError::Shape {
            document: index,
            what,
        })
    };
    let version = text_at(&document, "/apiVersion").to_owned();
    let kind = kind_of(&document).to_owned();
    let completed = |document| match written {
        Some(written) => written.completed(document, &kind, index),
        None => Ok(document),
    };
    match (version.as_str(), kind.as_str()) {
        ("", _) | (_, "") => {
            wrong("apiVersion and kind are wanted, as in every Kubernetes object".to_owned())
        }
        ("resource.k8s.io/v1", "ResourceClaim") => {
            let object = completed(document)?;
            objects
                .claims
                .push(claim(&typed(&object, index, &kind)?, index)?);
            Ok(())
        }
        ("v1", "Pod") => {
            let object = completed(document)?;
            objects
                .pods
                .push(pod(&typed(&object, index, &kind)?, index)?);
            Ok(())
        }
        (version, "ResourceClaim") => wrong(format!(
            "ResourceClaim of {version} is not read here; resource.k8s.io/v1 is"
        )),
        (_, kind) if kind.ends_with("List") => {
            let items = items(&document, kind.trim_end_matches("List"));
            items.into_iter().enumerate().try_for_each(|(at, item)| {
                take(item, index, written, objects).map_err(|error| error.in_item(at))
            })
        }
        (version, kind) => {
            let name = text_at(&document, "/metadata/name");
            let skipped = format!("document {index}: {kind} {name} ({version})");
            objects.skipped.push(skipped);
            Ok(())
        }
    }
}

fn text_at<'a>(object: &'a Value, pointer: &str) -> &'a str {
    let text = object.pointer(pointer).and_then(Value::as_str);
    text.unwrap_or_default()
}

fn kind_of(object: &Value) -> &str {
    text_at(object, "/kind")
}

/// The items of a list of this kind; of any kinds, if it is empty.
fn items(list: &Value, kind: &str) -> Vec<Value> {
    let items = list.get("items").and_then(Value::as_array);
    let version = text_at(list, "/apiVersion");
    let items = items.into_iter().flatten().cloned();
    items.map(|item| of_list(item, version, kind)).collect()
}

/// Adds the version and kind of a typed list to an item, which does not have them.
fn of_list(mut item: Value, version: &str, kind: &str) -> Value {
    if let (Some(fields), false) = (item.as_object_mut(), kind.is_empty()) {
        fields.entry("apiVersion").or_insert_with(|| version.into());
        fields.entry("kind").or_insert_with(|| kind.into());
    }
    item
}

fn typed<T: DeserializeOwned>(
    document: &Value,
    index: usize,
    kind: &str,
) -> Result<T, ManifestError> {
    Place::read(document).map_err(|(place, source)| ManifestError::Mismatch {
        document: index,
        place,
        kind: kind.to_owned(),
        source,
    })
}

struct Context {
    document: usize,
    what: String,
}

impl Context {
    fn name<T>(
        &self,
        field: &'static str,
        parsed: Result<T, NameError>,
    ) -> Result<T, ManifestError> {
        parsed.map_err(|source| ManifestError::Name {
            document: self.document,
            what: self.what.clone(),
            field,
            source,
        })
    }

    fn shape(&self, what: &str) -> ManifestError {
        ManifestError::Shape {
            document: self.document,
            what: format!("{}: {what}", self.what),
        }
    }
}

fn claim(object: &resource::ResourceClaim, document: usize) -> Result<Claim, ManifestError> {
    let meta = &object.metadata;
    let what = format!(
        "ResourceClaim {}",
        meta.name.as_deref().unwrap_or("without a name")
    );
    let context = Context { document, what };
    let id = object_ref(meta, &context)?;
    let status = object.status.as_ref();
    let consumers = status.and_then(|status| status.reserved_for.as_ref());
    let reserved_for = consumers
        .into_iter()
        .flatten()
        .map(|found| consumer(found, &context))
        .collect::<Result<_, _>>()?;
    let allocation = status
        .and_then(|status| status.allocation.as_ref())
        .map(|found| allocation(found, &context))
        .transpose()?;
    let owners = meta.owner_references.iter().flatten();
    let owner = owners
        .into_iter()
        .find(|owner| owner.controller == Some(true) && owner.kind == "Pod");
    let owner_pod = owner
        .map(|owner| context.name("metadata.ownerReferences[].uid", Uid::new(&owner.uid)))
        .transpose()?;
    let annotations = meta
        .annotations
        .clone()
        .unwrap_or_default()
        .into_iter()
        .collect();
    Ok(Claim {
        id,
        allocation,
        reserved_for,
        annotations,
        owner_pod,
        resource: None,
    })
}

fn object_ref(meta: &ObjectMeta, context: &Context) -> Result<ObjectRef, ManifestError> {
    let uid = meta
        .uid
        .as_deref()
        .ok_or_else(|| context.shape("metadata.uid is missing: objects are identified by it"))?;
    let (namespace, name) = (meta.namespace.as_deref(), meta.name.as_deref());
    let namespace = ObjectName::new(namespace.unwrap_or("default"));
    Ok(ObjectRef {
        namespace: context.name("metadata.namespace", namespace)?,
        name: context.name("metadata.name", ObjectName::new(name.unwrap_or_default()))?,
        uid: context.name("metadata.uid", Uid::new(uid))?,
    })
}

fn consumer(
    found: &resource::ResourceClaimConsumerReference,
    context: &Context,
) -> Result<Consumer, ManifestError> {
    Ok(Consumer {
        api_group: found.api_group.clone().unwrap_or_default(),
        resource: found.resource.clone(),
        name: context.name("status.reservedFor[].name", ObjectName::new(&found.name))?,
        uid: context.name("status.reservedFor[].uid", Uid::new(&found.uid))?,
    })
}

fn allocation(
    found: &resource::AllocationResult,
    context: &Context,
) -> Result<Allocation, ManifestError> {
    let devices = found.devices.as_ref();
    let results = devices
        .into_iter()
        .flat_map(|devices| devices.results.iter().flatten());
    let configs = devices
        .into_iter()
        .flat_map(|devices| devices.config.iter().flatten());
    Ok(Allocation {
        devices: results
            .map(|result| allocated(result, context))
            .collect::<Result<_, _>>()?,
        configs: configs
            .filter_map(|config| opaque(config, context).transpose())
            .collect::<Result<_, _>>()?,
        node_name: found.node_selector.as_ref().and_then(single_node),
    })
}

fn allocated(
    result: &resource::DeviceRequestAllocationResult,
    context: &Context,
) -> Result<AllocatedDevice, ManifestError> {
    let consumed = result.consumed_capacity.clone().unwrap_or_default();
    let binding = BindingConditions {
        conditions: result.binding_conditions.clone().unwrap_or_default(),
        failures: result
            .binding_failure_conditions
            .clone()
            .unwrap_or_default(),
    };
    Findings::of(|found| check::binding_conditions(found, &binding)).map_err(|error| {
        context.shape(&format!(
            "status.allocation.devices.results[] of device {}: {error}",
            result.device
        ))
    })?;
    Ok(AllocatedDevice {
        request: result.request.clone(),
        driver: context.name(
            "status.allocation.devices.results[].driver",
            DriverName::new(&result.driver),
        )?,
        pool: context.name(
            "status.allocation.devices.results[].pool",
            PoolName::new(&result.pool),
        )?,
        device: context.name(
            "status.allocation.devices.results[].device",
            DeviceName::new(&result.device),
        )?,
        share_id: result.share_id.clone(),
        consumed: consumed
            .into_iter()
            .map(|(name, quantity)| (name, quantity.0))
            .collect(),
        admin_access: result.admin_access.unwrap_or(false),
        binding,
    })
}

/// None: a config that is not opaque, of which Kubernetes has no kind yet.
fn opaque(
    config: &resource::DeviceAllocationConfiguration,
    context: &Context,
) -> Result<Option<OpaqueConfig>, ManifestError> {
    let Some(opaque) = &config.opaque else {
        return Ok(None);
    };
    Ok(Some(OpaqueConfig {
        source: config.source.parse().map_err(|_| {
            context.shape(&format!(
                "config source {:?} is neither FromClass nor FromClaim",
                config.source
            ))
        })?,
        requests: config.requests.clone().unwrap_or_default(),
        driver: context.name(
            "status.allocation.devices.config[].opaque.driver",
            DriverName::new(&opaque.driver),
        )?,
        parameters: opaque.parameters.0.to_string(),
    }))
}

/// The node's name in the selector that the scheduler writes for devices of one node.
fn single_node(selector: &k8s_openapi::api::core::v1::NodeSelector) -> Option<String> {
    let [term] = selector.node_selector_terms.as_slice() else {
        return None;
    };
    let field = term
        .match_fields
        .as_ref()?
        .iter()
        .find(|field| field.key == "metadata.name")?;
    match (field.operator.as_str(), field.values.as_deref()) {
        ("In", Some([name])) => Some(name.clone()),
        _ => None,
    }
}

fn pod(object: &Pod, document: usize) -> Result<PodRequest, ManifestError> {
    let meta = &object.metadata;
    let name = meta.name.as_deref().unwrap_or_default();
    let context = Context {
        document,
        what: format!("Pod {name}"),
    };
    let pod = object_ref(meta, &context)?;
    let claims = references(object, &context)?;
    let spec = object.spec.clone().unwrap_or_default();
    let pod_group = spec
        .scheduling_group
        .and_then(|group| group.pod_group_name)
        .map(ObjectName::new);
    let pod_group = pod_group
        .map(|name| context.name("spec.schedulingGroup.podGroupName", name))
        .transpose()?;
    let init = spec
        .init_containers
        .unwrap_or_default()
        .into_iter()
        .map(|c| (init_kind(&c), c));
    let app = spec.containers.into_iter().map(|c| (ContainerKind::App, c));
    let containers: Vec<_> = init
        .chain(app)
        .map(|(kind, c)| container(kind, c, &context))
        .collect::<Result<_, _>>()?;
    check_containers(object, &containers, &context)?;
    let mut request = PodRequest {
        pod,
        pod_group,
        claims,
        containers,
    };
    add_extended_resources(object, &mut request, &context)?;
    Ok(request)
}

/// Extended resources that the scheduler took from DRA drivers (KEP-5004): a claim that is in the pod's status only, with the
/// request of each container.
fn add_extended_resources(
    object: &Pod,
    request: &mut PodRequest,
    context: &Context,
) -> Result<(), ManifestError> {
    let status = object
        .status
        .as_ref()
        .and_then(|status| status.extended_resource_claim_status.as_ref());
    let Some(status) = status else { return Ok(()) };
    let claim_name = ObjectName::new(&status.resource_claim_name);
    request.claims.push(ClaimReference {
        pod_claim_name: EXTENDED_RESOURCES.to_owned(),
        claim_name: context.name(
            "status.extendedResourceClaimStatus.resourceClaimName",
            claim_name,
        )?,
        claim_uid: None,
    });
    for mapping in &status.request_mappings {
        let containers = request
            .containers
            .iter_mut()
            .filter(|container| container.name == mapping.container_name);
        containers.for_each(|container| {
            // The claim holds them: they must not be allocated again.
            container
                .resources
                .retain(|resource, _| resource.as_str() != mapping.resource_name);
            let request = Some(mapping.request_name.clone());
            container.claims.push(ContainerClaim {
                pod_claim_name: EXTENDED_RESOURCES.to_owned(),
                request,
            });
        });
    }
    Ok(())
}

fn references(object: &Pod, context: &Context) -> Result<Vec<ClaimReference>, ManifestError> {
    let statuses = object
        .status
        .iter()
        .flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let created: BTreeMap<_, _> = statuses
        .map(|status| (status.name.as_str(), status.resource_claim_name.as_deref()))
        .collect();
    let mut references = Vec::new();
    for entry in object
        .spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten())
    {
        let Some(claim_name) = claim_name(entry, &created, context)? else {
            continue;
        };
        references.push(ClaimReference {
            pod_claim_name: entry.name.clone(),
            claim_name: context.name("spec.resourceClaims[]", ObjectName::new(claim_name))?,
            claim_uid: None,
        });
    }
    Ok(references)
}

/// None: the template made no claim because none is needed (`resourceClaimName` absent in the status).
fn claim_name<'a>(
    entry: &'a k8s_openapi::api::core::v1::PodResourceClaim,
    created: &BTreeMap<&str, Option<&'a str>>,
    context: &Context,
) -> Result<Option<&'a str>, ManifestError> {
    let (pod, claim) = (context.what.clone(), entry.name.clone());
    match (
        &entry.resource_claim_name,
        &entry.resource_claim_template_name,
    ) {
        (Some(name), _) => Ok(Some(name)),
        (None, Some(_)) => created
            .get(entry.name.as_str())
            .copied()
            .ok_or(ManifestError::NotCreatedYet { pod, claim }),
        (None, None) => Err(ManifestError::NoClaimName { pod, claim }),
    }
}

/// An init container that is restarted runs beside the others.
fn init_kind(container: &Container) -> ContainerKind {
    match container.restart_policy.as_deref() {
        Some("Always") => ContainerKind::Sidecar,
        _ => ContainerKind::Init,
    }
}

fn container(
    kind: ContainerKind,
    container: Container,
    context: &Context,
) -> Result<PodContainer, ManifestError> {
    let resources = container.resources.unwrap_or_default();
    let claims = resources.claims.iter().flatten();
    let claims = claims
        .map(|claim| ContainerClaim {
            pod_claim_name: claim.name.clone(),
            request: claim.request.clone(),
        })
        .collect();
    let resources = limits::extended(&container.name, &resources, context)?;
    Ok(PodContainer {
        name: container.name,
        claims,
        kind,
        resources,
        numa_affinity: Vec::new(),
    })
}

fn check_containers(
    object: &Pod,
    containers: &[PodContainer],
    context: &Context,
) -> Result<(), ManifestError> {
    let entries = object
        .spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten());
    let known: Vec<_> = entries.map(|entry| entry.name.as_str()).collect();
    for container in containers {
        if let Some(claim) = container
            .claims
            .iter()
            .find(|claim| !known.contains(&claim.pod_claim_name.as_str()))
        {
            return Err(ManifestError::UnknownClaim {
                pod: context.what.clone(),
                container: container.name.clone(),
                claim: claim.pod_claim_name.clone(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "manifest_tests.rs"]
mod tests;
