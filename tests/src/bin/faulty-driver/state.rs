//! Claims that the driver has prepared, on disk.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::fault::Fault;

/// A device of a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Prepared {
    pub(crate) pool: String,
    pub(crate) device: String,
    pub(crate) request: String,
    pub(crate) cdi: String,
}

pub(crate) struct ClaimStore {
    directory: PathBuf,
    claims: Mutex<BTreeMap<String, Vec<Prepared>>>,
}

impl ClaimStore {
    /// Loads the state. A state that cannot be read is forgotten: a claim is prepared again when a kubelet requests it.
    pub(crate) fn load(directory: &Path, fault: Option<Fault>) -> Result<Self> {
        let path = directory.join("state.json");
        let was_ended = std::fs::remove_file(directory.join("ended")).is_ok();
        let mut claims: BTreeMap<String, Vec<Prepared>> = BTreeMap::new();
        if let Ok(text) = std::fs::read(&path) {
            match serde_json::from_slice(&text) {
                Ok(read) => claims = read,
                Err(_) => {
                    let is_cut = text.starts_with(b"{");
                    if fault
                        == Some(if is_cut {
                            Fault::EndsOnTruncatedState
                        } else {
                            Fault::EndsOnCorruptState
                        })
                    {
                        bail!("the state cannot be read");
                    }
                }
            }
        }
        let forgets = match fault {
            Some(Fault::OtherAnswerAfterRestart) => was_ended,
            Some(Fault::StoresAtTheEnd) => !was_ended,
            _ => false,
        };
        if forgets {
            for prepared in claims.values_mut().flatten() {
                prepared.cdi.push_str("-later");
            }
        }
        Ok(Self {
            directory: directory.to_owned(),
            claims: Mutex::new(claims),
        })
    }

    fn claims(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Vec<Prepared>>> {
        self.claims.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, uid: &str) -> Option<Vec<Prepared>> {
        self.claims().get(uid).cloned()
    }

    /// Returns whether the file has a claim that this process does not know.
    pub(crate) fn is_of_another(&self, uid: &str) -> bool {
        let text = std::fs::read_to_string(self.directory.join("state.json")).unwrap_or_default();
        !self.claims().contains_key(uid) && text.contains(uid)
    }

    /// Reads what another instance has written.
    pub(crate) fn refresh(&self) {
        let text = std::fs::read(self.directory.join("state.json")).unwrap_or_default();
        if let Ok(read) = serde_json::from_slice::<BTreeMap<String, Vec<Prepared>>>(&text) {
            let mut claims = self.claims();
            for (uid, prepared) in read {
                claims.entry(uid).or_insert(prepared);
            }
        }
    }

    pub(crate) fn set(&self, uid: &str, prepared: Option<Vec<Prepared>>) -> Result<()> {
        let mut claims = self.claims();
        match prepared {
            Some(prepared) => claims.insert(uid.to_owned(), prepared),
            None => claims.remove(uid),
        };
        let new = self.directory.join("state.json.new");
        std::fs::write(&new, serde_json::to_vec(&*claims)?)?;
        Ok(std::fs::rename(new, self.directory.join("state.json"))?)
    }

    /// Answers otherwise for every claim that is prepared.
    pub(crate) fn spoil(&self) {
        self.claims()
            .values_mut()
            .flatten()
            .for_each(|prepared| prepared.cdi.push_str("-taken"));
    }

    pub(crate) fn marker(&self, kind: &str, uid: &str) -> PathBuf {
        self.directory.join(format!("{kind}-{uid}"))
    }

    /// The driver ends in order.
    pub(crate) fn end(&self) -> Result<()> {
        Ok(std::fs::write(self.directory.join("ended"), "")?)
    }
}
