//! Watches the directory of registration sockets, at any depth, for sockets that are created, removed and replaced.
//!
//! A link to a socket counts as a socket. Files and directories whose names begin with a dot do not count, and links to directories are
//! not followed. Never connects to a socket and never deletes one: the worker finds out whether a process listens.

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use notify::RecursiveMode;
use notify::event::{EventKind, ModifyKind, RenameMode};
use tokio::sync::mpsc;

use nodedock_base::error::chain;
use nodedock_base::file;
use nodedock_base::tasks::Tasks;
use nodedock_base::watched::{self, Directory};
use nodedock_model::limit;

/// A change of a registration socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SocketEvent {
    /// It is new, or was replaced under the same path.
    Appeared(PathBuf),
    Gone(PathBuf),
}

/// Watches `directory` until the tasks stop. The first list is reported like later changes.
pub async fn watch(directory: PathBuf, tasks: Tasks, events: mpsc::Sender<SocketEvent>) {
    watched::follow(SocketDirectory::new(directory), tasks, events).await;
}

/// Returns the current registration sockets. A missing directory has none.
pub fn present(directory: &Path) -> io::Result<Vec<PathBuf>> {
    SocketDirectory::new(directory.to_owned())
        .list()
        .map(|listing| listing.into_keys().collect())
}

/// Distinguishes sockets of the same path. A change of mode or owner does not change it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    device: u64,
    inode: u64,
    born: Option<SystemTime>,
}

type Listing = BTreeMap<PathBuf, Stamp>;

#[derive(Default)]
struct SocketDirectory {
    directory: PathBuf,
    reported: Listing,
    /// Removed since the last check: an existing socket is another one, although its stamp may be equal.
    removed: HashSet<PathBuf>,
    complained: bool,
    too_many: bool,
}

impl SocketDirectory {
    fn new(directory: PathBuf) -> Self {
        Self {
            directory,
            ..Self::default()
        }
    }

    /// A missing directory has no sockets.
    fn list(&mut self) -> io::Result<Listing> {
        let mut walk = Walk {
            entries_left: limit::REGISTRY_ENTRIES_MAX,
            found: Listing::new(),
            too_many: false,
        };
        match walk.directory(&self.directory, 0) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        if walk.too_many && !self.too_many {
            let (entries, sockets) = (limit::REGISTRY_ENTRIES_MAX, limit::PLUGIN_SOCKETS_MAX);
            let directory = self.directory.display();
            tracing::warn!(%directory, entries, sockets, "the directory of registration sockets has too many entries");
        }
        self.too_many = walk.too_many;
        Ok(walk.found)
    }
}

impl Directory for SocketDirectory {
    type Event = SocketEvent;

    fn path(&self) -> &Path {
        &self.directory
    }

    fn depth(&self) -> RecursiveMode {
        RecursiveMode::Recursive
    }

    fn note(&mut self, event: &notify::Event) {
        let left = match event.kind {
            EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(RenameMode::From)) => {
                &event.paths[..]
            }
            // The first of the two paths is the old one.
            EventKind::Modify(ModifyKind::Name(RenameMode::Both)) => {
                event.paths.get(..1).unwrap_or_default()
            }
            _ => return,
        };
        let known = left.iter().filter(|path| self.reported.contains_key(*path));
        self.removed.extend(known.cloned());
    }

    fn look(&mut self) -> Vec<SocketEvent> {
        let listing = match self.list() {
            Ok(listing) => listing,
            Err(error) => {
                if !std::mem::replace(&mut self.complained, true) {
                    let directory = self.directory.display().to_string();
                    let error = chain(&error);
                    tracing::warn!(
                        directory,
                        error,
                        "cannot list the directory, its plugins stay"
                    );
                }
                return Vec::new();
            }
        };
        self.complained = false;
        let removed = std::mem::take(&mut self.removed);
        // Removed sockets are reported first, since they free names.
        let gone = self
            .reported
            .keys()
            .filter(|path| !listing.contains_key(*path));
        let mut events: Vec<_> = gone.cloned().map(SocketEvent::Gone).collect();
        events.extend(
            listing
                .iter()
                .filter(|(path, stamp)| {
                    self.reported.get(*path) != Some(*stamp) || removed.contains(*path)
                })
                .map(|(path, _)| SocketEvent::Appeared(path.clone())),
        );
        self.reported = listing;
        events
    }
}

