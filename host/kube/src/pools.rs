//! Names of the pools of this node's drivers. A native plugin publishes its pools by itself, and their names are left as they are; those of
//! other drivers are published by `PoolNames`.

use nodedock_core::registry::Registry;
use nodedock_model::{AllocatedDevice, Claim, DriverName, PoolName};

pub use nodedock_model::PoolNames;

/// The pools of this node's drivers.
#[derive(Clone)]
pub struct NodePools {
    pub names: PoolNames,
    pub registry: Registry,
}

impl NodePools {
    /// A driver that is not known yet is taken for one of a file: a plugin that is not here is not called anyway.
    fn is_native(&self, driver: &DriverName) -> bool {
        self.registry.publishes_itself(driver)
    }

    /// Whether an allocated device, by the name that the API server has, is one of this node's drivers of files.
    pub(crate) fn has_device(&self, device: &AllocatedDevice) -> bool {
        let is_known = self.registry.kind(&device.driver).is_some();
        is_known && !self.is_native(&device.driver) && self.names.is_of_node(&device.pool)
    }

    /// The name that the API server has.
    pub fn published(&self, driver: &DriverName, pool: &PoolName) -> PoolName {
        if self.is_native(driver) {
            return pool.clone();
        }
        // A pool whose name would be too long is not published, so no claim has it.
        self.names.published(pool).unwrap_or_else(|_| pool.clone())
    }

    /// A claim of the API server with the drivers' own names of pools.
    pub(crate) fn localized(&self, mut claim: Claim) -> Claim {
        for device in claim.allocation.iter_mut().flat_map(|allocation| &mut allocation.devices) {
            // A name of which nothing is left is no driver's, and stays as it came.
            if let (false, Ok(local)) =
                (self.is_native(&device.driver), PoolName::new(self.names.local(device.pool.as_str())))
            {
                device.pool = local;
            }
        }
        claim
    }
}
