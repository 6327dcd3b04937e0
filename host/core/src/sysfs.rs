//! Reading below `/sys` and nowhere else. Blocking functions, not for async threads.
//!
//! Is given paths that a grant allows. The kernel resolves every path beneath the root, without magic links and without other mounts, and
//! the resolved path is checked against the lists of what no driver may touch.

pub mod attribute;
pub mod blocking;
pub mod pci;
mod restore;
pub mod simulation;

pub use self::restore::{Fate, SysfsTree};

use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Instant;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::sysfs::blocking::LOOK_WALL;
use crate::sysfs::simulation::Simulation;
use nodedock_model::grant::pattern::{self, PatternSet};
use nodedock_model::limit::PATH_BYTES_MAX;
use nodedock_model::rule::is_unprintable;
use nodedock_model::{Problem, ProblemCode};

/// Bytes of one read: sysfs files have at most a page, `config` spaces 4 KiB; binary attributes may be larger.
const READ_BYTES_MAX: usize = 64 << 10;
/// Entries that `read-dir` or a glob returns.
pub const ENTRIES_MAX: usize = 4096;

/// Bytes of a written value: a kernel attribute takes at most a page.
pub const VALUE_BYTES_MAX: usize = 4096;
/// Directories that one glob may read, and how deep `**` goes.
const GLOB_DIRECTORIES_MAX: usize = 16_384;
const GLOB_DEPTH_MAX: usize = 12;

/// Never read, whatever is granted: other mounts' contents, secrets and addresses of the kernel, and files whose reading acts on
/// the hardware or hangs (ROM, vital product data, configuration space, memory of a PCI device).
static READ_DENIED: LazyLock<PatternSet> = LazyLock::new(|| {
    patterns(&[
        "**/rom",
        "**/vpd",
        "**/config",
        "**/resource[0-9]",
        "**/resource[0-9]_*",
        "**/{bind,unbind,new_id,remove_id,remove,rescan,reset,drivers_probe}",
        "firmware/{acpi,efi,qemu_fw_cfg}",
        "firmware/{acpi,efi,qemu_fw_cfg}/**",
        "firmware/dmi/tables/**",
        "fs/{bpf,cgroup,pstore,resctrl,selinux,smackfs}",
        "fs/{bpf,cgroup,pstore,resctrl,selinux,smackfs}/**",
        "kernel/{config,debug,security,tracing}",
        "kernel/{config,debug,security,tracing}/**",
        "module/*/sections/**",
    ])
});

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
    /// What follows a write where no kernel is.
    simulation: Option<Simulation>,
}

/// A plain path relative to `/sys`.
pub fn check_path(path: &str) -> Result<(), Problem> {
    let plain = path.split('/').all(|segment| !matches!(segment, "" | "." | ".."));
    if plain && path.len() <= PATH_BYTES_MAX && !path.contains(is_unprintable) {
        return Ok(());
    }
    Err(Problem::invalid(ProblemCode::BadPath, format!("{} is no plain path relative to /sys", shown(path))))
}

fn shown(path: &str) -> String {
    format!("{:?}", path.chars().take(128).collect::<String>())
}

