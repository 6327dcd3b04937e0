use std::path::{Path, PathBuf};

use nodedock_hardware::Snapshot;
use nodedock_sdk::testing::{FakeHost, Grant, Harness};
use nodedock_sdk::{
    AttributeValue, Claim, Configuration, ContainerEdits, Device, Driver, HealthState, Inventory,
    Prepared, Problem, ProblemKind,
};
use serde_json::{Value, json};

use crate::Gpu;

const AMD: &str = "devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0";
const AMD_VF: &str = "devices/pci0000:3a/0000:3a:00.0/0000:3b:02.0";
const INTEL: &str = "devices/pci0000:00/0000:00:02.0";
const NVIDIA: &str = "devices/pci0000:80/0000:80:01.0/0000:81:00.0";
const BMC: &str = "devices/pci0000:00/0000:00:1e.0";
const NIC: &str = "devices/pci0000:00/0000:00:1f.0";

const CAPABILITIES: &str = "/proc/driver/nvidia/capabilities/gpu2";

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
    .file(&format!("{directory}/numa_node"), "-1\n")
    .dir(&format!("bus/pci/drivers/{driver}"))
    .link(
        &format!("{directory}/driver"),
        &format!("{up}bus/pci/drivers/{driver}"),
    );
}

/// Adds `card{index}` and its render node, with their connectors and device nodes.
fn add_drm(fake: &FakeHost, directory: &str, index: u32) {
    for (name, minor) in [
        (format!("card{index}"), index),
        (format!("renderD{}", 128 + index), 128 + index),
    ] {
        fake.file(
            &format!("{directory}/drm/{name}/uevent"),
            format!("MAJOR=226\nMINOR={minor}\nDEVNAME=dri/{name}\nDEVTYPE=drm_minor\n"),
        );
        fake.character_node(&format!("/dev/dri/{name}"), 226, minor);
    }
    fake.file(
        &format!("{directory}/drm/card{index}/card{index}-DP-1/uevent"),
        "DEVTYPE=drm_connector\n",
    );
}

/// A node with a GPU of each vendor. `card0` is that of the board's management controller.
fn node() -> Harness<Gpu> {
    let node = Harness::new();
    let fake = node.fake();
    add_function(fake, NIC, "0x8086", "0x020000", "e1000e");
    add_function(fake, BMC, "0x1a03", "0x030000", "ast");
    add_drm(fake, BMC, 0);
    add_amd(fake);
    add_intel(fake);
    add_nvidia(fake);
    node
}

fn add_amd(fake: &FakeHost) {
    add_function(fake, AMD, "0x1002", "0x120000", "amdgpu");
    add_drm(fake, AMD, 1);
    fake.file(&format!("{AMD}/numa_node"), "1\n")
        .file(&format!("{AMD}/product_name"), "AMD Instinct MI300X OAM\n")
        .file(&format!("{AMD}/unique_id"), "51ba7a2f4a1b9c0d\n")
        .file(&format!("{AMD}/mem_info_vram_total"), "206141652992\n")
        .file(&format!("{AMD}/current_compute_partition"), "SPX\n")
        .file(&format!("{AMD}/current_memory_partition"), "NPS1\n")
        .character_node("/dev/kfd", 235, 0);
}

fn add_intel(fake: &FakeHost) {
    add_function(fake, INTEL, "0x8086", "0x038000", "xe");
    add_drm(fake, INTEL, 2);
    fake.file(&format!("{INTEL}/sriov_totalvfs"), "7\n")
        .file(&format!("{INTEL}/sriov_numvfs"), "0\n");
}

