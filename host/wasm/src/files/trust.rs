//! Trust in driver files: signatures that count, digests that are pinned, and other users who could have written the files.
//!
//! Takes the `trust` section of the daemon's config, a file's bytes and its signature; returns a verdict. Pure but for reading keys and
//! files. Never decides the further treatment of a driver: the registry does.
//!
//! A file is trusted if it meets all requirements of the config, and the config has at least one: with keys, a signature by one that may
//! sign drivers of its name; with pins for it, one of those digests.

mod key;
pub mod open;
pub mod permissions;
mod section;
mod signature;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use globset::Glob;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use tokio::sync::watch;

use nodedock_core::registry::TrustView;

pub use self::key::KeyError;
pub use self::section::{Section, SectionError};
pub use self::signature::SignatureError;

use self::key::{KeyId, PublicKey};
use crate::digest_text;

nodedock_base::worded! {
    /// Reaction to a file that is not trusted.
    #[derive(Default, Deserialize)]
    #[serde(rename_all = "lowercase")]
    Mode {
        /// Nothing.
        #[default]
        Off = "off",
        /// A warning.
        Warn = "warn",
        /// It is refused.
        Enforce = "enforce",
    }
}

/// A key whose signatures count.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Key {
    name: String,
    public: PublicKey,
    /// Globs of driver names; `*` matches anything, also dots. None: drivers of any name.
    drivers: Option<Vec<String>>,
}

/// Checks that a file's content is a signature, by any key.
pub fn check_signature(content: &[u8]) -> Result<(), SignatureError> {
    signature::decode(content).map(drop)
}

fn matches(glob: &str, name: &str) -> bool {
    Glob::new(glob).is_ok_and(|glob| glob.compile_matcher().is_match(name))
}

/// Returns true if a file of this stem may be a driver of a matching name: its stem is a name, or the first label of one.
fn may_match(glob: &str, stem: &str) -> bool {
    let label = glob.split('.').next().unwrap_or(glob);
    // A label that is not a glob is cut off within alternatives: only the driver's name decides.
    matches(glob, stem) || matches(label, stem) || Glob::new(label).is_err()
}

/// The `trust` section, checked, with its keys read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    mode: Mode,
    keys: Vec<Key>,
    /// Digests (`sha256:` and hex) by driver name or file stem.
    pins: BTreeMap<String, BTreeSet<String>>,
}

/// Findings about a file: enough to judge it again without its bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FileFindings {
    stem: String,
    digest: String,
    /// The known key that made the signature over these bytes, if one did; an error if there is no signature that can be read.
    signer: Result<Option<KeyId>, Distrust>,
}

/// Why a file is not trusted, and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Distrust {
    #[error(
        "nothing vouches for it: the config's `trust` has no keys, and no pin for it; pin its digest {digest}, or sign it"
    )]
    NothingVouches { digest: String },
    #[error(
        "it is not signed, there is no {stem}.wasm.sig: `cosign sign-blob` or `openssl dgst -sign` makes it"
    )]
    Unsigned { stem: String },
    #[error("{stem}.wasm.sig holds no signature: {why}")]
    Unreadable { stem: String, why: SignatureError },
    #[error(
        "{stem}.wasm.sig is no signature of this very file by a key of the config ({keys}): sign the file as it is now, or add its key to `trust.keys`"
    )]
    UnknownKey { stem: String, keys: String },
    #[error(
        "key {key} signed it, and may sign drivers named {drivers} only, not {name}: have another key sign it, or widen the key's `drivers`"
    )]
    NotForKey {
        key: String,
        drivers: String,
        name: String,
    },
    #[error(
        "key {key} signed it, and may sign drivers named {drivers} only: give the file such a driver's name or its first label, it is called {stem}.wasm"
    )]
    NotForStem {
        key: String,
        drivers: String,
        stem: String,
    },
    #[error(
        "its digest {digest} is not pinned for {pin}: add it to `trust.pins` if this version is wanted"
    )]
    NotPinned { pin: String, digest: String },
}

/// A policy's verdict on a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustDecision {
    pub mode: Mode,
    /// The name of the key that signed it, from the config.
    pub key: Option<String>,
    /// The driver name or file stem under which its digest is pinned.
    pub pin: Option<String>,
    /// None: it is trusted.
    pub distrust: Option<Distrust>,
    seen: Arc<FileFindings>,
}

impl TrustDecision {
    /// Returns true if the file must not be loaded.
    pub fn refuses(&self) -> bool {
        self.mode == Mode::Enforce && self.distrust.is_some()
    }

    /// Returns true if an operator has to be warned.
    pub fn warns(&self) -> bool {
        self.mode == Mode::Warn && self.distrust.is_some()
    }

    /// `sha256:` and hex, of the file's bytes.
    pub fn digest(&self) -> &str {
        &self.seen.digest
    }

    /// The verdict as it is shown: unchecked where the config requires nothing of files.
    pub fn view(&self) -> TrustView {
        let verdict = match (self.mode, &self.distrust) {
            (_, None) => "trusted",
            (Mode::Off, Some(_)) => "unchecked",
            (_, Some(_)) => "distrusted",
        };
        TrustView {
            mode: self.mode.as_str(),
            verdict,
            key: self.key.clone(),
            pin: self.pin.clone(),
            reason: self.distrust.as_ref().map(ToString::to_string),
        }
    }
}

impl Policy {
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// A policy of one key, for checking a file by hand.
    pub fn of_key_file(path: &Path) -> Result<Self, KeyError> {
        let name = path
            .file_stem()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        let key = Key {
            name,
            public: PublicKey::read(path)?,
            drivers: None,
        };
        Ok(Self {
            mode: Mode::Enforce,
            keys: vec![key],
            pins: BTreeMap::new(),
        })
    }

