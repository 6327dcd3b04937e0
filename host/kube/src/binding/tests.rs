//! The task at an API server in memory, with claims that are fakes. The clock is turned, not waited for.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use nodedock_stand_ins::api_server::{Allocated, ApiServer};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::sleep;

use super::decide::{EARLY_PREPARE_MAX, IDLE_LOOK, WITHDRAWN_GRACE};
use super::*;
use crate::client::tests::over;
use crate::pools::{NodePools, PoolNames};
use crate::slices::BindingRule;
use nodedock_base::changes::Changes;
use nodedock_core::driver::Published;
use nodedock_core::manager::claims::source::ClaimSource;
use nodedock_core::registry::Registry;
use nodedock_model::{
    BindingConditions, ClaimState, Device, DeviceName, DriverKind, DriverPart, Inventory,
    KubeletHold, Pool, PoolName,
};

const GPU: &str = "gpu.example.com";
const NODE: &str = "node-1";

fn gpu() -> DriverName {
    DriverName::new(GPU).unwrap()
}

fn node() -> ObjectName {
    ObjectName::new(NODE).unwrap()
}

/// Claims that are held for a kubelet.
#[derive(Default)]
struct FakeClaims {
    records: Mutex<BTreeMap<Key, Arc<ClaimRecord>>>,
    /// `prepare NAME DEVICE` and `release NAME: WHY`.
    calls: Mutex<Vec<String>>,
    refusal: Mutex<Option<Problem>>,
}

impl FakeClaims {
    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut self.calls.lock())
    }

    fn put(&self, claim: &Claim, early: bool) {
        let mut record = ClaimRecord::new(claim.id.clone(), ClaimState::Prepared, "boot-1");
        record.allocation = claim.allocation.clone().unwrap();
        let consumers = claim.reserved_for.clone();
        record.kubelet = Some(KubeletHold {
            consumers,
            early,
            ..KubeletHold::default()
        });
        record.drivers.insert(
            gpu(),
            Box::new(DriverPart {
                kubelet: true,
                ..DriverPart::default()
            }),
        );
        let key = (claim.id.namespace.clone(), claim.id.name.clone());
        self.records.lock().insert(key, Arc::new(record));
    }

    /// The kubelet requests what is there.
    fn request(&self) {
        for record in self.records.lock().values_mut() {
            Arc::make_mut(record).kubelet.as_mut().unwrap().early = false;
        }
    }
}

#[async_trait]
impl EarlyClaims for FakeClaims {
    fn early(&self) -> Vec<ObjectRef> {
        self.records
            .lock()
            .values()
            .filter(|record| record.is_held_early())
            .map(|record| record.id.clone())
            .collect()
    }

    fn held(&self, namespace: &ObjectName, name: &ObjectName) -> Option<Arc<ClaimRecord>> {
        self.records
            .lock()
            .get(&(namespace.clone(), name.clone()))
            .cloned()
    }

    async fn prepare(&self, driver: &DriverName, claim: Claim) -> Result<(), Problem> {
        assert_eq!(driver.as_str(), GPU);
        let device = &claim.allocation.as_ref().unwrap().devices[0];
        self.calls.lock().push(format!(
            "prepare {} {}/{}",
            claim.id.name, device.pool, device.device
        ));
        if let Some(problem) = self.refusal.lock().clone() {
            return Err(problem);
        }
        self.put(&claim, true);
        Ok(())
    }

    async fn release(&self, claim: &Uid, why: &str) -> Result<(), Problem> {
        let mut records = self.records.lock();
        records.retain(|(_, name), record| {
            let is_meant = record.id.uid == *claim && record.is_held_early();
            if is_meant {
                self.calls.lock().push(format!("release {name}: {why}"));
            }
            !is_meant
        });
        Ok(())
    }
}

/// A node with a driver whose devices have binding conditions.
struct Scene {
    server: Arc<ApiServer>,
    claims: Arc<FakeClaims>,
    api_claims: ApiClaims,
    drivers: watch::Sender<DriverSnapshot>,
    settings: watch::Sender<SliceSettings>,
    registry: Registry,
    refusals: Arc<Mutex<Vec<String>>>,
    allocations: AtomicU64,
    conditions: Conditions,
    /// Tasks of the claim cache.
    _tasks: Tasks,
}