fn add_nvidia(fake: &FakeHost) {
    add_function(fake, NVIDIA, "0x10de", "0x030200", "nvidia");
    fake.host_file(
        "/proc/driver/nvidia/gpus/0000:81:00.0/information",
        "Model: \t\t NVIDIA A100-SXM4-40GB\nGPU UUID: \t GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5\n\
         Bus Location: \t 0000:81:00.0\nDevice Minor: \t 2\nGPU Excluded:\t No\n",
    )
    .host_file(
        "/proc/driver/nvidia/version",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n",
    )
    .host_file(
        "/proc/devices",
        "Character devices:\n  1 mem\n195 nvidia\n234 nvidia-caps\n510 nvidia-uvm\n\nBlock devices:\n  8 sd\n",
    )
    .character_node("/dev/nvidia2", 195, 2)
    .character_node("/dev/nvidiactl", 195, 255)
    .character_node("/dev/nvidia-uvm", 510, 0)
    .character_node("/dev/nvidia-uvm-tools", 510, 1);
}

/// Partitions the NVIDIA GPU: a GPU instance with two compute instances, one with one, and one without any.
fn add_mig(fake: &FakeHost) {
    for (path, minor) in [
        ("gi1/access", 12),
        ("gi1/ci0/access", 13),
        ("gi1/ci1/access", 14),
        ("gi2/access", 21),
        ("gi2/ci0/access", 22),
        ("gi7/access", 66),
    ] {
        fake.host_file(
            &format!("{CAPABILITIES}/mig/{path}"),
            format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n"),
        );
        fake.character_node(&format!("/dev/nvidia-caps/nvidia-cap{minor}"), 234, minor);
    }
}

fn claim(device: &str) -> Claim {
    Claim::new("default", "demo", "uid").device("r", "gpu", device)
}

fn edits_of(node: &Harness<Gpu>, device: &str) -> Result<ContainerEdits, Problem> {
    node.prepare(&claim(device))
        .map(|mut prepared| prepared.devices.remove(0).edits)
}

fn paths(edits: &ContainerEdits) -> Vec<&str> {
    edits
        .device_nodes
        .iter()
        .map(|node| node.path.as_str())
        .collect()
}

fn names(inventory: &Inventory, pool: usize) -> Vec<&str> {
    inventory.pools[pool]
        .devices
        .iter()
        .map(|device| device.name.as_str())
        .collect()
}

fn device(inventory: &Inventory, name: &str) -> Device {
    inventory
        .device("gpu", name)
        .unwrap_or_else(|| panic!("no device {name}"))
        .clone()
}

fn assert_texts(device: &Device, expected: &[(&str, &str)]) {
    for (name, value) in expected {
        let value = AttributeValue::Text((*value).to_owned());
        assert_eq!(device.attribute_value(name), Some(&value), "{name}");
    }
}

#[test]
fn shipped_grant_covers_requested_capabilities() {
    let grant = Grant::parse(include_str!("../gpu.grant.yaml")).unwrap();
    assert_eq!(grant.missing(&Gpu::describe()), Vec::<String>::new());
    let config: Value = serde_saphyr::from_str(include_str!("../gpu.config.yaml")).unwrap();
    Gpu::validate_config(&config.to_string()).unwrap();
    let node = node();
    let inventory = node.grant(&grant).config(config).discover().unwrap();
    assert_eq!(names(&inventory, 0), ["0000-3b-00-0"]);
    assert_eq!(names(&inventory, 1), ["0000-00-02-0"]);
    assert_eq!(names(&inventory, 2), ["0000-81-00-0"]);
}

#[test]
fn schema_refuses_unknown_keys() {
    let schema: Value = serde_json::from_str(&Gpu::config_schema().unwrap()).unwrap();
    let pool = &schema["properties"]["pools"]["items"];
    for object in [&schema, pool, &pool["properties"]["select"]["items"]] {
        assert_eq!(object["additionalProperties"], false);
    }
}

#[test]
fn default_pool_has_all_supported_gpus() {
    let inventory = node().discover().unwrap();
    assert_eq!(inventory.pools.len(), 1);
    assert_eq!(
        names(&inventory, 0),
        ["0000-00-02-0", "0000-3b-00-0", "0000-81-00-0"]
    );
    assert!(
        inventory.pools[0]
            .devices
            .iter()
            .all(|device| device.taints.is_empty())
    );
    assert_eq!(
        Harness::<Gpu>::new().discover().unwrap().pools[0].devices,
        []
    );
}

