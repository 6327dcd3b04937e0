//! The `trust` section of the daemon's config, as it is written.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_saphyr::Spanned;

use super::key::{KeyError, PublicKey};
use super::{Key, Mode, Policy};
use crate::is_digest;
use nodedock_model::limit;

/// Trusted keys, name globs of each, drivers with pins and digests of each: each key is tried for each file.
const TRUST_KEYS_MAX: usize = 64;
const TRUST_NAMES_MAX: usize = 64;
const TRUST_PINS_MAX: usize = limit::DRIVER_FILES_MAX;
const TRUST_DIGESTS_MAX: usize = 64;

/// The section as it is written. `Policy` is made of it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Section {
    mode: Mode,
    keys: Vec<KeyEntry>,
    pins: BTreeMap<String, Spanned<Vec<Spanned<String>>>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct KeyEntry {
    name: Spanned<String>,
    file: Option<Spanned<PathBuf>>,
    pem: Option<Spanned<String>>,
    drivers: Option<Spanned<Vec<Spanned<String>>>>,
}

/// Why a section is refused.
#[derive(Debug, thiserror::Error)]
#[error("line {line}, column {column}: {message}")]
pub struct SectionError {
    line: u64,
    column: u64,
    message: String,
    source: Option<KeyError>,
}

fn at<T>(entry: &Spanned<T>, message: impl Into<String>) -> SectionError {
    let place = &entry.referenced;
    SectionError {
        line: place.line(),
        column: place.column(),
        message: message.into(),
        source: None,
    }
}

impl Section {
    /// Checks everything and reads the keys; `directory` is the config file's directory, to which paths of keys are relative.
    pub fn check(&self, directory: &Path) -> Result<Policy, SectionError> {
        let mut keys: Vec<Key> = Vec::new();
        for entry in &self.keys {
            let key = entry.check(directory)?;
            if keys.len() >= TRUST_KEYS_MAX {
                return Err(at(
                    &entry.name,
                    format!("trust.keys has more than {}", TRUST_KEYS_MAX),
                ));
            }
            if let Some(other) = keys.iter().find(|other| other.name == key.name) {
                return Err(at(
                    &entry.name,
                    format!("there are two keys named {}", other.name),
                ));
            }
            if let Some(other) = keys.iter().find(|other| other.public.id == key.public.id) {
                let message = format!("key {} is the same key as {}", key.name, other.name);
                return Err(at(&entry.name, message));
            }
            keys.push(key);
        }
        Ok(Policy {
            mode: self.mode,
            keys,
            pins: self.pins()?,
        })
    }

    fn pins(&self) -> Result<BTreeMap<String, BTreeSet<String>>, SectionError> {
        let mut pins = BTreeMap::new();
        for (of, entries) in &self.pins {
            let whole = |message: String| Err(at(entries, message));
            if of.is_empty() || of.contains('/') {
                return whole(format!(
                    "trust.pins: {of:?} is neither a driver's name nor a file's without .wasm"
                ));
            }
            if pins.len() >= TRUST_PINS_MAX || entries.value.len() > TRUST_DIGESTS_MAX {
                let (drivers, digests) = (TRUST_PINS_MAX, TRUST_DIGESTS_MAX);
                return whole(format!(
                    "trust.pins takes {drivers} drivers with {digests} digests each at most"
                ));
            }
            if entries.value.is_empty() {
                return whole(format!(
                    "trust.pins.{of} is empty: it would refuse every file; leave it out to pin nothing"
                ));
            }
            let mut digests = BTreeSet::new();
            for entry in &entries.value {
                if !is_digest(&entry.value) {
                    let message = format!(
                        "trust.pins.{of}: {:?} is not `sha256:` and 64 lowercase hex digits",
                        entry.value
                    );
                    return Err(at(entry, message));
                }
                if !digests.insert(entry.value.clone()) {
                    return Err(at(
                        entry,
                        format!("trust.pins.{of} has {} twice", entry.value),
                    ));
                }
            }
            pins.insert(of.clone(), digests);
        }
        Ok(pins)
    }
}

impl KeyEntry {
    fn check(&self, directory: &Path) -> Result<Key, SectionError> {
        let name = self.name.value.clone();
        if name.trim().is_empty()
            || name.len() > 64
            || !name
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || "-_.@ ".contains(c))
        {
            let message = format!(
                "a key's name is {name:?}, and 1 to 64 letters, digits and -_.@ are wanted"
            );
            return Err(at(&self.name, message));
        }
        Ok(Key {
            public: self.public(directory)?,
            drivers: self.drivers()?,
            name,
        })
    }

    fn public(&self, directory: &Path) -> Result<PublicKey, SectionError> {
        let name = &self.name.value;
        let message = format!("key {name}");
        match (&self.file, &self.pem) {
            (Some(file), None) => PublicKey::read(&directory.join(&file.value))
                .map_err(|source| with_source(source, at(file, message))),
            (None, Some(pem)) => {
                PublicKey::parse(&pem.value).map_err(|source| with_source(source, at(pem, message)))
            }
            (None, None) => Err(at(
                &self.name,
                format!("key {name} has neither `file` nor `pem`"),
            )),
            (Some(file), Some(_)) => Err(at(file, format!("key {name} has both `file` and `pem`"))),
        }
    }

    fn drivers(&self) -> Result<Option<Vec<String>>, SectionError> {
        let (Some(entries), name) = (&self.drivers, &self.name.value) else {
            return Ok(None);
        };
        if entries.value.is_empty() || entries.value.len() > TRUST_NAMES_MAX {
            let max = TRUST_NAMES_MAX;
            let message = format!(
                "key {name}: `drivers` takes 1 to {max} globs; leave it out for drivers of any name"
            );
            return Err(at(entries, message));
        }
        for entry in &entries.value {
            let text = &entry.value;
            let fits = !text.is_empty()
                && text.len() <= limit::GRANT_ENTRY_BYTES_MAX
                && !text.contains(['/', '\\']);
            let glob = globset::Glob::new(text);
            if !fits || glob.is_err() {
                let why = glob
                    .err()
                    .map(|error| format!(": {}", error.kind()))
                    .unwrap_or_default();
                return Err(at(
                    entry,
                    format!("key {name}: {text:?} is not a glob of driver names{why}"),
                ));
            }
        }
        Ok(Some(
            entries
                .value
                .iter()
                .map(|entry| entry.value.clone())
                .collect(),
        ))
    }
}

fn with_source(source: KeyError, place: SectionError) -> SectionError {
    SectionError {
        source: Some(source),
        ..place
    }
}
