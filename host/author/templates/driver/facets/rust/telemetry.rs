//! Values of the devices that change: how often each node is there, which is once or never.

use nodedock_sdk::*;

use crate::{NODES, NodeDriver, POOL, name};

impl Telemetry for NodeDriver {
    fn read(host: &Host, _: &Context) -> Result<Vec<DeviceReadings>, Problem> {
        let read = |path: &str| {
            let nodes = host.device_nodes().glob(path)?.len();
            Ok(DeviceReadings::new(POOL, name(path)).reading("nodes", nodes as f64))
        };
        NODES.into_iter().map(read).collect()
    }
}
