//! Adapters: what an operator says about the DRA driver that a device plugin becomes, and the names of its devices. Pure.
//!
//! A device plugin's IDs are any text, and DRA's device names are DNS labels. [`device_name`] encodes an ID so that no two have the same
//! name, and [`device_id`] decodes it.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::str::FromStr;

use regex::Regex;
use semver::Version;
use serde::{Deserialize, Serialize};
use serde_saphyr::Spanned;
use sha2::{Digest, Sha256};

use super::grant::pattern::{PatternError, PatternSet};
use super::grant::{Shape, globs, whole_value};
use super::rule::is_unprintable;
use super::side_file::{self, SideFileError, expect};
use super::{
    AttributeValue, Device, DeviceName, DriverName, ExtendedResource, NameError, PluginDevice,
    PoolName, QualifiedName, limit,
};

/// Schema of an adapter file.
pub const ADAPTER_API_VERSION: &str = "nodedock.dev/v1";
pub const ADAPTER_KIND: &str = "DevicePluginAdapter";

/// The attribute with the plugin's own ID of a device, if the API has room for it.
pub const DEVICE_ID_ATTRIBUTE: &str = "nodedock.dev/deviceID";

/// Rules of an adapter, and bytes of each template in one.
const RULES_MAX: usize = 32;
const RULE_BYTES_MAX: usize = 1024;

/// Begins the name of an ID that is too long to be encoded: `x---` and digits of its hash. An encoded ID never has three dashes there.
const HASHED: &str = "x---";
/// Digits of the hash: 160 bits.
const HASH_DIGITS: usize = 40;
const NAME_BYTES_MAX: usize = 63;

/// An operator's description of a device plugin's DRA driver.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Adapter {
    /// The extended resource under which the plugin registers.
    pub resource: ExtendedResource,
    /// The driver that it becomes. Other drivers cannot have the name.
    pub driver: DriverName,
    pub pool: PoolName,
    /// True if the scheduler allocates its devices by ResourceSlices, unless an operator has decided otherwise since.
    pub enabled: bool,
    pub rules: Vec<AttributeRule>,
    /// Globs of the device nodes and mounts that the plugin may give to containers; `None`: all that it answers with, as a kubelet has it.
    pub paths: Option<PathPatterns>,
}

/// Globs of absolute paths.
#[derive(Debug, Clone)]
pub struct PathPatterns {
    texts: Vec<String>,
    compiled: PatternSet,
}

impl PathPatterns {
    pub fn new(texts: Vec<String>) -> Result<Self, PatternError> {
        let compiled = PatternSet::new(texts.clone())?;
        Ok(Self { texts, compiled })
    }

    pub fn texts(&self) -> &[String] {
        &self.texts
    }

    pub fn matches(&self, path: &str) -> bool {
        self.compiled.matches(path)
    }
}

impl PartialEq for PathPatterns {
    fn eq(&self, other: &Self) -> bool {
        self.texts == other.texts
    }
}

impl Eq for PathPatterns {}

/// Attributes of the devices whose ID matches a pattern. Its serialized form is the entry of the file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(try_from = "RuleEntry", into = "RuleEntry")]
pub struct AttributeRule {
    entry: RuleEntry,
    pattern: Pattern,
    attributes: BTreeMap<QualifiedName, AttributeSource>,
}

/// Matched against the whole ID.
#[derive(Debug, Clone)]
struct Pattern(Regex);

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

impl Eq for Pattern {}

/// The source of a value. Groups of the pattern, such as `${address}`, are replaced by what they matched.
#[derive(Debug, Clone, PartialEq, Eq)]
enum AttributeSource {
    Value(ValueType, String),
    /// A file below `/sys`.
    Sysfs(ValueType, String),
}

/// The type of an attribute in the API.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "lowercase")]
enum ValueType {
    #[default]
    String,
    Int,
    Bool,
    Version,
}

