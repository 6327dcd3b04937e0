//! The operator's config, and the parameters of claims and classes.

use std::collections::BTreeSet;

use nodedock_sdk::{Claim, Problem, beginning, parse_json};
use serde::Deserialize;

use crate::device::Candidate;
use crate::kind::Kind;
use crate::text::matches;

/// The bound of a problem's message, which may quote any text of a config.
const MESSAGE_BYTES_MAX: usize = 1024;

/// Variables of containers have the name of the pool and of the device.
const POOL_NAME_BYTES_MAX: usize = 128;

/// Nodes that every container has, and directories that the runtime mounts.
const RESERVED: [&str; 14] = [
    "console", "core", "fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "tty",
    "urandom", "zero", "std",
];

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
    pub(crate) kind: Kind,
    /// A device is in the pool if it matches any of these; without any, every device of the kind matches.
    #[serde(default)]
    select: Vec<Selector>,
    #[serde(default)]
    pub(crate) name_by: NameBy,
    /// True if several claims may use a device at once.
    #[serde(default)]
    pub(crate) shared: bool,
    #[serde(default)]
    pub(crate) extended_resource: Option<String>,
    /// Path in the container of the device's main node, in addition to the node's own.
    #[serde(default)]
    pub(crate) container_path: Option<String>,
    /// Variable that has the path of the main node.
    #[serde(default)]
    pub(crate) env: Option<String>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum NameBy {
    #[default]
    Serial,
    Port,
    Node,
}

/// A device matches if it matches every field that is set. All fields but the first two are globs.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Selector {
    vendor: Option<String>,
    product: Option<String>,
    serial: Option<String>,
    port: Option<String>,
    manufacturer: Option<String>,
    model: Option<String>,
    driver: Option<String>,
}

impl Config {
    /// Parses a config and refuses one that cannot work on any node.
    pub(crate) fn read(text: &str) -> Result<Self, Problem> {
        let mut config: Config =
            parse_json("bad-config", "config of udev", text).map_err(bounded)?;
        let mut names = BTreeSet::new();
        for pool in &mut config.pools {
            if !names.insert(pool.name.clone()) {
                return Err(bad(&pool.name, "its name occurs twice"));
            }
            pool.check().map_err(|reason| bad(&pool.name, &reason))?;
        }
        Ok(config)
    }

    /// Returns the index of the first pool of the device's kind that it matches.
    pub(crate) fn pool_of(&self, candidate: &Candidate) -> Option<usize> {
        self.pools
            .iter()
            .position(|pool| pool.kind == candidate.kind && pool.fits(candidate))
    }
}

impl PoolConfig {
    /// Checks the pool and converts its IDs to the notation of sysfs.
    fn check(&mut self) -> Result<(), String> {
        if self.name.is_empty() || self.name != self.name.to_ascii_lowercase() {
            return Err("its name must be a DNS subdomain".to_owned());
        }
        if self.name.len() > POOL_NAME_BYTES_MAX {
            return Err(format!(
                "its name has {} bytes, at most {POOL_NAME_BYTES_MAX} are allowed",
                self.name.len()
            ));
        }
        if (self.kind, self.name_by) == (Kind::Usb, NameBy::Node) {
            return Err(
                "nameBy node: the node of a USB device has another number after every plug"
                    .to_owned(),
            );
        }
        if let Some(name) = self.env.as_ref().filter(|name| !is_env_name(name)) {
            return Err(format!(
                "env {name:?} is not UDEV_ and capital letters, digits and underscores"
            ));
        }
        if let Some(path) = &self.container_path {
            check_container_path(path)?;
        }
        self.select.iter_mut().try_for_each(Selector::check)
    }

    fn fits(&self, candidate: &Candidate) -> bool {
        self.select.is_empty() || self.select.iter().any(|selector| selector.fits(candidate))
    }
}

