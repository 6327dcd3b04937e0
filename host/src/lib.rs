//! Nodedock: the device dock of a node. The map of this crate is `ARCHITECTURE.md` beside it.

pub mod base;
pub mod cdi;
pub mod checkpoint;
pub mod claims;
pub mod config;
pub mod devices;
pub mod discovery;
pub mod driver;
pub mod model;
pub mod north;
pub mod pods;
pub mod registry;
pub mod trust;

pub mod app;
pub mod cli;

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
