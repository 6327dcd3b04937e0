//! Reads a snapshot from a tar file.

use std::io::{self, BufRead, BufReader, Read};

use bzip2::bufread::MultiBzDecoder;
use flate2::bufread::MultiGzDecoder;
use tar::{Archive, EntryType, PaxExtensions};

use crate::collect::Collector;
use crate::limit::{
    ARCHIVE_BYTES_MAX, EXTENDED_HEADER_BYTES_MAX, PATH_BYTES_MAX, TRAILING_BYTES_MAX,
};
use crate::path::{TOPS, segments};
use crate::{Entry, NodeKind, Refusal, Snapshot, SnapshotError};

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const BZIP2_MAGIC: [u8; 3] = *b"BZh";

/// Loads the archive. `file` is its name in errors.
pub(crate) fn load(file: &str, archive: impl Read) -> Result<Snapshot, SnapshotError> {
    let mut loading = Loading {
        file,
        entry: String::new(),
        top: None,
        extended: Extended::default(),
        collector: Collector::default(),
    };
    let archive = decompress(archive).map_err(|source| loading.read_error(source, false))?;
    let mut archive = Archive::new(Bounded {
        inner: archive,
        left: ARCHIVE_BYTES_MAX,
        is_at_end: false,
    });
    let outcome = loading.take_all(&mut archive);
    let mut rest = archive.into_inner();
    outcome.map_err(|failure| loading.error(failure, rest.is_at_end))?;
    // Without its end marker the archive was cut between two entries.
    if rest.is_at_end {
        return Err(loading.truncated());
    }
    // The checksum of a compressed archive comes last, after the padding of the last record.
    rest.left = rest.left.min(TRAILING_BYTES_MAX);
    io::copy(&mut rest, &mut io::sink()).map_err(|source| loading.read_error(source, false))?;
    loading.collector.finish(file)
}

fn decompress<'a>(archive: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let mut archive = BufReader::new(archive);
    let magic = archive.fill_buf()?;
    Ok(if magic.starts_with(&GZIP_MAGIC) {
        Box::new(MultiGzDecoder::new(archive))
    } else if magic.starts_with(&BZIP2_MAGIC) {
        Box::new(MultiBzDecoder::new(archive))
    } else {
        Box::new(archive)
    })
}

enum Failure {
    Io(io::Error),
    Refused(Refusal),
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Failure::Io(error)
    }
}

impl From<Refusal> for Failure {
    fn from(refusal: Refusal) -> Self {
        Failure::Refused(refusal)
    }
}

struct Loading<'a> {
    file: &'a str,
    /// The last entry that began.
    entry: String,
    /// The directory around the snapshot: empty if there is none, unknown before the first entry.
    top: Option<String>,
    extended: Extended,
    collector: Collector,
}

/// The headers before an entry that hold what its own header has no room for.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<Vec<u8>>,
}

