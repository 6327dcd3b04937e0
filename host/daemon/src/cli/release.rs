//! `nodedock release`: gives up a claim whose driver does not.

use anyhow::Result;
use clap::{Args, Subcommand};
use nodedock_proto::node::v1;
use serde::Serialize;

use super::client::{connect, said};
use super::get::{Ref, split};
use super::output::{Format, Rows, print, printable, say};
use super::values::Value;
use super::{CliError, Outcome, Place};

#[derive(Subcommand)]
pub(super) enum ReleaseCommand {
    /// Give up a claim that its drivers do not give up, or that no pod holds. Drivers that serve are asked once more; the
    /// others are not told. Values that they changed below /sys are put back; what else they did to the devices stays done
    Claim(ReleaseClaimArgs),
}

#[derive(Args)]
pub(super) struct ReleaseClaimArgs {
    #[arg(value_name = "[NAMESPACE/]NAME")]
    name: String,
    /// Namespace of the claim [default: default]
    #[arg(long, value_name = "NAME")]
    namespace: Option<String>,
    /// Which one, where several have the name
    #[arg(long)]
    uid: Option<String>,
    /// Do it; without it, it is only said what would be lost
    #[arg(long)]
    yes: bool,
    #[arg(short, long, value_enum, default_value_t)]
    output: Format,
}

#[derive(Serialize)]
struct Answer {
    claim: Ref,
    released: bool,
    pods: Vec<Ref>,
    drivers: Vec<Driver>,
    /// What drivers changed below `/sys`.
    values: Vec<Value>,
}

#[derive(Serialize)]
struct Driver {
    driver: String,
    devices: Vec<String>,
    told: &'static str,
    problem: Option<String>,
}

pub(super) async fn run(place: Place, command: ReleaseCommand) -> Result<Outcome> {
    let ReleaseCommand::Claim(args) = command;
    let claim = wanted(&args)?;
    let request = v1::ReleaseClaimRequest { claim: Some(claim), dry_run: !args.yes };
    let mut client = connect(&place).await?;
    let answer = client.release_claim(request).await.map_err(said(&place))?.into_inner();
    let answer = Answer {
        claim: answer.claim.unwrap_or_default().into(),
        released: args.yes,
        pods: answer.pods.into_iter().map(Into::into).collect(),
        drivers: answer.drivers.into_iter().map(|driver| one(driver, args.yes)).collect(),
        values: answer.values.into_iter().map(Into::into).collect(),
    };
    show(&answer, args.output)?;
    Ok(if args.yes { Outcome::Done } else { Outcome::Refused })
}

fn wanted(args: &ReleaseClaimArgs) -> Result<v1::ObjectRef, CliError> {
    let (of_name, name) = split(&args.name);
    let of_flag = args.namespace.clone().unwrap_or_default();
    if !of_name.is_empty() && !of_flag.is_empty() && of_name != of_flag {
        let message = format!("{:?} is not in the namespace {of_flag:?}", args.name);
        return Err(CliError::usage(message, "name the namespace once"));
    }
    let namespace = [of_name, of_flag, "default".to_owned()].into_iter().find(|name| !name.is_empty());
    let uid = args.uid.clone().unwrap_or_default();
    Ok(v1::ObjectRef { namespace: namespace.unwrap_or_default(), name, uid })
}

fn one(driver: v1::UntoldDriver, released: bool) -> Driver {
    let told = match (&driver.problem, released) {
        (None, _) => "asked once more",
        (Some(_), false) => "will not be told",
        (Some(_), true) => "not told",
    };
    let problem = driver.problem.map(|problem| problem.message);
    Driver { driver: driver.driver, devices: driver.devices, told, problem }
}

fn show(answer: &Answer, format: Format) -> Result<()> {
    let row = |driver: &Driver| {
        let why = driver.problem.clone().unwrap_or_default();
        vec![driver.driver.clone(), driver.devices.join(","), driver.told.to_owned(), why]
    };
    let rows = || Rows {
        heading: vec!["DRIVER", "DEVICES", "DRIVER IS", "WHY"],
        wide_from: 4,
        rows: answer.drivers.iter().map(row).collect(),
    };
    let nothing = if answer.released { "every driver gave it up" } else { "no driver has anything of it" };
    print(format, answer, rows, nothing)?;
    if matches!(format, Format::Table | Format::Wide) {
        answer.values.iter().try_for_each(|value| say(&value.words()))?;
    }
    let claim =
        printable(&format!("{}/{} (UID {})", answer.claim.namespace, answer.claim.name, answer.claim.uid));
    if answer.released {
        eprintln!("claim {claim} is released; `nodedock explain claim {}` tells of it", answer.claim.name);
    } else {
        let loss = "its CDI files and its record are removed and its devices are free for others";
        eprintln!(
            "claim {claim} would be given up: {loss}, whatever a driver that is not told did to them beside values below /sys"
        );
        eprintln!("hint: nothing was done; to do it, add --yes");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(name: &str, namespace: Option<&str>) -> Result<(String, String), CliError> {
        let namespace = namespace.map(str::to_owned);
        let args = ReleaseClaimArgs {
            name: name.to_owned(),
            namespace,
            uid: None,
            yes: false,
            output: Format::Json,
        };
        wanted(&args).map(|claim| (claim.namespace, claim.name))
    }

    #[test]
    fn a_namespace_is_the_names_the_flags_or_the_default() {
        let is = |namespace: &str| (namespace.to_owned(), "a".to_owned());
        assert_eq!(asked("a", None).unwrap(), is("default"));
        assert_eq!(asked("a", Some("ml")).unwrap(), is("ml"));
        assert_eq!(asked("ml/a", None).unwrap(), is("ml"));
        assert_eq!(asked("ml/a", Some("ml")).unwrap(), is("ml"));
        assert!(matches!(asked("ml/a", Some("web")), Err(CliError::Usage { .. })));
    }
}
