//! `nodedock driver build`: has the tool of a driver's language build it, and puts NAME.wasm beside the sources.

use std::ffi::OsStr;
use std::fs::DirEntry;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use nodedock_bindings::{WORLD, World};
use serde::Deserialize;

use super::bindings::{self, WIT};
use super::language::Language;
use super::unexported;
use super::wrap_module::wrap_module;
use super::write_file;
use nodedock_base::file;
use nodedock_command::output::print_text;
use nodedock_wasm::file_watch;

const RUST_TARGET: &str = "wasm32-unknown-unknown";
const GRANT: &str = ".grant.yaml";
/// Module of the bindings whose classes the host calls.
const PYTHON_ENTRY: &str = "nodedock_entry";

#[derive(Args)]
pub struct BuildArgs {
    /// Directory of the driver
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// Language, where the files of several are there
    #[arg(long, visible_alias = "language", value_enum, value_name = "LANGUAGE")]
    lang: Option<Language>,
    /// Make a driver of this module, which another tool built for WASI 0.1, instead of calling the tool
    #[arg(long, value_name = "FILE", conflicts_with = "lang")]
    module: Option<PathBuf>,
}

pub(super) fn run(args: &BuildArgs) -> Result<()> {
    let directory = args
        .dir
        .canonicalize()
        .with_context(|| format!("find the directory {}", args.dir.display()))?;
    let output = directory.join(format!("{}.wasm", stem(&directory)?));
    match &args.module {
        Some(module) => wrap(module, &directory, &output)?,
        None => build(
            args.lang
                .map_or_else(|| Language::of_directory(&directory), Ok)?,
            &directory,
            &output,
        )?,
    }
    let size = std::fs::metadata(&output)
        .with_context(|| format!("{} was not built", output.display()))?;
    print_text(&format!("{}, {} bytes", output.display(), size.len()))
}

fn build(language: Language, directory: &Path, output: &Path) -> Result<()> {
    match language {
        Language::Rust => build_rust(directory, output),
        Language::Go => {
            let world = read_world(language, directory)?;
            unexported::check_go_packages(directory, &world)?;
            build_go(directory, output)
        }
        Language::Python => {
            read_world(language, directory)?;
            build_python(directory, output)
        }
        Language::JavaScript => {
            read_world(language, directory)?;
            build_javascript(directory, output)
        }
        Language::C => build_c(directory, &read_world(language, directory)?, output),
    }
}

/// Reads the world of a project, and brings its bindings up to date with it.
fn read_world(language: Language, directory: &Path) -> Result<World> {
    let world = World::read(&directory.join(WIT), WORLD)?;
    bindings::update(language, directory)?;
    Ok(world)
}

/// The driver's files have the name of its grant, or else of its directory.
fn stem(directory: &Path) -> Result<String> {
    let shown = directory.display();
    let entries = std::fs::read_dir(directory).with_context(|| format!("read {shown}"))?;
    let mut stems = Vec::new();
    for entry in entries {
        let name = entry.with_context(|| format!("read {shown}"))?.file_name();
        stems.extend(
            name.to_str()
                .and_then(|name| name.strip_suffix(GRANT))
                .map(str::to_owned),
        );
    }
    stems.sort();
    let name = match stems.as_slice() {
        [] => directory
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned(),
        [stem] => stem.clone(),
        [one, other, ..] => {
            bail!("{shown} has {one}{GRANT} and {other}{GRANT}: the driver is named by one")
        }
    };
    let is_stem = file_watch::stem(OsStr::new(&format!("{name}.wasm"))).is_some();
    ensure!(
        is_stem,
        "{shown} has no {GRANT} file that names the driver: add NAME{GRANT}"
    );
    Ok(name)
}

/// Runs a tool, which prints what it does itself.
fn run_tool(command: &mut Command, install: &str) -> Result<()> {
    let program = command.get_program().to_string_lossy().into_owned();
    let status = match command.stdin(Stdio::null()).status() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("{program} is not installed: {install}")
        }
        status => status.with_context(|| format!("start {program}"))?,
    };
    ensure!(status.success(), "{program} failed ({status})");
    Ok(())
}

/// A message of `cargo build`.
#[derive(Deserialize)]
struct CargoMessage {
    reason: String,
    #[serde(default)]
    manifest_path: Option<PathBuf>,
    #[serde(default)]
    filenames: Vec<PathBuf>,
}

