//! Allocation of devices: to claims with the semantics of the Kubernetes scheduler, and of extended resources to containers with those of a
//! kubelet. Pure: no clock, no files, no tasks.

pub mod allocate;
pub mod resource;
pub mod selector;
