//! Reads a driver's files once and judges them: the same bytes are hashed, verified and compiled.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;

use crate::files::driver_image::ImageError;
use crate::files::file_watch::DriverFiles;
use crate::files::stored_files::SignedFile;
use crate::files::trust::open::{self, OpenError};
use crate::files::trust::permissions::{self, Fault};
use crate::files::trust::{Mode, Policy, TrustDecision};
use crate::load::driver_config::{self, DriverConfigError};
use crate::registry::file_memory::Room;
use nodedock_model::SideFileError;
use nodedock_model::grant::Grant;
use nodedock_model::limit;

/// The result of reading and judging files.
pub(super) struct Outcome {
    pub(super) faults: FileFaults,
    /// Digest of the driver's file, if it was read.
    pub(super) digest: Option<String>,
    pub(super) verified: Result<Verified, FileError>,
}

/// Files that may be loaded.
pub(super) struct Verified {
    pub(super) file: SignedFile,
    pub(super) grant: Grant,
    pub(super) config: Option<String>,
    pub(super) verdict: TrustDecision,
}

/// Why files are not compiled.
#[derive(Debug, thiserror::Error)]
pub(super) enum FileError {
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("read {}", path.display())]
    Read { path: PathBuf, source: OpenError },
    #[error("{} is larger than {max} bytes", path.display())]
    TooLarge { path: PathBuf, max: u64 },
    #[error("grant {file}")]
    Grant { file: String, source: SideFileError },
    #[error("config {file}")]
    Config {
        file: String,
        source: DriverConfigError,
    },
    #[error("others may change it: {0}")]
    Permissions(Fault),
    #[error("not trusted: {}", reason(.0))]
    Distrusted(Box<TrustDecision>),
    #[error("reading it was interrupted")]
    Interrupted,
}

impl FileError {
    /// The verdict on the file, if there is one.
    pub(super) fn verdict(&self) -> Option<&TrustDecision> {
        match self {
            Self::Distrusted(verdict) => Some(verdict),
            _ => None,
        }
    }
}

/// Why a file is not trusted, as a text.
pub(super) fn reason(verdict: &TrustDecision) -> String {
    verdict
        .distrust
        .as_ref()
        .map(ToString::to_string)
        .unwrap_or_default()
}

/// Faults of the files themselves, by the opened file; the file watcher reports those of the directory.
pub(super) type FileFaults = Vec<(PathBuf, Fault)>;

/// Files of which only the grant is read yet.
pub(super) struct Verification {
    files: DriverFiles,
    faults: FileFaults,
    /// The current grant: a revocation applies regardless of changes to the driver's file.
    pub(super) grant: Result<Grant, FileError>,
    /// Bytes of the driver's file as it was then, for which memory is reserved.
    pub(super) size: u64,
}

impl Verification {
    /// Reads the grant in a blocking thread.
    pub(super) async fn begin(files: &DriverFiles) -> Self {
        let (files, of_thread) = (files.clone(), files.clone());
        let read = tokio::task::spawn_blocking(move || {
            let mut faults = FileFaults::new();
            let grant = read_text(of_thread.grant.as_deref(), &mut faults).and_then(parse_grant);
            // no error: a path that is not a file has no size, and fails when it is read
            let found = of_thread
                .wasm
                .ok()
                .and_then(|path| std::fs::metadata(path).ok());
            let size = found.map_or(0, |found| found.len());
            (faults, grant, size)
        });
        let (faults, grant, size) = match read.await {
            Ok(read) => read,
            Err(_) => (FileFaults::new(), Err(FileError::Interrupted), 0),
        };
        Self {
            files,
            faults,
            grant,
            size,
        }
    }

    /// Reads and judges the rest in a blocking thread.
    pub(super) async fn end(self, policy: Arc<Policy>, room: Room) -> Outcome {
        let outcome = tokio::task::spawn_blocking(move || {
            let Self {
                files,
                mut faults,
                grant,
                ..
            } = self;
            let mut digest = None;
            let verified = verify(&files, grant, &policy, room, &mut faults, &mut digest);
            Outcome {
                faults,
                digest,
                verified,
            }
        });
        match outcome.await {
            Ok(outcome) => outcome,
            Err(_) => Outcome {
                faults: FileFaults::new(),
                digest: None,
                verified: Err(FileError::Interrupted),
            },
        }
    }
}

fn verify(
    files: &DriverFiles,
    grant: Result<Grant, FileError>,
    policy: &Policy,
    room: Room,
    faults: &mut FileFaults,
    digest: &mut Option<String>,
) -> Result<Verified, FileError> {
    let wasm = files.wasm.as_deref().map_err(Clone::clone)?;
    let code = read_code(wasm, room, faults)?;
    let signature = files.signature.as_deref();
    let signature = signature
        .map(|path| read(path, limit::SIGNATURE_FILE_BYTES_MAX, faults))
        .transpose()?;
    let config = read_text(files.config.as_deref(), faults);
    check_permissions(wasm, policy, faults)?;
    let verdict = policy.judge(&files.stem, &code, signature.as_deref());
    *digest = Some(verdict.digest().to_owned());
    if verdict.refuses() {
        return Err(FileError::Distrusted(Box::new(verdict)));
    }
    let file = SignedFile {
        code,
        signature: signature.map(Into::into),
    };
    Ok(Verified {
        file,
        grant: grant?,
        config: parse_config(config?)?,
        verdict,
    })
}