#[test]
fn amd_gpu_has_product_memory_partitions() {
    let inventory = node().discover().unwrap();
    let gpu = device(&inventory, "0000-3b-00-0");
    assert_texts(
        &gpu,
        &[
            ("type", "gpu"),
            ("resource.kubernetes.io/pciBusID", "0000:3b:00.0"),
            ("resource.kubernetes.io/pcieRoot", "pci0000:3a"),
            ("vendor", "0x1002"),
            ("device", "0x1234"),
            ("class", "0x120000"),
            ("driver", "amdgpu"),
            ("productName", "AMD Instinct MI300X OAM"),
            ("uniqueId", "51ba7a2f4a1b9c0d"),
            ("computePartition", "SPX"),
            ("memoryPartition", "NPS1"),
        ],
    );
    assert_eq!(
        (
            gpu.capacities[0].name.as_str(),
            gpu.capacities[0].value.as_str()
        ),
        ("memory", "196592Mi")
    );
    assert_eq!(
        (gpu.identity, gpu.numa_nodes),
        (vec!["pci:0000:3b:00.0".to_owned()], vec![1])
    );
}

#[test]
fn amd_gpu_has_drm_compute_nodes() {
    let node = node();
    let edits = edits_of(&node, "0000-3b-00-0").unwrap();
    assert_eq!(
        paths(&edits),
        ["/dev/dri/card1", "/dev/dri/renderD129", "/dev/kfd"]
    );
    assert_eq!(
        (edits.device_nodes[1].major, edits.device_nodes[1].minor),
        (Some(226), Some(129))
    );
    assert_eq!(
        edits_of(&node, "0000-3b-00-0"),
        Ok(edits),
        "a repeated prepare has the same result"
    );
    node.unprepare("uid").unwrap();
    node.fake().remove("/dev/kfd");
    assert_eq!(
        paths(&edits_of(&node, "0000-3b-00-0").unwrap()),
        ["/dev/dri/card1", "/dev/dri/renderD129"]
    );
}

#[test]
fn intel_gpu_has_memory_if_reported() {
    let node = node();
    let gpu = |node: &Harness<Gpu>| device(&node.discover().unwrap(), "0000-00-02-0");
    assert_eq!(gpu(&node).capacities, []);
    assert_eq!(
        gpu(&node).attribute_value("sriovTotalVfs"),
        Some(&AttributeValue::Int(7))
    );
    assert_eq!(
        gpu(&node).attribute_value("sriovNumVfs"),
        Some(&AttributeValue::Int(0))
    );
    assert!(gpu(&node).numa_nodes.is_empty());
    node.fake().file(
        &format!("{INTEL}/drm/card2/lmem_total_bytes"),
        "17179869184\n",
    );
    assert_eq!(gpu(&node).capacities[0].value, "16Gi");
    for tile in 0..2 {
        node.fake().file(
            &format!("{INTEL}/tile{tile}/physical_vram_size_bytes"),
            "68719476736\n",
        );
    }
    assert_eq!(gpu(&node).capacities[0].value, "128Gi");
    let edits = edits_of(&node, "0000-00-02-0").unwrap();
    assert_eq!(paths(&edits), ["/dev/dri/card2", "/dev/dri/renderD130"]);
}

#[test]
fn virtual_function_names_its_physical_function() {
    let node = node();
    add_function(node.fake(), AMD_VF, "0x1002", "0x120000", "amdgpu");
    add_drm(node.fake(), AMD_VF, 5);
    node.fake()
        .link(&format!("{AMD_VF}/physfn"), "../0000:3b:00.0");
    node.config(json!({"pools": [
        {"name": "vf", "select": [{"vendor": "amd", "virtualFunction": true}], "extendedResource": "example.com/gpu"},
        {"name": "gpu", "select": [{"vendor": "0x1002", "device": "0x1234", "driver": "amdgpu"}]},
    ]}));
    let inventory = node.discover().unwrap();
    assert_eq!(names(&inventory, 0), ["0000-3b-02-0"]);
    assert_texts(
        &inventory.pools[0].devices[0],
        &[("physfn", "0000:3b:00.0")],
    );
    assert_eq!(
        inventory.pools[0].extended_resource.as_deref(),
        Some("example.com/gpu")
    );
    assert_eq!(names(&inventory, 1), ["0000-3b-00-0"]);
}

