use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;

use super::super::in_use::{NodeUse, why_not_opened};
use super::*;
use nodedock_model::PutBackEnd;
use rustix::io::Errno;

/// A machine: functions of one IOMMU group, and what the node has of them.
struct Machine {
    dir: tempfile::TempDir,
    sys: SysfsRoot,
}

const GPU: &str = "0000:01:00.0";
const AUDIO: &str = "0000:01:00.1";
const BRIDGE: &str = "0000:00:01.0";
/// Without a kernel driver, as most host bridges.
const HOST_BRIDGE: &str = "0000:00:00.0";
const NVME: &str = "0000:02:00.0";
const NIC: &str = "0000:03:00.0";

fn at(text: &str) -> PciAddress {
    text.parse().unwrap()
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("sys");
        for driver in [
            "vfio-pci",
            "amdgpu",
            "snd_hda_intel",
            "nvme",
            "igb",
            "pcieport",
        ] {
            fs::create_dir_all(root.join("bus/pci/drivers").join(driver)).unwrap();
        }
        for (address, class, driver, group) in [
            (BRIDGE, "0x060400", "pcieport", Some(1)),
            (GPU, "0x030000", "amdgpu", Some(1)),
            (AUDIO, "0x040300", "snd_hda_intel", Some(1)),
            (NVME, "0x010802", "nvme", Some(2)),
            (NIC, "0x020000", "igb", None),
            (HOST_BRIDGE, "0x060000", "none", Some(1)),
        ] {
            let function = root.join("devices/pci0000:00").join(address);
            fs::create_dir_all(&function).unwrap();
            fs::create_dir_all(root.join("bus/pci/devices")).unwrap();
            fs::write(function.join("class"), format!("{class}\n")).unwrap();
            if driver != "none" {
                symlink(
                    format!("../../../bus/pci/drivers/{driver}"),
                    function.join("driver"),
                )
                .unwrap();
            }
            let link = root.join("bus/pci/devices").join(address);
            symlink(format!("../../../devices/pci0000:00/{address}"), link).unwrap();
            if let Some(group) = group {
                let group = root.join(format!("kernel/iommu_groups/{group}/devices"));
                fs::create_dir_all(&group).unwrap();
                symlink(
                    format!("../../../../devices/pci0000:00/{address}"),
                    group.join(address),
                )
                .unwrap();
                let group = group.parent().unwrap().strip_prefix(&root).unwrap();
                symlink(
                    PathBuf::from("../../..").join(group),
                    function.join("iommu_group"),
                )
                .unwrap();
            }
        }
        fs::create_dir_all(dir.path().join("proc/self")).unwrap();
        fs::write(dir.path().join("proc/self/mountinfo"), "").unwrap();
        fs::create_dir_all(dir.path().join("dev")).unwrap();
        let sys = SysfsRoot::open_simulated(&root).unwrap();
        Self { dir, sys }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.dir.path().join(path)
    }

    /// An entry of a class whose directory is below a function.
    fn class(&self, class: &str, name: &str, address: &str, files: &[(&str, &str)]) {
        let below = format!("devices/pci0000:00/{address}/{class}/{name}");
        let directory = self.path("sys").join(&below);
        fs::create_dir_all(&directory).unwrap();
        for (file, content) in files {
            fs::write(directory.join(file), format!("{content}\n")).unwrap();
        }
        let link = self.path(&format!("sys/class/{class}"));
        fs::create_dir_all(&link).unwrap();
        symlink(format!("../../{below}"), link.join(name)).unwrap();
    }

    fn use_of(&self, address: &str) -> Option<String> {
        let (proc, dev) = (self.path("proc"), self.path("dev"));
        let sysfs = &self.sys;
        let node = NodeUse {
            sysfs,
            proc: &proc,
            dev: &dev,
        };
        node.function(&at(address)).unwrap()
    }

    fn driver(&self, address: &str) -> String {
        self.sys.pci().binding(&at(address)).unwrap().value.unwrap()
    }

    fn bind(&self, address: &str, value: &str) -> Result<(), Problem> {
        let found = self.sys.pci().binding(&at(address)).unwrap();
        self.sys.store(&found, value).unwrap().outcome
    }

    fn kept(&self, address: &str, before: &str, after: &str) -> KeptValue {
        let found = self.sys.pci().binding(&at(address)).unwrap();
        KeptValue {
            path: found.path,
            inode: found.inode,
            order: 1,
            before: Some(before.to_owned()),
            after: Some(after.to_owned()),
            pending: None,
            putting_back: false,
            also_left: Vec::new(),
            restored_from: None,
        }
    }
}

