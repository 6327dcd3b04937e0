//! A temporary root: the files of a daemon, whether it runs or not, and the command line on it.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;

use tempfile::TempDir;
use tokio::process::Command;

use crate::machine::{Ext4, Tmpfs, program, run};
use crate::{DEADLINE, places};

/// The daemon's own directory below a root.
const STATE: &str = "var/lib/nodedock";
/// Driver files in it.
const DRIVERS: &str = "drivers";
const CDI: &str = "var/run/cdi";

/// A root of its own; removed when dropped.
#[derive(Debug)]
pub struct Root {
    /// Come first: what is mounted in the directory has to go before the directory can.
    pub mounts: Mounts,
    /// Shared by daemons that take turns on it.
    dir: Arc<TempDir>,
}

/// File systems of a root's own.
#[derive(Debug)]
pub struct Mounts {
    root: PathBuf,
    mounted: Vec<Mounted>,
    /// Directory that the daemon sees as `/sys`.
    sys: Option<PathBuf>,
}

#[derive(Debug)]
#[expect(dead_code, reason = "kept for its end")]
enum Mounted {
    Tmpfs(Tmpfs),
    Ext4(Ext4),
}

/// The outcome of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Output {
    /// None: a signal ended it.
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Root {
    pub fn new() -> Self {
        // The path of a Unix socket may have 107 bytes, so the root's is short.
        let roots = std::env::var("NODEDOCK_TEST_ROOTS").unwrap_or_else(|_| "/tmp".to_owned());
        let root = tempfile::Builder::new()
            .prefix("nd-")
            .rand_bytes(6)
            .tempdir_in(roots);
        let dir = root.expect("the directory for roots can be written");
        let root = Self {
            mounts: Mounts::new(dir.path(), None),
            dir: Arc::new(dir),
        };
        for dir in [root.drivers(), root.claims_dir(), root.cdi()] {
            std::fs::create_dir_all(dir).expect("a new directory in /tmp");
        }
        root
    }

    /// The same root, for another daemon on it. What is mounted stays with the first.
    pub fn beside(&self) -> Self {
        Self {
            mounts: Mounts::new(self.path(), self.mounts.sys.clone()),
            dir: self.dir.clone(),
        }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The daemon's own directory, with drivers, claims and checkpoint.
    pub fn state(&self) -> PathBuf {
        self.path().join(STATE)
    }

    pub fn drivers(&self) -> PathBuf {
        self.state().join(DRIVERS)
    }

    /// Files of drivers that prepared claims.
    pub fn kept_drivers(&self) -> PathBuf {
        self.state().join("kept-drivers")
    }

    pub fn claims_dir(&self) -> PathBuf {
        self.state().join("claims")
    }

    pub fn checkpoint(&self) -> PathBuf {
        self.state().join("checkpoint.db")
    }

    pub fn cdi(&self) -> PathBuf {
        self.path().join(CDI)
    }

    pub fn socket(&self) -> PathBuf {
        self.path().join("run/nodedock/nodedock.sock")
    }

    /// Socket of the pod-resources API.
    pub fn pod_resources(&self) -> PathBuf {
        self.path().join("run/nodedock/pod-resources/kubelet.sock")
    }

    pub fn log_path(&self) -> PathBuf {
        self.path().join("daemon.log")
    }

    /// Returns the log so far of all daemons on this root.
    pub fn log(&self) -> String {
        let bytes = std::fs::read(self.log_path()).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Writes a file below the root and gives its path.
    pub fn write(&self, name: &str, text: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, text)
            .unwrap_or_else(|error| panic!("write {}: {error}", path.display()));
        path
    }

    /// The command line with this root.
    pub fn command(&self) -> Command {
        self.program(places::nodedock())
    }

    /// The node program with this root.
    pub fn node_program(&self) -> Command {
        self.program(places::nodedockd())
    }

    fn program(&self, program: PathBuf) -> Command {
        let mut command = match &self.mounts.sys {
            None => Command::new(program),
            Some(sys) => {
                let mut command = as_sys(sys).expect("it could be when the root was made");
                command.arg(program);
                command.into()
            }
        };
        command
            .env("NODEDOCK_ROOT", self.path())
            .env("NODEDOCK_COMPILE_CACHE", self.path().join("compiled"))
            .env_remove("NOTIFY_SOCKET")
            .env_remove("NODEDOCK_LOG");
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Runs a command to its end.
    pub async fn cli(&self, args: &[&str]) -> Output {
        output("nodedock", self.command(), args).await
    }

    /// Runs a command to its end, as another user of the machine.
    pub async fn cli_as(&self, user: u32, group: u32, args: &[&str]) -> Output {
        let mut command = self.command();
        command.uid(user).gid(group).current_dir("/");
        output("nodedock", command, args).await
    }

    /// Runs the node program to its end.
    pub async fn run_node_program(&self, args: &[&str]) -> Output {
        output("nodedockd", self.node_program(), args).await
    }
}

impl Mounts {
    fn new(root: &Path, sys: Option<PathBuf>) -> Self {
        Self {
            root: root.to_owned(),
            mounted: Vec::new(),
            sys,
        }
    }

    /// Puts the daemon's own directory on a small file system in memory. The error says in one line why it cannot be.
    pub fn state(&mut self, options: &str) -> Result<(), String> {
        // Without a mode every user may write there.
        let options = format!("mode=700,{options}");
        self.mounted.push(Mounted::Tmpfs(Tmpfs::mount(
            &self.root.join(STATE),
            &options,
        )?));
        std::fs::create_dir(self.root.join(STATE).join(DRIVERS)).map_err(|error| error.to_string())
    }

    /// Puts the daemon's own directory on a disk that can be frozen and made read-only.
    pub fn state_disk(&mut self, bytes: u64) -> Result<(), String> {
        self.mounted
            .push(Mounted::Ext4(Ext4::mount(&self.root.join(STATE), bytes)?));
        std::fs::create_dir(self.root.join(STATE).join(DRIVERS)).map_err(|error| error.to_string())
    }

    /// Puts the directory of CDI files on a small file system in memory.
    pub fn cdi(&mut self, options: &str) -> Result<(), String> {
        self.mounted
            .push(Mounted::Tmpfs(Tmpfs::mount(&self.root.join(CDI), options)?));
        Ok(())
    }

    /// Has the program see an empty directory of the root as `/sys`, and gives the directory. The error says in one line why it cannot be.
    pub fn fake_sys(&mut self) -> Result<PathBuf, String> {
        let sys = self.root.join("sys");
        std::fs::create_dir(&sys).map_err(|error| error.to_string())?;
        let mut probe = as_sys(&sys)?;
        run(probe.arg("true"))?;
        self.sys = Some(sys.clone());
        Ok(sys)
    }
}

async fn output(name: &str, mut command: Command, args: &[&str]) -> Output {
    let line = format!("{name} {}", args.join(" "));
    let running = command.args(args).output();
    let output = tokio::time::timeout(DEADLINE, running).await;
    let output = output.unwrap_or_else(|_| panic!("`{line}` does not end"));
    let output = output.unwrap_or_else(|error| panic!("start `{line}`: {error}"));
    let text = |bytes| String::from_utf8(bytes).expect("the programs write UTF-8");
    Output {
        code: output.status.code(),
        stdout: text(output.stdout),
        stderr: text(output.stderr),
    }
}

/// Returns a command that runs a program with a directory in place of `/sys`, in a mount namespace of its own; its process is the
/// program's.
fn as_sys(sys: &Path) -> Result<std::process::Command, String> {
    let unshare = program("unshare").ok_or("there is no unshare")?;
    let mut command = std::process::Command::new(unshare);
    command.args(["--mount", "--propagation", "private", "sh", "-c"]);
    command
        .arg("mount --bind \"$0\" /sys && exec \"$@\"")
        .arg(sys);
    Ok(command)
}

impl Default for Root {
    fn default() -> Self {
        Self::new()
    }
}

impl Output {
    /// The standard output of a command that succeeded.
    #[track_caller]
    pub fn done(self) -> String {
        assert_eq!(self.code, Some(0), "{self:?}");
        self.stdout
    }

    /// The same, which has these parts.
    #[track_caller]
    pub fn done_with(self, parts: &[&str]) -> String {
        let text = self.done();
        assert_parts(&text, parts);
        text
    }

    /// The same as JSON.
    #[track_caller]
    pub fn json(self) -> serde_json::Value {
        let text = self.done();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
    }

    /// Everything that was written by a command that failed in this way.
    #[track_caller]
    pub fn failed(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:?}");
        format!("{}{}", self.stdout, self.stderr)
    }

    /// The same, which has these parts.
    #[track_caller]
    pub fn failed_with(self, code: i32, parts: &[&str]) -> String {
        let text = self.failed(code);
        assert_parts(&text, parts);
        text
    }
}

/// Expects each part in a text.
#[track_caller]
pub fn assert_parts(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} in {text}");
    }
}
