//! Detects external software on this machine, or returns in one line why it cannot be used.

use std::env;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::workspace::Workspace;

pub(crate) enum Finding {
    Present,
    Missing(String),
}

/// An installed toolchain: the program, and a text that identifies its version.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Tool {
    pub(crate) program: PathBuf,
    pub(crate) version: String,
}

/// The tools for a container with a device.
pub(crate) struct Podman {
    pub(crate) program: PathBuf,
    pub(crate) runtime: PathBuf,
    pub(crate) busybox: PathBuf,
}

/// Finds podman with a runtime and a static busybox, as root: a device node needs privileges.
pub(crate) fn podman() -> Result<Podman, String> {
    let program = find("podman").ok_or("podman is not installed")?;
    let runtime = ["runc", "crun"]
        .into_iter()
        .find_map(find)
        .ok_or("neither runc nor crun is installed")?;
    let busybox =
        static_busybox().ok_or("no statically linked busybox (package busybox-static)")?;
    if !rustix::process::geteuid().is_root() {
        return Err("podman needs root to hand a device to a container".into());
    }
    Ok(Podman {
        program,
        runtime,
        busybox,
    })
}

/// Finds Go in the PATH, or where its installer puts it.
pub(crate) fn go() -> Finding {
    if find("go").is_some() || is_program(Path::new("/usr/local/go/bin/go")) {
        Finding::Present
    } else {
        Finding::Missing("Go is not installed".into())
    }
}

