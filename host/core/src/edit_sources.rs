//! What container edits take from the node: the sources of mounts, and the programs of hooks.
//!
//! Is given paths that a grant allows, and decides whether another user of the node could exchange what is there, and whether a path is
//! another way to a directory that has a rule of its own. It is asked when a driver answers, and again before each answer that repeats the
//! path. Blocking functions, not for async threads; they need one `lstat` for each directory on the way.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use crate::device_metadata::CONTAINER_DIR;
use crate::hardware::Hardware;
use nodedock_model::grant::ceiling::WELL_KNOWN;
use nodedock_model::{Edits, PreparedClaim, Problem, ProblemCode};

/// Bits of a mode by which users other than the owner may write.
const OTHERS_MAY_WRITE: u32 = 0o022;

/// The root below which the node has its files, and the daemon's own directories.
#[derive(Debug, Clone, Copy)]
pub struct EditSources<'a> {
    root: &'a Path,
    own: &'a [PathBuf],
}

/// Device and inode: what a directory is, whatever its path.
type Identity = (u64, u64);

fn identity(found: &Metadata) -> Identity {
    (found.dev(), found.ino())
}

impl<'a> EditSources<'a> {
    pub fn of(hardware: &'a Hardware) -> Self {
        Self { root: hardware.root(), own: hardware.own_directories() }
    }

    /// Checks every source of a prepared claim again.
    pub fn check_claim(&self, prepared: &PreparedClaim) -> Result<(), Problem> {
        let of_devices = prepared.devices.iter().filter_map(|device| device.access.edits());
        of_devices.chain([&prepared.edits]).try_for_each(|edits| self.check_edits(edits))
    }

    fn check_edits(&self, edits: &Edits) -> Result<(), Problem> {
        // Those of the host itself are in its own directory; no driver puts anything there.
        let of_driver =
            edits.mounts.iter().filter(|mount| !Path::new(&mount.container_path).starts_with(CONTAINER_DIR));
        of_driver.map(|mount| &mount.host_path).try_for_each(|path| self.check_mount(path))?;
        edits.hooks.iter().try_for_each(|hook| self.check_way(&hook.path).map(drop))
    }

    /// Checks the source of a mount: an absolute, plain path without links.
    pub fn check_mount(&self, path: &str) -> Result<(), Problem> {
        let way = self.check_way(path)?;
        let refused = |why: String| Err(denied(path, &why));
        let identities =
            |path: &Path| identities(path).map_err(|error| unreadable(&path.display().to_string(), &error));
        for known in WELL_KNOWN {
            let place = self.place(known);
            let found = match std::fs::metadata(&place) {
                Ok(found) => identity(&found),
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(unreadable(known, &error)),
            };
            if let Some((other, _)) = way.iter().find(|(step, is)| *is == found && *step != place) {
                return refused(format!("{} is another way to {known}", other.display()));
            }
        }
        let (_, source) = way.last().expect("a path has a root");
        for own in self.own {
            let above = match identities(own) {
                Ok(above) => above,
                Err(problem) if problem.code == ProblemCode::NoSuchPath.as_str() => continue,
                Err(problem) => return Err(problem),
            };
            let itself = above.last().expect("a path has a root");
            if above.contains(source) || way.iter().any(|(_, step)| step == itself) {
                return refused("the daemon's own directories are never mounted".to_owned());
            }
        }
        Ok(())
    }

    /// Checks that no user but root can exchange what is at this path: each directory on the way is root's, and nobody else may write it. Returns
    /// what is on the way, from the root to the path itself.
    pub fn check_way(&self, path: &str) -> Result<Vec<(PathBuf, Identity)>, Problem> {
        let place = self.place(path);
        let below = place.strip_prefix(self.root).expect("it is joined to the root");
        let mut step = self.root.to_owned();
        let mut way = Vec::new();
        let mut names = below.components().filter(|part| matches!(part, Component::Normal(_))).peekable();
        loop {
            let found = std::fs::symlink_metadata(&step).map_err(|error| unreadable(path, &error))?;
            way.push((step.clone(), identity(&found)));
            let Some(name) = names.next() else { break };
            // A link of the root itself belongs to who chose the root.
            if found.is_symlink() && step != self.root {
                return Err(denied(path, &format!("a link is at {}, where none was", step.display())));
            }
            let is_owned = found.uid() == 0 || found.uid() == rustix::process::geteuid().as_raw();
            if !is_owned || found.mode() & OTHERS_MAY_WRITE != 0 {
                let message = format!(
                    "{} is writable for users other than root, who could exchange what is below",
                    step.display()
                );
                return Err(denied(path, &message));
            }
            step.push(name);
        }
        match std::fs::symlink_metadata(&step) {
            Ok(found) if found.is_symlink() => Err(denied(path, "a link is there, where none was")),
            Ok(_) => Ok(way),
            Err(error) => Err(unreadable(path, &error)),
        }
    }

    /// The path at which the host finds an absolute path of the node.
    pub fn place(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }
}

