//! A cluster for conformance cases and tests: an API server and a kubelet, as far as the drivers of a node meet them.

pub mod api_server;
mod deadline;
pub mod kubelet;

pub use deadline::DEADLINE;
