//! Claims for devices that a kubelet's device manager allocated to a container. Pure.
//!
//! A kubelet reports the devices that it allocates, and never the pod. So a claim is named by its content: its driver, its resource and its
//! devices. A repeated request means the same claim.

use std::collections::{BTreeMap, BTreeSet};

use uuid::Uuid;

use nodedock_core::resources::pools::split_id;
use nodedock_model::{
    AllocatedDevice, Allocation, Claim, DriverName, ExtendedResource, ObjectName, ObjectRef,
    Problem, ProblemCode, limit,
};

/// The request of such a claim.
const REQUEST: &str = "extended-resource";
/// Their namespace; no object of the API server.
const NAMESPACE: &str = "nodedock";
const NAME_PREFIX: &str = "device-plugin-";

/// Ids of devices, as the device manager has them for pools: `POOL/DEVICE`.
pub(super) type Ids = BTreeSet<String>;

/// Devices in sets that claims can have: a kubelet may allocate a container more devices than one claim may have.
pub(super) fn portions(ids: &Ids) -> Vec<Ids> {
    let ids: Vec<_> = ids.iter().collect();
    ids.chunks(limit::ALLOCATED_DEVICES_MAX)
        .map(|portion| portion.iter().copied().cloned().collect())
        .collect()
}

/// The name of the claim for these devices.
pub(super) fn id(
    driver: &DriverName,
    resource: &ExtendedResource,
    ids: &Ids,
) -> Result<ObjectRef, Problem> {
    let mut of = format!("device-plugin\0{driver}\0{resource}");
    ids.iter().for_each(|id| of.extend(["\0", id]));
    let uid = Uuid::new_v5(&Uuid::NAMESPACE_OID, of.as_bytes()).to_string();
    ObjectRef::new(NAMESPACE, &format!("{NAME_PREFIX}{uid}"), &uid)
        .map_err(|error| Problem::internal(ProblemCode::ClaimName, error.to_string()))
}

/// The namespace of these claims. An API server may have claims in it as well.
pub(super) fn namespace() -> ObjectName {
    ObjectName::new(NAMESPACE).expect("it is a valid name")
}

/// Returns whether a claim is one for devices that a kubelet's device manager allocated. An object of the API server cannot have its own
/// UID in its name.
pub(super) fn is_plugin_claim(claim: &ObjectRef) -> bool {
    claim.namespace.as_str() == NAMESPACE
        && claim.name.as_str().strip_prefix(NAME_PREFIX) == Some(claim.uid.as_str())
}

/// The claim itself, allocated.
pub(super) fn claim(id: ObjectRef, driver: &DriverName, ids: &Ids) -> Result<Claim, Problem> {
    let devices = ids
        .iter()
        .map(|id| device(driver, id))
        .collect::<Result<_, _>>()?;
    Ok(Claim {
        id,
        allocation: Some(Allocation {
            devices,
            ..Allocation::default()
        }),
        reserved_for: Vec::new(),
        annotations: BTreeMap::new(),
        owner_pod: None,
        resource: None,
    })
}

fn device(driver: &DriverName, id: &str) -> Result<AllocatedDevice, Problem> {
    let (pool, device) = split_id(id).ok_or_else(|| {
        Problem::internal(
            ProblemCode::DeviceId,
            format!("{id:?} is not POOL/DEVICE of {driver}"),
        )
    })?;
    Ok(AllocatedDevice::whole(
        REQUEST,
        driver.clone(),
        pool,
        device,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_core::resources::pools::device_id;

    fn ids(ids: &[&str]) -> Ids {
        ids.iter().map(|id| (*id).to_owned()).collect()
    }

    #[test]
    fn devices_are_split_into_bounded_claims() {
        for (count, expected) in [
            (0, vec![]),
            (1, vec![1]),
            (32, vec![32]),
            (70, vec![32, 32, 6]),
        ] {
            let of: Ids = (0..count).map(|n| format!("p/{n}")).collect();
            let portions = portions(&of);
            assert_eq!(portions.iter().map(Ids::len).collect::<Vec<_>>(), expected);
            assert_eq!(portions.into_iter().flatten().collect::<Ids>(), of);
        }
    }

    #[test]
    fn plugin_claim_is_identified_by_devices() {
        let driver = |name: &str| DriverName::new(name).unwrap();
        let resource = |name: &str| ExtendedResource::new(name).unwrap();
        let of = |d: &str, r: &str, of: &[&str]| id(&driver(d), &resource(r), &ids(of)).unwrap();
        let one = of("gpu.example.com", "example.com/gpu", &["p/0", "p/1"]);
        assert_eq!(
            one,
            of("gpu.example.com", "example.com/gpu", &["p/1", "p/0"])
        );
        for other in [
            of("gpu.example.com", "example.com/gpu", &["p/0"]),
            of("gpu.example.com", "example.com/gpu2", &["p/0", "p/1"]),
            of("gpu2.example.com", "example.com/gpu", &["p/0", "p/1"]),
        ] {
            assert_ne!(one, other);
        }
        assert!(is_plugin_claim(&one));
        let stranger = ObjectRef {
            uid: of("a", "example.com/gpu", &[]).uid,
            ..one.clone()
        };
        assert!(!is_plugin_claim(&stranger));

        let claim = claim(one, &driver("gpu.example.com"), &ids(&["a/b/0", "p/1"])).unwrap();
        let devices = claim.allocation.unwrap().devices;
        let named: Vec<_> = devices
            .iter()
            .map(|device| (device.pool.as_str(), device.device.as_str()))
            .collect();
        assert_eq!(named, [("a/b", "0"), ("p", "1")]);
        assert!(
            devices
                .iter()
                .all(|device| device_id(&device.pool, &device.device).contains('/'))
        );
    }
}