impl Scene {
    async fn new() -> Self {
        let (server, tasks) = (Arc::new(ApiServer::start().await), Tasks::new());
        let registry = Registry::new(Changes::default(), Conditions::default(), None);
        registry
            .sources
            .update(DriverKind::Wasm, "gpu.wasm", |view| view.name = Some(gpu()));
        let pools = NodePools {
            names: PoolNames { node: node() },
            registry: registry.clone(),
        };
        let api_claims = ApiClaims::new(over(&server), pools, Conditions::default(), tasks.clone());
        let conditions = BindingConditions {
            conditions: vec![BindingConditions::PREPARED.to_owned()],
            failures: vec![BindingConditions::PREPARE_FAILED.to_owned()],
        };
        let rule = BindingRule {
            driver: gpu(),
            pool: None,
            conditions,
        };
        Self {
            server,
            claims: Arc::default(),
            api_claims,
            drivers: watch::Sender::new(serving()),
            settings: watch::Sender::new(SliceSettings {
                binding: vec![rule],
                ..SliceSettings::default()
            }),
            registry,
            refusals: Arc::default(),
            allocations: AtomicU64::default(),
            conditions: Conditions::default(),
            _tasks: tasks,
        }
    }

    fn start(&self) -> (Tasks, Binding) {
        let (tasks, refusals) = (Tasks::new(), self.refusals.clone());
        let parts = BindingParts {
            client: over(&self.server),
            node: node(),
            claims: self.api_claims.clone(),
            drivers: self.drivers.subscribe(),
            settings: self.settings.subscribe(),
            early: self.claims.clone(),
            on_refused: Arc::new(move |refusal| {
                let (claim, problem) = (&refusal.claim.name, refusal.problem);
                refusals.lock().push(format!(
                    "{claim} for {}: {}",
                    refusal.consumers.len(),
                    problem.message
                ));
            }),
            conditions: self.conditions.clone(),
        };
        let binding = Binding::start(&tasks, parts);
        (tasks, binding)
    }

    /// Puts a pod that names a claim. Gives its UID.
    fn pod(&self, name: &str, claim: &str, nominated: &str) -> String {
        self.server.put(json!({
            "kind": "Pod",
            "metadata": { "name": name, "namespace": "default", "uid": format!("uid-{name}") },
            "spec": {
                "containers": [{ "name": "main", "image": "registry.k8s.io/pause:3.10" }],
                "resourceClaims": [{ "name": "gpu", "resourceClaimName": claim }],
            },
            "status": { "phase": "Pending", "nominatedNodeName": nominated },
        }));
        format!("uid-{name}")
    }

    fn edit_pod(&self, name: &str, edit: impl FnOnce(&mut Value)) {
        self.server.edit("pods", "default", name, edit);
    }

    /// The scheduler binds the pod: the nomination is cleared.
    fn bind(&self, name: &str, node: &str) {
        self.edit_pod(name, |pod| {
            pod["spec"]["nodeName"] = node.into();
            pod["status"]["nominatedNodeName"] = Value::Null;
        });
    }

    fn allocate(&self, name: &str, pool: &str, device: &str, pod: &str) {
        let (conditions, failures) = (["nodedock.dev/prepared"], ["nodedock.dev/prepare-failed"]);
        let claim = Allocated::new("default", name).reserved_for(pod, &format!("uid-{pod}"));
        self.server.allocate_claim(claim.node(NODE).result(json!({
            "request": "gpu", "driver": GPU, "pool": pool, "device": device,
            "bindingConditions": conditions, "bindingFailureConditions": failures,
        })));
        // Kubernetes' times have seconds, and these come one after the other.
        let second = 10 + self.allocations.fetch_add(1, Relaxed);
        self.server
            .edit("resourceclaims", "default", name, |claim| {
                claim["status"]["allocation"]["allocationTimestamp"] =
                    format!("2026-11-25T10:00:{second}Z").into();
            });
    }

    /// A pod for which the scheduler waits.
    fn wait(&self, pod: &str, claim: &str, device: &str) {
        self.pod(pod, claim, NODE);
        self.allocate(claim, "node-1/gpus", device, pod);
    }

    fn requests(&self, resource: &str) -> usize {
        self.server
            .requests()
            .iter()
            .filter(|seen| seen.resource == resource)
            .count()
    }
}

