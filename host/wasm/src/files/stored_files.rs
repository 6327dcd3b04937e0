//! Stored drivers: the files of versions that served before, by digest. A new version may not know what its previous version did with a
//! claim, so the previous version's code has to be there when the new one refuses.
//!
//! Owns the directory. Is given the bytes that serve, with their signature and config; returns them whole, or says why not. Never decides
//! which are needed, nor which are trusted: `HEX.wasm.sig` is the signature as it was last read, or as an operator stored it there.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::files::trust::open::{self, OpenError};
use crate::{DriverFile, is_digest};
use nodedock_base::failpoint::{self, Point};
use nodedock_base::file;
use nodedock_model::{DriverName, limit};

/// Versions of one driver whose files are stored for the claims that they prepared: more is a loop of replacements.
const VERSIONS_MAX: usize = 16;

/// Facts about a stored file, from when it served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredFacts {
    pub(crate) driver: DriverName,
    pub(crate) version: String,
    /// Name of the file without `.wasm`.
    pub(crate) stem: String,
    /// The last active config, as JSON text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) config: Option<String>,
}

/// A driver's file and its signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SignedFile {
    pub(crate) code: Bytes,
    pub(crate) signature: Option<Bytes>,
}

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("no file of digest {digest:?} is stored in {}", directory.display())]
    Missing { digest: String, directory: PathBuf },
    #[error("{} is damaged: {why}", path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: OpenError },
    #[error("{action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    #[error("the work on the stored files was interrupted")]
    Interrupted(#[from] tokio::task::JoinError),
    #[error(
        "{stored} other versions of {driver} are stored for the claims that they prepared, and more are not"
    )]
    TooMany { driver: DriverName, stored: usize },
}

/// The directory.
#[derive(Debug, Clone)]
pub(crate) struct StoredFiles {
    directory: PathBuf,
}

impl StoredFiles {
    /// Removes what an interrupted write or removal left.
    pub(crate) fn open(directory: &Path) -> Result<Self, StoreError> {
        let files = Self {
            directory: directory.to_owned(),
        };
        let whole = files.digests()?;
        for name in files.names()? {
            let stem = name.split('.').next().unwrap_or_default();
            let is_beside = name.ends_with(".json") || name.ends_with(".sig");
            let is_left =
                name.ends_with(".new") || is_beside && !whole.contains(&with_prefix(stem));
            if is_digest(&with_prefix(stem)) && is_left {
                remove(&files.directory.join(name));
            }
        }
        Ok(files)
    }

    /// The digests of all stored files.
    pub(crate) fn digests(&self) -> Result<BTreeSet<String>, StoreError> {
        let names = self.names()?;
        let stems = names.iter().filter_map(|name| name.strip_suffix(".wasm"));
        Ok(stems
            .map(with_prefix)
            .filter(|digest| is_digest(digest))
            .collect())
    }

    /// Stores a file durably. A whole stored file is not written again.
    pub(crate) fn put(
        &self,
        digest: &str,
        facts: &StoredFacts,
        file: &SignedFile,
    ) -> Result<(), StoreError> {
        let [code, beside, signature] = self.paths(digest)?;
        self.make_room(digest, &facts.driver)?;
        let text = serde_json::to_vec(facts).expect("names and texts make JSON");
        let beside = [
            (beside, Some(&text[..])),
            (signature, file.signature.as_deref()),
        ];
        for (path, content) in beside {
            // no error: it is written then
            if let Some(content) = content
                && !std::fs::read(&path).is_ok_and(|known| known == content)
            {
                write(&path, content)?;
            }
        }
        failpoint::pass(Point::KeptStaged);
        if self.code(digest, &code).is_err() {
            write(&code, &file.code)?;
        }
        Ok(())
    }

    fn make_room(&self, digest: &str, driver: &DriverName) -> Result<(), StoreError> {
        let others = self.digests()?.into_iter().filter(|other| other != digest);
        let of_driver =
            others.filter(|other| self.facts(other).is_ok_and(|facts| facts.driver == *driver));
        let stored = of_driver.count();
        if stored >= VERSIONS_MAX {
            return Err(StoreError::TooMany {
                driver: driver.clone(),
                stored,
            });
        }
        Ok(())
    }

