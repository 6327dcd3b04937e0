//! Looking at device nodes: never opening one, never following a link.

use std::os::fd::OwnedFd;
use std::sync::LazyLock;
use std::time::Instant;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::bindings::nodedock::driver::device_nodes::NodeInfo;
use super::bindings::types::NodeKind;
use nodedock_base::beneath::{self, Entry};
use nodedock_core::hardware::{Hardware, NodeNumbers};
use nodedock_core::sysfs::blocking::LOOK_WALL;
use nodedock_core::sysfs::{ENTRIES_MAX, SysfsRoot, bad_glob, join, not_permitted, present, read_stuck};
use nodedock_model::grant::pattern::{self, PatternSet};
use nodedock_model::rule::is_plain_path;
use nodedock_model::{Problem, ProblemCode};

/// Never shown nor given to containers, whatever is granted: the machine's memory and log, raw disks, and watchdogs.
static DENIED: LazyLock<PatternSet> = LazyLock::new(|| {
    let never = [
        "/dev/{mem,kmem,port,kmsg,oldmem,nvram,snapshot}",
        "/dev/{sd,hd,vd,xvd}[a-z]",
        "/dev/{sd,hd,vd,xvd}[a-z][a-z]",
        "/dev/{sd,hd,vd,xvd}[a-z][0-9]*",
        "/dev/{sd,hd,vd,xvd}[a-z][a-z][0-9]*",
        "/dev/{nvme,ng,dm-,md,mmcblk,sr,sg}[0-9]*",
        "/dev/{mapper,disk,block,mtd,bsg}/**",
        "/dev/watchdog*",
    ];
    PatternSet::new(never).expect("the patterns above are globs")
});

/// Numbers of `/dev/mem`, `kmem`, `port`, `kmsg` and `oldmem` (Linux, devices.txt): another name does not make them harmless.
const MEMORY_MAJOR: u32 = 1;
const MEMORY_MINORS: &[u32] = &[1, 2, 4, 11, 12];

/// How deep `**` goes.
const DEPTH_MAX: usize = 8;
/// Entries of a directory that a glob reads.
const DIRECTORY_ENTRIES_MAX: usize = 4 * ENTRIES_MAX;

/// `/dev`, or a directory of a test.
pub(super) struct DevRoot {
    dev: OwnedFd,
    /// Regular files stand for nodes.
    is_simulated: bool,
}

/// A plain path below `/dev`, without the `/dev/`.
pub(super) fn below_dev(path: &str) -> Result<&str, Problem> {
    let is_plain = is_plain_path(path) && !path.contains(char::is_control);
    let inside = path.strip_prefix("/dev/").filter(|_| is_plain);
    let shown: String = path.chars().take(128).collect();
    inside.ok_or_else(|| {
        Problem::invalid(ProblemCode::BadPath, format!("{shown:?} is no plain path below /dev"))
    })
}