fn serving() -> DriverSnapshot {
    let devices =
        ["gpu-0", "gpu-1"].map(|name| (DeviceName::new(name).unwrap(), Device::default()));
    let pool = Pool {
        devices: devices.into(),
        ..Pool::default()
    };
    let inventory = Inventory {
        pools: [(PoolName::new("gpus").unwrap(), pool)].into(),
    };
    let published = Arc::new(Published {
        inventory,
        ..Published::default()
    });
    DriverSnapshot {
        serving: [(gpu(), published)].into(),
        ..DriverSnapshot::default()
    }
}

async fn pass(time: Duration) {
    sleep(time).await;
}

async fn a_moment() {
    sleep(Duration::from_secs(2)).await;
}

#[tokio::test(start_paused = true)]
async fn allocated_claim_is_prepared_early_once() {
    let scene = Scene::new().await;
    let (_tasks, binding) = scene.start();
    // The scheduler nominates before it allocates.
    scene.pod("a", "one", NODE);
    pass(Duration::from_secs(3)).await;
    assert!(scene.claims.calls().is_empty());
    scene.allocate("one", "node-1/gpus", "gpu-0", "a");
    pass(Duration::from_secs(5)).await;
    assert_eq!(scene.claims.calls(), ["prepare one gpus/gpu-0"]);
    let statuses = binding
        .statuses()
        .borrow()
        .values()
        .next()
        .cloned()
        .unwrap();
    assert!(statuses.allocated_ms > 0 && statuses.devices.is_empty());
    // A pod that is bound is not nominated any more, and its kubelet may take its time.
    scene.bind("a", NODE);
    pass(WITHDRAWN_GRACE * 3).await;
    assert!(scene.claims.calls().is_empty());
    scene.claims.request();
    pass(IDLE_LOOK * 2).await;
    assert!(binding.statuses().borrow().is_empty());
    scene.server.forget_requests();
    pass(Duration::from_secs(3600)).await;
    assert!(scene.claims.calls().is_empty());
    assert_eq!(
        scene.requests("resourceclaims"),
        0,
        "nothing waits any more"
    );
}

/// The kubelet's request of a claim for which a scheduler waited needs no request to the API server, and sees what changed meanwhile.
#[tokio::test(start_paused = true)]
async fn awaited_claim_is_read_before_request() {
    let scene = Scene::new().await;
    let (_tasks, _binding) = scene.start();
    scene.wait("a", "one", "gpu-0");
    pass(Duration::from_secs(20)).await;
    scene.bind("a", NODE);
    a_moment().await;
    let (namespace, name) = (default_namespace(), ObjectName::new("one").unwrap());
    let uid = scene.claims.held(&namespace, &name).unwrap().id.uid.clone();
    scene.server.forget_requests();
    let device = async || {
        let claim = scene.api_claims.claim_with_uid(&namespace, &name, &uid);
        let allocation = claim.await.unwrap().unwrap().allocation;
        allocation.map(|allocation| allocation.devices[0].device.to_string())
    };
    assert_eq!(device().await.as_deref(), Some("gpu-0"));
    let path = "/status/allocation/devices/results/0/device";
    scene
        .server
        .edit("resourceclaims", "default", "one", |claim| {
            *claim.pointer_mut(path).unwrap() = "gpu-1".into();
        });
    a_moment().await;
    assert_eq!(device().await.as_deref(), Some("gpu-1"));
    assert_eq!(scene.requests("resourceclaims"), 0);
}

fn default_namespace() -> ObjectName {
    ObjectName::new("default").unwrap()
}

#[tokio::test(start_paused = true)]
async fn extended_resource_claim_is_prepared_early() {
    let scene = Scene::new().await;
    let (_tasks, _binding) = scene.start();
    scene.pod("a", "unused", NODE);
    scene.edit_pod("a", |pod| pod["spec"]["resourceClaims"] = json!([]));
    pass(Duration::from_secs(3)).await;
    // The scheduler makes the claim, and names it in the pod before it waits.
    scene.allocate("made", "node-1/gpus", "gpu-0", "a");
    let mapping = json!([{ "containerName": "main", "resourceName": "example.com/gpu", "requestName": "gpu" }]);
    scene.edit_pod("a", |pod| {
        pod["status"]["extendedResourceClaimStatus"] =
            json!({ "resourceClaimName": "made", "requestMappings": mapping });
    });
    pass(Duration::from_secs(5)).await;
    assert_eq!(scene.claims.calls(), ["prepare made gpus/gpu-0"]);
}

