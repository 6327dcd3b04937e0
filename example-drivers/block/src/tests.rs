use nodedock_sdk::testing::{FakeHost, Grant, Harness};
use nodedock_sdk::{
    AttributeValue, Claim, Configuration, Device, DeviceHealth, NodeInfo, NodeKind, Problem,
    ProblemKind,
};
use serde_json::{Value, json};

use crate::Block;

const SSD: &str = "devices/pci0000:00/0000:01:00.0/nvme/nvme0/nvme0n1";
const DATA: &str = "devices/pci0000:00/0000:02:00.0/nvme/nvme1/nvme1n1";
const SCSI: &str = "devices/pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda";

/// Adds a disk or partition with its node.
fn add(fake: &FakeHost, directory: &str, minor: u32, files: &[(&str, &str)]) {
    let kernel = directory.rsplit('/').next().unwrap();
    fake.file(&format!("{directory}/dev"), format!("259:{minor}\n"))
        .file(&format!("{directory}/size"), "2048\n")
        .dir(&format!("{directory}/holders"))
        .link(
            &format!("class/block/{kernel}"),
            &format!("../../{directory}"),
        );
    for (file, text) in files {
        fake.file(&format!("{directory}/{file}"), format!("{text}\n"));
    }
    fake.node(NodeInfo {
        path: format!("/dev/{kernel}"),
        kind: NodeKind::Block,
        major: 259,
        minor,
        mode: 0o660,
        uid: 0,
        gid: 6,
        sysfs_path: Some(directory.to_owned()),
    });
}

fn add_partition(fake: &FakeHost, disk: &str, number: u32, minor: u32, uuid: &str) {
    let kernel = disk.rsplit('/').next().unwrap();
    let infix = if kernel.ends_with(|c: char| c.is_ascii_digit()) {
        "p"
    } else {
        ""
    };
    let uevent = format!("DEVTYPE=partition\nPARTN={number}\nPARTUUID={uuid}");
    let number = number.to_string();
    let directory = format!("{disk}/{kernel}{infix}{number}");
    let files = [("partition", number.as_str()), ("uevent", uevent.as_str())];
    add(fake, &directory, minor, &files);
}

/// An SSD with the node's root, one without partitions, and a SATA disk with two partitions.
fn node() -> Harness<Block> {
    let node = Harness::new();
    let fake = node.fake();
    add(fake, SSD, 0, &[("wwid", "eui.0025385b21b0c7e0")]);
    add_partition(fake, SSD, 1, 1, "11111111-01");
    fake.dir("fs/ext4/nvme0n1p1").dir("fs/ext4/features");
    add(
        fake,
        DATA,
        2,
        &[("wwid", "eui.0025385b21b0c7e1"), ("uevent", "DEVTYPE=disk")],
    );
    let controller = "devices/pci0000:00/0000:02:00.0/nvme/nvme1";
    fake.file(&format!("{controller}/serial"), "S4EWNX0R\n")
        .file(&format!("{controller}/model"), "Samsung SSD 970\n")
        .link(&format!("{DATA}/device"), "../../nvme1");
    add(fake, SCSI, 8, &[]);
    let target = SCSI.strip_suffix("/block/sda").unwrap();
    fake.file(&format!("{target}/wwid"), "naa.5000c500a1b2c3d4\n")
        .link(&format!("{SCSI}/device"), "../../../0:0:0:0");
    add_partition(fake, SCSI, 1, 9, "22222222-01");
    add_partition(fake, SCSI, 2, 10, "22222222-02");
    node.config(select(&[
        json!({"wwid": "eui.0025385b21b0c7e1"}),
        json!({"partuuid": "22222222-01"}),
        json!({"name": "naa-5000c500a1b2c3d4-part2"}),
    ]));
    node
}

fn select(entries: &[Value]) -> Value {
    json!({"pools": [{"name": "disks", "select": entries}]})
}

fn names(node: &Harness<Block>) -> Vec<String> {
    let inventory = node.discover().unwrap();
    let devices = inventory.pools[0].devices.iter();
    devices.map(|device| device.name.clone()).collect()
}

fn claim(device: &str) -> Claim {
    Claim::new("default", "demo", "uid").device("r", "disks", device)
}

