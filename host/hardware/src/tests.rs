use std::fs;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use bzip2::write::BzEncoder;
use flate2::write::GzEncoder;
use tar::{Builder, EntryType, Header};

use crate::limit::{EXTENDED_HEADER_BYTES_MAX, FILE_BYTES_MAX};
use crate::{Entry, NodeKind, Refusal, Snapshot, SnapshotError};

/// An entry with a path that the tar crate itself would refuse to write.
fn raw(builder: &mut Builder<Vec<u8>>, path: &str, kind: EntryType, target: &str, content: &[u8]) {
    let mut header = Header::new_gnu();
    header.as_mut_bytes()[..path.len()].copy_from_slice(path.as_bytes());
    header.as_mut_bytes()[157..157 + target.len()].copy_from_slice(target.as_bytes());
    header.set_entry_type(kind);
    header.set_size(content.len() as u64);
    header.set_mode(0o644);
    if kind == EntryType::GNUSparse {
        header.as_gnu_mut().unwrap().set_real_size(0);
    }
    header.set_cksum();
    builder.append(&header, content).unwrap();
}

struct Tar(Builder<Vec<u8>>);

impl Tar {
    /// An archive with one file below `sys`.
    fn new() -> Self {
        Tar(Builder::new(Vec::new())).file("m/sys/class/a", "first\n")
    }

    fn entry(mut self, path: &str, kind: EntryType, target: &str, content: &str) -> Self {
        raw(&mut self.0, path, kind, target, content.as_bytes());
        self
    }

    fn file(self, path: &str, content: &str) -> Self {
        self.entry(path, EntryType::Regular, "", content)
    }

    fn link(self, path: &str, target: &str) -> Self {
        self.entry(path, EntryType::Symlink, target, "")
    }

    fn node(mut self, path: &str, kind: EntryType, major: u32, minor: u32) -> Self {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_size(0);
        header.set_device_major(major).unwrap();
        header.set_device_minor(minor).unwrap();
        self.0.append_data(&mut header, path, &[][..]).unwrap();
        self
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }

    fn load(self) -> Result<Snapshot, SnapshotError> {
        Snapshot::from_archive("m.tar", self.bytes().as_slice())
    }

    /// Returns the entry that is refused, and the reason.
    fn refusal(self) -> (String, Refusal) {
        match self.load() {
            Err(SnapshotError::Refused {
                file,
                entry,
                refusal,
            }) => {
                assert_eq!(file, "m.tar");
                (entry, refusal)
            }
            other => panic!("{other:?}"),
        }
    }
}

fn machine() -> Tar {
    Tar::new()
        .entry("m/sys/devices/x/", EntryType::Directory, "", "")
        .file("m/sys/devices/x/vendor", "0x1002\n")
        .link("m/sys/class/card0", "../devices/x")
        .link("m/sys/class/card1", "/sys/devices/x")
        .entry(
            "m/sys/devices/x/same",
            EntryType::Link,
            "m/sys/devices/x/vendor",
            "",
        )
        .file("m/proc/devices", "Character devices:\n226 drm\n")
        .node("m/dev/dri/card0", EntryType::Char, 226, 0)
        .node("m/dev/loop0", EntryType::Block, 7, 0)
}

fn file(content: &str) -> Option<Entry> {
    Some(Entry::File(content.as_bytes().to_vec()))
}

#[test]
fn archive_reads_every_entry_kind() {
    let snapshot = machine().load().unwrap();
    assert_eq!(
        snapshot.get("/sys/devices/x/vendor").cloned(),
        file("0x1002\n")
    );
    assert_eq!(
        snapshot.get("/sys/devices/x/same").cloned(),
        file("0x1002\n")
    );
    assert_eq!(
        snapshot.get("/sys/class/card0"),
        Some(&Entry::Link("../devices/x".into()))
    );
    assert_eq!(snapshot.get("/sys/class"), Some(&Entry::Directory));
    let node = |kind, major, minor| Some(Entry::Node { kind, major, minor });
    assert_eq!(
        snapshot.get("/dev/dri/card0").cloned(),
        node(NodeKind::Character, 226, 0)
    );
    assert_eq!(
        snapshot.get("/dev/loop0").cloned(),
        node(NodeKind::Block, 7, 0)
    );
    assert_eq!(snapshot.get("/m"), None);
}

