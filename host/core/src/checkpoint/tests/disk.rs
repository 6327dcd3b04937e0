//! A disk for tests: records every write and sync of SQLite's files, so that a test can cut the power at any point; fails operations on
//! request. SQLite reaches it by a VFS (sqlite.org/vfs.html) under the name `test-disk`, whose paths name the disk.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, Once, Weak};

use rusqlite::ffi;

/// Name of the VFS.
pub(super) const VFS: &str = "test-disk";
const SECTOR: usize = 512;

/// A file of a disk: SQLite's file and its log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Name {
    Main,
    Log,
}

#[derive(Debug, Clone)]
pub(super) enum Op {
    Write {
        file: Name,
        offset: u64,
        data: Vec<u8>,
    },
    Length {
        file: Name,
        length: u64,
    },
    Sync(Name),
    /// A sync that failed: Linux then marks the pages as clean that the disk does not have (lwn.net/Articles/752063).
    FailedSync(Name),
}

/// The bytes of both files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Image {
    main: Vec<u8>,
    log: Vec<u8>,
}

#[derive(Debug, Default)]
struct DiskState {
    image: Image,
    ops: Vec<Op>,
    /// Failure of writes and syncs.
    refusal: Option<io::ErrorKind>,
    /// Number of successful operations before the failure.
    credit: usize,
}

/// Handles to the same disk.
#[derive(Debug, Clone)]
pub(crate) struct Disk(Arc<SharedDisk>);

#[derive(Debug)]
struct SharedDisk {
    number: u64,
    state: Mutex<DiskState>,
}

static DISKS: LazyLock<Mutex<HashMap<u64, Weak<SharedDisk>>>> = LazyLock::new(Mutex::default);

impl Drop for SharedDisk {
    fn drop(&mut self) {
        DISKS.lock().unwrap().remove(&self.number);
    }
}

impl Disk {
    pub(super) fn new() -> Self {
        Self::with(Image::default())
    }

    pub(super) fn with(image: Image) -> Self {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(1);
        register();
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let state = Mutex::new(DiskState {
            image,
            ..DiskState::default()
        });
        let shared = Arc::new(SharedDisk { number, state });
        DISKS
            .lock()
            .unwrap()
            .insert(number, Arc::downgrade(&shared));
        Self(shared)
    }

    pub(super) fn path(&self) -> PathBuf {
        format!("/{}/checkpoint.db", self.0.number).into()
    }

    fn state(&self) -> MutexGuard<'_, DiskState> {
        self.0.state.lock().unwrap()
    }

    /// Fails writes and syncs after `credit` more of them.
    pub(crate) fn refuse(&self, kind: io::ErrorKind, credit: usize) {
        let mut state = self.state();
        (state.refusal, state.credit) = (Some(kind), credit);
    }

    pub(crate) fn accept(&self) {
        self.state().refusal = None;
    }

    pub(super) fn image(&self) -> Image {
        self.state().image.clone()
    }

    pub(super) fn ops(&self) -> Vec<Op> {
        self.state().ops.clone()
    }

    pub(super) fn ops_count(&self) -> usize {
        self.state().ops.len()
    }

    fn change(&self, op: Op) -> Result<(), io::ErrorKind> {
        let mut state = self.state();
        if let Some(kind) = state.refusal {
            match state.credit.checked_sub(1) {
                Some(credit) => state.credit = credit,
                None => {
                    if let Op::Sync(file) = op {
                        state.ops.push(Op::FailedSync(file));
                    }
                    return Err(kind);
                }
            }
        }
        state.image.apply(&op);
        state.ops.push(op);
        Ok(())
    }
}

impl Image {
    fn file(&mut self, name: Name) -> &mut Vec<u8> {
        match name {
            Name::Main => &mut self.main,
            Name::Log => &mut self.log,
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Write { file, offset, data } => {
                let (bytes, start) = (self.file(*file), usize::try_from(*offset).unwrap());
                bytes.resize(bytes.len().max(start + data.len()), 0);
                bytes[start..start + data.len()].copy_from_slice(data);
            }
            Op::Length { file, length } => self
                .file(*file)
                .resize(usize::try_from(*length).unwrap(), 0),
            Op::Sync(_) | Op::FailedSync(_) => {}
        }
    }

