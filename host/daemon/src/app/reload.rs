//! Reads the config file again while the daemon runs: the trust in drivers takes effect at once, other changes set a condition.

use std::path::PathBuf;

use tokio::sync::mpsc;

use crate::config::{ConfigError, ConfigFile};
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_model::{Problem, ProblemCode};
use nodedock_wasm::trust::Trust;

pub(super) struct Reload {
    pub(super) path: PathBuf,
    /// The file as it was at the start.
    pub(super) started: ConfigFile,
    pub(super) trust: Trust,
    pub(super) conditions: Conditions,
}

impl Reload {
    /// Reads the file at each report of its watch, until that ends.
    pub(super) async fn run(self, mut reports: mpsc::Receiver<()>) {
        while let Some(()) = reports.recv().await {
            let path = self.path.clone();
            match tokio::task::spawn_blocking(move || ConfigFile::read(&path)).await {
                Ok(read) => self.apply(read),
                // The runtime ends.
                Err(_) => return,
            }
        }
    }

    fn apply(&self, read: Result<ConfigFile, ConfigError>) {
        let subject = self.path.display().to_string();
        let file = match read {
            Ok(file) => file,
            Err(error) => {
                let message = format!("{}; what was before goes on to count", chain(&error));
                self.conditions.set(&subject, Problem::invalid(ProblemCode::ConfigRefused, message));
                return;
            }
        };
        self.conditions.clear(ProblemCode::ConfigRefused, &subject);
        match file.needs_restart(&self.started).as_slice() {
            [] => self.conditions.clear(ProblemCode::ConfigNeedsRestart, &subject),
            keys => {
                let message =
                    format!("{} changed, which takes effect when the daemon starts again", keys.join(", "));
                self.conditions.set(&subject, Problem::unavailable(ProblemCode::ConfigNeedsRestart, message));
            }
        }
        let mode = file.policy.mode().as_str();
        if self.trust.replace(file.policy) {
            tracing::info!(mode, "the trust in driver files changed");
        }
    }
}
