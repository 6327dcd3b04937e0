//! Runs the benchmarks, on release builds.

use anyhow::Result;

use crate::test::DRIVERS_DIR;
use crate::workspace::Workspace;
use crate::{drivers, shell};

pub(crate) fn run(workspace: &Workspace, args: &[String]) -> Result<()> {
    drivers::build(workspace)?;
    shell::run(workspace.cargo().args([
        "build",
        "--release",
        "-p",
        "nodedockd",
        "-p",
        "nodedock",
    ]))?;
    shell::run(
        workspace
            .cargo()
            .env(DRIVERS_DIR, workspace.drivers_dir())
            .args([
                "run",
                "--release",
                "-p",
                "nodedock-tests",
                "--bin",
                "bench",
                "--",
            ])
            .args(args),
    )
}
