//! Renders files from a claim record. Pure: the same record has the same bytes.

use std::collections::HashMap;

use super::identity::{DAEMON_OPENING, Identity, MARK};
use super::spec::{Device, Spec};
use super::validate::{SpecError, validate};
use nodedock_model::{ClaimRecord, DeviceAccess, DriverName, Edits, PreparedClaim, Uid};

/// The class of every CDI kind: the devices are claims, of any hardware.
const CLASS: &str = "claim";

/// A file of the CDI directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecFile {
    /// `DRIVER_UID.yaml`: a driver's name has no `_`.
    pub name: String,
    /// The identity as a YAML comment, and the spec as a line of JSON, which is YAML.
    pub bytes: Vec<u8>,
}

/// Why a claim has no file.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    #[error("render the CDI spec of driver {driver} for claim {claim}")]
    Refused {
        driver: DriverName,
        claim: Uid,
        source: SpecError,
    },
    #[error(
        "driver {driver} prepared claim {claim} with edits for all its containers, and without a device by which a container requests them"
    )]
    EditsWithoutDevice { driver: DriverName, claim: Uid },
    #[error("driver {driver} has not prepared claim {claim}")]
    NotPrepared { driver: DriverName, claim: Uid },
}

/// Name of the file of a claim and a driver.
pub fn file_name(driver: &DriverName, claim: &Uid) -> String {
    format!("{driver}_{claim}.yaml")
}

/// Parses a name that `file_name` returns.
pub fn file_of(name: &str) -> Option<(DriverName, Uid)> {
    let (driver, uid) = name.strip_suffix(".yaml")?.split_once('_')?;
    Some((DriverName::new(driver).ok()?, Uid::new(uid).ok()?))
}

/// Returns a driver's prepared devices with their CDI names. A device with edits has the daemon's own name; names of a native plugin are
/// passed through. Empty if the driver has not prepared the claim.
pub fn cdi_devices<'a>(
    record: &'a ClaimRecord,
    driver: &DriverName,
) -> Vec<(&'a nodedock_model::PreparedDevice, Vec<String>)> {
    let Some(prepared) = prepared(record, driver) else {
        return Vec::new();
    };
    let names = device_names(&record.id.uid, prepared);
    let qualified = prepared.devices.iter().zip(names).map(|(device, name)| {
        let own = format!("{driver}/{CLASS}={name}");
        let names = match &device.access {
            DeviceAccess::Edits(_) => vec![own],
            DeviceAccess::CdiDevices(names) => names.clone(),
            DeviceAccess::EditsAndCdiDevices(_, names) => [&[own], &names[..]].concat(),
            // They are in the answer, with the rest of it.
            DeviceAccess::Plugin(_) => Vec::new(),
        };
        (device, names)
    });
    qualified.collect()
}

/// Returns the files of a claim: one for each driver that has prepared it by edits.
pub fn render(record: &ClaimRecord) -> Result<Vec<SpecFile>, RenderError> {
    let drivers = record
        .drivers
        .iter()
        .filter(|(_, part)| part.current().is_some());
    drivers
        .filter_map(|(driver, _)| render_driver(record, driver).transpose())
        .collect()
}

/// Returns the file of one driver. `None`: no part of it is applied by edits.
pub fn render_driver(
    record: &ClaimRecord,
    driver: &DriverName,
) -> Result<Option<SpecFile>, RenderError> {
    let claim = &record.id.uid;
    let Some(prepared) = prepared(record, driver) else {
        return Err(RenderError::NotPrepared {
            driver: driver.clone(),
            claim: claim.clone(),
        });
    };
    let Some(spec) = valid_spec(record, driver, prepared)? else {
        return Ok(None);
    };
    let identity = Identity::of(record, driver, prepared);
    Ok(Some(SpecFile {
        name: file_name(driver, claim),
        bytes: bytes_of(&identity, &spec),
    }))
}

/// Checks that a driver's result, which is not in the record yet, makes a valid file or none.
pub fn check(
    record: &ClaimRecord,
    driver: &DriverName,
    prepared: &PreparedClaim,
) -> Result<(), RenderError> {
    valid_spec(record, driver, prepared).map(drop)
}

fn valid_spec(
    record: &ClaimRecord,
    driver: &DriverName,
    prepared: &PreparedClaim,
) -> Result<Option<Spec>, RenderError> {
    let claim = &record.id.uid;
    let spec = spec_of(record, driver, prepared);
    if spec.devices.is_empty() {
        let error = RenderError::EditsWithoutDevice {
            driver: driver.clone(),
            claim: claim.clone(),
        };
        return if prepared.edits.is_empty() {
            Ok(None)
        } else {
            Err(error)
        };
    }
    validate(&spec).map_err(|source| RenderError::Refused {
        driver: driver.clone(),
        claim: claim.clone(),
        source,
    })?;
    Ok(Some(spec))
}

