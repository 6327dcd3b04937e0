use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::host_functions::host_files::FilesRoot;
use crate::host_functions::nodes::tests::dev;
use nodedock_core::hardware::Hardware;
use nodedock_model::grant::{Capabilities, Grant, Unrequested};
use nodedock_model::{NetDevice, ProblemKind};

/// A node, and a driver whose requests are granted.
struct Scene {
    _directory: tempfile::TempDir,
    dev: DevRoot,
    sysfs: SysfsRoot,
}

impl Scene {
    /// None where device nodes cannot be made.
    fn new() -> Option<Self> {
        dev().map(|(_directory, dev, sysfs)| Self {
            _directory,
            dev,
            sysfs,
        })
    }

    fn edits(&self, capabilities: &Capabilities, edits: Edits) -> Result<Edits, Problem> {
        self.granted(capabilities, Unrequested::default(), edits)
    }

    fn granted(
        &self,
        capabilities: &Capabilities,
        unrequested: Unrequested,
        edits: Edits,
    ) -> Result<Edits, Problem> {
        let grant = Grant {
            allowed: capabilities.clone(),
            unrequested,
            ..Grant::default()
        };
        let effective = Effective::new(capabilities, &grant).unwrap();
        let files = FilesRoot::open(Path::new("/")).unwrap();
        let hardware = Hardware::of_node();
        Verifier {
            effective: &effective,
            dev: &self.dev,
            files: &files,
            sysfs: &self.sysfs,
            hardware: &hardware,
        }
        .edits(edits)
    }

    /// A program, in a directory that only root may write: not below /tmp.
    fn program(&self) -> Option<(tempfile::TempDir, String)> {
        let directory = tempfile::Builder::new()
            .prefix("nodedock-test-")
            .tempdir_in("/opt")
            .ok()?;
        let program = directory.path().join("hook");
        std::fs::write(&program, "#!/bin/sh\n").unwrap();
        std::fs::set_permissions(&program, PermissionsExt::from_mode(0o755)).unwrap();
        let path = program.to_str().unwrap().to_owned();
        Some((directory, path))
    }
}

fn hook(path: &str, env: &[&str]) -> Edits {
    let hook = Hook {
        stage: "createContainer".into(),
        path: path.into(),
        args: Vec::new(),
        env: env
            .iter()
            .map(|name| ((*name).into(), "/tmp/x".into()))
            .collect(),
        timeout_seconds: None,
    };
    Edits {
        hooks: vec![hook],
        ..Edits::default()
    }
}

fn strings(entries: &[&str]) -> Vec<String> {
    entries.iter().map(|entry| (*entry).to_owned()).collect()
}

fn node(path: &str) -> DeviceNode {
    DeviceNode {
        path: path.into(),
        host_path: None,
        kind: None,
        major: None,
        minor: None,
        permissions: "rw".into(),
        file_mode: None,
        uid: None,
        gid: None,
    }
}

fn mount(path: &Path) -> Mount {
    Mount {
        host_path: path.to_str().unwrap().into(),
        container_path: "/opt/in".into(),
        options: strings(&["ro"]),
        fs_type: None,
    }
}

#[test]
fn device_nodes_take_fields_from_node() {
    let Some(scene) = Scene::new() else { return };
    let device_nodes = strings(&["/dev/**", "/dev/fuse", "/dev/pipe", "/dev/ram7"]);
    let granted = Capabilities {
        device_nodes,
        ..Capabilities::default()
    };
    let edits = |nodes: &[DeviceNode]| {
        scene.edits(
            &granted,
            Edits {
                device_nodes: nodes.to_vec(),
                ..Edits::default()
            },
        )
    };

    let elsewhere = DeviceNode {
        host_path: Some("/dev/dri/card0".into()),
        ..node("/dev/gpu")
    };
    let filled = edits(&[elsewhere, node("/dev/pipe")]).unwrap().device_nodes;
    assert_eq!(
        (filled[0].kind, filled[0].major, filled[0].minor),
        (Some(NodeKind::Character), Some(226), Some(0))
    );
    assert_eq!(
        (filled[1].kind, filled[1].major),
        (Some(NodeKind::Fifo), None)
    );

    for wrong in [
        DeviceNode {
            kind: Some(NodeKind::Block),
            ..node("/dev/fuse")
        },
        DeviceNode {
            major: Some(11),
            ..node("/dev/fuse")
        },
        DeviceNode {
            minor: Some(0),
            ..node("/dev/fuse")
        },
        node("/dev/link"),
        node("/dev/file"),
    ] {
        let problem = edits(std::slice::from_ref(&wrong)).unwrap_err();
        // Other numbers may be those of a device that was plugged in again.
        let is_renumbered = wrong.major.or(wrong.minor).is_some();
        let kind = if is_renumbered {
            ProblemKind::Unavailable
        } else {
            ProblemKind::Invalid
        };
        assert_eq!(problem.kind, kind, "{problem:?}");
        assert!(problem.message.contains(&wrong.path), "{problem:?}");
    }
    let unseen = edits(&[node("/dev/none")]).unwrap_err();
    assert_eq!(
        (unseen.code.as_str(), unseen.kind),
        ("no-such-node", ProblemKind::Unavailable),
        "it may come"
    );
    for denied in ["/dev/mem", "/dev/innocent", "/dev/harmless", "/etc/passwd"] {
        assert_eq!(
            edits(&[node(denied)]).unwrap_err().kind,
            ProblemKind::Denied,
            "{denied}"
        );
    }
}

