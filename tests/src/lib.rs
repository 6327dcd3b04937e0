//! Drives the real daemon: starts it on a temporary root, talks to it as agents and operators do, waits for what it reports.
//!
//! Nothing here sleeps: readiness comes from the daemon's own notification, states from its `Watch`, files from the kernel.

pub mod agreement;
pub mod cdi;
pub mod cluster;
pub mod compiled;
pub mod compose;
pub mod daemon;
pub mod drivers;
pub mod go;
pub mod golden;
pub mod machine;
pub mod metrics;
pub mod node_api;
pub mod places;
pub mod podman;
pub mod recorded;
pub mod root;
mod service;
mod until;
pub mod versions;
pub mod wait;

pub use daemon::{Daemon, Options, children};
pub use node_api::{Client, NodeApi};
pub use root::{Output, Root, assert_parts};
pub use wait::own_pool;

/// Deadline of every wait. It only bounds a failure: a machine may be slow, and no test depends on time.
pub const DEADLINE: std::time::Duration = std::time::Duration::from_secs(120);
