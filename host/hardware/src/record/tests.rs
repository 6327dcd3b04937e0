use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};

use flate2::write::GzEncoder;
use proptest::prelude::*;

use super::*;

const FUNCTION: &str = "sys/devices/pci0000:00/0000:00:02.0";

/// A directory in place of a machine's root.
struct Machine(tempfile::TempDir);

impl Machine {
    fn new() -> Self {
        let machine = Machine(tempfile::tempdir().unwrap());
        machine
            .file(&format!("{FUNCTION}/vendor"), "0x8086\n")
            .file(
                &format!("{FUNCTION}/uevent"),
                "DRIVER=i915\nPCI_ID=8086:3E92\n",
            )
            .link(
                "sys/bus/pci/devices/0000:00:02.0",
                "../../../devices/pci0000:00/0000:00:02.0",
            )
            .file("proc/cpuinfo", "processor\t: 0\n")
            .file("proc/sys/kernel/osrelease", "6.12.0\n")
    }

    fn file(self, path: &str, content: impl AsRef<[u8]>) -> Self {
        fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        fs::write(self.path(path), content).unwrap();
        self
    }

    fn link(self, path: &str, target: &str) -> Self {
        fs::create_dir_all(self.path(path).parent().unwrap()).unwrap();
        symlink(target, self.path(path)).unwrap();
        self
    }

    fn path(&self, path: &str) -> PathBuf {
        self.0.path().join(path)
    }

    fn record(&self) -> Recording {
        Recorder::new(self.0.path()).record(&mut |_, _| ()).unwrap()
    }
}

fn archive(snapshot: &Snapshot) -> Vec<u8> {
    let mut gzip = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    snapshot.write_archive(&mut gzip).unwrap();
    gzip.flush().unwrap();
    gzip.finish().unwrap()
}

fn text<'a>(snapshot: &'a Snapshot, path: &str) -> &'a str {
    match snapshot.get(path) {
        Some(Entry::File(content)) => str::from_utf8(content).unwrap(),
        other => panic!("{path}: {other:?}"),
    }
}

fn skipped(recording: &Recording, reason: Skipped) -> Option<&str> {
    recording
        .summary
        .skipped
        .get(&reason)
        .map(|(_, first)| first.as_str())
}

#[test]
fn recording_without_identifiers_round_trips() {
    let machine = Machine::new().link(
        "sys/class/drm/card0",
        "../../devices/pci0000:00/0000:00:02.0",
    );
    let recording = machine.record();
    let expected = Snapshot::open(machine.0.path()).unwrap();
    assert!(
        recording.snapshot == expected,
        "{:?}",
        recording.snapshot.entries
    );
    let read = Snapshot::from_archive("m.tar.gz", archive(&recording.snapshot).as_slice()).unwrap();
    assert!(read == expected, "{:?}", read.entries);
    let summary = recording.summary;
    assert_eq!((summary.files, summary.links, summary.nodes), (4, 2, 0));
    assert_eq!(summary.redacted, Some(Redacted::default()));
    assert!(summary.skipped.is_empty(), "{summary:?}");
}

#[test]
fn dangerous_and_secret_files_stay_unopened() {
    let function = |name: &str| format!("{FUNCTION}/{name}");
    let machine = Machine::new()
        .file(&function("remove"), "")
        .file(&function("resource0"), "memory")
        .file(&function("config"), [7; 4096])
        .file(&function("large"), vec![b'a'; 70_000])
        .file("sys/kernel/debug/secret", "secret")
        .file("sys/firmware/acpi/tables/SSDT1", "secret")
        .file("sys/module/nvme/parameters/key", "secret")
        .file("sys/module/nvme/version", "1.0\n")
        .file("proc/cmdline", "secret")
        .file("dev/file", "secret")
        .link("dev/root", "sda")
        .link("sys/class/outside", "../../../etc/passwd");
    fs::set_permissions(
        machine.path(&function("remove")),
        fs::Permissions::from_mode(0o200),
    )
    .unwrap();
    let recording = machine.record();
    for path in ["remove", "resource0", "large"] {
        assert_eq!(
            recording.snapshot.get(&format!("/{}", function(path))),
            None,
            "{path}"
        );
    }
    let config = recording.snapshot.get(&format!("/{}", function("config")));
    assert_eq!(config, Some(&Entry::File(vec![7; 256])));
    assert_eq!(
        text(&recording.snapshot, "/sys/module/nvme/version"),
        "1.0\n"
    );
    for (_, entry) in recording.snapshot.entries() {
        assert!(!matches!(entry, Entry::File(content) if content == b"secret"));
    }
    let first = |reason| skipped(&recording, Skipped::ByRule(reason));
    assert_eq!(
        first("files for writing"),
        Some(&*format!("/{}", function("remove")))
    );
    assert_eq!(
        first("memory of a device"),
        Some(&*format!("/{}", function("resource0")))
    );
    assert_eq!(first("links in /dev"), Some("/dev/root"));
    assert_eq!(first("files in /dev"), Some("/dev/file"));
    assert_eq!(
        skipped(&recording, Skipped::Large),
        Some(&*format!("/{}", function("large")))
    );
    assert_eq!(
        skipped(&recording, Skipped::Unsuitable),
        Some("/sys/class/outside")
    );
}

