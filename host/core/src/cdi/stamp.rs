//! Files of a directory of specs as they are on the disk: their names, and stamps that show a change.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime};

/// More than the tick of any file system's clock.
pub(super) const CLOCK_TICK_MAX: Duration = Duration::from_millis(20);

/// A file after it was written or compared.
#[derive(Clone, Copy)]
pub(super) struct Known {
    pub(super) hash: u64,
    pub(super) stamp: Stamp,
    /// True if a later change certainly changes the stamp.
    pub(super) settled: bool,
}

/// Metadata that change when a file is changed or replaced, to the granularity of the file system's clock.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Stamp {
    pub(super) fn of(metadata: &Metadata) -> Self {
        Self {
            inode: metadata.ino(),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }

    /// Returns whether the last change is so old that another one certainly has another time. The clocks of file systems tick
    /// every 10 ms or less; two changes within a tick are indistinguishable.
    pub(super) fn is_settled(&self) -> bool {
        self.is_settled_at(Instant::now())
    }

    /// The same for an earlier moment.
    pub(super) fn is_settled_at(&self, moment: Instant) -> bool {
        let (seconds, nanos) = self.changed.max(self.modified);
        let (Ok(seconds), Ok(nanos)) = (u64::try_from(seconds), u32::try_from(nanos)) else {
            return false;
        };
        let changed = SystemTime::UNIX_EPOCH + Duration::new(seconds, nanos);
        let age = SystemTime::now().duration_since(changed);
        age.is_ok_and(|age| age.saturating_sub(moment.elapsed()) > CLOCK_TICK_MAX)
    }
}

/// Returns whether runtimes read a file of this name.
pub(super) fn is_spec_name(name: &str) -> bool {
    name.ends_with(".yaml") || name.ends_with(".json")
}

/// Opens a plain file; does not follow a link at its end and does not wait at a pipe.
pub(super) fn open_plain(path: &Path) -> io::Result<Option<File>> {
    use rustix::fs::{Mode, OFlags};
    use rustix::io::Errno;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match rustix::fs::open(path, flags, Mode::empty()) {
        // A link; a socket, or a device that is not there.
        Err(Errno::LOOP | Errno::NXIO | Errno::NODEV) => return Ok(None),
        opened => File::from(opened?),
    };
    Ok(file.metadata()?.is_file().then_some(file))
}
