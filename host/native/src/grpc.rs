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
pub use nodedock_model::{DraService, HealthService};
pub use registration::{PluginInfo, Registrar, RegistrarError, StepTimes};
pub use stats::{RpcSeconds, Rpcs};

use nodedock_model::limit::PROBLEM_MESSAGE_BYTES_MAX;

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
