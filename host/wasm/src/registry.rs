//! The files of WASM drivers, from their arrival to the driver that serves.

mod file_memory;
mod keeper;
pub mod predecessors;
mod vetting;
pub mod wasm_files;

#[cfg(test)]
mod keeper_tests;
