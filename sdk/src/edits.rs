//! What changes in a container that uses a device.

/// Kinds of special files.
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
    /// The name as in the contract: `character`.
    pub fn as_str(self) -> &'static str {
        match self {
            NodeKind::Character => "character",
            NodeKind::Block => "block",
            NodeKind::Fifo => "fifo",
        }
    }
}

/// A device node in the container. The host fills in kind, major and minor from the node, and refuses what differs from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceNode {
    /// In the container; absolute, at most 4,096 bytes.
    pub path: String,
    /// On the node; none means the same path.
    pub host_path: Option<String>,
    /// None lets the host look.
    pub kind: Option<NodeKind>,
    /// None lets the host look.
    pub major: Option<u32>,
    /// None lets the host look.
    pub minor: Option<u32>,
    /// Subset of `rwm`: read, write, make.
    pub permissions: String,
    /// Access bits of the node in the container.
    pub file_mode: Option<u32>,
    /// Owner in the container.
    pub uid: Option<u32>,
    /// Group in the container.
    pub gid: Option<u32>,
}

impl DeviceNode {
    /// This node of the host at the same path, to read and write.
    pub fn new(path: impl Into<String>) -> Self {
        DeviceNode {
            path: path.into(),
            host_path: None,
            kind: None,
            major: None,
            minor: None,
            permissions: "rw".into(),
            file_mode: None,
            uid: None,
            gid: None,
        }
    }

    /// The same, taken from another path of the host.
    #[must_use]
    pub fn host_path(mut self, path: impl Into<String>) -> Self {
        self.host_path = Some(path.into());
        self
    }

    /// The same with other permissions, a subset of `rwm`.
    #[must_use]
    pub fn permissions(mut self, permissions: impl Into<String>) -> Self {
        self.permissions = permissions.into();
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

/// A folder or file of the node in the container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Mount {
    /// On the node; absolute.
    pub host_path: String,
    /// In the container; absolute.
    pub container_path: String,
    /// As for mount(8): `ro`, `nosuid`, `bind`.
    pub options: Vec<String>,
    /// Type of the file system; none for a bind mount.
    pub fs_type: Option<String>,
}

impl Mount {
    /// A bind mount to read only, without set-user-ID programs and device nodes.
    pub fn read_only(host_path: impl Into<String>, container_path: impl Into<String>) -> Self {
        Self::bind(host_path, container_path, "ro")
    }

    /// A bind mount to read and write, without set-user-ID programs and device nodes.
    pub fn read_write(host_path: impl Into<String>, container_path: impl Into<String>) -> Self {
        Self::bind(host_path, container_path, "rw")
    }

    fn bind(host_path: impl Into<String>, container_path: impl Into<String>, access: &str) -> Self {
        Mount {
            host_path: host_path.into(),
            container_path: container_path.into(),
            options: [access, "nosuid", "nodev", "bind"].map(str::to_owned).into(),
            fs_type: None,
        }
    }
}

/// A network interface of the node that moves into the container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NetDevice {
    /// Its name on the node.
    pub host_interface: String,
    /// Its name in the container.
    pub container_interface: String,
}

/// Program of the node that the runtime runs as root. Refused unless the operator granted this very path.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hook {
    /// `prestart`, `createRuntime`, `createContainer`, `startContainer`, `poststart`, `poststop`.
    pub stage: String,
    /// The program; absolute.
    pub path: String,
    /// Its arguments, beginning with its name.
    pub args: Vec<String>,
    /// Its environment.
    pub env: Vec<(String, String)>,
    /// Seconds until it is killed.
    pub timeout_seconds: Option<u32>,
}

/// Resource Director Technology of Intel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IntelRdt {
    /// Class of service.
    pub clos_id: Option<String>,
    /// Lines of the schemata.
    pub schemata: Vec<String>,
    /// Whether a monitoring group is made.
    pub enable_monitoring: bool,
}

/// What changes in a container that uses a device: at most 64 entries in each list. The host checks every entry against the
/// operator's grant and the node before anything is answered.
///
/// ```
/// use nodedock_sdk::{DeviceNode, Edits, Mount};
///
/// let edits = Edits::new()
///     .env("GPU_0", "uuid")
///     .device_node("/dev/dri/card0")
///     .device_node(DeviceNode::new("/dev/dri/renderD128").permissions("r"))
///     .mount(Mount::read_only("/opt/gpu/lib", "/usr/lib/gpu"));
/// assert_eq!(edits.device_nodes.len(), 2);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edits {
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
    /// Groups that the container's processes get.
    pub additional_gids: Vec<u32>,
    /// Resource Director Technology.
    pub intel_rdt: Option<IntelRdt>,
}

impl Edits {
    /// No change.
    pub fn new() -> Self {
        Self::default()
    }

    /// The same with an environment variable more.
    #[must_use]
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// The same with a device node more; a path alone means the same path, to read and write.
    #[must_use]
    pub fn device_node(mut self, node: impl Into<DeviceNode>) -> Self {
        self.device_nodes.push(node.into());
        self
    }

    /// The same with a mount more.
    #[must_use]
    pub fn mount(mut self, mount: Mount) -> Self {
        self.mounts.push(mount);
        self
    }

    /// The same with a network interface more.
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

    /// The same with a hook more.
    #[must_use]
    pub fn hook(mut self, hook: Hook) -> Self {
        self.hooks.push(hook);
        self
    }

    /// The same with a group more.
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
    fn a_path_alone_is_a_node_to_read_and_write() {
        let edits = Edits::new().device_node("/dev/fuse").device_node(String::from("/dev/kvm"));
        assert_eq!(edits.device_nodes[0], DeviceNode::new("/dev/fuse"));
        assert_eq!(edits.device_nodes[1].permissions, "rw");
    }

    #[test]
    fn mounts_bring_no_programs_and_no_nodes() {
        assert_eq!(Mount::read_only("/a", "/b").options, ["ro", "nosuid", "nodev", "bind"]);
        assert_eq!(Mount::read_write("/a", "/b").options[0], "rw");
    }
}