#[tokio::test(start_paused = true)]
async fn claims_not_bound_here_are_released() {
    let scene = Scene::new().await;
    let (_tasks, _binding) = scene.start();
    scene.wait("a", "one", "gpu-0");
    scene.wait("b", "two", "gpu-1");
    a_moment().await;
    assert_eq!(scene.claims.calls().len(), 2);
    // The scheduler takes the device back, and then another one.
    scene.server.deallocate_claim("default", "one");
    pass(IDLE_LOOK * 2).await;
    assert_eq!(
        scene.claims.calls(),
        ["release one: it is not allocated to this node any more"]
    );
    scene.allocate("one", "node-1/gpus", "gpu-2", "a");
    pass(IDLE_LOOK * 2).await;
    assert_eq!(scene.claims.calls(), ["prepare one gpus/gpu-2"]);
    scene.server.deallocate_claim("default", "one");
    scene.allocate("one", "node-1/gpus", "gpu-3", "a");
    pass(IDLE_LOOK * 2).await;
    assert_eq!(
        scene.claims.calls(),
        [
            "release one: it was allocated again",
            "prepare one gpus/gpu-3"
        ]
    );
    // One pod is gone, and the other is not nominated any more.
    scene.server.delete("pods", "default", "a");
    a_moment().await;
    assert_eq!(
        scene.claims.calls(),
        ["release one: its consumers are gone"]
    );
    scene.edit_pod("b", |pod| pod["status"]["nominatedNodeName"] = Value::Null);
    pass(WITHDRAWN_GRACE / 2).await;
    scene.edit_pod("b", |pod| pod["status"]["nominatedNodeName"] = NODE.into());
    pass(WITHDRAWN_GRACE * 2).await;
    assert!(scene.claims.calls().is_empty(), "the scheduler tried again");
    scene.edit_pod("b", |pod| {
        pod["status"]["nominatedNodeName"] = "node-2".into()
    });
    pass(WITHDRAWN_GRACE + IDLE_LOOK).await;
    assert_eq!(
        scene.claims.calls(),
        ["release two: its pod is not nominated to this node any more"]
    );
}

#[tokio::test(start_paused = true)]
async fn restart_releases_only_unneeded_early_claims() {
    let scene = Scene::new().await;
    let (tasks, _binding) = scene.start();
    for (pod, claim) in [
        ("a", "stays"),
        ("b", "gone"),
        ("c", "bound"),
        ("d", "withdrawn"),
    ] {
        scene.wait(pod, claim, "gpu-0");
    }
    a_moment().await;
    assert_eq!(scene.claims.calls().len(), 4);
    assert!(tasks.drain(Duration::from_secs(1)).await);
    scene.server.delete("pods", "default", "b");
    scene.bind("c", NODE);
    scene.server.deallocate_claim("default", "withdrawn");
    scene.edit_pod("d", |pod| {
        pod["status"]["nominatedNodeName"] = "node-2".into()
    });
    // The driver is not loaded yet.
    scene.drivers.send_replace(DriverSnapshot::default());
    let (_tasks, _binding) = scene.start();
    pass(IDLE_LOOK * 2).await;
    let mut calls = scene.claims.calls();
    calls.sort();
    let released = [
        "release gone: its consumers are gone",
        "release withdrawn: it is not allocated to this node any more",
    ];
    assert_eq!(calls[1..], released);
    assert_eq!(
        calls[0], "prepare stays gpus/gpu-0",
        "which the manager answers from its record"
    );
    pass(Duration::from_secs(3600)).await;
    assert!(scene.claims.calls().is_empty());
}

