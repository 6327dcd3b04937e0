//! What arrives and leaves: files in the drivers folder, the daemon's config, sockets of plugins, devices of the kernel.
//!
//! Emits facts on channels. Decides nothing about them, and loses nothing: whatever a watch misses, the next list finds.

pub mod config;
pub mod device_plugins;
pub mod files;
pub mod kernel;
pub mod sockets;
pub mod specs;
mod watched;