fn text<'a>(device: &'a Device, name: &str) -> Option<&'a str> {
    match device.attribute_value(name) {
        Some(AttributeValue::Text(text)) => Some(text),
        _ => None,
    }
}

/// Returns why devices are left out.
fn reasons(node: &Harness<Block>) -> Vec<String> {
    let devices = node.left_out().unwrap().into_iter();
    devices.map(|device| device.reason).collect()
}

const ALL: [&str; 3] = [
    "eui-0025385b21b0c7e1",
    "naa-5000c500a1b2c3d4-part1",
    "naa-5000c500a1b2c3d4-part2",
];

#[test]
fn the_shipped_files_fit_the_driver() {
    let grant = Grant::parse(include_str!("../block.grant.yaml")).unwrap();
    let config: Value = serde_saphyr::from_str(include_str!("../block.config.yaml")).unwrap();
    Block::validate_config(&config.to_string()).unwrap();
    let node = node();
    let inventory = node.grant(&grant).config(config).discover().unwrap();
    assert!(inventory.device("scratch", ALL[0]).is_some());
    node.prepare(&Claim::new("n", "c", "u").device("r", "scratch", ALL[0]))
        .unwrap();
}

#[test]
fn disks_are_named_by_identifier() {
    let node = node();
    assert_eq!(names(&node), ALL);
    let inventory = node.discover().unwrap();
    let disk = inventory.device("disks", ALL[0]).unwrap();
    for (name, value) in [
        ("wwid", "eui.0025385b21b0c7e1"),
        ("serial", "S4EWNX0R"),
        ("model", "Samsung SSD 970"),
        ("name", ALL[0]),
    ] {
        assert_eq!(text(disk, name), Some(value), "{name}");
    }
    assert_eq!(disk.identity, ["dev:/dev/nvme1n1"]);
    assert_eq!(disk.capacities[0].value, (2048 * 512).to_string());
    let partition = inventory.device("disks", ALL[1]).unwrap();
    for (name, value) in [
        ("partuuid", Some("22222222-01")),
        ("disk", Some("naa.5000c500a1b2c3d4")),
        ("wwid", None),
    ] {
        assert_eq!(text(partition, name), value, "{name}");
    }
    let edits = node
        .prepare(&claim(ALL[1]))
        .unwrap()
        .devices
        .remove(0)
        .edits;
    assert_eq!(edits.device_nodes[0].path, "/dev/sda1");
    assert_eq!(
        (edits.device_nodes[0].major, edits.device_nodes[0].minor),
        (Some(259), Some(9))
    );
    let variable = "BLOCK_DISKS_NAA_5000C500A1B2C3D4_PART1".to_owned();
    assert_eq!(edits.env, [(variable, "/dev/sda1".to_owned())]);
}

#[test]
fn virtual_machine_disks_have_serials() {
    let node = node();
    let disk = "devices/pci0000:00/0000:00:05.0/virtio2/block/vdb";
    add(node.fake(), disk, 20, &[("serial", "scratch-1")]);
    let card = "devices/platform/soc/fe300000.mmc/mmc_host/mmc0/mmc0:aaaa/block/mmcblk0";
    add(
        node.fake(),
        card,
        21,
        &[("device/cid", "035344534333324780")],
    );
    node.config(select(&[
        json!({"wwid": "scratch-1"}),
        json!({"wwid": "035344534333324780"}),
    ]));
    assert_eq!(names(&node), ["035344534333324780", "scratch-1"]);
}

#[test]
fn disk_in_use_is_not_offered() {
    for (directory, reason) in [
        (format!("{DATA}/holders/dm-0"), "it is part of dm-0"),
        ("fs/xfs/nvme1n1".to_owned(), "it is mounted"),
        ("fs/btrfs/uuid/devices/nvme1n1".to_owned(), "it is mounted"),
        (String::new(), "it has partitions"),
    ] {
        let node = node();
        match directory.is_empty() {
            true => add_partition(node.fake(), DATA, 1, 3, "33333333-01"),
            false => _ = node.fake().dir(&directory),
        }
        assert_eq!(names(&node), ALL[1..]);
        assert_eq!(reasons(&node), [reason]);
        let problem = node.prepare(&claim(ALL[0])).unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::Conflict, "device-in-use")
        );
        assert!(problem.message.contains("/dev/nvme1n1: it"), "{problem}");
    }
}

