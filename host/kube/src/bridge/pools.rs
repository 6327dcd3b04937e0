//! Names of pools on a Kubernetes node: the API server has each with the node's name before it, and drivers know their own without.
//!
//! Claims are translated where they are read, and answers on their way out. A native plugin publishes its pools by itself, and their
//! names are left as they are.

use std::sync::Arc;

use async_trait::async_trait;

use crate::slices::PoolNames;
use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_core::registry::Registry;
use nodedock_model::{Claim, DriverKind, DriverName, ObjectName, PoolName, Problem, Uid};

#[derive(Clone)]
pub struct NodePools {
    pub names: PoolNames,
    pub registry: Registry,
}

impl NodePools {
    /// A driver that is not known yet is taken for one of a file: a plugin that is not here is not called anyway.
    fn is_native(&self, driver: &DriverName) -> bool {
        self.registry.kind(driver) == Some(DriverKind::Grpc)
    }

    /// The name that the driver uses.
    fn local(&self, driver: &DriverName, pool: &PoolName) -> PoolName {
        if self.is_native(driver) {
            return pool.clone();
        }
        // A name of which nothing is left is no driver's, and stays as it came.
        PoolName::new(self.names.local(pool.as_str())).unwrap_or_else(|_| pool.clone())
    }

    /// The name that the API server has.
    pub fn published(&self, driver: &DriverName, pool: &PoolName) -> PoolName {
        if self.is_native(driver) {
            return pool.clone();
        }
        // A pool whose name would be too long is not published, so no claim has it.
        self.names.published(pool).unwrap_or_else(|_| pool.clone())
    }
}

/// Claims of the API server with the drivers' own names of pools.
pub struct LocalClaims {
    pub source: Arc<dyn ClaimSource>,
    pub pools: NodePools,
}

impl LocalClaims {
    fn localized(&self, mut claim: Claim) -> Claim {
        for device in claim.allocation.iter_mut().flat_map(|allocation| &mut allocation.devices) {
            device.pool = self.pools.local(&device.driver, &device.pool);
        }
        claim
    }
}

#[async_trait]
impl ClaimSource for LocalClaims {
    async fn claim(&self, namespace: &ObjectName, name: &ObjectName) -> Result<Option<Claim>, Problem> {
        Ok(self.source.claim(namespace, name).await?.map(|claim| self.localized(claim)))
    }

    async fn claim_with_uid(
        &self,
        namespace: &ObjectName,
        name: &ObjectName,
        uid: &Uid,
    ) -> Result<Option<Claim>, Problem> {
        Ok(self.source.claim_with_uid(namespace, name, uid).await?.map(|claim| self.localized(claim)))
    }
}
