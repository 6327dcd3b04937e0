//! The devices of CDI specs as the registry has them: with attributes, identities and health from the node. Blocking functions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use super::exclusion::identities;
use super::merge::{CdiDevice, KnownSpec, merged};
use super::{CdiDriverParts, CdiDriverSettings};
use crate::cdi::foreign;
use crate::driver::Published;
use crate::sysfs::SysfsRoot;
use crate::sysfs::pci::PciAddress;
use crate::{hardware_keys, standard_attributes};
use nodedock_base::error::chain;
use nodedock_base::printable::one_line;
use nodedock_model::{
    AttributeValue, Device, DeviceHealth, DeviceName, DeviceNode, HealthReport, HealthState,
    Inventory, PoolName, Problem, ProblemCode, QualifiedName, device_name, limit,
};
use uuid::Uuid;

/// Digits and dashes of a UUID, at the end of a name.
const UUID_BYTES: usize = 36;
/// Directories between a PCI function and the node of a device that the function is: `drm/card0`, `nvme/nvme0/nvme0n1`.
const FUNCTION_DEPTH_MAX: usize = 3;

/// Bytes of an error that a condition shows: it may have a text of the file.
const WHY_BYTES_MAX: usize = 256;

/// Devices with what a claim gets of them.
pub(super) type CdiDevices = BTreeMap<(PoolName, DeviceName), CdiDevice>;

/// The specs of all directories, sorted by directory and path.
#[derive(Default)]
pub(super) struct ReadSpecs {
    pub(super) specs: Vec<KnownSpec>,
    /// Conditions by their subjects.
    pub(super) problems: BTreeMap<String, Problem>,
}

/// The devices of specs, and what the node says of them.
pub(super) struct Looked {
    pub(super) devices: CdiDevices,
    pub(super) published: Published,
    /// Conditions by their subjects, with those of the specs.
    pub(super) problems: BTreeMap<String, Problem>,
}

/// A device node of the specs on this node.
#[derive(Default)]
struct Node {
    /// Why its device is not usable; `Unknown` if it cannot be looked at.
    health: Option<DeviceHealth>,
    has_device: bool,
    functions: BTreeSet<String>,
}

/// Makes devices of specs, and looks at their nodes.
pub(super) fn look(
    parts: &CdiDriverParts,
    settings: &CdiDriverSettings,
    read: &ReadSpecs,
) -> Result<Looked, Problem> {
    let ReadSpecs { specs, problems } = read;
    let mut problems = problems.clone();
    let nodes = nodes(parts, specs);
    let has_device = |path: &str| nodes.get(path).is_none_or(|node| node.has_device);
    let merged = merged(specs, |kind| settings.has(kind), has_device);
    for (name, why) in &merged.conflicts {
        problems.insert(name.clone(), conflict(name, why));
    }
    let devices = merged.devices;
    let kinds: BTreeSet<_> = devices.iter().map(|device| &device.kind).collect();
    if devices.len() > limit::DEVICES_MAX || kinds.len() > limit::POOLS_MAX {
        let message = format!(
            "the CDI specs have {} devices of {} kinds, and {} of {} are the most: name the wanted kinds in `cdiDriver.kinds`",
            devices.len(),
            kinds.len(),
            limit::DEVICES_MAX,
            limit::POOLS_MAX
        );
        return Err(Problem::invalid(ProblemCode::CdiSpecInvalid, message));
    }
    let functions: Vec<_> = devices
        .iter()
        .map(|device| only_function(device, &nodes))
        .collect();
    let identities = identities(&devices, &functions);
    let names = device_names(&devices);
    let mut inventory = Inventory::default();
    let mut health = HealthReport::new();
    let mut found = CdiDevices::new();
    for (((device, function), identity), name) in devices
        .into_iter()
        .zip(functions)
        .zip(identities)
        .zip(names)
    {
        let identity = match identity {
            Ok(identity) => identity,
            Err(why) => {
                let qualified = device.qualified();
                problems.insert(qualified.clone(), conflict(&qualified, &why));
                continue;
            }
        };
        let described = described(&parts.sysfs, &device, function.as_deref(), identity)?;
        let pool = pool_name(&device.kind);
        health.insert((pool.clone(), name.clone()), health_of(&device, &nodes));
        let of_kind = inventory.pools.entry(pool.clone()).or_default();
        of_kind.devices.insert(name.clone(), described);
        found.insert((pool, name), device);
    }
    standard_attributes::add(&parts.sysfs, parts.numa_node_form, &mut inventory)?;
    hardware_keys::add(&parts.hardware, &parts.sysfs, &mut inventory)?;
    Ok(Looked {
        devices: found,
        published: Published {
            inventory,
            health,
            ..Published::default()
        },
        problems,
    })
}