#[test]
fn compression_is_recognized_by_magic_bytes() {
    let plain = machine().bytes();
    let mut gzip = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gzip.write_all(&plain).unwrap();
    let mut bzip2 = BzEncoder::new(Vec::new(), bzip2::Compression::fast());
    bzip2.write_all(&plain).unwrap();
    let expected = machine().load().unwrap();
    for archive in [gzip.finish().unwrap(), bzip2.finish().unwrap()] {
        assert_eq!(
            Snapshot::from_archive("m", archive.as_slice()).unwrap(),
            expected
        );
        for cut in [archive.len() / 2, archive.len() - 1] {
            let error = Snapshot::from_archive("m", &archive[..cut]).unwrap_err();
            assert!(
                matches!(error, SnapshotError::Truncated { .. }),
                "{error:?}"
            );
        }
    }
}

#[test]
fn top_directory_is_optional() {
    for top in ["", "./"] {
        let archive = Tar(Builder::new(Vec::new()))
            .entry("./", EntryType::Directory, "", "")
            .file(&format!("{top}proc/cpuinfo"), "")
            .file(&format!("{top}sys/a"), "1");
        assert_eq!(
            archive.load().unwrap().get("/sys/a").cloned(),
            file("1"),
            "{top:?}"
        );
    }
}

#[test]
fn truncated_archive_is_refused() {
    let archive = Tar::new().file("m/sys/b", &"x".repeat(600)).bytes();
    // Two zero blocks are the end marker, and the first is enough.
    let end = archive.len() - 1024;
    for cut in (1..end).step_by(100).chain((512..=end).step_by(512)) {
        let error = Snapshot::from_archive("m.tar", &archive[..cut]).unwrap_err();
        assert!(
            matches!(error, SnapshotError::Truncated { .. }),
            "{cut}: {error:?}"
        );
    }
    let error = Snapshot::from_archive("m.tar", &archive[..2000]).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("m.tar is truncated after entry \"m/sys/b\""),
        "{error}"
    );
}

#[test]
fn damaged_archives_never_cause_panic() {
    let archive = machine().bytes();
    for position in 0..archive.len() - 1024 {
        for flip in [0x01, 0x80] {
            let mut damaged = archive.clone();
            damaged[position] ^= flip;
            drop(Snapshot::from_archive("m.tar", damaged.as_slice()));
        }
    }
}

#[test]
fn wrong_header_checksum_is_refused() {
    let mut archive = machine().bytes();
    archive[0] ^= 1;
    let error = Snapshot::from_archive("m.tar", archive.as_slice()).unwrap_err();
    assert!(matches!(error, SnapshotError::Read { .. }), "{error:?}");
}

#[test]
fn what_is_no_archive_is_refused() {
    let error = Snapshot::from_archive("m.tar", &[7; 2048][..]).unwrap_err();
    assert!(matches!(error, SnapshotError::Read { .. }), "{error:?}");
    let error = Tar(Builder::new(Vec::new()))
        .file("m/proc/cpuinfo", "")
        .load()
        .unwrap_err();
    assert!(matches!(error, SnapshotError::NoSysfs { .. }), "{error:?}");
}

#[test]
fn escaping_paths_are_refused() {
    for path in ["/etc/passwd", "m/../etc/passwd", "../x", "m/sys/../../x"] {
        assert_eq!(
            Tar::new().file(path, "").refusal(),
            (path.to_owned(), Refusal::BadPath)
        );
    }
    let deep = format!("m/{}x", "d/".repeat(40));
    assert_eq!(Tar::new().file(&deep, "").load().unwrap().len(), 4 + 40);
    let deeper = format!("m{}", "/d".repeat(49));
    assert!(Tar::new().file(&deeper, "").load().is_ok());
    let second = Tar::new().file("other/sys/a", "");
    assert_eq!(second.refusal().1, Refusal::SecondTop { top: "m".into() });
}

#[test]
fn escaping_links_are_refused_with_target() {
    for target in ["../../../etc", "/../etc", "x/../../../../etc"] {
        let refusal = Refusal::LinkLeaves {
            target: target.into(),
        };
        assert_eq!(
            Tar::new().link("m/sys/class/l", target).refusal(),
            ("m/sys/class/l".into(), refusal)
        );
    }
}

#[test]
fn duplicate_paths_are_refused() {
    assert_eq!(
        Tar::new().file("m/sys/class/a", "").refusal().1,
        Refusal::Duplicate
    );
    assert_eq!(
        Tar::new().link("m/sys/class", "devices").refusal().1,
        Refusal::Duplicate
    );
    let directory = Tar::new().entry("m/sys/class/", EntryType::Directory, "", "");
    assert!(
        directory.load().is_ok(),
        "a directory may come after its content"
    );
    let through_file = Tar::new().file("m/sys/class/a/b", "");
    assert_eq!(
        through_file.refusal().1,
        Refusal::NotADirectory {
            ancestor: "/sys/class/a".into()
        }
    );
    let through_link = Tar::new().link("m/sys/l", "class").file("m/sys/l/b", "");
    assert_eq!(
        through_link.refusal().1,
        Refusal::NotADirectory {
            ancestor: "/sys/l".into()
        }
    );
}

