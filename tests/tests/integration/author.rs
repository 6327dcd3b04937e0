//! The author's tools: a new driver, and what they say of a driver on a recorded machine.

use std::path::Path;
use std::process::Stdio;

use nodedock_tests::drivers::{
    Form, MOCK_GPU, MOCK_GPU_FILE, MOCK_GPU_NAME, digest, side_file, version, wasm,
};
use nodedock_tests::machine::skip;
use nodedock_tests::recorded::Recorded;
use nodedock_tests::wait::until_path;
use nodedock_tests::{DEADLINE, Root, golden, recorded};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader, Lines};
use tokio::process::{Child, ChildStdout};

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of the tests are UTF-8")
}

/// The simulated GPUs with their grant and config, in a directory of an author.
fn mock_gpu(root: &Root) -> (String, String) {
    let file = root.write(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    root.write("mock-gpu.grant.yaml", side_file(MOCK_GPU, "grant"));
    root.write("mock-gpu.config.yaml", "pools: [{name: gpus, count: 2}]\n");
    let machine = Recorded::new(&root.path().join("machine"), &[]);
    (text(&file).to_owned(), text(machine.path()).to_owned())
}

#[tokio::test]
async fn golden_differences_and_errors_are_shown() {
    // The tools that built the golden driver build this one.
    if golden::C.bytes().is_none() {
        return skip(
            "a new driver in C",
            "`cargo xtask golden` did not build the golden driver in C",
        );
    }
    let root = Root::new();
    let directory = root.path().join("driver");
    let new = [
        "driver",
        "new",
        "fast-nic.example.org",
        "--lang",
        "c",
        "--dir",
        text(&directory),
    ];
    root.cli(&new).await.done();
    root.cli(&["driver", "build", text(&directory)])
        .await
        .done();
    let [file, machine, expected] =
        ["fast-nic.wasm", "machine", "golden.yaml"].map(|name| directory.join(name));
    let compare = [
        "driver",
        "test",
        text(&file),
        "--hardware",
        text(&machine),
        "--golden",
        text(&expected),
    ];
    let wanted = std::fs::read_to_string(&expected).unwrap();
    std::fs::write(&expected, wanted.replace("minor: 229", "minor: 230")).unwrap();
    root.cli(&compare).await.failed_with(
        1,
        &[
            "-          minor: 230\n",
            "+          minor: 229\n",
            "--update",
        ],
    );
    root.cli(&[&compare[..], &["--update"]].concat())
        .await
        .done();
    assert_eq!(std::fs::read_to_string(&expected).unwrap(), wanted);

    // An error in the sources is the compiler's to explain.
    std::fs::write(directory.join("driver.c"), "int main(void) {").unwrap();
    root.cli(&["driver", "build", text(&directory)])
        .await
        .failed_with(1, &["clang failed"]);
}

#[tokio::test]
async fn check_finds_obstacles_to_serving() {
    let root = Root::new();
    let (file, machine) = mock_gpu(&root);
    let check = async |more: &[&str]| {
        root.cli(
            &[
                &[
                    "driver",
                    "check",
                    &file,
                    "--hardware",
                    &machine,
                    "-o",
                    "json",
                ][..],
                more,
            ]
            .concat(),
        )
        .await
    };
    let ids = |output: &str| -> Vec<(String, String)> {
        let findings: Vec<Value> = serde_json::from_str(output).unwrap();
        let field = |finding: &Value, name: &str| finding[name].as_str().unwrap().to_owned();
        findings
            .iter()
            .map(|finding| (field(finding, "severity"), field(finding, "id")))
            .collect()
    };
    let pair = |severity: &str, id: &str| (severity.to_owned(), id.to_owned());
    assert_eq!(ids(&check(&[]).await.done()), []);
    let wide = side_file(MOCK_GPU, "grant") + "deviceNodes: [/dev/fuse]\n";
    let wide = root.write("wide.yaml", wide);
    let found = ids(&check(&["--grant", text(&wide)]).await.done());
    assert_eq!(found, [pair("warning", "grant-unneeded")]);
    let narrow = root.write(
        "narrow.yaml",
        "apiVersion: nodedock.dev/v1\nkind: DriverGrant\n",
    );
    let blocked = check(&["--grant", text(&narrow)]).await;
    assert_eq!(ids(&blocked.stdout), [pair("error", "grant-missing")]);
    blocked.failed_with(1, &["MOCK_GPU_*"]);
    let config = root.write("bad.yaml", "pool: []\n");
    let invalid = check(&["--config", text(&config)]).await;
    assert_eq!(ids(&invalid.stdout), [pair("error", "config-invalid")]);
    let junk = root.write("junk.wasm", "junk");
    root.cli(&["driver", "check", text(&junk), "--hardware", &machine])
        .await
        .failed_with(1, &["error", "not-loadable", "not WebAssembly"]);
    root.cli(&["driver", "check", &file, "--hardware", "/nowhere"])
        .await
        .failed_with(1, &["/nowhere"]);
}

#[tokio::test]
async fn check_tries_triggers_boots_and_changes() {
    let root = Root::new();
    let file = root.write("scripted.wasm", wasm("scripted", Form::Core));
    root.write("scripted.grant.yaml", side_file("scripted", "grant"));
    let [before, after] = ["before", "after"].map(|name| {
        let machine = Recorded::new(&root.path().join(name), &[]);
        text(machine.path()).to_owned()
    });
    let check = async |fault: &str, more: &[&str]| {
        let config = root.write("script.yaml", format!("devices: 2\n{fault}"));
        let args = [
            "driver",
            "check",
            text(&file),
            "--config",
            text(&config),
            "--hardware",
            &before,
        ];
        root.cli(&[&args[..], more].concat()).await
    };
    check("", &[]).await.done_with(&["no-identity"]);
    let at_load = check("fault: devices-only-at-load\n", &[]).await;
    at_load.failed_with(
        1,
        &["names-unstable", "a discovery by the timer", "by a request"],
    );
    let of_boot = check("fault: pool-of-the-boot\n", &[]).await;
    of_boot.failed_with(1, &["names-unstable", "a discovery after a reboot"]);
    check("", &["--then", &after])
        .await
        .done_with(&["no-identity"]);
    check("", &["--then", "/nowhere"])
        .await
        .failed_with(1, &["/nowhere"]);
}

#[tokio::test]
async fn tools_compile_a_driver_once() {
    let root = Root::new();
    let (file, machine) = mock_gpu(&root);
    let bench = async |cache: &str| {
        let args = ["driver", "bench", &file, "--hardware", &machine];
        let rounds = ["--rounds", "1", "--compile-cache", cache];
        root.cli(&[&args[..], &rounds[..]].concat()).await
    };
    let cache = root.path().join("shared");
    bench(text(&cache))
        .await
        .done_with(&["load, with compilation"]);
    bench(text(&cache))
        .await
        .done_with(&["load, from the cache"]);
    bench("none").await.done_with(&["load, with compilation"]);
    let in_the_way = root.write("file", "");
    let output = bench(text(&in_the_way)).await;
    let why = "file is no directory";
    assert!(
        output.stderr.lines().count() == 1 && output.stderr.contains(why),
        "{output:?}"
    );
    output.done_with(&["load, with compilation"]);
}

#[tokio::test]
async fn test_shows_written_and_restored_values() {
    const GPU: &str = "0000:01:00.0";
    let root = Root::new();
    let machine = Recorded::new(&root.path().join("machine"), &["vfio-pci", "amdgpu"]);
    machine.function(GPU, "0x030000", "amdgpu", Some(7));
    let file = root.write("vfio-pci.wasm", wasm("vfio-pci", Form::Core));
    root.write("vfio-pci.grant.yaml", side_file("vfio-pci", "grant"));
    root.write(
        "vfio-pci.config.yaml",
        "pools: [{name: gpu, select: [{class: \"0x03\"}]}]\n",
    );
    let args = [
        "driver",
        "test",
        text(&file),
        "--hardware",
        text(machine.path()),
        "-o",
        "json",
    ];
    let result = root.cli(&args).await.json();
    let claim = &result["claims"]["gpu/0000-01-00-0"];
    assert_eq!(claim["written"][0]["before"], "amdgpu", "{claim:#}");
    assert_eq!(
        claim["written_by_unprepare"][0]["after"], "amdgpu",
        "{claim:#}"
    );
    assert_eq!(
        claim["prepared"]["devices"][0]["device"], "0000-01-00-0",
        "{claim:#}"
    );
    assert!(claim.get("refused").is_none(), "{claim:#}");
    let sys = machine.path().join("sys");
    assert_eq!(
        recorded::kernel_driver(&sys, GPU),
        "amdgpu",
        "the snapshot is read only"
    );
}

#[tokio::test]
async fn a_bench_measures_every_function() {
    let root = Root::new();
    let (file, machine) = mock_gpu(&root);
    let args = [
        "driver",
        "bench",
        &file,
        "--hardware",
        &machine,
        "--rounds",
        "3",
        "-o",
        "json",
    ];
    let rows = root.cli(&args).await.json();
    let count = |what: &str| {
        let row = rows
            .as_array()
            .unwrap()
            .iter()
            .find(|row| row["what"] == what);
        let row = row.unwrap_or_else(|| panic!("{what} is not in {rows:#}"));
        assert!(row["median"].as_f64().unwrap() > 0.0, "{row}");
        row["count"].as_u64().unwrap()
    };
    for what in ["instantiate", "discover", "prepare", "unprepare"] {
        assert_eq!(count(what), 3);
    }
    for what in ["discover, CPU", "prepare, CPU", "unprepare, CPU"] {
        assert_eq!(count(what), 3);
    }
    for what in [
        "memory of a call, at most",
        "devices, as JSON",
        "prepared claim, as JSON",
        "file",
    ] {
        assert_eq!(count(what), 1);
    }
    root.cli(&["driver", "bench", &file, "--rounds", "0"])
        .await
        .failed_with(2, &["--rounds"]);
}

fn signal(child: &Child, signal: Signal) {
    let id = child.id().expect("it runs");
    let pid = Pid::from_raw(i32::try_from(id).expect("a process ID")).expect("a process ID");
    kill_process(pid, signal).expect("it runs");
}

/// Ctrl-C left the copy of the machine, which a snapshot of a large one fills with thousands of files.
#[tokio::test]
async fn stopped_command_leaves_no_files() {
    let root = Root::new();
    let (file, machine) = mock_gpu(&root);
    for stop in [Signal::INT, Signal::TERM] {
        let temporary = root.path().join("temporary");
        std::fs::create_dir(&temporary).unwrap();
        let mut started = root.command();
        started
            .args(["driver", "bench", &file, "--hardware", &machine])
            .env("TMPDIR", &temporary);
        // For longer than the test waits.
        started.args(["--rounds", "10000"]);
        let child = started
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let entries = || {
            std::fs::read_dir(&temporary)
                .unwrap()
                .flatten()
                .map(|entry| entry.path())
        };
        let exists = || {
            entries()
                .next()
                .map(drop)
                .ok_or_else(|| "nothing".to_owned())
        };
        until_path(&temporary, "the machine is copied", exists).await;
        signal(&child, stop);
        let ended = tokio::time::timeout(DEADLINE, child.wait_with_output())
            .await
            .expect("it ends")
            .unwrap();
        let error = String::from_utf8_lossy(&ended.stderr);
        assert!(
            ended.status.code() == Some(1) && error.contains("error: interrupted"),
            "{error}"
        );
        assert!(entries().next().is_none(), "{error}");
        std::fs::remove_dir(&temporary).unwrap();
    }
}

/// `driver run`, and what it prints.
struct Running {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Running {
    /// Reads until a line has all these parts.
    async fn until(&mut self, parts: &[&str]) -> String {
        let mut read = String::new();
        let found = async {
            while let Some(line) = self.lines.next_line().await.expect("read what it prints") {
                if parts.iter().all(|part| line.contains(part)) {
                    return line;
                }
                read.push_str(&line);
            }
            panic!("it ended before {parts:?}: {read}")
        };
        tokio::time::timeout(DEADLINE, found)
            .await
            .unwrap_or_else(|_| panic!("it does not print {parts:?}"))
    }
}

#[tokio::test]
async fn driver_run_reloads_a_changed_file() {
    let root = Root::new();
    let (file, machine) = mock_gpu(&root);
    let mut command = root.command();
    let child = command
        .args(["driver", "run", &file, "--hardware", &machine])
        .stdout(Stdio::piped())
        .spawn();
    let mut child = child.expect("the program starts");
    let lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
    let mut running = Running { child, lines };
    let line = running.until(&["root "]).await;
    let daemon_root = line
        .strip_prefix("root ")
        .and_then(|rest| rest.split_once(';'))
        .expect("a root")
        .0;
    // It prints the states before, too, and a file may be read half written.
    let named = format!("{MOCK_GPU_NAME} (");
    running.until(&[&named, "is serving"]).await;
    let added = format!("+ {MOCK_GPU_NAME}/");
    running.until(&[&added, "/gpus/gpu-1 "]).await;

    let second = version(wasm(MOCK_GPU, Form::Core), "two");
    root.write(MOCK_GPU_FILE, &second);
    running.until(&[&digest(&second)[..19], "is serving"]).await;
    root.write("mock-gpu.config.yaml", "pools: [{name: gpus, count: 1}]\n");
    let removed = format!("- {MOCK_GPU_NAME}/");
    running.until(&[&removed, "/gpus/gpu-1"]).await;

    assert!(Path::new(daemon_root).is_dir());
    signal(&running.child, Signal::INT);
    let ended = tokio::time::timeout(DEADLINE, running.child.wait())
        .await
        .expect("it ends")
        .unwrap();
    assert!(ended.success(), "{ended}");
    assert!(!Path::new(daemon_root).exists(), "the root is removed");
}
