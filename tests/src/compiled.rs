//! Compiled drivers that the daemons of all tests share. Each of them would compile the same few files, which takes most of the
//! processor time of a suite.

use std::fs::{self, DirBuilder, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nodedock_wasm::CachePaths;
use tempfile::NamedTempFile;

use crate::machine::sha256;
use crate::{Root, places};

/// Ending of the files that are complete.
const ENDING: &str = "cwasm";
const KEY_BYTES: usize = 32;

/// Returns the paths that the daemons of a root use.
pub fn of_root(root: &Root) -> CachePaths {
    CachePaths {
        directory: root.path().join("var/cache/nodedock"),
        key: root.state().join("cache.key"),
    }
}

/// Gives a root that had no daemon yet what is compiled already, with the key.
pub fn give(root: &Root, shared: &CachePaths) -> io::Result<()> {
    let own = of_root(root);
    if own.key.exists() || own.directory.exists() {
        return Ok(());
    }
    private_directory(&own.directory)?;
    fs::copy(&shared.key, &own.key)?;
    for file in complete_files(&shared.directory)? {
        copy_into(&file, &own.directory)?;
    }
    Ok(())
}

/// Takes what the daemons of a root have compiled, unless they use another key.
pub fn take(root: &Root, shared: &CachePaths) -> io::Result<()> {
    let own = of_root(root);
    let has_key =
        fs::read(&own.key).is_ok_and(|key| fs::read(&shared.key).is_ok_and(|ours| ours == key));
    if !has_key || !own.directory.is_dir() {
        return Ok(());
    }
    let built = built();
    for file in complete_files(&own.directory)? {
        let name = file.file_name().unwrap_or_default().to_string_lossy();
        // Drivers that a test makes for itself are of no use to others.
        if built.iter().any(|digest| name.starts_with(digest)) {
            copy_into(&file, &shared.directory)?;
        }
    }
    Ok(())
}

/// Returns the digests of the example drivers.
fn built() -> &'static [String] {
    static BUILT: OnceLock<Vec<String>> = OnceLock::new();
    BUILT.get_or_init(|| {
        let drivers = places::drivers();
        let directories = [drivers.join("wasip2"), drivers];
        let entries = directories.iter().flat_map(|directory| {
            fs::read_dir(directory).expect("`cargo xtask drivers` builds them")
        });
        entries
            .map(|entry| entry.expect("list a directory").path())
            .filter(|path| path.extension().is_some_and(|ending| ending == "wasm"))
            .map(|path| sha256(&fs::read(path).expect("read a driver")))
            .collect()
    })
}

/// Returns the paths of what is shared, with a key. Another build of the node program has others: it may compile otherwise.
pub fn shared() -> io::Result<CachePaths> {
    let program = fs::metadata(places::nodedockd())?;
    let modified = program.modified()?.duration_since(std::time::UNIX_EPOCH);
    let modified = modified.map_err(io::Error::other)?.as_nanos();
    let of_build = PathBuf::from(format!("compiled/{modified:x}-{:x}", program.len()));
    let paths = CachePaths::inside(&places::drivers().join(of_build));
    private_directory(&paths.directory)?;
    if !paths.key.exists() {
        let mut key = [0; KEY_BYTES];
        File::open("/dev/urandom")?.read_exact(&mut key)?;
        put(&paths.key, &key)?;
    }
    Ok(paths)
}

fn private_directory(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

fn complete_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(directory)?.map(|entry| Ok(entry?.path()));
    let complete = |path: &PathBuf| path.extension().is_some_and(|ending| ending == ENDING);
    paths
        .filter(|path: &io::Result<PathBuf>| path.as_ref().map_or(true, complete))
        .collect()
}

/// Copies a file, unless one of its name is there. A daemon may remove its own meanwhile.
fn copy_into(file: &Path, directory: &Path) -> io::Result<()> {
    let to = directory.join(file.file_name().unwrap_or_default());
    if to.exists() {
        return Ok(());
    }
    match fs::read(file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        bytes => put(&to, &bytes?),
    }
}

/// Writes a file as a whole, unless another test was faster.
fn put(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = NamedTempFile::new_in(path.parent().unwrap_or(Path::new(".")))?;
    file.write_all(bytes)?;
    file.as_file()
        .set_permissions(Permissions::from_mode(0o600))?;
    match file.persist_noclobber(path) {
        Err(error) if error.error.kind() != io::ErrorKind::AlreadyExists => Err(error.error),
        _ => Ok(()),
    }
}
