//! Names of pools: in a cluster each is told with the node's name before it, and drivers know their own without.
//!
//! Claims are translated where they are read, and what is answered of them on its way out. A native plugin tells the API server of its
//! pools by itself, and their names are left alone.

use std::sync::Arc;

use async_trait::async_trait;

use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_core::registry::Registry;
use nodedock_kube::slices::PoolNames;
use nodedock_model::{Claim, DriverKind, DriverName, KubeletDevice, ObjectName, PoolName, Problem, Uid};

#[derive(Clone)]
pub(super) struct Pools {
    pub(super) names: PoolNames,
    pub(super) registry: Registry,
}

impl Pools {
    /// A driver that is not known yet is taken for one of a file, unless somebody knows better: what is asked of a plugin that is not here
    /// comes to nothing anyway.
    fn is_native(&self, driver: &DriverName) -> bool {
        self.registry.kind(driver) == Some(DriverKind::Grpc)
    }

    /// As the driver has it.
    fn local(&self, driver: &DriverName, pool: &PoolName) -> PoolName {
        if self.is_native(driver) {
            return pool.clone();
        }
        // What is left of a name may be none: then it is nobody's, and stays as it came.
        PoolName::new(self.names.local(pool.as_str())).unwrap_or_else(|_| pool.clone())
    }

    /// As the API server has it.
    pub(super) fn published(&self, driver: &DriverName, pool: &PoolName) -> PoolName {
        if self.is_native(driver) {
            return pool.clone();
        }
        // A pool whose name would be too long is told nobody, so no claim has it.
        self.names.published(pool).unwrap_or_else(|_| pool.clone())
    }

    /// `prepared_by`: who prepared the claim, for a driver that has not come back since our start.
    pub(super) fn answered(
        &self,
        driver: &DriverName,
        mut devices: Vec<KubeletDevice>,
        prepared_by: impl FnOnce() -> Option<DriverKind>,
    ) -> Vec<KubeletDevice> {
        if self.registry.kind(driver).is_none() && prepared_by() == Some(DriverKind::Grpc) {
            return devices;
        }
        devices.iter_mut().for_each(|device| device.pool = self.published(driver, &device.pool));
        devices
    }

    fn read(&self, mut claim: Claim) -> Claim {
        for device in claim.allocation.iter_mut().flat_map(|allocation| &mut allocation.devices) {
            device.pool = self.local(&device.driver, &device.pool);
        }
        claim
    }
}

/// Claims of the API server with the drivers' own names of pools.
pub(super) struct LocalClaims {
    pub(super) source: Arc<dyn ClaimSource>,
    pub(super) pools: Pools,
}

#[async_trait]
impl ClaimSource for LocalClaims {
    async fn claim(&self, namespace: &ObjectName, name: &ObjectName) -> Result<Option<Claim>, Problem> {
        Ok(self.source.claim(namespace, name).await?.map(|claim| self.pools.read(claim)))
    }

    async fn claim_with_uid(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
        uid: &Uid,
    ) -> Result<Option<Claim>, Problem> {
        Ok(self.source.claim_with_uid(namespace, name, uid).await?.map(|claim| self.pools.read(claim)))
    }
}
