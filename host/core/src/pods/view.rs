//! What a pod holds, of claims and extended resources together. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::answer::{self, ContainerAnswer};
use super::pooled::{self, User};
use crate::claims::{self, ClaimOutcome};
use crate::devices::ResourceOutcome;
use nodedock_model::{
    AllocationEntry, ClaimRecord, ClaimState, ContainerKind, DriverName, ExtendedResource, ObjectRef,
    PodAllocation, PodContainer, PodRecord, Problem, Uid,
};

/// A pod and what it holds.
#[derive(Debug)]
pub struct PodView {
    pub pod: ObjectRef,
    /// The pod's own claims; those that stand for devices of pools are among its resources.
    pub claims: Vec<Arc<ClaimRecord>>,
    /// In the order of the containers.
    pub resources: Vec<PodResource>,
    pub containers: Vec<ContainerAnswer>,
    /// None: the pod has, or had, no claims.
    pub record: Option<Arc<PodRecord>>,
    /// Claims that stand for devices of pools.
    pooled: Vec<Arc<ClaimRecord>>,
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
    /// The claim that stands for it; none: a device plugin gave it.
    pub claim: Option<Uid>,
    /// The driver of whose pools the devices are, where a claim stands for them.
    pub driver: Option<DriverName>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResourceState {
    /// Its plugin or driver was asked and has not answered.
    Allocating,
    Allocated,
    /// Its claim is being given up.
    Freeing,
}

impl ResourceState {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allocating => "allocating",
            Self::Allocated => "allocated",
            Self::Freeing => "freeing",
        }
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
    /// None: the pod holds nothing.
    pub fn new(of_claims: Option<claims::PodView>, allocation: Option<Arc<PodAllocation>>) -> Option<Self> {
        let pod =
            of_claims.as_ref().map(|view| &view.pod.pod).or(allocation.as_ref().map(|a| &a.pod))?.clone();
        let (record, claims, containers) = match of_claims {
            Some(view) => (Some(view.pod), view.claims, view.containers),
            None => (None, Vec::new(), names(allocation.as_deref())),
        };
        let ours = ours(record.as_deref(), allocation.as_deref());
        let (pooled, claims): (Vec<_>, Vec<_>) =
            claims.into_iter().partition(|claim| ours.contains(&claim.id.uid));
        let resources = resources(record.as_deref(), allocation.as_deref(), &pooled);
        let containers = answer::containers(containers, allocation.as_deref());
        Some(Self { pod, claims, resources, containers, record, pooled })
    }

    /// A pod of which nothing is known but that some claim has it.
    pub(super) fn bare(pod: ObjectRef) -> Self {
        Self {
            pod,
            claims: Vec::new(),
            resources: Vec::new(),
            containers: Vec::new(),
            record: None,
            pooled: Vec::new(),
        }
    }