#[test]
fn mount_edits_match_the_real_path() {
    // Not below /tmp, which is never mounted.
    let Ok(directory) = tempfile::Builder::new()
        .prefix("nodedock-test-")
        .tempdir_in("/opt")
    else {
        return;
    };
    let Some(scene) = Scene::new() else { return };
    let base = directory.path();
    std::fs::create_dir(base.join("lib-1")).unwrap();
    symlink("lib-1", base.join("lib")).unwrap();
    symlink("/etc", base.join("sly")).unwrap();
    rustix::fs::mknodat(
        rustix::fs::CWD,
        base.join("pipe"),
        rustix::fs::FileType::Fifo,
        0o600.into(),
        0,
    )
    .unwrap();
    let mounts = vec![
        format!("{}/**", base.display()),
        "/etc/**".into(),
        "/etc".into(),
        "/etc/hosts".into(),
    ];
    let granted = Capabilities {
        mounts,
        ..Capabilities::default()
    };
    let edits = |mount: Mount| {
        scene.edits(
            &granted,
            Edits {
                mounts: vec![mount],
                ..Edits::default()
            },
        )
    };
    let writable_mounts = vec![format!("{}/lib-*", base.display())];
    let writable = Unrequested {
        writable_mounts,
        ..Unrequested::default()
    };
    let options = |unrequested: &Unrequested, options: &[&str]| {
        let mount = Mount {
            options: strings(options),
            ..mount(&base.join("lib"))
        };
        let edits = Edits {
            mounts: vec![mount],
            ..Edits::default()
        };
        let made = scene.granted(&granted, unrequested.clone(), edits);
        made.map(|edits| edits.mounts[0].options.clone())
            .map_err(|problem| problem.kind)
    };
    let read_only = Unrequested::default();
    assert_eq!(
        options(&read_only, &[]),
        Ok(strings(&["ro", "bind"])),
        "no grant says that it is writable"
    );
    assert_eq!(options(&read_only, &["rw"]), Err(ProblemKind::Denied));
    assert_eq!(options(&writable, &["rw"]), Ok(strings(&["rw", "bind"])));
    assert_eq!(options(&writable, &[]), Ok(strings(&["bind"])));
    assert_eq!(options(&writable, &["ro"]), Ok(strings(&["ro", "bind"])));
    assert_eq!(options(&writable, &["ro", "rw"]), Err(ProblemKind::Invalid));

    let real = edits(mount(&base.join("lib"))).unwrap().mounts.remove(0);
    assert_eq!(real.host_path, base.join("lib-1").to_str().unwrap());
    assert_eq!(real.options, ["ro", "bind"]);
    for path in [
        base.join("sly"),
        "/etc".into(),
        "/etc/hosts".into(),
        base.join("pipe"),
        "/opt".into(),
        "/usr".into(),
    ] {
        assert_eq!(
            edits(mount(&path)).unwrap_err().kind,
            ProblemKind::Denied,
            "{path:?}"
        );
    }
    assert_eq!(
        edits(mount(&base.join("none"))).unwrap_err().kind,
        ProblemKind::Unavailable
    );
    for option in [
        "suid", "dev", "rshared", "rslave", "rbind", "remount", "loop",
    ] {
        let greedy = Mount {
            options: strings(&[option]),
            ..mount(&base.join("lib"))
        };
        assert_eq!(
            edits(greedy).unwrap_err().kind,
            ProblemKind::Denied,
            "{option}"
        );
    }
    let other = Mount {
        fs_type: Some("ext4".into()),
        ..mount(&base.join("lib"))
    };
    assert_eq!(edits(other).unwrap_err().kind, ProblemKind::Denied);
}

