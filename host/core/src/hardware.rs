//! Hardware of the node as the host reads it: from the node itself, or from a directory in its place.

use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use rustix::fs::{Mode, OFlags, ResolveFlags};

use nodedock_base::beneath;
use nodedock_model::NodeKind;

use crate::sysfs::SysfsRoot;

/// Time for what the kernel asks to repeat while paths on the way are renamed.
const RESOLVE_WALL: Duration = Duration::from_secs(5);

/// A root with `sys`, `dev`, `proc` and the directories of libraries and vendors.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hardware {
    root: PathBuf,
    is_simulated: bool,
    own: OwnDirectories,
}

/// Directories of the daemon itself. Clones share them.
#[derive(Debug, Clone, Default)]
struct OwnDirectories(Arc<RwLock<Arc<[PathBuf]>>>);

impl PartialEq for OwnDirectories {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || *self.0.read() == *other.0.read()
    }
}

impl Eq for OwnDirectories {}

/// Kind and numbers of a device node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeNumbers {
    pub kind: NodeKind,
    pub major: u32,
    pub minor: u32,
}

impl Hardware {
    /// The node that runs this.
    pub fn of_node() -> Self {
        Self {
            root: "/".into(),
            is_simulated: false,
            own: OwnDirectories::default(),
        }
    }

    /// A directory of a test, with real special files.
    pub fn in_directory(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            is_simulated: false,
            own: OwnDirectories::default(),
        }
    }

    /// Returns a recorded machine: writes have the effects that they have in a kernel, and regular files below `dev` represent device
    /// nodes.
    pub fn simulated(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            is_simulated: true,
            own: OwnDirectories::default(),
        }
    }

    /// The same with the directories of the daemon itself, of which no container gets anything.
    pub fn with_own_directories(self, own: Vec<PathBuf>) -> Self {
        let own = OwnDirectories(Arc::new(RwLock::new(own.into())));
        Self { own, ..self }
    }

    /// Adds directories to those of the daemon itself, also of the clones.
    pub fn add_own_directories(&self, more: impl Iterator<Item = PathBuf>) {
        let mut own = self.own.0.write();
        let mut all = own.to_vec();
        all.extend(more);
        all.sort();
        all.dedup();
        *own = all.into();
    }

    pub fn own_directories(&self) -> Arc<[PathBuf]> {
        self.own.0.read().clone()
    }

    pub fn is_simulated(&self) -> bool {
        self.is_simulated
    }

    /// `/`: the root of all the paths.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn sys(&self) -> PathBuf {
        self.root.join("sys")
    }

    pub fn dev(&self) -> PathBuf {
        self.root.join("dev")
    }

    pub fn proc(&self) -> PathBuf {
        self.root.join("proc")
    }

    /// The path at which the host finds an absolute path of the node.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }

    pub fn open_sys(&self) -> io::Result<SysfsRoot> {
        match self.is_simulated {
            true => SysfsRoot::open_simulated(&self.sys()),
            false => SysfsRoot::open(&self.sys()),
        }
    }

    /// Returns what a path leads to, through every link, as an absolute path of the node without links.
    pub(crate) fn resolve(&self, path: &str) -> io::Result<String> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let root = rustix::fs::open(self.root(), flags | OFlags::DIRECTORY, Mode::empty())?;
        let until = Instant::now() + RESOLVE_WALL;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let found = beneath::open(&root, path, flags, resolve, until)?;
        let [root, found] =
            [root, found].map(|fd| std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())));
        let (root, found) = (root?, found?);
        let below = found.strip_prefix(&root).map_err(|_| {
            let (found, root) = (found.display(), root.display());
            io::Error::other(format!("it is {found}, outside of {root}"))
        })?;
        let path = Path::new("/").join(below).into_os_string().into_string();
        path.map_err(|path| {
            io::Error::new(
                ErrorKind::InvalidData,
                format!("{} is not UTF-8", path.display()),
            )
        })
    }

    /// Returns kind and numbers of a node without opening a device or following a link; `None` if it is no device node.
    pub fn node(&self, path: &str) -> io::Result<Option<NodeNumbers>> {
        let path = self.path(path);
        let found = std::fs::symlink_metadata(&path)?;
        if self.is_simulated && found.is_file() {
            return Ok(NodeNumbers::parse(&std::fs::read_to_string(path)?));
        }
        Ok(NodeNumbers::of(&found))
    }
}

/// Returns whether an error says that there is nothing at a path, or nothing that another process has as well: also a link that leads to itself,
/// or to what only one process has (`/dev/stdin`).
pub(crate) fn leads_nowhere(error: &io::Error) -> bool {
    let kinds = [
        ErrorKind::NotFound,
        ErrorKind::NotADirectory,
        ErrorKind::InvalidData,
        // No file has a name that is too long.
        ErrorKind::InvalidFilename,
    ];
    kinds.contains(&error.kind())
        || error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error())
}

impl NodeNumbers {
    fn of(found: &Metadata) -> Option<Self> {
        let kind = found.file_type();
        let kinds = [
            (kind.is_char_device(), NodeKind::Character),
            (kind.is_block_device(), NodeKind::Block),
            (kind.is_fifo(), NodeKind::Fifo),
        ];
        let kind = kinds
            .into_iter()
            .find_map(|(is, kind)| is.then_some(kind))?;
        let (major, minor) = (
            rustix::fs::major(found.rdev()),
            rustix::fs::minor(found.rdev()),
        );
        Some(Self { kind, major, minor })
    }

    /// Parses the content of a file that represents a node: `character 226:0`.
    pub fn parse(text: &str) -> Option<Self> {
        let (kind, numbers) = text.trim().split_once(' ')?;
        let kind = match kind {
            "character" => NodeKind::Character,
            "block" => NodeKind::Block,
            _ => return None,
        };
        let (major, minor) = numbers.split_once(':')?;
        Some(Self {
            kind,
            major: major.parse().ok()?,
            minor: minor.parse().ok()?,
        })
    }
}

/// Formats the content of a file that represents a node.
impl std::fmt::Display for NodeNumbers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            NodeKind::Character => "character",
            NodeKind::Block => "block",
            NodeKind::Fifo => "fifo",
        };
        write!(f, "{kind} {}:{}", self.major, self.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_recorded_machines_use_node_files() {
        let dir = tempfile::tempdir().unwrap();
        let card = NodeNumbers {
            kind: NodeKind::Character,
            major: 226,
            minor: 1,
        };
        std::fs::create_dir_all(dir.path().join("dev/dri")).unwrap();
        std::fs::write(dir.path().join("dev/dri/card1"), card.to_string()).unwrap();
        std::fs::write(dir.path().join("dev/text"), "character x:y\n").unwrap();
        let recorded = Hardware::simulated(dir.path());
        assert_eq!(recorded.node("/dev/dri/card1").unwrap(), Some(card));
        assert_eq!(recorded.node("/dev/text").unwrap(), None);
        assert_eq!(
            Hardware::in_directory(dir.path())
                .node("/dev/dri/card1")
                .unwrap(),
            None
        );
        assert!(recorded.node("/dev/dri/card2").is_err());
        let null = Hardware::of_node().node("/dev/null").unwrap().unwrap();
        assert_eq!(
            (null.kind, null.major, null.minor),
            (NodeKind::Character, 1, 3)
        );
    }
}
