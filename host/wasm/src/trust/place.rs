//! Checks who else may change a file: its owner and mode, and those of the directories above it.
//!
//! A user who may write a directory may put any file into it, and a user who may write its parent may replace it. So all of them have to
//! belong to root or to the daemon's user, and no other user may write them.

use std::fmt;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::open::Opened;

const WRITE_OF_OTHERS: u32 = 0o022;
const STICKY: u32 = 0o1000;

/// A file or directory that another user may change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    pub path: PathBuf,
    uid: u32,
    mode: u32,
    kind: Kind,
    /// The daemon's user.
    own_uid: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Owner,
    Writable,
}

/// The fault, and the command that repairs it.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, shown) = (self.path.display(), quoted(&self.path));
        write!(f, "{path} (owner {}, mode {:04o}) ", self.uid, self.mode)?;
        match self.kind {
            Kind::Owner => {
                let whose = if self.own_uid == 0 { "root" } else { "root or the daemon's user" };
                write!(f, "belongs to another than {whose}: chown {} {shown}", self.own_uid)
            }
            Kind::Writable => write!(f, "can be written by group or others: chmod go-w {shown}"),
        }
    }
}

/// A path, quoted for a shell.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    if text.chars().all(|c| c.is_alphanumeric() || "/._-+:@".contains(c)) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

/// The faults of a directory and of those above it. A missing one has none.
pub fn of_folder(folder: &Path) -> Vec<Fault> {
    let Ok(folder) = folder.canonicalize() else { return Vec::new() };
    let me = rustix::process::geteuid().as_raw();
    let chain: Vec<_> = folder
        .ancestors()
        .filter_map(|path| Some((path.to_owned(), Seen::of(&std::fs::symlink_metadata(path).ok()?))))
        .collect();
    let mut faults = Vec::new();
    for (index, (path, seen)) in chain.iter().enumerate() {
        // In a sticky folder nobody can put another into the place of what is root's or ours, as in /tmp.
        let below = index.checked_sub(1).map(|below| chain[below].1);
        let shielded = seen.mode & STICKY != 0 && below.is_some_and(|below| below.is_owned(me));
        faults.extend(seen.fault(path, me, shielded));
    }
    faults
}

/// The faults of a file in a directory, and of the directories between them if the file is behind a link.
pub fn of_file(opened: &Opened, folder: &Path) -> Vec<Fault> {
    let me = rustix::process::geteuid().as_raw();
    let own = Seen { uid: opened.uid, mode: opened.mode };
    let folder = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
    let between =
        opened.path.ancestors().skip(1).take_while(|path| *path != folder && path.starts_with(&folder));
    let found = |path: &Path| {
        let seen = Seen::of(&std::fs::symlink_metadata(path).ok()?);
        seen.fault(path, me, false)
    };
    own.fault(&opened.path, me, false).into_iter().chain(between.filter_map(found)).collect()
}

#[derive(Debug, Clone, Copy)]
struct Seen {
    uid: u32,
    mode: u32,
}

impl Seen {
    fn of(found: &Metadata) -> Self {
        Self { uid: found.uid(), mode: found.mode() & 0o7777 }
    }

    fn is_owned(self, me: u32) -> bool {
        self.uid == 0 || self.uid == me
    }

    fn fault(self, path: &Path, me: u32, shielded: bool) -> Option<Fault> {
        let kind = if !self.is_owned(me) {
            Kind::Owner
        } else if self.mode & WRITE_OF_OTHERS != 0 && !shielded {
            Kind::Writable
        } else {
            return None;
        };
        Some(Fault { path: path.to_owned(), uid: self.uid, mode: self.mode, kind, own_uid: me })
    }
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
    fn a_folder_that_others_may_write_or_replace_is_told_with_what_mends_it() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap();
        let folder = path.join("the drivers");
        std::fs::create_dir(&folder).unwrap();
        chmod(&folder, 0o755);
        assert_eq!(said(&of_folder(&folder)), [""; 0]);
        for (mode, shown) in [(0o775, "0775"), (0o757, "0757"), (0o1777, "1777")] {
            chmod(&folder, mode);
            let [fault] = said(&of_folder(&folder)).try_into().unwrap();
            assert!(fault.contains(&format!("mode {shown}")), "{fault}");
            assert!(fault.ends_with(&format!("chmod go-w '{}'", folder.display())), "{fault}");
        }
        chmod(&folder, 0o700);
        chmod(&path, 0o777);
        let [fault] = said(&of_folder(&folder)).try_into().unwrap();
        assert!(fault.ends_with(&format!("chmod go-w {}", path.display())), "{fault}");
        chmod(&path, 0o1777);
        assert_eq!(said(&of_folder(&folder)), [""; 0], "nobody else can replace what is in a sticky folder");
        assert_eq!(of_folder(&path.join("none")), []);
    }

    #[test]
    fn a_file_of_somebody_else_is_told_and_a_folder_on_its_way_too() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().canonicalize().unwrap();
        std::fs::create_dir(path.join("..now")).unwrap();
        std::fs::write(path.join("..now/a.wasm"), "x").unwrap();
        std::os::unix::fs::symlink("..now/a.wasm", path.join("a.wasm")).unwrap();
        chmod(&path.join("..now"), 0o755);
        chmod(&path.join("..now/a.wasm"), 0o644);
        let faults = || said(&of_file(&open_in(&path, OsStr::new("a.wasm"), 64).unwrap(), &path));
        assert_eq!(faults(), [""; 0]);
        chmod(&path.join("..now"), 0o777);
        chmod(&path.join("..now/a.wasm"), 0o664);
        let found = faults();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("a.wasm") && found[0].contains("0664"), "{found:?}");
        assert!(found[1].contains("..now (") && found[1].contains("0777"), "{found:?}");
    }

    #[test]
    fn of_another_owner_the_words_name_who_is_right() {
        let seen = Seen { uid: 1234, mode: 0o600 };
        let said = |me| seen.fault(Path::new("/x"), me, false).map(|fault| fault.to_string());
        assert_eq!(said(0).unwrap(), "/x (owner 1234, mode 0600) belongs to another than root: chown 0 /x");
        assert!(said(7).unwrap().contains("root or the daemon's user: chown 7 /x"));
        assert_eq!(said(1234), None);
    }
}