#[test]
fn nvidia_gpu_has_kernel_driver_attributes() {
    let gpu = device(&node().discover().unwrap(), "0000-81-00-0");
    assert_texts(
        &gpu,
        &[
            ("productName", "NVIDIA A100-SXM4-40GB"),
            ("uuid", "GPU-b8ea3855-276c-c9cb-b366-c6fa655957c5"),
            ("driver", "nvidia"),
            ("driverVersion", "535.104.05"),
        ],
    );
    assert_eq!((gpu.capacities, gpu.consumes), (vec![], vec![]));
}

#[test]
fn nvidia_gpu_has_nodes_by_minor() {
    let node = node();
    let prepared = node.prepare(&claim("0000-81-00-0")).unwrap();
    let nodes = [
        "/dev/nvidia2",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    ];
    assert_eq!(paths(&prepared.devices[0].edits), nodes);
    assert_eq!(
        prepared.edits.env,
        [("NVIDIA_VISIBLE_DEVICES".to_owned(), "void".to_owned())]
    );
    node.fake().character_node("/dev/nvidia-modeset", 195, 254);
    add_drm(node.fake(), NVIDIA, 3);
    let edits = edits_of(&node, "0000-81-00-0").unwrap();
    assert!(
        paths(&edits).contains(&"/dev/nvidia-modeset")
            && paths(&edits).contains(&"/dev/dri/renderD131")
    );
}

#[test]
fn mig_instances_exclude_their_whole_gpu() {
    let node = node();
    add_mig(node.fake());
    let inventory = node.discover().unwrap();
    let instances = [
        "0000-81-00-0-gi1-ci0",
        "0000-81-00-0-gi1-ci1",
        "0000-81-00-0-gi2-ci0",
    ];
    assert_eq!(
        names(&inventory, 0)[2..],
        [&["0000-81-00-0"][..], &instances].concat()
    );
    assert_eq!(inventory.pools[0].shared_counters[0].counters[0].value, "3");

    let whole = device(&inventory, "0000-81-00-0");
    assert_eq!(whole.consumes[0].counters[0].value, "3");
    assert_eq!(whole.identity.len(), 5);
    assert!(
        whole
            .identity
            .iter()
            .any(|identity| identity.starts_with("dev:/dev/nvidia"))
    );
    for name in instances {
        let mig = device(&inventory, name);
        assert_eq!(mig.consumes[0].counters[0].value, "1");
        assert_eq!(mig.identity.len(), 1);
        assert!(
            whole.identity.contains(&mig.identity[0]),
            "{name} and its GPU have a common identity"
        );
    }
    let mig = device(&inventory, instances[1]);
    assert_texts(
        &mig,
        &[
            ("type", "mig"),
            ("parent", "0000-81-00-0"),
            ("productName", "NVIDIA A100-SXM4-40GB"),
        ],
    );
    assert_eq!(
        mig.attribute_value("gpuInstance"),
        Some(&AttributeValue::Int(1))
    );
    assert_eq!(
        mig.attribute_value("computeInstance"),
        Some(&AttributeValue::Int(1))
    );
}

#[test]
fn mig_instance_gets_only_its_capabilities() {
    let node = node();
    add_mig(node.fake());
    let edits = edits_of(&node, "0000-81-00-0-gi1-ci1").unwrap();
    let caps: Vec<_> = edits
        .device_nodes
        .iter()
        .filter(|node| node.path.contains("caps"))
        .collect();
    assert_eq!(caps.len(), 2);
    assert_eq!(
        (caps[0].path.as_str(), caps[0].major),
        ("/dev/nvidia-caps/nvidia-cap12", Some(234))
    );
    assert_eq!(
        (caps[1].path.as_str(), caps[1].minor),
        ("/dev/nvidia-caps/nvidia-cap14", Some(14))
    );
    assert!(paths(&edits).contains(&"/dev/nvidia2"));
    assert!(
        !paths(&edits_of(&node, "0000-81-00-0").unwrap())
            .iter()
            .any(|path| path.contains("caps"))
    );
}

