//! Loading of a file's bytes into code that can be called: the requirements for a component, its compilation in a separate process, the
//! cache, and the config and schemas of the driver.

pub(crate) mod admission;
pub(crate) mod artifact;
pub(crate) mod cache;
pub(crate) mod compile;
pub(crate) mod compiled;
pub mod driver_config;
pub(crate) mod schema;
mod wit_packages;
