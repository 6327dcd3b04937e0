//! The node program of Nodedock. The map of the host is `ARCHITECTURE.md` in the directory above.

pub mod admin;
pub mod config;
pub mod convert;
pub mod device_names;
mod health;
pub mod node_api;
pub mod pod_resources;
mod probe;
pub mod program;
pub mod recording;
mod supervise;
pub mod telemetry;
pub mod user_connections;

pub mod app;

/// Helpers for fuzz targets and tests. In no build that is shipped.
#[cfg(any(test, feature = "fuzzing"))]
pub mod testing {
    pub mod fuzz;
}
