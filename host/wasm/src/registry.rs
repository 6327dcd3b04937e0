//! The files of WASM drivers, from their arrival to the driver that serves.

mod file_memory;
mod inventory_poller;
pub mod previous_versions;
mod verification;
pub mod wasm_files;

#[cfg(test)]
mod inventory_poller_tests;
