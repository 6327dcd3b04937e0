//! `nodedock explain`: the state of a claim, a driver, an extended resource or a device, its problems, what happens next, and its history.

mod claim;
mod device;
mod driver;
mod resource;

use anyhow::Result;
use clap::Subcommand;
use nodedock_proto::node::v1;

use claim::claim;
use device::device;
use driver::driver;
use resource::resource;

use super::client::{Client, connect};
use super::completion::Named;
use super::output::Format;
use super::{Location, describe};
use nodedock_base::clock::rfc3339;

#[derive(Subcommand)]
pub(super) enum ExplainCommand {
    /// A claim, by NAME, NAMESPACE/NAME or UID: also one that was refused or released, or that ended within the last day
    Claim {
        #[arg(add = Named::Claims.candidates())]
        name: String,
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// A driver, by its name, or that of its file or socket
    Driver {
        #[arg(add = Named::Drivers.candidates())]
        name: String,
    },
    /// An extended resource: by which mechanism it is offered, and why
    Resource {
        #[arg(add = Named::Resources.candidates())]
        name: String,
    },
    /// A device, by [DRIVER/][NODE/][POOL/]NAME, or one that a driver sees and does not offer, by [DRIVER/]NAME
    Device {
        #[arg(add = Named::WholeDevices.candidates())]
        name: String,
    },
}

pub(super) async fn run(location: &Location, command: ExplainCommand) -> Result<()> {
    let client = connect(location).await?;
    match command {
        ExplainCommand::Claim { name, output } => claim(location, client, &name, output).await,
        ExplainCommand::Driver { name } => driver(client, &name).await,
        ExplainCommand::Resource { name } => resource(client, &name).await,
        ExplainCommand::Device { name } => device(client, &name).await,
    }
}

async fn devices(client: &mut Client) -> Result<v1::ListDevicesResponse> {
    let request = v1::ListDevicesRequest::default();
    Ok(client.list_devices(request).await?.into_inner())
}

fn left_out_lines(left_out: &v1::LeftOut) -> Vec<String> {
    let v1::LeftOut { count, devices, .. } = left_out;
    let mut lines = vec![format!(
        "  not offered: {}",
        describe::count(*count, "device")
    )];
    lines.extend(devices.iter().map(|device| {
        let v1::LeftOutDevice { name, reason } = device;
        format!("    {name}: {reason}")
    }));
    let more = usize::try_from(*count).map_or(0, |count| count.saturating_sub(devices.len()));
    lines.extend((more > 0).then(|| format!("    and {more} more")));
    lines
}

fn condition_lines<'a>(
    conditions: impl IntoIterator<Item = &'a v1::Condition>,
    is_wanted: impl Fn(&v1::Condition) -> bool,
) -> Vec<String> {
    let wanted = conditions
        .into_iter()
        .filter(|condition| is_wanted(condition));
    wanted
        .flat_map(|condition| describe::problem(&condition.problem, "  "))
        .collect()
}

/// The entries of a timeline, each with the time that passed since the one before.
fn history(timeline: &[v1::Transition]) -> Vec<String> {
    let mut lines = Vec::new();
    let mut before = None;
    for entry in timeline {
        let passed = before
            .replace(entry.at_ms)
            .map(|before| format!("+{}", describe::elapsed(before, entry.at_ms)));
        let (at, passed) = (rfc3339(entry.at_ms), passed.unwrap_or_default());
        lines.push(format!(
            "    {at}  {passed:>12}  {}",
            describe::transition(entry)
        ));
        lines.extend(describe::problem(&entry.problem, "      "));
    }
    if !lines.is_empty() {
        lines.insert(0, "  history:".to_owned());
    }
    lines
}

#[cfg(test)]
mod fixtures {
    use super::v1;

    pub(super) fn left_out() -> v1::LeftOut {
        v1::LeftOut {
            driver: "gpu.example.com".to_owned(),
            count: 3,
            devices: vec![v1::LeftOutDevice {
                name: "0000:3b:00.0".to_owned(),
                reason: "its IOMMU group is shared".to_owned(),
            }],
            ..v1::LeftOut::default()
        }
    }

    pub(super) fn condition(subject: &str, message: &str) -> v1::Condition {
        v1::Condition {
            subject: subject.to_owned(),
            problem: Some(v1::Problem {
                message: message.to_owned(),
                ..v1::Problem::default()
            }),
            ..v1::Condition::default()
        }
    }
}
