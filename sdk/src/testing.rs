//! Runs drivers in plain `cargo test`, without WebAssembly, hardware or root.
//!
//! A [`FakeHost`] is a fake node. A [`Harness`] calls a driver as the host does: it grants only what the driver requests, and checks
//! every result against the bounds of the contract. A [`Grant`] is an operator's grant file, to test that the one you ship covers
//! what your driver requests. A [`Snapshot`] is a recorded machine: [`FakeHost::snapshot`] fills a fake node from it.

pub mod bounds;
mod fake;
mod grant;
mod harness;

pub use fake::{FakeHost, LogLine, SysfsWrite};
pub use grant::Grant;
pub use harness::Harness;
pub use nodedock_hardware::{Snapshot, SnapshotError};