#[test]
fn device_nodes_are_recorded_with_numbers() {
    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
    let machine = Machine::new();
    fs::create_dir_all(machine.path("dev/dri")).unwrap();
    let node = machine.path("dev/dri/card0");
    if mknodat(
        CWD,
        &node,
        FileType::CharacterDevice,
        Mode::RUSR,
        makedev(226, 0),
    )
    .is_err()
    {
        println!("skipped: this user may not make device nodes");
        return;
    }
    let recording = machine.record();
    let expected = Entry::Node {
        kind: NodeKind::Character,
        major: 226,
        minor: 0,
    };
    assert_eq!(recording.snapshot.get("/dev/dri/card0"), Some(&expected));
    assert_eq!(recording.summary.nodes, 1);
}

#[test]
fn machine_without_sysfs_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let error = Recorder::new(directory.path())
        .record(&mut |_, _| ())
        .unwrap_err();
    assert!(matches!(error, SnapshotError::NoSysfs { .. }), "{error:?}");
}

#[test]
fn circular_machine_links_name_the_link() {
    let machine = Machine::new()
        .link("sys/class/a", "b")
        .link("sys/class/b", "a");
    let error = Recorder::new(machine.0.path())
        .record(&mut |_, _| ())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("entry \"sys/class/a\": the link leads to itself"),
        "{error}"
    );
}

#[test]
fn identifiers_become_placeholders_everywhere() {
    let usb = "sys/devices/pci0000:00/usb1/1-1";
    let machine = || {
        Machine::new()
            .file("etc/hostname", "rack7-node12.example.com\n")
            .file(
                &format!("{FUNCTION}/net/enx3cfdfea1b2c3/address"),
                "3c:fd:fe:a1:b2:c3\n",
            )
            .file(
                &format!("{FUNCTION}/net/enx3cfdfea1b2c3/uevent"),
                "INTERFACE=enx3cfdfea1b2c3\nIFINDEX=2\n",
            )
            .file(&format!("{FUNCTION}/net/lo/address"), "00:00:00:00:00:00\n")
            .link(
                "sys/class/net/enx3cfdfea1b2c3",
                &format!("../../{}/net/enx3cfdfea1b2c3", &FUNCTION[4..]),
            )
            .file(
                &format!("{FUNCTION}/infiniband/mlx5_0/node_desc"),
                "rack7-node12 mlx5_0\n",
            )
            .file(
                &format!("{FUNCTION}/label"),
                "rack7-node12 slot 3, A50285BI.\n",
            )
            .file(&format!("{usb}/serial"), "A50285BI\n")
            .file(&format!("{usb}/edid"), [0, 0xff, 0x42])
            .file("sys/devices/virtual/dmi/id/product_serial", "None\n")
    };
    let recording = machine().record();
    let snapshot = &recording.snapshot;
    let net = format!("/{FUNCTION}/net/enx020000000001");
    assert_eq!(
        text(snapshot, &format!("{net}/address")),
        "02:00:00:00:00:01\n"
    );
    assert_eq!(
        text(snapshot, &format!("{net}/uevent")),
        "INTERFACE=enx020000000001\nIFINDEX=2\n"
    );
    let link = format!("../..{}", &net[4..]);
    assert_eq!(
        snapshot.get("/sys/class/net/enx020000000001"),
        Some(&Entry::Link(link))
    );
    assert_eq!(
        text(snapshot, &format!("/{FUNCTION}/net/lo/address")),
        "00:00:00:00:00:00\n"
    );
    assert_eq!(
        text(
            snapshot,
            &format!("/{FUNCTION}/infiniband/mlx5_0/node_desc")
        ),
        "00000-000000 0000_1\n"
    );
    assert_eq!(
        text(snapshot, &format!("/{FUNCTION}/label")),
        "00000-000003 slot 3, 00000002.\n"
    );
    assert_eq!(text(snapshot, &format!("/{usb}/serial")), "00000002\n");
    assert_eq!(
        snapshot.get(&format!("/{usb}/edid")),
        Some(&Entry::File(vec![0; 3]))
    );
    assert_eq!(
        text(snapshot, "/sys/devices/virtual/dmi/id/product_serial"),
        "None\n"
    );
    let redacted = recording.summary.redacted.unwrap();
    assert_eq!((redacted.files, redacted.dropped), (6, 0));

    let whole = Recorder::new(machine().0.path())
        .with_identifiers()
        .record(&mut |_, _| ())
        .unwrap();
    assert_eq!(
        text(&whole.snapshot, &format!("/{usb}/serial")),
        "A50285BI\n"
    );
    assert_eq!(whole.summary.redacted, None);
}

