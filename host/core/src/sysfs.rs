//! Reading below `/sys` and nowhere else. Blocking functions, not for async threads.
//!
//! Is given paths that a grant allows. The kernel resolves every path beneath the root, without magic links and without other mounts, and
//! the resolved path is checked against the lists of what no driver may touch.

pub mod attribute;
pub mod blocking;
pub mod in_use;
pub mod pci;
mod restore;
pub mod simulation;

pub use self::restore::{Fate, SysfsTree};

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Instant;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::sysfs::attribute::{Attribute, Written};
use crate::sysfs::blocking::LOOK_WALL;
use crate::sysfs::simulation::Simulation;
use nodedock_base::beneath;
use nodedock_model::grant::pattern::{self, PatternSet};
use nodedock_model::limit::PATH_BYTES_MAX;
use nodedock_model::rule::is_unprintable;
use nodedock_model::{Problem, ProblemCode, ProblemKind};

/// Bytes of one read: sysfs files have at most a page, `config` spaces 4 KiB; binary attributes may be larger.
const READ_BYTES_MAX: usize = 64 << 10;
/// Entries that `read-dir` or a glob returns.
pub const ENTRIES_MAX: usize = 4096;

/// Bytes of a written value: a kernel attribute takes at most a page.
pub const VALUE_BYTES_MAX: usize = 4096;
/// Directories that one glob may read, and how deep `**` goes.
const GLOB_DIRECTORIES_MAX: usize = 16_384;
const GLOB_DEPTH_MAX: usize = 12;

/// Paths that are never read, regardless of grants: other mounts' contents, secrets and addresses of the kernel, and files whose reading
/// acts on the hardware or hangs (ROM, vital product data, configuration space, memory of a PCI device).
static READ_DENIED: LazyLock<PatternSet> = LazyLock::new(|| {
    patterns(&[
        "**/rom",
        "**/vpd",
        "**/config",
        "**/{legacy_io,legacy_mem}",
        "devices/virtual/devcoredump/**",
        "**/resource[0-9]",
        "**/resource[0-9]_*",
        "**/{bind,unbind,new_id,remove_id,remove,rescan,reset,drivers_probe,hot_add,hot_remove}",
        "firmware/{acpi,efi,qemu_fw_cfg}",
        "firmware/{acpi,efi,qemu_fw_cfg}/**",
        "firmware/{dmi/tables,memmap}/**",
        "fs/{bpf,cgroup,pstore,resctrl,selinux,smackfs}",
        "fs/{bpf,cgroup,pstore,resctrl,selinux,smackfs}/**",
        "kernel/{boot_params,config,debug,kexec_crash_size,notes,security,tracing,vmcoreinfo}",
        "kernel/{boot_params,config,debug,security,tracing}/**",
        "module/*/sections/**",
    ])
});

/// Reader of a file or directory below `/sys`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// The host itself, which reads what root may.
    Host,
    /// A driver: what every user of the node may read.
    Everyone,
    /// A driver whose grant names this very path: also what only root may read, in the directory of a device.
    Named,
}

pub fn patterns(texts: &[&str]) -> PatternSet {
    PatternSet::new(texts.iter().copied()).expect("the patterns above are globs")
}

/// The problem of a read below `/sys` that takes longer than `LOOK_WALL`.
pub fn read_stuck() -> Problem {
    let millis = LOOK_WALL.as_millis();
    let message = format!("the driver read what did not answer within {millis} ms");
    Problem::unavailable(ProblemCode::SysfsStuck, message)
}

/// `/sys`, or a tree of a test.
pub struct SysfsRoot {
    root: OwnedFd,
    path: PathBuf,
    /// Simulation of the effects of a write, where there is no kernel.
    simulation: Option<Simulation>,
}

/// A plain path relative to `/sys`.
pub fn check_path(path: &str) -> Result<(), Problem> {
    let plain = path
        .split('/')
        .all(|segment| !matches!(segment, "" | "." | ".."));
    if plain && path.len() <= PATH_BYTES_MAX && !path.contains(is_unprintable) {
        return Ok(());
    }
    Err(Problem::invalid(
        ProblemCode::BadPath,
        format!("{} is no plain path relative to /sys", shown(path)),
    ))
}

