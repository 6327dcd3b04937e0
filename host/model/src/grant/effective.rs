//! Effective capabilities of a driver: what it requests and the operator grants, as matchers.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};

use regex::Regex;

use super::ceiling::{LOADING_ENV, RUNTIME_ANNOTATIONS};
use super::pattern::{Naming, PatternError, PatternSet};
use super::{Capabilities, Grant, POWERFUL_NODES, ValueGrant, whole_value};

/// Allows what both sides match.
#[derive(Debug, Default)]
struct Both {
    asked: PatternSet,
    granted: PatternSet,
    only_by_name: PatternSet,
}

impl Both {
    fn new(
        asked: &[String],
        granted: &[String],
        only_by_name: &[&str],
    ) -> Result<Self, PatternError> {
        Ok(Self {
            asked: PatternSet::new(asked)?,
            granted: PatternSet::new(granted)?,
            only_by_name: PatternSet::new(only_by_name.iter().copied())?,
        })
    }

    fn allows(&self, text: &str) -> bool {
        self.allows_named(text, Naming::Glob)
    }

    /// Returns whether the grant allows the text, and names it as explicitly as that.
    fn allows_named(&self, text: &str, naming: Naming) -> bool {
        let naming = if self.only_by_name.matches(text) {
            Naming::Path
        } else {
            naming
        };
        self.granted.allows(text, naming) && self.asked.matches(text)
    }

    /// Returns whether everything that a glob may match is allowed.
    fn allows_glob(&self, glob: &str) -> bool {
        self.asked.covers(glob) && self.granted.covers(glob)
    }
}

#[derive(Debug, Default)]
struct WriteRules(Vec<(PatternSet, Regex)>);

impl WriteRules {
    fn new(entries: &[ValueGrant]) -> Result<Self, EffectiveError> {
        entries
            .iter()
            .map(|entry| {
                let glob = PatternSet::new([&entry.glob])?;
                Ok((
                    glob,
                    whole_value(&entry.pattern).map_err(EffectiveError::Value)?,
                ))
            })
            .collect::<Result<_, EffectiveError>>()
            .map(Self)
    }

    fn allow(&self, path: &str, value: &str) -> bool {
        self.0
            .iter()
            .any(|(glob, pattern)| glob.matches(path) && pattern.is_match(value))
    }
}

#[derive(Debug, thiserror::Error)]
pub enum EffectiveError {
    #[error("a glob: {0}")]
    Glob(#[from] PatternError),
    #[error("{0}")]
    Value(String),
}

/// Effective capabilities of a driver: requested and granted, as matchers.
#[derive(Debug, Default)]
pub struct Effective {
    /// Set when the grant is withdrawn, which also affects calls in flight.
    revoked: AtomicBool,
    sysfs_read: Both,
    sysfs_write_asked: WriteRules,
    sysfs_write_granted: WriteRules,
    host_files: Both,
    pci_driver_asked: WriteRules,
    pci_driver_granted: WriteRules,
    device_nodes: Both,
    mounts: Both,
    hooks: Both,
    env: Both,
    net_devices: Both,
    writable_mounts: PatternSet,
    extended_resources: PatternSet,
    groups: Vec<u32>,
    rdt_classes: PatternSet,
    annotations: PatternSet,
}

/// Annotations that container runtimes act on.
static RUNTIME_KEYS: LazyLock<PatternSet> =
    LazyLock::new(|| PatternSet::new(RUNTIME_ANNOTATIONS.iter().copied()).expect("they are globs"));

impl Effective {
    /// Nothing.
    pub fn none() -> Self {
        Self::default()
    }

    pub fn new(request: &Capabilities, grant: &Grant) -> Result<Self, EffectiveError> {
        let Grant {
            allowed,
            unrequested,
            ..
        } = grant;
        Ok(Self {
            revoked: AtomicBool::new(false),
            sysfs_read: Both::new(&request.sysfs_read, &allowed.sysfs_read, &[])?,
            sysfs_write_asked: WriteRules::new(&request.sysfs_write)?,
            sysfs_write_granted: WriteRules::new(&allowed.sysfs_write)?,
            host_files: Both::new(&request.host_files, &allowed.host_files, &[])?,
            pci_driver_asked: WriteRules::new(&request.pci_driver)?,
            pci_driver_granted: WriteRules::new(&allowed.pci_driver)?,
            device_nodes: Both::new(&request.device_nodes, &allowed.device_nodes, POWERFUL_NODES)?,
            mounts: Both::new(&request.mounts, &allowed.mounts, &[])?,
            hooks: Both::new(&request.hooks, &allowed.hooks, &["/**"])?,
            env: Both::new(&request.env, &allowed.env, LOADING_ENV)?,
            net_devices: Both::new(&request.net_devices, &allowed.net_devices, &[])?,
            writable_mounts: PatternSet::new(&unrequested.writable_mounts)?,
            extended_resources: PatternSet::new(&unrequested.extended_resources)?,
            groups: unrequested.groups.clone(),
            rdt_classes: PatternSet::new(&unrequested.rdt_classes)?,
            annotations: PatternSet::new(&unrequested.annotations)?,
        })
    }

