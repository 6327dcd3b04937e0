//! `nodedock release`: force-releases a claim that its drivers do not unprepare.

use anyhow::Result;
use clap::{Args, Subcommand};
use nodedock_proto::node::v1;
use serde::Serialize;

use super::client::connect;
use super::completion::Named;
use super::output::{Column, Format, Row, join, print, print_error, printable, table};
use super::{CommandError, Location, describe, names};

#[derive(Subcommand)]
pub(super) enum ReleaseCommand {
    /// Release a claim that its drivers do not unprepare, or that no pod uses. Drivers that serve are called once more, the
    /// others are not. Values that they changed below /sys are restored; nothing else that they did to the devices is undone
    Claim(ReleaseClaimArgs),
}

#[derive(Args)]
pub(super) struct ReleaseClaimArgs {
    #[arg(value_name = "[NAMESPACE/]NAME", add = Named::Claims.candidates())]
    name: String,
    /// Namespace of the claim [default: default]
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// UID of the claim, where several have the name
    #[arg(long)]
    uid: Option<String>,
    /// Release it; without this flag the command only shows what would be lost
    #[arg(long)]
    yes: bool,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Serialize)]
struct ReleaseOutput {
    claim: Option<v1::ObjectRef>,
    released: bool,
    pods: Vec<v1::ObjectRef>,
    drivers: Vec<Driver>,
    /// Values that drivers changed below `/sys`.
    values: Vec<v1::SysfsValue>,
}

#[derive(Serialize)]
struct Driver {
    driver: String,
    devices: Vec<String>,
    told: &'static str,
    problem: Option<String>,
}

pub(super) async fn run(location: &Location, command: ReleaseCommand) -> Result<()> {
    let ReleaseCommand::Claim(args) = command;
    let claim = claim_of(&args)?;
    let request = v1::ReleaseClaimRequest {
        claim: Some(claim),
        dry_run: !args.yes,
    };
    let answer = connect(location)
        .await?
        .release_claim(request)
        .await?
        .into_inner();
    let v1::ReleaseClaimResponse {
        claim,
        pods,
        drivers,
        values,
        ..
    } = answer;
    let drivers = drivers
        .into_iter()
        .map(|driver| Driver::new(driver, args.yes))
        .collect();
    let answer = ReleaseOutput {
        claim,
        released: args.yes,
        pods,
        drivers,
        values,
    };
    print(args.output, &answer, || answer.text(args.output))?;
    answer.explain();
    CommandError::unless_done(args.yes)
}

fn claim_of(args: &ReleaseClaimArgs) -> Result<v1::ObjectRef, CommandError> {
    let (of_name, _) = names::split(&args.name);
    let mut claim = names::object(&args.name);
    claim.uid = args.uid.clone().unwrap_or_default();
    if let Some(of_flag) = args
        .namespace
        .clone()
        .filter(|namespace| !namespace.is_empty())
    {
        if !of_name.is_empty() && of_name != of_flag {
            let message = format!("{:?} is not in the namespace {of_flag:?}", args.name);
            return Err(CommandError::usage(message, "name the namespace once"));
        }
        claim.namespace = of_flag;
    }
    Ok(claim)
}

impl Driver {
    fn new(driver: v1::UntoldDriver, released: bool) -> Self {
        let told = match (&driver.problem, released) {
            (None, _) => "asked once more",
            (Some(_), false) => "will not be told",
            (Some(_), true) => "not told",
        };
        let problem = driver.problem.map(|problem| problem.message);
        Self {
            driver: driver.driver,
            devices: driver.devices,
            told,
            problem,
        }
    }
}

impl Row for Driver {
    const COLUMNS: &'static [Column<Self>] = &[
        ("DRIVER", |of| of.driver.clone()),
        ("DEVICES", |of| of.devices.join(",")),
        ("DRIVER IS", |of| of.told.to_owned()),
        ("WHY", |of| of.problem.clone().unwrap_or_default()),
    ];
}

impl ReleaseOutput {
    fn text(&self, format: Format) -> String {
        let none = if self.released {
            "every driver unprepared it"
        } else {
            "no driver prepared any of it"
        };
        let values = self
            .values
            .iter()
            .map(|value| join([describe::sysfs_value(value)]));
        let parts = std::iter::once(table(format, &self.drivers, none)).chain(values);
        parts.collect::<Vec<_>>().join("\n")
    }

    /// Writes to standard error what was, or would be, done.
    fn explain(&self) {
        let claim = self.claim.clone().unwrap_or_default();
        let shown = printable(&describe::object(&claim));
        if self.released {
            print_error(&format!(
                "claim {shown} is released; see `nodedock explain claim {}`",
                claim.name
            ));
            return;
        }
        let loss =
            "its CDI files and its record are removed and its devices are free for other claims";
        let rest = "except for values below /sys, nothing that an unreachable driver did to them is undone";
        print_error(&format!("claim {shown} would be released: {loss}; {rest}"));
        print_error("hint: nothing was done; to release it, add --yes");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(name: &str, namespace: Option<&str>) -> Result<(String, String), CommandError> {
        let namespace = namespace.map(str::to_owned);
        let args = ReleaseClaimArgs {
            name: name.to_owned(),
            namespace,
            uid: None,
            yes: false,
            output: Format::Json,
        };
        claim_of(&args).map(|claim| (claim.namespace, claim.name))
    }

    #[test]
    fn namespace_comes_from_name_or_flag() {
        let is = |namespace: &str| (namespace.to_owned(), "a".to_owned());
        assert_eq!(parsed("a", None).unwrap(), is("default"));
        assert_eq!(parsed("a", Some("ml")).unwrap(), is("ml"));
        assert_eq!(parsed("ml/a", None).unwrap(), is("ml"));
        assert_eq!(parsed("ml/a", Some("ml")).unwrap(), is("ml"));
        assert!(matches!(
            parsed("ml/a", Some("web")),
            Err(CommandError::Usage { .. })
        ));
    }
}