fn prepared<'a>(record: &'a ClaimRecord, driver: &DriverName) -> Option<&'a PreparedClaim> {
    record.drivers.get(driver)?.current()
}

/// Returns a name for each prepared device: `UID-DEVICE`, and `UID-DEVICE.N` for the Nth with the same device name (of another pool,
/// or another share). A device's name has no dot, so the names are unique.
fn device_names(claim: &Uid, prepared: &PreparedClaim) -> Vec<String> {
    let mut seen: HashMap<&str, u32> = HashMap::new();

    let mut names = Vec::with_capacity(prepared.devices.len());
    for device in &prepared.devices {
        let nth = seen.entry(device.device.as_str()).or_default();
        *nth += 1;
        names.push(match *nth {
            1 => format!("{claim}-{}", device.device),
            nth => format!("{claim}-{}.{nth}", device.device),
        });
    }
    names
}

fn spec_of(record: &ClaimRecord, driver: &DriverName, prepared: &PreparedClaim) -> Spec {
    let names = device_names(&record.id.uid, prepared);
    let devices = prepared.devices.iter().zip(names);
    let devices =
        devices.filter_map(|(device, name)| Some(device_of(record, name, device.access.edits()?)));
    let mut spec = Spec {
        kind: format!("{driver}/{CLASS}"),
        devices: devices.collect(),
        container_edits: in_file(&prepared.edits),
        ..Spec::default()
    };
    spec.cdi_version = spec.required_version().as_str().to_owned();
    spec
}

fn device_of(record: &ClaimRecord, name: String, edits: &Edits) -> Device {
    let mut container_edits = in_file(edits);
    if container_edits.is_empty() {
        container_edits.env.push(filler(record));
    }
    Device {
        name,
        container_edits,
    }
}

/// CDI libraries refuse a device without edits, so a device that needs none gets a variable that names the claim, with the same
/// value for all devices of the claim.
fn filler(record: &ClaimRecord) -> (String, String) {
    let bytes = record.id.uid.as_str().bytes();
    let uid: String = bytes
        .map(|b| match b.is_ascii_alphanumeric() {
            true => b.to_ascii_uppercase() as char,
            false => '_',
        })
        .collect();
    (format!("NODEDOCK_CLAIM_{uid}"), record.id.to_string())
}

/// Returns edits without what has no effect: a path on the node needs CDI 0.5.0 also if it is the one in the container.
fn in_file(edits: &Edits) -> Edits {
    let mut edits = edits.clone();
    for node in &mut edits.device_nodes {
        node.host_path.take_if(|path| *path == node.path);
    }
    edits
}

fn bytes_of(identity: &Identity, spec: &Spec) -> Vec<u8> {
    const PLAIN: &str = "a value with text keys is JSON";
    let identity = serde_json::to_string(identity).expect(PLAIN);
    let spec = serde_json::to_string(spec).expect(PLAIN);
    let mut text = String::with_capacity(MARK.len() + identity.len() + spec.len() + 2);
    text.push_str(MARK);
    push_for_yaml(&mut text, &identity);
    text.push('\n');
    push_for_yaml(&mut text, &spec);
    text.push('\n');
    text.into_bytes()
}

/// Returns the beginning of the files of one daemon: the mark, and the daemon as the first entry of the identity.
pub(super) fn mark_of(daemon: &str) -> String {
    let mut mark = DAEMON_OPENING.to_owned();
    push_for_yaml(&mut mark, &serde_json::Value::from(daemon).to_string());
    mark.push(',');
    mark
}

/// Escapes characters that JSON allows in a text and YAML does not: controls, and the line ends of YAML 1.1, with which a driver's
/// text could leave the comment.
fn push_for_yaml(text: &mut String, json: &str) {
    let mut rest = json;
    while let Some(at) = rest.find(is_special_in_yaml) {
        let (plain, special) = rest.split_at(at);
        text.push_str(plain);
        let mut characters = special.chars();
        for c in characters.by_ref().take(1) {
            text.push_str(&format!("\\u{:04x}", u32::from(c)));
        }
        rest = characters.as_str();
    }
    text.push_str(rest);
}

fn is_special_in_yaml(c: char) -> bool {
    matches!(
        c,
        '\u{7f}'..='\u{9f}' | '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}'
    )
}
