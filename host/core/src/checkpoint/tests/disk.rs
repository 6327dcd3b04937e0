//! A disk for tests: records every write and sync, so that a test can cut the power at any point; fails operations on request.

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
    /// Failure of writes and syncs.
    refusal: Option<io::ErrorKind>,
    /// Number of successful operations before the failure.
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

    /// Fails writes and syncs after `credit` more of them.
    pub(super) fn refuse(&self, kind: io::ErrorKind, credit: usize) {
        let mut state = self.state();
        (state.refusal, state.credit) = (Some(kind), credit);
    }

    /// Blocks every operation until the returned guard is dropped.
    pub(super) fn hold(&self) -> impl Sized + '_ {
        self.state()
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

    /// Drops unsynced bytes, except for those that `survives` selects.
    pub(super) fn lose_unsynced(&self, survives: impl FnMut() -> bool) {
        let mut state = self.state();
        let bytes = cut(&state.ops, survives);
        state.ops = vec![Op::Write { offset: 0, data: bytes.clone() }, Op::Sync];
        state.bytes = bytes;
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

/// Applies an operation to the bytes of a disk.
fn apply(bytes: &mut Vec<u8>, op: &Op) {
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

/// Returns a disk after a power loss: the synced bytes, and of the rest what `survives` selects, by sectors of 512 bytes.
pub(super) fn cut(ops: &[Op], mut survives: impl FnMut() -> bool) -> Vec<u8> {
    let synced = ops.iter().rposition(|op| matches!(op, Op::Sync)).map_or(0, |at| at + 1);
    let mut bytes = Vec::new();
    for op in &ops[..synced] {
        apply(&mut bytes, op);
    }
    for op in &ops[synced..] {
        match op {
            Op::Write { offset, data } => {
                for (n, sector) in data.chunks(512).enumerate() {
                    if survives() {
                        let offset = offset + n as u64 * 512;
                        apply(&mut bytes, &Op::Write { offset, data: sector.to_vec() });
                    }
                }
            }
            // The file's length is metadata: it survives with the writes or without them.
            Op::Length(_) if survives() => apply(&mut bytes, op),
            _ => {}
        }
    }
    bytes
}

/// Deterministic random numbers (xorshift).
pub(super) fn coin(seed: u64) -> impl FnMut() -> bool {
    let mut seed = seed | 1;
    move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed & 1 == 1
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