/// One walk through the directory.
struct Walk {
    entries_left: usize,
    found: Listing,
    too_many: bool,
}

impl Walk {
    /// A subdirectory may be removed during the walk, and one that this process may not list has no sockets. Any other error counts: the
    /// sockets that it hides are not gone.
    fn directory(&mut self, directory: &Path, depth: usize) -> io::Result<()> {
        let mut below = Vec::new();
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(b".") {
                continue;
            }
            if self.entries_left == 0 {
                self.too_many = true;
                return Ok(());
            }
            self.entries_left -= 1;
            let kind = match entry.file_type() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                kind => kind?,
            };
            if kind.is_dir() {
                below.push(entry.path());
            } else if kind.is_socket() || kind.is_symlink() {
                self.socket(entry.path())?;
            }
        }
        for directory in below {
            if depth >= limit::REGISTRY_DEPTH_MAX {
                self.too_many = true;
            } else if let Err(error) = self.directory(&directory, depth + 1) {
                match error.kind() {
                    io::ErrorKind::NotFound
                    | io::ErrorKind::NotADirectory
                    | io::ErrorKind::PermissionDenied => {
                        tracing::debug!(directory = %directory.display(), error = chain(&error), "a directory below is not listed");
                    }
                    _ => return Err(error),
                }
            }
        }
        Ok(())
    }

    fn socket(&mut self, path: PathBuf) -> io::Result<()> {
        let Some(stamp) = stamp(&path)? else {
            return Ok(());
        };
        if self.found.len() >= limit::PLUGIN_SOCKETS_MAX {
            self.too_many = true;
            return Ok(());
        }
        self.found.insert(path, stamp);
        Ok(())
    }
}

