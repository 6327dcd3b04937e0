//! The decisions one by one; `properties` tries histories of them.

mod node;
mod properties;
