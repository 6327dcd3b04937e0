//! Offers compute accelerators by the nodes of their kernel drivers: the kernel's class accel (NPUs), Google Coral and Hailo.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use nodedock_sdk::address::{FIRMWARE_FILES, Location, USB_FILES, UsbBuses};
use nodedock_sdk::{
    AllocatedDevice, Claim, ContainerEdits, Context, Device, DeviceHealth, DeviceNode, Driver,
    DriverInfo, Health, Host, Inventory, POWER_FILES, PoolDriver, Prepared, Problem, Trigger,
    dns_label, last_segment, present,
};

/// Classes of accelerators, with the directory of their nodes.
const CLASSES: [(&str, &str); 3] = [
    ("accel", "/dev/accel"),
    ("apex", "/dev"),
    ("hailo_chardev", "/dev"),
];

/// Files of a PCI function that are attributes.
const PCI_TEXTS: [&str; 2] = ["vendor", "device"];

/// What a kernel driver says of an accelerator that does not work: the class, the file below its entry, and the texts (gasket; habanalabs).
const FAULTS: [(&str, &str, [&str; 2]); 2] = [
    ("apex", "status", ["DEAD", "LAMED"]),
    ("accel", "device/status", ["disabled", "needs reset"]),
];

struct Accel;

nodedock_sdk::export_driver!(Accel: Configuration, Health);

/// The hardware of one address, with its nodes in the order of their paths.
#[derive(Debug)]
struct Accelerator {
    location: Location,
    texts: BTreeMap<&'static str, String>,
    /// Below `devices`: what has its nodes.
    parent: String,
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
            .sysfs_read(["devices/**/driver"].into_iter().chain(POWER_FILES))
            .sysfs_read(FAULTS.map(|(class, file, _)| format!("class/{class}/*/{file}")))
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
            let one = pools.allocated(allocated, found.values(), Accelerator::publish)?;
            Ok(one.edits(allocated))
        })
    }
}

impl Health for Accel {
    fn check(host: &Host, ctx: &Context) -> Result<Vec<DeviceHealth>, Problem> {
        let found = accelerators(host)?.into_values();
        let judged = found.map(|one| Ok((one.publish(), one.fault(host)?)));
        Self::pools(&ctx.config)?.health(judged)
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

    /// Returns why a container cannot use it now.
    fn fault(&self, host: &Host) -> Result<Option<String>, Problem> {
        let mut fault = host.sysfs().power_fault(&self.parent)?;
        for (path, numbers) in &self.nodes {
            fault = fault.or(host.device_nodes().fault(path, *numbers)?);
            for (class, file, texts) in FAULTS {
                let file = format!("class/{class}/{}/{file}", last_segment(path));
                let state = host.sysfs().find_printable(&file)?;
                let state = state.filter(|state| texts.contains(&state.as_str()));
                fault = fault.or(state.map(|state| format!("its kernel driver says: {state}")));
            }
        }
        Ok(fault)
    }
}

/// Returns the accelerators of the node by address.
fn accelerators(host: &Host) -> Result<BTreeMap<String, Accelerator>, Problem> {
    let buses = UsbBuses::read(host)?;
    let mut found: BTreeMap<String, Accelerator> = BTreeMap::new();
    for (class, directory) in CLASSES {
        for path in host.sysfs().glob(&format!("class/{class}/*"))? {
            if let Some((one, numbers)) = present(read(host, &buses, class, &path))?.flatten() {
                let one = found.entry(one.location.path.clone()).or_insert(one);
                one.nodes
                    .insert(format!("{directory}/{}", last_segment(&path)), numbers);
            }
        }
    }
    Ok(found)
}

/// An accelerator without its nodes, and the numbers of one of them.
type Read = (Accelerator, (u32, u32));

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
    let one = Accelerator {
        location,
        texts,
        parent: parent.to_owned(),
        nodes: BTreeMap::new(),
    };
    Ok(Some((one, numbers)))
}
