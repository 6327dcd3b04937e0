//! The operator's config.

use std::collections::BTreeSet;

use nodedock_sdk::pci::normal_hex;
use nodedock_sdk::{Problem, parse_json};
use serde::Deserialize;

use crate::function::Function;

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Config {
    #[serde(default = "one_pool")]
    pools: Vec<PoolConfig>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PoolConfig {
    pub(crate) name: String,
    /// A function is in the pool if it matches any of these; without any, every function matches.
    #[serde(default)]
    select: Vec<Selector>,
    #[serde(default)]
    pub(crate) extended_resource: Option<String>,
}

/// A function matches if it matches every field that is set.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Selector {
    vendor: Option<String>,
    device: Option<String>,
    /// The whole class code or a prefix of it: `0x03` is every display controller.
    class: Option<String>,
    /// Kernel driver that the function is bound to.
    driver: Option<String>,
}

fn one_pool() -> Vec<PoolConfig> {
    vec![PoolConfig {
        name: "pci".to_owned(),
        select: Vec::new(),
        extended_resource: None,
    }]
}

impl Config {
    /// Parses a config and refuses one that cannot work on any node.
    pub(crate) fn read(text: &str) -> Result<Self, Problem> {
        let mut config: Config = parse_json("bad-config", "config of pci", text)?;
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

    /// Returns the index of the first pool that the function matches, so that no function is in two.
    pub(crate) fn pool_of(&self, function: &Function) -> Option<usize> {
        self.pools.iter().position(|pool| pool.fits(function))
    }
}

impl PoolConfig {
    /// Checks the pool and converts its hex numbers to the notation of sysfs.
    fn check(&mut self) -> Result<(), Problem> {
        if self.name.is_empty() || self.name != self.name.to_ascii_lowercase() {
            return Err(bad(&self.name, "its name must be a DNS subdomain"));
        }
        for selector in &mut self.select {
            let numbers = [
                (&mut selector.vendor, &[4][..]),
                (&mut selector.device, &[4]),
                (&mut selector.class, &[2, 4, 6]),
            ];
            for (number, lengths) in numbers {
                if let Some(number) = number {
                    *number =
                        normal_hex(number, lengths).map_err(|reason| bad(&self.name, &reason))?;
                }
            }
        }
        Ok(())
    }

    fn fits(&self, function: &Function) -> bool {
        self.select.is_empty() || self.select.iter().any(|selector| selector.fits(function))
    }
}

impl Selector {
    fn fits(&self, function: &Function) -> bool {
        is_allowed(&self.vendor, &function.vendor)
            && is_allowed(&self.device, &function.device)
            && self
                .class
                .as_ref()
                .is_none_or(|class| function.class.starts_with(class.as_str()))
            && is_allowed(&self.driver, function.driver.as_deref().unwrap_or_default())
    }
}

fn is_allowed(wanted: &Option<String>, is: &str) -> bool {
    wanted.as_ref().is_none_or(|wanted| wanted == is)
}

fn bad(pool: &str, reason: &str) -> Problem {
    Problem::invalid(
        "bad-config",
        format!("config of pci: pool {pool:?}: {reason}"),
    )
}