/// An adapter as the config and adapter files have it; a file has `apiVersion` and `kind` as well.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct AdapterFile {
    api_version: Option<Spanned<String>>,
    kind: Option<Spanned<String>>,
    resource: Spanned<String>,
    driver: Spanned<String>,
    pool: Option<Spanned<String>>,
    #[serde(default = "yes")]
    enabled: bool,
    #[serde(default)]
    devices: Vec<Spanned<RuleEntry>>,
    paths: Option<Vec<Spanned<String>>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RuleEntry {
    #[serde(rename = "match", skip_serializing_if = "Option::is_none")]
    pattern: Option<String>,
    /// An identity string, such as `pci:${address}`.
    #[serde(skip_serializing_if = "Option::is_none")]
    identity: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    attributes: BTreeMap<String, SourceEntry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct SourceEntry {
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    sysfs: Option<String>,
    #[serde(default, rename = "type")]
    kind: ValueType,
}

fn yes() -> bool {
    true
}

impl Adapter {
    /// Parses an adapter file; an error names line and column.
    pub fn parse(text: &str) -> Result<Self, SideFileError> {
        let file: AdapterFile = side_file::parse(text)?;
        for (entry, key, wanted) in [
            (&file.api_version, "apiVersion", ADAPTER_API_VERSION),
            (&file.kind, "kind", ADAPTER_KIND),
        ] {
            expect(
                entry.as_ref().ok_or_else(|| {
                    SideFileError::Whole(format!("{key} is missing, and {wanted:?} is wanted"))
                })?,
                key,
                wanted,
            )?;
        }
        file.check()
    }

    /// Returns the pool's devices by the plugin's list, with what `/sys` says; of IDs that have one name, the first in the list. Fails if
    /// `read` fails: `None` is what the node does not have.
    pub fn devices<E>(
        &self,
        listed: &BTreeMap<String, PluginDevice>,
        read: impl Fn(&str) -> Result<Option<String>, E>,
    ) -> Result<BTreeMap<DeviceName, Device>, E> {
        let mut devices = BTreeMap::new();
        for device in listed.values() {
            if let Entry::Vacant(entry) = devices.entry(device_name(&device.id)) {
                entry.insert(self.device(device, &read)?);
            }
        }
        Ok(devices)
    }

    /// Returns the identity strings of the device with an ID. They depend on the ID alone, so a device that no list has any more has them too.
    pub fn identity(&self, id: &str) -> Vec<String> {
        let found = self.rules.iter().filter_map(|rule| {
            let (template, groups) = (
                rule.entry.identity.as_deref()?,
                rule.pattern.0.captures(id)?,
            );
            Some(expanded(&groups, template)).filter(|text| is_identity(text))
        });
        let found: BTreeSet<_> = found.collect();
        found.into_iter().take(limit::IDENTITIES_MAX).collect()
    }

    fn device<E>(
        &self,
        listed: &PluginDevice,
        read: impl Fn(&str) -> Result<Option<String>, E>,
    ) -> Result<Device, E> {
        let mut device = Device {
            numa_nodes: listed.numa_nodes.clone(),
            identity: self.identity(&listed.id),
            ..Device::default()
        };
        for rule in &self.rules {
            let Some(groups) = rule.pattern.0.captures(&listed.id) else {
                continue;
            };
            for (name, source) in &rule.attributes {
                let (kind, text) = match source {
                    AttributeSource::Value(kind, template) => {
                        (kind, Some(expanded(&groups, template)))
                    }
                    AttributeSource::Sysfs(kind, template) => {
                        (kind, read(&expanded(&groups, template))?)
                    }
                };
                // What the node does not have is left out, and so is what is not of the type.
                let value = text.and_then(|text| kind.value(text.trim()));
                if let Some(value) =
                    value.filter(|_| device.attributes.len() < limit::ATTRIBUTES_MAX)
                {
                    device.attributes.entry(name.clone()).or_insert(value);
                }
            }
        }
        let id = ValueType::String.value(&listed.id);
        if let Some(id) = id.filter(|_| device.attributes.len() < limit::ATTRIBUTES_MAX) {
            let name = QualifiedName::new(DEVICE_ID_ATTRIBUTE).expect("the name is one of the API");
            device.attributes.entry(name).or_insert(id);
        }
        Ok(device)
    }
}

fn expanded(groups: &regex::Captures<'_>, template: &str) -> String {
    let mut text = String::new();
    groups.expand(template, &mut text);
    text
}

impl ValueType {
    /// `None`: the text is not of the type, or the API has no room for it.
    fn value(self, text: &str) -> Option<AttributeValue> {
        match self {
            Self::String => {
                let is_allowed = !text.is_empty() && text.len() <= limit::ATTRIBUTE_TEXT_MAX;
                is_allowed.then(|| AttributeValue::Text(text.to_owned()))
            }
            Self::Int => text.parse().ok().map(AttributeValue::Int),
            Self::Bool => text.parse().ok().map(AttributeValue::Bool),
            Self::Version => {
                let fits = text.len() <= limit::ATTRIBUTE_TEXT_MAX;
                Version::parse(text)
                    .ok()
                    .filter(|_| fits)
                    .map(AttributeValue::Version)
            }
        }
    }
}

fn is_identity(text: &str) -> bool {
    let is_line = !text.is_empty()
        && text.len() <= limit::IDENTITY_BYTES_MAX
        && !text.contains(is_unprintable);
    // Those are the host's own keys.
    is_line && !text.starts_with(crate::DEVICES) && !text.starts_with(crate::NODE_KEY)
}

impl AdapterFile {
    fn check(self) -> Result<Adapter, SideFileError> {
        let pool = match &self.pool {
            Some(pool) => name(pool)?,
            None => plugin_pool(),
        };
        if let Some(beyond) = self.devices.get(RULES_MAX) {
            return Err(SideFileError::at(
                beyond,
                format!("devices has more than {RULES_MAX} entries"),
            ));
        }
        let rules = self.devices.iter().map(|entry| {
            entry
                .value
                .clone()
                .check()
                .map_err(|why| SideFileError::at(entry, format!("devices: {why}")))
        });
        let paths = self
            .paths
            .map(|entries| globs("paths", entries, Shape::Absolute))
            .transpose()?;
        let paths = paths.map(PathPatterns::new).transpose();
        Ok(Adapter {
            paths: paths.map_err(|error| SideFileError::Whole(error.to_string()))?,
            resource: name(&self.resource)?,
            pool,
            enabled: self.enabled,
            rules: rules.collect::<Result<_, _>>()?,
            driver: name(&self.driver)?,
        })
    }
}

impl RuleEntry {
    fn check(self) -> Result<AttributeRule, String> {
        let pattern = self.pattern.as_deref().unwrap_or("(?s).*");
        let pattern = whole_value(pattern).map_err(|why| format!("match: {why}"))?;
        if self.identity.is_none() && self.attributes.is_empty() {
            return Err("a rule has an identity, attributes, or both".to_owned());
        }
        if let Some(identity) = &self.identity {
            template("identity", identity, &pattern)?;
        }
        let attributes = self
            .attributes
            .iter()
            .map(|(key, entry)| attribute(key, entry, &pattern))
            .collect::<Result<_, _>>()?;
        Ok(AttributeRule {
            entry: self,
            attributes,
            pattern: Pattern(pattern),
        })
    }
}

fn attribute(
    key: &str,
    entry: &SourceEntry,
    pattern: &Regex,
) -> Result<(QualifiedName, AttributeSource), String> {
    let name = QualifiedName::new(key).map_err(|error| format!("attributes: {error}"))?;
    let source = match (&entry.value, &entry.sysfs) {
        (Some(value), None) => AttributeSource::Value(entry.kind, value.clone()),
        (None, Some(path)) if path.starts_with('/') => {
            return Err(format!("attributes: {key}: sysfs is relative to /sys"));
        }
        (None, Some(path)) => AttributeSource::Sysfs(entry.kind, path.clone()),
        _ => {
            return Err(format!(
                "attributes: {key} has either a value or a file below sysfs"
            ));
        }
    };
    let (AttributeSource::Value(_, text) | AttributeSource::Sysfs(_, text)) = &source;
    template(&format!("attributes: {key}"), text, pattern)?;
    Ok((name, source))
}

impl TryFrom<RuleEntry> for AttributeRule {
    type Error = String;

    fn try_from(entry: RuleEntry) -> Result<Self, String> {
        entry.check()
    }
}

impl From<AttributeRule> for RuleEntry {
    fn from(rule: AttributeRule) -> Self {
        rule.entry
    }
}

fn bounded(what: &str, text: &str) -> Result<(), String> {
    let fits = text.len() <= RULE_BYTES_MAX;
    fits.then_some(())
        .ok_or_else(|| format!("{what} has more than {RULE_BYTES_MAX} bytes"))
}

/// Checks that each group that a template names is one of the pattern.
fn template(what: &str, text: &str, pattern: &Regex) -> Result<(), String> {
    bounded(what, text)?;
    let named: BTreeSet<&str> = pattern.capture_names().flatten().collect();
    let reference = Regex::new(r"\$(?:\{([^}]*)\}|(\w+)|\$)").expect("the pattern is valid");
    for found in reference.captures_iter(text) {
        let Some(group) = found.get(1).or(found.get(2)).map(|group| group.as_str()) else {
            continue;
        };
        let is_number = group
            .parse::<usize>()
            .is_ok_and(|number| number < pattern.captures_len());
        if !named.contains(group) && !is_number {
            return Err(format!("{what}: match has no group {group:?}"));
        }
    }
    Ok(())
}

fn name<T: FromStr<Err = NameError>>(entry: &Spanned<String>) -> Result<T, SideFileError> {
    entry
        .value
        .parse()
        .map_err(|error: NameError| SideFileError::at(entry, error.to_string()))
}

impl<'de> Deserialize<'de> for Adapter {
    /// Reads an entry of the config, without `apiVersion` and `kind`.
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let file = AdapterFile::deserialize(deserializer)?;
        file.check().map_err(serde::de::Error::custom)
    }
}

