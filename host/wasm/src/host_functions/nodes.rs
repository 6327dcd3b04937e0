//! Looking at device nodes: never opening one, never following a link.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Instant;

use rustix::fs::{FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::bindings::nodedock::driver::device_nodes::NodeInfo;
use crate::bindings::types::NodeKind;
use crate::convert::node_kind;
use crate::host_functions::not_granted;
use nodedock_base::beneath::{self, Entry};
use nodedock_core::hardware::{Hardware, NodeNumbers};
use nodedock_core::sysfs::blocking::LOOK_WALL;
use nodedock_core::sysfs::{
    ENTRIES_MAX, SysfsRoot, bad_glob, join, not_permitted, present, read_stuck,
};
use nodedock_model::grant::ceiling::{self, NodeFacts};
use nodedock_model::grant::pattern::{self, PatternSet};
use nodedock_model::grant::{Effective, Naming};
use nodedock_model::rule::is_plain_path;
use nodedock_model::{Problem, ProblemCode};

/// File in which the kernel lists the terminals that are its console now, in the order of use.
const CONSOLES: &str = "class/tty/console/active";
/// File in which the kernel lists the names under which the major numbers of devices are registered.
const REGISTERED: &str = "devices";
/// File in which the kernel lists its consoles, with their numbers at the end of the line.
const REGISTERED_CONSOLES: &str = "consoles";

/// Names of the machine's memory, ports and log and of its watchdogs: a second line behind the kind of the device.
static DENIED: LazyLock<PatternSet> = LazyLock::new(|| {
    let never = [
        "/dev/{mem,kmem,port,kmsg,oldmem,nvram,snapshot}",
        "/dev/watchdog*",
    ];
    PatternSet::new(never).expect("the patterns above are globs")
});

/// Maximum depth of `**`.
const DEPTH_MAX: usize = 8;
/// Entries of a directory that a glob reads.
const DIRECTORY_ENTRIES_MAX: usize = 4 * ENTRIES_MAX;

/// A device node, and how a grant has to name it.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) info: NodeInfo,
    pub(crate) naming: Naming,
    /// Subsystem of the device, for messages.
    pub(crate) subsystem: Option<String>,
}

impl Node {
    /// The problem of a node that the grant does not have, or does not name explicitly enough.
    pub(crate) fn check_grant(&self, effective: &Effective) -> Result<(), Problem> {
        let path = &self.info.path;
        if effective.allows_device_node(path, self.naming) {
            return Ok(());
        }
        if !effective.allows_device_node(path, Naming::Glob) {
            return Err(not_granted("deviceNodes", path));
        }
        let kind = self
            .subsystem
            .as_deref()
            .map_or("unknown".to_owned(), |name| format!("{name:?}"));
        let message = format!(
            "{path} is granted by a glob alone, and its kind ({}, subsystem {kind}) needs its exact path (deviceNodes)",
            kind_text(self.info.kind)
        );
        Err(Problem::denied(ProblemCode::NotGranted, message).with("grant", "deviceNodes"))
    }
}

fn kind_text(kind: NodeKind) -> &'static str {
    match kind {
        NodeKind::Character => "character device",
        NodeKind::Block => "block device",
        NodeKind::Fifo => "pipe",
    }
}

/// `/dev`, or a directory of a test.
pub(crate) struct DevRoot {
    dev: OwnedFd,
    proc: PathBuf,
    /// True if regular files represent device nodes.
    is_simulated: bool,
}

/// A plain path below `/dev`, without the `/dev/`.
pub(crate) fn below_dev(path: &str) -> Result<&str, Problem> {
    let is_plain = is_plain_path(path) && !path.contains(char::is_control);
    let inside = path.strip_prefix("/dev/").filter(|_| is_plain);
    let shown: String = path.chars().take(128).collect();
    inside.ok_or_else(|| {
        Problem::invalid(
            ProblemCode::BadPath,
            format!("{shown:?} is no plain path below /dev"),
        )
    })
}

