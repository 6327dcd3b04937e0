//! The parts of a machine that a fake node shows: what a snapshot has, device nodes, PCI functions and network interfaces.

use nodedock_hardware::Entry as Recorded;
use nodedock_model::grant::Naming;
use nodedock_model::grant::ceiling::{self, NodeFacts};
use nodedock_model::rule::is_plain_path;

use super::{Entry, PAGE_CLAIMS, State};
use crate::facts::{FileInfo, FileKind, NetInterface, NodeInfo, OperationalState, Page};
use crate::{ClaimRecord, NodeKind, Problem};

/// Snapshots of machines.
impl State {
    pub(crate) fn add_recorded(&mut self, path: &str, recorded: &Recorded) {
        let below_sysfs = path.strip_prefix("/sys/");
        let entry = match recorded {
            Recorded::File(content) => Entry::File(content.clone()),
            Recorded::Directory => Entry::Dir,
            Recorded::Link(target) => Entry::Link(target.clone()),
            Recorded::Node { kind, major, minor } => {
                self.nodes.insert(
                    path.to_owned(),
                    plain_node(path, node_kind(*kind), *major, *minor),
                );
                return;
            }
        };
        match below_sysfs {
            Some(path) => self.sysfs.insert(path, entry),
            None if matches!(path, "/sys" | "/dev") || path.starts_with("/dev/") => {}
            None => self.files.insert(path, entry),
        }
    }

    /// The node that the `uevent` file of a directory describes.
    pub(crate) fn described_node(&self, directory: &str) -> Option<NodeInfo> {
        let uevent = str::from_utf8(self.sysfs.read(&format!("{directory}/uevent")).ok()?).ok()?;
        let value = |key: &str| {
            let mut lines = uevent.lines().filter_map(|line| line.split_once('='));
            lines.find_map(|(name, value)| (name == key).then_some(value))
        };
        let path = format!("/dev/{}", value("DEVNAME")?.trim_start_matches("/dev/"));
        let subsystem = self.sysfs.read_link(&format!("{directory}/subsystem"));
        let is_block = subsystem.is_ok_and(|path| path.ends_with("/block"));
        let kind = if is_block {
            NodeKind::Block
        } else {
            NodeKind::Character
        };
        let number = |key: &str| value(key)?.parse().ok();
        is_plain_path(&path).then_some(())?;
        let mode = value("DEVMODE").and_then(|mode| u32::from_str_radix(mode, 8).ok());
        Some(NodeInfo {
            mode: mode.unwrap_or(0o600),
            uid: number("DEVUID").unwrap_or(0),
            gid: number("DEVGID").unwrap_or(0),
            sysfs_path: Some(directory.to_owned()),
            ..plain_node(&path, kind, number("MAJOR")?, number("MINOR")?)
        })
    }
}

impl State {
    /// Returns how a grant has to name a node; `None`: the host gives it to no driver. A character device whose subsystem the test does not say
    /// counts as one that a glob may name.
    pub(crate) fn node_naming(&self, node: &NodeInfo) -> Option<Naming> {
        let kind = match node.kind {
            NodeKind::Character => nodedock_model::NodeKind::Character,
            NodeKind::Block => nodedock_model::NodeKind::Block,
            NodeKind::Fifo => nodedock_model::NodeKind::Fifo,
        };
        let directory = node.sysfs_path.as_deref();
        let link =
            directory.and_then(|path| self.sysfs.read_link(&format!("{path}/subsystem")).ok());
        let known = link.as_deref().and_then(|path| path.rsplit('/').next());
        let subsystem = known.or_else(|| (node.major == MISC_MAJOR).then_some("misc"));
        let facts = NodeFacts {
            kind,
            major: node.major,
            minor: node.minor,
            name: directory.and_then(|path| path.rsplit('/').next()),
            subsystem,
            is_console: false,
        };
        match ceiling::device_node(facts) {
            Some(Naming::Path) if node.kind == NodeKind::Character && subsystem.is_none() => {
                Some(Naming::Glob)
            }
            Some(_) if !self.has_grant_file => Some(Naming::Glob),
            naming => naming,
        }
    }
}

fn node_kind(kind: nodedock_hardware::NodeKind) -> NodeKind {
    match kind {
        nodedock_hardware::NodeKind::Character => NodeKind::Character,
        nodedock_hardware::NodeKind::Block => NodeKind::Block,
    }
}

/// Major number of the subsystem `misc` (Linux, devices.txt).
const MISC_MAJOR: u32 = 10;

/// A node of root with mode 0600.
pub(crate) fn plain_node(path: &str, kind: NodeKind, major: u32, minor: u32) -> NodeInfo {
    NodeInfo {
        path: path.to_owned(),
        kind,
        major,
        minor,
        mode: 0o600,
        uid: 0,
        gid: 0,
        sysfs_path: None,
    }
}

pub(crate) const PCI_DEVICES: &str = "bus/pci/devices";

/// PCI functions and network interfaces, as the tree below `/sys` shows them.
impl State {
    pub(crate) fn page(
        &self,
        after: Option<&str>,
        is_wanted: impl Fn(&ClaimRecord) -> bool,
    ) -> Page {
        let later = self
            .claims
            .values()
            .filter(|record| after.is_none_or(|uid| record.claim.id.uid.as_str() > uid));
        let mut wanted = later.filter(|record| is_wanted(record));
        let claims: Vec<_> = wanted
            .by_ref()
            .take(PAGE_CLAIMS)
            .map(|record| self.with_progress(record))
            .collect();
        let last = claims.last().map(|record| record.claim.id.uid.clone());
        (claims, last.filter(|_| wanted.next().is_some()))
    }

