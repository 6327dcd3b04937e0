//! `nodedock explain`: the timeline of a claim or a driver, the last problem, what comes next.

mod claim;

use anyhow::Result;
use clap::Subcommand;
use nodedock_proto::node::v1;

use super::client::{Client, connect, said};
use super::get::no_such;
use super::output::{Format, printable, say};
use super::{Outcome, Place};
use nodedock_base::clock::rfc3339;

#[derive(Subcommand)]
pub(super) enum ExplainCommand {
    /// A claim, by NAME, NAMESPACE/NAME or UID: also one that was refused or released
    Claim {
        name: String,
        #[arg(short, long, value_enum, default_value_t)]
        output: Format,
    },
    /// A driver, by its name, its file's or its socket's
    Driver { name: String },
}

pub(super) async fn run(place: Place, command: ExplainCommand) -> Result<Outcome> {
    let mut client = connect(&place).await?;
    match command {
        ExplainCommand::Claim { name, output } => claim::run(&mut client, &place, &name, output).await,
        ExplainCommand::Driver { name } => driver(&mut client, &place, &name).await,
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
    if let Some(trust) = &driver.trust {
        told_trust(trust)?;
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

/// What nothing is asked of is not worth a line.
fn told_trust(trust: &v1::DriverTrust) -> Result<()> {
    if trust.mode == "off" && trust.key.is_empty() && trust.pin.is_empty() {
        return Ok(());
    }
    let mut line = format!("  trust: {} (mode {})", trust.verdict, trust.mode);
    if !trust.key.is_empty() {
        line.push_str(&format!(", signed by {}", printable(&trust.key)));
    }
    if !trust.pin.is_empty() {
        line.push_str(&format!(", pinned for {}", printable(&trust.pin)));
    }
    if !trust.reason.is_empty() {
        line.push_str(&format!(": {}", printable(&trust.reason)));
    }
    say(&line)
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
            line.push_str(&format!(", {}", took(entry.duration_us)));
        }
        say(&line)?;
        problem(entry.problem.as_ref(), "    ")?;
    }
    Ok(())
}

/// A duration for people.
fn took(duration_us: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a duration for people")]
    let ms = duration_us as f64 / 1000.0;
    format!("{ms:.1} ms")
}

/// The time between two points, in its two largest units.
fn span(from_ms: u64, to_ms: u64) -> String {
    let ms = to_ms.saturating_sub(from_ms);
    let (s, min, h, d) = (ms / 1000, ms / 60_000, ms / 3_600_000, ms / 86_400_000);
    match ms {
        0..1000 => format!("{ms} ms"),
        1000..60_000 => format!("{s} s"),
        60_000..3_600_000 => format!("{min} min {} s", s % 60),
        3_600_000..86_400_000 => format!("{h} h {} min", min % 60),
        _ => format!("{d} d {} h", h % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_between_are_short_and_a_clock_that_went_back_does_no_harm() {
        let cases = [
            (5, "5 ms"),
            (59_999, "59 s"),
            (61_000, "1 min 1 s"),
            (7_980_000, "2 h 13 min"),
            (90_000_000, "1 d 1 h"),
        ];
        for (ms, text) in cases {
            assert_eq!(span(1000, 1000 + ms), text);
        }
        assert_eq!(span(5, 3), "0 ms");
    }
}
