//! The names of this node's pools, as users, exporters and the API have them: `NODE/POOL`.
//!
//! Drivers, the checkpoint and the manager have the names that drivers give, `POOL`. Code that takes a claim from outside or shows a
//! pool translates here, and nowhere else. A native plugin that publishes its own pools names them itself, and its names are the same on both sides.
//! Decides on names alone, and never whether there is such a pool.

use async_trait::async_trait;

use crate::manager::claims::source::{ClaimDirectory, ClaimSource};
use crate::registry::Registry;
use nodedock_model::{
    AllocatedDevice, Claim, ClaimRecord, DriverKind, DriverName, ObjectName, PoolName, PoolNames,
    Problem,
};

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

    /// Returns whether an allocated device, by the name that the API has, is one of this node's drivers of files.
    pub fn has_device(&self, device: &AllocatedDevice) -> bool {
        let is_known = self.registry.kind(&device.driver).is_some();
        is_known && !self.is_native(&device.driver) && self.names.is_of_node(&device.pool)
    }

    /// Returns the name of a driver's pool outside of the daemon.
    pub fn published(&self, driver: &DriverName, pool: &PoolName) -> PoolName {
        if self.is_native(driver) {
            pool.clone()
        } else {
            self.names.shown(pool)
        }
    }

    /// Returns the same of a pool that a claim has devices of. After a restart the record says which drivers publish themselves until they are
    /// back.
    pub fn published_in(
        &self,
        claim: &ClaimRecord,
        driver: &DriverName,
        pool: &PoolName,
    ) -> PoolName {
        let by = claim.drivers.get(driver).and_then(|part| part.by.as_ref());
        let recorded = || by.map(|by| by.kind == DriverKind::Grpc && !by.lists);
        let is_native = self
            .registry
            .instances
            .publishes_itself(driver)
            .or_else(recorded);
        if is_native.unwrap_or_else(|| self.is_native(driver)) {
            pool.clone()
        } else {
            self.names.shown(pool)
        }
    }

    /// Returns a driver's devices of a claim, as `NODE/POOL/DEVICE`.
    pub fn devices_of(&self, claim: &ClaimRecord, driver: &DriverName) -> Vec<String> {
        let devices = claim.allocation.of_driver(driver);
        devices.map(|of| self.device_of(claim, of)).collect()
    }

    /// Returns a device of a claim, as `NODE/POOL/DEVICE`.
    pub fn device_of(&self, claim: &ClaimRecord, of: &AllocatedDevice) -> String {
        let pool = self.published_in(claim, &of.driver, &of.pool);
        format!("{pool}/{}", of.device)
    }

    /// Returns the name of a recorded device, `POOL/DEVICE`, of a claim that is gone.
    pub fn published_device(&self, driver: &DriverName, pool_and_device: &str) -> String {
        let parts = pool_and_device.rsplit_once('/').and_then(|(pool, device)| {
            let pool = PoolName::new(pool).ok()?;
            Some(format!("{}/{device}", self.published(driver, &pool)))
        });
        parts.unwrap_or_else(|| pool_and_device.to_owned())
    }

    /// Returns a claim from outside with the drivers' own names of pools. A pool may be named with this node or without.
    pub fn localized(&self, mut claim: Claim) -> Claim {
        for device in claim
            .allocation
            .iter_mut()
            .flat_map(|allocation| &mut allocation.devices)
        {
            // A name of which nothing is left is no driver's, and stays as it came.
            if let (false, Ok(local)) = (
                self.is_native(&device.driver),
                PoolName::new(self.names.local(device.pool.as_str())),
            ) {
                device.pool = local;
            }
        }
        claim
    }
}

/// A directory of claims with the names from outside, as a source with the drivers' own.
pub struct LocalizedClaims {
    pub source: ClaimDirectory,
    pub pools: NodePools,
}

