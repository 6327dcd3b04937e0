//! Reading below `/sys`, beneath it and nowhere else: blocking functions, called off the async threads.
//!
//! Is given paths that a grant allows. Every path is resolved by the kernel beneath the root, without magic links and without
//! other mounts, and what it came to is held against the lists of what no driver may touch.

pub mod attribute;
pub mod blocking;
mod put_back;

pub use self::put_back::{Fate, SysfsTree};

use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Instant;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use nodedock_model::Problem;
use nodedock_model::grant::pattern::{self, PatternSet};
use nodedock_model::limit::{HOST_LOOK_WALL, PATH_BYTES_MAX, SYSFS_ENTRIES_MAX, SYSFS_READ_BYTES_MAX};

/// Bytes of a value that is written: a kernel attribute takes at most a page.
pub const VALUE_BYTES_MAX: usize = 4096;
/// Folders that one glob may look into, and how deep `**` goes.
const GLOB_FOLDERS_MAX: usize = 16_384;
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

/// The problem of a read below `/sys` that takes longer than `HOST_LOOK_WALL`.
pub fn read_stuck() -> Problem {
    let millis = HOST_LOOK_WALL.as_millis();
    Problem::unavailable(
        "sysfs-stuck",
        format!("the driver looked at what did not answer within {millis} ms"),
    )
}

/// The root below which all is: `/sys`, or a tree of a test.
pub struct SysfsRoot {
    root: OwnedFd,
    path: PathBuf,
}

/// A plain path relative to `/sys`.
pub fn check_path(path: &str) -> Result<(), Problem> {
    let plain = path.split('/').all(|segment| !matches!(segment, "" | "." | ".."));
    if plain && path.len() <= PATH_BYTES_MAX && !path.contains(char::is_control) {
        return Ok(());
    }
    Err(Problem::invalid("bad-path", format!("{} is no plain path relative to /sys", shown(path))))
}

fn shown(path: &str) -> String {
    format!("{:?}", path.chars().take(128).collect::<String>())
}

impl SysfsRoot {
    pub fn open(path: &Path) -> std::io::Result<Self> {
        let path = path.canonicalize()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let root = rustix::fs::open(&path, flags, Mode::empty())?;
        Ok(Self { root, path })
    }

    /// A regular file's content.
    pub fn read(&self, path: &str) -> Result<Vec<u8>, Problem> {
        let (resolved, _) = self.regular_file(path)?;
        let content = self.content(path, &resolved)?;
        if content.len() > SYSFS_READ_BYTES_MAX {
            let message = format!("/sys/{path} has more than {SYSFS_READ_BYTES_MAX} bytes");
            return Err(Problem::invalid("file-too-large", message));
        }
        Ok(content)
    }

    /// Names in a folder, sorted.
    pub fn read_dir(&self, path: &str) -> Result<Vec<String>, Problem> {
        let names = self.names(path)?;
        if names.len() > SYSFS_ENTRIES_MAX {
            return Err(too_many(path));
        }
        Ok(names.into_iter().map(|(name, _)| name).collect())
    }

    /// Where a link comes to, relative to the root.
    pub fn read_link(&self, path: &str) -> Result<String, Problem> {
        check_path(path)?;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let link = self.open_beneath(path, flags, ResolveFlags::empty())?;
        if FileType::from_raw_mode(stat(path, &link)?.st_mode) != FileType::Symlink {
            return Err(Problem::invalid("not-a-link", format!("/sys/{path} is no link")));
        }
        self.resolve(path)
    }

    /// The path without links.
    pub fn resolve(&self, path: &str) -> Result<String, Problem> {
        let end = self.open_beneath(path, OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::empty())?;
        self.resolved(path, &end)
    }

    /// Whether there is such a folder: a network interface, a device.
    pub fn exists(&self, path: &str) -> bool {
        check_path(path).is_ok() && self.resolve(path).is_ok()
    }

    /// Paths that match, as a walk from the root sees them, sorted.
    pub fn glob(&self, glob: &str) -> Result<Vec<String>, Problem> {
        let segments: Vec<&str> = glob.split('/').collect();
        let until = Instant::now() + HOST_LOOK_WALL;
        let mut walk = Walk { root: self, until, folders: 0, found: Vec::new() };
        walk.descend(String::new(), &segments, 0)?;
        walk.found.sort();
        walk.found.dedup();
        Ok(walk.found)
    }

