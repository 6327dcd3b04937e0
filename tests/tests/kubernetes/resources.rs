//! Extended resources, allocated by the kubelet's device manager.

use std::time::{Duration, Instant};

use native_device_plugin::{Device, Event, Options as PluginOptions, Plugin, Script};
use nodedock_proto::node::v1;
use nodedock_tests::Options;
use nodedock_tests::compose;
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use serde_json::{Value, json};

use crate::scene::{Scene, pod};

const RESOURCE: &str = "example.com/gpu";
const NIC: &str = "example.com/nic";
const OF_A_CLASS: &str = "example.com/gpu-of-a-class";
/// The longest time from a DeviceClass to the slices of its pool.
const POOL_MOVES: Duration = Duration::from_secs(5);
const THROUGH_DRA: &str = "example.com/gpu-through-dra";
const GPUS: &str = "pools: [{name: gpus, count: 4, extendedResource: example.com/gpu}]\n";

impl Scene {
    async fn ask(&self, what: &str, pod: &str) -> Value {
        let done = self.kubelet.ask(what, &self.node, pod, "main").await;
        done.unwrap_or_else(|why| panic!("{what} {pod}: {why:?}\n{}", self.daemon.log()))
            .result
    }

    /// Creates a pod whose container wants so many devices.
    async fn pod_with_devices(&self, name: &str, count: u32) {
        self.pod_with(name, RESOURCE, count).await;
    }

    async fn pod_with(&self, name: &str, resource: &str, count: u32) {
        let container = json!({"resources": {"limits": {resource: count.to_string()}}});
        self.api
            .post(
                &self.path("pods"),
                &pod(&self.node, name, json!([]), container),
            )
            .await
            .done();
    }

    /// The devices of all CDI files, sorted.
    fn rendered(&self) -> Vec<String> {
        let files = self.daemon.cdi_files();
        let mut names: Vec<_> = files.iter().flat_map(|file| file.devices()).collect();
        names.sort();
        names
    }

    /// The CDI devices with which a kubelet starts the pod's container, sorted.
    async fn started(&self, pod: &str) -> Vec<String> {
        let options = self.ask("start", pod).await;
        let names = options["cdi"]
            .as_array()
            .unwrap_or_else(|| panic!("no devices: {options}"));
        let mut names: Vec<_> = names
            .iter()
            .filter_map(Value::as_str)
            .map(str::to_owned)
            .collect();
        names.sort();
        names
    }
}

#[tokio::test]
async fn pool_devices_survive_restarts_until_release() {
    let Some(mut scene) = Scene::with_gpus("resources", GPUS).await else {
        return;
    };
    scene.kubelet.allocatable(RESOURCE, 4).await;
    scene.pod_with_devices("two", 2).await;
    scene.ask("allocate", "two").await;
    let names = scene.started("two").await;
    assert_eq!(names, scene.rendered());

    scene.kubelet.restart().await;
    scene.kubelet.allocatable(RESOURCE, 4).await;
    assert_eq!(scene.started("two").await, names);
    scene.daemon.crash().await;
    scene.daemon.until_serving(MOCK_GPU_FILE).await;
    scene.kubelet.allocatable(RESOURCE, 4).await;
    let again = scene
        .kubelet
        .repeat("start", &scene.node, "two", MOCK_GPU_NAME)
        .await;
    assert_eq!(
        again.result["cdi"].as_array().map(Vec::len),
        Some(2),
        "{again:?}"
    );

    // The rest goes to another pod, and all of them to a third when the kubelet knows that both are gone.
    scene.pod_with_devices("rest", 2).await;
    scene
        .kubelet
        .repeat("allocate", &scene.node, "rest", MOCK_GPU_NAME)
        .await;
    let others = scene.started("rest").await;
    assert!(
        others.len() == 2 && !others.iter().any(|name| names.contains(name)),
        "{others:?} and {names:?}"
    );
    for pod in ["two", "rest"] {
        scene
            .api
            .delete_at_once(&format!("{}/{pod}", scene.path("pods")))
            .await
            .done();
    }
    scene.pod_with_devices("all", 4).await;
    scene
        .kubelet
        .repeat("allocate", &scene.node, "all", MOCK_GPU_NAME)
        .await;
    let names = scene.started("all").await;
    assert_eq!(names.len(), 4, "{names:?}");
    assert_eq!(names, scene.rendered());
    scene.assert_nothing_forbidden();
}

