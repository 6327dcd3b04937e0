//! A driver's files, read once and judged: the same bytes are hashed, verified and compiled.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config;
use crate::discovery::files::DriverFiles;
use crate::driver::grant::{Grant, GrantError};
use crate::driver::wasm::SignedFile;
use crate::model::limit;
use crate::trust::open::{self, OpenError, Opened};
use crate::trust::place::{self, Fault};
use crate::trust::{Evidence, Mode, Policy, Verdict};

/// What was found of files.
pub(super) struct Looked {
    pub(super) faults: FileFaults,
    /// Of the driver's file, where it was read.
    pub(super) digest: Option<String>,
    /// As it is now, where it can be read: what was taken back counts whatever is said of the driver's file.
    pub(super) grant: Option<Grant>,
    pub(super) vetted: Result<Vetted, VetError>,
}

/// What was read and may be loaded.
pub(super) struct Vetted {
    pub(super) file: SignedFile,
    pub(super) grant: Grant,
    pub(super) config: Option<String>,
    pub(super) verdict: Verdict,
}

/// Why files are not given to the compiler.
#[derive(Debug, thiserror::Error)]
pub(super) enum VetError {
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: OpenError },
    #[error("{} is larger than {max} bytes", path.display())]
    TooLarge { path: PathBuf, max: u64 },
    #[error("grant {file}")]
    Grant { file: String, source: GrantError },
    #[error("config {file}")]
    Config { file: String, source: config::DriverConfigError },
    #[error("others may change it: {0}")]
    Place(Fault),
    #[error("not trusted: {}", reason(.0))]
    Distrusted(Box<Verdict>),
    #[error("it was not looked at to the end")]
    Interrupted,
}

impl VetError {
    /// What was said of the file, where it came to that.
    pub(super) fn verdict(&self) -> Option<&Verdict> {
        match self {
            Self::Distrusted(verdict) => Some(verdict),
            _ => None,
        }
    }
}

/// Why a file is not trusted, in words.
pub(super) fn reason(verdict: &Verdict) -> String {
    verdict.distrust.as_ref().map(ToString::to_string).unwrap_or_default()
}

/// Faults of the files themselves, by the file that was opened; those of the folder are told by discovery.
pub(super) type FileFaults = Vec<(PathBuf, Fault)>;

/// Reads and judges, off the async threads.
pub(super) async fn vet(files: &DriverFiles, policy: Arc<Policy>) -> Looked {
    let vetting = Vetting { files: files.clone(), policy, faults: Vec::new(), digest: None };
    let looked = tokio::task::spawn_blocking(move || vetting.run()).await;
    let nothing =
        |_| Looked { faults: Vec::new(), digest: None, grant: None, vetted: Err(VetError::Interrupted) };
    looked.unwrap_or_else(nothing)
}

struct Vetting {
    files: DriverFiles,
    policy: Arc<Policy>,
    faults: FileFaults,
    digest: Option<String>,
}

impl Vetting {
    fn run(mut self) -> Looked {
        let files = self.files.clone();
        let grant = self.read_text(files.grant.as_deref()).and_then(parse_grant);
        let known = grant.as_ref().ok().cloned();
        let vetted = self.judge(&files, grant);
        Looked { faults: self.faults, digest: self.digest, grant: known, vetted }
    }

    fn judge(&mut self, files: &DriverFiles, grant: Result<Grant, VetError>) -> Result<Vetted, VetError> {
        let wasm = self.read(&files.wasm, limit::DRIVER_FILE_BYTES_MAX)?;
        let signature = files.signature.as_deref();
        let signature = signature.map(|path| self.read(path, limit::SIGNATURE_FILE_BYTES_MAX)).transpose()?;
        let driver_config = self.read_text(files.config.as_deref());
        self.check_place(&files.wasm)?;
        let evidence = Evidence { stem: &files.stem, bytes: &wasm, signature: signature.as_deref() };
        let verdict = self.policy.judge(&evidence);
        self.digest = Some(verdict.digest().to_owned());
        if verdict.refuses() {
            return Err(VetError::Distrusted(Box::new(verdict)));
        }
        let file = SignedFile { code: wasm.into(), signature: signature.map(Into::into) };
        Ok(Vetted { file, grant: grant?, config: parse_config(driver_config?)?, verdict })
    }

    fn read(&mut self, path: &Path, max: u64) -> Result<Vec<u8>, VetError> {
        let opened = self.open(path, max).map_err(|source| match source {
            OpenError::TooLarge(max) => VetError::TooLarge { path: path.to_owned(), max },
            source => VetError::Read { path: path.to_owned(), source },
        })?;
        Ok(opened.bytes)
    }

    fn open(&mut self, path: &Path, max: u64) -> Result<Opened, OpenError> {
        let (folder, name) = path.parent().zip(path.file_name()).ok_or(OpenError::NotRegular)?;
        let opened = open::open_in(folder, name, max)?;
        let found = place::of_file(&opened, folder);
        self.faults.extend(found.into_iter().map(|fault| (path.to_owned(), fault)));
        Ok(opened)
    }

    fn read_text(&mut self, path: Option<&Path>) -> Result<Option<(String, String)>, VetError> {
        let Some(path) = path else { return Ok(None) };
        let bytes = self.read(path, limit::SIDE_FILE_BYTES_MAX)?;
        let not_text = |error| {
            let source = io::Error::new(io::ErrorKind::InvalidData, error).into();
            VetError::Read { path: path.to_owned(), source }
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Some((name, String::from_utf8(bytes).map_err(not_text)?)))
    }

    /// In a folder that others may write, a name and its side files mean nothing.
    fn check_place(&self, wasm: &Path) -> Result<(), VetError> {
        if self.policy.mode() != Mode::Enforce {
            return Ok(());
        }
        let of_folder = || place::of_folder(wasm.parent()?).into_iter().next();
        let fault = self.faults.first().map(|(_, fault)| fault.clone()).or_else(of_folder);
        fault.map_or(Ok(()), |fault| Err(VetError::Place(fault)))
    }
}

/// No grant file: the empty grant.
fn parse_grant(text: Option<(String, String)>) -> Result<Grant, VetError> {
    let Some((file, text)) = text else { return Ok(Grant::empty()) };
    Grant::parse(&text).map_err(|source| VetError::Grant { file, source })
}

fn parse_config(text: Option<(String, String)>) -> Result<Option<String>, VetError> {
    let Some((file, text)) = text else { return Ok(None) };
    config::driver_config(&text).map(Some).map_err(|source| VetError::Config { file, source })
}
