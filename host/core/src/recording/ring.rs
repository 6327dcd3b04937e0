//! A driver's ring: segments of JSON lines in a directory, of which the oldest is removed first.
//!
//! Each segment begins with the revision that its calls belong to. A process begins a new one, so that a line that a crash cut is the last
//! of its segment.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::{Line, Raw, Revision};

/// A ring has so many segments of equal size at most: dropping one loses an eighth of the history.
pub(super) const SEGMENTS: u64 = 8;

/// The segments of one driver.
#[derive(Debug)]
pub(super) struct Ring {
    directory: PathBuf,
    segment_bytes_max: u64,
    current: Option<Current>,
}

/// The segment that is written.
#[derive(Debug)]
struct Current {
    file: File,
    bytes: u64,
    revision: Arc<Revision>,
}

/// A segment that is read: what it had when it was opened.
#[derive(Debug)]
pub struct Segment {
    file: File,
    bytes: u64,
}

impl Segment {
    /// Reads its whole lines.
    pub fn read(self) -> io::Result<Vec<u8>> {
        let mut text = Vec::new();
        self.file.take(self.bytes).read_to_end(&mut text)?;
        let end = text
            .iter()
            .rposition(|byte| *byte == b'\n')
            .map_or(0, |at| at + 1);
        text.truncate(end);
        Ok(text)
    }
}

impl Ring {
    pub(super) fn new(directory: PathBuf, bytes_max: u64) -> Self {
        Self {
            directory,
            segment_bytes_max: bytes_max / SEGMENTS,
            current: None,
        }
    }

    /// Appends a line with its line feed.
    pub(super) fn append(&mut self, revision: &Arc<Revision>, line: &[u8]) -> io::Result<()> {
        let bytes = line.len() as u64;
        let current = self.current.as_mut().filter(|current| {
            *current.revision == **revision && current.bytes + bytes <= self.segment_bytes_max
        });
        let current = match current {
            Some(current) => current,
            None => {
                let begun = self.begin(revision, bytes)?;
                self.current.insert(begun)
            }
        };
        // After a write that failed in the middle, the next line is in another segment.
        if let Err(error) = current.file.write_all(line) {
            self.current = None;
            return Err(error);
        }
        current.bytes += bytes;
        Ok(())
    }

    /// Makes room and begins a segment, in which there is room for a line of this size.
    fn begin(&mut self, revision: &Arc<Revision>, bytes: u64) -> io::Result<Current> {
        let mut first = serde_json::to_vec(&Line::<Raw>::Revision((**revision).clone()))?;
        first.push(b'\n');
        let first_bytes = first.len() as u64;
        if first_bytes + bytes > self.segment_bytes_max {
            let message = format!(
                "{bytes} bytes, and a segment has {}",
                self.segment_bytes_max
            );
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, message));
        }
        self.current = None;
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.directory)?;
        let mut numbers = self.numbers()?;
        let mut sizes = numbers
            .iter()
            .map(|number| Ok(std::fs::metadata(self.path(*number))?.len()));
        let mut total = sizes.try_fold(0u64, |total, size: io::Result<u64>| {
            io::Result::Ok(total + size?)
        })?;
        let next = numbers.last().map_or(0, |last| last + 1);
        numbers.reverse();
        while total > self.segment_bytes_max * (SEGMENTS - 1)
            && let Some(oldest) = numbers.pop()
        {
            let path = self.path(oldest);
            total -= std::fs::metadata(&path)?.len();
            std::fs::remove_file(path)?;
        }
        let path = self.path(next);
        let mut file = OpenOptions::new()
            .append(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
        file.write_all(&first)?;
        Ok(Current {
            file,
            bytes: first_bytes,
            revision: Arc::clone(revision),
        })
    }

    /// The segments, the oldest first.
    pub(super) fn segments(&self) -> io::Result<Vec<Segment>> {
        self.numbers()?
            .into_iter()
            .map(|number| {
                let file = File::open(self.path(number))?;
                let bytes = file.metadata()?.len();
                Ok(Segment { file, bytes })
            })
            .collect()
    }

    /// Numbers of the segments in order. Without a directory there is none.
    fn numbers(&self) -> io::Result<Vec<u64>> {
        let entries = match std::fs::read_dir(&self.directory) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut numbers = Vec::new();
        for entry in entries {
            let name = entry?.file_name();
            let number: Option<u64> = name
                .to_str()
                .and_then(|name| name.strip_suffix(".jsonl")?.parse().ok());
            numbers.extend(number);
        }
        numbers.sort_unstable();
        Ok(numbers)
    }

    fn path(&self, number: u64) -> PathBuf {
        self.directory.join(format!("{number:010}.jsonl"))
    }

    /// Removes everything.
    pub(super) fn remove(&mut self) -> io::Result<()> {
        self.current = None;
        remove(&self.directory)
    }
}

