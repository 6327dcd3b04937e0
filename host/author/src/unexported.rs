//! Refuses implementations of interfaces of the contract that the world of a project does not export: without a word they would not be in the
//! driver. For C and Go; the modules of Python and JavaScript that the host calls do it themselves, and in Rust the SDK does.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use nodedock_bindings::{GO_EXPORTS, Interface, World};
use wasmparser::{Parser, Payload};

/// Checks the packages that implement the exports of a project in Go: one for each, and no others.
pub(super) fn check_go_packages(directory: &Path, world: &World) -> Result<()> {
    let package = |interface: &Interface| format!("{GO_EXPORTS}/{}", interface.go_package());
    let is_there = |package: &str| {
        let path = directory.join(package);
        path.try_exists()
            .with_context(|| format!("look at {}", path.display()))
    };
    for missing in &world.unexported {
        let package = package(&missing.interface);
        ensure!(!is_there(&package)?, "{}", missing.refusal(&package));
    }
    for interface in &world.exports {
        let package = package(interface);
        ensure!(
            is_there(&package)?,
            "the world driver in wit/ exports {}, and no package {package} implements it: add one, with the functions {} of the interface",
            interface.name,
            functions(interface)
        );
    }
    Ok(())
}

fn functions(interface: &Interface) -> String {
    let names = interface.functions.iter();
    let names: Vec<_> = names.map(|function| function.name.as_str()).collect();
    names.join(", ")
}

/// Checks the exports of a module that a compiler wrote. C's functions have names of their own, and are exported only if the linker is
/// asked for them.
pub(super) fn check_module(module: &[u8], world: &World) -> Result<()> {
    for name in exports(module)? {
        let owner = world.unexported.iter().find(|missing| {
            let interface = &missing.interface;
            let is_canonical = name
                .split_once('#')
                .is_some_and(|(id, _)| id == interface.id);
            is_canonical || interface.c_functions().any(|function| function == name)
        });
        if let Some(missing) = owner {
            bail!("{}", missing.refusal(&name));
        }
    }
    Ok(())
}

/// Checks the sources of a driver in C that do not compile.
pub(super) fn check_c_sources(sources: &[PathBuf], world: &World) -> Result<()> {
    for source in sources {
        let shown = source.display();
        let text = std::fs::read_to_string(source).with_context(|| format!("read {shown}"))?;
        for missing in &world.unexported {
            if let Some(name) = missing
                .interface
                .c_functions()
                .find(|name| text.contains(name))
            {
                bail!("{}", missing.refusal(&name));
            }
        }
    }
    Ok(())
}

fn exports(module: &[u8]) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for payload in Parser::new(0).parse_all(module) {
        let payload = payload.context("read the module that the compiler wrote")?;
        if let Payload::ExportSection(section) = payload {
            for export in section {
                let export = export.context("read the exports of the module")?;
                names.push(export.name.to_owned());
            }
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn world(name: &str) -> World {
        let wit = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit");
        World::read(Path::new(wit), name).unwrap()
    }

    /// A module with one function under this name.
    fn module(export: &str) -> Vec<u8> {
        let name = export.as_bytes();
        let length = u8::try_from(name.len()).unwrap();
        let mut bytes = b"\0asm\x01\0\0\0\x01\x04\x01\x60\0\0\x03\x02\x01\0\x07".to_vec();
        bytes.extend([length + 4, 1, length]);
        bytes.extend(name);
        bytes.extend(b"\0\0\x0a\x04\x01\x02\0\x0b");
        bytes
    }

    #[test]
    fn unexported_functions_are_refused() {
        let c = "exports_nodedock_driver_health_check";
        for name in [c, "nodedock:driver/health@0.2.0#check"] {
            let refused = check_module(&module(name), &world("driver"))
                .unwrap_err()
                .to_string();
            assert!(
                refused.starts_with(&format!("{name} implements health, which the world driver"))
                    && refused.contains("add `include nodedock:driver/health-facet@0.2.0;`"),
                "{refused}"
            );
            check_module(&module(name), &world("full-driver")).unwrap();
        }
        check_module(&module("run"), &world("driver")).unwrap();
        assert!(check_module(b"no module", &world("driver")).is_err());
    }

    #[test]
    fn unexported_functions_in_sources_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let source = directory.path().join("health.c");
        let check = |name| check_c_sources(std::slice::from_ref(&source), &world(name));
        assert!(check("driver").unwrap_err().to_string().contains("read "));
        std::fs::write(&source, "bool exports_nodedock_driver_health_check(").unwrap();
        let refused = check("driver").unwrap_err().to_string();
        assert!(
            refused.starts_with("exports_nodedock_driver_health_check implements health, which"),
            "{refused}"
        );
        check("full-driver").unwrap();
    }

    #[test]
    fn go_packages_match_the_world() {
        let directory = tempfile::tempdir().unwrap();
        let add = |interface: &str| {
            let package = format!("exports/export_nodedock_driver_{interface}");
            std::fs::create_dir_all(directory.path().join(package)).unwrap();
        };
        let check = |name| check_go_packages(directory.path(), &world(name));
        ["identity", "discovery"].into_iter().for_each(add);
        let missing = check("driver").unwrap_err().to_string();
        assert!(
            missing.contains(
                "exports preparation, and no package exports/export_nodedock_driver_preparation"
            ) && missing.contains("functions prepare, unprepare"),
            "{missing}"
        );
        add("preparation");
        check("driver").unwrap();
        add("health");
        let refused = check("driver").unwrap_err().to_string();
        assert!(
            refused.starts_with("exports/export_nodedock_driver_health implements health, which"),
            "{refused}"
        );
    }
}
