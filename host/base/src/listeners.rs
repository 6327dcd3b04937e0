//! Listening sockets that outlive the process which accepts on them.
//!
//! A client that dials while no process accepts waits in the socket's backlog, and is served by the process that comes next: the daemon
//! after a crash, or the instance that takes over. So a listener is kept for both: by the process that restarts this one (`FdStore`), and
//! here, to be given to another instance. A socket is known by its path, and adopted only if the file there is still the same.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream as StdStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use parking_lot::Mutex;
use sd_notify::NotifyState;
use tokio::net::UnixListener;

use crate::descriptors::{self, Received};
use crate::device_plugin_sockets::{SocketId, socket_id};
use crate::error::chain;
use crate::own_sockets;
use crate::socket::{BindError, bind_by};

/// Set by the process that restarts this one: standard input is a socket to it.
pub const KEPT_BY_PARENT: &str = "NODEDOCK_KEPT_BY_PARENT";
/// Set by systemd if the unit has a store for file descriptors.
const SYSTEMD_STORE: &str = "FDSTORE";

/// Bytes of the name of a process start.
pub const START_BYTES_MAX: usize = 8;

/// Listening sockets of this process. Clones are the same.
#[derive(Clone)]
pub struct Listeners(Arc<Inner>);

struct Inner {
    store: FdStore,
    state: Mutex<KeptListeners>,
}

struct KeptListeners {
    start: String,
    kept: BTreeMap<PathBuf, Kept>,
    /// Another instance has them: their files are not this one's to remove.
    given: bool,
}

struct Kept {
    listener: OwnedFd,
    id: SocketId,
    /// Name under which the listener is stored.
    name: String,
}

/// A socket that was opened.
pub struct Opened {
    pub listener: UnixListener,
    pub id: SocketId,
    /// It was open before this process, or before this instance: clients know it already.
    pub adopted: bool,
}

/// The store that keeps listeners for the next start of this process.
enum FdStore {
    None,
    /// `nodedockd run --supervise`.
    Parent(StdStream),
    /// The service's store of file descriptors.
    Systemd,
}

impl Default for Listeners {
    /// No process keeps them.
    fn default() -> Self {
        Self::new(FdStore::None, random_start())
    }
}

impl Listeners {
    fn new(store: FdStore, start: String) -> Self {
        let state = KeptListeners {
            start,
            kept: BTreeMap::new(),
            given: false,
        };
        Self(Arc::new(Inner {
            store,
            state: Mutex::new(state),
        }))
    }

    /// Returns listeners with a given name of the process start, for tests.
    pub fn of_start(start: &str) -> Self {
        Self::new(FdStore::None, start.to_owned())
    }

    /// Takes what the parent or systemd has kept for this process, and how often a parent has restarted it.
    pub fn inherited() -> io::Result<(Self, Option<Restarts>)> {
        if std::env::var_os(KEPT_BY_PARENT).is_some() {
            // Without its parent this process ends, as a service's does with the service.
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
            let socket = StdStream::from(io::stdin().as_fd().try_clone_to_owned()?);
            let (names, restarts) = from_parent(&socket)?;
            let listeners = Self::new(FdStore::Parent(socket), random_start());
            listeners.adopt(names);
            return Ok((listeners, Some(restarts)));
        }
        let has_store = std::env::var_os(SYSTEMD_STORE).is_some();
        let listeners = Self::new(
            if has_store {
                FdStore::Systemd
            } else {
                FdStore::None
            },
            random_start(),
        );
        if has_store {
            // SAFETY: systemd passed these descriptors to this process alone, and nothing else here takes them.
            listeners.adopt(
                sd_notify::listen_fds_with_names()?
                    .map(|(fd, name)| (name, unsafe { OwnedFd::from_raw_fd(fd) }))
                    .collect(),
            );
        }
        Ok((listeners, None))
    }

    /// Tells the parent that this process serves: if it ends from now on, that is a crash, and it is started again.
    pub fn ready(&self) {
        if let FdStore::Parent(socket) = &self.0.store {
            report(
                descriptors::send(socket.as_fd(), b"ready\n", &[]).map(drop),
                "ready",
            );
        }
    }

    /// A name in the paths of sockets that no other process start has, unless it adopted these.
    pub fn start(&self) -> String {
        self.0.state.lock().start.clone()
    }

