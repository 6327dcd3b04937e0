//! Claims that stand for devices of pools, as claims of their pod. Pure.
//!
//! In the pod's record such a claim is known as `RESOURCE/CLAIM`, which no claim of a pod's own can be called: those names are DNS
//! labels. So what a claim is there for is known as long as the pod is.

use std::collections::{BTreeMap, BTreeSet};

use crate::claims::ClaimOutcome;
use crate::devices::{ResourceOutcome, pooled_claims};
use nodedock_model::{
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

/// Resources of which pods have devices of pools, by the pods' records.
pub fn resources(records: &[PodRecord]) -> BTreeSet<ExtendedResource> {
    records.iter().flat_map(|record| record.claims.keys()).filter_map(|name| resource(name)).collect()
}

/// Claims of a pod that stand for devices of pools.
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
        PodRequest { pod: pod(), claims: vec![], containers: containers.iter().map(container).collect() }
    }

    #[test]
    fn containers_that_use_a_device_one_after_the_other_share_its_claim() {
        let allocation = allocation(vec![entry("init", "pool/0"), entry("main", "pool/0")]);
        let mut resources = allocated(&allocation);
        let pooled = Pooled::new(&allocation, &mut resources);
        let whole = pooled.request(&request(&["init", "main", "plain"]));
        let [reference] = whole.claims.as_slice() else { panic!("{whole:#?}") };
        assert_eq!(
            (reference.pod_claim_name.as_str(), reference.claim_name.as_str()),
            ("example.com/gpu/c", "c")
        );
        let used: Vec<_> = whole.containers.iter().map(|container| container.claims.len()).collect();
        assert_eq!(used, [1, 1, 0]);
        assert_eq!(pooled.inline(&[]).len(), 1);

        let problem = Problem::conflict("device-held", "somebody has it");
        pooled.refuse(&Refused::from([("uid-c".parse().unwrap(), problem)]), &mut resources);
        assert!(resources.iter().all(|resource| resource.end.is_err()), "both lose it: {resources:?}");
    }

    #[test]
    fn what_was_not_allocated_to_this_request_makes_no_claim() {
        let allocation = allocation(vec![entry("other", "pool/0")]);
        let pooled = Pooled::new(&allocation, &mut []);
        assert!(pooled.inline(&[]).is_empty());
        assert_eq!(pooled.request(&request(&["main"])), request(&["main"]));
    }

    #[test]
    fn a_device_that_can_be_no_claim_is_refused() {
        let allocation = allocation(vec![entry("main", "no-pool")]);
        let mut resources = allocated(&allocation);
        assert!(Pooled::new(&allocation, &mut resources).inline(&[]).is_empty());
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
        assert_eq!(resources(std::slice::from_ref(&record)), BTreeSet::from([resource.clone()]));
        assert_eq!(users(&record), [User { container: "main".to_owned(), resource, claim: claim("c") }]);
    }
}
