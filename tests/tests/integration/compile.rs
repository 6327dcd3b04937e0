//! Compilation happens in a process of its own: its failures do not affect the daemon and its other drivers.

pub(crate) mod bombs;

use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use nodedock_core::driver::values::NoJournal;
use nodedock_core::records::SharedClaimTable;
use nodedock_model::grant::Grant;
use nodedock_tests::compose::{gpu_claim, pod, request};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_FILE, wasm};
use nodedock_tests::golden::settings;
use nodedock_tests::machine::{Tmpfs, is_root, or_skip, skip, write_script};
use nodedock_tests::wait::until_path;
use nodedock_tests::{DEADLINE, Daemon, Options, Root, places};
use nodedock_wasm::{
    COMPILE_COMMAND, CompileBounds, Compiler, DriverFile, LoadError, WasmDriver, WasmHost,
    WasmSettings,
};
use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::AsyncWriteExt;
use tokio::io::unix::AsyncFd;

use crate::with_gpus;

fn host(program: PathBuf, bounds: CompileBounds) -> Arc<WasmHost> {
    let settings = WasmSettings {
        compiler: Compiler::Process { program, bounds },
        ..settings(None)
    };
    WasmHost::new(
        settings,
        Arc::new(SharedClaimTable::default()),
        Arc::new(NoJournal),
    )
    .expect("set up the sandbox")
}

async fn load(host: &Arc<WasmHost>, bytes: Vec<u8>) -> Result<WasmDriver, LoadError> {
    let file = DriverFile {
        name: "file.wasm".into(),
        bytes: bytes.into(),
    };
    host.load(file, Grant::empty(), None).await
}

async fn refusal(bounds: CompileBounds, bytes: Vec<u8>) -> LoadError {
    let outcome = load(&host(places::nodedockd(), bounds), bytes).await;
    outcome.map(|driver| driver.info().clone()).unwrap_err()
}

/// Writes a program that replaces the compiler.
fn script(root: &Root, text: &str) -> PathBuf {
    let path = root.path().join("compiler");
    write_script(&path, &format!("#!/bin/sh\n{text}\n"));
    path
}

/// Waits until a process has ended, whichever process is its parent.
async fn ended(process: OwnedFd) {
    // SAFETY: the descriptor is the registration's own, open until it ends, and nothing else registers it.
    let process = unsafe { AsyncFd::register(process) }.expect("a process can be waited for");
    let end = tokio::time::timeout(DEADLINE, process.readable()).await;
    let _ready = end.expect("the process ends").expect("wait for a process");
}

fn open(pid: i32) -> OwnedFd {
    let pid = Pid::from_raw(pid).expect("no process has ID 0");
    rustix::process::pidfd_open(pid, PidfdFlags::empty()).expect("the process is there")
}

/// The nth compiler that a daemon started.
async fn compiler_of(daemon: &Daemon, n: usize) -> i32 {
    let pid = || {
        let log = daemon.log();
        let line = log
            .lines()
            .filter(|line| line.contains("compiler started"))
            .nth(n - 1);
        let word = line.and_then(|line| {
            line.split_whitespace()
                .find_map(|word| word.strip_prefix("pid="))
        });
        word.and_then(|pid| pid.parse().ok()).ok_or(log)
    };
    until_path(&daemon.log_path(), "a compiler is started", pid).await
}

fn telling() -> Options {
    Options::default()
        .env("NODEDOCK_LOG", "info,nodedock_wasm=debug")
        .cold()
}

fn kept_files(root: &Root) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root.path().join("var/cache/nodedock")).unwrap();
    entries.map(|entry| entry.unwrap().path()).collect()
}

