//! Short words for claims, pods and problems of tests.

use nodedock_model::{
    AllocatedDevice, Allocation, Claim, Consumer, DeviceAccess, DeviceName, DriverName, Edits,
    ObjectName, ObjectRef, PoolName, PreparedClaim, PreparedDevice, Problem, Uid,
};

pub(crate) fn uid(text: &str) -> Uid {
    Uid::new(text).unwrap()
}

pub(crate) fn name(text: &str) -> ObjectName {
    ObjectName::new(text).unwrap()
}

/// The driver `gpu` is `gpu.example.com`.
pub(crate) fn driver(short: &str) -> DriverName {
    DriverName::new(format!("{short}.example.com")).unwrap()
}

pub(crate) fn pod(short: &str) -> ObjectRef {
    ObjectRef::new("default", short, &format!("uid-{short}")).unwrap()
}

/// A device by `driver/device` or `driver/device#share`; `!` before it is admin access. It is of the pool `pool`, and its
/// request has the name of the device.
pub(crate) fn device(text: &str) -> AllocatedDevice {
    let (admin_access, text) = text
        .strip_prefix('!')
        .map_or((false, text), |rest| (true, rest));
    let (short, device) = text.split_once('/').unwrap();
    let (device, share) = device
        .split_once('#')
        .map_or((device, None), |(device, share)| (device, Some(share)));
    AllocatedDevice {
        request: device.to_owned(),
        driver: driver(short),
        pool: PoolName::new("pool").unwrap(),
        device: DeviceName::new(device).unwrap(),
        share_id: share.map(str::to_owned),
        consumed: Default::default(),
        admin_access,
        binding: Default::default(),
    }
}

pub(crate) fn allocation(devices: &[&str]) -> Allocation {
    Allocation {
        devices: devices.iter().map(|text| device(text)).collect(),
        ..Default::default()
    }
}

/// A claim `NAME`, or `NAME@UID`, reserved for the pods.
pub(crate) fn claim(text: &str, devices: &[&str], pods: &[&ObjectRef]) -> Claim {
    let (name, uid) = text
        .split_once('@')
        .map_or((text, format!("uid-{text}")), |(n, u)| (n, u.to_owned()));
    Claim {
        id: ObjectRef::new("default", name, &uid).unwrap(),
        allocation: Some(allocation(devices)),
        reserved_for: pods.iter().map(|pod| Consumer::of_pod(pod)).collect(),
        annotations: Default::default(),
        owner_pod: None,
        resource: None,
    }
}

/// Returns a driver's result for its devices of a claim.
pub(crate) fn prepared(devices: &[AllocatedDevice], memo: &str) -> PreparedClaim {
    PreparedClaim {
        devices: devices
            .iter()
            .map(|device| PreparedDevice {
                requests: vec![device.base_request().to_owned()],
                pool: device.pool.clone(),
                device: device.device.clone(),
                share_id: device.share_id.clone(),
                access: DeviceAccess::Edits(Edits {
                    env: vec![("MEMO".to_owned(), memo.to_owned())],
                    ..Default::default()
                }),
                status: None,
                attributes: None,
            })
            .collect(),
        memo: memo.into(),
        ..Default::default()
    }
}

pub(crate) fn permanent() -> Problem {
    Problem::invalid("bad-parameters", "this can never be")
}

pub(crate) fn transient() -> Problem {
    Problem::unavailable("device-busy", "not now")
}
