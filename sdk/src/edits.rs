//! Container edits: the changes to a container that uses a device.

/// Type of a special file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeKind {
    /// Character device.
    Character,
    /// Block device.
    Block,
    /// Named pipe.
    Fifo,
}

impl NodeKind {
    /// Returns the name in the contract, such as `character`.
    pub fn as_str(self) -> &'static str {
        match self {
            NodeKind::Character => "character",
            NodeKind::Block => "block",
            NodeKind::Fifo => "fifo",
        }
    }
}

/// Rights of a container on a device node: at least one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeAccess {
    /// The container may read.
    pub read: bool,
    /// The container may write.
    pub write: bool,
    /// The container may create the node by mknod(2).
    pub mknod: bool,
}

impl NodeAccess {
    /// Reading only.
    pub const READ: Self = NodeAccess {
        read: true,
        write: false,
        mknod: false,
    };
    /// Reading and writing.
    pub const READ_WRITE: Self = NodeAccess {
        read: true,
        write: true,
        mknod: false,
    };
    /// Reading, writing and creating the node.
    pub const ALL: Self = NodeAccess {
        read: true,
        write: true,
        mknod: true,
    };
}

impl std::str::FromStr for NodeAccess {
    type Err = String;

    /// Parses CDI's notation: at least one of the letters `r`, `w` and `m`, each at most once.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut access = NodeAccess::default();
        for letter in text.chars() {
            let right = match letter {
                'r' => &mut access.read,
                'w' => &mut access.write,
                'm' => &mut access.mknod,
                _ => return Err(format!("{text:?} is not a subset of rwm")),
            };
            if std::mem::replace(right, true) {
                return Err(format!("{text:?} has {letter} twice"));
            }
        }
        if text.is_empty() {
            Err("no right of rwm".to_owned())
        } else {
            Ok(access)
        }
    }
}

/// A device node in the container. The host fills in kind, major and minor from the node, and refuses values that differ from the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// Path in the container: absolute, at most 4,096 bytes.
    pub path: String,
    /// Path on the node; `None` means the same path.
    pub host_path: Option<String>,
    /// `None`: the host takes it from the node.
    pub kind: Option<NodeKind>,
    /// `None`: the host takes it from the node.
    pub major: Option<u32>,
    /// `None`: the host takes it from the node.
    pub minor: Option<u32>,
    /// Rights of the container on the node.
    pub access: NodeAccess,
    /// File mode of the node in the container.
    pub file_mode: Option<u32>,
    /// User ID of the owner in the container.
    pub uid: Option<u32>,
    /// Group ID in the container.
    pub gid: Option<u32>,
}

impl DeviceNode {
    /// Creates a device node with the node's own path, for reading and writing.
    pub fn new(path: impl Into<String>) -> Self {
        DeviceNode {
            path: path.into(),
            host_path: None,
            kind: None,
            major: None,
            minor: None,
            access: NodeAccess::READ_WRITE,
            file_mode: None,
            uid: None,
            gid: None,
        }
    }

    /// Sets the path on the node.
    #[must_use]
    pub fn host_path(mut self, path: impl Into<String>) -> Self {
        self.host_path = Some(path.into());
        self
    }

    /// Sets the numbers (major, minor) that the node has: the host refuses it, for a retry, if it is another device's by then.
    #[must_use]
    pub fn numbers(mut self, (major, minor): (u32, u32)) -> Self {
        (self.major, self.minor) = (Some(major), Some(minor));
        self
    }

    /// Sets the rights of the container on the node.
    #[must_use]
    pub fn access(mut self, access: NodeAccess) -> Self {
        self.access = access;
        self
    }
}

impl From<&str> for DeviceNode {
    fn from(path: &str) -> Self {
        DeviceNode::new(path)
    }
}

impl From<String> for DeviceNode {
    fn from(path: String) -> Self {
        DeviceNode::new(path)
    }
}

/// A directory or file of the node that is mounted into the container.
///
/// ```
/// use nodedock_sdk::{ContainerEdits, DriverInfo, Mount};
///
/// const LIBRARIES: &str = "/opt/gpu/lib";
///
/// let info = DriverInfo::new("gpu.example.com", "0.1.0").mounts([LIBRARIES]);
/// let edits = ContainerEdits::new().mount(Mount::read_only(LIBRARIES, "/usr/lib/gpu"));
/// assert_eq!(info.capabilities.mounts, [edits.mounts[0].host_path.as_str()]);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mount {
    /// Path on the node; absolute.
    pub host_path: String,
    /// Path in the container; absolute.
    pub container_path: String,
    /// Options of mount(8): `ro`, `nosuid`, `bind`.
    pub options: Vec<String>,
    /// Type of the file system; `None` for a bind mount.
    pub fs_type: Option<String>,
}

impl Mount {
    /// Creates a read-only bind mount with `nosuid` and `nodev`.
    pub fn read_only(host_path: impl Into<String>, container_path: impl Into<String>) -> Self {
        Self::bind(host_path, container_path, "ro")
    }

    /// Creates a writable bind mount with `nosuid` and `nodev`.
    pub fn read_write(host_path: impl Into<String>, container_path: impl Into<String>) -> Self {
        Self::bind(host_path, container_path, "rw")
    }

    fn bind(host_path: impl Into<String>, container_path: impl Into<String>, access: &str) -> Self {
        Mount {
            host_path: host_path.into(),
            container_path: container_path.into(),
            options: [access, "nosuid", "nodev", "bind"]
                .map(str::to_owned)
                .into(),
            fs_type: None,
        }
    }
}

