//! A daemon on a root: started, killed, started again.

use std::ops::Deref;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use command_fds::{CommandFdExt, FdMapping};
use nodedock_base::failpoint::{HAS_FAIL_POINTS, Point};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use crate::drivers::{Form, MOCK_GPU};
use crate::node_api::NodeApi;
use crate::service::ServiceManager;
use crate::{DEADLINE, Root, compiled};

/// Options of a daemon.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The service manager stores its file descriptors.
    has_store: bool,
    /// The daemon compiles its drivers itself.
    is_cold: bool,
    args: Vec<String>,
    env: Vec<(String, String)>,
    config: Option<String>,
}

impl Options {
    /// Adds an argument with its value.
    pub fn arg(mut self, name: &str, value: impl Into<String>) -> Self {
        self.args.extend([name.to_owned(), value.into()]);
        self
    }

    /// Adds an argument without a value.
    pub fn flag(mut self, name: &str) -> Self {
        self.args.push(name.to_owned());
        self
    }

    /// The service manager stores the file descriptors of the daemon, and passes them to its next start.
    pub fn with_store(mut self) -> Self {
        self.has_store = true;
        self
    }

    /// The daemon finds no driver that another test's has compiled.
    pub fn cold(mut self) -> Self {
        self.is_cold = true;
        self
    }

    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.set_env(name, value);
        self
    }

    /// Replaces a variable of the environment; an empty value is as good as none.
    pub fn set_env(&mut self, name: &str, value: &str) {
        self.env.retain(|(known, _)| known != name);
        self.env.push((name.to_owned(), value.to_owned()));
    }

    /// The text of the config file.
    pub fn config(mut self, yaml: &str) -> Self {
        self.config = Some(yaml.to_owned());
        self
    }
}

/// A daemon that was started. It is killed when dropped, and its log is shown when a test fails.
pub struct Daemon {
    process: Option<Child>,
    manager: ServiceManager,
    options: Options,
    api: NodeApi,
}

impl Deref for Daemon {
    type Target = NodeApi;

    fn deref(&self) -> &NodeApi {
        &self.api
    }
}

impl Daemon {
    /// Starts one on a root of its own, and returns when it is ready.
    pub async fn start() -> Self {
        Self::start_on(Root::new(), Options::default()).await
    }

    pub async fn start_with(options: Options) -> Self {
        Self::start_on(Root::new(), options).await
    }

    pub async fn start_on(root: Root, options: Options) -> Self {
        Self::start_as(root, options, "notify").await
    }

    /// Starts another one on the same root, and returns when that is ready.
    pub async fn beside(&self, options: Options) -> Self {
        // Each has its socket, since the one before may still notify.
        static STARTED: AtomicUsize = AtomicUsize::new(1);
        let notify = format!("notify-{}", STARTED.fetch_add(1, Ordering::Relaxed));
        Self::start_as(Root::beside(self), options, &notify).await
    }

    /// Waits until it says once more that it is ready.
    pub async fn until_ready_again(&self) {
        while self.notification().await != "READY=1" {}
    }

    /// Starts one with the simulated GPUs, which serve.
    pub async fn with_gpus(options: Options) -> Self {
        let daemon = Self::start_with(options).await;
        daemon.serve(MOCK_GPU, Form::Core).await;
        daemon
    }

    async fn start_as(root: Root, options: Options, notify: &str) -> Self {
        let manager = ServiceManager::listen(&root.path().join(notify));
        if !options.is_cold {
            compiled::shared()
                .and_then(|shared| compiled::give(&root, &shared))
                .expect("copy compiled drivers");
        }
        let mut daemon = Self {
            process: None,
            manager,
            options,
            api: NodeApi::new(root),
        };
        daemon.run().await;
        daemon
    }

    /// Starts it, or starts it again after it ended.
    pub async fn run(&mut self) {
        if let Err(status) = self.try_run().await {
            panic!(
                "the daemon ended before it was ready: {status}\n{}",
                self.log()
            );
        }
    }

