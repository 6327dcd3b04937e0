//! CDI: the spec files from which container runtimes give devices to containers.
//!
//! Owns the files of the directory that begin with this daemon's line, and no others. Given claim records, it renders one file for
//! each driver whose edits the host applies. The files are derived from the checkpoint, and rendered again when they are missing or
//! altered. Reads the device names of other files in the runtimes' directories, to find collisions, and whole specs of other programs (`foreign`). Never decides whether a claim keeps
//! its file.

mod access;
mod catalog;
mod directory;
pub mod foreign;
mod identity;
mod rebuild;
mod render;
mod spec;
mod stamp;
mod validate;

#[cfg(test)]
mod tests;

pub use access::FileAccess;
pub use catalog::{Collision, Given, Touched};
pub use directory::{CdiDir, CdiError, OurFile, tag};
pub use identity::{Identity, IdentityDevice};
pub use rebuild::{RebuildError, Rebuilt, rebuild};
pub use render::{
    RenderError, SpecFile, cdi_devices, check, file_name, file_of, render, render_driver,
};
pub use spec::{Device, Spec};
pub use validate::{EditsError, SpecError, validate};