impl DevRoot {
    pub(super) fn open(hardware: &Hardware) -> std::io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dev = rustix::fs::open(hardware.dev(), flags, Mode::empty())?;
        Ok(Self { dev, is_simulated: hardware.is_simulated() })
    }

    /// One node. A link, a directory or a file is not a node.
    pub(super) fn stat(&self, path: &str, sysfs: &SysfsRoot) -> Result<NodeInfo, Problem> {
        let inside = below_dev(path)?;
        if DENIED.matches(path) {
            return Err(denied(path));
        }
        // An `O_PATH` descriptor does not open the device: the driver behind it notices nothing.
        let node = self.open_beneath(inside, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC)?;
        let stat = rustix::fs::fstat(&node).map_err(|errno| io_problem(path, errno))?;
        let not_a_node = || Problem::invalid(ProblemCode::NotANode, format!("{path} is no device node"));
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::CharacterDevice => NodeKind::Character,
            FileType::BlockDevice => NodeKind::Block,
            FileType::Fifo => NodeKind::Fifo,
            FileType::RegularFile if self.is_simulated => NodeKind::Fifo,
            _ => return Err(not_a_node()),
        };
        let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
        let (kind, major, minor) = match kind {
            NodeKind::Fifo if is_file => self.simulated(inside)?.ok_or_else(not_a_node)?,
            NodeKind::Fifo => (kind, 0, 0),
            kind => (kind, rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)),
        };
        let numbered = kind != NodeKind::Fifo;
        if kind == NodeKind::Character && major == MEMORY_MAJOR && MEMORY_MINORS.contains(&minor) {
            return Err(denied(path));
        }
        let sysfs_path = if numbered { sysfs_directory(sysfs, kind, major, minor)? } else { None };
        if kind == NodeKind::Block && is_disk(sysfs_path.as_deref()) {
            return Err(denied(path));
        }
        Ok(NodeInfo {
            path: path.to_owned(),
            kind,
            major,
            minor,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            sysfs_path,
        })
    }

    /// Nodes that match; other files and denied nodes are left out.
    pub(super) fn glob(&self, glob: &str, sysfs: &SysfsRoot) -> Result<Vec<NodeInfo>, Problem> {
        let inside = below_dev(glob)?;
        let matcher = pattern::compile(glob).map_err(|error| bad_glob(glob, &error))?.compile_matcher();
        let mut found = Vec::new();
        // The walk begins in the literal directory before the first wildcard.
        let start: Vec<&str> = inside.split('/').take_while(|segment| pattern::is_literal(segment)).collect();
        let deep = inside.split('/').count();
        if start.len() == deep {
            return Ok(self.find(glob, sysfs)?.into_iter().collect());
        }
        let deepest = if inside.contains("**") { DEPTH_MAX } else { deep };
        let mut open = vec![start.join("/")];
        // Its caller does not wait longer.
        let until = Instant::now() + LOOK_WALL;
        while let Some(directory) = open.pop() {
            if Instant::now() >= until {
                return Err(read_stuck());
            }
            let depth = if directory.is_empty() { 0 } else { directory.split('/').count() };
            for entry in self.entries(&directory, until)? {
                let is_directory = entry.kind == FileType::Directory;
                let inner = join(&directory, &entry.name);
                let path = format!("/dev/{inner}");
                if is_directory && depth + 1 < deepest {
                    open.push(inner);
                } else if !is_directory && matcher.is_match(&path) {
                    found.extend(self.find(&path, sysfs)?);
                }
                if found.len() > ENTRIES_MAX || open.len() > ENTRIES_MAX {
                    let message = format!("{glob} matches more than {ENTRIES_MAX} nodes");
                    return Err(Problem::invalid(ProblemCode::GlobTooWide, message));
                }
            }
        }
        found.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(found)
    }

    /// One node; `None` for what is no node, does not exist or is denied.
    fn find(&self, path: &str, sysfs: &SysfsRoot) -> Result<Option<NodeInfo>, Problem> {
        match self.stat(path, sysfs) {
            Ok(node) => Ok(Some(node)),
            Err(problem) if problem.kind.is_permanent() => Ok(None),
            Err(problem) => Err(problem),
        }
    }

    /// The node that a regular file stands for.
    fn simulated(&self, inside: &str) -> Result<Option<(NodeKind, u32, u32)>, Problem> {
        let file = self.open_beneath(inside, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC)?;
        let text = beneath::read(file, 64)
            .map_err(|error| Problem::unavailable(ProblemCode::IoError, format!("/dev/{inside}: {error}")))?;
        let numbers = std::str::from_utf8(&text).ok().and_then(NodeNumbers::parse);
        let Some(NodeNumbers { kind, major, minor }) = numbers else { return Ok(None) };
        let kind = match kind {
            nodedock_model::NodeKind::Character => NodeKind::Character,
            nodedock_model::NodeKind::Block => NodeKind::Block,
            nodedock_model::NodeKind::Fifo => NodeKind::Fifo,
        };
        Ok(Some((kind, major, minor)))
    }

    fn open_beneath(&self, path: &str, flags: OFlags) -> Result<OwnedFd, Problem> {
        self.open_until(Instant::now() + LOOK_WALL, path, flags)
    }

    fn open_until(&self, until: Instant, path: &str, flags: OFlags) -> Result<OwnedFd, Problem> {
        // Other mounts are part of /dev (`/dev/pts`); links are not: they may point anywhere.
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
        beneath::open(&self.dev, path, flags, resolve, until).map_err(|errno| match errno {
            // No name is that long.
            Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG => {
                Problem::not_found(ProblemCode::NoSuchNode, format!("/dev/{path} does not exist"))
            }
            Errno::LOOP | Errno::XDEV => {
                Problem::invalid(ProblemCode::NotANode, format!("/dev/{path} is behind a link"))
            }
            Errno::ACCESS | Errno::PERM => not_permitted(&format!("/dev/{path}")),
            errno => io_problem(&format!("/dev/{path}"), errno),
        })
    }

    /// What is in a directory, without links. What does not exist, is behind a link or may not be listed has no entries.
    fn entries(&self, directory: &str, until: Instant) -> Result<Vec<Entry>, Problem> {
        let path = if directory.is_empty() { "." } else { directory };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = match self.open_until(until, path, flags) {
            Err(problem) if problem.code == ProblemCode::NotANode => None,
            opened => present(opened)?,
        };
        let Some(opened) = opened else { return Ok(Vec::new()) };
        let entries = beneath::entries(&opened, DIRECTORY_ENTRIES_MAX, until);
        let mut entries = entries.map_err(|errno| io_problem(&format!("/dev/{directory}"), errno))?;
        if entries.len() > DIRECTORY_ENTRIES_MAX {
            let message = format!("/dev/{directory} has more than {DIRECTORY_ENTRIES_MAX} entries");
            return Err(Problem::invalid(ProblemCode::GlobTooWide, message));
        }
        entries.retain(|entry| entry.kind != FileType::Symlink);
        Ok(entries)
    }
}

/// `None` for a device without a directory below `/sys`.
fn sysfs_directory(
    sysfs: &SysfsRoot,
    kind: NodeKind,
    major: u32,
    minor: u32,
) -> Result<Option<String>, Problem> {
    let class = if kind == NodeKind::Block { "block" } else { "char" };
    sysfs.find(&format!("dev/{class}/{major}:{minor}"))
}

/// Decided by the kernel's name of a block device, not by that of its node.
fn is_disk(sysfs_path: Option<&str>) -> bool {
    let name = sysfs_path.and_then(|path| path.rsplit('/').next());
    name.is_some_and(|name| DENIED.matches(&format!("/dev/{name}")))
}

fn denied(path: &str) -> Problem {
    Problem::denied(ProblemCode::NeverAllowed, format!("no driver may have {path}, whatever is granted"))
}

fn io_problem(path: &str, errno: Errno) -> Problem {
    Problem::unavailable(ProblemCode::IoError, format!("{path}: {errno}"))
}

#[cfg(test)]
pub(super) mod tests;
