//! Checks the paths that container edits take from the node: the sources of mounts, and the programs of hooks.
//!
//! Receives paths that a grant allows, and decides whether another user of the node could exchange the file or directory at a path, and
//! whether a path is another way to a directory that has a rule of its own. The check runs when a driver answers, and again before each
//! answer that repeats the path. Blocking functions, not for async threads; they need one `lstat` for each directory of the path.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use crate::device_metadata::CONTAINER_DIR;
use crate::hardware::Hardware;
use nodedock_model::grant::ceiling::WELL_KNOWN;
use nodedock_model::{Edits, Mount, PreparedClaim, Problem, ProblemCode};

/// Bits of a mode by which users other than the owner may write.
const OTHERS_MAY_WRITE: u32 = 0o022;

/// The root below which the node has its files, and the daemon's own directories.
#[derive(Debug, Clone)]
pub struct EditSources<'a> {
    root: &'a Path,
    own: Arc<[PathBuf]>,
}

/// List of the process' own mounts (proc(5)).
const MOUNTS: &str = "/proc/self/mountinfo";

/// Place in a file system, independent of the paths that lead to it: the numbers of the file system, and the path below its root.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Place {
    file_system: String,
    path: PathBuf,
}

impl Place {
    fn is_at_or_below(&self, other: &Self) -> bool {
        self.file_system == other.file_system && self.path.starts_with(&other.path)
    }
}

/// The mounts of this process.
struct Mounts(Vec<(PathBuf, Place)>);

impl Mounts {
    fn read() -> Result<Self, Problem> {
        let text = std::fs::read_to_string(MOUNTS).map_err(|error| unreadable(MOUNTS, &error))?;
        Self::parse(&text).ok_or_else(|| {
            let message = format!("{MOUNTS} has a line of another form than proc(5) says");
            Problem::unavailable(ProblemCode::IoError, message)
        })
    }

    /// Each line has the numbers of the file system, the directory of it that is mounted, and the place where it is mounted.
    fn parse(text: &str) -> Option<Self> {
        let mounts = text.lines().map(|line| {
            let mut fields = line.split(' ').skip(2);
            let (file_system, root, at) = (fields.next()?, fields.next()?, fields.next()?);
            let place = Place {
                file_system: file_system.to_owned(),
                path: unescaped(root).into(),
            };
            Some((PathBuf::from(unescaped(at)), place))
        });
        mounts.collect::<Option<_>>().map(Self)
    }

    /// The place of an absolute path without links. Of several mounts at one path, the last one covers the others.
    fn place(&self, path: &Path) -> Option<Place> {
        let above = self.0.iter().filter(|(at, _)| path.starts_with(at));
        let (at, root) = above.max_by_key(|(at, _)| at.components().count())?;
        let below = path.strip_prefix(at).ok()?;
        Some(Place {
            file_system: root.file_system.clone(),
            path: root.path.join(below),
        })
    }

    fn is_mount(&self, path: &Path) -> bool {
        self.0.iter().any(|(at, _)| at == path)
    }
}

/// Spaces and the like are octal numbers there.
fn unescaped(text: &str) -> String {
    let escapes = [
        ("\\040", " "),
        ("\\011", "\t"),
        ("\\012", "\n"),
        ("\\134", "\\"),
    ];
    escapes
        .iter()
        .fold(text.to_owned(), |text, (escape, character)| {
            text.replace(escape, character)
        })
}

impl<'a> EditSources<'a> {
    pub fn of(hardware: &'a Hardware) -> Self {
        Self {
            root: hardware.root(),
            own: hardware.own_directories(),
        }
    }

    /// Checks every source of a prepared claim again.
    pub fn check_claim(&self, prepared: &PreparedClaim) -> Result<(), Problem> {
        edits_of(prepared).try_for_each(|edits| self.check_edits(edits))
    }

    fn check_edits(&self, edits: &Edits) -> Result<(), Problem> {
        mounts_of_driver(edits)
            .map(|mount| &mount.host_path)
            .try_for_each(|path| self.check_mount(path))?;
        edits
            .hooks
            .iter()
            .try_for_each(|hook| self.check_way(&hook.path))
    }

    /// Checks the source of a mount: an absolute, plain path without links.
    pub fn check_mount(&self, path: &str) -> Result<(), Problem> {
        self.check_way(path)?;
        let refused = |why: String| Err(denied(path, &why));
        let (mounts, real) = (Mounts::read()?, self.place(path));
        let Some(source) = mounts.place(&real) else {
            return refused("no mount of the node has it".to_owned());
        };
        for known in WELL_KNOWN {
            let at = self.place(known);
            let Some(known_place) = found_place(&mounts, &at)? else {
                continue;
            };
            // Below it by its own path, the path was judged as such.
            if source.is_at_or_below(&known_place) && !real.starts_with(&at) {
                return refused(format!("it is another way to {known}"));
            }
            if known_place.is_at_or_below(&source) && known_place != source {
                return refused(format!("{known} is in it"));
            }
        }
        for own in &*self.own {
            let Some(own) = found_place(&mounts, own)? else {
                continue;
            };
            if source.is_at_or_below(&own) || own.is_at_or_below(&source) {
                return refused("the daemon's own directories are never mounted".to_owned());
            }
        }
        Ok(())
    }