#[tokio::test]
async fn native_plugin_gets_every_kubelet_call() {
    let Some(mut scene) = Scene::start_with("plugin", |options| options.flag("--supervise")).await
    else {
        return;
    };
    let options = PluginOptions::new(NIC, &scene.daemon.state().join("device-plugins"));
    // Prefers the last one.
    let script =
        Script::ok().choose(|choice| choice.available.iter().max().cloned().into_iter().collect());
    let options = PluginOptions {
        pre_start: true,
        ..options
    };
    let plugin = Plugin::unregistered(options, script).expect("it listens");
    plugin.list(
        (0..3)
            .map(|n| Device::healthy(&format!("nic-{n}")))
            .collect(),
    );
    let work = async {
        scene.kubelet.allocatable(NIC, 3).await;
        for (pod, device) in [("one", "nic-2"), ("two", "nic-1")] {
            scene.pod_with(pod, NIC, 1).await;
            // After a crash the kubelet has no healthy devices for a moment.
            scene
                .kubelet
                .repeat("allocate", &scene.node, pod, NIC)
                .await;
            assert_eq!(
                scene.ask("start", pod).await["env"]["NATIVE_DEVICES"],
                device
            );
            let mut calls = Vec::new();
            while !matches!(calls.last(), Some(Event::PreStart { .. })) {
                calls.push(plugin.event().await);
            }
            let called =
                |wanted: fn(&Event) -> bool| calls.iter().filter(|call| wanted(call)).count();
            assert_eq!(
                called(|call| matches!(call, Event::Preferred(_))),
                1,
                "{calls:?}"
            );
            assert_eq!(
                called(|call| matches!(call, Event::Allocate { .. })),
                1,
                "{calls:?}"
            );
            // It has to register again, and the kubelet knows its devices meanwhile.
            scene.daemon.crash_supervised().await;
        }
        scene.daemon.until_allocatable(NIC, 3).await;
        let container = v1::Container {
            name: "main".to_owned(),
            extended_resources: [(NIC.to_owned(), 1)].into(),
            ..v1::Container::default()
        };
        let pod = Some(compose::pod("of-the-node-api"));
        let request = v1::PreparePodRequest {
            pod,
            containers: vec![container],
            ..Default::default()
        };
        let answer = scene.daemon.prepare(request).await;
        let problem = answer.resources[0]
            .problem
            .clone()
            .expect("the kubelet alone allocates them");
        assert_eq!(problem.code, "resource-of-kubelet", "{problem:?}");
    };
    tokio::select! {
        ended = plugin.keep_registered() => panic!("the plugin ended: {ended:?}"),
        () = work => {}
    }
    scene.assert_nothing_forbidden();
}

/// The scheduler makes a claim for a pod that wants a resource of which no node has any, and a class has devices.
#[tokio::test]
async fn class_resource_becomes_a_scheduler_claim() {
    let Some(scene) = Scene::with_gpus("classes", "pools: [{name: gpus, count: 4}]\n").await else {
        return;
    };
    let selector = json!({"cel": {"expression": format!("device.driver == \"{MOCK_GPU_NAME}\"")}});
    let spec = json!({"selectors": [selector], "extendedResourceName": OF_A_CLASS});
    let class = json!({"metadata": {"name": "of-a-resource"}, "spec": spec});
    scene
        .api
        .post("/apis/resource.k8s.io/v1/deviceclasses", &class)
        .await
        .done();
    let container = json!({"resources": {"limits": {OF_A_CLASS: "2"}}});
    scene
        .api
        .post(
            &scene.path("pods"),
            &pod(&scene.node, "two", json!([]), container),
        )
        .await
        .done();
    let names = scene.prepared("two").await;
    assert_eq!((names.len(), names), (2, scene.rendered()));
    scene.unprepared("two").await;
    scene.daemon.assert_empty().await;
    scene.assert_nothing_forbidden();
}