impl SysfsRoot {
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let path = path.canonicalize()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&path, flags, Mode::empty())?;
        Ok(Self { root, path, simulation: None })
    }

    /// Opens a directory in place of `/sys` in which writes have the effects that they have in the kernel.
    pub fn open_simulated(path: &Path) -> std::io::Result<Self> {
        let root = Self::open(path)?;
        let simulation = Some(Simulation::new(&root.path)?);
        Ok(Self { simulation, ..root })
    }

    /// The effects of a write that the file took.
    fn written(&self, path: &str, value: &str) -> std::io::Result<()> {
        let Some(simulation) = &self.simulation else { return Ok(()) };
        let path = self.resolve(path).unwrap_or_else(|_| path.to_owned());
        simulation.written(&path, value)
    }

    pub fn read(&self, path: &str) -> Result<Vec<u8>, Problem> {
        let (resolved, _) = self.regular_file(path)?;
        let content = self.content(path, &resolved)?;
        if content.len() > READ_BYTES_MAX {
            let message = format!("/sys/{path} has more than {READ_BYTES_MAX} bytes");
            return Err(Problem::invalid(ProblemCode::FileTooLarge, message));
        }
        Ok(content)
    }

    /// Names in a directory, sorted.
    pub fn read_dir(&self, path: &str) -> Result<Vec<String>, Problem> {
        let names = self.names(path)?;
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
            return Err(Problem::invalid(ProblemCode::NotALink, format!("/sys/{path} is no link")));
        }
        self.resolve(path)
    }

    /// The path without links.
    pub fn resolve(&self, path: &str) -> Result<String, Problem> {
        let end = self.open_beneath(path, OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::empty())?;
        self.resolved(path, &end)
    }

    /// Whether there is such a file or directory: a network interface, a device.
    pub fn exists(&self, path: &str) -> bool {
        check_path(path).is_ok() && self.resolve(path).is_ok()
    }

    /// Paths that match, as seen by a walk from the root, sorted.
    pub fn glob(&self, glob: &str) -> Result<Vec<String>, Problem> {
        let segments: Vec<&str> = glob.split('/').collect();
        let until = Instant::now() + LOOK_WALL;
        let mut walk = Walk { root: self, until, directories: 0, found: Vec::new() };
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
            return Err(Problem::invalid(ProblemCode::NotAFile, format!("/sys/{path} is no regular file")));
        }
        Ok((resolved, stat))
    }

    /// Reads at most one byte more than a driver may have.
    pub fn content(&self, path: &str, resolved: &str) -> Result<Vec<u8>, Problem> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = std::fs::File::from(self.open_beneath(resolved, flags, ResolveFlags::NO_SYMLINKS)?);
        let mut content = Vec::new();
        let read = file.take(READ_BYTES_MAX as u64 + 1).read_to_end(&mut content);
        read.map_err(|error| io_problem(path, &error))?;
        Ok(content)
    }

    /// Names in a directory and whether each is a directory itself, sorted.
    fn names(&self, path: &str) -> Result<Vec<(String, bool)>, Problem> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let name = if path.is_empty() { "." } else { path };
        let directory = self.open_beneath(name, flags, ResolveFlags::empty())?;
        self.resolved(path, &directory)?;
        let error = |errno: Errno| io_problem(path, &errno.into());
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&directory).map_err(error)? {
            let entry = entry.map_err(error)?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if !matches!(name, "." | "..") {
                names.push((name.to_owned(), entry.file_type() == FileType::Directory));
            }
            if names.len() > GLOB_DIRECTORIES_MAX {
                return Err(too_many(path));
            }
        }
        names.sort();
        Ok(names)
    }

    pub fn open_beneath(&self, path: &str, flags: OFlags, more: ResolveFlags) -> Result<OwnedFd, Problem> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV | more;
        rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve).map_err(|errno| match errno {
            Errno::NOENT => {
                Problem::not_found(ProblemCode::NoSuchPath, format!("/sys/{path} does not exist"))
            }
            Errno::NOTDIR if flags.contains(OFlags::DIRECTORY) => {
                Problem::invalid(ProblemCode::NotADirectory, format!("/sys/{path} is not a directory"))
            }
            Errno::NOTDIR => {
                Problem::not_found(ProblemCode::NoSuchPath, format!("/sys/{path} does not exist"))
            }
            Errno::XDEV | Errno::LOOP => {
                Problem::denied(ProblemCode::OutsideSysfs, format!("/sys/{path} leads out of /sys"))
            }
            errno => io_problem(path, &errno.into()),
        })
    }

    /// The path of an open file, relative to the root; refused where no driver may read.
    fn resolved(&self, path: &str, fd: &OwnedFd) -> Result<String, Problem> {
        use std::os::fd::AsRawFd;
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let target = rustix::fs::readlinkat(CWD, link, Vec::new()).map_err(|errno| {
            Problem::unavailable(ProblemCode::IoError, format!("/sys/{path}: resolve: {errno}"))
        })?;
        let outside = || Problem::denied(ProblemCode::OutsideSysfs, format!("/sys/{path} leads out of /sys"));
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

fn too_many(path: &str) -> Problem {
    Problem::invalid(ProblemCode::TooManyEntries, format!("/sys/{path} has more than {ENTRIES_MAX} entries"))
}

fn too_wide(does: &str, max: usize, what: &str) -> Problem {
    Problem::invalid(ProblemCode::GlobTooWide, format!("the glob {does} more than {max} {what}"))
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
    fn descend(&mut self, directory: String, segments: &[&str], depth: usize) -> Result<(), Problem> {
        let Some((first, rest)) = segments.split_first() else {
            return self.find(directory);
        };
        if *first == "**" {
            return self.descend_all(directory, segments, depth);
        }
        if pattern::is_literal(first) {
            let path = join(&directory, first);
            return if rest.is_empty() && !self.exists(&path) {
                Ok(())
            } else {
                self.descend(path, rest, depth + 1)
            };
        }
        let matcher = pattern::compile(first).map_err(|e| bad_glob(first, &e))?.compile_matcher();
        for (name, _) in self.names(&directory)? {
            if matcher.is_match(&name) {
                let path = join(&directory, &name);
                self.descend(path, rest, depth + 1)?;
            }
        }
        Ok(())
    }

    /// `**`: here, and in every directory below that is not behind a link.
    fn descend_all(&mut self, directory: String, segments: &[&str], depth: usize) -> Result<(), Problem> {
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

    fn exists(&self, path: &str) -> bool {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.root.open_beneath(path, flags, ResolveFlags::empty()).is_ok()
    }

    /// A path that is not a directory, was removed meanwhile or is denied has no names.
    fn names(&mut self, directory: &str) -> Result<Vec<(String, bool)>, Problem> {
        self.directories += 1;
        if Instant::now() >= self.until {
            return Err(read_stuck());
        }
        if self.directories > GLOB_DIRECTORIES_MAX {
            return Err(too_wide("reads", GLOB_DIRECTORIES_MAX, "directories"));
        }
        Ok(self.root.names(directory).unwrap_or_default())
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
    if directory.is_empty() { name.to_owned() } else { format!("{directory}/{name}") }
}

pub fn bad_glob(glob: &str, error: &pattern::PatternError) -> Problem {
    Problem::invalid(ProblemCode::BadGlob, format!("{} is not a glob: {error}", shown(glob)))
}

#[cfg(test)]
mod tests;
