//! A daemon on a Kubernetes node: the real daemon, and stand-ins for the rest of the cluster.

use std::path::{Path, PathBuf};

use nodedock_stand_ins::api_server::{Allocated, ApiServer};
use serde_json::Value;
use tempfile::TempDir;

use crate::drivers::MOCK_GPU_NAME;
use crate::{Daemon, Options, Root};

/// The node's name.
pub const NODE: &str = "node-1";
/// The namespace of everything that has one.
pub const NAMESPACE: &str = "default";

/// An API server with this node's object.
#[derive(Debug)]
pub struct Cluster {
    pub api: ApiServer,
    /// UID of the Node object.
    pub node_uid: String,
    dir: TempDir,
}

impl Cluster {
    pub async fn start() -> Self {
        let api = ApiServer::start().await;
        let node_uid = api.add_node(NODE);
        api.enforce(&rights());
        let dir = tempfile::tempdir().expect("a directory in the place for temporary files");
        Self { api, node_uid, dir }
    }

    /// The kubeconfig of the node's daemon.
    pub fn kubeconfig(&self) -> PathBuf {
        self.api.kubeconfig(self.dir.path())
    }

    /// Returns the options of a daemon of this node.
    pub fn options(&self) -> Options {
        let kubeconfig = self.kubeconfig();
        options(&kubeconfig)
    }

    /// A daemon on a root of its own, started and asked for nothing. The kubelet's directory is there, and no kubelet.
    pub async fn daemon(&self) -> Daemon {
        self.daemon_with(self.options()).await
    }

    pub async fn daemon_with(&self, options: Options) -> Daemon {
        let root = Root::new();
        make_kubelet_root(&root);
        Daemon::start_on(root, options).await
    }

    /// A claim for simulated GPUs of this node, each as the driver has it, `POOL/DEVICE`: as the scheduler leaves it for a pod. Gives
    /// its UID.
    pub fn gpu_claim(&self, name: &str, devices: &[&str]) -> String {
        self.api.allocate_claim(gpu_claim(name, devices))
    }
}

/// The rules of the role that the deployment gives the daemon. What it asks beyond them is refused.
fn rights() -> Vec<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/kustomize/base/rbac.yaml");
    let text = std::fs::read_to_string(file).expect("the deployment has a role");
    let objects: Vec<Value> = serde_saphyr::from_multiple(&text).expect("the role is YAML");
    let mut role = objects
        .into_iter()
        .find(|object| object["kind"] == "ClusterRole")
        .expect("a role");
    serde_json::from_value(role["rules"].take()).expect("rules are a list")
}

/// A claim for simulated GPUs as the scheduler leaves it. In the API a pool's name begins with the node's.
pub fn gpu_claim(name: &str, devices: &[&str]) -> Allocated {
    let claim = Allocated::new(NAMESPACE, name)
        .node(NODE)
        .reserved_for("pod", "pod-uid");
    let with = |claim: Allocated, (i, device): (usize, &&str)| {
        let (pool, device) = device.rsplit_once('/').expect("POOL/DEVICE");
        claim.device(
            &format!("device-{i}"),
            MOCK_GPU_NAME,
            &format!("{NODE}/{pool}"),
            device,
        )
    };
    devices.iter().enumerate().fold(claim, with)
}

/// Returns the options of a daemon of this node, with any kubeconfig.
pub fn options(kubeconfig: &Path) -> Options {
    options_of(NODE, kubeconfig)
}

/// Returns the options of a daemon of a node.
pub fn options_of(node: &str, kubeconfig: &Path) -> Options {
    let kubeconfig = kubeconfig.to_str().expect("paths of tests are text");
    Options::default()
        .env("NODEDOCK_KUBERNETES", "true")
        .arg("--node-name", node)
        .arg("--kubeconfig", kubeconfig)
}

/// The directories that a kubelet makes when it starts.
pub fn make_kubelet_root(root: &Root) {
    for dir in [
        "plugins_registry",
        "plugins",
        "device-plugins",
        "pod-resources",
    ] {
        std::fs::create_dir_all(root.kubelet().join(dir)).expect("a new directory below the root");
    }
}

impl Root {
    /// The kubelet's directory.
    pub fn kubelet(&self) -> PathBuf {
        self.path().join("var/lib/kubelet")
    }
}
