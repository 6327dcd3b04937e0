use nodedock_sdk::testing::{FakeHost, Grant, Harness};
use nodedock_sdk::{
    AllocatedDevice, AttributeValue, Claim, Configuration, Context, Problem, ProblemKind,
};
use serde_json::{Value, json};

use crate::VfioPci;

const GPU: &str = "0000:3b:00.0";
const AUDIO: &str = "0000:3b:00.1";
const BRIDGE: &str = "0000:3a:00.0";
const NVME: &str = "0000:3c:00.0";

fn directory(address: &str) -> String {
    format!("devices/pci0000:3a/{address}")
}

fn bind(fake: &FakeHost, address: &str, driver: &str) {
    let link = format!("{}/driver", directory(address));
    fake.dir(&format!("bus/pci/drivers/{driver}"))
        .link(&link, &format!("../../../bus/pci/drivers/{driver}"));
}

fn add_function(fake: &FakeHost, address: &str, ids: (&str, &str), class: &str, group: u32) {
    let directory = directory(address);
    fake.link(
        &format!("bus/pci/devices/{address}"),
        &format!("../../../{directory}"),
    )
    .file(&format!("{directory}/vendor"), format!("{}\n", ids.0))
    .file(&format!("{directory}/device"), format!("{}\n", ids.1))
    .file(&format!("{directory}/class"), format!("{class}\n"))
    .file(&format!("{directory}/numa_node"), "1\n")
    .link(
        &format!("{directory}/iommu_group"),
        &format!("../../../kernel/iommu_groups/{group}"),
    )
    .link(
        &format!("kernel/iommu_groups/{group}/devices/{address}"),
        &format!("../../../../{directory}"),
    );
}

fn node() -> Harness<VfioPci> {
    let node = Harness::new();
    let fake = node.fake();
    add_function(fake, BRIDGE, ("0x8086", "0x2030"), "0x060400", 27);
    add_function(fake, GPU, ("0x10de", "0x1eb8"), "0x030200", 27);
    add_function(fake, AUDIO, ("0x10de", "0x10f8"), "0x040300", 27);
    add_function(fake, NVME, ("0x144d", "0xa808"), "0x010802", 28);
    bind(fake, BRIDGE, "pcieport");
    bind(fake, GPU, "nouveau");
    bind(fake, AUDIO, "snd_hda_intel");
    bind(fake, NVME, "nvme");
    fake.dir("bus/pci/drivers/vfio-pci")
        .character_node("/dev/vfio/vfio", 10, 196)
        .character_node("/dev/vfio/27", 240, 0);
    node.config(pools(&[json!({"vendor": "0x10DE"})]));
    node
}

fn pools(select: &[Value]) -> Value {
    json!({"pools": [{"name": "gpu", "select": select, "extendedResource": "example.com/a-gpu"}]})
}

fn claim(uid: &str) -> Claim {
    Claim::new("default", "demo", uid).device("gpu", "gpu", "0000-3b-00-0")
}

fn admin_claim(uid: &str) -> Claim {
    let mut device = AllocatedDevice::new("gpu", "gpu", "0000-3b-00-0");
    device.admin_access = true;
    Claim::new("default", "admin", uid).with_device(device)
}

fn drivers(node: &Harness<VfioPci>) -> [Option<String>; 2] {
    [GPU, AUDIO].map(|address| node.fake().kernel_driver(address))
}

fn own_drivers() -> [Option<String>; 2] {
    [Some("nouveau".to_owned()), Some("snd_hda_intel".to_owned())]
}

fn vfio_drivers() -> [Option<String>; 2] {
    [Some("vfio-pci".to_owned()), Some("vfio-pci".to_owned())]
}

fn code(result: Result<impl Sized, Problem>) -> (ProblemKind, String) {
    let problem = result.err().expect("a problem");
    (problem.kind, problem.code)
}

/// Name and reason of each device that is left out.
fn left_out(node: &Harness<VfioPci>) -> Vec<(String, String)> {
    let devices = node.left_out().unwrap().into_iter();
    devices.map(|device| (device.name, device.reason)).collect()
}

