//! Attributes of Kubernetes that PCI devices get from the host, regardless of their driver: address, PCIe root and NUMA node, by the
//! device's identity. Attributes that a driver publishes itself stay. Blocking functions, not for async threads.
//!
//! Names and values are those of `k8s.io/dynamic-resource-allocation/deviceattribute`, which other drivers use.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use crate::sysfs::SysfsRoot;
use crate::sysfs::pci::PciAddress;
use nodedock_model::{AttributeValue, Device, Inventory, Problem, QualifiedName, limit};

const ADDRESS: &str = "resource.kubernetes.io/pciBusID";
const ROOT: &str = "resource.kubernetes.io/pcieRoot";
const NUMA_NODE: &str = "resource.kubernetes.io/numaNode";
/// Identity strings of PCI functions begin with it.
const IDENTITY: &str = "pci:";

/// The form of the NUMA node's attribute (KEP-6072).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NumaNodeForm {
    /// A number.
    #[default]
    Number,
    /// The number, and those of the nearest other nodes of its socket. A server without list attributes refuses it.
    List,
}

/// Adds what is missing: to devices that are one PCI function everything, and to others the attribute of the NUMA nodes that they name.
/// Fails if the node could not be read.
pub fn add(
    sysfs: &SysfsRoot,
    form: NumaNodeForm,
    inventory: &mut Inventory,
) -> Result<(), Problem> {
    let mut near = BTreeMap::new();
    for device in inventory
        .pools
        .values_mut()
        .flat_map(|pool| pool.devices.values_mut())
    {
        if let Some(address) = only_function(device) {
            add_of_function(sysfs, device, &address)?;
        }
        let nodes = match (&device.numa_nodes[..], form) {
            ([node], NumaNodeForm::Number) => AttributeValue::Int(i64::from(*node)),
            ([node], NumaNodeForm::List) => {
                let nodes = match near.entry(*node) {
                    Entry::Occupied(found) => found.into_mut(),
                    Entry::Vacant(entry) => entry.insert(with_nearest(sysfs, *node)?),
                };
                AttributeValue::Ints(nodes.clone())
            }
            (nodes @ [_, _, ..], NumaNodeForm::List) => {
                AttributeValue::Ints(nodes.iter().copied().map(i64::from).collect())
            }
            // Several are no number.
            ([], _) | (_, NumaNodeForm::Number) => continue,
        };
        add_attribute(device, NUMA_NODE, || Ok(Some(nodes)))?;
    }
    Ok(())
}

/// Adds the attributes of the PCI function that a device is, or is a part of, and its NUMA node.
pub fn add_of_function(
    sysfs: &SysfsRoot,
    device: &mut Device,
    address: &PciAddress,
) -> Result<(), Problem> {
    add_text(device, ADDRESS, || Ok(Some(address.as_str().to_owned())))?;
    add_text(device, ROOT, || root(sysfs, address))?;
    if device.numa_nodes.is_empty() {
        device.numa_nodes.extend(numa_node(sysfs, address)?);
    }
    Ok(())
}

/// The function that a device is, if it is one. The attributes have no form for domains of more than four digits, as of Intel VMD.
fn only_function(device: &Device) -> Option<PciAddress> {
    let mut functions = device
        .identity
        .iter()
        .filter_map(|identity| identity.strip_prefix(IDENTITY));
    let only = functions.next().filter(|_| functions.next().is_none())?;
    only.parse()
        .ok()
        .filter(|_| only.len() == "0000:00:00.0".len())
}

fn add_text(
    device: &mut Device,
    name: &str,
    value: impl FnOnce() -> Result<Option<String>, Problem>,
) -> Result<(), Problem> {
    add_attribute(device, name, || Ok(value()?.map(AttributeValue::Text)))
}

/// Adds an attribute, unless the device has it or no room for it.
fn add_attribute(
    device: &mut Device,
    name: &str,
    value: impl FnOnce() -> Result<Option<AttributeValue>, Problem>,
) -> Result<(), Problem> {
    let name = QualifiedName::new(name).expect("the name is one of the API");
    let values: usize = device.attributes.values().map(AttributeValue::count).sum();
    let has_room = device.attributes.len() + device.capacities.len() < limit::ATTRIBUTES_MAX;
    if device.attributes.contains_key(&name) || !has_room {
        return Ok(());
    }
    let value = value()?.filter(|value| values + value.count() <= limit::ATTRIBUTE_VALUES_MAX);
    device.attributes.extend(value.map(|value| (name, value)));
    Ok(())
}

