//! `nodedock driver`: commands about driver files, for authors, and about the drivers of a running daemon, for operators.

use anyhow::Result;
use clap::Subcommand;
use nodedock_author::DriverFileCommand;
use nodedock_proto::node::v1;

use super::client::connect;
use super::completion::Named;
use super::output::{print_text, printable};
use super::{Location, block_on};

#[derive(Subcommand)]
pub(super) enum DriverCommand {
    #[command(flatten)]
    File(DriverFileCommand),
    /// Have the daemon read a driver's files again and poll its devices; by the driver's name or its file's
    Reload {
        #[arg(add = Named::Drivers.candidates())]
        name: String,
    },
    /// End a driver's quarantine now, and reset its count of failures; by the driver's name or its file's
    Resume {
        #[arg(add = Named::Drivers.candidates())]
        name: String,
    },
    /// Give a driver's name to another source that describes it, such as a renamed file or an image
    Assign {
        #[arg(add = Named::Drivers.candidates())]
        name: String,
        /// Source, as `nodedock get drivers` shows it
        source: String,
    },
}

pub(super) fn execute(location: &Location, command: DriverCommand) -> Result<()> {
    match command {
        DriverCommand::File(command) => nodedock_author::execute(command),
        DriverCommand::Reload { name } => block_on(reload(location, name)),
        DriverCommand::Resume { name } => block_on(resume(location, name)),
        DriverCommand::Assign { name, source } => block_on(assign(location, name, source)),
    }
}

async fn reload(location: &Location, name: String) -> Result<()> {
    let answer = connect(location)
        .await?
        .reload_driver(v1::ReloadDriverRequest { name })
        .await?;
    let driver = answer.into_inner().driver.unwrap_or_default();
    let name = if driver.name.is_empty() {
        "driver of unknown name"
    } else {
        &driver.name
    };
    print_text(&format!(
        "{name} ({}) is {}, {} devices",
        driver.source, driver.state, driver.devices
    ))?;
    anyhow::ensure!(driver.reason.is_empty(), "{}", printable(&driver.reason));
    Ok(())
}

async fn assign(location: &Location, name: String, source: String) -> Result<()> {
    let request = v1::AssignDriverRequest {
        name: name.clone(),
        source,
    };
    let answer = connect(location).await?.assign_driver(request).await?;
    let v1::Driver { source, state, .. } = answer.into_inner().driver.unwrap_or_default();
    print_text(&format!(
        "the driver name {name} belongs to {source}, which is {state}"
    ))
}

async fn resume(location: &Location, name: String) -> Result<()> {
    let answer = connect(location)
        .await?
        .resume_driver(v1::ResumeDriverRequest { name })
        .await?;
    let v1::Driver {
        name,
        source,
        state,
        ..
    } = answer.into_inner().driver.unwrap_or_default();
    print_text(&format!(
        "the quarantine of {name} ({source}) is over: it is {state}"
    ))
}
