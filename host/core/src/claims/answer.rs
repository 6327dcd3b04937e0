//! What a runtime needs to start a pod's containers: from the claims' records, so the same after a restart.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::cdi;
use nodedock_model::{ClaimRecord, ContainerClaim, PodContainer, PodRecord, PreparedDevice};

/// What one container is given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerAnswer {
    pub name: String,
    /// In the order of the container's claims; each name once.
    pub cdi_devices: Vec<String>,
    pub annotations: BTreeMap<String, String>,
}

/// The answer for each container of a pod. `claim` finds the record of a claim by its UID.
pub(super) fn containers(
    pod: &PodRecord,
    claim: impl Fn(&str) -> Option<Arc<ClaimRecord>>,
) -> Vec<ContainerAnswer> {
    pod.containers.iter().map(|container| answer(pod, container, &claim)).collect()
}

/// The answer for a container that uses no claim.
pub(super) fn nothing(name: &str) -> ContainerAnswer {
    ContainerAnswer { name: name.to_owned(), ..Default::default() }
}

fn answer(
    pod: &PodRecord,
    container: &PodContainer,
    claim: &impl Fn(&str) -> Option<Arc<ClaimRecord>>,
) -> ContainerAnswer {
    let mut answer = nothing(&container.name);
    for wanted in &container.claims {
        let id = pod.claims.get(&wanted.pod_claim_name);
        if let Some(record) = id.and_then(|id| claim(id.uid.as_str())) {
            add(&mut answer, &record, wanted);
        }
    }
    answer
}

fn add(answer: &mut ContainerAnswer, record: &ClaimRecord, wanted: &ContainerClaim) {
    for (driver, part) in &record.drivers {
        let Some(prepared) = part.current() else { continue };
        let names = cdi::cdi_devices(record, driver);
        let mut used = false;
        for (device, (_, names)) in prepared.devices.iter().zip(names) {
            if serves(device, wanted) {
                used = true;
                names.into_iter().for_each(|name| push_once(&mut answer.cdi_devices, name));
            }
        }
        if used {
            answer.annotations.extend(prepared.annotations.clone());
        }
    }
}

fn serves(device: &PreparedDevice, wanted: &ContainerClaim) -> bool {
    let Some(request) = &wanted.request else { return true };
    device.requests.is_empty() || device.requests.contains(request)
}

fn push_once(names: &mut Vec<String>, name: String) {
    if !names.contains(&name) {
        names.push(name);
    }
}