#[test]
fn use_of_disk_excludes_its_partitions() {
    let node = node();
    node.fake().dir(&format!("{SCSI}/holders/md0"));
    assert_eq!(names(&node), ALL[..1]);
    let node = self::node();
    node.fake().dir(&format!("{SCSI}/sda1/holders/dm-1"));
    assert_eq!(names(&node), [ALL[0], ALL[2]]);
}

/// The disk with the node's root has partitions, one of which is mounted.
#[test]
fn root_disk_is_never_offered() {
    let node = node();
    node.config(select(&[
        json!({"wwid": "eui.0025385b21b0c7e0"}),
        json!({"partuuid": "11111111-01"}),
    ]));
    assert_eq!(names(&node), [""; 0]);
    assert_eq!(reasons(&node), ["it has partitions", "it is mounted"]);
    let left_out = node.left_out().unwrap();
    assert!(left_out[0].name.starts_with("/dev/nvme"), "{left_out:?}");
}

/// A container that mounts its disk, or makes partitions on it, does not lose it.
#[test]
fn use_by_claim_is_no_use_by_node() {
    let node = node();
    let prepared = node.prepare(&claim(ALL[0])).unwrap();
    node.fake().dir("fs/ext4/nvme1n1");
    add_partition(node.fake(), DATA, 1, 3, "33333333-01");
    assert_eq!(names(&node), ALL);
    assert_eq!(reasons(&node), [""; 0]);
    assert_eq!(node.prepare(&claim(ALL[0])), Ok(prepared));
    let other = Claim::new("default", "other", "other").device("r", "disks", ALL[0]);
    assert_eq!(node.prepare(&other).unwrap_err().code, "device-in-use");
    node.unprepare("uid").unwrap();
    assert_eq!(names(&node), ALL[1..]);
}

#[test]
fn two_paths_to_disk_are_not_offered() {
    let node = node();
    node.prepare(&claim(ALL[0])).unwrap();
    let path = "devices/pci0000:00/0000:03:00.0/nvme/nvme2/nvme2n1";
    add(node.fake(), path, 30, &[("wwid", "eui.0025385b21b0c7e1")]);
    assert_eq!(names(&node), ALL[1..]);
    assert_eq!(
        reasons(&node),
        ["another disk, or another path to it, has this name"; 2]
    );
}

/// The slots of a card reader have one identifier, and so has a path that is not in use now.
#[test]
fn empty_slot_takes_no_disks_name() {
    let node = node();
    let slot = "devices/pci0000:00/0000:03:00.0/nvme/nvme2/nvme2n1";
    let files = [("wwid", "eui.0025385b21b0c7e1"), ("size", "0")];
    add(node.fake(), slot, 30, &files);
    assert_eq!(names(&node), ALL);
    assert_eq!(reasons(&node), [""; 0]);
}

#[test]
fn disks_without_identity_or_medium_are_skipped() {
    let node = Harness::<Block>::new();
    let fake = node.fake();
    let disk = "devices/pci0000:00/0000:00:05.0/virtio2/block/vdb";
    add(fake, disk, 1, &[("serial", "")]);
    add(fake, "devices/virtual/block/loop0", 2, &[("wwid", "x")]);
    let path = "devices/virtual/nvme-fabrics/ctl/nvme0/nvme0c0n1";
    add(fake, path, 3, &[("wwid", "x"), ("hidden", "1")]);
    add(
        fake,
        "devices/pci0000:00/0000:00:06.0/virtio3/block/vdc",
        4,
        &[("serial", "empty"), ("size", "0")],
    );
    let shared = "devices/virtual/nvme-subsystem/nvme-subsys0/nvme5n1";
    add(fake, shared, 5, &[("wwid", "x")]);
    node.config(select(&[json!({"wwid": "x"}), json!({"wwid": "empty"})]));
    assert_eq!(reasons(&node), ["it has no medium"]);
    let inventory = node.discover().unwrap();
    assert_eq!(
        inventory.pools[0].devices.len(),
        1,
        "the disk of a subsystem is hardware"
    );
    assert_eq!(inventory.pools[0].devices[0].identity, ["dev:/dev/nvme5n1"]);
}

