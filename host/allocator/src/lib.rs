//! Allocation of devices to claims with the semantics of the Kubernetes scheduler. Pure: no clock, no files, no tasks.

pub mod allocate;
pub mod selector;