/// The domain of the drivers of device plugins without an adapter, which no driver of a vendor has.
const PLUGIN_DOMAIN: &str = "plugin.nodedock.dev";

/// The pool of such a driver, and of an adapter whose file names none.
pub fn plugin_pool() -> PoolName {
    PoolName::new("devices").expect("it is a DNS label")
}

/// Returns the driver of a device plugin that has no adapter: `example.com/gpu` has `gpu.example.com.plugin.nodedock.dev`. A resource whose name
/// cannot be a part of a driver's has a hash instead.
pub fn plugin_driver(resource: &ExtendedResource) -> DriverName {
    let text = resource.as_str();
    let (domain, name) = text.split_once('/').unwrap_or(("", text));
    let plain = format!("{name}.{domain}.{PLUGIN_DOMAIN}");
    let is_plain = !text.contains('_') && !text.contains(char::is_uppercase);
    DriverName::new(plain)
        .ok()
        .filter(|_| is_plain)
        .unwrap_or_else(|| {
            let digits = hex::encode(Sha256::digest(text));
            DriverName::new(format!("r--{}.{PLUGIN_DOMAIN}", &digits[..HASH_DIGITS]))
                .expect("it is short and of digits")
        })
}

/// Returns whether a name is that of the driver of a device plugin without an adapter.
pub fn is_plugin_driver(name: &DriverName) -> bool {
    name.as_str()
        .strip_suffix(PLUGIN_DOMAIN)
        .is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Returns the device's name for an ID: the ID itself if it is a DNS label without two dashes in a row. Other bytes are `--` and two hex
/// digits, and a name that would begin with a dash begins with `x`. A name that would be too long is `x---` and a hash.
pub fn device_name(id: &str) -> DeviceName {
    let bytes = id.as_bytes();
    let mut name = String::new();
    for (index, byte) in bytes.iter().enumerate() {
        // An `x` before an escape would look like the one that keeps a name from beginning with a dash.
        let looks_escaped = index == 0 && *byte == b'x' && bytes.len() > 1 && !is_kept(bytes, 1);
        if is_kept(bytes, index) && !looks_escaped {
            name.push(char::from(*byte));
        } else {
            if index == 0 {
                name.push('x');
            }
            name.push_str(&format!("--{byte:02x}"));
        }
    }
    if name.is_empty() || name.len() > NAME_BYTES_MAX {
        let digits = hex::encode(Sha256::digest(id));
        name = format!("{HASHED}{}", &digits[..HASH_DIGITS]);
    }
    DeviceName::new(&name).expect("an encoded ID is a DNS label")
}

/// Returns whether a byte of an ID is unchanged in the name: a dash only between two letters or digits.
fn is_kept(bytes: &[u8], index: usize) -> bool {
    is_plain(bytes, Some(index))
        || bytes[index] == b'-'
            && is_plain(bytes, index.checked_sub(1))
            && is_plain(bytes, Some(index + 1))
}

fn is_plain(bytes: &[u8], at: Option<usize>) -> bool {
    at.and_then(|at| bytes.get(at))
        .is_some_and(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit())
}

/// Returns the ID of a device's name; `None`: the name is a hash, or no [`device_name`].
pub fn device_id(name: &DeviceName) -> Option<String> {
    let text = name.as_str();
    if text.starts_with(HASHED) {
        return None;
    }
    let mut rest = text
        .strip_prefix('x')
        .filter(|rest| rest.starts_with("--"))
        .unwrap_or(text);
    let mut bytes = Vec::new();
    while !rest.is_empty() {
        match rest.strip_prefix("--") {
            Some(escaped) => {
                let digits = escaped.get(..2)?;
                bytes.push(u8::from_str_radix(digits, 16).ok()?);
                rest = &escaped[2..];
            }
            None => {
                bytes.push(rest.as_bytes()[0]);
                rest = &rest[1..];
            }
        }
    }
    let id = String::from_utf8(bytes).ok()?;
    (device_name(&id) == *name).then_some(id)
}

#[cfg(test)]
mod tests;
