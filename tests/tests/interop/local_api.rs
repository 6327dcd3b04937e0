//! The local API, used by the software that knows the API of a cluster: kubectl, informers of the official client library, and a driver
//! on the official helper library. Each is unmodified, and has the kubeconfig that the daemon prints.

mod drivers;
mod files;
mod informers;
mod kubectl;
mod patches;
mod typed;

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;
use std::process::Stdio;

use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_NAME};
use nodedock_tests::machine::or_skip;
use nodedock_tests::{DEADLINE, Daemon, Options, Output};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::timeout;

use crate::programs;

/// Name of the node's object.
const NODE: &str = "node-1";

/// A daemon with a local API, and the command line of Kubernetes for it.
struct Machine {
    daemon: Daemon,
    kubectl: PathBuf,
}

impl Deref for Machine {
    type Target = Daemon;

    fn deref(&self) -> &Daemon {
        &self.daemon
    }
}

impl DerefMut for Machine {
    fn deref_mut(&mut self) -> &mut Daemon {
        &mut self.daemon
    }
}

impl Machine {
    /// Starts the daemon without drivers. `None`, and a line that says why, on a machine that cannot have kubectl.
    async fn start() -> Option<Self> {
        let kubectl = or_skip("kubectl at the local API", programs::kubectl())?;
        let options = Options::default()
            .arg("--node-name", NODE)
            .flag("--local-api");
        let mut daemon =
            Daemon::start_with(options.env("NODEDOCK_LOCAL_API_LISTEN", "127.0.0.1:0")).await;
        let config = daemon.cli(&["kubeconfig"]).await.done();
        let address = &serde_saphyr::from_str::<Value>(&config).expect("YAML")["clusters"][0]["cluster"]
            ["server"];
        let address = address
            .as_str()
            .and_then(|url| url.strip_prefix("https://"));
        // The next start is at the same address.
        daemon.options().set_env(
            "NODEDOCK_LOCAL_API_LISTEN",
            address.expect("it is served with TLS"),
        );
        daemon.write("kubeconfig", &config);
        Some(Self { daemon, kubectl })
    }

    /// The same with simulated GPUs, of which there are slices, and their class `gpu`.
    async fn with_gpus() -> Option<Self> {
        let machine = Self::start().await?;
        machine.serve(MOCK_GPU, Form::Core).await;
        machine
            .apply("class", &class("gpu", MOCK_GPU_NAME))
            .await
            .done();
        Some(machine)
    }

    fn kubeconfig(&self) -> PathBuf {
        self.path().join("kubeconfig")
    }

    /// Runs kubectl with the arguments to its end.
    async fn kubectl(&self, args: &[&str]) -> Output {
        self.kubectl_edited(args, "false").await
    }

    /// The same, where an object is edited with a command.
    async fn kubectl_edited(&self, args: &[&str], editor: &str) -> Output {
        let mut command = Command::new(&self.kubectl);
        command
            .args(args)
            .env("KUBECONFIG", self.kubeconfig())
            .env("HOME", self.path())
            .env("KUBE_EDITOR", editor);
        let running = command.stdin(Stdio::null()).kill_on_drop(true).output();
        let line = args.join(" ");
        let output = timeout(DEADLINE, running).await;
        let output = output.unwrap_or_else(|_| panic!("`kubectl {line}` does not end"));
        let output = output.unwrap_or_else(|error| panic!("start `kubectl {line}`: {error}"));
        let text = |bytes| String::from_utf8(bytes).expect("kubectl writes UTF-8");
        Output {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    /// An object as `kubectl get` has it.
    async fn get(&self, object: &str) -> Value {
        self.kubectl(&["get", object, "-o", "json"]).await.json()
    }

    /// Writes manifests to a file and applies it.
    async fn apply(&self, name: &str, manifests: &str) -> Output {
        self.apply_with(name, manifests, &[]).await
    }

    async fn apply_with(&self, name: &str, manifests: &str, options: &[&str]) -> Output {
        let file = self.write(&format!("{name}.yaml"), manifests);
        let file = file.to_str().expect("the root has a name in UTF-8");
        self.kubectl(&[&["apply", "-f", file], options].concat())
            .await
    }

    /// Applies a claim for a GPU and returns it when it is allocated.
    async fn allocated(&self, name: &str) -> Value {
        self.apply(name, &claim(name, "gpu", json!({})))
            .await
            .done();
        self.until_allocated(name).await;
        self.get(&format!("resourceclaim/{name}")).await
    }

    async fn until_allocated(&self, name: &str) {
        let claim = format!("resourceclaim/{name}");
        let wait = [
            "wait",
            "--for=jsonpath={.status.allocation}",
            &claim,
            "--timeout=100s",
        ];
        self.kubectl(&wait).await.done_with(&["condition met"]);
    }

    /// Waits until kubectl does not find an object any more.
    async fn until_deleted(&self, object: &str) {
        self.kubectl(&["wait", "--for=delete", object, "--timeout=100s"])
            .await
            .done();
    }
}

/// The devices of one driver.
fn class(name: &str, driver: &str) -> String {
    let selector = json!({ "cel": { "expression": format!("device.driver == \"{driver}\"") } });
    let class = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": { "name": name },
        "spec": { "selectors": [selector] },
    });
    format!("{class:#}\n")
}

/// A claim for one device of a class, with these labels.
fn claim(name: &str, class: &str, labels: Value) -> String {
    // With the defaults: kubectl compares what was applied with what is there.
    let exactly = json!({ "deviceClassName": class, "allocationMode": "ExactCount", "count": 1 });
    let request = json!({ "name": "device", "exactly": exactly });
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": { "name": name, "labels": labels },
        "spec": { "devices": { "requests": [request] } },
    });
    format!("{claim:#}\n")
}

/// The devices of an allocated claim, as `DRIVER/POOL/DEVICE`.
fn devices(claim: &Value) -> Vec<String> {
    let results = claim["status"]["allocation"]["devices"]["results"].as_array();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let name = |result: &Value| {
        ["driver", "pool", "device"]
            .map(|field| text(&result[field]))
            .join("/")
    };
    results.into_iter().flatten().map(name).collect()
}
