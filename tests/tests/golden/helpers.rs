//! The helpers for drivers in Go, JavaScript and Python pass their own unit tests.

use std::path::{Path, PathBuf};
use std::process::Command;

use nodedock_tests::go;
use nodedock_tests::machine::{or_skip, program, run};
use nodedock_tests::places::{drivers, examples};

fn sdk(language: &str) -> PathBuf {
    examples().join("../sdk").join(language)
}

/// Runs the tests of a package, and fails with their output.
fn passes(command: &mut Command) {
    let output = command.output().expect("the program starts");
    let shown = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}{}",
        shown(&output.stdout),
        shown(&output.stderr)
    );
}

#[test]
fn python_helpers_pass_their_tests() {
    let environment = drivers().with_file_name("python").join("bin");
    let own = environment.join("python3");
    let python = if own.is_file() {
        own
    } else {
        PathBuf::from("python3")
    };
    let path = std::env::var_os("PATH").unwrap_or_default();
    let paths = std::env::split_paths(&path).chain([environment.clone()]);
    let path = std::env::join_paths(paths).expect("paths without colons");
    let tool = program("componentize-py").unwrap_or_else(|| environment.join("componentize-py"));
    let found = run(Command::new(tool).arg("--version"));
    if or_skip("the helpers for drivers in Python", found).is_some() {
        let mut tests = Command::new(python);
        tests.args(["-m", "unittest", "discover", "-s", "tests"]);
        // The sources are not the place for compiled files.
        tests.env("PYTHONDONTWRITEBYTECODE", "1").env("PATH", path);
        passes(tests.current_dir(sdk("python")));
    }
}

#[test]
fn javascript_helpers_pass_their_tests() {
    let node = program("node").ok_or_else(|| "Node.js is not installed".to_owned());
    let has_hooks = |node: PathBuf| {
        let check = "process.exit(require('node:module').register === undefined ? 1 : 0)";
        run(Command::new(&node).args(["--eval", check]))
            .map(|()| node)
            .map_err(|_| "Node.js is older than 20.6".to_owned())
    };
    let what = "the helpers for drivers in JavaScript";
    if let Some(node) = or_skip(what, node.and_then(has_hooks)) {
        passes(
            Command::new(node)
                .args(["--test", "test/"])
                .current_dir(sdk("javascript")),
        );
    }
}

#[test]
fn go_helpers_pass_their_tests() {
    let compiler = go::compiler().ok_or_else(|| "Go is not installed".to_owned());
    let fetched = |compiler: PathBuf| {
        run(Command::new(&compiler)
            .args(["mod", "download"])
            .current_dir(sdk("go")))
        .map(|()| compiler)
        .map_err(|why| format!("Go modules cannot be fetched: {why}"))
    };
    let what = "the helpers for drivers in Go";
    if let Some(compiler) = or_skip(what, compiler.and_then(fetched)) {
        let sources: &Path = &sdk("go");
        // Of the generated packages, `vet` refuses how they use memory.
        for args in [
            &["vet", "-unsafeptr=false", "./..."][..],
            &["test", "./..."],
        ] {
            passes(Command::new(&compiler).args(args).current_dir(sources));
        }
    }
}