    /// Applies what survives of an unsynced operation.
    fn apply_part(&mut self, op: &Op, survives: &mut impl FnMut() -> bool) {
        match op {
            Op::Write { file, offset, data } => {
                for (n, sector) in data.chunks(SECTOR).enumerate() {
                    if survives() {
                        let offset = offset + (n * SECTOR) as u64;
                        self.apply(&Op::Write {
                            file: *file,
                            offset,
                            data: sector.to_vec(),
                        });
                    }
                }
            }
            // The file's length is metadata: it survives with the writes or without them.
            Op::Length { .. } if survives() => self.apply(op),
            _ => {}
        }
    }
}

/// Returns a disk after a power loss: the synced bytes of each file, and of the rest what `survives` selects, by sectors. A write before a
/// failed sync is such a rest, also if a later sync succeeded.
pub(super) fn cut(before: &Image, ops: &[Op], mut survives: impl FnMut() -> bool) -> Image {
    let mut image = before.clone();
    for name in [Name::Main, Name::Log] {
        let mut unsynced: Vec<(&Op, bool)> = Vec::new();
        for op in ops {
            match op {
                Op::Write { file, .. } | Op::Length { file, .. } if *file == name => {
                    unsynced.push((op, false))
                }
                Op::FailedSync(file) if *file == name => {
                    unsynced.iter_mut().for_each(|(_, is_lost)| *is_lost = true);
                }
                Op::Sync(file) if *file == name => {
                    for (op, is_lost) in unsynced.drain(..) {
                        if is_lost {
                            image.apply_part(op, &mut survives)
                        } else {
                            image.apply(op)
                        }
                    }
                }
                _ => {}
            }
        }
        unsynced
            .iter()
            .for_each(|(op, _)| image.apply_part(op, &mut survives));
    }
    image
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

thread_local! {
    /// The system's error of the last failed operation, for `xGetLastError`.
    static ERRNO: Cell<c_int> = const { Cell::new(0) };
}

/// An open file, as SQLite allocates it.
#[repr(C)]
struct OpenFile {
    base: ffi::sqlite3_file,
    /// Pointer from `Box::into_raw`; `close` frees it.
    file: *mut (Disk, Name),
}

static METHODS: ffi::sqlite3_io_methods = ffi::sqlite3_io_methods {
    iVersion: 1,
    xClose: Some(close),
    xRead: Some(read),
    xWrite: Some(write),
    xTruncate: Some(truncate),
    xSync: Some(sync),
    xFileSize: Some(file_size),
    xLock: Some(any_lock),
    xUnlock: Some(any_lock),
    xCheckReservedLock: Some(check_reserved_lock),
    xFileControl: Some(file_control),
    xSectorSize: Some(sector_size),
    xDeviceCharacteristics: Some(device_characteristics),
    xShmMap: None,
    xShmLock: None,
    xShmBarrier: None,
    xShmUnmap: None,
    xFetch: None,
    xUnfetch: None,
};

/// Registers the VFS, once for all disks.
fn register() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: SQLite's default VFS lives as long as the process, as do the copy and its name, which are leaked.
        unsafe {
            let mut vfs = *ffi::sqlite3_vfs_find(std::ptr::null());
            vfs.iVersion = 1;
            vfs.szOsFile = c_int::try_from(size_of::<OpenFile>()).unwrap();
            vfs.zName = c"test-disk".as_ptr();
            vfs.pNext = std::ptr::null_mut();
            vfs.xOpen = Some(open);
            vfs.xDelete = Some(delete);
            vfs.xAccess = Some(access);
            vfs.xFullPathname = Some(full_pathname);
            vfs.xGetLastError = Some(last_error);
            assert_eq!(
                ffi::sqlite3_vfs_register(Box::leak(Box::new(vfs)), 0),
                ffi::SQLITE_OK
            );
        }
    });
}

