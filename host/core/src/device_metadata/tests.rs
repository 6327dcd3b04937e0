use std::os::unix::fs::MetadataExt;

use super::*;
use crate::manager::claims::fixtures::{claim, driver, pod, prepared, uid};
use nodedock_model::{ClaimState, Device, DeviceName, DeviceStatus, DriverPart, ObjectName, Pool};

const ON_NODE: &str = "/run/nodedock/device-metadata";

fn settings(directory: &Path) -> MetadataSettings {
    MetadataSettings {
        is_enabled: true,
        directory: directory.to_owned(),
        access: FileAccess::default(),
        pools: PoolNames {
            node: ObjectName::new("node-1").unwrap(),
        },
    }
}

/// The intent of a claim `one` of devices of the driver `gpu`, whose requests have the names of the devices.
fn intent(devices: &[&str]) -> ClaimRecord {
    let claim = claim("one", devices, &[&pod("a")]);
    let mut record = ClaimRecord::new(claim.id, ClaimState::Preparing, "boot-1");
    record.allocation = claim.allocation.unwrap();
    record.drivers.insert(driver("gpu"), Box::default());
    record
}

fn name(text: &str) -> QualifiedName {
    QualifiedName::new(text).unwrap()
}

fn attributes(entries: &[(&str, AttributeValue)]) -> BTreeMap<QualifiedName, AttributeValue> {
    entries
        .iter()
        .map(|(key, value)| (name(key), value.clone()))
        .collect()
}

/// An inventory of the device 0 with attributes of every type.
fn inventory() -> Inventory {
    let version = semver::Version::new(1, 2, 3);
    let attributes = attributes(&[
        ("cores", AttributeValue::Int(8)),
        ("ecc", AttributeValue::Bool(true)),
        ("model", AttributeValue::Text("Z100".to_owned())),
        ("firmware", AttributeValue::Version(version.clone())),
        ("lanes", AttributeValue::Ints(vec![1, 2])),
        ("modes", AttributeValue::Bools(vec![false])),
        ("links", AttributeValue::Texts(vec!["a\"b".to_owned()])),
        ("firmwares", AttributeValue::Versions(vec![version])),
    ]);
    let device = (
        DeviceName::new("0").unwrap(),
        Device {
            attributes,
            ..Device::default()
        },
    );
    let pool = Pool {
        devices: BTreeMap::from([device]),
        ..Pool::default()
    };
    Inventory {
        pools: BTreeMap::from([(PoolName::new("pool").unwrap(), pool)]),
    }
}

/// A driver's result with metadata.
fn with_metadata(
    record: &ClaimRecord,
    mut result: PreparedClaim,
) -> Result<PreparedClaim, MetadataError> {
    let settings = settings(Path::new(ON_NODE));
    add(
        record,
        &driver("gpu"),
        &mut result,
        Some(&inventory()),
        &settings,
    )
    .map(|()| result)
}

fn result(record: &ClaimRecord) -> PreparedClaim {
    prepared(&record.allocation.devices, "memo")
}

/// The record with the result.
fn completed(mut record: ClaimRecord, result: PreparedClaim) -> ClaimRecord {
    let part = DriverPart {
        prepared: Some(result.into()),
        ..DriverPart::default()
    };
    record.drivers.insert(driver("gpu"), Box::new(part));
    record
}

/// The record after a prepare.
fn prepared_record(record: ClaimRecord) -> ClaimRecord {
    let result = with_metadata(&record, result(&record)).unwrap();
    completed(record, result)
}

/// Paths of the mounts of each device.
fn mounts(record: &ClaimRecord) -> Vec<Vec<(String, String)>> {
    let devices = &record.drivers[&driver("gpu")]
        .prepared
        .as_ref()
        .unwrap()
        .devices;
    let of_device = |device: &PreparedDevice| {
        let mounts = &device.access.edits().unwrap().mounts;
        mounts
            .iter()
            .map(|mount| (mount.host_path.clone(), mount.container_path.clone()))
            .collect()
    };
    devices.iter().map(of_device).collect()
}

