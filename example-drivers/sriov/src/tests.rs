use std::sync::atomic::{AtomicBool, Ordering};

use nodedock_sdk::testing::{FakeHost, Grant, Harness};
use nodedock_sdk::{
    AllocatedDevice, AttributeValue, Claim, Configuration, Context, ParametersSource, Problem,
    ProblemKind,
};
use serde_json::{Value, json};

use crate::Sriov;

const PF: &str = "0000:3b:00.0";
const PF_DIRECTORY: &str = "devices/pci0000:3a/0000:3b:00.0";
const NUMVFS: &str = "bus/pci/devices/0000:3b:00.0/sriov_numvfs";
const AUTOPROBE: &str = "bus/pci/devices/0000:3b:00.0/sriov_drivers_autoprobe";

/// Virtual functions begin at 0000:3b:02.0, one after the other.
fn vf(index: u32) -> String {
    format!("0000:3b:02.{index}")
}

fn label(index: u32) -> String {
    format!("0000-3b-02-{index}")
}

/// Simulates the kernel after a write to `sriov_numvfs`, with at most `most` virtual functions.
fn set_count(fake: &FakeHost, count: u32, most: u32) {
    for index in 0..8 {
        let directory = format!("devices/pci0000:3a/{}", vf(index));
        fake.remove(&format!("{PF_DIRECTORY}/virtfn{index}"))
            .remove(&format!("bus/pci/devices/{}", vf(index)))
            .remove(&format!("kernel/iommu_groups/{}", 50 + index))
            .remove(&format!("class/net/ens1f0v{index}"))
            .remove(&directory);
    }
    let probes = fake.host().sysfs().read(AUTOPROBE).unwrap() == "1";
    for index in 0..count.min(most) {
        let (address, group) = (vf(index), 50 + index);
        let directory = format!("devices/pci0000:3a/{address}");
        fake.link(
            &format!("{PF_DIRECTORY}/virtfn{index}"),
            &format!("../{address}"),
        )
        .link(
            &format!("bus/pci/devices/{address}"),
            &format!("../../../{directory}"),
        )
        .file(&format!("{directory}/class"), "0x020000\n")
        .link(
            &format!("{directory}/iommu_group"),
            &format!("../../../kernel/iommu_groups/{group}"),
        )
        .link(
            &format!("kernel/iommu_groups/{group}/devices/{address}"),
            &format!("../../../../{directory}"),
        );
        if probes {
            probe(fake, index);
        }
    }
    fake.file(
        &format!("{PF_DIRECTORY}/sriov_numvfs"),
        format!("{}\n", count.min(most)),
    );
}

fn probe(fake: &FakeHost, index: u32) {
    let directory = format!("devices/pci0000:3a/{}", vf(index));
    let interface = format!("ens1f0v{index}");
    fake.link(
        &format!("{directory}/driver"),
        "../../../bus/pci/drivers/mlx5_core",
    )
    .file(
        &format!("{directory}/net/{interface}/address"),
        format!("02:00:00:00:00:0{index}\n"),
    )
    .dir(&format!("{directory}/infiniband/mlx5_{index}"))
    .dir(&format!("{directory}/infiniband_verbs/uverbs{index}"))
    .dir(&format!("{directory}/infiniband_mad/umad{index}"))
    .dir(&format!("{directory}/infiniband_mad/issm{index}"))
    .file(
        &format!("{directory}/accel/accel{index}/uevent"),
        format!("DEVNAME=accel/accel{index}\n"),
    )
    .link(
        &format!("class/net/{interface}"),
        &format!("../../{directory}/net/{interface}"),
    );
}

fn busy() -> Problem {
    Problem::unavailable("io-error", "EBUSY")
}

fn refuse_once(node: &Harness<Sriov>) {
    let has_refused = AtomicBool::new(false);
    let refuse = move || {
        if has_refused.swap(true, Ordering::Relaxed) {
            Ok(())
        } else {
            Err(busy())
        }
    };
    node.fake().on_write(NUMVFS, move |_, _| refuse());
}

