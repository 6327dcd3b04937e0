//! A node of the cluster: its objects, its kubelet, and the daemon with the rights that its deployment gives it.

use std::path::{Path, PathBuf};

use nodedock_tests::cluster::{make_kubelet_root, options_of};
use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::{Daemon, Options, Root};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::api::Api;
use crate::kubelet::{Done, Failure, Kubelet};
use crate::server::{Server, server};

/// The files of the deployment that concern the API server.
const DEPLOYED: [&str; 4] = [
    "namespace.yaml",
    "serviceaccount.yaml",
    "rbac.yaml",
    "admissionpolicy.yaml",
];
/// The namespace and the name of the daemon's account.
const ACCOUNT: &str = "nodedock";
pub(crate) const USER: &str = "system:serviceaccount:nodedock:nodedock";
pub(crate) const SCRIPTED_NAME: &str = "scripted.nodedock.dev";
pub(crate) const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

pub(crate) struct Scene {
    pub(crate) server: &'static Server,
    /// A user who may do everything.
    pub(crate) api: Api,
    /// The daemon's user.
    pub(crate) as_daemon: Api,
    /// The node's name, which is that of the namespace of its pods too.
    pub(crate) node: String,
    pub(crate) kubelet: Kubelet,
    pub(crate) daemon: Daemon,
    /// Options of a daemon of the node, except the UID of its pod.
    pub(crate) options: Options,
    /// Kubeconfig of the daemon's user.
    pub(crate) kubeconfig: PathBuf,
    /// UID of the daemon's pod.
    uid: String,
    _dir: TempDir,
}

impl Scene {
    /// A node with a kubelet and a daemon that has no driver; None on a machine that cannot have them.
    pub(crate) async fn start(node: &str) -> Option<Self> {
        Self::start_with(node, |options| options).await
    }

    /// The same with a driver of simulated GPUs, with this config, that the kubelet has registered.
    pub(crate) async fn with_gpus(node: &str, config: &str) -> Option<Self> {
        Self::with_gpus_and(node, config, |options| options).await
    }

    pub(crate) async fn with_gpus_and(
        node: &str,
        config: &str,
        change: impl FnOnce(Options) -> Options,
    ) -> Option<Self> {
        let scene = Self::start_with(node, change).await?;
        scene.daemon.install_gpus(config);
        scene.daemon.until_serving(MOCK_GPU_FILE).await;
        scene.kubelet.registered(MOCK_GPU_NAME).await;
        Some(scene)
    }

    pub(crate) async fn start_with(
        node: &str,
        change: impl FnOnce(Options) -> Options,
    ) -> Option<Self> {
        let server = server().await?;
        Some(Self::start_on(server, &server.program, node, change).await)
    }

    /// The same with a kubelet of another program.
    pub(crate) async fn start_on(
        server: &'static Server,
        kubelet: &Path,
        node: &str,
        change: impl FnOnce(Options) -> Options,
    ) -> Self {
        let admin = std::fs::read_to_string(&server.admin).expect("the kubeconfig is there");
        let api = Api::of(&admin).await;
        deploy(&api).await;
        add_node(&api, node).await;
        let pod = format!("nodedock-{node}");
        let (uid, token) = daemon_pod(&api, node, &pod).await;
        let config = server.kubeconfig(&token);
        let dir = tempfile::tempdir().expect("a directory in the place for temporary files");
        let kubeconfig = dir.path().join("kubeconfig");
        std::fs::write(&kubeconfig, &config).expect("write a kubeconfig");
        let root = Root::new();
        make_kubelet_root(&root);
        let log = root.path().join("kubelet.log");
        let kubelet = Kubelet::start(kubelet, &root.kubelet(), &server.admin, node, log).await;
        let options =
            options_of(node, &kubeconfig).env("NODEDOCK_POD", &format!("{ACCOUNT}/{pod}"));
        let own = instance(&options, &uid);
        let daemon = Daemon::start_on(root, change(own)).await;
        let as_daemon = Api::of(&config).await;
        Self {
            server,
            api,
            as_daemon,
            node: node.to_owned(),
            kubelet,
            daemon,
            options,
            kubeconfig,
            uid,
            _dir: dir,
        }
    }