#[test]
fn addresses_have_a_domain() {
    for good in ["0000:3b:00.0", "10000:e1:1f.7"] {
        assert_eq!(at(good).to_string(), good);
    }
    for bad in [
        "",
        "3b:00.0",
        "0000:3B:00.0",
        "0000:3b:00:0",
        "0000.3b:00.0",
        "0000:3b:00.0/..",
        "0000:3b:0.0",
    ] {
        assert_eq!(
            bad.parse::<PciAddress>().unwrap_err().code,
            "bad-value",
            "{bad}"
        );
    }
}

#[test]
fn binding_text_round_trips() {
    for text in [
        "nvme",
        "vfio-pci override=vfio-pci",
        "-",
        "- override=vfio-pci",
    ] {
        assert_eq!(Binding::from(text).to_string(), text);
    }
}

#[test]
fn override_binds_and_restores_function() {
    let machine = Machine::new();
    assert_eq!(machine.driver(GPU), "amdgpu");
    let target = Binding::forced_to("vfio-pci").to_string();
    machine.bind(GPU, &target).unwrap();
    assert_eq!(machine.driver(GPU), target);
    machine.bind(GPU, "amdgpu").unwrap();
    assert_eq!(machine.driver(GPU), "amdgpu");
    machine.bind(GPU, "-").unwrap();
    assert_eq!(machine.driver(GPU), "-", "an unbound function");
}

#[test]
fn failed_bind_is_undone() {
    let machine = Machine::new();
    // The driver is gone between the check and the bind.
    fs::remove_dir_all(machine.path("sys/bus/pci/drivers/vfio-pci")).unwrap();
    let problem = machine.bind(GPU, "vfio-pci override=vfio-pci").unwrap_err();
    assert_eq!(problem.code, "bind-failed");
    assert!(
        problem
            .message
            .contains("0000:01:00.0 to no driver, and not to vfio-pci"),
        "{problem}"
    );
    assert_eq!(machine.driver(GPU), "amdgpu");
}

#[test]
fn replaced_device_is_not_bound() {
    let machine = Machine::new();
    let found = machine.sys.pci().binding(&at(NIC)).unwrap();
    let directory = machine.path("sys/devices/pci0000:00").join(NIC);
    fs::rename(&directory, machine.path("gone")).unwrap();
    fs::create_dir(&directory).unwrap();
    assert_eq!(
        machine.sys.store(&found, "-").unwrap_err().code,
        "path-replaced"
    );
}

#[test]
fn vfio_binds_the_whole_group() {
    let machine = Machine::new();
    assert_eq!(
        machine
            .sys
            .pci()
            .bound_together(&at(GPU), "vfio-pci")
            .unwrap(),
        [at(GPU), at(AUDIO)]
    );
    assert_eq!(
        machine
            .sys
            .pci()
            .bound_together(&at(GPU), "mlx5_vfio_pci")
            .unwrap()
            .len(),
        2
    );
    assert_eq!(
        machine
            .sys
            .pci()
            .bound_together(&at(GPU), "uio_pci_generic")
            .unwrap(),
        [at(GPU)]
    );
    assert_eq!(
        machine
            .sys
            .pci()
            .bound_together(&at(NIC), "vfio-pci")
            .unwrap_err()
            .code,
        "no-iommu"
    );
    assert_eq!(machine.sys.pci().group_of(&at(NIC)).unwrap(), [at(NIC)]);
    let gone = machine
        .sys
        .pci()
        .bound_together(&at("0000:09:00.0"), "vfio-pci")
        .unwrap_err();
    assert_eq!(gone.code, "no-such-path");
}