    /// The least settled of its claims and resources.
    pub fn state(&self) -> ClaimState {
        let claims = || self.claims.iter().chain(&self.pooled).map(|claim| claim.state);
        let is_open = self.resources.iter().any(|resource| resource.state == ResourceState::Allocating);
        if claims().any(|state| state == ClaimState::Unpreparing) {
            ClaimState::Unpreparing
        } else if is_open || claims().any(|state| state == ClaimState::Preparing) {
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
                let mut kinds: Vec<(&str, ContainerKind)> =
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
        let used: BTreeSet<_> = containers.flat_map(|known| uids(record, known)).collect();
        self.claims.iter().filter(|claim| used.contains(&claim.id.uid)).collect()
    }

    pub(super) fn has_plugin_devices(&self, container: &str) -> bool {
        self.resources.iter().any(|resource| resource.container == container && resource.claim.is_none())
    }

    /// What a container needs, if it may start.
    pub(super) fn startable(&self, container: &str, boot_id: &str) -> Result<ContainerAnswer, Problem> {
        let answer = self.containers.iter().find(|answer| answer.name == container);
        if answer.is_none() && self.record.is_some() {
            let message = format!("pod {} has no container {container:?}", self.pod);
            return Err(Problem::not_found("no-such-container", message));
        }
        let is_ready =
            |claim: &Arc<ClaimRecord>| claim.state == ClaimState::Prepared && claim.boot_id == boot_id;
        let claim = self.claims.iter().chain(&self.pooled).find(|claim| !is_ready(claim));
        let resource = self.resources.iter().find(|resource| resource.state != ResourceState::Allocated);
        let open = claim.map(|claim| format!("claim {}", claim.id));
        match open
            .or_else(|| resource.map(|open| format!("{} of container {}", open.resource, open.container)))
        {
            Some(open) => {
                let message = format!("pod {} is not prepared ({open}): prepare it first", self.pod);
                Err(Problem::unavailable("pod-not-prepared", message))
            }
            // A container of which nothing is known has no devices.
            None => Ok(answer.cloned().unwrap_or_else(|| ContainerAnswer {
                name: container.to_owned(),
                ..ContainerAnswer::default()
            })),
        }
    }

    /// The outcomes of an unprepare: of the pod's own claims, and of its resources.
    pub(super) fn given_up(
        &self,
        claims: Vec<ClaimOutcome>,
        freed: &Result<(), Problem>,
    ) -> (Vec<ClaimOutcome>, Vec<ResourceOutcome>) {
        let is_ours = |outcome: &ClaimOutcome| {
            self.pooled.iter().any(|claim| Some(&claim.id.uid) == outcome.uid.as_ref())
        };
        let (ours, own): (Vec<_>, Vec<_>) = claims.into_iter().partition(is_ours);
        let end = |resource: &PodResource| {
            let claim = ours.iter().find(|outcome| resource.claim.is_some() && outcome.uid == resource.claim);
            claim.map_or(Ok(()), |outcome| outcome.end.clone().map(drop)).and(freed.clone())
        };
        let outcome = |resource: &PodResource| ResourceOutcome {
            container: resource.container.clone(),
            resource: resource.resource.clone(),
            end: end(resource).map(|()| resource.devices.clone()),
        };
        (own, self.resources.iter().map(outcome).collect())
    }
}

fn uids<'a>(record: &'a PodRecord, container: &'a PodContainer) -> impl Iterator<Item = Uid> + 'a {
    let claims = container.claims.iter().filter_map(|claim| record.claims.get(&claim.pod_claim_name));
    claims.map(|id| id.uid.clone())
}

/// The claims that stand for devices of pools: of a pod that is being given up the record alone knows them.
fn ours(record: Option<&PodRecord>, allocation: Option<&PodAllocation>) -> BTreeSet<Uid> {
    let entries = allocation.into_iter().flat_map(|allocation| &allocation.entries);
    let mut ours: BTreeSet<_> =
        entries.filter_map(|entry| Some(entry.claim.as_ref()?.id.uid.clone())).collect();
    ours.extend(record.into_iter().flat_map(pooled::claims));
    ours
}

/// The containers that have something, with nothing of claims.
fn names(allocation: Option<&PodAllocation>) -> Vec<claims::ContainerAnswer> {
    let mut names: Vec<&str> =
        allocation.into_iter().flat_map(|a| &a.entries).map(|entry| entry.container.as_str()).collect();
    names.dedup();
    let nothing = |name: &str| claims::ContainerAnswer { name: name.to_owned(), ..Default::default() };
    names.into_iter().map(nothing).collect()
}

fn resources(
    record: Option<&PodRecord>,
    allocation: Option<&PodAllocation>,
    pooled: &[Arc<ClaimRecord>],
) -> Vec<PodResource> {
    let find = |uid: &Uid| pooled.iter().find(|claim| claim.id.uid == *uid);
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
    let mut resources: Vec<_> =
        allocation.into_iter().flat_map(|allocation| &allocation.entries).map(entry).collect();
    let Some(record) = record else { return resources };
    for user in pooled::users(record) {
        let is_known = |r: &PodResource| r.container == user.container && r.resource == user.resource;
        if !resources.iter().any(is_known) {
            resources.extend(find(&user.claim.uid).map(|claim| left(record, &user, claim)));
        }
    }
    resources
}

/// What is left of a resource whose claim its driver has not given up.
fn left(record: &PodRecord, user: &User, claim: &Arc<ClaimRecord>) -> PodResource {
    let kind = record.containers.iter().find(|known| known.name == user.container).map(|known| known.kind);
    let devices = claim.allocation.devices.iter();
    PodResource {
        container: user.container.clone(),
        kind: kind.unwrap_or_default(),
        resource: user.resource.clone(),
        devices: devices.map(|d| (format!("{}/{}", d.pool, d.device), Vec::new())).collect(),
        state: ResourceState::of_claim(Some(claim)),
        claim: Some(claim.id.uid.clone()),
        driver: claim.allocation.devices.first().map(|device| device.driver.clone()),
    }
}