fn shown(path: &str) -> String {
    format!("{:?}", path.chars().take(128).collect::<String>())
}

impl SysfsRoot {
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let path = path.canonicalize()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&path, flags, Mode::empty())?;
        Ok(Self {
            root,
            path,
            simulation: None,
        })
    }

    /// Opens a directory in place of `/sys` in which writes have the effects that they have in the kernel.
    pub fn open_simulated(path: &Path) -> std::io::Result<Self> {
        let root = Self::open(path)?;
        let simulation = Some(Simulation::new(&root.path)?);
        Ok(Self { simulation, ..root })
    }

    /// Checks that a reader may read a file, or list a directory, at a path without links.
    pub fn admit(
        &self,
        path: &str,
        resolved: &str,
        stat: &Stat,
        reader: Reader,
    ) -> Result<(), Problem> {
        // A recorded machine has no modes of its own.
        if reader == Reader::Host || self.simulation.is_some() {
            return Ok(());
        }
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let needed = if is_directory {
            Mode::ROTH | Mode::XOTH
        } else {
            Mode::ROTH
        };
        let is_public = Mode::from_raw_mode(stat.st_mode).contains(needed)
            && self.is_way_public(path, resolved)?;
        if is_public || (reader == Reader::Named && resolved.starts_with("devices/")) {
            return Ok(());
        }
        let message = format!(
            "not every user of the node may read /sys/{path}: such a file of a device is granted by its exact path only (sysfsRead), and no other"
        );
        Err(Problem::denied(ProblemCode::NotPublic, message).with("grant", "sysfsRead"))
    }

    /// Returns whether every user may pass each directory on the way.
    fn is_way_public(&self, path: &str, resolved: &str) -> Result<bool, Problem> {
        for (end, _) in resolved.match_indices('/') {
            let found = rustix::fs::statat(&self.root, &resolved[..end], AtFlags::SYMLINK_NOFOLLOW);
            let found = found.map_err(|errno| io_problem(path, &errno.into()))?;
            if !Mode::from_raw_mode(found.st_mode).contains(Mode::XOTH) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes to the file that was read before, or binds the PCI function. An error: it is another file, or cannot be opened, and nothing was
    /// written.
    pub fn store(&self, found: &Attribute, value: &str) -> Result<Written, Problem> {
        if pci::is_binding(&found.path) {
            return self.pci().bind(found, value);
        }
        self.write(found, value)
    }

    /// The effects of a write that the file took.
    fn written(&self, path: &str, value: &str) -> std::io::Result<()> {
        let Some(simulation) = &self.simulation else {
            return Ok(());
        };
        let path = self.resolve(path).unwrap_or_else(|_| path.to_owned());
        simulation.written(&path, value)
    }

    pub fn read(&self, path: &str) -> Result<Vec<u8>, Problem> {
        self.read_for(path, Reader::Host)
    }

    /// Reads a file for the host or a driver.
    pub fn read_for(&self, path: &str, reader: Reader) -> Result<Vec<u8>, Problem> {
        let (resolved, stat) = self.regular_file(path)?;
        self.admit(path, &resolved, &stat, reader)?;
        let content = self.content(path, &resolved)?;
        if content.len() > READ_BYTES_MAX {
            let message = format!("/sys/{path} has more than {READ_BYTES_MAX} bytes");
            return Err(Problem::invalid(ProblemCode::FileTooLarge, message));
        }
        Ok(content)
    }

    /// Names in a directory, sorted.
    pub fn read_dir(&self, path: &str) -> Result<Vec<String>, Problem> {
        self.read_dir_for(path, Reader::Host)
    }

    /// Names in a directory, sorted, for the host or a driver.
    pub fn read_dir_for(&self, path: &str, reader: Reader) -> Result<Vec<String>, Problem> {
        let names = self.names(path, Instant::now() + LOOK_WALL, reader)?;
        match names.len() <= ENTRIES_MAX {
            true => Ok(names.into_iter().map(|(name, _)| name).collect()),
            false => Err(too_many(path)),
        }
    }

    /// The target of a link, relative to the root.
    pub fn read_link(&self, path: &str) -> Result<String, Problem> {
        check_path(path)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let link = self.open_beneath(path, flags, ResolveFlags::empty())?;
        if FileType::from_raw_mode(stat(path, &link)?.st_mode) != FileType::Symlink {
            return Err(Problem::invalid(
                ProblemCode::NotALink,
                format!("/sys/{path} is no link"),
            ));
        }
        self.resolve(path)
    }

    /// The path without links.
    pub fn resolve(&self, path: &str) -> Result<String, Problem> {
        let end = self.open_beneath(path, OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::empty())?;
        self.resolved(path, &end)
    }

    /// The path without links; `None` where nothing exists, or where no driver may look.
    pub fn find(&self, path: &str) -> Result<Option<String>, Problem> {
        present(check_path(path).and_then(|()| self.resolve(path)))
    }

    /// The text of a file without the white space around it; `None` where nothing exists or the kernel has no value now, and for what is no
    /// text.
    pub fn find_text(&self, path: &str) -> Result<Option<String>, Problem> {
        match self.read(path) {
            Ok(content) => Ok(std::str::from_utf8(&content)
                .map(|text| text.trim().to_owned())
                .ok()),
            Err(problem) if is_absent(&problem) => Ok(None),
            Err(problem) => Err(problem),
        }
    }

    /// Returns the same as `find_text`; `None` also for a file that no driver may read, and for a path that is no file.
    pub fn fact(&self, path: &str) -> Result<Option<String>, Problem> {
        match self.find_text(path) {
            Err(problem) if problem.kind.is_permanent() => Ok(None),
            found => found,
        }
    }

    /// Returns whether there is such a file or directory: a network interface, a device.
    pub fn exists(&self, path: &str) -> Result<bool, Problem> {
        Ok(self.find(path)?.is_some())
    }

    /// Paths that match, as a driver sees them by a walk from the root, sorted.
    pub fn glob(&self, glob: &str) -> Result<Vec<String>, Problem> {
        let segments: Vec<&str> = glob.split('/').collect();
        let until = Instant::now() + LOOK_WALL;
        let mut walk = Walk {
            root: self,
            until,
            directories: 0,
            found: Vec::new(),
        };
        walk.descend(String::new(), &segments, 0)?;
        walk.found.sort();
        walk.found.dedup();
        Ok(walk.found)
    }

    /// Resolves a path to a regular file that drivers may touch.
    pub fn regular_file(&self, path: &str) -> Result<(String, Stat), Problem> {
        check_path(path)?;
        let end = self.open_beneath(path, OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::empty())?;
        let resolved = self.resolved(path, &end)?;
        let stat = stat(path, &end)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Problem::invalid(
                ProblemCode::NotAFile,
                format!("/sys/{path} is no regular file"),
            ));
        }
        Ok((resolved, stat))
    }

    /// Reads at most one byte more than a driver may have.
    pub fn content(&self, path: &str, resolved: &str) -> Result<Vec<u8>, Problem> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = self.open_beneath(resolved, flags, ResolveFlags::NO_SYMLINKS)?;
        beneath::read(file, READ_BYTES_MAX as u64 + 1).map_err(|error| {
            match Errno::from_io_error(&error) {
                Some(errno) if has_no_value(errno) => no_value(path, errno),
                _ => io_problem(path, &error),
            }
        })
    }

    /// Names in a directory and whether each is a directory itself, sorted.
    fn names(
        &self,
        path: &str,
        until: Instant,
        reader: Reader,
    ) -> Result<Vec<(String, bool)>, Problem> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let name = if path.is_empty() { "." } else { path };
        let directory = self.open_until(until, name, flags, ResolveFlags::empty())?;
        let resolved = self.resolved(path, &directory)?;
        self.admit(path, &resolved, &stat(path, &directory)?, reader)?;
        let entries = beneath::entries(&directory, GLOB_DIRECTORIES_MAX, until);
        let entries = entries.map_err(|errno| io_problem(path, &errno.into()))?;
        if entries.len() > GLOB_DIRECTORIES_MAX {
            return Err(too_many(path));
        }
        Ok(entries
            .into_iter()
            .map(|entry| (entry.name, entry.kind == FileType::Directory))
            .collect())
    }

    pub fn open_beneath(
        &self,
        path: &str,
        flags: OFlags,
        more: ResolveFlags,
    ) -> Result<OwnedFd, Problem> {
        self.open_until(Instant::now() + LOOK_WALL, path, flags, more)
    }

    fn open_until(
        &self,
        until: Instant,
        path: &str,
        flags: OFlags,
        more: ResolveFlags,
    ) -> Result<OwnedFd, Problem> {
        let resolve =
            ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV | more;
        beneath::open(&self.root, path, flags, resolve, until).map_err(|errno| match errno {
            // No name is that long.
            Errno::NOENT | Errno::NAMETOOLONG => Problem::not_found(
                ProblemCode::NoSuchPath,
                format!("/sys/{path} does not exist"),
            ),
            Errno::NOTDIR if flags.contains(OFlags::DIRECTORY) => Problem::invalid(
                ProblemCode::NotADirectory,
                format!("/sys/{path} is not a directory"),
            ),
            Errno::NOTDIR => Problem::not_found(
                ProblemCode::NoSuchPath,
                format!("/sys/{path} does not exist"),
            ),
            Errno::XDEV | Errno::LOOP => Problem::denied(
                ProblemCode::OutsideSysfs,
                format!("/sys/{path} leads out of /sys"),
            ),
            Errno::ACCESS | Errno::PERM => not_permitted(&format!("/sys/{path}")),
            // The device is being removed.
            Errno::NODEV | Errno::NXIO => no_value(path, errno),
            errno => io_problem(path, &errno.into()),
        })
    }

    /// The path of an open file, relative to the root; refused where no driver may read.
    fn resolved(&self, path: &str, fd: &OwnedFd) -> Result<String, Problem> {
        use std::os::fd::AsRawFd;
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let target = rustix::fs::readlinkat(CWD, link, Vec::new()).map_err(|errno| {
            Problem::unavailable(
                ProblemCode::IoError,
                format!("/sys/{path}: resolve: {errno}"),
            )
        })?;
        let outside = || {
            Problem::denied(
                ProblemCode::OutsideSysfs,
                format!("/sys/{path} leads out of /sys"),
            )
        };
        let target = Path::new(target.to_str().map_err(|_| outside())?);
        let inside = target.strip_prefix(&self.path).map_err(|_| outside())?;
        let inside = inside.to_str().ok_or_else(outside)?.to_owned();
        if READ_DENIED.matches(path) || READ_DENIED.matches(&inside) {
            return Err(denied(path));
        }
        Ok(inside)
    }
}

