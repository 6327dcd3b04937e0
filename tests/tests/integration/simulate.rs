//! Virtual nodes at a stand-in of the API server.

use std::collections::BTreeMap;
use std::path::PathBuf;

use nodedock_stand_ins::api_server::{Allocated, ApiServer};
use nodedock_tests::cluster::{NAMESPACE, make_kubelet_root, options_of};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_NAME, side_file, wasm};
use nodedock_tests::recorded::Recorded;
use nodedock_tests::{Daemon, Root};
use serde_json::{Value, json};
use tokio::process::Child;

const SCRIPTED: &str = "scripted.nodedock.dev";

/// A directory with drivers and two machines, and an API server.
struct Scene {
    root: Root,
    api: ApiServer,
    machines: [PathBuf; 2],
}

impl Scene {
    async fn start() -> Self {
        let root = Root::new();
        let with = |name: &str, functions: &[(&str, &str)]| {
            let machine = Recorded::new(&root.path().join(name), &["amdgpu", "igb"]);
            for (address, class) in functions {
                machine.function(address, class, "amdgpu", None);
            }
            machine.path().to_owned()
        };
        let machines = [
            with(
                "one",
                &[("0000:01:00.0", "0x030000"), ("0000:02:00.0", "0x020000")],
            ),
            with("two", &[("0000:41:00.0", "0x030000")]),
        ];
        for name in ["pci", MOCK_GPU, "scripted"] {
            root.drop_in(&format!("{name}.grant.yaml"), side_file(name, "grant"));
        }
        root.drop_in("pci.config.yaml", side_file("pci", "config"));
        root.drop_in("mock-gpu.config.yaml", "pools: [{name: gpus, count: 8}]\n");
        root.drop_in("scripted.config.yaml", "report: true\n");
        for name in ["pci", MOCK_GPU, "scripted"] {
            root.drop_in(&format!("{name}.wasm"), wasm(name, Form::Core));
        }
        Self {
            api: ApiServer::start().await,
            root,
            machines,
        }
    }

    fn args(&self, nodes: usize) -> Vec<String> {
        let mut args = vec![
            "simulate".to_owned(),
            "--nodes".to_owned(),
            nodes.to_string(),
        ];
        let mut add =
            |name: &str, path: PathBuf| args.extend([name.to_owned(), path.display().to_string()]);
        self.machines
            .iter()
            .for_each(|machine| add("--hardware", machine.clone()));
        add("--drivers", self.root.drivers());
        add("--kubeconfig", self.api.kubeconfig(self.root.path()));
        args
    }

    fn run(&self, nodes: usize, more: &[&str]) -> Child {
        self.root
            .command()
            .args(self.args(nodes))
            .args(more)
            .spawn()
            .expect("the program starts")
    }

    async fn refused(&self, more: &[&str], parts: &[&str]) {
        let args = self.args(2);
        let args: Vec<_> = args
            .iter()
            .map(String::as_str)
            .chain(more.iter().copied())
            .collect();
        self.root.cli(&args).await.failed_with(1, parts);
    }

    /// Waits until there are so many slices.
    async fn slices(&self, count: usize) -> BTreeMap<String, Value> {
        let all = |slices: Vec<&Value>| (slices.len() == count).then(|| by_pool(slices));
        self.api
            .wait_for("the slices", |state| all(state.objects("resourceslices")))
            .await
    }

    /// A claim for a device of a virtual node, for a pod.
    fn claim(&self, name: &str, driver: &str, pool: &str, device: &str) -> String {
        let node = pool.split('/').next().unwrap();
        let claim = Allocated::new(NAMESPACE, name)
            .node(node)
            .device("one", driver, pool, device);
        self.api
            .allocate_claim(claim.reserved_for("pod", "pod-uid"))
    }

