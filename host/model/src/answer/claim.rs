//! A claim as a driver prepared it. Which of its edits are granted, and true on the node, is checked elsewhere, as is whether its devices are
//! those of the claim.

use std::collections::BTreeMap;

use super::Labels;
use super::inventory::attributes;
use crate::check::{self, Field, Findings, Reason};
use crate::limit::{
    ALLOCATED_DEVICES_MAX, ATTRIBUTES_MAX, CONDITION_TYPE_BYTES_MAX, LABEL_VALUE_BYTES_MAX,
    LABELS_MAX, MEMO_BYTES_MAX, STATUS_CONDITIONS_MAX, STATUS_IPS_MAX,
};
use crate::{
    Condition, DeviceAccess, DeviceName, DeviceStatus, DriverName, NetworkData, PoolName,
    PreparedClaim, PreparedDevice, is_label_key,
};

/// Converts a prepared claim. Without the driver's name, `name` and `driver/name` count as different attributes.
///
/// # Errors
///
/// What is wrong with it.
pub fn prepared_claim(
    driver: Option<&DriverName>,
    answer: super::PreparedClaim,
) -> Result<PreparedClaim, Findings> {
    let mut findings = Findings::default();
    findings.field(Field::Memo, |at| {
        at.bytes(answer.memo.len(), MEMO_BYTES_MAX)
    });
    let mut devices = Vec::new();
    if findings.at_most(Field::Devices, answer.devices.len(), ALLOCATED_DEVICES_MAX) {
        devices = self::devices(&mut findings, driver, answer.devices);
    }
    findings.field(Field::Edits, |at| check::edits(at, &answer.edits));
    let annotations = annotations(&mut findings, answer.annotations);
    findings.accept(PreparedClaim {
        devices,
        annotations,
        edits: answer.edits,
        memo: answer.memo,
        metadata_generation: 0,
    })
}

fn devices(
    findings: &mut Findings,
    driver: Option<&DriverName>,
    answer: Vec<super::PreparedDevice>,
) -> Vec<PreparedDevice> {
    let mut devices: Vec<PreparedDevice> = Vec::with_capacity(answer.len());
    for device in answer {
        let shown = format!("{}/{}", device.pool, device.device);
        let device = findings.named(Field::Device, &shown, |at| {
            let device = prepared_device(at, driver, device)?;
            let same = |other: &PreparedDevice| {
                (&other.pool, &other.device, &other.share_id)
                    == (&device.pool, &device.device, &device.share_id)
            };
            if devices.iter().any(same) {
                at.add(Reason::Duplicate(shown.clone()));
            }
            Some(device)
        });
        devices.extend(device);
    }
    devices
}

fn prepared_device(
    findings: &mut Findings,
    driver: Option<&DriverName>,
    device: super::PreparedDevice,
) -> Option<PreparedDevice> {
    let pool = findings.parsed(PoolName::new(&device.pool));
    let name = findings.parsed(DeviceName::new(&device.device));
    findings.at_most(
        Field::Requests,
        device.requests.len(),
        ALLOCATED_DEVICES_MAX,
    );
    findings.field(Field::Edits, |at| check::edits(at, &device.edits));
    let status = device
        .status
        .map(|given| findings.field(Field::Status, |at| status(at, driver, given)));
    Some(PreparedDevice {
        requests: device.requests,
        pool: pool?,
        device: name?,
        share_id: device.share_id,
        access: DeviceAccess::Edits(device.edits),
        status,
        attributes: None,
    })
}

/// Annotations reach the container runtime, which would inject devices of any driver for those of CDI.
fn annotations(findings: &mut Findings, entries: Labels) -> BTreeMap<String, String> {
    findings.labels(Field::Annotations, &entries);
    for (key, _) in entries.iter().take(LABELS_MAX) {
        findings.field(Field::Annotations, |at| {
            at.require(is_label_key(key), key, "is not the name of an annotation");
            let is_of_cdi = key.starts_with("cdi.k8s.io/");
            at.require(
                !is_of_cdi,
                key,
                "is not allowed: devices are injected by edits only",
            );
        });
    }
    entries.into_iter().collect()
}

fn status(
    findings: &mut Findings,
    driver: Option<&DriverName>,
    answer: super::DeviceStatus,
) -> DeviceStatus {
    let mut status = answer.status;
    let conditions = &status.conditions;
    findings.each(
        Field::Conditions,
        conditions,
        STATUS_CONDITIONS_MAX,
        condition,
    );
    findings.unique(
        Field::Conditions,
        conditions.iter().map(|condition| condition.kind.as_str()),
    );
    if let Some(data) = &status.data {
        check::data(findings, data);
    }
    if let Some(network) = &status.network {
        findings.field(Field::Network, |at| self::network(at, network));
    }
    if findings.at_most(Field::Attributes, answer.attributes.len(), ATTRIBUTES_MAX) {
        status.attributes = attributes(findings, driver, answer.attributes);
    }
    status
}

/// The host writes the reason in the form that the API takes: a driver's is any line, or empty.
fn condition(findings: &mut Findings, condition: &Condition) {
    check::condition_type(findings, &condition.kind);
    let max = CONDITION_TYPE_BYTES_MAX;
    findings.field(Field::Kind, |at| at.bytes(condition.kind.len(), max));
    for (field, text) in [
        (Field::Reason, &condition.reason),
        (Field::Message, &condition.message),
    ] {
        findings.field(field, |at| at.line(text, LABEL_VALUE_BYTES_MAX));
    }
}

/// The host writes addresses in their canonical form, each once.
fn network(findings: &mut Findings, network: &NetworkData) {
    let (name, address) = (&network.interface_name, &network.hardware_address);
    if check::interface_name(findings, name) {
        findings.field(Field::InterfaceName, |at| at.line(name, usize::MAX));
    }
    if check::hardware_address(findings, address) {
        findings.field(Field::HardwareAddress, |at| at.line(address, usize::MAX));
    }
    findings.each(Field::Ips, &network.ips, STATUS_IPS_MAX, |at, ip| {
        check::interface_address(at, ip);
    });
}
