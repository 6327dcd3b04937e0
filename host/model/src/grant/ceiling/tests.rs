use super::*;

fn character(subsystem: Option<&'static str>, name: &'static str) -> NodeFacts<'static> {
    NodeFacts {
        kind: NodeKind::Character,
        major: 240,
        minor: 0,
        name: Some(name),
        subsystem,
        is_console: false,
    }
}

#[test]
fn known_subsystem_is_granted_by_glob() {
    for (subsystem, name) in [
        ("drm", "card0"),
        ("tty", "ttyUSB0"),
        ("sound", "timer"),
        ("nvidia-uvm", "x"),
        ("vfio", "12"),
        ("hidraw", "hidraw3"),
    ] {
        assert_eq!(
            device_node(character(Some(subsystem), name)),
            Some(Naming::Glob),
            "{subsystem}"
        );
    }
}

#[test]
fn unknown_subsystem_needs_exact_path() {
    for (subsystem, name) in [
        (Some("misc"), "kvm"),
        (Some("misc"), "vfio"),
        (Some("uio"), "uio0"),
        (Some("ipmi"), "ipmi0"),
        (Some("new"), "a"),
        (None, "a"),
    ] {
        assert_eq!(
            device_node(character(subsystem, name)),
            Some(Naming::Path),
            "{name}"
        );
    }
}

#[test]
fn block_device_or_pipe_needs_path() {
    for kind in [NodeKind::Block, NodeKind::Fifo] {
        for subsystem in [Some("block"), Some("drm"), None] {
            assert_eq!(
                device_node(NodeFacts {
                    kind,
                    ..character(subsystem, "a")
                }),
                Some(Naming::Path)
            );
        }
    }
}

/// Independent of the name and path of the node.
#[test]
fn dangerous_devices_are_never_granted() {
    for subsystem in NEVER_SUBSYSTEMS {
        assert_eq!(
            device_node(character(Some(subsystem), "innocent")),
            None,
            "{subsystem}"
        );
    }
    for name in NEVER_MISC {
        assert_eq!(device_node(character(Some("misc"), name)), None, "{name}");
    }
    for (major, minor) in [
        (1, 1),
        (1, 2),
        (1, 4),
        (1, 11),
        (1, 12),
        (1, 99),
        (4, 0),
        (4, 63),
        (5, 0),
        (5, 1),
        (5, 2),
        (5, 3),
        (2, 0),
        (3, 7),
        (136, 0),
        (143, 7),
    ] {
        for subsystem in [Some("drm"), Some("tty"), None] {
            assert_eq!(
                device_node(NodeFacts {
                    major,
                    minor,
                    ..character(subsystem, "a")
                }),
                None,
                "{major}:{minor}"
            );
        }
    }
    assert_eq!(
        device_node(NodeFacts {
            major: 1,
            minor: 3,
            ..character(Some("mem"), "null")
        }),
        Some(Naming::Path)
    );
    assert_eq!(
        device_node(NodeFacts {
            major: 4,
            minor: 64,
            ..character(Some("tty"), "ttyS0")
        }),
        Some(Naming::Glob)
    );
    assert_eq!(
        device_node(NodeFacts {
            is_console: true,
            ..character(Some("tty"), "ttyS0")
        }),
        None
    );
}

#[test]
fn no_glob_subsystem_is_also_forbidden() {
    let both: Vec<_> = DEVICE_SUBSYSTEMS
        .iter()
        .filter(|name| NEVER_SUBSYSTEMS.contains(name))
        .collect();
    assert!(both.is_empty(), "{both:?}");
}

#[test]
fn libraries_and_kernel_facts_allow_globs() {
    for path in [
        "/proc/driver/nvidia/version",
        "/proc/devices",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "/usr/lib64/libcuda.so",
        "/lib/firmware/amdgpu/a.bin",
        "/opt/rocm/lib/libhsa.so",
    ] {
        assert_eq!(host_file(path), Some(Naming::Glob), "{path}");
    }
    assert_eq!(
        host_file("/etc/vulkan/icd.d/nvidia_icd.json"),
        Some(Naming::Directory(2))
    );
}

