//! Functions of the fuzz targets in `fuzz/`, and of the test of their seeds: one function for each target.
//!
//! Each gets bytes, and panics if the result breaks a guarantee of the daemon. It returns true if the input was accepted, so that seeds
//! which are only ever refused are noticed.

mod answers;
mod bounds;
mod snapshot;
mod texts;

#[cfg(test)]
mod tests;

pub use answers::answers;
pub use nodedock_apiserver::fuzz::api;
pub use nodedock_core::checkpoint::fuzz::record;
pub use nodedock_wasm::testing::fuzz::admission;
pub use snapshot::snapshot;
pub use texts::{config, grant, manifest};
