//! Converts between the node API's messages and the model. Requests are checked here and nowhere behind.

use std::collections::BTreeSet;
use std::str::FromStr;

use nodedock_proto::node::v1;

use nodedock_base::conditions::Condition;
use nodedock_base::printable::is_unprintable;
use nodedock_core::manager::claims::{ClaimOutcome, PodSelector};
use nodedock_core::manager::{ContainerAnswer, PodOutcome, PodView};
use nodedock_core::pools::NodePools;
use nodedock_core::registry::{DriverView, NativeView, TrustView};
use nodedock_kube::taints::AddedTaints;
use nodedock_model::{
    AllocatedDevice, Allocation, AttributeValue, Claim, ClaimReference, Consumer, ContainerClaim,
    ContainerKind, DriverName, LeftOut, LeftOutDevice, NameError, ObjectRef, OpaqueConfig,
    PodContainer, PodRequest, Problem, ProblemCode, Taint, is_dns_label, limit,
};

mod claims;
mod resources;

pub use claims::{
    claim_status, ended_claim, refused_claim, release_preview, release_request, release_response,
    released_claim, waiting_claim,
};
use claims::{transition, worst_problem};
pub use resources::{
    adapter, capacity, cover_request, covered, hint_scope, hints, plugin_device, set_mechanisms,
    source as resource_source, start_request,
};

/// Characters of a bad name that an error repeats.
const SHOWN_CHARS_MAX: usize = 64;
/// Name of a consumer of which the caller gives only the UID.
const UNNAMED: &str = "unnamed";

fn invalid(message: impl Into<String>) -> Problem {
    Problem::invalid(ProblemCode::BadRequest, message)
}

fn missing(field: &str) -> Problem {
    invalid(format!("{field} is missing"))
}

fn bounded(field: &str, entries: usize, max: usize) -> Result<(), Problem> {
    if entries <= max {
        return Ok(());
    }
    Err(invalid(format!(
        "{field} has {entries} entries, at most {max} are allowed"
    )))
}

/// Parses a name, UID or resource.
fn name<T: FromStr<Err = NameError>>(field: &str, text: &str) -> Result<T, Problem> {
    text.parse()
        .map_err(|error| invalid(format!("{field}: {error}")))
}

/// Parses a name that may be empty for none.
fn optional<T: FromStr<Err = NameError>>(field: &str, text: &str) -> Result<Option<T>, Problem> {
    if text.is_empty() {
        Ok(None)
    } else {
        name(field, text).map(Some)
    }
}

fn not_empty(text: &str) -> Option<String> {
    Some(text.to_owned()).filter(|text| !text.is_empty())
}

/// The start of a text for an error, without unprintable characters.
fn shown(text: &str) -> String {
    text.chars()
        .filter(|c| !is_unprintable(*c))
        .take(SHOWN_CHARS_MAX)
        .collect()
}

fn object(field: &str, object: Option<&v1::ObjectRef>) -> Result<ObjectRef, Problem> {
    let object = object.ok_or_else(|| missing(field))?;
    Ok(ObjectRef {
        namespace: name(&format!("{field}.namespace"), &object.namespace)?,
        name: name(&format!("{field}.name"), &object.name)?,
        uid: name(&format!("{field}.uid"), &object.uid)?,
    })
}

/// Checks the name of a container or of a pod's claim.
fn label(field: &str, name: &str) -> Result<String, Problem> {
    if is_dns_label(name) {
        return Ok(name.to_owned());
    }
    let start: String = name.chars().take(SHOWN_CHARS_MAX).collect();
    Err(invalid(format!(
        "{field}: {start:?} is no DNS label of at most 63 bytes"
    )))
}

fn unique<'a>(field: &str, names: impl IntoIterator<Item = &'a str>) -> Result<(), Problem> {
    let mut seen = BTreeSet::new();
    match names.into_iter().find(|name| !seen.insert(*name)) {
        None => Ok(()),
        Some(twice) => Err(invalid(format!("{field}: {twice:?} is there twice"))),
    }
}

