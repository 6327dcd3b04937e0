//! A new driver in each language builds, is checked, matches its golden file and conforms as it is.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use nodedock_tests::machine::{or_skip, program, run};
use nodedock_tests::places::{drivers, examples};
use nodedock_tests::{Output, Root, go, golden};
use tokio::process::Command;
use tokio::sync::Mutex;

use super::conformance::{COMMAND, passes, text};

/// One language at a time: the tools and the compilation of what they build need a whole machine.
static TURN: Mutex<()> = Mutex::const_new(());

/// A new driver on a root.
struct New {
    root: Root,
    directory: PathBuf,
    /// Directory of tools that are not in the `PATH`.
    tools: Option<PathBuf>,
    /// Target directory of a driver in Rust, kept for the next run: the crates of the SDK take half a minute.
    target: PathBuf,
}

impl New {
    async fn of(language: &str, more: &[&str], tools: Option<PathBuf>) -> Self {
        let root = Root::new();
        let directory = root.path().join("driver");
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("new-driver");
        let new = Self {
            root,
            directory,
            tools,
            target,
        };
        let args = [
            "driver",
            "new",
            "fast-nic.example.org",
            "--lang",
            language,
            "--dir",
        ];
        let made = new
            .runs(new.root.command().args(args).arg(&new.directory).args(more))
            .await;
        made.done_with(&[
            "nodedock driver build",
            "check fast-nic.wasm --hardware machine",
        ]);
        new
    }

    /// Runs a command in the driver's directory, with the tools of its language.
    async fn runs(&self, command: &mut Command) -> Output {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let paths = std::env::split_paths(&path).chain(self.tools.clone());
        command.env(
            "PATH",
            std::env::join_paths(paths).expect("paths without colons"),
        );
        // What the workspace is built of is there already.
        command
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_NET_OFFLINE", "true");
        if self.directory.is_dir() {
            command.current_dir(&self.directory);
        }
        command.stdin(Stdio::null()).kill_on_drop(true);
        let output = tokio::time::timeout(COMMAND, command.output())
            .await
            .expect("it ends");
        let output = output.expect("the program starts");
        let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
        Output {
            code: output.status.code(),
            stdout: text(output.stdout),
            stderr: text(output.stderr),
        }
    }

    async fn nodedock(&self, args: &[&str]) -> Output {
        self.runs(self.root.command().args(args)).await
    }

    /// The commands of its `README.md`.
    async fn is_complete(&self) {
        self.nodedock(&["driver", "build"])
            .await
            .done_with(&["driver/fast-nic.wasm, ", " bytes"]);
        let on_machine = ["fast-nic.wasm", "--hardware", "machine"];
        let check = [&["driver", "check"], &on_machine[..]].concat();
        self.nodedock(&check).await.done_with(&["no findings"]);
        let test = [
            &["driver", "test"],
            &on_machine[..],
            &["--golden", "golden.yaml"],
        ]
        .concat();
        self.nodedock(&test)
            .await
            .done_with(&["as before, 2 devices, 2 prepared, 0 refused"]);
        let file = self.directory.join("fast-nic.wasm");
        passes(
            "the new driver",
            &file,
            "wire",
            &["--hardware", text(&self.directory.join("machine"))],
        )
        .await;
    }
}

#[tokio::test]
async fn new_rust_driver_is_complete() {
    let _turn = TURN.lock().await;
    let sdk = examples().join("../sdk");
    let new = New::of("rust", &["--sdk", text(&sdk)], None).await;
    new.is_complete().await;
    new.runs(Command::new("cargo").args(["test", "--quiet"]))
        .await
        .done_with(&["test result: ok. 1 passed"]);
}

/// Go's own compiler, for WASI 0.1: the command makes a component of its module.
#[tokio::test]
async fn new_go_driver_is_complete() {
    let _turn = TURN.lock().await;
    let found = go::compiler().ok_or_else(|| "Go is not installed".to_owned());
    let Some(compiler) = or_skip("a new driver in Go", found) else {
        return;
    };
    let new = New::of("go", &[], compiler.parent().map(Path::to_owned)).await;
    let fetched = new
        .runs(Command::new(&compiler).args(["mod", "download"]))
        .await;
    let found = match fetched.code {
        Some(0) => Ok(()),
        _ => Err(format!(
            "Go modules cannot be fetched: {}",
            fetched.stderr.trim()
        )),
    };
    if or_skip("a new driver in Go", found).is_none() {
        return;
    }
    new.is_complete().await;
    new.runs(Command::new(&compiler).args(["vet", "./driver"]))
        .await
        .done();
}

#[tokio::test]
async fn new_c_driver_is_complete() {
    let _turn = TURN.lock().await;
    // The tools that built the golden driver build this one.
    let found = golden::C.bytes().and_then(|_| program("clang"));
    let found =
        found.ok_or_else(|| "`cargo xtask golden` did not build the golden driver in C".to_owned());
    if or_skip("a new driver in C", found).is_some() {
        New::of("c", &[], None).await.is_complete().await;
    }
}

#[tokio::test]
async fn new_python_driver_is_complete() {
    let _turn = TURN.lock().await;
    let environment = drivers().with_file_name("python").join("bin");
    let tool = program("componentize-py").unwrap_or_else(|| environment.join("componentize-py"));
    let found = run(std::process::Command::new(&tool).arg("--version"));
    if or_skip("a new driver in Python", found).is_some() {
        New::of("python", &[], Some(environment))
            .await
            .is_complete()
            .await;
    }
}

#[tokio::test]
async fn new_javascript_driver_is_complete() {
    let _turn = TURN.lock().await;
    let modules = drivers()
        .with_file_name("golden-tools")
        .join("javascript/node_modules");
    let has_tools =
        program("node").is_some() && modules.join("@bytecodealliance/componentize-js").is_dir();
    let found = has_tools
        .then_some(modules)
        .ok_or_else(|| "Node.js or componentize-js is not installed".to_owned());
    let Some(modules) = or_skip("a new driver in JavaScript", found) else {
        return;
    };
    let new = New::of("js", &[], None).await;
    std::os::unix::fs::symlink(modules, new.directory.join("node_modules")).expect("a new link");
    new.is_complete().await;
}