#[test]
fn vanished_gpu_is_not_found() {
    let node = node();
    add_mig(node.fake());
    node.discover().unwrap();
    node.fake()
        .remove(&format!("{CAPABILITIES}/mig/gi2"))
        .remove("bus/pci/devices/0000:3b:00.0")
        .remove(AMD);
    for name in [
        "0000-81-00-0-gi2-ci0",
        "0000-3b-00-0",
        "0000-00-1f-0",
        "gpu-0",
    ] {
        let problem = node.prepare(&claim(name)).unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (ProblemKind::NotFound, "no-such-device"),
            "{name}"
        );
    }
    let other_pool = Claim::new("n", "c", "u").device("r", "other", "0000-00-02-0");
    assert_eq!(
        node.prepare(&other_pool).unwrap_err().code,
        "no-such-device"
    );
    assert!(!names(&node.discover().unwrap(), 0).contains(&"0000-3b-00-0"));
}

#[test]
fn only_vanished_gpus_are_skipped() {
    let node = node();
    let failed = Problem::unavailable("io-error", "no memory");
    node.fake()
        .fail("bus/pci/devices/0000:3b:00.0/vendor", failed.clone());
    assert_eq!(node.discover(), Err(failed));
    let gone = Problem::unavailable("no-value", "no such device or address");
    node.fake()
        .fail("bus/pci/devices/0000:3b:00.0/vendor", gone);
    assert_eq!(
        names(&node.discover().unwrap(), 0),
        ["0000-00-02-0", "0000-81-00-0"]
    );
}

/// The codes of a device's taint, of its prepare, and whether it is healthy.
fn faults(node: &Harness<Gpu>, name: &str) -> (String, String, bool) {
    let taint = device(&node.discover().unwrap(), name)
        .taints
        .first()
        .map(|taint| taint.value.clone());
    let prepared = node.prepare(&claim(name)).unwrap_err();
    assert_eq!(prepared.kind, ProblemKind::Unavailable);
    let health = node
        .check()
        .unwrap()
        .into_iter()
        .find(|health| health.device == name)
        .unwrap();
    (
        taint.unwrap_or_default(),
        prepared.code,
        health.state == HealthState::Healthy,
    )
}

#[test]
fn gpu_without_nodes_is_tainted() {
    let fault = |code: &str| (code.to_owned(), code.to_owned(), false);
    let node = node();
    assert!(
        node.check()
            .unwrap()
            .iter()
            .all(|health| health.state == HealthState::Healthy)
    );
    node.fake()
        .remove("/dev/dri/renderD129")
        .remove("/dev/nvidiactl");
    assert_eq!(faults(&node, "0000-3b-00-0"), fault("no-device-node"));
    assert_eq!(faults(&node, "0000-81-00-0"), fault("no-device-node"));
    node.fake().character_node("/dev/nvidiactl", 194, 255);
    assert_eq!(faults(&node, "0000-81-00-0"), fault("stale-device-node"));
    node.fake()
        .remove(&format!("{INTEL}/drm"))
        .remove(&format!("{INTEL}/driver"));
    assert_eq!(faults(&node, "0000-00-02-0"), fault("no-kernel-driver"));
    node.fake().remove("/proc/driver/nvidia/gpus");
    assert_eq!(faults(&node, "0000-81-00-0"), fault("no-kernel-driver"));
}

#[test]
fn gpu_excluded_by_kernel_is_unusable() {
    let node = node();
    node.fake().host_file(
        "/proc/driver/nvidia/gpus/0000:81:00.0/information",
        "Device Minor: 2\nGPU Excluded: Yes\n",
    );
    assert_eq!(faults(&node, "0000-81-00-0").0, "gpu-excluded");
}