    pub(crate) fn with_progress(&self, record: &ClaimRecord) -> ClaimRecord {
        let mut record = record.clone();
        if let Some(progress) = self.progress.get(&record.claim.id.uid) {
            record.claim.progress.clone_from(progress);
        }
        record
    }

    /// The functions that are bound together: for a `vfio` driver the IOMMU group without its bridges.
    pub(crate) fn functions_with(
        &self,
        address: &str,
        driver: &str,
    ) -> Result<Vec<String>, Problem> {
        self.sysfs
            .resolve(&format!("{PCI_DEVICES}/{address}"), true)?;
        if !driver.starts_with("vfio") {
            return Ok(vec![address.to_owned()]);
        }
        if self
            .sysfs
            .read_dir(&format!("{PCI_DEVICES}/{address}/iommu_group/devices"))
            .is_err()
        {
            let message = format!("{address} is in no IOMMU group, and {driver} needs one");
            return Err(Problem::unavailable("no-iommu", message));
        }
        self.group_of(address)
    }

    pub(crate) fn group_of(&self, address: &str) -> Result<Vec<String>, Problem> {
        self.sysfs
            .resolve(&format!("{PCI_DEVICES}/{address}"), true)?;
        let group = self
            .sysfs
            .read_dir(&format!("{PCI_DEVICES}/{address}/iommu_group/devices"));
        let is_bridge = |function: &String| {
            let class = self
                .sysfs
                .read(&format!("{PCI_DEVICES}/{function}/class"))
                .unwrap_or_default();
            class.starts_with(b"0x06")
        };
        let mut group = group.unwrap_or_else(|_| vec![address.to_owned()]);
        group.retain(|function| !is_bridge(function));
        Ok(group)
    }

    pub(crate) fn kernel_driver(&self, function: &str) -> Option<String> {
        let target = self.sysfs.read_link(&format!("{function}/driver")).ok()?;
        target.rsplit('/').next().map(str::to_owned)
    }

    pub(crate) fn set_kernel_driver(&mut self, directory: &str, driver: Option<&str>) {
        let link = format!("{directory}/driver");
        self.sysfs.remove(&link);
        if let Some(driver) = driver {
            let up = "../".repeat(directory.split('/').count());
            self.sysfs
                .insert(&link, Entry::Link(format!("{up}bus/pci/drivers/{driver}")));
        }
    }

    pub(crate) fn net_interface(&self, name: &str) -> NetInterface {
        let text = |file: &str| {
            let content = self
                .sysfs
                .read(&format!("class/net/{name}/{file}"))
                .unwrap_or_default();
            String::from_utf8_lossy(content).trim().to_owned()
        };
        let flags = u32::from_str_radix(text("flags").trim_start_matches("0x"), 16).unwrap_or(0);
        NetInterface {
            name: name.to_owned(),
            index: text("ifindex").parse().unwrap_or(0),
            hardware_address: text("address"),
            mtu: text("mtu").parse().unwrap_or(0),
            admin_up: flags & 1 == 1,
            state: match text("operstate").as_str() {
                "notpresent" => OperationalState::NotPresent,
                "down" => OperationalState::Down,
                "lowerlayerdown" => OperationalState::LowerLayerDown,
                "testing" => OperationalState::Testing,
                "dormant" => OperationalState::Dormant,
                "up" => OperationalState::Up,
                _ => OperationalState::Unknown,
            },
            device_path: self
                .sysfs
                .read_link(&format!("class/net/{name}/device"))
                .ok(),
        }
    }

    pub(crate) fn host_file(&self, path: &str) -> Result<FileInfo, Problem> {
        self.check_host_path(path)?;
        let never = || {
            Problem::denied(
                "never-allowed",
                format!("no driver may read {path}, whatever is granted"),
            )
        };
        let naming = ceiling::host_file(path).ok_or_else(never)?;
        let asked = if self.has_grant_file {
            naming
        } else {
            Naming::Glob
        };
        self.demand(
            |granted| granted.allows_host_file(path, asked),
            "hostFiles",
            path,
        )?;
        let real_path = format!(
            "/{}",
            self.files.resolve(path.trim_start_matches('/'), true)?
        );
        if ceiling::host_file(&real_path).is_none_or(|needed| needed > naming) {
            return Err(never());
        }
        let (kind, size) = match self.files.get(real_path.trim_start_matches('/')) {
            Some(Entry::File(content)) => (FileKind::Regular, content.len() as u64),
            _ => (FileKind::Directory, 0),
        };
        Ok(FileInfo {
            path: path.to_owned(),
            real_path,
            kind,
            size,
        })
    }

    pub(crate) fn check_host_path(&self, path: &str) -> Result<(), Problem> {
        if !is_plain_path(path) {
            return Err(Problem::invalid(
                "bad-path",
                format!("{path:?} is not an absolute, plain path"),
            ));
        }
        self.check_failure(path)
    }

    pub(crate) fn check_writes(&self, what: &str) -> Result<(), Problem> {
        let message = || format!("{what} may be changed during prepare and unprepare only");
        if self.writes_refused {
            Err(Problem::denied("not-now", message()))
        } else {
            Ok(())
        }
    }
}
