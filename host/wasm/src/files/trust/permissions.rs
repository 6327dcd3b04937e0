//! Checks who else may change a file: its owner and mode, and those of the directories above it.
//!
//! A user who may write a directory may put any file into it, and a user who may write its parent may replace it. So all of them have to
//! belong to root or to the daemon's user, and no other user may write them.

use std::fmt;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use super::open::Opened;

const WRITE_OF_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;
/// Links on the way to a directory, as the kernel follows (path_resolution(7)).
const LINKS_MAX: usize = 40;

/// A file or directory that another user may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub path: PathBuf,
    uid: u32,
    mode: u32,
    /// The daemon's user.
    own_uid: u32,
}

/// The fault, and the command that repairs it.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, shown, own) = (self.path.display(), quoted(&self.path), self.own_uid);
        write!(f, "{path} (owner {}, mode {:04o}) ", self.uid, self.mode)?;
        if is_owned(self.uid, own) {
            return write!(f, "can be written by group or others: chmod go-w {shown}");
        }
        let whose = if own == 0 {
            "root"
        } else {
            "root or the daemon's user"
        };
        write!(f, "belongs to another than {whose}: chown {own} {shown}")
    }
}

impl Fault {
    /// Returns true if the owner is neither root nor the daemon's user.
    pub fn belongs_to_another(&self) -> bool {
        !is_owned(self.uid, self.own_uid)
    }

    /// `shielded`: in this directory, no other user can replace the entry that matters.
    fn find(path: &Path, uid: u32, mode: u32, own_uid: u32, shielded: bool) -> Option<Self> {
        let is_writable = mode & WRITE_OF_OTHERS != 0 && !shielded;
        (!is_owned(uid, own_uid) || is_writable).then(|| Self {
            path: path.to_owned(),
            uid,
            mode,
            own_uid,
        })
    }
}

fn is_owned(uid: u32, own_uid: u32) -> bool {
    uid == 0 || uid == own_uid
}

