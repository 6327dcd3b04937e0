//! Builds the example drivers for WebAssembly into `target/drivers`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

use crate::shell;
use crate::workspace::{DriverPackage, Workspace};

/// The main target of drivers: a core module, which the host turns into a component.
pub(crate) const CORE_TARGET: &str = "wasm32-unknown-unknown";
const WASI_TARGET: &str = "wasm32-wasip2";
const PROFILE: &str = "driver";

pub(crate) fn run(workspace: &Workspace, release_dir: Option<&Path>) -> Result<()> {
    build(workspace)?;
    match release_dir {
        Some(dir) => release(workspace, dir),
        None => Ok(()),
    }
}

pub(crate) fn build(workspace: &Workspace) -> Result<()> {
    ensure_targets(&[CORE_TARGET, WASI_TARGET])?;
    let modules = workspace.drivers_dir();
    for (target, directory) in [
        (CORE_TARGET, modules.clone()),
        (WASI_TARGET, modules.join("wasip2")),
    ] {
        compile(workspace, target)?;
        for driver in &workspace.drivers {
            collect(workspace, driver, target, &directory)?;
        }
    }
    Ok(())
}

/// Adds missing targets to the toolchain. Without rustup the build itself reports a missing target.
pub(crate) fn ensure_targets(wanted: &[&str]) -> Result<()> {
    let Some(installed) = installed_targets() else {
        eprintln!(
            "rustup is not installed; assuming that {} are installed",
            wanted.join(" and ")
        );
        return Ok(());
    };
    let missing = missing(&installed, wanted);
    if missing.is_empty() {
        return Ok(());
    }
    let mut command = Command::new("rustup");
    command.args(["target", "add"]).args(&missing);
    shell::run(&mut command).with_context(|| {
        format!(
            "adding targets needs the network once; run `{}` once it is available",
            shell::line(&command)
        )
    })
}

fn installed_targets() -> Option<String> {
    let mut command = Command::new("rustup");
    let output = command
        .args(["target", "list", "--installed"])
        .stderr(Stdio::null())
        .output()
        .ok()?;
    output
        .status
        .success()
        .then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn missing<'a>(installed: &str, wanted: &[&'a str]) -> Vec<&'a str> {
    wanted
        .iter()
        .copied()
        .filter(|target| !installed.lines().any(|line| line.trim() == *target))
        .collect()
}

fn compile(workspace: &Workspace, target: &str) -> Result<()> {
    let mut command = workspace.cargo();
    command.args(["build", "--lib", "--profile", PROFILE, "--target", target]);
    command.args(workspace.driver_selection());
    shell::run(&mut command).with_context(|| {
        format!("building the drivers; if the target is missing: `rustup target add {target}`")
    })
}

fn collect(
    workspace: &Workspace,
    driver: &DriverPackage,
    target: &str,
    directory: &Path,
) -> Result<()> {
    let built = workspace
        .target
        .join(target)
        .join(PROFILE)
        .join(&driver.artifact);
    let kept = directory.join(format!("{}.wasm", driver.name));
    let size = place(&built, &kept)?;
    eprintln!("{:>7} KiB  {}", size.div_ceil(1024), kept.display());
    Ok(())
}

/// Copies a file unless the content is equal, because a new modification time means a new driver. Renames the copy into place, since
/// a daemon may be watching the directory.
pub(crate) fn place(from: &Path, to: &Path) -> Result<usize> {
    let bytes = fs::read(from).with_context(|| format!("reading {}", from.display()))?;
    if fs::read(to).is_ok_and(|present| present == bytes) {
        return Ok(bytes.len());
    }
    let directory = to.parent().context("a file to write has no directory")?;
    fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
    let partial = partial_name(to);
    fs::write(&partial, &bytes)
        .and_then(|()| fs::rename(&partial, to))
        .with_context(|| format!("writing {}", to.display()))?;
    Ok(bytes.len())
}

fn partial_name(to: &Path) -> PathBuf {
    to.with_added_extension("partial")
}