#[test]
fn common_values_are_replaced_locally() {
    let machine = Machine::new()
        .file("etc/hostname", "i915\n")
        .file(&format!("{FUNCTION}/serial"), "8086\n")
        .file(&format!("{FUNCTION}/drm/i915/status"), "i915 8086\n");
    let snapshot = machine.record().snapshot;
    assert_eq!(text(&snapshot, &format!("/{FUNCTION}/serial")), "0001\n");
    assert_eq!(
        text(&snapshot, &format!("/{FUNCTION}/drm/i915/status")),
        "i915 8086\n"
    );
    assert_eq!(text(&snapshot, &format!("/{FUNCTION}/vendor")), "0x8086\n");
}

#[test]
fn texts_outside_vocabulary_are_replaced() {
    let usb = "sys/devices/pci0000:00/0000:00:14.0/usb1/1-1";
    let function = |name: &str| format!("{FUNCTION}/{name}");
    let recording = Machine::new()
        .file(&format!("{usb}/product"), "Alice's iPhone\n")
        .file(&format!("{usb}/idVendor"), "05ac\n")
        .file(&format!("{usb}/speed"), "480\n")
        .file(
            "sys/devices/virtual/misc/uhid/input/input9/name",
            "Alice's Keyboard\n",
        )
        .file(
            "sys/devices/virtual/misc/uhid/input/input9/uevent",
            "PRODUCT=5/4c/26c/1\nNAME=\"Alice's Keyboard\"\n",
        )
        .file(
            "sys/devices/platform/host1/target1:0:0/1:0:0:0/model",
            "payroll-backup  \n",
        )
        .file(
            "sys/devices/platform/ipmi_bmc.0/guid",
            "4c4c4544003235108052b4c04f564432\n",
        )
        .file(&function("blob"), [0, 1, 2, 0xff])
        .file(&function("product_name"), "AMD Instinct MI300X\n")
        .file(&function("current_link_speed"), "16.0 GT/s PCIe\n")
        .record();
    let read = |path: &str| text(&recording.snapshot, &format!("/{path}")).to_owned();
    assert_eq!(read(&format!("{usb}/product")), "00001's 000002\n");
    assert_eq!(
        read("sys/devices/virtual/misc/uhid/input/input9/name"),
        "00001's Keyboard\n"
    );
    let uevent = read("sys/devices/virtual/misc/uhid/input/input9/uevent");
    assert_eq!(uevent, "PRODUCT=5/4c/26c/1\nNAME=\"00001's Keyboard\"\n");
    let model = read("sys/devices/platform/host1/target1:0:0/1:0:0:0/model");
    assert!(
        !model.contains("payroll") && !model.contains("backup") && model.ends_with("  \n"),
        "{model}"
    );
    let guid = read("sys/devices/platform/ipmi_bmc.0/guid");
    assert!(
        guid.trim_end().bytes().all(|byte| byte.is_ascii_digit()) && guid.len() == 33,
        "{guid}"
    );
    let blob = recording.snapshot.get(&format!("/{}", function("blob")));
    assert_eq!(blob, Some(&Entry::File(vec![0; 4])));
    for (path, kept) in [
        (format!("{usb}/idVendor"), "05ac\n"),
        (format!("{usb}/speed"), "480\n"),
        (function("product_name"), "AMD Instinct MI300X\n"),
        (function("current_link_speed"), "16.0 GT/s PCIe\n"),
    ] {
        assert_eq!(read(&path), kept, "{path}");
    }
}

