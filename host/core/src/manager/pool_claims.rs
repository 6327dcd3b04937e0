//! Pool claims: claims that the manager makes for the extended resources of a pod's containers. Pure.
//!
//! Such a claim has devices of a driver's pools, or those of a device plugin as the driver `plugin_driver`. In the pod's record it is known
//! as `RESOURCE/CLAIM`, which no claim of the pod's own can be called: those names are DNS labels. So its purpose is known as long as
//! the pod is.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use crate::manager::entry::{Choices, Entry};
use crate::records::table::ClaimTable;
pub(crate) use crate::resources::pools::{device_id, split_id};
use nodedock_allocator::resource::DeviceNodes;
use nodedock_model::{
    AllocatedDevice, Allocation, Claim, ClaimRecord, ClaimReference, Consumer, ContainerClaim,
    ContainerKind, DeviceName, DriverName, EXTENDED_RESOURCE_REQUEST, ExtendedResource, ObjectRef,
    PodRecord, PodRequest, PoolName, Problem, ProblemCode, ResourceDevices, Uid, device_name,
    plugin_driver, plugin_pool, pod_claim_name,
};

/// The claim of an entry.
pub(super) fn claim_of(entry: &Entry, pod: &ObjectRef) -> Result<Claim, Problem> {
    let devices = entry
        .devices
        .keys()
        .map(|id| allocated(entry, id))
        .collect::<Result<_, _>>()?;
    Ok(Claim {
        id: entry.claim.id.clone(),
        allocation: Some(Allocation {
            devices,
            ..Allocation::default()
        }),
        reserved_for: vec![Consumer::of_pod(pod)],
        annotations: BTreeMap::new(),
        owner_pod: Some(pod.uid.clone()),
        resource: Some(ResourceDevices {
            resource: entry.resource.clone(),
            devices: entry.devices.clone(),
        }),
    })
}

fn allocated(entry: &Entry, id: &str) -> Result<AllocatedDevice, Problem> {
    let driver = &entry.claim.driver;
    let (pool, device) = device_of(&entry.resource, driver, id).ok_or_else(|| {
        Problem::internal(
            ProblemCode::DeviceId,
            format!("{id:?} is not POOL/DEVICE of {driver}"),
        )
    })?;
    Ok(AllocatedDevice::whole(
        EXTENDED_RESOURCE_REQUEST,
        driver.clone(),
        pool,
        device,
    ))
}

/// The pool and the device of an ID of a resource, of a driver's pools or of a device plugin.
pub(super) fn device_of(
    resource: &ExtendedResource,
    driver: &DriverName,
    id: &str,
) -> Option<(PoolName, DeviceName)> {
    match *driver == plugin_driver(resource) {
        true => Some((plugin_pool(), device_name(id))),
        false => split_id(id),
    }
}

/// The devices of a claim by their IDs in the resource, with their NUMA nodes. A claim that was rebuilt from CDI files has the names alone.
pub(super) fn devices_of(claim: &ClaimRecord) -> DeviceNodes {
    claim.resource.as_ref().map_or_else(
        || {
            let devices = claim.allocation.devices.iter();
            devices
                .map(|device| (device_id(&device.pool, &device.device), Vec::new()))
                .collect()
        },
        |of| of.devices.clone(),
    )
}

/// A container that has devices by a pool claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct User {
    pub(super) container: String,
    pub(super) kind: ContainerKind,
    pub(super) resource: ExtendedResource,
    pub(super) claim: ObjectRef,
}

/// The pool claims of a pod's request.
#[derive(Debug, Default)]
pub(super) struct PoolClaims {
    users: Vec<User>,
    /// Each once, in the order of their references: containers of which one reuses the other's devices share a claim.
    claims: Vec<Claim>,
}

