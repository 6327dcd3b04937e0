//! Opening, listing and reading what lies beneath an open directory. Blocking functions, not for async threads.
//!
//! Repeats what the kernel asks to repeat, until a deadline: openat2(2) fails with `EAGAIN` where a path has `..` and anything on the
//! machine is renamed at the same time, and nearly every path below `/sys/bus` and `/sys/class` is a link with `..`. Returns every other
//! failure: none is left out.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::fs::{Dir, FileType, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::path::Arg;

use crate::failpoint::system_call;

/// Attempts without a pause: a rename takes microseconds.
const ATTEMPTS_AT_ONCE: u32 = 64;
const PAUSE: Duration = Duration::from_millis(1);

/// Opens a path beneath a directory, as openat2(2) does.
pub fn open(
    directory: impl AsFd,
    path: impl Arg + Copy,
    flags: OFlags,
    resolve: ResolveFlags,
    until: Instant,
) -> rustix::io::Result<OwnedFd> {
    repeat(until, || {
        system_call()?;
        rustix::fs::openat2(&directory, path, flags, Mode::empty(), resolve)
    })
}

/// Returns the content of an open file, at most `max` bytes of it.
pub fn read(file: OwnedFd, max: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    Reader(file.into()).take(max).read_to_end(&mut content)?;
    Ok(content)
}

struct Reader(File);

impl Read for Reader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        system_call()?;
        self.0.read(buffer)
    }
}

/// An entry of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub name: String,
    /// A link to a directory is a link.
    pub kind: FileType,
}

/// Returns what is in an open directory, sorted by name, without names that are not UTF-8; at most one entry more than `max`.
pub fn entries(directory: &OwnedFd, max: usize, until: Instant) -> rustix::io::Result<Vec<Entry>> {
    let mut entries = repeat(until, || {
        system_call()?;
        let entries = Dir::read_from(directory)?.filter_map(named);
        entries
            .take(max + 1)
            .collect::<rustix::io::Result<Vec<_>>>()
    })?;
    entries.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(entries)
}

fn named(entry: rustix::io::Result<rustix::fs::DirEntry>) -> Option<rustix::io::Result<Entry>> {
    let entry = match entry {
        Ok(entry) => entry,
        Err(errno) => return Some(Err(errno)),
    };
    let name = entry
        .file_name()
        .to_str()
        .ok()
        .filter(|name| !matches!(*name, "." | ".."))?
        .to_owned();
    Some(Ok(Entry {
        name,
        kind: entry.file_type(),
    }))
}

fn repeat<T>(
    until: Instant,
    mut work: impl FnMut() -> rustix::io::Result<T>,
) -> rustix::io::Result<T> {
    let mut attempts = 0;
    loop {
        match work() {
            Err(Errno::AGAIN | Errno::INTR) if Instant::now() < until => attempts += 1,
            ended => return ended,
        }
        match attempts < ATTEMPTS_AT_ONCE {
            true => std::thread::yield_now(),
            false => std::thread::sleep(PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interrupted_calls_are_repeated_until_deadline() {
        for errno in [Errno::AGAIN, Errno::INTR] {
            let mut left = 3 * ATTEMPTS_AT_ONCE / 2;
            let until = Instant::now() + Duration::from_secs(60);
            let repeated = repeat(until, || {
                left -= 1;
                if left == 0 { Ok("done") } else { Err(errno) }
            });
            assert_eq!(repeated, Ok("done"));
            let mut attempts = 0;
            let over = repeat(Instant::now(), || {
                attempts += 1;
                Err::<(), _>(errno)
            });
            assert_eq!((over, attempts), (Err(errno), 1), "the time is over");
        }
    }

    #[test]
    fn another_failure_is_returned_at_once() {
        for errno in [Errno::NOENT, Errno::MFILE, Errno::NOMEM, Errno::IO] {
            let mut attempts = 0;
            let failed = repeat(Instant::now() + Duration::from_secs(60), || {
                attempts += 1;
                Err::<(), _>(errno)
            });
            assert_eq!((failed, attempts), (Err(errno), 1));
        }
    }

    #[test]
    fn entries_are_sorted_and_bounded() {
        let directory = tempfile::tempdir().unwrap();
        for name in ["b", "a", "c"] {
            std::fs::write(directory.path().join(name), name).unwrap();
        }
        let open_directory = || {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            rustix::fs::open(directory.path(), flags, Mode::empty()).unwrap()
        };
        let until = Instant::now() + Duration::from_secs(60);
        let names = |max| -> Vec<String> {
            let found = entries(&open_directory(), max, until).unwrap();
            found.into_iter().map(|entry| entry.name).collect()
        };
        assert_eq!(names(3), ["a", "b", "c"]);
        assert_eq!(names(1).len(), 2);
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let file = open(open_directory(), "a", flags, ResolveFlags::BENEATH, until).unwrap();
        assert_eq!(read(file, 64).unwrap(), b"a");
        let none = open(open_directory(), "d", flags, ResolveFlags::BENEATH, until);
        assert_eq!(none.unwrap_err(), Errno::NOENT);
    }
}
