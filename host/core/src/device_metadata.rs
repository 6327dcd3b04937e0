//! Device metadata files (KEP-5304), in which a container reads what its devices are.
//!
//! A prepared claim has one file for each driver and request. Given a driver's result and its inventory, this module adds the attributes
//! to the result, and the mounts of the files to its container edits. Both become part of the claim's record, from which the files are
//! rendered: the same record has the same bytes. Owns the directory of the files. Never decides whether a claim keeps its files.

mod directory;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::mem;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::value::RawValue;

pub use directory::MetadataDir;

use crate::cdi::{self, FileAccess};
use nodedock_model::{
    AttributeValue, ClaimRecord, DeviceAccess, DriverName, Edits, Inventory, Mount, NetworkData,
    POD_CLAIM_NAME, PoolName, PoolNames, PreparedClaim, PreparedDevice, Problem, ProblemCode,
    QualifiedName, Uid, is_dns_label, limit::ATTRIBUTES_MAX,
};

/// Directory in which containers find the files (KEP-5304).
pub const CONTAINER_DIR: &str = "/var/run/kubernetes.io/dra-device-attributes";
const SUFFIX: &str = "-metadata.json";
const EXTENSION: &str = ".json";
const KIND: &str = "DeviceMetadata";
/// The same content in each version, the newest first: a reader uses the first that it knows.
const VERSIONS: [&str; 2] = [
    "metadata.resource.k8s.io/v1beta1",
    "metadata.resource.k8s.io/v1alpha1",
];

/// Settings of metadata files: whether prepared claims get them, and where they are.
#[derive(Debug, Clone)]
pub struct MetadataSettings {
    /// Files of claims that are prepared from now on; those of other claims stay.
    pub is_enabled: bool,
    /// The directory of the files, by the path that a container runtime mounts.
    pub directory: PathBuf,
    /// Access rights to the directory.
    pub access: FileAccess,
    /// The names of pools outside of the daemon, which claims and files have.
    pub pools: PoolNames,
}

/// A file of a prepared claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetadataFile {
    pub name: FileName,
    pub bytes: Vec<u8>,
}

/// Name of a file below the metadata directory: the request of a claim whose devices of a driver it describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileName {
    pub driver: DriverName,
    pub claim: Uid,
    /// A DNS label.
    pub request: String,
}

impl FileName {
    /// Returns the path below the metadata directory: the directory of the driver, and in it `CLAIM_REQUEST.json`. A label has no `_`.
    pub fn below(&self) -> PathBuf {
        let file = format!("{}_{}{EXTENSION}", self.claim, self.request);
        Path::new(self.driver.as_str()).join(file)
    }

    /// Parses the name of a file in the directory of a driver. `None`: it is not one of these files.
    fn parse(driver: DriverName, name: &str) -> Option<Self> {
        let (claim, request) = name.strip_suffix(EXTENSION)?.rsplit_once('_')?;
        Some(Self {
            driver,
            // no error: another file
            claim: Uid::new(claim).ok()?,
            request: is_dns_label(request).then(|| request.to_owned())?,
        })
    }
}

/// Why a claim cannot have metadata files.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    #[error(
        "annotation {POD_CLAIM_NAME} of claim {claim} is {value:?}, which is not a DNS label and must not become part of a path"
    )]
    PodClaimName { claim: String, value: String },
    #[error(
        "claim {claim} has the request {request:?}, which is not a DNS label and must not become part of a path"
    )]
    Request { claim: String, request: String },
    #[error(
        "device {device} of driver {driver} has {count} attributes, with those that the driver added to claim {claim}, and {ATTRIBUTES_MAX} are the most"
    )]
    Attributes {
        claim: String,
        driver: DriverName,
        device: String,
        count: usize,
    },
}

impl From<MetadataError> for Problem {
    fn from(error: MetadataError) -> Self {
        let code = match error {
            MetadataError::PodClaimName { .. } | MetadataError::Request { .. } => {
                ProblemCode::MetadataPath
            }
            MetadataError::Attributes { .. } => ProblemCode::MetadataAttributes,
        };
        Problem::invalid(code, error.to_string())
    }
}

/// Returns the directory for the files of a daemon, as identified in CDI files: beside them, since the runtimes that read these mount the
/// metadata files, and have to reach them. CDI libraries skip directories.
pub fn directory_beside(cdi: &Path, daemon: &str) -> PathBuf {
    cdi.join(format!("nodedock-metadata-{}", cdi::tag(daemon)))
}

/// Returns the names of a claim's files of one driver, of those that it may have.
pub(crate) fn names(record: &ClaimRecord, driver: &DriverName) -> Vec<FileName> {
    let names = requests(record, driver)
        .into_iter()
        .filter_map(|request| name(record, driver, request));
    names.collect()
}

/// `None`: the request must not become part of a path.
fn name(record: &ClaimRecord, driver: &DriverName, request: &str) -> Option<FileName> {
    is_dns_label(request).then(|| FileName {
        driver: driver.clone(),
        claim: record.id.uid.clone(),
        request: request.to_owned(),
    })
}