fn because(address: &str, reason: &str) -> (String, String) {
    (address.to_owned(), reason.to_owned())
}

#[test]
fn the_shipped_files_fit_the_driver() {
    let grant = Grant::parse(include_str!("../vfio-pci.grant.yaml")).unwrap();
    let config: Value = serde_saphyr::from_str(include_str!("../vfio-pci.config.yaml")).unwrap();
    VfioPci::validate_config(&config.to_string()).unwrap();
    let node = node();
    node.grant(&grant).config(config);
    assert!(
        node.discover()
            .unwrap()
            .device("gpu", "0000-3b-00-0")
            .is_some()
    );
    node.prepare(&claim("a")).unwrap();
    node.unprepare("a").unwrap();
}

#[test]
fn schema_refuses_unknown_keys() {
    let schema: Value = serde_json::from_str(&VfioPci::config_schema().unwrap()).unwrap();
    assert_eq!(schema["additionalProperties"], false);
    assert_eq!(
        schema["properties"]["pools"]["items"]["additionalProperties"],
        false
    );
}

#[test]
fn group_is_one_device_without_bridges() {
    let node = node();
    assert_eq!(left_out(&node), [], "no config selects the disk");
    let inventory = node.discover().unwrap();
    assert_eq!(inventory.pools[0].devices.len(), 1);
    let gpu = inventory.device("gpu", "0000-3b-00-0").unwrap();
    assert_eq!(gpu.identity, ["pci:0000:3b:00.0", "pci:0000:3b:00.1"]);
    assert_eq!(gpu.numa_nodes, [1]);
    for (name, value) in [
        (
            "resource.kubernetes.io/pciBusID",
            AttributeValue::Text(GPU.into()),
        ),
        (
            "resource.kubernetes.io/pcieRoot",
            AttributeValue::Text("pci0000:3a".into()),
        ),
        ("vendor", AttributeValue::Text("0x10de".into())),
        ("device", AttributeValue::Text("0x1eb8".into())),
        ("class", AttributeValue::Text("0x030200".into())),
        ("numaNode", AttributeValue::Int(1)),
        ("iommuGroup", AttributeValue::Int(27)),
        ("functions", AttributeValue::Int(2)),
    ] {
        assert_eq!(gpu.attribute_value(name), Some(&value), "{name}");
    }
}

#[test]
fn without_a_config_nothing_is_offered() {
    assert_eq!(node().config(json!({})).discover().unwrap().pools, []);
}

#[test]
fn group_with_unselected_function_is_excluded() {
    let node = node();
    let disk = "0000:3b:00.2";
    add_function(node.fake(), disk, ("0x144d", "0xa808"), "0x010802", 27);
    bind(node.fake(), disk, "nvme");
    assert_eq!(node.discover().unwrap().pools[0].devices, []);
    assert_eq!(
        left_out(&node),
        [because(
            GPU,
            &format!("IOMMU group 27: the config does not select its function {disk}")
        )]
    );
    assert_eq!(
        code(node.prepare(&claim("a"))),
        (ProblemKind::NotFound, "not-offered".into())
    );
    assert_eq!(drivers(&node), own_drivers());
}

#[test]
fn driverless_host_bridge_needs_no_bind() {
    let node = node();
    let bridge = "0000:3b:00.7";
    add_function(node.fake(), bridge, ("0x8086", "0x4660"), "0x060000", 27);
    let inventory = node.discover().unwrap();
    let gpu = inventory.device("gpu", "0000-3b-00-0").unwrap();
    assert_eq!(gpu.identity, ["pci:0000:3b:00.0", "pci:0000:3b:00.1"]);
    node.prepare(&claim("a")).unwrap();
    assert_eq!(drivers(&node), vfio_drivers());
    assert_eq!(node.fake().kernel_driver(bridge), None);
    node.unprepare("a").unwrap();
}