    /// The API with a token that is bound to the node, as a daemon that is no pod has it.
    pub(crate) async fn as_service_of_node(&self) -> Api {
        let node = self
            .api
            .get(&format!("/api/v1/nodes/{}", self.node))
            .await
            .done();
        Api::of(
            &self
                .server
                .kubeconfig(&token(&self.api, "Node", &node).await),
        )
        .await
    }

    /// Returns the options of a daemon of the node's first pod.
    pub(crate) fn same_instance(&self) -> Options {
        instance(&self.options, &self.uid)
    }

    /// Waits until the slices of a driver on this node have exactly these devices, `POOL/DEVICE`, sorted.
    pub(crate) async fn until_published(&self, driver: &str, wanted: &[String]) -> Vec<Value> {
        let path = self.slices_of(driver);
        self.api
            .until(
                "the devices are published",
                &path,
                |slices| match devices_in(slices) {
                    found if found == wanted => Ok(slices.to_vec()),
                    found => Err(format!("{found:?} instead of {wanted:?}")),
                },
            )
            .await
    }

    /// Waits until a driver has so many devices in slices of this node.
    pub(crate) async fn until_devices(&self, driver: &str, count: usize) {
        let look = |slices: &[Value]| match devices_in(slices) {
            found if found.len() == count => Ok(()),
            found => Err(format!("{found:?}")),
        };
        self.api
            .until(
                &format!("{count} devices are published"),
                &self.slices_of(driver),
                look,
            )
            .await;
    }

    pub(crate) fn slices_of(&self, driver: &str) -> String {
        format!(
            "{SLICES}?fieldSelector=spec.nodeName%3D{}%2Cspec.driver%3D{driver}",
            self.node
        )
    }

    /// Path of objects of the node's namespace.
    pub(crate) fn path(&self, resource: &str) -> String {
        path(&self.node, resource)
    }

    /// Creates a claim with requests and a pod of one container that uses it. Both have this name.
    pub(crate) async fn pod_with_claim(&self, name: &str, requests: Value) {
        pod_with_claim(&self.api, &self.node, name, requests).await;
    }

    pub(crate) async fn prepare(&self, pod: &str) -> Result<Done, Failure> {
        self.kubelet.ask("prepare", &self.node, pod, "").await
    }

    /// Prepares a pod's claims. Gives the CDI devices of its container.
    pub(crate) async fn prepared(&self, pod: &str) -> Vec<String> {
        let done = self.prepare(pod).await;
        let done = done.unwrap_or_else(|why| panic!("{pod}: {why:?}\n{}", self.daemon.log()));
        cdi_devices(&done.result)
    }

    /// Prepares a pod's claims as soon as that is possible after a restart. Gives the CDI devices of its container. A kubelet that was
    /// started again has them twice: it adds those of the answer to those of its checkpoint.
    pub(crate) async fn prepared_again(&self, pod: &str, driver: &str) -> Vec<String> {
        let mut names = cdi_devices(
            &self
                .kubelet
                .repeat("prepare", &self.node, pod, driver)
                .await
                .result,
        );
        names.dedup();
        names
    }

    pub(crate) async fn unprepared(&self, pod: &str) {
        let done = self.kubelet.ask("unprepare", &self.node, pod, "").await;
        done.unwrap_or_else(|why| panic!("{pod}: {why:?}\n{}", self.daemon.log()));
    }

    /// Unprepares a pod's claims as soon as that is possible after a restart.
    pub(crate) async fn unprepared_again(&self, pod: &str, driver: &str) {
        self.kubelet
            .repeat("unprepare", &self.node, pod, driver)
            .await;
    }

    /// Deletes a pod that has ended, and the claim of its name; returns when the claim is gone.
    pub(crate) async fn removed(&self, name: &str) {
        remove(&self.api, &self.node, name).await;
        let is_gone = |claims: &[Value]| match claims
            .iter()
            .find(|claim| claim["metadata"]["name"] == name)
        {
            None => Ok(()),
            Some(claim) => Err(claim.to_string()),
        };
        self.api
            .until(
                &format!("claim {name} is gone"),
                &self.path("resourceclaims"),
                is_gone,
            )
            .await;
    }

