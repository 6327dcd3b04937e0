//! Adapters of device plugins: loads them when the daemon starts, and reads their files and the config again whenever one of them changes. Which
//! device plugin has which driver and pool is decided when its adapter is new: one that names another driver or pool sets a condition.

use std::collections::BTreeSet;
use std::path::PathBuf;

use anyhow::{Context, Result};
use futures::future::BoxFuture;
use tokio::sync::{mpsc, watch};

use crate::config::KubernetesConfig;
use crate::config::adapters;
use nodedock_base::conditions::Conditions;
use nodedock_base::paths::Paths;
use nodedock_base::tasks::Tasks;
use nodedock_base::watched;
use nodedock_core::adapters::{AdapterEntries, AdapterParts, Adapters, claimed};
use nodedock_core::checkpoint::StoredRecords;
use nodedock_core::hardware::Hardware;
use nodedock_core::records::SharedClaimTable;
use nodedock_model::{Adapter, AdapterRecord, ExtendedResource, Problem, ProblemCode, limit};
use nodedock_wasm::registry::wasm_files::WasmFiles;

/// Takes all adapters as they are written now. Returns the sources of those that need a restart.
pub(super) type ApplyAdapters = Box<
    dyn Fn(AdapterEntries) -> BoxFuture<'static, Result<BTreeSet<String>, Problem>> + Send + Sync,
>;

/// The files of adapters.
pub(super) struct AdapterFiles {
    directories: [PathBuf; 2],
    conditions: Conditions,
}

/// Loads device plugins that are drivers, by the config and the files beside the plugins' sockets.
pub(super) async fn load(
    paths: &Paths,
    hardware: &Hardware,
    kubernetes: Option<&KubernetesConfig>,
    entries: &[Adapter],
    wasm: &WasmFiles,
    claims: &SharedClaimTable,
    stored: StoredRecords<ExtendedResource, AdapterRecord>,
) -> Result<(Adapters, AdapterFiles)> {
    let conditions = wasm.conditions.clone();
    let directories = [paths.device_plugins.clone(), paths.plugins_registry.clone()];
    let entries = adapters::entries_of(entries, adapters::files(&directories), &conditions);
    let (taken, claimed) = {
        let claims = claims.lock();
        let records = claims.claims().map(AsRef::as_ref);
        (claims.taken_of_plugins(), claimed(records))
    };
    let parts = AdapterParts {
        registry: wasm.registry.clone(),
        conditions: conditions.clone(),
        sysfs: hardware
            .open_sys()
            .with_context(|| format!("open {}", hardware.sys().display()))?,
        numa_node_form: kubernetes
            .map(|node| node.numa_node_form)
            .unwrap_or_default(),
        hardware: hardware.clone(),
        grace: limit::RESOURCE_GRACE,
        has_kubelet: kubernetes.is_some(),
    };
    let adapters = Adapters::load(parts, entries, stored, taken, &claimed).await;
    let files = AdapterFiles {
        directories,
        conditions,
    };
    Ok((adapters, files))
}

impl AdapterFiles {
    /// Applies the adapters of the files and of the config (`config`) at each change of one of them, and periodically: an entry that does not count may
    /// do so once claims are gone.
    pub(super) fn watch(
        self,
        config: watch::Receiver<Vec<Adapter>>,
        apply: ApplyAdapters,
        tasks: &Tasks,
    ) {
        let (sender, reports) = mpsc::channel(1);
        for directory in self.directories.clone() {
            let watch = watched::changes(directory, tasks.clone(), sender.clone());
            tasks.spawn("adapter-directory", watch);
        }
        tasks.spawn_until_stopped("adapter-files", self.run(reports, config, apply));
    }

    async fn run(
        self,
        mut reports: mpsc::Receiver<()>,
        mut config: watch::Receiver<Vec<Adapter>>,
        apply: ApplyAdapters,
    ) {
        let (mut due, mut seen) = (BTreeSet::new(), BTreeSet::new());
        loop {
            tokio::select! {
                // Whichever it was, everything is read.
                report = reports.recv() => if report.is_none() { return },
                Ok(()) = config.changed() => {}
            }
            // Also bounds how often they are read while plugins come and go.
            tokio::time::sleep(limit::FILE_SETTLE).await;
            let written = config.borrow_and_update().clone();
            let directories = self.directories.clone();
            let read = tokio::task::spawn_blocking(move || {
                // no error: one that cannot be looked at is away
                let there = directories.iter().filter(|directory| directory.is_dir());
                let there: BTreeSet<_> = there.cloned().collect();
                (there, adapters::files(&directories))
            });
            // The runtime ends.
            let Ok((there, found)) = read.await else {
                return;
            };
            // One that was there may be a mount that is away: what was in it stays.
            let is_away = !seen.is_subset(&there);
            seen.extend(there);
            let refused: BTreeSet<_> = found
                .iter()
                .filter(|file| file.read.is_err())
                .map(|file| file.source.clone())
                .collect();
            let mut entries = adapters::entries_of(&written, found, &self.conditions);
            entries.is_incomplete |= is_away;
            self.conditions
                .retain(ProblemCode::AdapterInvalid, |subject| {
                    refused.contains(subject)
                });
            match apply(entries).await {
                Ok(renamed) => {
                    self.report_renamed(&renamed, &due);
                    due = renamed;
                }
                // The checkpoint reports that it takes no writes, and the next report tries again.
                Err(problem) => tracing::debug!(%problem, "the adapters are not applied yet"),
            }
        }
    }