#[test]
fn group_with_bound_bridge_is_excluded() {
    let node = node();
    let bridge = "0000:3b:00.7";
    add_function(node.fake(), bridge, ("0x8086", "0x7a84"), "0x060100", 27);
    bind(node.fake(), bridge, "lpc_ich");
    assert_eq!(node.discover().unwrap().pools[0].devices, []);
    assert_eq!(
        left_out(&node),
        [because(
            GPU,
            &format!("IOMMU group 27: its bridge {bridge} has the kernel driver lpc_ich")
        )]
    );
    assert_eq!(
        code(node.prepare(&claim("a"))),
        (ProblemKind::Conflict, "bridge-in-use".into())
    );
    assert_eq!(drivers(&node), own_drivers());
}

/// A card with four functions in one group: display, audio, USB and the controller of its USB-C connector (UCSI).
#[test]
fn shipped_config_has_whole_gpu_cards() {
    let config: Value = serde_saphyr::from_str(include_str!("../vfio-pci.config.yaml")).unwrap();
    let node = node();
    node.config(config);
    for (function, device, class) in [
        ("0000:3b:00.2", "0x1ad6", "0x0c0330"),
        ("0000:3b:00.3", "0x1ad7", "0x0c8000"),
    ] {
        add_function(node.fake(), function, ("0x10de", device), class, 27);
    }
    let inventory = node.discover().unwrap();
    let gpu = inventory.device("gpu", "0000-3b-00-0").unwrap();
    assert_eq!(
        gpu.attribute_value("functions"),
        Some(&AttributeValue::Int(4))
    );
}

#[test]
fn group_in_two_pools_is_excluded() {
    let node = node();
    node.config(json!({"pools": [
        {"name": "gpu", "select": [{"class": "0x03"}]},
        {"name": "audio", "select": [{"class": "0x0403"}]},
    ]}));
    let inventory = node.discover().unwrap();
    assert!(inventory.pools.iter().all(|pool| pool.devices.is_empty()));
    assert_eq!(
        left_out(&node),
        [because(
            GPU,
            "IOMMU group 27: the config has its functions in several pools"
        )]
    );
}

#[test]
fn function_with_virtual_functions_is_excluded() {
    let node = node();
    node.fake()
        .file(&format!("{}/sriov_numvfs", directory(GPU)), "4\n");
    assert_eq!(node.discover().unwrap().pools[0].devices, []);
    assert_eq!(
        code(node.prepare(&claim("a"))),
        (ProblemKind::Conflict, "has-virtual-functions".into())
    );
}

#[test]
fn prepare_binds_group_and_gives_nodes() {
    let node = node();
    let prepared = node.prepare(&claim("a")).unwrap();
    let edits = &prepared.devices[0].edits;
    let paths: Vec<_> = edits
        .device_nodes
        .iter()
        .map(|node| node.path.as_str())
        .collect();
    assert_eq!(paths, ["/dev/vfio/vfio", "/dev/vfio/27"]);
    assert_eq!(
        edits.env,
        [(
            "PCIDEVICE_0000_3B_00_0".to_owned(),
            format!("{GPU},{AUDIO}")
        )]
    );
    assert_eq!(
        prepared.edits.env,
        [("PCI_RESOURCE_EXAMPLE_COM_A_GPU".to_owned(), GPU.to_owned())]
    );
    assert_eq!(drivers(&node), vfio_drivers());
    assert_eq!(
        node.fake().kernel_driver(BRIDGE).as_deref(),
        Some("pcieport")
    );
    assert_eq!(
        node.prepare(&claim("a")),
        Ok(prepared),
        "a repeated prepare returns the same"
    );
    node.unprepare("a").unwrap();
    assert_eq!(drivers(&node), own_drivers());
    node.unprepare("a").unwrap();
    assert_eq!(drivers(&node), own_drivers());
}

#[test]
fn two_claims_restore_their_own_groups() {
    let node = node();
    let second = "0000:5e:00.0";
    add_function(node.fake(), second, ("0x10de", "0x1eb8"), "0x030200", 31);
    bind(node.fake(), second, "nouveau");
    node.fake().character_node("/dev/vfio/31", 240, 1);
    node.prepare(&claim("a")).unwrap();
    node.prepare(&Claim::new("default", "demo", "b").device("gpu", "gpu", "0000-5e-00-0"))
        .unwrap();
    node.unprepare("a").unwrap();
    assert_eq!(drivers(&node), own_drivers());
    assert_eq!(
        node.fake().kernel_driver(second).as_deref(),
        Some("vfio-pci")
    );
    node.unprepare("b").unwrap();
    assert_eq!(
        node.fake().kernel_driver(second).as_deref(),
        Some("nouveau")
    );
}