    /// Returns whether a stop of this process may be followed by a start to which its sockets are passed.
    pub fn outlive_a_stop(&self) -> bool {
        matches!(self.0.store, FdStore::Systemd)
    }

    /// Returns whether the socket of a path is kept and its file is still the same.
    pub fn has(&self, path: &Path) -> bool {
        self.0
            .state
            .lock()
            .kept
            .get(path)
            .is_some_and(|kept| socket_id(path) == Some(kept.id))
    }

    /// Listens on a path, as `socket::bind` does, or adopts its listener.
    pub async fn open(&self, path: &Path) -> Result<Opened, BindError> {
        self.open_by(path, &path.with_extension("sock.new")).await
    }

    /// Listens on a path, as `socket::bind_by` does, or adopts its listener.
    pub async fn open_by(&self, path: &Path, temporary: &Path) -> Result<Opened, BindError> {
        let failed = |source| BindError::Io {
            path: path.to_owned(),
            source,
        };
        if let Some(opened) = self.adopted(path).map_err(failed)? {
            return Ok(opened);
        }
        let listener = bind_by(path, temporary).await?;
        let id = socket_id(path).ok_or_else(|| failed(io::ErrorKind::NotFound.into()))?;
        let name = name(&self.start(), path, id);
        let kept = Kept {
            listener: listener.as_fd().try_clone_to_owned().map_err(failed)?,
            id,
            name,
        };
        self.0.store.keep(&kept.name, kept.listener.as_fd());
        self.0.state.lock().kept.insert(path.to_owned(), kept);
        Ok(Opened {
            listener,
            id,
            adopted: false,
        })
    }

    fn adopted(&self, path: &Path) -> io::Result<Option<Opened>> {
        let mut state = self.0.state.lock();
        let Some(kept) = state.kept.get(path) else {
            return Ok(None);
        };
        if socket_id(path) != Some(kept.id) {
            self.0.store.drop(&kept.name);
            state.kept.remove(path);
            return Ok(None);
        }
        let listener = std::os::unix::net::UnixListener::from(kept.listener.try_clone()?);
        listener.set_nonblocking(true)?;
        let id = kept.id;
        own_sockets::add(path);
        Ok(Some(Opened {
            listener: UnixListener::from_std(listener)?,
            id,
            adopted: true,
        }))
    }

    /// Removes a socket, unless another instance has it, or its file is another's.
    pub fn remove(&self, path: &Path, id: SocketId) {
        let mut state = self.0.state.lock();
        if state.given {
            return;
        }
        if let Some(kept) = state.kept.get(path).filter(|kept| kept.id == id) {
            self.0.store.drop(&kept.name);
            state.kept.remove(path);
        }
        if socket_id(path) == Some(id)
            && let Err(error) = std::fs::remove_file(path)
        {
            tracing::warn!(socket = %path.display(), %error, "a socket cannot be removed");
        }
    }

    /// Returns the names of the listeners, and a descriptor for each, so that another instance can continue listening. This process keeps
    /// them too, in case the other instance fails.
    pub fn give(&self) -> io::Result<Vec<(String, OwnedFd)>> {
        let mut state = self.0.state.lock();
        state.given = true;
        let given = state
            .kept
            .values()
            .map(|kept| Ok((kept.name.clone(), kept.listener.try_clone()?)));
        given.collect()
    }

    /// This instance serves again: what was given is its own.
    pub fn take_back(&self) {
        self.0.state.lock().given = false;
    }

    /// Takes what the process or the instance before has given. A socket whose file is gone or another is dropped.
    pub fn adopt(&self, given: Vec<(String, OwnedFd)>) {
        let mut state = self.0.state.lock();
        for (text, listener) in given {
            let Some((start, path, same)) = parse(&text) else {
                tracing::warn!(name = text, "a listener with an unknown name is dropped");
                continue;
            };
            let Some(id) = socket_id(&path).filter(|id| (id.inode, nanoseconds(*id)) == same)
            else {
                self.0.store.drop(&text);
                continue;
            };
            state.start = start;
            self.0.store.keep(&text, listener.as_fd());
            state.kept.insert(
                path,
                Kept {
                    listener,
                    id,
                    name: text,
                },
            );
        }
    }
}