/// A node whose kernel creates at most `most` virtual functions.
fn node_with(most: u32) -> Harness<Sriov> {
    let node = Harness::new();
    let fake = node.fake();
    fake.link(
        &format!("bus/pci/devices/{PF}"),
        &format!("../../../{PF_DIRECTORY}"),
    )
    .dir("bus/pci/drivers/mlx5_core")
    .dir("bus/pci/drivers/vfio-pci")
    .link(
        &format!("{PF_DIRECTORY}/driver"),
        "../../../bus/pci/drivers/mlx5_core",
    );
    for (name, value) in [
        ("vendor", "0x15b3"),
        ("device", "0x1017"),
        ("numa_node", "1"),
        ("sriov_totalvfs", "8"),
        ("sriov_numvfs", "0"),
        ("sriov_offset", "16"),
        ("sriov_stride", "1"),
        ("sriov_vf_device", "1018"),
        ("sriov_drivers_autoprobe", "1"),
        ("net/ens1f0/speed", "25000"),
    ] {
        fake.file(&format!("{PF_DIRECTORY}/{name}"), format!("{value}\n"));
    }
    fake.character_node("/dev/vfio/vfio", 10, 196)
        .character_node("/dev/infiniband/rdma_cm", 10, 58);
    for index in 0..8 {
        fake.character_node(&format!("/dev/vfio/{}", 50 + index), 240, index)
            .character_node(&format!("/dev/infiniband/uverbs{index}"), 231, index)
            .character_node(&format!("/dev/infiniband/umad{index}"), 231, 64 + index)
            .character_node(&format!("/dev/accel/accel{index}"), 261, index);
    }
    fake.on_write("bus/pci/devices/*/sriov_numvfs", move |fake, write| {
        if write.value == write.before {
            return Ok(());
        }
        if write.before != "0" && write.value != "0" {
            return Err(busy());
        }
        set_count(fake, write.value.parse().unwrap(), most);
        Ok(())
    });
    node.config(config("netdevice", 4));
    node
}

fn node() -> Harness<Sriov> {
    node_with(8)
}

fn config(mode: &str, vfs: u32) -> Value {
    json!({"pools": [{
        "name": "net", "select": [{"vendor": "0x15B3", "interface": "ens1f*"}], "vfs": vfs, "mode": mode,
        "extendedResource": "example.com/a-vf",
    }]})
}

fn claim(uid: &str, index: u32) -> Claim {
    Claim::new("default", "net", uid).device("r", "net", label(index))
}

fn with_parameters(claim: Claim, parameters: &Value) -> Claim {
    claim.with_parameters(ParametersSource::Claim, [], parameters.to_string())
}

fn count(node: &Harness<Sriov>) -> String {
    node.fake().host().sysfs().read(NUMVFS).unwrap()
}

fn autoprobe(node: &Harness<Sriov>) -> String {
    node.fake().host().sysfs().read(AUTOPROBE).unwrap()
}

fn writes(node: &Harness<Sriov>) -> Vec<String> {
    let short = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
    node.fake()
        .writes()
        .iter()
        .map(|write| format!("{}={}", short(&write.path), write.value))
        .collect()
}

fn code(result: Result<impl Sized, Problem>) -> (ProblemKind, String) {
    let problem = result.err().expect("a problem");
    (problem.kind, problem.code)
}

fn names(node: &Harness<Sriov>) -> Vec<String> {
    node.discover().unwrap().pools[0]
        .devices
        .iter()
        .map(|device| device.name.clone())
        .collect()
}

fn paths(node: &Harness<Sriov>, claim: &Claim) -> Vec<String> {
    let edits = node.prepare(claim).unwrap().devices.remove(0).edits;
    edits
        .device_nodes
        .into_iter()
        .map(|node| node.path)
        .collect()
}

