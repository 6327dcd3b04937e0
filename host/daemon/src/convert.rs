//! Between the node API's messages and the vocabulary. What comes in is checked here and nowhere behind.

use std::collections::BTreeSet;

use nodedock_proto::node::v1;

use nodedock_base::conditions::Condition;
use nodedock_core::manager::claims::{ClaimOutcome, PodSelector};
use nodedock_core::manager::{ContainerAnswer, PodOutcome, PodView};
use nodedock_core::registry::{DriverView, NativeView, TrustView};
use nodedock_model::{
    AllocatedDevice, Allocation, AllocationMount, AllocationNode, AttributeValue, Claim, ClaimRecord,
    ClaimReference, ConfigSource, Consumer, ContainerClaim, ContainerKind, DeviceName, DriverName, NameError,
    ObjectName, ObjectRef, OpaqueConfig, PodContainer, PodRequest, PoolName, Problem, Uid, is_dns_label,
    limit,
};

mod claims;
mod resources;
mod values;

pub use claims::{claim_status, refused_claim, release_outcome, release_request, released_claim};
use claims::{transition, worst_problem};
pub use resources::{capacity, cover_request, covered, hint_scope, hints, plugin_device, start_request};

fn wrong(field: &str, error: &NameError) -> Problem {
    Problem::invalid("bad-request", format!("{field}: {error}"))
}

fn missing(field: &str) -> Problem {
    Problem::invalid("bad-request", format!("{field} is missing"))
}

fn bounded<T>(field: &str, list: &[T], max: usize) -> Result<(), Problem> {
    if list.len() <= max {
        return Ok(());
    }
    Err(Problem::invalid(
        "bad-request",
        format!("{field} has {} entries, and {max} are the most", list.len()),
    ))
}

pub fn object(field: &str, object: Option<&v1::ObjectRef>) -> Result<ObjectRef, Problem> {
    let object = object.ok_or_else(|| missing(field))?;
    let part = |name: &str, error| wrong(&format!("{field}.{name}"), &error);
    Ok(ObjectRef {
        namespace: ObjectName::new(&object.namespace).map_err(|e| part("namespace", e))?,
        name: ObjectName::new(&object.name).map_err(|e| part("name", e))?,
        uid: Uid::new(&object.uid).map_err(|e| part("uid", e))?,
    })
}

/// Kubernetes' rule for the names of containers and of a pod's claims.
fn label(field: &str, name: &str) -> Result<String, Problem> {
    if is_dns_label(name) {
        return Ok(name.to_owned());
    }
    let shown: String = name.chars().take(SHOWN_CHARS_MAX).collect();
    Err(Problem::invalid("bad-request", format!("{field}: {shown:?} is no DNS label of at most 63 bytes")))
}

/// Characters of a bad name that an error repeats.
const SHOWN_CHARS_MAX: usize = 64;
/// A consumer of which a caller says the UID only.
const UNNAMED: &str = "unnamed";

fn unique<'a>(field: &str, names: impl IntoIterator<Item = &'a str>) -> Result<(), Problem> {
    let mut seen = BTreeSet::new();
    match names.into_iter().find(|name| !seen.insert(*name)) {
        None => Ok(()),
        Some(twice) => Err(Problem::invalid("bad-request", format!("{field}: {twice:?} is there twice"))),
    }
}

pub fn pod_request(request: &v1::PreparePodRequest) -> Result<(PodRequest, Vec<Claim>), Problem> {
    bounded("claims", &request.claims, limit::POD_CLAIMS_MAX)?;
    bounded("inline_claims", &request.inline_claims, limit::POD_CLAIMS_MAX)?;
    let pod = object("pod", request.pod.as_ref())?;
    let claims: Vec<_> = request.claims.iter().map(reference).collect::<Result<_, _>>()?;
    let containers = containers(&request.containers)?;
    unique("claims[].pod_claim_name", claims.iter().map(|claim| claim.pod_claim_name.as_str()))?;
    let names: BTreeSet<_> = claims.iter().map(|claim| claim.pod_claim_name.as_str()).collect();
    for container in &containers {
        let known = |claim: &ContainerClaim| names.contains(claim.pod_claim_name.as_str());
        if let Some(unknown) = container.claims.iter().find(|claim| !known(claim)) {
            let message = format!(
                "container {:?} uses claim {:?}, which the pod does not have",
                container.name, unknown.pod_claim_name
            );
            return Err(Problem::invalid("bad-request", message));
        }
    }
    let inline = request.inline_claims.iter().map(claim).collect::<Result<_, _>>()?;
    Ok((PodRequest { pod, claims, containers }, inline))
}