/// The number of times that the parent has restarted this process, and the reason.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Restarts {
    pub count: u64,
    /// Description of the end of the previous process.
    pub last: String,
}

impl FdStore {
    fn keep(&self, name: &str, listener: BorrowedFd<'_>) {
        let kept = match self {
            Self::None => Ok(()),
            Self::Parent(socket) => descriptors::send(
                socket.as_fd(),
                format!("keep {name}\n").as_bytes(),
                &[listener],
            )
            .map(drop),
            Self::Systemd => {
                let state = [NotifyState::FdStore, NotifyState::FdName(name)];
                sd_notify::notify_with_fds(&state, &[listener])
            }
        };
        report(kept, name);
    }

    fn drop(&self, name: &str) {
        let dropped = match self {
            Self::None => Ok(()),
            Self::Parent(socket) => {
                descriptors::send(socket.as_fd(), format!("drop {name}\n").as_bytes(), &[])
                    .map(drop)
            }
            Self::Systemd => {
                sd_notify::notify(&[NotifyState::FdStoreRemove, NotifyState::FdName(name)])
            }
        };
        report(dropped, name);
    }
}

fn report(outcome: io::Result<()>, name: &str) {
    if let Err(error) = outcome {
        tracing::warn!(
            listener = name,
            error = chain(&error),
            "a listener is not kept: after a crash clients get an error"
        );
    }
}