/// Checks a request for a pod, and returns it with the claims that it carries.
pub fn pod_request(request: &v1::PreparePodRequest) -> Result<(PodRequest, Vec<Claim>), Problem> {
    bounded("claims", request.claims.len(), limit::POD_CLAIMS_MAX)?;
    bounded(
        "inline_claims",
        request.inline_claims.len(),
        limit::POD_CLAIMS_MAX,
    )?;
    let pod = object("pod", request.pod.as_ref())?;
    let claims: Vec<_> = request
        .claims
        .iter()
        .map(reference)
        .collect::<Result<_, _>>()?;
    let containers = containers(&request.containers)?;
    unique(
        "claims[].pod_claim_name",
        claims.iter().map(|claim| claim.pod_claim_name.as_str()),
    )?;
    let names: BTreeSet<_> = claims
        .iter()
        .map(|claim| claim.pod_claim_name.as_str())
        .collect();
    for container in &containers {
        if let Some(unknown) = container
            .claims
            .iter()
            .find(|claim| !names.contains(claim.pod_claim_name.as_str()))
        {
            let (name, claim) = (&container.name, &unknown.pod_claim_name);
            let message =
                format!("container {name:?} uses claim {claim:?}, which the pod does not have");
            return Err(invalid(message));
        }
    }
    let inline = request
        .inline_claims
        .iter()
        .map(claim)
        .collect::<Result<_, _>>()?;
    let pod_group = optional("pod_group", &request.pod_group)?;
    Ok((
        PodRequest {
            pod,
            pod_group,
            claims,
            containers,
        },
        inline,
    ))
}

/// Checks a request about the extended resources of a pod; the claims of its containers are left out.
pub fn resources_request(request: &v1::GetTopologyHintsRequest) -> Result<PodRequest, Problem> {
    let pod = object("pod", request.pod.as_ref())?;
    let mut containers = containers(&request.containers)?;
    containers
        .iter_mut()
        .for_each(|container| container.claims.clear());
    Ok(PodRequest {
        pod,
        pod_group: None,
        claims: Vec::new(),
        containers,
    })
}

fn containers(containers: &[v1::Container]) -> Result<Vec<PodContainer>, Problem> {
    bounded("containers", containers.len(), limit::POD_CONTAINERS_MAX)?;
    let containers: Vec<_> = containers.iter().map(container).collect::<Result<_, _>>()?;
    unique(
        "containers[].name",
        containers.iter().map(|container| container.name.as_str()),
    )?;
    Ok(containers)
}

fn reference(reference: &v1::ClaimReference) -> Result<ClaimReference, Problem> {
    Ok(ClaimReference {
        pod_claim_name: label("claims[].pod_claim_name", &reference.pod_claim_name)?,
        claim_name: name("claims[].claim_name", &reference.claim_name)?,
        claim_uid: optional("claims[].claim_uid", &reference.claim_uid)?,
    })
}

fn container(container: &v1::Container) -> Result<PodContainer, Problem> {
    bounded(
        "containers[].claims",
        container.claims.len(),
        limit::CONTAINER_CLAIMS_MAX,
    )?;
    Ok(PodContainer {
        name: label("containers[].name", &container.name)?,
        claims: container
            .claims
            .iter()
            .map(|claim| ContainerClaim {
                pod_claim_name: claim.pod_claim_name.clone(),
                request: not_empty(&claim.request),
            })
            .collect(),
        kind: container_kind(&container.kind)?,
        resources: resources::limits(&container.name, &container.extended_resources)?,
        numa_affinity: resources::numa_nodes(&container.name, &container.numa_affinity)?,
    })
}

fn container_kind(kind: &str) -> Result<ContainerKind, Problem> {
    let kinds = [
        ContainerKind::App,
        ContainerKind::Init,
        ContainerKind::Sidecar,
    ];
    match kind {
        "" => Ok(ContainerKind::App),
        _ => kinds
            .into_iter()
            .find(|known| known.as_str() == kind)
            .ok_or_else(|| {
                invalid(format!(
                    "containers[].kind: {:?} is none of app, init and sidecar",
                    shown(kind)
                ))
            }),
    }
}

/// A consumer is identified by its UID; callers may leave out the rest.
fn consumer(consumer: &v1::Consumer) -> Result<Consumer, Problem> {
    let called = if consumer.name.is_empty() {
        UNNAMED
    } else {
        &consumer.name
    };
    Ok(Consumer {
        api_group: consumer.api_group.clone(),
        resource: consumer.resource.clone(),
        name: name("reserved_for[].name", called)?,
        uid: name("reserved_for[].uid", &consumer.uid)?,
    })
}

