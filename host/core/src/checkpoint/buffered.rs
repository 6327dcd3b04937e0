//! A file whose writes are buffered until it is accepted. redb writes to a file when it opens it (marks, a repair); a file
//! that is then refused or set aside must be unchanged.

use std::fs::File;
use std::io;
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use redb::backends::FileBackend;
use redb::{BackendError, DatabaseError, StorageBackend};

/// Handles to the same file.
#[derive(Debug, Clone)]
pub(super) struct BufferedFile(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    file: FileBackend,
    holding: AtomicBool,
    pending: Mutex<Pending>,
}

/// Buffered operations.
#[derive(Debug)]
struct Pending {
    length: u64,
    /// Bytes of the file that no truncation has removed.
    kept: u64,
    ops: Vec<Op>,
}

#[derive(Debug)]
enum Op {
    Write { offset: u64, data: Vec<u8> },
    Length(u64),
    Sync,
}

impl BufferedFile {
    pub(super) fn new(file: File) -> Result<Self, DatabaseError> {
        let file = FileBackend::new(file)?;
        let length = file.len()?;
        let pending = Mutex::new(Pending { length, kept: length, ops: Vec::new() });
        Ok(Self(Arc::new(Shared { file, holding: AtomicBool::new(true), pending })))
    }

    /// Executes the buffered operations, with their syncs, and buffers nothing from now on.
    pub(super) fn release(&self) -> io::Result<()> {
        let mut pending = self.0.pending.lock();
        for op in pending.ops.drain(..) {
            match op {
                Op::Write { offset, data } => self.0.file.write(offset, &data)?,
                Op::Length(length) => self.0.file.set_len(length)?,
                Op::Sync => self.0.file.sync_data()?,
            }
        }
        self.0.holding.store(false, Ordering::Release);
        Ok(())
    }

    /// Runs on the buffered operations. `None`: nothing is buffered any more.
    fn buffered<T>(&self, act: impl FnOnce(&mut Pending) -> T) -> Option<T> {
        if !self.0.holding.load(Ordering::Acquire) {
            return None;
        }
        Some(act(&mut self.0.pending.lock()))
    }
}

impl Pending {
    fn set_len(&mut self, length: u64) {
        (self.length, self.kept) = (length, self.kept.min(length));
        self.ops.push(Op::Length(length));
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.length = self.length.max(offset + data.len() as u64);
        self.ops.push(Op::Write { offset, data: data.to_vec() });
    }

    /// Returns the file's bytes with the buffered operations applied.
    fn read(&self, file: &FileBackend, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(out.len() as u64).filter(|end| *end <= self.length);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        let from_file = usize::try_from(self.kept.min(end).saturating_sub(offset)).unwrap_or(out.len());
        let (kept, new) = out.split_at_mut(from_file);
        if !kept.is_empty() {
            file.read(offset, kept)?;
        }
        new.fill(0);
        for op in &self.ops {
            match op {
                Op::Write { offset: at, data } => overlay(offset, out, *at, data),
                Op::Length(length) => cut(offset, out, *length),
                Op::Sync => {}
            }
        }
        Ok(())
    }
}

/// Copies the overlap of `data`, which begins at `at`, into `out`, which begins at `offset`.
fn overlay(offset: u64, out: &mut [u8], at: u64, data: &[u8]) {
    let start = offset.max(at);
    let end = (offset + out.len() as u64).min(at + data.len() as u64);
    if start < end {
        // Within both slices, so the numbers fit.
        let (to, from, length) = ((start - offset) as usize, (start - at) as usize, (end - start) as usize);
        out[to..to + length].copy_from_slice(&data[from..from + length]);
    }
}

/// Zeroes the bytes that a truncation to `length` removes.
fn cut(offset: u64, out: &mut [u8], length: u64) {
    let keep = usize::try_from(length.saturating_sub(offset)).map_or(out.len(), |keep| keep.min(out.len()));
    out[keep..].fill(0);
}

impl StorageBackend for BufferedFile {
    fn len(&self) -> io::Result<u64> {
        self.buffered(|pending| pending.length).map_or_else(|| self.0.file.len(), Ok)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        match self.buffered(|pending| pending.read(&self.0.file, offset, out)) {
            Some(read) => read,
            None => self.0.file.read(offset, out),
        }
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.buffered(|pending| pending.set_len(len)).map_or_else(|| self.0.file.set_len(len), Ok)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.buffered(|pending| pending.ops.push(Op::Sync)).map_or_else(|| self.0.file.sync_data(), Ok)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.buffered(|pending| pending.write(offset, data))
            .map_or_else(|| self.0.file.write(offset, data), Ok)
    }

    fn close(&self) -> io::Result<()> {
        self.0.file.close()
    }

    fn try_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.file.try_lock_range(start, end)
    }

    fn try_lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.file.try_lock_shared_range(start, end)
    }

    fn lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.file.lock_range(start, end)
    }

    fn lock_shared_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.file.lock_shared_range(start, end)
    }

    fn unlock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<(), BackendError> {
        self.0.file.unlock_range(start, end)
    }

    fn query_lock_range(&self, start: Bound<u64>, end: Bound<u64>) -> Result<bool, BackendError> {
        self.0.file.query_lock_range(start, end)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Write(u64, Vec<u8>),
        Length(u64),
        Read(u64, usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (0..64u64, proptest::collection::vec(1..255u8, 1..16))
                .prop_map(|(at, data)| Step::Write(at, data)),
            (0..80u64).prop_map(Step::Length),
            (0..64u64, 1..32usize).prop_map(|(at, length)| Step::Read(at, length)),
        ]
    }

    fn buffered_and_plain() -> (tempfile::NamedTempFile, BufferedFile, tempfile::NamedTempFile, FileBackend) {
        let (a, b) = (tempfile::NamedTempFile::new().unwrap(), tempfile::NamedTempFile::new().unwrap());
        for file in [&a, &b] {
            std::fs::write(file.path(), [7; 40]).unwrap();
        }
        let buffered = BufferedFile::new(a.reopen().unwrap()).unwrap();
        let plain = FileBackend::new(b.reopen().unwrap()).unwrap();
        (a, buffered, b, plain)
    }

    proptest! {
        #[test]
        fn a_buffered_file_reads_as_if_it_were_written_and_is_not(steps in proptest::collection::vec(step(), 0..20)) {
            let (buffered_file, buffered, plain_file, plain) = buffered_and_plain();
            for step in steps {
                match step {
                    Step::Write(at, data) => {
                        buffered.write(at, &data).unwrap();
                        plain.write(at, &data).unwrap();
                    }
                    Step::Length(length) => {
                        buffered.set_len(length).unwrap();
                        plain.set_len(length).unwrap();
                    }
                    Step::Read(at, length) => {
                        let (mut a, mut b) = (vec![1; length], vec![1; length]);
                        let outcomes = (buffered.read(at, &mut a).is_ok(), plain.read(at, &mut b).is_ok());
                        prop_assert_eq!(outcomes.0, outcomes.1);
                        prop_assert!(!outcomes.0 || a == b);
                    }
                }
                prop_assert_eq!(buffered.len().unwrap(), plain.len().unwrap());
            }
            prop_assert_eq!(std::fs::read(buffered_file.path()).unwrap(), [7; 40]);
            buffered.release().unwrap();
            prop_assert_eq!(std::fs::read(buffered_file.path()).unwrap(), std::fs::read(plain_file.path()).unwrap());
        }
    }
}
