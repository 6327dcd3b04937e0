//! Cost of a pod's prepare: requests, commits and calls of the driver are counted. The times at a real kubelet and API server, beside those
//! of a driver on the official Go library in the same run, are printed and not asserted. Those of a release build:
//!
//! ```text
//! cargo build --release -p nodedockd -p nodedock
//! NODEDOCK_BIN=$PWD/target/release/nodedock cargo xtask test -p nodedock-tests --test kubernetes -- timing --nocapture
//! ```

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use nodedock_tests::go::Module;
use nodedock_tests::machine::{or_skip, tell};
use nodedock_tests::metrics::Exposition;
use serde_json::{Value, json};

use crate::scene::{SLICES, Scene, gpus, remove, request};

const OFFICIAL: &str = "gpu.example.com";
const NODE: &str = "timing";
const PODS: usize = 20;

/// Ends the process with the test.
struct Killed(std::process::Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a driver on the official library, which registers with the kubelet and reads claims from the API server.
fn official(scene: &Scene, cdi: &Path) -> Option<Killed> {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join("interop");
    let sources = tests.join("interop/go");
    let module = Module {
        sources,
        output,
        fetch_seconds: 300,
        build_seconds: 900,
        linker_flags: "",
        requirements: None,
    };
    let program = or_skip(
        "a driver on the official library",
        module.program("dra-driver"),
    )?;
    let config: Value =
        serde_json::from_str(&std::fs::read_to_string(&scene.server.admin).unwrap()).unwrap();
    let cluster = &config["clusters"][0]["cluster"];
    use base64::Engine as _;
    let certificate = cluster["certificate-authority-data"].as_str().unwrap();
    let certificate = base64::engine::general_purpose::STANDARD
        .decode(certificate)
        .unwrap();
    let file = cdi.join("ca.pem");
    std::fs::write(&file, certificate).unwrap();
    let kubelet = scene.daemon.kubelet();
    let data = kubelet.join("plugins").join(OFFICIAL);
    std::fs::create_dir_all(&data).unwrap();
    let mut command = Command::new(program);
    command
        .arg("--registry-dir")
        .arg(kubelet.join("plugins_registry"))
        .arg("--data-dir")
        .arg(data);
    command
        .arg("--cdi-dir")
        .arg(cdi)
        .arg("--server-ca")
        .arg(file)
        .args(["--driver-name", OFFICIAL, "--v", "0"]);
    command
        .arg("--checkpoint")
        .arg(scene.daemon.path().join("official-checkpoint.json"));
    command
        .arg("--server")
        .arg(cluster["server"].as_str().unwrap());
    command.env(
        "TOKEN",
        config["users"][0]["user"]["token"].as_str().unwrap(),
    );
    Some(Killed(
        command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    ))
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort();
    times[times.len() / 2].as_secs_f64() * 1000.0
}

/// The mean of a histogram's observations between two looks, in milliseconds, and how many there were.
fn mean(name: &str, labels: &[(&str, &str)], looks: &[Exposition; 2]) -> (f64, f64) {
    let [before, after] = looks.each_ref().map(|look| {
        ["sum", "count"].map(|part| {
            let samples = look.families.iter().flat_map(|family| &family.samples);
            let is_of = |of: &BTreeMap<String, String>| {
                labels.iter().all(|(label, value)| {
                    of.get(*label)
                        .is_some_and(|known| known.rsplit('/').next() == Some(value))
                })
            };
            let part = format!("{name}_{part}");
            samples
                .filter(|((sample, of), _)| *sample == part && is_of(of))
                .map(|(_, value)| value)
                .sum::<f64>()
        })
    });
    let count = after[1] - before[1];
    ((after[0] - before[0]) / count * 1000.0, count)
}

#[tokio::test]
async fn prepare_costs_one_request_commit_call() {
    let gpu_pool = "pools: [{name: gpus, count: 4}]\n";
    let Some(scene) = Scene::with_gpus(NODE, gpu_pool).await else {
        return;
    };
    let cdi = tempfile::tempdir().unwrap();
    let Some(_official) = official(&scene, cdi.path()) else {
        return;
    };
    scene.kubelet.registered(OFFICIAL).await;
    let class = json!({
        "metadata": {"name": OFFICIAL},
        "spec": {"selectors": [{"cel": {"expression": format!("device.driver == \"{OFFICIAL}\"")}}]},
    });
    scene
        .api
        .post("/apis/resource.k8s.io/v1/deviceclasses", &class)
        .await
        .done();
    let slice = json!({
        "metadata": {"name": "official"},
        "spec": {
            "driver": OFFICIAL,
            "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": (0..4).map(|n| json!({"name": format!("gpu-{n}")})).collect::<Vec<_>>(),
        },
    });
    scene.api.post(SLICES, &slice).await.done();
    let metrics = async || scene.daemon.metrics().await;
    let (mut times, before) = ([const { Vec::new() }; 4], metrics().await);
    for number in 0..PODS {
        // In turns, so that both have the same machine.
        for (which, requests) in [gpus(1), json!([request("gpus", OFFICIAL, 1)])]
            .into_iter()
            .enumerate()
        {
            let pod = format!("pod-{which}-{number}");
            scene.pod_with_claim(&pod, requests).await;
            for (call, what) in ["prepare", "unprepare"].into_iter().enumerate() {
                let done = scene
                    .kubelet
                    .ask(what, &scene.node, &pod, "")
                    .await
                    .expect("it succeeds");
                times[2 * call + which].push(done.elapsed);
            }
            remove(&scene.api, &scene.node, &pod).await;
        }
    }
    let looks = [before, metrics().await];
    let [prepare, official_prepare, unprepare, official_unprepare] = times.map(median);
    tell(&format!(
        "medians of {PODS} in ms, ours and the official library's: prepare {prepare:.2}, {official_prepare:.2}; unprepare {unprepare:.2}, {official_unprepare:.2}"
    ));
    let (bridge, driver) = (
        "nodedock_bridge_call_duration_seconds",
        "nodedock_driver_call_duration_seconds",
    );
    for (what, name, labels, of_each_pod) in [
        (
            "prepare in the daemon",
            bridge,
            &[("method", "NodePrepareResources")][..],
            1,
        ),
        (
            "unprepare in the daemon",
            bridge,
            &[("method", "NodeUnprepareResources")],
            1,
        ),
        (
            "requests to the API server",
            "nodedock_api_request_duration_seconds",
            &[],
            1,
        ),
        (
            "prepare in the driver",
            driver,
            &[("operation", "prepare")],
            1,
        ),
        (
            "unprepare in the driver",
            driver,
            &[("operation", "unprepare")],
            1,
        ),
        (
            "commits",
            "nodedock_checkpoint_commit_duration_seconds",
            &[],
            2,
        ),
    ] {
        let (ms, count) = mean(name, labels, &looks);
        tell(&format!("{what}: mean {ms:.3} ms of {count}"));
        assert_eq!(count, (of_each_pod * PODS) as f64, "{what}");
    }
}