pub fn stat(path: &str, fd: &OwnedFd) -> Result<Stat, Problem> {
    rustix::fs::fstat(fd).map_err(|errno| io_problem(path, &errno.into()))
}

pub fn denied(path: &str) -> Problem {
    let message = format!("no driver may touch /sys/{path}, whatever is granted");
    Problem::denied(ProblemCode::NeverAllowed, message)
}

/// The kernel refuses the daemon's user.
pub fn not_permitted(path: &str) -> Problem {
    let message = format!("the user of the daemon may not open {path}");
    Problem::denied(ProblemCode::NotPermitted, message)
}

/// Returns whether the kernel reports that an attribute has no value at the moment, and not that the read failed: a link is down (`EINVAL`,
/// Documentation/ABI/testing/sysfs-class-net), the device has no such property (`EOPNOTSUPP`, and `ENOTSUPP` of the kernel's own), is being
/// removed (`ENODEV`, `ENXIO`), or has not measured yet (`ENODATA`).
fn has_no_value(errno: Errno) -> bool {
    const NOTSUPP: Errno = Errno::from_raw_os_error(524);
    let none = [
        Errno::INVAL,
        Errno::OPNOTSUPP,
        NOTSUPP,
        Errno::NODEV,
        Errno::NXIO,
        Errno::NODATA,
    ];
    none.contains(&errno)
}

