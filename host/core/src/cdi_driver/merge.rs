//! Devices of CDI specs by their hardware. Pure.
//!
//! A spec has several names for one piece of hardware (index, UUID, and `all` where there is one), and names for all of it together. Names
//! with the same device nodes are one device, and a name whose nodes are those of several other devices is none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;

use crate::cdi::{Device, Spec};
use nodedock_model::Edits;

/// The name by which vendors' tools mean all devices of a kind.
const ALL: &str = "all";
/// The beginning of UUIDs of partitions of NVIDIA's GPUs.
const MIG: &str = "MIG-";

/// A spec file, as it was when it was valid.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct KnownSpec {
    pub(super) path: PathBuf,
    /// Position of its directory: a later one takes precedence.
    pub(super) directory: usize,
    pub(super) spec: Arc<Spec>,
    /// Why the file is not valid any more.
    pub(super) refused: Option<String>,
}

/// One device: the hardware of one or more names of a kind.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct CdiDevice {
    pub(super) kind: String,
    /// The name by which containers get it.
    pub(super) name: String,
    pub(super) names: BTreeSet<String>,
    /// Paths of device nodes, and interfaces, that tell it from other devices.
    pub(super) hardware: BTreeSet<String>,
    pub(super) edits: Edits,
    /// The spec with the edits for every container that uses one of its devices.
    pub(super) file: KnownSpec,
}

/// All devices, and why names are not among them, by qualified name.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Merged {
    pub(super) devices: Vec<CdiDevice>,
    pub(super) conflicts: BTreeMap<String, String>,
}

impl CdiDevice {
    pub(super) fn qualified(&self) -> String {
        format!("{}={}", self.kind, self.name)
    }

    /// Every device node that a container gets.
    pub(super) fn node_paths(&self) -> BTreeSet<&str> {
        let common = &self.file.spec.container_edits;
        let nodes = self.edits.device_nodes.iter().chain(&common.device_nodes);
        nodes.map(|node| node.node_path()).collect()
    }

    /// Returns whether it is a part of hardware that has other parts, by the names that vendors' tools give: the indices `PARENT:PART`, or a
    /// UUID.
    pub(super) fn is_partition(&self) -> bool {
        self.names.iter().any(|name| {
            let indices = name.split_once(':');
            name.starts_with(MIG)
                || indices.is_some_and(|(parent, part)| is_number(parent) && is_number(part))
        })
    }

    /// Returns whether another device is a part of it, by the names.
    pub(super) fn is_parent_of(&self, other: &Self) -> bool {
        let parents = other.names.iter().filter_map(|name| name.split_once(':'));
        self.kind == other.kind
            && parents
                .into_iter()
                .any(|(name, _)| self.names.contains(name))
    }
}

/// Merges the specs of wanted kinds, which are sorted by directory and path. `has_device`: whether the kernel has a device of its own behind a
/// node.
pub(super) fn merged(
    specs: &[KnownSpec],
    is_wanted: impl Fn(&str) -> bool,
    has_device: impl Fn(&str) -> bool,
) -> Merged {
    let (named, conflicts) = names(specs.iter().filter(|file| is_wanted(&file.spec.kind)));
    let mut kinds: BTreeMap<&str, Vec<CdiDevice>> = BTreeMap::new();
    for ((kind, name), (file, device)) in named {
        let devices = kinds.entry(kind).or_default();
        let hardware = own_hardware(&file.spec, device, &has_device);
        let known = devices.iter_mut().find(|known| known.hardware == hardware);
        match known.filter(|_| !hardware.is_empty()) {
            Some(known) => {
                known.names.insert(name.to_owned());
                if rank(name) < rank(&known.name) {
                    known.name = name.to_owned();
                    known.edits = device.container_edits.clone();
                    known.file = file.clone();
                }
            }
            // Without hardware it is a name for the others.
            None if hardware.is_empty() && name == ALL => {}
            None => devices.push(CdiDevice {
                kind: kind.to_owned(),
                name: name.to_owned(),
                names: [name.to_owned()].into(),
                hardware,
                edits: device.container_edits.clone(),
                file: file.clone(),
            }),
        }
    }
    kinds.values_mut().for_each(remove_groups);
    remove_control_nodes(&mut kinds, &has_device);
    Merged {
        devices: kinds.into_values().flatten().collect(),
        conflicts,
    }
}

type Named<'a> = BTreeMap<(&'a str, &'a str), (&'a KnownSpec, &'a Device)>;