#[tokio::test(start_paused = true)]
async fn watch_opens_only_with_binding_conditions() {
    let scene = Scene::new().await;
    let plain = Scene {
        settings: watch::Sender::default(),
        ..scene
    };
    plain.wait("a", "one", "gpu-0");
    let (_tasks, _binding) = plain.start();
    pass(Duration::from_secs(60)).await;
    assert_eq!(
        (plain.requests("pods"), plain.requests("resourceclaims")),
        (0, 0)
    );
    // A driver that names conditions itself.
    let scheduling = nodedock_model::DeviceScheduling {
        binding_conditions: vec!["example.com/attached".to_owned()],
        binding_failure_conditions: vec!["example.com/failed".to_owned()],
        ..Default::default()
    };
    let mut drivers = serving();
    let mut published = Published::clone(&drivers.serving[&gpu()]);
    let pool = published.inventory.pools.values_mut().next().unwrap();
    pool.devices.values_mut().next().unwrap().scheduling = Some(Box::new(scheduling));
    drivers.serving.insert(gpu(), Arc::new(published));
    plain.drivers.send_replace(drivers);
    a_moment().await;
    assert_eq!(plain.claims.calls(), ["prepare one gpus/gpu-0"]);
    assert!(plain.server.requests().iter().any(|seen| {
        seen.resource == "pods" && seen.query["fieldSelector"] == "status.nominatedNodeName=node-1"
    }));
    // When nothing waits any more, the watch ends with the devices.
    plain.drivers.send_replace(DriverSnapshot::default());
    plain.server.delete("pods", "default", "a");
    plain.server.delete("resourceclaims", "default", "one");
    pass(Duration::from_secs(60)).await;
    assert_eq!(
        plain.claims.calls(),
        ["release one: its ResourceClaim is gone"]
    );
    assert_eq!(plain.server.look(|state| state.watches("pods")), 0);
}

#[tokio::test(start_paused = true)]
async fn refused_claim_gets_condition_without_taint() {
    let scene = Scene::new().await;
    let (_tasks, binding) = scene.start();
    *scene.claims.refusal.lock() = Some(Problem::invalid(ProblemCode::BadValue, "no such profile"));
    scene.wait("a", "one", "gpu-0");
    pass(IDLE_LOOK * 4).await;
    assert_eq!(
        scene.claims.calls(),
        ["prepare one gpus/gpu-0"],
        "it is not tried again"
    );
    let types = || {
        let statuses = binding.statuses().borrow().clone();
        let devices = statuses.into_values().flat_map(|statuses| statuses.devices);
        let conditions = devices.flat_map(|device| device.status.conditions);
        conditions
            .map(|condition| format!("{} {}", condition.kind, condition.reason))
            .collect::<Vec<_>>()
    };
    assert_eq!(types(), ["nodedock.dev/prepare-failed BadValue"]);
    assert_eq!(*scene.refusals.lock(), ["one for 1: no such profile"]);
    assert!(binding.failed().borrow().is_empty());
    *scene.claims.refusal.lock() = None;
    scene.server.deallocate_claim("default", "one");
    scene.allocate("one", "node-1/gpus", "gpu-0", "a");
    pass(IDLE_LOOK * 2).await;
    assert_eq!(
        (scene.claims.calls(), types()),
        (vec!["prepare one gpus/gpu-0".to_owned()], vec![])
    );
}

#[tokio::test(start_paused = true)]
async fn failed_device_is_tainted_until_prepared() {
    let scene = Scene::new().await;
    let (_tasks, binding) = scene.start();
    let unavailable = || {
        Some(Problem::unavailable(
            ProblemCode::DriverNotServing,
            "the link is down",
        ))
    };
    *scene.claims.refusal.lock() = unavailable();
    scene.wait("a", "one", "gpu-0");
    pass(EARLY_PREPARE_MAX - Duration::from_secs(1)).await;
    assert!(binding.failed().borrow().is_empty() && scene.refusals.lock().is_empty());
    pass(IDLE_LOOK * 2).await;
    let device = |name: &str| {
        (
            gpu(),
            PoolName::new("gpus").unwrap(),
            DeviceName::new(name).unwrap(),
        )
    };
    assert_eq!(*binding.failed().borrow(), [device("gpu-0")].into());
    assert_eq!(*scene.refusals.lock(), ["one for 1: the link is down"]);
    scene.server.delete("pods", "default", "a");
    scene.server.delete("resourceclaims", "default", "one");
    // Another claim tolerates the taint, and the device works again.
    *scene.claims.refusal.lock() = None;
    scene.wait("b", "two", "gpu-0");
    a_moment().await;
    assert!(binding.failed().borrow().is_empty());

    *scene.claims.refusal.lock() = unavailable();
    scene.wait("c", "three", "gpu-1");
    pass(EARLY_PREPARE_MAX + IDLE_LOOK * 2).await;
    assert_eq!(*binding.failed().borrow(), [device("gpu-1")].into());
    scene.server.delete("pods", "default", "c");
    scene.server.delete("resourceclaims", "default", "three");
    pass(FAILED_TAINT).await;
    assert!(
        binding.failed().borrow().is_empty(),
        "the pod is gone, and nothing else reports it"
    );
}