fn claim(claim: &v1::Claim) -> Result<Claim, Problem> {
    bounded(
        "reserved_for",
        claim.reserved_for.len(),
        limit::RESERVED_FOR_MAX,
    )?;
    Ok(Claim {
        resource: None,
        id: object("inline_claims[].id", claim.id.as_ref())?,
        allocation: claim.allocation.as_ref().map(allocation).transpose()?,
        reserved_for: claim
            .reserved_for
            .iter()
            .map(consumer)
            .collect::<Result<_, _>>()?,
        annotations: claim.annotations.clone(),
        owner_pod: optional("owner_pod_uid", &claim.owner_pod_uid)?,
    })
}

fn allocation(allocation: &v1::Allocation) -> Result<Allocation, Problem> {
    Ok(Allocation {
        devices: allocation
            .devices
            .iter()
            .map(allocated)
            .collect::<Result<_, _>>()?,
        configs: allocation
            .configs
            .iter()
            .map(config)
            .collect::<Result<_, _>>()?,
        node_name: not_empty(&allocation.node_name),
    })
}

fn allocated(device: &v1::AllocatedDevice) -> Result<AllocatedDevice, Problem> {
    Ok(AllocatedDevice {
        request: device.request.clone(),
        driver: name("devices[].driver", &device.driver)?,
        pool: name("devices[].pool", &device.pool)?,
        device: name("devices[].device", &device.device)?,
        share_id: device.share_id.clone(),
        consumed: device.consumed_capacity.clone(),
        admin_access: device.admin_access,
        binding: Default::default(),
    })
}

fn config(config: &v1::OpaqueConfig) -> Result<OpaqueConfig, Problem> {
    Ok(OpaqueConfig {
        source: config.source.parse().map_err(|_| {
            invalid(format!(
                "configs[].source: {:?} is neither FromClass nor FromClaim",
                config.source
            ))
        })?,
        requests: config.requests.clone(),
        driver: name("configs[].driver", &config.driver)?,
        parameters: config.parameters.clone(),
    })
}

/// Selects a pod by UID, or by namespace and name if the UID is empty.
pub fn selector(pod: Option<&v1::ObjectRef>) -> Result<PodSelector, Problem> {
    let pod = pod.ok_or_else(|| missing("pod"))?;
    if !pod.uid.is_empty() {
        return name("pod.uid", &pod.uid).map(PodSelector::Uid);
    }
    Ok(PodSelector::Name(
        name("pod.namespace", &pod.namespace)?,
        name("pod.name", &pod.name)?,
    ))
}

fn claim_message(claim: &Claim) -> v1::Claim {
    v1::Claim {
        id: Some(object_message(&claim.id)),
        allocation: claim.allocation.as_ref().map(allocation_message),
        reserved_for: claim.reserved_for.iter().map(consumer_message).collect(),
        annotations: claim.annotations.clone(),
        owner_pod_uid: claim
            .owner_pod
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
    }
}

fn consumer_message(consumer: &Consumer) -> v1::Consumer {
    v1::Consumer {
        api_group: consumer.api_group.clone(),
        resource: consumer.resource.clone(),
        name: consumer.name.to_string(),
        uid: consumer.uid.to_string(),
    }
}

fn allocation_message(allocation: &Allocation) -> v1::Allocation {
    v1::Allocation {
        devices: allocation.devices.iter().map(device_message).collect(),
        configs: allocation.configs.iter().map(config_message).collect(),
        node_name: allocation.node_name.clone().unwrap_or_default(),
    }
}

fn config_message(config: &OpaqueConfig) -> v1::OpaqueConfig {
    v1::OpaqueConfig {
        source: config.source.to_string(),
        requests: config.requests.clone(),
        driver: config.driver.to_string(),
        parameters: config.parameters.clone(),
    }
}

fn device_message(device: &AllocatedDevice) -> v1::AllocatedDevice {
    v1::AllocatedDevice {
        request: device.request.clone(),
        driver: device.driver.to_string(),
        pool: device.pool.to_string(),
        device: device.device.to_string(),
        share_id: device.share_id.clone(),
        admin_access: device.admin_access,
        consumed_capacity: device.consumed.clone(),
    }
}

/// Returns the message of a pod's request, as the command line sends it.
pub fn pod_message(request: &PodRequest, inline: &[Claim]) -> v1::PreparePodRequest {
    v1::PreparePodRequest {
        pod: Some(object_message(&request.pod)),
        claims: request.claims.iter().map(reference_message).collect(),
        containers: request.containers.iter().map(container_message).collect(),
        inline_claims: inline.iter().map(claim_message).collect(),
        pod_group: request
            .pod_group
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
    }
}

