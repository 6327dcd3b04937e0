//! Files that credentials come from.

use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

/// Files that the credentials come from, with the digests of their contents; one that cannot be read counts as empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Files {
    connection: Vec<Digested>,
    token: Option<Digested>,
}

type Digested = (PathBuf, [u8; 32]);

/// The paths of these files.
#[derive(Debug, Clone, Default)]
pub(super) struct Paths {
    /// Of what a connection is made of.
    pub(super) connection: Vec<PathBuf>,
    /// Of the token, which each request has.
    pub(super) token: Option<PathBuf>,
}

impl Files {
    pub(super) fn paths(&self) -> Paths {
        let path = |(path, _): &Digested| path.clone();
        Paths {
            connection: self.connection.iter().map(path).collect(),
            token: self.token.as_ref().map(path),
        }
    }

    /// Returns whether both say the same, but for the token.
    pub(super) fn have_same_connection(&self, other: &Self) -> bool {
        self.connection == other.connection && self.token.is_some() == other.token.is_some()
    }
}

pub(super) async fn read(paths: Paths) -> Files {
    let mut files = Files::default();
    for path in paths.connection {
        let digest = digest(&path).await;
        files.connection.push((path, digest));
    }
    if let Some(path) = paths.token {
        let digest = digest(&path).await;
        files.token = Some((path, digest));
    }
    files
}

async fn digest(path: &Path) -> [u8; 32] {
    // no error: one that cannot be read is another than before, and loading it reports why
    let content = tokio::fs::read(path).await.unwrap_or_default();
    Sha256::digest(content).into()
}
