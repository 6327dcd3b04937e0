use std::os::unix::fs::symlink;

use super::*;
use nodedock_model::ProblemKind;

/// A tree like sysfs, with what is not in sysfs beside it.
fn tree() -> (tempfile::TempDir, SysfsRoot) {
    let directory = tempfile::tempdir().unwrap();
    let sys = directory.path().join("sys");
    let card = sys.join("devices/pci0/card");
    std::fs::create_dir_all(card.join("power")).unwrap();
    std::fs::create_dir_all(sys.join("class/net")).unwrap();
    std::fs::create_dir_all(sys.join("firmware/efi/efivars")).unwrap();
    std::fs::write(card.join("vendor"), "0x1af4\n").unwrap();
    std::fs::write(card.join("binary"), [0xff, 0xfe]).unwrap();
    std::fs::write(card.join("config"), "secret").unwrap();
    std::fs::write(card.join("resource0"), "bar").unwrap();
    std::fs::write(card.join("numvfs"), "0\n").unwrap();
    std::fs::write(card.join("power/control"), "auto\n").unwrap();
    std::fs::write(card.join("large"), vec![b'x'; READ_BYTES_MAX + 1]).unwrap();
    std::fs::write(sys.join("firmware/efi/efivars/key"), "secret").unwrap();
    std::fs::write(directory.path().join("outside"), "secret").unwrap();
    symlink("../../devices/pci0/card", sys.join("class/net/eth0")).unwrap();
    symlink("../outside", sys.join("escape")).unwrap();
    symlink(directory.path().join("outside"), sys.join("absolute")).unwrap();
    symlink("/proc/self/root", sys.join("magic")).unwrap();
    symlink("config", card.join("harmless")).unwrap();
    symlink("loop", sys.join("loop")).unwrap();
    rustix::fs::mknodat(CWD, sys.join("fifo"), FileType::Fifo, Mode::from(0o600), 0).unwrap();
    let root = SysfsRoot::open(&sys).unwrap();
    (directory, root)
}

fn code(result: Result<impl std::fmt::Debug, Problem>) -> String {
    result.unwrap_err().code
}

#[test]
fn internal_links_are_followed() {
    let (_directory, sys) = tree();
    assert_eq!(sys.read("devices/pci0/card/vendor").unwrap(), b"0x1af4\n");
    assert_eq!(sys.read("class/net/eth0/vendor").unwrap(), b"0x1af4\n");
    assert_eq!(
        sys.read_link("class/net/eth0").unwrap(),
        "devices/pci0/card"
    );
    assert_eq!(sys.read_dir("class/net").unwrap(), ["eth0"]);
    assert!(sys.exists("class/net/eth0").unwrap() && !sys.exists("class/net/eth1").unwrap());
}

#[test]
fn nothing_outside_is_reached() {
    let (_directory, sys) = tree();
    for path in [
        "",
        "/class/net",
        "class/../vendor",
        "..",
        "./class",
        "class//net",
        "a\0b",
        "a\nb",
        &"x/".repeat(3000),
    ] {
        assert_eq!(code(sys.read(path)), "bad-path", "{path:?}");
    }
    for path in ["escape", "absolute", "magic/etc/passwd", "loop"] {
        let problem = sys.read(path).unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::Denied, "outside-sysfs"),
            "{path}"
        );
    }
    assert_eq!(code(sys.read_link("escape")), "outside-sysfs");
}

#[test]
fn only_bounded_regular_files_are_read() {
    let (_directory, sys) = tree();
    assert_eq!(code(sys.read("fifo")), "not-a-file");
    assert_eq!(code(sys.read("class/net")), "not-a-file");
    assert_eq!(code(sys.read("class/net/eth0/large")), "file-too-large");
    assert_eq!(code(sys.read("class/net/eth9/vendor")), "no-such-path");
    assert_eq!(
        code(sys.read("class/net/eth0/vendor/deeper")),
        "no-such-path"
    );
    assert_eq!(
        code(sys.read_dir("class/net/eth0/vendor")),
        "not-a-directory"
    );
    assert_eq!(code(sys.read_link("class/net")), "not-a-link");
}