#[test]
fn the_shipped_files_fit_the_driver() {
    let grant = Grant::parse(include_str!("../sriov.grant.yaml")).unwrap();
    let config: Value = serde_saphyr::from_str(include_str!("../sriov.config.yaml")).unwrap();
    Sriov::validate_config(&config.to_string()).unwrap();
    let node = node();
    node.grant(&grant).config(config);
    assert!(node.discover().unwrap().device("net", &label(0)).is_some());
    node.prepare(&claim("a", 0)).unwrap();
    node.unprepare("a").unwrap();
}

#[test]
fn schemas_refuse_unknown_keys() {
    for schema in [Sriov::config_schema(), Sriov::parameters_schema()] {
        let schema: Value = serde_json::from_str(&schema.unwrap()).unwrap();
        assert_eq!(schema["additionalProperties"], false);
    }
}

#[test]
fn virtual_functions_are_offered_before_creation() {
    let node = node();
    let before = names(&node);
    assert_eq!(before, [0, 1, 2, 3].map(label));
    let inventory = node.discover().unwrap();
    let device = inventory.device("net", &label(2)).unwrap();
    let text = |text: &str| AttributeValue::Text(text.into());
    for (name, value) in [
        ("resource.kubernetes.io/pciBusID", text(&vf(2))),
        ("resource.kubernetes.io/pcieRoot", text("pci0000:3a")),
        ("vendor", text("0x15b3")),
        ("device", text("0x1018")),
        ("mode", text("netdevice")),
        ("vfIndex", AttributeValue::Int(2)),
        ("pfAddress", text(PF)),
        ("pfInterface", text("ens1f0")),
        ("pfSpeedMbps", AttributeValue::Int(25000)),
        ("numaNode", AttributeValue::Int(1)),
    ] {
        assert_eq!(device.attribute_value(name), Some(&value), "{name}");
    }
    assert_eq!(
        (device.identity.as_slice(), device.numa_nodes.as_slice()),
        (&[format!("pci:{}", vf(2))][..], &[1][..])
    );
    node.prepare(&claim("a", 0)).unwrap();
    assert_eq!(names(&node), before);
    let inventory = node.discover().unwrap();
    let device = inventory.device("net", &label(2)).unwrap();
    assert_eq!(device.attribute_value("driver"), Some(&text("mlx5_core")));
    assert_eq!(device.attribute_value("rdmaDevice"), Some(&text("mlx5_2")));
}

#[test]
fn virtual_functions_exist_only_while_claimed() {
    let node = node();
    node.prepare(&claim("a", 0)).unwrap();
    assert_eq!(count(&node), "4");
    node.prepare(&claim("b", 3)).unwrap();
    node.unprepare("a").unwrap();
    assert_eq!(count(&node), "4", "claim b uses one of them");
    node.unprepare("b").unwrap();
    assert_eq!(count(&node), "0");
    node.unprepare("b").unwrap();
    // The second 4 changes nothing, and is how the host knows that claim b needs the value.
    assert_eq!(
        writes(&node),
        ["sriov_numvfs=4", "sriov_numvfs=4", "sriov_numvfs=0"]
    );
}

#[test]
fn batched_claims_share_virtual_functions() {
    let calls: [&[&[&str]]; 3] = [&[&["a", "b"]], &[&["a"], &["b"]], &[&["b"], &["a"]]];
    for calls in calls {
        let node = node();
        let outcomes = node.prepare_batch(&[claim("a", 0), claim("b", 1)]);
        assert!(outcomes.iter().all(|(_, outcome)| outcome.is_ok()));
        for call in calls {
            assert_eq!(count(&node), "4");
            assert!(
                node.unprepare_batch(call)
                    .iter()
                    .all(|(_, outcome)| outcome.is_ok())
            );
        }
        assert_eq!(count(&node), "0");
    }
}