pub(crate) fn python_grpc() -> Finding {
    let Some(python) = find("python3") else {
        return Finding::Missing("Python is not installed".into());
    };
    let mut command = Command::new(python);
    command
        .args(["-c", "import grpc"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    match command.status() {
        Ok(status) if status.success() => Finding::Present,
        _ => Finding::Missing("Python has no grpcio (python3 -m pip install grpcio)".into()),
    }
}

/// Finds cargo-fuzz, which must be in the PATH.
pub(crate) fn cargo_fuzz() -> Finding {
    match find("cargo-fuzz") {
        Some(_) => Finding::Present,
        None => Finding::Missing("it is not installed (cargo install --locked cargo-fuzz)".into()),
    }
}

/// Finds the tool that compares the API of a library with that of a release.
pub(crate) fn cargo_semver_checks() -> Finding {
    match find("cargo-semver-checks") {
        Some(_) => Finding::Present,
        None => Finding::Missing(
            "it is not installed (cargo install --locked cargo-semver-checks)".into(),
        ),
    }
}

/// Finds a reader of OCI image layouts.
pub(crate) fn skopeo() -> Finding {
    match find("skopeo") {
        Some(_) => Finding::Present,
        None => Finding::Missing("skopeo is not installed".into()),
    }
}

/// Finds a C++ compiler for libFuzzer.
pub(crate) fn cplusplus() -> Finding {
    match find("c++") {
        Some(_) => Finding::Present,
        None => Finding::Missing("no compiler for C++ (package g++)".into()),
    }
}

/// Finds a clang for WebAssembly, with the C library for it.
pub(crate) fn clang_for_wasm() -> Result<Tool, String> {
    let program = find("clang").ok_or("clang is not installed")?;
    let probe = "#include <stdlib.h>\nvoid *probe(void) { return malloc(1); }";
    let mut command = Command::new(&program);
    command.args([
        "--target=wasm32-wasi",
        "-nostartfiles",
        "-Wl,--no-entry",
        "-Wl,--export=probe",
    ]);
    command.args(["-x", "c", "-", "-o", "/dev/null"]);
    if !takes(command, probe) {
        let packages = "lld, wasi-libc and libclang-rt-dev-wasm32 (of clang-VERSION: libclang-rt-VERSION-dev-wasm32)";
        return Err(format!(
            "clang has no linker or no C library for WebAssembly (packages {packages})"
        ));
    }
    Ok(Tool {
        version: said(&program, &["--version"])?,
        program,
    })
}

/// Finds `componentize-py` in the PATH or in the virtual environment of CI.
pub(crate) fn componentize_py(environment: &Path) -> Result<Tool, String> {
    let program = find("componentize-py").or_else(|| Some(environment.join("bin/componentize-py")));
    let program = program.filter(|file| is_program(file));
    let program = program
        .ok_or("componentize-py is not installed (python3 -m pip install componentize-py)")?;
    Ok(Tool {
        version: said(&program, &["--version"])?,
        program,
    })
}

/// Finds Node with `componentize-js` among the modules of a directory.
pub(crate) fn componentize_js(directory: &Path) -> Result<Tool, String> {
    let program = find("node").ok_or("Node.js is not installed")?;
    let package = directory.join("node_modules/@bytecodealliance/componentize-js/package.json");
    let module = std::fs::read_to_string(&package).map_err(|_| {
        format!(
            "componentize-js is not installed in {} (npm install there)",
            directory.display()
        )
    })?;
    Ok(Tool {
        version: format!("{}, {module}", said(&program, &["--version"])?),
        program,
    })
}

/// Returns whether a command with this input succeeds.
fn takes(mut command: Command, input: &str) -> bool {
    let child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    child.is_ok_and(|mut child| {
        // A command that does not read its whole input has failed, and reports that.
        let _ = child
            .stdin
            .take()
            .map(|mut stdin| stdin.write_all(input.as_bytes()));
        child.wait().is_ok_and(|status| status.success())
    })
}

/// Returns the version line of a program.
fn said(program: &Path, args: &[&str]) -> Result<String, String> {
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output();
    match output {
        Ok(output) if output.status.success() => {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        }
        _ => Err(format!("{} cannot be run", program.display())),
    }
}

/// Finds a program in the PATH and in the directories of system programs, which some users' PATH lacks.
/// Finds a tool that renders the deployment: in `target/deploy-tools`, where CI installs it, or in the PATH.
pub(crate) fn deploy_tool(workspace: &Workspace, name: &str) -> Result<PathBuf, String> {
    let own = workspace.target.join("deploy-tools").join(name);
    if is_program(&own) {
        return Ok(own);
    }
    find(name).ok_or_else(|| format!("{name} is not installed"))
}

fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let directories = env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    directories
        .map(|directory| directory.join(program))
        .find(|file| is_program(file))
}

fn is_program(file: &Path) -> bool {
    file.metadata()
        .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

fn static_busybox() -> Option<PathBuf> {
    let candidates = [Some("/bin/busybox".into()), find("busybox")];
    candidates
        .into_iter()
        .flatten()
        .find(|file| is_program(file) && is_static(file))
}

/// A dynamic program names its loader directly behind the ELF headers.
fn is_static(program: &Path) -> bool {
    let mut head = Vec::new();
    let read = File::open(program).and_then(|file| file.take(4096).read_to_end(&mut head));
    read.is_ok() && head.starts_with(b"\x7fELF") && !names_loader(&head)
}

fn names_loader(head: &[u8]) -> bool {
    head.windows(4).any(|bytes| bytes == b"/ld-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_like_in_shell() {
        assert!(find("sh").is_some());
        assert!(find("no-such-program").is_none());
    }

    #[test]
    fn missing_tool_is_named_with_installer() {
        let nowhere = Path::new("/nowhere");
        let why = componentize_js(nowhere).unwrap_err();
        assert!(why.contains("Node.js") || why.contains("/nowhere"), "{why}");
        if find("componentize-py").is_none() {
            assert!(
                componentize_py(nowhere)
                    .unwrap_err()
                    .contains("pip install")
            );
        }
    }

    #[test]
    fn program_support_and_version_are_queried() {
        let grep = |text: &str| {
            let mut command = Command::new("grep");
            command.arg(text);
            takes(command, "one two")
        };
        assert!(grep("two") && !grep("three") && !takes(Command::new("/no/such/program"), ""));
        assert_eq!(said(Path::new("echo"), &["1.0"]), Ok("1.0".to_owned()));
        assert!(said(Path::new("false"), &[]).is_err());
    }

    #[test]
    fn a_dynamic_program_is_not_static() {
        assert!(names_loader(b"\x7fELF....\0/lib64/ld-linux-x86-64.so.2\0"));
        assert!(!names_loader(b"\x7fELF....\0GNU\0"));
        assert!(!is_static(Path::new("/etc/passwd")));
        assert!(!is_static(Path::new("/no/such/file")));
    }
}