#[test]
fn denied_files_are_unreachable_by_alias() {
    let (_directory, sys) = tree();
    let card = "class/net/eth0";
    for path in [
        format!("{card}/config"),
        format!("{card}/resource0"),
        format!("{card}/harmless"),
        "firmware/efi/efivars/key".into(),
    ] {
        assert_eq!(code(sys.read(&path)), "never-allowed", "{path}");
    }
    assert_eq!(code(sys.read_dir("firmware/efi/efivars")), "never-allowed");
    assert_eq!(code(sys.read_dir("firmware/efi")), "never-allowed");
}

#[test]
fn globs_see_links_and_keep_them() {
    let (_directory, sys) = tree();
    assert_eq!(
        sys.glob("class/net/*/vendor").unwrap(),
        ["class/net/eth0/vendor"]
    );
    assert_eq!(sys.glob("class/net/*").unwrap(), ["class/net/eth0"]);
    assert_eq!(
        sys.glob("class/net/eth0/{vendor,numvfs,none}").unwrap(),
        ["class/net/eth0/numvfs", "class/net/eth0/vendor"]
    );
    assert_eq!(
        sys.glob("**/vendor").unwrap(),
        ["devices/pci0/card/vendor"],
        "links are not followed by **"
    );
    assert_eq!(
        sys.glob("devices/pci0/card/power/**").unwrap(),
        ["devices/pci0/card/power/control"]
    );
    assert_eq!(sys.glob("class/net/eth0").unwrap(), ["class/net/eth0"]);
    assert_eq!(sys.glob("class/block/*").unwrap(), Vec::<String>::new());
}

#[test]
fn attributes_are_checked_before_writing() {
    let (directory, sys) = tree();
    let numvfs = sys.attribute("class/net/eth0/numvfs").unwrap();
    assert_eq!(
        (numvfs.path.as_str(), numvfs.value.as_deref()),
        ("devices/pci0/card/numvfs", Some("0"))
    );
    assert_eq!(
        sys.attribute("class/net/eth0/binary").unwrap().value,
        None,
        "it is no text"
    );
    for path in ["class/net/eth0/power/control", "class/net/eth0/config"] {
        assert_eq!(code(sys.attribute(path)), "never-allowed", "{path}");
    }
    assert_eq!(code(sys.attribute("escape")), "outside-sysfs");
    assert_eq!(code(sys.attribute("fifo")), "not-a-file");
    assert_eq!(code(sys.attribute("class/net/eth0/none")), "no-such-path");

    let written = sys.store(&numvfs, "4").unwrap();
    assert_eq!(
        (written.outcome, written.value),
        (Ok(()), Ok(Some("4".to_owned())))
    );
    let file = directory.path().join("sys/devices/pci0/card/numvfs");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "4\n");
    // What was looked at and what is written are the same, or nothing is.
    std::fs::rename(directory.path().join("sys/devices/pci0/card/vendor"), &file).unwrap();
    assert_eq!(code(sys.store(&numvfs, "5")), "path-replaced");
    std::fs::remove_file(&file).unwrap();
    symlink("binary", &file).unwrap();
    assert_eq!(code(sys.store(&numvfs, "5")), "outside-sysfs");
    assert_eq!(
        std::fs::read_to_string(directory.path().join("outside")).unwrap(),
        "secret"
    );
}

#[test]
fn unreadable_value_is_not_written() {
    // The beginning of a process's memory: EIO (proc(5)).
    let sys = SysfsRoot::open(Path::new("/proc/self")).unwrap();
    assert_eq!(code(sys.read("mem")), "io-error");
    assert_eq!(code(sys.find_text("mem")), "io-error");
    assert_eq!(code(sys.fact("mem")), "io-error");
    assert_eq!(
        code(sys.value("mem")),
        "io-error",
        "its previous value could not be restored"
    );
    assert_eq!(sys.find_text("none"), Ok(None));
}

#[test]
fn absent_value_differs_from_read_error() {
    for raw in [22, 95, 524, 19, 6, 61] {
        let problem = no_value("class/net/eth0/speed", Errno::from_raw_os_error(raw));
        assert!(
            has_no_value(Errno::from_raw_os_error(raw)) && is_absent(&problem),
            "{raw}"
        );
    }
    for failed in [
        Errno::AGAIN,
        Errno::INTR,
        Errno::IO,
        Errno::MFILE,
        Errno::NFILE,
        Errno::NOMEM,
    ] {
        assert!(
            !has_no_value(failed) && !is_absent(&io_problem("a", &failed.into())),
            "{failed}"
        );
    }
}
