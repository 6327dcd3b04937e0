//! The operator's config.

use std::collections::BTreeSet;

use nodedock_sdk::pci::normal_hex;
use nodedock_sdk::{Problem, parse_json};
use serde::Deserialize;

use crate::function::{AMD, Function, INTEL, NVIDIA};

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Config {
    #[serde(default = "one_pool")]
    pools: Vec<PoolConfig>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PoolConfig {
    pub(crate) name: String,
    /// A GPU is in the pool if it matches any of these; without any, every GPU of AMD, Intel and NVIDIA matches.
    #[serde(default)]
    select: Vec<Selector>,
    #[serde(default)]
    pub(crate) extended_resource: Option<String>,
    /// Globs of files that containers get read-only.
    #[serde(default)]
    pub(crate) libraries: Vec<String>,
    /// Paths of programs that containers get read-only.
    #[serde(default)]
    pub(crate) binaries: Vec<String>,
}

/// A GPU matches if it matches every field that is set.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Selector {
    /// `amd`, `intel`, `nvidia` or the number.
    vendor: Option<String>,
    device: Option<String>,
    /// Kernel driver that the GPU is bound to.
    driver: Option<String>,
    /// True if the GPU is a virtual function of another.
    virtual_function: Option<bool>,
}

fn one_pool() -> Vec<PoolConfig> {
    vec![PoolConfig {
        name: "gpu".to_owned(),
        ..PoolConfig::default()
    }]
}

impl Config {
    /// Parses a config and refuses one that cannot work on any node.
    pub(crate) fn read(text: &str) -> Result<Self, Problem> {
        let mut config: Config = parse_json("bad-config", "config of gpu", text)?;
        let mut names = BTreeSet::new();
        for pool in &mut config.pools {
            if !names.insert(pool.name.clone()) {
                return Err(bad(&pool.name, "its name occurs twice"));
            }
            pool.check()?;
        }
        Ok(config)
    }

    pub(crate) fn pools(&self) -> &[PoolConfig] {
        &self.pools
    }

    /// Returns the index of the first pool that the GPU matches, so that no GPU is in two.
    pub(crate) fn pool_of(&self, function: &Function) -> Option<usize> {
        self.pools.iter().position(|pool| pool.fits(function))
    }
}

impl PoolConfig {
    /// Checks the pool and converts its vendors and hex numbers to the notation of sysfs.
    fn check(&mut self) -> Result<(), Problem> {
        if self.name.is_empty() || self.name != self.name.to_ascii_lowercase() {
            return Err(bad(&self.name, "its name must be a DNS subdomain"));
        }
        for selector in &mut self.select {
            if let Some(vendor) = &mut selector.vendor {
                *vendor = vendor_number(vendor).map_err(|reason| bad(&self.name, &reason))?;
            }
            if let Some(device) = &mut selector.device {
                *device = normal_hex(device, &[4]).map_err(|reason| bad(&self.name, &reason))?;
            }
        }
        for path in self.libraries.iter().chain(&self.binaries) {
            if !is_plain(path) {
                return Err(bad(
                    &self.name,
                    &format!("{path:?} is not an absolute path without `.` and `..`"),
                ));
            }
        }
        match self.binaries.iter().find(|path| is_glob(path)) {
            Some(path) => Err(bad(
                &self.name,
                &format!("{path:?} in binaries is a glob, and must be a path"),
            )),
            None => Ok(()),
        }
    }

    fn fits(&self, function: &Function) -> bool {
        if self.select.is_empty() {
            return [AMD, INTEL, NVIDIA].contains(&function.vendor.as_str());
        }
        self.select.iter().any(|selector| selector.fits(function))
    }
}

impl Selector {
    fn fits(&self, function: &Function) -> bool {
        is_allowed(&self.vendor, &function.vendor)
            && is_allowed(&self.device, &function.device)
            && is_allowed(&self.driver, function.driver.as_deref().unwrap_or_default())
            && self
                .virtual_function
                .is_none_or(|wanted| wanted == function.physfn.is_some())
    }
}

fn is_allowed(wanted: &Option<String>, is: &str) -> bool {
    wanted.as_ref().is_none_or(|wanted| wanted == is)
}

/// Returns whether the path has a wildcard, so that it may match several files or none.
pub(crate) fn is_glob(path: &str) -> bool {
    path.contains(['*', '?', '[', ']', '{', '}'])
}

fn is_plain(path: &str) -> bool {
    path.strip_prefix('/').is_some_and(|rest| {
        !rest
            .split('/')
            .any(|segment| matches!(segment, "" | "." | ".."))
    })
}

fn vendor_number(vendor: &str) -> Result<String, String> {
    match vendor.to_ascii_lowercase().as_str() {
        "amd" => Ok(AMD.to_owned()),
        "intel" => Ok(INTEL.to_owned()),
        "nvidia" => Ok(NVIDIA.to_owned()),
        number => normal_hex(number, &[4])
            .map_err(|reason| format!("{reason}, and not amd, intel or nvidia")),
    }
}

fn bad(pool: &str, reason: &str) -> Problem {
    Problem::invalid(
        "bad-config",
        format!("config of gpu: pool {pool:?}: {reason}"),
    )
}