    /// Withdraws all capabilities at once.
    pub fn revoke(&self) {
        self.revoked.store(true, Ordering::Release);
    }

    fn stands(&self) -> bool {
        !self.revoked.load(Ordering::Acquire)
    }

    /// Returns whether a driver can change the node itself. Everything else that is granted is for containers, or only read.
    pub fn can_change_node(&self) -> bool {
        is_both(&self.sysfs_write_asked, &self.sysfs_write_granted)
            || is_both(&self.pci_driver_asked, &self.pci_driver_granted)
    }

    /// `path` is relative to `/sys` and normalised.
    pub fn allows_sysfs_read(&self, path: &str) -> bool {
        self.stands() && self.sysfs_read.allows(path)
    }

    /// Returns whether the grant names this path without wildcards, for a file that not every user may read.
    pub fn names_sysfs_read(&self, path: &str) -> bool {
        self.stands() && self.sysfs_read.allows_named(path, Naming::Path)
    }

    /// Returns whether everything that the glob may match may be read.
    pub fn allows_sysfs_glob(&self, glob: &str) -> bool {
        self.stands() && self.sysfs_read.allows_glob(glob)
    }

    pub fn allows_sysfs_write(&self, path: &str, value: &str) -> bool {
        self.stands()
            && self.sysfs_write_asked.allow(path, value)
            && self.sysfs_write_granted.allow(path, value)
    }

    /// `path` is absolute, on the node. The ceiling says how the grant has to name it: [`ceiling::host_file`].
    pub fn allows_host_file(&self, path: &str, naming: Naming) -> bool {
        self.stands() && self.host_files.allows_named(path, naming)
    }

    /// Returns whether everything that the glob may match may be read.
    pub fn allows_host_files_glob(&self, glob: &str) -> bool {
        self.stands() && self.host_files.allows_glob(glob)
    }

    /// Returns whether the PCI function may be bound to the kernel driver.
    pub fn allows_bind(&self, address: &str, kernel_driver: &str) -> bool {
        self.stands()
            && self.pci_driver_asked.allow(address, kernel_driver)
            && self.pci_driver_granted.allow(address, kernel_driver)
    }

    /// `path` is absolute, on the node. The ceiling says how the grant has to name it: [`ceiling::device_node`].
    pub fn allows_device_node(&self, path: &str, naming: Naming) -> bool {
        self.stands() && self.device_nodes.allows_named(path, naming)
    }

    /// Returns whether all nodes that the glob may match may be inspected.
    pub fn allows_device_nodes_glob(&self, glob: &str) -> bool {
        self.stands() && self.device_nodes.allows_glob(glob)
    }

    /// `path` is absolute, on the node. The ceiling says how the grant has to name it: [`ceiling::mount_source`].
    pub fn allows_mount(&self, path: &str, naming: Naming) -> bool {
        self.stands() && self.mounts.allows_named(path, naming)
    }

    /// Returns whether a container may write to a mount of this source. The ceiling says how the grant has to name it:
    /// [`ceiling::writable_source`].
    pub fn allows_writable_mount(&self, path: &str, naming: Naming) -> bool {
        self.stands() && self.writable_mounts.allows(path, naming)
    }

    pub fn allows_hook(&self, path: &str) -> bool {
        self.stands() && self.hooks.allows(path)
    }

    pub fn allows_env(&self, name: &str) -> bool {
        self.stands() && self.env.allows(name)
    }

    pub fn allows_net_device(&self, name: &str) -> bool {
        self.stands() && self.net_devices.allows(name)
    }

    /// Returns whether a pool may have this extended-resource name.
    pub fn allows_extended_resource(&self, name: &str) -> bool {
        self.stands() && self.extended_resources.matches(name)
    }

    pub fn allows_group(&self, group: u32) -> bool {
        self.stands() && self.groups.contains(&group)
    }

    pub fn allows_rdt_class(&self, name: &str) -> bool {
        self.stands() && self.rdt_classes.matches(name)
    }

    pub fn allows_annotation(&self, key: &str) -> bool {
        let is_granted = if RUNTIME_KEYS.matches(key) {
            self.annotations.names(key)
        } else {
            self.annotations.matches(key)
        };
        self.stands() && is_granted
    }
}

fn is_both(asked: &WriteRules, granted: &WriteRules) -> bool {
    !asked.0.is_empty() && !granted.0.is_empty()
}
