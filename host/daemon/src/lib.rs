//! Nodedock: the device dock of a node. The map of the host is `ARCHITECTURE.md` in the directory above.

pub mod admin;
pub mod config;
pub mod convert;
mod health;
pub mod node_api;
pub mod pod_resources;
mod preflight;
pub mod recording;
mod simulate;
mod supervise;
mod telemetry;

pub mod app;
pub mod cli;

/// For fuzz targets and tests. In no build that is shipped.
#[cfg(any(test, feature = "fuzzing"))]
pub mod testing {
    pub mod fuzz;
}
