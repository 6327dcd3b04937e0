//! `nodedock driver new`: writes the directory of a new driver, which builds and passes its tests as it is.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use clap::Args;
use serde::Deserialize;

use super::bindings;
use super::inspect::labelled;
use super::language::Language;
use super::templates::{self, Values};
use super::write_below;
use nodedock_command::CommandError;
use nodedock_command::output::{join, print_text};
use nodedock_model::DriverName;

/// The SDK of the sources that this program was built from.
const SDK_BESIDE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../sdk");

#[derive(Args)]
pub struct NewArgs {
    /// Name of the driver, such as gpu.example.com; its files are gpu.*
    name: String,
    #[arg(long, visible_alias = "language", value_enum, value_name = "LANGUAGE")]
    lang: Language,
    /// Optional interfaces of the contract that the driver exports, separated by commas, such as health,configuration
    #[arg(long, value_name = "FACETS", value_delimiter = ',', value_parser = facet)]
    facets: Vec<String>,
    /// Directory of the driver, new or empty [default: the first label of the name]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Source of the SDK for a driver in Rust: a version on crates.io, a Git URL or a directory [default: the sources that this program was
    /// built from]
    #[arg(long, value_name = "VERSION|URL|DIR")]
    sdk: Option<String>,
}

pub(super) fn run(args: &NewArgs) -> Result<()> {
    let stem = stem(&args.name)?;
    let sdk = match args.lang {
        Language::Rust => Some(Sdk::choose(args.sdk.as_deref(), Path::new(SDK_BESIDE))?),
        _ if args.sdk.is_some() => {
            return Err(CommandError::usage("--sdk is for drivers in Rust", "leave it out").into());
        }
        _ => None,
    };
    let facets: BTreeSet<_> = args.facets.iter().cloned().collect();
    let facets: Vec<_> = facets.into_iter().collect();
    let values = Values {
        name: &args.name,
        stem,
        sdk: &sdk.as_ref().map(Sdk::dependency).unwrap_or_default(),
        note: sdk.as_ref().map_or("", Sdk::note),
        facets: &facets,
    };
    let directory = args.dir.clone().unwrap_or_else(|| stem.into());
    ensure_empty(&directory)?;
    for (path, bytes) in &templates::files(args.lang, &values) {
        write_below(&directory, path, bytes)?;
    }
    bindings::update(args.lang, &directory)?;
    print_text(&join(lines(&directory, stem, sdk.as_ref(), &facets)))
}

fn lines(directory: &Path, stem: &str, sdk: Option<&Sdk>, facets: &[String]) -> Vec<String> {
    let next = [
        format!("cd {}", directory.display()),
        "nodedock driver build".to_owned(),
        format!("nodedock driver check {stem}.wasm --hardware machine"),
        format!("nodedock driver test {stem}.wasm --hardware machine --golden golden.yaml"),
        format!("nodedock conform {stem}.wasm --hardware machine"),
        format!("nodedock driver run {stem}.wasm --hardware machine"),
    ];
    [
        labelled("directory", [directory.display().to_string()]),
        labelled("SDK", sdk.map(Sdk::dependency)),
        labelled("facets", facets.iter().cloned()),
        labelled("next", next),
    ]
    .concat()
}

/// Checks the name of a facet.
fn facet(name: &str) -> Result<String, String> {
    let all = templates::facets();
    match all.iter().any(|facet| facet == name) {
        true => Ok(name.to_owned()),
        false => Err(format!("the facets of the contract are {}", all.join(", "))),
    }
}

/// Checks the name of a driver, and returns the name of its files.
fn stem(name: &str) -> Result<&str, CommandError> {
    let hint = "a driver is named by a lower-case DNS subdomain that begins with a letter, such as gpu.example.com";
    DriverName::new(name).map_err(|error| CommandError::usage(error.to_string(), hint))?;
    if !name.starts_with(|c: char| c.is_ascii_alphabetic()) || name.contains(char::is_uppercase) {
        return Err(CommandError::usage(
            format!("driver name {name:?} does not begin with a letter, or has upper-case ones"),
            hint,
        ));
    }
    Ok(name.split('.').next().unwrap_or(name))
}

/// The source of a driver's SDK.
#[derive(Debug, PartialEq, Eq)]
enum Sdk {
    Version(String),
    Git(String),
    Directory(PathBuf),
}

impl Sdk {
    fn choose(given: Option<&str>, beside: &Path) -> Result<Self> {
        match given {
            // no error: text that is no version is something else
            Some(text) if semver::VersionReq::parse(text).is_ok() => {
                Ok(Self::Version(text.to_owned()))
            }
            Some(text) if text.contains("://") => Ok(Self::Git(text.to_owned())),
            Some(text) => Self::directory(Path::new(text)),
            None if beside.try_exists()? => Self::directory(beside),
            None => {
                let message = "the sources that this program was built from, with the SDK, are not on this machine";
                let hint = "choose with --sdk: a version on crates.io, a Git URL, or the directory sdk of a copy of the sources";
                Err(CommandError::usage(message, hint).into())
            }
        }
    }

