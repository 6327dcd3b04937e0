//! Reads a driver's files once and judges them: the same bytes are hashed, verified and compiled.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use crate::SignedFile;
use crate::driver_config::{self, DriverConfigError};
use crate::file_watch::DriverFiles;
use crate::registry::file_memory::Room;
use crate::trust::open::{self, OpenError, Opened};
use crate::trust::place::{self, Fault};
use crate::trust::{Evidence, Mode, Policy, Verdict};
use nodedock_model::grant::{Grant, GrantError};
use nodedock_model::limit;

/// The result of reading and judging files.
pub(super) struct Looked {
    pub(super) faults: FileFaults,
    /// Of the driver's file, if it was read.
    pub(super) digest: Option<String>,
    pub(super) vetted: Result<Vetted, VetError>,
}

/// Files that may be loaded.
pub(super) struct Vetted {
    pub(super) file: SignedFile,
    pub(super) grant: Grant,
    pub(super) config: Option<String>,
    pub(super) verdict: Verdict,
}

/// Why files are not compiled.
#[derive(Debug, thiserror::Error)]
pub(super) enum VetError {
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: OpenError },
    #[error("{} is larger than {max} bytes", path.display())]
    TooLarge { path: PathBuf, max: u64 },
    #[error("grant {file}")]
    Grant { file: String, source: GrantError },
    #[error("config {file}")]
    Config { file: String, source: DriverConfigError },
    #[error("others may change it: {0}")]
    Place(Fault),
    #[error("not trusted: {}", reason(.0))]
    Distrusted(Box<Verdict>),
    #[error("reading it was interrupted")]
    Interrupted,
}

impl VetError {
    /// The verdict on the file, if there is one.
    pub(super) fn verdict(&self) -> Option<&Verdict> {
        match self {
            Self::Distrusted(verdict) => Some(verdict),
            _ => None,
        }
    }
}

/// Why a file is not trusted, as a text.
pub(super) fn reason(verdict: &Verdict) -> String {
    verdict.distrust.as_ref().map(ToString::to_string).unwrap_or_default()
}

/// Faults of the files themselves, by the opened file; discovery reports those of the directory.
pub(super) type FileFaults = Vec<(PathBuf, Fault)>;

/// Files of which only the grant is read yet.
pub(super) struct Vetting {
    reading: Reading,
    grant: Result<Grant, VetError>,
    /// Of the driver's file, as it was then.
    size: u64,
}

impl Vetting {
    /// Reads the grant in a blocking thread.
    pub(super) async fn begin(files: &DriverFiles) -> Self {
        let reading = || Reading { files: files.clone(), faults: Vec::new(), digest: None };
        let mut begun = reading();
        let begun = tokio::task::spawn_blocking(move || {
            let grant = begun.files.grant.clone();
            let grant = begun.read_text(grant.as_deref()).and_then(parse_grant);
            // A path that is not a file has no size, and fails when it is read.
            let size = std::fs::metadata(&begun.files.wasm).map_or(0, |found| found.len());
            Self { reading: begun, grant, size }
        });
        let nothing = |_| Self { reading: reading(), grant: Err(VetError::Interrupted), size: 0 };
        begun.await.unwrap_or_else(nothing)
    }

    /// The current grant, if it can be read: a revocation counts whatever happens to the driver's file.
    pub(super) fn grant(&self) -> Option<&Grant> {
        self.grant.as_ref().ok()
    }

    /// Bytes of the driver's file, for which memory is reserved.
    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// Reads and judges the rest in a blocking thread.
    pub(super) async fn end(self, policy: Arc<Policy>, room: Room) -> Looked {
        let Self { mut reading, grant, .. } = self;
        let looked = tokio::task::spawn_blocking(move || {
            let vetted = reading.judge(&policy, grant, room);
            Looked { faults: reading.faults, digest: reading.digest, vetted }
        });
        let nothing = |_| Looked { faults: Vec::new(), digest: None, vetted: Err(VetError::Interrupted) };
        looked.await.unwrap_or_else(nothing)
    }
}

struct Reading {
    files: DriverFiles,
    faults: FileFaults,
    digest: Option<String>,
}

