//! Pool claims: claims that the manager makes for extended resources of a driver's pool. Pure.
//!
//! An entry of an allocation whose devices are of a pool names such a claim, and the claim holds them. In the pod's record it is known
//! as `RESOURCE/CLAIM`, which no claim of the pod's own can be called: those names are DNS labels. So its purpose is known as long as
//! the pod is.

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::manager::devices::ResourceOutcome;
use nodedock_model::{
    AllocatedDevice, Allocation, AllocationEntry, Claim, ClaimReference, Consumer, ContainerClaim,
    DeviceName, DriverName, ExtendedResource, NameError, ObjectName, ObjectRef, PodAllocation, PodRecord,
    PodRequest, PoolName, PooledClaim, Problem, ProblemCode, Uid,
};

/// The request of a pool claim.
const REQUEST: &str = "extended-resource";
/// Bytes of the pod's name that a claim's name keeps: with the rest it stays a DNS label.
const POD_NAME_BYTES_MAX: usize = 40;
/// Digits of the hash in a claim's name.
const HASH_DIGITS: usize = 16;

/// Names the pool claim for a resource of a container: always the same name and UID.
pub(crate) fn name_claim(
    pod: &ObjectRef,
    container: &str,
    resource: &ExtendedResource,
    driver: &DriverName,
) -> Result<PooledClaim, Problem> {
    let of = format!("{}/{container}/{resource}", pod.uid);
    let digits = hex::encode(Sha256::digest(&of));
    let name = format!("{}-{}", label(pod.name.as_str()), &digits[..HASH_DIGITS]);
    let uid = Uuid::new_v5(&Uuid::NAMESPACE_OID, of.as_bytes()).to_string();
    let id = || -> Result<ObjectRef, NameError> {
        let (name, uid) = (ObjectName::new(&name)?, Uid::new(&uid)?);
        Ok(ObjectRef { namespace: pod.namespace.clone(), name, uid })
    };
    let id = id().map_err(|error| Problem::internal(ProblemCode::ClaimName, error.to_string()))?;
    Ok(PooledClaim { driver: driver.clone(), id })
}

/// The beginning of a pod's name as the beginning of a DNS label.
fn label(name: &str) -> String {
    let cut: String = name.chars().take(POD_NAME_BYTES_MAX).map(|c| if c == '.' { '-' } else { c }).collect();
    cut.trim_end_matches('-').to_owned()
}

/// The pool claim of an entry. None: the devices are a plugin's.
pub(crate) fn claim_of(entry: &AllocationEntry, pod: &ObjectRef) -> Option<Result<Claim, Problem>> {
    let claim = entry.claim.as_ref()?;
    let devices = entry.devices.keys().map(|id| allocated(claim, id)).collect::<Result<_, _>>();
    Some(devices.map(|devices| Claim {
        id: claim.id.clone(),
        allocation: Some(Allocation { devices, ..Allocation::default() }),
        reserved_for: vec![Consumer::of_pod(pod)],
        annotations: BTreeMap::new(),
        owner_pod: Some(pod.uid.clone()),
    }))
}

fn allocated(claim: &PooledClaim, id: &str) -> Result<AllocatedDevice, Problem> {
    let wrong =
        || Problem::internal(ProblemCode::DeviceId, format!("{id:?} is not POOL/DEVICE of {}", claim.driver));
    let (pool, device) = split_id(id).ok_or_else(wrong)?;
    Ok(AllocatedDevice {
        request: REQUEST.to_owned(),
        driver: claim.driver.clone(),
        pool,
        device,
        share_id: None,
        consumed: BTreeMap::new(),
        admin_access: false,
        binding: Default::default(),
    })
}

pub(crate) fn device_id(pool: &PoolName, device: &DeviceName) -> String {
    format!("{pool}/{device}")
}

/// The pool and the device of an id: a pool's name may have slashes, a device's has none.
pub(crate) fn split_id(id: &str) -> Option<(PoolName, DeviceName)> {
    let (pool, device) = id.rsplit_once('/')?;
    Some((PoolName::new(pool).ok()?, DeviceName::new(device).ok()?))
}

/// A container that has devices by a pool claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct User {
    pub(super) container: String,
    pub(super) resource: ExtendedResource,
    pub(super) claim: ObjectRef,
}

impl User {
    /// The pod's name for the claim.
    fn pod_claim_name(&self) -> String {
        format!("{}/{}", self.resource, self.claim.name)
    }
}

/// The pool claims of a pod's request.
#[derive(Debug, Default)]
pub(super) struct PoolClaims {
    users: Vec<User>,
    /// Each once, in the order of their references: containers of which one reuses the other's devices share a claim.
    claims: Vec<Claim>,
}

