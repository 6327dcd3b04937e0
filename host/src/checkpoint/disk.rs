//! A disk for tests: remembers every write and sync, so that power can be cut anywhere afterwards; refuses what it is told to.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};

use redb::StorageBackend;

#[derive(Debug, Clone)]
pub(super) enum Op {
    Write { offset: u64, data: Vec<u8> },
    Length(u64),
    Sync,
}

#[derive(Debug, Default)]
struct State {
    bytes: Vec<u8>,
    ops: Vec<Op>,
    /// What writes and syncs answer.
    refusal: Option<io::ErrorKind>,
    /// Successful operations until the refusal begins.
    credit: usize,
}

/// Handles to the same disk.
#[derive(Debug, Clone, Default)]
pub(super) struct Disk(Arc<Mutex<State>>);

impl Disk {
    pub(super) fn with(bytes: Vec<u8>) -> Self {
        Self(Arc::new(Mutex::new(State { bytes, ..State::default() })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    /// Refuses writes and syncs after `credit` more of them.
    pub(super) fn refuse(&self, kind: io::ErrorKind, credit: usize) {
        let mut state = self.state();
        (state.refusal, state.credit) = (Some(kind), credit);
    }

    pub(super) fn accept(&self) {
        self.state().refusal = None;
    }

    pub(super) fn bytes(&self) -> Vec<u8> {
        self.state().bytes.clone()
    }

    pub(super) fn ops(&self) -> Vec<Op> {
        self.state().ops.clone()
    }

    pub(super) fn ops_count(&self) -> usize {
        self.state().ops.len()
    }

    fn change(&self, op: Op) -> io::Result<()> {
        let mut state = self.state();
        if let Some(kind) = state.refusal {
            match state.credit.checked_sub(1) {
                Some(credit) => state.credit = credit,
                None => return Err(kind.into()),
            }
        }
        apply(&mut state.bytes, &op);
        state.ops.push(op);
        Ok(())
    }
}

/// What an operation does to the bytes of a disk.
pub(super) fn apply(bytes: &mut Vec<u8>, op: &Op) {
    match op {
        Op::Write { offset, data } => {
            let start = usize::try_from(*offset).unwrap();
            bytes.resize(bytes.len().max(start + data.len()), 0);
            bytes[start..start + data.len()].copy_from_slice(data);
        }
        Op::Length(length) => bytes.resize(usize::try_from(*length).unwrap(), 0),
        Op::Sync => {}
    }
}

impl StorageBackend for Disk {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state().bytes.len() as u64)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.state();
        let start = usize::try_from(offset).unwrap();
        let range = state.bytes.get(start..start + out.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
        out.copy_from_slice(range);
        Ok(())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.change(Op::Length(len))
    }

    fn sync_data(&self) -> io::Result<()> {
        self.change(Op::Sync)
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.change(Op::Write { offset, data: data.to_vec() })
    }
}
