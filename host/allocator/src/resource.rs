//! Choice of the devices of an extended resource for a container: by its NUMA affinity, by the preference of its plugin and by the devices
//! that init containers leave. A kubelet's device manager chooses by the same rules; this choice is the same one each time. The hints for a
//! topology manager are computed here too. Pure.

mod affinity;
mod choose;
mod hints;

#[cfg(test)]
mod choose_tests;
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod hints_tests;

use std::collections::BTreeMap;

use nodedock_model::{ContainerKind, ExtendedResource, PodRequest};

pub use affinity::{closest, parse_nodes};
pub use choose::{Open, Question, Step, Stock, check_count, choose, too_few, unregistered};
pub use hints::{TopologyHint, hints, pod_request};

/// NUMA nodes for hints, one hint for each set of them; a kubelet's topology manager supports no more.
const HINT_NUMA_NODES_MAX: usize = 8;

/// Devices by ID, with the NUMA nodes of each.
pub type DeviceNodes = BTreeMap<String, Vec<u32>>;

/// One resource of one container of a request.
#[derive(Debug, Clone, PartialEq)]
pub struct Want {
    pub container: String,
    pub kind: ContainerKind,
    pub resource: ExtendedResource,
    pub count: usize,
    /// NUMA nodes, as a topology manager chose them; empty: any.
    pub affinity: Vec<u32>,
}

/// The wants of a request, in the order in which containers start, then by resource.
pub fn wants(request: &PodRequest) -> Vec<Want> {
    // Init containers and sidecars start before the others.
    let mut containers: Vec<_> = request.containers.iter().collect();
    containers.sort_by_key(|container| container.kind.is_app());
    let wants = containers.into_iter().flat_map(|container| {
        let resources = container.resources.iter();
        resources.map(move |(resource, count)| Want {
            container: container.name.clone(),
            kind: container.kind,
            resource: resource.clone(),
            count: *count as usize,
            affinity: container.numa_affinity.clone(),
        })
    });
    wants.collect()
}
