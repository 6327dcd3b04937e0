use nodedock_sdk::testing::{FakeHost, Grant, Harness};
use nodedock_sdk::{AttributeValue, Claim, Configuration, ContainerEdits, Problem, ProblemKind};
use serde_json::{Value, json};

use crate::Pci;

const GPU: &str = "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0";
const NIC: &str = "devices/pci0000:00/0000:00:02.0";

fn add_function(fake: &FakeHost, directory: &str, vendor: &str, class: &str, driver: &str) {
    let address = directory.rsplit('/').next().unwrap();
    let up = "../".repeat(directory.split('/').count());
    fake.link(
        &format!("bus/pci/devices/{address}"),
        &format!("../../../{directory}"),
    )
    .file(&format!("{directory}/vendor"), format!("{vendor}\n"))
    .file(&format!("{directory}/device"), "0x1234\n")
    .file(&format!("{directory}/class"), format!("{class}\n"))
    .dir(&format!("bus/pci/drivers/{driver}"))
    .link(
        &format!("{directory}/driver"),
        &format!("{up}bus/pci/drivers/{driver}"),
    );
}

fn add_node(fake: &FakeHost, directory: &str, name: &str, minor: u32) {
    fake.file(
        &format!("{directory}/uevent"),
        format!("MAJOR=226\nMINOR={minor}\nDEVNAME={name}\n"),
    )
    .character_node(&format!("/dev/{name}"), 226, minor);
}

fn node() -> Harness<Pci> {
    let node = Harness::new();
    let fake = node.fake();
    add_function(fake, GPU, "0x10de", "0x030200", "gpu");
    add_function(fake, NIC, "0x8086", "0x020000", "nic");
    fake.file(&format!("{GPU}/subsystem_vendor"), "0x10de\n")
        .file(&format!("{GPU}/subsystem_device"), "0x0001\n")
        .file(&format!("{GPU}/current_link_speed"), "16.0 GT/s PCIe\n")
        .file(&format!("{GPU}/current_link_width"), "16\n")
        .dir("kernel/iommu_groups/27")
        .link(
            &format!("{GPU}/iommu_group"),
            "../../../../kernel/iommu_groups/27",
        );
    add_node(fake, &format!("{GPU}/drm/card0"), "dri/card0", 0);
    add_node(
        fake,
        &format!("{GPU}/drm/renderD128"),
        "dri/renderD128",
        128,
    );
    node
}

fn gpu_claim() -> Claim {
    Claim::new("default", "demo", "uid").device("gpu", "pci", "0000-3b-00-0")
}

fn edits_of(node: &Harness<Pci>, claim: &Claim) -> Result<ContainerEdits, Problem> {
    node.prepare(claim)
        .map(|mut prepared| prepared.devices.remove(0).edits)
}

fn paths(edits: &ContainerEdits) -> Vec<&str> {
    edits
        .device_nodes
        .iter()
        .map(|node| node.path.as_str())
        .collect()
}

#[test]
fn the_shipped_files_fit_the_driver() {
    let grant = Grant::parse(include_str!("../pci.grant.yaml")).unwrap();
    let config: Value = serde_saphyr::from_str(include_str!("../pci.config.yaml")).unwrap();
    Pci::validate_config(&config.to_string()).unwrap();
    let node = node();
    let inventory = node.grant(&grant).config(config).discover().unwrap();
    assert!(inventory.device("display", "0000-3b-00-0").is_some());
    assert!(inventory.device("network", "0000-00-02-0").is_some());
}

#[test]
fn schema_refuses_unknown_keys() {
    let schema: Value = serde_json::from_str(&Pci::config_schema().unwrap()).unwrap();
    assert_eq!(schema["additionalProperties"], false);
    assert_eq!(
        schema["properties"]["pools"]["items"]["additionalProperties"],
        false
    );
}

#[test]
fn default_config_has_one_pool() {
    let inventory = node().discover().unwrap();
    assert_eq!(inventory.pools.len(), 1);
    assert_eq!(
        (
            inventory.pools[0].name.as_str(),
            inventory.pools[0].devices.len()
        ),
        ("pci", 2)
    );
}

#[test]
fn function_has_its_attributes_and_location() {
    let inventory = node().discover().unwrap();
    let gpu = inventory.device("pci", "0000-3b-00-0").unwrap();
    let text = |text: &str| AttributeValue::Text(text.into());
    for (name, value) in [
        ("vendor", text("0x10de")),
        ("device", text("0x1234")),
        ("class", text("0x030200")),
        ("subsystemVendor", text("0x10de")),
        ("subsystemDevice", text("0x0001")),
        ("driver", text("gpu")),
        ("iommuGroup", AttributeValue::Int(27)),
        ("currentLinkSpeed", text("16.0 GT/s PCIe")),
        ("currentLinkWidth", AttributeValue::Int(16)),
    ] {
        assert_eq!(gpu.attribute_value(name), Some(&value), "{name}");
    }
    assert_eq!(gpu.identity, ["pci:0000:3b:00.0"]);
}

#[test]
fn unknown_kernel_values_are_omitted() {
    let node = node();
    node.fake()
        .file(&format!("{NIC}/current_link_speed"), "Unknown\n")
        .file(&format!("{NIC}/current_link_width"), "255\n")
        .remove(&format!("{NIC}/driver"));
    let inventory = node.discover().unwrap();
    let nic = inventory.device("pci", "0000-00-02-0").unwrap();
    for name in [
        "iommuGroup",
        "driver",
        "currentLinkSpeed",
        "currentLinkWidth",
        "subsystemVendor",
    ] {
        assert_eq!(nic.attribute_value(name), None, "{name}");
    }
}