#[test]
fn mig_instance_needs_its_capability_node() {
    let node = node();
    add_mig(node.fake());
    node.fake().remove("/dev/nvidia-caps/nvidia-cap22");
    assert_eq!(faults(&node, "0000-81-00-0-gi2-ci0").0, "no-device-node");
    assert!(edits_of(&node, "0000-81-00-0-gi1-ci0").is_ok());
}

fn prepare_with_libraries(node: &Harness<Gpu>, files: Value) -> Result<Prepared, Problem> {
    let mut pool = json!({"name": "gpu"});
    pool.as_object_mut()
        .unwrap()
        .extend(files.as_object().unwrap().clone());
    node.config(json!({"pools": [pool]}));
    node.prepare(&claim("0000-81-00-0"))
}

#[test]
fn library_link_targets_are_mounted_readonly() {
    let node = node();
    let library = "/usr/lib/x86_64-linux-gnu/libcuda.so";
    node.fake()
        .host_file(&format!("{library}.535.104.05"), "elf")
        .host_link(&format!("{library}.1"), "libcuda.so.535.104.05");
    let files = json!({"libraries": [format!("{library}*")], "binaries": ["/usr/bin/nvidia-smi"]});
    let prepared = prepare_with_libraries(&node, files).unwrap();
    let mounts: Vec<_> = prepared
        .edits
        .mounts
        .iter()
        .map(|mount| (&mount.host_path[..], &mount.container_path[..]))
        .collect();
    assert_eq!(
        mounts,
        [
            ("/usr/bin/nvidia-smi", "/usr/bin/nvidia-smi"),
            (
                &format!("{library}.535.104.05")[..],
                &format!("{library}.1")[..]
            ),
            (
                &format!("{library}.535.104.05")[..],
                &format!("{library}.535.104.05")[..]
            ),
        ]
    );
    assert!(
        prepared
            .edits
            .mounts
            .iter()
            .all(|mount| mount.options.contains(&"ro".to_owned()))
    );
}

#[test]
fn unusable_libraries_are_reported_as_problems() {
    let node = node();
    for index in 0..65 {
        node.fake()
            .host_file(&format!("/opt/nvidia/lib{index}.so"), "elf");
    }
    let cases = [
        (
            "/usr/lib64/libcuda.so*",
            ProblemKind::Unavailable,
            "no-such-library",
        ),
        (
            "/opt/nvidia/none.so",
            ProblemKind::Unavailable,
            "no-such-library",
        ),
        ("/usr/lib64/libssl.so*", ProblemKind::Denied, "not-granted"),
        ("/opt/nvidia/*.so", ProblemKind::Invalid, "too-many-files"),
    ];
    for (library, kind, code) in cases {
        let problem = prepare_with_libraries(&node, json!({"libraries": [library]})).unwrap_err();
        assert_eq!(
            (problem.kind, problem.code.as_str()),
            (kind, code),
            "{library}"
        );
    }
}

#[test]
fn invalid_configs_are_refused_with_reason() {
    let select = |selector: Value| json!({"pools": [{"name": "p", "select": [selector]}]});
    let cases = [
        (json!({"pool": []}), "unknown field `pool`"),
        (json!({"pools": [{"name": "p"}, {"name": "p"}]}), "twice"),
        (json!({"pools": [{"name": "P"}]}), "DNS subdomain"),
        (select(json!({"vendor": "ati"})), "not amd, intel or nvidia"),
        (select(json!({"device": "0x12"})), "not 0x and 4 hex digits"),
        (select(json!({"class": "0x03"})), "unknown field `class`"),
        (
            json!({"pools": [{"name": "p", "libraries": ["libcuda.so"]}]}),
            "not an absolute path",
        ),
        (
            json!({"pools": [{"name": "p", "libraries": ["/usr/../etc/*"]}]}),
            "not an absolute path",
        ),
        (
            json!({"pools": [{"name": "p", "binaries": ["/usr/bin/nvidia-*"]}]}),
            "must be a path",
        ),
    ];
    for (config, reason) in cases {
        let problem = Gpu::validate_config(&config.to_string()).unwrap_err();
        assert_eq!(problem.kind, ProblemKind::Invalid);
        assert!(problem.message.contains(reason), "{problem} lacks {reason}");
    }
}