/// Reads the specs of all directories. A file that cannot be read, or is not valid any more, has the spec that it had.
pub(super) fn read(directories: &[PathBuf], before: &ReadSpecs) -> ReadSpecs {
    let (mut specs, mut problems) = (Vec::new(), BTreeMap::new());
    for (position, directory) in directories.iter().enumerate() {
        let known = before.specs.iter();
        let known = known.filter(|known| known.directory == position);
        let files = match foreign::read(directory) {
            Ok(files) => files,
            Err(error) => {
                let path = directory.display().to_string();
                problems.insert(path.clone(), invalid(&path, &chain(&error)));
                specs.extend(known.cloned());
                continue;
            }
        };
        for (path, read) in files {
            let spec = match read {
                Ok(spec) => Some(KnownSpec {
                    path,
                    directory: position,
                    spec: Arc::new(spec),
                    refused: None,
                }),
                Err(error) => {
                    let (subject, why) = (path.display().to_string(), chain(&error));
                    let problem = invalid(&subject, &why);
                    let refused = (!error.is_unknown()).then(|| problem.message.clone());
                    problems.insert(subject, problem);
                    let known = known.clone().find(|known| known.path == path);
                    known.map(|known| KnownSpec {
                        refused: refused.or_else(|| known.refused.clone()),
                        ..known.clone()
                    })
                }
            };
            specs.extend(spec);
        }
    }
    ReadSpecs { specs, problems }
}

fn invalid(path: &str, why: &str) -> Problem {
    let why = one_line(why, WHY_BYTES_MAX);
    let message = format!("{path} is not used as CDI specs: {why}");
    Problem::invalid(ProblemCode::CdiSpecInvalid, message).with("file", path)
}

fn conflict(device: &str, why: &str) -> Problem {
    let message = format!("the CDI device {device} cannot be claimed: {why}");
    Problem::conflict(ProblemCode::CdiSpecConflict, message).with("device", device)
}

fn nodes(parts: &CdiDriverParts, specs: &[KnownSpec]) -> BTreeMap<String, Node> {
    let edits = specs.iter().flat_map(|known| {
        let devices = known.spec.devices.iter();
        let of_devices = devices.map(|device| &device.container_edits);
        of_devices.chain([&known.spec.container_edits])
    });
    let paths: BTreeSet<_> = edits
        .flat_map(|edits| &edits.device_nodes)
        .map(|node| node.node_path())
        .collect();
    let looked = paths
        .into_iter()
        .map(|path| (path.to_owned(), node(parts, path)));
    looked.collect()
}

fn node(parts: &CdiDriverParts, path: &str) -> Node {
    let looked = hardware_keys::of_edit(&parts.hardware, &parts.sysfs, &DeviceNode::at(path));
    let (state, message) = match looked {
        Ok(Some(found)) => {
            return Node {
                health: None,
                has_device: found.has_hardware,
                functions: found
                    .keys
                    .iter()
                    .filter_map(|key| function_of(key))
                    .collect(),
            };
        }
        Ok(None) => (HealthState::Unhealthy, absent(path)),
        Err(problem) => (
            HealthState::Unknown,
            format!("{path} cannot be looked at: {problem}"),
        ),
    };
    Node {
        health: Some(DeviceHealth { state, message }),
        // Not known to have none.
        has_device: true,
        functions: BTreeSet::new(),
    }
}

pub(super) fn absent(path: &str) -> String {
    format!("the device node {path} is not there")
}

/// The PCI function that a directory of the kernel is, or is a device of; none of a device behind a controller of several.
fn function_of(key: &str) -> Option<String> {
    let below: Vec<&str> = key.strip_prefix("/sys/devices/")?.split('/').collect();
    // no error: other directories have other names
    let at = below.iter().rposition(|part| {
        part.parse::<PciAddress>().is_ok() && part.len() == "0000:00:00.0".len()
    })?;
    let rest = &below[at + 1..];
    let is_behind_bus = rest.first().is_some_and(|bus| bus.starts_with("usb"));
    (rest.len() <= FUNCTION_DEPTH_MAX && !is_behind_bus).then(|| below[at].to_owned())
}

