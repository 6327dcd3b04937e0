//! The attributes that the host adds to PCI functions, beside those of the library that other drivers use.

use std::collections::BTreeMap;

use nodedock_proto::node::v1;
use nodedock_tests::cluster::{Cluster, make_kubelet_root};
use nodedock_tests::drivers::{Form, side_file, wasm};
use nodedock_tests::machine::{or_skip, skip};
use nodedock_tests::recorded::archives;
use nodedock_tests::{Daemon, Root};
use serde_json::{Map, Value};

use crate::{lines, programs};

const PREFIX: &str = "resource.kubernetes.io/";

/// A machine of which PCI functions have NUMA nodes.
const WITH_NODES: &str = "hwloc-nvidiagpunumanodes.tar.bz2";

/// The standard attributes, by the address as the name of a device has it.
type Attributes = BTreeMap<String, Map<String, Value>>;

fn of_daemon(devices: Vec<v1::Device>) -> Attributes {
    let each = devices.into_iter().map(|device| {
        let mut attributes: Map<String, Value> =
            serde_json::from_str(&device.attributes_json).unwrap();
        attributes.retain(|name, _| name.starts_with(PREFIX));
        (device.name, attributes)
    });
    each.collect()
}

#[tokio::test]
async fn recorded_machine_attributes_equal_library_attributes() {
    let Some(program) = or_skip(
        "attributes of devices, by the library",
        programs::go("device-attributes"),
    ) else {
        return;
    };
    let archives = match archives() {
        Ok(archives) => archives,
        Err(why) => return skip("attributes of devices on recorded machines", &why),
    };
    let (mut functions, mut with_node) = (0, 0);
    let lists = archives.iter().map(|archive| (archive, "list"));
    // A number is the first of the list: one machine shows it.
    let numbers = archives
        .iter()
        .filter(|archive| archive.ends_with(WITH_NODES))
        .map(|archive| (archive, "number"));
    for (archive, form) in lists.chain(numbers) {
        let cluster = Cluster::start().await;
        let root = Root::new();
        make_kubelet_root(&root);
        root.drop_in("pci.grant.yaml", side_file("pci", "grant"));
        root.drop_in("pci.wasm", wasm("pci", Form::Core));
        let config = format!("kubernetes: {{numaNodeList: {}}}\n", form == "list");
        let options = cluster
            .options()
            .config(&config)
            .arg("--hardware", archive.to_string_lossy());
        let daemon = Daemon::start_on(root, options).await;
        daemon.until_serving("pci.wasm").await;
        let sys = daemon.path().join("run/nodedock/hardware/sys");
        let expected = lines(&program, &[sys.to_str().unwrap(), form])
            .await
            .concat();
        let expected: Attributes = serde_json::from_str(&expected).unwrap();
        let expected: Attributes = expected
            .into_iter()
            .map(|(address, found)| (address.replace([':', '.'], "-"), found))
            .collect();
        let found = of_daemon(daemon.devices().await);
        functions += found.len();
        with_node += found
            .values()
            .filter(|device| device.contains_key(&format!("{PREFIX}numaNode")))
            .count();
        for (address, found) in found {
            assert_eq!(
                found,
                expected[&address],
                "{address} of {}, {form}",
                archive.display()
            );
        }
    }
    assert!(
        functions > 100 && with_node > 10,
        "{functions}, {with_node} with a NUMA node"
    );
}
