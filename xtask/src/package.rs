//! Checks that the SDK can be published, with the crates that it needs, and that it keeps the API of its last release.

use std::collections::BTreeSet;
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::drivers::CORE_TARGET;
use crate::machine::{self, Finding};
use crate::shell;
use crate::workspace::Workspace;

const SDK: &str = "nodedock-sdk";
/// The crates that are published, in the order in which they are.
const PUBLISHED: [&str; 3] = ["nodedock-model", "nodedock-hardware", SDK];
/// Tags of the SDK's releases: `sdk-v0.1.0`.
const RELEASES: &str = "sdk-v*";

pub(crate) fn check(workspace: &Workspace) -> Result<()> {
    check_files(workspace)?;
    remove_unpacked(&cargo_home()?)?;
    let target = target(workspace);
    if target.try_exists()? {
        let failed = || format!("removing {}", target.display());
        fs::remove_dir_all(&target).with_context(failed)?;
    }
    // With new and changed files too: the check is for a change before its commit. Each package is compiled, with those before it.
    let mut package = workspace.cargo();
    package.env("CARGO_TARGET_DIR", &target);
    package.args(["package", "--offline", "--allow-dirty", "--quiet"]);
    shell::run(package.args(PUBLISHED.iter().flat_map(|name| ["-p", name])))?;
    build_for_wasm(workspace)?;
    check_api(workspace)
}

/// The directory of packages and what is built of them, new for each check: cargo takes what it built of a version for every build of that version.
fn target(workspace: &Workspace) -> PathBuf {
    workspace.target.join("sdk-package")
}

fn cargo_home() -> Result<PathBuf> {
    let home = env::var_os("HOME").map(|home| Path::new(&home).join(".cargo"));
    let given = env::var_os("CARGO_HOME").map(PathBuf::from);
    given.or(home).context("neither CARGO_HOME nor HOME is set")
}

/// Removes what cargo has unpacked of these packages: it takes the sources of an earlier run for those of this one, since version and path of its
/// temporary registry are the same.
fn remove_unpacked(home: &Path) -> Result<()> {
    let sources = home.join("registry/src");
    if !sources.try_exists()? {
        return Ok(());
    }
    let failed = || format!("reading {}", sources.display());
    for entry in fs::read_dir(&sources).with_context(failed)? {
        let registry = entry.with_context(failed)?.path();
        // The directory of a registry on this machine is named without a host.
        let is_local = registry
            .file_name()
            .is_some_and(|name| name.as_encoded_bytes().starts_with(b"-"));
        for name in PUBLISHED.iter().filter(|_| is_local) {
            let unpacked = registry.join(format!("{name}-{}", env!("CARGO_PKG_VERSION")));
            if unpacked.try_exists()? {
                let failed = || format!("removing {}", unpacked.display());
                fs::remove_dir_all(&unpacked).with_context(failed)?;
            }
        }
    }
    Ok(())
}

/// Compiles the packaged SDK as a driver has it, with bindings of the packaged contract. Cargo itself compiles it for this machine.
fn build_for_wasm(workspace: &Workspace) -> Result<()> {
    let directory = workspace.target.join("packaged-sdk");
    let [needed @ .., sdk] = PUBLISHED.map(|name| dependency(workspace, name));
    let needed = needed.concat();
    let manifest = format!(
        "[package]\nname = \"driver\"\nedition = \"2024\"\n\n[dependencies]\n{sdk}\n[patch.crates-io]\n{needed}\n[workspace]\n"
    );
    write_below(&directory, "Cargo.toml", &manifest)?;
    write_below(&directory, "src/lib.rs", "pub use nodedock_sdk::*;\n")?;
    let mut build = workspace.cargo();
    build
        .args(["build", "--offline", "--quiet", "--target", CORE_TARGET])
        .current_dir(&directory);
    shell::run(build.env("CARGO_TARGET_DIR", target(workspace)))
}

fn dependency(workspace: &Workspace, name: &str) -> String {
    let path = target(workspace)
        .join("package")
        .join(format!("{name}-{}", env!("CARGO_PKG_VERSION")));
    // The escapes of such a text are escapes of TOML.
    format!("{name} = {{ path = {:?} }}\n", path.display().to_string())
}

fn write_below(directory: &Path, path: &str, text: &str) -> Result<()> {
    let path = directory.join(path);
    fs::create_dir_all(path.parent().unwrap_or(directory))
        .and_then(|()| fs::write(&path, text))
        .with_context(|| format!("writing {}", path.display()))
}

/// Checks that the packaged SDK has the whole contract: its bindings are generated where it is built.
fn check_files(workspace: &Workspace) -> Result<()> {
    let mut list = workspace.cargo();
    list.args([
        "package",
        "--list",
        "--offline",
        "--allow-dirty",
        "--quiet",
        "-p",
        SDK,
    ]);
    let listed = shell::read(&mut list)?;
    let missing = missing(&listed, &contract(workspace)?);
    ensure!(
        missing.is_empty(),
        "the package of {SDK} lacks {missing:?}: see `include` in sdk/Cargo.toml"
    );
    Ok(())
}

