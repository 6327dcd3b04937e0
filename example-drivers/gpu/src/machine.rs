//! The GPUs of the node with everything that their container edits need. Read afresh in every call.

use std::collections::BTreeMap;

use nodedock_sdk::{DeviceNode, Host, NodeInfo, Problem};

use crate::function::{AMD, Function};
use crate::nvidia::{Mig, Nvidia};

/// Nodes that all GPUs of a vendor share.
pub(crate) const CONTROL_NODES: [&str; 5] = [
    "/dev/kfd",
    "/dev/nvidiactl",
    "/dev/nvidia-modeset",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
];

/// Globs of the device nodes that containers may get.
pub(crate) const NODE_GLOBS: [&str; 4] = [
    "/dev/dri/*",
    "/dev/kfd",
    "/dev/nvidia*",
    "/dev/nvidia-caps/*",
];

const NVIDIA_CONTROL_MINOR: u32 = 255;
const NVIDIA_MODESET_MINOR: u32 = 254;

pub(crate) struct Machine {
    /// Device nodes that exist, by path.
    nodes: BTreeMap<String, NodeInfo>,
    pub(crate) nvidia: Nvidia,
}

/// A node that a container needs, with the number that the kernel gives it, if known.
struct Needed {
    path: String,
    major: Option<u32>,
    minor: Option<u32>,
    is_optional: bool,
}

impl Needed {
    fn new(path: impl Into<String>, major: Option<u32>, minor: u32) -> Self {
        Needed {
            path: path.into(),
            major,
            minor: major.map(|_| minor),
            is_optional: false,
        }
    }

    fn optional(self) -> Self {
        Needed {
            is_optional: true,
            ..self
        }
    }
}

impl Machine {
    pub(crate) fn read(host: &Host) -> Result<Self, Problem> {
        let mut nodes = BTreeMap::new();
        for glob in NODE_GLOBS {
            nodes.extend(
                host.device_nodes()
                    .glob(glob)?
                    .into_iter()
                    .map(|node| (node.path.clone(), node)),
            );
        }
        Ok(Machine {
            nodes,
            nvidia: Nvidia::read(host)?,
        })
    }

    /// Returns the device nodes of a whole GPU.
    pub(crate) fn gpu_nodes(&self, function: &Function) -> Result<Vec<DeviceNode>, Problem> {
        let mut needed = if function.has_nvidia_driver() {
            self.nvidia_nodes(function)?
        } else {
            Vec::new()
        };
        let is_needed = needed.is_empty();
        for node in &function.drm {
            let node = Needed::new(&node.path, Some(node.major), node.minor);
            needed.push(if is_needed { node } else { node.optional() });
        }
        if needed.is_empty() {
            return Err(no_driver(function));
        }
        if function.vendor == AMD {
            needed.push(Needed::new("/dev/kfd", None, 0).optional());
        }
        self.existing(function, needed)
    }

    /// Returns the device nodes of a MIG instance.
    pub(crate) fn mig_nodes(
        &self,
        function: &Function,
        mig: &Mig,
    ) -> Result<Vec<DeviceNode>, Problem> {
        let mut needed = self.nvidia_nodes(function)?;
        let major = self.nvidia.major("nvidia-caps");
        for minor in mig.capabilities {
            needed.push(Needed::new(
                format!("/dev/nvidia-caps/nvidia-cap{minor}"),
                major,
                minor,
            ));
        }
        self.existing(function, needed)
    }

    fn nvidia_nodes(&self, function: &Function) -> Result<Vec<Needed>, Problem> {
        let Some(gpu) = self.nvidia.gpu(&function.address) else {
            return Err(no_driver(function));
        };
        if gpu.is_excluded {
            let message = format!(
                "NVIDIA's kernel driver excludes GPU {}",
                function.address.as_str()
            );
            return Err(Problem::unavailable("gpu-excluded", message));
        }
        let (major, uvm) = (self.nvidia.gpu_major(), self.nvidia.major("nvidia-uvm"));
        Ok(vec![
            Needed::new(format!("/dev/nvidia{}", gpu.minor), major, gpu.minor),
            Needed::new("/dev/nvidiactl", major, NVIDIA_CONTROL_MINOR),
            Needed::new("/dev/nvidia-modeset", major, NVIDIA_MODESET_MINOR).optional(),
            Needed::new("/dev/nvidia-uvm", uvm, 0).optional(),
            Needed::new("/dev/nvidia-uvm-tools", uvm, 1).optional(),
        ])
    }

    fn existing(
        &self,
        function: &Function,
        needed: Vec<Needed>,
    ) -> Result<Vec<DeviceNode>, Problem> {
        let mut nodes = Vec::new();
        for needed in needed {
            match self.nodes.get(&needed.path) {
                Some(node) => nodes.push(checked(needed, node)?),
                None if needed.is_optional => {}
                None => {
                    let message = format!(
                        "{} of GPU {} does not exist",
                        needed.path,
                        function.address.as_str()
                    );
                    return Err(Problem::unavailable("no-device-node", message));
                }
            }
        }
        Ok(nodes)
    }
}

/// Refuses a node that is left from before the kernel driver got other numbers.
fn checked(needed: Needed, node: &NodeInfo) -> Result<DeviceNode, Problem> {
    if differs(needed.major, node.major) || differs(needed.minor, node.minor) {
        let message = format!(
            "{} has number {}:{}, and the kernel another",
            needed.path, node.major, node.minor
        );
        return Err(Problem::unavailable("stale-device-node", message));
    }
    Ok(DeviceNode {
        major: needed.major,
        minor: needed.minor,
        ..DeviceNode::new(needed.path)
    })
}

fn differs(number: Option<u32>, is: u32) -> bool {
    number.is_some_and(|number| number != is)
}

fn no_driver(function: &Function) -> Problem {
    let address = function.address.as_str();
    let message = match &function.driver {
        Some(driver) => format!("kernel driver {driver} offers no device nodes for GPU {address}"),
        None => format!("GPU {address} is bound to no kernel driver"),
    };
    Problem::unavailable("no-kernel-driver", message)
}
