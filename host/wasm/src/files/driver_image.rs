//! Driver images: directories with one driver each, such as mounted OCI images.
//!
//! An image has the driver and its signature. What the driver may do and how it is configured is the operator's decision, so its grant and its
//! config are beside the daemon's config, and those in the image are not read. Finds the files only; the file watcher reports them.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

/// Suffixes of a driver, its grant, its config and its signature.
pub(crate) const SUFFIXES: [&str; 4] = [".wasm", ".grant.yaml", ".config.yaml", ".wasm.sig"];

/// A directory with one driver, as the daemon's config names it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverImage {
    /// Name that replaces the file name without `.wasm`; the file's name in the image does not matter.
    pub name: String,
    /// Mount point of the image.
    pub directory: PathBuf,
    /// The directory of `NAME.grant.yaml` and `NAME.config.yaml`.
    pub side_files: PathBuf,
}

/// Why an image has no driver to load.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    #[error("driver image {name}: its directory {} cannot be listed: {why}", directory.display())]
    Unlisted {
        name: String,
        directory: PathBuf,
        why: String,
    },
    #[error("driver image {name}: its directory {} has no file *.wasm, and one is needed", directory.display())]
    Empty { name: String, directory: PathBuf },
    #[error(
        "driver image {name}: its directory {} has more than one file *.wasm, {first} and {second}: make an image of each",
        directory.display()
    )]
    Several {
        name: String,
        directory: PathBuf,
        first: String,
        second: String,
    },
}

impl DriverImage {
    /// The name under which the registry shows it.
    pub fn source(&self) -> String {
        format!("{}{}", self.name, SUFFIXES[0])
    }

    /// Lists the directory and returns the path of its driver, which may be anything that has such a name.
    pub fn find(&self) -> Result<PathBuf, ImageError> {
        let (name, directory) = (self.name.clone(), self.directory.clone());
        let mut found = match first_two(&directory) {
            Ok(found) => found.into_iter(),
            Err(error) => {
                return Err(ImageError::Unlisted {
                    name,
                    directory,
                    why: error.to_string(),
                });
            }
        };
        match (found.next(), found.next()) {
            (None, _) => Err(ImageError::Empty { name, directory }),
            (Some(only), None) => Ok(directory.join(only)),
            (Some(first), Some(second)) => Err(ImageError::Several {
                name,
                directory,
                first,
                second,
            }),
        }
    }
}

/// The names of entries that may be drivers, as in the drivers directory: the first two by name.
fn first_two(directory: &Path) -> io::Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(directory)? {
        let name = entry?.file_name();
        if let Some(stem) = stem(&name) {
            names.insert(format!("{stem}{}", SUFFIXES[0]));
        }
        if names.len() > 2 {
            names.pop_last();
        }
    }
    Ok(names)
}

/// The stem of a driver's file; hidden files are none.
pub fn stem(name: &OsStr) -> Option<&str> {
    let stem = name.to_str()?.strip_suffix(SUFFIXES[0])?;
    (!stem.is_empty() && !stem.starts_with('.')).then_some(stem)
}
