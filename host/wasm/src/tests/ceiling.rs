//! Effect of the ceiling on a grant of `**` for everything, on real machines: a fixture per machine, so that a change of a rule is seen as
//! a change of the paths that it allows. `NODEDOCK_RECORD=1` writes the fixtures again.
//!
//! The machines of other projects' test suites are beside the repository if they are present; without them only the made-up machine is
//! compared.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use nodedock_core::hardware::{Hardware, NodeNumbers};
use nodedock_core::sysfs::{Reader, SysfsRoot};
use nodedock_hardware::{Entry, Snapshot};
use nodedock_model::grant::{Naming, ceiling};
use nodedock_model::{NodeKind, Problem};

use crate::host_functions::nodes::DevRoot;

/// Paths of which a reader may ask whether they are mounted or read.
const PATHS: &[&str] = &[
    "/",
    "/bin/sh",
    "/boot/vmlinuz",
    "/dev/sda",
    "/etc",
    "/etc/ceph/ceph.conf",
    "/etc/hosts",
    "/etc/shadow",
    "/etc/ssh/ssh_host_rsa_key",
    "/etc/ssl/certs/ca.pem",
    "/etc/vulkan/icd.d",
    "/home/a/data",
    "/lib/firmware/a.bin",
    "/lib/systemd/system",
    "/media/usb",
    "/mnt/scratch",
    "/nix/store/a",
    "/opt",
    "/opt/acme/lib",
    "/opt/cni/bin",
    "/run/modprobe.d/a",
    "/sysroot/ostree",
    "/data",
    "/opt/acme/id_rsa",
    "/proc/1/root",
    "/proc/devices",
    "/proc/driver/nvidia/version",
    "/proc/kcore",
    "/root/.ssh/id_rsa",
    "/run",
    "/run/acme/sockets",
    "/run/containerd/containerd.sock",
    "/run/docker.sock",
    "/run/user/1000/bus",
    "/srv/data",
    "/sys/fs/cgroup",
    "/tmp/a",
    "/usr",
    "/usr/bin/nvidia-smi",
    "/usr/lib/systemd/system",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/local/cuda/lib64",
    "/usr/local/lib/acme",
    "/usr/share/vulkan/a.json",
    "/var",
    "/var/cache/nodedock",
    "/var/lib",
    "/var/lib/acme",
    "/var/lib/acme/models",
    "/var/lib/docker/overlay2",
    "/var/lib/kubelet/pods",
    "/var/lib/nodedock",
    "/var/log/syslog",
    "/var/spool/cron",
];

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src/tests/ceiling")
        .join(name)
        .with_extension("txt")
}

/// Compares a text with its fixture, or writes it.
fn compare(name: &str, text: &str) -> Result<(), String> {
    let path = fixture(name);
    if std::env::var_os("NODEDOCK_RECORD").is_some() {
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, text).unwrap();
    }
    let recorded =
        std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
    let first = recorded
        .lines()
        .zip(text.lines())
        .find(|(recorded, now)| recorded != now);
    match recorded == text {
        true => Ok(()),
        false => Err(format!("{} differs, first in {first:?}", path.display())),
    }
}

fn naming(naming: Option<Naming>) -> &'static str {
    match naming {
        Some(Naming::Glob) => "by any glob",
        Some(Naming::Directory(_)) => "by a glob that names the vendor",
        Some(Naming::Path) => "by its exact path",
        None => "never",
    }
}

#[test]
fn mount_and_file_sources_match_recording() {
    let mut text = "# path | mounted | writable with :rw | read (hostFiles)\n".to_owned();
    for path in PATHS {
        let mounted = ceiling::mount_source(path);
        let writable = naming(ceiling::writable_source(path));
        writeln!(
            text,
            "{path} | {} | {writable} | {}",
            naming(mounted),
            naming(ceiling::host_file(path))
        )
        .unwrap();
    }
    compare("paths", &text).unwrap();
}

/// Digits tell devices of one kind from each other; they say nothing of a rule.
fn kind_of(name: &str) -> String {
    let mut kind = String::new();
    for c in name.chars() {
        match c.is_ascii_digit() {
            true if kind.ends_with('#') => {}
            true => kind.push('#'),
            false => kind.push(c),
        }
    }
    kind
}

