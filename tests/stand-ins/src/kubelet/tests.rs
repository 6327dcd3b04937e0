//! Against small plugins.

mod devices;
mod dra;
mod plugin;
mod pods;
mod registering;