    /// Waits for what drivers report of a claim.
    async fn status(&self, claim: &str) -> Value {
        let status = |claim: &Value| {
            let devices = claim
                .pointer("/status/devices")
                .filter(|devices| !devices.is_null());
            devices.cloned()
        };
        let look = |claim: Option<&Value>| claim.and_then(status);
        self.api
            .wait_for("the status", |state| {
                look(state.object("resourceclaims", NAMESPACE, claim))
            })
            .await
    }
}

/// Slices by their driver and pool, without what the server makes of any slice.
fn by_pool(slices: Vec<&Value>) -> BTreeMap<String, Value> {
    let each = slices.into_iter().map(|slice| {
        let mut slice = slice.clone();
        let metadata = slice["metadata"].as_object_mut().expect("an object");
        for of_server in [
            "name",
            "uid",
            "resourceVersion",
            "creationTimestamp",
            "managedFields",
        ] {
            metadata.remove(of_server);
        }
        slice["metadata"]["ownerReferences"][0]["uid"].take();
        let spec = &slice["spec"];
        (
            format!(
                "{} {}",
                spec["driver"].as_str().unwrap(),
                spec["pool"]["name"].as_str().unwrap()
            ),
            slice,
        )
    });
    each.collect()
}

#[tokio::test]
async fn simulated_slices_equal_those_of_daemon() {
    let scene = Scene::start().await;
    let _simulation = scene.run(3, &[]);
    // Nodes 0 and 2 have a GPU and a network card in two pools, node 1 has the GPU alone; each has a pool of two drivers more.
    let simulated = scene.slices(11).await;
    let nodes: Vec<_> = scene
        .api
        .list("nodes")
        .iter()
        .map(|node| node["metadata"]["name"].clone())
        .collect();
    assert_eq!(nodes, ["virtual-0", "virtual-1", "virtual-2"]);

    let api = ApiServer::start().await;
    api.add_node("virtual-1");
    let root = scene.root.beside();
    make_kubelet_root(&root);
    let options = options_of("virtual-1", &api.kubeconfig(&root.path().join("two")));
    let options = options.arg("--hardware", scene.machines[1].display().to_string());
    let _daemon = Daemon::start_on(root, options).await;
    let real = api.wait_for("the daemon's slices", |state| {
        let slices = state.objects("resourceslices");
        (slices.len() == 3).then(|| by_pool(slices))
    });
    let of_node = |pool: &&String| pool.split([' ', '/']).nth(1) == Some("virtual-1");
    let simulated: BTreeMap<_, _> = simulated
        .into_iter()
        .filter(|(pool, _)| of_node(&pool))
        .collect();
    let text = |slices: &BTreeMap<String, Value>| serde_json::to_string_pretty(slices).unwrap();
    assert_eq!(text(&simulated), text(&real.await));
}

#[tokio::test]
async fn simulated_claims_are_prepared_and_counted() {
    let scene = Scene::start().await;
    let uid = scene.claim("before", SCRIPTED, "virtual-1/script", "device-0");
    let mut simulation = scene.root.command();
    simulation
        .args(scene.args(2))
        .stdout(std::process::Stdio::piped());
    let mut simulation = simulation.spawn().unwrap();
    let mut lines = lines(&mut simulation);
    let status = scene.status("before").await;
    assert_eq!(status[0]["pool"], "virtual-1/script", "{uid}: {status}");
    assert_eq!(status[0]["networkData"]["interfaceName"], "net1");
    scene.claim("refuse-permanent", SCRIPTED, "virtual-0/script", "device-0");
    scene.claim("plain", MOCK_GPU_NAME, "virtual-0/gpus", "gpu-3");
    scene.claim("other-node", MOCK_GPU_NAME, "other/gpus", "gpu-3");
    until(&mut lines, "2 claims prepared, 1 refused").await;
    scene.api.deallocate_claim(NAMESPACE, "before");
    // The refused claim is tried again after a minute, and counted again.
    until(&mut lines, ", 1 claims prepared, ").await;
    scene.api.delete("resourceclaims", NAMESPACE, "plain");
    until(&mut lines, ", 0 claims prepared, ").await;
}

