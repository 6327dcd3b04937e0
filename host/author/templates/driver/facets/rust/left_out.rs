//! Devices that the driver does not offer: nodes that this machine does not have.

use nodedock_sdk::*;

use crate::{NODES, NodeDriver};

impl LeftOut for NodeDriver {
    fn list_devices(host: &Host, _: &Context) -> Result<Vec<LeftOutDevice>, Problem> {
        let mut devices = Vec::new();
        for path in NODES {
            if host.device_nodes().glob(path)?.is_empty() {
                devices.push(LeftOutDevice::new(
                    path,
                    "the node does not exist: load its kernel module",
                ));
            }
        }
        Ok(devices)
    }
}