fn read_code(path: &Path, room: Room, faults: &mut FileFaults) -> Result<Bytes, FileError> {
    let max = room.bytes_max();
    match read(path, max, faults) {
        Ok(code) => Ok(room.hold(code)),
        // Memory was reserved for the size that the file had before.
        Err(FileError::TooLarge { path, .. }) if max < limit::DRIVER_FILE_BYTES_MAX => {
            Err(FileError::Read {
                path,
                source: OpenError::Changed,
            })
        }
        Err(error) => Err(error),
    }
}

fn read(path: &Path, max: u64, faults: &mut FileFaults) -> Result<Vec<u8>, FileError> {
    let failed = |source| match source {
        OpenError::TooLarge(max) => FileError::TooLarge {
            path: path.to_owned(),
            max,
        },
        source => FileError::Read {
            path: path.to_owned(),
            source,
        },
    };
    let place = path
        .parent()
        .zip(path.file_name())
        .ok_or(OpenError::NotRegular);
    let (directory, name) = place.map_err(failed)?;
    let opened = open::open_in(directory, name, max).map_err(failed)?;
    let found = permissions::of_file(&opened, directory).map_err(|error| failed(error.into()))?;
    faults.extend(found.into_iter().map(|fault| (path.to_owned(), fault)));
    Ok(opened.bytes)
}

fn read_text(path: Option<&Path>, faults: &mut FileFaults) -> Result<NamedText, FileError> {
    let Some(path) = path else { return Ok(None) };
    let bytes = read(path, limit::SIDE_FILE_BYTES_MAX, faults)?;
    let name = path
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    Ok(Some((
        name,
        String::from_utf8(bytes).map_err(|error| {
            let source = io::Error::new(io::ErrorKind::InvalidData, error).into();
            FileError::Read {
                path: path.to_owned(),
                source,
            }
        })?,
    )))
}

/// Refuses a driver in a directory that others may write: a name and its side files prove nothing there.
fn check_permissions(wasm: &Path, policy: &Policy, faults: &FileFaults) -> Result<(), FileError> {
    if policy.mode() != Mode::Enforce {
        return Ok(());
    }
    let of_directory = wasm
        .parent()
        .map(permissions::of_directory)
        .transpose()
        .map_err(|source| FileError::Read {
            path: wasm.to_owned(),
            source: source.into(),
        })?;
    let fault = faults
        .first()
        .map(|(_, fault)| fault)
        .or(of_directory.iter().flatten().next())
        .cloned();
    fault.map_or(Ok(()), |fault| Err(FileError::Permissions(fault)))
}

/// A file's name and content. None: there is no such file.
type NamedText = Option<(String, String)>;

/// No grant file: the empty grant.
fn parse_grant(text: NamedText) -> Result<Grant, FileError> {
    let Some((file, text)) = text else {
        return Ok(Grant::empty());
    };
    Grant::parse(&text).map_err(|source| FileError::Grant { file, source })
}

fn parse_config(text: NamedText) -> Result<Option<String>, FileError> {
    let Some((file, text)) = text else {
        return Ok(None);
    };
    driver_config::driver_config(&text)
        .map(Some)
        .map_err(|source| FileError::Config { file, source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::registry::file_memory::FileMemory;

    const MIB: usize = 1 << 20;

    async fn end(verification: Verification, memory: &FileMemory) -> Outcome {
        let room = Room::within(&memory.loading, verification.size).await;
        verification.end(Arc::default(), room).await
    }

    fn files(directory: &Path, code: &[u8]) -> DriverFiles {
        let wasm = directory.join("a.wasm");
        std::fs::write(&wasm, code).unwrap();
        DriverFiles {
            stem: "a".to_owned(),
            is_image: false,
            wasm: Ok(wasm),
            grant: None,
            config: None,
            signature: None,
        }
    }

    /// A directory full of large files that wait for the compiler was in memory as a whole.
    #[tokio::test]
    async fn file_memory_is_held_until_dropped() {
        let (directory, memory) = (tempfile::tempdir().unwrap(), FileMemory::default());
        let (files, all) = (
            files(directory.path(), &vec![0; 3 * MIB]),
            memory.loading.available_permits(),
        );
        let outcome = end(Verification::begin(&files).await, &memory).await;
        let code = outcome.verified.ok().unwrap().file.code;
        assert_eq!(
            (code.len(), memory.loading.available_permits()),
            (3 * MIB, all - 4)
        );
        drop(code);
        assert_eq!(memory.loading.available_permits(), all);

        let gone = DriverFiles {
            wasm: Ok(directory.path().join("b.wasm")),
            ..files
        };
        let outcome = end(Verification::begin(&gone).await, &memory).await;
        assert!(
            matches!(outcome.verified, Err(FileError::Read { .. }))
                && memory.loading.available_permits() == all
        );
    }

    #[tokio::test]
    async fn grown_file_is_read_again_later() {
        let (directory, memory) = (tempfile::tempdir().unwrap(), FileMemory::default());
        let small = files(directory.path(), b"small");
        let verification = Verification::begin(&small).await;
        files(directory.path(), &vec![0; 2 * MIB]);
        let outcome = end(verification, &memory).await;
        assert!(matches!(
            outcome.verified,
            Err(FileError::Read {
                source: OpenError::Changed,
                ..
            })
        ));

        let file = std::fs::File::options()
            .write(true)
            .open(small.wasm.as_deref().unwrap())
            .unwrap();
        file.set_len(limit::DRIVER_FILE_BYTES_MAX + 1).unwrap();
        let outcome = end(Verification::begin(&small).await, &memory).await;
        let max = limit::DRIVER_FILE_BYTES_MAX;
        assert!(
            matches!(outcome.verified, Err(FileError::TooLarge { max: found, .. }) if found == max)
        );
    }
}
