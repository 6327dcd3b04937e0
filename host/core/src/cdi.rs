//! CDI: the files by which container runtimes give devices to containers.
//!
//! Owns the folder's files that begin with our line, and no others. Is given claim records; renders one file for each driver
//! whose edits the host applies. The files are derived: the checkpoint holds what they say, and whoever finds one missing or
//! altered renders it again. Reads what others' files in the runtimes' folders name, for collisions. Never decides whether a claim keeps its file.

mod catalog;
mod folder;
mod identity;
mod rebuild;
mod render;
mod spec;
mod validate;

#[cfg(test)]
mod tests;

pub use catalog::{Collision, Touched};
pub use folder::{CdiDir, CdiError, Durability, OurFile};
pub use identity::{Identity, IdentityDevice};
pub use rebuild::{RebuildError, Rebuilt, rebuild};
pub use render::{RenderError, SpecFile, cdi_devices, file_name, file_of, render, render_driver};
pub use spec::{ContainerEdits, Device, DeviceNode, Hook, IntelRdt, Mount, NetDevice, Spec, Version};
pub use validate::{EditsError, SpecError, validate};