/// Removes a ring's directory, if it exists.
pub(super) fn remove(directory: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn read(ring: &Ring) -> Vec<String> {
        let texts = ring
            .segments()
            .unwrap()
            .into_iter()
            .map(|segment| segment.read().unwrap());
        texts.map(|text| String::from_utf8(text).unwrap()).collect()
    }

    fn calls(ring: &Ring) -> Vec<u64> {
        let texts = read(ring);
        let lines = texts.iter().flat_map(|text| text.lines());
        lines
            .filter(|line| !line.starts_with('{'))
            .map(|line| line.trim().parse().unwrap())
            .collect()
    }

    #[test]
    fn ring_keeps_newest_lines_within_bound() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("gpu.example.com");
        let (revision, max) = (Arc::new(Revision::native("gpu.example.com")), 8 * 1024);
        let mut ring = Ring::new(path.clone(), max);
        for n in 0..500 {
            ring.append(&revision, format!("{n:>99}\n").as_bytes())
                .unwrap();
            let entries = std::fs::read_dir(&path)
                .unwrap()
                .map(|entry| entry.unwrap().metadata().unwrap());
            let sizes: Vec<_> = entries
                .map(|file| (file.len(), file.permissions().mode() & 0o777))
                .collect();
            assert!(
                sizes.iter().map(|(bytes, _)| bytes).sum::<u64>() <= max,
                "{sizes:?}"
            );
            assert!(sizes.iter().all(|(_, mode)| *mode == 0o600), "{sizes:?}");
        }
        let kept = calls(&ring);
        assert!(
            kept.len() > 50 && kept.iter().copied().eq(500 - kept.len() as u64..500),
            "{kept:?}"
        );
        assert!(
            read(&ring)
                .iter()
                .all(|text| text.starts_with("{\"revision\":")),
            "{:?}",
            read(&ring)
        );
        assert_eq!(
            std::fs::metadata(path).unwrap().permissions().mode() & 0o777,
            0o700
        );
    }

    #[test]
    fn new_revision_starts_a_segment() {
        let directory = tempfile::tempdir().unwrap();
        let mut ring = Ring::new(directory.path().to_owned(), 1 << 20);
        let [one, two] = ["1.0.0", "2.0.0"].map(|version| {
            Arc::new(Revision {
                version: version.to_owned(),
                ..Revision::native("gpu.example.com")
            })
        });
        ring.append(&one, b"1\n").unwrap();
        ring.append(&two, b"2\n").unwrap();
        ring.append(&two, b"3\n").unwrap();
        let last = directory.path().join("0000000001.jsonl");
        OpenOptions::new()
            .append(true)
            .open(last)
            .unwrap()
            .write_all(b"{\"call\":")
            .unwrap();
        let mut again = Ring::new(directory.path().to_owned(), 1 << 20);
        again.append(&two, b"4\n").unwrap();
        assert_eq!(calls(&again), [1, 2, 3, 4]);
        assert_eq!(read(&again).len(), 3);
    }

    #[test]
    fn oversized_line_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (mut ring, revision) = (
            Ring::new(directory.path().to_owned(), 8 * 1024),
            Arc::new(Revision::native("a")),
        );
        ring.append(&revision, b"1\n").unwrap();
        let error = ring.append(&revision, &[b' '; 1024]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
        ring.append(&revision, b"2\n").unwrap();
        assert_eq!(calls(&ring), [1, 2]);
        ring.remove().unwrap();
        assert!(ring.segments().unwrap().is_empty() && !directory.path().exists());
    }
}