impl DevRoot {
    pub(crate) fn open(hardware: &Hardware) -> std::io::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dev = rustix::fs::open(hardware.dev(), flags, Mode::empty())?;
        Ok(Self {
            dev,
            proc: hardware.proc(),
            is_simulated: hardware.is_simulated(),
        })
    }

    /// One node. A link, a directory or a file is not a node.
    pub(crate) fn stat(&self, path: &str, sysfs: &SysfsRoot) -> Result<Node, Problem> {
        let inside = below_dev(path)?;
        if DENIED.matches(path) {
            return Err(denied(path));
        }
        // An `O_PATH` descriptor does not open the device: the driver behind it notices nothing.
        let node = self.open_beneath(inside, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC)?;
        let stat = rustix::fs::fstat(&node).map_err(|errno| io_problem(path, errno))?;
        let not_a_node =
            || Problem::invalid(ProblemCode::NotANode, format!("{path} is no device node"));
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
            kind => (
                kind,
                rustix::fs::major(stat.st_rdev),
                rustix::fs::minor(stat.st_rdev),
            ),
        };
        let numbered = kind != NodeKind::Fifo;
        let sysfs_path = if numbered {
            sysfs_directory(sysfs, kind, major, minor)?
        } else {
            None
        };
        let subsystem = match &sysfs_path {
            Some(directory) => match subsystem(sysfs, directory)? {
                None if self.is_simulated => listed_subsystem(sysfs, directory)?,
                found => found,
            },
            None if kind == NodeKind::Character => self.registered(major)?,
            None => None,
        };
        let name = sysfs_path
            .as_deref()
            .and_then(|path| path.rsplit('/').next());
        let is_console = match name {
            Some(name) if subsystem.as_deref() == Some("tty") => {
                is_console(sysfs, name)? || self.is_registered_console(major, minor)?
            }
            _ => false,
        };
        let facts = NodeFacts {
            kind: node_kind(kind),
            major,
            minor,
            name,
            subsystem: subsystem.as_deref(),
            is_console,
        };
        let naming = ceiling::device_node(facts).ok_or_else(|| denied(path))?;
        // What a record of a machine does not say of a node is no reason against it: there is no device behind it.
        let is_unrecorded = self.is_simulated
            && kind == NodeKind::Character
            && sysfs_path.is_none()
            && subsystem.is_none();
        let naming = if is_unrecorded { Naming::Glob } else { naming };
        let info = NodeInfo {
            path: path.to_owned(),
            kind,
            major,
            minor,
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
            sysfs_path,
        };
        Ok(Node {
            info,
            naming,
            subsystem,
        })
    }

    /// Returns true if the kernel lists the numbers of a terminal among its consoles, which may have another name there (`3270/tty1`).
    fn is_registered_console(&self, major: u32, minor: u32) -> Result<bool, Problem> {
        let numbers = format!("{major}:{minor}");
        let consoles = self.proc_text(REGISTERED_CONSOLES)?.unwrap_or_default();
        Ok(consoles
            .lines()
            .any(|line| line.split_whitespace().next_back() == Some(numbers.as_str())))
    }

    /// The name under which a module registered a major number of character devices.
    fn registered(&self, major: u32) -> Result<Option<String>, Problem> {
        let text = self.proc_text(REGISTERED)?;
        Ok(text
            .as_deref()
            .and_then(|text| registered_name(text, major))
            .map(str::to_owned))
    }

    /// A file of `/proc`; `None` where the kernel has none.
    fn proc_text(&self, name: &str) -> Result<Option<String>, Problem> {
        let path = self.proc.join(name);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => {
                let message = format!("{}: {error}", path.display());
                Err(Problem::unavailable(ProblemCode::IoError, message))
            }
        }
    }

    /// Nodes that match; other files and denied nodes are left out.
    pub(crate) fn glob(&self, glob: &str, sysfs: &SysfsRoot) -> Result<Vec<Node>, Problem> {
        let inside = below_dev(glob)?;
        let matcher = pattern::compile(glob)
            .map_err(|error| bad_glob(glob, &error))?
            .compile_matcher();
        let mut found = Vec::new();
        // The walk begins in the literal directory before the first wildcard.
        let start: Vec<&str> = inside
            .split('/')
            .take_while(|segment| pattern::is_literal(segment))
            .collect();
        let deep = inside.split('/').count();
        if start.len() == deep {
            return Ok(self.find(glob, sysfs)?.into_iter().collect());
        }
        let deepest = if inside.contains("**") {
            DEPTH_MAX
        } else {
            deep
        };
        let mut open = vec![start.join("/")];
        // Its caller does not wait longer.
        let until = Instant::now() + LOOK_WALL;
        while let Some(directory) = open.pop() {
            if Instant::now() >= until {
                return Err(read_stuck());
            }
            let depth = if directory.is_empty() {
                0
            } else {
                directory.split('/').count()
            };
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
        found.sort_by(|a, b| a.info.path.cmp(&b.info.path));
        Ok(found)
    }

    /// One node; `None` for what is no node, does not exist or is denied.
    fn find(&self, path: &str, sysfs: &SysfsRoot) -> Result<Option<Node>, Problem> {
        match self.stat(path, sysfs) {
            Ok(node) => Ok(Some(node)),
            Err(problem) if problem.kind.is_permanent() => Ok(None),
            Err(problem) => Err(problem),
        }
    }

    /// Returns the device node that a regular file represents.
    fn simulated(&self, inside: &str) -> Result<Option<(NodeKind, u32, u32)>, Problem> {
        let file =
            self.open_beneath(inside, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC)?;
        let text = beneath::read(file, 64).map_err(|error| {
            Problem::unavailable(ProblemCode::IoError, format!("/dev/{inside}: {error}"))
        })?;
        let numbers = std::str::from_utf8(&text).ok().and_then(NodeNumbers::parse);
        let Some(NodeNumbers { kind, major, minor }) = numbers else {
            return Ok(None);
        };
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
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_SYMLINKS;
        beneath::open(&self.dev, path, flags, resolve, until).map_err(|errno| match errno {
            // No name is that long.
            Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG => Problem::not_found(
                ProblemCode::NoSuchNode,
                format!("/dev/{path} does not exist"),
            ),
            Errno::LOOP | Errno::XDEV => Problem::invalid(
                ProblemCode::NotANode,
                format!("/dev/{path} is behind a link"),
            ),
            Errno::ACCESS | Errno::PERM => not_permitted(&format!("/dev/{path}")),
            errno => io_problem(&format!("/dev/{path}"), errno),
        })
    }

    /// Returns the entries of a directory, without links. A directory that does not exist, is behind a link or may not be listed has none.
    fn entries(&self, directory: &str, until: Instant) -> Result<Vec<Entry>, Problem> {
        let path = if directory.is_empty() { "." } else { directory };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = match self.open_until(until, path, flags) {
            Err(problem) if problem.code == ProblemCode::NotANode => None,
            opened => present(opened)?,
        };
        let Some(opened) = opened else {
            return Ok(Vec::new());
        };
        let entries = beneath::entries(&opened, DIRECTORY_ENTRIES_MAX, until);
        let mut entries =
            entries.map_err(|errno| io_problem(&format!("/dev/{directory}"), errno))?;
        if entries.len() > DIRECTORY_ENTRIES_MAX {
            let message = format!("/dev/{directory} has more than {DIRECTORY_ENTRIES_MAX} entries");
            return Err(Problem::invalid(ProblemCode::GlobTooWide, message));
        }
        entries.retain(|entry| entry.kind != FileType::Symlink);
        Ok(entries)
    }
}