/// Returns what is wrong with each device that is unhealthy.
fn faults(node: &Harness<Block>) -> Vec<String> {
    let health = node.check().unwrap().into_iter();
    let faults = health.map(|device| device.message);
    faults.filter(|message| !message.is_empty()).collect()
}

#[test]
fn offered_disks_report_their_health() {
    let node = node();
    let healthy = ALL.map(|name| DeviceHealth::healthy("disks", name));
    assert_eq!(node.check().unwrap(), healthy);
    let controller = "devices/pci0000:00/0000:02:00.0/nvme/nvme1";
    let target = SCSI.strip_suffix("/block/sda").unwrap();
    // What the kernel brings back by itself is no fault.
    let good = [
        (controller, "resetting"),
        (controller, "live"),
        (target, "running"),
    ];
    for (directory, state) in good {
        let file = format!("{directory}/state");
        node.fake().file(&file, format!("{state}\n"));
        assert_eq!(faults(&node), [""; 0], "{state}");
    }
    let unhealthy = |path: &str, text: &str| {
        let node = self::node();
        node.fake().file(path, format!("{text}\n"));
        faults(&node)
    };
    let dead = unhealthy(&format!("{controller}/state"), "dead");
    assert_eq!(dead, ["its state is dead"]);
    // Both partitions of the disk.
    let offline = unhealthy(&format!("{target}/state"), "offline");
    assert_eq!(offline, ["its state is offline"; 2]);
    let moved = unhealthy(&format!("{SCSI}/sda2/dev"), "259:77");
    assert_eq!(
        moved,
        ["/dev/sda2 has the numbers 259:10, and the device has 259:77"]
    );
    node.fake().remove("/dev/sda1");
    assert_eq!(faults(&node).len(), 1);
    let failed = Problem::unavailable("io-error", "no memory");
    node.fake()
        .fail("class/block/sda/device/state", failed.clone());
    assert_eq!(node.check(), Err(failed));
}

/// A disk that a claim has stays in the inventory, and its claim gets the same answer.
#[test]
fn removed_medium_makes_claimed_disk_unhealthy() {
    let node = node();
    let prepared = node.prepare(&claim(ALL[0])).unwrap();
    node.fake().file(&format!("{DATA}/size"), "0\n");
    assert_eq!(names(&node), ALL);
    assert_eq!(faults(&node), ["it has no medium"]);
    assert_eq!(node.prepare(&claim(ALL[0])), Ok(prepared));
    node.unprepare("uid").unwrap();
    assert_eq!(names(&node), ALL[1..]);
    assert_eq!(reasons(&node), ["it has no medium"]);
    assert_eq!(faults(&node), [""; 0]);
    let problem = node.prepare(&claim(ALL[0])).unwrap_err();
    assert!(problem.message.ends_with("it has no medium"), "{problem}");
}

#[test]
fn config_names_each_disk() {
    for entries in [
        vec![],
        vec![json!({})],
        vec![json!({"wwid": "*"})],
        vec![json!({"wwid": "eui.1"}), json!({"serial": "S4?"})],
    ] {
        let problem = Block::validate_config(&select(&entries).to_string()).unwrap_err();
        assert!(
            problem
                .message
                .contains("name each disk or partition, without wildcards"),
            "{problem}"
        );
    }
    assert_eq!(Harness::<Block>::new().discover().unwrap().pools, []);
}

#[test]
fn failed_read_is_an_error() {
    let node = node();
    for path in [
        "class/block/nvme1n1/wwid",
        "class/block/nvme1n1/size",
        "fs/*/*",
        "class/block/*/holders/*",
    ] {
        let failed = Problem::unavailable("io-error", "no memory");
        node.fake().fail(path, failed.clone());
        assert_eq!(node.discover(), Err(failed), "{path}");
        node.fake().heal(path);
    }
    node.fake().remove(DATA).remove("class/block/nvme1n1");
    assert_eq!(names(&node), ALL[1..]);
    let problem = node.prepare(&claim(ALL[0])).unwrap_err();
    assert_eq!(problem.code, "no-such-device");
}