#[test]
fn link_to_non_device_is_refused() {
    let machine = Machine::new();
    let link = machine.path("sys/bus/pci/devices/0000:05:00.0");
    symlink("../drivers/vfio-pci", link).unwrap();
    assert_eq!(
        machine
            .sys
            .pci()
            .binding(&at("0000:05:00.0"))
            .unwrap_err()
            .code,
        "outside-sysfs"
    );
}

#[test]
fn function_in_use_has_a_reason() {
    let machine = Machine::new();
    assert_eq!(machine.use_of(NVME), None);
    machine.class("block", "nvme0n1", NVME, &[("dev", "259:0")]);
    assert_eq!(machine.use_of(NVME), None, "a disk that nothing uses");
    let mounts = "36 35 259:0 / /data rw shared:1 - ext4 /dev/nvme0n1 rw\n";
    fs::write(machine.path("proc/self/mountinfo"), mounts).unwrap();
    assert!(machine.use_of(NVME).unwrap().contains("nvme0n1 is mounted"));
    // btrfs mounts have a number of their own.
    let mounts = "36 35 0:44 / /data rw shared:1 - btrfs /dev/nvme0n1 rw\n";
    fs::write(machine.path("proc/self/mountinfo"), mounts).unwrap();
    assert!(machine.use_of(NVME).unwrap().contains("is mounted"));
    fs::write(machine.path("proc/self/mountinfo"), "").unwrap();
    fs::write(
        machine.path("proc/swaps"),
        "Filename\tType\n/dev/nvme0n1 partition 1 0 -2\n",
    )
    .unwrap();
    assert!(machine.use_of(NVME).unwrap().contains("swaps"));
    fs::write(machine.path("proc/swaps"), "").unwrap();
    let holders = machine.path(&format!(
        "sys/devices/pci0000:00/{NVME}/block/nvme0n1/holders"
    ));
    fs::create_dir_all(holders.join("dm-0")).unwrap();
    assert!(machine.use_of(NVME).unwrap().contains("part of dm-0"));
    fs::remove_file(machine.path("proc/self/mountinfo")).unwrap();
    let (proc, dev) = (machine.path("proc"), machine.path("dev"));
    let node = NodeUse {
        sysfs: &machine.sys,
        proc: &proc,
        dev: &dev,
    };
    let unknown = node.function(&at(NVME));
    assert_eq!(
        unknown.unwrap_err().code,
        "io-error",
        "what is unknown is no permission"
    );
}

#[test]
fn multipath_disk_belongs_to_each_controller() {
    let machine = Machine::new();
    machine.class("nvme", "nvme0", NVME, &[]);
    let subsystem = machine.path("sys/devices/virtual/nvme-subsystem/nvme-subsys0");
    fs::create_dir_all(subsystem.join("nvme0n1/nvme0n1p1")).unwrap();
    symlink(
        format!("../../../pci0000:00/{NVME}/nvme/nvme0"),
        subsystem.join("nvme0"),
    )
    .unwrap();
    fs::write(subsystem.join("nvme0n1/dev"), "259:1\n").unwrap();
    fs::write(subsystem.join("nvme0n1/nvme0n1p1/dev"), "259:2\n").unwrap();
    for (class, name, below) in [
        ("nvme-subsystem", "nvme-subsys0", "nvme-subsys0"),
        ("block", "nvme0n1", "nvme-subsys0/nvme0n1"),
        ("block", "nvme0n1p1", "nvme-subsys0/nvme0n1/nvme0n1p1"),
    ] {
        fs::create_dir_all(machine.path(&format!("sys/class/{class}"))).unwrap();
        let target = format!("../../devices/virtual/nvme-subsystem/{below}");
        symlink(target, machine.path(&format!("sys/class/{class}/{name}"))).unwrap();
    }
    fs::write(
        machine.path("proc/self/mountinfo"),
        "1 1 259:1 / / rw - ext4 /dev/root rw\n",
    )
    .unwrap();
    assert!(machine.use_of(NVME).unwrap().contains("nvme0n1 is mounted"));
    fs::write(
        machine.path("proc/self/mountinfo"),
        "1 1 259:2 / / rw - ext4 /dev/root rw\n",
    )
    .unwrap();
    assert!(
        machine
            .use_of(NVME)
            .unwrap()
            .contains("nvme0n1p1 is mounted")
    );
}

