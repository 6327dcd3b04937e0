use super::*;
use crate::{DriverInfo, Level, ProblemKind};

fn fake() -> FakeHost {
    let fake = FakeHost::new();
    fake.file("class/leds/a/brightness", "0\n")
        .file("class/leds/b/brightness", [0xff, 0xfe]);
    fake.character_node("/dev/fuse", 10, 229)
        .block_node("/dev/loop0", 7, 0);
    fake
}

fn grant(info: DriverInfo) -> FakeHost {
    let fake = fake();
    fake.grant(&info.capabilities);
    fake
}

fn info() -> DriverInfo {
    DriverInfo::new("leds", "0.1.0")
}

#[test]
fn only_text_reads_lose_newline() {
    let host = fake().host();
    assert_eq!(host.sysfs().read("class/leds/a/brightness").unwrap(), "0");
    assert_eq!(
        host.sysfs().read_bytes("class/leds/a/brightness").unwrap(),
        b"0\n"
    );
    assert_eq!(
        host.sysfs()
            .read("class/leds/b/brightness")
            .unwrap_err()
            .code,
        "not-text"
    );
}

#[test]
fn nothing_is_found_outside_of_sys() {
    for path in [
        "/class/leds",
        "class/../leds",
        "",
        "class//leds",
        "./class",
        "class/leds/",
        "a\0",
    ] {
        assert_eq!(
            fake().host().sysfs().read(path).unwrap_err().code,
            "bad-path",
            "{path}"
        );
    }
    for path in ["fuse", "/etc/passwd", "/dev/../etc/passwd", "/dev/"] {
        assert_eq!(
            fake().host().device_nodes().stat(path).unwrap_err().code,
            "bad-path",
            "{path}"
        );
    }
}

#[test]
fn ungranted_missing_paths_are_denied() {
    let host = grant(
        info()
            .sysfs_read(["class/leds/*/brightness"])
            .device_nodes(["/dev/fuse"]),
    )
    .host();
    assert!(host.sysfs().read("class/leds/a/brightness").is_ok());
    assert_eq!(
        host.sysfs().glob("class/leds/*/brightness").unwrap().len(),
        2
    );
    assert_eq!(
        host.sysfs().read("class/leds/a/other").unwrap_err().kind,
        ProblemKind::Denied
    );
    assert_eq!(
        host.sysfs().read_dir("class/leds").unwrap_err().kind,
        ProblemKind::Denied
    );
    assert_eq!(
        host.sysfs().find("class/net").unwrap_err().kind,
        ProblemKind::Denied
    );
    assert!(host.device_nodes().stat("/dev/fuse").is_ok());
    assert_eq!(
        host.device_nodes().stat("/dev/loop0").unwrap_err().kind,
        ProblemKind::Denied
    );
    assert_eq!(
        host.device_nodes().glob("/dev/*").unwrap_err().kind,
        ProblemKind::Denied
    );
}

#[test]
fn find_returns_none_for_missing_paths() {
    let fake = fake();
    let host = fake.host();
    assert_eq!(host.sysfs().find("class/leds/c/brightness"), Ok(None));
    assert_eq!(host.sysfs().find_link("class/leds/c"), Ok(None));
    fake.link("class/leds/out", "../../../etc");
    for no_link in ["class/leds/a", "class/leds/out"] {
        assert_eq!(host.sysfs().find_link(no_link), Ok(None), "{no_link}");
    }
    assert_eq!(
        host.sysfs().find_parsed::<u32>("class/leds/a/brightness"),
        Ok(Some(0))
    );
    fake.file("class/leds/a/brightness", "bright");
    assert_eq!(
        host.sysfs().find_parsed::<u32>("class/leds/a/brightness"),
        Ok(None)
    );
}

#[test]
fn writes_are_recorded_with_previous_value() {
    let fake = grant(
        info()
            .sysfs_read(["class/leds/*/brightness"])
            .sysfs_write("class/leds/*/brightness", "[0-9]+"),
    );
    let sysfs_host = fake.host();
    sysfs_host
        .sysfs()
        .write("class/leds/a/brightness", "255")
        .unwrap();
    assert_eq!(
        sysfs_host.sysfs().read("class/leds/a/brightness").unwrap(),
        "255"
    );
    let write = SysfsWrite {
        path: "class/leds/a/brightness".into(),
        before: "0".into(),
        value: "255".into(),
    };
    assert_eq!(fake.writes(), [write]);
}

#[test]
fn invalid_writes_are_refused() {
    let fake = grant(info().sysfs_write("class/leds/*/brightness", "[0-9]+"));
    let host = fake.host();
    let write = |path, value| host.sysfs().write(path, value).unwrap_err();
    assert_eq!(
        write("class/leds/a/brightness", "255; rm").code,
        "not-granted"
    );
    assert_eq!(write("class/leds/a/trigger", "1").code, "not-granted");
    assert_eq!(
        write("class/leds/c/brightness", "1").kind,
        ProblemKind::NotFound
    );
    fake.allow_writes(false);
    assert_eq!(write("class/leds/a/brightness", "1").code, "not-now");
    assert_eq!(fake.writes(), []);
}

