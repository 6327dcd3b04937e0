//! Offers cameras on USB, PCI and the board: each with its video, media and sub-device nodes, named by where it is plugged in.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use nodedock_sdk::address::{FIRMWARE_FILES, USB_FILES, UsbBuses};
use nodedock_sdk::{
    AllocatedDevice, Claim, ContainerEdits, Context, Device, DeviceHealth, DeviceNode, Driver,
    DriverInfo, Health, Host, Inventory, POWER_FILES, PoolDriver, Prepared, Problem, Trigger,
    dns_label, last_segment, present,
};

/// The bound of a device's identities.
const IDENTITIES_MAX: usize = 16;

/// Files of a USB device and of a PCI function, each after the attribute that it is.
const USB_TEXTS: [(&str, &str); 4] = [
    ("vendor", "idVendor"),
    ("product", "idProduct"),
    ("serial", "serial"),
    ("model", "product"),
];
const PCI_TEXTS: [(&str, &str); 2] = [("vendor", "vendor"), ("product", "device")];

/// Ranks of nodes: those of a camera are sorted by them.
const FRAMES: usize = 0;
const METADATA: usize = 1;

struct CameraDriver;

nodedock_sdk::export_driver!(CameraDriver: Configuration, Health);

/// Texts by name.
type Attributes = BTreeMap<&'static str, String>;

/// A device node. Nodes of one function are in the order of the kernel.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Node {
    rank: usize,
    parent: String,
    index: u32,
    path: String,
    numbers: (u32, u32),
    /// Attributes of a camera whose first node this is.
    texts: Attributes,
}

/// V4L2 hardware of one address.
#[derive(Debug, Default)]
struct Camera {
    attributes: Attributes,
    nodes: Vec<Node>,
}

impl Driver for CameraDriver {
    fn describe() -> DriverInfo {
        DriverInfo::new("camera.nodedock.dev", env!("CARGO_PKG_VERSION"))
            .summary("Cameras with all of their nodes, named by where they are plugged in")
            .sysfs_read(["class/video4linux/*", "bus/media/devices/*"])
            .sysfs_read(["dev", "index", "name"].map(|file| format!("class/video4linux/*/{file}")))
            .sysfs_read(["bus/media/devices/*/dev", "devices/**/driver"])
            .sysfs_read(USB_TEXTS.map(|(_, file)| format!("bus/usb/devices/*/{file}")))
            .sysfs_read(PCI_TEXTS.map(|(_, file)| format!("bus/pci/devices/*/{file}")))
            .sysfs_read(
                FIRMWARE_FILES
                    .into_iter()
                    .chain(USB_FILES)
                    .chain(POWER_FILES),
            )
            .device_nodes(["/dev/media*", "/dev/v4l-subdev*", "/dev/video*"])
            .env(["CAMERA_*"])
            .events(["media", "usb", "video4linux"])
    }

    fn discover(host: &Host, ctx: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        let cameras = cameras(host)?;
        Ok(Self::pools(&ctx.config)?.inventory(cameras.iter().map(Camera::publish)))
    }

    fn prepare(host: &Host, ctx: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        let (pools, cameras) = (Self::pools(&ctx.config)?, cameras(host)?);
        Prepared::each(claim, |allocated| {
            let camera = pools.allocated(allocated, &cameras, Camera::publish)?;
            Ok(camera.edits(allocated))
        })
    }
}

impl Health for CameraDriver {
    fn check(host: &Host, ctx: &Context) -> Result<Vec<DeviceHealth>, Problem> {
        let cameras = cameras(host)?.into_iter();
        let judged = cameras.map(|camera| Ok((camera.publish(), camera.fault(host)?)));
        Self::pools(&ctx.config)?.health(judged)
    }
}

impl PoolDriver for CameraDriver {
    const ATTRIBUTES: &'static [&'static str] = &[
        "bus", "card", "driver", "model", "path", "product", "serial", "vendor",
    ];
}

impl Camera {
    fn publish(&self) -> Device {
        let ranks = self.nodes.iter().map(|node| node.rank);
        let count = |rank| ranks.clone().map(|is| u32::from(is == rank)).sum::<u32>();
        let device = Device::new(dns_label(&self.attributes["path"]))
            .texts(self.attributes.clone())
            .attribute("frameNodes", count(FRAMES))
            .attribute("metadataNodes", count(METADATA));
        let nodes = self.nodes.iter().take(IDENTITIES_MAX);
        nodes.fold(device, |device, node| {
            device.identity(format!("dev:{}", node.path))
        })
    }

