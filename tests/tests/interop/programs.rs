//! The programs of `tests/interop`, or in one line why this machine cannot have them.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

use nodedock_tests::DEADLINE;
use nodedock_tests::go::{KUBERNETES_VERSION_FLAGS, Module};
use nodedock_tests::machine::{program, run};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::time::timeout;

/// A program of the Go module, built. Without Go or its modules there is none; a program that does not compile is a failure.
pub(crate) fn go(name: &str) -> Result<PathBuf, String> {
    built("go", name, "")
}

/// The command line of Kubernetes, from the module of its other parts.
pub(crate) fn kubectl() -> Result<PathBuf, String> {
    built("kubernetes", "kubectl", KUBERNETES_VERSION_FLAGS)
}

/// The parser, the checks and the query engine of Prometheus.
pub(crate) fn prometheus() -> Result<PathBuf, String> {
    built("prometheus", "prometheus", "-s -w")
}

fn built(module: &str, name: &str, linker_flags: &str) -> Result<PathBuf, String> {
    // One at a time: they share most of what has to be compiled.
    static BUILDING: Mutex<()> = Mutex::new(());
    let _building = BUILDING
        .lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner);
    let output = Path::new(env!("CARGO_TARGET_TMPDIR")).join("interop");
    let sources = sources(module);
    Module {
        sources,
        output,
        fetch_seconds: 300,
        build_seconds: 900,
        linker_flags,
        requirements: None,
    }
    .program(name)
}

/// A Python that has grpcio.
pub(crate) fn python() -> Result<PathBuf, String> {
    python_with("grpc", "grpcio")
}

/// A Python that has a module, by the name of its package.
pub(crate) fn python_with(module: &str, package: &str) -> Result<PathBuf, String> {
    let python = program("python3").ok_or("Python is not installed")?;
    run(Command::new(&python).args(["-c", &format!("import {module}")]))
        .map_err(|_| format!("Python has no {package} (python3 -m pip install {package})"))?;
    Ok(python)
}

/// A directory of `tests/interop`.
pub(crate) fn sources(language: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("interop")
        .join(language)
}

/// A running program that takes commands and prints events, each a line of JSON. It is killed when dropped.
pub(crate) struct Running {
    pub(crate) process: Child,
    commands: ChildStdin,
    events: Lines<BufReader<ChildStdout>>,
    /// Events that were read while another was waited for.
    passed: Vec<Value>,
}

impl Running {
    pub(crate) fn start(mut command: tokio::process::Command) -> Self {
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let mut process = command.spawn().expect("start the program");
        let commands = process.stdin.take().expect("it is piped");
        let events = BufReader::new(process.stdout.take().expect("it is piped")).lines();
        Self {
            process,
            commands,
            events,
            passed: Vec::new(),
        }
    }

    pub(crate) async fn command(&mut self, command: &Value) {
        self.commands
            .write_all(format!("{command}\n").as_bytes())
            .await
            .expect("the program reads");
    }

    /// The first event that is wanted, of those that no caller took yet.
    pub(crate) async fn event(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        if let Some(at) = self.passed.iter().position(&wanted) {
            return self.passed.remove(at);
        }
        let found = timeout(DEADLINE, async {
            while let Some(line) = self
                .events
                .next_line()
                .await
                .expect("read the program's output")
            {
                let event: Value = serde_json::from_str(&line).expect("JSON");
                if wanted(&event) {
                    return event;
                }
                self.passed.push(event);
            }
            panic!("the program ended before {what}");
        });
        let found = found.await;
        found.unwrap_or_else(|_| {
            panic!(
                "waited in vain until {what}; the program said {:#?}",
                self.passed
            )
        })
    }

    /// Forgets the events until now.
    pub(crate) fn forget(&mut self) {
        self.passed.clear();
    }
}