    /// Resolves to a regular file that may be touched.
    pub fn regular_file(&self, path: &str) -> Result<(String, Stat), Problem> {
        check_path(path)?;
        let end = self.open_beneath(path, OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::empty())?;
        let resolved = self.resolved(path, &end)?;
        let stat = stat(path, &end)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(Problem::invalid("not-a-file", format!("/sys/{path} is no regular file")));
        }
        Ok((resolved, stat))
    }

    /// At most one byte more than a driver is given.
    pub fn content(&self, path: &str, resolved: &str) -> Result<Vec<u8>, Problem> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = std::fs::File::from(self.open_beneath(resolved, flags, ResolveFlags::NO_SYMLINKS)?);
        let mut content = Vec::new();
        let read = file.take(SYSFS_READ_BYTES_MAX as u64 + 1).read_to_end(&mut content);
        read.map_err(|error| io_problem(path, &error))?;
        Ok(content)
    }

    /// Names in a folder and whether each is a folder itself, sorted.
    fn names(&self, path: &str) -> Result<Vec<(String, bool)>, Problem> {
        let folder = if path.is_empty() { "." } else { path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = match self.open_beneath(folder, flags, ResolveFlags::empty()) {
            Err(problem) if problem.code == "not-a-folder" => {
                return Err(Problem::invalid("not-a-folder", format!("/sys/{path} is no folder")));
            }
            folder => folder?,
        };
        self.resolved(path, &folder)?;
        let error = |errno: Errno| io_problem(path, &errno.into());
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&folder).map_err(error)? {
            let entry = entry.map_err(error)?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            if !matches!(name, "." | "..") {
                names.push((name.to_owned(), entry.file_type() == FileType::Directory));
            }
            if names.len() > GLOB_FOLDERS_MAX {
                return Err(too_many(path));
            }
        }
        names.sort();
        Ok(names)
    }

    pub fn open_beneath(&self, path: &str, flags: OFlags, more: ResolveFlags) -> Result<OwnedFd, Problem> {
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS | ResolveFlags::NO_XDEV | more;
        rustix::fs::openat2(&self.root, path, flags, Mode::empty(), resolve).map_err(|errno| match errno {
            Errno::NOENT => Problem::not_found("no-such-path", format!("/sys/{path} does not exist")),
            Errno::NOTDIR if flags.contains(OFlags::DIRECTORY) => {
                Problem::invalid("not-a-folder", format!("/sys/{path} is no folder"))
            }
            Errno::NOTDIR => Problem::not_found("no-such-path", format!("/sys/{path} does not exist")),
            Errno::XDEV | Errno::LOOP => {
                Problem::denied("outside-sysfs", format!("/sys/{path} leads out of /sys"))
            }
            errno => io_problem(path, &errno.into()),
        })
    }

    /// Where an open file is, relative to the root; refused where nobody may look.
    fn resolved(&self, path: &str, fd: &OwnedFd) -> Result<String, Problem> {
        use std::os::fd::AsRawFd;
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let target = rustix::fs::readlinkat(CWD, link, Vec::new())
            .map_err(|errno| Problem::unavailable("io-error", format!("/sys/{path}: resolve: {errno}")))?;
        let outside = || Problem::denied("outside-sysfs", format!("/sys/{path} leads out of /sys"));
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
    Problem::denied("never-allowed", format!("no driver may touch /sys/{path}, whatever is granted"))
}

fn too_many(path: &str) -> Problem {
    Problem::invalid("too-many-entries", format!("/sys/{path} has more than {SYSFS_ENTRIES_MAX} entries"))
}

pub fn io_problem(path: &str, error: &std::io::Error) -> Problem {
    Problem::unavailable("io-error", format!("/sys/{path}: {error}"))
}

/// A glob on its way down.
struct Walk<'a> {
    root: &'a SysfsRoot,
    /// Nobody waits for it longer.
    until: Instant,
    folders: usize,
    found: Vec<String>,
}

impl Walk<'_> {
    fn descend(&mut self, folder: String, segments: &[&str], depth: usize) -> Result<(), Problem> {
        let Some((first, rest)) = segments.split_first() else {
            return self.find(folder);
        };
        if *first == "**" {
            return self.descend_all(folder, segments, depth);
        }
        if pattern::is_literal(first) {
            let path = join(&folder, first);
            return if rest.is_empty() && !self.exists(&path) {
                Ok(())
            } else {
                self.descend(path, rest, depth + 1)
            };
        }
        let matcher = pattern::compile(first).map_err(|e| bad_glob(first, &e))?.compile_matcher();
        for (name, _) in self.names(&folder)? {
            if matcher.is_match(&name) {
                let path = join(&folder, &name);
                self.descend(path, rest, depth + 1)?;
            }
        }
        Ok(())
    }

    /// `**`: here, and in every folder below that is not behind a link.
    fn descend_all(&mut self, folder: String, segments: &[&str], depth: usize) -> Result<(), Problem> {
        let rest = &segments[1..];
        let last = rest.is_empty();
        if !last {
            self.descend(folder.clone(), rest, depth)?;
        }
        if depth >= GLOB_DEPTH_MAX {
            return Ok(());
        }
        for (name, is_folder) in self.names(&folder)? {
            let path = join(&folder, &name);
            if last {
                self.find(path.clone())?;
            }
            if is_folder {
                self.descend_all(path, segments, depth + 1)?;
            }
        }
        Ok(())
    }

    fn exists(&self, path: &str) -> bool {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        self.root.open_beneath(path, flags, ResolveFlags::empty()).is_ok()
    }

    /// What is no folder, gone meanwhile, or out of bounds has no names.
    fn names(&mut self, folder: &str) -> Result<Vec<(String, bool)>, Problem> {
        self.folders += 1;
        if Instant::now() >= self.until {
            return Err(read_stuck());
        }
        if self.folders > GLOB_FOLDERS_MAX {
            return Err(Problem::invalid(
                "glob-too-wide",
                format!("the glob looks into more than {GLOB_FOLDERS_MAX} folders"),
            ));
        }
        Ok(self.root.names(folder).unwrap_or_default())
    }

    fn find(&mut self, path: String) -> Result<(), Problem> {
        // `**` can come to a path in several ways; duplicates are dropped at the end.
        if self.found.len() >= SYSFS_ENTRIES_MAX {
            return Err(Problem::invalid(
                "glob-too-wide",
                format!("the glob matches more than {SYSFS_ENTRIES_MAX} paths"),
            ));
        }
        self.found.push(path);
        Ok(())
    }
}

fn join(folder: &str, name: &str) -> String {
    if folder.is_empty() { name.to_owned() } else { format!("{folder}/{name}") }
}

pub fn bad_glob(glob: &str, error: &pattern::PatternError) -> Problem {
    Problem::invalid("bad-glob", format!("{} is not a glob: {error}", shown(glob)))
}

#[cfg(test)]
mod tests;