#[test]
fn protected_container_paths_cannot_be_covered() {
    let Some(scene) = Scene::new() else { return };
    let granted = Capabilities {
        mounts: strings(&["/opt/**"]),
        device_nodes: strings(&["/dev/**"]),
        ..Capabilities::default()
    };
    for path in [
        "/",
        "/proc",
        "/proc/sys",
        "/sys",
        "/sys/fs/cgroup",
        "/etc",
        "/etc/ld.so.preload",
        "/etc/ld.so.conf.d/a.conf",
    ] {
        let over = Mount {
            container_path: path.into(),
            ..mount(Path::new("/opt/acme"))
        };
        let node = DeviceNode {
            path: path.into(),
            host_path: Some("/dev/fuse".into()),
            ..node("/dev/fuse")
        };
        for edits in [
            Edits {
                mounts: vec![over],
                ..Edits::default()
            },
            Edits {
                device_nodes: vec![node],
                ..Edits::default()
            },
        ] {
            let problem = scene.edits(&granted, edits).unwrap_err();
            assert_eq!(problem.kind, ProblemKind::Denied, "{path}: {problem}");
            assert!(
                problem.message.contains("nothing is put"),
                "{path}: {problem}"
            );
        }
    }
    for path in ["/etc/acme", "/etc/ld.so.cache", "/procedures"] {
        assert!(in_container("mount", path).is_ok(), "{path}");
    }
}

#[test]
fn hook_environment_needs_an_env_grant() {
    let Some(scene) = Scene::new() else { return };
    let Some((_directory, path)) = scene.program() else {
        return;
    };
    let granted = Capabilities {
        hooks: strings(&[&path]),
        env: strings(&["ACME_*"]),
        ..Capabilities::default()
    };
    assert!(scene.edits(&granted, hook(&path, &["ACME_A"])).is_ok());
    for name in ["LD_PRELOAD", "PATH", "OTHER"] {
        let problem = scene.edits(&granted, hook(&path, &[name])).unwrap_err();
        assert!(
            problem.kind == ProblemKind::Denied && problem.message.contains(name),
            "{problem}"
        );
    }
}

#[test]
fn hooks_are_writable_only_by_root() {
    let Some(scene) = Scene::new() else { return };
    let Some((_directory, path)) = scene.program() else {
        return;
    };
    let granted = Capabilities {
        hooks: strings(&[&path]),
        ..Capabilities::default()
    };
    for (mode, expected) in [
        (0o755, None),
        (0o644, Some(ProblemKind::Invalid)),
        (0o777, Some(ProblemKind::Denied)),
    ] {
        std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
        let refusal = scene.edits(&granted, hook(&path, &[])).err();
        assert_eq!(refusal.map(|problem| problem.kind), expected, "{mode:o}");
    }
}

#[test]
fn interfaces_and_groups_are_checked() {
    let Some(scene) = Scene::new() else { return };
    let granted = Capabilities {
        env: strings(&["ACME"]),
        net_devices: strings(&["eth*"]),
        ..Capabilities::default()
    };
    let net = |host: &str| {
        let device = NetDevice {
            host_interface: host.into(),
            container_interface: "net1".into(),
        };
        scene.edits(
            &granted,
            Edits {
                net_devices: vec![device],
                ..Edits::default()
            },
        )
    };
    assert!(net("eth0").is_ok());
    assert_eq!(net("lo").unwrap_err().kind, ProblemKind::Denied);
    let env = vec![("ACME".into(), "x".into())];
    let edits = Edits {
        env,
        additional_gids: vec![44],
        ..Edits::default()
    };
    assert_eq!(
        scene.edits(&granted, edits.clone()).unwrap_err().kind,
        ProblemKind::Denied
    );
    let groups = Unrequested {
        groups: vec![44],
        ..Unrequested::default()
    };
    assert!(scene.granted(&granted, groups, edits).is_ok());
}