/// The identities of a directory and of those above it, from the root.
fn identities(path: &Path) -> io::Result<Vec<Identity>> {
    let real = path.canonicalize()?;
    let mut above: Vec<_> = real
        .ancestors()
        .map(|path| std::fs::metadata(path).map(|found| identity(&found)))
        .collect::<io::Result<_>>()?;
    above.reverse();
    Ok(above)
}

fn denied(path: &str, why: &str) -> Problem {
    Problem::denied(ProblemCode::EditSourceUnsafe, format!("{path}: {why}"))
}

/// What is missing may be installed later: the refusal is not permanent.
fn unreadable(path: &str, error: &io::Error) -> Problem {
    match error.kind() {
        io::ErrorKind::NotFound => {
            Problem::unavailable(ProblemCode::NoSuchPath, format!("{path} does not exist"))
        }
        _ => Problem::unavailable(ProblemCode::IoError, format!("{path}: {error}")),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, chown, symlink};

    use super::*;

    struct Scene {
        _directory: tempfile::TempDir,
        hardware: Hardware,
    }

    fn scene() -> Scene {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().to_owned();
        fs::set_permissions(&root, PermissionsExt::from_mode(0o755)).unwrap();
        for path in ["opt/acme/lib", "etc/acme", "srv/dock/var/lib/nodedock/drivers", "var/lib/kubelet"] {
            fs::create_dir_all(root.join(path)).unwrap();
        }
        let own = vec![root.join("srv/dock/var/lib/nodedock"), root.join("srv/dock/none")];
        Scene { _directory: directory, hardware: Hardware::in_directory(&root).with_own_directories(own) }
    }

    impl Scene {
        fn root(&self) -> &Path {
            self.hardware.root()
        }

        fn code(&self, path: &str) -> Option<String> {
            EditSources::of(&self.hardware).check_mount(path).err().map(|problem| problem.code)
        }
    }

    #[test]
    fn a_source_that_only_root_can_exchange_is_mounted() {
        let scene = scene();
        fs::write(scene.root().join("opt/acme/lib/a.so"), "").unwrap();
        assert_eq!(scene.code("/opt/acme/lib"), None);
        assert_eq!(scene.code("/opt/acme/lib/a.so"), None);
        assert_eq!(scene.code("/opt/acme/none").as_deref(), Some("no-such-path"));
    }

    #[test]
    fn a_directory_on_the_way_that_others_may_write_is_refused() {
        let scene = scene();
        for mode in [0o775, 0o757, 0o1777] {
            fs::set_permissions(scene.root().join("opt/acme"), PermissionsExt::from_mode(mode)).unwrap();
            assert_eq!(scene.code("/opt/acme/lib").as_deref(), Some("edit-source-unsafe"), "{mode:o}");
        }
        fs::set_permissions(scene.root().join("opt/acme"), PermissionsExt::from_mode(0o755)).unwrap();
        assert_eq!(scene.code("/opt/acme/lib"), None);
        if chown(scene.root().join("opt/acme"), Some(1234), None).is_ok() {
            assert_eq!(scene.code("/opt/acme/lib").as_deref(), Some("edit-source-unsafe"));
        }
    }

    #[test]
    fn a_link_in_place_of_a_directory_is_refused() {
        let scene = scene();
        fs::rename(scene.root().join("opt/acme"), scene.root().join("opt/old")).unwrap();
        symlink("../etc", scene.root().join("opt/acme")).unwrap();
        for path in ["/opt/acme", "/opt/acme/acme"] {
            assert_eq!(scene.code(path).as_deref(), Some("edit-source-unsafe"), "{path}");
        }
    }

    #[test]
    fn the_daemons_directories_are_not_mounted_from_above_or_below() {
        let scene = scene();
        for path in ["/srv", "/srv/dock", "/srv/dock/var/lib/nodedock", "/srv/dock/var/lib/nodedock/drivers"]
        {
            assert_eq!(scene.code(path).as_deref(), Some("edit-source-unsafe"), "{path}");
        }
    }

    /// A bind mount shows the same directory at another path, as the kernel does with `mount --bind`.
    #[test]
    fn a_bind_mount_is_no_way_round() {
        let scene = scene();
        let alias = scene.root().join("opt/alias");
        fs::create_dir(&alias).unwrap();
        for (target, below) in [
            ("etc", "/opt/alias/acme"),
            ("var/lib", "/opt/alias/kubelet"),
            ("", "/opt/alias/etc"),
            ("srv/dock", "/opt/alias/var"),
        ] {
            let mounted = std::process::Command::new("mount")
                .arg("--bind")
                .arg(scene.root().join(target))
                .arg(&alias)
                .status();
            if !mounted.is_ok_and(|status| status.success()) {
                eprintln!("skipped: bind mounts need rights");
                return;
            }
            let codes = [scene.code("/opt/alias"), scene.code(below)];
            assert!(std::process::Command::new("umount").arg(&alias).status().unwrap().success());
            for code in codes {
                assert_eq!(code.as_deref(), Some("edit-source-unsafe"), "{target}");
            }
        }
        assert_eq!(scene.code("/opt/alias"), None);
    }
}
