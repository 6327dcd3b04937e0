//! A daemon on a Kubernetes node: the real daemon, and what stands for the rest of the cluster.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use nodedock_proto::kubelet::dra::v1 as dra;
use nodedock_proto::kubelet::dra::v1::dra_plugin_client::DraPluginClient;
use nodedock_stand_ins::api_server::{Allocated, ApiServer};
use serde_json::Value;
use tempfile::TempDir;
use tonic::Status;
use tonic::transport::Channel;

use crate::drivers::MOCK_GPU_NAME;
use crate::wait::until_path;
use crate::{Daemon, Options, Root};

/// The node's name.
pub const NODE: &str = "node-1";
/// The namespace of everything that has one.
pub const NAMESPACE: &str = "default";

/// An API server with this node's object.
#[derive(Debug)]
pub struct Cluster {
    pub api: ApiServer,
    /// Of the node's object.
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

    /// What a daemon of this node is started with.
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
    let mut role = objects.into_iter().find(|object| object["kind"] == "ClusterRole").expect("a role");
    serde_json::from_value(role["rules"].take()).expect("rules are a list")
}

/// A claim for simulated GPUs as the scheduler leaves it. In the API a pool's name begins with the node's.
pub fn gpu_claim(name: &str, devices: &[&str]) -> Allocated {
    let claim = Allocated::new(NAMESPACE, name).node(NODE).reserved_for("pod", "pod-uid");
    let with = |claim: Allocated, (i, device): (usize, &&str)| {
        let (pool, device) = device.rsplit_once('/').expect("POOL/DEVICE");
        claim.device(&format!("device-{i}"), MOCK_GPU_NAME, &format!("{NODE}/{pool}"), device)
    };
    devices.iter().enumerate().fold(claim, with)
}

/// What a daemon of this node is started with, whatever the kubeconfig has.
pub fn options(kubeconfig: &Path) -> Options {
    let kubeconfig = kubeconfig.to_str().expect("paths of tests are text");
    Options::default()
        .env("NODEDOCK_KUBERNETES", "true")
        .arg("--node-name", NODE)
        .arg("--kubeconfig", kubeconfig)
}

/// The directories that a kubelet makes when it starts.
pub fn make_kubelet_root(root: &Root) {
    for dir in ["plugins_registry", "plugins", "device-plugins", "pod-resources"] {
        std::fs::create_dir_all(root.kubelet().join(dir)).expect("a new directory below the root");
    }
}

impl Root {
    /// The kubelet's directory.
    pub fn kubelet(&self) -> PathBuf {
        self.path().join("var/lib/kubelet")
    }
}

/// A claim as a kubelet names it: its name in `NAMESPACE`, and its UID.
pub type ClaimName<'a> = (&'a str, &'a str);

/// A driver as it is offered to a kubelet: by one of several instances of the daemon, or by the only one.
#[derive(Debug, Clone, Copy)]
pub struct Offered<'a> {
    pub driver: &'a str,
    pub instance: Option<&'a str>,
}

impl<'a> From<&'a str> for Offered<'a> {
    fn from(driver: &'a str) -> Self {
        Self { driver, instance: None }
    }
}

impl<'a> From<(&'a str, &'a str)> for Offered<'a> {
    fn from((driver, instance): (&'a str, &'a str)) -> Self {
        Self { driver, instance: Some(instance) }
    }
}

/// What becomes of a kubelet's call for one claim: the devices that it reports, or the message of a refusal.
pub type Prepared = Result<Vec<dra::Device>, String>;

