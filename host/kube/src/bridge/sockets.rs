//! The files of sockets in a kubelet's folders: made, looked at and removed.
//!
//! A kubelet dials what appears in its folder at once, so a socket is made under a name that begins with a dot, which a kubelet does
//! not look at, given its mode, and renamed into place. What is not a socket, and a socket on which another process listens, is never
//! touched; nor is one removed that is not the very one that was made here.

use std::fs::{Metadata, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sha2::{Digest, Sha256};
use tokio::net::{UnixListener, UnixStream};

/// As a kubelet makes its folders.
const FOLDER_MODE: u32 = 0o750;
const SOCKET_MODE: u32 = 0o600;

#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    #[error("{0:?} is in the way, which is not a socket: remove it")]
    InTheWay(PathBuf),
    #[error(
        "another process listens on {0:?}: of two daemons at one kubelet each needs an instance's UID of its own"
    )]
    InUse(PathBuf),
    #[error("look at {path:?}")]
    Look { path: PathBuf, source: io::Error },
    #[error("make the socket {path:?}")]
    Make { path: PathBuf, source: io::Error },
    #[error("make the folder {path:?}")]
    Folder { path: PathBuf, source: io::Error },
    #[error("{0:?} is not a folder: remove it")]
    NoFolder(PathBuf),
}

/// A socket's file that was made here.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    stamp: Stamp,
}

/// What tells one file from another under the same path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    born: Option<SystemTime>,
}

impl SocketFile {
    /// Listens on `path`. A socket on which nobody listens any more is replaced.
    pub(super) async fn listen(path: &Path) -> Result<(UnixListener, Self), SocketError> {
        let make = |source| SocketError::Make { path: path.to_owned(), source };
        refuse_occupied(path).await?;
        let hidden = hidden(path);
        refuse_occupied(&hidden).await?;
        absent(std::fs::remove_file(&hidden)).map_err(make)?;
        let listener = UnixListener::bind(&hidden).map_err(make)?;
        std::fs::set_permissions(&hidden, Permissions::from_mode(SOCKET_MODE)).map_err(make)?;
        let found = std::fs::symlink_metadata(&hidden).map_err(make)?;
        std::fs::rename(&hidden, path).map_err(make)?;
        Ok((listener, Self { path: path.to_owned(), stamp: Stamp::of(&found) }))
    }

    /// Whether it is still there.
    pub(super) fn stands(&self) -> bool {
        std::fs::symlink_metadata(&self.path).is_ok_and(|found| Stamp::of(&found) == self.stamp)
    }

    /// Removes it, if it is still there.
    pub(super) fn remove(&self) {
        if self.stands()
            && let Err(error) = absent(std::fs::remove_file(&self.path))
        {
            tracing::warn!(socket = %self.path.display(), %error, "a socket cannot be removed");
        }
    }
}

impl Stamp {
    fn of(found: &Metadata) -> Self {
        Self { device: found.dev(), inode: found.ino(), born: found.created().ok() }
    }
}

/// A name beside `path` that a kubelet does not look at, no longer than any socket's name here.
fn hidden(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default();
    let digest = Sha256::digest(name.as_encoded_bytes());
    path.with_file_name(format!(".{}", hex::encode(&digest[..3])))
}

async fn refuse_occupied(path: &Path) -> Result<(), SocketError> {
    match std::fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(SocketError::Look { path: path.to_owned(), source }),
        Ok(found) if !found.file_type().is_socket() => return Err(SocketError::InTheWay(path.to_owned())),
        Ok(_) => {}
    }
    match UnixStream::connect(path).await {
        Err(error) if is_stale(error.kind()) => Ok(()),
        // Also one that has no place for another connection has an owner.
        _ => Err(SocketError::InUse(path.to_owned())),
    }
}

fn is_stale(error: io::ErrorKind) -> bool {
    matches!(error, io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound)
}