/// The objects of the only file.
fn stream(record: &ClaimRecord, settings: &MetadataSettings) -> Vec<serde_json::Value> {
    let files = render(record, settings);
    assert_eq!(files.len(), 1, "{files:?}");
    serde_json::Deserializer::from_slice(&files[0].bytes)
        .into_iter()
        .map(Result::unwrap)
        .collect()
}

#[test]
fn file_has_every_version_and_type() {
    let record = prepared_record(intent(&["gpu/0"]));
    let objects = stream(&record, &settings(Path::new(ON_NODE)));
    let versions: Vec<_> = objects
        .iter()
        .map(|object| object["apiVersion"].as_str().unwrap())
        .collect();
    assert_eq!(versions, VERSIONS);
    let expected = serde_json::json!({
        "kind": "DeviceMetadata",
        "apiVersion": "metadata.resource.k8s.io/v1beta1",
        "metadata": {"name": "one", "namespace": "default", "uid": "uid-one", "generation": 1},
        "requests": [{"name": "0", "devices": [{
            "driver": "gpu.example.com", "pool": "node-1/pool", "name": "0",
            "attributes": {
                "cores": {"int": 8}, "ecc": {"bool": true}, "model": {"string": "Z100"}, "firmware": {"version": "1.2.3"},
                "lanes": {"ints": [1, 2]}, "modes": {"bools": [false]}, "links": {"strings": ["a\"b"]},
                "firmwares": {"versions": ["1.2.3"]},
            },
        }]}],
    });
    assert_eq!(objects[0], expected);
    let paths = (
        format!("{ON_NODE}/gpu.example.com/uid-one_0.json"),
        "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/one/0/gpu.example.com-metadata.json"
            .to_owned(),
    );
    assert_eq!(mounts(&record), [[paths]]);
}

#[test]
fn template_claim_uses_pod_claim_name() {
    let mut record = intent(&["gpu/0"]);
    record
        .annotations
        .insert(POD_CLAIM_NAME.to_owned(), "gpu".to_owned());
    let record = prepared_record(record);
    let (_, in_container) = &mounts(&record)[0][0];
    let expected = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/gpu/0/gpu.example.com-metadata.json";
    assert_eq!(in_container, expected);
    assert_eq!(
        stream(&record, &settings(Path::new(ON_NODE)))[0]["podClaimName"],
        "gpu"
    );
}

#[test]
fn each_request_has_one_file() {
    let mut record = intent(&["gpu/0", "gpu/1", "gpu/2"]);
    for (device, request) in
        record
            .allocation
            .devices
            .iter_mut()
            .zip(["big/first", "big/first", "small"])
    {
        request.clone_into(&mut device.request);
    }
    let record = prepared_record(record);
    assert_eq!(
        mounts(&record).iter().map(Vec::len).collect::<Vec<_>>(),
        [1, 0, 1]
    );
    let files = render(&record, &settings(Path::new(ON_NODE)));
    let of_files: Vec<_> = files.iter().map(|file| file.name.clone()).collect();
    assert_eq!(of_files, names(&record, &driver("gpu")));
    let requests: Vec<_> = of_files.iter().map(|name| name.request.as_str()).collect();
    assert_eq!(requests, ["big", "small"]);
    let objects =
        serde_json::Deserializer::from_slice(&files[0].bytes).into_iter::<serde_json::Value>();
    let request = objects
        .map(|object| object.unwrap()["requests"][0].clone())
        .next()
        .unwrap();
    assert_eq!(
        (
            &request["name"],
            request["devices"].as_array().unwrap().len()
        ),
        (&"big/first".into(), 2)
    );
}