impl Root {
    /// Waits until a driver has its sockets in the kubelet's directories.
    pub async fn until_offered<'a>(&self, driver: impl Into<Offered<'a>>) {
        self.until_there(&self.registration(&driver.into())).await;
    }

    fn registration(&self, driver: &Offered<'_>) -> PathBuf {
        let name = match driver.instance {
            None => format!("{}-reg.sock", driver.driver),
            Some(instance) => format!("{}-{instance}-reg.sock", driver.driver),
        };
        self.kubelet().join("plugins_registry").join(name)
    }

    /// Waits until a driver has none any more.
    pub async fn until_withdrawn<'a>(&self, driver: impl Into<Offered<'a>>) {
        let dir = self.kubelet().join("plugins_registry");
        let socket = self.registration(&driver.into());
        let is_gone = || if socket.exists() { Err("it is there".to_owned()) } else { Ok(()) };
        until_path(&dir, &format!("{} is gone", socket.display()), is_gone).await;
    }

    /// Waits until there is a file in a directory that is there.
    pub async fn until_there(&self, path: &Path) {
        let dir = path.parent().expect("a file is in a directory");
        let is_there = || if path.exists() { Ok(()) } else { Err("it is not there".to_owned()) };
        until_path(dir, &format!("{} is there", path.display()), is_there).await;
    }

    /// A kubelet's client of a driver's service.
    pub fn dra_client<'a>(&self, driver: impl Into<Offered<'a>>) -> DraClient {
        let Offered { driver, instance } = driver.into();
        let name = instance.map_or_else(|| "dra.sock".to_owned(), |instance| format!("dra-{instance}.sock"));
        let socket = self.kubelet().join("plugins").join(driver).join(name);
        DraClient(DraPluginClient::new(crate::daemon::channel(socket)))
    }

    /// Prepares claims with a driver as a kubelet does.
    pub async fn kubelet_prepares(
        &self,
        driver: impl Into<Offered<'_>>,
        claims: &[ClaimName<'_>],
    ) -> BTreeMap<String, Prepared> {
        let answers = self.dra_client(driver).prepare(claims).await;
        answers.unwrap_or_else(|status| panic!("{status}\n{}", self.log()))
    }

    /// Prepares one claim, and expects it to go well.
    pub async fn kubelet_prepared(
        &self,
        driver: impl Into<Offered<'_>>,
        claim: ClaimName<'_>,
    ) -> Vec<dra::Device> {
        let mut answers = self.kubelet_prepares(driver, &[claim]).await;
        let answer = answers.remove(claim.1).expect("every claim has an answer");
        answer.unwrap_or_else(|why| panic!("{}: {why}\n{}", claim.0, self.log()))
    }

    /// Prepares one claim, and expects a refusal; its message.
    pub async fn kubelet_refused(&self, driver: impl Into<Offered<'_>>, claim: ClaimName<'_>) -> String {
        let mut answers = self.kubelet_prepares(driver, &[claim]).await;
        answers.remove(claim.1).expect("every claim has an answer").expect_err("it is refused")
    }

    /// Unprepares one claim with a driver as a kubelet does. An error has the message of the refusal.
    pub async fn kubelet_unprepares(
        &self,
        driver: impl Into<Offered<'_>>,
        claim: ClaimName<'_>,
    ) -> Result<(), String> {
        let answer = self.dra_client(driver).unprepare(claim).await;
        answer.unwrap_or_else(|status| panic!("{status}\n{}", self.log()))
    }
}

fn dra_claim(claim: &ClaimName<'_>) -> dra::Claim {
    dra::Claim { namespace: NAMESPACE.to_owned(), uid: claim.1.to_owned(), name: claim.0.to_owned() }
}

/// A kubelet's client of a driver's service.
#[derive(Debug, Clone)]
pub struct DraClient(DraPluginClient<Channel>);

impl DraClient {
    async fn prepare(&self, claims: &[ClaimName<'_>]) -> Result<BTreeMap<String, Prepared>, Status> {
        let request = dra::NodePrepareResourcesRequest { claims: claims.iter().map(dra_claim).collect() };
        let answer = self.0.clone().node_prepare_resources(request).await?.into_inner();
        let outcome = |answer: dra::NodePrepareResourceResponse| {
            if answer.error.is_empty() { Ok(answer.devices) } else { Err(answer.error) }
        };
        let answers = answer.claims.into_iter();
        Ok(answers.map(|entry| (entry.key, outcome(entry.value.expect("a kubelet wants a value")))).collect())
    }

    async fn unprepare(&self, claim: ClaimName<'_>) -> Result<Result<(), String>, Status> {
        let request = dra::NodeUnprepareResourcesRequest { claims: vec![dra_claim(&claim)] };
        let answer = self.0.clone().node_unprepare_resources(request).await?.into_inner();
        let answer = answer.claims.into_iter().find(|entry| entry.key == claim.1);
        let answer = answer.and_then(|entry| entry.value).expect("every claim has an answer");
        Ok(if answer.error.is_empty() { Ok(()) } else { Err(answer.error) })
    }

    /// Prepares a claim with one device, and retries until it succeeds: the daemon may be away meanwhile. The error has the last refusal.
    pub async fn prepare_until_ready(&self, claim: ClaimName<'_>) -> Result<(), String> {
        let once = || async {
            let mut answers = self.prepare(&[claim]).await.map_err(|status| status.to_string())?;
            match answers.remove(claim.1).ok_or("no answer for the claim")??.len() {
                1 => Ok(()),
                devices => Err(format!("{devices} devices")),
            }
        };
        repeated(once).await
    }

    /// The same for its unprepare.
    pub async fn unprepare_until_done(&self, claim: ClaimName<'_>) -> Result<(), String> {
        repeated(|| async { self.unprepare(claim).await.map_err(|status| status.to_string())? }).await
    }
}

/// A kubelet retries in its own time; a test retries at once, until its deadline.
async fn repeated<F: Future<Output = Result<(), String>>>(once: impl Fn() -> F) -> Result<(), String> {
    let mut last = String::new();
    let until = async {
        while let Err(why) = once().await {
            last = why;
            // What answers at once that it is away leaves others their turn.
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    let ended = tokio::time::timeout(crate::DEADLINE * 3, until).await;
    ended.map_err(|_| last)
}