    fn edits(&self, allocated: &AllocatedDevice) -> ContainerEdits {
        let edits = ContainerEdits::new().env(allocated.variable("CAMERA"), &self.nodes[0].path);
        self.nodes.iter().fold(edits, |edits, node| {
            edits.device_node(DeviceNode::new(&node.path).numbers(node.numbers))
        })
    }

    /// Returns why a container cannot use it now.
    fn fault(&self, host: &Host) -> Result<Option<String>, Problem> {
        let (nodes, mut fault) = (host.device_nodes(), None);
        for node in &self.nodes {
            fault = fault.or(nodes.fault(&node.path, node.numbers)?);
            fault = fault.or(host.sysfs().power_fault(&node.parent)?);
        }
        Ok(fault)
    }
}

/// Returns the V4L2 hardware of the node that has a node for frames, sorted by address.
fn cameras(host: &Host) -> Result<Vec<Camera>, Problem> {
    let (sysfs, buses) = (host.sysfs(), UsbBuses::read(host)?);
    let mut cameras: BTreeMap<String, Camera> = BTreeMap::new();
    let media = sysfs.glob("bus/media/devices/*")?;
    for path in sysfs.glob("class/video4linux/*")?.into_iter().chain(media) {
        if let Some((attributes, node)) = present(read(host, &buses, &path))?.flatten() {
            let camera = cameras.entry(attributes["path"].clone()).or_default();
            camera.attributes.extend(attributes);
            camera.nodes.push(node);
        }
    }
    let mut cameras: Vec<_> = cameras.into_values().collect();
    for camera in &mut cameras {
        camera.nodes.sort();
        camera.attributes.extend(camera.nodes[0].texts.clone());
    }
    cameras.retain(|camera| camera.nodes[0].rank == FRAMES);
    Ok(cameras)
}

/// Reads a node, and what its hardware says of itself. Returns `None` for other nodes, and for what has no hardware.
fn read(host: &Host, buses: &UsbBuses, path: &str) -> Result<Option<(Attributes, Node)>, Problem> {
    let (sysfs, entry) = (host.sysfs(), last_segment(path));
    let kind = entry.trim_end_matches(|c: char| c.is_ascii_digit());
    let mut kinds = ["video", "", "media", "v4l-subdev"].into_iter();
    let directory = sysfs.read_link(path)?;
    let (Some(mut rank), Some(numbers), Some(place)) = (
        kinds.position(|known| known == kind),
        sysfs.find_numbers(path)?,
        buses.locate(host, &directory)?,
    ) else {
        return Ok(None);
    };
    let mut attributes = BTreeMap::from([("bus", place.bus.to_owned()), ("path", place.path)]);
    let files: &[(&'static str, &str)] = match place.bus {
        "usb" => &USB_TEXTS,
        "pci" => &PCI_TEXTS,
        _ => &[],
    };
    for (attribute, file) in files {
        let path = format!("bus/{}/devices/{}/{file}", place.bus, place.name);
        attributes.extend(sysfs.find_printable(&path)?.map(|text| (*attribute, text)));
    }
    let parent = directory.trim_end_matches(&format!("/{entry}"));
    let parent = parent.trim_end_matches("/video4linux").to_owned();
    let (mut index, mut texts) = (0, Attributes::new());
    if rank == FRAMES {
        index = sysfs.find_parsed(&format!("{path}/index"))?.unwrap_or(0);
        let driver = sysfs.find_link(&format!("{parent}/driver"))?;
        let driver = driver.map(|driver| last_segment(&driver));
        // The kernel has a node for metadata after each node for frames (`uvc_register_terms`).
        if driver.as_deref() == Some("uvcvideo") && index % 2 == 1 {
            rank = METADATA;
        }
        texts.extend(driver.map(|driver| ("driver", driver)));
        let card = sysfs.find_printable(&format!("{path}/name"))?;
        texts.extend(card.map(|card| ("card", card)));
    }
    let node = Node {
        rank,
        parent,
        index,
        path: format!("/dev/{entry}"),
        numbers,
        texts,
    };
    Ok(Some((attributes, node)))
}
