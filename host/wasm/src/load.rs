//! From a file's bytes to code that can be called: what a component must be, its compilation in a process of its own, the cache, and the config
//! and schemas of the driver.

pub(crate) mod admission;
pub(crate) mod artifact;
pub(crate) mod cache;
pub(crate) mod compile;
pub(crate) mod compiled;
pub mod driver_config;
pub(crate) mod schema;
mod wit_packages;