#[test]
fn unfinished_prepare_keeps_the_virtual_functions() {
    let node = node();
    node.prepare(&claim("a", 0)).unwrap();
    // As a daemon that stopped between the driver's answer and the record of it.
    node.fake()
        .fail("ens1f0v1", Problem::unavailable("io-error", "not now"));
    node.prepare(&claim("b", 1)).unwrap_err();
    node.fake().heal("ens1f0v1");
    node.unprepare("a").unwrap();
    assert_eq!(count(&node), "4", "claim b is being prepared");
    node.prepare(&claim("b", 1)).unwrap();
    node.unprepare("b").unwrap();
    assert_eq!(count(&node), "0");
}

#[test]
fn container_gets_interface_claim_gets_status() {
    let node = node();
    let prepared = node.prepare(&claim("a", 1)).unwrap();
    let device = &prepared.devices[0];
    assert_eq!(device.edits.net_devices[0].host_interface, "ens1f0v1");
    assert_eq!(device.edits.net_devices[0].container_interface, "net");
    assert_eq!(
        device.edits.env,
        [("PCIDEVICE_0000_3B_02_1".to_owned(), vf(1))]
    );
    assert_eq!(
        prepared.edits.env,
        [("PCIDEVICE_EXAMPLE_COM_A_VF".to_owned(), vf(1))]
    );
    let network = device.status.as_ref().unwrap().network.as_ref().unwrap();
    assert_eq!(
        (
            network.interface_name.as_str(),
            network.hardware_address.as_str()
        ),
        ("net", "02:00:00:00:00:01")
    );
    // The runtime moves the interface into the container, where the node does not see it.
    node.fake()
        .remove(&format!("devices/pci0000:3a/{}/net", vf(1)))
        .remove("class/net/ens1f0v1");
    assert_eq!(
        node.prepare(&claim("a", 1)),
        Ok(prepared),
        "a repeated prepare returns the same"
    );
}

#[test]
fn interface_names_fit_in_15_bytes() {
    let node = node();
    let name = |claim: &Claim, device: usize| {
        node.prepare(claim).unwrap().devices[device]
            .edits
            .net_devices[0]
            .container_interface
            .clone()
    };
    assert_eq!(
        name(
            &with_parameters(claim("a", 0), &json!({"interfaceName": "fast0"})),
            0
        ),
        "fast0"
    );
    let mut two = claim("b", 1).device("r", "net", label(2));
    two.id.name = "a-long.name-of-a-claim".into();
    let (first, second) = (name(&two, 0), name(&two, 1));
    assert!(
        first != second && first.len() <= 15 && first.starts_with("a-long-"),
        "{first} {second}"
    );
    let twice = with_parameters(two, &json!({"interfaceName": "fast0"}));
    assert_eq!(
        code(node.prepare(&twice)),
        (ProblemKind::Invalid, "bad-parameters".into())
    );
}

#[test]
fn missing_interface_is_retried_soon() {
    let node = node();
    node.fake()
        .file(&format!("{PF_DIRECTORY}/sriov_drivers_autoprobe"), "0\n");
    node.fake()
        .on_write("bus/pci/devices/*/sriov_drivers_autoprobe", |fake, _| {
            fake.file(&format!("{PF_DIRECTORY}/sriov_drivers_autoprobe"), "0\n");
            Ok(())
        });
    let problem = node.prepare(&claim("a", 0)).unwrap_err();
    assert_eq!(
        (problem.code.as_str(), problem.retry_after_ms),
        ("no-interface", Some(250))
    );
    probe(node.fake(), 0);
    node.prepare(&claim("a", 0)).unwrap();
}

#[test]
fn rdma_adds_nodes_of_the_device() {
    let node = node();
    node.config(config("rdma", 4));
    let nodes = [
        "/dev/infiniband/uverbs1",
        "/dev/infiniband/umad1",
        "/dev/infiniband/rdma_cm",
    ];
    assert_eq!(paths(&node, &claim("a", 1)), nodes);
    node.fake()
        .remove("/dev/infiniband/rdma_cm")
        .remove("/dev/infiniband/uverbs2");
    assert_eq!(paths(&node, &claim("a", 1)), nodes[..2]);
    assert_eq!(
        code(node.prepare(&claim("b", 2))),
        (ProblemKind::Unavailable, "no-device-node".into())
    );
}