#[test]
fn used_disk_is_found_among_thousands() {
    let machine = Machine::new();
    machine.class("block", "nvme0n1", NVME, &[("dev", "259:0")]);
    for disk in 0..5_000 {
        symlink(
            "../../devices/virtual/block/none",
            machine.path(&format!("sys/class/block/a{disk}")),
        )
        .unwrap();
    }
    fs::write(
        machine.path("proc/self/mountinfo"),
        "1 1 259:0 / / rw - ext4 /dev/root rw\n",
    )
    .unwrap();
    assert!(
        machine.use_of(NVME).unwrap().contains("nvme0n1 is mounted"),
        "more disks than a driver may list"
    );
    fs::remove_dir_all(machine.path("sys/class/block")).unwrap();
    fs::write(machine.path("sys/class/block"), "").unwrap();
    let (proc, dev) = (machine.path("proc"), machine.path("dev"));
    let node = NodeUse {
        sysfs: &machine.sys,
        proc: &proc,
        dev: &dev,
    };
    let unknown = node.function(&at(NVME));
    assert_eq!(unknown.unwrap_err().code, "not-a-directory");
}

#[test]
fn active_interfaces_keep_their_function() {
    let machine = Machine::new();
    machine.class("net", "eth0", NIC, &[("flags", "0x1002")]);
    assert_eq!(machine.use_of(NIC), None);
    let interface = machine.path(&format!("sys/devices/pci0000:00/{NIC}/net/eth0"));
    symlink("../bond0", interface.join("upper_bond0")).unwrap();
    assert!(machine.use_of(NIC).unwrap().contains("part of a bond"));
    fs::write(interface.join("flags"), "0x1003\n").unwrap();
    assert!(machine.use_of(NIC).unwrap().contains("eth0 is up"));
}

#[test]
fn consoles_and_parents_keep_their_function() {
    let machine = Machine::new();
    fs::write(
        machine.path(&format!("sys/devices/pci0000:00/{GPU}/boot_vga")),
        "1\n",
    )
    .unwrap();
    assert!(machine.use_of(GPU).unwrap().contains("console"));
    machine.class("tty", "ttyS0", AUDIO, &[]);
    assert_eq!(machine.use_of(AUDIO), None);
    fs::create_dir_all(machine.path("sys/class/tty/console")).unwrap();
    fs::write(machine.path("sys/class/tty/console/active"), "tty0 ttyS0\n").unwrap();
    assert!(
        machine
            .use_of(AUDIO)
            .unwrap()
            .contains("ttyS0 is the console")
    );
    fs::write(
        machine.path(&format!("sys/devices/pci0000:00/{NIC}/sriov_numvfs")),
        "4\n",
    )
    .unwrap();
    assert!(machine.use_of(NIC).unwrap().contains("4 virtual functions"));
}