    /// The daemon's requests until now, as the audit log has them.
    pub(crate) fn requests(&self) -> Vec<Value> {
        let log = std::fs::read_to_string(&self.server.audit_log)
            .expect("the server writes an audit log");
        let lines = log
            .lines()
            .filter(|line| line.contains(USER) && line.contains(&self.node));
        // The last line may not be whole.
        let events = lines.filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let nodes = |event: &Value| {
            event["user"]["extra"]["authentication.kubernetes.io/node-name"].clone()
        };
        events
            .filter(|event| event["user"]["username"] == USER && nodes(event)[0] == self.node)
            .collect()
    }

    /// Expects that the daemon made requests, and that it had the right to each.
    pub(crate) fn assert_nothing_forbidden(&self) {
        let requests = self.requests();
        assert!(
            !requests.is_empty(),
            "the audit log has the daemon's requests"
        );
        let forbidden: Vec<_> = requests
            .iter()
            .filter(|event| event["responseStatus"]["code"] == 403)
            .collect();
        assert!(forbidden.is_empty(), "{forbidden:#?}");
    }
}

/// The CDI devices of a pod's only container, sorted.
pub(crate) fn cdi_devices(prepared: &Value) -> Vec<String> {
    let names = prepared["main"]
        .as_array()
        .expect("the container is answered")
        .iter();
    let mut names: Vec<_> = names
        .map(|name| name.as_str().expect("a name is text").to_owned())
        .collect();
    names.sort();
    names
}

/// Returns the options of the daemon of a pod.
pub(crate) fn instance(options: &Options, uid: &str) -> Options {
    options.clone().arg("--instance-uid", uid)
}

/// Path of namespaced objects.
pub(crate) fn path(namespace: &str, resource: &str) -> String {
    let group = match resource {
        "resourceclaims" | "resourceclaimtemplates" => "apis/resource.k8s.io/v1",
        "events" => "apis/events.k8s.io/v1",
        _ => "api/v1",
    };
    format!("/{group}/namespaces/{namespace}/{resource}")
}

/// A request for devices of a class, which has the driver's name.
pub(crate) fn request(name: &str, class: &str, count: u32) -> Value {
    json!({"name": name, "exactly": {"deviceClassName": class, "count": count}})
}

/// A request for GPUs of a pool of the simulated ones.
pub(crate) fn gpus(count: u32) -> Value {
    json!([request("gpus", MOCK_GPU_NAME, count)])
}

pub(crate) async fn pod_with_claim(api: &Api, node: &str, name: &str, requests: Value) {
    let claim = json!({"metadata": {"name": name}, "spec": {"devices": {"requests": requests}}});
    api.post(&path(node, "resourceclaims"), &claim).await.done();
    let of_pod = json!([{"name": "claim", "resourceClaimName": name}]);
    let main = json!({"resources": {"claims": [{"name": "claim"}]}});
    api.post(&path(node, "pods"), &pod(node, name, of_pod, main))
        .await
        .done();
}

/// A pod for a node, with one container.
pub(crate) fn pod(node: &str, name: &str, claims: Value, mut container: Value) -> Value {
    container["name"] = json!("main");
    container["image"] = json!("registry.k8s.io/pause:3.10");
    json!({
        "metadata": {"name": name},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "resourceClaims": claims,
            "containers": [container],
        },
    })
}

/// Deletes a pod and the claim of its name. The claim goes when it is free.
pub(crate) async fn remove(api: &Api, node: &str, name: &str) {
    api.delete(&format!("{}/{name}", path(node, "resourceclaims")))
        .await
        .done();
    api.delete_at_once(&format!("{}/{name}", path(node, "pods")))
        .await
        .done();
}