#[test]
fn accelerators_give_nodes_listed_by_kernel() {
    let node = node();
    node.config(config("nodes", 4));
    assert_eq!(paths(&node, &claim("a", 1)), ["/dev/accel/accel1"]);
}

#[test]
fn passthrough_binds_and_restores_everything() {
    let node = node();
    node.config(config("vfio", 4));
    assert_eq!(
        paths(&node, &claim("a", 1)),
        ["/dev/vfio/vfio", "/dev/vfio/51"]
    );
    assert_eq!(
        node.fake().kernel_driver(&vf(1)).as_deref(),
        Some("vfio-pci")
    );
    assert_eq!(
        (node.fake().kernel_driver(&vf(0)), autoprobe(&node).as_str()),
        (None, "0")
    );
    node.prepare(&claim("b", 2)).unwrap();
    node.unprepare("a").unwrap();
    assert_eq!(node.fake().kernel_driver(&vf(1)), None);
    node.unprepare("b").unwrap();
    assert_eq!(
        (count(&node).as_str(), autoprobe(&node).as_str()),
        ("0", "1")
    );
}

#[test]
fn claim_chooses_a_passthrough_driver_variant() {
    let node = node();
    node.config(config("vfio", 4))
        .fake()
        .dir("bus/pci/drivers/mlx5_vfio_pci");
    let chosen = json!({"vfDriver": "mlx5_vfio_pci"});
    node.prepare(&with_parameters(claim("a", 0), &chosen))
        .unwrap();
    assert_eq!(
        node.fake().kernel_driver(&vf(0)).as_deref(),
        Some("mlx5_vfio_pci")
    );
    node.unprepare("a").unwrap();
    node.config(config("netdevice", 4));
    let problem = code(node.prepare(&with_parameters(claim("a", 0), &chosen)));
    assert_eq!(problem, (ProblemKind::Invalid, "bad-parameters".into()));
}

#[test]
fn without_an_iommu_passthrough_is_unavailable() {
    let node = node();
    node.config(config("vfio", 1));
    node.fake().fail(
        &vf(0),
        Problem::unavailable("no-iommu", "0000:3b:02.0 is in no IOMMU group"),
    );
    assert_eq!(
        code(node.prepare(&claim("a", 0))),
        (ProblemKind::Unavailable, "no-iommu".into())
    );
    node.unprepare("a").unwrap_err();
    node.fake().heal(&vf(0));
    node.unprepare("a").unwrap();
    assert_eq!(count(&node), "0");
}

#[test]
fn failed_function_creation_leaves_no_writes() {
    let node = node();
    node.fake().on_write(NUMVFS, |_, _| Err(busy()));
    assert_eq!(node.prepare(&claim("a", 0)), Err(busy()));
    assert!(node.fake().progress("a").is_some());
    node.unprepare("a").unwrap();
    assert_eq!(node.fake().writes(), []);
}

#[test]
fn too_few_virtual_functions_are_removed() {
    let node = node_with(2);
    let problem = node.prepare(&claim("a", 0)).unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Unavailable, "too-few-vfs")
    );
    assert!(problem.message.contains("2 of 4"), "{problem}");
    assert_eq!(count(&node), "0");
}

/// The daemon crashed after the kernel had created half of them.
#[test]
fn partial_function_creation_is_recovered() {
    for is_prepared_again in [true, false] {
        let node = node();
        refuse_once(&node);
        node.prepare(&claim("a", 0)).unwrap_err();
        set_count(node.fake(), 2, 8);
        if is_prepared_again {
            node.prepare(&claim("a", 3)).unwrap();
            assert_eq!(count(&node), "4");
        }
        node.unprepare("a").unwrap();
        assert_eq!(count(&node), "0");
    }
}

