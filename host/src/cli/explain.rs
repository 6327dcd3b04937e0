//! `nodedock explain`: the timeline of a claim or a driver, the last problem, what comes next.

use anyhow::Result;
use clap::Subcommand;
use nodedock_proto::node::v1;

use super::client::{Client, connect, said};
use super::get::{no_such, split};
use super::output::{printable, say};
use super::{Outcome, Place};
use crate::base::clock::rfc3339;

#[derive(Subcommand)]
pub(super) enum ExplainCommand {
    /// A claim, by NAME, NAMESPACE/NAME or UID
    Claim { name: String },
    /// A driver, by its name, its file's or its socket's
    Driver { name: String },
}

pub(super) async fn run(place: Place, command: ExplainCommand) -> Result<Outcome> {
    let mut client = connect(&place).await?;
    match command {
        ExplainCommand::Claim { name } => claim(&mut client, &place, &name).await,
        ExplainCommand::Driver { name } => driver(&mut client, &place, &name).await,
    }
}

async fn claim(client: &mut Client, place: &Place, wanted: &str) -> Result<Outcome> {
    let (namespace, name) = split(wanted);
    let request = v1::ListClaimsRequest { namespace, name, with_timeline: true };
    let claims = client.list_claims(request).await.map_err(said(place))?.into_inner().claims;
    if claims.is_empty() {
        return Err(no_such("claim", wanted));
    }
    for claim in &claims {
        describe_claim(claim)?;
    }
    Ok(Outcome::Done)
}

fn describe_claim(claim: &v1::ClaimStatus) -> Result<()> {
    let id = claim.id.clone().unwrap_or_default();
    say(&format!("claim {}/{} (UID {}) is {}", id.namespace, id.name, id.uid, claim.state))?;
    if claim.stale_boot {
        say("  it was prepared in an earlier boot, and is prepared once more when its pod comes back")?;
    }
    for pod in &claim.pods {
        say(&format!("  held by pod {}/{} (UID {})", pod.namespace, pod.name, pod.uid))?;
    }
    for driver in &claim.drivers {
        let by =
            if driver.version.is_empty() { String::new() } else { format!(" by version {}", driver.version) };
        say(&format!("  driver {}: {}{by}: {}", driver.driver, driver.state, driver.devices.join(", ")))?;
        for name in &driver.cdi_devices {
            say(&format!("    CDI device {name}"))?;
        }
        problem(driver.problem.as_ref(), "    ")?;
    }
    if let Some(next) = next_step(claim) {
        say(&format!("  next: {next}"))?;
    }
    timeline(&claim.timeline)
}

fn next_step(claim: &v1::ClaimStatus) -> Option<String> {
    match (claim.state.as_str(), &claim.problem) {
        ("unpreparing", _) => Some("given up as soon as its drivers take the call".to_owned()),
        ("preparing", Some(problem)) => Some(match problem.retry_after_ms {
            Some(delay) => format!("a retry of its pod makes sense after {delay} ms"),
            None => "a retry of its pod calls only the drivers that are missing".to_owned(),
        }),
        _ => None,
    }
}

async fn driver(client: &mut Client, place: &Place, name: &str) -> Result<Outcome> {
    let request = v1::ListDriversRequest { name: name.to_owned() };
    let drivers = client.list_drivers(request).await.map_err(said(place))?.into_inner().drivers;
    if drivers.is_empty() {
        return Err(no_such("driver", name));
    }
    for driver in &drivers {
        describe_driver(driver)?;
    }
    Ok(Outcome::Done)
}

fn describe_driver(driver: &v1::Driver) -> Result<()> {
    let name = if driver.name.is_empty() { "driver of unknown name" } else { &driver.name };
    say(&format!("{name} ({}, {}) is {}", driver.kind, driver.source, driver.state))?;
    for (label, value) in [
        ("summary", &driver.summary),
        ("version", &driver.version),
        ("digest", &driver.digest),
        ("reason", &driver.reason),
    ] {
        if !value.is_empty() {
            say(&format!("  {label}: {}", printable(value)))?;
        }
    }
    for missing in &driver.missing_grants {
        say(&format!("  not granted: {}", printable(missing)))?;
    }
    if driver.discovered_ms > 0 {
        say(&format!("  {} devices, looked at last on {}", driver.devices, rfc3339(driver.discovered_ms)))?;
    }
    if let Some(plugin) = &driver.native {
        native(plugin)?;
    }
    problem(driver.problem.as_ref(), "  ")?;
    timeline(&driver.timeline)
}

/// An instance of a native driver; each is a driver of its own in the list, and all have its name.
fn native(plugin: &v1::NativePlugin) -> Result<()> {
    say(&format!("  {}: {}", plugin.connection, printable(&plugin.endpoint)))?;
    say(&format!("  it lists {}", printable(&plugin.services.join(", "))))?;
    for device in &plugin.health {
        let said = if device.message.is_empty() {
            String::new()
        } else {
            format!(": {}", printable(&device.message))
        };
        say(&format!("  device {}/{} is {}{said}", device.pool, device.device, device.health))?;
    }
    Ok(())
}

fn problem(problem: Option<&v1::Problem>, indent: &str) -> Result<()> {
    let Some(problem) = problem else { return Ok(()) };
    say(&format!("{indent}problem ({}, {}): {}", problem.kind, problem.code, printable(&problem.message)))?;
    for (key, value) in &problem.details {
        say(&format!("{indent}  {}: {}", printable(key), printable(value)))?;
    }
    Ok(())
}

fn timeline(timeline: &[v1::Transition]) -> Result<()> {
    for entry in timeline {
        let mut line = format!("  {}  {}", rfc3339(entry.at_ms), printable(&entry.what));
        if !entry.cause.is_empty() {
            line.push_str(&format!(" ({})", printable(&entry.cause)));
        }
        if entry.duration_us > 0 {
            #[expect(clippy::cast_precision_loss, reason = "a duration for people")]
            line.push_str(&format!(", {:.1} ms", entry.duration_us as f64 / 1000.0));
        }
        say(&line)?;
        problem(entry.problem.as_ref(), "    ")?;
    }
    Ok(())
}
