//! Generates what stands between a driver's sources and the contract: the bindings of C and Go, by wit-bindgen's generators, and for Python and
//! JavaScript, whose own tools make bindings, the module whose functions the host calls.
//!
//! Reads the WIT files of a project and returns the files of its bindings. Writes nothing.

mod entry;
mod world;

use std::path::Path;

use anyhow::{Context, Result};
use wit_bindgen_core::{Files, WorldGenerator};

pub use world::{Function, Interface, Unexported, World};

/// Directory of the bindings in a project, by which its sources name them.
pub const DIRECTORY: &str = "bindings";
/// World of a project's WIT package that its driver exports.
pub const WORLD: &str = "driver";
/// Directory of the packages in which a project in Go implements the exports, one package `export_INTERFACE` for each.
pub const GO_EXPORTS: &str = "exports";

/// Module of the SDK for Go.
pub const GO_SDK: &str = "github.com/nodedock/nodedock/sdk/go";
/// Package of the bindings in Go that calls the packages of the exports.
const GO_WORLD: &str = "wit_exports/";

/// A language, with what its bindings depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Language<'a> {
    C,
    /// What a project exports. The bindings of the contract are in the SDK.
    Go {
        /// Path of the project's module, as in its `go.mod`.
        module: &'a str,
    },
    /// The bindings in the SDK for Go: the types of the contract, and the functions of the host.
    GoSdk,
    Python,
    JavaScript,
}

/// Returns the bindings of a world of the WIT package in a directory: paths relative to [`DIRECTORY`], in their order, and contents.
///
/// Go's are formatted if `gofmt` is installed.
///
/// # Errors
///
/// Fails if the directory has no valid WIT package, or the package no such world.
pub fn generate(language: Language<'_>, wit: &Path, world: &str) -> Result<Vec<(String, Vec<u8>)>> {
    let mut generator = match language {
        Language::Python => return Ok(entry::python(&World::read(wit, world)?)),
        Language::JavaScript => return Ok(entry::javascript(&World::read(wit, world)?)),
        Language::C => wit_bindgen_c::Opts::default().build(),
        Language::Go { module } => go_generator(module),
        Language::GoSdk => go_generator(GO_SDK),
    };
    let shown = wit.display();
    let (mut resolve, id) = world::select(wit, world)?;
    let mut files = Files::default();
    generator
        .generate(&mut resolve, id, &mut files)
        .with_context(|| format!("generate the bindings of the world {world} in {shown}"))?;
    let is_wanted = |path: &str| match language {
        Language::Go { .. } => path.starts_with(GO_WORLD),
        Language::GoSdk => !path.starts_with(GO_WORLD),
        _ => true,
    };
    Ok(files
        .iter()
        .filter(|(path, _)| is_wanted(path))
        .map(|(path, bytes)| (path.to_owned(), bytes.to_vec()))
        .collect())
}

fn go_generator(module: &str) -> Box<dyn WorldGenerator> {
    wit_bindgen_go::Opts {
        pkg_name: Some(format!("{GO_SDK}/{DIRECTORY}")),
        export_pkg_name: Some(format!("{module}/{GO_EXPORTS}")),
        ..Default::default()
    }
    .build()
}

/// Returns the requirement of Go's bindings, as in `go.mod`: a path and a version.
#[must_use]
pub fn go_requirement() -> String {
    wit_bindgen_go::remote_pkg_version()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CONTRACT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit");

    fn text(files: &[(String, Vec<u8>)], path: &str) -> String {
        let file = files.iter().find(|file| file.0 == path);
        String::from_utf8(file.unwrap_or_else(|| panic!("no {path}")).1.clone()).unwrap()
    }

    #[test]
    fn c_bindings_have_header_and_contract() {
        let files = generate(Language::C, Path::new(CONTRACT), "driver").unwrap();
        let paths: Vec<_> = files.iter().map(|(path, _)| path.as_str()).collect();
        assert_eq!(paths, ["driver.c", "driver.h", "driver_component_type.o"]);
        assert!(text(&files, "driver.h").contains("exports_nodedock_driver_preparation_prepare("));
        assert!(files[2].1.starts_with(b"\0asm"));
        let full = generate(Language::C, Path::new(CONTRACT), "full-driver").unwrap();
        assert!(
            text(&full, "full_driver.h").contains("exports_nodedock_driver_health_check"),
            "the world was chosen"
        );
    }

    #[test]
    fn go_packages_use_the_module_path() {
        let language = Language::Go {
            module: "example.com/gpu",
        };
        let files = generate(language, Path::new(CONTRACT), "driver").unwrap();
        let exports = text(&files, "wit_exports/wit_exports.go");
        assert!(exports.contains("//go:wasmexport nodedock:driver/preparation@"));
        for package in [
            "example.com/gpu/exports/export_nodedock_driver_identity",
            "github.com/nodedock/nodedock/sdk/go/bindings/nodedock_driver_claims",
        ] {
            assert!(exports.contains(&format!("\"{package}\"")), "{package}");
        }
        assert_eq!(
            files.len(),
            1,
            "the rest is in the SDK, or written by the author"
        );
    }

    /// `NODEDOCK_RECORD=1` writes them again after a change of the contract.
    #[test]
    fn sdk_for_go_has_the_contract() {
        let gofmt = std::process::Command::new("gofmt")
            .arg("/dev/null")
            .output();
        if gofmt.is_err() {
            return eprintln!("skipped: the bindings in the SDK for Go: gofmt is not installed");
        }
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../sdk/go/bindings");
        let files = generate(Language::GoSdk, Path::new(CONTRACT), "full-driver").unwrap();
        for (path, bytes) in &files {
            let path = directory.join(path);
            if std::env::var_os("NODEDOCK_RECORD").is_some() {
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(&path, bytes).unwrap();
            }
            let recorded = std::fs::read(&path).unwrap_or_default(); // no error: the next line shows it
            assert!(
                recorded == *bytes,
                "{} is not of the contract: NODEDOCK_RECORD=1 writes it again",
                path.display()
            );
        }
        let packages = std::fs::read_dir(&directory).unwrap().count();
        assert_eq!(
            packages * 2,
            files.len(),
            "each package has its sources and an empty file of assembly"
        );
    }

    #[test]
    fn unreadable_contract_is_named() {
        let error = |wit: &str, world: &str| {
            let error = generate(Language::C, Path::new(wit), world).unwrap_err();
            format!("{error:#}")
        };
        assert!(error("/nowhere", "driver").starts_with("read the WIT files in /nowhere: "));
        assert!(error(CONTRACT, "plane").starts_with("find the world plane in "));
    }
}
