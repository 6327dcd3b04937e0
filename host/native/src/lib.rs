//! Native plugins: their sockets, their registration as with a kubelet, and the clients of the DRA and device-plugin APIs.

pub mod endpoints;
pub mod grpc;
pub mod plugins;
pub mod registration;
pub mod sockets;