/// `None`: the kernel shows no device of this number.
fn sysfs_directory(
    sysfs: &SysfsRoot,
    kind: NodeKind,
    major: u32,
    minor: u32,
) -> Result<Option<String>, Problem> {
    let class = if kind == NodeKind::Block {
        "block"
    } else {
        "char"
    };
    sysfs.find(&format!("dev/{class}/{major}:{minor}"))
}

fn subsystem(sysfs: &SysfsRoot, directory: &str) -> Result<Option<String>, Problem> {
    let path = sysfs.find(&format!("{directory}/subsystem"))?;
    Ok(path.and_then(|path| Some(path.rsplit('/').next()?.to_owned())))
}

/// The class or bus that lists a device, in a record of a machine that left out the device's own link to it.
fn listed_subsystem(sysfs: &SysfsRoot, directory: &str) -> Result<Option<String>, Problem> {
    let Some(name) = directory.rsplit('/').next() else {
        return Ok(None);
    };
    for glob in [format!("class/*/{name}"), format!("bus/*/devices/{name}")] {
        for link in sysfs.glob(&glob)? {
            if sysfs.find(&link)?.as_deref() == Some(directory) {
                return Ok(link.split('/').nth(1).map(str::to_owned));
            }
        }
    }
    Ok(None)
}

fn is_console(sysfs: &SysfsRoot, name: &str) -> Result<bool, Problem> {
    let active = present(sysfs.read(CONSOLES))?;
    Ok(active.is_some_and(|active| {
        String::from_utf8_lossy(&active)
            .split_whitespace()
            .any(|console| console == name)
    }))
}

/// Parses `/proc/devices`: one line of number and name for each registration, character devices first. `None` if the major number has several
/// names, of which one says nothing of a minor number, except for those of one module (`nvidia`, `nvidiactl`): then the first of them.
fn registered_name(text: &str, major: u32) -> Option<&str> {
    let characters = text
        .lines()
        .take_while(|line| !line.starts_with("Block devices"));
    let registered = characters.filter_map(|line| line.trim().split_once(' '));
    let mut names = registered
        .filter(|(number, _)| number.parse() == Ok(major))
        .map(|(_, name)| name.trim());
    let first = names.next()?;
    names.all(|name| name.starts_with(first)).then_some(first)
}

fn denied(path: &str) -> Problem {
    Problem::denied(
        ProblemCode::NeverAllowed,
        format!("no driver may have {path}, whatever is granted"),
    )
}

fn io_problem(path: &str, errno: Errno) -> Problem {
    Problem::unavailable(ProblemCode::IoError, format!("{path}: {errno}"))
}

#[cfg(test)]
pub(crate) mod tests;
