//! Looking at device nodes: never opening one, never following a link.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::sync::LazyLock;
use std::time::Instant;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use super::bindings::nodedock::driver::device_nodes::NodeInfo;
use super::bindings::types::NodeKind;
use nodedock_core::hardware::{Hardware, NodeNumbers};
use nodedock_core::sysfs::blocking::LOOK_WALL;
use nodedock_core::sysfs::{ENTRIES_MAX, SysfsRoot, bad_glob, join, read_stuck};
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
            NodeKind::Fifo if is_file => self.simulated(inside).ok_or_else(not_a_node)?,
            NodeKind::Fifo => (kind, 0, 0),
            kind => (kind, rustix::fs::major(stat.st_rdev), rustix::fs::minor(stat.st_rdev)),
        };
        let numbered = kind != NodeKind::Fifo;
        if kind == NodeKind::Character && major == MEMORY_MAJOR && MEMORY_MINORS.contains(&minor) {
            return Err(denied(path));
        }
        let sysfs_path = if numbered { sysfs_directory(sysfs, kind, major, minor) } else { None };
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
            return match self.stat(glob, sysfs) {
                Ok(node) => Ok(vec![node]),
                Err(problem) if problem.kind.is_permanent() => Ok(Vec::new()),
                Err(problem) => Err(problem),
            };
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
            for (name, is_directory) in self.names(&directory) {
                let inner = join(&directory, &name);
                let path = format!("/dev/{inner}");
                if is_directory && depth + 1 < deepest {
                    open.push(inner);
                } else if !is_directory && matcher.is_match(&path) {
                    found.extend(self.stat(&path, sysfs));
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

    /// The node that a regular file stands for.
    fn simulated(&self, inside: &str) -> Option<(NodeKind, u32, u32)> {
        let mut text = String::new();
        let file = self.open_beneath(inside, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC).ok()?;
        std::fs::File::from(file).take(64).read_to_string(&mut text).ok()?;
        let NodeNumbers { kind, major, minor } = NodeNumbers::parse(&text)?;
        let kind = match kind {
            nodedock_model::NodeKind::Character => NodeKind::Character,
            nodedock_model::NodeKind::Block => NodeKind::Block,
            nodedock_model::NodeKind::Fifo => NodeKind::Fifo,
        };
        Some((kind, major, minor))
    }

    fn open_beneath(&self, path: &str, flags: OFlags) -> Result<OwnedFd, Problem> {
        // Other mounts are part of /dev (`/dev/pts`); links are not: they may point anywhere.
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
        rustix::fs::openat2(&self.dev, path, flags, Mode::empty(), resolve).map_err(|errno| match errno {
            Errno::NOENT | Errno::NOTDIR => {
                Problem::not_found(ProblemCode::NoSuchNode, format!("/dev/{path} does not exist"))
            }
            Errno::LOOP | Errno::XDEV => {
                Problem::invalid(ProblemCode::NotANode, format!("/dev/{path} is behind a link"))
            }
            errno => io_problem(path, errno),
        })
    }

    fn names(&self, directory: &str) -> Vec<(String, bool)> {
        let path = if directory.is_empty() { "." } else { directory };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let Ok(opened) = self.open_beneath(path, flags) else { return Vec::new() };
        let Ok(entries) = rustix::fs::Dir::read_from(&opened) else { return Vec::new() };
        let entries = entries.filter_map(Result::ok).take(4 * ENTRIES_MAX);
        let names = entries.filter_map(|entry| {
            let name = entry.file_name().to_str().ok()?.to_owned();
            let real = !matches!(name.as_str(), "." | "..") && entry.file_type() != FileType::Symlink;
            real.then_some((name, entry.file_type() == FileType::Directory))
        });
        names.collect()
    }
}

fn sysfs_directory(sysfs: &SysfsRoot, kind: NodeKind, major: u32, minor: u32) -> Option<String> {
    let class = if kind == NodeKind::Block { "block" } else { "char" };
    sysfs.resolve(&format!("dev/{class}/{major}:{minor}")).ok()
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