/// Follows links. `None`: it is not a socket.
fn stamp(path: &Path) -> io::Result<Option<Stamp>> {
    let found = file::reachable(path)?.filter(|found| found.file_type().is_socket());
    // Not every file system has a time of birth.
    Ok(found.map(|found| Stamp {
        device: found.dev(),
        inode: found.ino(),
        born: found.created().ok(),
    }))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::time::Duration;

    use super::*;

    struct Watching {
        dir: tempfile::TempDir,
        events: mpsc::Receiver<SocketEvent>,
        tasks: Tasks,
    }

    impl Watching {
        fn new(prepare: impl FnOnce(&Path)) -> Self {
            let dir = tempfile::tempdir().unwrap();
            prepare(dir.path());
            let (sender, events) = mpsc::channel(16);
            let tasks = Tasks::new();
            tasks.spawn("watch", watch(dir.path().to_owned(), tasks.clone(), sender));
            Self { dir, events, tasks }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        fn bind(&self, name: &str) -> UnixListener {
            UnixListener::bind(self.path(name)).unwrap()
        }

        /// Waits for a number of events, sorted by path.
        async fn next(&mut self, count: usize) -> Vec<SocketEvent> {
            let mut events = Vec::new();
            while events.len() < count {
                events.push(self.events.recv().await.unwrap());
            }
            events.sort_by_key(|event| match event {
                SocketEvent::Appeared(path) | SocketEvent::Gone(path) => path.clone(),
            });
            events
        }

        fn each(&self, names: &[String], event: fn(PathBuf) -> SocketEvent) -> Vec<SocketEvent> {
            names.iter().map(|name| event(self.path(name))).collect()
        }

        async fn appeared(&mut self, name: &str) {
            let path = self.path(name);
            assert_eq!(self.events.recv().await, Some(SocketEvent::Appeared(path)));
        }

        async fn gone(&mut self, name: &str) {
            let path = self.path(name);
            assert_eq!(self.events.recv().await, Some(SocketEvent::Gone(path)));
        }
    }

    #[tokio::test]
    async fn only_sockets_are_reported() {
        let mut directory =
            Watching::new(|dir| drop(UnixListener::bind(dir.join("a.sock")).unwrap()));
        directory.appeared("a.sock").await;
        std::fs::write(directory.path("file.sock"), "no socket").unwrap();
        let _hidden = directory.bind(".hidden.sock");
        let _b = directory.bind("b.sock");
        directory.appeared("b.sock").await;
        std::fs::remove_file(directory.path("a.sock")).unwrap();
        directory.gone("a.sock").await;
        assert!(directory.tasks.drain(Duration::from_secs(60)).await);
    }

    #[tokio::test]
    async fn every_socket_change_is_reported() {
        let names = |when: &str| {
            (0..10)
                .map(|n| format!("{when}-{n}.sock"))
                .collect::<Vec<_>>()
        };
        let before = names("before");
        let mut directory = Watching::new(|dir| {
            before
                .iter()
                .for_each(|name| drop(UnixListener::bind(dir.join(name)).unwrap()));
        });
        assert_eq!(
            directory.next(10).await,
            directory.each(&before, SocketEvent::Appeared)
        );
        let later = names("later");
        let _later: Vec<_> = later.iter().map(|name| directory.bind(name)).collect();
        assert_eq!(
            directory.next(10).await,
            directory.each(&later, SocketEvent::Appeared)
        );
        let all = [before, later].concat();
        all.iter()
            .for_each(|name| std::fs::remove_file(directory.path(name)).unwrap());
        assert_eq!(
            directory.next(20).await,
            directory.each(&all, SocketEvent::Gone)
        );
    }

    #[tokio::test]
    async fn dot_directories_are_ignored() {
        let mut directory = Watching::new(|dir| {
            std::fs::create_dir(dir.join(".old")).unwrap();
            drop(UnixListener::bind(dir.join(".old/a.sock")).unwrap());
        });
        std::fs::create_dir_all(directory.path("one/two")).unwrap();
        std::fs::create_dir(directory.path(".new")).unwrap();
        let _hidden = directory.bind(".new/b.sock");
        let _deep = directory.bind("one/two/c.sock");
        directory.appeared("one/two/c.sock").await;
    }

    #[tokio::test]
    async fn only_links_to_sockets_are_followed() {
        let elsewhere = tempfile::tempdir().unwrap();
        let _far = UnixListener::bind(elsewhere.path().join("far.sock")).unwrap();
        let mut directory = Watching::new(|dir| {
            std::os::unix::fs::symlink(elsewhere.path(), dir.join("all")).unwrap();
            std::os::unix::fs::symlink(elsewhere.path().join("far.sock"), dir.join("near.sock"))
                .unwrap();
        });
        directory.appeared("near.sock").await;
        let _last = directory.bind("z.sock");
        directory.appeared("z.sock").await;
    }

    #[tokio::test]
    async fn only_replaced_sockets_are_reported_again() {
        use std::os::unix::fs::PermissionsExt;
        let mut directory =
            Watching::new(|dir| drop(UnixListener::bind(dir.join("a.sock")).unwrap()));
        directory.appeared("a.sock").await;
        std::fs::set_permissions(directory.path("a.sock"), PermissionsExt::from_mode(0o600))
            .unwrap();
        let _b = directory.bind("b.sock");
        directory.appeared("b.sock").await;
        std::fs::remove_file(directory.path("a.sock")).unwrap();
        let _a = directory.bind("a.sock");
        // Detected between the two steps or after both.
        match directory.events.recv().await.unwrap() {
            SocketEvent::Gone(path) => {
                assert_eq!(path, directory.path("a.sock"));
                directory.appeared("a.sock").await;
            }
            appeared => assert_eq!(appeared, SocketEvent::Appeared(directory.path("a.sock"))),
        }
    }

    #[tokio::test]
    async fn renamed_socket_is_removed_and_added() {
        let mut directory =
            Watching::new(|dir| drop(UnixListener::bind(dir.join("a.sock")).unwrap()));
        directory.appeared("a.sock").await;
        std::fs::rename(directory.path("a.sock"), directory.path("b.sock")).unwrap();
        directory.gone("a.sock").await;
        directory.appeared("b.sock").await;
        let away = tempfile::tempdir_in(directory.dir.path().parent().unwrap()).unwrap();
        std::fs::rename(directory.path("b.sock"), away.path().join("b.sock")).unwrap();
        directory.gone("b.sock").await;
    }

    #[test]
    fn directory_scan_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        for index in 0..limit::REGISTRY_ENTRIES_MAX + 10 {
            std::fs::write(dir.path().join(index.to_string()), "").unwrap();
        }
        let mut directory = SocketDirectory::new(dir.path().to_owned());
        assert_eq!(directory.look(), []);
        assert!(directory.too_many);
    }
}
