//! Names of the pools of this node's drivers, as the API server has them.

pub use nodedock_core::pools::NodePools;
pub use nodedock_model::PoolNames;