#[test]
fn operator_created_functions_stay_unchanged() {
    let node = node();
    set_count(node.fake(), 2, 8);
    assert_eq!(names(&node), [0, 1].map(label));
    assert_eq!(node.fake().log_lines().len(), 1, "fewer than configured");
    node.prepare(&claim("a", 1)).unwrap();
    let problem = node.prepare(&claim("b", 3)).unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Conflict, "other-vf-count")
    );
    assert!(
        problem.message.contains("has 2") && problem.message.contains("asks for 4"),
        "{problem}"
    );
    node.unprepare("a").unwrap();
    assert_eq!(
        (count(&node).as_str(), node.fake().writes()),
        ("2", Vec::new())
    );
}

#[test]
fn changed_count_waits_for_claims() {
    let node = node();
    node.prepare(&claim("a", 0)).unwrap();
    node.config(config("netdevice", 6));
    assert_eq!(names(&node).len(), 4);
    node.prepare(&claim("a", 0)).unwrap();
    assert_eq!(
        code(node.prepare(&claim("b", 5))),
        (ProblemKind::Conflict, "other-vf-count".into())
    );
    node.unprepare("a").unwrap();
    node.unprepare("b").unwrap();
    assert_eq!((count(&node).as_str(), names(&node).len()), ("0", 6));
    node.prepare(&claim("b", 5)).unwrap();
}

#[test]
fn busy_function_keeps_the_claim() {
    let node = node();
    node.prepare(&claim("a", 0)).unwrap();
    refuse_once(&node);
    assert_eq!(node.unprepare("a"), Err(busy()));
    node.unprepare("a").unwrap();
}

#[test]
fn unresponsive_physical_function_keeps_the_claim() {
    let node = node();
    node.prepare(&claim("a", 0)).unwrap();
    let stuck = Problem::unavailable("sysfs-stuck", "the kernel does not answer");
    node.fake().fail(NUMVFS, stuck.clone());
    assert_eq!(node.unprepare("a"), Err(stuck));
    node.fake().heal(NUMVFS);
    node.unprepare("a").unwrap();
    assert_eq!(count(&node), "0");
}

#[test]
fn another_programs_count_stays_at_unprepare() {
    let node = node();
    node.prepare(&claim("a", 0)).unwrap();
    set_count(node.fake(), 7, 8);
    node.unprepare("a").unwrap();
    assert_eq!(count(&node), "7");
}

#[test]
fn reboot_discards_state_of_old_boot() {
    let node = node();
    node.prepare(&claim("a", 0)).unwrap();
    set_count(node.fake(), 0, 8);
    node.context(Context {
        boot_id: "another".into(),
        ..Context::default()
    });
    node.prepare(&claim("b", 1)).unwrap();
    node.unprepare("a").unwrap();
    assert_eq!(count(&node), "4", "claim b created them in this boot");
    node.unprepare("b").unwrap();
    assert_eq!(count(&node), "0");
}

#[test]
fn vanished_physical_function_unprepares_with_success() {
    let node = node();
    node.prepare(&claim("a", 0)).unwrap();
    set_count(node.fake(), 0, 8);
    node.fake()
        .remove(&format!("bus/pci/devices/{PF}"))
        .remove(PF_DIRECTORY);
    assert_eq!(
        code(node.prepare(&claim("b", 0))),
        (ProblemKind::NotFound, "no-such-device".into())
    );
    node.unprepare("a").unwrap();
    assert_eq!(node.discover().unwrap().pools[0].devices, []);
}

#[test]
fn functions_at_other_addresses_are_refused() {
    let node = node();
    node.fake()
        .file(&format!("{PF_DIRECTORY}/sriov_offset"), "24\n");
    let elsewhere = Claim::new("n", "c", "u").device("r", "net", "0000-3b-03-0");
    assert_eq!(
        code(node.prepare(&elsewhere)),
        (ProblemKind::Unavailable, "other-vf-address".into())
    );
}

#[test]
fn functions_without_offset_need_to_exist() {
    let node = node();
    node.fake()
        .file(&format!("{PF_DIRECTORY}/sriov_offset"), "0\n");
    assert!(names(&node).is_empty());
    set_count(node.fake(), 4, 8);
    assert_eq!(names(&node), [0, 1, 2, 3].map(label));
}