/// Reads what a parent has kept, up to the line that says how often it restarted this process.
fn from_parent(socket: &StdStream) -> io::Result<(Vec<(String, OwnedFd)>, Restarts)> {
    let (mut received, mut given) = (Received::default(), Vec::new());
    loop {
        while let Some(line) = received.line()? {
            if let Some(name) = line.strip_prefix("keep ") {
                given.extend(
                    received
                        .descriptors(1)?
                        .into_iter()
                        .map(|listener| (name.to_owned(), listener)),
                );
            } else if let Some(restarts) = line.strip_prefix("start ") {
                let (count, last) = restarts.split_once(' ').unwrap_or((restarts, ""));
                let count = count
                    .parse()
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                return Ok((
                    given,
                    Restarts {
                        count,
                        last: last.to_owned(),
                    },
                ));
            }
        }
        if received.read(socket.as_fd())? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

/// The name of a kept listener: the process start that made it, and inode, time in nanoseconds and path of its file. systemd allows 255
/// characters.
fn name(start: &str, path: &Path, id: SocketId) -> String {
    format!(
        "{start} {} {} {}",
        id.inode,
        nanoseconds(id),
        path.display()
    )
}

fn nanoseconds(id: SocketId) -> u128 {
    id.made
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_nanos()
}

/// Returns whether a text can be the name of a process start.
pub fn is_start(text: &str) -> bool {
    (1..=START_BYTES_MAX).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// Parses the name of a listener: its process start, path, inode and time.
fn parse(name: &str) -> Option<(String, PathBuf, (u64, u128))> {
    let mut parts = name.splitn(4, ' ');
    let (start, inode, made) = (
        parts.next()?,
        parts.next()?.parse().ok()?,
        parts.next()?.parse().ok()?,
    );
    let path = parts.next()?;
    (is_start(start) && path.starts_with('/'))
        .then(|| (start.to_owned(), path.into(), (inode, made)))
}

fn random_start() -> String {
    uuid::Uuid::new_v4().simple().to_string()[..START_BYTES_MAX].to_owned()
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    /// A process and its parent, of which the test is the second.
    fn with_parent(start: &str) -> (Listeners, StdStream, Received) {
        let (near, far) = StdStream::pair().unwrap();
        far.set_nonblocking(true).unwrap();
        (
            Listeners::new(FdStore::Parent(near), start.to_owned()),
            far,
            Received::default(),
        )
    }

    /// The lines that a parent has received, and the listeners.
    fn sent(socket: &StdStream, received: &mut Received) -> Vec<(String, Option<OwnedFd>)> {
        while received.read(socket.as_fd()).is_ok_and(|read| read > 0) {}
        let lines = std::iter::from_fn(|| received.line().unwrap()).collect::<Vec<_>>();
        let with_listener = |line: String| {
            let listener = line
                .starts_with("keep ")
                .then(|| received.descriptors(1).unwrap().remove(0));
            (line, listener)
        };
        lines.into_iter().map(with_listener).collect()
    }

    #[tokio::test]
    async fn parent_keeps_sockets_for_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let paths = ["a.sock", "b.sock"].map(|name| dir.path().join(name));
        let (listeners, parent, mut received) = with_parent("one");
        for path in &paths {
            assert!(!listeners.open(path).await.unwrap().adopted);
        }
        listeners.ready();
        let mut kept = sent(&parent, &mut received);
        assert_eq!(kept.pop().unwrap().0, "ready");
        assert!(
            kept[0].0.starts_with("keep one ") && kept[0].0.ends_with("/a.sock"),
            "{kept:?}"
        );
        drop(listeners);
        // Clients wait while no process is there.
        let client = StdStream::connect(&paths[0]).unwrap();

        let (near, far) = StdStream::pair().unwrap();
        for (line, listener) in &kept {
            descriptors::send(
                far.as_fd(),
                format!("{line}\n").as_bytes(),
                &[listener.as_ref().unwrap().as_fd()],
            )
            .unwrap();
        }
        (&far).write_all(b"start 3 signal: 9 (SIGKILL)\n").unwrap();
        let (given, restarts) = from_parent(&near).unwrap();
        assert_eq!(
            restarts,
            Restarts {
                count: 3,
                last: "signal: 9 (SIGKILL)".to_owned()
            }
        );
        let (next, parent, mut received) = with_parent("two");
        // The second was removed meanwhile.
        std::fs::remove_file(&paths[1]).unwrap();
        next.adopt(given);
        assert_eq!(next.start(), "one");
        let lines: Vec<_> = sent(&parent, &mut received)
            .into_iter()
            .map(|(line, _)| line)
            .collect();
        assert!(
            lines.len() == 2
                && lines[0] == kept[0].0
                && lines[1] == kept[1].0.replace("keep", "drop"),
            "{lines:?}"
        );
        let opened = next.open(&paths[0]).await.unwrap();
        assert!(opened.adopted);
        opened.listener.accept().await.unwrap();
        assert!(!next.open(&paths[1]).await.unwrap().adopted);
        drop(client);
        next.remove(&paths[0], opened.id);
        let lines = sent(&parent, &mut received);
        assert_eq!(lines.last().unwrap().0, kept[0].0.replace("keep", "drop"));
        assert!(!paths[0].exists() && paths[1].exists());
    }

    #[tokio::test]
    async fn handed_over_and_foreign_sockets_stay() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.sock");
        let listeners = Listeners::of_start("one");
        let id = listeners.open(&path).await.unwrap().id;
        let given = listeners.give().unwrap();
        listeners.remove(&path, id);
        assert!(path.exists());
        listeners.take_back();
        assert!(
            listeners.open(&path).await.unwrap().adopted,
            "this instance serves again"
        );
        listeners.remove(&path, id);
        assert!(!path.exists());

        let _another = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let next = Listeners::of_start("two");
        next.adopt(given);
        next.adopt(vec![(
            "no name".to_owned(),
            std::fs::File::open("/dev/null").unwrap().into(),
        )]);
        assert!(matches!(next.open(&path).await, Err(BindError::InUse(_))));
        next.remove(&path, id);
        assert!(path.exists());
    }

    #[test]
    fn invalid_lines_from_parent_are_errors() {
        for sent in ["start many\n", "keep one 1 1 /a.sock\n", ""] {
            let (near, far) = StdStream::pair().unwrap();
            (&far).write_all(sent.as_bytes()).unwrap();
            drop(far);
            assert!(from_parent(&near).is_err(), "{sent:?}");
        }
    }

    #[test]
    fn socket_names_are_parsed_strictly() {
        let id = SocketId {
            device: 1,
            inode: 42,
            made: UNIX_EPOCH + std::time::Duration::from_nanos(7),
        };
        let path = Path::new("/var/lib/a b.sock");
        assert_eq!(
            parse(&name("6f1c2d7e", path, id)).unwrap(),
            ("6f1c2d7e".to_owned(), path.to_owned(), (42, 7))
        );
        for bad in [
            "",
            "one",
            "one 42 7",
            "one x 7 /a",
            "one 42 x /a",
            "../one 42 7 /a",
            "123456789 42 7 /a",
            "one 42 7 a",
        ] {
            assert!(parse(bad).is_none(), "{bad:?}");
        }
    }
}