/// The drivers for tests are not released.
const FOR_TESTS: [&str; 2] = ["golden", "scripted"];

fn release(workspace: &Workspace, dir: &Path) -> Result<()> {
    for driver in workspace
        .drivers
        .iter()
        .filter(|driver| !FOR_TESTS.contains(&driver.name.as_str()))
    {
        install(workspace, driver, dir)?;
        eprintln!("{} is in {}", driver.name, dir.display());
    }
    Ok(())
}

/// Copies a driver into a drivers directory: first the grant, then the driver.
pub(crate) fn install(workspace: &Workspace, driver: &DriverPackage, dir: &Path) -> Result<()> {
    for file in files(workspace, driver)? {
        let name = file.file_name().context("a driver's file has no name")?;
        place(&file, &dir.join(name))?;
    }
    Ok(())
}

/// Returns grant, config and module of a built driver; the first two are optional.
pub(crate) fn files(workspace: &Workspace, driver: &DriverPackage) -> Result<Vec<PathBuf>> {
    let module = workspace
        .drivers_dir()
        .join(format!("{}.wasm", driver.name));
    if !module.is_file() {
        bail!(
            "{} is not built; run `cargo xtask drivers`",
            module.display()
        );
    }
    let beside = ["grant", "config"].map(|what| {
        driver
            .directory
            .join(format!("{}.{what}.yaml", driver.name))
    });
    Ok(beside
        .into_iter()
        .filter(|file| file.is_file())
        .chain([module])
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unlisted_targets_are_missing() {
        let installed = "wasm32-wasip2\nx86_64-unknown-linux-gnu\n";
        assert_eq!(
            missing(installed, &[CORE_TARGET, WASI_TARGET]),
            [CORE_TARGET]
        );
        assert!(missing(installed, &[WASI_TARGET]).is_empty());
        assert_eq!(
            missing("wasm32-wasip2-threads\n", &[WASI_TARGET]),
            [WASI_TARGET]
        );
    }

    #[test]
    fn file_of_equal_content_is_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let (from, to) = (dir.path().join("a.wasm"), dir.path().join("out/b.wasm"));
        fs::write(&from, b"one").unwrap();
        assert_eq!(place(&from, &to).unwrap(), 3);
        let before = fs::metadata(&to).unwrap().modified().unwrap();
        place(&from, &to).unwrap();
        assert_eq!(fs::metadata(&to).unwrap().modified().unwrap(), before);
        fs::write(&from, b"four").unwrap();
        assert_eq!(place(&from, &to).unwrap(), 4);
        assert_eq!(fs::read(&to).unwrap(), b"four");
        assert_eq!(fs::read_dir(dir.path().join("out")).unwrap().count(), 1);
    }

    #[test]
    fn driver_is_copied_with_its_files() {
        let dir = tempfile::tempdir().unwrap();
        let (root, target) = (dir.path().to_owned(), dir.path().join("target"));
        let directory = root.join("pci");
        let workspace = Workspace {
            root,
            target,
            drivers: Vec::new(),
            suites: Default::default(),
        };
        let driver = DriverPackage {
            name: "pci".into(),
            directory,
            artifact: "pci.wasm".into(),
        };
        assert!(
            files(&workspace, &driver)
                .unwrap_err()
                .to_string()
                .contains("cargo xtask drivers")
        );

        fs::create_dir_all(workspace.drivers_dir()).unwrap();
        fs::create_dir_all(&driver.directory).unwrap();
        fs::write(workspace.drivers_dir().join("pci.wasm"), b"m").unwrap();
        fs::write(driver.directory.join("pci.grant.yaml"), b"g").unwrap();
        install(&workspace, &driver, &dir.path().join("out")).unwrap();
        assert!(dir.path().join("out/pci.grant.yaml").is_file());
        assert!(dir.path().join("out/pci.wasm").is_file());
        assert!(!dir.path().join("out/pci.config.yaml").exists());
    }
}