#[test]
fn node_is_linked_by_its_number() {
    let fake = FakeHost::new();
    fake.file("devices/virtual/misc/fuse/uevent", "DEVNAME=fuse\n")
        .node(NodeInfo {
            path: "/dev/fuse".into(),
            kind: NodeKind::Character,
            major: 10,
            minor: 229,
            mode: 0o666,
            uid: 0,
            gid: 0,
            sysfs_path: Some("devices/virtual/misc/fuse".into()),
        });
    assert_eq!(
        fake.host().sysfs().read("dev/char/10:229/uevent").unwrap(),
        "DEVNAME=fuse"
    );
}

fn snapshot(entries: &[(&str, &str)]) -> Snapshot {
    let mut archive = tar::Builder::new(Vec::new());
    for (path, content) in entries {
        let mut header = tar::Header::new_gnu();
        if let Some(target) = content.strip_prefix("-> ") {
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            archive.append_link(&mut header, path, target).unwrap();
        } else {
            header.set_size(content.len() as u64);
            archive
                .append_data(&mut header, path, content.as_bytes())
                .unwrap();
        }
    }
    Snapshot::from_archive("m.tar", archive.into_inner().unwrap().as_slice()).unwrap()
}

#[test]
fn snapshot_fills_tree_files_and_nodes() {
    let fake = FakeHost::new();
    fake.snapshot(&snapshot(&[
        (
            "sys/devices/x/drm/card0/uevent",
            "MAJOR=226\nMINOR=0\nDEVNAME=dri/card0\nDEVMODE=0666\n",
        ),
        (
            "sys/devices/y/uevent",
            "MAJOR=259\nMINOR=1\nDEVNAME=nvme0n1\nDEVTYPE=disk\n",
        ),
        ("sys/devices/y/subsystem", "-> ../../class/block"),
        ("sys/class/block/nvme0n1", "-> ../../devices/y"),
        ("sys/devices/z/uevent", "DRIVER=none\n"),
        (
            "sys/devices/w/uevent",
            "MAJOR=1\nMINOR=1\nDEVNAME=../etc/passwd\n",
        ),
        ("proc/driver/nvidia/version", "NVRM\n"),
    ]));
    let host = fake.host();
    assert_eq!(
        host.sysfs().read_link("class/block/nvme0n1").unwrap(),
        "devices/y"
    );
    assert_eq!(
        host.host_files()
            .read("/proc/driver/nvidia/version")
            .unwrap(),
        "NVRM\n"
    );
    assert_eq!(host.device_nodes().glob("/dev/**").unwrap(), []);

    fake.nodes_from_sysfs();
    let nodes = host.device_nodes().glob("/dev/**").unwrap();
    let facts: Vec<_> = nodes
        .iter()
        .map(|node| (node.path.as_str(), node.kind, node.minor))
        .collect();
    assert_eq!(
        facts,
        [
            ("/dev/dri/card0", NodeKind::Character, 0),
            ("/dev/nvme0n1", NodeKind::Block, 1)
        ]
    );
    assert_eq!(nodes[0].mode, 0o666);
    assert_eq!(
        host.sysfs().read_link("dev/char/226:0").unwrap(),
        "devices/x/drm/card0"
    );

    fake.remove("/proc/driver/nvidia");
    assert_eq!(
        host.host_files().find("/proc/driver/nvidia/version"),
        Ok(None)
    );
}

#[test]
fn injected_failures_last_until_healed() {
    let fake = fake();
    let trouble = Problem::unavailable("io-error", "no");
    fake.fail("/dev/fuse", trouble.clone())
        .fail("class/leds/a/brightness", trouble.clone());
    let host = fake.host();
    assert_eq!(host.device_nodes().stat("/dev/fuse"), Err(trouble.clone()));
    assert_eq!(
        host.sysfs().read("class/leds/a/brightness"),
        Err(trouble.clone())
    );
    assert_eq!(host.sysfs().find("class/leds/a/brightness"), Err(trouble));
    fake.fail(
        "class/leds/a/brightness",
        Problem::unavailable("no-value", "no"),
    );
    assert_eq!(host.sysfs().find("class/leds/a/brightness"), Ok(None));
    fake.heal("/dev/fuse");
    assert!(host.device_nodes().stat("/dev/fuse").is_ok());
}

#[test]
fn added_claims_and_logs_are_returned() {
    let fake = fake();
    let host = fake.host();
    let record = ClaimRecord {
        claim: crate::Claim::new("n", "c", "u"),
        ..ClaimRecord::default()
    };
    fake.claim(record.clone());
    assert_eq!(host.prepared_claims().get("u"), Some(record));
    fake.forget_claim("u");
    assert_eq!(host.prepared_claims().get("u"), None);
    host.log().warn("too hot", &[("device", "a")]);
    assert_eq!(
        fake.log_lines(),
        [LogLine {
            level: Level::Warn,
            message: "too hot".into(),
            fields: vec![("device".into(), "a".into())]
        }]
    );
}
