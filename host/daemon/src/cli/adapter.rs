//! `nodedock adapter`: which way the devices of a device plugin are offered.

use anyhow::Result;
use clap::Subcommand;
use nodedock_proto::node::v1;

use super::Location;
use super::client::connect;
use super::output::print_text;

#[derive(Subcommand)]
pub(super) enum AdapterCommand {
    /// Offer the devices to the scheduler in ResourceSlices, once the kubelet's device manager does not offer them any more
    Enable {
        /// Name of the adapter's driver, as `nodedock get adapters` shows it
        name: String,
    },
    /// Offer the devices by the kubelet's device manager, once no ResourceSlice has them any more
    Disable {
        /// Name of the adapter's driver, as `nodedock get adapters` shows it
        name: String,
    },
}

/// Returns when the decision is durable; the switch follows, and pods keep their devices.
pub(super) async fn run(location: &Location, command: AdapterCommand) -> Result<()> {
    let (driver, enabled) = match command {
        AdapterCommand::Enable { name } => (name, true),
        AdapterCommand::Disable { name } => (name, false),
    };
    let request = v1::SwitchAdapterRequest { driver, enabled };
    let answer = connect(location).await?.switch_adapter(request).await?.into_inner();
    let v1::Adapter { driver, resource, reason, .. } = answer.adapter.unwrap_or_default();
    let word = if enabled { "enabled" } else { "disabled" };
    print_text(&format!("adapter {driver} of {resource} is {word}"))?;
    if !reason.is_empty() {
        print_text(&format!("its devices are not offered yet: {reason}"))?;
    }
    Ok(())
}
