//! Offers compute accelerators by the nodes of their kernel drivers: the kernel's class accel (NPUs), Google Coral and Hailo.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use nodedock_sdk::address::{FIRMWARE_FILES, Location, USB_FILES, UsbBuses};
use nodedock_sdk::{
    AllocatedDevice, Claim, ContainerEdits, Context, Device, DeviceNode, Driver, DriverInfo, Host,
    Inventory, PoolDriver, Prepared, Problem, Trigger, dns_label, last_segment,
};

/// Classes of accelerators, with the directory of their nodes.
const CLASSES: [(&str, &str); 3] = [
    ("accel", "/dev/accel"),
    ("apex", "/dev"),
    ("hailo_chardev", "/dev"),
];

/// Files of a PCI function that are attributes.
const PCI_TEXTS: [&str; 2] = ["vendor", "device"];

struct Accel;

nodedock_sdk::export_driver!(Accel: Configuration);

/// The hardware of one address, with its nodes in the order of their paths.
#[derive(Debug)]
struct Accelerator {
    location: Location,
    texts: BTreeMap<&'static str, String>,
    /// Numbers by path.
    nodes: BTreeMap<String, (u32, u32)>,
}

impl Driver for Accel {
    fn describe() -> DriverInfo {
        DriverInfo::new("accel.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("Compute accelerators: the kernel's class accel, Google Coral and Hailo")
            .sysfs_read(CLASSES.map(|(class, _)| format!("class/{class}/*")))
            .sysfs_read(CLASSES.map(|(class, _)| format!("class/{class}/*/dev")))
            .sysfs_read(PCI_TEXTS.map(|file| format!("bus/pci/devices/*/{file}")))
            .sysfs_read(FIRMWARE_FILES.into_iter().chain(USB_FILES))
            .sysfs_read(["devices/**/driver"])
            .device_nodes(["/dev/accel/*", "/dev/apex_*", "/dev/hailo*"])
            .env(["ACCEL_*"])
            .events(["accel", "apex", "hailo_chardev", "pci"])
    }

    fn discover(host: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        let pools = Self::pools(&ctx.config)?;
        let found = accelerators(host)?;
        Ok(pools.inventory(found.values().map(Accelerator::publish)))
    }

    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        let pools = Self::pools(&ctx.config)?;
        let found = accelerators(host)?;
        Prepared::each(claim, |allocated| {
            let mut all = found.values();
            let one = all.find(|one| pools.has(allocated, &one.publish()));
            let edits = one.map(|one| one.edits(allocated));
            edits.ok_or_else(|| pools.no_such_device(allocated))
        })
    }
}

impl PoolDriver for Accel {
    const ATTRIBUTES: &'static [&'static str] = &["class", "device", "driver", "path", "vendor"];
}

impl Accelerator {
    fn publish(&self) -> Device {
        let Location { bus, name, path } = &self.location;
        if *bus == "pci" {
            // The host adds address, PCIe root and NUMA node, by the identity.
            let device = Device::new(dns_label(name)).texts(self.texts.clone());
            return device.identity(format!("pci:{name}"));
        }
        let device = Device::new(dns_label(path)).texts(self.texts.clone());
        let nodes = self.nodes.keys();
        nodes.fold(device, |device, path| {
            device.identity(format!("dev:{path}"))
        })
    }

    fn edits(&self, allocated: &AllocatedDevice) -> ContainerEdits {
        let paths: Vec<&str> = self.nodes.keys().map(String::as_str).collect();
        let edits = ContainerEdits::new().env(allocated.variable("ACCEL"), paths.join(","));
        self.nodes.iter().fold(edits, |edits, (path, numbers)| {
            edits.device_node(DeviceNode::new(path).numbers(*numbers))
        })
    }
}

/// Returns the accelerators of the node by address.
fn accelerators(host: &Host) -> Result<BTreeMap<String, Accelerator>, Problem> {
    let buses = UsbBuses::read(host)?;
    let mut found: BTreeMap<String, Accelerator> = BTreeMap::new();
    for (class, directory) in CLASSES {
        for path in host.sysfs().glob(&format!("class/{class}/*"))? {
            let read = match read(host, &buses, class, &path) {
                // The device disappears while it is read.
                Err(problem) if problem.is_absent() => None,
                read => read?,
            };
            if let Some((location, texts, numbers)) = read {
                let one = found.entry(location.path.clone());
                let one = one.or_insert_with(|| Accelerator {
                    location,
                    texts,
                    nodes: BTreeMap::new(),
                });
                one.nodes
                    .insert(format!("{directory}/{}", last_segment(&path)), numbers);
            }
        }
    }
    Ok(found)
}

type Read = (Location, BTreeMap<&'static str, String>, (u32, u32));

/// Reads an entry of a class. Returns `None` for what has no hardware or no node.
fn read(host: &Host, buses: &UsbBuses, class: &str, path: &str) -> Result<Option<Read>, Problem> {
    let sysfs = host.sysfs();
    let directory = sysfs.read_link(path)?;
    let (Some(location), Some(numbers)) =
        (buses.locate(host, &directory)?, sysfs.find_numbers(path)?)
    else {
        return Ok(None);
    };
    let parent = directory.trim_end_matches(&format!("/{class}/{}", last_segment(path)));
    let driver = sysfs.find_link(&format!("{parent}/driver"))?;
    let mut texts = BTreeMap::from([("class", class.to_owned()), ("path", location.path.clone())]);
    texts.extend(driver.map(|driver| ("driver", last_segment(&driver))));
    if location.bus == "pci" {
        for file in PCI_TEXTS {
            let text =
                sysfs.find_printable(&format!("bus/pci/devices/{}/{file}", location.name))?;
            texts.extend(text.map(|text| (file, text)));
        }
    }
    Ok(Some((location, texts, numbers)))
}
