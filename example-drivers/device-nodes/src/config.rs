//! The operator's config.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_sdk::{NodeAccess, Problem, parse_json};
use serde::Deserialize;

use crate::nodes::{is_requested, not_requested};

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Config {
    #[serde(default)]
    pub(crate) pools: Vec<PoolConfig>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PoolConfig {
    pub(crate) name: String,
    /// Globs below `/dev`.
    pub(crate) paths: Vec<String>,
    #[serde(default = "read_write")]
    pub(crate) permissions: String,
    /// True if several claims may use a node at once.
    #[serde(default)]
    pub(crate) shared: bool,
    #[serde(default)]
    pub(crate) extended_resource: Option<String>,
    #[serde(default)]
    pub(crate) env: BTreeMap<String, String>,
}

fn read_write() -> String {
    "rw".to_owned()
}

impl Config {
    /// Parses a config and refuses one that cannot work on any node.
    pub(crate) fn read(text: &str) -> Result<Self, Problem> {
        let config: Config = parse_json("bad-config", "config of device-nodes", text)?;
        let mut names = BTreeSet::new();
        for pool in &config.pools {
            if !names.insert(&pool.name) {
                return Err(bad(&pool.name, "its name occurs twice"));
            }
            pool.check()?;
        }
        Ok(config)
    }
}

impl PoolConfig {
    pub(crate) fn access(&self) -> Result<NodeAccess, Problem> {
        self.permissions
            .parse()
            .map_err(|why| bad(&self.name, &format!("permissions: {why}")))
    }

    fn check(&self) -> Result<(), Problem> {
        if self.name.is_empty() || self.name != self.name.to_ascii_lowercase() {
            return Err(bad(&self.name, "its name must be a DNS subdomain"));
        }
        if let Some(path) = self.paths.iter().find(|path| !is_below_dev(path)) {
            return Err(bad(&self.name, &format!("path {path:?} is not below /dev")));
        }
        if let Some(path) = self.paths.iter().find(|path| !is_requested(path)) {
            return Err(bad(&self.name, &not_requested(path)));
        }
        self.access()?;
        match self.env.keys().find(|name| !name.starts_with("DEVICE_")) {
            Some(name) => Err(bad(
                &self.name,
                &format!("env {name:?} does not begin with DEVICE_"),
            )),
            None => Ok(()),
        }
    }
}

fn is_below_dev(path: &str) -> bool {
    let below = path.strip_prefix("/dev/");
    below.is_some_and(|rest| {
        rest.split('/')
            .all(|segment| !matches!(segment, "" | "." | ".."))
    })
}

fn bad(pool: &str, reason: &str) -> Problem {
    Problem::invalid(
        "bad-config",
        format!("config of device-nodes: pool {pool:?}: {reason}"),
    )
}
