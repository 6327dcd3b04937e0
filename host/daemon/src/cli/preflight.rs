//! `nodedock preflight`: prints what a node lacks.

use anyhow::Result;
use clap::Args;

use super::output::{self, Column, Format, Row};
use super::{CliError, Location};
use crate::config::Flags;
use crate::preflight::{self, Check, Verdict};

#[derive(Args)]
pub(super) struct PreflightArgs {
    #[command(flatten)]
    flags: Flags,
    /// Form of the output
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

impl Row for Check {
    const COLUMNS: &'static [Column<Self>] = &[
        ("CHECK", |check| check.name.to_owned()),
        ("RESULT", |check| check.verdict.as_str().to_owned()),
        ("FINDING", |check| check.finding.clone()),
    ];
}

/// Fails if a check did.
pub(super) async fn run(location: &Location, args: PreflightArgs) -> Result<()> {
    let checks = preflight::run(&super::config(location, args.flags)?).await;
    output::print(args.output, &checks, || {
        output::table(args.output, &checks, "")
    })?;
    CliError::unless_done(checks.iter().all(|check| check.verdict != Verdict::Failed))
}