impl Loading<'_> {
    /// The tar crate would read extended headers of any size into memory, so they are read here.
    fn take_all(&mut self, archive: &mut Archive<impl Read>) -> Result<(), Failure> {
        for entry in archive.entries()?.raw(true) {
            let mut entry = entry?;
            match entry.header().entry_type() {
                EntryType::XGlobalHeader => drop(extended(&mut entry)?),
                EntryType::GNULongName => {
                    self.extended.path = Some(without_nul(extended(&mut entry)?))
                }
                EntryType::GNULongLink => {
                    self.extended.link = Some(without_nul(extended(&mut entry)?))
                }
                EntryType::XHeader => self.extended.take(&extended(&mut entry)?)?,
                _ => self.take(&mut entry)?,
            }
        }
        let Extended {
            path: None,
            link: None,
            size: None,
        } = self.extended
        else {
            return Err(truncated().into());
        };
        Ok(())
    }

    fn take(&mut self, entry: &mut tar::Entry<'_, impl Read>) -> Result<(), Failure> {
        let extended = std::mem::take(&mut self.extended);
        let path = extended
            .path
            .unwrap_or_else(|| entry.path_bytes().into_owned());
        self.entry = String::from_utf8_lossy(&path[..path.len().min(PATH_BYTES_MAX)]).into_owned();
        let size = entry.size();
        if extended
            .size
            .is_some_and(|recorded| recorded != size.to_string().as_bytes())
        {
            return Err(Refusal::SizeMismatch.into());
        }
        let Some(segments) = self.below_top(&path)? else {
            return Ok(());
        };
        let content = self.content(entry, extended.link)?;
        let segments: Vec<_> = segments.iter().map(String::as_str).collect();
        Ok(self.collector.add(&segments, content)?)
    }

    /// Returns the segments below the snapshot's root; `None` for the root itself.
    fn below_top(&mut self, path: &[u8]) -> Result<Option<Vec<String>>, Refusal> {
        let segments = segments(path)?;
        let Some(first) = segments.first() else {
            return Ok(None);
        };
        let top = self.top.get_or_insert_with(|| {
            if TOPS.contains(first) {
                String::new()
            } else {
                (*first).into()
            }
        });
        let below = match top.as_str() {
            "" => &segments[..],
            top if top == *first => &segments[1..],
            top => {
                return Err(Refusal::SecondTop {
                    top: top.to_owned(),
                });
            }
        };
        Ok(
            (!below.is_empty())
                .then(|| below.iter().map(|segment| (*segment).to_owned()).collect()),
        )
    }

    fn content(
        &mut self,
        entry: &mut tar::Entry<'_, impl Read>,
        link: Option<Vec<u8>>,
    ) -> Result<Entry, Failure> {
        let kind = entry.header().entry_type();
        match kind {
            EntryType::Directory => Ok(Entry::Directory),
            EntryType::Regular | EntryType::Continuous => self.file(entry),
            EntryType::Symlink => Ok(Entry::Link(link_name(entry, link)?)),
            EntryType::Link => self.hard_link(&link_name(entry, link)?),
            EntryType::Char => node(entry, NodeKind::Character),
            EntryType::Block => node(entry, NodeKind::Block),
            EntryType::Fifo => Err(Refusal::FileType { kind: "a fifo" }.into()),
            EntryType::GNUSparse => Err(Refusal::FileType {
                kind: "a sparse file",
            }
            .into()),
            _ => Err(Refusal::FileType {
                kind: "of a type that tar does not define",
            }
            .into()),
        }
    }

    fn file(&self, entry: &mut tar::Entry<'_, impl Read>) -> Result<Entry, Failure> {
        self.collector.admit_file(entry.size())?;
        whole(entry).map(Entry::File)
    }

    /// Copies the file that a hard link names. Sizes are checked as for any file.
    fn hard_link(&mut self, target: &str) -> Result<Entry, Failure> {
        let segments = self.below_top(target.as_bytes())?;
        let segments: Option<Vec<_>> = segments
            .as_ref()
            .map(|segments| segments.iter().map(String::as_str).collect());
        match segments.and_then(|segments| self.collector.get(&segments)) {
            Some(Entry::File(content)) => {
                self.collector.admit_file(content.len() as u64)?;
                Ok(Entry::File(content.clone()))
            }
            _ => Err(Refusal::BadHardLink {
                target: target.to_owned(),
            }
            .into()),
        }
    }

    fn error(&self, failure: Failure, is_at_end: bool) -> SnapshotError {
        match failure {
            Failure::Io(source) => self.read_error(source, is_at_end),
            Failure::Refused(refusal) => self.refused(refusal),
        }
    }

    fn read_error(&self, source: io::Error, is_at_end: bool) -> SnapshotError {
        match source.kind() {
            io::ErrorKind::FileTooLarge => self.refused(Refusal::LargeArchive),
            io::ErrorKind::UnexpectedEof => self.truncated(),
            _ if is_at_end => self.truncated(),
            _ => SnapshotError::Read {
                file: self.file.to_owned(),
                entry: self.entry.clone(),
                source,
            },
        }
    }

    fn refused(&self, refusal: Refusal) -> SnapshotError {
        SnapshotError::Refused {
            file: self.file.to_owned(),
            entry: self.entry.clone(),
            refusal,
        }
    }

    fn truncated(&self) -> SnapshotError {
        SnapshotError::Truncated {
            file: self.file.to_owned(),
            entry: self.entry.clone(),
        }
    }
}

impl Extended {
    fn take(&mut self, header: &[u8]) -> Result<(), Failure> {
        for record in PaxExtensions::new(header) {
            let record = record?;
            let value = record.value_bytes();
            match record.key_bytes() {
                b"path" => self.path = Some(value.to_vec()),
                b"linkpath" => self.link = Some(value.to_vec()),
                b"size" => self.size = Some(value.to_vec()),
                key if key.starts_with(b"GNU.sparse.") => {
                    return Err(Refusal::FileType {
                        kind: "a sparse file",
                    }
                    .into());
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn extended(entry: &mut tar::Entry<'_, impl Read>) -> Result<Vec<u8>, Failure> {
    if entry.size() > EXTENDED_HEADER_BYTES_MAX {
        return Err(Refusal::LargeHeader.into());
    }
    whole(entry)
}

fn whole(entry: &mut tar::Entry<'_, impl Read>) -> Result<Vec<u8>, Failure> {
    // The caller has checked the size.
    let mut content = Vec::with_capacity(usize::try_from(entry.size()).unwrap_or_default());
    entry.read_to_end(&mut content)?;
    if content.len() as u64 == entry.size() {
        Ok(content)
    } else {
        Err(truncated().into())
    }
}

fn without_nul(mut name: Vec<u8>) -> Vec<u8> {
    if name.last() == Some(&0) {
        name.pop();
    }
    name
}

fn link_name(
    entry: &tar::Entry<'_, impl Read>,
    extended: Option<Vec<u8>>,
) -> Result<String, Refusal> {
    let name = extended.or_else(|| entry.link_name_bytes().map(|name| name.into_owned()));
    String::from_utf8(name.ok_or(Refusal::BadPath)?).map_err(|_| Refusal::BadPath)
}

fn node(entry: &tar::Entry<'_, impl Read>, kind: NodeKind) -> Result<Entry, Failure> {
    let header = entry.header();
    let (Some(major), Some(minor)) = (header.device_major()?, header.device_minor()?) else {
        return Err(Refusal::FileType {
            kind: "a device node without a number",
        }
        .into());
    };
    Ok(Entry::Node { kind, major, minor })
}

fn truncated() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}

/// Fails beyond a number of bytes, and remembers whether the end was met.
struct Bounded<R> {
    inner: R,
    left: u64,
    is_at_end: bool,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.is_at_end |= read == 0 && !buffer.is_empty();
        self.left = self
            .left
            .checked_sub(read as u64)
            .ok_or(io::ErrorKind::FileTooLarge)?;
        Ok(read)
    }
}
