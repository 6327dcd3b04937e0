//! View of a pod's claims and extended resources together. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use strum::IntoStaticStr;

use super::answer::{self, ContainerAnswer};
use super::pool_claims::{self};
use crate::manager::claims::ClaimOutcome;
use crate::manager::devices::ResourceOutcome;
use crate::records::table::ClaimTable;
use nodedock_model::{
    ClaimRecord, ClaimState, ContainerKind, DriverName, ExtendedResource, ObjectRef, PodRecord,
    Problem, ProblemCode, Uid,
};

/// A pod and what it holds.
#[derive(Debug)]
pub struct PodView {
    pub pod: ObjectRef,
    /// The pod's own claims; pool claims are among its resources.
    pub claims: Vec<Arc<ClaimRecord>>,
    /// Resources in the order of the containers.
    pub resources: Vec<PodResource>,
    pub containers: Vec<ContainerAnswer>,
    /// None: only the pod's claims are known.
    pub record: Option<Arc<PodRecord>>,
    pool_claims: Vec<Arc<ClaimRecord>>,
}

/// Devices of a resource that a container has.
#[derive(Debug, Clone, PartialEq)]
pub struct PodResource {
    pub container: String,
    pub kind: ContainerKind,
    pub resource: ExtendedResource,
    /// Device to its NUMA nodes.
    pub devices: BTreeMap<String, Vec<u32>>,
    pub state: ResourceState,
    /// The pool claim.
    pub claim: Uid,
    /// The driver of the pool. None: a device plugin gave the devices.
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

    fn of_claim(claim: &ClaimRecord) -> Self {
        match claim.state {
            ClaimState::Prepared => Self::Allocated,
            ClaimState::Unpreparing => Self::Freeing,
            ClaimState::Preparing => Self::Allocating,
        }
    }
}

impl PodView {
    /// The view of a pod by its UID. None: the pod holds nothing.
    pub fn new(table: &ClaimTable, uid: &str) -> Option<Self> {
        let record = table.pod(uid)?.clone();
        let of_pools = pool_claims::claims(&record);
        let claims = table.claims_of_pod(uid).into_iter();
        let claims = claims
            .filter(|claim| !of_pools.contains(&claim.id.uid))
            .collect();
        // When the pod is being unprepared, only its record names them.
        let pool_claims: Vec<_> = of_pools
            .iter()
            .filter_map(|uid| table.claim(uid.as_str()).cloned())
            .collect();
        let resources = resources(&record, &pool_claims);
        let containers = answer::of_record(&record, |uid| table.claim(uid).cloned());
        Some(Self {
            pod: record.pod.clone(),
            claims,
            resources,
            containers,
            record: Some(record),
            pool_claims,
        })
    }

    /// A pod of which only its claims are known.
    pub(super) fn without_record(pod: ObjectRef) -> Self {
        let (claims, resources, containers, pool_claims) = Default::default();
        Self {
            pod,
            claims,
            resources,
            containers,
            record: None,
            pool_claims,
        }
    }

    fn all_claims(&self) -> impl Iterator<Item = &Arc<ClaimRecord>> {
        self.claims.iter().chain(&self.pool_claims)
    }

    /// The least settled state of its claims and resources.
    pub fn state(&self) -> ClaimState {
        let is_open = self
            .resources
            .iter()
            .any(|resource| resource.state == ResourceState::Allocating);
        if self.has_claim(ClaimState::Unpreparing) {
            ClaimState::Unpreparing
        } else if is_open || self.has_claim(ClaimState::Preparing) {
            ClaimState::Preparing
        } else {
            ClaimState::Prepared
        }
    }

    fn has_claim(&self, state: ClaimState) -> bool {
        self.all_claims().any(|claim| claim.state == state)
    }

    /// The containers as far as they are known, in the order in which they start.
    pub fn kinds(&self) -> Vec<(&str, ContainerKind)> {
        let containers = self.record.iter().flat_map(|record| &record.containers);
        containers
            .map(|container| (container.name.as_str(), container.kind))
            .collect()
    }