#[tokio::test]
async fn dead_compiler_fails_only_its_file() {
    let daemon = Daemon::start_with(telling()).await;
    daemon.serve(MOCK_GPU, Form::Core).await;
    daemon.drop_in("slow.wasm", bombs::slow(20));
    for started in [2, 3] {
        let pid = compiler_of(&daemon, started).await;
        rustix::process::kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
    daemon
        .prepared(request(
            &pod("meanwhile"),
            &[&gpu_claim("meanwhile", &["gpus/gpu-0"])],
        ))
        .await;
    let failed = daemon.until_state("slow.wasm", "failed").await;
    assert!(
        failed
            .reason
            .contains("the compiler was killed twice by signal 9"),
        "{failed:?}"
    );
    daemon
        .prepared(request(
            &pod("after"),
            &[&gpu_claim("after", &["gpus/gpu-1"])],
        ))
        .await;
    assert_eq!(
        kept_files(&daemon).len(),
        1,
        "of what failed nothing is kept"
    );
}

#[tokio::test]
async fn oversized_module_is_not_compiled() {
    let daemon = with_gpus().await;
    for (name, bytes, wanted) in [
        (
            "many.wasm",
            bombs::many(),
            "functions, at most 100000 are taken",
        ),
        (
            "huge.wasm",
            bombs::huge(),
            "a function of 2800011 bytes, at most 2097152 are taken",
        ),
    ] {
        daemon.drop_in(name, bytes);
        daemon.until_failed(name, &[wanted]).await;
    }
}

#[tokio::test]
async fn each_compilation_bound_has_its_error() {
    let bounds = CompileBounds {
        cpu: Duration::from_secs(1),
        ..CompileBounds::default()
    };
    let error = refusal(bounds, bombs::slow(12)).await;
    assert_eq!(error.code().as_str(), "compile-cpu", "{error}");
    assert!(error.to_string().contains("more than 1s of CPU"), "{error}");

    let bounds = CompileBounds {
        wall: Duration::from_millis(1),
        ..CompileBounds::default()
    };
    let error = refusal(bounds, bombs::slow(1)).await;
    assert_eq!(error.code().as_str(), "compile-time", "{error}");

    let bounds = CompileBounds {
        memory: 320 << 20,
        ..CompileBounds::default()
    };
    let error = refusal(bounds, bombs::greedy()).await;
    assert_eq!(error.code().as_str(), "compile-memory", "{error}");
    assert!(error.to_string().contains("320 MiB"), "{error}");
}

#[tokio::test]
async fn killed_compiler_is_restarted_once() {
    let root = Root::new();
    let (tries, program) = (root.path().join("tries"), places::nodedockd());
    let count = format!("echo try >> {}", tries.display());
    let always = script(&root, &format!("{count}\nkill -KILL $$"));
    let error = load(
        &host(always, CompileBounds::default()),
        wasm(MOCK_GPU, Form::Core),
    )
    .await;
    let error = error.map(|driver| driver.info().clone()).unwrap_err();
    assert_eq!(error.code().as_str(), "compiler-killed", "{error}");
    assert_eq!(std::fs::read_to_string(&tries).unwrap().lines().count(), 2);

    std::fs::remove_file(&tries).unwrap();
    let (marker, program) = (tries.display(), program.display());
    let once = script(
        &root,
        &format!("[ -e {marker} ] && exec {program} \"$@\"\n{count}\nkill -KILL $$"),
    );
    load(
        &host(once, CompileBounds::default()),
        wasm(MOCK_GPU, Form::Core),
    )
    .await
    .unwrap();
}

#[tokio::test]
async fn invalid_compiler_output_is_refused() {
    let root = Root::new();
    for (text, wanted) in [
        ("exit 0", "cut off"),
        ("cat", "cut off"),
        (
            "cat >/dev/null; head -c 400000000 /dev/zero",
            "without an end",
        ),
        ("echo no such name >&2; exit 1", "no such name"),
        ("exec /nowhere/at/all", "could not start"),
    ] {
        let host = host(script(&root, text), CompileBounds::default());
        let error = load(&host, wasm(MOCK_GPU, Form::Core))
            .await
            .map(|driver| driver.info().clone());
        let error = error.unwrap_err();
        assert!(
            error.code() == "host-failed" && error.to_string().contains(wanted),
            "{text}: {error}"
        );
    }
    let error = load(
        &host("/nowhere/at/all".into(), CompileBounds::default()),
        wasm(MOCK_GPU, Form::Core),
    )
    .await;
    let error = error
        .map(|driver| driver.info().clone())
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("start the compiler /nowhere/at/all"),
        "{error}"
    );
}