    fn directory(path: &Path) -> Result<Self> {
        #[derive(Deserialize)]
        struct Manifest {
            package: Package,
        }
        #[derive(Deserialize)]
        struct Package {
            name: String,
        }
        let manifest = path.join("Cargo.toml");
        let shown = path.display();
        let text = std::fs::read_to_string(&manifest)
            .with_context(|| format!("{shown} is not the directory of the SDK"))?;
        let manifest: Manifest = toml::from_str(&text)
            .with_context(|| format!("{} is not valid", manifest.display()))?;
        ensure!(
            manifest.package.name == "nodedock-sdk",
            "{shown} is not the directory of the SDK"
        );
        Ok(Self::Directory(
            path.canonicalize()
                .with_context(|| format!("find {shown}"))?,
        ))
    }

    /// The value in `Cargo.toml`.
    fn dependency(&self) -> String {
        match self {
            Self::Version(version) => quoted(version),
            Self::Git(url) => format!("{{ git = {} }}", quoted(url)),
            Self::Directory(path) => format!("{{ path = {} }}", quoted(&path.to_string_lossy())),
        }
    }

    fn note(&self) -> &'static str {
        match self {
            Self::Version(_) | Self::Git(_) => "",
            Self::Directory(_) => {
                "\n# Cargo.toml has the SDK by a path of one machine: replace it by a version or a Git URL first."
            }
        }
    }
}

/// The escapes of JSON are escapes of TOML.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn ensure_empty(directory: &Path) -> Result<()> {
    let shown = directory.display();
    match std::fs::read_dir(directory) {
        Ok(mut entries) => {
            ensure!(
                entries.next().is_none(),
                "{shown} is not empty: choose another directory with --dir"
            );
            Ok(())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("{shown} is not a directory")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_for_authors_has_all_facets() {
        let page = include_str!("../../../docs/write-a-driver.md");
        let option = format!("`--facets {}`", templates::facets().join(","));
        assert!(page.contains(&option), "write-a-driver.md lacks {option}");
    }
    use nodedock_base::error::chain;

    fn args(name: &str, dir: &Path) -> NewArgs {
        NewArgs {
            name: name.to_owned(),
            lang: Language::C,
            dir: Some(dir.to_owned()),
            sdk: None,
            facets: Vec::new(),
        }
    }

    #[test]
    fn files_are_named_by_first_label() {
        assert_eq!(stem("gpu.example.com").unwrap(), "gpu");
        assert_eq!(stem("gpu").unwrap(), "gpu");
        for bad in [
            "",
            "GPU.example.com",
            "gpu..com",
            "../gpu",
            "9gpu.example.com",
            "-gpu.dev",
            "gpu_1.dev",
        ] {
            assert!(
                matches!(stem(bad), Err(CommandError::Usage { .. })),
                "{bad:?}"
            );
        }
    }

    #[test]
    fn facets_are_those_of_the_contract() {
        assert_eq!(facet("health").as_deref(), Ok("health"));
        let refused = facet("healt").unwrap_err();
        assert_eq!(
            refused,
            "the facets of the contract are configuration, health, left-out, scheduling, telemetry"
        );
        let directory = tempfile::tempdir().unwrap();
        let new = directory.path().join("new");
        let facets = ["scheduling", "health", "health"]
            .map(str::to_owned)
            .to_vec();
        run(&NewArgs {
            facets,
            ..args("gpu.example.com", &new)
        })
        .unwrap();
        let world = std::fs::read_to_string(new.join("wit/world.wit")).unwrap();
        assert_eq!(world.matches("health-facet@").count(), 1, "{world}");
        assert!(new.join("health.c").is_file() && !new.join("configuration.c").exists());
    }

    #[test]
    fn driver_needs_new_or_empty_directory() {
        let directory = tempfile::tempdir().unwrap();
        let new = directory.path().join("new");
        run(&args("gpu.example.com", &new)).unwrap();
        assert!(new.join("gpu.grant.yaml").is_file() && new.join("wit/world.wit").is_file());
        let again = run(&args("gpu.example.com", &new)).unwrap_err();
        assert!(
            chain(again.as_ref()).contains("new is not empty: choose another"),
            "{again:#}"
        );
        let file = run(&args("gpu.example.com", &new.join("driver.c"))).unwrap_err();
        assert!(
            chain(file.as_ref()).contains("driver.c is not a directory"),
            "{file:#}"
        );
        let sdk = run(&NewArgs {
            sdk: Some("1".into()),
            ..args("gpu.example.com", directory.path())
        });
        assert!(chain(sdk.unwrap_err().as_ref()).contains("--sdk is for drivers in Rust"));
    }

    #[test]
    fn sdk_is_version_repository_or_directory() {
        let choose = |text| Sdk::choose(Some(text), Path::new("/nowhere"));
        assert_eq!(choose("0.1").unwrap().dependency(), "\"0.1\"");
        let git = choose("https://example.com/nodedock").unwrap();
        assert_eq!(
            git.dependency(),
            "{ git = \"https://example.com/nodedock\" }"
        );
        assert_eq!(git.note(), "");
        let beside = Sdk::choose(None, Path::new(SDK_BESIDE)).unwrap();
        assert!(beside.dependency().contains("/sdk\""), "{beside:?}");
        assert!(beside.note().contains("a path of one machine"));
        for (other, part) in [
            ("/nowhere", "is not the directory"),
            (env!("CARGO_MANIFEST_DIR"), "is not the"),
        ] {
            let error = choose(other).unwrap_err();
            assert!(chain(error.as_ref()).contains(part), "{error:#}");
        }
        let error = Sdk::choose(None, Path::new("/nowhere")).unwrap_err();
        assert!(
            chain(error.as_ref()).contains("are not on this machine"),
            "{error:#}"
        );
    }
}
