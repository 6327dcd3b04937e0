//! One piece of hardware is in one claim, regardless of the drivers and nodes through which containers would get it.

use std::collections::BTreeMap;

use native_device_plugin::{
    Device, Options as PluginOptions, Plugin, Script, ScriptedOutcome, api,
};
use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::drivers::{Form, side_file, wasm};
use nodedock_tests::recorded::Recorded;
use nodedock_tests::{Daemon, Options, Output, Root};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

const PCI: &str = "pci.nodedock.dev";
const VFIO: &str = "vfio-pci.nodedock.dev";
const NODES: &str = "device-nodes.nodedock.dev";
const WAIT: &str = "claims: {exclusiveWaitMs: 100}\n";

const CLASSES: &str = r#"
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: display}
spec: {selectors: [{cel: {expression: 'device.driver == "pci.nodedock.dev"'}}]}
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: card}
spec: {selectors: [{cel: {expression: 'device.driver == "device-nodes.nodedock.dev" && device.attributes["device-nodes.nodedock.dev"].path.startsWith("/dev/dri/")'}}]}
"#;

/// Two display functions with a DRM node each, the first in the IOMMU group 7.
fn machine(root: &Root) -> Recorded {
    let machine = Recorded::new(&root.path().join("machine"), &["vfio-pci", "amdgpu"]);
    for (minor, (address, group)) in [("0000:01:00.0", Some(7)), ("0000:02:00.0", Some(8))]
        .into_iter()
        .enumerate()
    {
        let directory = format!("devices/pci0000:00/{address}/drm/card{minor}");
        machine
            .function(address, "0x030000", "amdgpu", group)
            .file(&format!("sys/{directory}/dev"), &format!("226:{minor}"))
            .link(
                &format!("sys/dev/char/226:{minor}"),
                &format!("../../{directory}"),
            )
            .link(
                &format!("sys/class/drm/card{minor}"),
                &format!("../../{directory}"),
            )
            .file(
                &format!("dev/dri/card{minor}"),
                &format!("character 226:{minor}"),
            );
    }
    machine
        .file("dev/vfio/vfio", "character 10:196")
        .file("dev/vfio/7", "character 240:7");
    machine
}

async fn start(options: Options) -> Daemon {
    let root = Root::new();
    let machine = machine(&root);
    for (file, config) in [
        ("pci", "pools: [{name: display, select: [{class: '0x03'}]}]"),
        (
            "vfio-pci",
            "pools: [{name: gpu, select: [{class: '0x03'}]}]",
        ),
        (
            "device-nodes",
            "pools: [{name: nodes, paths: ['/dev/dri/*', '/dev/vfio/*']}]",
        ),
    ] {
        root.drop_in(&format!("{file}.grant.yaml"), side_file(file, "grant"));
        root.drop_in(&format!("{file}.config.yaml"), config);
        root.drop_in(&format!("{file}.wasm"), wasm(file, Form::Core));
    }
    let options = options
        .config(WAIT)
        .arg("--hardware", machine.path().to_string_lossy());
    let daemon = Daemon::start_on(root, options).await;
    for driver in [PCI, VFIO, NODES] {
        daemon.until_serving(driver).await;
    }
    daemon
}

fn claim_of(name: &str, class: &str) -> String {
    format!(
        "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {{name: {name}}}\nspec: {{devices: {{requests: [{{name: r, exactly: {{deviceClassName: {class}}}}}]}}}}\n"
    )
}

async fn create(daemon: &Daemon, name: &str, text: &str, more: &[&str]) -> Output {
    let file = daemon.write(&format!("{name}.yaml"), text);
    let args = ["claim", "create", "-f", file.to_str().unwrap()];
    daemon.cli(&[&args[..], more].concat()).await
}

#[tokio::test]
async fn claimed_node_is_refused_to_others() {
    let daemon = start(Options::default()).await;
    let function = format!("{PCI}/display/0000-01-00-0");
    let bound = format!("{VFIO}/gpu/0000-01-00-0");
    let (card, group) = (
        format!("{NODES}/nodes/dri-card0"),
        format!("{NODES}/nodes/vfio-7"),
    );
    // The node of a group is there until a bind to another driver is undone, as in the kernel.
    for (owner, thieves) in [
        (&group, vec![&function, &bound, &card]),
        (&function, vec![&card, &group, &bound]),
        (&bound, vec![&card, &group, &function]),
        (&card, vec![&function, &bound]),
    ] {
        daemon
            .prepared(request(&pod("owner"), &[&claim("owner", &[owner])]))
            .await;
        for thief in thieves {
            let wanted = request(&pod("thief"), &[&claim("thief", &[thief])]);
            let problem = daemon.refused_as(wanted, "conflict", "device-held").await;
            assert!(
                problem.message.contains("default/owner"),
                "{owner} {thief}: {}",
                problem.message
            );
        }
        daemon.unprepare(&pod("owner")).await;
    }
    daemon.assert_empty().await;
}