    /// Sets the conditions of the sources that need a restart, and clears those of others. `due`: which needed one before.
    fn report_renamed(&self, renamed: &BTreeSet<String>, due: &BTreeSet<String>) {
        let code = ProblemCode::ConfigNeedsRestart;
        for source in renamed {
            let message = format!(
                "{source} names another driver or pool for its resource, which takes effect when the daemon starts again"
            );
            self.conditions
                .set(source, Problem::unavailable(code, message));
        }
        for source in due.difference(renamed) {
            self.conditions.clear(code, source);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;
    use nodedock_base::changes::Changes;

    const VALID: &str = "apiVersion: nodedock.dev/v1\nkind: DevicePluginAdapter\nresource: example.com/a\ndriver: a.example.com\n";

    /// New and deleted files were unseen until the next start.
    #[tokio::test]
    async fn adapters_follow_files_and_config() {
        let (directory, tasks, changes) = (
            tempfile::tempdir().unwrap(),
            Tasks::new(),
            Changes::default(),
        );
        let at = |name: &str| directory.path().join(name);
        let write = |name: &str, text: &str| std::fs::write(at(name), text).unwrap();
        let (mut states, conditions) = (changes.listen(), Conditions::new(changes));
        let (seen, mut applied) = mpsc::unbounded_channel();
        let apply: ApplyAdapters = Box::new(move |entries: AdapterEntries| {
            let named = entries.entries.iter();
            let renamed: BTreeSet<String> = named
                .filter(|entry| entry.adapter.driver.as_str() == "renamed.example.com")
                .map(|entry| entry.source.clone())
                .collect();
            let named = entries.entries.iter().map(|entry| {
                let enabled = entry.adapter.enabled;
                format!("{} {enabled}", entry.adapter.driver)
            });
            let mut line = named.collect::<Vec<_>>().join(", ");
            if entries.is_incomplete {
                line += ", incomplete";
            }
            seen.send(line).unwrap();
            async move { Ok(renamed) }.boxed()
        });
        let config = watch::Sender::new(Vec::new());
        AdapterFiles {
            directories: [directory.path().to_owned(), at("missing")],
            conditions: conditions.clone(),
        }
        .watch(config.subscribe(), apply, &tasks);
        let mut until = async |wanted: &str| {
            let found = tokio::time::timeout(limit::DRAIN, async {
                while applied.recv().await.unwrap() != wanted {}
            });
            assert!(found.await.is_ok(), "{wanted:?} is not applied");
        };
        let mut next = async || {
            let state = tokio::time::timeout(limit::DRAIN, states.recv()).await;
            let state = state.expect("a state in time").unwrap().state;
            let messages = conditions
                .list()
                .into_iter()
                .map(|condition| condition.problem.message);
            (state, messages.collect::<Vec<_>>().join(" "))
        };
        let over = ("over".to_owned(), String::new());
        until("").await;
        write("a.adapter.yaml", VALID);
        until("a.example.com true").await;
        write("a.adapter.yaml", &format!("{VALID}enabled: false\n"));
        until("a.example.com false").await;
        let of_config = VALID.replace("example.com", "config.com");
        config.send_replace(vec![Adapter::parse(&of_config).unwrap()]);
        until("a.config.com true, a.example.com false").await;
        config.send_replace(Vec::new());
        until("a.example.com false").await;

        write(
            "a.adapter.yaml",
            &VALID.replace("a.example.com", "renamed.example.com"),
        );
        let (state, message) = next().await;
        assert_eq!(state, "config-needs-restart");
        assert!(
            message.contains("a.adapter.yaml names another driver"),
            "{message}"
        );
        write(
            "a.adapter.yaml",
            &format!("{VALID}# A comment is no change.\n"),
        );
        assert_eq!(next().await, over);
        until("a.example.com true").await;

        // The last one that was valid counts, and what else is in no file stays.
        write(
            "b.adapter.yaml",
            &VALID.replace("DevicePluginAdapter", "DriverGrant"),
        );
        let (state, message) = next().await;
        assert_eq!(state, "adapter-invalid");
        assert!(
            message.contains("b.adapter.yaml") && message.contains("line 2"),
            "{message}"
        );
        until("a.example.com true, incomplete").await;
        std::fs::remove_file(at("b.adapter.yaml")).unwrap();
        assert_eq!(next().await, over);
        std::fs::rename(at("a.adapter.yaml"), at("c")).unwrap();
        until("").await;
        // A directory that is away takes none of its adapters with it.
        std::fs::remove_dir_all(directory.path()).unwrap();
        config.send_replace(vec![Adapter::parse(&of_config).unwrap()]);
        until("a.config.com true, incomplete").await;
        assert!(tasks.drain(limit::DRAIN).await);
    }
}
