//! What stands for a cluster in tests: an API server and a kubelet, as far as a node's drivers meet them.

pub mod api_server;
mod deadline;
pub mod kubelet;

pub use deadline::DEADLINE;
