//! Configuration: the daemon's own (flags over file over defaults), and what operators write for drivers.
//!
//! Only values: paths are derived here, and nothing is created or opened but the file that is read.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use crate::model::limit;

/// The daemon's config file. Every key may be absent.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ConfigFile {
    /// Name of this node; the machine's host name unless set.
    pub node_name: Option<String>,
    /// Where CDI specs are written.
    pub cdi_dir: Option<PathBuf>,
    /// Folders in which container runtimes look for CDI specs, by priority, as in their own configs.
    pub cdi_spec_dirs: Option<Vec<PathBuf>>,
    pub claims: ClaimsSection,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ClaimsSection {
    /// Milliseconds that a prepare waits for the holder of a device.
    pub exclusive_wait_ms: Option<u64>,
    /// Milliseconds that a driver has for a prepare or an unprepare.
    pub call_deadline_ms: Option<u64>,
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("read the config {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("the config {} is not valid", path.display())]
    Parse { path: PathBuf, source: Box<serde_saphyr::Error> },
    #[error("the config {}: {key} is {value}, and {min} to {max} are allowed", path.display())]
    Range { path: PathBuf, key: &'static str, value: u64, min: u64, max: u64 },
    #[error("the config {}: cdiSpecDirs has {} folders, and at most {} are allowed", path.display(), folders, limit::CDI_FOLDERS_MAX)]
    SpecFolders { path: PathBuf, folders: usize },
    #[error("the config {}: cdiSpecDirs has {:?}, and absolute paths are wanted", path.display(), folder)]
    SpecFolder { path: PathBuf, folder: PathBuf },
}

impl ConfigFile {
    /// Reads and checks a file. Unknown keys and wrong types are errors with line and column.
    pub fn read(path: &Path) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let invalid = |error| ConfigError::Parse { path: path.to_owned(), source: Box::new(error) };
        let config: Self = serde_saphyr::from_str(text).map_err(invalid)?;
        let check = |key, value: Option<u64>, min, max| match value {
            Some(value) if !(min..=max).contains(&value) => {
                Err(ConfigError::Range { path: path.to_owned(), key, value, min, max })
            }
            _ => Ok(()),
        };
        check("claims.exclusiveWaitMs", config.claims.exclusive_wait_ms, 0, 60_000)?;
        check("claims.callDeadlineMs", config.claims.call_deadline_ms, 100, 300_000)?;
        check_spec_dirs(config.cdi_spec_dirs.as_deref().unwrap_or_default(), path)?;
        Ok(config)
    }
}

fn check_spec_dirs(folders: &[PathBuf], path: &Path) -> Result<(), ConfigError> {
    if folders.len() > limit::CDI_FOLDERS_MAX {
        return Err(ConfigError::SpecFolders { path: path.to_owned(), folders: folders.len() });
    }
    match folders.iter().find(|folder| !folder.is_absolute()) {
        Some(folder) => Err(ConfigError::SpecFolder { path: path.to_owned(), folder: folder.clone() }),
        None => Ok(()),
    }
}

/// What the daemon runs with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub paths: Paths,
    pub node_name: String,
    pub exclusive_wait: Duration,
    pub call_deadline: Duration,
}

impl Config {
    /// Puts the file's values and the defaults together. `cdi_dir` and `node_name` are flags, and win over the file.
    pub fn new(
        root: &Path,
        socket: Option<PathBuf>,
        cdi_dir: Option<PathBuf>,
        node_name: String,
        file: &ConfigFile,
    ) -> Self {
        let mut paths = Paths::below(root);
        paths.socket = socket.unwrap_or(paths.socket);
        paths.cdi = cdi_dir.or_else(|| file.cdi_dir.clone()).unwrap_or(paths.cdi);
        paths.cdi_spec_dirs = file.cdi_spec_dirs.clone().unwrap_or(paths.cdi_spec_dirs);
        let milliseconds = |value: Option<u64>, default| value.map_or(default, Duration::from_millis);
        Self {
            paths,
            node_name,
            exclusive_wait: milliseconds(file.claims.exclusive_wait_ms, limit::EXCLUSIVE_WAIT),
            call_deadline: milliseconds(file.claims.call_deadline_ms, limit::CLAIM_CALL_DEADLINE),
        }
    }
}

/// Where everything is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paths {
    pub drivers: PathBuf,
    /// Registration sockets of native plugins.
    pub plugins_registry: PathBuf,
    /// The socket on which device plugins register, and theirs beside it.
    pub device_plugins: PathBuf,
    pub checkpoint: PathBuf,
    pub claims: PathBuf,
    pub cache: PathBuf,
    pub socket: PathBuf,
    /// Socket of the pod-resources API, under the name that its clients know.
    pub pod_resources: PathBuf,
    pub cdi: PathBuf,
    /// Where runtimes look for specs, by priority; `cdi` is read as well.
    pub cdi_spec_dirs: Vec<PathBuf>,
}

