//! Allocations of extended resources, which older releases recorded for each pod, become claims. Pure.

use std::sync::Arc;

use super::{Change, Dump};
use nodedock_model::{
    AllocatedDevice, Allocation, AllocationEntry, ClaimRecord, ClaimState, ContainerClaim,
    DriverKind, DriverPart, EXTENDED_RESOURCE_REQUEST, Hold, ObjectRef, PluginAnswer, PodContainer,
    PodRecord, PooledClaim, PreparedBy, ResourceDevices, device_name, plugin_driver, plugin_pool,
    pod_claim_name,
};

/// Replaces the allocations by claims, and returns the changes to commit. An allocation that no plugin has answered is dropped: nothing depends on
/// it.
pub(super) fn adopt(dump: &mut Dump) -> Vec<Change> {
    let mut changes = Vec::new();
    for allocation in std::mem::take(&mut dump.allocations) {
        changes.push(Change::DeleteAllocation(allocation.pod.uid.clone()));
        for entry in &allocation.entries {
            let devices = ResourceDevices {
                resource: entry.resource.clone(),
                devices: entry.devices.clone(),
            };
            if let Some(claim) = &entry.claim {
                let known = dump
                    .claims
                    .iter_mut()
                    .find(|known| known.id.uid == claim.id.uid);
                if let Some(known) = known.filter(|known| known.resource.is_none()) {
                    known.resource = Some(devices);
                    changes.push(Change::PutClaim(Arc::new(known.clone())));
                }
                continue;
            }
            let Some(claim) = claim_of(&allocation.pod, entry, devices) else {
                continue;
            };
            let pod = use_claim(dump, &allocation.pod, entry, &claim.id);
            changes.extend([
                Change::PutPod(Arc::new(pod)),
                Change::PutClaim(Arc::new(claim.clone())),
            ]);
            dump.claims.push(claim);
        }
    }
    changes
}

/// The prepared claim of an entry; `None`: no plugin has answered it. Its boot is not known, so it is prepared again before containers start again.
fn claim_of(pod: &ObjectRef, entry: &AllocationEntry, of: ResourceDevices) -> Option<ClaimRecord> {
    let allocation = entry.response.clone()?;
    let (driver, pool) = (plugin_driver(&entry.resource), plugin_pool());
    let claim = PooledClaim::named(pod, &entry.container, &entry.resource, &driver);
    let allocated = |id: &String| {
        AllocatedDevice::whole(
            EXTENDED_RESOURCE_REQUEST,
            driver.clone(),
            pool.clone(),
            device_name(id),
        )
    };
    let devices: Vec<_> = entry.devices.keys().map(allocated).collect();
    let answer = PluginAnswer {
        allocation,
        pre_start: entry.pre_start,
        nodes: Vec::new(),
    };
    let prepared = answer.prepared(&devices);
    let part = DriverPart {
        prepared: Some(Arc::new(prepared)),
        by: Some(PreparedBy {
            kind: DriverKind::Adapter,
            version: String::new(),
            digest: String::new(),
            lists: false,
        }),
        ..DriverPart::default()
    };
    let mut record = ClaimRecord::new(claim.id, ClaimState::Prepared, "");
    record.pods.insert(pod.uid.clone(), pod.clone());
    record.holds = devices.iter().map(hold).collect();
    record.allocation = Allocation {
        devices,
        ..Allocation::default()
    };
    record.drivers.insert(driver, Box::new(part));
    record.resource = Some(of);
    Some(record)
}

fn hold(device: &AllocatedDevice) -> Hold {
    let key = format!("{}/{}/{}", device.driver, device.pool, device.device);
    Hold {
        key,
        shared: false,
        driver: None,
        derived: false,
        uses: Vec::new(),
    }
}

/// Notes in the pod's record that a container uses the claim. Returns the record.
fn use_claim(
    dump: &mut Dump,
    pod: &ObjectRef,
    entry: &AllocationEntry,
    claim: &ObjectRef,
) -> PodRecord {
    let at = dump
        .pods
        .iter()
        .position(|known| known.pod.uid == pod.uid)
        .unwrap_or_else(|| {
            let (claims, containers, unknown) = Default::default();
            dump.pods.push(PodRecord {
                pod: pod.clone(),
                claims,
                containers,
                unknown,
            });
            dump.pods.len() - 1
        });
    let record = &mut dump.pods[at];
    let name = pod_claim_name(&entry.resource, &claim.name);
    record.claims.insert(name.clone(), claim.clone());
    let used = ContainerClaim {
        pod_claim_name: name,
        request: None,
    };
    match record
        .containers
        .iter_mut()
        .find(|known| known.name == entry.container)
    {
        Some(container) => container.claims.push(used),
        None => record.containers.push(PodContainer {
            name: entry.container.clone(),
            kind: entry.kind,
            claims: vec![used],
            ..PodContainer::default()
        }),
    }
    record.clone()
}
