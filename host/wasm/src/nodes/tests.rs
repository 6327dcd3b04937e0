use std::os::unix::fs::symlink;

use rustix::fs::{CWD, makedev};

use super::*;

/// A `/dev` of a test, or None where device nodes cannot be made.
pub(crate) fn dev() -> Option<(tempfile::TempDir, DevRoot, SysfsRoot)> {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path().join("dev");
    std::fs::create_dir_all(root.join("dri")).unwrap();
    std::fs::create_dir_all(directory.path().join("sys/dev/char")).unwrap();
    std::fs::create_dir_all(directory.path().join("sys/dev/block")).unwrap();
    std::fs::create_dir_all(directory.path().join("sys/devices/card0")).unwrap();
    std::fs::create_dir_all(directory.path().join("sys/devices/block/sda")).unwrap();
    std::fs::create_dir_all(directory.path().join("sys/class/net/eth0")).unwrap();
    symlink("../../devices/card0", directory.path().join("sys/dev/char/226:0")).unwrap();
    symlink("../../devices/block/sda", directory.path().join("sys/dev/block/8:0")).unwrap();
    let make = |name: &str, kind, major, minor| {
        rustix::fs::mknodat(CWD, root.join(name), kind, Mode::from(0o640), makedev(major, minor))
    };
    use FileType::{BlockDevice, CharacterDevice, Fifo};
    if make("dri/card0", CharacterDevice, 226, 0) == Err(Errno::PERM) {
        return None;
    }
    for (name, kind, major, minor) in [
        ("fuse", CharacterDevice, 10, 229),
        ("innocent", CharacterDevice, 1, 1),
        ("harmless", BlockDevice, 8, 0),
        ("ram7", BlockDevice, 250, 7),
        ("mem", CharacterDevice, 1, 1),
        ("pipe", Fifo, 0, 0),
    ] {
        make(name, kind, major, minor).unwrap();
    }
    std::fs::write(root.join("file"), "").unwrap();
    symlink("fuse", root.join("link")).unwrap();
    symlink("dri", root.join("links")).unwrap();
    let sysfs = SysfsRoot::open(&directory.path().join("sys")).unwrap();
    let root = DevRoot::open(&Hardware::in_directory(directory.path())).unwrap();
    Some((directory, root, sysfs))
}

#[test]
fn a_node_is_looked_at_and_not_opened() {
    let Some((_directory, dev, sysfs)) = dev() else { return };
    let card = dev.stat("/dev/dri/card0", &sysfs).unwrap();
    assert_eq!((card.kind, card.major, card.minor), (NodeKind::Character, 226, 0));
    assert_eq!(card.sysfs_path.as_deref(), Some("devices/card0"));
    // Opening a pipe would wait for the other end.
    assert_eq!(dev.stat("/dev/pipe", &sysfs).unwrap().kind, NodeKind::Fifo);
    assert_eq!(dev.stat("/dev/ram7", &sysfs).unwrap().kind, NodeKind::Block);
}

#[test]
fn paths_that_are_not_nodes_and_nodes_that_no_driver_may_have_are_refused() {
    let Some((_directory, dev, sysfs)) = dev() else { return };
    for (path, code) in [
        ("/dev/link", "not-a-node"),
        ("/dev/links/card0", "not-a-node"),
        ("/dev/file", "not-a-node"),
        ("/dev/dri", "not-a-node"),
        ("/dev/none", "no-such-node"),
        ("/dev/../etc/passwd", "bad-path"),
        ("/etc/passwd", "bad-path"),
        ("fuse", "bad-path"),
        ("/dev/", "bad-path"),
        ("/dev/mem", "never-allowed"),
        ("/dev/innocent", "never-allowed"),
        ("/dev/harmless", "never-allowed"),
        ("/dev/sda1", "never-allowed"),
        ("/dev/nvme0n1", "never-allowed"),
        ("/dev/watchdog0", "never-allowed"),
    ] {
        assert_eq!(dev.stat(path, &sysfs).unwrap_err().code, code, "{path}");
    }
}

#[test]
fn a_glob_finds_nodes_only() {
    let Some((_directory, dev, sysfs)) = dev() else { return };
    let paths =
        |glob: &str| -> Vec<String> { dev.glob(glob, &sysfs).unwrap().into_iter().map(|n| n.path).collect() };
    assert_eq!(paths("/dev/*"), ["/dev/fuse", "/dev/pipe", "/dev/ram7"]);
    assert_eq!(paths("/dev/dri/card*"), ["/dev/dri/card0"]);
    assert_eq!(paths("/dev/**"), ["/dev/dri/card0", "/dev/fuse", "/dev/pipe", "/dev/ram7"]);
    assert_eq!(paths("/dev/*/card0"), ["/dev/dri/card0"]);
    assert_eq!(paths("/dev/fuse"), ["/dev/fuse"]);
    assert_eq!(paths("/dev/none"), Vec::<String>::new());
    assert_eq!(dev.glob("/dev/[", &sysfs).unwrap_err().code, "bad-glob");
}