#[test]
fn driver_adds_attributes_and_network_data() {
    let record = intent(&["gpu/0"]);
    let mut result = result(&record);
    let network = NetworkData {
        interface_name: "net1".to_owned(),
        ips: vec!["192.0.2.1/24".to_owned()],
        hardware_address: String::new(),
    };
    let added = attributes(&[
        ("cores", AttributeValue::Int(4)),
        ("slice", AttributeValue::Text("1g".to_owned())),
    ]);
    let status = DeviceStatus {
        network: Some(network),
        attributes: added,
        ..DeviceStatus::default()
    };
    result.devices[0].status = Some(status);
    let result = with_metadata(&record, result).unwrap();
    assert!(
        result.devices[0]
            .status
            .as_ref()
            .unwrap()
            .attributes
            .is_empty(),
        "they are in one place"
    );
    let objects = stream(&completed(record, result), &settings(Path::new(ON_NODE)));
    let device = &objects[0]["requests"][0]["devices"][0];
    assert_eq!(device["attributes"]["cores"], serde_json::json!({"int": 4}));
    assert_eq!(
        device["attributes"]["slice"],
        serde_json::json!({"string": "1g"})
    );
    assert_eq!(
        device["attributes"]["model"],
        serde_json::json!({"string": "Z100"})
    );
    let expected = serde_json::json!({"interfaceName": "net1", "ips": ["192.0.2.1/24"]});
    assert_eq!(device["networkData"], expected);
}

#[test]
fn pools_have_api_names() {
    let record = prepared_record(intent(&["gpu/0"]));
    let objects = stream(&record, &settings(Path::new(ON_NODE)));
    assert_eq!(
        objects[0]["requests"][0]["devices"][0]["pool"],
        "node-1/pool"
    );
}

#[test]
fn each_prepare_is_a_generation() {
    let once = prepared_record(intent(&["gpu/0"]));
    let twice = prepared_record(once);
    assert_eq!(
        stream(&twice, &settings(Path::new(ON_NODE)))[0]["metadata"]["generation"],
        2
    );
}

#[test]
fn names_escaping_the_directory_are_refused() {
    for name in ["../../etc", "a/b", "", "A", &"a".repeat(64)] {
        let mut record = intent(&["gpu/0"]);
        record
            .annotations
            .insert(POD_CLAIM_NAME.to_owned(), name.to_owned());
        let error = with_metadata(&record, result(&record)).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("annotation resource.kubernetes.io/pod-claim-name of claim"),
            "{error}"
        );
        assert_eq!(Problem::from(error).code, "metadata-path");
    }
    for request in ["..", ".", "", &"r".repeat(300)] {
        let mut record = intent(&["gpu/0"]);
        request.clone_into(&mut record.allocation.devices[0].request);
        let error = with_metadata(&record, result(&record)).unwrap_err();
        assert!(
            error
                .to_string()
                .contains(&format!("has the request {request:?}")),
            "{error}"
        );
        assert_eq!(names(&record, &driver("gpu")), [], "nothing is removed");
    }
}

#[test]
fn excess_attributes_are_refused() {
    let record = intent(&["gpu/0"]);
    let mut result = result(&record);
    let many: Vec<_> = (0..25).map(|n| format!("a{n}")).collect();
    let added = many
        .iter()
        .map(|key| (name(key), AttributeValue::Int(1)))
        .collect();
    result.devices[0].status = Some(DeviceStatus {
        attributes: added,
        ..DeviceStatus::default()
    });
    let error = with_metadata(&record, result).unwrap_err().to_string();
    assert!(
        error.contains("device pool/0 of driver gpu.example.com has 33 attributes"),
        "{error}"
    );
}

#[test]
fn native_plugins_have_no_metadata_files() {
    let record = intent(&["gpu/0"]);
    let mut native = result(&record);
    native.devices[0].access = DeviceAccess::CdiDevices(vec!["v/c=d".to_owned()]);
    let native = with_metadata(&record, native).unwrap();
    assert_eq!(native.metadata_generation, 0);
    assert_eq!(
        render(
            &completed(record.clone(), native),
            &settings(Path::new(ON_NODE))
        ),
        []
    );
    let off = MetadataSettings {
        is_enabled: false,
        ..settings(Path::new(ON_NODE))
    };
    let mut plain = result(&record);
    add(
        &record,
        &driver("gpu"),
        &mut plain,
        Some(&inventory()),
        &off,
    )
    .unwrap();
    assert_eq!(plain, result(&record));
    assert_eq!(render(&completed(record, plain), &off), []);
}

/// The file of the claim `one`, of the request `0` for the driver `gpu`.
fn file(bytes: &[u8]) -> MetadataFile {
    MetadataFile {
        name: FileName {
            driver: driver("gpu"),
            claim: uid("uid-one"),
            request: "0".to_owned(),
        },
        bytes: bytes.to_vec(),
    }
}