impl PoolClaims {
    /// The claims for what was chosen. An entry that makes no valid claim is refused.
    pub(super) fn new(pod: &ObjectRef, choices: &mut Choices) -> Self {
        let (mut users, mut claims) = (Vec::new(), BTreeMap::new());
        for choice in choices.values_mut() {
            let Ok(Some(entry)) = choice else { continue };
            match claim_of(entry, pod) {
                Ok(claim) => {
                    let (container, resource) = (entry.container.clone(), entry.resource.clone());
                    users.push(User {
                        container,
                        kind: entry.kind,
                        resource,
                        claim: claim.id.clone(),
                    });
                    claims.insert(claim.id.uid.clone(), claim);
                }
                Err(problem) => *choice = Err(problem),
            }
        }
        Self {
            users,
            claims: claims.into_values().collect(),
        }
    }

    /// The pod's request with the claims, each named in the containers that have its devices.
    pub(super) fn request<'a>(&self, request: &'a PodRequest) -> Cow<'a, PodRequest> {
        if self.claims.is_empty() {
            return Cow::Borrowed(request);
        }
        let mut whole = request.clone();
        whole.claims.extend(self.claims.iter().filter_map(|claim| {
            let user = self
                .users
                .iter()
                .find(|user| user.claim.uid == claim.id.uid)?;
            Some(ClaimReference {
                pod_claim_name: pod_claim_name(&user.resource, &user.claim.name),
                claim_name: claim.id.name.clone(),
                claim_uid: Some(claim.id.uid.clone()),
            })
        }));
        for user in &self.users {
            for container in whole
                .containers
                .iter_mut()
                .filter(|c| c.name == user.container)
            {
                let pod_claim_name = pod_claim_name(&user.resource, &user.claim.name);
                let claim = ContainerClaim {
                    pod_claim_name,
                    request: None,
                };
                container.claims.push(claim);
            }
        }
        Cow::Owned(whole)
    }

    /// The claims themselves, after those that came with the request: of two with one name the later counts.
    pub(super) fn inline<'a>(&'a self, inline: &'a [Claim]) -> Vec<&'a Claim> {
        inline.iter().chain(&self.claims).collect()
    }
}

