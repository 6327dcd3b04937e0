//! Looking at files of the node outside `/sys` and `/dev`: beneath the root, within the ceiling, root's own and readable by everyone.
//! Blocking functions, not for async threads.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::bindings::nodedock::driver::host_files::{FileInfo, FileKind};
use nodedock_base::beneath::{self, Entry};
use nodedock_core::sysfs::blocking::LOOK_WALL;
use nodedock_core::sysfs::{ENTRIES_MAX, bad_glob, not_permitted, present};
use nodedock_model::grant::{ceiling, pattern};
use nodedock_model::limit::PATH_BYTES_MAX;
use nodedock_model::rule::is_plain_path;
use nodedock_model::{Problem, ProblemCode};

/// Bytes of one read: `/proc/cpuinfo` of a node with 512 CPUs has 800 kB.
const READ_BYTES_MAX: u64 = 1 << 20;
/// Directories that one glob may read, and how deep `**` goes.
const GLOB_DIRECTORIES_MAX: usize = 16_384;
const GLOB_DEPTH_MAX: usize = 12;

/// `/`, or a directory of a test.
pub(crate) struct FilesRoot {
    root: OwnedFd,
    path: PathBuf,
}

/// Checks that a path or a glob is absolute and plain.
pub(crate) fn check_path(path: &str) -> Result<(), Problem> {
    if is_plain_path(path) && path.len() <= PATH_BYTES_MAX && !path.contains(char::is_control) {
        return Ok(());
    }
    let shown: String = path.chars().take(128).collect();
    Err(Problem::invalid(
        ProblemCode::BadPath,
        format!("{shown:?} is not an absolute, plain path"),
    ))
}

pub(crate) fn never(path: &str) -> Problem {
    let message = format!("no driver may read {path}, whatever is granted");
    Problem::denied(ProblemCode::NeverAllowed, message)
}

fn too_wide(what: &str, max: usize) -> Problem {
    Problem::invalid(
        ProblemCode::GlobTooWide,
        format!("the glob needs more than {max} {what}"),
    )
}

/// The problem of a file system that does not answer.
pub(crate) fn stuck() -> Problem {
    let message = format!("a file system of the node did not answer within {LOOK_WALL:?}");
    Problem::unavailable(ProblemCode::FileStuck, message)
}