/// A network interface of the node that the runtime moves into the container.
///
/// ```
/// use nodedock_sdk::{ContainerEdits, DriverInfo};
///
/// let info = DriverInfo::new("nic.example.com", "0.1.0").net_devices(["eth*"]);
/// let edits = ContainerEdits::new().net_device("eth1", "net0");
/// assert_eq!(edits.net_devices[0].container_interface, "net0");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetDevice {
    /// Name on the node.
    pub host_interface: String,
    /// Name in the container.
    pub container_interface: String,
}

/// The point in a container's life at which the runtime runs a hook (OCI runtime specification).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HookStage {
    /// `prestart`, which the specification deprecates.
    Prestart,
    /// `createRuntime`.
    CreateRuntime,
    /// `createContainer`.
    CreateContainer,
    /// `startContainer`.
    StartContainer,
    /// `poststart`.
    Poststart,
    /// `poststop`.
    Poststop,
}

/// Program of the node that the container runtime runs as root. The host refuses it unless the grant has this exact path.
///
/// ```
/// use nodedock_sdk::{ContainerEdits, DriverInfo, Hook, HookStage};
///
/// const HOOK: &str = "/usr/bin/gpu-hook";
///
/// let info = DriverInfo::new("gpu.example.com", "0.1.0").hooks([HOOK]);
/// let hook = Hook {
///     stage: HookStage::CreateContainer,
///     path: HOOK.into(),
///     args: ["gpu-hook", "update-ldcache"].map(String::from).into(),
///     env: Vec::new(),
///     timeout_seconds: Some(5),
/// };
/// let edits = ContainerEdits::new().hook(hook);
/// assert_eq!(info.capabilities.hooks, [edits.hooks[0].path.as_str()]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hook {
    /// The point in a container's life at which the runtime runs it.
    pub stage: HookStage,
    /// Path of the program; absolute.
    pub path: String,
    /// Arguments, beginning with the program's name.
    pub args: Vec<String>,
    /// Environment variables of the program.
    pub env: Vec<(String, String)>,
    /// Seconds until the runtime kills the program.
    pub timeout_seconds: Option<u32>,
}

/// Settings of Intel Resource Director Technology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IntelRdt {
    /// Class of service.
    pub clos_id: Option<String>,
    /// Lines of the schemata.
    pub schemata: Vec<String>,
    /// True if the runtime creates a monitoring group.
    pub enable_monitoring: bool,
}

/// Container edits for a device: at most 64 entries in each list. The host checks every entry against the operator's grant and
/// the node before it uses any.
///
/// ```
/// use nodedock_sdk::{ContainerEdits, DeviceNode, Mount, NodeAccess};
///
/// let edits = ContainerEdits::new()
///     .env("GPU_0", "uuid")
///     .device_node("/dev/dri/card0")
///     .device_node(DeviceNode::new("/dev/dri/renderD128").access(NodeAccess::READ))
///     .mount(Mount::read_only("/opt/gpu/lib", "/usr/lib/gpu"));
/// assert_eq!(edits.device_nodes.len(), 2);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerEdits {
    /// Environment variables.
    pub env: Vec<(String, String)>,
    /// Device nodes.
    pub device_nodes: Vec<DeviceNode>,
    /// Mounts.
    pub mounts: Vec<Mount>,
    /// Network interfaces.
    pub net_devices: Vec<NetDevice>,
    /// Hooks.
    pub hooks: Vec<Hook>,
    /// Supplementary group IDs of the container's processes.
    pub additional_gids: Vec<u32>,
    /// Intel Resource Director Technology.
    pub intel_rdt: Option<IntelRdt>,
}

impl ContainerEdits {
    /// Creates edits without any change.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Adds a device node; a path alone means the same path on the node, for reading and writing.
    #[must_use]
    pub fn device_node(mut self, node: impl Into<DeviceNode>) -> Self {
        self.device_nodes.push(node.into());
        self
    }

    /// Adds a mount.
    #[must_use]
    pub fn mount(mut self, mount: Mount) -> Self {
        self.mounts.push(mount);
        self
    }

    /// Adds a network interface.
    #[must_use]
    pub fn net_device(
        mut self,
        host_interface: impl Into<String>,
        container_interface: impl Into<String>,
    ) -> Self {
        self.net_devices.push(NetDevice {
            host_interface: host_interface.into(),
            container_interface: container_interface.into(),
        });
        self
    }

    /// Adds a hook.
    #[must_use]
    pub fn hook(mut self, hook: Hook) -> Self {
        self.hooks.push(hook);
        self
    }

    /// Adds a supplementary group ID.
    #[must_use]
    pub fn additional_gid(mut self, gid: u32) -> Self {
        self.additional_gids.push(gid);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_are_read_from_their_letters() {
        assert_eq!("rw".parse(), Ok(NodeAccess::READ_WRITE));
        assert_eq!(
            "mr".parse(),
            Ok(NodeAccess {
                mknod: true,
                ..NodeAccess::READ
            })
        );
        for bad in ["", "x", "rr", "r w"] {
            bad.parse::<NodeAccess>().unwrap_err();
        }
    }

    #[test]
    fn path_alone_is_read_write_node() {
        let edits = ContainerEdits::new()
            .device_node("/dev/fuse")
            .device_node(String::from("/dev/kvm"));
        assert_eq!(edits.device_nodes[0], DeviceNode::new("/dev/fuse"));
        assert_eq!(edits.device_nodes[1].access, NodeAccess::READ_WRITE);
    }

    #[test]
    fn mounts_are_nosuid_and_nodev() {
        assert_eq!(
            Mount::read_only("/a", "/b").options,
            ["ro", "nosuid", "nodev", "bind"]
        );
        assert_eq!(Mount::read_write("/a", "/b").options[0], "rw");
    }
}
