//! What the fuzz targets in `fuzz/` call, and the test of their seeds: one function for each target.
//!
//! Each gets bytes, and panics if the result breaks a promise of the daemon. It returns whether the input was accepted, so that seeds
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
