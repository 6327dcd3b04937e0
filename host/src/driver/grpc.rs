//! Native plugins: programs that speak the kubelet's protocols on Unix sockets of their own.
//!
//! Owns the connections to them, the steps of a registration, and the calls. Is given sockets by the registry and the device
//! manager; gives back a `ClaimDriver` or a `DeviceDriver`. What a plugin answers is checked like anything from outside. Never
//! decides who serves.

mod connection;
mod convert;
mod device_plugin;
mod dra;
mod health;
mod problem;
mod registration;
mod rpc;
mod stats;

#[cfg(test)]
mod tests;

pub use connection::{Connection, Link};
pub use device_plugin::{DevicePlugin, Following, PluginSteps};
pub use dra::DraPlugin;
pub use health::Health;
pub use registration::{PluginInfo, Registrar, RegistrarError, StepTimes};
pub use stats::{CLAIM_SECONDS, RpcSeconds, Rpcs};

use crate::model::limit::PROBLEM_MESSAGE_BYTES_MAX;

/// The version of the DRA API that a plugin is called with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DraService {
    V1,
    V1beta1,
}

impl DraService {
    /// The newest first: it is taken whatever a plugin's order.
    pub const ALL: [Self; 2] = [Self::V1, Self::V1beta1];

    /// As plugins list it, which is not the name of the gRPC service.
    pub fn listed_as(self) -> &'static str {
        match self {
            Self::V1 => "v1.DRAPlugin",
            Self::V1beta1 => "v1beta1.DRAPlugin",
        }
    }

    pub fn version(self) -> &'static str {
        match self {
            Self::V1 => "v1",
            Self::V1beta1 => "v1beta1",
        }
    }
}

/// The version of the health API that a plugin is called with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HealthService {
    V1,
    V1alpha1,
}

impl HealthService {
    /// The newest first: it is taken whatever a plugin's order.
    pub const ALL: [Self; 2] = [Self::V1, Self::V1alpha1];

    pub fn listed_as(self) -> &'static str {
        match self {
            Self::V1 => "v1.DRAResourceHealth",
            Self::V1alpha1 => "v1alpha1.DRAResourceHealth",
        }
    }
}

/// A plugin's text for a log, an event or a terminal: one line, bounded.
fn clean(text: &str) -> String {
    cut(text, PROBLEM_MESSAGE_BYTES_MAX).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// At most `max` bytes; what is longer ends in dots.
fn cut(text: &str, max: usize) -> String {
    if text.len() <= max {
        return text.to_owned();
    }
    let mut end = max.saturating_sub("...".len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    format!("{}...", &text[..end])
}