    /// Reads a stored file and verifies its digest.
    pub(crate) fn take(&self, digest: &str) -> Result<(StoredFacts, SignedFile), StoreError> {
        let [code, _, signature] = self.paths(digest)?;
        let code = self.code(digest, &code)?;
        let signature = match self.read(digest, &signature, limit::SIGNATURE_FILE_BYTES_MAX) {
            Err(StoreError::Missing { .. }) => None,
            signature => Some(signature?),
        };
        Ok((self.facts(digest)?, SignedFile { code, signature }))
    }

    /// Returns the path from which the signature of a stored file is read.
    pub(crate) fn signature_path(&self, digest: &str) -> Result<PathBuf, StoreError> {
        self.paths(digest).map(|[.., signature]| signature)
    }

    fn code(&self, digest: &str, path: &Path) -> Result<Bytes, StoreError> {
        let bytes = self.read(digest, path, limit::DRIVER_FILE_BYTES_MAX)?;
        let file = DriverFile {
            name: String::new(),
            bytes,
        };
        match file.digest() {
            found if found == digest => Ok(file.bytes),
            found => {
                let why = format!("its digest is {found}");
                Err(StoreError::Damaged {
                    path: path.to_owned(),
                    why,
                })
            }
        }
    }

    /// Reads the facts about a stored file.
    pub(crate) fn facts(&self, digest: &str) -> Result<StoredFacts, StoreError> {
        let [_, path, _] = self.paths(digest)?;
        let text = self.read(digest, &path, limit::DRIVER_FILE_BYTES_MAX)?;
        serde_json::from_slice(&text).map_err(|error| StoreError::Damaged {
            path: path.clone(),
            why: error.to_string(),
        })
    }

    fn read(&self, digest: &str, path: &Path, max: u64) -> Result<Bytes, StoreError> {
        match open::open(path, max) {
            Ok(opened) => Ok(opened.bytes.into()),
            Err(OpenError::Io(error)) if error.kind() == io::ErrorKind::NotFound => {
                Err(self.missing(digest))
            }
            Err(source) => Err(StoreError::Read {
                path: path.to_owned(),
                source,
            }),
        }
    }

    /// Removes a stored file. One that cannot be removed stays until the next start.
    pub(crate) fn remove(&self, digest: &str) {
        let Ok([code, facts, signature]) = self.paths(digest) else {
            return;
        };
        remove(&code);
        failpoint::pass(Point::KeptForgotten);
        remove(&signature);
        remove(&facts);
    }

    /// Returns the paths of the code, its facts and its signature.
    fn paths(&self, digest: &str) -> Result<[PathBuf; 3], StoreError> {
        let stem = digest.strip_prefix("sha256:").filter(|_| is_digest(digest));
        let stem = stem.ok_or_else(|| self.missing(digest))?;
        Ok(["wasm", "json", "wasm.sig"].map(|end| self.directory.join(format!("{stem}.{end}"))))
    }

    fn missing(&self, digest: &str) -> StoreError {
        StoreError::Missing {
            digest: digest.to_owned(),
            directory: self.directory.clone(),
        }
    }

    fn names(&self) -> Result<Vec<String>, StoreError> {
        let entries: Vec<_> = std::fs::read_dir(&self.directory)
            .and_then(Iterator::collect)
            .map_err(|source| StoreError::Io {
                action: "read",
                path: self.directory.clone(),
                source,
            })?;
        // A name that is not UTF-8 is not one of ours.
        let names = entries.iter().map(std::fs::DirEntry::file_name);
        Ok(names.flat_map(OsString::into_string).collect())
    }
}

fn write(path: &Path, content: &[u8]) -> Result<(), StoreError> {
    file::replace(path, content).map_err(|source| StoreError::Io {
        action: "write",
        path: path.to_owned(),
        source,
    })
}

