//! Adapters of device plugins: loads them when the daemon starts, and watches their files. Changed rules, paths and `enabled` take effect
//! at once. Which device plugin has which driver and pool is decided at a start, so a file that is new or gone, or that names another
//! driver or pool, sets a condition, and changes nothing else.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc;

use crate::config::KubernetesConfig;
use crate::config::adapters::{self, FileAdapter};
use nodedock_base::conditions::Conditions;
use nodedock_base::paths::Paths;
use nodedock_base::tasks::Tasks;
use nodedock_base::watched;
use nodedock_core::adapters::{AdapterParts, Adapters};
use nodedock_core::checkpoint::StoredRecords;
use nodedock_core::hardware::Hardware;
use nodedock_core::records::SharedClaimTable;
use nodedock_model::{
    Adapter, AdapterRecord, DriverKind, DriverName, ExtendedResource, Problem, ProblemCode, limit,
};
use nodedock_wasm::registry::wasm_files::WasmFiles;

/// Takes an adapter from a source that changed. False: it needs a restart.
type UpdateAdapter =
    Box<dyn Fn(String, Adapter) -> BoxFuture<'static, Result<bool, Problem>> + Send + Sync>;

/// The files of adapters.
pub(super) struct AdapterFiles {
    directories: [PathBuf; 2],
    /// Those in effect that are valid, by path.
    started: BTreeMap<String, Adapter>,
    update: UpdateAdapter,
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
    let found = adapters::files(&directories);
    let started = valid(&found);
    let entries = adapters::entries_of(entries, found, &conditions);
    let (taken, claims) = {
        let claims = claims.lock();
        (
            claims.taken_of_plugins(),
            claims.claims().cloned().collect::<Vec<_>>(),
        )
    };
    let mut claimed: BTreeMap<DriverName, Option<DriverKind>> = BTreeMap::new();
    for (driver, part) in claims.iter().flat_map(|claim| &claim.drivers) {
        // A claim that was rebuilt from its CDI file has the kind of a driver file, and no digest.
        let by = part
            .by
            .as_ref()
            .filter(|by| by.kind != DriverKind::Wasm || !by.digest.is_empty());
        let known = claimed.entry(driver.clone()).or_default();
        if *known != Some(DriverKind::Adapter) {
            *known = by.map(|by| by.kind).or(*known);
        }
    }
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
    let updated = adapters.clone();
    let update: UpdateAdapter = Box::new(move |source, adapter| {
        let adapters = updated.clone();
        async move { adapters.update(&source, adapter).await }.boxed()
    });
    Ok((
        adapters,
        AdapterFiles {
            directories,
            started,
            update,
            conditions,
        },
    ))
}

fn valid(files: &[FileAdapter]) -> BTreeMap<String, Adapter> {
    files
        .iter()
        .filter_map(|file| Some((file.source.clone(), file.read.as_ref().ok()?.clone())))
        .collect()
}

impl AdapterFiles {
    pub(super) fn watch(self, tasks: &Tasks) {
        let (sender, reports) = mpsc::channel(1);
        for directory in self.directories.clone() {
            let watch = watched::changes(directory, tasks.clone(), sender.clone());
            tasks.spawn("adapter-directory", watch);
        }
        tasks.spawn_until_stopped("adapter-files", self.run(reports));
    }

    async fn run(mut self, mut reports: mpsc::Receiver<()>) {
        let mut due = BTreeSet::new();
        while let Some(()) = reports.recv().await {
            // Also bounds how often they are read while plugins come and go.
            tokio::time::sleep(limit::FILE_SETTLE).await;
            let directories = self.directories.clone();
            match tokio::task::spawn_blocking(move || adapters::files(&directories)).await {
                Ok(found) => {
                    let now = valid(&found);
                    self.apply(&now).await;
                    due = self.compare(&found, &now, &due);
                }
                // The runtime ends.
                Err(_) => return,
            }
        }
    }

    /// Applies the files that changed, as far as they need no restart.
    async fn apply(&mut self, now: &BTreeMap<String, Adapter>) {
        for (source, adapter) in now {
            let is_changed = self
                .started
                .get(source)
                .is_some_and(|before| before != adapter);
            if !is_changed {
                continue;
            }
            match (self.update)(source.clone(), adapter.clone()).await {
                Ok(true) => drop(self.started.insert(source.clone(), adapter.clone())),
                Ok(false) => {}
                // The condition that it needs a restart is true as well, and the next report tries again.
                Err(problem) => {
                    tracing::warn!(%source, %problem, "a changed adapter is not stored yet")
                }
            }
        }
    }

