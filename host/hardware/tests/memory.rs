//! The memory that a small archive can make a reader take.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{self, Read};
use std::sync::atomic::{AtomicUsize, Ordering};

use nodedock_hardware::Snapshot;
use tar::{EntryType, Header};

/// Counts what is allocated.
struct Counting;

static NOW: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let now = NOW.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(now, Ordering::Relaxed);
        // SAFETY: the caller's layout.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        NOW.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's pointer, which `alloc` returned for this layout.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// An archive without end, of entries with their headers that a function makes.
struct Entries<F> {
    entry: F,
    number: usize,
    blocks: io::Cursor<Vec<u8>>,
}

impl<F: FnMut(usize) -> Vec<u8>> Read for Entries<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.blocks.position() as usize == self.blocks.get_ref().len() {
            self.blocks = io::Cursor::new((self.entry)(self.number));
            self.number += 1;
        }
        self.blocks.read(buffer)
    }
}

/// A header, and its content in whole blocks.
fn blocks(kind: EntryType, path: &str, content: &str) -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_path(path).unwrap();
    header.set_size(content.len() as u64);
    header.set_cksum();
    let mut blocks = header.as_bytes().to_vec();
    blocks.extend_from_slice(content.as_bytes());
    blocks.resize(blocks.len().next_multiple_of(512), 0);
    blocks
}

/// The bytes that reading the archive takes at most, and its error.
fn peak(entry: impl FnMut(usize) -> Vec<u8>) -> (usize, String) {
    let before = NOW.load(Ordering::Relaxed);
    PEAK.store(before, Ordering::Relaxed);
    let archive = Entries {
        entry,
        number: 0,
        blocks: io::Cursor::default(),
    };
    let error = Snapshot::from_archive("m.tar", archive)
        .unwrap_err()
        .to_string();
    (PEAK.load(Ordering::Relaxed) - before, error)
}

/// One test, since all tests of a process share its memory.
#[test]
fn endless_archive_needs_bounded_memory() {
    const BOUND: usize = 192 << 20;
    // Each entry has many directories with long paths.
    let name = "a".repeat(60);
    let (deep, error) = peak(|number| {
        let path = format!("sys/{number:06}/{}", format!("{name}/").repeat(60));
        let long = blocks(EntryType::GNULongName, "././@LongLink", &path);
        [long, blocks(EntryType::Directory, "x", "")].concat()
    });
    assert!(
        error.contains("entry \"sys/000")
            && error.contains("paths and targets of links up to this one"),
        "{error}"
    );
    let (links, error) = peak(|number| {
        let long = blocks(EntryType::GNULongLink, "././@LongLink", &"./".repeat(2000));
        [
            long,
            blocks(EntryType::Symlink, &format!("sys/{number:06}"), ""),
        ]
        .concat()
    });
    assert!(
        error.contains("entry \"sys/0")
            && error.contains("paths and targets of links up to this one"),
        "{error}"
    );
    let (many, error) = peak(|number| blocks(EntryType::Regular, &format!("sys/{number}"), ""));
    assert!(
        error.contains("entry \"sys/499999\": the snapshot has more than 500000 entries"),
        "{error}"
    );
    println!("{deep} bytes for deep paths, {links} for links, {many} for entries");
    assert!(
        deep < BOUND && links < BOUND && many < BOUND,
        "{deep} {links} {many}"
    );
}