/// Devices by kind and name: the last directory that has one counts, and one that two files of a directory have is usable by no runtime. A file
/// that is not valid any more is as good as none if another has the device.
fn names<'a>(specs: impl Iterator<Item = &'a KnownSpec>) -> (Named<'a>, BTreeMap<String, String>) {
    let (mut named, mut conflicts) = (Named::new(), BTreeMap::new());
    for file in specs {
        let kind = file.spec.kind.as_str();
        for device in &file.spec.devices {
            let key = (kind, device.name.as_str());
            let Some((other, before)) = named.insert(key, (file, device)) else {
                continue;
            };
            if other.refused.is_some() {
                continue;
            }
            if file.refused.is_some() {
                named.insert(key, (other, before));
            } else if other.directory == file.directory {
                let (first, second) = (other.path.display(), file.path.display());
                let why = format!(
                    "{first} and {second} have it, and container runtimes use neither: remove one of them"
                );
                conflicts.insert(format!("{kind}={}", device.name), why);
            }
        }
    }
    named.retain(|(kind, name), _| !conflicts.contains_key(&format!("{kind}={name}")));
    (named, conflicts)
}

/// Order of preference for the name of a device: an index, then the shortest.
fn rank(name: &str) -> (bool, bool, usize, &str) {
    let is_index = name.split(':').all(is_number);
    (name == ALL, !is_index, name.len(), name)
}

fn is_number(part: &str) -> bool {
    !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
}

/// Hardware that a container with a device gets, without the nodes for every container of its file behind which is no kernel device.
fn own_hardware(
    spec: &Spec,
    device: &Device,
    has_device: impl Fn(&str) -> bool,
) -> BTreeSet<String> {
    let mut common = hardware_of(&spec.container_edits);
    let mut own = hardware_of(&device.container_edits);
    own.retain(|path| !common.contains(path));
    common.retain(|path| has_device(path));
    own.append(&mut common);
    own
}

fn hardware_of(edits: &Edits) -> BTreeSet<String> {
    let nodes = edits.device_nodes.iter();
    let nodes = nodes.map(|node| node.node_path().to_owned());
    let interfaces = edits.net_devices.iter();
    let interfaces = interfaces.map(|interface| format!("net:{}", interface.host_interface));
    nodes.chain(interfaces).collect()
}

/// Removes the devices whose hardware is that of several others together.
fn remove_groups(devices: &mut Vec<CdiDevice>) {
    let sets: Vec<_> = devices
        .iter()
        .map(|device| device.hardware.clone())
        .collect();
    devices.retain(|device| {
        let is_below = |set: &&BTreeSet<String>| {
            set.len() < device.hardware.len() && set.is_subset(&device.hardware)
        };
        let below: BTreeSet<_> = sets.iter().filter(is_below).flatten().collect();
        device.hardware.is_empty() || below.len() < device.hardware.len()
    });
}

/// Removes nodes without a kernel device that all devices of each kind with them have (`/dev/kfd`), if each device has others: they give access
/// to no device in particular.
fn remove_control_nodes(
    kinds: &mut BTreeMap<&str, Vec<CdiDevice>>,
    has_device: impl Fn(&str) -> bool,
) {
    let mut control: BTreeMap<_, _> = kinds
        .iter()
        .map(|(kind, devices)| (*kind, control_nodes(devices, &has_device)))
        .collect();
    let mut own = BTreeSet::new();
    for (kind, devices) in kinds.iter() {
        let paths = devices.iter().flat_map(|device| &device.hardware);
        own.extend(paths.filter(|path| !control[kind].contains(*path)).cloned());
    }
    for (kind, devices) in kinds {
        let control = control.remove(kind).unwrap_or_default();
        for device in devices {
            device
                .hardware
                .retain(|path| own.contains(path) || !control.contains(path));
        }
    }
}

/// Returns the nodes of a kind that give access to no device in particular.
fn control_nodes(devices: &[CdiDevice], has_device: impl Fn(&str) -> bool) -> BTreeSet<String> {
    let sets = devices.iter().map(|device| &device.hardware);
    let mut sets = sets.filter(|set| !set.is_empty());
    let Some(first) = sets.next() else {
        return BTreeSet::new();
    };
    let others: Vec<_> = sets.collect();
    let control: BTreeSet<_> = first
        .iter()
        .filter(|path| others.iter().all(|set| set.contains(*path)) && !has_device(path))
        .cloned()
        .collect();
    let is_all =
        first.len() == control.len() || others.iter().any(|set| set.len() == control.len());
    match others.is_empty() || is_all {
        true => BTreeSet::new(),
        false => control,
    }
}
