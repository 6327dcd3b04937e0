//! What a change must satisfy before anyone reads it.

use anyhow::Result;

use crate::drivers::{self, CORE_TARGET};
use crate::shell;
use crate::workspace::Workspace;

const CLIPPY_RULES: [&str; 3] = ["--", "-D", "warnings"];

pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    shell::run(workspace.cargo().args(["fmt", "--all", "--", "--check"]))?;
    shell::run(workspace.cargo().args(["clippy", "--workspace", "--all-targets"]).args(CLIPPY_RULES))?;
    // Together with the tests it has fail points, and what stands for them in a program that is shipped is not looked at.
    shell::run(workspace.cargo().args(["clippy", "-p", "nodedock"]).args(CLIPPY_RULES))?;
    drivers::ensure_targets(&[CORE_TARGET])?;
    shell::run(
        workspace
            .cargo()
            .args(["clippy", "--target", CORE_TARGET])
            .args(workspace.driver_selection())
            .args(CLIPPY_RULES),
    )
}
