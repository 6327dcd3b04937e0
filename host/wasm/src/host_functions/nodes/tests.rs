use std::os::unix::fs::symlink;

use rustix::fs::{CWD, makedev};

use super::*;

/// Numbers of character devices, their names in the kernel, and their subsystems.
const CHARACTERS: [(&str, &str, &str); 6] = [
    ("10:229", "fuse", "misc"),
    ("4:64", "ttyS0", "tty"),
    ("4:65", "ttyS1", "tty"),
    ("250:3", "sg3", "scsi_generic"),
    ("249:0", "watchdog9", "watchdog"),
    ("10:144", "nvram", "misc"),
];

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
    symlink(
        "../../devices/card0",
        directory.path().join("sys/dev/char/226:0"),
    )
    .unwrap();
    for (number, device, subsystem) in CHARACTERS {
        let path = directory.path().join("sys/devices").join(device);
        std::fs::create_dir_all(&path).unwrap();
        symlink(format!("../../class/{subsystem}"), path.join("subsystem")).unwrap();
        std::fs::create_dir_all(directory.path().join("sys/class").join(subsystem)).unwrap();
        symlink(
            format!("../../devices/{device}"),
            directory.path().join("sys/dev/char").join(number),
        )
        .unwrap();
    }
    std::fs::create_dir_all(directory.path().join("sys/devices/card0")).unwrap();
    std::fs::create_dir_all(directory.path().join("sys/class/drm")).unwrap();
    symlink(
        "../../class/drm",
        directory.path().join("sys/devices/card0/subsystem"),
    )
    .unwrap();
    std::fs::create_dir_all(directory.path().join("sys/class/tty/console")).unwrap();
    std::fs::write(
        directory.path().join("sys/class/tty/console/active"),
        "tty0 ttyS1\n",
    )
    .unwrap();
    std::fs::create_dir_all(directory.path().join("proc")).unwrap();
    let registered = "Character devices:\n  1 mem\n195 nvidia-frontend\n235 acme\n\nBlock devices:\n234 nvidia-uvm\n";
    std::fs::write(directory.path().join("proc/devices"), registered).unwrap();
    symlink(
        "../../devices/block/sda",
        directory.path().join("sys/dev/block/8:0"),
    )
    .unwrap();
    let make = |name: &str, kind, major, minor| {
        rustix::fs::mknodat(
            CWD,
            root.join(name),
            kind,
            Mode::from(0o640),
            makedev(major, minor),
        )
    };
    use FileType::{BlockDevice, CharacterDevice, Fifo};
    if make("dri/card0", CharacterDevice, 226, 0) == Err(Errno::PERM) {
        return None;
    }
    for (name, kind, major, minor) in [
        ("fuse", CharacterDevice, 10, 229),
        ("zero", CharacterDevice, 4, 64),
        ("one", CharacterDevice, 4, 65),
        ("two", CharacterDevice, 4, 2),
        ("three", CharacterDevice, 250, 3),
        ("four", CharacterDevice, 249, 0),
        ("five", CharacterDevice, 10, 144),
        ("six", CharacterDevice, 136, 0),
        ("gpu", CharacterDevice, 195, 0),
        ("acme", CharacterDevice, 235, 0),
        ("uvm", CharacterDevice, 234, 0),
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
fn nodes_are_inspected_without_opening() {
    let Some((_directory, dev, sysfs)) = dev() else {
        return;
    };
    let card = dev.stat("/dev/dri/card0", &sysfs).unwrap().info;
    assert_eq!(
        (card.kind, card.major, card.minor),
        (NodeKind::Character, 226, 0)
    );
    assert_eq!(card.sysfs_path.as_deref(), Some("devices/card0"));
    // Opening a pipe would wait for the other end.
    assert_eq!(
        dev.stat("/dev/pipe", &sysfs).unwrap().info.kind,
        NodeKind::Fifo
    );
    assert_eq!(
        dev.stat("/dev/ram7", &sysfs).unwrap().info.kind,
        NodeKind::Block
    );
}

#[test]
fn forbidden_and_invalid_nodes_are_refused() {
    let Some((_directory, dev, sysfs)) = dev() else {
        return;
    };
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
        // What they are decides, not what they are called: the console, a virtual console, storage commands, a watchdog, a pseudo terminal.
        ("/dev/one", "never-allowed"),
        ("/dev/two", "never-allowed"),
        ("/dev/three", "never-allowed"),
        ("/dev/four", "never-allowed"),
        ("/dev/five", "never-allowed"),
        ("/dev/six", "never-allowed"),
        ("/dev/watchdog0", "never-allowed"),
    ] {
        assert_eq!(dev.stat(path, &sysfs).unwrap_err().code, code, "{path}");
    }
}

#[test]
fn node_kind_determines_its_grant_naming() {
    let Some((_directory, dev, sysfs)) = dev() else {
        return;
    };
    for (path, naming) in [
        ("/dev/dri/card0", Naming::Glob),
        ("/dev/zero", Naming::Glob),
        ("/dev/gpu", Naming::Glob),
        ("/dev/fuse", Naming::Path),
        ("/dev/acme", Naming::Path),
        // The number is registered for block devices alone.
        ("/dev/uvm", Naming::Path),
        ("/dev/harmless", Naming::Path),
        ("/dev/ram7", Naming::Path),
        ("/dev/pipe", Naming::Path),
    ] {
        assert_eq!(dev.stat(path, &sysfs).unwrap().naming, naming, "{path}");
    }
}

#[test]
fn a_glob_finds_nodes_only() {
    let Some((_directory, dev, sysfs)) = dev() else {
        return;
    };
    let paths = |glob: &str| -> Vec<String> {
        dev.glob(glob, &sysfs)
            .unwrap()
            .into_iter()
            .map(|n| n.info.path)
            .collect()
    };
    assert_eq!(
        paths("/dev/[fpr]*"),
        ["/dev/fuse", "/dev/pipe", "/dev/ram7"]
    );
    assert_eq!(paths("/dev/dri/card*"), ["/dev/dri/card0"]);
    assert_eq!(
        paths("/dev/**"),
        [
            "/dev/acme",
            "/dev/dri/card0",
            "/dev/fuse",
            "/dev/gpu",
            "/dev/harmless",
            "/dev/pipe",
            "/dev/ram7",
            "/dev/uvm",
            "/dev/zero"
        ]
    );
    assert_eq!(paths("/dev/*/card0"), ["/dev/dri/card0"]);
    assert_eq!(paths("/dev/fuse"), ["/dev/fuse"]);
    assert_eq!(paths("/dev/none"), Vec::<String>::new());
    assert_eq!(dev.glob("/dev/[", &sysfs).unwrap_err().code, "bad-glob");
}