    /// Checks that no user but root can exchange what is at this path: each directory on the way is root's, and no other user may write it.
    pub fn check_way(&self, path: &str) -> Result<(), Problem> {
        let place = self.place(path);
        let below = place
            .strip_prefix(self.root)
            .expect("it is joined to the root");
        let mut step = self.root.to_owned();
        let mut names = below
            .components()
            .filter(|part| matches!(part, Component::Normal(_)))
            .peekable();
        loop {
            let found =
                std::fs::symlink_metadata(&step).map_err(|error| unreadable(path, &error))?;
            let Some(name) = names.next() else { break };
            // A link of the root itself belongs to who chose the root.
            if found.is_symlink() && step != self.root {
                return Err(denied(
                    path,
                    &format!("a link is at {}, where none was", step.display()),
                ));
            }
            let is_owned = found.uid() == 0 || found.uid() == rustix::process::geteuid().as_raw();
            let (at, mode) = (step.display(), found.mode() & 0o7777);
            if !is_owned {
                let message = format!(
                    "{at} belongs to user {}, who could exchange what is below: chown root {at}, or mount a copy elsewhere",
                    found.uid()
                );
                return Err(denied(path, &message));
            }
            if mode & OTHERS_MAY_WRITE != 0 {
                let message = format!(
                    "{at} (mode {mode:04o}) is writable for users other than root, who could exchange what is below: chmod go-w {at}"
                );
                return Err(denied(path, &message));
            }
            step.push(name);
        }
        match std::fs::symlink_metadata(&step) {
            Ok(found) if found.is_symlink() => Err(denied(path, "a link is there, where none was")),
            Ok(_) => Ok(()),
            Err(error) => Err(unreadable(path, &error)),
        }
    }

    /// The path at which the host finds an absolute path of the node.
    pub fn place(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }
}

/// Returns whether a driver's container edits name files of the node, which others may exchange.
pub fn has_sources(prepared: &PreparedClaim) -> bool {
    edits_of(prepared)
        .any(|edits| mounts_of_driver(edits).next().is_some() || !edits.hooks.is_empty())
}

fn edits_of(prepared: &PreparedClaim) -> impl Iterator<Item = &Edits> {
    let of_devices = prepared
        .devices
        .iter()
        .filter_map(|device| device.access.edits());
    of_devices.chain([&prepared.edits])
}

/// The mounts of a driver. Those of the host itself are in its own directory; no driver puts anything there.
fn mounts_of_driver(edits: &Edits) -> impl Iterator<Item = &Mount> {
    let mounts = edits.mounts.iter();
    mounts.filter(|mount| !Path::new(&mount.container_path).starts_with(CONTAINER_DIR))
}

/// The place of a directory or file, through links; `None` if it does not exist. A mount is not looked at: its file system may hang.
fn found_place(mounts: &Mounts, path: &Path) -> Result<Option<Place>, Problem> {
    if mounts.is_mount(path) {
        return Ok(mounts.place(path));
    }
    match path.canonicalize() {
        Ok(real) => Ok(mounts.place(&real)),
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            Ok(None)
        }
        Err(error) => Err(unreadable(&path.display().to_string(), &error)),
    }
}

fn denied(path: &str, why: &str) -> Problem {
    Problem::denied(ProblemCode::EditSourceUnsafe, format!("{path}: {why}"))
}

