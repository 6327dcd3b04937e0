//! Running drivers in plain `cargo test`, without WebAssembly, hardware or root.
//!
//! A [`FakeHost`] is a node that a test makes up. A [`Harness`] calls a driver as the host does: with nothing granted but what it
//! describes, and with every answer held against the bounds of the contract. A [`Grant`] is an operator's file, to test that the
//! one you ship covers what your driver asks for.

pub mod bounds;
mod fake;
mod globs;
mod grant;
mod harness;
mod tree;

pub use fake::{FakeHost, LogLine, SysfsWrite};
pub use grant::Grant;
pub use harness::Harness;
