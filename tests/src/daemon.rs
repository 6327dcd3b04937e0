//! A daemon on a root: started, asked, killed, started again.

use std::ops::Deref;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use command_fds::{CommandFdExt, FdMapping};
use hyper_util::rt::TokioIo;
use nodedock_base::failpoint::{HAS_FAIL_POINTS, Point};
use nodedock_proto::node::v1;
use nodedock_proto::node::v1::node_client::NodeClient;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions};
use tokio::net::UnixStream;
use tokio::process::{Child, Command};
use tokio::time::timeout;
use tonic::Status;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::service::ServiceManager;
use crate::{DEADLINE, Root};

/// A client of the node API.
pub type Client = NodeClient<Channel>;

/// How a daemon is started.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// The service manager stores its file descriptors.
    has_store: bool,
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
    client: Client,
    manager: ServiceManager,
    options: Options,
    root: Root,
}

impl Deref for Daemon {
    type Target = Root;

    fn deref(&self) -> &Root {
        &self.root
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
        Self::start_as(self.root.beside(), options, &notify).await
    }

    /// Waits until it says once more that it is ready.
    pub async fn until_ready_again(&self) {
        while self.notification().await != "READY=1" {}
    }

    async fn start_as(root: Root, options: Options, notify: &str) -> Self {
        let manager = ServiceManager::listen(&root.path().join(notify));
        let client = connect(root.socket());
        let mut daemon = Self {
            process: None,
            client,
            manager,
            options,
            root,
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
        self.client = connect(self.root.socket());
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

    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// A connection for other services than the node API.
    pub fn channel(&self) -> Channel {
        channel(self.socket())
    }

    /// A connection to the pod-resources API.
    pub fn pod_resources_channel(&self) -> Channel {
        channel(self.pod_resources())
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
        // The new root only satisfies Drop; the one that counts is taken out.
        std::mem::take(&mut self.root)
    }

    pub async fn prepare(&self, request: v1::PreparePodRequest) -> v1::PreparePodResponse {
        let answer = self.client().prepare_pod(request).await;
        answer
            .unwrap_or_else(|status| panic!("prepare: {status}\n{}", self.log()))
            .into_inner()
    }

    /// Prepares, and expects every claim to be prepared.
    pub async fn prepared(&self, request: v1::PreparePodRequest) -> v1::PreparePodResponse {
        let answer = self.prepare(request).await;
        let prepared = answer
            .claims
            .iter()
            .all(|claim| claim.outcome == "prepared");
        assert!(prepared, "{answer:#?}\n{}", self.log());
        answer
    }

    /// Prepares, and expects the only claim to be refused.
    pub async fn refused(&self, request: v1::PreparePodRequest) -> v1::Problem {
        let answer = self.prepare(request).await;
        let [claim] = answer.claims.as_slice() else {
            panic!("one claim is wanted: {answer:#?}")
        };
        assert_eq!(claim.outcome, "refused", "{answer:#?}");
        assert!(
            answer.containers.is_empty(),
            "a refused pod gets no devices: {answer:#?}"
        );
        claim.problem.clone().expect("a refusal has a problem")
    }

    /// Prepares, and expects the only claim to be refused with this kind and code of problem.
    pub async fn refused_as(
        &self,
        request: v1::PreparePodRequest,
        kind: &str,
        code: &str,
    ) -> v1::Problem {
        let problem = self.refused(request).await;
        assert_eq!(
            (problem.kind.as_str(), problem.code.as_str()),
            (kind, code),
            "{problem:?}"
        );
        problem
    }

    /// Expects that the daemon has neither claims nor pods nor CDI files.
    pub async fn assert_empty(&self) {
        assert_eq!(
            (self.claims().await, self.pods().await, self.cdi_files()),
            (vec![], vec![], vec![])
        );
    }

    /// The MiB in a line of `/proc/PID/status`, such as `VmHWM`.
    pub fn memory_mib(&self, field: &str) -> f64 {
        memory_mib(self.pid().as_raw_nonzero().get(), field)
    }

    /// Unprepares a pod's claims: the outcomes by claim name.
    pub async fn unprepare(&self, pod: &v1::ObjectRef) -> Vec<(String, String)> {
        let answer = self.unprepare_pod(pod).await;
        let name = |claim: v1::ClaimOutcome| (claim.id.unwrap_or_default().name, claim.outcome);
        answer.claims.into_iter().map(name).collect()
    }

    pub async fn unprepare_pod(&self, pod: &v1::ObjectRef) -> v1::UnpreparePodResponse {
        let request = v1::UnpreparePodRequest {
            pod: Some(pod.clone()),
        };
        let answer = self.client().unprepare_pod(request).await;
        answer
            .unwrap_or_else(|status| panic!("unprepare: {status}\n{}", self.log()))
            .into_inner()
    }

    pub async fn pod_devices(&self, pod: &v1::ObjectRef) -> Result<v1::PreparePodResponse, Status> {
        let request = v1::GetPodDevicesRequest {
            pod: Some(pod.clone()),
        };
        self.client()
            .get_pod_devices(request)
            .await
            .map(tonic::Response::into_inner)
    }

    pub async fn claims(&self) -> Vec<v1::ClaimStatus> {
        let request = v1::ListClaimsRequest {
            with_timeline: true,
            ..Default::default()
        };
        self.client()
            .list_claims(request)
            .await
            .expect("list claims")
            .into_inner()
            .claims
    }

    /// The only claim that is known.
    pub async fn only_claim(&self) -> v1::ClaimStatus {
        let mut claims = self.claims().await;
        assert_eq!(claims.len(), 1, "{claims:#?}");
        claims.remove(0)
    }

    pub async fn pods(&self) -> Vec<v1::PodStatus> {
        self.client()
            .list_pods(v1::ListPodsRequest {})
            .await
            .expect("list pods")
            .into_inner()
            .pods
    }

    pub async fn node(&self) -> v1::NodeStatus {
        self.client()
            .get_node(v1::GetNodeRequest {})
            .await
            .expect("get the node")
            .into_inner()
    }

    pub async fn devices(&self) -> Vec<v1::Device> {
        let request = v1::ListDevicesRequest::default();
        self.client()
            .list_devices(request)
            .await
            .expect("list devices")
            .into_inner()
            .devices
    }

    pub async fn drivers(&self) -> Vec<v1::Driver> {
        let request = v1::ListDriversRequest::default();
        self.client()
            .list_drivers(request)
            .await
            .expect("list drivers")
            .into_inner()
            .drivers
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
        if std::thread::panicking() {
            eprintln!(
                "log of the daemon on {}:\n{}",
                self.path().display(),
                self.log()
            );
        }
    }
}

/// The processes that a process of one thread started and has not waited for.
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

fn connect(socket: PathBuf) -> Client {
    // As of the commands: a list of a plugin's devices may be long.
    NodeClient::new(channel(socket)).max_decoding_message_size(64 << 20)
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

/// A connection to a socket, made when it is first used.
pub fn channel(socket: PathBuf) -> Channel {
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { UnixStream::connect(socket).await.map(TokioIo::new) }
    });
    // The address is for the protocol only; the connector knows the socket. The timeout is for an answer to begin: a stream goes on.
    Endpoint::from_static("http://localhost")
        .timeout(DEADLINE * 2)
        .connect_with_connector_lazy(connector)
}