#[async_trait]
impl ClaimSource for LocalizedClaims {
    async fn claim(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
    ) -> Result<Option<Claim>, Problem> {
        let found = self.source.claim(namespace, name).await?;
        Ok(found.map(|claim| self.pools.localized(claim)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_base::changes::Changes;
    use nodedock_base::conditions::Conditions;
    use nodedock_model::{Allocation, ClaimState, DeviceName, ObjectRef, PreparedBy};

    fn pools() -> NodePools {
        let registry = Registry::new(Changes::default(), Conditions::default(), None);
        for (kind, source, driver) in [
            (DriverKind::Wasm, "gpu.wasm", "gpu.dev"),
            (DriverKind::Grpc, "nic.sock", "nic.dev"),
        ] {
            registry.sources.update(kind, source, |view| {
                view.name = Some(DriverName::new(driver).unwrap())
            });
        }
        NodePools {
            names: PoolNames {
                node: ObjectName::new("node-1").unwrap(),
            },
            registry,
        }
    }

    fn localized(pools: &NodePools, driver: &str, pool: &str) -> String {
        let device = AllocatedDevice {
            request: "r".to_owned(),
            driver: DriverName::new(driver).unwrap(),
            pool: PoolName::new(pool).unwrap(),
            device: DeviceName::new("d").unwrap(),
            share_id: None,
            consumed: Default::default(),
            admin_access: false,
            binding: Default::default(),
        };
        let claim = Claim {
            id: ObjectRef::new("default", "c", "u").unwrap(),
            allocation: Some(Allocation {
                devices: vec![device],
                configs: Vec::new(),
                node_name: None,
            }),
            reserved_for: Vec::new(),
            annotations: Default::default(),
            owner_pod: None,
            resource: None,
        };
        pools.localized(claim).allocation.unwrap().devices[0]
            .pool
            .to_string()
    }

    #[test]
    fn node_prefix_of_pool_is_optional() {
        let pools = pools();
        for (driver, named, own) in [
            ("gpu.dev", "gpus", "gpus"),
            ("gpu.dev", "node-1/gpus", "gpus"),
            ("gpu.dev", "node-1", "node-1"),
            ("gpu.dev", "node-2/gpus", "node-2/gpus"),
            ("elsewhere.dev", "node-1/gpus", "gpus"),
            ("nic.dev", "node-1/nics", "node-1/nics"),
        ] {
            assert_eq!(localized(&pools, driver, named), own, "{driver}/{named}");
        }
    }

    /// Just after a restart no plugin is registered, and its claims were listed under pools that no driver has.
    #[test]
    fn record_decides_pools_of_absent_driver() {
        let (pools, absent) = (pools(), DriverName::new("absent.dev").unwrap());
        let pool = PoolName::new("nics").unwrap();
        let mut record = ClaimRecord::new(
            ObjectRef::new("default", "c", "u").unwrap(),
            ClaimState::Prepared,
            "boot",
        );
        let mut named = |by: Option<PreparedBy>| {
            record.drivers.entry(absent.clone()).or_default().by = by;
            pools.published_in(&record, &absent, &pool).to_string()
        };
        let by = |kind, lists| {
            Some(PreparedBy {
                kind,
                version: String::new(),
                digest: String::new(),
                lists,
            })
        };
        assert_eq!(named(by(DriverKind::Grpc, false)), "nics");
        assert_eq!(named(by(DriverKind::Grpc, true)), "node-1/nics");
        assert_eq!(named(by(DriverKind::Wasm, false)), "node-1/nics");
        assert_eq!(named(None), "node-1/nics");
    }

    #[test]
    fn a_published_device_is_read_back() {
        let pools = pools();
        let (gpu, nic) = (
            DriverName::new("gpu.dev").unwrap(),
            DriverName::new("nic.dev").unwrap(),
        );
        for (driver, own, published) in [
            (&gpu, "gpus/gpu-0", "node-1/gpus/gpu-0"),
            (&gpu, "rack/gpus/gpu-0", "node-1/rack/gpus/gpu-0"),
            (&nic, "node-1/nic-0", "node-1/nic-0"),
            (&nic, "nics/nic-0", "nics/nic-0"),
            (&gpu, "no-device", "no-device"),
        ] {
            assert_eq!(pools.published_device(driver, own), published);
            if let Some((pool, _)) = published.rsplit_once('/') {
                assert_eq!(
                    format!(
                        "{}/{}",
                        localized(&pools, driver.as_str(), pool),
                        own.rsplit_once('/').unwrap().1
                    ),
                    own
                );
            }
        }
    }
}