/// A pod of which nothing but its extended resources matters.
pub fn resources_request(request: &v1::GetTopologyHintsRequest) -> Result<PodRequest, Problem> {
    let pod = object("pod", request.pod.as_ref())?;
    let mut containers = containers(&request.containers)?;
    containers.iter_mut().for_each(|container| container.claims.clear());
    Ok(PodRequest { pod, claims: Vec::new(), containers })
}

fn containers(containers: &[v1::Container]) -> Result<Vec<PodContainer>, Problem> {
    bounded("containers", containers, limit::POD_CONTAINERS_MAX)?;
    let containers: Vec<_> = containers.iter().map(container).collect::<Result<_, _>>()?;
    unique("containers[].name", containers.iter().map(|container| container.name.as_str()))?;
    Ok(containers)
}

fn reference(reference: &v1::ClaimReference) -> Result<ClaimReference, Problem> {
    let uid = Some(&reference.claim_uid).filter(|uid| !uid.is_empty());
    Ok(ClaimReference {
        pod_claim_name: label("claims[].pod_claim_name", &reference.pod_claim_name)?,
        claim_name: ObjectName::new(&reference.claim_name).map_err(|e| wrong("claims[].claim_name", &e))?,
        claim_uid: uid.map(Uid::new).transpose().map_err(|e| wrong("claims[].claim_uid", &e))?,
    })
}

fn container(container: &v1::Container) -> Result<PodContainer, Problem> {
    bounded("containers[].claims", &container.claims, limit::CONTAINER_CLAIMS_MAX)?;
    let claim = |claim: &v1::ContainerClaim| ContainerClaim {
        pod_claim_name: claim.pod_claim_name.clone(),
        request: Some(claim.request.clone()).filter(|request| !request.is_empty()),
    };
    Ok(PodContainer {
        name: label("containers[].name", &container.name)?,
        claims: container.claims.iter().map(claim).collect(),
        kind: container_kind(&container.kind)?,
        resources: resources::limits(&container.name, &container.extended_resources)?,
        numa_affinity: resources::numa_nodes(&container.name, &container.numa_affinity)?,
    })
}

fn container_kind(kind: &str) -> Result<ContainerKind, Problem> {
    let kinds = [ContainerKind::App, ContainerKind::Init, ContainerKind::Sidecar];
    match kind {
        "" => Ok(ContainerKind::App),
        _ => kinds.into_iter().find(|known| known.as_str() == kind).ok_or_else(|| {
            let shown: String = kind.chars().take(SHOWN_CHARS_MAX).collect();
            let message = format!("containers[].kind: {shown:?} is none of app, init and sidecar");
            Problem::invalid("bad-request", message)
        }),
    }
}

/// The UID says who it is; callers may leave out the rest.
fn consumer(consumer: &v1::Consumer) -> Result<Consumer, Problem> {
    let name = if consumer.name.is_empty() { UNNAMED } else { &consumer.name };
    Ok(Consumer {
        api_group: consumer.api_group.clone(),
        resource: consumer.resource.clone(),
        name: ObjectName::new(name).map_err(|e| wrong("reserved_for[].name", &e))?,
        uid: Uid::new(&consumer.uid).map_err(|e| wrong("reserved_for[].uid", &e))?,
    })
}

fn claim(claim: &v1::Claim) -> Result<Claim, Problem> {
    let id = object("inline_claims[].id", claim.id.as_ref())?;
    let owner = Some(&claim.owner_pod_uid).filter(|uid| !uid.is_empty());
    bounded("reserved_for", &claim.reserved_for, limit::RESERVED_FOR_MAX)?;
    Ok(Claim {
        id,
        allocation: claim.allocation.as_ref().map(allocation).transpose()?,
        reserved_for: claim.reserved_for.iter().map(consumer).collect::<Result<_, _>>()?,
        annotations: claim.annotations.clone(),
        owner_pod: owner.map(Uid::new).transpose().map_err(|e| wrong("owner_pod_uid", &e))?,
    })
}

