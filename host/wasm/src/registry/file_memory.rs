//! Memory for drivers' files: a directory full of the largest ones must not take 32 GiB while they wait for the compiler.
//!
//! Memory is reserved before a file is read, until its bytes are dropped. Files that are only judged have memory of their own: a driver that is
//! no longer trusted does not wait for the compiler.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use nodedock_model::limit;

/// Bytes of drivers' files in memory during loads, which are sequential: a dozen Python files fit, or three of the largest.
const LOADED_FILES_BYTES_MAX: u64 = 256 << 20;

/// The same while files are only verified, which takes a second for the largest.
const JUDGED_FILES_BYTES_MAX: u64 = 128 << 20;

const UNIT: u64 = 1 << 20;

/// Clones share it.
#[derive(Clone)]
pub struct FileMemory {
    /// Memory for files that are loaded, and their side files.
    pub(super) loading: Arc<Semaphore>,
    /// Memory for files that are only judged.
    pub(super) judging: Arc<Semaphore>,
}

impl Default for FileMemory {
    fn default() -> Self {
        Self {
            loading: units(LOADED_FILES_BYTES_MAX),
            judging: units(JUDGED_FILES_BYTES_MAX),
        }
    }
}

fn units(bytes: u64) -> Arc<Semaphore> {
    let units = usize::try_from(bytes / UNIT).expect("a bound is some units");
    Arc::new(Semaphore::new(units))
}

/// Reserved memory for the bytes of a file.
pub(super) struct Room {
    permit: OwnedSemaphorePermit,
}

impl Room {
    /// Reserves memory for a file of this size, in order of request.
    pub(super) async fn within(all: &Arc<Semaphore>, size: u64) -> Self {
        // Rounded up, at least one unit: for the side files.
        let units = size.min(limit::DRIVER_FILE_BYTES_MAX) / UNIT + 1;
        let units = u32::try_from(units).expect("a file's bound is some units");
        let permit = Arc::clone(all)
            .acquire_many_owned(units)
            .await
            .expect("it is never closed");
        Self { permit }
    }

    /// Bytes of the largest file that fits.
    pub(super) fn bytes_max(&self) -> u64 {
        (self.permit.num_permits() as u64 * UNIT).min(limit::DRIVER_FILE_BYTES_MAX)
    }

    /// Bytes that keep the reservation until the last part of them is dropped.
    pub(super) fn hold(self, bytes: Vec<u8>) -> Bytes {
        Bytes::from_owner(ReservedBytes { bytes, _room: self })
    }
}

struct ReservedBytes {
    bytes: Vec<u8>,
    _room: Room,
}

impl AsRef<[u8]> for ReservedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    #[tokio::test]
    async fn only_loading_files_wait_for_memory() {
        let (memory, largest) = (FileMemory::default(), limit::DRIVER_FILE_BYTES_MAX);
        let mut held = Vec::new();
        while let Some(room) = Room::within(&memory.loading, largest).now_or_never() {
            assert_eq!(room.bytes_max(), largest);
            held.push(room.hold(vec![0; 4]));
        }
        assert!((1..=LOADED_FILES_BYTES_MAX / largest).contains(&(held.len() as u64)));
        assert!(
            Room::within(&memory.judging, u64::MAX)
                .now_or_never()
                .is_some(),
            "the largest fits whatever it says"
        );
        let part = held.pop().unwrap().slice(1..2);
        assert!(
            Room::within(&memory.loading, largest)
                .now_or_never()
                .is_none(),
            "a part of it is held still"
        );
        drop(part);
        assert!(
            Room::within(&memory.loading, largest)
                .now_or_never()
                .is_some()
        );
    }

    #[tokio::test]
    async fn file_memory_allows_some_growth() {
        let memory = FileMemory::default();
        for (size, bytes_max) in [(0, UNIT), (UNIT - 1, UNIT), (UNIT, 2 * UNIT)] {
            assert_eq!(
                Room::within(&memory.loading, size).await.bytes_max(),
                bytes_max
            );
        }
    }
}