#[test]
fn physical_function_for_passthrough_offers_nothing() {
    let node = node();
    node.fake().link(
        &format!("{PF_DIRECTORY}/driver"),
        "../../../bus/pci/drivers/vfio-pci",
    );
    assert!(names(&node).is_empty());
    node.fake().remove(&format!("{PF_DIRECTORY}/driver"));
    assert!(names(&node).is_empty());
}

#[test]
fn admin_access_creates_and_binds_nothing() {
    let node = node();
    let mut device = AllocatedDevice::new("r", "net", label(0));
    device.admin_access = true;
    let admin = Claim::new("default", "admin", "admin").with_device(device);
    assert_eq!(
        code(node.prepare(&admin)),
        (ProblemKind::Denied, "no-admin-access".into())
    );
    node.config(config("vfio", 4));
    assert_eq!(
        code(node.prepare(&admin)),
        (ProblemKind::Unavailable, "no-such-function".into())
    );
    node.prepare(&claim("a", 1)).unwrap();
    assert_eq!(
        code(node.prepare(&admin)),
        (ProblemKind::Unavailable, "not-bound".into())
    );
    node.prepare(&claim("b", 0)).unwrap();
    node.prepare(&admin).unwrap();
    node.unprepare("admin").unwrap();
    assert_eq!(
        node.fake().kernel_driver(&vf(0)).as_deref(),
        Some("vfio-pci")
    );
}

#[test]
fn invalid_parameters_are_refused_with_reason() {
    for (parameters, code) in [
        (json!({"mtu": 9000}), "mtu-not-supported"),
        (json!({"interfaceName": "a name"}), "bad-parameters"),
        (
            json!({"interfaceName": "longer-than-15-by"}),
            "bad-parameters",
        ),
        (json!({"vfDriver": "uio_pci_generic"}), "bad-parameters"),
        (json!({"vlan": 5}), "bad-parameters"),
    ] {
        assert_eq!(
            Sriov::validate_parameters(&parameters.to_string())
                .unwrap_err()
                .code,
            code
        );
        let claim = with_parameters(claim("a", 0), &parameters);
        assert_eq!(
            node().prepare(&claim).unwrap_err().code,
            code,
            "{parameters}"
        );
    }
    Sriov::validate_parameters(r#"{"interfaceName": "fast0"}"#).unwrap();
}

#[test]
fn invalid_configs_are_refused_with_reason() {
    let pool = |changes: Value| {
        let mut pool = json!({"name": "p", "select": [{}], "vfs": 1, "mode": "netdevice"});
        pool.as_object_mut()
            .unwrap()
            .extend(changes.as_object().unwrap().clone());
        json!({"pools": [pool]})
    };
    let cases = [
        (json!({"pool": []}), "unknown field `pool`"),
        (
            json!({"pools": [{"name": "p", "select": [], "mode": "vfio"}]}),
            "missing field `vfs`",
        ),
        (pool(json!({"select": []})), "select is empty"),
        (pool(json!({"name": "P"})), "DNS subdomain"),
        (pool(json!({"vfs": 0})), "vfs is 0"),
        (
            pool(json!({"mode": "macvlan"})),
            "unknown variant `macvlan`",
        ),
        (pool(json!({"bind": "vfio-pci"})), "mode vfio only"),
        (
            pool(json!({"mode": "vfio", "bind": "uio"})),
            "neither vfio-pci nor a variant",
        ),
        (
            pool(json!({"select": [{"vendor": "15b3"}]})),
            "not 0x and 4 hex digits",
        ),
    ];
    for (config, reason) in cases {
        let problem = Sriov::validate_config(&config.to_string()).unwrap_err();
        assert_eq!(problem.kind, ProblemKind::Invalid);
        assert!(problem.message.contains(reason), "{problem} lacks {reason}");
    }
}