#[test]
fn longest_name_is_a_file_name() {
    let name = FileName {
        driver: DriverName::new("d".repeat(63)).unwrap(),
        claim: Uid::new("u_".repeat(63) + "uu").unwrap(),
        request: "r".repeat(63),
    };
    let below = name.below();
    let file = below.file_name().unwrap().to_str().unwrap();
    assert!(file.len() < 256, "{} bytes", file.len());
    assert_eq!(FileName::parse(name.driver.clone(), file), Some(name));
    for other in ["u_r", "r.json", "_r.json", "u_R.json", "u/_r.json"] {
        assert_eq!(FileName::parse(driver("gpu"), other), None, "{other}");
    }
}

#[test]
fn deleted_directory_is_made_again() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metadata");
    let metadata = MetadataDir::new(&path, FileAccess::new(0o640, None).unwrap());
    for _ in 0..2 {
        metadata.write(&file(b"{}")).unwrap();
        assert!(metadata.is_current(&file(b"{}")));
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o750);
        std::fs::remove_dir_all(&path).unwrap();
    }
}

/// Another program's change of the mode lasts until the next file after a check of all files.
#[test]
fn changed_directory_mode_is_restored() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metadata");
    let metadata = MetadataDir::new(&path, FileAccess::default());
    metadata.write(&file(b"{}")).unwrap();
    let closed = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    std::fs::set_permissions(&path, closed).unwrap();
    metadata.list().unwrap();
    metadata.write(&file(b"other")).unwrap();
    assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o755);
}

#[test]
fn file_is_rewritten_in_place() {
    let directory = tempfile::tempdir().unwrap();
    let metadata = MetadataDir::new(&directory.path().join("metadata"), FileAccess::default());
    assert_eq!(metadata.list().unwrap(), []);
    let path = directory
        .path()
        .join("metadata/gpu.example.com/uid-one_0.json");
    metadata.write(&file(b"a long text")).unwrap();
    let inode = path.metadata().unwrap().ino();
    assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o644);
    assert!(metadata.is_current(&file(b"a long text")) && !metadata.is_current(&file(b"short")));
    metadata.write(&file(b"short")).unwrap();
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "short");
    assert_eq!(path.metadata().unwrap().ino(), inode);
    assert_eq!(metadata.list().unwrap(), [file(b"").name]);
    for _ in 0..2 {
        metadata.remove(&file(b"").name).unwrap();
        assert_eq!(metadata.list().unwrap(), []);
    }
}

#[test]
fn metadata_directory_mode_follows_cdi_files() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("metadata");
    for (mode, of_directory) in [(0o644, 0o755), (0o640, 0o750), (0o600, 0o700)] {
        MetadataDir::new(&path, FileAccess::new(mode, None).unwrap())
            .write(&file(b"{}"))
            .unwrap();
        let mode_of = |path: &Path| path.metadata().unwrap().mode() & 0o777;
        let of_file = mode_of(&path.join("gpu.example.com/uid-one_0.json"));
        assert_eq!(
            (mode_of(&path), of_file),
            (of_directory, 0o644),
            "programs in containers read the file"
        );
    }
}

#[test]
fn obstacle_at_file_path_is_replaced() {
    let directory = tempfile::tempdir().unwrap();
    let metadata = MetadataDir::new(directory.path(), FileAccess::default());
    let victim = directory.path().join("victim");
    std::fs::write(&victim, "whole").unwrap();
    let path = directory.path().join("gpu.example.com/uid-one_0.json");
    let file = file(b"other");
    std::fs::create_dir(path.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(&victim, &path).unwrap();
    assert!(!metadata.is_current(&file));
    metadata.write(&file).unwrap();
    assert!(metadata.is_current(&file));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir_all(path.join("below")).unwrap();
    metadata.write(&file).unwrap();
    assert!(metadata.is_current(&file));
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir_all(path.join("below")).unwrap();
    metadata.remove(&file.name).unwrap();
    assert!(!path.exists());
    assert_eq!(std::fs::read_to_string(&victim).unwrap(), "whole");
}