fn absent(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

/// Makes a folder whose parent is there, unless it is there.
pub(super) fn make_folder(path: &Path) -> Result<(), SocketError> {
    let folder = |source| SocketError::Folder { path: path.to_owned(), source };
    match std::fs::DirBuilder::new().mode(FOLDER_MODE).create(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        made => return made.map_err(folder),
    }
    let found = std::fs::metadata(path).map_err(folder)?;
    if found.is_dir() { Ok(()) } else { Err(SocketError::NoFolder(path.to_owned())) }
}

/// Removes a folder, if there is nothing in it.
pub(super) fn remove_empty_folder(path: &Path) {
    // It has something of others in it, or is gone.
    let _ = std::fs::remove_dir(path);
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener as StdListener;

    use super::*;

    fn folder() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gpu.example.com-reg.sock");
        (folder, path)
    }

    fn names(folder: &Path) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(folder)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn a_socket_is_private_and_alone_and_goes_when_it_is_removed() {
        let (folder, path) = folder();
        let (_listener, file) = SocketFile::listen(&path).await.unwrap();
        assert_eq!(names(folder.path()), ["gpu.example.com-reg.sock"]);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(file.stands());
        file.remove();
        assert!(!file.stands() && names(folder.path()).is_empty());
        file.remove();
    }

    #[tokio::test]
    async fn stale_sockets_are_replaced_also_the_one_of_a_listen_that_was_cut_short() {
        let (folder, path) = folder();
        drop(StdListener::bind(&path).unwrap());
        drop(StdListener::bind(hidden(&path)).unwrap());
        let (_listener, file) = SocketFile::listen(&path).await.unwrap();
        assert!(file.stands());
        assert_eq!(names(folder.path()).len(), 1);
        UnixStream::connect(&path).await.unwrap();
    }

    #[tokio::test]
    async fn what_is_somebody_elses_is_left_as_it_is() {
        let (folder, path) = folder();
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(SocketFile::listen(&path).await, Err(SocketError::InTheWay(_))));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        std::fs::remove_file(&path).unwrap();

        let elsewhere = folder.path().join("elsewhere.sock");
        drop(StdListener::bind(&elsewhere).unwrap());
        std::os::unix::fs::symlink(&elsewhere, &path).unwrap();
        assert!(matches!(SocketFile::listen(&path).await, Err(SocketError::InTheWay(_))));
        assert!(path.is_symlink());
        std::fs::remove_file(&path).unwrap();

        let _theirs = StdListener::bind(&path).unwrap();
        assert!(matches!(SocketFile::listen(&path).await, Err(SocketError::InUse(_))));
        UnixStream::connect(&path).await.unwrap();
    }

    #[tokio::test]
    async fn one_that_another_made_in_its_place_is_not_removed() {
        let (_folder, path) = folder();
        let (_listener, file) = SocketFile::listen(&path).await.unwrap();
        std::fs::remove_file(&path).unwrap();
        // Time passes for the new file to be born later, even where inodes are used again.
        let (_theirs, their_file) = SocketFile::listen(&path).await.unwrap();
        file.remove();
        assert!(their_file.stands() && !file.stands());
    }

    #[test]
    fn a_hidden_name_is_shorter_than_the_shortest_socket() {
        for name in ["dra.sock", "a-reg.sock"] {
            let hidden = hidden(&Path::new("/x").join(name));
            let hidden = hidden.file_name().unwrap().to_str().unwrap();
            assert!(hidden.starts_with('.') && hidden.len() < name.len(), "{hidden}");
        }
    }

    #[test]
    fn folders_are_made_as_a_kubelet_makes_them_and_a_file_in_the_way_is_named() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("plugins");
        make_folder(&folder).unwrap();
        make_folder(&folder).unwrap();
        assert_eq!(std::fs::metadata(&folder).unwrap().mode() & 0o777, 0o750);
        std::fs::write(folder.join("file"), "").unwrap();
        remove_empty_folder(&folder);
        assert!(folder.exists());
        assert!(matches!(make_folder(&folder.join("file")), Err(SocketError::NoFolder(_))));
        assert!(matches!(make_folder(&root.path().join("no/plugins")), Err(SocketError::Folder { .. })));
    }
}
