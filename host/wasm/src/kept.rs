//! Files of drivers, kept by digest: a version that took over may not know what its predecessor did with a claim, so the
//! predecessor's code has to be there when it refuses.
//!
//! Owns the folder. Is given the bytes that serve, with their signature and config; gives them back whole, or says why not. Never
//! decides which are needed, nor which are trusted: `HEX.wasm.sig` is the signature as it was last seen, or as an operator put it there.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use serde::{Deserialize, Serialize};

use super::DriverFile;
use crate::trust::open::{self, OpenError};
use nodedock_base::failpoint::{self, Point};
use nodedock_model::{DriverName, limit};

/// What a kept file was when it served.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptFacts {
    pub driver: DriverName,
    pub version: String,
    /// Name of the file without `.wasm`.
    pub stem: String,
    /// JSON text, of the last time that it served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
}

/// A driver's file, with what is beside it as its signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignedFile {
    pub code: Bytes,
    pub signature: Option<Bytes>,
}

#[derive(Debug, thiserror::Error)]
pub enum KeptError {
    #[error("{digest:?} is not a digest of a file")]
    NoDigest { digest: String },
    #[error("the file of digest {digest} is not kept in {}", folder.display())]
    Missing { digest: String, folder: PathBuf },
    #[error("{} is damaged: {why}", path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: OpenError },
    #[error("read {}", path.display())]
    Folder { path: PathBuf, source: io::Error },
    #[error("write {}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error("the work on the kept files was interrupted")]
    Interrupted(#[from] tokio::task::JoinError),
    #[error("{kept} other versions of {driver} are kept for the claims that they prepared, and more are not")]
    TooMany { driver: DriverName, kept: usize },
}

/// The folder.
#[derive(Debug, Clone)]
pub struct KeptFiles {
    folder: PathBuf,
}

impl KeptFiles {
    /// What an interrupted write or removal left is removed.
    pub fn open(folder: &Path) -> Result<Self, KeptError> {
        let files = Self { folder: folder.to_owned() };
        let whole = files.digests()?;
        for name in files.names()? {
            let stem = name.split('.').next().unwrap_or_default();
            let is_beside = name.ends_with(".json") || name.ends_with(".sig");
            let is_left = name.ends_with(".new") || is_beside && !whole.contains(&with_prefix(stem));
            if is_hex(stem) && is_left {
                remove(&files.folder.join(name));
            }
        }
        Ok(files)
    }

    /// Every digest of which there is a file.
    pub fn digests(&self) -> Result<BTreeSet<String>, KeptError> {
        let names = self.names()?;
        let stems = names.iter().filter_map(|name| name.strip_suffix(".wasm"));
        Ok(stems.filter(|stem| is_hex(stem)).map(with_prefix).collect())
    }

    /// Keeps a file, durably. One that is there and whole is not written again.
    pub fn put(&self, digest: &str, facts: &KeptFacts, file: &SignedFile) -> Result<(), KeptError> {
        let Paths { code, facts: beside, signature } = self.paths(digest)?;
        self.make_room(digest, &facts.driver)?;
        let text = serde_json::to_vec(facts).expect("names and texts make JSON");
        let write = |path: &Path, content: &[u8]| {
            replace(path, content).map_err(|source| KeptError::Write { path: path.to_owned(), source })
        };
        let renew = |path: &Path, content: &[u8]| match std::fs::read(path) {
            Ok(known) if known == content => Ok(()),
            _ => write(path, content),
        };
        renew(&beside, &text)?;
        if let Some(content) = &file.signature {
            renew(&signature, content)?;
        }
        failpoint::pass(Point::KeptStaged);
        if self.code(digest, &code).is_err() {
            write(&code, &file.code)?;
        }
        Ok(())
    }

    fn make_room(&self, digest: &str, driver: &DriverName) -> Result<(), KeptError> {
        let others = self.digests()?.into_iter().filter(|other| other != digest);
        let of_driver = others.filter(|other| self.facts(other).is_ok_and(|facts| facts.driver == *driver));
        match of_driver.count() {
            kept if kept >= limit::KEPT_VERSIONS_MAX => {
                Err(KeptError::TooMany { driver: driver.clone(), kept })
            }
            _ => Ok(()),
        }
    }