    /// The pod's own claims that a container uses, each once.
    pub fn claims_of(&self, container: &str) -> Vec<&Arc<ClaimRecord>> {
        let Some(record) = &self.record else {
            return Vec::new();
        };
        let containers = record
            .containers
            .iter()
            .filter(|known| known.name == container);
        let names = containers
            .flat_map(|known| &known.claims)
            .map(|claim| &claim.pod_claim_name);
        let used: BTreeSet<_> = names
            .filter_map(|name| Some(&record.claims.get(name)?.uid))
            .collect();
        self.claims
            .iter()
            .filter(|claim| used.contains(&claim.id.uid))
            .collect()
    }

    /// The claims of the extended resources of a container.
    pub(super) fn pool_claims_of(&self, container: &str) -> Vec<&Arc<ClaimRecord>> {
        let used: Vec<_> = self
            .resources
            .iter()
            .filter(|of| of.container == container)
            .map(|of| &of.claim)
            .collect();
        self.pool_claims
            .iter()
            .filter(|claim| used.contains(&&claim.id.uid))
            .collect()
    }

    /// The answer for a container that may start now.
    pub(super) fn startable(
        &self,
        container: &str,
        boot_id: &str,
    ) -> Result<ContainerAnswer, Problem> {
        let answer = self
            .containers
            .iter()
            .find(|answer| answer.name == container);
        if answer.is_none() && self.record.is_some() {
            let message = format!("pod {} has no container {container:?}", self.pod);
            return Err(Problem::not_found(ProblemCode::NoSuchContainer, message));
        }
        let is_ready = |claim: &Arc<ClaimRecord>| {
            claim.state == ClaimState::Prepared && claim.boot_id == boot_id
        };
        let claim = self
            .claims
            .iter()
            .find(|claim| !is_ready(claim))
            .map(|claim| format!("claim {}", claim.id));
        let resource = self.resources.iter().find(|of| {
            !self
                .pool_claims
                .iter()
                .any(|claim| claim.id.uid == of.claim && is_ready(claim))
        });
        let resource =
            resource.map(|open| format!("{} of container {}", open.resource, open.container));
        let open = claim.or(resource);
        if let Some(open) = open {
            let message = format!(
                "pod {} is not prepared ({open}): prepare it first",
                self.pod
            );
            return Err(Problem::unavailable(ProblemCode::PodNotPrepared, message));
        }
        // A container that nothing is known of has no devices.
        Ok(answer
            .cloned()
            .unwrap_or_else(|| ContainerAnswer::named(container)))
    }

    /// The outcomes of an unprepare: of the pod's own claims, and of its resources.
    pub(super) fn unprepared(
        &self,
        claims: Vec<ClaimOutcome>,
    ) -> (Vec<ClaimOutcome>, Vec<ResourceOutcome>) {
        let (of_pools, own): (Vec<_>, Vec<_>) = claims.into_iter().partition(|outcome| {
            self.pool_claims
                .iter()
                .any(|claim| Some(&claim.id.uid) == outcome.uid.as_ref())
        });
        let resources = self.resources.iter().map(|resource| {
            let of_claim = of_pools
                .iter()
                .find(|outcome| outcome.uid.as_ref() == Some(&resource.claim));
            ResourceOutcome {
                container: resource.container.clone(),
                resource: resource.resource.clone(),
                end: of_claim
                    .map_or(Ok(()), |of| of.end.clone().map(drop))
                    .map(|()| resource.devices.clone()),
            }
        });
        (own, resources.collect())
    }
}

fn resources(record: &PodRecord, pool_claims: &[Arc<ClaimRecord>]) -> Vec<PodResource> {
    let users = pool_claims::users(record).into_iter();
    let resources = users.filter_map(|user| {
        let claim = pool_claims
            .iter()
            .find(|claim| claim.id.uid == user.claim.uid)?;
        let driver = claim
            .allocation
            .devices
            .first()
            .filter(|_| !claim.is_of_plugin());
        Some(PodResource {
            container: user.container,
            kind: user.kind,
            resource: user.resource,
            devices: pool_claims::devices_of(claim),
            state: ResourceState::of_claim(claim),
            claim: user.claim.uid,
            driver: driver.map(|device| device.driver.clone()),
        })
    });
    resources.collect()
}
