//! `nodedock driver`: what authors and operators ask of driver files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Subcommand;
use nodedock_proto::node::v1;

use super::client::{connect, said};
use super::output::say;
use super::{Outcome, Place};
use crate::driver::grant;

#[derive(Subcommand)]
pub(super) enum DriverCommand {
    /// Have the daemon read a driver's files again and ask it for its devices; by the driver's name or its file's
    Reload { name: String },
}

pub(super) async fn run(place: Place, command: DriverCommand) -> Result<Outcome> {
    match command {
        DriverCommand::Reload { name } => reload(&place, name).await,
    }
}

async fn reload(place: &Place, name: String) -> Result<Outcome> {
    let mut client = connect(place).await?;
    let answer = client.reload_driver(v1::ReloadDriverRequest { name }).await.map_err(said(place))?;
    let driver = answer.into_inner().driver.unwrap_or_default();
    say(&format!("{} ({}) is {}, {} devices", driver.name, driver.source, driver.state, driver.devices))?;
    if driver.reason.is_empty() {
        return Ok(Outcome::Done);
    }
    anyhow::bail!("{}", super::output::printable(&driver.reason))
}