impl PoolClaims {
    /// The claims for the resources that were allocated. If an entry makes no valid claim, all of them are refused.
    pub(super) fn new(allocation: &PodAllocation, resources: &mut [ResourceOutcome]) -> Self {
        let is_allocated = |entry: &&AllocationEntry| {
            let mut allocated = resources.iter().filter(|outcome| outcome.end.is_ok());
            allocated.any(|o| o.container == entry.container && o.resource == entry.resource)
        };
        let entries: Vec<_> = allocation.entries.iter().filter(is_allocated).collect();
        let user = |entry: &&AllocationEntry| {
            let (container, resource) = (entry.container.clone(), entry.resource.clone());
            Some(User { container, resource, claim: entry.claim.as_ref()?.id.clone() })
        };
        let users: Vec<_> = entries.iter().filter_map(user).collect();
        let claims = entries.iter().filter_map(|entry| claim_of(entry, &allocation.pod));
        let claims = claims.map(|claim| claim.map(|claim| (claim.id.uid.clone(), claim)));
        match claims.collect::<Result<BTreeMap<_, _>, _>>() {
            Ok(claims) => Self { users, claims: claims.into_values().collect() },
            Err(problem) => {
                let refused = Self { users, claims: Vec::new() };
                for user in &refused.users {
                    refused.set(&user.claim.uid, &Err(problem.clone()), resources);
                }
                Self::default()
            }
        }
    }

    /// The pod's request with the claims, each named in the containers that have its devices.
    pub(super) fn request(&self, request: &PodRequest) -> PodRequest {
        let mut whole = request.clone();
        whole.claims.extend(self.claims.iter().filter_map(|claim| {
            Some(ClaimReference {
                pod_claim_name: self.user(&claim.id.uid)?.pod_claim_name(),
                claim_name: claim.id.name.clone(),
                claim_uid: Some(claim.id.uid.clone()),
            })
        }));
        for user in &self.users {
            for container in whole.containers.iter_mut().filter(|c| c.name == user.container) {
                let claim = ContainerClaim { pod_claim_name: user.pod_claim_name(), request: None };
                container.claims.push(claim);
            }
        }
        whole
    }

    /// The claims themselves, after those that came with the request: of two with one name the later counts.
    pub(super) fn inline(&self, inline: &[Claim]) -> Vec<Claim> {
        inline.iter().chain(&self.claims).cloned().collect()
    }

    /// The first container, in the pod's order, that has devices by a claim.
    pub(super) fn user(&self, claim: &Uid) -> Option<&User> {
        self.users.iter().find(|user| user.claim.uid == *claim)
    }

    /// Sets the outcome of each resource that a claim holds devices for.
    pub(super) fn set(
        &self,
        claim: &Uid,
        end: &Result<BTreeMap<String, Vec<u32>>, Problem>,
        resources: &mut [ResourceOutcome],
    ) {
        for user in self.users.iter().filter(|user| user.claim.uid == *claim) {
            let is_of =
                |o: &&mut ResourceOutcome| o.container == user.container && o.resource == user.resource;
            resources.iter_mut().filter(is_of).for_each(|outcome| outcome.end = end.clone());
        }
    }
}

/// The resource of a pool claim. None: the claim is the pod's own.
fn resource(pod_claim_name: &str) -> Option<ExtendedResource> {
    let (resource, _) = pod_claim_name.rsplit_once('/')?;
    ExtendedResource::new(resource).ok()
}

/// Containers of a pod that have devices by pool claims, by the pod's record.
pub(super) fn users(record: &PodRecord) -> Vec<User> {
    let used = record.containers.iter().flat_map(|c| c.claims.iter().map(move |claim| (c, claim)));
    let user = |(container, claim): (&nodedock_model::PodContainer, &ContainerClaim)| {
        let resource = resource(&claim.pod_claim_name)?;
        let claim = record.claims.get(&claim.pod_claim_name)?.clone();
        Some(User { container: container.name.clone(), resource, claim })
    };
    used.filter_map(user).collect()
}

/// Resources for which pods have pool claims, by the pods' records.
pub(crate) fn resources<'a>(records: impl Iterator<Item = &'a PodRecord>) -> BTreeSet<ExtendedResource> {
    records.flat_map(|record| record.claims.keys()).filter_map(|name| resource(name)).collect()
}

