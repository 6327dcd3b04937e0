//! DeviceClasses of the local API from files in a directory beside the drivers: applied when the daemon starts, and when a file changes, so that a machine that
//! loses its checkpoint keeps them. A file that is removed leaves its classes, which claims may name.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokio::sync::mpsc;

use nodedock_base::conditions::Conditions;
use nodedock_base::error::chain;
use nodedock_base::tasks::Tasks;
use nodedock_base::watched;
use nodedock_core::manifest;
use nodedock_kube::client::KubeClient;
use nodedock_kube::local::apply_class;
use nodedock_model::{Problem, ProblemCode, limit};

/// Maximum number of files; the first ones by name are read.
const FILES_MAX: usize = 256;
const EXTENSIONS: [&str; 3] = ["yaml", "yml", "json"];
const API_VERSION: &str = "resource.k8s.io/v1";
const KIND: &str = "DeviceClass";

/// The classes of each file, or why it has none.
type Files = BTreeMap<PathBuf, Result<Vec<Value>, String>>;

pub(super) fn watch(directory: PathBuf, client: KubeClient, conditions: Conditions, tasks: &Tasks) {
    let (sender, reports) = mpsc::channel(1);
    let changes = watched::changes(directory.clone(), tasks.clone(), sender);
    tasks.spawn("device-class-directory", changes);
    let files = ClassFiles {
        directory,
        client,
        conditions,
        applied: BTreeMap::new(),
    };
    tasks.spawn_until_stopped("device-class-files", files.run(reports));
}

struct ClassFiles {
    directory: PathBuf,
    client: KubeClient,
    conditions: Conditions,
    /// Files as they are applied, or refused.
    applied: Files,
}

impl ClassFiles {
    async fn run(mut self, mut reports: mpsc::Receiver<()>) {
        while let Some(()) = reports.recv().await {
            // A file that is being written changes again.
            tokio::time::sleep(limit::FILE_SETTLE).await;
            let directory = self.directory.clone();
            match tokio::task::spawn_blocking(move || read(&directory)).await {
                Ok(Ok(files)) => self.apply(files).await,
                Ok(Err(error)) => {
                    let problem = invalid(format!("list the files of DeviceClasses: {error}"));
                    self.conditions
                        .set(&self.directory.display().to_string(), problem);
                }
                // The runtime ends.
                Err(_) => return,
            }
        }
    }

    /// Applies the files that changed. One that cannot be stored now is applied with the next report, which comes without a change as well.
    async fn apply(&mut self, files: Files) {
        let subject = |path: &Path| path.display().to_string();
        let code = ProblemCode::DeviceClassFileInvalid;
        let here: BTreeSet<_> = files.keys().map(|path| subject(path)).collect();
        for condition in self.conditions.list() {
            if condition.problem.code == code && !here.contains(&condition.subject) {
                self.conditions.clear(code, &condition.subject);
            }
        }
        self.applied.retain(|path, _| files.contains_key(path));
        for (path, read) in files {
            if self.applied.get(&path) == Some(&read) {
                continue;
            }
            let applied = match &read {
                Ok(classes) => self.apply_classes(&path, classes).await,
                Err(why) => Err(why.clone()),
            };
            match applied {
                Ok(()) => {
                    self.conditions.clear(code, &subject(&path));
                    self.applied.insert(path, read);
                }
                Err(why) => {
                    self.conditions.set(&subject(&path), invalid(why));
                    // A file that was refused by the API is tried again.
                    self.applied.remove(&path);
                    if read.is_err() {
                        self.applied.insert(path, read);
                    }
                }
            }
        }
    }

    async fn apply_classes(&self, path: &Path, classes: &[Value]) -> Result<(), String> {
        for class in classes {
            let name = name_of(class);
            let applied = apply_class(&self.client, name, class).await;
            applied
                .map_err(|error| format!("DeviceClass {name} is not applied: {}", chain(&error)))?;
            tracing::info!(class = name, file = %path.display(), "DeviceClass applied");
        }
        Ok(())
    }
}

fn invalid(message: String) -> Problem {
    Problem::invalid(ProblemCode::DeviceClassFileInvalid, message)
}

fn name_of(class: &Value) -> &str {
    class["metadata"]["name"].as_str().unwrap_or_default()
}

/// Reads the files of a directory; a directory that is not there has none.
fn read(directory: &Path) -> io::Result<Files> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Files::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) {
            paths.push(path);
        }
    }
    paths.sort();
    let beyond = paths.split_off(paths.len().min(FILES_MAX));
    let mut files: Files = paths
        .into_iter()
        .map(|path| {
            let classes = classes(&path);
            (path, classes)
        })
        .collect();
    if let Some(first) = beyond.into_iter().next() {
        let why = format!("this file and those after it are not read: {FILES_MAX} are the most");
        files.insert(first, Err(why));
    }
    Ok(files)
}

/// Reads the DeviceClasses of a file, which has nothing else.
fn classes(path: &Path) -> Result<Vec<Value>, String> {
    let text = manifest::text_of(path).map_err(|error| chain(&error))?;
    let documents =
        manifest::documents(&text, &path.display().to_string()).map_err(|error| chain(&error))?;
    for (number, document) in documents.iter().enumerate() {
        let [api_version, kind] =
            ["apiVersion", "kind"].map(|field| document[field].as_str().unwrap_or_default());
        if (api_version, kind) != (API_VERSION, KIND) {
            return Err(format!(
                "document {} is {api_version} {kind}, and not {API_VERSION} {KIND}",
                number + 1
            ));
        }
        if name_of(document).is_empty() {
            return Err(format!("document {} has no metadata.name", number + 1));
        }
    }
    Ok(documents)
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLASS: &str =
        "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: gpu}\nspec: {}\n";

    #[test]
    fn files_have_device_classes_alone() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        assert!(read(&at("none")).unwrap().is_empty());
        let other = CLASS.replace("DeviceClass", "ResourceClaim");
        let nameless = CLASS.replace("name: gpu", "");
        for (name, text) in [
            ("a.yaml", CLASS),
            ("b.yml", &format!("{CLASS}---\n{CLASS}")),
            ("c.yaml", &other),
            ("d.json", &nameless),
            ("e.yaml", "a: [\n"),
            ("notes.txt", "no class"),
        ] {
            std::fs::write(at(name), text).unwrap();
        }
        let files = read(directory.path()).unwrap();
        assert_eq!(files.len(), 5);
        assert_eq!(files[&at("a.yaml")].as_ref().unwrap().len(), 1);
        assert_eq!(files[&at("b.yml")].as_ref().unwrap().len(), 2);
        assert_eq!(
            files[&at("c.yaml")].as_ref().unwrap_err(),
            "document 1 is resource.k8s.io/v1 ResourceClaim, and not resource.k8s.io/v1 DeviceClass"
        );
        assert_eq!(
            files[&at("d.json")].as_ref().unwrap_err(),
            "document 1 has no metadata.name"
        );
        assert!(files[&at("e.yaml")].is_err());
    }
}
