//! Reads files, each within a deadline.
//!
//! A read of `/sys` calls into a kernel driver, which may wait for hardware without end, and no signal ends such a read. It happens in a
//! thread, which is left behind when it does not return.

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};

/// Time for one file.
const READ_DEADLINE: Duration = Duration::from_secs(2);
/// Reads that may not return before the recording ends: each keeps a thread.
const STUCK_READS_MAX: usize = 16;

type ReadFile = fn(&Path, usize) -> io::Result<Vec<u8>>;

/// Reads one file after the other.
pub(super) struct Reader {
    read: ReadFile,
    deadline: Duration,
    worker: Option<Worker>,
    stuck: usize,
}

struct Worker {
    requests: Sender<(PathBuf, usize)>,
    results: Receiver<io::Result<Vec<u8>>>,
}

impl Reader {
    pub(super) fn new() -> Self {
        Reader {
            read,
            deadline: READ_DEADLINE,
            worker: None,
            stuck: 0,
        }
    }

    /// Returns the first bytes of a file, or why it cannot be read. Fails if too many reads did not return.
    pub(super) fn read(&mut self, path: &Path, bytes: usize) -> io::Result<io::Result<Vec<u8>>> {
        let worker = match self.worker.take() {
            Some(worker) => worker,
            None => Worker::start(self.read)?,
        };
        // A worker that ended, which only a panic does, closes both channels.
        let sent = worker
            .requests
            .send((path.to_owned(), bytes))
            .map_err(|_| RecvTimeoutError::Disconnected);
        match sent.and_then(|()| worker.results.recv_timeout(self.deadline)) {
            Ok(result) => {
                self.worker = Some(worker);
                Ok(result)
            }
            Err(RecvTimeoutError::Disconnected) => Ok(Err(io::ErrorKind::Other.into())),
            Err(RecvTimeoutError::Timeout) => {
                self.stuck += 1;
                let timed_out = io::Error::from(io::ErrorKind::TimedOut);
                if self.stuck > STUCK_READS_MAX {
                    Err(timed_out)
                } else {
                    Ok(Err(timed_out))
                }
            }
        }
    }
}

impl Worker {
    fn start(read: ReadFile) -> io::Result<Self> {
        let (requests, waiting) = channel::<(PathBuf, usize)>();
        let (done, results) = channel();
        thread::Builder::new()
            .name("read".to_owned())
            .spawn(move || {
                for (path, bytes) in waiting {
                    // After a deadline there is no receiver.
                    let _ = done.send(read(&path, bytes));
                }
            })?;
        Ok(Worker { requests, results })
    }
}

/// Returns the first bytes of a regular file. Opens nothing that a link leads to, and does not wait for a fifo.
pub(super) fn read(path: &Path, bytes: usize) -> io::Result<Vec<u8>> {
    let flags =
        OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut content = Vec::new();
    file.take(bytes as u64).read_to_end(&mut content)?;
    Ok(content)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Waits for as long as the test runs, if the name says so.
    fn waiting(path: &Path, _: usize) -> io::Result<Vec<u8>> {
        while path.starts_with("waits") {
            thread::park();
        }
        Ok(b"read".to_vec())
    }

    #[test]
    fn stuck_reads_are_abandoned_and_bounded() {
        let mut reader = Reader {
            read: waiting,
            deadline: Duration::from_millis(10),
            worker: None,
            stuck: 0,
        };
        for _ in 0..STUCK_READS_MAX {
            let stuck = reader.read(Path::new("waits"), 1).unwrap().unwrap_err();
            assert_eq!(stuck.kind(), io::ErrorKind::TimedOut);
            reader.deadline = Duration::from_secs(60);
            assert_eq!(
                reader.read(Path::new("a"), 1).unwrap().unwrap(),
                b"read",
                "the next file is read"
            );
            reader.deadline = Duration::from_millis(10);
        }
        assert_eq!(
            reader.read(Path::new("waits"), 1).unwrap_err().kind(),
            io::ErrorKind::TimedOut
        );
    }

    #[test]
    fn only_regular_files_are_read_partially() {
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("file"), "content").unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            path("fifo"),
            rustix::fs::FileType::Fifo,
            Mode::RUSR,
            0,
        )
        .unwrap();
        assert_eq!(read(&path("file"), 4).unwrap(), b"cont");
        assert!(read(&path("link"), 4).is_err());
        assert_eq!(
            read(&path("fifo"), 4).unwrap_err().kind(),
            io::ErrorKind::InvalidInput
        );
        assert!(read(directory.path(), 4).is_err());
    }
}