/// The mode of a directory, without the write permission of a user's private group: it has the user's own number, and no other member
/// (`USERGROUPS_ENAB`, login.defs(5)). Such users have the umask 002.
fn mode(found: &std::fs::Metadata) -> u32 {
    let own = own_uid();
    let is_private = own != 0 && found.uid() == own && found.gid() == own;
    found.mode() & 0o7777 & if is_private { !0o020 } else { !0 }
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// A path, quoted for a shell.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    if text
        .chars()
        .all(|c| c.is_alphanumeric() || "/._-+:@".contains(c))
    {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// The faults of a directory and of those above it. A missing one has none.
pub fn of_directory(directory: &Path) -> io::Result<Vec<Fault>> {
    let directory = match directory.canonicalize() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        directory => directory?,
    };
    let (own, mut faults, mut below_is_owned) = (own_uid(), Vec::new(), false);
    for path in directory.ancestors() {
        let found = std::fs::symlink_metadata(path)?;
        // In a sticky directory no other user can replace what is root's or ours, as in /tmp.
        let shielded = found.mode() & STICKY != 0 && below_is_owned;
        faults.extend(Fault::find(path, found.uid(), mode(&found), own, shielded));
        below_is_owned = is_owned(found.uid(), own);
    }
    Ok(faults)
}

/// The faults of a directory and of all directories on the way to it, those of links included.
///
/// # Errors
///
/// If one of them cannot be looked at: the path is absolute and exists.
pub fn on_the_way(directory: &Path) -> io::Result<Vec<Fault>> {
    let own = own_uid();
    let mut faults = Vec::new();
    let mut look = |path: &Path, has_owned_entry: bool| {
        let found = std::fs::symlink_metadata(path)?;
        let shielded = found.mode() & STICKY != 0 && has_owned_entry;
        let fault = Fault::find(path, found.uid(), mode(&found), own, shielded);
        faults.extend(fault.filter(|fault| !faults.contains(fault)));
        Ok::<_, io::Error>(())
    };
    let (mut at, mut links) = (PathBuf::from("/"), 0);
    // Backwards: the next part is the last.
    let mut rest = parts(directory);
    while let Some(part) = rest.pop() {
        if part.as_os_str() == ".." {
            at.pop();
            continue;
        }
        let entry = at.join(&part);
        let found = std::fs::symlink_metadata(&entry)?;
        look(&at, is_owned(found.uid(), own))?;
        if !found.is_symlink() {
            at = entry;
            continue;
        }
        links += 1;
        if links > LINKS_MAX {
            return Err(rustix::io::Errno::LOOP.into());
        }
        let target = std::fs::read_link(&entry)?;
        if target.is_absolute() {
            at = "/".into();
        }
        rest.extend(parts(&target));
    }
    look(&at, false)?;
    Ok(faults)
}

/// The names of a path and its `..`, the last one first.
fn parts(path: &Path) -> Vec<PathBuf> {
    let named = path
        .components()
        .filter(|part| matches!(part, Component::Normal(_) | Component::ParentDir));
    named
        .rev()
        .map(|part| PathBuf::from(part.as_os_str()))
        .collect()
}

/// The faults of a file in a directory, and of the directories between them if the file is behind a link.
pub fn of_file(opened: &Opened, directory: &Path) -> io::Result<Vec<Fault>> {
    let own = own_uid();
    let directory = directory.canonicalize()?;
    let mut faults = Vec::from_iter(Fault::find(
        &opened.path,
        opened.uid,
        opened.mode,
        own,
        false,
    ));
    for path in opened
        .path
        .ancestors()
        .skip(1)
        .take_while(|path| *path != directory && path.starts_with(&directory))
    {
        let found = std::fs::symlink_metadata(path)?;
        faults.extend(Fault::find(
            path,
            found.uid(),
            found.mode() & 0o7777,
            own,
            false,
        ));
    }
    Ok(faults)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::super::open::open_in;
    use super::*;

    fn chmod(path: &Path, mode: u32) {
        set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn said(faults: &[Fault]) -> Vec<String> {
        faults.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn unsafe_directory_is_reported_with_fix() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap();
        let directory = path.join("the drivers");
        std::fs::create_dir(&directory).unwrap();
        chmod(&directory, 0o755);
        assert_eq!(said(&of_directory(&directory).unwrap()), [""; 0]);
        for (mode, shown) in [(0o775, "0775"), (0o757, "0757"), (0o1777, "1777")] {
            chmod(&directory, mode);
            let [fault] = said(&of_directory(&directory).unwrap()).try_into().unwrap();
            assert!(fault.contains(&format!("mode {shown}")), "{fault}");
            assert!(
                fault.ends_with(&format!("chmod go-w '{}'", directory.display())),
                "{fault}"
            );
        }
        chmod(&directory, 0o700);
        chmod(&path, 0o777);
        let [fault] = said(&of_directory(&directory).unwrap()).try_into().unwrap();
        assert!(
            fault.ends_with(&format!("chmod go-w {}", path.display())),
            "{fault}"
        );
        chmod(&path, 0o1777);
        assert_eq!(
            said(&of_directory(&directory).unwrap()),
            [""; 0],
            "no other user can replace an entry of a sticky directory"
        );
        assert_eq!(of_directory(&path.join("none")).unwrap(), []);
    }

    #[test]
    fn every_link_directory_is_reported() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap();
        for name in ["a", "b", "real", "real/state"] {
            std::fs::create_dir(path.join(name)).unwrap();
        }
        std::os::unix::fs::symlink("../b/two", path.join("a/one")).unwrap();
        std::os::unix::fs::symlink(path.join("real/./state/../state"), path.join("b/two")).unwrap();
        let on_the_way = || said(&on_the_way(&path.join("a/one")).unwrap());
        assert_eq!(on_the_way(), [""; 0]);
        for name in ["a", "b", "real", "real/state"] {
            chmod(&path.join(name), 0o777);
            let [fault] = on_the_way().try_into().unwrap();
            assert!(
                fault.ends_with(&format!("chmod go-w {}", path.join(name).display())),
                "{fault}"
            );
            chmod(&path.join(name), 0o1777);
            assert_eq!(
                on_the_way().is_empty(),
                name != "real/state",
                "{name}: no user can replace its entry"
            );
            chmod(&path.join(name), 0o755);
        }
        std::os::unix::fs::symlink("loop", path.join("loop")).unwrap();
        assert!(super::on_the_way(&path.join("loop")).is_err());
        assert!(super::on_the_way(&path.join("none")).is_err());
    }

    #[test]
    fn foreign_owners_are_reported() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap();
        std::fs::create_dir(path.join("..now")).unwrap();
        std::fs::write(path.join("..now/a.wasm"), "x").unwrap();
        std::os::unix::fs::symlink("..now/a.wasm", path.join("a.wasm")).unwrap();
        chmod(&path.join("..now"), 0o755);
        chmod(&path.join("..now/a.wasm"), 0o644);
        let faults =
            || said(&of_file(&open_in(&path, OsStr::new("a.wasm"), 64).unwrap(), &path).unwrap());
        assert_eq!(faults(), [""; 0]);
        chmod(&path.join("..now"), 0o777);
        chmod(&path.join("..now/a.wasm"), 0o664);
        let found = faults();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(
            found[0].contains("a.wasm") && found[0].contains("0664"),
            "{found:?}"
        );
        assert!(
            found[1].contains("..now (") && found[1].contains("0777"),
            "{found:?}"
        );
    }

    #[test]
    fn owner_fault_names_the_allowed_owners() {
        let said = |own| {
            Fault::find(Path::new("/x"), 1234, 0o600, own, false).map(|fault| fault.to_string())
        };
        assert_eq!(
            said(0).unwrap(),
            "/x (owner 1234, mode 0600) belongs to another than root: chown 0 /x"
        );
        assert!(
            said(7)
                .unwrap()
                .contains("root or the daemon's user: chown 7 /x")
        );
        assert_eq!(said(1234), None);
    }
}
