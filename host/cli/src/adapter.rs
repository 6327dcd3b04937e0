//! `nodedock adapter`: which way the devices of a device plugin are offered.

use anyhow::Result;
use clap::Subcommand;
use nodedock_proto::node::v1;

use super::Location;
use super::client::connect;
use super::completion::Named;
use super::output::print_text;

#[derive(Subcommand)]
pub(super) enum AdapterCommand {
    /// Offer the devices to the scheduler in ResourceSlices, once the kubelet's device manager does not offer them any more
    Enable {
        /// Name of the adapter's driver, as `nodedock get adapters` shows it
        #[arg(add = Named::Adapters.candidates())]
        name: String,
    },
    /// Offer the devices by the kubelet's device manager, once no ResourceSlice has them any more
    Disable {
        /// Name of the adapter's driver, as `nodedock get adapters` shows it
        #[arg(add = Named::Adapters.candidates())]
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
    let answer = connect(location)
        .await?
        .switch_adapter(request)
        .await?
        .into_inner();
    let adapter = answer.adapter.unwrap_or_default();
    let v1::Adapter {
        driver, resource, ..
    } = &adapter;
    let word = if enabled { "enabled" } else { "disabled" };
    print_text(&format!("adapter {driver} of {resource} is {word}"))?;
    waits(&adapter).map_or(Ok(()), |line| print_text(&line))
}

/// Returns the reason why an adapter's devices are not offered, or are not offered by the decided mechanism.
pub(super) fn waits(adapter: &v1::Adapter) -> Option<String> {
    let v1::Adapter {
        mechanism, reason, ..
    } = adapter;
    match (mechanism.as_str(), reason.as_str()) {
        (_, "") => None,
        ("" | "none", reason) => Some(format!("its devices are not offered yet: {reason}")),
        (mechanism, reason) => Some(format!("its pool is offered by {mechanism} now: {reason}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offered_pool_is_not_called_missing() {
        let adapter = |mechanism: &str, reason: &str| v1::Adapter {
            mechanism: mechanism.to_owned(),
            reason: reason.to_owned(),
            ..v1::Adapter::default()
        };
        assert_eq!(waits(&adapter("dra", "")), None);
        let waiting = waits(&adapter(
            "device-plugin",
            "the pool waits for a DeviceClass",
        ))
        .unwrap();
        assert_eq!(
            waiting,
            "its pool is offered by device-plugin now: the pool waits for a DeviceClass"
        );
        for neither in ["", "none"] {
            let missing = waits(&adapter(neither, "no device plugin has registered")).unwrap();
            assert!(missing.contains("not offered yet"), "{missing}");
        }
    }
}
