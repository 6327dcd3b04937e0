use std::fs;
use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;
use std::path::Path;

use super::*;
use nodedock_model::AllocationMount;

/// Recorded machine, on which a regular file represents a device node.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new(nodes: &[(&str, &str)]) -> Self {
        let machine = Self(tempfile::tempdir().unwrap());
        nodes
            .iter()
            .for_each(|(path, numbers)| machine.file(path, numbers));
        machine
    }

    fn at(&self, path: &str) -> std::path::PathBuf {
        self.0.path().join(path.trim_start_matches('/'))
    }

    fn directory(&self, path: &str) {
        fs::create_dir_all(self.at(path)).unwrap();
    }

    fn file(&self, path: &str, text: &str) {
        self.directory(Path::new(path).parent().unwrap().to_str().unwrap());
        fs::write(self.at(path), text).unwrap();
    }

    fn link(&self, path: &str, target: &str) {
        self.directory(Path::new(path).parent().unwrap().to_str().unwrap());
        symlink(target, self.at(path)).unwrap();
    }

    /// Each node as `PATH=HOST PATH PERMISSIONS MAJOR:MINOR`, or the problem.
    fn nodes(&self, specs: &[(&str, &str, &str)]) -> Result<Vec<String>, Problem> {
        let allocation = ContainerAllocation {
            device_nodes: specs.iter().map(spec).collect(),
            ..Default::default()
        };
        let found = self.look(&allocation)?;
        let words = |node: &DeviceNode| {
            let (major, minor) = (node.major.unwrap(), node.minor.unwrap());
            assert!(node.kind.is_some());
            format!(
                "{}={} {} {major}:{minor}",
                node.path,
                node.node_path(),
                node.permissions
            )
        };
        Ok(found.iter().map(words).collect())
    }

    fn look(&self, allocation: &ContainerAllocation) -> Result<Vec<DeviceNode>, Problem> {
        let resource = "example.com/gpu".parse().unwrap();
        device_nodes(&resource, allocation, &Hardware::simulated(self.0.path()))
    }

    #[track_caller]
    fn refused(&self, specs: &[(&str, &str, &str)], code: ProblemCode, parts: &[&str]) {
        let problem = self.nodes(specs).unwrap_err();
        assert_eq!(problem.code, code.to_string(), "{problem}");
        for part in parts.iter().chain(&["example.com/gpu"]) {
            assert!(problem.message.contains(part), "{problem}");
        }
    }
}

fn spec((host, inside, permissions): &(&str, &str, &str)) -> AllocationNode {
    AllocationNode {
        host_path: (*host).to_owned(),
        container_path: (*inside).to_owned(),
        permissions: (*permissions).to_owned(),
    }
}

#[test]
fn links_lead_to_their_device_nodes() {
    let machine = Machine::new(&[
        ("dev/ttyUSB0", "character 188:0"),
        ("dev/snd/timer", "character 116:33"),
    ]);
    machine.link("dev/serial/by-id/usb-a", "../../ttyUSB0");
    machine.link("dev/absolute", "/dev/serial/by-id/usb-a");
    machine.link("dev/above", "../../../../dev/ttyUSB0");
    machine.link("dev/sound", "snd");
    for (path, inside) in [
        ("/dev/serial/by-id/usb-a", "/dev/modem"),
        ("/dev/absolute", "/dev/modem"),
        ("/dev/above", "/dev/modem"),
    ] {
        let found = machine.nodes(&[(path, inside, "mrw")]).unwrap();
        assert_eq!(found, ["/dev/modem=/dev/ttyUSB0 mrw 188:0"], "{path}");
    }
    let below = machine
        .nodes(&[
            ("/dev/sound", "/dev/s", "r"),
            ("/dev/sound/timer", "/dev/t", "r"),
        ])
        .unwrap();
    assert_eq!(
        below,
        [
            "/dev/s/timer=/dev/snd/timer r 116:33",
            "/dev/t=/dev/snd/timer r 116:33"
        ]
    );
}

#[test]
fn directory_expands_to_device_nodes() {
    let machine = Machine::new(&[
        ("dev/snd/controlC0", "character 116:0"),
        ("dev/snd/by/deep/pcmC0D0p", "character 116:16"),
        ("dev/snd/loop0", "block 7:0"),
        ("dev/snd/console", "character 5:1"),
        ("dev/snd/readme", "no node"),
        ("dev/elsewhere", "character 1:3"),
    ]);
    for skipped in SKIPPED_DIRECTORIES {
        machine.file(&format!("dev/snd/{skipped}/0"), "character 136:0");
    }
    machine.file("dev/snd/by/console/0", "character 5:2");
    machine.link("dev/snd/linked", "../elsewhere");
    machine.link("dev/snd/dangling", "none");
    machine.link("dev/snd/again", ".");
    let _socket = UnixListener::bind(machine.at("dev/snd/socket")).unwrap();
    let expected = [
        "/dev/snd/controlC0=/dev/snd/controlC0 rw 116:0",
        "/dev/snd/loop0=/dev/snd/loop0 rw 7:0",
        "/dev/snd/by/console/0=/dev/snd/by/console/0 rw 5:2",
        "/dev/snd/by/deep/pcmC0D0p=/dev/snd/by/deep/pcmC0D0p rw 116:16",
    ];
    let mut found = machine.nodes(&[("/dev/snd", "/dev/snd", "rw")]).unwrap();
    found.sort();
    let mut sorted = expected;
    sorted.sort_unstable();
    assert_eq!(found, sorted);
    let inside = machine.nodes(&[("/dev/snd", "/", "rw")]).unwrap();
    assert!(
        inside.contains(&"/controlC0=/dev/snd/controlC0 rw 116:0".to_owned()),
        "{inside:?}"
    );
}