/// Adds attributes and mounts to a driver's result, which is not in the record yet. Devices of native plugins have neither: their plugins
/// write CDI files and metadata themselves.
pub fn add(
    record: &ClaimRecord,
    driver: &DriverName,
    prepared: &mut PreparedClaim,
    inventory: Option<&Inventory>,
    settings: &MetadataSettings,
) -> Result<(), MetadataError> {
    let statuses = prepared
        .devices
        .iter_mut()
        .map(|device| device.status.as_mut());
    let added: Vec<_> = statuses
        .map(|status| {
            status
                .map(|status| mem::take(&mut status.attributes))
                .unwrap_or_default()
        })
        .collect();
    if !settings.is_enabled
        || prepared
            .devices
            .iter()
            .all(|device| device.access.edits().is_none())
    {
        return Ok(());
    }
    let in_container = container_directory(record)?;
    for (device, added) in prepared.devices.iter_mut().zip(&added) {
        if device.access.edits().is_some() {
            let published = inventory.and_then(|known| known.device(&device.pool, &device.device));
            device.attributes = Some(attributes_of(record, driver, device, published, added)?);
        }
    }
    for request in requests(record, driver) {
        let Some(name) = name(record, driver, request) else {
            let (claim, request) = (record.id.to_string(), request.to_owned());
            return Err(MetadataError::Request { claim, request });
        };
        // A container that uses the request has all of its devices, and needs the file once.
        let mut of_request = prepared
            .devices
            .iter_mut()
            .filter(|device| serves(device, request));
        if let Some(edits) = of_request.find_map(|device| edits_mut(&mut device.access)) {
            let on_node = settings.directory.join(name.below());
            let of_request = in_container.join(request);
            edits.mounts.push(mount(&on_node, &of_request, driver));
        }
    }
    let before = record
        .drivers
        .get(driver)
        .and_then(|part| part.prepared.as_ref());
    prepared.metadata_generation = before.map_or(0, |before| before.metadata_generation) + 1;
    Ok(())
}

/// Returns the files of a claim, of the drivers that have prepared it.
pub fn render(record: &ClaimRecord, settings: &MetadataSettings) -> Vec<MetadataFile> {
    let parts = record
        .drivers
        .iter()
        .filter_map(|(driver, part)| Some((driver, part.current()?)));
    let files = parts.flat_map(|(driver, prepared)| {
        let requests = requests(record, driver).into_iter();
        requests.filter_map(move |request| file(record, driver, prepared, request, settings))
    });
    files.collect()
}

/// `None`: no device of the request has metadata.
fn file(
    record: &ClaimRecord,
    driver: &DriverName,
    prepared: &PreparedClaim,
    request: &str,
    settings: &MetadataSettings,
) -> Option<MetadataFile> {
    let of_request = prepared
        .devices
        .iter()
        .filter(|device| serves(device, request));
    let devices: Vec<_> = of_request
        .filter_map(|device| Device::of(driver, device, &settings.pools))
        .collect();
    if devices.is_empty() {
        return None;
    }
    // With its subrequest, as in the allocation.
    let mut allocated = record
        .allocation
        .of_driver(driver)
        .filter(|device| device.base_request() == request);
    let name = allocated.next().map_or(request, |device| &device.request);
    let file = self::name(record, driver, request)?;
    let mut bytes = Vec::new();
    for api_version in VERSIONS {
        let object = DeviceMetadata {
            kind: KIND,
            api_version,
            metadata: ObjectMeta {
                name: record.id.name.as_str(),
                namespace: record.id.namespace.as_str(),
                uid: record.id.uid.as_str(),
                generation: prepared.metadata_generation,
            },
            pod_claim_name: record.annotations.get(POD_CLAIM_NAME).map(String::as_str),
            requests: [Request {
                name,
                devices: &devices,
            }],
        };
        serde_json::to_writer(&mut bytes, &object).expect("a value with text keys is JSON");
        bytes.push(b'\n');
    }
    Some(MetadataFile { name: file, bytes })
}

/// Returns the base names of a driver's requests, each once.
fn requests<'a>(record: &'a ClaimRecord, driver: &'a DriverName) -> Vec<&'a str> {
    let mut requests = Vec::new();
    for device in record.allocation.of_driver(driver) {
        if !requests.contains(&device.base_request()) {
            requests.push(device.base_request());
        }
    }
    requests
}

fn serves(device: &PreparedDevice, request: &str) -> bool {
    device.requests.is_empty() || device.requests.iter().any(|known| known == request)
}

fn edits_mut(access: &mut DeviceAccess) -> Option<&mut Edits> {
    match access {
        DeviceAccess::Edits(edits) | DeviceAccess::EditsAndCdiDevices(edits, _) => Some(edits),
        DeviceAccess::CdiDevices(_) | DeviceAccess::Plugin(_) => None,
    }
}