fn build_rust(directory: &Path, output: &Path) -> Result<()> {
    let install = "install Rust from https://rustup.rs";
    let mut cargo = Command::new("cargo");
    cargo.args(["build", "--lib", "--release", "--target", RUST_TARGET]);
    cargo
        .arg("--message-format=json-render-diagnostics")
        .current_dir(directory);
    let child = cargo.stdin(Stdio::null()).stdout(Stdio::piped()).spawn();
    let mut child = match child {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            bail!("cargo is not installed: {install}")
        }
        child => child.context("start cargo")?,
    };
    let manifest = directory.join("Cargo.toml");
    let mut built = None;
    for line in BufReader::new(child.stdout.take().context("cargo has no output")?).lines() {
        let line = line.context("read the output of cargo")?;
        built = artifact(&line, &manifest).or(built);
    }
    let status = child.wait().context("wait for cargo")?;
    ensure!(
        status.success(),
        "cargo failed ({status}); if it lacks the target: rustup target add {RUST_TARGET}"
    );
    let built = built.with_context(|| {
        format!(
            "{} has no library with crate-type \"cdylib\", which a driver is",
            manifest.display()
        )
    })?;
    let bytes = std::fs::read(&built).with_context(|| format!("read {}", built.display()))?;
    write_file(output, &bytes)
}

/// The WebAssembly file of the package, if a line of cargo's output names it. Other lines are of dependencies and of build scripts.
fn artifact(line: &str, manifest: &Path) -> Option<PathBuf> {
    let message: CargoMessage = serde_json::from_str(line).ok()?;
    let is_ours = message.reason == "compiler-artifact"
        && message.manifest_path.is_some_and(|path| path == manifest);
    let mut files = message.filenames.into_iter().filter(|_| is_ours);
    files.find(|file| file.extension() == Some(OsStr::new("wasm")))
}

fn build_python(directory: &Path, output: &Path) -> Result<()> {
    let own = directory.join(".venv/bin/componentize-py");
    let program = if file::is_file(&own)? {
        own
    } else {
        "componentize-py".into()
    };
    let mut command = Command::new(program);
    command.args(["-d", WIT, "-w", WORLD, "componentize", "--stub-wasi"]);
    command.args(["-p", ".", "-p", nodedock_bindings::DIRECTORY]);
    // An exception of the sources comes with a backtrace of the tool otherwise.
    command
        .args([PYTHON_ENTRY, "-o"])
        .env_remove("RUST_BACKTRACE");
    let install = "python3 -m venv .venv && .venv/bin/pip install -r requirements.txt";
    run_tool(command.arg(output).current_dir(directory), install)
}

fn build_javascript(directory: &Path, output: &Path) -> Result<()> {
    let tool = "node_modules/@bytecodealliance/componentize-js";
    let install = "npm install --ignore-scripts";
    ensure!(
        directory.join(tool).try_exists()?,
        "componentize-js is not installed in {}: {install}",
        directory.display()
    );
    let mut command = Command::new("node");
    command
        .arg("bindings/build.js")
        .arg(output)
        .current_dir(directory);
    run_tool(
        &mut command,
        "install Node.js 20 or newer from https://nodejs.org",
    )
}

fn build_c(directory: &Path, world: &World, output: &Path) -> Result<()> {
    let packages = "packages clang, lld, wasi-libc and libclang-rt-dev-wasm32 of Debian and Ubuntu (with clang-VERSION: libclang-rt-VERSION-dev-wasm32)";
    let scratch = tempfile::tempdir().context("make a directory for the module")?;
    let module = scratch.path().join("module.wasm");
    let mut command = Command::new("clang");
    command.args(["--target=wasm32-wasi", "-Os", "-Wall", "-nostartfiles"]);
    command.args(["-Wl,--no-entry", "-Wl,--strip-all"]);
    // The linker drops a function that nothing calls, and with it the sign that the driver implements it.
    for missing in &world.unexported {
        let names = missing.interface.c_functions();
        command.args(names.map(|name| format!("-Wl,--export-if-defined={name}")));
    }
    let own = sources(directory, &["c"])?;
    let bindings = sources(&directory.join(nodedock_bindings::DIRECTORY), &["c", "o"])?;
    command.args(own.iter().chain(&bindings));
    let built = run_tool(
        command.arg("-o").arg(&module).current_dir(directory),
        packages,
    );
    if let Err(error) = built {
        // The types of an interface that the world does not export are not in the bindings.
        unexported::check_c_sources(&own, world)?;
        return Err(error).with_context(|| {
            format!("build for WebAssembly, with clang, its linker and its C library ({packages})")
        });
    }
    let bytes = std::fs::read(&module).with_context(|| format!("read {}", module.display()))?;
    unexported::check_module(&bytes, world)?;
    write_file(output, &bytes)
}

fn build_go(directory: &Path, output: &Path) -> Result<()> {
    let scratch = tempfile::tempdir().context("make a directory for the module")?;
    let module = scratch.path().join("module.wasm");
    let mut command = Command::new("go");
    command.env("GOOS", "wasip1").env("GOARCH", "wasm");
    // The bindings allocate with a function of the runtime, before the runtime has begun.
    command.args([
        "build",
        "-buildmode=c-shared",
        "-ldflags=-s -w -checklinkname=0",
        "-o",
    ]);
    run_tool(
        command.arg(&module).arg(".").current_dir(directory),
        "install Go 1.25 or newer from https://go.dev",
    )?;
    wrap(&module, directory, output)
}