/// The mechanism is set in the config, since the server is older than 1.37. The class is created with the rights of an administrator.
#[tokio::test]
async fn adapter_lets_scheduler_allocate_plugin_devices() {
    const ADAPTED: &str = "example.com/nic-through-dra";
    let config = format!(
        "kubernetes: {{extendedResources: dra}}\n\
         devicePluginAdapters: [{{resource: {ADAPTED}, driver: nic.example.com, pool: nics}}]\n"
    );
    let through_dra = |options: Options| options.config(&config);
    let Some(mut scene) = Scene::start_with("adapter", through_dra).await else {
        return;
    };
    // A kubelet without any pod may not know its pods yet.
    scene.pod_with_devices("other", 0).await;
    let options = PluginOptions::new(ADAPTED, &scene.daemon.state().join("device-plugins"));
    let plugin = Plugin::unregistered(options, Script::ok()).expect("it listens");
    plugin.list(
        (0..4)
            .map(|n| Device::healthy(&format!("nic:{n}")))
            .collect(),
    );
    let work = async {
        scene.kubelet.registered("nic.example.com").await;
        let apply = |kubeconfig: &std::path::Path| {
            let file = kubeconfig.to_str().expect("UTF-8").to_owned();
            ["get", "classmanifests", "--apply", "--kubeconfig"]
                .map(str::to_owned)
                .into_iter()
                .chain([file])
                .collect()
        };
        scene.daemon.until_allocatable(ADAPTED, 4).await;
        let run = async |args: Vec<String>| {
            scene
                .daemon
                .cli(&args.iter().map(String::as_str).collect::<Vec<_>>())
                .await
        };
        run(apply(&scene.server.admin))
            .await
            .done_with(&["deviceclass example.com-nic-through-dra created"]);
        run(apply(&scene.server.admin))
            .await
            .done_with(&["unchanged"]);
        let denied = run(apply(&scene.kubeconfig)).await.failed(1);
        assert!(
            denied.contains("forbidden") && denied.contains("deviceclasses"),
            "{denied}"
        );
        scene.until_devices("nic.example.com", 4).await;
        scene.pod_with("two", ADAPTED, 2).await;
        let names = scene.prepared("two").await;
        assert_eq!(names.len(), 2, "{names:?}");
        let claims = scene.daemon.claims().await;
        let devices: Vec<_> = claims
            .iter()
            .flat_map(|claim| &claim.drivers)
            .flat_map(|of| &of.devices)
            .collect();
        assert!(
            devices.len() == 2
                && devices
                    .iter()
                    .all(|device| device.starts_with("adapter/nics/nic--3a")),
            "{devices:?}"
        );
        // It registers again, and neither its slices nor its claim change.
        scene.daemon.crash().await;
        scene.daemon.until_allocatable(ADAPTED, 4).await;
        scene.until_devices("nic.example.com", 4).await;
        scene.unprepared_again("two", "nic.example.com").await;
        scene.daemon.assert_empty().await;
    };
    tokio::select! {
        ended = plugin.keep_registered() => panic!("the plugin ended: {ended:?}"),
        () = work => {}
    }
}

/// The mechanism is set in the config, since the server is older than 1.37: the pool is in slices, and the class is the one that the
/// command prints.
#[tokio::test]
async fn named_pool_is_allocated_through_class() {
    let config = "pools: [{name: gpus, count: 4}, {name: named, count: 4, firstIndex: 4, extendedResource: example.com/gpu-through-dra}]\n";
    let through_dra = |options: Options| options.config("kubernetes: {extendedResources: dra}\n");
    let Some(scene) = Scene::with_gpus_and("through-dra", config, through_dra).await else {
        return;
    };
    let printed = scene
        .daemon
        .cli(&["get", "classmanifests", "-o", "json"])
        .await
        .json();
    let [class] = printed["items"].as_array().expect("a list").as_slice() else {
        panic!("{printed:#}")
    };
    let applied = Instant::now();
    scene
        .api
        .post("/apis/resource.k8s.io/v1/deviceclasses", class)
        .await
        .done();
    scene.until_devices(MOCK_GPU_NAME, 8).await;
    let waited = applied.elapsed();
    assert!(waited < POOL_MOVES, "{waited:?}");
    scene.pod_with("two", THROUGH_DRA, 2).await;
    let names = scene.prepared("two").await;
    assert_eq!((names.len(), &names), (2, &scene.rendered()));
    let claims = scene.daemon.claims().await;
    let devices: Vec<_> = claims
        .iter()
        .flat_map(|claim| &claim.drivers)
        .flat_map(|of| &of.devices)
        .collect();
    assert!(
        devices
            .iter()
            .all(|device| device.starts_with("through-dra/named/")),
        "{devices:?}"
    );
    scene.unprepared("two").await;
    scene.daemon.assert_empty().await;
    scene.assert_nothing_forbidden();
}
