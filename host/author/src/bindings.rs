//! `nodedock driver bindings`: generates what stands between a driver's sources and the contract, into `bindings/`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use nodedock_base::file;
use nodedock_bindings::WORLD;

use super::language::Language;
use super::write_below;
use nodedock_command::CommandError;
use nodedock_command::output::print_text;

/// Directory of a project's WIT package.
pub(super) const WIT: &str = "wit";
/// Directory of the contract in it.
const CONTRACT: &str = "deps/nodedock-driver";
/// The contract's world with every facet.
const FULL_WORLD: &str = "full-driver";
/// Directory of a project's copy of the SDK.
const SDK_COPY: &str = "nodedock";
const GO_MANIFEST: &str = "go.mod";

#[derive(Args)]
pub struct BindingsArgs {
    /// Directory of the driver
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// Language, where the files of several are there
    #[arg(long, visible_alias = "language", value_enum, value_name = "LANGUAGE")]
    lang: Option<Language>,
    /// Directory of the WIT package with the world of the driver [default: wit in the directory of the driver]
    #[arg(long, value_name = "DIR")]
    wit: Option<PathBuf>,
}

pub(super) fn run(args: &BindingsArgs) -> Result<()> {
    let language = args
        .lang
        .map_or_else(|| Language::of_directory(&args.dir), Ok)?;
    let wit = args.wit.clone().unwrap_or_else(|| args.dir.join(WIT));
    let Some(files) = generate(language, &args.dir, &wit)? else {
        let message = "a driver in Rust has no generated bindings";
        let hint = "the SDK has them";
        return Err(CommandError::usage(message, hint).into());
    };
    let directory = args.dir.join(nodedock_bindings::DIRECTORY);
    write_changed(&directory, &files)?;
    print_text(&format!("{}, {} files", directory.display(), files.len()))
}

/// Writes the bindings of a driver, if its language has any, as its world is now.
pub(super) fn update(language: Language, directory: &Path) -> Result<()> {
    if let Some(files) = generate(language, directory, &directory.join(WIT))? {
        write_changed(&directory.join(nodedock_bindings::DIRECTORY), &files)?;
    }
    if language == Language::Go {
        update_go_sdk(directory)?;
    }
    Ok(())
}

/// Writes the bindings of the SDK for Go, if the project has a copy of it.
fn update_go_sdk(directory: &Path) -> Result<()> {
    let sdk = directory.join(SDK_COPY);
    let has_copy = file::is_file(&sdk.join(GO_MANIFEST))
        .with_context(|| format!("look at {}", sdk.display()))?;
    if !has_copy {
        return Ok(());
    }
    let contract = directory.join(WIT).join(CONTRACT);
    let language = nodedock_bindings::Language::GoSdk;
    let files = nodedock_bindings::generate(language, &contract, FULL_WORLD)?;
    write_changed(&sdk.join(nodedock_bindings::DIRECTORY), &files)
}

type Files = Vec<(String, Vec<u8>)>;

/// Returns nothing for a language without generated bindings.
fn generate(language: Language, directory: &Path, wit: &Path) -> Result<Option<Files>> {
    let module;
    let language = match language {
        Language::Rust => return Ok(None),
        Language::C => nodedock_bindings::Language::C,
        Language::Python => nodedock_bindings::Language::Python,
        Language::JavaScript => nodedock_bindings::Language::JavaScript,
        Language::Go => {
            module = go_module(directory)?;
            nodedock_bindings::Language::Go { module: &module }
        }
    };
    nodedock_bindings::generate(language, wit, WORLD).map(Some)
}

/// Leaves files as they are that have the same content: a build tool may go by their times.
fn write_changed(directory: &Path, files: &Files) -> Result<()> {
    for (path, bytes) in files {
        let before = match std::fs::read(directory.join(path)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            before => {
                Some(before.with_context(|| format!("read {path} in {}", directory.display()))?)
            }
        };
        if before.as_ref() != Some(bytes) {
            write_below(directory, path, bytes)?;
        }
    }
    Ok(())
}

/// Returns the path of a Go module, by which its packages import one another.
fn go_module(directory: &Path) -> Result<String> {
    let manifest = directory.join(GO_MANIFEST);
    let shown = manifest.display();
    let text = std::fs::read_to_string(&manifest).with_context(|| format!("read {shown}"))?;
    let path = text.lines().find_map(|line| {
        let path = line.trim().strip_prefix("module")?;
        // The path ends at a space, before a comment.
        path.starts_with([' ', '\t'])
            .then(|| path.split_whitespace().next())?
    });
    let path = path.with_context(|| format!("{shown} names no module"))?;
    Ok(path.trim_matches(['"', '`']).to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_base::error::chain;

    const WIT_FILES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit");

    fn args(dir: &Path) -> BindingsArgs {
        BindingsArgs {
            dir: dir.to_owned(),
            lang: None,
            wit: Some(WIT_FILES.into()),
        }
    }

    #[test]
    fn go_bindings_call_the_projects_packages() {
        let directory = tempfile::tempdir().unwrap();
        let manifest = directory.path().join("go.mod");
        std::fs::write(
            &manifest,
            "// modules\nmodule example.com/gpu // old\n\ngo 1.25\n",
        )
        .unwrap();
        run(&args(directory.path())).unwrap();
        let exports = directory.path().join("bindings/wit_exports/wit_exports.go");
        let exports = std::fs::read_to_string(exports).unwrap();
        assert!(
            exports.contains("\"example.com/gpu/exports/export_nodedock_driver_identity\""),
            "{exports}"
        );
        std::fs::write(&manifest, "module \"example.com/nic\"\n").unwrap();
        assert_eq!(go_module(directory.path()).unwrap(), "example.com/nic");
        std::fs::write(&manifest, "modules example.com/gpu\nmodule\n").unwrap();
        let error = run(&args(directory.path())).unwrap_err();
        assert!(
            chain(error.as_ref()).contains("go.mod names no module"),
            "{error:#}"
        );
    }

    #[test]
    fn rust_alone_has_no_bindings() {
        let directory = tempfile::tempdir().unwrap();
        let of = |lang| {
            run(&BindingsArgs {
                lang: Some(lang),
                ..args(directory.path())
            })
        };
        let error = of(Language::Rust).unwrap_err();
        assert!(
            chain(error.as_ref()).contains("in Rust has no generated bindings"),
            "{error:#}"
        );
        for (lang, file) in [
            (Language::C, "driver.h"),
            (Language::Python, "nodedock_entry.py"),
            (Language::JavaScript, "entry.js"),
        ] {
            of(lang).unwrap();
            assert!(directory.path().join("bindings").join(file).is_file());
        }
    }

    #[test]
    fn unchanged_bindings_are_not_written() {
        let directory = tempfile::tempdir().unwrap();
        let of = || {
            run(&BindingsArgs {
                lang: Some(Language::C),
                ..args(directory.path())
            })
        };
        of().unwrap();
        let header = directory.path().join("bindings/driver.h");
        let inode = |path: &Path| std::os::unix::fs::MetadataExt::ino(&path.metadata().unwrap());
        let before = inode(&header);
        of().unwrap();
        assert_eq!(inode(&header), before);
        std::fs::write(&header, "changed").unwrap();
        of().unwrap();
        assert_ne!(std::fs::read(&header).unwrap(), b"changed");
        std::fs::remove_file(&header).unwrap();
        std::fs::create_dir(&header).unwrap();
        let error = of().unwrap_err();
        assert!(
            chain(error.as_ref()).contains("read driver.h in "),
            "{error:#}"
        );
    }
}