fn only_function(device: &CdiDevice, nodes: &BTreeMap<String, Node>) -> Option<String> {
    let own = device.edits.device_nodes.iter();
    let functions: BTreeSet<_> = own
        .filter_map(|node| nodes.get(node.node_path()))
        .flat_map(|node| &node.functions)
        .collect();
    let mut functions = functions.into_iter();
    functions
        .next()
        .filter(|_| functions.next().is_none())
        .cloned()
}

fn health_of(device: &CdiDevice, nodes: &BTreeMap<String, Node>) -> DeviceHealth {
    if let Some(refused) = &device.file.refused {
        return DeviceHealth {
            state: HealthState::Unhealthy,
            message: one_line(refused, limit::HEALTH_MESSAGE_BYTES_MAX),
        };
    }
    let of_nodes = device.node_paths();
    let mut of_nodes = of_nodes
        .iter()
        .filter_map(|path| nodes.get(*path)?.health.as_ref());
    of_nodes.next().cloned().unwrap_or(DeviceHealth {
        state: HealthState::Healthy,
        message: String::new(),
    })
}

fn described(
    sysfs: &SysfsRoot,
    device: &CdiDevice,
    function: Option<&str>,
    identity: Vec<String>,
) -> Result<Device, Problem> {
    let mut found = Device {
        identity,
        ..Device::default()
    };
    set(&mut found, "kind", &device.kind);
    set(&mut found, "name", &device.name);
    for name in &device.names {
        // no error: a number is an index, and other names are not
        if let Ok(index) = name.parse() {
            let index = AttributeValue::Int(index);
            found.attributes.insert(attribute("index"), index);
        }
        let uuid = name.len().checked_sub(UUID_BYTES);
        if uuid.is_some_and(|at| name.get(at..).is_some_and(is_uuid)) {
            set(&mut found, "uuid", name);
        }
    }
    // no error: the name was made of an address
    if let Some(Ok(address)) = function.map(str::parse::<PciAddress>) {
        let directory = format!("bus/pci/devices/{address}");
        for name in ["vendor", "device", "class"] {
            if let Some(text) = sysfs.fact(&format!("{directory}/{name}"))? {
                set(&mut found, name, &text);
            }
        }
        let driver = sysfs.find(&format!("{directory}/driver"))?;
        if let Some(name) = driver.as_deref().and_then(|path| path.rsplit('/').next()) {
            set(&mut found, "driver", name);
        }
        standard_attributes::add_of_function(sysfs, &mut found, &address)?;
    }
    Ok(found)
}

fn is_uuid(text: &str) -> bool {
    // no error: other names are no UUIDs
    Uuid::try_parse(text).is_ok()
}

fn attribute(name: &str) -> QualifiedName {
    QualifiedName::new(name).expect("the names above are names of attributes")
}

fn set(device: &mut Device, name: &str, text: &str) {
    if text.len() <= limit::ATTRIBUTE_TEXT_MAX {
        let text = AttributeValue::Text(text.to_owned());
        device.attributes.insert(attribute(name), text);
    }
}

/// The kind, with an encoding of a vendor or class that a pool's name cannot have.
fn pool_name(kind: &str) -> PoolName {
    let part = |part: &str| match PoolName::new(part) {
        Ok(_) => part.to_owned(),
        Err(_) => device_name(part).to_string(),
    };
    let parts: Vec<_> = kind.split('/').map(part).collect();
    PoolName::new(parts.join("/")).expect("DNS subdomains are a pool's name")
}

/// The names of devices, in their order: `0:1` is `0-1`. Of two that would be the same, both are encoded.
fn device_names(devices: &[CdiDevice]) -> Vec<DeviceName> {
    let mut plain: BTreeMap<(&str, String), usize> = BTreeMap::new();
    for device in devices {
        *plain
            .entry((&device.kind, dashed(&device.name)))
            .or_default() += 1;
    }
    let name = |device: &CdiDevice| {
        let name = dashed(&device.name);
        let is_only = plain[&(device.kind.as_str(), name.clone())] == 1;
        // no error: such a name is encoded
        let only = DeviceName::new(name).ok().filter(|_| is_only);
        only.unwrap_or_else(|| device_name(&device.name))
    };
    devices.iter().map(name).collect()
}

fn dashed(name: &str) -> String {
    let dashed = name.to_ascii_lowercase();
    dashed.replace([':', '.', '_'], "-")
}