/// Finds the file of a path: `/DISK/checkpoint.db`, with `-wal` for the log.
fn find(path: &str) -> Option<(Disk, Name)> {
    let (number, name) = path.strip_prefix('/')?.split_once('/')?;
    let disk = DISKS
        .lock()
        .unwrap()
        .get(&number.parse().ok()?)?
        .upgrade()?;
    match name {
        "checkpoint.db" => Some((Disk(disk), Name::Main)),
        "checkpoint.db-wal" => Some((Disk(disk), Name::Log)),
        _ => None,
    }
}

/// # Safety
/// `path` is a C string or null.
unsafe fn path_of<'a>(path: *const c_char) -> &'a str {
    if path.is_null() {
        return "";
    }
    // SAFETY: the caller's.
    unsafe { CStr::from_ptr(path) }.to_str().unwrap()
}

/// # Safety
/// `file` was opened by `open` and is not closed.
unsafe fn disk_of<'a>(file: *mut ffi::sqlite3_file) -> &'a (Disk, Name) {
    // SAFETY: SQLite passes what `open` has filled.
    unsafe { &*(*file.cast::<OpenFile>()).file }
}

fn outcome(done: Result<(), io::ErrorKind>, code: c_int) -> c_int {
    let Err(kind) = done else {
        return ffi::SQLITE_OK;
    };
    let errno = match kind {
        io::ErrorKind::StorageFull => rustix::io::Errno::NOSPC,
        io::ErrorKind::ReadOnlyFilesystem => rustix::io::Errno::ROFS,
        _ => rustix::io::Errno::IO,
    };
    ERRNO.set(errno.raw_os_error());
    // As SQLite's own VFS says it of writes.
    let is_full = kind == io::ErrorKind::StorageFull && code == ffi::SQLITE_IOERR_WRITE;
    if is_full { ffi::SQLITE_FULL } else { code }
}