/// Returns the problem of a path that cannot be read. A missing path may be installed later, so the refusal is not permanent.
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
        for path in [
            "opt/acme/lib",
            "etc/acme",
            "srv/dock/var/lib/nodedock/drivers",
            "var/lib/kubelet",
        ] {
            fs::create_dir_all(root.join(path)).unwrap();
        }
        let own = vec![
            root.join("srv/dock/var/lib/nodedock"),
            root.join("srv/dock/none"),
        ];
        Scene {
            _directory: directory,
            hardware: Hardware::in_directory(&root).with_own_directories(own),
        }
    }

    impl Scene {
        fn root(&self) -> &Path {
            self.hardware.root()
        }

        fn code(&self, path: &str) -> Option<String> {
            EditSources::of(&self.hardware)
                .check_mount(path)
                .err()
                .map(|problem| problem.code)
        }
    }

    #[test]
    fn root_owned_source_is_mounted() {
        let scene = scene();
        fs::write(scene.root().join("opt/acme/lib/a.so"), "").unwrap();
        assert_eq!(scene.code("/opt/acme/lib"), None);
        assert_eq!(scene.code("/opt/acme/lib/a.so"), None);
        assert_eq!(
            scene.code("/opt/acme/none").as_deref(),
            Some("no-such-path")
        );
    }

    #[test]
    fn writable_parent_directory_is_refused() {
        let scene = scene();
        for mode in [0o775, 0o757, 0o1777] {
            fs::set_permissions(
                scene.root().join("opt/acme"),
                PermissionsExt::from_mode(mode),
            )
            .unwrap();
            assert_eq!(
                scene.code("/opt/acme/lib").as_deref(),
                Some("edit-source-unsafe"),
                "{mode:o}"
            );
        }
        fs::set_permissions(
            scene.root().join("opt/acme"),
            PermissionsExt::from_mode(0o755),
        )
        .unwrap();
        assert_eq!(scene.code("/opt/acme/lib"), None);
        if chown(scene.root().join("opt/acme"), Some(1234), None).is_ok() {
            assert_eq!(
                scene.code("/opt/acme/lib").as_deref(),
                Some("edit-source-unsafe")
            );
        }
    }

    #[test]
    fn link_instead_of_directory_is_refused() {
        let scene = scene();
        fs::rename(scene.root().join("opt/acme"), scene.root().join("opt/old")).unwrap();
        symlink("../etc", scene.root().join("opt/acme")).unwrap();
        for path in ["/opt/acme", "/opt/acme/acme"] {
            assert_eq!(
                scene.code(path).as_deref(),
                Some("edit-source-unsafe"),
                "{path}"
            );
        }
    }

    #[test]
    fn daemon_directories_cannot_be_mounted() {
        let scene = scene();
        for path in [
            "/srv",
            "/srv/dock",
            "/srv/dock/var/lib/nodedock",
            "/srv/dock/var/lib/nodedock/drivers",
        ] {
            assert_eq!(
                scene.code(path).as_deref(),
                Some("edit-source-unsafe"),
                "{path}"
            );
        }
    }

    /// A bind mount shows the same directory at another path, as the kernel does with `mount --bind`.
    #[test]
    fn bind_mount_cannot_bypass_the_rules() {
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
            assert!(
                std::process::Command::new("umount")
                    .arg(&alias)
                    .status()
                    .unwrap()
                    .success()
            );
            for code in codes {
                assert_eq!(code.as_deref(), Some("edit-source-unsafe"), "{target}");
            }
        }
        assert_eq!(scene.code("/opt/alias"), None);
    }

    /// The state directory is a bind mount of a directory that has another path as well, as on machines with an immutable root.
    #[test]
    fn parent_of_bind_origin_is_refused() {
        let scene = scene();
        let (origin, at) = (
            scene.root().join("srv/deploy/state/nodedock"),
            scene.root().join("srv/dock/var/lib/nodedock"),
        );
        fs::create_dir_all(&origin).unwrap();
        let mounted = std::process::Command::new("mount")
            .arg("--bind")
            .arg(&origin)
            .arg(&at)
            .status();
        if !mounted.is_ok_and(|status| status.success()) {
            eprintln!("skipped: bind mounts need rights");
            return;
        }
        let codes = [
            "/srv/deploy",
            "/srv/deploy/state",
            "/srv/deploy/state/nodedock",
        ]
        .map(|path| scene.code(path));
        assert!(
            std::process::Command::new("umount")
                .arg(&at)
                .status()
                .unwrap()
                .success()
        );
        for code in codes {
            assert_eq!(code.as_deref(), Some("edit-source-unsafe"));
        }
    }

    #[test]
    fn path_resolves_below_last_mount() {
        let text = "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n30 22 8:2 /@home /home rw - btrfs /dev/sda2 rw\n31 22 8:1 /etc/a\\040b /opt/x rw - ext4 /dev/sda1 rw\n";
        let mounts = Mounts::parse(text).unwrap();
        assert!(
            Mounts::parse("22 1 8:1\n").is_none(),
            "what is not understood is no list of mounts"
        );
        let place = |path: &str| {
            mounts.place(Path::new(path)).map(|place| {
                format!(
                    "{} {}",
                    place.file_system,
                    place.path.components().collect::<PathBuf>().display()
                )
            })
        };
        assert_eq!(place("/opt/y").as_deref(), Some("8:1 /opt/y"));
        assert_eq!(place("/home/u").as_deref(), Some("8:2 /@home/u"));
        assert_eq!(place("/opt/x/c").as_deref(), Some("8:1 /etc/a b/c"));
        assert_eq!(place("/opt/x").as_deref(), Some("8:1 /etc/a b"));
    }
}