#[tokio::test]
async fn unrelated_nodes_are_given_beside_claim() {
    let daemon = start(Options::default()).await;
    for (name, device) in [
        ("bound", format!("{VFIO}/gpu/0000-01-00-0")),
        ("control", format!("{NODES}/nodes/vfio-vfio")),
        ("other", format!("{NODES}/nodes/dri-card1")),
    ] {
        daemon
            .prepared(request(&pod(name), &[&claim(name, &[&device])]))
            .await;
    }
    let again = request(
        &pod("again"),
        &[&claim("again", &[&format!("{NODES}/nodes/vfio-vfio")])],
    );
    daemon.refused_as(again, "conflict", "device-held").await;
}

#[tokio::test]
async fn allocator_offers_only_preparable_devices() {
    let daemon = start(Options::default().flag("--local-api")).await;
    create(&daemon, "classes", CLASSES, &[]).await.done();
    create(&daemon, "whole", &claim_of("whole", "display"), &[])
        .await
        .done_with(&["0000-01-00-0"]);
    create(&daemon, "node", &claim_of("node", "card"), &[])
        .await
        .done_with(&["dri-card1"]);
    for claim in ["whole", "node"] {
        daemon
            .cli(&["prepare", "--pod", claim, "--claim", claim])
            .await
            .done();
    }
    let late = create(
        &daemon,
        "late",
        &claim_of("late", "card"),
        &["--timeout", "5"],
    )
    .await;
    assert_ne!(late.code, Some(0), "{late:?}");
    let why = daemon.cli(&["explain", "claim", "late"]).await.done();
    assert!(why.contains("its hardware is in use by claim"), "{why}");
    daemon.cli(&["unprepare", "default/whole"]).await.done();
    daemon.cli(&["claim", "delete", "whole"]).await.done();
    daemon
        .cli(&["prepare", "--pod", "late", "--claim", "late"])
        .await
        .done();
}

/// `prepare --device` takes what it names, also if a claim was given it and has not been prepared yet.
#[tokio::test]
async fn taken_device_is_replaced_in_prepare() {
    let daemon = start(Options::default().flag("--local-api")).await;
    create(&daemon, "classes", CLASSES, &[]).await.done();
    create(&daemon, "node", &claim_of("node", "card"), &[])
        .await
        .done_with(&["dri-card0"]);
    let named = format!("{NODES}/nodes/dri-card0");
    daemon
        .cli(&["prepare", "--pod", "first", "--device", &named])
        .await
        .done();
    daemon
        .cli(&["prepare", "--pod", "second", "--claim", "node"])
        .await
        .done_with(&["dri-card1"]);
}

const CARD: &str = "example.com/card";

/// A device plugin without an adapter, which gives the DRM nodes of both functions by their numbers.
async fn with_cards(daemon: &Daemon) -> Plugin {
    let script = Script::new(|ids| {
        let path = |id: &String| format!("/dev/dri/card{id}");
        let node = |id: &String| api::DeviceSpec {
            container_path: path(id),
            host_path: path(id),
            permissions: "rw".to_owned(),
        };
        let devices = ids.iter().map(node).collect();
        ScriptedOutcome::container(api::ContainerAllocateResponse {
            devices,
            ..Default::default()
        })
    });
    let options = PluginOptions::new(CARD, &daemon.state().join("device-plugins"));
    let devices = ["0", "1"].map(Device::healthy).to_vec();
    let plugin = Plugin::start(options, script, devices)
        .await
        .expect("it registers");
    daemon.until_allocatable(CARD, 2).await;
    plugin
}

/// A pod whose container wants one of the plugin's devices.
fn limited(name: &str) -> v1::PreparePodRequest {
    let container = v1::Container {
        name: "main".to_owned(),
        extended_resources: [(CARD.to_owned(), 1)].into(),
        ..Default::default()
    };
    v1::PreparePodRequest {
        pod: Some(pod(name)),
        containers: vec![container],
        ..Default::default()
    }
}