/// `POOL/DEVICE` of the slices, sorted.
fn devices_in(slices: &[Value]) -> Vec<String> {
    let mut all = Vec::new();
    for slice in slices {
        let pool = slice["spec"]["pool"]["name"]
            .as_str()
            .expect("a slice has a pool");
        let devices = slice["spec"]["devices"].as_array().into_iter().flatten();
        all.extend(
            devices.map(|device| format!("{pool}/{}", device["name"].as_str().unwrap_or_default())),
        );
    }
    all.sort();
    all
}

/// Creates what the deployment creates for the whole cluster, and a class for each driver.
pub(crate) async fn deploy(api: &Api) {
    let base = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kustomize/base");
    for file in DEPLOYED {
        let text = std::fs::read_to_string(base.join(file)).expect("the deployment has the file");
        let objects: Vec<Value> = serde_saphyr::from_multiple(&text).expect("it is YAML");
        for object in objects {
            let path = match object["kind"].as_str().expect("an object has a kind") {
                "Namespace" => "/api/v1/namespaces".to_owned(),
                "ServiceAccount" => format!("/api/v1/namespaces/{ACCOUNT}/serviceaccounts"),
                "ClusterRole" => "/apis/rbac.authorization.k8s.io/v1/clusterroles".to_owned(),
                "ClusterRoleBinding" => {
                    "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings".to_owned()
                }
                "ValidatingAdmissionPolicy" => {
                    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies".to_owned()
                }
                "ValidatingAdmissionPolicyBinding" => {
                    "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
                        .to_owned()
                }
                kind => panic!("the tests do not know where a {kind} is created"),
            };
            api.ensure(&path, &object).await;
        }
    }
    for driver in [MOCK_GPU_NAME, SCRIPTED_NAME] {
        let selector = json!({"cel": {"expression": format!("device.driver == \"{driver}\"")}});
        let class = json!({"metadata": {"name": driver}, "spec": {"selectors": [selector]}});
        api.ensure("/apis/resource.k8s.io/v1/deviceclasses", &class)
            .await;
    }
}

/// Creates a node that can run pods, and a namespace of its name for them.
async fn add_node(api: &Api, name: &str) {
    let room = json!({"cpu": "64", "memory": "64Gi", "pods": "1000"});
    let ready = json!([{"type": "Ready", "status": "True", "reason": "KubeletReady"}]);
    let node = json!({
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
        "status": {"capacity": room, "allocatable": room, "conditions": ready},
    });
    api.post("/api/v1/nodes", &node).await.done();
    // For claims that look at devices of others.
    let labels = json!({"resource.kubernetes.io/admin-access": "true"});
    let namespace = json!({"metadata": {"name": name, "labels": labels}});
    api.post("/api/v1/namespaces", &namespace).await.done();
    // A controller creates it elsewhere.
    let account = json!({"metadata": {"name": "default"}});
    api.post(&path(name, "serviceaccounts"), &account)
        .await
        .done();
}

/// Creates the daemon's pod on a node. Gives its UID, and the token that a kubelet would mount in it.
async fn daemon_pod(api: &Api, node: &str, name: &str) -> (String, String) {
    let container = json!({"name": "nodedock", "image": "ghcr.io/nodedock/nodedock"});
    let pod = json!({
        "metadata": {"name": name},
        "spec": {"nodeName": node, "serviceAccountName": ACCOUNT, "containers": [container]},
    });
    let pod = api.post(&path(ACCOUNT, "pods"), &pod).await.done();
    let uid = pod["metadata"]["uid"]
        .as_str()
        .expect("it is text")
        .to_owned();
    (uid, token(api, "Pod", &pod).await)
}

/// A token of the daemon's service account that is bound to an object.
async fn token(api: &Api, kind: &str, object: &Value) -> String {
    let Value::Object(metadata) = &object["metadata"] else {
        panic!("an object has metadata")
    };
    let bound =
        json!({"apiVersion": "v1", "kind": kind, "name": metadata["name"], "uid": metadata["uid"]});
    let request = json!({"spec": {"boundObjectRef": bound, "expirationSeconds": 7200}});
    let account = format!("{}/{ACCOUNT}/token", path(ACCOUNT, "serviceaccounts"));
    let answer = api.post(&account, &request).await.done();
    answer["status"]["token"]
        .as_str()
        .expect("it is text")
        .to_owned()
}