#[tokio::test(start_paused = true)]
async fn foreign_claims_are_not_prepared_early() {
    let scene = Scene::new().await;
    let native = DriverName::new("native.example.com").unwrap();
    scene
        .registry
        .sources
        .update(DriverKind::Grpc, "native.sock", |view| {
            view.name = Some(native.clone())
        });
    let (_tasks, binding) = scene.start();
    scene.pod("a", "missing", NODE);
    scene.pod("b", "elsewhere", NODE);
    scene.allocate("elsewhere", "node-2/gpus", "gpu-0", "b");
    scene.pod("c", "of-others", NODE);
    scene.allocate("of-others", "node-1/gpus", "gpu-0", "other");
    for (pod, claim, driver) in [
        ("d", "native", native.as_str()),
        ("e", "unknown", "unknown.example.com"),
    ] {
        scene.pod(pod, claim, NODE);
        let reserved = Allocated::new("default", claim)
            .node(NODE)
            .reserved_for(pod, &format!("uid-{pod}"));
        scene.server.allocate_claim(reserved.result(json!({
            "request": "gpu", "driver": driver, "pool": "node-1", "device": "gpu-0",
            "bindingConditions": ["A"], "bindingFailureConditions": ["B"],
        })));
    }
    // A claim without conditions, one for another node, and one that the API server should not have.
    scene.pod("f", "plain", NODE);
    let plain = Allocated::new("default", "plain")
        .node(NODE)
        .reserved_for("f", "uid-f");
    scene
        .server
        .allocate_claim(plain.device("gpu", GPU, "node-1/gpus", "gpu-0"));
    scene.wait("g", "moved", "gpu-0");
    scene
        .server
        .edit("resourceclaims", "default", "moved", |claim| {
            let selector = &mut claim["status"]["allocation"]["nodeSelector"]["nodeSelectorTerms"]
                [0]["matchFields"][0];
            selector["values"] = json!(["node-2"]);
        });
    scene.wait("h", "odd", "gpu-0");
    scene
        .server
        .edit("resourceclaims", "default", "odd", |claim| {
            claim["status"]["allocation"]["devices"]["results"][0]["bindingConditions"] =
                json!(["not a type"]);
        });
    scene.pod("i", "nominated-elsewhere", "node-2");
    scene.allocate("nominated-elsewhere", "node-1/gpus", "gpu-0", "i");
    pass(Duration::from_secs(700)).await;
    assert!(scene.claims.calls().is_empty());
    assert!(binding.failed().borrow().is_empty() && scene.refusals.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn refused_watch_sets_condition_until_allowed() {
    let scene = Scene::new().await;
    scene.server.deny("list", "pods");
    let (_tasks, _binding) = scene.start();
    scene.wait("a", "one", "gpu-0");
    pass(Duration::from_secs(10)).await;
    let conditions = scene.conditions.list();
    assert_eq!(
        conditions[0].problem.code,
        ProblemCode::NominatedPodsUnreadable
    );
    assert!(
        conditions[0]
            .problem
            .message
            .contains("right to watch pods"),
        "{:?}",
        conditions[0]
    );
    assert!(scene.claims.calls().is_empty());
    scene.server.allow_all();
    pass(Duration::from_secs(60)).await;
    assert!(scene.conditions.list().is_empty());
    assert_eq!(scene.claims.calls(), ["prepare one gpus/gpu-0"]);
}

#[tokio::test(start_paused = true)]
async fn early_claims_beyond_limit_wait() {
    let scene = Scene::new().await;
    for index in 0..NOMINATED_PODS_MAX + 50 {
        scene.pod(&format!("p-{index:04}"), &format!("c-{index:04}"), NODE);
    }
    let (_tasks, _binding) = scene.start();
    pass(Duration::from_secs(60)).await;
    let looked_at = || {
        let requests = scene
            .server
            .requests()
            .into_iter()
            .filter(|seen| seen.resource == "resourceclaims");
        requests.map(|seen| seen.name).collect::<BTreeSet<_>>()
    };
    assert_eq!(looked_at().len(), EARLY_CLAIMS_MAX);
    for index in 0..NOMINATED_PODS_MAX {
        scene
            .server
            .delete("pods", "default", &format!("p-{index:04}"));
    }
    pass(Duration::from_secs(120)).await;
    scene.wait("last", "last", "gpu-0");
    pass(Duration::from_secs(60)).await;
    assert_eq!(scene.claims.calls(), ["prepare last gpus/gpu-0"]);
}