#[test]
fn secrets_and_accounts_are_never_readable() {
    for path in [
        "/etc/shadow",
        "/etc/hosts",
        "/etc/ssh/ssh_host_rsa_key",
        "/etc/ssl/private/a.crt",
        "/etc/kubernetes/admin.conf",
        "/etc/nodedock/config.yaml",
        "/etc/ceph/ceph.conf",
        "/etc/postfix/main.cf",
        "/etc/mysql/my.cnf",
        "/etc/bind/named.conf",
        "/etc/vendor/server.key",
        "/etc/vendor/SERVER.PEM",
        "/etc/vendor/api-token",
        "/opt/agent/APIKEY.TXT",
        "/opt/agent/Api_Key",
        "/opt/agent/id_rsa",
        "/opt/agent/ID_ED25519.pub",
        "/opt/agent/.netrc",
        "/opt/agent/credentials.json",
        "/opt/agent/Secrets/of/a.conf",
        "/proc/1/environ",
        "/proc/kcore",
        "/proc/driver",
        "/root/.ssh/id_rsa",
        "/home/a/b",
        "/var/lib/kubelet/pki/a",
        "/usr/bin/sh",
        "/run/secrets/a",
        "/libfoo/a",
        "/",
    ] {
        assert_eq!(host_file(path), None, "{path}");
    }
}

#[test]
fn mount_source_naming_depends_on_directory() {
    for (path, naming) in [
        ("/usr/lib/acme", Some(Naming::Glob)),
        ("/usr/share/acme/a", Some(Naming::Glob)),
        ("/lib/firmware/a", Some(Naming::Glob)),
        ("/opt/acme", Some(Naming::Glob)),
        ("/etc/vulkan/icd.d", Some(Naming::Directory(2))),
        ("/run/acme/sockets", Some(Naming::Directory(2))),
        ("/var/lib/acme/a", Some(Naming::Directory(3))),
        ("/var/lib/acme", Some(Naming::Path)),
        ("/usr/bin/acme", Some(Naming::Path)),
        ("/srv/data", Some(Naming::Path)),
        ("/usr", None),
        ("/", None),
        ("/etc", None),
        ("/etc/ssh/a", None),
        ("/etc/SSL/a", None),
        ("/var/lib/kubelet/pods/x", None),
        ("/var/lib/docker", None),
        ("/run/containerd/containerd.sock", None),
        ("/run/docker.sock", None),
        ("/run/my-kubelet/a", None),
        ("/run/user/1000/a", None),
        ("/var/log/a", None),
        ("/proc/1/root", None),
        ("/sys/fs/cgroup", None),
        ("/dev/sda", None),
        ("/tmp/a", None),
        ("/home/a/b", None),
        ("/var/run/acme/a", None),
    ] {
        assert_eq!(mount_source(path), naming, "{path}");
    }
}

#[test]
fn programs_and_libraries_are_never_writable() {
    for path in [
        "/usr/bin/a",
        "/usr/lib/systemd/system",
        "/lib/systemd/system",
        "/bin/sh",
        "/etc/acme/a",
        "/boot/a",
        "/srv",
        "/opt",
        "/opt/cni/bin",
        "/run/modprobe.d/a",
        "/var/lib/dkms/a",
    ] {
        assert_eq!(writable_source(path), None, "{path}");
    }
    for (path, naming) in [
        ("/opt/acme/scratch", Naming::Directory(2)),
        ("/srv/data", Naming::Path),
        ("/var/lib/acme/a", Naming::Directory(3)),
        ("/run/acme/a", Naming::Directory(2)),
        ("/mnt/scratch", Naming::Path),
    ] {
        assert_eq!(writable_source(path), Some(naming), "{path}");
    }
}