fn container_message(container: &PodContainer) -> v1::Container {
    v1::Container {
        name: container.name.clone(),
        claims: container
            .claims
            .iter()
            .map(|claim| v1::ContainerClaim {
                pod_claim_name: claim.pod_claim_name.clone(),
                request: claim.request.clone().unwrap_or_default(),
            })
            .collect(),
        kind: container.kind.as_str().to_owned(),
        extended_resources: container
            .resources
            .iter()
            .map(|(name, count)| (name.to_string(), *count))
            .collect(),
        numa_affinity: container.numa_affinity.clone(),
    }
}

fn reference_message(claim: &ClaimReference) -> v1::ClaimReference {
    v1::ClaimReference {
        pod_claim_name: claim.pod_claim_name.clone(),
        claim_name: claim.claim_name.to_string(),
        claim_uid: claim
            .claim_uid
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
    }
}

/// The taints of a device: of its driver, then of the host, then of rules.
pub fn taints(own: &[Taint], added: &AddedTaints) -> Vec<v1::Taint> {
    let own = own.iter().map(|own| taint(own, "driver"));
    let host = added.host.iter().map(|host| taint(host, "nodedock"));
    own.chain(host)
        .chain(added.rules.iter().map(|of| v1::Taint {
            key: of.key.clone(),
            value: of.value.clone(),
            effect: of.effect.clone(),
            source: "rule".to_owned(),
            rule: of.rule.to_string(),
        }))
        .collect()
}

fn taint(taint: &Taint, source: &str) -> v1::Taint {
    v1::Taint {
        key: taint.key.clone(),
        value: taint.value.clone(),
        effect: taint.effect.as_str().to_owned(),
        source: source.to_owned(),
        rule: String::new(),
    }
}

pub fn object_message(object: &ObjectRef) -> v1::ObjectRef {
    v1::ObjectRef {
        namespace: object.namespace.to_string(),
        name: object.name.to_string(),
        uid: object.uid.to_string(),
    }
}

pub use nodedock_base::grpc::problem;

pub fn condition(condition: &Condition) -> v1::Condition {
    v1::Condition {
        subject: condition.subject.clone(),
        problem: Some(problem(&condition.problem)),
        since_ms: condition.since_ms,
    }
}

pub fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

pub fn prepared(outcome: &PodOutcome) -> v1::PreparePodResponse {
    v1::PreparePodResponse {
        pod: Some(object_message(&outcome.pod)),
        claims: outcome.claims.iter().map(claim_outcome).collect(),
        containers: outcome.containers.iter().map(container_devices).collect(),
        resources: outcome
            .resources
            .iter()
            .map(|resource| resources::outcome(resource, "allocated"))
            .collect(),
        cdi_directories: Vec::new(),
    }
}

fn claim_outcome(outcome: &ClaimOutcome) -> v1::ClaimOutcome {
    let (end, refused) = match &outcome.end {
        Ok(end) => (end.as_str(), None),
        Err(refused) => ("refused", Some(problem(refused))),
    };
    let id = v1::ObjectRef {
        namespace: outcome.namespace.to_string(),
        name: outcome.name.to_string(),
        uid: outcome
            .uid
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
    };
    v1::ClaimOutcome {
        id: Some(id),
        outcome: end.to_owned(),
        problem: refused,
    }
}

pub fn container_devices(container: &ContainerAnswer) -> v1::ContainerDevices {
    let allocation = &container.allocation;
    v1::ContainerDevices {
        name: container.name.clone(),
        cdi_devices: allocation.cdi_devices.clone(),
        env: allocation.env.clone(),
        mounts: allocation
            .mounts
            .iter()
            .map(|mount| v1::Mount {
                host_path: mount.host_path.clone(),
                container_path: mount.container_path.clone(),
                read_only: mount.read_only,
            })
            .collect(),
        device_nodes: allocation
            .device_nodes
            .iter()
            .map(|node| v1::DeviceNode {
                host_path: node.host_path.clone(),
                container_path: node.container_path.clone(),
                permissions: node.permissions.clone(),
            })
            .collect(),
        annotations: allocation.annotations.clone(),
        conflicts: container.conflicts.clone(),
    }
}

/// Merges the outcomes of all pods of the name into one answer; no pod is success.
pub fn unprepared(requested: &v1::ObjectRef, outcomes: &[PodOutcome]) -> v1::UnpreparePodResponse {
    let pod = outcomes
        .first()
        .map_or_else(|| requested.clone(), |outcome| object_message(&outcome.pod));
    let claims = outcomes
        .iter()
        .flat_map(|outcome| &outcome.claims)
        .map(claim_outcome)
        .collect();
    let resources = outcomes.iter().flat_map(|outcome| &outcome.resources);
    let resources = resources
        .map(|resource| resources::outcome(resource, "freed"))
        .collect();
    v1::UnpreparePodResponse {
        pod: Some(pod),
        claims,
        resources,
    }
}

