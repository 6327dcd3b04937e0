//! Adapters of device plugins: the section `devicePluginAdapters`, and the files `NAME.adapter.yaml` beside the plugins' sockets.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use serde::de::Error;
use serde::{Deserialize, Deserializer};

use nodedock_base::conditions::Conditions;
use nodedock_core::adapters::{AdapterEntries, AdapterEntry};
use nodedock_model::{Adapter, Problem, ProblemCode, limit};
use nodedock_wasm::trust::open;

/// The source of the adapters of the config.
const CONFIG: &str = "the config";

const SUFFIX: &str = ".adapter.yaml";

/// Reads the entries: a bounded number with different resources and drivers.
pub(super) fn entries<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Vec<Adapter>, D::Error> {
    let entries = Option::<Vec<Adapter>>::deserialize(deserializer)?.unwrap_or_default();
    let max = limit::PLUGIN_RESOURCES_MAX;
    if entries.len() > max {
        let message = format!(
            "devicePluginAdapters has {} entries, at most {max} are allowed",
            entries.len()
        );
        return Err(D::Error::custom(message));
    }
    let (mut resources, mut drivers) = (BTreeSet::new(), BTreeSet::new());
    for Adapter {
        resource, driver, ..
    } in &entries
    {
        let twice = match (resources.insert(resource), drivers.insert(driver)) {
            (false, _) => resource.as_str(),
            (true, false) => driver.as_str(),
            (true, true) => continue,
        };
        return Err(D::Error::custom(format!(
            "devicePluginAdapters has two entries of {twice}"
        )));
    }
    Ok(entries)
}

/// A file, or a directory that cannot be read.
pub(crate) struct FileAdapter {
    pub(crate) source: String,
    pub(crate) read: Result<Adapter, String>,
}

impl FileAdapter {
    fn new(path: &Path, read: Result<Adapter, String>) -> Self {
        Self {
            source: path.display().to_string(),
            read,
        }
    }

    /// Why it does not count.
    pub(crate) fn refused(&self) -> Option<Problem> {
        let why = self.read.as_ref().err()?;
        let message = format!(
            "the adapter {} is not valid, and one that was there before stays as it was: {why}",
            self.source
        );
        Some(Problem::invalid(ProblemCode::AdapterInvalid, message))
    }
}

/// Reads the adapter files in some directories, by name.
pub(crate) fn files(directories: &[PathBuf]) -> Vec<FileAdapter> {
    directories
        .iter()
        .flat_map(|directory| files_in(directory))
        .collect()
}

fn files_in(directory: &Path) -> Vec<FileAdapter> {
    match paths(directory) {
        Ok(paths) => paths
            .iter()
            .map(|path| FileAdapter::new(path, file(path)))
            .collect(),
        Err(error) => vec![FileAdapter::new(directory, Err(error.to_string()))],
    }
}

/// Returns the adapters of the config, and then those of the files. A file that is not valid, and a directory that cannot be read, is a
/// condition.
pub(crate) fn entries_of(
    config: &[Adapter],
    files: Vec<FileAdapter>,
    conditions: &Conditions,
) -> AdapterEntries {
    let mut found = AdapterEntries {
        entries: config
            .iter()
            .map(|adapter| AdapterEntry {
                adapter: adapter.clone(),
                source: CONFIG.to_owned(),
            })
            .collect(),
        is_incomplete: false,
    };
    for file in files {
        if let Some(problem) = file.refused() {
            conditions.set(&file.source, problem);
            found.is_incomplete = true;
        }
        found
            .entries
            .extend(file.read.ok().map(|adapter| AdapterEntry {
                adapter,
                source: file.source,
            }));
    }
    found
}

/// The adapter files in a directory, by name. A directory that is not there has none.
fn paths(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        if path
            .file_name()
            .and_then(|name| name.to_str())
            .is_some_and(|name| name.ends_with(SUFFIX))
        {
            paths.push(path);
        }
    }
    if paths.len() > limit::PLUGIN_RESOURCES_MAX {
        let (count, max) = (paths.len(), limit::PLUGIN_RESOURCES_MAX);
        return Err(io::Error::other(format!(
            "it has {count} adapters, and {max} are the most that are read"
        )));
    }
    paths.sort();
    Ok(paths)
}

