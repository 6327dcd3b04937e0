//! The Kubernetes API: claims from it, slices, status and events to it.

pub mod binding;
pub mod bridge;
pub mod claims;
pub mod client;
pub mod drivers;
pub mod events;
pub mod extended_resources;
pub mod facts;
pub mod fleet;
pub mod local;
pub mod local_client;
pub mod pools;
pub mod preflight;
pub mod reconcile;
pub mod slices;
pub mod status;
pub mod taints;