fn wrap(module: &Path, directory: &Path, output: &Path) -> Result<()> {
    let (shown, wit) = (module.display(), directory.join(WIT));
    let bytes = std::fs::read(module).with_context(|| format!("read {shown}"))?;
    unexported::check_module(&bytes, &World::read(&wit, WORLD)?)?;
    let component = wrap_module(bytes, &wit, WORLD);
    write_file(
        output,
        &component.with_context(|| format!("make a driver of {shown}"))?,
    )
}

/// The files of a directory with these extensions, in the order of their names.
fn sources(directory: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let entries: Vec<_> = std::fs::read_dir(directory)
        .and_then(Iterator::collect)
        .with_context(|| format!("read {}", directory.display()))?;
    let mut found: Vec<_> = entries.iter().map(DirEntry::path).collect();
    found.retain(|path| {
        path.extension()
            .and_then(OsStr::to_str)
            .is_some_and(|extension| extensions.contains(&extension))
    });
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_base::error::chain;

    #[test]
    fn grant_or_directory_names_the_driver() {
        let directory = tempfile::tempdir().unwrap();
        let named = directory.path().join("nic");
        std::fs::create_dir(&named).unwrap();
        assert_eq!(stem(&named).unwrap(), "nic");
        std::fs::write(named.join("gpu.grant.yaml"), "").unwrap();
        assert_eq!(stem(&named).unwrap(), "gpu");
        std::fs::write(named.join("fpga.grant.yaml"), "").unwrap();
        let two = stem(&named).unwrap_err().to_string();
        assert!(
            two.contains("has fpga.grant.yaml and gpu.grant.yaml"),
            "{two}"
        );
        let hidden = directory.path().join(".hidden");
        std::fs::create_dir(&hidden).unwrap();
        assert!(
            stem(&hidden)
                .unwrap_err()
                .to_string()
                .contains("add NAME.grant.yaml")
        );
    }

    #[test]
    fn missing_tool_is_named_with_installation() {
        let missing =
            run_tool(&mut Command::new("/nowhere/componentize"), "pip install it").unwrap_err();
        assert_eq!(
            missing.to_string(),
            "/nowhere/componentize is not installed: pip install it"
        );
        let failed = run_tool(&mut Command::new("false"), "")
            .unwrap_err()
            .to_string();
        assert!(failed.starts_with("false failed"), "{failed}");
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("driver.js"), "").unwrap();
        std::fs::write(directory.path().join("a.grant.yaml"), "").unwrap();
        let contract = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit");
        std::os::unix::fs::symlink(contract, directory.path().join("wit")).unwrap();
        let args = BuildArgs {
            dir: directory.path().to_owned(),
            lang: None,
            module: None,
        };
        let missing = chain(run(&args).unwrap_err().as_ref());
        assert!(
            missing.contains("componentize-js is not installed in")
                && missing.contains("npm install"),
            "{missing}"
        );
    }

    #[test]
    fn artifact_is_own_wasm_module() {
        let line = |manifest: &str, files: &str| {
            format!(
                r#"{{"reason":"compiler-artifact","manifest_path":"{manifest}","filenames":{files}}}"#
            )
        };
        let of = |line: &str| artifact(line, Path::new("/a/Cargo.toml"));
        let files = r#"["/a/libdriver.rlib","/a/driver.wasm"]"#;
        assert_eq!(
            of(&line("/a/Cargo.toml", files)),
            Some("/a/driver.wasm".into())
        );
        assert_eq!(of(&line("/b/Cargo.toml", files)), None);
        assert_eq!(of(&line("/a/Cargo.toml", r#"["/a/libdriver.rlib"]"#)), None);
        assert_eq!(of(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(of("a line of a build script"), None);
    }

    #[test]
    fn module_without_driver_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let module = directory.path().join("module.wasm");
        let output = directory.path().join("a.wasm");
        let refused = || {
            chain(
                wrap(&module, directory.path(), &output)
                    .unwrap_err()
                    .as_ref(),
            )
        };
        assert!(
            refused().contains("read ") && refused().contains("module.wasm"),
            "{}",
            refused()
        );
        std::fs::write(&module, b"\0asm\x01\0\0\0").unwrap();
        assert!(refused().contains("read the WIT files in"), "{}", refused());
        let wit = directory.path().join("wit");
        std::fs::create_dir(&wit).unwrap();
        let world = "package a:b;\nworld driver { export run: func(); }\n";
        std::fs::write(wit.join("a.wit"), world).unwrap();
        assert!(
            refused().contains("has no package nodedock:driver"),
            "{}",
            refused()
        );
        std::fs::remove_dir_all(&wit).unwrap();
        let contract = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit");
        std::os::unix::fs::symlink(contract, &wit).unwrap();
        assert!(
            refused().contains("does not implement the world driver"),
            "{}",
            refused()
        );
        assert!(!output.exists());
    }

    #[test]
    fn missing_directory_is_named() {
        let nowhere = BuildArgs {
            dir: "/nowhere".into(),
            lang: None,
            module: None,
        };
        assert!(chain(run(&nowhere).unwrap_err().as_ref()).contains("find the directory /nowhere"));
    }
}