#[test]
fn interrupted_bind_is_restored() {
    let target = Binding::forced_to("vfio-pci").to_string();
    let steps = [
        "amdgpu override=vfio-pci",
        "- override=vfio-pci",
        "vfio-pci override=vfio-pci",
        "vfio-pci",
        "-",
    ];
    for step in steps {
        let machine = Machine::new();
        let mut kept = machine.kept(GPU, "amdgpu", &target);
        (kept.after, kept.pending) = (None, Some(target.clone()));
        machine.bind(GPU, step).unwrap();
        let fate = machine.sys.restore(&kept, false);
        assert_eq!(fate.end, PutBackEnd::PutBack, "{step}: {fate:?}");
        assert_eq!(machine.driver(GPU), "amdgpu", "{step}");
    }
}

#[test]
fn binding_changed_by_others_is_kept() {
    let machine = Machine::new();
    let kept = machine.kept(GPU, "amdgpu", "vfio-pci override=vfio-pci");
    machine.bind(GPU, "igb").unwrap();
    let fate = machine.sys.restore(&kept, false);
    assert_eq!(
        (fate.end, fate.problem.unwrap().code.as_str()),
        (PutBackEnd::Left, "value-changed")
    );
    assert_eq!(machine.driver(GPU), "igb");
}

/// The device cgroup of an unprivileged pod forbids the open, and the pod does not see the node's mounts.
#[test]
fn unopenable_disk_counts_as_used() {
    for (opened, expected) in [
        (Err(Errno::BUSY), Some("for itself")),
        (Err(Errno::PERM), Some("not permitted")),
        (Err(Errno::ACCESS), Some("not permitted")),
        (Err(Errno::NXIO), None),
        (Ok(()), None),
    ] {
        let reason = why_not_opened("sdb", opened).unwrap();
        assert!(
            reason.is_some() == expected.is_some(),
            "{opened:?}: {reason:?}"
        );
        assert!(
            reason
                .unwrap_or_default()
                .contains(expected.unwrap_or_default()),
            "{opened:?}"
        );
    }
    assert_eq!(
        why_not_opened("sdb", Err(Errno::MFILE)).unwrap_err().code,
        "io-error"
    );
}

#[test]
fn disk_with_used_partition_is_used() {
    let machine = Machine::new();
    machine.class("block", "sdb", NVME, &[("dev", "8:16")]);
    let directory = format!("devices/pci0000:00/{NVME}/block/sdb");
    let partition = machine.path("sys").join(&directory).join("sdb1");
    fs::create_dir_all(&partition).unwrap();
    fs::write(partition.join("dev"), "8:17\n").unwrap();
    symlink(
        format!("../../{directory}/sdb1"),
        machine.path("sys/class/block/sdb1"),
    )
    .unwrap();
    let (proc, dev) = (machine.path("proc"), machine.path("dev"));
    let node = NodeUse {
        sysfs: &machine.sys,
        proc: &proc,
        dev: &dev,
    };
    let used = |directory: &str| node.block_device(directory).map_err(|problem| problem.code);
    assert_eq!(used(&directory), Ok(None));
    let mount = "36 35 8:17 / /mnt rw - ext4 /dev/sdb1 rw\n";
    fs::write(machine.path("proc/self/mountinfo"), mount).unwrap();
    assert_eq!(
        used(&directory),
        Ok(Some("disk sdb1 is mounted".to_owned()))
    );
    assert_eq!(
        used(&format!("{directory}/sdb1")),
        Ok(Some("disk sdb1 is mounted".to_owned()))
    );
    fs::write(machine.path("proc/self/mountinfo"), "").unwrap();
    fs::create_dir_all(machine.path("sys").join(&directory).join("holders/md0")).unwrap();
    assert_eq!(
        used(&directory),
        Ok(Some("disk sdb is part of md0".to_owned()))
    );
    fs::remove_file(machine.path("proc/self/mountinfo")).unwrap();
    assert_eq!(
        used(&directory),
        Err("io-error".to_owned()),
        "what is unknown is no permission"
    );
}
