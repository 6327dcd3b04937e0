//! Podman, for containers on a directory with nothing but busybox: of root, or of another user (rootless).

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::machine::{is_root, program, run};
use crate::{DEADLINE, Root};

/// Directory that podman reads; its version here takes no other.
pub const CDI_DIR: &str = "/var/run/cdi";

/// Files of users, which newuidmap and newgidmap read.
const USER_FILES: [&str; 3] = ["/etc/passwd", "/etc/subuid", "/etc/subgid"];

/// Puts other files in place of those of the machine, for itself and its children alone, and becomes a user's program.
const AS_USER: &str = r#"
directory=$1 uid=$2 group=$3; shift 3
for file in passwd subuid subgid; do mount --bind "$directory/$file" "/etc/$file" || exit 1; done
export HOME="$directory/home" XDG_RUNTIME_DIR="$directory/run"
cd "$HOME" && exec setpriv --reuid "$uid" --regid "$uid" --groups "$group" "$@"
"#;

#[derive(Clone)]
pub struct Podman {
    podman: PathBuf,
    pub runtime: PathBuf,
    /// Options of podman, and of its command `run`.
    pub options: [Vec<String>; 2],
    user: Option<User>,
}

/// A user of no other program, with subordinate users.
#[derive(Debug, Clone, Copy)]
pub struct User {
    pub uid: u32,
    /// A group that the user is in.
    pub group: u32,
    /// The first of [`SUBORDINATES`] users, and of as many groups.
    pub first_subordinate: u32,
}

const SUBORDINATES: u32 = 65_536;

impl Podman {
    pub fn find() -> Result<Self, String> {
        let podman = program("podman").ok_or("podman is not installed")?;
        let runtime = program("runc").ok_or("runc is not installed")?;
        if !is_root() {
            return Err("it needs root".to_owned());
        }
        let busybox = Command::new("/bin/busybox")
            .arg("true")
            .stdin(Stdio::null())
            .status();
        if !busybox.is_ok_and(|status| status.success()) {
            return Err("there is no /bin/busybox".to_owned());
        }
        Ok(Self {
            podman,
            runtime,
            options: Default::default(),
            user: None,
        })
    }

    /// Lets a user run it. The machine's files of users stay as they are: the user is in those of a mount namespace.
    pub fn rootless(mut self, user: User) -> Result<Self, String> {
        for name in ["unshare", "setpriv", "newuidmap", "newgidmap"] {
            program(name).ok_or_else(|| format!("{name} is not installed"))?;
        }
        if let Some(missing) = USER_FILES.iter().find(|file| !Path::new(file).is_file()) {
            return Err(format!("there is no {missing}"));
        }
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        write_user(directory.path(), user);
        let mut words = as_user(directory.path(), user).into_iter();
        // As podman does: a machine may forbid the namespace, or the mounts.
        let shell = ["unshare", "--user", "--map-root-user", "true"];
        let mut command = Command::new(words.next().expect("the program"));
        run(command.args(words).args(shell))?;
        self.user = Some(user);
        Ok(self)
    }

    /// Returns podman and its arguments before a command.
    fn program(&self, root: &Root) -> Vec<String> {
        let storage = |name: &str| text(&root.path().join("podman").join(name));
        let mut arguments = Vec::new();
        if let Some(user) = self.user {
            let directory = home(root);
            if !directory.exists() {
                write_user(&directory, user);
                let storage = root.path().join("podman");
                std::fs::create_dir_all(&storage).unwrap();
                chown(&storage, Some(user.uid), Some(user.uid)).unwrap();
            }
            arguments = as_user(&directory, user);
        }
        arguments.extend([text(&self.podman), "--root".to_owned(), storage("root")]);
        arguments.extend([
            "--runroot".to_owned(),
            storage("run"),
            "--tmpdir".to_owned(),
            storage("tmp"),
        ]);
        arguments.extend([
            "--storage-driver=vfs".to_owned(),
            "--runtime".to_owned(),
            text(&self.runtime),
        ]);
        let [of_podman, _] = &self.options;
        arguments.extend(["--cgroup-manager=cgroupfs", "--events-backend=none"].map(str::to_owned));
        arguments.extend_from_slice(of_podman);
        arguments
    }

    /// Ends and removes every container of a root, with what is mounted for it.
    pub async fn remove_all(&self, root: &Root) {
        let mut words = self.program(root).into_iter();
        let mut command = tokio::process::Command::new(words.next().expect("the program"));
        command
            .args(words)
            .args(["rm", "--all", "--force", "--time", "0"]);
        // A monitor that was killed makes the first removal fail, and not the second.
        for _ in 0..2 {
            let removed = command.stdin(Stdio::null()).output();
            let removed = tokio::time::timeout(DEADLINE, removed).await;
            if removed.expect("podman ends").unwrap().status.success() {
                return;
            }
        }
        panic!("containers stay");
    }

