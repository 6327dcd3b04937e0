//! Nodedock's protocols and the Rust that is generated from them.

pub use prost;

/// The node API, `nodedock.node.v1`.
pub mod node {
    /// Version 1.
    pub mod v1 {
        tonic::include_proto!("nodedock.node.v1");
    }
}
