//! Bounds of a snapshot.

/// Entries of a snapshot. A whole `/sys` has some 300 for each processor and each PCI function, so that of a large server fits.
pub const ENTRIES_MAX: usize = 500_000;

/// Bytes of one file. Files of `/sys` and `/proc` are far smaller; the largest that a snapshot has use for are tables of the firmware.
pub const FILE_BYTES_MAX: u64 = 16 << 20;

/// Bytes of all files, because a snapshot is held in memory.
pub const TOTAL_BYTES_MAX: u64 = 256 << 20;

/// Bytes of an archive after decompression: the files, and for each entry two blocks of tar. It stops a small file that expands without
/// end.
pub const ARCHIVE_BYTES_MAX: u64 = TOTAL_BYTES_MAX + ENTRIES_MAX as u64 * 1024;

/// Segments of a path. Devices of `/sys` are nested about 25 levels deep.
pub const DEPTH_MAX: usize = 64;

/// Bytes of a path, and of a link's target, as `PATH_MAX` of Linux.
pub const PATH_BYTES_MAX: usize = 4096;

/// Bytes of all paths and of all targets of links, since they are held in memory too, and each segment is looked up: 128 for each entry. It
/// bounds the depth of all paths together.
pub const PATHS_BYTES_MAX: u64 = 64 << 20;

/// Bytes of an extended header of tar: a path, a target, or records of pax with some attributes.
pub const EXTENDED_HEADER_BYTES_MAX: u64 = 64 << 10;

/// Bytes after the end marker of an archive. Tar pads to records of 10 KiB, and some programs use larger ones.
pub const TRAILING_BYTES_MAX: u64 = 1 << 20;

/// Links that lead to one another, as many as Linux follows.
pub const LINKS_MAX: usize = 40;
