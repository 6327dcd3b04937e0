//! Unmodified CDI files of the directory.

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::Root;

/// Prefix of each of our files.
pub const MARK: &str = "# nodedock.dev/claim: ";

/// A file of ours.
#[derive(Debug, Clone, PartialEq)]
pub struct CdiFile {
    pub path: PathBuf,
    /// Identity of the claim that the file belongs to.
    pub identity: Value,
    /// Spec that runtimes read.
    pub spec: Value,
    pub text: String,
}

impl CdiFile {
    /// None: the file belongs to another program, or is being written under a temporary name.
    pub fn read(path: &Path) -> Option<Self> {
        if path.extension()? != "yaml" {
            return None;
        }
        let text = std::fs::read_to_string(path).ok()?;
        let (first, rest) = text.split_once('\n')?;
        let identity =
            serde_json::from_str(first.strip_prefix(MARK)?).expect("the identity is JSON");
        let spec = serde_json::from_str(rest).expect("the spec is JSON in one line");
        Some(Self {
            path: path.to_owned(),
            identity,
            spec,
            text,
        })
    }

    pub fn claim_uid(&self) -> &str {
        self.identity["uid"]
            .as_str()
            .expect("the identity has the claim's UID")
    }

    /// Names under which runtimes know the devices.
    pub fn devices(&self) -> Vec<String> {
        let kind = self.spec["kind"].as_str().expect("a spec has a kind");
        let devices = self.spec["devices"]
            .as_array()
            .expect("a spec has devices")
            .iter();
        devices
            .map(|device| {
                format!(
                    "{kind}={}",
                    device["name"].as_str().expect("a device has a name")
                )
            })
            .collect()
    }

    /// Every mount of the file, by its path on the node and in a container.
    pub fn mounts(&self) -> Vec<(PathBuf, PathBuf)> {
        let devices = self.spec["devices"]
            .as_array()
            .into_iter()
            .flatten()
            .chain([&self.spec]);
        let mounts = devices
            .filter_map(|holder| holder["containerEdits"]["mounts"].as_array())
            .flatten();
        let path = |mount: &Value, key: &str| {
            PathBuf::from(mount[key].as_str().expect("a mount has paths"))
        };
        mounts
            .map(|mount| (path(mount, "hostPath"), path(mount, "containerPath")))
            .collect()
    }

    /// Every environment variable of the file.
    pub fn env(&self) -> Vec<String> {
        let devices = self.spec["devices"]
            .as_array()
            .into_iter()
            .flatten()
            .chain([&self.spec]);
        let lists = devices.filter_map(|holder| holder["containerEdits"]["env"].as_array());
        lists
            .flatten()
            .filter_map(Value::as_str)
            .map(ToOwned::to_owned)
            .collect()
    }
}

impl Root {
    /// The files of ours in the root's CDI directory, by name.
    pub fn cdi_files(&self) -> Vec<CdiFile> {
        let entries = std::fs::read_dir(self.cdi()).expect("read the CDI directory");
        let mut paths: Vec<_> = entries
            .map(|entry| entry.expect("read the CDI directory").path())
            .collect();
        paths.sort();
        paths
            .iter()
            .filter_map(|path| CdiFile::read(path))
            .collect()
    }

    /// The only file of ours.
    pub fn only_cdi_file(&self) -> CdiFile {
        let mut files = self.cdi_files();
        assert_eq!(files.len(), 1, "{files:#?}");
        files.remove(0)
    }
}