#[tokio::test]
async fn script_makes_devices_unhealthy_or_absent() {
    let scene = Scene::start().await;
    let script = "faults:\n\
        - {nodes: virtual-1, driver: mock-gpu.nodedock.dev, devices: gpus/gpu-2, state: unhealthy, message: too hot}\n\
        - {nodes: virtual-0, devices: gpus/gpu-*, state: absent, forSeconds: 5}\n";
    let script = scene.root.write("faults.yaml", script);
    let _simulation = scene.run(2, &["--faults", script.to_str().unwrap()]);
    let gpus = |state: &nodedock_stand_ins::api_server::State, node: &str| {
        let mut slices = state.slices(MOCK_GPU_NAME).into_iter().cloned();
        slices.rfind(|slice| slice["spec"]["nodeName"] == node)
    };
    let tainted = scene.api.wait_for("the taint", |state| {
        let slice = gpus(state, "virtual-1")?;
        let devices = slice["spec"]["devices"].as_array()?.clone();
        devices
            .into_iter()
            .find(|device| !device["taints"].is_null())
    });
    let tainted = tainted.await;
    assert_eq!(tainted["name"], "gpu-2");
    assert_eq!(tainted["taints"][0]["key"], "nodedock.dev/unhealthy");
    // The pool goes with its devices, and is there again.
    let created = |state: &nodedock_stand_ins::api_server::State| {
        state
            .requests()
            .iter()
            .filter(|seen| seen.verb == "create" && seen.path.ends_with("resourceslices"))
            .count()
    };
    let is_back = |slice: Value| slice["spec"]["devices"][7] != json!(null);
    let wait = scene.api.wait_until("the devices are back", |state| {
        created(state) == 8 && gpus(state, "virtual-0").is_some_and(is_back)
    });
    wait.await;
}

#[tokio::test]
async fn invalid_input_stops_the_start() {
    let scene = Scene::start().await;
    let bad = scene
        .root
        .write("bad.yaml", "faults: [{devices: gpus/*, state: broken}]");
    scene
        .refused(
            &["--faults", bad.to_str().unwrap()],
            &["bad.yaml", "broken"],
        )
        .await;
    let bad = scene
        .root
        .write("bad.yaml", "faults: [{devices: '[', state: absent}]");
    scene
        .refused(
            &["--faults", bad.to_str().unwrap()],
            &["bad.yaml", "faults[0]", "devices"],
        )
        .await;
    scene
        .refused(&["--hardware", "/nowhere.tar"], &["/nowhere.tar"])
        .await;
    std::fs::write(
        scene.root.driver_path("scripted.grant.yaml"),
        "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n",
    )
    .unwrap();
    scene
        .refused(&[], &["scripted.wasm", "not granted", "SCRIPTED_*"])
        .await;
    std::fs::write(scene.root.driver_path("mock-gpu.config.yaml"), "pools: 3\n").unwrap();
    scene.refused(&[], &["mock-gpu", "pools"]).await;
    let empty = scene.root.path().join("empty");
    std::fs::create_dir(&empty).unwrap();
    let output = scene.root.cli(&["simulate", "--nodes", "0"]).await;
    assert!(output.failed(2).contains("--nodes"));
}

type Lines = tokio::io::Lines<tokio::io::BufReader<tokio::process::ChildStdout>>;

fn lines(child: &mut Child) -> Lines {
    use tokio::io::AsyncBufReadExt;
    tokio::io::BufReader::new(child.stdout.take().expect("it is piped")).lines()
}

/// Reads until a line has this part.
async fn until(lines: &mut Lines, part: &str) {
    let mut seen = Vec::new();
    let read = async {
        while let Some(line) = lines.next_line().await.expect("text") {
            if line.contains(part) {
                return;
            }
            seen.push(line);
        }
        panic!("it ended");
    };
    let found = tokio::time::timeout(nodedock_tests::DEADLINE, read).await;
    assert!(found.is_ok(), "no line has {part:?}: {seen:#?}");
}