fn directory(address: &PciAddress) -> String {
    format!("bus/pci/devices/{}", address.as_str())
}

/// The first directory of the function's path below `/sys/devices`.
fn root(sysfs: &SysfsRoot, address: &PciAddress) -> Result<Option<String>, Problem> {
    let path = sysfs.find(&directory(address))?.unwrap_or_default();
    let below = path
        .strip_prefix("devices/")
        .filter(|below| below.ends_with(address.as_str()));
    let root = below
        .and_then(|below| below.split('/').next())
        .filter(|root| root.starts_with("pci"));
    Ok(root.map(str::to_owned))
}

/// None: it has none, or the kernel does not know it (-1).
fn numa_node(sysfs: &SysfsRoot, address: &PciAddress) -> Result<Option<u32>, Problem> {
    number(sysfs, &format!("{}/numa_node", directory(address)))
}

/// A node, and the nodes at the least distance from it that are not known to be of another socket.
fn with_nearest(sysfs: &SysfsRoot, node: u32) -> Result<Vec<i64>, Problem> {
    let mut nodes = vec![i64::from(node)];
    let distances = sysfs
        .fact(&format!("devices/system/node/node{node}/distance"))?
        .unwrap_or_default();
    let distances: Option<Vec<u32>> = distances
        .split_whitespace()
        .take(limit::NUMA_NODE_ID_MAX as usize + 1)
        .map(|distance| distance.parse().ok())
        .collect();
    let distances = distances
        .filter(|all| (node as usize) < all.len())
        .unwrap_or_default();
    let others = (0..).zip(&distances).filter(|(other, _)| *other != node);
    let least = others.clone().map(|(_, distance)| distance).min();
    let here = socket(sysfs, node)?;
    for (other, _) in others.filter(|(_, distance)| Some(*distance) == least) {
        if here.is_none() || socket(sysfs, other)?.is_none_or(|there| Some(there) == here) {
            nodes.push(i64::from(other));
        }
    }
    Ok(nodes)
}

/// The socket of a node's first CPU.
fn socket(sysfs: &SysfsRoot, node: u32) -> Result<Option<u32>, Problem> {
    let cpus = sysfs
        .fact(&format!("devices/system/node/node{node}/cpulist"))?
        .unwrap_or_default();
    match cpus.split([',', '-']).next().map(str::parse::<u32>) {
        Some(Ok(first)) => number(
            sysfs,
            &format!("devices/system/cpu/cpu{first}/topology/physical_package_id"),
        ),
        // It has no CPUs.
        _ => Ok(None),
    }
}

