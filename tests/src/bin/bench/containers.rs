//! Starts of containers by the name of a class, beside those of the same device by its vendor's name: with the OCI runtime alone, and with podman
//! around it. All ways in turns.
//!
//! A start is everything from the command to its end, of a container whose program ends at once: it includes the end of the claim.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use nodedock_tests::drivers::{MOCK_GPU_FILE, MOCK_GPU_NAME};
use nodedock_tests::machine::{or_skip, program};
use nodedock_tests::places::nodedock;
use nodedock_tests::podman::{CDI_DIR, Podman};
use nodedock_tests::{Daemon, Options, Root};
use rustix::fs::{Advice, fadvise};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::Size;
use crate::table::{Table, Times, millis};

/// The program of the containers.
const PROGRAM: &str = "/bin/busybox";

/// A way to start a container: whose name the device has, and the runtime.
const WAYS: [&str; 3] = [
    "vendor's name, runc",
    "vendor's name, nodedock runtime",
    "class, nodedock runtime",
];

pub(crate) async fn run(size: Size, table: &mut Table) {
    let Some(podman) = or_skip("starts of containers", Podman::find()) else {
        return;
    };
    let machine = Machine::start(podman).await;
    for tool in [Tool::Runc, Tool::Podman] {
        for is_cold in [false, true] {
            machine.measure(tool, is_cold, size, table).await;
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Tool {
    Runc,
    Podman,
}

/// A machine with GPUs of a driver, a spec that gives the same as the driver's under a vendor's name, and a bundle for each way.
struct Machine {
    daemon: Daemon,
    podman: [Podman; 2],
    vendor: VendorSpec,
    class: String,
    /// Each with its configuration.
    bundles: [(PathBuf, String); 3],
    runtimes: [PathBuf; 2],
    cold: Vec<PathBuf>,
}

/// A file in a directory that is not ours.
struct VendorSpec {
    path: PathBuf,
    kind: String,
}

impl Drop for VendorSpec {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_file(&self.path) {
            eprintln!("{} stays: {error}", self.path.display());
        }
    }
}

impl Machine {
    async fn start(runc: Podman) -> Self {
        let options = Options::default()
            .flag("--local-api")
            .arg("--cdi-dir", CDI_DIR);
        let daemon = Daemon::start_with(options).await;
        daemon.install_gpus("pools:\n- {name: gpus, count: 4}\n");
        daemon.until_serving(MOCK_GPU_FILE).await;
        let class = format!("bench-{}", std::process::id());
        let object = json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": class },
            "spec": { "selectors": [{ "cel": { "expression": format!("device.driver == '{MOCK_GPU_NAME}'") } }] },
        });
        let file = daemon.write("class.json", object.to_string());
        let file = file.to_str().expect("UTF-8");
        daemon.cli(&["claim", "create", "-f", file]).await.done();
        let marks = class_edits(&class).await;
        let vendor = VendorSpec::write(&daemon).await;
        let link = daemon.path().join("nodedock-runtime");
        symlink(nodedock(), &link).expect("a link below the root");
        let runtimes = [runc.runtime.clone(), link.clone()];
        let mut around = runc.clone();
        around.runtime = link;
        let rootfs = runc.rootfs(&daemon);
        let edits = [vendor.edits(), vendor.edits(), marks];
        let mut bundles: [(PathBuf, String); 3] = Default::default();
        for (number, edits) in edits.iter().enumerate() {
            bundles[number] = bundle(&daemon, &runc.runtime, &rootfs, number, edits).await;
        }
        let tools = ["podman", "conmon", "runc"].map(program);
        let cold = tools.into_iter().flatten().chain([nodedock()]).collect();
        Self {
            daemon,
            podman: [runc, around],
            vendor,
            class,
            bundles,
            runtimes,
            cold,
        }
    }

    /// Starts containers in every way, and adds the rows.
    async fn measure(&self, tool: Tool, is_cold: bool, size: Size, table: &mut Table) {
        let count = match is_cold {
            true => size.containers.div_ceil(5),
            false => size.containers,
        };
        let mut times: [Times; 3] = Default::default();
        let mut added = Vec::new();
        // The first of each is no measurement.
        for number in 0..=count {
            let mut took = [Duration::ZERO; 3];
            for (way, took) in took.iter_mut().enumerate() {
                if is_cold {
                    self.cold.iter().for_each(|file| forget(file));
                }
                *took = self.container(tool, way, number).await;
            }
            if number > 0 {
                times
                    .iter_mut()
                    .zip(took)
                    .for_each(|(times, took)| times.add(took));
                added.push(millis(took[2]) - millis(took[0]));
            }
        }
        let tool = match tool {
            Tool::Runc => "runc run",
            Tool::Podman => "podman run",
        };
        let temperature = if is_cold { ", cold" } else { "" };
        let name = |way: &str| format!("{tool}{temperature}: {way}");
        let [base, ..] = WAYS.map(name);
        for (way, times) in WAYS.iter().zip(&times) {
            let against = if *way == WAYS[0] { "" } else { &base };
            table.times(&name(way), times, against, "in turns");
        }
        let note = "of one start after the other; goal: 15 ms";
        table.figures(&name("what a class adds"), added, "ms", "", note);
    }

    /// Runs a container to its end.
    async fn container(&self, tool: Tool, way: usize, number: usize) -> Duration {
        let runtime = way.min(1);
        let words = match tool {
            Tool::Runc => {
                let (runtime, (bundle, config)) = (&self.runtimes[runtime], &self.bundles[way]);
                // The runtime puts the devices of a claim in the place of the mark.
                std::fs::write(bundle.join("config.json"), config).expect("it can be written");
                let id = format!("{}-{way}-{number}", self.class);
                let state = self.daemon.path().join("runc");
                let words = [
                    text(runtime),
                    "--root".to_owned(),
                    text(&state),
                    "run".to_owned(),
                ];
                let rest = ["--bundle".to_owned(), text(bundle), id];
                words.into_iter().chain(rest).collect()
            }
            Tool::Podman => {
                let device = match way {
                    2 => format!("nodedock.dev/{}=any", self.class),
                    _ => format!("{}=gpu", self.vendor.kind),
                };
                self.podman[runtime].arguments(&self.daemon, &[&device], "true")
            }
        };
        let [program, arguments @ ..] = &words[..] else {
            unreachable!("a program is the first word")
        };
        let mut command = Command::new(program);
        command
            .args(arguments)
            .stdin(Stdio::null())
            .kill_on_drop(true);
        let began = Instant::now();
        let output = command.output().await.expect("it can be run");
        let took = began.elapsed();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", WAYS[way]);
        took
    }
}

