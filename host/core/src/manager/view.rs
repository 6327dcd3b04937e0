//! What a pod holds, of claims and extended resources together. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use strum::IntoStaticStr;

use super::answer::{self, ContainerAnswer};
use super::pool_claims::{self, User};
use crate::manager::claims::ClaimOutcome;
use crate::manager::claims::table::ClaimTable;
use crate::manager::devices::ResourceOutcome;
use nodedock_model::{
    AllocationEntry, ClaimRecord, ClaimState, ContainerKind, DriverName, ExtendedResource, ObjectRef,
    PodAllocation, PodRecord, Problem, ProblemCode, Uid,
};

/// A pod and what it holds.
#[derive(Debug)]
pub struct PodView {
    pub pod: ObjectRef,
    /// The pod's own claims; pool claims are among its resources.
    pub claims: Vec<Arc<ClaimRecord>>,
    /// In the order of the containers.
    pub resources: Vec<PodResource>,
    pub containers: Vec<ContainerAnswer>,
    /// None: the pod has, or had, no claims.
    pub record: Option<Arc<PodRecord>>,
    pool_claims: Vec<Arc<ClaimRecord>>,
}

/// What a container has of a resource.
#[derive(Debug, Clone, PartialEq)]
pub struct PodResource {
    pub container: String,
    pub kind: ContainerKind,
    pub resource: ExtendedResource,
    /// Device to its NUMA nodes.
    pub devices: BTreeMap<String, Vec<u32>>,
    pub state: ResourceState,
    /// The pool claim. None: a device plugin gave the devices.
    pub claim: Option<Uid>,
    /// The driver of the pool.
    pub driver: Option<DriverName>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "kebab-case")]
pub enum ResourceState {
    /// Its plugin or driver was called and has not answered.
    Allocating,
    Allocated,
    /// Its claim is being unprepared.
    Freeing,
}

impl ResourceState {
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    fn of_claim(claim: Option<&Arc<ClaimRecord>>) -> Self {
        match claim.map(|claim| claim.state) {
            Some(ClaimState::Prepared) => Self::Allocated,
            Some(ClaimState::Unpreparing) => Self::Freeing,
            Some(ClaimState::Preparing) | None => Self::Allocating,
        }
    }
}

impl PodView {
    /// The view of a pod by its UID. None: the pod holds nothing.
    pub fn new(table: &ClaimTable, uid: &str, allocation: Option<Arc<PodAllocation>>) -> Option<Self> {
        let (record, allocation) = (table.pod(uid).cloned(), allocation.as_deref());
        let pod = record.as_ref().map(|record| &record.pod).or(allocation.map(|a| &a.pod))?.clone();
        let claims = if record.is_some() { table.claims_of_pod(uid) } else { Vec::new() };
        let pool_uids = pool_claims_of(record.as_deref(), allocation);
        let (pool_claims, claims): (Vec<_>, Vec<_>) =
            claims.into_iter().partition(|claim| pool_uids.contains(&claim.id.uid));
        let resources = resources(record.as_deref(), allocation, &pool_claims);
        let containers = match &record {
            Some(record) => answer::of_record(record, |uid| table.claim(uid).cloned(), allocation),
            None => answer::of_names(names(allocation), allocation),
        };
        Some(Self { pod, claims, resources, containers, record, pool_claims })
    }

    /// A pod of which only its claims are known.
    pub(super) fn without_record(pod: ObjectRef) -> Self {
        let (claims, resources, containers, pool_claims) = Default::default();
        Self { pod, claims, resources, containers, record: None, pool_claims }
    }