impl Paths {
    /// The default places below a root.
    pub fn below(root: &Path) -> Self {
        Self {
            drivers: root.join("var/lib/nodedock/drivers"),
            plugins_registry: root.join("var/lib/nodedock/plugins_registry"),
            device_plugins: root.join("var/lib/nodedock/device-plugins"),
            checkpoint: root.join("var/lib/nodedock/checkpoint.redb"),
            claims: root.join("var/lib/nodedock/claims"),
            cache: root.join("var/cache/nodedock"),
            socket: root.join("run/nodedock/nodedock.sock"),
            pod_resources: root.join("run/nodedock/pod-resources/kubelet.sock"),
            cdi: root.join("var/run/cdi"),
            cdi_spec_dirs: vec![root.join("etc/cdi"), root.join("var/run/cdi")],
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum DriverConfigError {
    #[error("not valid YAML")]
    Syntax(#[source] Box<serde_saphyr::Error>),
    #[error("a mapping is wanted, keys and values, and this is {0}")]
    NotAMapping(&'static str),
}

/// A driver's config, from YAML to the JSON text that the driver gets. An empty file is an empty mapping.
pub fn driver_config(yaml: &str) -> Result<String, DriverConfigError> {
    use serde_json::Value;
    let value: Value =
        serde_saphyr::from_str(yaml).map_err(|error| DriverConfigError::Syntax(Box::new(error)))?;
    match value {
        Value::Object(_) => Ok(value.to_string()),
        Value::Null => Ok("{}".to_owned()),
        Value::Array(_) => Err(DriverConfigError::NotAMapping("a list")),
        Value::String(_) => Err(DriverConfigError::NotAMapping("a text")),
        Value::Bool(_) | Value::Number(_) => Err(DriverConfigError::NotAMapping("a single value")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::base::error::chain;

    #[test]
    fn a_driver_config_is_json_for_the_driver_and_its_errors_say_where() {
        assert_eq!(driver_config("pools:\n- {name: misc}\n").unwrap(), r#"{"pools":[{"name":"misc"}]}"#);
        assert_eq!(driver_config("# nothing\n").unwrap(), "{}");
        assert!(matches!(driver_config("- a\n"), Err(DriverConfigError::NotAMapping("a list"))));
        let error = chain(&driver_config("a: 1\nb: [1,\n").unwrap_err());
        assert!(error.contains("line"), "{error}");
    }

    #[test]
    fn unknown_keys_wrong_types_and_values_out_of_range_are_named() {
        let parse = |text| ConfigFile::parse(text, Path::new("nodedock.yaml"));
        assert_eq!(parse("nodeName: n1\n").unwrap().node_name.as_deref(), Some("n1"));
        let error = chain(&parse("nodeName: n1\nnodName: n1\n").unwrap_err());
        assert!(error.contains("nodName") && error.contains("line 2"), "{error}");
        let error = chain(&parse("claims: {exclusiveWaitMs: soon}\n").unwrap_err());
        assert!(error.contains("line 1"), "{error}");
        let error = chain(&parse("claims: {callDeadlineMs: 1}\n").unwrap_err());
        assert!(error.contains("claims.callDeadlineMs is 1"), "{error}");
        let error = chain(&parse("cdiSpecDirs: [/etc/cdi, run/cdi]\n").unwrap_err());
        assert!(error.contains("\"run/cdi\""), "{error}");
        let error = chain(&parse(&format!("cdiSpecDirs: [{}]\n", "/x, ".repeat(17))).unwrap_err());
        assert!(error.contains("has 17 folders"), "{error}");
    }

    #[test]
    fn flags_win_over_the_file_and_the_file_over_defaults() {
        let file = ConfigFile { cdi_dir: Some("/from/file".into()), ..Default::default() };
        let config = |flag| Config::new(Path::new("/r"), None, flag, "n".to_owned(), &file).paths.cdi;
        assert_eq!(config(None), Path::new("/from/file"));
        assert_eq!(config(Some("/from/flag".into())), Path::new("/from/flag"));
        let plain = Config::new(Path::new("/r"), None, None, "n".to_owned(), &ConfigFile::default());
        assert_eq!(plain.paths.cdi, Path::new("/r/var/run/cdi"));
        assert_eq!(plain.paths.cdi_spec_dirs, ["/r/etc/cdi", "/r/var/run/cdi"].map(PathBuf::from));
        let file = ConfigFile { cdi_spec_dirs: Some(vec!["/x".into()]), ..Default::default() };
        let config = Config::new(Path::new("/r"), None, None, "n".to_owned(), &file);
        assert_eq!(config.paths.cdi_spec_dirs, [PathBuf::from("/x")]);
    }
}
