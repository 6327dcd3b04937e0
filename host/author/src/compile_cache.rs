//! The cache of compiled drivers that the tools share: a driver is compiled once, until its file or the program changes.
//!
//! It is the daemon's cache, with its bounds and its seal, in the user's cache directory. One that cannot be used is one line on standard
//! error; the driver is compiled for the run then.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use nodedock_base::file;
use nodedock_command::output::print_error;
use nodedock_wasm::CachePaths;
use nodedock_wasm::trust::permissions;

/// Directory below the user's cache directory.
const DIRECTORY: &str = "nodedock";
/// In place of a directory: no cache.
const NONE: &str = "none";

#[derive(Args)]
pub(super) struct CompileCacheArgs {
    /// Directory for compiled drivers, or "none" [default: nodedock below $XDG_CACHE_HOME or ~/.cache]
    #[arg(long, value_name = "DIR", env = "NODEDOCK_COMPILE_CACHE")]
    compile_cache: Option<PathBuf>,
}

impl CompileCacheArgs {
    /// Returns the directory of a cache that can be used; else `temporary`, which exists and lives as long as the run.
    pub(super) fn directory(&self, temporary: &Path) -> PathBuf {
        let chosen = match &self.compile_cache {
            Some(none) if none == Path::new(NONE) => return temporary.to_owned(),
            Some(chosen) => Ok(chosen.clone()),
            None => users_directory(),
        };
        let usable = chosen.and_then(|directory| {
            let directory =
                std::path::absolute(&directory).context("find the current directory")?;
            check(&directory).with_context(|| directory.display().to_string())?;
            Ok(directory)
        });
        usable.unwrap_or_else(|error| {
            print_error(&format!(
                "the driver is compiled for this run alone, without the cache of compiled drivers: {error:#}"
            ));
            temporary.to_owned()
        })
    }
}

/// The directory of the XDG base directory specification.
fn users_directory() -> Result<PathBuf> {
    let variable = |name: &str| {
        let value = std::env::var_os(name).map(PathBuf::from);
        // The specification has relative paths ignored.
        value.filter(|path| path.is_absolute())
    };
    let cache = variable("XDG_CACHE_HOME")
        .or_else(|| variable("HOME").map(|home| home.join(".cache")))
        .context("neither XDG_CACHE_HOME nor HOME is an absolute path")?;
    Ok(cache.join(DIRECTORY))
}

/// Checks that no other user can replace what is in a directory, and opens the cache in it.
fn check(directory: &Path) -> Result<()> {
    let mut existing = None;
    for ancestor in directory.ancestors() {
        let found =
            file::metadata(ancestor).with_context(|| format!("look at {}", ancestor.display()))?;
        if let Some(found) = found {
            ensure!(found.is_dir(), "{} is no directory", ancestor.display());
            existing = Some(ancestor);
            break;
        }
    }
    let existing = existing.context("no directory of its path exists")?;
    let faults = permissions::on_the_way(existing)
        .with_context(|| format!("look at {}", existing.display()))?;
    if let Some(fault) = faults.first() {
        bail!("other users could change it: {fault}");
    }
    CachePaths::inside(directory)
        .open()
        .context("open the cache")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn directory_of(chosen: &Path, temporary: &Path) -> PathBuf {
        let args = CompileCacheArgs {
            compile_cache: Some(chosen.to_owned()),
        };
        args.directory(temporary)
    }

    #[test]
    fn unusable_cache_is_replaced() {
        let (here, temporary) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = here.path().canonicalize().unwrap();
        let good = path.join("a/b");
        assert_eq!(directory_of(&good, temporary.path()), good);
        assert!(good.join("cache.key").exists());
        assert_eq!(directory_of(&good, temporary.path()), good, "again");
        let none = directory_of(Path::new(NONE), temporary.path());
        assert_eq!(none, temporary.path());

        let file = path.join("file");
        std::fs::write(&file, "").unwrap();
        let open = path.join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
        for (bad, why) in [
            (file.clone(), "file is no directory"),
            (file.join("below"), "file is no directory"),
            (open.join("below"), "other users could change it"),
        ] {
            let error = format!("{:#}", check(&bad).unwrap_err());
            assert!(error.contains(why), "{error}");
            assert_eq!(directory_of(&bad, temporary.path()), temporary.path());
        }
    }
}