fn file(path: &Path) -> Result<Adapter, String> {
    let opened = open::open(path, limit::SIDE_FILE_BYTES_MAX).map_err(|error| error.to_string())?;
    let text = String::from_utf8(opened.bytes).map_err(|_| "it is not UTF-8 text")?;
    Adapter::parse(&text).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ConfigFile;
    use nodedock_base::changes::Changes;
    use nodedock_base::error::chain;

    fn parse(entries: &str) -> Result<ConfigFile, String> {
        let text = format!("devicePluginAdapters: {entries}\n");
        ConfigFile::parse(&text, Path::new("config.yaml")).map_err(|error| chain(&error))
    }

    #[test]
    fn duplicate_adapters_are_refused() {
        let one = "{ resource: example.com/a, driver: a.example.com }";
        assert_eq!(
            parse(&format!("[{one}]"))
                .unwrap()
                .device_plugin_adapters
                .len(),
            1
        );
        for (other, twice) in [
            (
                "{ resource: example.com/a, driver: b.example.com }",
                "example.com/a",
            ),
            (
                "{ resource: example.com/b, driver: a.example.com }",
                "a.example.com",
            ),
        ] {
            let error = parse(&format!("[{one}, {other}]")).unwrap_err();
            assert!(
                error.contains(&format!("two entries of {twice}")),
                "{error}"
            );
        }
        let error = parse("[{ resource: example.com/a }]").unwrap_err();
        assert!(error.contains("driver"), "{error}");
        let error = parse(
            "[{ resource: example.com/a, driver: a.b, devices: [{ match: '(' , identity: a }] }]",
        );
        assert!(error.unwrap_err().contains("is not a regular expression"));
    }

    #[test]
    fn invalid_adapter_files_become_conditions() {
        let directory = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(directory.path().join(name), text).unwrap();
        let valid = "apiVersion: nodedock.dev/v1\nkind: DevicePluginAdapter\nresource: example.com/b\ndriver: b.example.com\n";
        write("b.adapter.yaml", valid);
        write(
            "a.adapter.yaml",
            &valid.replace("DevicePluginAdapter", "DriverGrant"),
        );
        write("c.yaml", valid);
        std::fs::create_dir(directory.path().join("d.adapter.yaml")).unwrap();
        let conditions = Conditions::new(Changes::default());
        let config = parse("[{ resource: example.com/a, driver: a.example.com }]").unwrap();
        let missing = directory.path().join("missing");
        let read = |config: &[Adapter], directories: &[&Path]| {
            let directories: Vec<_> = directories
                .iter()
                .map(|directory| directory.to_path_buf())
                .collect();
            entries_of(config, files(&directories), &conditions)
        };
        let found = read(
            &config.device_plugin_adapters,
            &[directory.path(), &missing],
        );
        assert!(found.is_incomplete);
        let found: Vec<_> = found
            .entries
            .iter()
            .map(|entry| (entry.adapter.driver.as_str(), entry.source.clone()))
            .collect();
        let file = directory
            .path()
            .join("b.adapter.yaml")
            .display()
            .to_string();
        assert_eq!(
            found,
            [
                ("a.example.com", "the config".to_owned()),
                ("b.example.com", file)
            ]
        );
        let problems: Vec<_> = conditions
            .list()
            .into_iter()
            .map(|condition| condition.problem.message)
            .collect();
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(
            problems[0].contains("line 2, column 7: kind is \"DriverGrant\""),
            "{problems:?}"
        );
        assert!(
            problems[1].contains("it is not a regular file"),
            "{problems:?}"
        );
        let file = directory.path().join("c.yaml");
        assert!(read(&[], &[&file]).is_incomplete, "it is no directory");
        assert_eq!(read(&[], &[&missing]), AdapterEntries::default());
    }
}