    /// Gives a file back, held against its digest.
    pub fn take(&self, digest: &str) -> Result<(KeptFacts, SignedFile), KeptError> {
        let Paths { code, signature, .. } = self.paths(digest)?;
        let code = self.code(digest, &code)?;
        let signature = match self.read(digest, &signature, limit::SIGNATURE_FILE_BYTES_MAX) {
            Ok(signature) => Some(signature),
            Err(KeptError::Missing { .. }) => None,
            Err(error) => return Err(error),
        };
        Ok((self.facts(digest)?, SignedFile { code, signature }))
    }

    /// Where the signature of a kept file is looked for.
    pub fn signature_path(&self, digest: &str) -> Result<PathBuf, KeptError> {
        Ok(self.paths(digest)?.signature)
    }

    fn code(&self, digest: &str, path: &Path) -> Result<Bytes, KeptError> {
        let bytes = self.read(digest, path, limit::DRIVER_FILE_BYTES_MAX)?;
        let file = DriverFile { name: String::new(), bytes };
        match file.digest() {
            found if found == digest => Ok(file.bytes),
            found => {
                let why = format!("its digest is {found}");
                Err(KeptError::Damaged { path: path.to_owned(), why })
            }
        }
    }

    fn facts(&self, digest: &str) -> Result<KeptFacts, KeptError> {
        let path = self.paths(digest)?.facts;
        let text = self.read(digest, &path, limit::DRIVER_FILE_BYTES_MAX)?;
        serde_json::from_slice(&text)
            .map_err(|error| KeptError::Damaged { path: path.clone(), why: error.to_string() })
    }

    fn read(&self, digest: &str, path: &Path, max: u64) -> Result<Bytes, KeptError> {
        let failed = |source: OpenError| match source {
            OpenError::Io(error) if error.kind() == io::ErrorKind::NotFound => {
                KeptError::Missing { digest: digest.to_owned(), folder: self.folder.clone() }
            }
            source => KeptError::Read { path: path.to_owned(), source },
        };
        open::open(path, max).map(|opened| opened.bytes.into()).map_err(failed)
    }

    /// Removes a file. One that cannot be removed stays until the next start.
    pub fn remove(&self, digest: &str) {
        let Ok(Paths { code, facts, signature }) = self.paths(digest) else { return };
        remove(&code);
        failpoint::pass(Point::KeptForgotten);
        remove(&signature);
        remove(&facts);
    }

    fn paths(&self, digest: &str) -> Result<Paths, KeptError> {
        let no_digest = || KeptError::NoDigest { digest: digest.to_owned() };
        let stem = digest.strip_prefix("sha256:").filter(|stem| is_hex(stem)).ok_or_else(no_digest)?;
        let path = |end: &str| self.folder.join(format!("{stem}.{end}"));
        Ok(Paths { code: path("wasm"), facts: path("json"), signature: path("wasm.sig") })
    }

    fn names(&self) -> Result<Vec<String>, KeptError> {
        let failed = |source| KeptError::Folder { path: self.folder.clone(), source };
        let mut names = Vec::new();
        for entry in std::fs::read_dir(&self.folder).map_err(failed)? {
            // A name that is no text is none of ours.
            names.extend(entry.map_err(failed)?.file_name().into_string());
        }
        Ok(names)
    }
}

/// The files of a version.
struct Paths {
    code: PathBuf,
    facts: PathBuf,
    signature: PathBuf,
}

fn with_prefix(stem: &str) -> String {
    format!("sha256:{stem}")
}

fn is_hex(stem: &str) -> bool {
    stem.len() == 64 && stem.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whole or not at all, also when the power goes.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".new");
    let mut file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    match path.parent() {
        Some(folder) => File::open(folder)?.sync_all(),
        None => Ok(()),
    }
}

fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "a driver's file that is needed no more stays");
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use nodedock_base::error::chain;

    fn file(content: &str) -> (String, SignedFile) {
        let file = DriverFile { name: String::new(), bytes: content.to_owned().into() };
        (file.digest(), SignedFile { code: file.bytes, signature: None })
    }

    fn facts(driver: &str, config: Option<&str>) -> KeptFacts {
        let driver = DriverName::new(driver).unwrap();
        KeptFacts {
            driver,
            version: "1.0.0".to_owned(),
            stem: "a".to_owned(),
            config: config.map(str::to_owned),
        }
    }

    #[test]
    fn a_kept_file_comes_back_whole_with_its_last_config_and_signature() {
        let folder = tempfile::tempdir().unwrap();
        let (files, (digest, mut bytes)) = (KeptFiles::open(folder.path()).unwrap(), file("code"));
        files.put(&digest, &facts("a.example", None), &bytes).unwrap();
        let last = facts("a.example", Some("{\"n\":1}"));
        for signature in [b"first" as &[u8], b"second"] {
            bytes.signature = Some(signature.into());
            files.put(&digest, &last, &bytes).unwrap();
        }
        let unsigned = SignedFile { signature: None, ..bytes.clone() };
        files.put(&digest, &last, &unsigned).unwrap();
        assert_eq!(files.take(&digest).unwrap(), (last, bytes));
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            assert_eq!(entry.unwrap().metadata().unwrap().permissions().mode() & 0o7777, 0o600);
        }
        files.remove(&digest);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
        assert!(matches!(files.take(&digest), Err(KeptError::Missing { .. })));
    }

    #[test]
    fn a_damaged_file_is_told_and_mended_by_the_next_that_is_kept() {
        let folder = tempfile::tempdir().unwrap();
        let (files, (digest, bytes)) = (KeptFiles::open(folder.path()).unwrap(), file("code"));
        files.put(&digest, &facts("a.example", None), &bytes).unwrap();
        let Paths { code, facts: beside, .. } = files.paths(&digest).unwrap();
        for path in [&code, &beside] {
            std::fs::write(path, "cod").unwrap();
            let error = files.take(&digest).unwrap_err();
            assert!(chain(&error).contains(&path.display().to_string()), "{error}");
            assert!(matches!(error, KeptError::Damaged { .. }), "{error:?}");
            files.put(&digest, &facts("a.example", None), &bytes).unwrap();
            files.take(&digest).unwrap();
        }
        std::fs::remove_file(&beside).unwrap();
        assert!(matches!(files.take(&digest), Err(KeptError::Missing { .. })));
        assert!(matches!(files.take("sha256:../../passwd"), Err(KeptError::NoDigest { .. })));
    }

    #[test]
    fn what_an_interruption_left_is_removed_and_what_others_put_there_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let (files, (digest, bytes)) = (KeptFiles::open(folder.path()).unwrap(), file("code"));
        files.put(&digest, &facts("a.example", None), &bytes).unwrap();
        let (other, _) = file("other");
        let Paths { code, facts: beside, signature } = files.paths(&other).unwrap();
        std::fs::write(&beside, "{}").unwrap();
        std::fs::write(&signature, "x").unwrap();
        std::fs::write(format!("{}.new", code.display()), "half").unwrap();
        std::fs::write(folder.path().join("README"), "mine").unwrap();
        let files = KeptFiles::open(folder.path()).unwrap();
        assert_eq!(files.digests().unwrap(), BTreeSet::from([digest]));
        assert_eq!(files.names().unwrap().len(), 3);
    }

    #[test]
    fn versions_of_one_driver_are_bounded_and_other_drivers_do_not_notice() {
        let folder = tempfile::tempdir().unwrap();
        let files = KeptFiles::open(folder.path()).unwrap();
        let put = |driver: &str, content: &str| {
            let (digest, bytes) = file(content);
            files.put(&digest, &facts(driver, None), &bytes)
        };
        for n in 0..limit::KEPT_VERSIONS_MAX {
            put("a.example", &format!("a {n}")).unwrap();
        }
        assert!(matches!(put("a.example", "one more"), Err(KeptError::TooMany { .. })));
        put("a.example", "a 0").unwrap();
        put("b.example", "b").unwrap();
        files.remove(&file("a 3").0);
        put("a.example", "one more").unwrap();
    }

    #[test]
    fn a_folder_that_takes_no_file_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let files = KeptFiles::open(folder.path()).unwrap();
        drop(folder);
        let (digest, bytes) = file("code");
        let error = files.put(&digest, &facts("a.example", None), &bytes).unwrap_err();
        assert!(matches!(error, KeptError::Folder { .. }), "{error:?}");
        assert!(KeptFiles::open(&files.folder).is_err());
    }
}
