//! The statuses of devices of a kubelet's claims, as they are published. Pure.

use nodedock_model::{
    BindingConditions, ClaimRecord, ClaimStatuses, Condition, DeviceStatus, DriverName,
    PreparedDevice, ReportedDevice,
};

/// Returns whether a claim may have a status to publish.
pub(crate) fn has_status(record: &ClaimRecord) -> bool {
    let prepared = record
        .drivers
        .values()
        .filter_map(|part| part.prepared.as_ref());
    let mut devices = prepared.flat_map(|prepared| &prepared.devices);
    devices.any(|device| device.status.is_some())
        || record
            .allocation
            .devices
            .iter()
            .any(|device| !device.binding.is_empty())
}

/// Returns the device statuses to publish for a claim; None if there are none.
pub fn statuses(record: &ClaimRecord) -> Option<ClaimStatuses> {
    let is_object = record.kubelet.as_ref().is_some_and(|hold| !hold.given);
    let held = record
        .drivers
        .iter()
        .filter(|(_, part)| is_object && part.kubelet);
    let current = held.filter_map(|(driver, part)| Some((driver, part.current()?)));
    let devices = current.flat_map(|(driver, prepared)| {
        let reported = prepared.devices.iter().filter_map(|device| {
            Some(ReportedDevice {
                driver: driver.clone(),
                pool: device.pool.clone(),
                device: device.device.clone(),
                share_id: device.share_id.clone(),
                status: status_of(record, driver, device)?,
            })
        });
        reported.collect::<Vec<_>>()
    });
    let devices: Vec<_> = devices.collect();
    (!devices.is_empty()).then(|| ClaimStatuses {
        claim: record.id.clone(),
        allocated_ms: 0,
        devices,
    })
}

/// Returns the status to publish for a prepared device: the status that its driver reported, and the condition of the host, if a scheduler
/// waits for it.
fn status_of(
    record: &ClaimRecord,
    driver: &DriverName,
    device: &PreparedDevice,
) -> Option<DeviceStatus> {
    let mut allocated = record.allocation.of_driver(driver);
    let allocated = allocated.find(|known| {
        (&known.pool, &known.device, &known.share_id)
            == (&device.pool, &device.device, &device.share_id)
    });
    let is_awaited = allocated.is_some_and(|known| {
        known
            .binding
            .conditions
            .iter()
            .any(|kind| kind == BindingConditions::PREPARED)
    });
    let reported = device.status.iter().flat_map(|status| &status.conditions);
    if !is_awaited
        || reported
            .map(|condition| condition.kind.as_str())
            .any(|kind| kind == BindingConditions::PREPARED)
    {
        return device.status.clone();
    }
    let mut status = device.status.clone().unwrap_or_default();
    let (reason, message) = (
        "Prepared".to_owned(),
        "the device is prepared on its node".to_owned(),
    );
    let kind = BindingConditions::PREPARED.to_owned();
    // Of too many conditions the first are published.
    status.conditions.insert(
        0,
        Condition {
            kind,
            status: Some(true),
            reason,
            message,
        },
    );
    Some(status)
}