fn with_prefix(stem: &str) -> String {
    format!("sha256:{stem}")
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "a stored driver's file that is no longer needed cannot be removed");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use nodedock_base::error::chain;

    fn file(content: &str) -> (String, SignedFile) {
        let file = DriverFile {
            name: String::new(),
            bytes: content.to_owned().into(),
        };
        (
            file.digest(),
            SignedFile {
                code: file.bytes,
                signature: None,
            },
        )
    }

    fn facts(driver: &str, config: Option<&str>) -> StoredFacts {
        let driver = DriverName::new(driver).unwrap();
        StoredFacts {
            driver,
            version: "1.0.0".to_owned(),
            stem: "a".to_owned(),
            config: config.map(str::to_owned),
        }
    }

    #[test]
    fn stored_file_round_trips_with_config() {
        let directory = tempfile::tempdir().unwrap();
        let (files, (digest, mut bytes)) =
            (StoredFiles::open(directory.path()).unwrap(), file("code"));
        files
            .put(&digest, &facts("a.example", None), &bytes)
            .unwrap();
        let last = facts("a.example", Some("{\"n\":1}"));
        for signature in [b"first" as &[u8], b"second"] {
            bytes.signature = Some(signature.into());
            files.put(&digest, &last, &bytes).unwrap();
        }
        let unsigned = SignedFile {
            signature: None,
            ..bytes.clone()
        };
        files.put(&digest, &last, &unsigned).unwrap();
        assert_eq!(files.take(&digest).unwrap(), (last, bytes));
        for entry in std::fs::read_dir(directory.path()).unwrap() {
            assert_eq!(
                entry.unwrap().metadata().unwrap().permissions().mode() & 0o7777,
                0o600
            );
        }
        files.remove(&digest);
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
        assert!(matches!(
            files.take(&digest),
            Err(StoreError::Missing { .. })
        ));
    }

    #[test]
    fn damaged_stored_file_is_replaceable() {
        let directory = tempfile::tempdir().unwrap();
        let (files, (digest, bytes)) = (StoredFiles::open(directory.path()).unwrap(), file("code"));
        files
            .put(&digest, &facts("a.example", None), &bytes)
            .unwrap();
        let [code, beside, _] = files.paths(&digest).unwrap();
        for path in [&code, &beside] {
            std::fs::write(path, "cod").unwrap();
            let error = files.take(&digest).unwrap_err();
            assert!(
                chain(&error).contains(&path.display().to_string()),
                "{error}"
            );
            assert!(matches!(error, StoreError::Damaged { .. }), "{error:?}");
            files
                .put(&digest, &facts("a.example", None), &bytes)
                .unwrap();
            files.take(&digest).unwrap();
        }
        std::fs::remove_file(&beside).unwrap();
        assert!(matches!(
            files.take(&digest),
            Err(StoreError::Missing { .. })
        ));
        assert!(matches!(
            files.take("sha256:../../passwd"),
            Err(StoreError::Missing { .. })
        ));
    }

    #[test]
    fn only_own_leftovers_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let (files, (digest, bytes)) = (StoredFiles::open(directory.path()).unwrap(), file("code"));
        files
            .put(&digest, &facts("a.example", None), &bytes)
            .unwrap();
        let (other, _) = file("other");
        let [code, beside, signature] = files.paths(&other).unwrap();
        std::fs::write(&beside, "{}").unwrap();
        std::fs::write(&signature, "x").unwrap();
        std::fs::write(format!("{}.new", code.display()), "half").unwrap();
        std::fs::write(directory.path().join("README"), "mine").unwrap();
        let files = StoredFiles::open(directory.path()).unwrap();
        assert_eq!(files.digests().unwrap(), BTreeSet::from([digest]));
        assert_eq!(files.names().unwrap().len(), 3);
    }

    #[test]
    fn stored_versions_are_bounded_per_driver() {
        let directory = tempfile::tempdir().unwrap();
        let files = StoredFiles::open(directory.path()).unwrap();
        let put = |driver: &str, content: &str| {
            let (digest, bytes) = file(content);
            files.put(&digest, &facts(driver, None), &bytes)
        };
        for n in 0..VERSIONS_MAX {
            put("a.example", &format!("a {n}")).unwrap();
        }
        assert!(matches!(
            put("a.example", "one more"),
            Err(StoreError::TooMany { .. })
        ));
        put("a.example", "a 0").unwrap();
        put("b.example", "b").unwrap();
        files.remove(&file("a 3").0);
        put("a.example", "one more").unwrap();
    }

    #[test]
    fn unwritable_directory_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let files = StoredFiles::open(directory.path()).unwrap();
        drop(directory);
        let (digest, bytes) = file("code");
        let error = files
            .put(&digest, &facts("a.example", None), &bytes)
            .unwrap_err();
        assert!(matches!(error, StoreError::Io { .. }), "{error:?}");
        assert!(StoredFiles::open(&files.directory).is_err());
    }
}