/// Returns the directory of a claim in a container: by the pod's own name for a claim from a template, whose name is generated.
fn container_directory(record: &ClaimRecord) -> Result<PathBuf, MetadataError> {
    let directory = Path::new(CONTAINER_DIR);
    match record.annotations.get(POD_CLAIM_NAME) {
        None => Ok(directory
            .join("resourceclaims")
            .join(record.id.name.as_str())),
        Some(name) if is_dns_label(name) => Ok(directory.join("resourceclaimtemplates").join(name)),
        Some(name) => {
            let (claim, value) = (record.id.to_string(), name.clone());
            Err(MetadataError::PodClaimName { claim, value })
        }
    }
}

fn mount(on_node: &Path, in_container: &Path, driver: &DriverName) -> Mount {
    let container_path = in_container.join(format!("{driver}{SUFFIX}"));
    Mount {
        host_path: on_node.to_string_lossy().into_owned(),
        container_path: container_path.to_string_lossy().into_owned(),
        options: ["ro", "bind"].map(str::to_owned).to_vec(),
        fs_type: None,
    }
}

/// Returns the attributes of the inventory and those that the driver added, which take precedence.
fn attributes_of(
    record: &ClaimRecord,
    driver: &DriverName,
    device: &PreparedDevice,
    published: Option<&nodedock_model::Device>,
    added: &BTreeMap<QualifiedName, AttributeValue>,
) -> Result<String, MetadataError> {
    let published = published.into_iter().flat_map(|device| &device.attributes);
    let all: BTreeMap<_, _> = published.chain(added).collect();
    if all.len() > ATTRIBUTES_MAX {
        let (claim, driver) = (record.id.to_string(), driver.clone());
        let device = format!("{}/{}", device.pool, device.device);
        return Err(MetadataError::Attributes {
            claim,
            driver,
            device,
            count: all.len(),
        });
    }
    let all: BTreeMap<_, _> = all
        .into_iter()
        .map(|(name, value)| (name, Attribute::from(value)))
        .collect();
    Ok(serde_json::to_string(&all).expect("a value with text keys is JSON"))
}

/// An object of the stream.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct DeviceMetadata<'a> {
    kind: &'static str,
    api_version: &'static str,
    metadata: ObjectMeta<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod_claim_name: Option<&'a str>,
    requests: [Request<'a>; 1],
}

#[derive(Serialize)]
struct ObjectMeta<'a> {
    name: &'a str,
    namespace: &'a str,
    uid: &'a str,
    /// Counts the prepares of the claim that succeeded.
    generation: u64,
}

#[derive(Serialize)]
struct Request<'a> {
    name: &'a str,
    devices: &'a [Device<'a>],
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Device<'a> {
    driver: &'a str,
    pool: PoolName,
    name: &'a str,
    attributes: &'a RawValue,
    #[serde(skip_serializing_if = "Option::is_none")]
    network_data: Option<Network<'a>>,
}

impl<'a> Device<'a> {
    /// `None`: the device has no metadata.
    fn of(driver: &'a DriverName, device: &'a PreparedDevice, pools: &PoolNames) -> Option<Self> {
        Some(Self {
            driver: driver.as_str(),
            pool: pools.shown(&device.pool),
            name: device.device.as_str(),
            attributes: serde_json::from_str(device.attributes.as_deref()?).ok()?,
            network_data: device
                .status
                .as_ref()
                .and_then(|status| status.network.as_ref())
                .map(Network::of),
        })
    }
}

/// Network data as in `resource.k8s.io/v1`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Network<'a> {
    #[serde(skip_serializing_if = "str::is_empty")]
    interface_name: &'a str,
    #[serde(skip_serializing_if = "<[String]>::is_empty")]
    ips: &'a [String],
    #[serde(skip_serializing_if = "str::is_empty")]
    hardware_address: &'a str,
}

impl<'a> Network<'a> {
    fn of(network: &'a NetworkData) -> Self {
        let NetworkData {
            interface_name,
            ips,
            hardware_address,
        } = network;
        Self {
            interface_name,
            ips,
            hardware_address,
        }
    }
}

/// An attribute as in `resource.k8s.io/v1`.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Attribute<'a> {
    Int(i64),
    Bool(bool),
    String(&'a str),
    Version(&'a semver::Version),
    Ints(&'a [i64]),
    Bools(&'a [bool]),
    Strings(&'a [String]),
    Versions(&'a [semver::Version]),
}

impl<'a> From<&'a AttributeValue> for Attribute<'a> {
    fn from(value: &'a AttributeValue) -> Self {
        match value {
            AttributeValue::Int(value) => Self::Int(*value),
            AttributeValue::Bool(value) => Self::Bool(*value),
            AttributeValue::Text(value) => Self::String(value),
            AttributeValue::Version(value) => Self::Version(value),
            AttributeValue::Ints(list) => Self::Ints(list),
            AttributeValue::Bools(list) => Self::Bools(list),
            AttributeValue::Texts(list) => Self::Strings(list),
            AttributeValue::Versions(list) => Self::Versions(list),
        }
    }
}