/// The machine of a snapshot in a directory, as the daemon makes it.
fn machine(snapshot: &Snapshot, directory: &Path) -> Hardware {
    snapshot.write_to(directory).unwrap();
    for (path, node) in snapshot.nodes() {
        let kind = match node.kind {
            nodedock_hardware::NodeKind::Character => NodeKind::Character,
            nodedock_hardware::NodeKind::Block => NodeKind::Block,
        };
        let path = directory.join(path.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(
            path,
            NodeNumbers {
                kind,
                major: node.major,
                minor: node.minor,
            }
            .to_string(),
        )
        .unwrap();
    }
    for (link, device) in snapshot.numbers() {
        let link = directory.join("sys/dev").join(link);
        std::fs::create_dir_all(link.parent().unwrap()).unwrap();
        if std::fs::symlink_metadata(&link).is_err() {
            std::os::unix::fs::symlink(Path::new("../..").join(device), link).unwrap();
        }
    }
    std::fs::create_dir_all(directory.join("dev")).unwrap();
    Hardware::simulated(directory)
}

fn nodes(snapshot: &Snapshot, dev: &DevRoot, sysfs: &SysfsRoot, text: &mut String) {
    for wanted in [Some(Naming::Glob), Some(Naming::Path), None] {
        writeln!(text, "# device nodes, {}", naming(wanted)).unwrap();
        for path in snapshot.nodes().keys() {
            let found = match dev.stat(path, sysfs) {
                Ok(node) => Some(node.naming),
                Err(problem) if problem.code == "never-allowed" => None,
                Err(problem) => panic!("{path}: {problem}"),
            };
            if found == wanted {
                writeln!(text, "{path}").unwrap();
            }
        }
    }
}

fn attributes(snapshot: &Snapshot, sysfs: &SysfsRoot, text: &mut String) {
    let files = snapshot
        .entries()
        .filter(|(_, entry)| matches!(entry, Entry::File(_)));
    let files: Vec<_> = files
        .filter_map(|(path, _)| path.strip_prefix("/sys/"))
        .collect();
    let names = |allowed: &dyn Fn(&str) -> bool| -> BTreeSet<String> {
        let allowed = files.iter().filter(|path| allowed(path));
        allowed
            .map(|path| kind_of(path.rsplit('/').next().unwrap()))
            .collect()
    };
    let is = |result: Result<(), Problem>| match result {
        Ok(()) => true,
        Err(problem) if problem.code == "never-allowed" => false,
        Err(problem) => panic!("{problem}"),
    };
    let may_read = |path: &str| {
        let read = sysfs
            .regular_file(path)
            .and_then(|(resolved, stat)| sysfs.admit(path, &resolved, &stat, Reader::Everyone));
        is(read)
    };
    for (title, names) in [
        ("read below /sys: names of files", names(&may_read)),
        (
            "not read below /sys: names of files",
            names(&|path| !may_read(path)),
        ),
        (
            "not written below /sys, though of a device: names of files",
            { names(&|path| path.starts_with("devices/") && !is(sysfs.attribute(path).map(drop))) },
        ),
    ] {
        writeln!(text, "# {title}").unwrap();
        names
            .iter()
            .for_each(|name| writeln!(text, "{name}").unwrap());
    }
    let outside = files
        .iter()
        .find(|path| !path.starts_with("devices/") && is(sysfs.attribute(path).map(drop)));
    assert_eq!(outside, None, "only attributes of devices are written");
}

#[test]
fn grant_of_everything_matches_recording() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/hardware");
    let Ok(entries) = std::fs::read_dir(directory) else {
        eprintln!("skipped: no recorded machines in {directory}");
        return;
    };
    let mut wrong = Vec::new();
    for archive in entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().contains(".tar"))
    {
        let snapshot = Snapshot::open(&archive).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let hardware = machine(&snapshot, directory.path());
        let (sysfs, dev) = (
            hardware.open_sys().unwrap(),
            DevRoot::open(&hardware).unwrap(),
        );
        let mut text = String::new();
        nodes(&snapshot, &dev, &sysfs, &mut text);
        attributes(&snapshot, &sysfs, &mut text);
        let name = archive
            .file_name()
            .unwrap()
            .to_string_lossy()
            .split(".tar")
            .next()
            .unwrap()
            .to_owned();
        wrong.extend(compare(&name, &text).err());
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
