//! Files that credentials come from.

use std::path::PathBuf;

use sha2::{Digest as _, Sha256};

/// Files that the credentials come from, with the digests of their contents; one that cannot be read counts as empty.
pub(super) type Files = Vec<(PathBuf, [u8; 32])>;

pub(super) async fn read(paths: Vec<PathBuf>) -> Files {
    let mut files = Files::new();
    for path in paths {
        // no error: one that cannot be read is another than before, and loading it reports why
        let content = tokio::fs::read(&path).await.unwrap_or_default();
        files.push((path, Sha256::digest(content).into()));
    }
    files
}
