//! Names of the pools of this node's drivers, as the API server has them.

pub use nodedock_core::pools::NodePools;
pub use nodedock_model::PoolNames;

use nodedock_model::{DriverName, PoolName};

/// A pool in the API.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PoolKey {
    pub driver: DriverName,
    /// Its published name.
    pub pool: PoolName,
}

impl std::fmt::Display for PoolKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.driver, self.pool)
    }
}
