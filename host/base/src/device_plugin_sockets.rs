//! The sockets in a kubelet's directory of device plugins.
//!
//! Emits all sockets of the directory whenever one is created, removed or replaced. Never connects to a socket and never deletes one.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use crate::error::chain;
use crate::file;
use crate::tasks::Tasks;
use crate::watched::{self, Directory};
use nodedock_model::limit;

/// The kubelet's socket in this directory (device plugin API).
pub const KUBELET_SOCKET: &str = "kubelet.sock";
/// Interval of checking a missing directory, which cannot be watched; a check costs two system calls.
const MISSING_PERIOD: Duration = Duration::from_millis(250);

/// Distinguishes sockets of the same path. A change of mode or owner, and a move, do not change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketId {
    pub device: u64,
    pub inode: u64,
    /// Modification time, which is the time of its creation. The kernel reuses inode numbers at once.
    pub made: SystemTime,
}

/// Sockets of the directory by file name.
pub type Sockets = BTreeMap<String, SocketId>;

/// Watches `directory` until the tasks stop. A missing directory has no sockets.
pub async fn follow(directory: PathBuf, tasks: Tasks, seen: watch::Sender<Arc<Sockets>>) {
    // Reports go through `seen` only.
    let (events, _sender) = mpsc::channel::<()>(1);
    watched::follow(
        PluginDirectory {
            directory,
            seen,
            missing: false,
            complained: false,
        },
        tasks,
        events,
    )
    .await;
}

/// Returns the current socket at a path, without following links; `None` if there is none, or if that is unknown.
pub fn socket_id(path: &Path) -> Option<SocketId> {
    // no error: a socket that cannot be looked at is not the one that is compared with
    look(path).ok().flatten()
}

fn look(path: &Path) -> io::Result<Option<SocketId>> {
    let found = file::symlink_metadata(path)?.filter(|found| found.file_type().is_socket());
    found
        .map(|found| {
            Ok(SocketId {
                device: found.dev(),
                inode: found.ino(),
                made: found.modified()?,
            })
        })
        .transpose()
}

struct PluginDirectory {
    directory: PathBuf,
    seen: watch::Sender<Arc<Sockets>>,
    missing: bool,
    complained: bool,
}

impl PluginDirectory {
    fn list(&self) -> io::Result<Sockets> {
        let mut found = Sockets::new();
        for entry in std::fs::read_dir(&self.directory)?.take(limit::REGISTRY_ENTRIES_MAX) {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            found.extend(look(&entry.path())?.map(|id| (name, id)));
        }
        // Other entries do not matter.
        let kubelet = look(&self.directory.join(KUBELET_SOCKET))?;
        found.extend(kubelet.map(|id| (KUBELET_SOCKET.to_owned(), id)));
        Ok(found)
    }
}

impl Directory for PluginDirectory {
    type Event = ();

    fn path(&self) -> &Path {
        &self.directory
    }

    fn look(&mut self) -> Vec<()> {
        let listed = self.list();
        self.missing = listed
            .as_ref()
            .is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        let found = match listed {
            Err(error) if !self.missing => {
                if !std::mem::replace(&mut self.complained, true) {
                    let directory = self.directory.display().to_string();
                    tracing::warn!(
                        directory,
                        error = chain(&error),
                        "cannot list the directory of device plugins"
                    );
                }
                return Vec::new();
            }
            found => found.unwrap_or_default(),
        };
        self.complained = false;
        self.seen.send_if_modified(|seen| {
            let differs = **seen != found;
            if differs {
                *seen = Arc::new(found);
            }
            differs
        });
        Vec::new()
    }

    fn next_look(&self) -> Option<Instant> {
        self.missing.then(|| Instant::now() + MISSING_PERIOD)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[tokio::test]
    async fn socket_creation_removal_replacement_are_reported() {
        let root = tempfile::tempdir().unwrap();
        let directory = root.path().join("device-plugins");
        let (sender, mut seen) = watch::channel(Arc::default());
        let tasks = Tasks::new();
        tasks.spawn("follow", follow(directory.clone(), tasks.clone(), sender));
        std::fs::create_dir(&directory).unwrap();
        std::fs::write(directory.join("DEPRECATION"), "").unwrap();
        let path = directory.join(KUBELET_SOCKET);
        let one = UnixListener::bind(&path).unwrap();
        seen.wait_for(|sockets| sockets.len() == 1).await.unwrap();
        let first = seen.borrow()[KUBELET_SOCKET];
        assert_eq!(Some(first), socket_id(&path));
        std::os::unix::fs::symlink(KUBELET_SOCKET, directory.join("link.sock")).unwrap();
        std::fs::remove_file(&path).unwrap();
        let _two = UnixListener::bind(&path).unwrap();
        seen.wait_for(|sockets| sockets.get(KUBELET_SOCKET).is_some_and(|id| *id != first))
            .await
            .unwrap();
        assert_eq!(seen.borrow().len(), 1, "a link is no socket");
        std::fs::remove_dir_all(&directory).unwrap();
        seen.wait_for(|sockets| sockets.is_empty()).await.unwrap();
        drop(one);
        assert!(tasks.drain(Duration::from_secs(60)).await);
    }
}