#[tokio::test]
async fn a_cancelled_load_ends_its_compiler() {
    let root = Root::new();
    let pid = root.path().join("pid");
    let (new, path) = (format!("{}.new", pid.display()), pid.display());
    let waiting = script(
        &root,
        &format!("echo $$ > {new}; mv {new} {path}; exec sleep 1000"),
    );
    let host = host(waiting, CompileBounds::default());
    let loading =
        tokio::spawn(async move { load(&host, wasm(MOCK_GPU, Form::Core)).await.map(drop) });
    let read = || std::fs::read_to_string(&pid).map_err(|error| error.to_string());
    let process = open(
        until_path(root.path(), "the compiler runs", read)
            .await
            .trim()
            .parse()
            .unwrap(),
    );
    loading.abort();
    ended(process).await;
}

#[tokio::test]
async fn compiler_dies_with_its_daemon() {
    let mut daemon = Daemon::start_with(telling()).await;
    daemon.serve(MOCK_GPU, Form::Core).await;
    daemon.take_out(MOCK_GPU_FILE);
    daemon.until_gone(MOCK_GPU_FILE).await;
    daemon.drop_in(MOCK_GPU_FILE, bombs::slow(12));
    let compiler = open(compiler_of(&daemon, 2).await);
    daemon.kill9().await;
    ended(compiler).await;
    let kept = kept_files(&daemon);
    assert_eq!(kept.len(), 1, "nothing half written is left: {kept:?}");

    daemon.drop_in(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    daemon.run().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_log("from_cache=true").await;
}

#[tokio::test]
async fn changed_file_stops_its_compilation() {
    let daemon = Daemon::start_with(telling()).await;
    daemon.drop_in(
        "mock-gpu.grant.yaml",
        nodedock_tests::drivers::side_file(MOCK_GPU, "grant"),
    );
    daemon.drop_in(MOCK_GPU_FILE, bombs::slow(20));
    let compiler = open(compiler_of(&daemon, 1).await);
    daemon.drop_in(MOCK_GPU_FILE, wasm(MOCK_GPU, Form::Core));
    ended(compiler).await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    assert_eq!(
        kept_files(&daemon).len(),
        1,
        "the first was not compiled to its end"
    );
}

#[tokio::test]
async fn compilation_uses_no_daemon_memory() {
    let daemon = Daemon::with_gpus(Options::default().cold()).await;
    let before = daemon.memory_mib("VmHWM");
    let large = bombs::slow(1);
    daemon.take_out(MOCK_GPU_FILE);
    daemon.until_gone(MOCK_GPU_FILE).await;
    daemon.drop_in(MOCK_GPU_FILE, &large);
    daemon.until_serving(MOCK_GPU_FILE).await;
    let log = daemon.log();
    let compiled = log
        .lines()
        .rfind(|line| line.contains("memory_peak_mib="))
        .expect("it is logged");
    let (_, words) = compiled.split_once("memory_peak_mib=").unwrap();
    let taken: f64 = words
        .chars()
        .take_while(char::is_ascii_digit)
        .collect::<String>()
        .parse()
        .unwrap();
    let grown = daemon.memory_mib("VmHWM") - before;
    assert!(
        taken > 50.0 && grown < taken / 3.0,
        "{taken} MiB to compile, the daemon grew by {grown}: {compiled}"
    );
}

#[tokio::test]
async fn compiler_has_only_its_pipes() {
    let mut command = tokio::process::Command::new(places::nodedockd());
    command.args([
        COMPILE_COMMAND,
        &std::process::id().to_string(),
        "536870912",
        "7",
    ]);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let mut compiler = command.spawn().unwrap();
    let mut stdin = compiler.stdin.take().unwrap();
    // More than a pipe holds: when it is written, the compiler reads, and has dropped its rights before.
    stdin.write_all(&vec![0; 1 << 20]).await.unwrap();
    let proc = PathBuf::from(format!("/proc/{}", compiler.id().unwrap()));
    let read = |name: &str| std::fs::read_to_string(proc.join(name)).unwrap();
    let tasks: Vec<_> = std::fs::read_dir(proc.join("task"))
        .unwrap()
        .map(|task| task.unwrap().path())
        .collect();
    // The main thread, and those that compile if there are processors for them.
    let processors = std::thread::available_parallelism().unwrap().get().min(4);
    assert_eq!(tasks.len(), if processors > 1 { 1 + processors } else { 1 });
    let mut users = std::collections::BTreeSet::new();
    for task in tasks {
        let status = std::fs::read_to_string(task.join("status")).unwrap();
        let field = |name: &str| {
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix(name))
                .unwrap_or_else(|| panic!("{name}: {status}"));
            line.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(field("NoNewPrivs:"), ["1"]);
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            assert_eq!(field(set), ["0000000000000000"], "{set}");
        }
        if is_root() {
            users.extend(field("Uid:").into_iter().chain(field("Gid:")));
            assert!(field("Groups:").is_empty());
        }
    }
    if is_root() {
        let user: u32 = users
            .iter()
            .map(|user| user.parse().unwrap())
            .next()
            .unwrap();
        assert!(
            users.len() == 1 && (2_147_200_000..=2_147_265_535).contains(&user),
            "{users:?}"
        );
        // The user was that of others: any of their processes could stop the compiler.
        let stop = format!("kill -STOP {}", compiler.id().unwrap());
        let stopped = std::process::Command::new("sh")
            .args(["-c", &stop])
            .uid(65534)
            .gid(65534)
            .output();
        assert!(!stopped.unwrap().status.success());
    }
    let limits = read("limits");
    for (name, value) in [
        ("Max cpu time", "7"),
        ("Max file size", "0"),
        ("Max core file size", "0"),
        ("Max open files", "3"),
        ("Max processes", "0"),
        ("Max address space", "536870912"),
    ] {
        let line = limits
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or_else(|| panic!("{limits}"));
        assert_eq!(line.split_whitespace().next(), Some(value), "{name}");
    }
    assert_eq!(read("oom_score_adj").trim(), "1000");
    if is_root() {
        assert_eq!(
            std::fs::read_link(proc.join("cwd")).unwrap(),
            Path::new("/")
        );
        assert_eq!(std::fs::read_dir(proc.join("fd")).unwrap().count(), 3);
    } else {
        skip(
            "user and open files of a compiler",
            "only root may look at them",
        );
    }
    drop(stdin);
    compiler.wait_with_output().await.unwrap();
}

#[tokio::test]
async fn compiler_refuses_interactive_use() {
    let root = Root::new();
    let help = root.cli(&["--help"]).await.done();
    assert!(
        help.contains("prepare") && !help.contains(COMPILE_COMMAND),
        "{help}"
    );
    root.cli(&[COMPILE_COMMAND, "1", "536870912", "7"])
        .await
        .failed_with(1, &["the parent process is gone"]);
}

#[tokio::test]
async fn cache_works_on_noexec_disk() {
    let root = Root::new();
    let cache = root.path().join("var/cache/nodedock");
    std::fs::create_dir_all(&cache).unwrap();
    let Some(mounted) = or_skip(
        "a cache on a disk that runs no code",
        Tmpfs::mount(&cache, "noexec,mode=700"),
    ) else {
        return;
    };
    let mut daemon = Daemon::start_on(root, Options::default()).await;
    daemon.serve(MOCK_GPU, Form::Core).await;
    daemon.restart().await;
    daemon.until_serving(MOCK_GPU_FILE).await;
    daemon.until_log("from_cache=true").await;
    // The directory goes last.
    let _root = daemon.into_root().await;
    drop(mounted);
}
