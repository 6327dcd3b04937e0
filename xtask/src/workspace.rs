//! Reads `cargo metadata` of this workspace: its paths, and which packages are WASM drivers.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde::Deserialize;

use crate::shell;

pub(crate) struct Workspace {
    pub(crate) root: PathBuf,
    pub(crate) target: PathBuf,
    pub(crate) drivers: Vec<DriverPackage>,
}

/// A package in `example-drivers/` that builds a `.wasm` file, so none of the native drivers.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct DriverPackage {
    pub(crate) name: String,
    pub(crate) directory: PathBuf,
    /// File name of cargo's output: dashes become underscores.
    pub(crate) artifact: String,
}

impl Workspace {
    pub(crate) fn load() -> Result<Self> {
        let mut command = cargo(Path::new(env!("CARGO_MANIFEST_DIR")));
        command.args(["metadata", "--no-deps", "--format-version", "1"]);
        Self::from_metadata(&shell::read(&mut command)?)
    }

    fn from_metadata(json: &str) -> Result<Self> {
        let metadata: Metadata =
            serde_json::from_str(json).context("reading the output of cargo metadata")?;
        let examples = metadata.workspace_root.join("example-drivers");
        let mut drivers: Vec<_> = metadata
            .packages
            .into_iter()
            .filter_map(|package| package.driver(&examples))
            .collect();
        drivers.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Self {
            root: metadata.workspace_root,
            target: metadata.target_directory,
            drivers,
        })
    }

    pub(crate) fn cargo(&self) -> Command {
        cargo(&self.root)
    }

    pub(crate) fn drivers_dir(&self) -> PathBuf {
        self.target.join("drivers")
    }

    /// Returns `-p NAME` for every driver.
    pub(crate) fn driver_selection(&self) -> impl Iterator<Item = &str> {
        self.drivers
            .iter()
            .flat_map(|driver| ["-p", driver.name.as_str()])
    }
}

/// Returns the cargo that runs this program, so that nested builds use the same toolchain, without the variables by which that cargo
/// describes this package: build scripts that watch them would run again for each of `cargo build` and `cargo xtask`, and everything
/// above them would be built again.
fn cargo(directory: &Path) -> Command {
    let program = env::var_os("CARGO").map_or_else(|| "cargo".into(), PathBuf::from);
    let mut command = Command::new(program);
    command.current_dir(directory);
    for (name, _) in env::vars_os() {
        if name.to_str().is_some_and(describes_a_package) {
            command.env_remove(name);
        }
    }
    command
}

/// Returns whether cargo sets this variable for the crate that it builds, runs or tests ("Environment variables Cargo sets for crates"
/// in its book). None of them is a setting of cargo, so a user has no reason to set one.
fn describes_a_package(name: &str) -> bool {
    const NAMES: [&str; 5] = [
        "CARGO_CRATE_NAME",
        "CARGO_PRIMARY_PACKAGE",
        "CARGO_RUSTC_CURRENT_DIR",
        "CARGO_TARGET_TMPDIR",
        "OUT_DIR",
    ];
    const PREFIXES: [&str; 3] = ["CARGO_BIN_", "CARGO_MANIFEST_", "CARGO_PKG_"];
    NAMES.contains(&name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[derive(Deserialize)]
struct Metadata {
    workspace_root: PathBuf,
    target_directory: PathBuf,
    packages: Vec<Package>,
}

#[derive(Deserialize)]
struct Package {
    name: String,
    manifest_path: PathBuf,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    name: String,
    crate_types: Vec<String>,
}

impl Package {
    fn driver(self, examples: &Path) -> Option<DriverPackage> {
        let directory = self
            .manifest_path
            .parent()
            .filter(|directory| directory.parent() == Some(examples))?;
        let library = self
            .targets
            .iter()
            .find(|target| target.crate_types.iter().any(|kind| kind == "cdylib"))?;
        let artifact = format!("{}.wasm", library.name.replace('-', "_"));
        Some(DriverPackage {
            directory: directory.to_owned(),
            artifact,
            name: self.name,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const METADATA: &str = r#"{
        "workspace_root": "/w", "target_directory": "/t",
        "packages": [
            {"name": "pci", "manifest_path": "/w/example-drivers/pci/Cargo.toml",
             "targets": [{"name": "pci", "crate_types": ["cdylib", "rlib"]}]},
            {"name": "device-nodes", "manifest_path": "/w/example-drivers/device-nodes/Cargo.toml",
             "targets": [{"name": "rules", "crate_types": ["bin"]},
                         {"name": "device_nodes", "crate_types": ["cdylib", "rlib"]}]},
            {"name": "native-fuse", "manifest_path": "/w/example-drivers/native-fuse/Cargo.toml",
             "targets": [{"name": "native-fuse", "crate_types": ["bin"]}]},
            {"name": "plugin", "manifest_path": "/w/host/Cargo.toml",
             "targets": [{"name": "plugin", "crate_types": ["cdylib"]}]}
        ]}"#;

    #[test]
    fn drivers_are_cdylibs_among_examples() {
        let workspace = Workspace::from_metadata(METADATA).unwrap();
        let names: Vec<_> = workspace
            .drivers
            .iter()
            .map(|driver| driver.name.as_str())
            .collect();
        assert_eq!(names, ["device-nodes", "pci"]);
        assert_eq!(workspace.drivers[0].artifact, "device_nodes.wasm");
        assert_eq!(
            workspace.drivers[0].directory,
            Path::new("/w/example-drivers/device-nodes")
        );
        assert_eq!(workspace.drivers_dir(), Path::new("/t/drivers"));
    }

    /// `cargo test` describes the package of a test to it, so some variables are there to be removed.
    #[test]
    fn nested_cargo_keeps_settings_alone() {
        let command = cargo(Path::new("/w"));
        let removed: Vec<_> = command
            .get_envs()
            .map(|(name, value)| {
                assert_eq!(value, None, "nothing is added");
                name.to_str().unwrap()
            })
            .collect();
        assert!(removed.contains(&"CARGO_MANIFEST_DIR") && removed.contains(&"CARGO_PKG_NAME"));
        assert!(removed.iter().all(|name| describes_a_package(name)));
        for name in ["CARGO_BIN_EXE_nodedock", "CARGO_CRATE_NAME", "OUT_DIR"] {
            assert!(describes_a_package(name), "{name}");
        }
        for name in [
            "CARGO",
            "CARGO_BUILD_JOBS",
            "CARGO_HOME",
            "CARGO_INCREMENTAL",
            "CARGO_NET_OFFLINE",
            "CARGO_PROFILE_DEV_DEBUG",
            "CARGO_TARGET_DIR",
            "CARGO_TERM_COLOR",
            "RUSTFLAGS",
            "RUSTUP_TOOLCHAIN",
        ] {
            assert!(!describes_a_package(name), "{name}");
        }
    }

    #[test]
    fn the_selection_names_each_driver_once() {
        let workspace = Workspace::from_metadata(METADATA).unwrap();
        let selection: Vec<_> = workspace.driver_selection().collect();
        assert_eq!(selection, ["-p", "device-nodes", "-p", "pci"]);
    }

    #[test]
    fn metadata_of_other_shape_is_error() {
        assert!(Workspace::from_metadata("{}").is_err());
    }
}
