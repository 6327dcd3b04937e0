//! The real daemon against parts of real Kubernetes: its API server with the deployment's role and admission policy, its scheduler, and
//! the managers of its kubelet.

mod api;
mod binding;
mod claims;
mod kubelet;
mod plugins;
mod policy;
mod preflight;
mod reboot;
mod resources;
mod restarts;
mod scene;
mod server;
mod simulate;
mod slices;
mod stand_in;
mod stream;
mod timing;

/// Deadline of every wait. It only bounds a failure: several loops of Kubernetes have periods of seconds, and the machine may be slow.
const PATIENCE: std::time::Duration = std::time::Duration::from_secs(120);