    /// Sets and clears the conditions of all files. Returns those that need a restart. `now`: those of `found` that are valid; `due`: which
    /// needed one before.
    fn compare(
        &self,
        found: &[FileAdapter],
        now: &BTreeMap<String, Adapter>,
        due: &BTreeSet<String>,
    ) -> BTreeSet<String> {
        let refused: BTreeMap<_, _> = found
            .iter()
            .filter_map(|file| Some((file.source.as_str(), file.refused()?)))
            .collect();
        for (source, problem) in &refused {
            self.conditions.set(source, problem.clone());
        }
        self.conditions
            .retain(ProblemCode::AdapterInvalid, |subject| {
                refused.contains_key(subject)
            });
        // Of a file that is not valid the last adapter counts, and what is in a directory that cannot be read is not known.
        let mut sources: BTreeSet<_> = self.started.keys().chain(now.keys()).collect();
        sources.retain(|source| {
            let directory = Path::new(source).parent().and_then(Path::to_str);
            !refused.contains_key(source.as_str())
                && !refused.contains_key(directory.unwrap_or_default())
        });
        let mut changed = BTreeSet::new();
        for source in sources {
            let what = match (self.started.get(source), now.get(source)) {
                (None, _) => "is new",
                (_, None) => "is gone",
                (before, after) if before != after => "changed",
                _ => continue,
            };
            let message =
                format!("{source} {what}, which takes effect when the daemon starts again");
            self.conditions.set(
                source,
                Problem::unavailable(ProblemCode::ConfigNeedsRestart, message),
            );
            changed.insert(source.clone());
        }
        for source in due.difference(&changed) {
            self.conditions
                .clear(ProblemCode::ConfigNeedsRestart, source);
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_base::changes::Changes;

    const VALID: &str = "apiVersion: nodedock.dev/v1\nkind: DevicePluginAdapter\nresource: example.com/a\ndriver: a.example.com\n";

    /// Changes of a file were unseen until the next start, and one that was repaired stayed a condition.
    #[tokio::test]
    async fn changed_adapter_file_is_a_condition() {
        let (directory, tasks, changes) = (
            tempfile::tempdir().unwrap(),
            Tasks::new(),
            Changes::default(),
        );
        let write =
            |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        write("a.adapter.yaml", VALID);
        let directories = [
            directory.path().to_owned(),
            directory.path().join("missing"),
        ];
        let (mut states, conditions) = (changes.listen(), Conditions::new(changes));
        let started = valid(&adapters::files(&directories));
        let (updates, mut updated) = mpsc::channel(1);
        let update: UpdateAdapter = Box::new(move |source, adapter| {
            let updates = updates.clone();
            async move {
                let is_live = adapter.driver.as_str() == "a.example.com";
                if is_live {
                    updates.send((source, adapter)).await.unwrap();
                }
                Ok(is_live)
            }
            .boxed()
        });
        AdapterFiles {
            directories,
            started,
            update,
            conditions: conditions.clone(),
        }
        .watch(&tasks);
        let mut next = async || {
            let state = tokio::time::timeout(limit::DRAIN, states.recv()).await;
            let state = state.expect("a state in time").unwrap().state;
            let messages = conditions
                .list()
                .into_iter()
                .map(|condition| condition.problem.message);
            (state, messages.collect::<Vec<_>>().join(" "))
        };
        write(
            "a.adapter.yaml",
            &VALID.replace("a.example.com", "b.example.com"),
        );
        let (state, message) = next().await;
        assert_eq!(state, "config-needs-restart");
        assert!(
            message.contains("a.adapter.yaml changed, which"),
            "{message}"
        );
        write(
            "a.adapter.yaml",
            &format!("{VALID}# A comment is no change.\n"),
        );
        assert_eq!(next().await, ("over".to_owned(), String::new()));
        write("a.adapter.yaml", &format!("{VALID}enabled: false\n"));
        let (source, adapter) = updated.recv().await.unwrap();
        assert!(source.ends_with("a.adapter.yaml") && !adapter.enabled);
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
        std::fs::remove_file(directory.path().join("b.adapter.yaml")).unwrap();
        assert_eq!(next().await, ("over".to_owned(), String::new()));
        std::fs::rename(
            directory.path().join("a.adapter.yaml"),
            directory.path().join("c"),
        )
        .unwrap();
        assert!(next().await.1.contains("a.adapter.yaml is gone"));
        assert!(tasks.drain(limit::DRAIN).await);
    }
}
