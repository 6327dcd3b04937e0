//! Capabilities that a driver requests, that the operator grants, and that are in effect: the intersection of both.
//!
//! Given the request (from `describe`) and the text of `NAME.grant.yaml`, it returns the difference as text and compiled matchers. The
//! host's own ceiling, the lists of what no driver may use, is beside the code of the capabilities.

pub mod ceiling;
mod effective;
mod limits;
pub mod pattern;
mod yaml;

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;
use serde::Deserialize;
use serde_saphyr::Spanned;

pub use self::effective::{Effective, EffectiveError};
pub use self::limits::{LimitKey, LimitValues, Limits, LogRates, requested_limits};
pub use self::pattern::Naming;
pub use self::yaml::to_yaml;

use self::ceiling::LOADING_ENV;
use self::pattern::{PatternSet, covers, is_literal};

use crate::DriverName;
use crate::limit;
use crate::side_file::{self, SideFileError, expect};

/// Schema of a grant file.
pub const GRANT_API_VERSION: &str = "nodedock.dev/v1";
pub const GRANT_KIND: &str = "DriverGrant";

/// Nodes of `misc` that many drivers request: the exact path grants them, as every node of that subsystem, and a driver that requests
/// one is blocked without it.
const POWERFUL_NODES: &[&str] = &[
    "/dev/kvm",
    "/dev/net/tun",
    "/dev/vhost-*",
    "/dev/loop-control",
    "/dev/btrfs-control",
];

/// A file below `/sys` and the values that may be written to it, or PCI functions and the kernel drivers that they may be bound to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ValueGrant {
    pub glob: String,
    /// Regular expression that the whole value must match.
    pub pattern: String,
}

/// Requested or granted capabilities: globs. Paths below `/sys` are relative to it, the others are absolute.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Capabilities {
    pub sysfs_read: Vec<String>,
    pub sysfs_write: Vec<ValueGrant>,
    pub host_files: Vec<String>,
    /// Globs of addresses, and patterns of kernel drivers.
    pub pci_driver: Vec<ValueGrant>,
    pub device_nodes: Vec<String>,
    pub mounts: Vec<String>,
    pub hooks: Vec<String>,
    pub env: Vec<String>,
    pub net_devices: Vec<String>,
}

/// Capabilities that a grant gives and the contract has no list to request: a driver requests them by what it returns.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Unrequested {
    /// Globs of the extended-resource names of pools.
    pub extended_resources: Vec<String>,
    /// Additional groups of containers.
    pub groups: Vec<u32>,
    /// Globs of classes of service (Intel RDT).
    pub rdt_classes: Vec<String>,
    /// Keys of annotations; a glob has a prefix that ends in `/`.
    pub annotations: Vec<String>,
    /// Globs of the sources that containers may write to.
    pub writable_mounts: Vec<String>,
}

