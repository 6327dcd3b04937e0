//! Claims that stand for devices of pools, as claims of their pod. Pure.
//!
//! In the pod's record such a claim is known as `RESOURCE/CLAIM`, which no claim of a pod's own can be called: those names are DNS
//! labels. So what a claim is there for is known as long as the pod is.

use std::collections::{BTreeMap, BTreeSet};

use crate::claims::ClaimOutcome;
use crate::devices::{ResourceOutcome, pooled_claims};
use crate::model::{
    Claim, ClaimReference, ContainerClaim, ExtendedResource, ObjectRef, PodAllocation, PodRecord, PodRequest,
    Problem, Uid,
};

/// A container that has devices of a pool by a claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct User {
    pub(super) container: String,
    pub(super) resource: ExtendedResource,
    pub(super) claim: ObjectRef,
}

/// The claims of a request that stand for devices of pools.
#[derive(Debug, Default)]
pub(super) struct Pooled {
    users: Vec<User>,
    /// In the order of their references.
    claims: Vec<Claim>,
}

/// What became of claims that were refused.
pub(super) type Refused = BTreeMap<Uid, Problem>;

impl Pooled {
    /// The claims of what was allocated. An allocation that makes no claims is refused.
    pub(super) fn new(allocation: &PodAllocation, resources: &mut [ResourceOutcome]) -> Self {
        let allocated: BTreeSet<_> = resources
            .iter()
            .filter(|outcome| outcome.end.is_ok())
            .map(|outcome| (outcome.container.clone(), outcome.resource.clone()))
            .collect();
        let mut wanted = allocation.clone();
        wanted.entries.retain(|entry| allocated.contains(&(entry.container.clone(), entry.resource.clone())));
        let users: Vec<_> = wanted
            .entries
            .iter()
            .filter_map(|entry| {
                Some(User {
                    container: entry.container.clone(),
                    resource: entry.resource.clone(),
                    claim: entry.claim.as_ref()?.id.clone(),
                })
            })
            .collect();
        match pooled_claims(&wanted) {
            Ok(claims) => Self { users, claims },
            Err(problem) => {
                let all = |user: &User| (user.claim.uid.clone(), problem.clone());
                refuse(&users, &users.iter().map(all).collect(), resources);
                Self::default()
            }
        }
    }

    /// The pod's request with the claims, each named in the containers that have its devices.
    pub(super) fn request(&self, request: &PodRequest) -> PodRequest {
        let mut whole = request.clone();
        whole.claims.extend(self.claims.iter().filter_map(|claim| {
            Some(ClaimReference {
                pod_claim_name: name(self.user(&claim.id.uid)?),
                claim_name: claim.id.name.clone(),
                claim_uid: Some(claim.id.uid.clone()),
            })
        }));
        for user in &self.users {
            let has_name = |name: &str| name == user.container;
            for container in whole.containers.iter_mut().filter(|container| has_name(&container.name)) {
                container.claims.push(ContainerClaim { pod_claim_name: name(user), request: None });
            }
        }
        whole
    }

    /// The claims themselves, after those that came with the request: of two with one name the later counts.
    pub(super) fn inline(&self, inline: &[Claim]) -> Vec<Claim> {
        inline.iter().chain(&self.claims).cloned().collect()
    }

    /// A container that has devices by a claim, the first in the pod's order.
    pub(super) fn user(&self, claim: &Uid) -> Option<&User> {
        self.users.iter().find(|user| user.claim.uid == *claim)
    }

    /// The outcomes of the pod's own claims, of which there are `own`, and the refusals of ours.
    pub(super) fn split(&self, mut outcomes: Vec<ClaimOutcome>, own: usize) -> (Vec<ClaimOutcome>, Refused) {
        let ours = outcomes.split_off(own.min(outcomes.len()));
        let refused = ours.into_iter().filter_map(|outcome| Some((outcome.uid?, outcome.end.err()?)));
        (outcomes, refused.collect())
    }

    /// A refused claim is a refused resource.
    pub(super) fn refuse(&self, refused: &Refused, resources: &mut [ResourceOutcome]) {
        refuse(&self.users, refused, resources);
    }

    /// What choosing anew for a claim came to.
    pub(super) fn settle(
        &self,
        claim: &Uid,
        chosen: &Result<BTreeMap<String, Vec<u32>>, Problem>,
        resources: &mut [ResourceOutcome],
    ) {
        set(&self.users, claim, chosen, resources);
    }
}

fn refuse(users: &[User], refused: &Refused, resources: &mut [ResourceOutcome]) {
    for (claim, problem) in refused {
        set(users, claim, &Err(problem.clone()), resources);
    }
}

fn set(
    users: &[User],
    claim: &Uid,
    end: &Result<BTreeMap<String, Vec<u32>>, Problem>,
    resources: &mut [ResourceOutcome],
) {
    for user in users.iter().filter(|user| user.claim.uid == *claim) {
        let is_of = |o: &&mut ResourceOutcome| o.container == user.container && o.resource == user.resource;
        resources.iter_mut().filter(is_of).for_each(|outcome| outcome.end = end.clone());
    }
}

/// What the pod calls a claim.
fn name(user: &User) -> String {
    format!("{}/{}", user.resource, user.claim.name)
}

/// The resource for which a pod has a claim. None: the claim is the pod's own.
fn resource(pod_claim_name: &str) -> Option<ExtendedResource> {
    let (resource, _) = pod_claim_name.rsplit_once('/')?;
    ExtendedResource::new(resource).ok()
}

/// Containers of a pod that have devices of pools, by the pod's record.
pub(super) fn users(record: &PodRecord) -> Vec<User> {
    let mut users = Vec::new();
    for container in &record.containers {
        for claim in &container.claims {
            let known = record.claims.get(&claim.pod_claim_name).zip(resource(&claim.pod_claim_name));
            let user = |(claim, resource): (&ObjectRef, _)| User {
                container: container.name.clone(),
                resource,
                claim: claim.clone(),
            };
            users.extend(known.map(user));
        }
    }
    users
}

/// Claims of a pod that stand for devices of pools.
pub(super) fn claims(record: &PodRecord) -> BTreeSet<Uid> {
    let ours = record.claims.iter().filter(|(name, _)| resource(name).is_some());
    ours.map(|(_, claim)| claim.uid.clone()).collect()
}
