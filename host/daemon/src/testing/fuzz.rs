//! What the fuzz targets in `fuzz/` call, and the test of their seeds: one function a target.
//!
//! Each is given bytes, and panics where what becomes of them breaks a promise of the daemon's. It gives back whether the input was
//! taken, so that somebody notices when seeds are only ever refused. In no build that is shipped.

mod answers;
mod bounds;
mod texts;

#[cfg(test)]
mod tests;

use nodedock_core::checkpoint;

pub use answers::answers;
pub use texts::{config, grant, manifest};

/// A dropped file: what is admitted is a driver, and stays one.
pub fn admission(data: &[u8]) -> bool {
    nodedock_wasm::fuzz::admission(data)
}

/// A value of the checkpoint: what is read of it can be written, and nothing is lost on the way.
pub fn record(data: &[u8]) -> bool {
    checkpoint::fuzz::record(data)
}