impl Selector {
    fn check(&mut self) -> Result<(), String> {
        for id in [&mut self.vendor, &mut self.product].into_iter().flatten() {
            *id = id.to_ascii_lowercase();
            if id.len() != 4 || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(format!("{id:?} is not 4 hex digits"));
            }
        }
        let globs = [
            &self.serial,
            &self.port,
            &self.manufacturer,
            &self.model,
            &self.driver,
        ];
        if globs.into_iter().flatten().any(String::is_empty) {
            return Err("an empty text matches no device: use * or leave the key out".to_owned());
        }
        Ok(())
    }

    fn fits(&self, candidate: &Candidate) -> bool {
        let usb = candidate.usb();
        let path = usb.map_or_else(|| candidate.path(), |usb| usb.path.clone());
        is_allowed(&self.vendor, usb.map(|usb| &usb.vendor))
            && is_allowed(&self.product, usb.map(|usb| &usb.product))
            && is_matched(&self.serial, usb.and_then(|usb| usb.serial.as_ref()))
            && is_matched(
                &self.manufacturer,
                usb.and_then(|usb| usb.manufacturer.as_ref()),
            )
            && is_matched(&self.model, usb.and_then(|usb| usb.model.as_ref()))
            && is_matched(&self.driver, candidate.driver.as_ref())
            && (is_matched(&self.port, Some(&path))
                || is_matched(&self.port, Some(&candidate.kernel_path())))
    }
}

fn is_matched(wanted: &Option<String>, is: Option<&String>) -> bool {
    wanted
        .as_ref()
        .is_none_or(|wanted| is.is_some_and(|is| matches(wanted, is)))
}

fn is_allowed(wanted: &Option<String>, is: Option<&String>) -> bool {
    wanted.is_none() || wanted.as_ref() == is
}

/// Parameters of a claim or class.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Parameters {
    #[serde(default)]
    pub(crate) container_path: Option<String>,
}

impl Parameters {
    pub(crate) fn read(text: &str) -> Result<Self, Problem> {
        parse_json::<Self>("bad-parameters", "parameters of udev", text)
            .and_then(Self::checked)
            .map_err(bounded)
    }

    /// Returns the parameters of a class with those of the claim over them.
    pub(crate) fn of(claim: &Claim, request: &str) -> Result<Self, Problem> {
        let merged = claim
            .merge_parameters::<Self>(request)
            .map(Option::unwrap_or_default);
        merged.and_then(Self::checked).map_err(bounded)
    }

    fn checked(self) -> Result<Self, Problem> {
        if let Some(path) = &self.container_path {
            check_container_path(path)
                .map_err(|reason| Problem::invalid("bad-parameters", reason))?;
        }
        Ok(self)
    }
}

fn is_env_name(name: &str) -> bool {
    name.strip_prefix("UDEV_").is_some_and(|rest| {
        !rest.is_empty()
            && rest
                .bytes()
                .all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_')
    }) && name.len() <= 64
}

fn check_container_path(path: &str) -> Result<(), String> {
    let Some(below) = path
        .strip_prefix("/dev/")
        .filter(|below| below.split('/').all(is_plain))
    else {
        return Err(format!(
            "containerPath {path:?} is not a path below /dev of letters, digits, '.', '_' and '-'"
        ));
    };
    if path.len() > 255 {
        return Err(format!(
            "containerPath has {} bytes, at most 255 are allowed",
            path.len()
        ));
    }
    let first = below.split('/').next().unwrap_or(below);
    if RESERVED
        .into_iter()
        .any(|name| first == name || (name == "std" && first.starts_with(name)))
    {
        return Err(format!(
            "containerPath {path:?} is a path of the container's own /dev"
        ));
    }
    Ok(())
}

fn is_plain(segment: &str) -> bool {
    !matches!(segment, "" | "." | "..")
        && segment
            .bytes()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-'))
}

fn bad(pool: &str, reason: &str) -> Problem {
    bounded(Problem::invalid(
        "bad-config",
        format!("config of udev: pool {pool:?}: {reason}"),
    ))
}

fn bounded(problem: Problem) -> Problem {
    Problem {
        message: beginning(&problem.message, MESSAGE_BYTES_MAX).to_owned(),
        ..problem
    }
}