#[test]
fn hard_links_are_to_earlier_files() {
    for target in ["m/sys/none", "m/sys/class", "m"] {
        let archive = Tar::new().entry("m/sys/h", EntryType::Link, target, "");
        assert_eq!(
            archive.refusal().1,
            Refusal::BadHardLink {
                target: target.into()
            }
        );
    }
    let archive = Tar::new().entry("m/sys/h", EntryType::Link, "../etc/shadow", "");
    assert_eq!(archive.refusal().1, Refusal::BadPath);
}

#[test]
fn other_types_of_files_are_refused() {
    for kind in [EntryType::Fifo, EntryType::GNUSparse, EntryType::new(b'Z')] {
        let (_, refusal) = Tar::new().entry("m/sys/f", kind, "", "").refusal();
        assert!(matches!(refusal, Refusal::FileType { .. }), "{refusal}");
    }
    let node = Tar::new().node("m/sys/null", EntryType::Char, 1, 3);
    assert_eq!(
        node.refusal().1,
        Refusal::FileType {
            kind: "a device node elsewhere"
        }
    );
}

#[test]
fn oversized_file_is_refused_before_reading() {
    let mut header = Header::new_gnu();
    header.set_path("m/sys/large").unwrap();
    header.set_size(FILE_BYTES_MAX + 1);
    header.set_cksum();
    let error = Snapshot::from_archive("m.tar", header.as_bytes().as_slice()).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("snapshot m.tar, entry \"m/sys/large\": the file has 16777217 bytes")
    );
}

#[test]
fn header_without_content_is_truncated() {
    let mut header = Header::new_gnu();
    header.set_path("m/sys/large").unwrap();
    header.set_size(FILE_BYTES_MAX);
    header.set_cksum();
    let error = Snapshot::from_archive("m.tar", header.as_bytes().as_slice()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("truncated after entry \"m/sys/large\""),
        "{error}"
    );
}

/// Reads a header, and then a content without end.
fn endless(path: &str, kind: EntryType, bytes: u64) -> impl Read {
    let mut header = Header::new_gnu();
    header.set_path(path).unwrap();
    header.set_entry_type(kind);
    header.set_size(bytes);
    header.set_cksum();
    io::Cursor::new(header.as_bytes().to_vec()).chain(io::repeat(0))
}

#[test]
fn endless_archive_is_refused_with_entry() {
    let refused = |archive: &mut dyn Read| {
        Snapshot::from_archive("m.tar", archive)
            .unwrap_err()
            .to_string()
    };
    let error = refused(&mut endless("m/sys/a", EntryType::Regular, 1 << 30));
    assert!(
        error.contains("entry \"m/sys/a\": the file has 1073741824 bytes, more than"),
        "{error}"
    );
    let error = refused(&mut endless("m/sys/a/", EntryType::Directory, 1 << 40));
    assert!(
        error.contains("entry \"m/sys/a/\": the archive has more than"),
        "{error}"
    );
    // The end marker, and zeros after it.
    let error = refused(&mut endless("m/sys/a", EntryType::Regular, 0));
    assert!(error.contains("after its end marker"), "{error}");
}

#[test]
fn decompression_bomb_is_refused() {
    let mut gzip = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    io::copy(
        &mut endless("m/sys/a", EntryType::Regular, 1 << 30).take(4 << 20),
        &mut gzip,
    )
    .unwrap();
    let error = Snapshot::from_archive("m.tar.gz", gzip.finish().unwrap().as_slice()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("entry \"m/sys/a\": the file has 1073741824 bytes"),
        "{error}"
    );
}