fn number(sysfs: &SysfsRoot, path: &str) -> Result<Option<u32>, Problem> {
    Ok(sysfs.fact(path)?.and_then(|text| text.parse().ok()))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;

    use super::*;
    use nodedock_model::{DeviceName, Pool, PoolName};

    const ADDRESS_OF_GPU: &str = "0000:3b:00.0";

    fn write(root: &Path, path: &str, value: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, format!("{value}\n")).unwrap();
    }

    /// Two sockets with two nodes each, and a node without CPUs; a GPU at node 1.
    fn machine() -> (tempfile::TempDir, SysfsRoot) {
        let dir = tempfile::tempdir().unwrap();
        let gpu = format!("devices/pci0000:3a/0000:3a:01.0/{ADDRESS_OF_GPU}");
        write(dir.path(), &format!("{gpu}/numa_node"), "1");
        fs::create_dir_all(dir.path().join("bus/pci/devices")).unwrap();
        let link = dir.path().join("bus/pci/devices").join(ADDRESS_OF_GPU);
        symlink(format!("../../../{gpu}"), link).unwrap();
        for (node, cpus, distance) in [
            (0, "0-1", "10 12 12 20 12"),
            (1, "2-3", "12 10 12 20 12"),
            (2, "4", "12 12 10 12 20"),
            (3, "6", "20 20 12 10 20"),
            (4, "", "12 12 20 20 10"),
        ] {
            write(
                dir.path(),
                &format!("devices/system/node/node{node}/cpulist"),
                cpus,
            );
            write(
                dir.path(),
                &format!("devices/system/node/node{node}/distance"),
                distance,
            );
        }
        for (cpu, socket) in [(0, "0"), (2, "0"), (4, "1"), (6, "1")] {
            write(
                dir.path(),
                &format!("devices/system/cpu/cpu{cpu}/topology/physical_package_id"),
                socket,
            );
        }
        let sysfs = SysfsRoot::open_simulated(dir.path()).unwrap();
        (dir, sysfs)
    }

    fn device(identity: &[&str]) -> Device {
        Device {
            identity: identity.iter().map(ToString::to_string).collect(),
            ..Device::default()
        }
    }

    fn added(device: Device, form: NumaNodeForm) -> Device {
        let (_dir, sysfs) = machine();
        let (pool, name) = (PoolName::new("p").unwrap(), DeviceName::new("d").unwrap());
        let devices = BTreeMap::from([(name.clone(), device)]);
        let pools = BTreeMap::from([(
            pool.clone(),
            Pool {
                devices,
                ..Pool::default()
            },
        )]);
        let mut inventory = Inventory { pools };
        add(&sysfs, form, &mut inventory).unwrap();
        inventory
            .pools
            .remove(&pool)
            .unwrap()
            .devices
            .remove(&name)
            .unwrap()
    }

    fn attributes(device: &Device) -> Vec<(String, AttributeValue)> {
        device
            .attributes
            .iter()
            .map(|(name, value)| (name.to_string(), value.clone()))
            .collect()
    }

    fn text(value: &str) -> AttributeValue {
        AttributeValue::Text(value.to_owned())
    }

    #[test]
    fn pci_function_has_standard_attributes() {
        let gpu = added(
            device(&["pci:0000:3b:00.0", "uuid:1"]),
            NumaNodeForm::Number,
        );
        let expected = [
            (NUMA_NODE.to_owned(), AttributeValue::Int(1)),
            (ADDRESS.to_owned(), text(ADDRESS_OF_GPU)),
            (ROOT.to_owned(), text("pci0000:3a")),
        ];
        assert_eq!(
            (attributes(&gpu), gpu.numa_nodes),
            (expected.to_vec(), vec![1])
        );
        let several = Device {
            numa_nodes: vec![0, 1],
            ..Device::default()
        };
        assert_eq!(
            added(several.clone(), NumaNodeForm::Number),
            several,
            "several are no number"
        );
    }

    #[test]
    fn numa_list_has_nearest_nodes() {
        let gpu = added(device(&["pci:0000:3b:00.0"]), NumaNodeForm::List);
        assert_eq!(
            attributes(&gpu)[0],
            (NUMA_NODE.to_owned(), AttributeValue::Ints(vec![1, 0, 4]))
        );
        let other = added(
            Device {
                numa_nodes: vec![7],
                ..Device::default()
            },
            NumaNodeForm::List,
        );
        assert_eq!(
            attributes(&other)[0].1,
            AttributeValue::Ints(vec![7]),
            "the kernel does not know the node"
        );
        let several = added(
            Device {
                numa_nodes: vec![3, 1],
                ..Device::default()
            },
            NumaNodeForm::List,
        );
        assert_eq!(attributes(&several)[0].1, AttributeValue::Ints(vec![3, 1]));
    }

    #[test]
    fn published_attributes_are_not_overwritten() {
        let mut own = device(&["pci:0000:3b:00.0"]);
        own.attributes
            .insert(QualifiedName::new(ROOT).unwrap(), text("pci0000:00"));
        own.numa_nodes = vec![0];
        let own = added(own, NumaNodeForm::Number);
        assert_eq!(attributes(&own)[2], (ROOT.to_owned(), text("pci0000:00")));
        assert_eq!(own.numa_nodes, [0]);
        let group = ["pci:0000:3b:00.0", "pci:0000:3b:00.1"];
        for identity in [
            &[][..],
            &["pci:somewhere"],
            &["pci:10000:3b:00.0"],
            &["uuid:1"],
            &group,
        ] {
            assert_eq!(
                added(device(identity), NumaNodeForm::List),
                device(identity)
            );
        }
        let gone = added(device(&["pci:0000:99:00.0"]), NumaNodeForm::Number);
        assert_eq!(
            attributes(&gone),
            [(ADDRESS.to_owned(), text("0000:99:00.0"))]
        );
    }

    #[test]
    fn a_full_device_keeps_its_attributes() {
        let mut full = device(&["pci:0000:3b:00.0"]);
        let names =
            (0..limit::ATTRIBUTES_MAX - 1).map(|n| QualifiedName::new(format!("a{n}")).unwrap());
        full.attributes = names
            .map(|name| (name, AttributeValue::Bool(true)))
            .collect();
        let full = added(full, NumaNodeForm::Number);
        assert_eq!(full.attributes.len(), limit::ATTRIBUTES_MAX);
        assert!(
            full.attributes
                .contains_key(&QualifiedName::new(ADDRESS).unwrap())
        );
    }
}
