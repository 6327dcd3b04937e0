//! The operator's config.

use std::collections::BTreeSet;

use nodedock_sdk::{Problem, parse_json};
use serde::Deserialize;

use crate::function::Function;
use nodedock_sdk::matches_wildcards;
use nodedock_sdk::pci::normal_hex;

pub(crate) const VFIO_PCI: &str = "vfio-pci";
const VARIANT_SUFFIXES: [&str; 2] = ["_vfio_pci", "-vfio-pci"];

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Config {
    #[serde(default)]
    pools: Vec<PoolConfig>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct PoolConfig {
    pub(crate) name: String,
    /// A function is in the pool if it matches any of these.
    select: Vec<Selector>,
    /// Kernel driver that a prepare binds the functions to.
    #[serde(default = "vfio_pci")]
    pub(crate) bind: String,
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
    /// Kernel driver that the function is bound to while no claim uses it.
    driver: Option<String>,
    /// Globs; without any, every address matches.
    #[serde(default)]
    addresses: Vec<String>,
}

fn vfio_pci() -> String {
    VFIO_PCI.to_owned()
}

impl Config {
    /// Parses a config and refuses one that cannot work on any node.
    pub(crate) fn read(text: &str) -> Result<Self, Problem> {
        let mut config: Config = parse_json("bad-config", "config of vfio-pci", text)?;
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
        if self.select.is_empty() {
            return Err(bad(
                &self.name,
                "select is empty: a pool never has all functions of a node",
            ));
        }
        if self.bind != VFIO_PCI
            && !VARIANT_SUFFIXES
                .iter()
                .any(|suffix| self.bind.ends_with(suffix))
        {
            let reason = format!(
                "bind is {:?}, which is neither vfio-pci nor a variant of it",
                self.bind
            );
            return Err(bad(&self.name, &reason));
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
        self.select.iter().any(|selector| selector.fits(function))
    }
}

impl Selector {
    fn fits(&self, function: &Function) -> bool {
        let address = function.address.as_str();
        is_allowed(&self.vendor, &function.vendor)
            && is_allowed(&self.device, &function.device)
            && self
                .class
                .as_ref()
                .is_none_or(|class| function.class.starts_with(class.as_str()))
            && is_allowed(&self.driver, function.driver.as_deref().unwrap_or_default())
            && (self.addresses.is_empty()
                || self
                    .addresses
                    .iter()
                    .any(|glob| matches_wildcards(glob, address)))
    }
}

fn is_allowed(wanted: &Option<String>, is: &str) -> bool {
    wanted.as_ref().is_none_or(|wanted| wanted == is)
}

fn bad(pool: &str, reason: &str) -> Problem {
    Problem::invalid(
        "bad-config",
        format!("config of vfio-pci: pool {pool:?}: {reason}"),
    )
}
