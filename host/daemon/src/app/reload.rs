//! Reads the config file again while the daemon runs: the trust in drivers takes effect at once, other changes set a condition.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use tokio::sync::mpsc;

use crate::config::{ConfigError, ConfigFile};
use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_model::{Problem, ProblemCode, limit};
use nodedock_wasm::trust::Trust;

pub(super) struct Reload {
    pub(super) path: PathBuf,
    /// The file as it was at the start.
    pub(super) started: ConfigFile,
    pub(super) trust: Trust,
    pub(super) conditions: Conditions,
}

impl Reload {
    /// Reads the file at each report of its directory's watch, until that ends. Reports are periodical too, because keys are in files of
    /// their own, which may be anywhere.
    pub(super) async fn run(self, mut reports: mpsc::Receiver<()>) {
        while let Some(()) = reports.recv().await {
            settled(&self.path).await;
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
                let message = format!("{}; the config before stays in effect", chain(&error));
                self.conditions.set(
                    &subject,
                    Problem::invalid(ProblemCode::ConfigRefused, message),
                );
                return;
            }
        };
        self.conditions.clear(ProblemCode::ConfigRefused, &subject);
        match file.needs_restart(&self.started).as_slice() {
            [] => self
                .conditions
                .clear(ProblemCode::ConfigNeedsRestart, &subject),
            keys => {
                let message = format!(
                    "{} changed, which takes effect when the daemon starts again",
                    keys.join(", ")
                );
                self.conditions.set(
                    &subject,
                    Problem::unavailable(ProblemCode::ConfigNeedsRestart, message),
                );
            }
        }
        let mode = file.policy.mode().as_str();
        if self.trust.replace(file.policy) {
            tracing::info!(mode, "the trust in driver files changed");
        }
    }
}

/// Waits until the file is old enough to be whole.
async fn settled(file: &Path) {
    loop {
        // Also bounds how often the file is read while others in its directory are written.
        tokio::time::sleep(limit::FILE_SETTLE).await;
        let modified = std::fs::metadata(file).and_then(|found| found.modified());
        let age = modified
            .ok()
            .and_then(|at| SystemTime::now().duration_since(at).ok());
        if age.is_none_or(|age| age >= limit::FILE_SETTLE) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use nodedock_base::changes::Changes;
    use nodedock_base::tasks::Tasks;
    use nodedock_base::watched;

    /// A log that was written beside the config postponed the report for ever.
    #[tokio::test]
    async fn writes_beside_config_delay_no_reload() {
        let (directory, tasks, changes) = (
            tempfile::tempdir().unwrap(),
            Tasks::new(),
            Changes::default(),
        );
        let (path, mut states) = (directory.path().join("nodedock.yaml"), changes.listen());
        let conditions = Conditions::new(changes);
        std::fs::write(&path, "nodeName: a\n").unwrap();
        let started = ConfigFile::read(&path).unwrap();
        let trust = Trust::new(started.policy.clone());
        let reload = Reload {
            path: path.clone(),
            started,
            trust,
            conditions,
        };
        let (sender, reports) = mpsc::channel(1);
        tasks.spawn_until_stopped("config", reload.run(reports));
        let watch = watched::changes(directory.path().to_owned(), tasks.clone(), sender);
        tasks.spawn("config-directory", watch);
        let log = directory.path().join("daemon.log");
        tasks.spawn_until_stopped("log", async move {
            loop {
                std::fs::write(&log, "x").unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let mut next = async || {
            let state = tokio::time::timeout(limit::DRAIN, states.recv()).await;
            state.expect("a state in time").unwrap().state
        };
        std::fs::write(directory.path().join("new"), "nodeName: b\n").unwrap();
        std::fs::rename(directory.path().join("new"), &path).unwrap();
        assert_eq!(next().await, "config-needs-restart");
        std::fs::write(&path, "nodeName: a\n").unwrap();
        assert_eq!(next().await, "over");
        std::fs::remove_file(&path).unwrap();
        assert_eq!(next().await, "config-refused");
        assert!(tasks.drain(limit::DRAIN).await);
    }
}