/// Answers from the records of a pod that was prepared before.
pub fn known_pod(view: &PodView) -> v1::PreparePodResponse {
    v1::PreparePodResponse {
        pod: Some(object_message(&view.pod)),
        claims: view
            .claims
            .iter()
            .map(|claim| v1::ClaimOutcome {
                id: Some(object_message(&claim.id)),
                outcome: claim.state.as_str().to_owned(),
                problem: worst_problem(claim),
            })
            .collect(),
        containers: view.containers.iter().map(container_devices).collect(),
        resources: view.resources.iter().map(resources::held).collect(),
        cdi_directories: Vec::new(),
    }
}

pub fn pod_status(view: &PodView) -> v1::PodStatus {
    v1::PodStatus {
        pod: Some(object_message(&view.pod)),
        claims: view
            .claims
            .iter()
            .map(|claim| object_message(&claim.id))
            .collect(),
        containers: view.containers.iter().map(container_devices).collect(),
        state: view.state().as_str().to_owned(),
        resources: view.resources.iter().map(resources::held).collect(),
    }
}

pub fn driver(view: &DriverView, pools: &NodePools) -> v1::Driver {
    v1::Driver {
        name: view
            .name
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default(),
        kind: view.kind.as_str().to_owned(),
        source: view.source.clone(),
        version: view.version.clone(),
        state: view.state.as_str().to_owned(),
        reason: view.reason.clone(),
        digest: view.digest.clone(),
        devices: count(view.devices),
        summary: view.summary.clone(),
        timeline: view.timeline.iter().map(transition).collect(),
        missing_grants: view.missing_grants.clone(),
        parameters: view.parameters.clone().unwrap_or_default(),
        discovered_ms: view.discovered_ms.unwrap_or(0),
        problem: view.problem.as_ref().map(problem),
        native: view
            .native
            .as_ref()
            .map(|of| native(of, view.name.as_ref(), pools)),
        trust: view.trust.as_ref().map(trust),
    }
}

/// `driver`: of the devices, or the socket of a device plugin with this resource. `None`: nothing is left out.
pub fn left_out(driver: &str, resource: &str, left_out: &LeftOut) -> Option<v1::LeftOut> {
    let device = |device: &LeftOutDevice| v1::LeftOutDevice {
        name: device.name.clone(),
        reason: device.reason.clone(),
    };
    (left_out.count() > 0).then(|| v1::LeftOut {
        driver: driver.to_owned(),
        extended_resource: resource.to_owned(),
        count: count(left_out.count()),
        devices: left_out.devices().iter().map(device).collect(),
    })
}

pub fn trust(trust: &TrustView) -> v1::DriverTrust {
    v1::DriverTrust {
        mode: trust.mode.to_owned(),
        verdict: trust.verdict.to_owned(),
        key: trust.key.clone().unwrap_or_default(),
        pin: trust.pin.clone().unwrap_or_default(),
        reason: trust.reason.clone().unwrap_or_default(),
    }
}

fn native(native: &NativeView, driver: Option<&DriverName>, pools: &NodePools) -> v1::NativePlugin {
    let health = native
        .health
        .iter()
        .map(|((pool, device), health)| v1::DeviceHealth {
            pool: match driver {
                Some(driver) => pools.published(driver, pool).to_string(),
                None => pool.to_string(),
            },
            device: device.to_string(),
            health: health.state.as_str().to_owned(),
            message: health.message.clone(),
        });
    v1::NativePlugin {
        endpoint: native.endpoint.clone(),
        services: native.services.clone(),
        connection: native.connection.to_owned(),
        health: health.collect(),
    }
}

/// Returns attributes as a JSON object of plain values.
pub fn attributes_json<'a>(
    attributes: impl IntoIterator<Item = (&'a nodedock_model::QualifiedName, &'a AttributeValue)>,
) -> String {
    let object: serde_json::Map<String, serde_json::Value> = attributes
        .into_iter()
        .filter_map(|(name, value)| Some((name.to_string(), serde_json::to_value(value).ok()?)))
        .collect();
    serde_json::Value::Object(object).to_string()
}

#[cfg(test)]
mod tests;