#[test]
fn claim_devices_are_listed_by_resource() {
    let node = node();
    let second = "0000:5e:00.0";
    add_function(node.fake(), second, ("0x10de", "0x1eb8"), "0x030200", 31);
    node.fake().character_node("/dev/vfio/31", 240, 1);
    let prepared = node
        .prepare(&claim("a").device("gpu", "gpu", "0000-5e-00-0"))
        .unwrap();
    let list = format!("{GPU},{second}");
    assert_eq!(
        prepared.edits.env,
        [("PCI_RESOURCE_EXAMPLE_COM_A_GPU".to_owned(), list)]
    );
}

/// The functions are bound to `vfio-pci` while a claim uses them, and the config selects by the kernel drivers that they had.
#[test]
fn selection_by_driver_keeps_prepared_devices() {
    let node = node();
    node.config(pools(&[
        json!({"driver": "nouveau"}),
        json!({"driver": "snd_hda_intel"}),
    ]));
    let before = node.discover().unwrap();
    assert_eq!(before.pools[0].devices.len(), 1);
    let prepared = node.prepare(&claim("a")).unwrap();
    assert_eq!(node.discover().unwrap(), before);
    assert_eq!(node.prepare(&claim("a")), Ok(prepared));
}

#[test]
fn prepare_with_missing_node_is_retried() {
    let node = node();
    node.config(pools(&[
        json!({"driver": "nouveau"}),
        json!({"driver": "snd_hda_intel"}),
    ]));
    node.fake().remove("/dev/vfio/27");
    let problem = node.prepare(&claim("a")).unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Unavailable, "no-vfio-node")
    );
    assert_eq!(problem.retry_after_ms, Some(250));
    node.fake().character_node("/dev/vfio/27", 240, 0);
    node.prepare(&claim("a")).unwrap();
    assert_eq!(node.fake().progress("a"), None);
    node.unprepare("a").unwrap();
    assert_eq!(drivers(&node), own_drivers());
}

#[test]
fn unprepare_of_failed_prepare_restores_drivers() {
    let node = node();
    node.fake().remove("/dev/vfio/27");
    node.prepare(&claim("a")).unwrap_err();
    assert_eq!(drivers(&node), vfio_drivers());
    node.unprepare("a").unwrap();
    assert_eq!(drivers(&node), own_drivers());
}

#[test]
fn the_hosts_refusal_reaches_the_user() {
    let node = node();
    let refusal = Problem::denied("function-in-use", "0000:3b:00.1 is an interface that is up");
    node.fake().fail(GPU, refusal.clone());
    assert_eq!(node.prepare(&claim("a")), Err(refusal));
    assert_eq!(drivers(&node), own_drivers());
}

#[test]
fn variant_driver_is_bound_if_available() {
    let node = node();
    let config = json!({"pools": [
        {"name": "gpu", "select": [{"vendor": "0x10de"}], "bind": "nvgrace_gpu_vfio_pci"},
    ]});
    node.config(config);
    assert_eq!(
        code(node.prepare(&claim("a"))),
        (ProblemKind::NotFound, "no-such-kernel-driver".into())
    );
    node.fake().dir("bus/pci/drivers/nvgrace_gpu_vfio_pci");
    node.prepare(&claim("a")).unwrap();
    assert_eq!(
        node.fake().kernel_driver(GPU).as_deref(),
        Some("nvgrace_gpu_vfio_pci")
    );
}

#[test]
fn functions_without_iommu_are_left_out() {
    let node = node();
    node.fake()
        .remove(&format!("{}/iommu_group", directory(GPU)));
    node.fake()
        .remove(&format!("{}/iommu_group", directory(AUDIO)));
    assert_eq!(node.discover().unwrap().pools[0].devices, []);
    assert_eq!(
        left_out(&node),
        [GPU, AUDIO].map(|address| because(
            address,
            "it is in no IOMMU group: enable the IOMMU of the node"
        ))
    );
    assert_eq!(
        code(node.prepare(&claim("a"))),
        (ProblemKind::Unavailable, "no-iommu".into())
    );
}