fn no_value(path: &str, errno: Errno) -> Problem {
    Problem::unavailable(
        ProblemCode::NoValue,
        format!("the kernel has no value of /sys/{path} now: {errno}"),
    )
}

/// Returns whether a problem says that there is nothing, as opposed to a read that failed.
pub fn is_absent(problem: &Problem) -> bool {
    problem.kind == ProblemKind::NotFound || problem.code == ProblemCode::NoValue
}

/// `None` for what does not exist or no driver may see.
pub fn present<T>(found: Result<T, Problem>) -> Result<Option<T>, Problem> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(problem) if is_absent(&problem) || problem.kind == ProblemKind::Denied => Ok(None),
        Err(problem) => Err(problem),
    }
}

fn too_many(path: &str) -> Problem {
    Problem::invalid(
        ProblemCode::TooManyEntries,
        format!("/sys/{path} has more than {ENTRIES_MAX} entries"),
    )
}

fn too_wide(does: &str, max: usize, what: &str) -> Problem {
    Problem::invalid(
        ProblemCode::GlobTooWide,
        format!("the glob {does} more than {max} {what}"),
    )
}

pub fn io_problem(path: &str, error: &std::io::Error) -> Problem {
    Problem::unavailable(ProblemCode::IoError, format!("/sys/{path}: {error}"))
}