unsafe extern "C" fn open(
    _: *mut ffi::sqlite3_vfs,
    path: ffi::sqlite3_filename,
    file: *mut ffi::sqlite3_file,
    flags: c_int,
    out_flags: *mut c_int,
) -> c_int {
    // SAFETY: SQLite passes a valid path, and memory of the size that the VFS names.
    unsafe {
        let open = file.cast::<OpenFile>();
        let Some(found) = find(path_of(path)) else {
            (*open).base.pMethods = std::ptr::null();
            return ffi::SQLITE_CANTOPEN;
        };
        (*open).file = Box::into_raw(Box::new(found));
        (*open).base.pMethods = &METHODS;
        if !out_flags.is_null() {
            *out_flags = flags;
        }
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn close(file: *mut ffi::sqlite3_file) -> c_int {
    // SAFETY: `open` made the box, and SQLite closes a file once.
    drop(unsafe { Box::from_raw((*file.cast::<OpenFile>()).file) });
    ffi::SQLITE_OK
}

unsafe extern "C" fn read(
    file: *mut ffi::sqlite3_file,
    out: *mut c_void,
    length: c_int,
    offset: ffi::sqlite3_int64,
) -> c_int {
    // SAFETY: SQLite passes a buffer of that length.
    let (out, (disk, name)) = unsafe {
        (
            std::slice::from_raw_parts_mut(out.cast::<u8>(), usize::try_from(length).unwrap()),
            disk_of(file),
        )
    };
    let mut state = disk.state();
    let (bytes, start) = (state.image.file(*name), usize::try_from(offset).unwrap());
    let found = &bytes[start.min(bytes.len())..(start + out.len()).min(bytes.len())];
    out[..found.len()].copy_from_slice(found);
    if found.len() == out.len() {
        return ffi::SQLITE_OK;
    }
    out[found.len()..].fill(0);
    ffi::SQLITE_IOERR_SHORT_READ
}

unsafe extern "C" fn write(
    file: *mut ffi::sqlite3_file,
    data: *const c_void,
    length: c_int,
    offset: ffi::sqlite3_int64,
) -> c_int {
    // SAFETY: SQLite passes a buffer of that length.
    let (data, (disk, name)) = unsafe {
        (
            std::slice::from_raw_parts(data.cast::<u8>(), usize::try_from(length).unwrap()),
            disk_of(file),
        )
    };
    let op = Op::Write {
        file: *name,
        offset: offset.try_into().unwrap(),
        data: data.to_vec(),
    };
    outcome(disk.change(op), ffi::SQLITE_IOERR_WRITE)
}

unsafe extern "C" fn truncate(file: *mut ffi::sqlite3_file, length: ffi::sqlite3_int64) -> c_int {
    // SAFETY: the file is open.
    let (disk, name) = unsafe { disk_of(file) };
    let op = Op::Length {
        file: *name,
        length: length.try_into().unwrap(),
    };
    outcome(disk.change(op), ffi::SQLITE_IOERR_TRUNCATE)
}

unsafe extern "C" fn sync(file: *mut ffi::sqlite3_file, _: c_int) -> c_int {
    // SAFETY: the file is open.
    let (disk, name) = unsafe { disk_of(file) };
    outcome(disk.change(Op::Sync(*name)), ffi::SQLITE_IOERR_FSYNC)
}

unsafe extern "C" fn file_size(
    file: *mut ffi::sqlite3_file,
    size: *mut ffi::sqlite3_int64,
) -> c_int {
    // SAFETY: the file is open, and SQLite passes a place for the number.
    unsafe {
        let (disk, name) = disk_of(file);
        *size = disk.state().image.file(*name).len().try_into().unwrap();
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn any_lock(_: *mut ffi::sqlite3_file, _: c_int) -> c_int {
    ffi::SQLITE_OK
}

unsafe extern "C" fn check_reserved_lock(
    _: *mut ffi::sqlite3_file,
    is_locked: *mut c_int,
) -> c_int {
    // SAFETY: SQLite passes a place for the number.
    unsafe { *is_locked = 0 };
    ffi::SQLITE_OK
}

unsafe extern "C" fn file_control(_: *mut ffi::sqlite3_file, _: c_int, _: *mut c_void) -> c_int {
    ffi::SQLITE_NOTFOUND
}

unsafe extern "C" fn sector_size(_: *mut ffi::sqlite3_file) -> c_int {
    c_int::try_from(SECTOR).unwrap()
}

/// Returns the characteristics of SQLite's own VFS on Linux: a write does not change the bytes around it.
unsafe extern "C" fn device_characteristics(_: *mut ffi::sqlite3_file) -> c_int {
    ffi::SQLITE_IOCAP_POWERSAFE_OVERWRITE
}

unsafe extern "C" fn delete(_: *mut ffi::sqlite3_vfs, path: *const c_char, _: c_int) -> c_int {
    // SAFETY: SQLite passes a valid path.
    let Some((disk, file)) = find(unsafe { path_of(path) }) else {
        return ffi::SQLITE_IOERR_DELETE_NOENT;
    };
    outcome(
        disk.change(Op::Length { file, length: 0 }),
        ffi::SQLITE_IOERR_DELETE,
    )
}

unsafe extern "C" fn access(
    _: *mut ffi::sqlite3_vfs,
    path: *const c_char,
    _: c_int,
    exists: *mut c_int,
) -> c_int {
    // SAFETY: SQLite passes a valid path and a place for the number.
    unsafe {
        let found = find(path_of(path));
        *exists = found
            .is_some_and(|(disk, name)| !disk.state().image.file(name).is_empty())
            .into();
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn full_pathname(
    _: *mut ffi::sqlite3_vfs,
    path: *const c_char,
    length: c_int,
    out: *mut c_char,
) -> c_int {
    // SAFETY: SQLite passes a valid path and a buffer of that length.
    unsafe {
        let path = CStr::from_ptr(path).to_bytes_with_nul();
        if path.len() > usize::try_from(length).unwrap() {
            return ffi::SQLITE_CANTOPEN;
        }
        std::ptr::copy_nonoverlapping(path.as_ptr().cast(), out, path.len());
    }
    ffi::SQLITE_OK
}

unsafe extern "C" fn last_error(_: *mut ffi::sqlite3_vfs, _: c_int, _: *mut c_char) -> c_int {
    ERRNO.get()
}
