//! The operator's config and the parameters of claims.

use std::collections::BTreeSet;

use nodedock_sdk::{Problem, parse_json};
use serde::Deserialize;

use crate::physical::PhysicalFunction;
use nodedock_sdk::matches_wildcards;
use nodedock_sdk::pci::normal_hex;

pub(crate) const VFIO_PCI: &str = "vfio-pci";
const VARIANT_SUFFIXES: [&str; 2] = ["_vfio_pci", "-vfio-pci"];
const INTERFACE_NAME_BYTES_MAX: usize = 15;

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
    /// A physical function is in the pool if it matches any of these.
    select: Vec<Selector>,
    /// Virtual functions of each physical function.
    pub(crate) vfs: u32,
    pub(crate) mode: Mode,
    /// Kernel driver of virtual functions in mode `vfio`.
    #[serde(default)]
    bind: Option<String>,
    #[serde(default)]
    pub(crate) extended_resource: Option<String>,
}

/// The way in which a container gets access to a virtual function.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Mode {
    /// Its network interface.
    Netdevice,
    /// Its network interface and RDMA nodes.
    Rdma,
    /// Its IOMMU group.
    Vfio,
    /// The nodes of an accelerator.
    Nodes,
}

impl Mode {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Mode::Netdevice => "netdevice",
            Mode::Rdma => "rdma",
            Mode::Vfio => "vfio",
            Mode::Nodes => "nodes",
        }
    }

    /// Returns whether the kernel binds a new virtual function to its driver.
    pub(crate) fn autoprobe(self) -> &'static str {
        if self == Mode::Vfio { "0" } else { "1" }
    }
}

/// A physical function matches if it matches every field that is set.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Selector {
    vendor: Option<String>,
    device: Option<String>,
    /// Glob of the name of its network interface.
    interface: Option<String>,
    /// Globs; without any, every address matches.
    #[serde(default)]
    addresses: Vec<String>,
}

/// Parameters of a claim or a class.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Parameters {
    /// Name of the interface in the container.
    pub(crate) interface_name: Option<String>,
    /// Kernel driver of the virtual function in mode `vfio`.
    pub(crate) vf_driver: Option<String>,
    /// Refused.
    mtu: Option<u32>,
}

impl Config {
    /// Parses a config and refuses one that cannot work on any node.
    pub(crate) fn read(text: &str) -> Result<Self, Problem> {
        let mut config: Config = parse_json("bad-config", "config of sriov", text)?;
        let mut names = BTreeSet::new();
        for pool in &mut config.pools {
            let checked = if names.insert(pool.name.clone()) {
                pool.check()
            } else {
                Err("its name occurs twice".to_owned())
            };
            checked.map_err(|reason| {
                Problem::invalid(
                    "bad-config",
                    format!("config of sriov: pool {:?}: {reason}", pool.name),
                )
            })?;
        }
        Ok(config)
    }

    pub(crate) fn pools(&self) -> &[PoolConfig] {
        &self.pools
    }

    /// Returns the index of the first pool that the physical function matches, so that none is in two.
    pub(crate) fn pool_of(&self, physical: &PhysicalFunction) -> Option<usize> {
        self.pools
            .iter()
            .position(|pool| pool.select.iter().any(|selector| selector.fits(physical)))
    }
}

impl PoolConfig {
    /// Returns the kernel driver that virtual functions are bound to; `None` in modes that bind none.
    pub(crate) fn bind(&self) -> Option<&str> {
        (self.mode == Mode::Vfio).then(|| self.bind.as_deref().unwrap_or(VFIO_PCI))
    }

    /// Checks the pool and converts its hex numbers to the notation of sysfs.
    fn check(&mut self) -> Result<(), String> {
        if self.name.is_empty() || self.name != self.name.to_ascii_lowercase() {
            return Err("its name must be a DNS subdomain".into());
        }
        if self.select.is_empty() {
            return Err(
                "select is empty: a pool never has all physical functions of a node".into(),
            );
        }
        if self.vfs == 0 {
            return Err("vfs is 0".into());
        }
        match &self.bind {
            Some(_) if self.mode != Mode::Vfio => return Err("bind is for mode vfio only".into()),
            Some(driver) if !is_vfio_driver(driver) => {
                return Err(format!(
                    "bind is {driver:?}, which is neither vfio-pci nor a variant of it"
                ));
            }
            _ => {}
        }
        for selector in &mut self.select {
            for number in [&mut selector.vendor, &mut selector.device]
                .into_iter()
                .flatten()
            {
                *number = normal_hex(number, &[4])?;
            }
        }
        Ok(())
    }
}

impl Selector {
    fn fits(&self, physical: &PhysicalFunction) -> bool {
        let address = physical.address.as_str();
        let interface = physical.interface.as_deref();
        is_allowed(&self.vendor, &physical.vendor)
            && is_allowed(&self.device, &physical.device)
            && self
                .interface
                .as_ref()
                .is_none_or(|glob| interface.is_some_and(|name| matches_wildcards(glob, name)))
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

impl Parameters {
    /// Checks what the type cannot express.
    pub(crate) fn check(&self) -> Result<(), Problem> {
        if self.mtu.is_some() {
            let message = "mtu cannot be set by a driver: set it on the node or in the container";
            return Err(Problem::invalid("mtu-not-supported", message));
        }
        match (&self.interface_name, &self.vf_driver) {
            (Some(name), _) if !is_interface_name(name) => bad(format!(
                "interfaceName {name:?} is not the name of a network interface"
            )),
            (_, Some(driver)) if !is_vfio_driver(driver) => bad(format!(
                "vfDriver {driver:?} is neither vfio-pci nor a variant of it"
            )),
            _ => Ok(()),
        }
    }
}

fn bad(message: String) -> Result<(), Problem> {
    Err(Problem::invalid("bad-parameters", message))
}

fn is_interface_name(name: &str) -> bool {
    let plain = name
        .bytes()
        .all(|byte| byte.is_ascii_graphic() && !matches!(byte, b'/' | b':'));
    (1..=INTERFACE_NAME_BYTES_MAX).contains(&name.len()) && plain && !matches!(name, "." | "..")
}

fn is_vfio_driver(driver: &str) -> bool {
    driver == VFIO_PCI
        || VARIANT_SUFFIXES
            .iter()
            .any(|suffix| driver.ends_with(suffix))
}
