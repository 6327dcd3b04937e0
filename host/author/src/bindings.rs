//! `nodedock driver bindings`: generates what a driver in C or Go calls and implements from the contract, into `bindings/`.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;

use super::language::Language;
use super::write_below;
use nodedock_command::CommandError;
use nodedock_command::output::print_text;

/// World of the contract that every driver exports.
pub(super) const WORLD: &str = "driver";
const WIT: &str = "wit";
const GO_MANIFEST: &str = "go.mod";

#[derive(Args)]
pub struct BindingsArgs {
    /// Directory of the driver
    #[arg(default_value = ".")]
    dir: PathBuf,
    /// Language, where the files of several are there
    #[arg(long, value_enum, value_name = "LANGUAGE")]
    lang: Option<Language>,
    /// Directory of the contract [default: wit in the directory of the driver]
    #[arg(long, value_name = "DIR")]
    wit: Option<PathBuf>,
    /// Name of the world of the contract that the driver exports
    #[arg(long, value_name = "NAME", default_value = WORLD)]
    world: String,
}

pub(super) fn run(args: &BindingsArgs) -> Result<()> {
    let language = args
        .lang
        .map_or_else(|| Language::of_directory(&args.dir), Ok)?;
    let wit = args.wit.clone().unwrap_or_else(|| args.dir.join(WIT));
    let Some(files) = generate(language, &args.dir, &wit, &args.world)? else {
        let message = "only drivers in C and Go have generated bindings";
        let hint = "the tools of the other languages read the contract themselves";
        return Err(CommandError::usage(message, hint).into());
    };
    let directory = args.dir.join(nodedock_bindings::DIRECTORY);
    write(&directory, &files)?;
    print_text(&format!("{}, {} files", directory.display(), files.len()))
}

/// Writes the bindings of a new driver, if its language has any.
pub(super) fn write_new(language: Language, directory: &Path) -> Result<()> {
    let wit = directory.join(WIT);
    match generate(language, directory, &wit, WORLD)? {
        Some(files) => write(&directory.join(nodedock_bindings::DIRECTORY), &files),
        None => Ok(()),
    }
}

type Files = Vec<(String, Vec<u8>)>;

/// Returns nothing for a language without generated bindings.
fn generate(
    language: Language,
    directory: &Path,
    wit: &Path,
    world: &str,
) -> Result<Option<Files>> {
    match language {
        Language::C => nodedock_bindings::generate(nodedock_bindings::Language::C, wit, world),
        Language::Go => {
            let module = go_module(directory)?;
            let language = nodedock_bindings::Language::Go { module: &module };
            nodedock_bindings::generate(language, wit, world)
        }
        Language::Rust | Language::Python | Language::JavaScript => return Ok(None),
    }
    .map(Some)
}

fn write(directory: &Path, files: &Files) -> Result<()> {
    files
        .iter()
        .try_for_each(|(path, bytes)| write_below(directory, path, bytes))
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

    const CONTRACT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit");

    fn args(dir: &Path) -> BindingsArgs {
        BindingsArgs {
            dir: dir.to_owned(),
            lang: None,
            wit: Some(CONTRACT.into()),
            world: WORLD.to_owned(),
        }
    }

    #[test]
    fn bindings_import_the_projects_own_module() {
        let directory = tempfile::tempdir().unwrap();
        let manifest = directory.path().join("go.mod");
        std::fs::write(
            &manifest,
            "// modules\nmodule example.com/gpu // old\n\ngo 1.25\n",
        )
        .unwrap();
        run(&args(directory.path())).unwrap();
        let claims = directory
            .path()
            .join("bindings/nodedock_driver_claims/wit_bindings.go");
        let claims = std::fs::read_to_string(claims).unwrap();
        assert!(
            claims.contains("\"example.com/gpu/bindings/nodedock_driver_common\""),
            "{claims}"
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
    fn a_language_without_bindings_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let of = |lang| {
            run(&BindingsArgs {
                lang: Some(lang),
                ..args(directory.path())
            })
        };
        let error = of(Language::Rust).unwrap_err();
        assert!(
            chain(error.as_ref()).contains("only drivers in C and Go"),
            "{error:#}"
        );
        of(Language::C).unwrap();
        assert!(directory.path().join("bindings/driver.h").is_file());
    }
}