#[test]
fn extended_header_names_are_bounded() {
    let (long, target) = (format!("m/sys/{}", "n".repeat(200)), "t".repeat(200));
    let pax = |records: &[(&str, &str)]| {
        let mut builder = Builder::new(Vec::new());
        builder
            .append_pax_extensions(records.iter().map(|(key, value)| (*key, value.as_bytes())))
            .unwrap();
        Tar(builder)
    };
    let gnu = Tar(Builder::new(Vec::new()))
        .entry(
            "././@LongLink",
            EntryType::GNULongName,
            "",
            &format!("{long}\0"),
        )
        .entry(
            "././@LongLink",
            EntryType::GNULongLink,
            "",
            &format!("{target}\0"),
        )
        .link("m/sys/short", "short");
    for archive in [
        gnu,
        pax(&[("mtime", "1"), ("path", &long), ("linkpath", &target)]).link("m/sys/short", "short"),
    ] {
        let snapshot = archive.load().unwrap();
        assert_eq!(snapshot.get(&long[1..]), Some(&Entry::Link(target.clone())));
        assert_eq!(snapshot.len(), 2);
    }
    let large = "n".repeat(EXTENDED_HEADER_BYTES_MAX as usize + 1);
    for kind in [
        EntryType::GNULongName,
        EntryType::GNULongLink,
        EntryType::XHeader,
        EntryType::XGlobalHeader,
    ] {
        let archive = Tar::new().entry("././@LongLink", kind, "", &large);
        assert_eq!(
            archive.refusal(),
            ("m/sys/class/a".to_owned(), Refusal::LargeHeader),
            "{kind:?}"
        );
    }
    let path = Tar::new()
        .entry("././@LongLink", EntryType::GNULongName, "", &large[..5000])
        .file("m/sys/b", "");
    let (entry, refusal) = path.refusal();
    assert_eq!((entry.len(), refusal), (4096, Refusal::LongPath));
    let unfinished = Tar::new()
        .entry("././@LongLink", EntryType::GNULongName, "", "m/sys/b")
        .load()
        .unwrap_err();
    assert!(
        matches!(unfinished, SnapshotError::Truncated { .. }),
        "{unfinished:?}"
    );
    let sparse = pax(&[("GNU.sparse.major", "1")])
        .file("sys/a", "")
        .load()
        .unwrap_err();
    assert!(
        sparse.to_string().contains("this is a sparse file"),
        "{sparse}"
    );
}

#[test]
fn a_file_has_one_size() {
    let sized = |size: &str| {
        let mut builder = Builder::new(Vec::new());
        builder
            .append_pax_extensions([("size", size.as_bytes())])
            .unwrap();
        Tar(builder).file("m/sys/a", "12345")
    };
    assert_eq!(
        sized("5").load().unwrap().get("/sys/a").cloned(),
        file("12345")
    );
    for size in ["0", "6", "99999999999999999999", "x"] {
        assert_eq!(
            sized(size).refusal(),
            ("m/sys/a".to_owned(), Refusal::SizeMismatch),
            "{size}"
        );
    }
}

#[test]
fn looping_and_chained_links_are_refused() {
    let circle = Tar::new()
        .link("m/sys/b", "class/c")
        .link("m/sys/class/c", "../b");
    assert_eq!(circle.refusal(), ("sys/b".to_owned(), Refusal::LinkLoop));
    let out = Tar::new()
        .link("m/sys/b", "/")
        .link("m/sys/class/c", "../b/..");
    assert_eq!(
        out.refusal(),
        (
            "sys/class/c".to_owned(),
            Refusal::LinkLeaves {
                target: "../b/..".into()
            }
        )
    );
}

#[test]
fn archive_round_trips() {
    let deep = format!("m/sys/{}", "directory/".repeat(20));
    let machine = machine().link("m/sys/dot", "./class/").load().unwrap();
    let mut entries = machine.entries;
    entries.insert(
        deep[1..deep.len() - 1].to_owned(),
        Entry::Link("target/".repeat(30)),
    );
    for depth in 1..20 {
        entries.insert(
            format!("/sys{}", "/directory".repeat(depth)),
            Entry::Directory,
        );
    }
    let snapshot = Snapshot { entries };
    let mut archive = Vec::new();
    snapshot.write_archive(&mut archive).unwrap();
    let read = Snapshot::from_archive("m.tar", archive.as_slice()).unwrap();
    assert!(read == snapshot, "{:?}", read.entries);
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    assert_eq!(
        snapshot.write_archive(Full).unwrap_err().kind(),
        io::ErrorKind::StorageFull
    );
}

#[test]
fn special_and_huge_files_stay_unread() {
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir(directory.path().join("sys")).unwrap();
    let (fifo, huge) = (
        directory.path().join("sys/fifo"),
        directory.path().join("sys/huge"),
    );
    let mode = rustix::fs::Mode::RUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).unwrap();
    let error = Snapshot::open(directory.path()).unwrap_err().to_string();
    assert!(
        error.contains("entry \"sys/fifo\": ") && error.contains("this is a fifo"),
        "{error}"
    );
    fs::remove_file(fifo).unwrap();
    fs::File::create(huge).unwrap().set_len(1 << 30).unwrap();
    let error = Snapshot::open(directory.path()).unwrap_err().to_string();
    assert!(
        error.contains("entry \"sys/huge\": the file has 1073741824 bytes"),
        "{error}"
    );
}

