//! The directories of the daemon: only its user may enter them, and no other user can change or replace them.

use std::collections::BTreeSet;
use std::fs::{Permissions, metadata, set_permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::Mode;

use nodedock_base::directories::make;
use nodedock_base::paths::Paths;
use nodedock_wasm::trust::permissions;

const PRIVATE: u32 = 0o700;

/// Lets new files and directories of this process be for its user alone. Files for others are given their mode after they are made.
pub fn set_umask() {
    rustix::process::umask(Mode::RWXG | Mode::RWXO);
}

/// Makes the directories, and closes to others those that exist.
///
/// # Errors
///
/// If another user may write one of them, or may replace it.
pub(super) fn prepare(paths: &Paths) -> Result<()> {
    let own = paths.own_directories();
    // A socket may be in a directory of other programs.
    let of_socket = paths.socket.parent().into_iter();
    for directory in own.iter().copied().chain(of_socket) {
        make(directory, PRIVATE).with_context(|| {
            format!(
                "make the directory {}: choose a --root that can be written",
                directory.display()
            )
        })?;
    }
    let faults = faults(paths)?;
    if !faults.is_empty() {
        bail!(
            "other users can change files of the daemon, which it does not use then: {}",
            faults.join("; ")
        );
    }
    own.into_iter().try_for_each(close)
}

/// Each directory that another user may write or replace, with the command that mends it. A missing one has none.
pub fn faults(paths: &Paths) -> Result<Vec<String>> {
    let mut faults = BTreeSet::new();
    for directory in paths.own_directories() {
        // no error: the look at the directories above finds it
        let existing = directory
            .ancestors()
            .find(|ancestor| ancestor.symlink_metadata().is_ok());
        let existing = existing.unwrap_or(Path::new("/"));
        let found = permissions::on_the_way(existing);
        let found =
            found.with_context(|| format!("look at the directories of {}", existing.display()))?;
        let own = paths.own_directories();
        faults.extend(found.iter().map(|fault| match fault.belongs_to_another() && !own.contains(&&*fault.path) {
            // It may be a user's home: no command of ours gives it away.
            true => format!(
                "{} belongs to another user, who can replace what is below: choose a --root whose parents belong to root or to the daemon's user",
                fault.path.display()
            ),
            false => fault.to_string(),
        }));
    }
    Ok(faults.into_iter().collect())
}

fn close(directory: &Path) -> Result<()> {
    let shown = directory.display();
    let mode = metadata(directory)
        .with_context(|| format!("look at {shown}"))?
        .permissions()
        .mode()
        & 0o7777;
    if mode == PRIVATE {
        return Ok(());
    }
    match set_permissions(directory, Permissions::from_mode(PRIVATE)) {
        Ok(()) => {
            tracing::info!(directory = %shown, "other users could enter the directory; its mode is 0700 now")
        }
        // A directory of root's, or one that is mounted read-only: no other user can write it.
        Err(error) => {
            tracing::warn!(directory = %shown, %error, "other users can enter the directory")
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chmod(path: &Path, mode: u32) {
        set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    fn mode(path: &Path) -> u32 {
        metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn directories_are_made_private() {
        let root = tempfile::tempdir().unwrap();
        let paths = Paths::below(&root.path().canonicalize().unwrap());
        prepare(&paths).unwrap();
        for open in [0o755, 0o750, 0o2755, 0o711] {
            for directory in paths.own_directories() {
                assert_eq!(mode(directory), PRIVATE, "{directory:?}");
                chmod(directory, open);
            }
            prepare(&paths).unwrap();
        }
    }

    /// Covers the umask 0, with which a local user's driver file served as root's.
    #[test]
    fn directories_writable_by_others_are_refused() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let paths = Paths::below(&root);
        prepare(&paths).unwrap();
        let parents = [
            root.join("var"),
            root.join("var/lib"),
            root.join("run"),
            root.clone(),
        ];
        for directory in paths
            .own_directories()
            .into_iter()
            .chain(parents.iter().map(AsRef::as_ref))
        {
            let before = mode(directory);
            for open in [0o777, 0o770, 0o702] {
                chmod(directory, open);
                let refused = prepare(&paths).unwrap_err().to_string();
                assert!(
                    refused.contains(&format!("chmod go-w {}", directory.display())),
                    "{refused}"
                );
                assert_eq!(faults(&paths).unwrap().len(), 1);
            }
            chmod(directory, before);
        }
        prepare(&paths).unwrap();
        chmod(&root, 0o1777);
        prepare(&paths).expect("no other user can replace an entry of a sticky directory");
    }

    #[test]
    fn link_replaceable_by_others_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let paths = Paths::below(&root.join("dock"));
        for directory in ["dock/var/lib", "open", "state"] {
            make(&root.join(directory), 0o755).unwrap();
        }
        std::os::unix::fs::symlink("../../../open/link", root.join("dock/var/lib/nodedock"))
            .unwrap();
        std::os::unix::fs::symlink("../state", root.join("open/link")).unwrap();
        prepare(&paths).unwrap();
        assert_eq!(mode(&root.join("state")), PRIVATE);
        chmod(&root.join("open"), 0o777);
        let refused = prepare(&paths).unwrap_err().to_string();
        assert!(
            refused.ends_with(&format!("chmod go-w {}", root.join("open").display())),
            "{refused}"
        );
    }

    #[test]
    fn shared_socket_directory_retains_its_mode() {
        let root = tempfile::tempdir().unwrap();
        let shared = root.path().join("shared");
        make(&shared, 0o755).unwrap();
        let mut paths = Paths::below(&root.path().canonicalize().unwrap().join("dock"));
        paths.socket = shared.join("nodedock.sock");
        prepare(&paths).unwrap();
        assert_eq!(mode(&shared), 0o755);
    }
}