fn allocation(allocation: &v1::Allocation) -> Result<Allocation, Problem> {
    Ok(Allocation {
        devices: allocation.devices.iter().map(allocated).collect::<Result<_, _>>()?,
        configs: allocation.configs.iter().map(config).collect::<Result<_, _>>()?,
        node_name: Some(allocation.node_name.clone()).filter(|name| !name.is_empty()),
    })
}

fn allocated(device: &v1::AllocatedDevice) -> Result<AllocatedDevice, Problem> {
    Ok(AllocatedDevice {
        request: device.request.clone(),
        driver: DriverName::new(&device.driver).map_err(|e| wrong("devices[].driver", &e))?,
        pool: PoolName::new(&device.pool).map_err(|e| wrong("devices[].pool", &e))?,
        device: DeviceName::new(&device.device).map_err(|e| wrong("devices[].device", &e))?,
        share_id: device.share_id.clone(),
        consumed: device.consumed_capacity.clone(),
        admin_access: device.admin_access,
    })
}

fn config(config: &v1::OpaqueConfig) -> Result<OpaqueConfig, Problem> {
    let source = match config.source.as_str() {
        "FromClass" => ConfigSource::DeviceClass,
        "FromClaim" => ConfigSource::Claim,
        other => {
            let message = format!("configs[].source: {other:?} is neither FromClass nor FromClaim");
            return Err(Problem::invalid("bad-request", message));
        }
    };
    Ok(OpaqueConfig {
        source,
        requests: config.requests.clone(),
        driver: DriverName::new(&config.driver).map_err(|e| wrong("configs[].driver", &e))?,
        parameters: config.parameters.clone(),
    })
}

/// By UID where there is one, else by namespace and name.
pub fn selector(pod: Option<&v1::ObjectRef>) -> Result<PodSelector, Problem> {
    let pod = pod.ok_or_else(|| missing("pod"))?;
    if !pod.uid.is_empty() {
        return Uid::new(&pod.uid).map(PodSelector::Uid).map_err(|e| wrong("pod.uid", &e));
    }
    let namespace = ObjectName::new(&pod.namespace).map_err(|e| wrong("pod.namespace", &e))?;
    let name = ObjectName::new(&pod.name).map_err(|e| wrong("pod.name", &e))?;
    Ok(PodSelector::Name(namespace, name))
}