/// Returns the files of `wit/`, as the package names them.
fn contract(workspace: &Workspace) -> Result<BTreeSet<String>> {
    let directory = workspace.root.join("wit");
    let entries = std::fs::read_dir(&directory)
        .with_context(|| format!("reading {}", directory.display()))?;
    entries
        .map(|entry| Ok(format!("wit/{}", entry?.file_name().to_string_lossy())))
        .collect()
}

fn missing(listed: &str, contract: &BTreeSet<String>) -> Vec<String> {
    let listed: BTreeSet<_> = listed.lines().map(str::trim).collect();
    let others = ["src/lib.rs", "README.md", "LICENSE"].map(str::to_owned);
    contract
        .iter()
        .chain(&others)
        .filter(|file| !listed.contains(file.as_str()))
        .cloned()
        .collect()
}

/// Compares the API with that of the last release.
fn check_api(workspace: &Workspace) -> Result<()> {
    let mut tags = Command::new("git");
    tags.current_dir(&workspace.root).args([
        "tag",
        "--merged",
        "HEAD",
        "--sort=version:refname",
        "--list",
        RELEASES,
    ]);
    match plan(&shell::read(&mut tags)?, machine::cargo_semver_checks()) {
        Plan::Skip(why) => {
            eprintln!("skipped: API of {SDK}: {why}");
            Ok(())
        }
        Plan::Compare(release) => {
            let mut compare = workspace.cargo();
            shell::run(compare.args(["semver-checks", "-p", SDK, "--baseline-rev", &release]))
        }
    }
}

#[derive(Debug, PartialEq)]
enum Plan {
    Skip(String),
    /// Compare with the release of this tag.
    Compare(String),
}

/// `tags` are those of releases, the last one last.
fn plan(tags: &str, tool: Finding) -> Plan {
    match (tags.lines().last(), tool) {
        (None, _) => Plan::Skip(format!("it has no release (no tag {RELEASES})")),
        (Some(_), Finding::Missing(why)) => Plan::Skip(format!("cargo-semver-checks: {why}")),
        (Some(release), Finding::Present) => Plan::Compare(release.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unpacked_packages_are_removed() {
        let home = tempfile::tempdir().unwrap();
        remove_unpacked(home.path()).unwrap();
        let version = env!("CARGO_PKG_VERSION");
        let package = |registry: &str, name: &str| {
            let directory = home.path().join("registry/src").join(registry);
            directory.join(format!("{name}-{version}"))
        };
        let gone = package("-0123", SDK);
        let kept = [
            package("index.crates.io-0123", SDK),
            package("-0123", "other"),
        ];
        for directory in kept.iter().chain([&gone]) {
            fs::create_dir_all(directory).unwrap();
        }
        remove_unpacked(home.path()).unwrap();
        assert!(!gone.exists() && kept.iter().all(|directory| directory.exists()));
    }

    #[test]
    fn package_without_the_contract_is_detected() {
        let workspace = Workspace::load().unwrap();
        let contract = contract(&workspace).unwrap();
        assert!(contract.contains("wit/driver.wit"), "{contract:?}");
        let all: Vec<_> = contract
            .iter()
            .map(String::as_str)
            .chain(["src/lib.rs", "README.md", "LICENSE"])
            .collect();
        assert_eq!(missing(&all.join("\n"), &contract), [""; 0]);
        assert_eq!(missing(&all[1..].join("\n"), &contract), [all[0]]);
        assert_eq!(
            missing(&all[..all.len() - 1].join("\n"), &contract),
            ["LICENSE"]
        );
    }

    #[test]
    fn api_is_compared_since_first_release() {
        let missing = || Finding::Missing("it is not installed".into());
        assert_eq!(
            plan("", missing()),
            Plan::Skip("it has no release (no tag sdk-v*)".into())
        );
        assert_eq!(
            plan("sdk-v0.9.0\nsdk-v0.10.0\n", Finding::Present),
            Plan::Compare("sdk-v0.10.0".into())
        );
        let skipped = Plan::Skip("cargo-semver-checks: it is not installed".into());
        assert_eq!(plan("sdk-v0.1.0\n", missing()), skipped);
    }

    #[test]
    fn only_sdk_and_dependencies_are_published() {
        let workspace = Workspace::load().unwrap();
        let mut metadata = workspace.cargo();
        metadata.args([
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ]);
        let metadata: serde_json::Value =
            serde_json::from_str(&shell::read(&mut metadata).unwrap()).unwrap();
        let packages = metadata["packages"].as_array().unwrap().iter();
        let published: BTreeSet<_> = packages
            .filter(|package| package["publish"] != serde_json::json!([]))
            .map(|package| package["name"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(published, PUBLISHED.map(str::to_owned).into());
    }
}