#[test]
fn parameters_in_claims_are_refused() {
    assert_eq!(
        Gpu::validate_parameters("{}").unwrap_err().code,
        "no-parameters"
    );
}

/// A node like a recorded machine; `None` where the records are missing.
fn recorded(archive: &str) -> Option<Harness<Gpu>> {
    let path: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../../shared/hardware")
        .join(archive);
    if !path.exists() {
        println!("skipped: {} does not exist", path.display());
        return None;
    }
    let node = Harness::new();
    let snapshot = Snapshot::open(&path).unwrap_or_else(|error| panic!("{error}"));
    node.fake().snapshot(&snapshot).nodes_from_sysfs();
    Some(node)
}

#[test]
fn recorded_emulated_gpu_can_be_selected() {
    let Some(node) = recorded("hwloc-2pa-pcidomain32bits.tar.bz2") else {
        return;
    };
    assert_eq!(node.discover().unwrap().pools[0].devices, []);
    node.config(json!({"pools": [{"name": "gpu", "select": [{"vendor": "0x1013"}]}]}));
    let gpu = device(&node.discover().unwrap(), "0000-00-02-0");
    assert_texts(
        &gpu,
        &[
            ("vendor", "0x1013"),
            ("resource.kubernetes.io/pcieRoot", "pci0000:00"),
        ],
    );
    assert_eq!(
        paths(&edits_of(&node, "0000-00-02-0").unwrap()),
        ["/dev/dri/card0"]
    );
}

#[test]
fn recorded_nvidia_without_proc_is_unusable() {
    let Some(node) = recorded("ghw-linux-amd64-accel-nvidia.tar.gz") else {
        return;
    };
    let inventory = node.discover().unwrap();
    let gpu = device(&inventory, "0000-06-00-0");
    assert_texts(
        &gpu,
        &[
            ("vendor", "0x10de"),
            ("device", "0x15f8"),
            ("driver", "nvidia"),
            ("class", "0x030200"),
        ],
    );
    assert_eq!(faults(&node, "0000-06-00-0").0, "no-kernel-driver");
}

#[test]
fn recorded_functions_without_vendor_are_skipped() {
    let Some(node) = recorded("hwloc-nvidiagpunumanodes.tar.bz2") else {
        return;
    };
    assert_eq!(node.discover().unwrap().pools[0].devices, []);
}

#[test]
fn recorded_other_accelerators_need_a_selection() {
    let Some(node) = recorded("ghw-linux-amd64-accel.tar.gz") else {
        return;
    };
    assert_eq!(node.discover().unwrap().pools[0].devices, []);
}

#[test]
fn sensors_are_readings_of_their_gpu() {
    let node = node();
    node.fake()
        .file(&format!("{AMD}/hwmon/hwmon7/temp1_input"), "65500\n")
        .file(&format!("{AMD}/hwmon/hwmon7/power1_average"), "210000000\n")
        .file(&format!("{AMD}/hwmon/hwmon7/power1_input"), "250000000\n")
        .file(&format!("{AMD}/gpu_busy_percent"), "50\n")
        .file(&format!("{AMD}/mem_info_vram_used"), "1024\n");
    let readings = node.readings().unwrap();
    let of = |name: &str| {
        let device = readings.iter().find(|device| device.device == name);
        let readings = device.expect("each GPU is listed").readings.iter();
        readings
            .map(|reading| (reading.name.as_str(), reading.value))
            .collect::<Vec<_>>()
    };
    assert_eq!(
        of("0000-3b-00-0"),
        [
            ("temperature_celsius", 65.5),
            ("power_watts", 210.0),
            ("utilization_ratio", 0.5),
            ("memory_used_bytes", 1024.0)
        ]
    );
    assert_eq!(of("0000-81-00-0"), []);
}
