//! What leaves the cache: files of other versions, and the ones that were not used for longest when there are too many.

use std::os::fd::OwnedFd;

use rustix::fs::{AtFlags, Dir, FileType};
use rustix::io::Errno;

use super::Cache;
use nodedock_model::limit::{CACHE_BYTES_MAX, CACHE_FILES_MAX};

/// Hex digits of a source's digest, with which all our names begin.
const NAME_DIGITS: usize = 64;
/// Endings of what we write, and of what former versions wrote.
const ENDINGS: &[&str] = &[".cwasm", ".cwasm.new", ".sha256", ".sha256.new"];

struct Entry {
    name: String,
    bytes: u64,
    /// Seconds and nanoseconds of its last use.
    used: (i64, u64),
}

impl Cache {
    /// Removes what other versions left, and what was half written when a daemon ended.
    pub(super) fn sweep(&self, folder: &OwnedFd) {
        for name in names(folder).into_iter().filter(|name| is_ours(name) && !name.ends_with(&self.suffix)) {
            self.remove(folder, &name);
        }
    }

    /// Removes everything that a daemon wrote.
    pub(super) fn empty(&self, folder: &OwnedFd) {
        for name in names(folder).into_iter().filter(|name| is_ours(name)) {
            self.remove(folder, &name);
        }
    }

    /// Removes the ones that were not used for longest, until the rest is within the bounds. Those of drivers that are loaded stay.
    pub(super) fn trim(&self, folder: &OwnedFd) {
        self.trim_to(folder, CACHE_FILES_MAX, CACHE_BYTES_MAX);
    }

    pub(super) fn trim_to(&self, folder: &OwnedFd, files_max: usize, bytes_max: u64) {
        let mut entries = self.entries(folder);
        entries.sort_by_key(|entry| entry.used);
        let (mut files, mut bytes) = (entries.len(), entries.iter().map(|entry| entry.bytes).sum::<u64>());
        for entry in entries {
            if files <= files_max && bytes <= bytes_max {
                return;
            }
            if !self.is_in_use(&entry.name) {
                self.remove(folder, &entry.name);
                files -= 1;
                bytes -= entry.bytes;
            }
        }
    }

    pub(super) fn remove(&self, folder: &OwnedFd, name: &str) {
        let outcome = match rustix::fs::unlinkat(folder, name, AtFlags::empty()) {
            Err(Errno::ISDIR) => rustix::fs::unlinkat(folder, name, AtFlags::REMOVEDIR),
            outcome => outcome,
        };
        if let Err(error) = outcome
            && error != Errno::NOENT
        {
            tracing::warn!(folder = %self.path.display(), name, %error, "file stays in the cache of compiled drivers");
        }
    }

    fn entries(&self, folder: &OwnedFd) -> Vec<Entry> {
        let known = names(folder).into_iter().filter(|name| is_ours(name) && name.ends_with(&self.suffix));
        known.filter_map(|name| entry(folder, name)).collect()
    }
}

fn entry(folder: &OwnedFd, name: String) -> Option<Entry> {
    let found = rustix::fs::statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW).ok()?;
    let is_file = FileType::from_raw_mode(found.st_mode) == FileType::RegularFile;
    let bytes = u64::try_from(found.st_size).ok()?;
    #[allow(clippy::unnecessary_cast, reason = "the types differ between architectures")]
    let used = (found.st_mtime as i64, found.st_mtime_nsec as u64);
    is_file.then_some(Entry { name, bytes, used })
}

/// Names of the folder that are text; ours are. One that cannot be listed has none.
fn names(folder: &OwnedFd) -> Vec<String> {
    let entries = Dir::read_from(folder).into_iter().flatten().filter_map(Result::ok);
    entries.filter_map(|entry| Some(entry.file_name().to_str().ok()?.to_owned())).collect()
}

fn is_ours(name: &str) -> bool {
    let digest = name.get(..NAME_DIGITS).is_some_and(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
    digest && ENDINGS.iter().any(|ending| name.ends_with(ending))
}
