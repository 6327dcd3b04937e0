//! Errors of the checkpoint, with their problem codes.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::database::StoreError;
use nodedock_base::error::chain;
use nodedock_model::{Problem, ProblemCode, Uid};

/// Retry delay of a refused request: about the interval of testing the disk.
const RETRY: Duration = Duration::from_secs(5);

/// Why a checkpoint was not opened. The file is unchanged.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("another daemon has locked the checkpoint {}", .0.display())]
    InUse(PathBuf),
    #[error(
        "the checkpoint {} has format {found}, and this release knows none above {known}: start the release that wrote it ({written_by}), or move the file away",
        .path.display()
    )]
    Newer {
        path: PathBuf,
        found: u32,
        known: u32,
        written_by: String,
    },
    #[error(
        "the checkpoint {} has format {found}, and this release does not read formats that old (it writes {known}): start a release between it and {written_by} first, or move the file away",
        .path.display()
    )]
    Older {
        path: PathBuf,
        found: u32,
        known: u32,
        written_by: String,
    },
    #[error("{doing} the checkpoint {}", .path.display())]
    Io {
        path: PathBuf,
        doing: &'static str,
        source: io::Error,
    },
    /// Damaged, and could not be set aside.
    #[error("set aside the checkpoint {} ({reason})", .path.display())]
    SetAside {
        path: PathBuf,
        reason: String,
        source: io::Error,
    },
    #[error("{doing} the checkpoint {}", .path.display())]
    Store {
        path: PathBuf,
        doing: &'static str,
        source: StoreError,
    },
}

/// Why changes are not known to be durable.
#[derive(Debug, Clone, thiserror::Error)]
pub enum CommitError {
    #[error("the checkpoint is closed")]
    Closed,
    #[error("encode the record {uid}")]
    Encode {
        uid: Uid,
        source: Arc<serde_json::Error>,
    },
    #[error("write the checkpoint")]
    Store(#[from] Arc<StoreError>),
}

impl CommitError {
    /// The values of `code`.
    pub const CODES: [ProblemCode; 3] = [
        ProblemCode::CheckpointDiskFull,
        ProblemCode::CheckpointReadOnly,
        ProblemCode::CheckpointUnavailable,
    ];

    /// Returns its stable code.
    pub fn code(&self) -> ProblemCode {
        use io::ErrorKind::{PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
        let [full, read_only, other] = Self::CODES;
        match self.io_kind() {
            Some(StorageFull | QuotaExceeded) => full,
            Some(ReadOnlyFilesystem | PermissionDenied) => read_only,
            _ => other,
        }
    }

    /// Converts the error to the problem of the request that had to be written.
    pub fn problem(&self) -> Problem {
        Problem::unavailable(self.code(), format!("new work is refused: {}", chain(self)))
            .retry_after(RETRY)
    }

    fn io_kind(&self) -> Option<io::ErrorKind> {
        if let Self::Store(error) = self {
            error.kind()
        } else {
            None
        }
    }
}

/// Why a checkpoint could not be read without changing it.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("read the checkpoint {}", .path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("the checkpoint {} has {bytes} bytes, and at most {max} are read into memory", .path.display())]
    TooLarge { path: PathBuf, bytes: u64, max: u64 },
    #[error("the checkpoint {} has format {found}, and this release knows none above {known} (written by {written_by})", .path.display())]
    Newer {
        path: PathBuf,
        found: u32,
        known: u32,
        written_by: String,
    },
    #[error("the checkpoint {} has format {found}, and this release does not read formats that old (written by {written_by})", .path.display())]
    Older {
        path: PathBuf,
        found: u32,
        written_by: String,
    },
    #[error("the checkpoint {} is damaged or another program's: {reason}", .path.display())]
    Damaged { path: PathBuf, reason: String },
    #[error("the checkpoint {} changed while it was read, {attempts} times: request it from the daemon that has it open", .path.display())]
    Busy { path: PathBuf, attempts: u32 },
}
