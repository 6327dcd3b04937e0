//! Metadata files as derived state: they live and die with the claim's CDI files.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;

use crate::cdi::{self, CdiDir, FileAccess};
use crate::device_metadata::{self, MetadataSettings};
use crate::manager::claims::fixtures::{claim, driver, pod};
use crate::manager::tests::scene::{Daemon, FakeDriver, Home, Reply, ends};
use nodedock_model::{DeviceStatus, NetworkData, ObjectName, PoolNames};

const IN_CONTAINER: &str = "/var/run/kubernetes.io/dra-device-attributes/resourceclaims/one/0/gpu.example.com-metadata.json";

/// A daemon with metadata files, and the prepared claim `one`.
async fn prepared() -> (Home, Daemon, Arc<FakeDriver>) {
    let (home, gpu) = (Home::new(), FakeDriver::new(driver("gpu")));
    let daemon = start(&home, &gpu);
    assert_eq!(
        ends(&daemon.prepare(&pod("a"), &["one"]).await),
        ["prepared"]
    );
    (home, daemon, gpu)
}

fn start(home: &Home, gpu: &Arc<FakeDriver>) -> Daemon {
    start_in("boot-1", home, gpu)
}

fn start_in(boot_id: &str, home: &Home, gpu: &Arc<FakeDriver>) -> Daemon {
    let daemon = home.start_with_metadata(boot_id);
    daemon.serve(gpu);
    daemon.source.put(claim("one", &["gpu/0"], &[&pod("a")]));
    daemon
}

fn path(home: &Home) -> PathBuf {
    home.metadata().join("gpu.example.com/uid-one_0.json")
}

fn first(home: &Home) -> serde_json::Value {
    let text = std::fs::read(path(home)).unwrap();
    serde_json::Deserializer::from_slice(&text)
        .into_iter()
        .next()
        .unwrap()
        .unwrap()
}

fn network(ip: &str) -> Reply {
    let (interface_name, hardware_address) = ("net1".to_owned(), String::new());
    let network = NetworkData {
        interface_name,
        ips: vec![ip.to_owned()],
        hardware_address,
    };
    Reply::Status(DeviceStatus {
        network: Some(network),
        ..DeviceStatus::default()
    })
}

#[tokio::test]
async fn file_and_mount_last_until_unprepare() {
    let (home, daemon, _gpu) = prepared().await;
    assert_eq!(first(&home)["metadata"]["uid"], "uid-one");
    let spec = std::fs::read_to_string(&daemon.cdi_files()[0]).unwrap();
    assert!(
        spec.contains(IN_CONTAINER) && spec.contains(path(&home).to_str().unwrap()),
        "{spec}"
    );
    assert!(daemon.unprepare(&pod("a")).await.iter().all(Result::is_ok));
    assert!(!path(&home).exists());
}

#[tokio::test]
async fn damaged_file_is_rendered_again() {
    let (home, daemon, gpu) = prepared().await;
    let whole = std::fs::read(path(&home)).unwrap();
    for damage in ["", "other"] {
        std::fs::write(path(&home), damage).unwrap();
        daemon.sweep().await;
        assert_eq!(std::fs::read(path(&home)).unwrap(), whole);
    }
    std::fs::remove_dir_all(home.metadata()).unwrap();
    assert_eq!(
        ends(&daemon.prepare(&pod("a"), &["one"]).await),
        ["prepared"]
    );
    assert_eq!(std::fs::read(path(&home)).unwrap(), whole);
    std::fs::remove_dir_all(home.metadata()).unwrap();
    daemon.stop().await;
    let daemon = start(&home, &gpu);
    daemon.sweep().await;
    assert_eq!(
        std::fs::read(path(&home)).unwrap(),
        whole,
        "without a call of the driver"
    );
    assert_eq!(gpu.counts(), (1, 0));
}

#[tokio::test]
async fn unwritable_file_refuses_the_claim() {
    let (home, gpu) = (Home::new(), FakeDriver::new(driver("gpu")));
    let daemon = start(&home, &gpu);
    std::fs::write(home.metadata(), "no directory").unwrap();
    assert_eq!(
        ends(&daemon.prepare(&pod("a"), &["one"]).await),
        ["metadata-not-written"]
    );
    assert_eq!((daemon.conditions(), gpu.counts()), (Vec::new(), (1, 1)));
    assert!(daemon.is_empty(), "it holds no device");
    std::fs::remove_file(home.metadata()).unwrap();
    assert_eq!(
        ends(&daemon.prepare(&pod("a"), &["one"]).await),
        ["prepared"]
    );
    assert_eq!((daemon.conditions(), gpu.counts()), (Vec::new(), (2, 1)));
}

