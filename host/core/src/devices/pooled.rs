//! Claims that stand for devices of pools: their names, and the claims themselves.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};
use uuid::Uuid;

use nodedock_model::{
    AllocatedDevice, Allocation, AllocationEntry, Claim, Consumer, DeviceName, DriverName, ExtendedResource,
    NameError, ObjectName, ObjectRef, PodAllocation, PoolName, PooledClaim, Problem, Uid,
};

/// The request of a claim that stands for an extended resource.
const REQUEST: &str = "extended-resource";
/// Bytes of the pod's name that a claim's name keeps: with the rest it stays a DNS label.
const POD_NAME_BYTES_MAX: usize = 40;
/// Digits of the hash in a claim's name.
const HASH_DIGITS: usize = 16;

/// The claim that stands for a resource of a container. It has the same name and UID whenever it is asked for.
pub(super) fn pooled(
    pod: &ObjectRef,
    container: &str,
    resource: &ExtendedResource,
    driver: &DriverName,
) -> Result<PooledClaim, Problem> {
    let of = format!("{}/{container}/{resource}", pod.uid);
    let digits = hex::encode(Sha256::digest(&of));
    let name = format!("{}-{}", label(pod.name.as_str()), &digits[..HASH_DIGITS]);
    let uid = Uuid::new_v5(&Uuid::NAMESPACE_OID, of.as_bytes()).to_string();
    let id = || -> Result<ObjectRef, NameError> {
        Ok(ObjectRef {
            namespace: pod.namespace.clone(),
            name: ObjectName::new(&name)?,
            uid: Uid::new(&uid)?,
        })
    };
    let id = id().map_err(|error| Problem::internal("claim-name", error.to_string()))?;
    Ok(PooledClaim { driver: driver.clone(), id })
}

/// The beginning of a pod's name as the beginning of a DNS label.
fn label(name: &str) -> String {
    let cut: String = name.chars().take(POD_NAME_BYTES_MAX).map(|c| if c == '.' { '-' } else { c }).collect();
    cut.trim_end_matches('-').to_owned()
}

/// The claim that stands for an entry. None: the devices are a plugin's.
pub fn pooled_claim(entry: &AllocationEntry, pod: &ObjectRef) -> Option<Result<Claim, Problem>> {
    let claim = entry.claim.as_ref()?;
    Some(entry.devices.keys().map(|id| device(claim, id)).collect::<Result<_, _>>().map(|devices| Claim {
        id: claim.id.clone(),
        allocation: Some(Allocation { devices, ..Allocation::default() }),
        reserved_for: vec![Consumer::of_pod(pod)],
        annotations: BTreeMap::new(),
        owner_pod: Some(pod.uid.clone()),
    }))
}

/// The claims of a pod's entries, each once: containers of which one uses the other's devices again share its claim.
pub fn pooled_claims(allocation: &PodAllocation) -> Result<Vec<Claim>, Problem> {
    let claims = allocation.entries.iter().filter_map(|entry| pooled_claim(entry, &allocation.pod));
    let claims = claims.map(|claim| claim.map(|claim| (claim.id.uid.clone(), claim)));
    Ok(claims.collect::<Result<BTreeMap<_, _>, _>>()?.into_values().collect())
}

fn device(claim: &PooledClaim, id: &str) -> Result<AllocatedDevice, Problem> {
    let wrong = || Problem::internal("device-id", format!("{id:?} is not POOL/DEVICE of {}", claim.driver));
    let (pool, device) = split(id).ok_or_else(wrong)?;
    Ok(AllocatedDevice {
        request: REQUEST.to_owned(),
        driver: claim.driver.clone(),
        pool,
        device,
        share_id: None,
        consumed: BTreeMap::new(),
        admin_access: false,
    })
}

/// The id of a pool's device.
pub(super) fn device_id(pool: &PoolName, device: &DeviceName) -> String {
    format!("{pool}/{device}")
}

/// The pool and the device of an id; a pool's name may have slashes, a device's has none.
pub(super) fn split(id: &str) -> Option<(PoolName, DeviceName)> {
    let (pool, device) = id.rsplit_once('/')?;
    Some((PoolName::new(pool).ok()?, DeviceName::new(device).ok()?))
}