    fn all_claims(&self) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        self.claims.iter().chain(&self.pool_claims)
    }

    /// The least settled state of its claims and resources.
    pub fn state(&self) -> ClaimState {
        let any_claim = |state: ClaimState| self.all_claims().any(|claim| claim.state == state);
        let is_open = self.resources.iter().any(|resource| resource.state == ResourceState::Allocating);
        if any_claim(ClaimState::Unpreparing) {
            ClaimState::Unpreparing
        } else if is_open || any_claim(ClaimState::Preparing) {
            ClaimState::Preparing
        } else {
            ClaimState::Prepared
        }
    }

    /// The containers as far as they are known, in the order in which they start.
    pub fn kinds(&self) -> Vec<(&str, ContainerKind)> {
        match &self.record {
            Some(record) => record.containers.iter().map(|c| (c.name.as_str(), c.kind)).collect(),
            None => {
                let mut kinds: Vec<_> =
                    self.resources.iter().map(|r| (r.container.as_str(), r.kind)).collect();
                kinds.dedup();
                kinds
            }
        }
    }

    /// The pod's own claims that a container uses, each once.
    pub fn claims_of(&self, container: &str) -> Vec<&Arc<ClaimRecord>> {
        let Some(record) = &self.record else { return Vec::new() };
        let containers = record.containers.iter().filter(|known| known.name == container);
        let names = containers.flat_map(|known| &known.claims).map(|claim| &claim.pod_claim_name);
        let used: BTreeSet<_> = names.filter_map(|name| Some(&record.claims.get(name)?.uid)).collect();
        self.claims.iter().filter(|claim| used.contains(&claim.id.uid)).collect()
    }

    pub(super) fn has_plugin_devices(&self, container: &str) -> bool {
        self.resources.iter().any(|resource| resource.container == container && resource.claim.is_none())
    }

    /// The answer for a container that may start now.
    pub(super) fn startable(&self, container: &str, boot_id: &str) -> Result<ContainerAnswer, Problem> {
        let answer = self.containers.iter().find(|answer| answer.name == container);
        if answer.is_none() && self.record.is_some() {
            let message = format!("pod {} has no container {container:?}", self.pod);
            return Err(Problem::not_found(ProblemCode::NoSuchContainer, message));
        }
        let is_ready =
            |claim: &Arc<ClaimRecord>| claim.state == ClaimState::Prepared && claim.boot_id == boot_id;
        let claim = self.all_claims().find(|claim| !is_ready(claim));
        let resource = self.resources.iter().find(|resource| resource.state != ResourceState::Allocated);
        let open = claim.map(|claim| format!("claim {}", claim.id));
        let open = open.or(resource.map(|open| format!("{} of container {}", open.resource, open.container)));
        if let Some(open) = open {
            let message = format!("pod {} is not prepared ({open}): prepare it first", self.pod);
            return Err(Problem::unavailable(ProblemCode::PodNotPrepared, message));
        }
        // A container that nothing is known of has no devices.
        Ok(answer.cloned().unwrap_or_else(|| ContainerAnswer::named(container)))
    }

    /// The outcomes of an unprepare: of the pod's own claims, and of its resources.
    pub(super) fn unprepared(
        &self,
        claims: Vec<ClaimOutcome>,
        freed: &Result<(), Problem>,
    ) -> (Vec<ClaimOutcome>, Vec<ResourceOutcome>) {
        let is_pool_claim = |outcome: &ClaimOutcome| {
            self.pool_claims.iter().any(|claim| Some(&claim.id.uid) == outcome.uid.as_ref())
        };
        let (of_pools, own): (Vec<_>, Vec<_>) = claims.into_iter().partition(is_pool_claim);
        let outcome = |resource: &PodResource| {
            let of_claim = of_pools.iter().find(|o| resource.claim.is_some() && o.uid == resource.claim);
            let end = of_claim.map_or(Ok(()), |outcome| outcome.end.clone().map(drop)).and(freed.clone());
            ResourceOutcome {
                container: resource.container.clone(),
                resource: resource.resource.clone(),
                end: end.map(|()| resource.devices.clone()),
            }
        };
        let resources = self.resources.iter().map(outcome).collect();
        (own, resources)
    }
}

/// The pool claims of a pod. When the pod is being unprepared, only its record names them.
fn pool_claims_of(record: Option<&PodRecord>, allocation: Option<&PodAllocation>) -> BTreeSet<Uid> {
    let entries = allocation.into_iter().flat_map(|allocation| &allocation.entries);
    let mut uids: BTreeSet<_> =
        entries.filter_map(|entry| Some(entry.claim.as_ref()?.id.uid.clone())).collect();
    uids.extend(record.into_iter().flat_map(pool_claims::claims));
    uids
}

/// The containers that have devices.
fn names(allocation: Option<&PodAllocation>) -> Vec<&str> {
    let entries = allocation.into_iter().flat_map(|allocation| &allocation.entries);
    let mut names: Vec<_> = entries.map(|entry| entry.container.as_str()).collect();
    names.dedup();
    names
}

fn resources(
    record: Option<&PodRecord>,
    allocation: Option<&PodAllocation>,
    pool_claims: &[Arc<ClaimRecord>],
) -> Vec<PodResource> {
    let find = |uid: &Uid| pool_claims.iter().find(|claim| claim.id.uid == *uid);
    let entry = |entry: &AllocationEntry| PodResource {
        container: entry.container.clone(),
        kind: entry.kind,
        resource: entry.resource.clone(),
        devices: entry.devices.clone(),
        state: match (&entry.claim, &entry.response) {
            (Some(claim), _) => ResourceState::of_claim(find(&claim.id.uid)),
            (None, Some(_)) => ResourceState::Allocated,
            (None, None) => ResourceState::Allocating,
        },
        claim: entry.claim.as_ref().map(|claim| claim.id.uid.clone()),
        driver: entry.claim.as_ref().map(|claim| claim.driver.clone()),
    };
    let entries = allocation.into_iter().flat_map(|allocation| &allocation.entries);
    let mut resources: Vec<_> = entries.map(entry).collect();
    let Some(record) = record else { return resources };
    for user in pool_claims::users(record) {
        let is_known = |r: &PodResource| r.container == user.container && r.resource == user.resource;
        if !resources.iter().any(is_known) {
            resources.extend(find(&user.claim.uid).map(|claim| freeing(record, &user, claim)));
        }
    }
    resources
}

/// A resource whose allocation is gone, and whose pool claim its driver has not unprepared yet.
fn freeing(record: &PodRecord, user: &User, claim: &Arc<ClaimRecord>) -> PodResource {
    let kind = record.containers.iter().find(|known| known.name == user.container).map(|known| known.kind);
    let devices = claim.allocation.devices.iter();
    PodResource {
        container: user.container.clone(),
        kind: kind.unwrap_or_default(),
        resource: user.resource.clone(),
        devices: devices.map(|d| (pool_claims::device_id(&d.pool, &d.device), Vec::new())).collect(),
        state: ResourceState::of_claim(Some(claim)),
        claim: Some(claim.id.uid.clone()),
        driver: claim.allocation.devices.first().map(|device| device.driver.clone()),
    }
}