/// The pool claims of a pod.
pub(super) fn claims(record: &PodRecord) -> BTreeSet<Uid> {
    let ours = record.claims.iter().filter(|(name, _)| resource(name).is_some());
    ours.map(|(_, claim)| claim.uid.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_model::{AllocationEntry, ContainerKind, PodContainer, PooledClaim};

    const GPU: &str = "example.com/gpu";

    fn pod() -> ObjectRef {
        ObjectRef::new("default", "a", "uid-a").unwrap()
    }

    /// What a container has of a pool by the claim `c`.
    fn entry(container: &str, device: &str) -> AllocationEntry {
        let claim = ObjectRef::new("default", "c", "uid-c").unwrap();
        AllocationEntry {
            container: container.to_owned(),
            kind: ContainerKind::App,
            resource: ExtendedResource::new(GPU).unwrap(),
            devices: [(device.to_owned(), Vec::new())].into(),
            claim: Some(PooledClaim { driver: "d.dev".parse().unwrap(), id: claim }),
            response: None,
            pre_start: false,
            unknown: BTreeMap::new(),
        }
    }

    fn allocation(entries: Vec<AllocationEntry>) -> PodAllocation {
        PodAllocation { pod: pod(), entries, since_ms: 0, unknown: BTreeMap::new() }
    }

    fn allocated(allocation: &PodAllocation) -> Vec<ResourceOutcome> {
        let outcome = |entry: &AllocationEntry| ResourceOutcome {
            container: entry.container.clone(),
            resource: entry.resource.clone(),
            end: Ok(entry.devices.clone()),
        };
        allocation.entries.iter().map(outcome).collect()
    }

    fn request(containers: &[&str]) -> PodRequest {
        let container = |name: &&str| PodContainer { name: (*name).to_owned(), ..PodContainer::default() };
        let containers = containers.iter().map(container).collect();
        PodRequest { pod: pod(), pod_group: None, claims: vec![], containers }
    }

    #[test]
    fn containers_that_use_a_device_one_after_the_other_share_its_claim() {
        let allocation = allocation(vec![entry("init", "pool/0"), entry("main", "pool/0")]);
        let mut resources = allocated(&allocation);
        let pooled = PoolClaims::new(&allocation, &mut resources);
        let whole = pooled.request(&request(&["init", "main", "plain"]));
        let [reference] = whole.claims.as_slice() else { panic!("{whole:#?}") };
        assert_eq!(
            (reference.pod_claim_name.as_str(), reference.claim_name.as_str()),
            ("example.com/gpu/c", "c")
        );
        let used: Vec<_> = whole.containers.iter().map(|container| container.claims.len()).collect();
        assert_eq!(used, [1, 1, 0]);
        assert_eq!(pooled.inline(&[]).len(), 1);

        let problem = Problem::conflict("device-held", "another claim has it");
        pooled.set(&"uid-c".parse().unwrap(), &Err(problem), &mut resources);
        assert!(resources.iter().all(|resource| resource.end.is_err()), "both lose it: {resources:?}");
    }

    #[test]
    fn what_was_not_allocated_to_this_request_makes_no_claim() {
        let allocation = allocation(vec![entry("other", "pool/0")]);
        let pooled = PoolClaims::new(&allocation, &mut []);
        assert!(pooled.inline(&[]).is_empty());
        assert_eq!(pooled.request(&request(&["main"])), request(&["main"]));
    }

    #[test]
    fn a_device_that_can_be_no_claim_is_refused() {
        let allocation = allocation(vec![entry("main", "no-pool")]);
        let mut resources = allocated(&allocation);
        assert!(PoolClaims::new(&allocation, &mut resources).inline(&[]).is_empty());
        assert_eq!(resources[0].end.as_ref().unwrap_err().code, "device-id");
    }

    #[test]
    fn a_pods_record_tells_claims_of_pools_from_its_own() {
        let claim = |name: &str| ObjectRef::new("default", name, &format!("uid-{name}")).unwrap();
        let mut containers = request(&["main"]).containers;
        containers[0].claims = ["own", "example.com/gpu/c"]
            .map(|name| ContainerClaim { pod_claim_name: name.to_owned(), request: None })
            .to_vec();
        let record = PodRecord {
            pod: pod(),
            claims: [("own".to_owned(), claim("own")), ("example.com/gpu/c".to_owned(), claim("c"))].into(),
            containers,
            unknown: BTreeMap::new(),
        };
        assert_eq!(claims(&record), BTreeSet::from([claim("c").uid]));
        let resource = ExtendedResource::new(GPU).unwrap();
        assert_eq!(resources(std::iter::once(&record)), BTreeSet::from([resource.clone()]));
        assert_eq!(users(&record), [User { container: "main".to_owned(), resource, claim: claim("c") }]);
    }
}