impl FilesRoot {
    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        let path = path.canonicalize()?;
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            root: rustix::fs::open(&path, flags, Mode::empty())?,
            path,
        })
    }

    /// One file or directory.
    pub(crate) fn stat(&self, path: &str) -> Result<FileInfo, Problem> {
        self.look(path).map(|(info, _)| info)
    }

    /// The content of a regular file.
    pub(crate) fn read(&self, path: &str) -> Result<Vec<u8>, Problem> {
        let (info, _) = self.look(path)?;
        if info.kind != FileKind::Regular {
            return Err(Problem::invalid(
                ProblemCode::NotAFile,
                format!("{path} is no regular file"),
            ));
        }
        // The path without links: it was checked, and what it names is checked again.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        let file = self.open_beneath(&info.real_path, flags, ResolveFlags::NO_SYMLINKS)?;
        check_public(path, &stat(path, &file)?)?;
        let read = beneath::read(file, READ_BYTES_MAX + 1);
        let content = read.map_err(|error| {
            Problem::unavailable(ProblemCode::IoError, format!("{path}: {error}"))
        })?;
        if content.len() as u64 > READ_BYTES_MAX {
            let message = format!("{path} has more than {READ_BYTES_MAX} bytes");
            return Err(Problem::invalid(ProblemCode::FileTooLarge, message));
        }
        Ok(content)
    }

    /// Files and directories that match, sorted; those that no driver may read are left out.
    pub(crate) fn glob(&self, glob: &str) -> Result<Vec<FileInfo>, Problem> {
        pattern::compile(glob).map_err(|error| bad_glob(glob, &error))?;
        let segments: Vec<&str> = glob.trim_start_matches('/').split('/').collect();
        let mut walk = Walk {
            root: self,
            until: Instant::now() + LOOK_WALL,
            directories: 0,
            found: Vec::new(),
        };
        walk.descend(String::new(), &segments, 0)?;
        let mut found = walk.found;
        found.sort_by(|a, b| a.path.cmp(&b.path));
        found.dedup_by(|a, b| a.path == b.path);
        Ok(found)
    }

    /// The path without links, and what kind of file it is; of any file, not only of those that drivers may read.
    pub(crate) fn resolve(&self, path: &str) -> Result<(String, FileType), Problem> {
        let file =
            self.open_beneath(path, OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::empty())?;
        let kind = FileType::from_raw_mode(stat(path, &file)?.st_mode);
        Ok((self.real_path(path, &file)?, kind))
    }

    fn look(&self, path: &str) -> Result<(FileInfo, OwnedFd), Problem> {
        check_path(path)?;
        // Checked first: what is beyond the ceiling is not even looked at.
        if ceiling::host_file(path).is_none() {
            return Err(never(path));
        }
        let file =
            self.open_beneath(path, OFlags::PATH | OFlags::CLOEXEC, ResolveFlags::empty())?;
        let real_path = self.real_path(path, &file)?;
        // A link is no way to what has to be named more explicitly.
        if ceiling::host_file(&real_path)
            .is_none_or(|naming| Some(naming) > ceiling::host_file(path))
        {
            return Err(never(path));
        }
        let found = stat(path, &file)?;
        check_public(path, &found)?;
        self.check_way(path, &real_path)?;
        let kind = match FileType::from_raw_mode(found.st_mode) {
            FileType::RegularFile => FileKind::Regular,
            FileType::Directory => FileKind::Directory,
            _ => {
                let message = format!("{path} is neither a regular file nor a directory");
                return Err(Problem::invalid(ProblemCode::NotAFile, message));
            }
        };
        let size = if kind == FileKind::Regular {
            found.st_size.unsigned_abs()
        } else {
            0
        };
        Ok((
            FileInfo {
                path: path.to_owned(),
                real_path,
                kind,
                size,
            },
            file,
        ))
    }

    /// Links are resolved beneath the root, as in a chroot.
    fn open_beneath(
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
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS | more;
        beneath::open(&self.root, path, flags, resolve, until).map_err(|errno| match errno {
            // No name is that long.
            Errno::NOENT | Errno::NOTDIR | Errno::NAMETOOLONG => {
                Problem::not_found(ProblemCode::NoSuchPath, format!("{path} does not exist"))
            }
            Errno::LOOP => never(path),
            Errno::ACCESS | Errno::PERM => not_permitted(path),
            errno => Problem::unavailable(ProblemCode::IoError, format!("{path}: {errno}")),
        })
    }

    fn real_path(&self, path: &str, file: &OwnedFd) -> Result<String, Problem> {
        let link = format!("/proc/self/fd/{}", file.as_raw_fd());
        let target = rustix::fs::readlinkat(CWD, link, Vec::new()).map_err(|errno| {
            Problem::unavailable(ProblemCode::IoError, format!("{path}: resolve: {errno}"))
        })?;
        let target = Path::new(target.to_str().map_err(|_| never(path))?);
        let inside = target.strip_prefix(&self.path).map_err(|_| never(path))?;
        Ok(format!("/{}", inside.to_str().ok_or_else(|| never(path))?))
    }

    /// Checks that every user may pass each directory on the way to a path without links.
    fn check_way(&self, path: &str, real_path: &str) -> Result<(), Problem> {
        let inside = real_path.trim_start_matches('/');
        for (end, _) in inside.match_indices('/') {
            let found = rustix::fs::statat(&self.root, &inside[..end], AtFlags::SYMLINK_NOFOLLOW);
            let found = found.map_err(|errno| {
                Problem::unavailable(ProblemCode::IoError, format!("{path}: {errno}"))
            })?;
            if !Mode::from_raw_mode(found.st_mode).contains(Mode::XOTH) {
                let message = format!(
                    "no driver may read {path}: not everyone may pass /{}",
                    &inside[..end]
                );
                return Err(Problem::denied(ProblemCode::NeverAllowed, message));
            }
        }
        Ok(())
    }

    /// Returns the entries of a directory; none if there is no directory, or if it may not be listed.
    fn entries(&self, directory: &str, until: Instant) -> Result<Vec<Entry>, Problem> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let name = if directory.is_empty() { "." } else { directory };
        let Some(open) = present(self.open_until(until, name, flags, ResolveFlags::empty()))?
        else {
            return Ok(Vec::new());
        };
        let entries = beneath::entries(&open, GLOB_DIRECTORIES_MAX, until).map_err(|errno| {
            Problem::unavailable(ProblemCode::IoError, format!("{directory}: {errno}"))
        })?;
        if entries.len() > GLOB_DIRECTORIES_MAX {
            return Err(too_wide("entries of a directory", GLOB_DIRECTORIES_MAX));
        }
        Ok(entries)
    }
}

