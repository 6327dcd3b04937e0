//! Device plugins as a kubelet knows them, and what is allocated of their devices.

use nodedock_proto::kubelet::device_plugin::v1beta1::{
    ContainerAllocateResponse, Device, DevicePluginOptions,
};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

/// A resource as the node would report it.
#[derive(Clone, Debug, Default)]
pub struct Resource {
    pub devices: Vec<Device>,
    /// True if its plugin's list is watched. Devices of a plugin that is gone are unhealthy.
    pub running: bool,
    pub prefers: bool,
}

impl Resource {
    /// IDs of devices that can be allocated.
    pub fn healthy(&self) -> Vec<&str> {
        self.devices
            .iter()
            .filter(|device| device.health == "Healthy")
            .map(|device| device.id.as_str())
            .collect()
    }
}

/// Devices allocated to a container, and the plugin's response.
#[derive(Clone, Debug)]
pub struct Allocation {
    pub(super) number: u64,
    pub resource: String,
    pub ids: Vec<String>,
    pub answer: ContainerAllocateResponse,
}

impl Allocation {
    /// The name of the pod that has it, in the namespace `default`.
    pub fn pod(&self) -> String {
        format!("pod-{}", self.number)
    }
}

#[derive(Debug)]
pub(super) struct Plugin {
    pub(super) number: u64,
    pub(super) channel: Option<Channel>,
    pub(super) options: DevicePluginOptions,
    pub(super) devices: Vec<Device>,
    pub(super) running: bool,
    pub(super) end: CancellationToken,
}

impl Plugin {
    pub(super) fn shown(&self) -> Resource {
        Resource {
            devices: self.devices.clone(),
            running: self.running,
            prefers: self.options.get_preferred_allocation_available,
        }
    }

    pub(super) fn stopped(&mut self) {
        self.channel = None;
        self.running = false;
        for device in &mut self.devices {
            device.health = "Unhealthy".to_owned();
        }
    }

    /// Forgets the devices, as a kubelet does when its process ends.
    pub(super) fn forget(&mut self) {
        self.end.cancel();
        self.stopped();
        self.devices.clear();
    }
}
