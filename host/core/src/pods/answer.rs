//! What a runtime needs to start a pod's containers, of claims and extended resources together. Pure.

use std::collections::BTreeMap;

use super::interrupted;
use crate::claims;
use crate::devices::ResourceOutcome;
use crate::devices::merge::merge;
use nodedock_model::{AllocationEntry, ContainerAllocation, ExtendedResource, PodAllocation, PodRequest};

/// What one container is given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerAnswer {
    pub name: String,
    pub allocation: ContainerAllocation,
    /// What was left out because something else stands in its place, one sentence each.
    pub conflicts: Vec<String>,
}

/// One outcome for each resource of each container, in the pod's order: what nobody answered for is refused.
pub(super) fn complete(request: &PodRequest, outcomes: Vec<ResourceOutcome>) -> Vec<ResourceOutcome> {
    let mut known: BTreeMap<_, _> =
        outcomes.into_iter().map(|o| ((o.container.clone(), o.resource.clone()), o.end)).collect();
    let wanted = request
        .containers
        .iter()
        .flat_map(|container| container.resources.keys().map(|resource| (container.name.clone(), resource)));
    let outcome = |(container, resource): (String, &ExtendedResource)| {
        let end = known.remove(&(container.clone(), resource.clone()));
        ResourceOutcome {
            container,
            resource: resource.clone(),
            end: end.unwrap_or_else(|| Err(interrupted())),
        }
    };
    wanted.map(outcome).collect()
}

/// The answers of claims with what device plugins gave, container by container.
pub(super) fn containers(
    of_claims: Vec<claims::ContainerAnswer>,
    allocation: Option<&PodAllocation>,
) -> Vec<ContainerAnswer> {
    let entries = || allocation.iter().flat_map(|allocation| &allocation.entries);
    of_claims.into_iter().map(|answer| container(answer, entries())).collect()
}

/// What claims bring comes first.
fn container<'a>(
    of_claims: claims::ContainerAnswer,
    entries: impl Iterator<Item = &'a AllocationEntry>,
) -> ContainerAnswer {
    let claims::ContainerAnswer { name, cdi_devices, annotations } = of_claims;
    let own = entries.filter(|entry| entry.container == name);
    let parts = own.filter_map(|entry| Some((entry.resource.clone(), entry.response.clone()?)));
    let merged = merge(&parts.collect());
    let mut answer = ContainerAnswer {
        name,
        allocation: ContainerAllocation { cdi_devices, annotations, ..merged.allocation },
        conflicts: merged.conflicts,
    };
    for name in merged.allocation.cdi_devices {
        if !answer.allocation.cdi_devices.contains(&name) {
            answer.allocation.cdi_devices.push(name);
        }
    }
    for (key, value) in merged.allocation.annotations {
        answer.annotate(key, value);
    }
    answer
}

impl ContainerAnswer {
    fn annotate(&mut self, key: String, value: String) {
        match self.allocation.annotations.get(&key) {
            None => drop(self.allocation.annotations.insert(key, value)),
            Some(known) if *known == value => {}
            Some(_) => self
                .conflicts
                .push(format!("a device plugin: the annotation {key} is set by a claim already")),
        }
    }
}