impl Reading {
    fn judge(
        &mut self,
        policy: &Policy,
        grant: Result<Grant, VetError>,
        room: Room,
    ) -> Result<Vetted, VetError> {
        let files = self.files.clone();
        let wasm = self.read_code(&files.wasm, room)?;
        let signature = files.signature.as_deref();
        let signature = signature.map(|path| self.read(path, limit::SIGNATURE_FILE_BYTES_MAX)).transpose()?;
        let driver_config = self.read_text(files.config.as_deref());
        self.check_place(policy, &files.wasm)?;
        let evidence = Evidence { stem: &files.stem, bytes: &wasm, signature: signature.as_deref() };
        let verdict = policy.judge(&evidence);
        self.digest = Some(verdict.digest().to_owned());
        if verdict.refuses() {
            return Err(VetError::Distrusted(Box::new(verdict)));
        }
        let file = SignedFile { code: wasm, signature: signature.map(Into::into) };
        Ok(Vetted { file, grant: grant?, config: parse_config(driver_config?)?, verdict })
    }

    fn read_code(&mut self, path: &Path, room: Room) -> Result<Bytes, VetError> {
        let max = room.bytes_max();
        match self.read(path, max) {
            Ok(code) => Ok(room.hold(code)),
            // Memory was reserved for the size that the file had before.
            Err(VetError::TooLarge { path, .. }) if max < limit::DRIVER_FILE_BYTES_MAX => {
                Err(VetError::Read { path, source: OpenError::Changed })
            }
            Err(error) => Err(error),
        }
    }

    fn read(&mut self, path: &Path, max: u64) -> Result<Vec<u8>, VetError> {
        let opened = self.open(path, max).map_err(|source| match source {
            OpenError::TooLarge(max) => VetError::TooLarge { path: path.to_owned(), max },
            source => VetError::Read { path: path.to_owned(), source },
        })?;
        Ok(opened.bytes)
    }

    fn open(&mut self, path: &Path, max: u64) -> Result<Opened, OpenError> {
        let (directory, name) = path.parent().zip(path.file_name()).ok_or(OpenError::NotRegular)?;
        let opened = open::open_in(directory, name, max)?;
        let found = place::of_file(&opened, directory);
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

    /// In a directory that others may write, a name and its side files prove nothing.
    fn check_place(&self, policy: &Policy, wasm: &Path) -> Result<(), VetError> {
        if policy.mode() != Mode::Enforce {
            return Ok(());
        }
        let of_directory = || place::of_folder(wasm.parent()?).into_iter().next();
        let fault = self.faults.first().map(|(_, fault)| fault.clone()).or_else(of_directory);
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
    driver_config::driver_config(&text).map(Some).map_err(|source| VetError::Config { file, source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::file_memory::FileMemory;

    const MIB: usize = 1 << 20;

    async fn end(vetting: Vetting, memory: &FileMemory) -> Looked {
        let room = memory.to_load(vetting.size()).await;
        vetting.end(Arc::default(), room).await
    }

    fn files(directory: &Path, code: &[u8]) -> DriverFiles {
        let wasm = directory.join("a.wasm");
        std::fs::write(&wasm, code).unwrap();
        DriverFiles { stem: "a".to_owned(), wasm, grant: None, config: None, signature: None }
    }

    /// A directory full of large files that wait for the compiler was in memory as a whole.
    #[tokio::test]
    async fn a_file_has_its_room_until_its_bytes_are_dropped() {
        let (folder, memory) = (tempfile::tempdir().unwrap(), FileMemory::default());
        let (files, all) = (files(folder.path(), &vec![0; 3 * MIB]), memory.left());
        let looked = end(Vetting::begin(&files).await, &memory).await;
        let code = looked.vetted.ok().unwrap().file.code;
        assert_eq!((code.len(), memory.left()), (3 * MIB, all - 4));
        drop(code);
        assert_eq!(memory.left(), all);

        let gone = DriverFiles { wasm: folder.path().join("b.wasm"), ..files };
        let looked = end(Vetting::begin(&gone).await, &memory).await;
        assert!(matches!(looked.vetted, Err(VetError::Read { .. })) && memory.left() == all);
    }

    #[tokio::test]
    async fn a_file_that_has_grown_beyond_its_room_is_read_another_time() {
        let (folder, memory) = (tempfile::tempdir().unwrap(), FileMemory::default());
        let small = files(folder.path(), b"small");
        let vetting = Vetting::begin(&small).await;
        files(folder.path(), &vec![0; 2 * MIB]);
        let looked = end(vetting, &memory).await;
        assert!(matches!(looked.vetted, Err(VetError::Read { source: OpenError::Changed, .. })));

        let file = std::fs::File::options().write(true).open(&small.wasm).unwrap();
        file.set_len(limit::DRIVER_FILE_BYTES_MAX + 1).unwrap();
        let looked = end(Vetting::begin(&small).await, &memory).await;
        let max = limit::DRIVER_FILE_BYTES_MAX;
        assert!(matches!(looked.vetted, Err(VetError::TooLarge { max: told, .. }) if told == max));
    }
}