#[test]
fn pipe_needs_its_own_path() {
    let machine = Machine::new(&[("dev/d/node", "character 1:3")]);
    let made = std::process::Command::new("mkfifo")
        .arg(machine.at("dev/d/pipe"))
        .status()
        .unwrap();
    assert!(made.success());
    assert_eq!(
        machine.nodes(&[("/dev/d/pipe", "/p", "rw")]).unwrap(),
        ["/p=/dev/d/pipe rw 0:0"]
    );
    assert_eq!(
        machine.nodes(&[("/dev/d", "/d", "rw")]).unwrap(),
        ["/d/node=/dev/d/node rw 1:3"]
    );
}

#[test]
fn non_device_path_is_refused() {
    use ProblemCode::{AllocationNodeInvalid, AllocationPathMissing};
    let machine = Machine::new(&[("etc/hostname", "a"), ("dev/links/file", "no node")]);
    machine.directory("dev/empty");
    machine.link("dev/file", "../etc/hostname");
    machine.link("dev/links/null", "/dev/null");
    machine.link("dev/one", "other");
    machine.link("dev/other", "one");
    machine.link("dev/dangling", "none");
    machine.link("dev/fd", "/proc/self/fd");
    let refused =
        |path, code, parts: &[&str]| machine.refused(&[(path, "/dev/x", "rw")], code, parts);
    refused(
        "/etc/hostname",
        AllocationNodeInvalid,
        &["/etc/hostname", "no device node"],
    );
    refused(
        "/dev/file",
        AllocationNodeInvalid,
        &["/dev/file", "a link to /etc/hostname", "no device node"],
    );
    refused(
        "/dev/empty",
        AllocationNodeInvalid,
        &["/dev/empty", "no device node"],
    );
    refused(
        "/dev/links",
        AllocationNodeInvalid,
        &["/dev/links", "links in it do not count"],
    );
    refused(
        "/dev/one",
        AllocationPathMissing,
        &["/dev/one", "symbolic links"],
    );
    refused(
        "/dev/dangling",
        AllocationPathMissing,
        &["/dev/dangling", "No such file"],
    );
    refused(
        "/dev/fd",
        AllocationPathMissing,
        &["/dev/fd", "No such file"],
    );
    refused(
        "/dev/nosuch",
        AllocationPathMissing,
        &["/dev/nosuch", "devices"],
    );
    refused(
        "/etc/hostname/x",
        AllocationPathMissing,
        &["/etc/hostname/x"],
    );
}

#[test]
fn linked_mount_source_must_exist() {
    let machine = Machine::new(&[("etc/hostname", "a")]);
    machine.link("lib/current", "/etc");
    machine.link("lib/loop", "loop");
    let mount = |path: &str| ContainerAllocation {
        mounts: vec![AllocationMount {
            host_path: path.to_owned(),
            container_path: "/x".to_owned(),
            read_only: true,
        }],
        ..Default::default()
    };
    for path in ["/etc", "/lib/current", "/lib/current/hostname"] {
        assert_eq!(machine.look(&mount(path)), Ok(Vec::new()), "{path}");
    }
    for path in ["/lib/none", "/lib/loop"] {
        let problem = machine.look(&mount(path)).unwrap_err();
        assert_eq!(problem.code, "allocation-path-missing");
        assert!(
            problem.message.contains(path) && problem.message.contains("mounts"),
            "{problem}"
        );
    }
}

#[test]
fn duplicate_nodes_merge_and_conflicts_fail() {
    let machine = Machine::new(&[
        ("dev/dri/card0", "character 226:0"),
        ("dev/dri/card1", "character 226:1"),
    ]);
    machine.link("dev/link", "dri/card0");
    let card0 = ("/dev/dri/card0", "/dev/dri/card0", "r");
    let found = machine
        .nodes(&[
            card0,
            card0,
            ("/dev/link", "/dev/dri/card0", "rw"),
            ("/dev/dri", "/dev/dri", "m"),
        ])
        .unwrap();
    assert_eq!(
        found,
        [
            "/dev/dri/card0=/dev/dri/card0 rwm 226:0",
            "/dev/dri/card1=/dev/dri/card1 m 226:1"
        ]
    );
    let two = [card0, ("/dev/dri/card1", "/dev/dri/card0", "r")];
    let parts = ["two device nodes", "/dev/dri/card0", "/dev/dri/card1"];
    machine.refused(&two, ProblemCode::AllocationNodeInvalid, &parts);
}

#[test]
fn excess_nodes_and_entries_are_refused() {
    let machine = Machine::new(&[]);
    machine.directory("dev/many");
    for number in 0..=ALLOCATION_ENTRIES_MAX {
        fs::write(
            machine.at(&format!("dev/many/{number:05}")),
            "character 1:3",
        )
        .unwrap();
    }
    let many = [("/dev/many", "/dev/many", "rw")];
    machine.refused(
        &many,
        ProblemCode::AllocationNodeInvalid,
        &["more than 1024 device nodes"],
    );
    fs::remove_file(machine.at("dev/many/00000")).unwrap();
    assert_eq!(machine.nodes(&many).unwrap().len(), ALLOCATION_ENTRIES_MAX);
    // The same nodes again cost no more entries than there may be.
    let again = vec![many[0]; DIRECTORY_ENTRIES_MAX / ALLOCATION_ENTRIES_MAX + 1];
    machine.refused(
        &again,
        ProblemCode::AllocationNodeInvalid,
        &["more than 16384 entries"],
    );
    let long = format!("/{}", "x".repeat(PATH_BYTES_MAX - 2));
    let long = [("/dev/many", long.as_str(), "rw")];
    machine.refused(
        &long,
        ProblemCode::AllocationNodeInvalid,
        &["more than 4096 bytes"],
    );
}