fn stat(path: &str, file: &OwnedFd) -> Result<Stat, Problem> {
    rustix::fs::fstat(file)
        .map_err(|errno| Problem::unavailable(ProblemCode::IoError, format!("{path}: {errno}")))
}

/// Only what root (or the daemon's own user, in tests) owns and a user without rights could open.
fn check_public(path: &str, found: &Stat) -> Result<(), Problem> {
    let is_owned = found.st_uid == 0 || found.st_uid == rustix::process::geteuid().as_raw();
    let is_directory = FileType::from_raw_mode(found.st_mode) == FileType::Directory;
    let needed = if is_directory {
        Mode::ROTH | Mode::XOTH
    } else {
        Mode::ROTH
    };
    if is_owned && Mode::from_raw_mode(found.st_mode).contains(needed) {
        return Ok(());
    }
    let message =
        format!("no driver may read {path}: root does not own it, or not everyone may read it");
    Err(Problem::denied(ProblemCode::NeverAllowed, message))
}

struct Walk<'a> {
    root: &'a FilesRoot,
    /// Its caller does not wait longer.
    until: Instant,
    directories: usize,
    found: Vec<FileInfo>,
}

impl Walk<'_> {
    fn descend(
        &mut self,
        directory: String,
        segments: &[&str],
        depth: usize,
    ) -> Result<(), Problem> {
        let Some((first, rest)) = segments.split_first() else {
            return self.find(&directory);
        };
        if pattern::is_literal(first) {
            return self.descend(format!("{directory}/{first}"), rest, depth + 1);
        }
        if *first == "**" && !rest.is_empty() {
            self.descend(directory.clone(), rest, depth)?;
        }
        let one = if *first == "**" { "*" } else { first };
        let matcher = pattern::compile(one)
            .map_err(|error| bad_glob(one, &error))?
            .compile_matcher();
        self.directories += 1;
        if self.directories > GLOB_DIRECTORIES_MAX {
            return Err(too_wide("directories", GLOB_DIRECTORIES_MAX));
        }
        if Instant::now() >= self.until {
            return Err(stuck());
        }
        for Entry { name, kind } in self.root.entries(&directory, self.until)? {
            let path = format!("{directory}/{name}");
            if *first == "**" {
                if rest.is_empty() {
                    self.find(&path)?;
                }
                if kind == FileType::Directory && depth < GLOB_DEPTH_MAX {
                    self.descend(path, segments, depth + 1)?;
                }
            } else if matcher.is_match(&name) {
                self.descend(path, rest, depth + 1)?;
            }
        }
        Ok(())
    }

    fn find(&mut self, path: &str) -> Result<(), Problem> {
        match self.root.stat(path) {
            Ok(_) if self.found.len() >= ENTRIES_MAX => Err(too_wide("entries", ENTRIES_MAX)),
            Ok(info) => {
                self.found.push(info);
                Ok(())
            }
            Err(problem) if problem.kind.is_permanent() => Ok(()),
            Err(problem) => Err(problem),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    fn scene() -> (tempfile::TempDir, FilesRoot) {
        let dir = tempfile::tempdir().unwrap();
        for file in [
            "proc/driver/nvidia/version",
            "proc/devices",
            "usr/lib/libcuda.so.1.2",
            "usr/lib/vendor/a.bin",
            "opt/vendor/readme",
            "opt/vendor/private",
            "etc/vendor/list.json",
            "etc/shadow",
            "etc/ssh/config",
            "home/a/secret",
        ] {
            let path = dir.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, file).unwrap();
        }
        symlink("libcuda.so.1.2", dir.path().join("usr/lib/libcuda.so")).unwrap();
        symlink("/usr/lib/vendor", dir.path().join("opt/vendor/lib")).unwrap();
        symlink("/etc/shadow", dir.path().join("opt/vendor/out")).unwrap();
        symlink(
            "../../../../../home/a/secret",
            dir.path().join("opt/vendor/up"),
        )
        .unwrap();
        symlink("circle", dir.path().join("opt/vendor/circle")).unwrap();
        let private = dir.path().join("opt/vendor/private");
        fs::set_permissions(private, fs::Permissions::from_mode(0o640)).unwrap();
        let root = FilesRoot::open(dir.path()).unwrap();
        (dir, root)
    }

    fn code(result: Result<impl std::fmt::Debug, Problem>) -> String {
        result.unwrap_err().code
    }

    #[test]
    fn links_within_the_ceiling_are_followed() {
        let (_dir, root) = scene();
        assert_eq!(
            root.read("/usr/lib/libcuda.so").unwrap(),
            b"usr/lib/libcuda.so.1.2"
        );
        let info = root.stat("/opt/vendor/lib/a.bin").unwrap();
        assert_eq!(
            (info.path.as_str(), info.real_path.as_str()),
            ("/opt/vendor/lib/a.bin", "/usr/lib/vendor/a.bin")
        );
        assert_eq!((info.kind, info.size), (FileKind::Regular, 20));
        assert_eq!(root.stat("/opt/vendor").unwrap().kind, FileKind::Directory);
    }

    #[test]
    fn paths_beyond_the_ceiling_are_denied() {
        let (_dir, root) = scene();
        for path in [
            "/etc/shadow",
            "/etc/ssh/config",
            "/home/a/secret",
            "/opt/vendor/out",
            "/opt/vendor/up",
            "/opt/vendor/private",
            "/opt/vendor/circle",
        ] {
            assert_eq!(code(root.read(path)), "never-allowed", "{path}");
        }
        for path in ["opt/a", "/opt/../etc/shadow", "/opt//a", "/opt/a\n", ""] {
            assert_eq!(code(root.read(path)), "bad-path", "{path:?}");
        }
        assert_eq!(code(root.read("/opt/vendor/none")), "no-such-path");
        assert_eq!(code(root.read("/opt/vendor")), "not-a-file");
    }

    #[test]
    fn large_and_special_files_are_refused() {
        let (dir, root) = scene();
        let large = fs::File::create(dir.path().join("opt/vendor/large")).unwrap();
        large.set_len(READ_BYTES_MAX + 1).unwrap();
        assert_eq!(code(root.read("/opt/vendor/large")), "file-too-large");
        let socket =
            std::os::unix::net::UnixListener::bind(dir.path().join("opt/vendor/socket")).unwrap();
        fs::set_permissions(
            dir.path().join("opt/vendor/socket"),
            fs::Permissions::from_mode(0o666),
        )
        .unwrap();
        assert_eq!(code(root.read("/opt/vendor/socket")), "not-a-file");
        drop(socket);
    }

    #[test]
    fn glob_lists_only_readable_files() {
        let (_dir, root) = scene();
        let paths = |glob: &str| -> Vec<String> {
            root.glob(glob)
                .unwrap()
                .into_iter()
                .map(|info| info.path)
                .collect()
        };
        assert_eq!(
            paths("/usr/lib/libcuda.so*"),
            ["/usr/lib/libcuda.so", "/usr/lib/libcuda.so.1.2"]
        );
        assert_eq!(
            paths("/opt/vendor/*"),
            ["/opt/vendor/lib", "/opt/vendor/readme"]
        );
        assert_eq!(paths("/etc/*/*"), ["/etc/vendor/list.json"]);
        assert_eq!(paths("/opt/**/readme"), ["/opt/vendor/readme"]);
        assert_eq!(
            paths("/proc/driver/nvidia/version"),
            ["/proc/driver/nvidia/version"]
        );
        assert_eq!(paths("/root/*"), Vec::<String>::new());
        assert_eq!(code(root.glob("/opt/[")), "bad-glob");
    }
}
