//! The vocabulary: names, claims, devices, container edits, problems, limits, and the checks of drivers' answers. Values only; no IO, no clock,
//! no task.
//!
//! Input is parsed here into types that enforce its rules, and is not checked again after that.

mod adapter;
pub mod answer;
mod api_object;
mod cdi_name;
mod change;
pub mod check;
mod claim;
mod device;
mod edits;
mod exact;
mod few;
pub mod grant;
mod held_keys;
mod kubelet;
mod left_out;
pub mod limit;
mod name;
mod offer;
mod pools;
mod problem;
pub mod quantity;
mod record;
mod resource;
pub mod rule;
mod side_file;
mod small_map;
mod source;
mod values;
pub mod yaml;

pub use adapter::*;
pub use api_object::*;
pub use cdi_name::*;
pub use change::*;
pub use claim::*;
pub use device::*;
pub use edits::*;
pub use few::Few;
pub use held_keys::{DEVICES, HeldKeys, NODE_KEY};
pub use kubelet::*;
pub use left_out::{LeftOut, LeftOutDevice};
pub use name::*;
pub use offer::*;
pub use pools::*;
pub use problem::*;
pub use record::*;
pub use resource::*;
pub use side_file::SideFileError;
pub use small_map::SmallMap;
pub use source::*;
pub use values::*;