#[derive(Clone, Debug)]
struct Secrets {
    host: String,
    serial: String,
    wwid: String,
    uuid: String,
    password: String,
    address: [u8; 6],
}

fn secrets() -> impl Strategy<Value = Secrets> {
    let address = any::<[u8; 6]>().prop_map(|[_, b, c, d, e, f]| [0x3c, b, c, d, e, f]);
    // Each with a letter first, which no placeholder has.
    (
        "[g-z][a-z0-9-]{6,20}[g-z]",
        "[G-Z][A-Z0-9]{6,20}",
        "[a-f][0-9a-f]{15}",
        "[a-f][0-9]{7}-[0-9a-f]{4}-4[0-9a-f]{3}",
        "[h-z]{6}",
        address,
    )
        .prop_filter("a serial number has a digit", |(_, serial, ..)| {
            serial.bytes().any(|byte| byte.is_ascii_digit())
        })
        .prop_map(|(host, serial, wwid, uuid, password, address)| Secrets {
            host,
            serial,
            wwid,
            uuid,
            password,
            address,
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_secret_is_in_the_archive(secrets in secrets()) {
        let Secrets { host, serial, wwid, uuid, password, address } = &secrets;
        let octets = address.map(|octet| format!("{octet:02x}"));
        let (mac, compact) = (octets.join(":"), octets.concat());
        let nvme = format!("{FUNCTION}/nvme/nvme0");
        let machine = Machine::new()
            .file("etc/hostname", format!("{host}.example.com"))
            .file("etc/machine-id", format!("{}\n", uuid.replace('-', "")))
            .file("sys/devices/virtual/dmi/id/board_serial", format!("{serial}\n"))
            .file("sys/devices/virtual/dmi/id/product_uuid", format!("{uuid}\n"))
            .file(&format!("{nvme}/serial"), format!("{serial}   \n"))
            .file(&format!("{nvme}/wwid"), format!("eui.{wwid}\n"))
            .file(&format!("{nvme}/subsysnqn"), format!("nqn.2014.08.org.nvmexpress:{serial}\n"))
            .file(&format!("{nvme}/dhchap_secret"), format!("{password}\n"))
            .file(&format!("{nvme}/address"), format!("traddr={host},model={serial}\n"))
            .file(&format!("{nvme}/naa.{wwid}/vendor"), "0x1\n")
            .link(&format!("sys/class/nvme/{serial}"), &format!("../../{}/naa.{wwid}", &nvme[4..]))
            .file(&format!("{FUNCTION}/net/enx{compact}/address"), format!("{mac}\n"))
            .file(&format!("{FUNCTION}/input/uevent"), format!("UNIQ=\"{password}\"\nPHYS={}\nNAME={compact}\n", mac.to_uppercase()))
            .file("proc/driver/nvidia/gpus/0000:00:02.0/information", format!("Model: \t A100\nGPU UUID: \t GPU-{uuid}\n"));
        let archive = archive(&machine.record().snapshot);
        let mut plain = Vec::new();
        std::io::Read::read_to_end(&mut flate2::read::GzDecoder::new(archive.as_slice()), &mut plain).unwrap();
        let plain = String::from_utf8_lossy(&plain).to_lowercase();
        for secret in [host, serial, wwid, uuid, password, &mac, &compact] {
            prop_assert!(!plain.contains(&secret.to_lowercase()), "{secret}");
        }
        prop_assert!(Snapshot::from_archive("m.tar.gz", archive.as_slice()).is_ok());
    }
}

/// The machine that runs the test: its files change, but a recording of it is read as it was written.
#[test]
fn recording_of_test_machine_round_trips() {
    let recording = Recorder::new(Path::new("/"))
        .record(&mut |_, _| ())
        .unwrap();
    let read = Snapshot::from_archive("m.tar.gz", archive(&recording.snapshot).as_slice()).unwrap();
    assert!(read == recording.snapshot);
    assert!(recording.summary.files > 100, "{:?}", recording.summary);
    assert!(
        !recording.summary.skipped.contains_key(&Skipped::Slow),
        "{:?}",
        recording.summary
    );
    println!("{:?}", recording.summary);
}
