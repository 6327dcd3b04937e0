//! What the scheduler should know beyond the inventory: an entry for each device, to be filled.

use nodedock_sdk::*;

use crate::NodeDriver;

impl Scheduling for NodeDriver {
    fn schedule(_: &Host, _: &Context, inventory: &Inventory) -> Result<Additions, Problem> {
        let additions = |pool: &Pool, device: &Device| DeviceScheduling {
            pool: pool.name.clone(),
            device: device.name.clone(),
            ..DeviceScheduling::default()
        };
        let of_pool = |pool: &Pool| pool.devices.iter().map(|device| additions(pool, device)).collect::<Vec<_>>();
        Ok(Additions {
            devices: inventory.pools.iter().flat_map(of_pool).collect(),
            ..Additions::default()
        })
    }
}