/// The operator's grant for one driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Grant {
    /// The only name that the driver may have.
    pub driver: Option<DriverName>,
    pub allowed: Capabilities,
    pub unrequested: Unrequested,
    pub limits: LimitValues,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct GrantFile {
    api_version: Spanned<String>,
    kind: Spanned<String>,
    #[serde(default)]
    driver: Option<Spanned<String>>,
    #[serde(default)]
    extended_resources: Vec<Spanned<String>>,
    #[serde(default)]
    groups: Vec<Spanned<u32>>,
    #[serde(default)]
    rdt_classes: Vec<Spanned<String>>,
    #[serde(default)]
    annotations: Vec<Spanned<String>>,
    #[serde(default)]
    sysfs_read: Vec<Spanned<String>>,
    #[serde(default)]
    sysfs_write: Vec<ValueEntry>,
    #[serde(default)]
    host_files: Vec<Spanned<String>>,
    #[serde(default)]
    pci_driver: Vec<BindEntry>,
    #[serde(default)]
    device_nodes: Vec<Spanned<String>>,
    #[serde(default)]
    mounts: Vec<Spanned<String>>,
    #[serde(default)]
    hooks: Vec<Spanned<String>>,
    #[serde(default)]
    env: Vec<Spanned<String>>,
    #[serde(default)]
    net_devices: Vec<Spanned<String>>,
    #[serde(default)]
    limits: BTreeMap<LimitKey, Option<Spanned<u32>>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ValueEntry {
    glob: Spanned<String>,
    pattern: Spanned<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct BindEntry {
    functions: Spanned<String>,
    drivers: Spanned<String>,
}

impl Grant {
    /// The empty grant of a driver without a grant file, which may only log.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Parses a grant file; an error names line and column.
    pub fn parse(text: &str) -> Result<Self, SideFileError> {
        let file: GrantFile = side_file::parse(text)?;
        file.check()
    }
}

impl GrantFile {
    fn check(self) -> Result<Grant, SideFileError> {
        expect(&self.api_version, "apiVersion", GRANT_API_VERSION)?;
        expect(&self.kind, "kind", GRANT_KIND)?;
        let (mounts, writable_mounts) = mounts(self.mounts)?;
        let unrequested = Unrequested {
            extended_resources: globs(
                "extendedResources",
                self.extended_resources,
                Shape::Resource,
            )?,
            groups: groups(self.groups)?,
            rdt_classes: globs("rdtClasses", self.rdt_classes, Shape::Name)?,
            annotations: globs("annotations", self.annotations, Shape::Annotation)?,
            writable_mounts,
        };
        let allowed = Capabilities {
            sysfs_read: globs("sysfsRead", self.sysfs_read, Shape::Relative)?,
            sysfs_write: self
                .sysfs_write
                .into_iter()
                .map(ValueEntry::check)
                .collect::<Result<_, _>>()?,
            host_files: globs("hostFiles", self.host_files, Shape::Absolute)?,
            pci_driver: self
                .pci_driver
                .into_iter()
                .map(BindEntry::check)
                .collect::<Result<_, _>>()?,
            device_nodes: globs("deviceNodes", self.device_nodes, Shape::Absolute)?,
            mounts,
            hooks: globs("hooks", self.hooks, Shape::Path)?,
            env: globs("env", self.env, Shape::Variable)?,
            net_devices: globs("netDevices", self.net_devices, Shape::Name)?,
        };
        let driver = self.driver.map(driver_name).transpose()?;
        Ok(Grant {
            driver,
            allowed,
            unrequested,
            limits: limits::check(self.limits)?,
        })
    }
}

fn driver_name(entry: Spanned<String>) -> Result<DriverName, SideFileError> {
    DriverName::new(&entry.value)
        .map_err(|error| SideFileError::at(&entry, format!("driver: {error}")))
}

/// The globs of all sources, and of those that containers may write to: `/var/lib/acme/*:rw`.
fn mounts(mut entries: Vec<Spanned<String>>) -> Result<(Vec<String>, Vec<String>), SideFileError> {
    let mut writable = Vec::new();
    for entry in &mut entries {
        let Some((source, access)) = entry.value.rsplit_once(':') else {
            continue;
        };
        match access {
            "ro" | "rw" => {
                let source = source.to_owned();
                writable.extend((access == "rw").then(|| source.clone()));
                entry.value = source;
            }
            other if other.chars().all(|c| c.is_ascii_alphabetic()) => {
                let why = format!(
                    "mounts: {:?} ends in neither \":ro\" nor \":rw\"",
                    entry.value
                );
                return Err(SideFileError::at(entry, why));
            }
            // A part of the path, as in an address.
            _ => {}
        }
    }
    Ok((globs("mounts", entries, Shape::Absolute)?, writable))
}

fn groups(entries: Vec<Spanned<u32>>) -> Result<Vec<u32>, SideFileError> {
    at_most("groups", &entries)?;
    match entries.iter().find(|entry| entry.value == 0) {
        Some(root) => Err(SideFileError::at(
            root,
            "groups: the group of root is never given".to_owned(),
        )),
        None => Ok(entries.into_iter().map(|entry| entry.value).collect()),
    }
}

impl ValueEntry {
    fn check(self) -> Result<ValueGrant, SideFileError> {
        Shape::Attribute
            .check(&self.glob.value)
            .map_err(|why| SideFileError::at(&self.glob, why))?;
        whole_value(&self.pattern.value).map_err(|why| SideFileError::at(&self.pattern, why))?;
        Ok(ValueGrant {
            glob: self.glob.value,
            pattern: self.pattern.value,
        })
    }
}

impl BindEntry {
    fn check(self) -> Result<ValueGrant, SideFileError> {
        Shape::Name
            .check(&self.functions.value)
            .map_err(|why| SideFileError::at(&self.functions, why))?;
        whole_value(&self.drivers.value).map_err(|why| SideFileError::at(&self.drivers, why))?;
        Ok(ValueGrant {
            glob: self.functions.value,
            pattern: self.drivers.value,
        })
    }
}

pub(crate) fn globs(
    key: &str,
    entries: Vec<Spanned<String>>,
    shape: Shape,
) -> Result<Vec<String>, SideFileError> {
    at_most(key, &entries)?;
    entries
        .into_iter()
        .map(|entry| match shape.check(&entry.value) {
            Ok(()) => Ok(entry.value),
            Err(why) => Err(SideFileError::at(&entry, format!("{key}: {why}"))),
        })
        .collect()
}

fn at_most<T>(key: &str, entries: &[Spanned<T>]) -> Result<(), SideFileError> {
    let max = limit::GRANT_ENTRIES_MAX;
    let beyond = entries.get(max);
    beyond.map_or(Ok(()), |beyond| {
        Err(SideFileError::at(
            beyond,
            format!("{key} has more than {max} entries"),
        ))
    })
}

/// Form of the globs of a list.
#[derive(Clone, Copy)]
pub(crate) enum Shape {
    Relative,
    Absolute,
    /// Absolute and without wildcards.
    Path,
    Name,
    /// Relative, with a last segment without wildcards.
    Attribute,
    /// A name without wildcards, or with a prefix that ends in `_`.
    Variable,
    /// A key without wildcards, or with a prefix that ends in `/`.
    Annotation,
    /// `DOMAIN/NAME`, in which both may have wildcards.
    Resource,
}

/// A prefix of its own before the first wildcard: `ACME_*`, and neither `ACME*` nor `_*`.
fn is_variable_prefix(glob: &str) -> bool {
    let prefix = pattern::literal_prefix(glob);
    prefix.len() > 1 && prefix.ends_with('_')
}

impl Shape {
    fn check(self, text: &str) -> Result<(), String> {
        pattern::compile(text).map_err(|error| format!("{text:?} is not a glob: {error}"))?;
        match self {
            Self::Relative | Self::Attribute if text.starts_with('/') => {
                Err(format!("{text:?} must be relative to /sys"))
            }
            Self::Absolute | Self::Path if !text.starts_with('/') => {
                Err(format!("{text:?} must be absolute"))
            }
            Self::Path if !is_literal(text) => {
                Err(format!("{text:?} must be one path, without wildcards"))
            }
            Self::Attribute if !is_literal(text.rsplit('/').next().unwrap_or(text)) => {
                Err(format!(
                    "{text:?} must name the file that is written: its last segment has no wildcards"
                ))
            }
            Self::Variable if !is_literal(text) && !is_variable_prefix(text) => Err(format!(
                "{text:?} needs a prefix that ends in '_' before the first wildcard, such as \"ACME_*\": any other variable is granted by its exact name"
            )),
            Self::Annotation
                if !is_literal(text) && !pattern::literal_prefix(text).ends_with('/') =>
            {
                Err(format!(
                    "{text:?} needs a prefix that ends in '/' before the first wildcard, such as \"acme.com/*\": any other annotation is granted by its exact key"
                ))
            }
            Self::Resource if text.split('/').count() != 2 => Err(format!(
                "{text:?} must be DOMAIN/NAME, such as \"acme.com/*\""
            )),
            Self::Name | Self::Variable if text.contains('/') => {
                Err(format!("{text:?} must not contain '/'"))
            }
            _ => Ok(()),
        }
    }
}

impl Capabilities {
    /// Checks a driver's requested capabilities; the error names the list and the entry.
    pub fn check(&self) -> Result<(), String> {
        let lists = [
            ("sysfs-read", &self.sysfs_read, Shape::Relative),
            ("host-files", &self.host_files, Shape::Absolute),
            ("device-nodes", &self.device_nodes, Shape::Absolute),
            ("mounts", &self.mounts, Shape::Absolute),
            ("hooks", &self.hooks, Shape::Path),
            ("env", &self.env, Shape::Variable),
            ("net-devices", &self.net_devices, Shape::Name),
        ];
        for (key, entries, shape) in lists {
            count(key, entries.len())?;
            entries
                .iter()
                .try_for_each(|entry| shape.check(entry).map_err(|why| format!("{key}: {why}")))?;
        }
        let pairs = [
            ("sysfs-write", &self.sysfs_write, Shape::Attribute),
            ("pci-driver", &self.pci_driver, Shape::Name),
        ];
        for (key, entries, shape) in pairs {
            count(key, entries.len())?;
            for entry in entries {
                shape
                    .check(&entry.glob)
                    .map_err(|why| format!("{key}: {why}"))?;
                whole_value(&entry.pattern).map_err(|why| format!("{key}: {why}"))?;
            }
        }
        Ok(())
    }
}

fn count(key: &str, entries: usize) -> Result<(), String> {
    if entries <= limit::GRANT_ENTRIES_MAX {
        return Ok(());
    }
    Err(format!(
        "{key} has {entries} entries, at most {} are allowed",
        limit::GRANT_ENTRIES_MAX
    ))
}

/// A pattern on a value, always anchored at both ends.
pub(crate) fn whole_value(pattern: &str) -> Result<Regex, String> {
    if pattern.is_empty() || pattern.len() > limit::GRANT_ENTRY_BYTES_MAX {
        let max = limit::GRANT_ENTRY_BYTES_MAX;
        return Err(format!(
            "the pattern has {} bytes, 1 to {max} are allowed",
            pattern.len()
        ));
    }
    // Compiled alone first: `1)|(?:.*` would end the group that anchors it.
    let built = compile(pattern).and_then(|_| compile(&format!("^(?:{pattern})$")));
    built.map_err(|error| {
        // The last line has the error; the lines before it mark the position.
        let why = error.to_string();
        format!(
            "{pattern:?} is not a regular expression: {}",
            why.lines().last().unwrap_or_default()
        )
    })
}

fn compile(text: &str) -> Result<Regex, regex::Error> {
    regex::RegexBuilder::new(text).size_limit(1 << 20).build()
}

/// Returns the requested capabilities beyond the grant, one readable line each: `sysfsRead: class/net/*`.
pub fn missing(request: &Capabilities, limits: &LimitValues, grant: &Grant) -> Vec<String> {
    let allowed = &grant.allowed;
    let mut lines = Vec::new();
    let mut list =
        |key: &str, asked: &[String], granted: &[String], naming: &dyn Fn(&str) -> Naming| {
            for entry in asked {
                let named = naming(entry);
                let is_covered = granted.iter().any(|granted| match named {
                    Naming::Path => granted == entry,
                    Naming::Directory(segments) => {
                        pattern::literal_segments(granted) >= segments && covers(granted, entry)
                    }
                    Naming::Glob => covers(granted, entry),
                });
                if !is_covered {
                    lines.push(format!("{key}: {entry}"));
                }
            }
        };

    list(
        "sysfsRead",
        &request.sysfs_read,
        &allowed.sysfs_read,
        &|_| Naming::Glob,
    );
    list(
        "hostFiles",
        &request.host_files,
        &allowed.host_files,
        // What no grant allows is refused when it is used.
        &|path| ceiling::host_file(path).unwrap_or(Naming::Glob),
    );
    list(
        "deviceNodes",
        &request.device_nodes,
        &allowed.device_nodes,
        &naming_of(POWERFUL_NODES),
    );
    list("mounts", &request.mounts, &allowed.mounts, &mount_naming);
    list("hooks", &request.hooks, &allowed.hooks, &|_| Naming::Path);
    list("env", &request.env, &allowed.env, &naming_of(LOADING_ENV));
    list(
        "netDevices",
        &request.net_devices,
        &allowed.net_devices,
        &|_| Naming::Glob,
    );
    let pairs = [
        ("sysfsWrite", &request.sysfs_write, &allowed.sysfs_write),
        ("pciDriver", &request.pci_driver, &allowed.pci_driver),
    ];
    for (key, asked, granted) in pairs {
        for asked in asked {
            let mut same = granted
                .iter()
                .filter(|granted| granted.pattern == asked.pattern);
            if !same.any(|granted| covers(&granted.glob, &asked.glob)) {
                lines.push(format!("{key}: {} with {}", asked.glob, asked.pattern));
            }
        }
    }
    lines.extend(limits::beyond(limits, &grant.limits));
    lines
}

/// Returns the rules of a list that cover none of the paths, names and globs that a driver read.
pub fn unused<'a>(rules: &'a [String], read: &BTreeSet<String>) -> Vec<&'a str> {
    rules
        .iter()
        .map(String::as_str)
        .filter(|rule| !read.iter().any(|text| covers(rule, text)))
        .collect()
}

fn mount_naming(path: &str) -> Naming {
    match ceiling::mount_source(path) {
        // A glob may match paths that need no exact name beside such that do.
        Some(Naming::Path) if !is_literal(path) => Naming::Glob,
        naming => naming.unwrap_or(Naming::Glob),
    }
}

/// Returns the naming of texts of which those that match one of the globs need their exact name.
fn naming_of(names: &'static [&'static str]) -> impl Fn(&str) -> Naming {
    let names = PatternSet::new(names.iter().copied()).expect("the names above are globs");
    move |text: &str| match names.matches(text) {
        true => Naming::Path,
        false => Naming::Glob,
    }
}

#[cfg(test)]
mod tests;