#[test]
fn first_matching_pool_gets_the_function() {
    let node = node();
    node.config(json!({"pools": [
        {"name": "gpu", "select": [{"vendor": "0x10DE", "class": "0x03"}], "extendedResource": "example.com/gpu"},
        {"name": "bound", "select": [{"driver": "nic", "device": "0x9999"}]},
        {"name": "rest", "select": [{"class": "0x0302"}, {"vendor": "0x8086"}]},
    ]}));
    let inventory = node.discover().unwrap();
    assert!(inventory.device("gpu", "0000-3b-00-0").is_some());
    assert_eq!(
        inventory.pools[0].extended_resource.as_deref(),
        Some("example.com/gpu")
    );
    assert_eq!(inventory.pools[1].devices, []);
    assert_eq!(inventory.pools[2].devices.len(), 1);
}

#[test]
fn container_gets_function_address_and_nodes() {
    let node = node();
    let edits = edits_of(&node, &gpu_claim()).unwrap();
    assert_eq!(
        edits.env,
        [(
            "PCIDEVICE_0000_3B_00_0".to_owned(),
            "0000:3b:00.0".to_owned()
        )]
    );
    assert_eq!(paths(&edits), ["/dev/dri/card0", "/dev/dri/renderD128"]);
    assert_eq!(
        edits_of(&node, &gpu_claim()),
        Ok(edits),
        "a repeated call comes to the same end"
    );
    node.unprepare("uid").unwrap();
}

#[test]
fn function_without_nodes_gives_address_only() {
    let nic = Claim::new("n", "c", "u").device("r", "pci", "0000-00-02-0");
    let edits = edits_of(&node(), &nic).unwrap();
    assert_eq!((edits.env.len(), edits.device_nodes.len()), (1, 0));
}

#[test]
fn vfio_function_gives_its_group() {
    let node = node();
    node.fake()
        .remove(&format!("{GPU}/drm"))
        .dir("bus/pci/drivers/vfio-pci")
        .link(
            &format!("{GPU}/driver"),
            "../../../../bus/pci/drivers/vfio-pci",
        )
        .character_node("/dev/vfio/vfio", 10, 196)
        .character_node("/dev/vfio/27", 240, 0);
    assert_eq!(
        paths(&edits_of(&node, &gpu_claim()).unwrap()),
        ["/dev/vfio/vfio", "/dev/vfio/27"]
    );
    node.fake().remove(&format!("{GPU}/iommu_group"));
    let problem = edits_of(&node, &gpu_claim()).unwrap_err();
    assert_eq!(
        (problem.kind, problem.code.as_str()),
        (ProblemKind::Unavailable, "no-iommu-group")
    );
}

#[test]
fn missing_or_unoffered_function_is_refused() {
    let node = node();
    let device = |pool, name| Claim::new("n", "c", "u").device("r", pool, name);
    for claim in [
        device("other", "0000-3b-00-0"),
        device("pci", "0000-ff-00-0"),
        device("pci", "gpu"),
    ] {
        let problem = node.prepare(&claim).unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::NotFound, "no-such-device")
        );
    }
    node.fake()
        .remove("bus/pci/devices/0000:3b:00.0")
        .remove(GPU);
    assert_eq!(
        node.prepare(&gpu_claim()).unwrap_err().code,
        "no-such-device"
    );
    assert_eq!(node.discover().unwrap().pools[0].devices.len(), 1);
}

#[test]
fn only_vanished_functions_are_skipped() {
    let node = node();
    let failed = Problem::unavailable("io-error", "no memory");
    node.fake()
        .fail("bus/pci/devices/0000:3b:00.0/class", failed.clone());
    assert_eq!(node.discover(), Err(failed));
    let gone = Problem::unavailable("no-value", "no such device or address");
    node.fake().fail("bus/pci/devices/0000:3b:00.0/class", gone);
    assert_eq!(node.discover().unwrap().pools[0].devices.len(), 1);
}

#[test]
fn invalid_configs_are_refused_with_reason() {
    let select = |selector: Value| json!({"pools": [{"name": "p", "select": [selector]}]});
    let cases = [
        (json!({"pool": []}), "unknown field `pool`"),
        (json!({"pools": [{"name": "p"}, {"name": "p"}]}), "twice"),
        (json!({"pools": [{"name": "P"}]}), "DNS subdomain"),
        (select(json!({"vendor": "10de"})), "not 0x and 4 hex digits"),
        (select(json!({"device": "0x12"})), "not 0x and 4 hex digits"),
        (
            select(json!({"class": "0x030"})),
            "not 0x and 2 or 4 or 6 hex digits",
        ),
        (
            select(json!({"vender": "0x10de"})),
            "unknown field `vender`",
        ),
    ];
    for (config, reason) in cases {
        let problem = Pci::validate_config(&config.to_string()).unwrap_err();
        assert_eq!(problem.kind, ProblemKind::Invalid);
        assert!(problem.message.contains(reason), "{problem} lacks {reason}");
    }
}

#[test]
fn parameters_in_claims_are_refused() {
    assert_eq!(
        Pci::validate_parameters("{}").unwrap_err().code,
        "no-parameters"
    );
}
