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
        self.builds().await;
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

/// All facets of the contract.
const FACETS: [&str; 2] = ["--facets", "configuration,health,left-out,scheduling"];
/// The world without one of them.
const HEALTH: &str = "include nodedock:driver/health-facet@0.2.0;";

impl New {
    async fn builds(&self) {
        self.nodedock(&["driver", "build"])
            .await
            .done_with(&["driver/fast-nic.wasm, ", " bytes"]);
    }

    /// Its file has the facets, and a build refuses one that is implemented and not exported.
    async fn has_facets_of_its_world(&self) {
        self.nodedock(&["driver", "inspect", "fast-nic.wasm"])
            .await
            .done_with(&["facets    configuration, health, left-out, scheduling\n"]);
        self.replace("wit/world.wit", HEALTH, "");
        let refused = self.nodedock(&["driver", "build"]).await;
        let shown = format!("{}{}", refused.stdout, refused.stderr);
        assert_ne!(refused.code, Some(0), "{shown}");
        for part in [
            "implements health, which the world driver does not export",
            HEALTH,
        ] {
            assert!(shown.contains(part), "{part:?} in {shown}");
        }
        let world = std::fs::read_to_string(self.directory.join("wit/world.wit"));
        let world = world.expect("the world is there");
        let with_health = world.replacen("include ", &format!("{HEALTH}\n    include "), 1);
        std::fs::write(self.directory.join("wit/world.wit"), with_health).expect("it is written");
    }

    /// What is printed is in the log, and an exception is the problem of its call, with its trace.
    async fn explains_exceptions(&self, source: &str, before: &str, raises: &str, trace: &[&str]) {
        self.replace(source, before, &format!("{before}{raises}"));
        self.builds().await;
        let args = ["driver", "test", "fast-nic.wasm", "--hardware", "machine"];
        let mut command = self.root.command();
        let failed = self
            .runs(command.args(args).env("NODEDOCK_LOG", "info"))
            .await;
        assert_ne!(failed.code, Some(0), "{failed:?}");
        for part in [&["a line of the driver"], trace].concat() {
            assert!(
                failed.stderr.contains(part),
                "{part:?} in {}",
                failed.stderr
            );
        }
    }

    fn replace(&self, path: &str, before: &str, after: &str) {
        let path = self.directory.join(path);
        let text = std::fs::read_to_string(&path).expect("the file is there");
        assert!(text.contains(before), "{before:?} in {text}");
        std::fs::write(path, text.replacen(before, after, 1)).expect("it is written");
    }
}

#[tokio::test]
async fn new_rust_driver_is_complete() {
    let _turn = TURN.lock().await;
    let sdk = examples().join("../sdk");
    let args = [&["--sdk", text(&sdk)], &FACETS[..]].concat();
    let new = New::of("rust", &args, None).await;
    new.is_complete().await;
    new.nodedock(&["driver", "inspect", "fast-nic.wasm"])
        .await
        .done_with(&["facets    configuration, health, left-out, scheduling\n"]);
    new.runs(Command::new("cargo").args(["test", "--quiet"]))
        .await
        .done_with(&["test result: ok. 1 passed"]);
    new.replace("src/lib.rs", ", Health", "");
    let refused = new.nodedock(&["driver", "build"]).await;
    assert_ne!(refused.code, Some(0), "{refused:?}");
    let why = "the driver implements Health, which export_driver! does not name";
    assert!(refused.stderr.contains(why), "{}", refused.stderr);
}

/// Go's own compiler, for WASI 0.1: the command makes a component of its module.
#[tokio::test]
async fn new_go_driver_is_complete() {
    let _turn = TURN.lock().await;
    let found = go::compiler().ok_or_else(|| "Go is not installed".to_owned());
    let Some(compiler) = or_skip("a new driver in Go", found) else {
        return;
    };
    let new = New::of("go", &FACETS, compiler.parent().map(Path::to_owned)).await;
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
    new.runs(Command::new(&compiler).args(["vet", "-unsafeptr=false", "./driver"]))
        .await
        .done();
    new.runs(Command::new(&compiler).args(["test", "./driver"]))
        .await
        .done_with(&["ok  \tnodedock-driver/driver"]);
    new.has_facets_of_its_world().await;
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
        let new = New::of("c", &FACETS, None).await;
        new.is_complete().await;
        new.has_facets_of_its_world().await;
    }
}

#[tokio::test]
async fn new_python_driver_is_complete() {
    let _turn = TURN.lock().await;
    let environment = drivers().with_file_name("python").join("bin");
    let tool = program("componentize-py").unwrap_or_else(|| environment.join("componentize-py"));
    let found = run(std::process::Command::new(&tool).arg("--version"));
    if or_skip("a new driver in Python", found).is_some() {
        let new = New::of("python", &FACETS, Some(environment.clone())).await;
        new.is_complete().await;
        new.has_facets_of_its_world().await;
        let python = environment.join("python3");
        let python = if python.is_file() {
            python
        } else {
            "python3".into()
        };
        new.runs(Command::new(python).args(["-m", "unittest"]))
            .await
            .done();
        let raises =
            "\n        print(\"a line of the driver\")\n        raise ValueError(\"broken\")";
        let trace = ["ValueError: broken, at driver.py:", " in discover"];
        let before = "def discover(self, ctx, trigger):";
        new.explains_exceptions("driver.py", before, raises, &trace)
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
    let new = New::of("js", &FACETS, None).await;
    std::os::unix::fs::symlink(modules, new.directory.join("node_modules")).expect("a new link");
    new.is_complete().await;
    new.has_facets_of_its_world().await;
    new.runs(Command::new("node").args(["--test", "driver.test.js"]))
        .await
        .done_with(&["# pass 1\n", "# fail 0\n"]);
    let raises =
        "\n    console.log(\"a line of the driver\");\n    throw new RangeError(\"broken\");";
    let trace = ["RangeError: broken, at discover@driver.js:"];
    new.explains_exceptions(
        "driver.js",
        "discover(_context, _trigger) {",
        raises,
        &trace,
    )
    .await;
}