#[tokio::test]
async fn device_plugin_gives_no_claimed_node() {
    let mut daemon = start(Options::default()).await;
    let _plugin = with_cards(&daemon).await;
    let functions = [0, 1].map(|n| format!("{PCI}/display/0000-0{}-00-0", n + 1));
    daemon
        .prepared(request(&pod("owner"), &[&claim("owner", &[&functions[0]])]))
        .await;
    let answer = daemon.prepared(limited("first")).await;
    assert_eq!(
        answer.resources[0].device_ids,
        ["1"],
        "the other one is chosen: {answer:#?}"
    );
    assert_eq!(
        answer.containers[0].device_nodes[0].host_path,
        "/dev/dri/card1"
    );
    let late = daemon.prepare(limited("late")).await;
    let problem = late.resources[0]
        .problem
        .as_ref()
        .expect("there is none left");
    assert_eq!(problem.code, "too-few-devices", "{problem:?}");
    let thief = request(&pod("thief"), &[&claim("thief", &[&functions[1]])]);
    let held = daemon
        .refused_as(thief.clone(), "conflict", "device-held")
        .await;
    assert!(held.message.contains("default/first-"), "{}", held.message);
    daemon.crash().await;
    for driver in [PCI, VFIO, NODES] {
        daemon.until_serving(driver).await;
    }
    daemon
        .refused_as(thief.clone(), "conflict", "device-held")
        .await;
    // Its plugin is not back.
    daemon.unprepare(&pod("first")).await;
    daemon.prepared(thief).await;
}

/// Returns the index of the function behind a device.
fn function_of(device: &str) -> usize {
    let of = |ends: [&str; 2]| ends.iter().position(|end| device.ends_with(end));
    let found = of(["01-00-0", "02-00-0"])
        .or(of(["card0", "card1"]))
        .or(of(["vfio-7", "vfio-8"]))
        .or(of(["0", "1"]));
    found.unwrap_or_else(|| panic!("{device}"))
}

/// Pods of every kind come and go in a generated order while the daemon crashes.
#[tokio::test]
async fn mixed_drivers_never_share_hardware() {
    const PODS: usize = 5;
    for seed in 1..=3_u64 {
        let (mut numbers, mut daemon) =
            (StdRng::seed_from_u64(seed), start(Options::default()).await);
        let mut plugin = with_cards(&daemon).await;
        let mut held: BTreeMap<String, usize> = BTreeMap::new();
        let (mut given, mut refused) = (0, 0);
        for _ in 0..60 {
            let name = format!("pod-{}", numbers.random_range(0..PODS));
            if numbers.random_ratio(1, 12) {
                daemon.crash().await;
                for driver in [PCI, VFIO, NODES] {
                    daemon.until_serving(driver).await;
                }
                drop(plugin);
                plugin = with_cards(&daemon).await;
            } else if held.remove(&name).is_some() {
                daemon.unprepare(&pod(&name)).await;
            } else {
                let n = numbers.random_range(0..2);
                let device = match numbers.random_range(0..4) {
                    0 => format!("{PCI}/display/0000-0{}-00-0", n + 1),
                    1 => format!("{VFIO}/gpu/0000-0{}-00-0", n + 1),
                    2 => format!("{NODES}/nodes/dri-card{n}"),
                    _ => String::new(),
                };
                let answer = match device.as_str() {
                    "" => daemon.prepare(limited(&name)).await,
                    device => {
                        daemon
                            .prepare(request(&pod(&name), &[&claim(&name, &[device])]))
                            .await
                    }
                };
                if answer.containers.is_empty() {
                    refused += 1;
                    daemon.unprepare(&pod(&name)).await;
                    continue;
                }
                given += 1;
                let function = match answer.resources.first() {
                    Some(resource) => function_of(&resource.device_ids[0]),
                    None => function_of(&device),
                };
                let other = held.iter().find(|(_, of)| **of == function);
                assert!(
                    other.is_none(),
                    "seed {seed}: {name} and {other:?}: {answer:#?}\n{}",
                    daemon.log()
                );
                held.insert(name, function);
            }
        }
        assert!(
            given > 10 && refused > 5,
            "seed {seed}: {given} given, {refused} refused"
        );
    }
}