impl VendorSpec {
    /// Writes a spec whose device gives what a claim of one GPU gives.
    async fn write(daemon: &Daemon) -> Self {
        let device = format!("{MOCK_GPU_NAME}/gpus/gpu-0");
        let prepare = [
            "prepare", "--pod", "vendor", "--device", &device, "-o", "json",
        ];
        let prepared = daemon.cli(&prepare).await.json();
        let name = prepared["containers"][0]["cdiDevices"][0].as_str();
        let name = name.expect("a CDI name").to_owned();
        let (kind, of_claim) = name.split_once('=').expect("KIND=DEVICE");
        let edits = device_edits(kind, of_claim).expect("the file of a prepared claim");
        daemon.cli(&["unprepare", "default/vendor"]).await.done();
        let id = std::process::id();
        let this = Self {
            path: Path::new(CDI_DIR).join(format!("bench-{id}.json")),
            kind: format!("bench-{id}.example.com/gpu"),
        };
        // The file with the metadata of the claim is gone.
        let edits = json!({ "env": edits["env"] });
        let spec = json!({
            "cdiVersion": "0.5.0", "kind": this.kind,
            "devices": [{ "name": "gpu", "containerEdits": edits }],
        });
        std::fs::write(&this.path, spec.to_string()).expect("write a CDI file");
        this
    }

    fn edits(&self) -> Value {
        device_edits(&self.kind, "gpu").expect("it was written")
    }
}

/// Waits for the file of a class, and returns the edits of one device of it.
async fn class_edits(class: &str) -> Value {
    loop {
        if let Some(edits) = device_edits(&format!("nodedock.dev/{class}"), "any") {
            return edits;
        }
        tokio::task::yield_now().await;
    }
}

/// Returns the edits of a device in podman's directory.
fn device_edits(kind: &str, device: &str) -> Option<Value> {
    let entries = std::fs::read_dir(CDI_DIR).expect("the daemon made it");
    // Others write and remove files there.
    let texts = entries.filter_map(|entry| std::fs::read_to_string(entry.ok()?.path()).ok());
    let specs = texts.filter_map(|text| {
        let json = text.lines().find(|line| !line.starts_with('#'))?.to_owned();
        serde_json::from_str::<Value>(&json).ok()
    });
    // Each claim has a file of its own.
    specs.filter(|spec| spec["kind"] == kind).find_map(|spec| {
        let devices = spec["devices"].as_array()?;
        let found = devices.iter().find(|found| found["name"] == device)?;
        Some(found["containerEdits"].clone())
    })
}

/// Writes the bundle of a container as a tool that reads CDI would, on the directory with the program.
async fn bundle(
    root: &Root,
    runc: &Path,
    rootfs: &Path,
    number: usize,
    edits: &Value,
) -> (PathBuf, String) {
    let bundle = root.path().join(format!("bundle-{number}"));
    std::fs::create_dir(&bundle).expect("a directory below the root");
    let made = Command::new(runc)
        .arg("spec")
        .arg("--bundle")
        .arg(&bundle)
        .status();
    assert!(made.await.expect("runc can be run").success());
    let path = bundle.join("config.json");
    let config = std::fs::read(&path).expect("runc writes it");
    let mut config: Value = serde_json::from_slice(&config).expect("it is JSON");
    config["root"] = json!({ "path": rootfs });
    config["process"]["terminal"] = false.into();
    config["process"]["args"] = json!([PROGRAM, "true"]);
    let env = edits["env"].as_array().into_iter().flatten().cloned();
    let variables = config["process"]["env"].as_array_mut().expect("a list");
    variables.extend(env);
    for hook in edits["hooks"].as_array().into_iter().flatten() {
        let stage = hook["hookName"].as_str().expect("a hook has a stage");
        config["hooks"][stage] = json!([{ "path": hook["path"], "args": hook["args"] }]);
    }
    (bundle, config.to_string())
}

/// Drops a file from the page cache, unless a process has it mapped.
fn forget(file: &Path) {
    let file = std::fs::File::open(file).expect("the program is there");
    fadvise(&file, 0, None, Advice::DontNeed).expect("the kernel takes the advice");
}

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}