#[test]
fn vanished_function_is_unprepared_with_success() {
    let node = node();
    node.prepare(&claim("a")).unwrap();
    for address in [GPU, AUDIO] {
        node.fake()
            .remove(&format!("bus/pci/devices/{address}"))
            .remove(&format!("kernel/iommu_groups/27/devices/{address}"))
            .remove(&directory(address));
    }
    assert_eq!(
        code(node.prepare(&claim("b"))),
        (ProblemKind::NotFound, "no-such-device".into())
    );
    node.unprepare("a").unwrap();
}

#[test]
fn claim_for_unoffered_device_is_refused() {
    let node = node();
    for (pool, device) in [
        ("other", "0000-3b-00-0"),
        ("gpu", "0000-3b-00-1"),
        ("gpu", "gpu"),
    ] {
        let claim = Claim::new("n", "c", "u").device("r", pool, device);
        assert_eq!(
            code(node.prepare(&claim)),
            (ProblemKind::NotFound, "no-such-device".into()),
            "{device}"
        );
    }
    let claim = Claim::new("n", "c", "u").device("r", "gpu", "0000-3c-00-0");
    assert_eq!(
        code(node.prepare(&claim)),
        (ProblemKind::NotFound, "not-offered".into())
    );
}

#[test]
fn admin_access_binds_and_restores_nothing() {
    let node = node();
    assert_eq!(
        code(node.prepare(&admin_claim("admin"))),
        (ProblemKind::Unavailable, "not-bound".into())
    );
    assert_eq!(drivers(&node), own_drivers());
    node.prepare(&claim("a")).unwrap();
    let prepared = node.prepare(&admin_claim("admin")).unwrap();
    assert_eq!(prepared.devices[0].edits.device_nodes.len(), 2);
    node.unprepare("admin").unwrap();
    assert_eq!(drivers(&node), vfio_drivers());
    node.unprepare("a").unwrap();
    assert_eq!(drivers(&node), own_drivers());
}

#[test]
fn old_boot_drivers_are_not_restored() {
    let node = node();
    node.prepare(&claim("a")).unwrap();
    bind(node.fake(), GPU, "nvidia");
    bind(node.fake(), AUDIO, "snd_hda_intel");
    node.context(Context {
        boot_id: "another".into(),
        ..Context::default()
    });
    node.unprepare("a").unwrap();
    assert_eq!(node.fake().kernel_driver(GPU).as_deref(), Some("nvidia"));
}

#[test]
fn invalid_configs_are_refused_with_reason() {
    let pool = |select: Value, bind: &str| json!({"pools": [{"name": "p", "select": [select], "bind": bind}]});
    let cases = [
        (json!({"pool": []}), "unknown field `pool`"),
        (json!({"pools": [{"name": "p"}]}), "missing field `select`"),
        (
            json!({"pools": [{"name": "p", "select": []}]}),
            "select is empty",
        ),
        (
            json!({"pools": [{"name": "P", "select": [{}]}]}),
            "DNS subdomain",
        ),
        (
            json!({"pools": [{"name": "p", "select": [{}]}, {"name": "p", "select": [{}]}]}),
            "twice",
        ),
        (
            pool(json!({"vendor": "10de"}), "vfio-pci"),
            "not 0x and 4 hex digits",
        ),
        (
            pool(json!({"class": "0x030"}), "vfio-pci"),
            "not 0x and 2 or 4 or 6 hex digits",
        ),
        (
            pool(json!({}), "uio_pci_generic"),
            "neither vfio-pci nor a variant",
        ),
    ];
    for (config, reason) in cases {
        let problem = VfioPci::validate_config(&config.to_string()).unwrap_err();
        assert_eq!(problem.kind, ProblemKind::Invalid);
        assert!(problem.message.contains(reason), "{problem} lacks {reason}");
    }
    assert_eq!(
        VfioPci::validate_parameters("{}").unwrap_err().code,
        "no-parameters"
    );
}