#[tokio::test]
async fn escaping_annotation_is_refused() {
    let (home, gpu) = (Home::new(), FakeDriver::new(driver("gpu")));
    let daemon = start(&home, &gpu);
    let mut bad = claim("one", &["gpu/0"], &[&pod("a")]);
    bad.annotations.insert(
        "resource.kubernetes.io/pod-claim-name".to_owned(),
        "../../etc".to_owned(),
    );
    daemon.source.put(bad);
    daemon.source.put(claim("two", &["gpu/1"], &[&pod("a")]));
    assert_eq!(
        ends(&daemon.prepare(&pod("a"), &["one", "two"]).await),
        ["metadata-path", "prepared"]
    );
    assert!(!path(&home).exists());
}

#[tokio::test]
async fn orphaned_files_are_removed() {
    let (home, daemon, _gpu) = prepared().await;
    let orphans = [
        "gpu.example.com/uid-gone_0.json",
        "gone.example.com/a_b_c.json",
    ];
    let others = [
        "notes",
        "gpu.example.com/notes.json",
        "gpu.example.com/uid-gone_.json",
    ];
    std::fs::create_dir(home.metadata().join("gone.example.com")).unwrap();
    for name in orphans.iter().chain(&others) {
        std::fs::write(home.metadata().join(name), "{}").unwrap();
    }
    daemon.sweep().await;
    let is_there = |name: &str| home.metadata().join(name).exists();
    assert!(!orphans.iter().any(|name| is_there(name)));
    assert!(others.iter().all(|name| is_there(name)) && path(&home).exists());
}

#[tokio::test]
async fn unreadable_claims_files_are_kept() {
    let (home, daemon, gpu) = prepared().await;
    let before = std::fs::read(path(&home)).unwrap();
    daemon.stop().await;
    home.make_unreadable("uid-one");
    let daemon = start(&home, &gpu);
    daemon.sweep().await;
    assert_eq!(std::fs::read(path(&home)).unwrap(), before);
}

#[tokio::test]
async fn prepare_after_reboot_rewrites_same_file() {
    let (home, gpu) = (Home::new(), FakeDriver::new(driver("gpu")));
    let daemon = start(&home, &gpu);
    gpu.reply("uid-one", network("192.0.2.1/24"));
    daemon.prepare(&pod("a"), &["one"]).await;
    let inode = path(&home).metadata().unwrap().ino();
    daemon.stop().await;
    let daemon = start_in("boot-2", &home, &gpu);
    gpu.reply("uid-one", network("192.0.2.2/24"));
    daemon.prepare(&pod("a"), &["one"]).await;
    let first = first(&home);
    assert_eq!(
        first["requests"][0]["devices"][0]["networkData"]["ips"][0],
        "192.0.2.2/24"
    );
    assert_eq!(first["metadata"]["generation"], 2);
    assert_eq!(path(&home).metadata().unwrap().ino(), inode);
}

#[tokio::test]
async fn disabled_metadata_keeps_existing_files() {
    let (home, daemon, gpu) = prepared().await;
    daemon.stop().await;
    let daemon = home.start();
    daemon.serve(&gpu);
    std::fs::remove_dir_all(home.metadata()).unwrap();
    daemon.sweep().await;
    assert!(path(&home).exists(), "containers have it mounted");
    daemon.source.put(claim("two", &["gpu/1"], &[&pod("b")]));
    daemon.prepare(&pod("b"), &["two"]).await;
    let two = home.metadata().join("gpu.example.com/uid-two_1.json");
    assert!(!two.exists());
}

#[tokio::test]
async fn rebuilt_claim_has_same_metadata() {
    let (home, gpu) = (Home::new(), FakeDriver::new(driver("gpu")));
    let daemon = start(&home, &gpu);
    let mut made = claim("one", &["gpu/0"], &[&pod("a")]);
    made.annotations.insert(
        "resource.kubernetes.io/pod-claim-name".to_owned(),
        "gpu".to_owned(),
    );
    daemon.source.put(made);
    gpu.reply("uid-one", network("192.0.2.1/24"));
    assert_eq!(
        ends(&daemon.prepare(&pod("a"), &["one"]).await),
        ["prepared"]
    );
    let known = daemon.manager.records.claims();
    let directory = CdiDir::open(&daemon.cdi, &[], "test").unwrap();
    let rebuilt = cdi::rebuild(directory.list_ours().unwrap());
    let settings = MetadataSettings {
        is_enabled: true,
        directory: home.metadata(),
        access: FileAccess::default(),
        pools: PoolNames {
            node: ObjectName::new("node-1").unwrap(),
        },
    };
    let files = |record| device_metadata::render(record, &settings);
    assert_eq!(files(&rebuilt.claims[&known[0].id.uid]), files(&known[0]));
    let first = first(&home);
    assert_eq!(
        (
            &first["podClaimName"],
            first["requests"][0]["devices"][0]["networkData"].is_object()
        ),
        (&"gpu".into(), true)
    );
}