#[test]
fn directory_round_trips() {
    let directory = tempfile::tempdir().unwrap();
    let snapshot = machine().load().unwrap();
    let root = directory.path().join("around/m");
    snapshot.write_to(&root).unwrap();
    let vendor = fs::read(root.join("sys/class/card1/vendor")).unwrap();
    assert_eq!(
        vendor, b"0x1002\n",
        "an absolute link leads into the directory"
    );
    for path in [&root, &directory.path().join("around")] {
        let read = Snapshot::open(path).unwrap();
        assert_eq!(read.get("/sys/devices/x/vendor").cloned(), file("0x1002\n"));
        assert_eq!(
            read.get("/sys/class/card1"),
            Some(&Entry::Link("../../sys/devices/x".into()))
        );
        assert_eq!(read.get("/dev/dri/card0"), None, "nodes are not written");
        assert_eq!(read.len(), snapshot.len() - 2);
    }
    let again = snapshot.write_to(&root).unwrap_err();
    assert!(
        matches!(again, SnapshotError::Write { .. }),
        "existing files are not replaced: {again:?}"
    );
}

#[test]
fn directory_is_checked_like_an_archive() {
    let directory = tempfile::tempdir().unwrap();
    let none = Snapshot::open(directory.path()).unwrap_err();
    assert!(matches!(none, SnapshotError::NoSysfs { .. }), "{none:?}");
    fs::create_dir(directory.path().join("sys")).unwrap();
    std::os::unix::fs::symlink("../../etc", directory.path().join("sys/out")).unwrap();
    let error = Snapshot::open(directory.path()).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("entry \"sys/out\": the link's target \"../../etc\" leaves"),
        "{error}"
    );
    let missing = Snapshot::open(&directory.path().join("none.tar")).unwrap_err();
    assert!(matches!(missing, SnapshotError::Open { .. }), "{missing:?}");
}

fn recorded_machines() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/hardware")
}

#[test]
fn every_recorded_machine_is_read() {
    let Ok(archives) = fs::read_dir(recorded_machines()) else {
        println!(
            "skipped: {} with recorded machines does not exist",
            recorded_machines().display()
        );
        return;
    };
    for archive in archives {
        let path = archive.unwrap().path();
        if !path.to_string_lossy().contains(".tar") {
            continue;
        }
        let snapshot = Snapshot::open(&path).unwrap_or_else(|error| panic!("{error}"));
        assert!(snapshot.len() > 500, "{}", path.display());
        assert!(
            matches!(snapshot.get("/proc/cpuinfo"), Some(Entry::File(_))),
            "{}",
            path.display()
        );
        // Writing the others as well would take seconds and show nothing else.
        if path.ends_with("ghw-linux-amd64-accel.tar.gz") {
            let directory = tempfile::tempdir().unwrap();
            snapshot.write_to(directory.path()).unwrap();
            assert_eq!(
                Snapshot::open(directory.path()).unwrap().len(),
                snapshot.len()
            );
        }
    }
}

/// The files of PCI functions and USB devices that the example drivers read: without them a snapshot would be useless to the drivers.
#[test]
fn redacted_machine_keeps_driver_inputs() {
    const READ: [&str; 15] = [
        "bDeviceClass",
        "busnum",
        "class",
        "current_link_speed",
        "current_link_width",
        "device",
        "idProduct",
        "idVendor",
        "local_cpulist",
        "modalias",
        "numa_node",
        "speed",
        "subsystem_device",
        "subsystem_vendor",
        "vendor",
    ];
    if !recorded_machines().is_dir() {
        return println!("skipped: {} is not there", recorded_machines().display());
    }
    let mut compared = 0;
    for archive in fs::read_dir(recorded_machines()).unwrap() {
        let archive = archive.unwrap().path();
        if archive
            .extension()
            .is_none_or(|extension| extension == "md")
        {
            continue;
        }
        let snapshot = Snapshot::open(&archive).unwrap();
        let (redacted, _) = snapshot.clone().redacted(&[]);
        for (path, entry) in snapshot.entries() {
            let (directory, name) = path.rsplit_once('/').unwrap();
            // A SCSI device has a vendor too, which is a name.
            let is_number = snapshot.get(&format!("{directory}/scsi_level")).is_none();
            if matches!(entry, Entry::File(_))
                && is_number
                && path.starts_with("/sys/devices/pci")
                && READ.contains(&name)
            {
                assert_eq!(
                    redacted.get(path),
                    Some(entry),
                    "{path} of {}",
                    archive.display()
                );
                compared += 1;
            }
        }
    }
    assert!(compared > 1000, "{compared}");
}