    /// Judges a file before its content is used, and before its driver's name is known, by its name without `.wasm` and the content of
    /// `NAME.wasm.sig`. A file that is not refused is judged again by its driver's name. Blocking: it hashes and verifies.
    pub fn judge(&self, stem: &str, bytes: &[u8], signature: Option<&[u8]>) -> TrustDecision {
        let sha256 = Sha256::digest(bytes).into();
        let stem = stem.to_owned();
        let signer = match signature.map(signature::decode) {
            None => Err(Distrust::Unsigned { stem: stem.clone() }),
            Some(Err(why)) => Err(Distrust::Unreadable {
                stem: stem.clone(),
                why,
            }),
            Some(Ok(signature)) => {
                let signer = self
                    .keys
                    .iter()
                    .find(|key| key.public.signed(bytes, &sha256, &signature));
                Ok(signer.map(|key| key.public.id))
            }
        };
        let seen = FileFindings {
            stem,
            digest: digest_text(&sha256),
            signer,
        };
        self.decide(Arc::new(seen), None)
    }

    /// Judges a file again, now that its driver's name is known. It was judged before by this policy or another.
    pub fn judge_named(&self, verdict: &TrustDecision, name: &str) -> TrustDecision {
        self.decide(Arc::clone(&verdict.seen), Some(name))
    }

    fn decide(&self, seen: Arc<FileFindings>, name: Option<&str>) -> TrustDecision {
        let signed = self.signed(&seen, name);
        let pinned = self.pinned(&seen, name);
        let (key, pin, distrust) = match (signed, pinned) {
            (Ok(None), Ok(None)) => (
                None,
                None,
                Some(Distrust::NothingVouches {
                    digest: seen.digest.clone(),
                }),
            ),
            (Ok(key), Ok(pin)) => (key, pin, None),
            (Err(distrust), pin) => (self.key_of(&seen), pin.ok().flatten(), Some(distrust)),
            (Ok(key), Err(distrust)) => (key, None, Some(distrust)),
        };
        TrustDecision {
            mode: self.mode,
            key: key.map(|key| key.name.clone()),
            pin: pin.map(str::to_owned),
            distrust,
            seen,
        }
    }

    fn key_of(&self, seen: &FileFindings) -> Option<&Key> {
        let id = seen.signer.as_ref().ok()?.as_ref()?;
        self.keys.iter().find(|key| key.public.id == *id)
    }

    /// The key that signed it, where there are keys.
    fn signed(&self, seen: &FileFindings, name: Option<&str>) -> Result<Option<&Key>, Distrust> {
        if self.keys.is_empty() {
            return Ok(None);
        }
        seen.signer.clone()?;
        let key = self.key_of(seen).ok_or_else(|| {
            let keys: Vec<_> = self.keys.iter().map(|key| key.name.as_str()).collect();
            Distrust::UnknownKey {
                stem: seen.stem.clone(),
                keys: keys.join(", "),
            }
        })?;
        let Some(globs) = &key.drivers else {
            return Ok(Some(key));
        };
        let (of, drivers) = (key.name.clone(), globs.join(", "));
        match name {
            Some(name) if !globs.iter().any(|glob| matches(glob, name)) => {
                Err(Distrust::NotForKey {
                    key: of,
                    drivers,
                    name: name.to_owned(),
                })
            }
            None if !globs.iter().any(|glob| may_match(glob, &seen.stem)) => {
                Err(Distrust::NotForStem {
                    key: of,
                    drivers,
                    stem: seen.stem.clone(),
                })
            }
            _ => Ok(Some(key)),
        }
    }

    /// The name under which it is pinned. Where both its stem and its driver's name have pins, both have to contain its digest. While the name is
    /// unknown, a file whose stem has no pins may belong to any driver whose pins contain its digest: `judge_named` decides.
    fn pinned<'a>(
        &'a self,
        seen: &FileFindings,
        name: Option<&str>,
    ) -> Result<Option<&'a str>, Distrust> {
        let mut under = None;
        for wanted in [Some(seen.stem.as_str()), name].into_iter().flatten() {
            let Some((pin, digests)) = self.pins.get_key_value(wanted) else {
                continue;
            };
            if !digests.contains(&seen.digest) {
                return Err(Distrust::NotPinned {
                    pin: pin.clone(),
                    digest: seen.digest.clone(),
                });
            }
            under = Some(pin.as_str());
        }
        if name.is_none() && under.is_none() {
            let mut pins = self.pins.iter();
            under = pins
                .find(|(_, digests)| digests.contains(&seen.digest))
                .map(|(pin, _)| pin.as_str());
        }
        Ok(under)
    }
}

/// The current policy. Clones share it.
#[derive(Debug, Clone)]
pub struct Trust(Arc<watch::Sender<Arc<Policy>>>);

impl Trust {
    pub fn new(policy: Policy) -> Self {
        Self(Arc::new(watch::Sender::new(Arc::new(policy))))
    }

    pub fn policy(&self) -> Arc<Policy> {
        self.0.borrow().clone()
    }

    /// Replaces the policy. False: it is the same.
    pub fn replace(&self, policy: Policy) -> bool {
        self.0.send_if_modified(|known| {
            let other = **known != policy;
            *known = Arc::new(policy);
            other
        })
    }

    /// Has every file judged again by the same policy.
    pub(crate) fn judge_again(&self) {
        self.0.send_modify(|_| {});
    }

    pub fn changes(&self) -> watch::Receiver<Arc<Policy>> {
        self.0.subscribe()
    }
}