/// Sets what was chosen for all containers that have devices by a claim.
pub(super) fn set(claim: &Uid, end: &Result<Entry, Problem>, choices: &mut Choices) {
    for choice in choices.values_mut() {
        let Ok(Some(entry)) = choice else { continue };
        if entry.claim.id.uid == *claim {
            *choice = end.clone().map(|other| {
                Some(Entry {
                    devices: other.devices,
                    ..entry.clone()
                })
            });
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
    let used = record
        .containers
        .iter()
        .flat_map(|c| c.claims.iter().map(move |claim| (c, claim)));
    let users = used.filter_map(|(container, claim)| {
        let resource = resource(&claim.pod_claim_name)?;
        let claim = record.claims.get(&claim.pod_claim_name)?.clone();
        Some(User {
            container: container.name.clone(),
            kind: container.kind,
            resource,
            claim,
        })
    });
    users.collect()
}

/// The place of the first container that has devices by a claim, in the order in which the containers of its pod start.
pub(super) fn place(table: &ClaimTable, claim: &Uid) -> Option<(bool, usize)> {
    let record = table.claim(claim.as_str())?;
    let pod = table.pod(record.pods.keys().next()?.as_str())?;
    let user = users(pod)
        .into_iter()
        .find(|user| user.claim.uid == *claim)?;
    let at = pod
        .containers
        .iter()
        .position(|container| container.name == user.container)?;
    Some((user.kind.is_app(), at))
}

/// Resources for which pods have pool claims, by the pods' records.
pub(crate) fn resources<'a>(
    records: impl Iterator<Item = &'a PodRecord>,
) -> BTreeSet<ExtendedResource> {
    records
        .flat_map(|record| record.claims.keys())
        .filter_map(|name| resource(name))
        .collect()
}

/// The pool claims of a pod.
pub(super) fn claims(record: &PodRecord) -> BTreeSet<Uid> {
    let ours = record
        .claims
        .iter()
        .filter(|(name, _)| resource(name).is_some());
    ours.map(|(_, claim)| claim.uid.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::entry::{Chosen, Key};
    use nodedock_model::{PodContainer, PooledClaim};

    const GPU: &str = "example.com/gpu";

    fn pod() -> ObjectRef {
        ObjectRef::new("default", "a", "uid-a").unwrap()
    }

    /// Returns the choice of a device of a pool for a container, with the claim `c`.
    fn choice(container: &str, device: &str) -> (Key, Chosen) {
        let claim = ObjectRef::new("default", "c", "uid-c").unwrap();
        let entry = Entry {
            container: container.to_owned(),
            kind: ContainerKind::App,
            resource: ExtendedResource::new(GPU).unwrap(),
            devices: [(device.to_owned(), Vec::new())].into(),
            claim: PooledClaim {
                driver: "d.dev".parse().unwrap(),
                id: claim,
            },
            is_prepared: false,
        };
        (
            (container.to_owned(), entry.resource.clone()),
            Ok(Some(entry)),
        )
    }

    fn request(containers: &[&str]) -> PodRequest {
        let container = |name: &&str| PodContainer {
            name: (*name).to_owned(),
            ..PodContainer::default()
        };
        let containers = containers.iter().map(container).collect();
        PodRequest {
            pod: pod(),
            pod_group: None,
            claims: vec![],
            containers,
        }
    }

    #[test]
    fn sequential_containers_share_one_claim() {
        let mut choices: Choices = [choice("init", "pool/0"), choice("main", "pool/0")].into();
        let pooled = PoolClaims::new(&pod(), &mut choices);
        let requested = request(&["init", "main", "plain"]);
        let whole = pooled.request(&requested);
        let [reference] = whole.claims.as_slice() else {
            panic!("{whole:#?}")
        };
        assert_eq!(
            (
                reference.pod_claim_name.as_str(),
                reference.claim_name.as_str()
            ),
            ("example.com/gpu/c", "c")
        );
        let used: Vec<_> = whole
            .containers
            .iter()
            .map(|container| container.claims.len())
            .collect();
        assert_eq!(used, [1, 1, 0]);
        assert_eq!(pooled.inline(&[]).len(), 1);

        let problem = Problem::conflict("device-held", "another claim has it");
        set(&"uid-c".parse().unwrap(), &Err(problem), &mut choices);
        assert!(
            choices.values().all(Result::is_err),
            "both lose it: {choices:?}"
        );
    }

    #[test]
    fn unchosen_devices_make_no_claim() {
        let key = |name: &str| (name.to_owned(), ExtendedResource::new(GPU).unwrap());
        let mut choices: Choices = [
            (key("main"), Err(Problem::conflict("a", "refused"))),
            (key("none"), Ok(None)),
        ]
        .into();
        let pooled = PoolClaims::new(&pod(), &mut choices);
        assert!(pooled.inline(&[]).is_empty());
        assert_eq!(*pooled.request(&request(&["main"])), request(&["main"]));
    }

    #[test]
    fn invalid_device_id_is_refused() {
        let mut choices: Choices = [choice("main", "no-pool")].into();
        assert!(PoolClaims::new(&pod(), &mut choices).inline(&[]).is_empty());
        assert_eq!(
            choices.into_values().next().unwrap().unwrap_err().code,
            "device-id"
        );
    }

    #[test]
    fn pod_record_distinguishes_pool_claims() {
        let claim = |name: &str| ObjectRef::new("default", name, &format!("uid-{name}")).unwrap();
        let mut containers = request(&["main"]).containers;
        containers[0].claims = ["own", "example.com/gpu/c"]
            .map(|name| ContainerClaim {
                pod_claim_name: name.to_owned(),
                request: None,
            })
            .to_vec();
        let record = PodRecord {
            pod: pod(),
            claims: [
                ("own".to_owned(), claim("own")),
                ("example.com/gpu/c".to_owned(), claim("c")),
            ]
            .into(),
            containers,
            unknown: BTreeMap::new(),
        };
        assert_eq!(claims(&record), BTreeSet::from([claim("c").uid]));
        let resource = ExtendedResource::new(GPU).unwrap();
        assert_eq!(
            resources(std::iter::once(&record)),
            BTreeSet::from([resource.clone()])
        );
        let main = User {
            container: "main".to_owned(),
            kind: ContainerKind::App,
            resource,
            claim: claim("c"),
        };
        assert_eq!(users(&record), [main]);
    }
}
