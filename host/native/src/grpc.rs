//! Native plugins: programs that implement the kubelet's protocols on Unix sockets.
//!
//! Owns the connections to them, the steps of a registration, and the calls. Given sockets by the registry and the device
//! manager, it returns a `ClaimDriver` or a `DeviceDriver`. It checks a plugin's responses like any external input. Never
//! decides which instance serves.

mod connection;
mod convert;
mod device_plugin;
mod dra;
mod health;
mod old_dra;
mod problem;
mod registration;
mod rpc;
mod stats;
mod tap;

#[cfg(test)]
mod tests;

pub use connection::Connection;
pub(crate) use connection::{RECONNECT_MAX, RECONNECT_MIN};
pub use convert::PluginInfo;
pub use device_plugin::{DevicePlugin, Following};
pub use dra::{Caller, DraPlugin};
pub use health::Health;
pub use nodedock_model::{DraService, HealthService};
pub use old_dra::{OldDraPlugin, inventory};
pub use registration::{PluginTimes, Registrar, RegistrarError};
pub use stats::Rpcs;
pub use tap::Tap;

use nodedock_base::printable::one_line;
use nodedock_model::limit::PROBLEM_MESSAGE_BYTES_MAX;
use std::time::Duration;

/// A kubelet's deadline for the steps of a registration.
const PLUGIN_DIAL: Duration = Duration::from_secs(10);
const PLUGIN_INFO: Duration = Duration::from_secs(1);
const PLUGIN_NOTIFY: Duration = Duration::from_secs(5);

/// Converts a plugin's text to one bounded line for a log, an event or a terminal.
fn clean(text: &str) -> String {
    one_line(text, PROBLEM_MESSAGE_BYTES_MAX)
}
