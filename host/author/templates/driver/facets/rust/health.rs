//! The health of the devices: a node that is gone is unhealthy.

use nodedock_sdk::*;

use crate::{NODES, NodeDriver, POOL, name};

impl Health for NodeDriver {
    fn check(host: &Host, _: &Context) -> Result<Vec<DeviceHealth>, Problem> {
        let check = |path: &str| {
            let is_there = !host.device_nodes().glob(path)?.is_empty();
            Ok(match is_there {
                true => DeviceHealth::healthy(POOL, name(path)),
                false => DeviceHealth::unhealthy(POOL, name(path), format!("{path} is gone")),
            })
        };
        NODES.into_iter().map(check).collect()
    }
}