/// A claim for a request: what the command line sends of a manifest.
pub fn claim_message(claim: &Claim) -> v1::Claim {
    v1::Claim {
        id: Some(object_message(&claim.id)),
        allocation: claim.allocation.as_ref().map(allocation_message),
        reserved_for: claim.reserved_for.iter().map(consumer_message).collect(),
        annotations: claim.annotations.clone(),
        owner_pod_uid: claim.owner_pod.as_ref().map(ToString::to_string).unwrap_or_default(),
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
    let device = |device: &AllocatedDevice| v1::AllocatedDevice {
        request: device.request.clone(),
        driver: device.driver.to_string(),
        pool: device.pool.to_string(),
        device: device.device.to_string(),
        share_id: device.share_id.clone(),
        admin_access: device.admin_access,
        consumed_capacity: device.consumed.clone(),
    };
    let config = |config: &OpaqueConfig| v1::OpaqueConfig {
        source: match config.source {
            ConfigSource::DeviceClass => "FromClass".to_owned(),
            ConfigSource::Claim => "FromClaim".to_owned(),
        },
        requests: config.requests.clone(),
        driver: config.driver.to_string(),
        parameters: config.parameters.clone(),
    };
    v1::Allocation {
        devices: allocation.devices.iter().map(device).collect(),
        configs: allocation.configs.iter().map(config).collect(),
        node_name: allocation.node_name.clone().unwrap_or_default(),
    }
}

/// A pod's request as a message.
pub fn pod_message(request: &PodRequest, inline: &[Claim]) -> v1::PreparePodRequest {
    let reference = |claim: &ClaimReference| v1::ClaimReference {
        pod_claim_name: claim.pod_claim_name.clone(),
        claim_name: claim.claim_name.to_string(),
        claim_uid: claim.claim_uid.as_ref().map(ToString::to_string).unwrap_or_default(),
    };
    let container_claim = |claim: &ContainerClaim| v1::ContainerClaim {
        pod_claim_name: claim.pod_claim_name.clone(),
        request: claim.request.clone().unwrap_or_default(),
    };
    let container = |container: &PodContainer| v1::Container {
        name: container.name.clone(),
        claims: container.claims.iter().map(container_claim).collect(),
        kind: container.kind.as_str().to_owned(),
        extended_resources: container
            .resources
            .iter()
            .map(|(name, count)| (name.to_string(), *count))
            .collect(),
        numa_affinity: container.numa_affinity.clone(),
    };
    v1::PreparePodRequest {
        pod: Some(object_message(&request.pod)),
        claims: request.claims.iter().map(reference).collect(),
        containers: request.containers.iter().map(container).collect(),
        inline_claims: inline.iter().map(claim_message).collect(),
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
        uid: outcome.uid.as_ref().map(ToString::to_string).unwrap_or_default(),
    };
    v1::ClaimOutcome { id: Some(id), outcome: end.to_owned(), problem: refused }
}

pub fn container_devices(container: &ContainerAnswer) -> v1::ContainerDevices {
    let allocation = &container.allocation;
    let mount = |mount: &AllocationMount| v1::Mount {
        host_path: mount.host_path.clone(),
        container_path: mount.container_path.clone(),
        read_only: mount.read_only,
    };
    let node = |node: &AllocationNode| v1::DeviceNode {
        host_path: node.host_path.clone(),
        container_path: node.container_path.clone(),
        permissions: node.permissions.clone(),
    };
    v1::ContainerDevices {
        name: container.name.clone(),
        cdi_devices: allocation.cdi_devices.clone(),
        env: allocation.env.clone(),
        mounts: allocation.mounts.iter().map(mount).collect(),
        device_nodes: allocation.device_nodes.iter().map(node).collect(),
        annotations: allocation.annotations.clone(),
        conflicts: container.conflicts.clone(),
    }
}

/// One answer for however many pods of the name there were; none is success.
pub fn unprepared(asked: &v1::ObjectRef, outcomes: &[PodOutcome]) -> v1::UnpreparePodResponse {
    let pod = outcomes.first().map_or_else(|| asked.clone(), |outcome| object_message(&outcome.pod));
    let claims = outcomes.iter().flat_map(|outcome| &outcome.claims).map(claim_outcome).collect();
    let resources = outcomes.iter().flat_map(|outcome| &outcome.resources);
    let resources = resources.map(|resource| resources::outcome(resource, "freed")).collect();
    v1::UnpreparePodResponse { pod: Some(pod), claims, resources }
}

pub fn known_pod(view: &PodView) -> v1::PreparePodResponse {
    let outcome = |claim: &ClaimRecord| v1::ClaimOutcome {
        id: Some(object_message(&claim.id)),
        outcome: claim.state.as_str().to_owned(),
        problem: worst_problem(claim),
    };
    v1::PreparePodResponse {
        pod: Some(object_message(&view.pod)),
        claims: view.claims.iter().map(|claim| outcome(claim)).collect(),
        containers: view.containers.iter().map(container_devices).collect(),
        resources: view.resources.iter().map(resources::held).collect(),
    }
}

pub fn pod_status(view: &PodView) -> v1::PodStatus {
    v1::PodStatus {
        pod: Some(object_message(&view.pod)),
        claims: view.claims.iter().map(|claim| object_message(&claim.id)).collect(),
        containers: view.containers.iter().map(container_devices).collect(),
        state: view.state().as_str().to_owned(),
        resources: view.resources.iter().map(resources::held).collect(),
    }
}

pub fn driver(view: &DriverView) -> v1::Driver {
    v1::Driver {
        name: view.name.as_ref().map(ToString::to_string).unwrap_or_default(),
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
        discovered_ms: view.discovered_ms.unwrap_or(0),
        problem: view.problem.as_ref().map(problem),
        native: view.native.as_ref().map(native),
        trust: view.trust.as_ref().map(trust),
    }
}

fn trust(trust: &TrustView) -> v1::DriverTrust {
    v1::DriverTrust {
        mode: trust.mode.to_owned(),
        verdict: trust.verdict.to_owned(),
        key: trust.key.clone().unwrap_or_default(),
        pin: trust.pin.clone().unwrap_or_default(),
        reason: trust.reason.clone().unwrap_or_default(),
    }
}

fn native(native: &NativeView) -> v1::NativePlugin {
    let health = native.health.iter().map(|((pool, device), health)| v1::DeviceHealth {
        pool: pool.to_string(),
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

/// Attributes as a JSON object of plain values.
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