    /// Returns the directory of a container's files.
    pub fn rootfs(&self, root: &Root) -> PathBuf {
        let rootfs = root.path().join("rootfs");
        fill(&rootfs, self.user);
        rootfs
    }

    /// Returns the arguments that run a shell command in a container with the devices, on a directory with nothing but busybox.
    pub fn arguments(&self, root: &Root, devices: &[&str], script: &str) -> Vec<String> {
        let rootfs = self.rootfs(root);
        let mut arguments = self.program(root);
        let [_, of_run] = &self.options;
        let fixed = ["run", "--rm", "--network=none"].map(str::to_owned);
        arguments.extend(fixed.into_iter().chain(of_run.iter().cloned()));
        let devices = devices.iter().flat_map(|device| ["--device", device]);
        arguments.extend(devices.map(str::to_owned));
        if self.user.is_none() {
            let limits = ["nofile=16384:16384", "nproc=32768:32768"];
            let limits = limits.iter().flat_map(|limit| ["--ulimit", limit]);
            arguments.extend(limits.map(str::to_owned));
        }
        arguments.extend(["--rootfs".to_owned(), text(&rootfs)]);
        arguments.extend(["/bin/busybox", "sh", "-c", script].map(str::to_owned));
        arguments
    }

    /// Runs a shell command in a container with the devices, on a directory with nothing but busybox.
    pub async fn run(&self, root: &Root, devices: &[&str], script: &str) -> Result<String, String> {
        let mut arguments = self.arguments(root, devices, script).into_iter();
        let mut command = tokio::process::Command::new(arguments.next().expect("the program"));
        command.args(arguments);
        let output = command.stdin(Stdio::null()).kill_on_drop(true).output();
        let output = tokio::time::timeout(DEADLINE, output)
            .await
            .map_err(|_| "podman hangs")?;
        let output = output.map_err(|error| error.to_string())?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() {
            Ok(text(&output.stdout))
        } else {
            Err(text(&output.stderr))
        }
    }

    /// Returns what ends the process by which podman keeps the namespaces of a user, when it is dropped.
    pub fn pause(&self, root: &Root) -> Pause {
        Pause(root.path().join("podman/tmp/pause.pid"))
    }
}

/// The process of a user's namespaces.
pub struct Pause(PathBuf);

impl Drop for Pause {
    fn drop(&mut self) {
        // Without the file there is no such process.
        let pid = std::fs::read_to_string(&self.0).ok();
        let pid = pid.and_then(|pid| Pid::from_raw(pid.trim().parse().ok()?));
        // It may have ended.
        let _ = pid.map(|pid| kill_process(pid, Signal::KILL));
    }
}

/// The directory of a user on a root.
fn home(root: &Root) -> PathBuf {
    root.path().join("user")
}

/// Writes the files of a user.
fn write_user(directory: &Path, user: User) {
    let User {
        uid,
        first_subordinate,
        ..
    } = user;
    let passwd = std::fs::read_to_string(USER_FILES[0]).unwrap();
    let home = text(&directory.join("home"));
    let passwd = format!("{passwd}\nnodedock-test:x:{uid}:{uid}::{home}:/bin/sh\n");
    let ranges = format!("nodedock-test:{first_subordinate}:{SUBORDINATES}\n");
    for own in ["home", "run"].map(|name| directory.join(name)) {
        std::fs::create_dir_all(&own).unwrap();
        std::fs::set_permissions(&own, Permissions::from_mode(0o700)).unwrap();
        chown(&own, Some(uid), Some(uid)).unwrap();
    }
    for (name, content) in [
        ("passwd", &passwd),
        ("subuid", &ranges),
        ("subgid", &ranges),
    ] {
        std::fs::write(directory.join(name), content).unwrap();
    }
    std::fs::set_permissions(directory, Permissions::from_mode(0o755)).unwrap();
}

/// Returns the program and the arguments before a program of a user.
fn as_user(directory: &Path, user: User) -> Vec<String> {
    let (uid, group) = (user.uid.to_string(), user.group.to_string());
    let shell = ["unshare", "--mount", "sh", "-c", AS_USER, "as-user"];
    let words = [text(directory), uid, group];
    shell.map(str::to_owned).into_iter().chain(words).collect()
}

fn text(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

/// Makes the directory of a container's files, which a user has to own for containers of the user.
fn fill(rootfs: &Path, user: Option<User>) {
    let own = |path: &Path| {
        if let Some(User { uid, .. }) = user {
            chown(path, Some(uid), Some(uid)).unwrap();
        }
    };
    for dir in ["", "bin", "dev", "etc", "proc", "sys", "tmp"] {
        let dir = rootfs.join(dir);
        std::fs::create_dir_all(&dir).unwrap();
        own(&dir);
    }
    // A container may run it.
    let busybox = rootfs.join("bin/busybox");
    if !busybox.exists() {
        std::fs::copy("/bin/busybox", &busybox).unwrap();
        own(&busybox);
    }
}