    /// The same for one that may end before it is ready; then the error is how it ended.
    pub async fn try_run(&mut self) -> Result<(), ExitStatus> {
        assert!(self.process.is_none(), "the daemon runs already");
        let mut process = self.spawn();
        let ready = async { while self.notification().await != "READY=1" {} };
        tokio::select! {
            // The end of one that was ready first is found later.
            biased;
            () = ready => {}
            status = process.wait() => return Err(status.expect("a child can be waited for")),
        }
        self.process = Some(process);
        self.api.connect();
        Ok(())
    }

    fn spawn(&self) -> Child {
        let log = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(self.log_path());
        let log = log.expect("the log is below the root");
        let mut command = if self.options.has_store {
            self.with_store()
        } else {
            self.node_program()
        };
        command.arg("run").args(&self.options.args);
        if let Some(config) = &self.options.config {
            command
                .arg("--config")
                .arg(self.write("nodedock.yaml", config));
        }
        command.env("NOTIFY_SOCKET", &self.manager.socket);
        command.envs(self.options.env.iter().map(|(name, value)| (name, value)));
        command.stdout(Stdio::null()).stderr(log);
        command.spawn().expect("start the daemon")
    }

    /// The program with what the service manager has stored, as systemd passes it: as the first descriptors, with their names, for the
    /// process that has the ID. That is known to the shell which becomes the daemon.
    fn with_store(&self) -> Command {
        let daemon = self.node_program();
        let (names, descriptors) = self.manager.stored();
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", "LISTEN_PID=$$ exec \"$0\" \"$@\""])
            .arg(daemon.as_std().get_program());
        command.args(daemon.as_std().get_args());
        let variables = daemon
            .as_std()
            .get_envs()
            .filter_map(|(name, value)| Some((name, value?)));
        command.envs(variables).env("FDSTORE", "1024");
        if !names.is_empty() {
            command
                .env("LISTEN_FDS", names.len().to_string())
                .env("LISTEN_FDNAMES", names.join(":"));
        }
        let mapped = |(parent_fd, child_fd)| FdMapping {
            parent_fd,
            child_fd,
        };
        let mappings = descriptors.into_iter().zip(3..).map(mapped).collect();
        command
            .fd_mappings(mappings)
            .expect("no number is used twice");
        command.stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// The next notification of the daemon to its service manager.
    pub async fn notification(&self) -> String {
        let received = timeout(DEADLINE, self.manager.notification()).await;
        received.unwrap_or_else(|_| panic!("the daemon sends no notification\n{}", self.log()))
    }

    /// The daemon whose parent this is (`nodedockd run --supervise`).
    pub fn supervised(&self) -> Pid {
        let [daemon] = children(self.pid())[..] else {
            panic!("one child is expected\n{}", self.log())
        };
        daemon
    }

    /// Ends the daemon as a crash would, under its parent, which starts it again.
    pub async fn crash_supervised(&mut self) {
        rustix::process::kill_process(self.supervised(), Signal::KILL)
            .expect("a process may be killed");
        self.until_ready_again().await;
    }

    pub fn options(&mut self) -> &mut Options {
        &mut self.options
    }

    pub fn pid(&self) -> Pid {
        let id = self
            .process
            .as_ref()
            .and_then(Child::id)
            .expect("the daemon runs");
        let id = i32::try_from(id).expect("process IDs are positive integers of 32 bits");
        Pid::from_raw(id).expect("no process has ID 0")
    }

    /// Ends the daemon as a crash would.
    pub async fn kill9(&mut self) {
        let mut process = self.process.take().expect("the daemon runs");
        process.kill().await.expect("a child may be killed");
    }

    /// Kills the daemon and starts it again.
    pub async fn crash(&mut self) {
        self.kill9().await;
        self.run().await;
    }

    /// Asks the daemon to end, and starts it again.
    pub async fn restart(&mut self) {
        let status = self.terminate().await;
        assert!(status.success(), "{status}\n{}", self.log());
        self.run().await;
    }

    /// Asks the daemon to end and gives its exit status.
    pub async fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.ended().await
    }

    pub fn signal(&self, signal: Signal) {
        rustix::process::kill_process(self.pid(), signal).expect("a child may be signalled");
    }

    /// Waits until the daemon has ended by itself.
    pub async fn ended(&mut self) -> ExitStatus {
        let mut process = self.process.take().expect("the daemon runs");
        match timeout(DEADLINE, process.wait()).await {
            Ok(status) => status.expect("a child can be waited for"),
            Err(_) => panic!("the daemon does not end\n{}", self.log()),
        }
    }

    /// Ends when the daemon has ended by itself.
    pub fn death(&self) -> impl Future<Output = ()> + 'static {
        let (pid, how) = (self.pid(), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        let ended =
            tokio::task::spawn_blocking(move || rustix::process::waitid(WaitId::Pid(pid), how));
        // An error says that it was waited for before.
        async move {
            let _ = ended.await.expect("waiting does not panic");
        }
    }

    /// Lets the daemon die at the `pass`th pass of a point after the next start. Needs a program with fail points.
    pub fn arm(&mut self, point: Point, pass: u32) {
        let log = self.log();
        assert!(
            log.contains(HAS_FAIL_POINTS),
            "the program has no fail points: build it together with the tests (`cargo xtask test`, or \
             `cargo build -p nodedockd --features failpoints`)\n{log}"
        );
        self.options.set_env(
            "FAILPOINTS",
            &format!("{}={}*off->return", point.as_str(), pass - 1),
        );
    }

    /// The daemon lives on after the next start.
    pub fn disarm(&mut self) {
        self.options.set_env("FAILPOINTS", "");
    }

    /// Lets the daemon go and keeps its root.
    pub async fn into_root(mut self) -> Root {
        if self.process.is_some() {
            self.kill9().await;
        }
        self.api.take_root()
    }

    /// The MiB in a line of `/proc/PID/status`, such as `VmHWM`.
    pub fn memory_mib(&self, field: &str) -> f64 {
        memory_mib(self.pid().as_raw_nonzero().get(), field)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(mut process) = self.process.take() {
            let pid = process
                .id()
                .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
            // It may have ended by itself. Its files are removed next, so it must be gone by then.
            for supervised in pid.map(children).unwrap_or_default() {
                let _ = rustix::process::kill_process(supervised, Signal::KILL);
            }
            let _ = process.start_kill();
            if let Some(pid) = pid {
                let _ = rustix::process::waitid(
                    WaitId::Pid(pid),
                    WaitIdOptions::EXITED | WaitIdOptions::NOWAIT,
                );
            }
        }
        if !std::thread::panicking() && !self.options.is_cold {
            compiled::shared()
                .and_then(|shared| compiled::take(&self.api, &shared))
                .expect("copy compiled drivers");
        }
        if std::thread::panicking() {
            eprintln!(
                "log of the daemon on {}:\n{}",
                self.path().display(),
                self.log()
            );
        }
    }
}

/// The child processes of a process.
pub fn children(parent: Pid) -> Vec<Pid> {
    let id = parent.as_raw_nonzero();
    let children =
        std::fs::read_to_string(format!("/proc/{id}/task/{id}/children")).unwrap_or_default();
    children
        .split_whitespace()
        .filter_map(|pid| Pid::from_raw(pid.parse().ok()?))
        .collect()
}

/// The MiB in a line of `/proc/PID/status`, such as `VmHWM`. Not a number where there is none.
pub fn memory_mib(pid: impl std::fmt::Display, field: &str) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kib.unwrap_or(f64::NAN) / 1024.0
}