struct Walk<'a> {
    root: &'a SysfsRoot,
    /// Its caller does not wait longer.
    until: Instant,
    directories: usize,
    found: Vec<String>,
}

impl Walk<'_> {
    fn descend(
        &mut self,
        directory: String,
        segments: &[&str],
        depth: usize,
    ) -> Result<(), Problem> {
        let Some((first, rest)) = segments.split_first() else {
            return self.find(directory);
        };
        if *first == "**" {
            return self.descend_all(directory, segments, depth);
        }
        if pattern::is_literal(first) {
            let path = join(&directory, first);
            return if rest.is_empty() && !self.exists(&path)? {
                Ok(())
            } else {
                self.descend(path, rest, depth + 1)
            };
        }
        let matcher = pattern::compile(first)
            .map_err(|e| bad_glob(first, &e))?
            .compile_matcher();
        for (name, _) in self.names(&directory)? {
            if matcher.is_match(&name) {
                let path = join(&directory, &name);
                self.descend(path, rest, depth + 1)?;
            }
        }
        Ok(())
    }

    /// `**`: here, and in every directory below that is not behind a link.
    fn descend_all(
        &mut self,
        directory: String,
        segments: &[&str],
        depth: usize,
    ) -> Result<(), Problem> {
        let rest = &segments[1..];
        let last = rest.is_empty();
        if !last {
            self.descend(directory.clone(), rest, depth)?;
        }
        if depth >= GLOB_DEPTH_MAX {
            return Ok(());
        }
        for (name, is_directory) in self.names(&directory)? {
            let path = join(&directory, &name);
            if last {
                self.find(path.clone())?;
            }
            if is_directory {
                self.descend_all(path, segments, depth + 1)?;
            }
        }
        Ok(())
    }

    fn exists(&self, path: &str) -> Result<bool, Problem> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(present(
            self.root
                .open_until(self.until, path, flags, ResolveFlags::empty()),
        )?
        .is_some())
    }

    /// A path that is not a directory, was removed meanwhile or is denied has no names. Another failure fails the glob.
    fn names(&mut self, directory: &str) -> Result<Vec<(String, bool)>, Problem> {
        self.directories += 1;
        if Instant::now() >= self.until {
            return Err(read_stuck());
        }
        if self.directories > GLOB_DIRECTORIES_MAX {
            return Err(too_wide("reads", GLOB_DIRECTORIES_MAX, "directories"));
        }
        match self.root.names(directory, self.until, Reader::Everyone) {
            Err(problem) if problem.code == ProblemCode::NotADirectory => Ok(Vec::new()),
            names => Ok(present(names)?.unwrap_or_default()),
        }
    }

    fn find(&mut self, path: String) -> Result<(), Problem> {
        // `**` can reach a path in several ways; duplicates are dropped at the end.
        if self.found.len() >= ENTRIES_MAX {
            return Err(too_wide("matches", ENTRIES_MAX, "paths"));
        }
        self.found.push(path);
        Ok(())
    }
}

pub fn join(directory: &str, name: &str) -> String {
    if directory.is_empty() {
        name.to_owned()
    } else {
        format!("{directory}/{name}")
    }
}

pub fn bad_glob(glob: &str, error: &pattern::PatternError) -> Problem {
    Problem::invalid(
        ProblemCode::BadGlob,
        format!("{} is not a glob: {error}", shown(glob)),
    )
}

#[cfg(test)]
mod tests;
